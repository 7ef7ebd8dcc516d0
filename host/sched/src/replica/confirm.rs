//! What did a finished step bring? Tokens are accepted, delivered or discarded; full blocks become findable; blocks behind the step's
//! fence come back.

use alloc::vec::Vec;

use penstock_base::plan::{BatchFailure, RowDone};
use penstock_base::{BatchId, BlockKey, Duration, Failure, Instant, Outcome, SeqId};
use penstock_kv::{Confirm, Holder};

use super::cost::StepShape;
use super::digest::Mark;
use super::sequence::{Held, Place};
use super::{Replica, ReplicaEffect, ReplicaEffects};

/// A step in flight.
#[derive(Clone, Debug)]
pub(super) struct Batch {
    pub id: BatchId,
    pub rows: Vec<BatchRow>,
    pub shape: StepShape,
    pub query_tokens: u64,
}

/// One of its rows, and enough to know whether its sequence is still the one it was planned for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct BatchRow {
    pub entry: u32,
    pub serial: u64,
    pub request: u32,
    pub request_serial: u64,
    pub seq: SeqId,
    pub start: u32,
    pub tokens: u32,
    pub sample: bool,
    /// The step opens its slot.
    pub opens: bool,
}

/// What came of one row.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum RowResult {
    Done(RowDone),
    Failed,
}

impl Replica {
    /// The oldest step in flight, if that is `batch`. Everything fenced behind it comes back.
    fn retire(&mut self, now: Instant, batch: BatchId, effects: &mut ReplicaEffects) -> Option<Batch> {
        if self.batches.first().is_none_or(|oldest| oldest.id != batch) {
            self.stale(effects);
            return None;
        }
        let oldest = self.batches.remove(0);
        self.kv.retire(now, batch);
        Some(oldest)
    }

    pub(super) fn batch_done(
        &mut self,
        now: Instant,
        batch: BatchId,
        done: &[RowDone],
        took: Duration,
        effects: &mut ReplicaEffects,
    ) {
        let Some(batch) = self.retire(now, batch, effects) else { return };
        self.cost.observe(batch.shape, took);
        self.take_rows(now, &batch, (done, &[]), effects);
        self.meters.on_step(now, took);
        self.share_device_time(took, batch.query_tokens);
        self.give_back(batch);
    }

    pub(super) fn batch_failed(
        &mut self,
        now: Instant,
        batch: BatchId,
        failure: BatchFailure,
        (failed, done): (&[u32], &[RowDone]),
        effects: &mut ReplicaEffects,
    ) {
        let Some(batch) = self.retire(now, batch, effects) else { return };
        match failure {
            BatchFailure::Rows => self.take_rows(now, &batch, (done, failed), effects),
            BatchFailure::Batch => {
                // Its operations may not have happened either: a slot that it opened may be unknown to the executor.
                for row in batch.rows.iter().filter(|row| row.opens) {
                    self.drops.retain(|entry| *entry != row.entry);
                    let seq = &mut self.sequences[row.entry as usize];
                    seq.opened &= seq.serial != row.serial;
                }
                self.take_rows(now, &batch, (&[], &[]), effects);
            }
            BatchFailure::Executor => self.freeze("the executor is lost", Failure::ReplicaLost, effects),
        }
        self.meters.on_step(now, Duration::ZERO);
        self.give_back(batch);
    }

    fn give_back(&mut self, batch: Batch) {
        let mut rows = batch.rows;
        rows.clear();
        self.row_buffers.push(rows);
    }

    fn take_rows(
        &mut self,
        now: Instant,
        batch: &Batch,
        (done, failed): (&[RowDone], &[u32]),
        effects: &mut ReplicaEffects,
    ) {
        for (place, row) in (0u32..).zip(&batch.rows) {
            let result = match done.get(place as usize) {
                Some(done) if done.seq == row.seq && !failed.contains(&place) => RowResult::Done(*done),
                _ => RowResult::Failed,
            };
            self.take_row(now, (batch.id, place), row, result, effects);
        }
    }

    fn take_row(
        &mut self,
        now: Instant,
        (batch, place): (BatchId, u32),
        row: &BatchRow,
        result: RowResult,
        effects: &mut ReplicaEffects,
    ) {
        let lives = self.sequence(row.entry).serial == row.serial && self.sequence(row.entry).place != Place::Vacant;
        let request = self.requests[row.request as usize].as_ref();
        let here = request.is_some_and(|request| request.serial == row.request_serial);
        if lives {
            self.sequence_mut(row.entry).inflight -= 1;
        }
        let done = match result {
            // A row that should sample and did not brought nothing.
            RowResult::Done(done) if !row.sample || done.accepted > 0 => done,
            _ => return self.fail_row(now, row, (lives, here), effects),
        };
        if here {
            self.note_computed(row, batch);
        }
        if !lives {
            return;
        }
        let seq = self.sequence_mut(row.entry);
        if seq.place == Place::Running {
            seq.computed = row.start + row.tokens;
            seq.confirmed = seq.computed;
        }
        if seq.source == Some((batch, place)) {
            seq.source = None;
        }
        let held = self.sequence(row.entry).held != Held::Free;
        if row.sample && held {
            self.keep_back(row.entry, done);
        } else if row.sample {
            self.accept(now, (batch, place), row, done, effects);
        }
        let still = self.sequence(row.entry).serial == row.serial && self.sequence(row.entry).place == Place::Running;
        if still {
            self.store_blocks(now, row.entry);
        }
        if still && held {
            self.tell_sending(now, row.entry, row.sample.then_some((batch, place)), effects);
        }
    }

