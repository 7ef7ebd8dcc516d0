//! How requests end: what the client is told, once, and what is given back, when it is known to be back. The two may lie apart.

use penstock_base::{Outcome, Phase, Refusal};
use penstock_policy_api::{Finished, Refused, Settled};

use super::State;
use super::io::{GatewayEffect, GatewayEvent};
use super::request::{Compute, Place, Request};
use super::seats::Cx;
use super::table::NONE;
use crate::message::{ToReplica, Usage};

/// An end: how, with what, and when to come again.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct End {
    /// How.
    pub outcome: Outcome,
    /// What was used.
    pub usage: Usage,
    /// For refusals that may be retried; 0 is none.
    pub retry_after_ms: u32,
}

impl End {
    /// An end of work that used nothing.
    pub fn unused(outcome: Outcome) -> Self {
        Self { outcome, usage: Usage::default(), retry_after_ms: 0 }
    }
}

/// Kind and detail in one number, for facts and digests.
pub(super) fn outcome_code(outcome: Outcome) -> u64 {
    let (kind, detail) = outcome.code();
    u64::from(kind) << 16 | u64::from(detail)
}

impl Request {
    /// What is known here of what it used.
    pub fn usage(&self) -> Usage {
        let run = &self.run;
        let prompt = if run.started || self.carried_output > 0 { self.manifest.input_tokens } else { 0 };
        Usage {
            prompt_tokens: prompt,
            cached_tokens: run.cached_tokens.min(prompt),
            output_tokens: u32::try_from(run.output_tokens).unwrap_or(u32::MAX).saturating_add(self.carried_output),
            preemptions: run.preemptions,
        }
    }

    /// Where it is when its time runs out.
    pub fn phase(&self) -> Phase {
        match self.compute {
            Compute::Accepted | Compute::Queued => Phase::Queue,
            Compute::Prefilling => Phase::Prefill,
            _ => Phase::Decode,
        }
    }
}

impl State {
    /// Ends a live request before its replica did, or before it had one. Idempotent: a request that is over stays as it ended.
    pub(super) fn end_early(&mut self, slot: u32, end: End, cx: &mut Cx<'_>) {
        let request = &mut self.requests.table[slot];
        if !request.move_to(Compute::of(end.outcome)) {
            return;
        }
        match request.place {
            // Nobody decodes it yet: the hand-off's parties let go of it, and hold nothing that would have to be waited for.
            Place::Running { .. } if request.run.transfer.is_some() => {
                let end = End { usage: request.usage(), ..end };
                self.cancel_handoff(slot, cx);
                self.leave_replica(slot);
                self.tell_end(slot, end, cx);
                self.settle(slot, &end, cx);
            }
            Place::Running { replica } => {
                let (id, attempt) = (request.manifest.request, request.attempt);
                request.place = Place::Settling { replica };
                let end = End { usage: request.usage(), ..end };
                self.requests.retime(slot, &self.config);
                self.requests.tpot.remove(slot);
                let facts = &self.replicas.table[replica].facts;
                cx.effects.push(GatewayEffect::Send {
                    replica: facts.replica,
                    epoch: facts.epoch,
                    message: ToReplica::Cancel { request: id, attempt, outcome: end.outcome },
                });
                self.tell_end(slot, end, cx);
            }
            Place::Deferred => {
                self.leave_deferred(slot);
                self.tell_end(slot, end, cx);
                self.settle(slot, &end, cx);
            }
            Place::Queued | Place::Held | Place::Reserved { .. } => {
                // What it had at a replica before counts.
                let end = if request.carried_output > 0 { End { usage: request.usage(), ..end } } else { end };
                self.leave_queue(slot);
                self.tell_end(slot, end, cx);
                self.settle(slot, &end, cx);
            }
            Place::Settling { .. } => {}
        }
    }

    /// Its replica says that all of it has ended, or is lost with it: what it held is back. The client is told unless it was before.
    pub(super) fn end_at_replica(&mut self, slot: u32, end: End, cx: &mut Cx<'_>) {
        self.leave_replica(slot);
        if self.requests.table[slot].move_to(Compute::of(end.outcome)) {
            self.tell_end(slot, end, cx);
        }
        self.settle(slot, &end, cx);
    }

    /// The client is told, exactly once.
    fn tell_end(&mut self, slot: u32, end: End, cx: &mut Cx<'_>) {
        self.requests.table[slot].outcome = Some(end.outcome);
        let request = &self.requests.table[slot];
        let id = request.manifest.request;
        let missed = self.has_missed(request, end.outcome);
        let (class, manifest) = (request.class, request.manifest.clone());
        let ttft =
            if request.has_emitted() { request.first_token_at.since(manifest.arrived).as_us() } else { u64::MAX };
        self.digest.add(&[6, id.0, outcome_code(end.outcome)]);
        let admitted = self.requests.table[slot].flow != NONE;
        if admitted {
            self.overload.ended(class, missed);
        }
        self.counters.ended += 1;
        self.watch.moved(self.now);
        if end.outcome.is_success() && end.usage.output_tokens > 0 {
            let each = u64::from(end.usage.output_tokens).div_ceil(u64::from(manifest.sequences.max(1)));
            self.outputs.learn(manifest.tenant, manifest.class, manifest.input_tokens, each);
        }
        cx.effects.push(GatewayEffect::Ended {
            request: id,
            outcome: end.outcome,
            usage: end.usage,
            retry_after_ms: end.retry_after_ms,
        });
        let now_us = self.now.as_us();
        if let Outcome::Refused(refusal) = end.outcome {
            self.tell_refused(&manifest, refusal, cx);
        }
        if !admitted {
            return;
        }
        self.tell_served_of(self.requests.table[slot].flow, cx);
        let fact = Finished {
            request_id: id.0,
            flow_id: manifest.flow.0,
            outcome_code: outcome_code(end.outcome),
            output_tokens: u64::from(end.usage.output_tokens),
            ttft_us: ttft,
            age_us: self.now.since(manifest.arrived).as_us(),
        };
        self.tell(fact.at(now_us), cx);
    }

