//! The live driver: threads, mailboxes and the wall clock around the two machines of `penstock-sched`.
//!
//! Start at [`Engine::start`]; hand requests in with [`Engine::submit`] and read each one's [`EventStream`]. Inside, every machine has one
//! thread with one mailbox and one closed `Wake` enum; text is made on a thread of its own. `wiring` says who may wait for whom.
//!
//! Layer 4: it knows neither HTTP nor which executor computes.

mod answer;
mod cache_events;
mod clock;
mod config;
mod context;
mod engine;
mod executor_loop;
mod gateway_loop;
mod handoff;
mod journal;
mod latch;
mod limits;
mod mailbox;
pub mod metrics;
mod outputs;
mod panics;
mod permit;
mod policies;
mod remote;
mod replica_loop;
mod replica_wake;
mod request;
#[cfg(test)]
mod rig;
mod settle;
mod status;
mod story;
mod stream;
mod wiring;

pub use cache_events::CacheFollower;
pub use clock::Clock;
pub use config::{EngineConfig, EngineLimits, ServedModel, Vocabulary};
pub use context::SubmissionFault;
pub use engine::{DrainReport, Engine, EngineError, SubmitError};
pub use handoff::{EndpointError, HandoffSetup, NixlTransfer, PartyError, TransferSettings, Way};
pub use journal::JournalConfig;
pub use metrics::{Metrics, outcome_labels};
pub use penstock_kv_events::{ConsumerSettings, KvEventsError, PublisherSettings, Trust};
pub use penstock_transport::Kind as TransferKind;
pub use policies::activation::{Activation, ActivationError};
pub use policies::inputs::{InputsKept, KeptFor, KeptTable, Names};
pub use policies::log::{DECISIONS_KEPT_MAX, DecisionRecord, DecisionsConfig, FIRST_ROWS, Proposal};
pub use policies::seats::{Machine, Memory, NATIVE_WORDS, PolicySource, PreparedPolicies, SeatedPolicies, TakenOver};
pub use remote::{JoinError, Joined, RefusedGateway, WIRE_VERSION, Worker, WorkerIdentity, gateway_greeting};
pub use replica_loop::Role;
pub use request::{DeliveredToken, RequestEvent, Submission, Ticket};
pub use status::{QueueStatus, ReplicaState, ReplicaStatus, Status};
pub use story::{Happened, MOMENTS_MAX, Moment};
pub use stream::{EventStream, RecvTimeout};
