//! Native order: whose request is placed next?

use alloc::vec::Vec;

use penstock_base::ClassRank;

use crate::generated::WaitingSignal;
use crate::matrix::Matrix;
use crate::sat;

use super::positions;

positions! { at: WaitingSignal {
    CLASS = ClassRank,
    PRIORITY = PriorityBiased,
    WAITED = WaitedUs,
    AGE = AgeUs,
} }

pub(super) const ROWS: &[WaitingSignal] = at::ALL;

/// A wait that is worth one class.
const AGEING_US: u64 = 5_000_000;

/// Smaller goes first: class, priority and age turned round, then the row.
pub(super) type Key = (u64, u64, u64, u32);

/// Ranks every row: class and its ageing descending, priority descending, then arrival.
pub(super) fn rank(waiting: &Matrix, keys: &mut Vec<Key>, ranked: &mut Vec<u32>) {
    keys.clear();
    keys.extend((0..waiting.rows()).map(|row| {
        let class = effective_class(waiting.get(row, at::CLASS), waiting.get(row, at::WAITED));
        (u64::MAX - class, u64::MAX - waiting.get(row, at::PRIORITY), u64::MAX - waiting.get(row, at::AGE), row as u32)
    }));
    keys.sort_unstable();
    ranked.clear();
    ranked.extend(keys.iter().map(|key| key.3));
}

fn effective_class(class: u64, waited_us: u64) -> u64 {
    sat::add(class, waited_us / AGEING_US).min(u64::from(ClassRank::MAX.get()))
}
