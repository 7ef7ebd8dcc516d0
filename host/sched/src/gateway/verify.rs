//! Is the machine sound while it serves? The cheap part after every step, the full walk when it is due, and what follows if it is not.

use penstock_base::codec::{DecodeError, Reader, Writer};
use penstock_base::limits::{FULL_WALK_STEPS, RESERVED_REQUESTS_MAX};
use penstock_base::{Failure, Outcome};

use super::State;
use super::finish::outcome_code;
use super::io::{GatewayEffect, GatewayEvent, GatewayInput};
use super::seats::Cx;
use crate::message::Usage;

/// What a broken gateway reads back as: the reason is for people, and was told when it happened.
const BROKEN_BEFORE: &str = "it was broken before it was saved";

/// What the checks themselves must remember.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Soundness {
    /// Steps of this machine.
    steps: u64,
    /// Nothing was here at the end of the last step: the full walk was done then.
    quiet: bool,
    /// Which invariant does not hold, if one does not.
    pub broken: Option<&'static str>,
}

impl Soundness {
    /// Of a machine that has done nothing.
    pub fn new() -> Self {
        Self { steps: 0, quiet: true, broken: None }
    }

    /// Writes the state.
    pub fn encode(&self, out: &mut Writer) {
        out.u64(self.steps);
        out.bool(self.quiet);
        out.bool(self.broken.is_some());
    }

    /// Reads what [`Self::encode`] wrote.
    pub fn decode(from: &mut Reader<'_>) -> Result<Self, DecodeError> {
        Ok(Self { steps: from.u64()?, quiet: from.bool()?, broken: from.bool()?.then_some(BROKEN_BEFORE) })
    }
}

impl State {
    /// The cheap checks at every step, the full walk when it is due: at quiescence, every [`FULL_WALK_STEPS`] steps, in tests always.
    pub(super) fn verify(&mut self, cx: &mut Cx<'_>) {
        let quiet = self.requests.table.len() == 0;
        let was_quiet = core::mem::replace(&mut self.soundness.quiet, quiet);
        let became_quiet = quiet && !was_quiet;
        self.soundness.steps += 1;
        let due = self.config.check_every_step || became_quiet || self.soundness.steps.is_multiple_of(FULL_WALK_STEPS);
        let checked = self.check_counts().and_then(|()| if due { self.check() } else { Ok(()) });
        if let Err(why) = checked {
            self.break_down(why, cx);
        }
    }

