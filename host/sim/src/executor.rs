//! Does every row read the right data? An executor without numbers that knows what each block must hold.
//!
//! A position's content is a hash over all tokens up to it. Before a row is computed, every position that it reads is compared with the
//! right answer of its sequence, so that a wrong table, a missing copy, a block handed out too early or a stale reference shows at the
//! very row that would have read it. Plans are computed as they are submitted: a device runs them in that order too. What a step in
//! flight reads is remembered until it is done, so that a write beside it shows as well.

use penstock_base::plan::{Plan, PlanOp, PlanRow, RowDone, TokenSource};
use penstock_base::{BatchId, BlockRef, SeqId, Slot};

use crate::workload::{Answer, Planned, index_of, sample};

/// Content of a position that was never written.
const NOTHING: u64 = 0;
/// Batches whose samples are remembered: at most two are in flight.
const REMEMBERED: usize = 4;

/// What a slot holds.
struct Open {
    seq: SeqId,
    table: Vec<BlockRef>,
    /// Positions whose token is in the slot's history.
    known: u32,
    /// Positions written on its behalf.
    written: u32,
    opened_by: BatchId,
}

/// Who reads a block in a batch.
#[derive(Clone, Copy, Default)]
struct Reader {
    batch: BatchId,
    seq: SeqId,
    /// Others do as well.
    many: bool,
    /// Leading positions of the block that are read or written.
    upto: u32,
}

/// A sampled token.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Sampled {
    /// Whose.
    pub seq: SeqId,
    /// Its index in the output.
    pub index: u32,
    /// The token.
    pub token: u64,
}

/// A plan that was computed.
#[derive(Clone, Debug)]
pub struct Computed {
    /// Which.
    pub batch: BatchId,
    /// One a row.
    pub done: Vec<RowDone>,
    /// One a row.
    pub sampled: Vec<Option<Sampled>>,
}

/// Counts of what plans did.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct PlanCounts {
    /// Copied blocks.
    pub copies: u64,
    /// Rows that took a token in flight.
    pub chained_rows: u64,
}

/// See the module.
pub struct Executor {
    size: u32,
    slots_max: usize,
    step_tokens: u64,
    content: Vec<u64>,
    generation: Vec<u32>,
    slots: Vec<Option<Open>>,
    /// For each block, which slots list it and where.
    listed: Vec<Vec<(u32, u32)>>,
    /// For each block, who reads it in the last even and the last odd batch.
    readers: Vec<[Reader; 2]>,
    /// The oldest batch in flight.
    inflight_from: BatchId,
    last: BatchId,
    recent: Vec<Computed>,
    counts: PlanCounts,
}

impl Executor {
    /// An empty one for pools of `blocks` blocks of `size` tokens, steps of `step_tokens` and `slots` sequences.
    pub fn new(blocks: u32, size: u32, slots: u32, step_tokens: u32) -> Self {
        Self {
            size,
            slots_max: slots as usize,
            step_tokens: u64::from(step_tokens),
            content: vec![NOTHING; blocks as usize * size as usize],
            generation: vec![0; blocks as usize],
            slots: (0..slots).map(|_| None).collect(),
            listed: vec![Vec::new(); blocks as usize],
            readers: vec![[Reader::default(); 2]; blocks as usize],
            inflight_from: BatchId(1),
            last: BatchId(0),
            recent: Vec::new(),
            counts: PlanCounts::default(),
        }
    }

    /// What plans did so far.
    pub fn counts(&self) -> PlanCounts {
        self.counts
    }

    /// Computes a plan. `known` says how many output tokens of a sequence its driver has seen accepted.
    ///
    /// # Errors
    /// The first thing in the plan that is not as it must be.
    pub fn submit(
        &mut self,
        plan: &Plan,
        requests: &[Planned],
        known: impl Fn(SeqId) -> Option<u32>,
    ) -> Result<Computed, String> {
        ensure(plan.batch.0 == self.last.0 + 1, || format!("batch {} follows {}", plan.batch, self.last))?;
        ensure(!plan.rows.is_empty(), || format!("batch {} is empty", plan.batch))?;
        ensure(plan.rows.len() <= self.slots_max, || format!("batch {} has {} rows", plan.batch, plan.rows.len()))?;
        ensure(plan.query_tokens() <= self.step_tokens, || {
            format!("batch {} has {} tokens of {}", plan.batch, plan.query_tokens(), self.step_tokens)
        })?;
        self.last = plan.batch;
        for op in &plan.ops {
            self.apply(plan.batch, *op, requests, &known)?;
        }
        let mut computed = Computed { batch: plan.batch, done: Vec::new(), sampled: Vec::new() };
        let mut seen = vec![false; self.slots_max];
        for row in &plan.rows {
            let twice = seen.get_mut(row.slot.0 as usize).is_none_or(|seen| std::mem::replace(seen, true));
            ensure(!twice, || format!("{} has two rows in batch {}, or no slot", row.seq, plan.batch))?;
            let sampled = self.compute(plan.batch, row, requests, &known)?;
            let stop = |sampled: Sampled| answer(requests, row.seq).is_some_and(|a| a.stop_at == Some(sampled.index));
            computed.done.push(RowDone {
                seq: row.seq,
                accepted: u16::from(sampled.is_some()),
                stop: sampled.is_some_and(stop),
            });
            computed.sampled.push(sampled);
        }
        if self.recent.len() == REMEMBERED {
            self.recent.remove(0);
        }
        self.recent.push(computed.clone());
        Ok(computed)
    }

