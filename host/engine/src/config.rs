//! How an engine is set up. One typed value; each key has unit, default and reason.

use std::borrow::Cow;
use std::fmt;
use std::sync::Arc;

use penstock_base::Duration;
use penstock_kv_events::PublisherSettings;
use penstock_model::{Namespace, Tokenizer};
use penstock_sched::gateway::GatewayConfig;
use penstock_sched::replica::ReplicaConfig;

use crate::handoff::{HandoffSetup, TransferSettings};
use crate::journal::JournalConfig;
use crate::policies::log::DecisionsConfig;
use crate::policies::seats::PolicySource;

/// Everything that can be chosen about an engine.
#[derive(Clone, Debug, Default)]
pub struct EngineConfig {
    /// The gateway machine. `block_size_tokens` and `kv_token_bytes` are taken from the executors.
    pub gateway: GatewayConfig,
    /// The replica machines. Id, epoch, pool, slots, step budget and context are taken from each executor (`step_tokens` and `slots`
    /// are the lesser of the two).
    pub replica: ReplicaConfig,
    /// Replicas that compute prompts for others; none is that each replica does whole requests.
    pub handoff: Option<HandoffSetup>,
    /// How a worker's KV gets to other processes.
    pub transfer: TransferSettings,
    /// Bounds of the driver itself.
    pub limits: EngineLimits,
    /// Where the machines' first policies come from.
    pub policies: PolicySource,
    /// What is kept of decisions.
    pub decisions: DecisionsConfig,
    /// Where the machines' inputs and decisions are written down; none is nowhere.
    pub journal: Option<JournalConfig>,
    /// Where replicas tell what they cache; none is nowhere. The first has these addresses, the ports of the others follow. Rank and life are
    /// the replica's.
    pub kv_events: Option<PublisherSettings>,
}

/// Bounds of what the driver keeps for its clients.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct EngineLimits {
    /// Most submissions whose stream is still open or whose work is not over. Bounds every table that grows with requests.
    pub requests_max: usize,
    /// Most bytes of prompts that these keep alive.
    pub pending_bytes_max: usize,
    /// Most unread bytes in one client's stream; past it the request is cancelled as a slow client.
    pub stream_bytes_max: usize,
    /// Most unread events in one client's stream. Text of one answer that waits unread is joined into one event.
    pub stream_events_max: usize,
    /// Longest time a client may leave unread events lying while more come; then the request is cancelled as a slow client.
    pub send_timeout: Duration,
    /// After a drain's grace: how long clients may take to read the end of their streams.
    pub drain_flush: Duration,
    /// How long [`Engine::shutdown`](crate::Engine::shutdown) waits for a thread before it leaves it behind. Longer than any sane step.
    pub join: Duration,
    /// How long each phase of a policy swap waits for a machine. A machine answers between two steps, and waits for nobody but a reader
    /// that is far behind; past this the swap is given up and the set in force stays.
    pub policy_switch: Duration,
}

impl Default for EngineLimits {
    fn default() -> Self {
        Self {
            // Queue (1,024) and running work of a few replicas with room for streams that are read out.
            requests_max: 4_096,
            pending_bytes_max: 256 << 20,
            stream_bytes_max: 256 << 10,
            stream_events_max: 4_096,
            send_timeout: Duration::from_s(30),
            drain_flush: Duration::from_s(2),
            join: Duration::from_s(30),
            policy_switch: Duration::from_s(5),
        }
    }
}

/// What the engine must know of the model that its executors compute.
#[derive(Clone)]
pub struct ServedModel {
    /// Public name: the `model_name` label of metrics.
    pub name: String,
    /// Namespace of cached blocks: what differs in it shares nothing.
    pub namespace: Namespace,
    /// Token ids to bytes.
    pub vocabulary: Arc<dyn Vocabulary>,
}

impl fmt::Debug for ServedModel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ServedModel")
            .field("name", &self.name)
            .field("namespace", &self.namespace)
            .finish_non_exhaustive()
    }
}

/// Which bytes does a token stand for?
pub trait Vocabulary: Send + Sync {
    /// The bytes a client sees for `id`: empty for control tokens and ids outside the vocabulary. Text is the lossy decoding of the
    /// bytes of all tokens joined.
    fn token_bytes(&self, id: u32) -> Cow<'_, [u8]>;
}

impl Vocabulary for Tokenizer {
    fn token_bytes(&self, id: u32) -> Cow<'_, [u8]> {
        Cow::Borrowed(self.delivered_bytes(id))
    }
}