    /// O(classes): sums that must add up whatever happened.
    pub(super) fn check_counts(&self) -> Result<(), &'static str> {
        let (mut requests, mut tokens, mut need_blocks) = (0u64, 0u64, 0u64);
        for class in &self.queue.classes {
            requests += u64::from(class.list.len);
            tokens += class.tokens;
            need_blocks += class.need_blocks;
        }
        if (requests, tokens, need_blocks)
            != (u64::from(self.queue.requests), self.queue.tokens, self.queue.need_blocks)
        {
            return Err("queue: the sums differ from those of the classes");
        }
        let running: u64 = self.inflight.iter().map(|class| u64::from(class.requests)).sum();
        if running != u64::from(self.running_requests) {
            return Err("holdings: the classes' counts differ from the sum");
        }
        if self.running_requests > self.config.running_requests_max {
            return Err("holdings: more requests run than may");
        }
        if self.deferred.len > self.config.deferred_requests_max || self.deferred_tokens > self.config.queue_tokens_max
        {
            return Err("deferred: more than the bound");
        }
        let live = self.requests.table.len() as u64;
        if requests + running + u64::from(self.deferred.len) != live {
            return Err("places: a request stands in no place, or in two");
        }
        if u64::from(self.held.len) + u64::from(self.reserved_requests) > requests {
            return Err("places: more are held and reserved than wait");
        }
        if self.reserved_requests as usize > RESERVED_REQUESTS_MAX * self.replicas.slots().len() {
            return Err("places: more are reserved than replicas take");
        }
        // What has ended and holds something at its replica is the difference.
        let unfinished = self.counters.arrived.checked_sub(self.counters.ended);
        if unfinished.is_none_or(|unfinished| unfinished > live) {
            return Err("ends: more or fewer than one for an arrival");
        }
        Ok(())
    }

    /// Nothing that the machine says can be trusted any more: what is here ends, once, and nothing is taken from now on. The driver ends
    /// this gateway.
    fn break_down(&mut self, why: &'static str, cx: &mut Cx<'_>) {
        self.soundness.broken = Some(why);
        cx.effects.push(GatewayEffect::Event(GatewayEvent::Broken(why)));
        for slot in 0..self.requests.table.slots_end() {
            let Some(request) = self.requests.table.get(slot).filter(|request| request.outcome.is_none()) else {
                continue;
            };
            let (id, usage) = (request.manifest.request, request.usage());
            self.requests.table[slot].outcome = Some(Outcome::Failed(Failure::Internal));
            self.tell_broken(id, usage, cx);
        }
    }

    /// What a broken gateway does with an input: an arrival still gets its end, everything else is too late.
    pub(super) fn answer_broken(&mut self, input: GatewayInput, cx: &mut Cx<'_>) {
        match input {
            GatewayInput::Arrive(manifest) if self.requests.table.find(&manifest.request).is_none() => {
                self.counters.arrived += 1;
                self.tell_broken(manifest.request, Usage::default(), cx);
            }
            GatewayInput::Tick => {}
            _ => self.stale(cx),
        }
    }

    fn tell_broken(&mut self, request: penstock_base::RequestId, usage: Usage, cx: &mut Cx<'_>) {
        let outcome = Outcome::Failed(Failure::Internal);
        self.counters.ended += 1;
        self.digest.add(&[6, request.0, outcome_code(outcome)]);
        cx.effects.push(GatewayEffect::Ended { request, outcome, usage, retry_after_ms: 0 });
    }
}

#[cfg(test)]
mod tests {
    use alloc::boxed::Box;
    use alloc::sync::Arc;
    use alloc::vec::Vec;

    use penstock_base::{
        ClassRank, Duration, FlowId, Generation, Instant, Manifest, Priority, RequestId, SessionId, TenantId,
        TenantTerms, Traits, TrustGroup,
    };
    use penstock_policy_api::Policies;
    use penstock_policy_api::native::NativePolicies;

    use super::*;
    use crate::gateway::{Gateway, GatewayConfig, GatewayEffects};

    fn manifest(request: u64) -> Arc<Manifest> {
        Arc::new(Manifest {
            request: RequestId(request),
            tenant: TenantId(1),
            flow: FlowId(1),
            session: SessionId(0),
            trust: TrustGroup(0),
            class: ClassRank::default(),
            priority: Priority(0),
            sequences: 1,
            input_tokens: 20,
            max_output_tokens: 4,
            arrived: Instant::ZERO,
            deadline: Instant::NEVER,
            slo_ttft: Duration::MAX,
            slo_tpot: Duration::MAX,
            traits: Traits::default(),
            prefix_key: 0,
            keys: Box::default(),
            retention: 50,
            retry: false,
            terms: TenantTerms::default(),
        })
    }

    /// A gateway that looks as seldom as a live one, with two requests in its queue.
    fn two_wait(check_every_step: bool) -> (Gateway, impl Policies) {
        let mut policies = NativePolicies::new(Generation(1), 4_096);
        let mut gateway = Gateway::new(GatewayConfig { check_every_step, ..GatewayConfig::default() }, Instant::ZERO);
        for request in 1..=2 {
            step(&mut gateway, &mut policies, GatewayInput::Arrive(manifest(request)));
        }
        assert_eq!(gateway.queued_requests(), 2);
        (gateway, policies)
    }

    fn step(gateway: &mut Gateway, policies: &mut dyn Policies, input: GatewayInput) -> GatewayEffects {
        let mut effects = GatewayEffects::new();
        gateway.step(gateway.state.now + Duration::from_us(1), input, policies, &mut effects);
        effects
    }

