//! May it enter? The pipeline of an arrival, in this order: never fits, draining, too late, quota, stance, policy, queue.
//!
//! Everything before the policy costs no policy call; nothing is reserved before the verdict, and then quota and queue place are taken
//! in the same step, so that two requests never share one.

use alloc::sync::Arc;

use penstock_base::limits::{DEFER_MIN, DEFERRALS_MAX, EARLY_ASKS_MAX, EARLY_ASKS_STEP_MAX, SEQUENCES_MAX};
use penstock_base::{ClassRank, Duration, Instant, Manifest, Outcome, Phase, Refusal, RequestId, Traits};
use penstock_policy_api::{AdmissionDecision, AdmissionSignal, Admitted, Asked, Decision, InContext, RequestRecord};

use super::State;
use super::finish::End;
use super::io::{GatewayEffect, GatewayEvent, fallback_code};
use super::ledger::OverQuota;
use super::request::{Need, Place, Request};
use super::seats::Cx;
use super::signals::{AdmissionFacts, AskedArrival};
use super::table::NONE;
use crate::message::Usage;

/// Verdicts by number, as events and facts carry them.
const ADMIT: u8 = 0;
/// See [`ADMIT`].
const DEFER: u8 = 1;
/// See [`ADMIT`].
const DEGRADE: u8 = 2;
/// See [`ADMIT`].
const REJECT: u8 = 3;

/// How a request is let in.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Grant {
    max_output_tokens: u32,
    reserve_output_tokens: u32,
    class: ClassRank,
    verdict: u8,
}

impl State {
    /// A complete, authenticated, tokenised request.
    pub(super) fn arrive(&mut self, manifest: Arc<Manifest>, cx: &mut Cx<'_>) {
        let id = manifest.request;
        if self.requests.table.find(&id).is_some() || self.requests.finished.find(&id).is_some() {
            return self.stale(cx);
        }
        self.counters.arrived += 1;
        self.overload.arrived(manifest.class, manifest.retry);
        let tenant = match self.before_policy(&manifest, cx) {
            Ok(tenant) => tenant,
            Err(end) => return self.turn_away(&manifest, end, cx),
        };
        let request = Request::new(manifest, tenant, self.now);
        let Some(inserted) = self.requests.table.insert(id, request) else {
            debug_assert!(false, "there is room for everything that the bounds let live, and one more");
            return;
        };
        let slot = inserted.slot;
        self.ledger.change(tenant, |tenant| tenant.live_requests += 1);
        self.deferred.push_back(&mut self.requests.outer, slot);
        self.deferred_tokens += u64::from(self.requests.table[slot].manifest.input_tokens);
        self.ask_admission(slot, cx);
    }

    /// What the host itself refuses. The tenant's slot, where nothing of it does.
    fn before_policy(&mut self, manifest: &Manifest, cx: &mut Cx<'_>) -> Result<u32, End> {
        if !self.may_ever_fit(manifest) {
            return Err(End::unused(Outcome::Refused(Refusal::NeverFits)));
        }
        let refused = |refusal, retry_after_ms| End { retry_after_ms, ..End::unused(Outcome::Refused(refusal)) };
        if self.draining {
            return Err(refused(Refusal::Draining, 1_000));
        }
        if manifest.deadline <= self.now {
            return Err(End::unused(Outcome::TimedOut(Phase::Queue)));
        }
        let tenant = self.ledger.open(manifest.tenant, &manifest.terms);
        let tenant = tenant.ok_or_else(|| refused(Refusal::QueueFull, self.retry_after_ms()))?;
        let tokens = reservation(manifest, manifest.max_output_tokens.min(self.capped_output(manifest)));
        if let Err(over) = self.within_quota(tenant, tokens, false) {
            return Err(refused(Refusal::Quota, self.quota_retry_ms(over)));
        }
        self.stance_on_arrival(manifest, cx).map_err(|refusal| refused(refusal, self.retry_after_ms()))?;
        Ok(tenant)
    }