    /// A refusal is a fact and counts for overload.
    pub(super) fn tell_refused(&mut self, manifest: &penstock_base::Manifest, refusal: Refusal, cx: &mut Cx<'_>) {
        self.overload.refused();
        let fact = Refused {
            request_id: manifest.request.0,
            flow_id: manifest.flow.0,
            reason_code: u64::from(refusal.code()),
            retry_flag: u64::from(manifest.retry),
        };
        self.tell(fact.at(self.now.as_us()), cx);
    }

    /// Did it end outside what was promised, as far as something was?
    fn has_missed(&self, request: &Request, outcome: Outcome) -> bool {
        let ttft_target = self.ttft_target(request);
        let ttft_at = request.first_token_at.min(self.now);
        let late = ttft_at.since(request.manifest.arrived) > ttft_target;
        let slow = request.manifest.slo_tpot.0 != u64::MAX && request.run.output_tokens > 1 && {
            let each = request.run.output_tokens / u64::from(request.manifest.sequences.max(1));
            let spent = self.now.since(request.first_token_at).0;
            spent > request.manifest.slo_tpot.0.saturating_mul(each.saturating_sub(1).max(1))
        };
        match outcome {
            Outcome::Stop | Outcome::Length => late || slow,
            Outcome::Cancelled(_) => late,
            Outcome::Refused(_) | Outcome::TimedOut(_) | Outcome::Failed(_) => true,
        }
    }

    /// First-token target of the request, or of its class.
    pub(super) fn ttft_target(&self, request: &Request) -> penstock_base::Duration {
        let own = request.manifest.slo_ttft;
        if own == penstock_base::Duration::MAX { self.config.class_slo_ttft[request.class.index()] } else { own }
    }

    /// What it reserved comes back, what it used is charged, once: the request is forgotten here.
    fn settle(&mut self, slot: u32, end: &End, cx: &mut Cx<'_>) {
        let request = &self.requests.table[slot];
        let (tenant, flow, reserved) = (request.tenant, request.flow, request.reserved_tokens);
        let used = u64::from(end.usage.prompt_tokens) + u64::from(end.usage.output_tokens);
        let manifest = request.manifest.clone();
        let told = request.outcome.unwrap_or(end.outcome);
        self.ledger.change(tenant, |tenant| {
            tenant.reserved_tokens -= reserved;
            tenant.charged_tokens = tenant.charged_tokens.saturating_add(used);
            tenant.live_requests -= 1;
        });
        let fact = Settled {
            request_id: manifest.request.0,
            tenant_id: manifest.tenant.0,
            used_tokens: used,
            refund_tokens: reserved.saturating_sub(used),
            outcome_code: outcome_code(told),
            flow_id: manifest.flow.0,
        };
        self.requests.forget(slot);
        self.tell(fact.at(self.now.as_us()), cx);
        if self.flows.table.get(flow).is_some() {
            self.flow_moved(flow, cx);
        }
        self.capacity_freed = true;
    }

    /// Timers that have come.
    pub(super) fn run_timers(&mut self, cx: &mut Cx<'_>) {
        while let Some(slot) = self.requests.due(self.now) {
            let request = &self.requests.table[slot];
            if request.manifest.deadline <= self.now {
                let outcome = Outcome::TimedOut(request.phase());
                self.end_early(slot, End::unused(outcome), cx);
                continue;
            }
            let waits_too_long =
                request.place.is_waiting() && super::requests::queue_end(request, &self.config) <= self.now;
            match request.place {
                _ if waits_too_long => self.end_early(slot, End::unused(Outcome::TimedOut(Phase::Queue)), cx),
                Place::Deferred => self.ask_deferred_again(slot, cx),
                Place::Held => {
                    self.unhold(slot);
                    self.tell_in_vain(slot, cx);
                }
                Place::Reserved { .. } => self.end_reservation(slot, cx),
                Place::Queued | Place::Running { .. } | Place::Settling { .. } => {
                    self.requests.retime(slot, &self.config)
                }
            }
            debug_assert!(self.requests.table.get(slot).is_none_or(|_| self.requests.due(self.now) != Some(slot)));
        }
    }

    /// Counted, without effect.
    pub(super) fn stale(&mut self, cx: &mut Cx<'_>) {
        self.counters.stale += 1;
        cx.effects.push(GatewayEffect::Event(GatewayEvent::Stale));
    }

    /// `Retry-After` for a full or lost pool: how long what waits would take at the pace of the pool, a second where
    /// that is not known.
    pub(super) fn retry_after_ms(&self) -> u32 {
        let rate = self.replicas.pool.prefill_tokens_per_sec;
        let ms = self.queue.tokens.saturating_mul(1_000).checked_div(rate).unwrap_or(0);
        u32::try_from(ms).unwrap_or(u32::MAX).clamp(1_000, 60_000)
    }
}