    fn ends(effects: &[GatewayEffect]) -> Vec<(u64, Outcome)> {
        let end = |effect: &GatewayEffect| match effect {
            GatewayEffect::Ended { request, outcome, .. } => Some((request.0, *outcome)),
            _ => None,
        };
        effects.iter().filter_map(end).collect()
    }

    fn broken(effects: &[GatewayEffect]) -> bool {
        effects.iter().any(|effect| matches!(effect, GatewayEffect::Event(GatewayEvent::Broken(_))))
    }

    const FAILED: Outcome = Outcome::Failed(Failure::Internal);

    #[test]
    fn a_sum_that_does_not_add_up_ends_everything_once_and_nothing_is_taken_any_more() {
        let (mut gateway, mut policies) = two_wait(false);
        gateway.state.queue.tokens += 1;
        let effects = step(&mut gateway, &mut policies, GatewayInput::Tick);
        assert!(broken(&effects));
        assert_eq!(ends(&effects), [(1, FAILED), (2, FAILED)]);
        assert!(gateway.broken().is_some() && !gateway.is_ready());
        assert_eq!(gateway.next_wake(), Instant::NEVER);

        let late = step(&mut gateway, &mut policies, GatewayInput::Arrive(manifest(3)));
        assert_eq!(ends(&late), [(3, FAILED)], "whoever comes is told");
        let again = step(&mut gateway, &mut policies, GatewayInput::Arrive(manifest(1)));
        assert_eq!(again, [GatewayEffect::Event(GatewayEvent::Stale)]);
        assert_eq!(step(&mut gateway, &mut policies, GatewayInput::Tick), []);
        assert_eq!((gateway.counters().arrived, gateway.counters().ended), (3, 3));

        let mut out = Writer::new();
        gateway.encode(&mut out);
        let bytes = out.into_bytes();
        let copy = Gateway::decode(gateway.state.config.clone(), &mut Reader::new(&bytes)).expect("it reads back");
        assert!(copy.broken().is_some(), "and stays broken");
    }

    /// Something that only the walk sees: a request that names a flow's queue and stands in none.
    fn misplace(gateway: &mut Gateway) {
        let slot = gateway.state.requests.table.find(&RequestId(1)).expect("it waits");
        gateway.state.requests.table[slot].reserved_tokens += 1;
        assert!(gateway.state.check_counts().is_ok() && gateway.check().is_err());
    }

    #[test]
    fn the_full_walk_comes_at_every_step_in_tests() {
        let (mut gateway, mut policies) = two_wait(true);
        misplace(&mut gateway);
        assert!(broken(&step(&mut gateway, &mut policies, GatewayInput::Tick)));
    }

    #[test]
    fn the_full_walk_comes_once_in_so_many_steps_of_a_live_gateway() {
        let (mut gateway, mut policies) = two_wait(false);
        misplace(&mut gateway);
        // Two arrivals were steps as well.
        for number in 3..FULL_WALK_STEPS {
            assert!(!broken(&step(&mut gateway, &mut policies, GatewayInput::Tick)), "step {number}");
        }
        assert!(broken(&step(&mut gateway, &mut policies, GatewayInput::Tick)));
    }

    #[test]
    fn the_full_walk_comes_when_a_live_gateway_falls_quiet() {
        let mut policies = NativePolicies::new(Generation(1), 4_096);
        let config = GatewayConfig { check_every_step: false, ..GatewayConfig::default() };
        let mut gateway = Gateway::new(config, Instant::ZERO);
        step(&mut gateway, &mut policies, GatewayInput::Arrive(manifest(1)));
        gateway.state.replicas.pool.free_blocks += 1;
        assert!(!broken(&step(&mut gateway, &mut policies, GatewayInput::Tick)), "not while something is here");
        let cancel = GatewayInput::Cancel { request: RequestId(1), cause: penstock_base::CancelCause::Client };
        let last = step(&mut gateway, &mut policies, cancel);
        assert!(broken(&last));
        assert_eq!(
            ends(&last),
            [(1, Outcome::Cancelled(penstock_base::CancelCause::Client))],
            "ended before, and once"
        );
    }
}