    /// Malformed, longer than the context, or larger than every known replica: no wait would help.
    fn may_ever_fit(&self, manifest: &Manifest) -> bool {
        let sane = (1..=SEQUENCES_MAX).contains(&manifest.sequences)
            && manifest.input_tokens > 0
            && manifest.max_output_tokens > 0;
        let longest = u64::from(manifest.input_tokens) + u64::from(manifest.max_output_tokens);
        if !sane || longest > u64::from(self.config.context_tokens_max) {
            return false;
        }
        let fits_one = self.fits_any(manifest, manifest.max_output_tokens);
        self.replicas.slots().is_empty() || fits_one
    }

    /// Could some known replica, ready or draining, ever take it?
    pub(super) fn fits_any(&self, manifest: &Manifest, max_output_tokens: u32) -> bool {
        let (need, finish, longest) = self.sizes_of(manifest, max_output_tokens);
        self.replicas.iter().any(|(_, replica)| replica.fits(&need, finish, longest))
    }

    /// What a replica must have at least to take it: slots, blocks to finish in, the longest sequence.
    pub(super) fn sizes_of(&self, manifest: &Manifest, max_output_tokens: u32) -> (Need, u64, u64) {
        let block = self.config.block_size_tokens;
        let need = Need { slots: u32::from(manifest.sequences), prefill_tokens: 1, blocks: 0 };
        let finish = Manifest::need_blocks(manifest.input_tokens, max_output_tokens, manifest.sequences, block);
        (need, finish, u64::from(manifest.input_tokens) + u64::from(max_output_tokens))
    }

    /// Ends an arrival that holds nothing yet.
    fn turn_away(&mut self, manifest: &Manifest, end: End, cx: &mut Cx<'_>) {
        let reason = match end.outcome {
            Outcome::Refused(refusal) => refusal,
            _ => Refusal::Deadline,
        };
        self.note_verdict(manifest.request, (REJECT, reason.code()), cx);
        self.counters.ended += 1;
        self.digest.add(&[1, manifest.request.0, u64::from(REJECT), u64::from(reason.code())]);
        cx.effects.push(GatewayEffect::Ended {
            request: manifest.request,
            outcome: end.outcome,
            usage: Usage::default(),
            retry_after_ms: end.retry_after_ms,
        });
        self.tell_refused(manifest, reason, cx);
    }

    fn note_verdict(&mut self, request: RequestId, (verdict, reason): (u8, u16), cx: &mut Cx<'_>) {
        cx.effects.push(GatewayEffect::Event(GatewayEvent::Admission { request, verdict, reason }));
    }

    /// A policy's answer was not used, or not as it was.
    pub(super) fn note_checked<T>(&mut self, decision: Decision, asked: &Asked<T>, cx: &mut Cx<'_>) {
        let (decision, call) = (decision as u8, asked.call);
        match asked.fallback {
            Some(reason) if reason.is_strike() => {
                self.counters.fallbacks += 1;
                let event = GatewayEvent::Fallback { decision, call, reason: fallback_code(reason) };
                cx.effects.push(GatewayEffect::Event(event));
            }
            // What the contract changes about the default's own answer is nobody's doing.
            Some(_) => {}
            None => {
                if let Some(change) = asked.changed {
                    let event = GatewayEvent::Changed { decision, call, change: change as u8 };
                    cx.effects.push(GatewayEffect::Event(event));
                }
            }
        }
    }

    fn quota_retry_ms(&self, over: OverQuota) -> u32 {
        let ms = match over {
            OverQuota::Requests => 1_000,
            // The lease is what is missing, and may come at any moment.
            OverQuota::Tokens if !self.share.is_held(self.now) => 1_000,
            OverQuota::Tokens => self.ledger.window_left(self.now).as_ms(),
        };
        u32::try_from(ms).unwrap_or(u32::MAX).clamp(1_000, 60_000)
    }