    /// The batch is done: nobody reads its blocks on its behalf any more.
    pub fn finish(&mut self, batch: BatchId) {
        self.inflight_from = BatchId(batch.0 + 1);
    }

    /// The batch came to nothing as a whole: slots that it opened are unknown.
    pub fn forget(&mut self, batch: BatchId) {
        for slot in 0..self.slots.len() {
            if self.slots[slot].as_ref().is_some_and(|open| open.opened_by == batch) {
                self.close(slot);
            }
        }
        self.finish(batch);
    }

    /// What lies in blocks that a transfer reads, which must be computed and right: `first` is the place of the first one in the sequence.
    ///
    /// # Errors
    /// A block was given away, or holds another content than its place in the answer has.
    pub fn read(&self, blocks: &[BlockRef], first: u32, prompt: &[u64]) -> Result<Vec<u64>, String> {
        let size = self.size as usize;
        let mut read = Vec::with_capacity(blocks.len() * size);
        for (index, block) in (first as usize..).zip(blocks) {
            let known = self.generation.get(block.index as usize) == Some(&block.generation);
            ensure(known, || format!("a transfer reads {block:?}, which was given away"))?;
            let held = &self.content[block.index as usize * size..][..size];
            let from = (index * size).min(prompt.len());
            let right = &prompt[from..(from + size).min(prompt.len())];
            ensure(!right.is_empty() && held.starts_with(right), || {
                format!("a transfer reads {block:?} as block {index} of a prompt, and it holds another content")
            })?;
            read.extend_from_slice(held);
        }
        Ok(read)
    }

    /// What lies in blocks, whatever it is.
    pub fn lies_in(&self, blocks: &[BlockRef]) -> Vec<u64> {
        let size = self.size as usize;
        blocks.iter().flat_map(|block| self.content[block.index as usize * size..][..size].iter().copied()).collect()
    }

    /// A transfer writes a block.
    ///
    /// # Errors
    /// A slot lists it, a step in flight reads it, or it has been given to somebody else since.
    pub fn land(&mut self, block: BlockRef, content: &[u64]) -> Result<(), String> {
        self.see(block)?;
        ensure(self.holders(block).next().is_none(), || format!("a transfer writes to {block:?}, which a slot lists"))?;
        self.nobody_reads(BatchId(u64::MAX), None, block.index, 0)?;
        let size = self.size as usize;
        self.content[block.index as usize * size..][..size].copy_from_slice(content);
        Ok(())
    }

    fn close(&mut self, slot: usize) -> bool {
        let Some(open) = self.slots.get_mut(slot).and_then(Option::take) else { return false };
        for block in open.table {
            self.listed[block.index as usize].retain(|(by, _)| *by != slot as u32);
        }
        true
    }

    fn see(&mut self, block: BlockRef) -> Result<(), String> {
        let seen = self.generation.get_mut(block.index as usize).ok_or_else(|| format!("{block:?} is outside"))?;
        ensure(block.generation >= *seen, || format!("{block:?} is stale: generation {seen} was seen"))?;
        *seen = block.generation;
        Ok(())
    }

    fn apply(
        &mut self,
        batch: BatchId,
        op: PlanOp,
        requests: &[Planned],
        known: &impl Fn(SeqId) -> Option<u32>,
    ) -> Result<(), String> {
        match op {
            PlanOp::OpenSlot { slot, seq } => {
                let accepted = known(seq).ok_or_else(|| format!("{seq} is not here and gets slot {slot}"))?;
                let prompt = requests[index_of(seq.request)].manifest.input_tokens;
                let place = self.slots.get_mut(slot.0 as usize).ok_or_else(|| format!("no slot {slot}"))?;
                ensure(place.is_none(), || format!("slot {slot} was not dropped before {seq} gets it"))?;
                let known = prompt + accepted;
                *place = Some(Open { seq, table: Vec::new(), known, written: 0, opened_by: batch });
            }
            PlanOp::DropSlot { slot } => {
                ensure(self.close(slot.0 as usize), || format!("slot {slot} is dropped and was not open"))?;
            }
            PlanOp::SetBlock { slot, group, index, block } => {
                ensure(group == 0, || format!("group {group}"))?;
                self.see(block)?;
                self.set_block(slot, index, block)?;
            }
            PlanOp::CopyBlock { from, to, tokens } => self.copy(batch, from, to, tokens)?,
        }
        Ok(())
    }

