//! Does everything hold that must? The cheap part after every step, the walk when it is due.

use alloc::vec::Vec;

use penstock_base::limits::PREFILL_ROUNDS_MAX;
use penstock_kv::OwnerId;

use super::Replica;
use super::confirm::Batch;
use super::sequence::{Held, NONE, Place};

/// What does not hold, by name.
pub(super) type Checked = Result<(), &'static str>;

fn ensure(holds: bool, what: &'static str) -> Checked {
    if holds { Ok(()) } else { Err(what) }
}

impl Replica {
    /// O(1): sums that must add up whatever happened.
    pub(super) fn check_counts(&self) -> Checked {
        let counts = self.kv.counts();
        ensure(counts.sum() == u64::from(self.config.blocks), "block states do not add up to the pool")?;
        let have = u64::from(counts.free) + u64::from(self.kv.evictable_blocks());
        ensure(self.kv.reservations().total() <= have, "more blocks are promised than can be had")?;
        let placed = self.running.len() + self.resume.len() + self.sequence_entries.len() as usize;
        ensure(placed <= self.config.slots as usize, "a sequence stands in two places")?;
        ensure(self.batches.len() <= self.config.inflight_max, "more steps are in flight than configured")?;
        ensure(self.prefill_rounds <= PREFILL_ROUNDS_MAX, "prompts starve decodes")?;
        let budget = u64::from(self.config.step_tokens);
        ensure(self.batches.iter().all(|batch| batch.query_tokens <= budget), "a step is over its token budget")?;
        ensure(self.ready.len() <= self.config.ready_window, "the ready window is overfull")
    }

    /// The full walk over the invariants. The error names the first one that does not hold.
    pub fn check(&self) -> Checked {
        self.check_counts()?;
        let tables = self.sequences.iter().map(|seq| &seq.table);
        let held = self.requests.iter().flatten().filter_map(|request| request.prefix.as_ref());
        let landing = self.parties.iter().flat_map(|parties| parties.receiver.tables());
        let tables = tables.chain(held).chain(landing);
        if let Some(parties) = &self.parties {
            parties.sender.check(&self.kv)?;
            parties.receiver.check(&self.kv)?;
        }
        self.kv.check_with_tables(tables).map_err(|_| "the books of the block pool are broken")?;
        self.check_places()?;
        self.check_requests()?;
        self.check_sequences()?;
        self.check_batches()
    }

    /// Every sequence stands in exactly one place.
    fn check_places(&self) -> Checked {
        let mut seen = alloc::vec![0u32; self.sequences.len()];
        let mut visit = |entries: &[u32], place: Place| -> Checked {
            for entry in entries {
                ensure(self.sequence(*entry).place == place, "a list holds a sequence of another place")?;
                seen[*entry as usize] += 1;
            }
            Ok(())
        };
        visit(&self.running, Place::Running)?;
        visit(&self.resume, Place::Preempted)?;
        visit(self.sequence_entries.stack(), Place::Vacant)?;
        let waiting = self.sequences.iter().zip(&mut seen).filter(|(seq, _)| seq.place == Place::Waiting);
        for (seq, seen) in waiting {
            *seen += 1;
            ensure(self.request(seq.request).waiting, "a sequence waits for nobody")?;
        }
        ensure(seen.iter().all(|times| *times == 1), "a sequence stands in no place, or in two")?;
        let by_joining = |list: &[u32]| list.is_sorted_by_key(|entry| self.sequence(*entry).joined);
        ensure(by_joining(&self.running) && by_joining(&self.resume), "a list is out of order")
    }

