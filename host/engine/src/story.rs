//! What happened to each request, moment by moment, at the gateway: who asks later why, is told from here.
//!
//! Numbers only, as in the decision log: no prompt, no tenant's name.

use penstock_base::{
    CancelCause, ClassRank, Duration, Generation, Instant, Outcome, RefuseReason, ReplicaId, RequestId,
};
use penstock_sched::gateway::{GatewayEffect, GatewayEvent, GatewayInput, RANKED_TOLD, RoutingMade};
use penstock_sched::message::{FromReplica, Usage};

/// Moments kept: ten or so a request, so that about as many requests can be told of as decisions are kept.
pub const MOMENTS_MAX: usize = 32_768;

/// Something that happened to a request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Moment {
    /// The gateway's time.
    pub at: Instant,
    /// To which.
    pub request: RequestId,
    /// Level of the overload stance in force.
    pub level: u8,
    /// What.
    pub what: Happened,
}

/// What can happen to a request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Happened {
    /// It arrived.
    Arrived {
        /// Prompt length.
        input_tokens: u32,
        /// Output cap asked for, of each sequence.
        max_output_tokens: u32,
        /// Answers asked for.
        sequences: u16,
        /// Class.
        class: ClassRank,
        /// Time until its deadline; [`Duration::MAX`] is none.
        deadline: Duration,
    },
    /// The gateway's verdict: 0 admit, 1 defer, 2 degrade, 3 reject, with a refusal's code.
    Verdict {
        /// See above.
        verdict: u8,
        /// See above.
        reason: u16,
    },
    /// It waits in its queue.
    Queued {
        /// Output cap in force.
        max_output_tokens: u32,
        /// The policy lowered it.
        degraded: bool,
    },
    /// What became of an answer about where it runs.
    Routed {
        /// Number of the routing call.
        call: u64,
        /// The first replicas of the ranking; [`NO_REPLICA`](penstock_sched::gateway::NO_REPLICA) is none.
        ranked: [ReplicaId; RANKED_TOLD],
        /// What the gateway made of it.
        made: RoutingMade,
    },
    /// It was handed to a replica.
    Dispatched {
        /// Which.
        replica: ReplicaId,
        /// Which attempt.
        attempt: u16,
        /// Generation of the policies that placed it.
        generation: Generation,
    },
    /// The replica did not take it.
    Refused {
        /// Which.
        replica: ReplicaId,
        /// Why.
        reason: RefuseReason,
    },
    /// The replica began with it.
    Started {
        /// Which.
        replica: ReplicaId,
        /// Prompt tokens that were cached there.
        cached_tokens: u32,
    },
    /// Its first token.
    FirstToken,
    /// A sequence of it gave its blocks back.
    Preempted {
        /// Where.
        replica: ReplicaId,
        /// Blocks that it gave back.
        freed_blocks: u32,
        /// Tokens that were computed for the sequence.
        computed_tokens: u32,
        /// 0 shortage of blocks, 1 an overload action, 2 a drain.
        cause_code: u8,
    },
    /// It goes on.
    Resumed {
        /// Where.
        replica: ReplicaId,
        /// Tokens computed again.
        recomputed_tokens: u32,
    },
    /// Its end was asked for.
    CancelAsked(CancelCause),
    /// Its replica was lost.
    ReplicaLost {
        /// Which.
        replica: ReplicaId,
    },
    /// It leaves its replica with output behind it, and goes on at another one; what it had is computed again there.
    Migrated {
        /// Where it was.
        from: ReplicaId,
    },
    /// It is over.
    Ended {
        /// How.
        outcome: Outcome,
        /// What is billed.
        usage: Usage,
        /// When another try makes sense; 0 is no word on it.
        retry_after_ms: u32,
    },
}

/// Takes moments down at the gateway's loop.
#[derive(Debug, Default)]
pub(crate) struct Teller {
    level: u8,
    /// Not in the ring yet.
    pub waiting: Vec<Moment>,
}

/// Moments that wait for a reader to let go of the ring; beyond it the newest are left out.
const WAITING_MAX: usize = 4_096;

impl Teller {
    /// Something happened to a request.
    pub fn tell(&mut self, at: Instant, request: RequestId, what: Happened) {
        if self.waiting.len() < WAITING_MAX {
            self.waiting.push(Moment { at, request, level: self.level, what });
        }
    }

    /// What an input says of a request.
    pub fn of_input(&mut self, at: Instant, input: &GatewayInput) {
        let (request, what) = match input {
            GatewayInput::Arrive(manifest) => {
                let what = Happened::Arrived {
                    input_tokens: manifest.input_tokens,
                    max_output_tokens: manifest.max_output_tokens,
                    sequences: manifest.sequences,
                    class: manifest.class,
                    deadline: at.until(manifest.deadline),
                };
                (manifest.request, what)
            }
            GatewayInput::Cancel { request, cause } => (*request, Happened::CancelAsked(*cause)),
            GatewayInput::Replica { replica, message, .. } => match of_message(*replica, message) {
                Some(told) => told,
                None => return,
            },
            _ => return,
        };
        self.tell(at, request, what);
    }

    /// What an effect says of a request.
    pub fn of_effect(&mut self, at: Instant, effect: &GatewayEffect) {
        match effect {
            GatewayEffect::Queued { request, max_output_tokens, degraded } => {
                let what = Happened::Queued { max_output_tokens: *max_output_tokens, degraded: *degraded };
                self.tell(at, *request, what);
            }
            GatewayEffect::Dispatched { request, replica, attempt, generation, .. } => {
                let (replica, attempt, generation) = (*replica, *attempt, *generation);
                self.tell(at, *request, Happened::Dispatched { replica, attempt, generation });
            }
            GatewayEffect::Ended { request, outcome, usage, retry_after_ms } => {
                let (outcome, usage, retry_after_ms) = (*outcome, *usage, *retry_after_ms);
                self.tell(at, *request, Happened::Ended { outcome, usage, retry_after_ms });
            }
            GatewayEffect::Event(GatewayEvent::Admission { request, verdict, reason }) => {
                self.tell(at, *request, Happened::Verdict { verdict: *verdict, reason: *reason });
            }
            GatewayEffect::Event(GatewayEvent::Routed { request, call, ranked, made }) => {
                self.tell(at, *request, Happened::Routed { call: *call, ranked: *ranked, made: *made });
            }
            GatewayEffect::Event(GatewayEvent::Migrated { request, from, .. }) => {
                self.tell(at, *request, Happened::Migrated { from: *from });
            }
            GatewayEffect::Event(GatewayEvent::Stance { level }) => self.level = *level,
            GatewayEffect::Send { .. } | GatewayEffect::Event(_) => {}
        }
    }
}

fn of_message(replica: ReplicaId, message: &FromReplica) -> Option<(RequestId, Happened)> {
    Some(match *message {
        FromReplica::Started { request, cached_tokens, .. } => (request, Happened::Started { replica, cached_tokens }),
        FromReplica::Progress(progress) if progress.first_token => (progress.request, Happened::FirstToken),
        FromReplica::Preempted { request, computed_tokens, freed_blocks, cause_code, .. } => {
            (request, Happened::Preempted { replica, freed_blocks, computed_tokens, cause_code })
        }
        FromReplica::Resumed { request, recomputed_tokens, .. } => {
            (request, Happened::Resumed { replica, recomputed_tokens })
        }
        FromReplica::Refuse { request, reason, .. } => (request, Happened::Refused { replica, reason }),
        _ => return None,
    })
}