    fn set_block(&mut self, slot: Slot, index: u32, block: BlockRef) -> Result<(), String> {
        let open = self.slots.get_mut(slot.0 as usize).and_then(Option::as_mut);
        let open = open.ok_or_else(|| format!("slot {slot} is patched and not open"))?;
        let at = index as usize;
        ensure(at <= open.table.len(), || format!("entry {index} of slot {slot} leaves a gap"))?;
        if at == open.table.len() {
            open.table.push(block);
        } else {
            let old = std::mem::replace(&mut open.table[at], block);
            self.listed[old.index as usize].retain(|entry| *entry != (slot.0, index));
        }
        self.listed[block.index as usize].push((slot.0, index));
        Ok(())
    }

    fn copy(&mut self, batch: BatchId, from: BlockRef, to: BlockRef, tokens: u32) -> Result<(), String> {
        self.counts.copies += 1;
        self.see(from)?;
        self.see(to)?;
        ensure(from.index != to.index && tokens > 0 && tokens <= self.size, || format!("a copy of {tokens} tokens"))?;
        ensure(self.holders(to).next().is_none(), || format!("a copy to {to:?}, which a slot lists"))?;
        self.nobody_reads(batch, None, to.index, 0)?;
        let size = self.size as usize;
        let source = from.index as usize * size..from.index as usize * size + tokens as usize;
        ensure(self.content[source.clone()].iter().all(|content| *content != NOTHING), || {
            format!("a copy of {tokens} tokens of {from:?}, which are not there")
        })?;
        let target = to.index as usize * size;
        self.content.copy_within(source, target);
        self.content[target + tokens as usize..target + size].fill(NOTHING);
        Ok(())
    }

    /// No other batch in flight may be reading the block, from `offset` on, for somebody else.
    fn nobody_reads(&self, batch: BatchId, seq: Option<SeqId>, block: u32, offset: u32) -> Result<(), String> {
        let others = |reader: &&Reader| {
            let inflight = reader.batch >= self.inflight_from && reader.batch < batch;
            inflight && (reader.many || Some(reader.seq) != seq) && reader.upto > offset
        };
        match self.readers[block as usize].iter().find(others) {
            Some(by) => Err(format!("block {block} is written by batch {batch} while batch {} reads it", by.batch)),
            None => Ok(()),
        }
    }

    fn compute(
        &mut self,
        batch: BatchId,
        row: &PlanRow,
        requests: &[Planned],
        known: &impl Fn(SeqId) -> Option<u32>,
    ) -> Result<Option<Sampled>, String> {
        let seq = row.seq;
        let at = || format!("batch {batch}, {seq} at {}+{}", row.start, row.tokens);
        let slot = row.slot.0 as usize;
        let open = self.slots[slot].take().ok_or_else(|| format!("{}: its slot is not open", at()))?;
        let end = row.start + row.tokens;
        let answer = answer(requests, seq).ok_or_else(|| format!("{}: no such sequence", at()))?;
        let prompt = requests[index_of(seq.request)].manifest.input_tokens;
        ensure(open.seq == seq, || format!("{}: the slot belongs to {}", at(), open.seq))?;
        ensure(row.tokens > 0 && end <= open.table.len() as u32 * self.size, || format!("{}: no blocks", at()))?;
        ensure(end <= open.known, || format!("{}: only {} tokens are known", at(), open.known))?;
        let accepted = known(seq).ok_or_else(|| format!("{}: it has ended or is not here", at()))?;
        self.check_source(row, prompt + accepted, prompt).map_err(|what| format!("{}: {what}", at()))?;
        self.check_reads(&open, row.start, answer).map_err(|what| format!("{}: {what}", at()))?;
        self.write(batch, &open, row, answer).map_err(|what| format!("{}: {what}", at()))?;
        ensure(row.sample == (end == open.known), || format!("{}: sampling {} of {}", at(), row.sample, open.known))?;
        let mut open = open;
        open.written = open.written.max(end);
        let sampled = row.sample.then(|| {
            let last = &open.table[((end - 1) / self.size) as usize];
            let content = self.content[(last.index * self.size + (end - 1) % self.size) as usize];
            let index = open.known - prompt;
            Sampled { seq, index, token: sample(content, answer.seed, index) }
        });
        open.known += u32::from(row.sample);
        self.slots[slot] = Some(open);
        Ok(sampled)
    }

