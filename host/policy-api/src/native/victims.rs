//! Native victims: who gives KV back?

use alloc::vec::Vec;

use crate::generated::RunningSignal;
use crate::matrix::{Context, Matrix};
use crate::proposal::Yielder;
use crate::sat;

use super::positions;

positions! { at: RunningSignal {
    CLASS = ClassRank,
    ADMITTED = AdmitCount,
    FREED = FreedBlocks,
    RECOMPUTE = RecomputeTokens,
    EST_RECOMPUTE = EstRecomputeUs,
    EST_OFFLOAD = EstOffloadUs,
} }
pub(super) mod context {
    use crate::generated::VictimsSignal;
    pub(in crate::native) const SHORT: usize = 0;
    pub(in crate::native) const TAKE: usize = 1;
    pub(in crate::native) const DRAM_FREE: usize = 2;
    pub(in crate::native) const ALL: &[VictimsSignal] =
        &[VictimsSignal::ShortBlocks, VictimsSignal::TakeSequences, VictimsSignal::DramFreeBlocks];
}

pub(super) const ROWS: &[RunningSignal] = at::ALL;

const RECOMPUTE: u8 = 0;
const OFFLOAD: u8 = 1;

/// Smaller goes first: class, tokens to compute again, joined last, then the row.
pub(super) type Key = (u64, u64, u64, u32);

/// Names rows until the shortage is covered: class ascending, recompute-tokens ascending, joined last first. A victim is offloaded where
/// that is faster and its blocks still find room in DRAM beside those of the victims before it.
pub(super) fn choose(values: Context<'_>, running: &Matrix, keys: &mut Vec<Key>, yielders: &mut Vec<Yielder>) {
    keys.clear();
    keys.extend((0..running.rows()).map(|row| {
        let joined = u64::MAX - running.get(row, at::ADMITTED);
        (running.get(row, at::CLASS), running.get(row, at::RECOMPUTE), joined, row as u32)
    }));
    keys.sort_unstable();
    yielders.clear();
    let (mut freed, mut room) = (0, values.get(context::DRAM_FREE));
    for key in keys.iter() {
        if freed >= values.get(context::SHORT) || yielders.len() as u64 >= values.get(context::TAKE) {
            break;
        }
        let row = key.3 as usize;
        let blocks = running.get(row, at::FREED);
        let faster = running.get(row, at::EST_OFFLOAD) < running.get(row, at::EST_RECOMPUTE);
        let offload = faster && room >= blocks && room > 0;
        if offload {
            room = sat::sub(room, blocks);
        }
        yielders.push(Yielder { row: key.3, how: if offload { OFFLOAD } else { RECOMPUTE } });
        freed = sat::add(freed, blocks);
    }
}
