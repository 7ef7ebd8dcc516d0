//! What are the policies asked about? Made-up facts of plausible size, held in columns: reading a cell is one load, so that the table shows
//! what a call costs and not what a machine must do to know something.

use penstock_base::{ClassRank, Priority, RequestId, Traits};
use penstock_policy_api::{CommonSignal, ContextSource, RequestRecord, RowSource, Signal, Unit};

/// Flows among which the waiting requests are spread.
pub const FLOWS: u64 = 64;

/// Signals that no machine knows yet, or whose fill is what a healthy machine would say.
const UNKNOWN: &[&str] = &[
    "overlap-dram-blocks",
    "overlap-ssd-blocks",
    "est-load-us",
    "est-offload-us",
    "dram-free-blocks",
    "ssd-free-blocks",
    "est-transfer-us",
    "known-mask",
];

/// Values of a table, column by column.
#[derive(Debug)]
pub struct Made {
    /// By signal; none where it is unknown.
    columns: Vec<Option<Vec<u64>>>,
    common: Vec<Option<u64>>,
    rows: usize,
}

impl Made {
    /// A context: one value a signal.
    pub fn context<S: Signal>() -> Self {
        Self::rows::<S>(1)
    }

    /// Rows of table `S`.
    pub fn rows<S: Signal>(rows: usize) -> Self {
        let column = |signal: &S| {
            let info = signal.info();
            let known = !UNKNOWN.contains(&info.name);
            known.then(|| (0..rows as u64).map(|row| value(info.name, info.unit, row)).collect())
        };
        let common = |signal: &CommonSignal| {
            let info = signal.info();
            (!UNKNOWN.contains(&info.name)).then(|| value(info.name, info.unit, 0))
        };
        Self {
            columns: S::ALL.iter().map(column).collect(),
            common: CommonSignal::ALL.iter().map(common).collect(),
            rows,
        }
    }
}

impl<S: Signal> ContextSource<S> for Made {
    fn common(&self, which: CommonSignal) -> Option<u64> {
        self.common[which.index()]
    }
    fn value(&self, which: S) -> Option<u64> {
        self.columns[which.index()].as_ref().map(|column| column[0])
    }
}

impl<S: Signal> RowSource<S> for Made {
    fn rows(&self) -> usize {
        self.rows
    }
    fn cell(&self, which: S, row: usize) -> Option<u64> {
        self.columns[which.index()].as_ref().map(|column| column[row])
    }
}

/// One value: by name where policies look closely, by unit elsewhere.
fn value(name: &str, unit: Unit, row: u64) -> u64 {
    let salt = name.bytes().fold(7, |sum: u64, byte| sum.wrapping_mul(31).wrapping_add(u64::from(byte)));
    let draw = |below: u64| mix(row ^ salt << 20) % below;
    match name {
        "block-size-tokens" => 16,
        "stale-load-us" | "queued-tokens" => 500_000,
        "stale-cache-us" => 2_000_000,
        "load-age-us" | "cache-age-us" => draw(90_000),
        "take-requests" | "take-sequences" => 4,
        "short-blocks" => 48,
        "needy-class-rank" => 7,
        "flow-id" => row % FLOWS + 1,
        "flow-count" => row / FLOWS,
        "flow-weight-ppm" | "speed-ppm" | "gateway-share-ppm" => 1_000_000,
        "class-rank" => draw(4) + 2,
        "replica-id" | "request-id" | "sequence-id" | "admit-count" => row + 1,
        "need-blocks" => 40,
        "queue-limit-tokens" | "tenant-limit-tokens" => 4 << 20,
        "queue-limit-requests" => 1_024,
        "pool-queued-requests" => 200,
        "total-blocks" | "pool-total-blocks" => 16_384,
        "pool-free-blocks" => 2_048,
        "defer-count" | "tenant-used-tokens" | "tenant-borrowed-tokens" => 0,
        "retention-rank" => 50,
        "run-blocks" => 1 + draw(24),
        "left-price" => 40_000,
        "hit-count" => draw(6),
        "est-credit-us" if row.is_multiple_of(2) => 0,
        _ => match unit {
            Unit::Us => draw(2_000_000),
            Unit::Tokens => draw(2_048),
            Unit::Blocks => draw(128),
            Unit::Flag => draw(2),
            Unit::Rank | Unit::Level => draw(8),
            Unit::Requests | Unit::Sequences | Unit::Count | Unit::Replicas | Unit::Flows => draw(32),
            Unit::Ppm => draw(1_000_000),
            Unit::Id | Unit::Hash | Unit::Epoch => mix(row ^ salt),
            _ => draw(100_000),
        },
    }
}

/// The mix of SplitMix64.
pub fn mix(z: u64) -> u64 {
    let z = (z.wrapping_add(0x9e37_79b9_7f4a_7c15) ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// The request of admission and routing.
pub fn request() -> RequestRecord {
    RequestRecord {
        request_id: RequestId(77),
        tenant_id: 3,
        flow_id: 5,
        session_id: 9,
        class_rank: ClassRank::default(),
        attempt: 1,
        sequences: 1,
        priority: Priority(0),
        input_tokens: 600,
        max_output_tokens: 256,
        deadline_us: u64::MAX,
        traits: Traits::STREAMING,
    }
}