    fn check_source(&mut self, row: &PlanRow, seen: u32, prompt: u32) -> Result<(), String> {
        let end = row.start + row.tokens;
        match row.input {
            TokenSource::Known => ensure(end <= seen, || "its last token is not known yet".to_owned()),
            TokenSource::FromBatch { batch, row: place } => {
                self.counts.chained_rows += 1;
                ensure(end > seen, || "a known token is taken from a batch".to_owned())?;
                let from = self.recent.iter().find(|computed| computed.batch == batch);
                let sampled = from.and_then(|computed| computed.sampled.get(place as usize).copied().flatten());
                let right = sampled.is_some_and(|s| s.seq == row.seq && prompt + s.index + 1 == end);
                ensure(right && batch >= self.inflight_from, || format!("batch {batch} row {place} has not its token"))
            }
        }
    }

    /// All positions before `start` hold what they must.
    fn check_reads(&self, open: &Open, start: u32, answer: &Answer) -> Result<(), String> {
        let size = self.size as usize;
        let (start, mut from) = (start as usize, 0);
        for block in &open.table {
            let tokens = size.min(start - from);
            if tokens == 0 {
                break;
            }
            ensure(self.generation[block.index as usize] == block.generation, || format!("{block:?} was given away"))?;
            let held = &self.content[block.index as usize * size..][..tokens];
            let right = &answer.content[from..from + tokens];
            if held != right {
                let wrong = held.iter().zip(right).position(|(held, right)| held != right).unwrap_or(0);
                return Err(format!("position {} in {block:?} holds another content", from + wrong));
            }
            from += tokens;
        }
        Ok(())
    }

    fn write(&mut self, batch: BatchId, open: &Open, row: &PlanRow, answer: &Answer) -> Result<(), String> {
        let (size, slot, seq) = (self.size, row.slot.0, row.seq);
        let end = row.start + row.tokens;
        for (index, block) in (0..).zip(&open.table[..end.div_ceil(size) as usize]) {
            let first = index * size;
            let (from, to) = (row.start.max(first), end.min(first + size));
            if from < to {
                ensure(self.generation[block.index as usize] == block.generation, || {
                    format!("{block:?} is given away")
                })?;
                let base = (block.index * size) as usize;
                let held = &self.content[base + (from - first) as usize..base + (to - first) as usize];
                let right = &answer.content[from as usize..to as usize];
                if held != right {
                    self.nobody_reads(batch, Some(seq), block.index, from - first)?;
                    self.nobody_shares(slot, block.index, from - first)?;
                    let held = &mut self.content[base + (from - first) as usize..base + (to - first) as usize];
                    held.copy_from_slice(right);
                }
            }
            let reader = &mut self.readers[block.index as usize][(batch.0 % 2) as usize];
            let again = reader.batch == batch;
            let many = again && (reader.many || reader.seq != seq);
            let upto = (end - first).min(size).max(if again { reader.upto } else { 0 });
            *reader = Reader { batch, seq, many, upto };
        }
        Ok(())
    }

    /// No other slot has written, or found, the block from this offset on.
    fn nobody_shares(&self, slot: u32, block: u32, offset: u32) -> Result<(), String> {
        let block = BlockRef { index: block, generation: self.generation[block as usize] };
        for (_, index, open) in self.holders(block).filter(|(by, ..)| *by != slot) {
            ensure(index * self.size + offset >= open.written, || format!("{block:?} is changed under {}", open.seq))?;
        }
        Ok(())
    }

    /// Slots that list the block as it is now. An entry of an older generation is one that the slot will not read again: it is replaced
    /// or dropped before its next row.
    fn holders(&self, block: BlockRef) -> impl Iterator<Item = (u32, u32, &Open)> {
        self.listed[block.index as usize].iter().filter_map(move |(by, index)| {
            let open = self.slots[*by as usize].as_ref()?;
            (open.table.get(*index as usize) == Some(&block)).then_some((*by, *index, open))
        })
    }
}

fn answer(requests: &[Planned], seq: SeqId) -> Option<&Answer> {
    requests.get(index_of(seq.request))?.answers.get(usize::from(seq.index))
}

/// `Err` with the text unless `holds`.
pub fn ensure(holds: bool, text: impl FnOnce() -> String) -> Result<(), String> {
    if holds { Ok(()) } else { Err(text()) }
}
