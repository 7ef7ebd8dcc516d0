//! Did two runs decide the same? One running number over everything this machine decided.

use core::hash::{BuildHasher, Hasher};

use penstock_base::map::FixedState;
use penstock_base::plan::{Plan, PlanOp, TokenSource};

/// What a number that is mixed in stands for, so that neighbours of different kinds never cancel.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub(super) enum Mark {
    Plan = 1,
    Refuse,
    Preempt,
    Resume,
    SequenceEnd,
    Evict,
    Fallback,
    Policies,
    Deliver,
    Price,
    Handoff,
}

/// A running digest. Equal decisions in equal order give equal digests, in every process.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) struct Digest(pub(super) u64);

impl Digest {
    pub(super) fn mix(&mut self, mark: Mark, a: u64, b: u64) {
        let mut hasher = FixedState.build_hasher();
        hasher.write_u64(self.0);
        hasher.write_u8(mark as u8);
        hasher.write_u64(a);
        hasher.write_u64(b);
        self.0 = hasher.finish();
    }

    pub(super) fn mix_plan(&mut self, plan: &Plan) {
        let mut hasher = FixedState.build_hasher();
        hasher.write_u64(plan.batch.0);
        for op in &plan.ops {
            match *op {
                PlanOp::OpenSlot { slot, seq } => {
                    words(&mut hasher, [1, u64::from(slot.0), seq.request.0, u64::from(seq.index)])
                }
                PlanOp::SetBlock { slot, group, index, block } => {
                    let place = u64::from(group) << 32 | u64::from(index);
                    words(&mut hasher, [2, u64::from(slot.0), place, block_word(block)]);
                }
                PlanOp::CopyBlock { from, to, tokens } => {
                    words(&mut hasher, [3, block_word(from), block_word(to), u64::from(tokens)]);
                }
                PlanOp::DropSlot { slot } => words(&mut hasher, [4, u64::from(slot.0), 0, 0]),
            }
        }
        for row in &plan.rows {
            let source = match row.input {
                TokenSource::Known => 0,
                TokenSource::FromBatch { batch, row } => 1 + (batch.0 << 16 | u64::from(row)),
            };
            let span = u64::from(row.start) << 32 | u64::from(row.tokens) << 1 | u64::from(row.sample);
            words(&mut hasher, [u64::from(row.slot.0), row.seq.request.0 ^ u64::from(row.seq.index), span, source]);
        }
        let plan = hasher.finish();
        self.mix(Mark::Plan, plan, 0);
    }
}

fn words(hasher: &mut impl Hasher, words: [u64; 4]) {
    for word in words {
        hasher.write_u64(word);
    }
}

fn block_word(block: penstock_base::BlockRef) -> u64 {
    u64::from(block.index) << 32 | u64::from(block.generation)
}
