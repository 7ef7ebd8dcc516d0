//! What a policy was told, kept whole: for faults, for answers that the host changed, and for a sample.
//!
//! Whether an answer is worth it is known only when the host has checked it, behind the question; until then the values lie in a store
//! of the step.

use std::sync::Arc;

use penstock_base::RequestId;
use penstock_policy_api::{Declarable, Declared, Matrix, Question, RequestRecord};

use super::log::DecisionRecord;

/// Values of one step that wait for the verdict over them: 1 MiB. Questions beyond it keep no inputs.
const ARENA_WORDS_MAX: usize = 1 << 17;
/// Kept inputs that wait for a reader to let go of the ring.
const WAITING_MAX: usize = 256;
/// Of the questions about many, one in so many of the sample's share is kept: they are asked far more often, over far more rows.
const MANY_ONE_IN: u64 = 64;

/// Names of the values, in the order they are told.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Names {
    /// Of the context.
    pub context: Box<[&'static str]>,
    /// Of each table: what its rows are, and its columns.
    pub tables: Vec<(&'static str, Box<[&'static str]>)>,
}

impl Names {
    /// Of a context.
    pub(super) fn of<S: Declarable>(context: &Declared<S>) -> Self {
        Self { context: names(context), tables: Vec::new() }
    }

    /// And of a table.
    pub(super) fn and<S: Declarable>(mut self, rows: &'static str, columns: &Declared<S>) -> Self {
        self.tables.push((rows, names(columns)));
        self
    }
}

fn names<S: Declarable>(declared: &Declared<S>) -> Box<[&'static str]> {
    declared.entries().iter().map(|entry| entry.map_or("unknown", |signal| signal.entry().name)).collect()
}

/// Why inputs were kept.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum KeptFor {
    /// The policy failed, or its answer was refused.
    Fault,
    /// The host changed something about the answer.
    Override,
    /// The sample.
    Sample,
}

impl KeptFor {
    /// The name in answers of the admin listener.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Fault => "fault",
            Self::Override => "override",
            Self::Sample => "sample",
        }
    }
}

/// Everything that one question told: numbers only, no prompt, no tenant's name.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct InputsKept {
    /// Of the decision.
    pub sequence: u64,
    /// What was asked.
    pub question: Question,
    /// Number among those of its kind.
    pub call: u64,
    /// Seed of the call.
    pub seed: u64,
    /// Why it was kept.
    pub kept_for: KeptFor,
    /// The request that it is about.
    pub request: Option<RequestRecord>,
    /// Names of the values.
    pub names: Arc<Names>,
    /// Rows of each table.
    pub rows: [u32; 2],
    /// Context, then the tables, column by column.
    pub values: Box<[u64]>,
}

/// A table of candidates, as it was told.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct KeptTable<'a> {
    /// What its rows are.
    pub rows_are: &'static str,
    /// Names of the columns.
    pub columns: &'a [&'static str],
    /// Row by row.
    pub rows: Vec<Vec<u64>>,
}

impl InputsKept {
    /// Context values by name.
    pub fn context(&self) -> impl Iterator<Item = (&'static str, u64)> {
        self.names.context.iter().copied().zip(self.values.iter().copied())
    }

    /// Each table.
    pub fn tables(&self) -> Vec<KeptTable<'_>> {
        let mut from = self.names.context.len();
        let mut tables = Vec::new();
        for ((what, columns), rows) in self.names.tables.iter().zip(self.rows) {
            let rows = rows as usize;
            let cells = self.values.get(from..from + columns.len() * rows).unwrap_or_default();
            from += columns.len() * rows;
            let row = |row: usize| (0..columns.len()).map(|column| cells[column * rows + row]).collect();
            let all = if cells.is_empty() { Vec::new() } else { (0..rows).map(row).collect() };
            tables.push(KeptTable { rows_are: what, columns, rows: all });
        }
        tables
    }

    /// Memory that it takes.
    pub(super) fn bytes(&self) -> usize {
        size_of::<Self>() + size_of_val(&*self.values)
    }
}

