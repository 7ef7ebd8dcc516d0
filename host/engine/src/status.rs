//! What the engine says of itself: for readiness and liveness probes, load endpoints and gauges.

use penstock_base::{Generation, ReplicaEpoch, ReplicaId};
use penstock_sched::message::Load;

/// May this process get traffic, and is it alive?
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Status {
    /// A replica is ready, nothing drains, and the watchdog sees progress.
    pub ready: bool,
    /// The gateway loop lives. When false the process should be restarted.
    pub live: bool,
    /// New work is refused.
    pub draining: bool,
    /// Work waits, a replica is ready, and nothing has moved for longer than the watchdog allows.
    pub stuck: bool,
    /// One a replica, by id.
    pub replicas: Vec<ReplicaStatus>,
    /// What waits and runs.
    pub queue: QueueStatus,
}

impl Status {
    /// Sum over all replicas of something in their load.
    pub fn sum(&self, of: impl Fn(&Load) -> u64) -> u64 {
        self.replicas.iter().map(|replica| of(&replica.load)).sum()
    }
}

/// One replica.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ReplicaStatus {
    /// Which.
    pub replica: ReplicaId,
    /// Its incarnation.
    pub epoch: ReplicaEpoch,
    /// Whether it serves.
    pub state: ReplicaState,
    /// Its last report; zeros while it is not ready.
    pub load: Load,
    /// Generation of the policy set in its seats.
    pub generation: Generation,
    /// Most sequences in a step.
    pub slots: u32,
    /// Tokens in a block.
    pub block_size_tokens: u32,
    /// Longest sequence.
    pub context_tokens_max: u32,
}

/// Whether a replica serves. Only a ready one gets work. Downloading and loading come before there is a replica: nothing answers then.
///
/// ```text
/// Warming ──► Ready ──► Draining
///               ⇅          │
///            Frozen ◄──────┘
///               └──► Lost
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum ReplicaState {
    /// Its machine has not started yet.
    Warming,
    /// It takes work.
    Ready,
    /// It finishes what it has and takes nothing new.
    Draining,
    /// It broke: its steps in flight are awaited, then it starts anew.
    Frozen,
    /// Its executor is lost; it will not come back in this process.
    Lost,
}

impl ReplicaState {
    /// All states.
    pub const ALL: [Self; 5] = [Self::Warming, Self::Ready, Self::Draining, Self::Frozen, Self::Lost];

    /// As it is shown: in the words that a worker's discovery record has.
    pub fn name(self) -> &'static str {
        match self {
            Self::Warming => "warming",
            Self::Ready => "ready",
            Self::Draining => "draining",
            Self::Frozen => "unhealthy",
            Self::Lost => "terminated",
        }
    }
}

/// What waits and runs.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct QueueStatus {
    /// Requests that the gateway has and no replica: queued or deferred.
    pub waiting_requests: usize,
    /// Their prompt tokens.
    pub waiting_tokens: u64,
    /// Requests placed and not over.
    pub placed_requests: usize,
    /// Submissions whose work or whose stream is not over.
    pub in_flight_requests: usize,
    /// Bytes of prompts that these keep alive.
    pub pending_bytes: usize,
    /// Bytes in clients' streams that wait to be read.
    pub send_buffer_bytes: usize,
}