    /// The row's sequence fails, and so do those that share what it was computing.
    fn fail_row(&mut self, now: Instant, row: &BatchRow, (lives, here): (bool, bool), effects: &mut ReplicaEffects) {
        let outcome = Outcome::Failed(Failure::Executor);
        if here {
            for entry in self.request(row.request).sequences {
                let depends = self.sequences.get(entry as usize).is_some_and(|seq| seq.shares.is_some());
                if depends && entry != row.entry {
                    let tokens = self.sequence(entry).delivered;
                    self.end_sequence(now, entry, outcome, tokens, effects);
                }
            }
        }
        if lives {
            let tokens = self.sequence(row.entry).delivered;
            self.end_sequence(now, row.entry, outcome, tokens, effects);
        }
    }

    /// Books the computed positions with the request, whether or not the sequence that computed them still lives.
    fn note_computed(&mut self, row: &BatchRow, batch: BatchId) {
        let end = row.start + row.tokens;
        let request = self.requests[row.request as usize].as_mut().expect("the caller has looked");
        let prompt_end = end.min(request.prompt());
        let fresh = prompt_end.saturating_sub(request.charged.max(row.start));
        request.charged = request.charged.max(prompt_end);
        request.done.prefill_tokens += fresh;
        request.done.query_tokens += u64::from(row.tokens);
        if !core::mem::replace(&mut request.done.touched, true) {
            self.touched.push(row.request);
        }
        let shared_tokens = request.prompt() - 1;
        let sequences = request.sequences;
        self.meters.prefilled += u64::from(fresh);
        for entry in sequences {
            if let Some(seq) = self.sequences.get_mut(entry as usize).filter(|seq| seq.shares == Some(batch)) {
                seq.shares = None;
                (seq.computed, seq.confirmed) = (shared_tokens, shared_tokens);
            }
        }
    }

    /// The first token of a sequence that another replica is to have.
    fn keep_back(&mut self, entry: u32, done: RowDone) {
        let seq = self.sequence_mut(entry);
        seq.generated += 1;
        seq.held = if done.stop { Held::Stop } else { Held::Token };
    }

    /// A sampled token counts: it is delivered, and may be the last.
    fn accept(
        &mut self,
        now: Instant,
        (batch, row): (BatchId, u32),
        of: &BatchRow,
        done: RowDone,
        effects: &mut ReplicaEffects,
    ) {
        if done.accepted > 1 {
            self.stale(effects);
        }
        let seq = self.sequence_mut(of.entry);
        seq.generated += 1;
        let (first, owner) = (seq.delivered, seq.request);
        // A stop token counts as accepted and is not delivered.
        let tokens = u16::from(!done.stop);
        seq.delivered += u32::from(tokens);
        let (delivered, full) = (seq.delivered, seq.generated >= seq.max_output);
        if tokens > 0 {
            effects.push(ReplicaEffect::Deliver { seq: of.seq, batch, row, tokens, first });
            self.meters.decoded += 1;
            self.digest.mix(Mark::Deliver, of.seq.as_u64(), u64::from(first));
        }
        let request = self.request_mut(owner);
        request.done.decode_tokens += u32::from(tokens);
        if tokens > 0 && !core::mem::replace(&mut request.first_token, true) {
            request.done.first_token = true;
            request.first_token_at = now;
        }
        if done.stop || full {
            // What the last step computed is worth keeping: store it before the blocks are let go.
            if self.sequence(of.entry).place == Place::Running {
                self.store_blocks(now, of.entry);
            }
            let outcome = if done.stop { Outcome::Stop } else { Outcome::Length };
            self.end_sequence(now, of.entry, outcome, delivered, effects);
        }
    }

    /// Makes the full, confirmed blocks of a sequence findable.
    pub(super) fn store_blocks(&mut self, now: Instant, entry: u32) {
        if !self.config.prefix_cache {
            return;
        }
        let seq = &mut self.sequences[entry as usize];
        let Some(request) = self.requests[seq.request as usize].as_ref() else { return };
        let upto = seq.confirmed / self.config.block_size_tokens;
        if upto <= seq.table.confirmed_blocks() {
            return;
        }
        let keys = penstock_kv::Keys { prompt: &request.manifest.keys, generated: &seq.keys };
        let holder = Holder { class: request.class, ..Holder::of(&request.manifest) };
        self.scratch.adopted.clear();
        let ask = Confirm { keys, upto, holder, fence: seq.last_batch };
        self.kv.confirm(now, &mut seq.table, ask, &mut self.scratch.adopted);
        for adopted in &self.scratch.adopted {
            seq.told = seq.told.min(adopted.index);
        }
    }

    /// Keys of blocks that output has filled.
    pub(super) fn take_keys(
        &mut self,
        now: Instant,
        seq: SeqId,
        first: u32,
        keys: &[BlockKey],
        effects: &mut ReplicaEffects,
    ) {
        let Some(entry) = self.find(seq) else { return self.stale(effects) };
        let prompt_keys = self.request(self.sequence(entry).request).manifest.keys.len();
        let size = self.config.block_size_tokens;
        let sequence = self.sequence_mut(entry);
        let known = prompt_keys + sequence.keys.len();
        let filled = ((sequence.prompt + sequence.generated) / size) as usize;
        if first as usize != known || known + keys.len() > filled {
            return self.stale(effects);
        }
        sequence.keys.extend_from_slice(keys);
        if sequence.place == Place::Running {
            self.store_blocks(now, entry);
        }
    }

    fn share_device_time(&mut self, took: Duration, query_tokens: u64) {
        for entry in self.touched.iter().copied() {
            let Some(request) = self.requests[entry as usize].as_mut() else { continue };
            let share =
                u128::from(took.as_us()) * u128::from(request.done.query_tokens) / u128::from(query_tokens.max(1));
            request.done.device_us = u32::try_from(share).unwrap_or(u32::MAX);
        }
    }
}