/// Which questions are kept as a sample: by a hash of the request's id, so that every machine keeps the same requests.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Sampling {
    /// Parts of a million.
    pub ppm: u32,
}

impl Sampling {
    /// Is this one of them?
    pub fn takes(self, record: &DecisionRecord) -> bool {
        match record.request {
            Some(request) => self.takes_request(request),
            None => {
                let hash = spread(record.call ^ (record.question as u64) << 56);
                hash.is_multiple_of(MANY_ONE_IN) && self.takes_hash(hash / MANY_ONE_IN)
            }
        }
    }

    fn takes_request(self, request: RequestId) -> bool {
        self.takes_hash(spread(request.0))
    }

    fn takes_hash(self, hash: u64) -> bool {
        hash % 1_000_000 < u64::from(self.ppm)
    }
}

/// The finaliser of SplitMix64: neighbours land far apart.
fn spread(word: u64) -> u64 {
    let word = (word ^ word >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let word = (word ^ word >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    word ^ word >> 31
}

/// What one question told, where it lies.
pub(super) struct ToldOf<'a> {
    pub names: &'a Arc<Names>,
    pub seed: u64,
    pub request: Option<&'a RequestRecord>,
    pub context: &'a [u64],
    pub tables: [Option<&'a Matrix>; 2],
}

/// What the questions of a step told.
#[derive(Default)]
pub(super) struct Arena {
    words: Vec<u64>,
    pending: Vec<Pending>,
}

struct Pending {
    /// Its record among those noted.
    record: usize,
    names: Arc<Names>,
    seed: u64,
    request: Option<RequestRecord>,
    rows: [u32; 2],
    from: usize,
    to: usize,
}

impl Arena {
    /// Takes the values of the question whose record will be the `record`-th.
    pub fn take(&mut self, record: usize, told: ToldOf<'_>) {
        let from = self.words.len();
        let cells: usize = told.tables.iter().flatten().map(|table| table.rows() * table.names()).sum();
        if from + told.context.len() + cells > ARENA_WORDS_MAX {
            return;
        }
        self.words.extend_from_slice(told.context);
        told.tables.iter().flatten().for_each(|table| table.pack_into(&mut self.words));
        self.pending.push(Pending {
            record,
            names: Arc::clone(told.names),
            seed: told.seed,
            request: told.request.copied(),
            rows: told.tables.map(|table| table.map_or(0, |table| table.rows() as u32)),
            from,
            to: self.words.len(),
        });
    }

    /// Moves what is worth it to `kept`, and forgets the rest.
    pub fn settle(
        &mut self,
        noted: &mut [DecisionRecord],
        kept: &mut Vec<InputsKept>,
        why: impl Fn(&DecisionRecord) -> Option<KeptFor>,
    ) {
        for pending in self.pending.drain(..) {
            let Some(record) = noted.get_mut(pending.record) else { continue };
            let Some(kept_for) = why(record).filter(|_| kept.len() < WAITING_MAX) else { continue };
            record.kept = Some(kept_for);
            kept.push(InputsKept {
                sequence: record.sequence,
                question: record.question,
                call: record.call,
                seed: pending.seed,
                kept_for,
                request: pending.request,
                names: pending.names,
                rows: pending.rows,
                values: self.words[pending.from..pending.to].into(),
            });
        }
        self.words.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use penstock_base::GatewayEpoch;

    #[test]
    fn the_sample_follows_the_share_and_the_request_alone() {
        let request = |number| RequestId::new(GatewayEpoch(3), number).unwrap();
        let taken = |ppm| (1..=100_000).filter(|number| Sampling { ppm }.takes_request(request(*number))).count();
        assert_eq!((taken(0), taken(1_000_000)), (0, 100_000));
        // A binomial count of 100,000 at one in ten has a standard deviation of 95.
        let tenth = taken(100_000);
        assert!((9_500..10_500).contains(&tenth), "{tenth}");
        // A larger share takes everything that a smaller one takes.
        let both = |number| (Sampling { ppm: 1_000 }, Sampling { ppm: 50_000 }, request(number));
        assert!((1..=10_000).map(both).all(|(few, many, id)| !few.takes_request(id) || many.takes_request(id)));
    }
}
