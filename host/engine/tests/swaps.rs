//! Another policy set takes over while requests run: no request fails for it, no token changes, and a set that cannot serve everywhere
//! serves nowhere.

mod support;

use std::any::Any;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex};

use penstock_base::{Duration, Failure, Generation, Instant, Outcome};
use penstock_engine::{
    ActivationError, DecisionRecord, EngineConfig, EngineLimits, Machine, Memory, PolicySource, PreparedPolicies,
    Proposal, ReplicaState, RequestEvent, SeatedPolicies, TakenOver,
};
use penstock_exec::SamplingParams;
use penstock_policy_api::native::NativePolicies;
use penstock_policy_api::validate::Malformed;
use penstock_policy_api::{
    AdmissionPolicy, Decision, EvictionPolicy, FairnessPolicy, FallbackReason, OverloadPolicy, Policies, Question,
    RoutingPolicy,
};
use penstock_sched::replica::ReplicaConfig;
use support::{Nonsense, OptimisticPolicies, Rig, Sizes, answer, prompt, read};

/// Blocks a machine between two steps while it is shut.
#[derive(Default)]
struct Gate(Mutex<bool>, Condvar);

impl Gate {
    fn shut(&self, is_shut: bool) {
        *self.0.lock().expect("nobody panics with it") = is_shut;
        self.1.notify_all();
    }
    fn pass(&self) {
        let is_shut = self.0.lock().expect("nobody panics with it");
        drop(self.1.wait_while(is_shut, |is_shut| *is_shut));
    }
}

/// What a test sees of the sets that it makes.
#[derive(Clone, Default)]
struct Workshop {
    /// Sets made and not ended.
    alive: Arc<AtomicUsize>,
    refused: Arc<AtomicU64>,
    /// Shut: the gateway stands still between two steps.
    gateway: Arc<Gate>,
    /// The longest chain of sets that handed their state on.
    longest: Arc<AtomicU64>,
    /// What the last set to be tried was told of the one before.
    remembered: Arc<AtomicU64>,
}

struct Set {
    inner: Box<dyn Policies + Send>,
    shop: Workshop,
    machine: Machine,
    /// State: how many sets came before it.
    before: u64,
}

impl Workshop {
    fn source(&self, inner: impl Fn() -> Box<dyn Policies + Send> + Send + Sync + 'static) -> PolicySource {
        let shop = self.clone();
        PolicySource::preparing(move |machine, memory: Option<&Memory>| {
            if let Some(before) = memory.and_then(|memory| memory.downcast_ref::<u64>()) {
                shop.remembered.store(*before, Ordering::SeqCst);
            }
            shop.alive.fetch_add(1, Ordering::SeqCst);
            Ok(Box::new(Set { inner: inner(), shop: shop.clone(), machine, before: 0 }))
        })
    }

    fn native(&self) -> PolicySource {
        self.source(|| Box::new(NativePolicies::new(Generation(0), 4_096)))
    }
}

impl Drop for Set {
    fn drop(&mut self) {
        self.shop.alive.fetch_sub(1, Ordering::SeqCst);
    }
}

impl PreparedPolicies for Set {
    fn seat(self: Box<Self>, _: Generation) -> Box<dyn SeatedPolicies> {
        self
    }
    fn take_over(mut self: Box<Self>, old: Box<dyn SeatedPolicies>, _: Generation, _: Instant) -> TakenOver {
        let old: Box<dyn Any> = old;
        let Ok(old) = old.downcast::<Set>() else { panic!("every set here is of this kind") };
        assert_eq!(old.machine, self.machine, "an instance belongs to one machine");
        self.before = old.before + 1;
        self.shop.longest.fetch_max(self.before, Ordering::SeqCst);
        TakenOver { seated: self, retired: old }
    }
}

impl SeatedPolicies for Set {
    fn between_steps(&mut self, _: Instant) {
        if self.machine == Machine::Gateway {
            self.shop.gateway.pass();
        }
    }
    fn refused(&mut self, decision: Decision, why: Malformed) {
        assert_eq!((decision, why), (Decision::Routing, Malformed::RowOutOfRange));
        self.shop.refused.fetch_add(1, Ordering::SeqCst);
    }
    fn memory(&mut self) -> Memory {
        Box::new(self.before)
    }
}

impl Policies for Set {
    fn generation(&self) -> Generation {
        self.inner.generation()
    }
    fn admission(&mut self) -> &mut dyn AdmissionPolicy {
        self.inner.admission()
    }
    fn routing(&mut self) -> &mut dyn RoutingPolicy {
        self.inner.routing()
    }
    fn fairness(&mut self) -> &mut dyn FairnessPolicy {
        self.inner.fairness()
    }
    fn eviction(&mut self) -> &mut dyn EvictionPolicy {
        self.inner.eviction()
    }
    fn overload(&mut self) -> &mut dyn OverloadPolicy {
        self.inner.overload()
    }
}

