//! A fake executor that knows what every block must hold.
//!
//! It computes no numbers. Each KV position holds a hash of the token history up to it; before a row is computed, every position that it
//! reads is compared with the history of its sequence, so a wrong block table, a missing copy, a block handed out too early or a stale
//! reference shows as a wrong content at the very row that would have read it. Sampled tokens are a function of history, seed and index
//! alone, so the right output of a request is known without any scheduler: [`expected_output`].

#![allow(dead_code, reason = "each test file uses its part")]

use std::collections::BTreeMap;

use penstock_base::plan::{Plan, PlanOp, PlanRow, RowDone, TokenSource};
use penstock_base::{BatchId, BlockKey, BlockRef, SeqId};

/// Tokens are below this; 0 is the stop token.
pub const VOCABULARY: u64 = 23;
/// One in so many histories stops.
const STOP_ONE_IN: u64 = 24;
/// The token that stands for the last token of a stop string.
pub const STOP_STRING: u32 = 13;

/// A fixed mix of two words (SplitMix64's finalizer).
pub fn mix(a: u64, b: u64) -> u64 {
    let z = a.rotate_left(23).wrapping_add(b).wrapping_add(0x9e37_79b9_7f4a_7c15);
    let z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// Hash of the history after each token.
fn chain(tokens: &[u32]) -> Vec<u64> {
    let step = |state: &mut u64, token: &u32| {
        *state = mix(*state, u64::from(*token) + 1);
        Some(*state)
    };
    tokens.iter().scan(7, step).collect()
}

/// The token behind a history: a function of history, seed and output index.
fn sample(history: u64, seed: u64, index: u32) -> u32 {
    let draw = mix(mix(history, seed), u64::from(index));
    if seed != 0 && draw.is_multiple_of(STOP_ONE_IN) { 0 } else { 1 + (draw / STOP_ONE_IN % (VOCABULARY - 1)) as u32 }
}

/// Seed of one sequence of a request. Seed 0 stays 0: such a sequence never stops by itself.
pub fn sequence_seed(seed: u64, index: u16) -> u64 {
    if seed == 0 { 0 } else { mix(seed, u64::from(index)) }
}

/// What one sequence must put out: up to the cap, up to a stop token (not part of it), or before the first stop string.
pub fn expected_output(prompt: &[u32], seed: u64, max_output: u32, stop_string: bool) -> Vec<u32> {
    let mut state = *chain(prompt).last().expect("a prompt has tokens");
    let mut output = Vec::new();
    for index in 0..max_output {
        let token = sample(state, seed, index);
        if token == 0 || (stop_string && token == STOP_STRING) {
            break;
        }
        output.push(token);
        state = mix(state, u64::from(token) + 1);
    }
    output
}

/// Keys of the full blocks of `tokens`, root first.
pub fn block_keys(root: u64, tokens: &[u32], block_size: usize) -> Vec<BlockKey> {
    let mut parent = root;
    let key = |block: &[u32]| {
        parent = block.iter().fold(mix(parent, 99), |state, token| mix(state, u64::from(*token)));
        let mut bytes = [0; 16];
        bytes[..8].copy_from_slice(&parent.to_le_bytes());
        bytes[8..].copy_from_slice(&mix(parent, 5).to_le_bytes());
        BlockKey(bytes)
    };
    tokens.chunks_exact(block_size).map(key).collect()
}

/// What a slot starts from.
pub struct Opening {
    /// Prompt and accepted output.
    pub history: Vec<u32>,
    /// Prompt tokens among them.
    pub prompt: usize,
    /// Seed of the sequence.
    pub seed: u64,
}

struct Slot {
    seq: SeqId,
    table: Vec<BlockRef>,
    /// Prompt, output, and what was sampled since.
    history: Vec<u32>,
    chain: Vec<u64>,
    prompt: usize,
    seed: u64,
}

/// Blocks that a batch in flight reads or writes for a sequence.
struct Reads {
    batch: BatchId,
    seq: SeqId,
    /// With the number of leading positions in each.
    blocks: Vec<(u32, usize)>,
}

/// See the module.
pub struct ContentExecutor {
    block_size: usize,
    content: Vec<Vec<Option<u64>>>,
    generation: Vec<u32>,
    slots: BTreeMap<u32, Slot>,
    /// Tokens of the batches in flight, by batch and row.
    results: BTreeMap<(u64, u32), (SeqId, u32)>,
    reads: Vec<Reads>,
    next_batch: Option<u64>,
    step_tokens: u32,
}

impl ContentExecutor {
    pub fn new(blocks: u32, block_size: u32, step_tokens: u32) -> Self {
        Self {
            block_size: block_size as usize,
            content: vec![vec![None; block_size as usize]; blocks as usize],
            generation: vec![0; blocks as usize],
            slots: BTreeMap::new(),
            results: BTreeMap::new(),
            reads: Vec::new(),
            next_batch: None,
            step_tokens,
        }
    }

    /// Computes a plan: its operations, then its rows, as an executor would; the results are handed out by [`Self::finish`].
    ///
    /// `opening` says what a slot starts from, `known` how many tokens of a sequence its driver knows.
    pub fn submit(
        &mut self,
        plan: &Plan,
        opening: impl Fn(SeqId) -> Opening,
        known: impl Fn(SeqId) -> usize,
    ) -> Vec<RowDone> {
        assert!(self.next_batch.is_none_or(|next| next == plan.batch.0), "batches are consecutive: {:?}", plan.batch);
        self.next_batch = Some(plan.batch.0 + 1);
        assert!(plan.query_tokens() <= u64::from(self.step_tokens), "a step is over its budget");
        assert!(!plan.rows.is_empty(), "an empty step was submitted");
        for op in &plan.ops {
            self.apply(plan, *op, &opening);
        }
        let mut slots: Vec<u32> = plan.rows.iter().map(|row| row.slot.0).collect();
        slots.sort_unstable();
        assert!(slots.windows(2).all(|pair| pair[0] != pair[1]), "one row a sequence and step");
        let rows = plan.rows.iter().enumerate();
        rows.map(|(place, row)| self.compute(plan.batch, place as u32, row, &known)).collect()
    }

    /// The batch is done: nobody reads its blocks on its behalf any more.
    pub fn finish(&mut self, batch: BatchId) {
        self.reads.retain(|reads| reads.batch != batch);
        self.results.retain(|(of, _), _| *of + 4 > batch.0);
    }

    /// The batch came to nothing as a whole: what it opened is unknown, and so is everybody who had a row in it.
    pub fn forget(&mut self, plan: &Plan) {
        for op in &plan.ops {
            if let PlanOp::OpenSlot { slot, seq } = op
                && self.slots.get(&slot.0).is_some_and(|open| open.seq == *seq)
            {
                self.slots.remove(&slot.0);
            }
        }
        self.finish(plan.batch);
    }

    fn see(&mut self, block: BlockRef) {
        let seen = &mut self.generation[block.index as usize];
        assert!(block.generation >= *seen, "a stale block reference: {block:?}, generation {seen} was seen");
        *seen = block.generation;
    }

    fn apply(&mut self, plan: &Plan, op: PlanOp, opening: &impl Fn(SeqId) -> Opening) {
        match op {
            PlanOp::OpenSlot { slot, seq } => {
                let Opening { history, prompt, seed } = opening(seq);
                let chain = chain(&history);
                let opened = Slot { seq, table: Vec::new(), history, chain, prompt, seed };
                assert!(self.slots.insert(slot.0, opened).is_none(), "slot {slot} was not dropped");
            }
            PlanOp::DropSlot { slot } => {
                assert!(self.slots.remove(&slot.0).is_some(), "slot {slot} is not open");
            }
            PlanOp::SetBlock { slot, group, index, block } => {
                assert_eq!(group, 0);
                self.see(block);
                let slot = self.slots.get_mut(&slot.0).expect("a patched slot is open");
                assert!(index as usize <= slot.table.len(), "table entries are set in rising order");
                if index as usize == slot.table.len() {
                    slot.table.push(block);
                } else {
                    slot.table[index as usize] = block;
                }
            }
            PlanOp::CopyBlock { from, to, tokens } => {
                self.see(from);
                self.see(to);
                let listed = |slot: &Slot| slot.table.contains(&to);
                assert!(!self.slots.values().any(listed), "a copy goes to a block that somebody lists");
                let mut content = self.content[from.index as usize].clone();
                let whole = content.iter().take(tokens as usize).all(Option::is_some);
                assert!(whole && tokens > 0, "a copy of content that is not there");
                content[tokens as usize..].fill(None);
                self.overwrite_check(plan.batch, None, (to.index, 0));
                self.content[to.index as usize] = content;
            }
        }
    }

    /// Nobody else may be reading position `at` of block `index` in a batch in flight.
    fn overwrite_check(&self, batch: BatchId, seq: Option<SeqId>, (index, at): (u32, usize)) {
        for reads in &self.reads {
            let read = reads.blocks.iter().any(|(block, filled)| *block == index && at < *filled);
            let other = reads.batch != batch && Some(reads.seq) != seq && read;
            assert!(!other, "block {index} is written while batch {} may read it for {}", reads.batch, reads.seq);
        }
    }

    fn compute(&mut self, batch: BatchId, place: u32, row: &PlanRow, known: &impl Fn(SeqId) -> usize) -> RowDone {
        let size = self.block_size;
        let slot = &self.slots[&row.slot.0];
        assert_eq!(slot.seq, row.seq, "a row for another sequence than the slot's");
        let (start, end) = (row.start as usize, (row.start + row.tokens) as usize);
        assert!(row.tokens > 0 && end <= slot.table.len() * size, "a row without blocks");
        assert!(end <= slot.history.len(), "{} computes position {end} of {}", row.seq, slot.history.len());
        match row.input {
            TokenSource::Known => assert!(end <= known(row.seq), "an input token is not known yet"),
            TokenSource::FromBatch { batch, row: from } => {
                assert!(end > known(row.seq), "a known token is taken from a batch");
                let (seq, token) = self.results[&(batch.0, from)];
                assert_eq!((seq, token), (row.seq, slot.history[end - 1]), "the wrong sampled token");
            }
        }
        for at in 0..start {
            let block = slot.table[at / size];
            let found = self.content[block.index as usize][at % size];
            assert_eq!(
                found,
                Some(slot.chain[at]),
                "{} reads position {at} from block {} and finds another content (batch {batch})",
                row.seq,
                block.index
            );
        }
        let filled = |index: usize| (end - index * size).min(size);
        let blocks = slot.table[..end.div_ceil(size)].iter().enumerate();
        let blocks = blocks.map(|(index, block)| (block.index, filled(index))).collect();
        let reads = Reads { batch, seq: row.seq, blocks };
        let writes: Vec<(u32, usize, u64)> =
            (start..end).map(|at| (slot.table[at / size].index, at % size, slot.chain[at])).collect();
        for (block, at, value) in writes {
            if self.content[block as usize][at] != Some(value) {
                self.overwrite_check(batch, Some(row.seq), (block, at));
            }
            self.content[block as usize][at] = Some(value);
        }
        self.reads.push(reads);
        let slot = self.slots.get_mut(&row.slot.0).expect("it is open");
        assert_eq!(row.sample, end == slot.history.len(), "a token is sampled behind the last known one");
        let mut done = RowDone { seq: row.seq, accepted: 0, stop: false };
        if row.sample {
            let index = (slot.history.len() - slot.prompt) as u32;
            let token = sample(slot.chain[end - 1], slot.seed, index);
            slot.history.push(token);
            slot.chain.push(mix(slot.chain[end - 1], u64::from(token) + 1));
            self.results.insert((batch.0, place), (row.seq, token));
            (done.accepted, done.stop) = (1, token == 0);
        }
        done
    }

    /// The token that a row of a batch sampled.
    pub fn token(&self, batch: BatchId, row: u32) -> u32 {
        self.results[&(batch.0, row)].1
    }
}