    fn check_requests(&self) -> Checked {
        let mut here = 0;
        for (entry, request) in (0u32..).zip(&self.requests) {
            let promised = self.kv.reservations().of(OwnerId(entry));
            let Some(request) = request else {
                ensure(promised == 0, "blocks are promised to nobody")?;
                continue;
            };
            here += 1;
            ensure(self.by_id.get(&request.id()) == Some(&entry), "a request cannot be found")?;
            ensure(request.ready == self.ready.contains(&entry), "the ready window and a request disagree")?;
            let live = request.live_sequences().count();
            let right = if request.ready { live == 0 && request.live > 0 } else { live == usize::from(request.live) };
            ensure(right, "the living sequences of a request are miscounted")?;
            ensure(request.live > 0 || self.ended.contains(&entry), "an ended request is still here")?;
            for entry in request.live_sequences() {
                ensure(self.sequence(entry).place != Place::Vacant, "a request lists a vacant entry")?;
            }
            let leader = request.sequences[usize::from(request.leader)];
            ensure(!request.waiting || leader != NONE, "sequences wait for a leader that has ended")?;
        }
        let entries = self.requests.len() - self.request_entries.len() as usize;
        ensure(here == entries && here == self.by_id.len(), "requests are miscounted")?;
        let lent = self.requests.iter().flatten().filter(|request| request.prefix.is_some()).count();
        ensure(lent + self.tables.len() == self.config.ready_window + 1, "a block table is lost")
    }

    fn check_sequences(&self) -> Checked {
        let size = self.config.block_size_tokens;
        for (entry, seq) in (0u32..).zip(&self.sequences) {
            if seq.place == Place::Vacant {
                ensure(seq.table.is_empty() && !seq.opened, "a vacant entry holds something")?;
                continue;
            }
            let request = self.requests.get(seq.request as usize).and_then(Option::as_ref);
            let listed = request.is_some_and(|request| request.sequences[usize::from(seq.index)] == entry);
            ensure(listed, "a sequence has no request")?;
            ensure(seq.scheduled >= seq.computed && seq.computed >= seq.confirmed, "progress runs backwards")?;
            ensure(seq.scheduled <= seq.len(), "more is scheduled than is known")?;
            let held = request.is_some_and(|request| request.sending.is_some());
            ensure(held == (seq.held != Held::Free), "a sequence is kept back for nobody, or not kept back")?;
            ensure(seq.delivered <= seq.generated && seq.generated <= seq.sampled, "output is miscounted")?;
            ensure(seq.sampled <= seq.max_output, "a sequence is over its output cap")?;
            ensure(seq.told <= seq.table.len(), "the executor was told of blocks that are gone")?;
            ensure(seq.table.len() == seq.scheduled.div_ceil(size), "a table does not fit what is scheduled")?;
            let confirmed = seq.table.confirmed_blocks() * size;
            ensure(confirmed <= seq.scheduled, "a block is findable before it is computed")?;
            let holds = seq.place == Place::Running;
            ensure(holds || (seq.table.is_empty() && !seq.opened), "a sequence that does not run holds blocks")?;
        }
        Ok(())
    }

    /// Steps in flight: consecutive, counted at their sequences, and no block with two writers.
    fn check_batches(&self) -> Checked {
        let mut inflight = alloc::vec![0u32; self.sequences.len()];
        for (back, batch) in (1u64..).zip(self.batches.iter().rev()) {
            ensure(batch.id.0 + back == self.next_batch.0, "steps in flight are not consecutive")?;
            let tokens: u64 = batch.rows.iter().map(|row| u64::from(row.tokens)).sum();
            ensure(tokens == batch.query_tokens && !batch.rows.is_empty(), "a step is miscounted")?;
            for row in &batch.rows {
                if self.sequence(row.entry).serial == row.serial {
                    inflight[row.entry as usize] += 1;
                }
            }
            self.check_writers(batch)?;
        }
        let right =
            self.sequences.iter().zip(&inflight).all(|(seq, rows)| seq.place == Place::Vacant || seq.inflight == *rows);
        ensure(right, "rows in flight are miscounted")
    }

    fn check_writers(&self, batch: &Batch) -> Checked {
        let size = self.config.block_size_tokens;
        let mut written = Vec::new();
        for row in &batch.rows {
            let seq = self.sequence(row.entry);
            if seq.serial != row.serial || seq.place != Place::Running {
                continue;
            }
            for index in row.start / size..=(row.start + row.tokens - 1) / size {
                let block = seq.table.get(index).ok_or("a row in flight has no block")?;
                written.push((block.index, row.entry));
            }
        }
        written.sort_unstable();
        let twice = written.windows(2).any(|pair| pair[0].0 == pair[1].0 && pair[0].1 != pair[1].1);
        ensure(!twice, "a block has two writers")
    }
}