fn rig(shop: &Workshop, replicas: usize, limits: EngineLimits) -> Rig {
    let config = EngineConfig { policies: shop.native(), limits, ..EngineConfig::default() };
    let rig = Rig::new(replicas, Sizes { slots: 6, ..Sizes::default() }, config);
    rig.wait_until("replicas", |status| status.replicas.iter().all(|r| r.state == ReplicaState::Ready));
    rig
}

fn impatient() -> EngineLimits {
    EngineLimits { policy_switch: Duration::from_ms(300), ..EngineLimits::default() }
}

/// Everything that has left has ended; what lives is one set a machine.
fn assert_alive(rig: &Rig, shop: &Workshop, machines: usize) {
    rig.wait_until("the end of old sets", |_| rig.engine.policies_leaving() == 0);
    assert_eq!(shop.alive.load(Ordering::SeqCst), machines);
}

/// Sixteen clients, one after the other each, until `done`. How many requests; every one gave the right tokens, or broke with its replica
/// where that `may_break`.
fn clients(rig: &Rig, done: &AtomicBool, may_break: bool) -> usize {
    std::thread::scope(|scope| {
        let client = |which: u32| {
            let mut served = 0;
            while !done.load(Ordering::Relaxed) {
                let prompt = prompt(which + served % 3, 4 + which % 9);
                let expected = answer(&prompt, &SamplingParams::default(), 24);
                let mut stream = rig.submit(rig.submission(&prompt, 24));
                let got = read(&mut stream);
                match got.outcome() {
                    Outcome::Length => assert_eq!(got.tokens, [expected]),
                    Outcome::Failed(Failure::ReplicaLost) if may_break => {
                        assert!(got.tokens.iter().all(|tokens| expected.starts_with(tokens)));
                    }
                    other => panic!("{other:?}"),
                }
                served += 1;
            }
            served as usize
        };
        let threads: Vec<_> = (0..16).map(|which| scope.spawn(move || client(which))).collect();
        threads.into_iter().map(|thread| thread.join().expect("a client that is content")).sum()
    })
}

#[test]
fn a_hundred_swaps_under_sixteen_streams_change_no_token_and_fail_no_request() {
    let shop = Workshop::default();
    let rig = rig(&shop, 2, EngineLimits::default());
    let done = AtomicBool::new(false);
    let served = std::thread::scope(|scope| {
        let clients = scope.spawn(|| clients(&rig, &done, false));
        let mut pauses = Vec::new();
        for swap in 1..=100 {
            let source = match swap % 3 {
                0 => shop.native(),
                1 => shop.source(|| Box::new(OptimisticPolicies::new())),
                _ => shop.source(|| Box::new(Nonsense::new())),
            };
            let activation = rig.engine.activate(&source).unwrap();
            assert_eq!((activation.generation, activation.late), (Generation(swap + 1), vec![]));
            assert_eq!(activation.pauses.len(), 3);
            assert_eq!(shop.remembered.load(Ordering::SeqCst), swap - 1, "tried with what the set before it remembers");
            pauses.extend(activation.pauses.iter().map(|(_, pause)| pause.0));
        }
        done.store(true, Ordering::Relaxed);
        pauses.sort_unstable();
        println!("swap pause: p50 {} ns, p99 {} ns", pauses[pauses.len() / 2], pauses[pauses.len() * 99 / 100]);
        clients.join().unwrap()
    });
    assert!(served >= 16, "{served}");
    rig.wait_until_empty();
    assert_eq!(shop.longest.load(Ordering::SeqCst), 100, "state went from each set to the next");
    assert_eq!(rig.engine.policy_generation(), Generation(101));
    assert_eq!(rig.metric("penstock_policy_generation"), 101.0);
    assert!(rig.engine.status().replicas.iter().all(|replica| replica.generation == Generation(101)));
    assert_eq!(rig.metric("penstock_policy_swap_duration_seconds_count"), 300.0);
    assert_eq!(rig.metric("penstock_replica_freezes_total"), 0.0);
    assert_alive(&rig, &shop, 3);
}

