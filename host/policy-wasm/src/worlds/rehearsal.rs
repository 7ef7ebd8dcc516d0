//! A question of which nothing is known: the smallest input that is legal, put once before a policy is activated.

use penstock_policy_api::{CommonSignal, ContextSource, Fill, RowSource, Signal, Table};

/// Knows what the host always knows, as small numbers, and nothing else.
#[derive(Clone, Copy, Debug)]
pub(super) struct Blank {
    pub rows: usize,
}

impl<S: Signal> ContextSource<S> for Blank {
    fn common(&self, _which: CommonSignal) -> Option<u64> {
        None
    }
    fn value(&self, which: S) -> Option<u64> {
        (which.info().fill == Fill::Required).then_some(1)
    }
}

impl<S: Signal> RowSource<S> for Blank {
    fn rows(&self) -> usize {
        self.rows
    }
    fn cell(&self, which: S, row: usize) -> Option<u64> {
        // Ranks of the class table start at 0; ids and counts that a policy may divide by do not.
        let first = u64::from(S::TABLE != Table::Class);
        (which.info().fill == Fill::Required).then_some(row as u64 + first)
    }
}