    /// Asks about a request in the list of deferred ones, and carries the verdict out.
    fn ask_admission(&mut self, slot: u32, cx: &mut Cx<'_>) {
        self.deliver_facts(Decision::Admission, cx);
        let request = &self.requests.table[slot];
        let manifest = request.manifest.clone();
        let (tenant, deferrals) = (request.tenant, request.deferrals);
        let max_output_tokens = self.capped_output(&manifest);
        let record = RequestRecord { max_output_tokens, ..request.record() };
        let seats = &mut *cx.seats;
        let names = &cx.policies.admission().describe().context;
        let wants_overlap = [AdmissionSignal::CachedPrefixTokens, AdmissionSignal::EstTtftUs]
            .iter()
            .any(|signal| names.position(InContext::Own(*signal)).is_some());
        let overlaps = &mut seats.scratch.overlaps;
        if wants_overlap {
            self.directory.overlaps(&manifest.keys, overlaps);
        }
        let overlaps = wants_overlap.then_some(&*overlaps);
        let asked = AskedArrival { manifest: &manifest, max_output_tokens, tenant, deferrals, overlaps };
        let facts = AdmissionFacts { state: self, asked };
        let asked = seats.admission.ask(cx.policies.admission(), self.now, &record, deferrals, &facts);
        self.note_checked(Decision::Admission, &asked, cx);
        let request = &mut self.requests.table[slot];
        request.asked_at = self.now;
        let id = manifest.request.0;
        match asked.decision {
            AdmissionDecision::Admit { reserve_output_tokens, class } => {
                self.digest.add(&[1, id, u64::from(ADMIT), u64::from(reserve_output_tokens), u64::from(class.get())]);
                let grant = Grant { max_output_tokens, reserve_output_tokens, class, verdict: ADMIT };
                self.let_in(slot, grant, cx);
            }
            AdmissionDecision::Degrade { max_output_tokens, reserve_output_tokens, class } => {
                self.digest.add(&[1, id, u64::from(DEGRADE), u64::from(max_output_tokens), u64::from(class.get())]);
                let grant = Grant { max_output_tokens, reserve_output_tokens, class, verdict: DEGRADE };
                self.let_in(slot, grant, cx);
            }
            AdmissionDecision::Defer { for_us } => {
                self.digest.add(&[1, id, u64::from(DEFER), u64::from(for_us)]);
                self.defer(slot, Duration::from_us(u64::from(for_us)), cx);
            }
            AdmissionDecision::Reject { reason, retry_after_ms } => {
                self.digest.add(&[1, id, u64::from(REJECT), u64::from(reason.code())]);
                self.reject(slot, reason, retry_after_ms, cx);
            }
        }
    }

    fn reject(&mut self, slot: u32, reason: Refusal, retry_after_ms: u32, cx: &mut Cx<'_>) {
        let request = self.requests.table[slot].manifest.request;
        self.note_verdict(request, (REJECT, reason.code()), cx);
        let end = End { retry_after_ms, ..End::unused(Outcome::Refused(reason)) };
        self.end_early(slot, end, cx);
    }

    /// Takes quota, flow and queue place at once, or nothing.
    fn let_in(&mut self, slot: u32, grant: Grant, cx: &mut Cx<'_>) {
        let request = &self.requests.table[slot];
        let manifest = request.manifest.clone();
        let (tenant, deferrals) = (request.tenant, request.deferrals);
        if !self.queue_has_room(manifest.input_tokens) {
            if manifest.traits.has(Traits::MAY_DEFER) && deferrals < DEFERRALS_MAX {
                return self.defer(slot, DEFER_MIN, cx);
            }
            return self.reject(slot, Refusal::QueueFull, self.retry_after_ms(), cx);
        }
        let tokens = reservation(&manifest, grant.max_output_tokens);
        if let Err(over) = self.within_quota(tenant, tokens, true) {
            return self.reject(slot, Refusal::Quota, self.quota_retry_ms(over), cx);
        }
        let weight_ppm = manifest.terms.weight_ppm;
        let opened = self.flows.open(manifest.flow, manifest.tenant, manifest.class, weight_ppm, self.now);
        let Some((flow, gone)) = opened else {
            return self.reject(slot, Refusal::QueueFull, self.retry_after_ms(), cx);
        };
        if let Some(gone) = gone {
            self.flow_gone(gone, cx);
        }
        self.leave_deferred(slot);
        self.ledger.change(tenant, |tenant| tenant.reserved_tokens += tokens);
        let expected = self.expected_output(&manifest, grant.max_output_tokens);
        let request = &mut self.requests.table[slot];
        request.flow = flow;
        request.class = grant.class;
        request.max_output_tokens = grant.max_output_tokens;
        request.reserve_output_tokens = grant.reserve_output_tokens.min(grant.max_output_tokens);
        request.expected_output_tokens =
            expected.and_then(|tokens| u32::try_from(tokens).ok()).unwrap_or(grant.max_output_tokens);
        request.reserved_tokens = tokens;
        let blocks = request.need_blocks(self.config.block_size_tokens);
        self.note_verdict(manifest.request, (grant.verdict, 0), cx);
        cx.effects.push(GatewayEffect::Queued {
            request: manifest.request,
            max_output_tokens: grant.max_output_tokens,
            degraded: grant.max_output_tokens < manifest.max_output_tokens,
        });
        self.enter_queue(slot, cx);
        self.tell_admitted(&manifest, tokens, blocks, grant.verdict, cx);
    }