#[test]
fn swaps_while_replicas_break_end_with_one_generation_everywhere() {
    let shop = Workshop::default();
    let rig = rig(&shop, 2, EngineLimits::default());
    for (replica, step) in [(0, 40), (1, 90), (1, 300), (0, 500)] {
        rig.controls[replica].fault_at(step, support::Fault::WrongRows);
    }
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let clients = scope.spawn(|| clients(&rig, &done, true));
        let enough = || rig.controls.iter().all(|control| control.steps() > 600);
        let mut swaps = 0;
        while swaps < 40 || !enough() {
            let before = rig.engine.policy_generation();
            let activation = rig.engine.activate(&shop.native()).unwrap();
            assert_eq!(activation.generation, Generation(before.0 + 1));
            swaps += 1;
        }
        done.store(true, Ordering::Relaxed);
        clients.join().unwrap();
    });
    rig.wait_until_empty();
    assert_eq!(rig.metric("penstock_replica_freezes_total"), 4.0);
    let generation = rig.engine.policy_generation();
    rig.wait_until("one generation", |status| status.replicas.iter().all(|replica| replica.generation == generation));
    assert_alive(&rig, &shop, 3);
}

#[test]
fn a_refusal_at_one_machine_keeps_the_set_in_force_everywhere() {
    let shop = Workshop::default();
    let rig = rig(&shop, 2, EngineLimits::default());
    let good = shop.native();
    let made = shop.clone();
    let picky = PolicySource::preparing(move |machine, _| match machine {
        Machine::Replica(1) => Err("eviction: component decides routing".into()),
        _ => {
            made.alive.fetch_add(1, Ordering::SeqCst);
            let inner = Box::new(NativePolicies::new(Generation(0), 4_096));
            Ok(Box::new(Set { inner, shop: made.clone(), machine, before: 0 }))
        }
    });
    let refused = rig.engine.activate(&picky).unwrap_err();
    let why = "eviction: component decides routing".to_owned();
    assert_eq!(refused, ActivationError::Refused { machine: Machine::Replica(1), why });
    assert_eq!(refused.to_string(), "refused at the replica 1: eviction: component decides routing");
    assert_eq!(rig.engine.policy_generation(), Generation(1));
    assert_alive(&rig, &shop, 3);
    assert_eq!(rig.metric("penstock_policy_activations_total{model_name=\"fake\",outcome=\"refused\""), 1.0);
    assert_eq!(rig.engine.activate(&good).unwrap().generation, Generation(2));
    assert_alive(&rig, &shop, 3);
}

#[test]
fn a_machine_that_does_not_answer_in_time_keeps_the_set_in_force_everywhere() {
    let shop = Workshop::default();
    let rig = rig(&shop, 2, impatient());
    shop.gateway.shut(true);
    // Whatever turn the gateway is in, it stands still at its end.
    let refused = loop {
        match rig.engine.activate(&shop.native()) {
            Err(error) => break error,
            Ok(activation) => assert!(activation.generation.0 < 10, "the gate is shut"),
        }
    };
    assert!(matches!(refused, ActivationError::TimedOut { machine: Machine::Gateway, .. }), "{refused:?}");
    let before = rig.engine.policy_generation();
    shop.gateway.shut(false);
    let after = rig.engine.activate(&shop.native()).unwrap();
    assert!(after.generation > before && after.late.is_empty());
    assert_alive(&rig, &shop, 3);
}

#[test]
fn a_gateway_that_holds_the_set_and_does_not_switch_in_time_never_does() {
    let shop = Workshop::default();
    let rig = rig(&shop, 1, impatient());
    let (made, gate) = (shop.clone(), Arc::clone(&shop.gateway));
    let shutting = PolicySource::preparing(move |machine, _| {
        // Made last: from here on the gateway takes what it is told within its turn, and gets no further.
        if machine == Machine::Replica(0) {
            gate.shut(true);
        }
        made.alive.fetch_add(1, Ordering::SeqCst);
        let inner = Box::new(NativePolicies::new(Generation(0), 4_096));
        Ok(Box::new(Set { inner, shop: made.clone(), machine, before: 0 }))
    });
    let refused = rig.engine.activate(&shutting).unwrap_err();
    assert!(matches!(refused, ActivationError::TimedOut { machine: Machine::Gateway, .. }), "{refused:?}");
    shop.gateway.shut(false);
    let prompt = prompt(3, 7);
    let got = read(&mut rig.submit(rig.submission(&prompt, 12)));
    assert_eq!(got.tokens, [answer(&prompt, &SamplingParams::default(), 12)]);
    assert_eq!(rig.engine.policy_generation(), Generation(1));
    assert_eq!(rig.engine.status().replicas[0].generation, Generation(1));
    assert_alive(&rig, &shop, 2);
}

