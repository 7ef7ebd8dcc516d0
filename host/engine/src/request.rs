//! What the edge hands in for one request, and what it gets back.

use std::sync::Arc;

use penstock_base::{
    ClassRank, Duration, FlowId, Generation, Instant, Outcome, Priority, RequestId, SessionId, TenantId, TenantTerms,
    Traits, TrustGroup,
};
use penstock_exec::SamplingParams;
use penstock_sched::message::Usage;

/// One validated, authenticated, tokenised request.
#[derive(Clone, Debug)]
pub struct Submission {
    /// Who pays.
    pub tenant: TenantId,
    /// The tenant's terms now.
    pub terms: TenantTerms,
    /// Unit of fairness.
    pub flow: FlowId,
    /// Conversation; 0 is none.
    pub session: SessionId,
    /// Cache-sharing domain, derived from the authenticated tenant.
    pub trust: TrustGroup,
    /// Class after clamping to the tenant's ceiling.
    pub class: ClassRank,
    /// Order inside the class.
    pub priority: Priority,
    /// The prompt, at least one token.
    pub prompt: Arc<[u32]>,
    /// Answers wanted, 1..=8. Each samples with a seed of its own, derived from `sampling.seed` and its index.
    pub sequences: u16,
    /// Output cap of each answer.
    pub max_output_tokens: u32,
    /// How to sample.
    pub sampling: Arc<SamplingParams>,
    /// Strings that end an answer; they are not delivered.
    pub stop_strings: Arc<[String]>,
    /// When the complete request had been received.
    pub arrived: Instant,
    /// After this nothing more is computed.
    pub deadline: Instant,
    /// Declared first-token target.
    pub slo_ttft: Duration,
    /// Declared per-token target.
    pub slo_tpot: Duration,
    /// What the host may do with it.
    pub traits: Traits,
    /// Retention hint for its cached blocks, 0..=100.
    pub retention: u8,
    /// A retry of work refused within the last minute.
    pub retry: bool,
}

/// What happens to a request, in order. After [`RequestEvent::Ended`] nothing follows.
#[derive(Clone, Debug)]
pub enum RequestEvent {
    /// It entered the queue.
    Queued {
        /// Output cap in force.
        max_output_tokens: u32,
        /// The cap is lower than asked for.
        degraded: bool,
    },
    /// It was placed.
    Dispatched {
        /// Policy generation that placed it.
        generation: Generation,
    },
    /// Text of one answer. Never splits a character, never contains a stop string or a part of one that may still complete.
    Text {
        /// Which answer, 0..n.
        choice: u16,
        /// What to append; may be empty when only tokens moved.
        text: String,
        /// The tokens this text completes, with their log-probabilities when asked for.
        tokens: Vec<DeliveredToken>,
    },
    /// One answer is complete.
    ChoiceEnded {
        /// Which answer.
        choice: u16,
        /// How.
        outcome: Outcome,
        /// Output tokens that count.
        tokens: u32,
    },
    /// The request is over.
    Ended {
        /// How.
        outcome: Outcome,
        /// What is billed.
        usage: Usage,
        /// Milliseconds after which a refused request may come again; 0 is none.
        retry_after_ms: u32,
    },
}

/// One token that reached the client.
#[derive(Clone, PartialEq, Debug)]
pub struct DeliveredToken {
    /// Id.
    pub id: u32,
    /// Its exact bytes.
    pub bytes: Vec<u8>,
    /// Natural log of its probability; 0 when not asked for.
    pub logprob: f32,
    /// The likeliest tokens at its position: id, bytes, log-probability.
    pub top: Vec<(u32, Vec<u8>, f32)>,
}

/// Names a submitted request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Ticket {
    /// Its id.
    pub request: RequestId,
}