    fn tell_admitted(&mut self, manifest: &Manifest, tokens: u64, blocks: u64, verdict: u8, cx: &mut Cx<'_>) {
        let fact = Admitted {
            request_id: manifest.request.0,
            tenant_id: manifest.tenant.0,
            reserve_tokens: tokens,
            reserve_blocks: blocks,
            verdict_code: u64::from(verdict),
            flow_id: manifest.flow.0,
        };
        self.tell(fact.at(self.now.as_us()), cx);
    }

    /// It stays among the deferred, as far as those are within their bounds.
    fn defer(&mut self, slot: u32, for_: Duration, cx: &mut Cx<'_>) {
        let beyond = self.deferred.len > self.config.deferred_requests_max
            || self.deferred_tokens > self.config.queue_tokens_max;
        if beyond {
            return self.reject(slot, Refusal::QueueFull, self.retry_after_ms(), cx);
        }
        let request = self.requests.table[slot].manifest.request;
        self.note_verdict(request, (DEFER, 0), cx);
        let request = &mut self.requests.table[slot];
        request.deferrals += 1;
        request.until = self.now + for_;
        self.requests.retime(slot, &self.config);
    }

    /// Its time is up, or capacity was freed.
    pub(super) fn ask_deferred_again(&mut self, slot: u32, cx: &mut Cx<'_>) {
        let request = &self.requests.table[slot];
        let tokens = reservation(&request.manifest, self.capped_output(&request.manifest));
        if let Err(over) = self.within_quota(request.tenant, tokens, true) {
            return self.reject(slot, Refusal::Quota, self.quota_retry_ms(over), cx);
        }
        self.ask_admission(slot, cx);
    }

    /// Takes a request out of the list of deferred ones.
    pub(super) fn leave_deferred(&mut self, slot: u32) {
        let request = &mut self.requests.table[slot];
        debug_assert_eq!(request.place, Place::Deferred);
        request.until = Instant::NEVER;
        self.deferred_tokens -= u64::from(request.manifest.input_tokens);
        self.deferred.remove(&mut self.requests.outer, slot);
    }

    /// When freed capacity lets the first deferred request be asked about; never when it does not.
    pub(super) fn early_ask_due(&self) -> Instant {
        let Some(head) = self.requests.table.get(self.deferred.head).filter(|_| self.capacity_freed) else {
            return Instant::NEVER;
        };
        if head.deferrals >= EARLY_ASKS_MAX {
            Instant::NEVER
        } else {
            head.asked_at.max(self.early_asked_at) + DEFER_MIN
        }
    }

    /// Capacity was freed: the first deferred requests are asked about again, until one stays deferred.
    pub(super) fn ask_deferred_early(&mut self, cx: &mut Cx<'_>) {
        if self.deferred.head == NONE || self.early_ask_due() > self.now {
            return;
        }
        self.capacity_freed = false;
        self.early_asked_at = self.now;
        for _ in 0..EARLY_ASKS_STEP_MAX {
            let slot = self.deferred.head;
            let Some(request) = self.requests.table.get(slot) else { return };
            if request.deferrals >= EARLY_ASKS_MAX || request.asked_at + DEFER_MIN > self.now {
                return;
            }
            self.ask_deferred_again(slot, cx);
            if self.deferred.head == slot {
                return;
            }
        }
    }
}

/// Tokens reserved of the tenant's window: input and the full cap of all sequences.
fn reservation(manifest: &Manifest, max_output_tokens: u32) -> u64 {
    u64::from(manifest.input_tokens) + u64::from(max_output_tokens) * u64::from(manifest.sequences)
}