#[test]
fn a_replica_that_is_frozen_through_a_swap_comes_back_with_the_new_set() {
    let shop = Workshop::default();
    let replica = ReplicaConfig { inflight_max: 2, ..ReplicaConfig::default() };
    let config = EngineConfig { policies: shop.native(), replica, ..EngineConfig::default() };
    let rig = Rig::new(2, Sizes { slots: 2, ..Sizes::default() }, config);
    rig.controls.iter().for_each(|control| control.hold());
    let prompts: Vec<_> = (0..8).map(|which| prompt(which, 6)).collect();
    let mut streams: Vec<_> = prompts.iter().map(|prompt| rig.submit(rig.submission(prompt, 25))).collect();
    rig.wait_until("work on both", |status| status.replicas.iter().all(|r| r.load.running_requests > 0));
    // It breaks on the first of two steps, and the second does not come back before it is let through.
    rig.controls[1].fault_next(support::Fault::WrongRows);
    rig.controls[1].let_through(1);
    rig.wait_until("a freeze", |status| status.replicas[1].state == ReplicaState::Frozen);
    let activation = rig.engine.activate(&shop.native()).unwrap();
    assert_eq!((activation.generation, activation.late), (Generation(2), vec![Machine::Replica(1)]));
    rig.controls.iter().for_each(|control| control.release());
    rig.wait_until("both again", |status| {
        status.replicas.iter().all(|r| r.state == ReplicaState::Ready && r.generation == Generation(2))
    });
    for (stream, prompt) in streams.iter_mut().zip(&prompts) {
        let got = read(stream);
        let expected = answer(prompt, &SamplingParams::default(), 25);
        assert!(matches!(got.outcome(), Outcome::Length | Outcome::Failed(Failure::ReplicaLost)), "{:?}", got.end);
        assert!(got.tokens.iter().all(|tokens| expected.starts_with(tokens)));
    }
    drop(streams);
    rig.wait_until_empty();
    assert_alive(&rig, &shop, 3);
}

#[test]
fn every_placement_names_the_generation_that_made_it() {
    let shop = Workshop::default();
    let rig = rig(&shop, 1, EngineLimits::default());
    for generation in 1..=3 {
        let mut stream = rig.submit(rig.submission(&prompt(1, 5), 3));
        let mut named = None;
        while let Some(event) = stream.recv_timeout(support::PATIENCE).unwrap() {
            if let RequestEvent::Dispatched { generation } = event {
                named = Some(generation);
            }
        }
        assert_eq!(named, Some(Generation(generation)));
        rig.engine.activate(&shop.native()).unwrap();
    }
}

#[test]
fn nonsense_reaches_its_keeper_and_the_log_tells_what_was_asked_and_why_the_default_answered() {
    let shop = Workshop::default();
    let rig = rig(&shop, 2, EngineLimits::default());
    rig.engine.activate(&shop.source(|| Box::new(Nonsense::new()))).unwrap();
    let (ticket, mut stream) = rig.engine.submit(rig.submission(&prompt(1, 5), 3)).unwrap();
    assert_eq!(read(&mut stream).outcome(), Outcome::Length);
    let about = |record: &DecisionRecord| record.request == Some(ticket.request);
    rig.wait_until("the record", |_| rig.engine.decisions(10, about)[0].1.len() == 2);
    let found = rig.engine.decisions(10, about);
    assert_eq!(found[0].0, Machine::Gateway);
    let [admission, routing] = &found[0].1[..] else { panic!("{found:?}") };
    assert_eq!((admission.question, &*admission.policy, admission.fallback), (Question::Admission, "bounded", None));
    assert_eq!(admission.proposal, Proposal::Admit { reserve_output_tokens: 3, class_rank: 3 });
    assert_eq!((routing.question, &*routing.policy, routing.rows), (Question::Routing, "nonsense", 2));
    assert_eq!(routing.fallback, Some(FallbackReason::Malformed(Malformed::RowOutOfRange)));
    assert!(matches!(routing.proposal, Proposal::Place { ranked: [77, u32::MAX, ..], named: 1, .. }), "{routing:?}");
    assert_eq!((routing.generation, admission.generation), (Generation(2), Generation(2)));
    assert!(routing.sequence > admission.sequence);
    assert_eq!(shop.refused.load(Ordering::SeqCst), 1);
    let calls =
        "penstock_policy_call_duration_seconds_count{decision=\"routing\",model_name=\"fake\",policy=\"nonsense\"}";
    assert_eq!(rig.metric(calls), 1.0);
    let fallbacks =
        "penstock_policy_fallbacks_total{decision=\"routing\",model_name=\"fake\",reason=\"row-out-of-range\"}";
    assert_eq!(rig.metric(fallbacks), 1.0);
}
