//! Facts by hand: what is listed is known, the rest is not.
#![allow(dead_code, reason = "each test file uses its part")]

use penstock_base::{ClassRank, Priority, RequestId, Traits};
use penstock_policy_api::{CommonSignal, ContextSource, FillBasis, RequestRecord, RowSource, Signal};

/// A context.
#[derive(Debug)]
pub struct Facts<S> {
    pub common: Vec<(CommonSignal, u64)>,
    pub own: Vec<(S, u64)>,
}

impl<S> Default for Facts<S> {
    fn default() -> Self {
        Self { common: Vec::new(), own: Vec::new() }
    }
}

impl<S: Signal> Facts<S> {
    pub fn own(own: &[(S, u64)]) -> Self {
        Self { own: own.to_vec(), ..Self::default() }
    }
}

fn find<S: Signal>(known: &[(S, u64)], which: S) -> Option<u64> {
    known.iter().find(|(signal, _)| *signal == which).map(|(_, value)| *value)
}

impl<S: Signal> ContextSource<S> for Facts<S> {
    fn common(&self, which: CommonSignal) -> Option<u64> {
        find(&self.common, which)
    }
    fn value(&self, which: S) -> Option<u64> {
        find(&self.own, which)
    }
}

/// Rows.
#[derive(Debug)]
pub struct Rows<S> {
    pub rows: Vec<Vec<(S, u64)>>,
    pub max_left: Option<u64>,
}

impl<S: Signal> Rows<S> {
    pub fn of(rows: &[&[(S, u64)]]) -> Self {
        Self { rows: rows.iter().map(|row| row.to_vec()).collect(), max_left: None }
    }
    pub fn none() -> Self {
        Self { rows: Vec::new(), max_left: None }
    }
    /// `rows` rows with `value` in every signal.
    pub fn all(rows: usize, value: u64) -> Self {
        let row: Vec<_> = S::ALL.iter().map(|signal| (*signal, value)).collect();
        Self { rows: vec![row; rows], max_left: None }
    }
}

impl<S: Signal> RowSource<S> for Rows<S> {
    fn rows(&self) -> usize {
        self.rows.len()
    }
    fn cell(&self, which: S, row: usize) -> Option<u64> {
        find(&self.rows[row], which)
    }
    fn basis(&self, basis: FillBasis, row: usize) -> Option<u64> {
        match basis {
            FillBasis::MaxLeft => self.max_left,
            other => S::basis_signal(other).and_then(|signal| self.cell(signal, row)),
        }
    }
}

/// A request of class 3 with 160 tokens in, at most 100 out, no traits and no deadline.
pub fn request() -> RequestRecord {
    RequestRecord {
        request_id: RequestId(1),
        tenant_id: 2,
        flow_id: 3,
        session_id: 0,
        class_rank: ClassRank::default(),
        attempt: 1,
        sequences: 1,
        priority: Priority(0),
        input_tokens: 160,
        max_output_tokens: 100,
        deadline_us: u64::MAX,
        traits: Traits::default(),
    }
}
