//! What does one call cost, seat by seat? The whole call (columns filled, policy asked, answer checked) and the policy's part alone.

use std::fmt::Debug;
use std::hint::black_box;

use penstock_base::{ClassRank, Instant};
use penstock_policy_api::validate::Standing;
use penstock_policy_api::{
    AdmissionSeat, AdmissionSignal, Call, ClassSignal, Context, EvictionSeat, EvictionSignal, FactKind, FlowActive,
    OrderSeat, OrderSignal, OverloadQuestion, OverloadSeat, OverloadSignal, OverloadSources, PlaceAsked, Policies,
    Question, ReplicaSignal, RoutingPhase, RoutingQuestion, RoutingSeat, RoutingSignal, RunSignal, RunningSignal,
    Served, VictimsSeat, VictimsSignal, WaitingSignal,
};
use penstock_policy_wasm::WasmPolicies;

use crate::facts::{FLOWS, Made, mix, request};
use crate::samples::{Pair, interleave};

const NOW: Instant = Instant(1 << 40);
const CALL: Call = Call { number: 1, now_us: NOW.0 / 1_000, seed: 0x5eed };
const CONTEXT_WINDOW_TOKENS: u32 = 8_192;

/// One line of the table.
#[derive(Clone, Copy, Debug)]
pub struct Line {
    pub question: Question,
    pub rows: usize,
    pub whole: Pair,
    pub alone: Pair,
    /// Of the last call through the wall.
    pub fuel: u64,
}

/// The two ways, and how often each is sampled.
pub struct Bench<'a> {
    pub native: &'a mut dyn Policies,
    pub gateway: &'a mut WasmPolicies,
    pub replica: &'a mut WasmPolicies,
    pub calls: usize,
    pub clock_ns: u64,
}

impl Bench<'_> {
    /// Tells the flows that the waiting rows belong to, as a gateway would have.
    pub fn introduce_flows(&mut self) {
        let mut facts = Vec::new();
        for flow_id in 1..=FLOWS {
            let active = FlowActive { flow_id, tenant_id: flow_id, class_rank: 3, weight_ppm: 1_000_000, idle_us: 0 };
            facts.push(active.at(CALL.now_us));
            let prefill_tokens = mix(flow_id) % 10_000;
            facts.push(Served { flow_id, prefill_tokens, weight_ppm: 1_000_000, ..Served::default() }.at(CALL.now_us));
        }
        for policies in [&mut *self.native, &mut *self.gateway as &mut dyn Policies] {
            let wanted = policies.fairness().terms().facts;
            if wanted.has(FactKind::FlowActive) {
                policies.fairness().observe(&facts).expect("facts are taken");
            }
        }
    }

    /// Measures one question over that many rows. Panics where the two ways differ in an answer.
    pub fn line(&mut self, question: Question, rows: usize) -> Line {
        match question {
            Question::Admission => self.admission(),
            Question::Routing => self.routing(rows),
            Question::Order => self.order(rows),
            Question::Victims => self.victims(rows),
            Question::Eviction => self.eviction(rows),
            Question::Overload => self.overload(rows),
        }
    }

    /// Samples `ask` both ways, each with its own of `states`; the answers must be equal.
    fn both<S, A: PartialEq + Debug>(
        &mut self,
        question: Question,
        rows: usize,
        states: &mut [S; 2],
        ask: impl Fn(&mut S, &mut dyn Policies) -> A,
    ) -> Pair {
        let [first, second] = states;
        let (native, wasm) = (&mut *self.native, wasm_of(question, self.gateway, self.replica));
        assert_eq!(ask(first, native), ask(second, wasm), "{}: one rule, one answer", question.name());
        let calls = if rows > 64 { self.calls / 8 } else { self.calls };
        let mut by_native = || drop(black_box(ask(first, native)));
        let mut by_wasm = || drop(black_box(ask(second, wasm)));
        interleave(calls, self.clock_ns, &mut by_native, &mut by_wasm)
    }

    fn finish(&mut self, question: Question, rows: usize, whole: Pair, alone: Pair) -> Line {
        let wasm = wasm_of(question, self.gateway, self.replica);
        Line { question, rows, whole, alone, fuel: wasm.last_fuel(question.decision()) }
    }

    fn admission(&mut self) -> Line {
        const QUESTION: Question = Question::Admission;
        let (context, request) = (Made::context::<AdmissionSignal>(), request());
        let mut seats = [AdmissionSeat::new(1), AdmissionSeat::new(1)];
        let whole = self
            .both(QUESTION, 0, &mut seats, |seat, policies| seat.ask(policies.admission(), NOW, &request, 0, &context));
        let values = seats[0].context();
        let alone = self.both(QUESTION, 0, &mut [(), ()], |(), policies| {
            policies.admission().decide(&CALL, &request, Context { values })
        });
        self.finish(QUESTION, 0, whole, alone)
    }

    fn routing(&mut self, rows: usize) -> Line {
        const QUESTION: Question = Question::Routing;
        let (context, replicas) = (Made::context::<RoutingSignal>(), Made::rows::<ReplicaSignal>(rows));
        let (record, phase) = (request(), RoutingPhase::Whole);
        let place = PlaceAsked { request: &record, phase };
        let mut seats = [RoutingSeat::new(1), RoutingSeat::new(1)];
        let whole = self.both(QUESTION, rows, &mut seats, |seat, policies| {
            seat.ask(policies.routing(), NOW, place, &context, &replicas)
        });
        let (values, replicas) = (seats[0].context(), seats[0].rows());
        let asked = RoutingQuestion { request: &record, phase, context: Context { values }, replicas };
        let mut ranked = [Vec::new(), Vec::new()];
        let alone = self.both(QUESTION, rows, &mut ranked, |ranked, policies| {
            ranked.clear();
            policies.routing().decide(&CALL, &asked, ranked)
        });
        assert_eq!(ranked[0], ranked[1]);
        self.finish(QUESTION, rows, whole, alone)
    }

    fn order(&mut self, rows: usize) -> Line {
        const QUESTION: Question = Question::Order;
        let (context, waiting) = (Made::context::<OrderSignal>(), Made::rows::<WaitingSignal>(rows));
        let mut seats = [(OrderSeat::new(1), Vec::new()), (OrderSeat::new(1), Vec::new())];
        let whole = self.both(QUESTION, rows, &mut seats, |(seat, ranked), policies| {
            seat.ask(policies.fairness(), NOW, &context, &waiting, ranked)
        });
        assert_eq!(seats[0].1, seats[1].1);
        let (values, waiting) = (seats[0].0.context(), seats[0].0.rows());
        let mut ranked = [Vec::new(), Vec::new()];
        let alone = self.both(QUESTION, rows, &mut ranked, |ranked, policies| {
            ranked.clear();
            policies.fairness().order(&CALL, Context { values }, waiting, ranked)
        });
        assert_eq!(ranked[0], ranked[1]);
        self.finish(QUESTION, rows, whole, alone)
    }

    fn victims(&mut self, rows: usize) -> Line {
        const QUESTION: Question = Question::Victims;
        let (context, running) = (Made::context::<VictimsSignal>(), Made::rows::<RunningSignal>(rows));
        let mut seats = [(VictimsSeat::new(1), Vec::new()), (VictimsSeat::new(1), Vec::new())];
        let whole = self.both(QUESTION, rows, &mut seats, |(seat, victims), policies| {
            seat.ask(policies.fairness(), NOW, &context, &running, victims)
        });
        assert_eq!(seats[0].1, seats[1].1);
        let (values, running) = (seats[0].0.context(), seats[0].0.rows());
        let mut yielders = [Vec::new(), Vec::new()];
        let alone = self.both(QUESTION, rows, &mut yielders, |yielders, policies| {
            yielders.clear();
            policies.fairness().victims(&CALL, Context { values }, running, yielders)
        });
        assert_eq!(yielders[0], yielders[1]);
        self.finish(QUESTION, rows, whole, alone)
    }

    fn eviction(&mut self, rows: usize) -> Line {
        const QUESTION: Question = Question::Eviction;
        let (context, runs) = (Made::context::<EvictionSignal>(), Made::rows::<RunSignal>(rows));
        let mut seats = [(EvictionSeat::new(1), Vec::new()), (EvictionSeat::new(1), Vec::new())];
        let whole = self.both(QUESTION, rows, &mut seats, |(seat, priced), policies| {
            seat.ask(policies.eviction(), NOW, &context, &runs, priced)
        });
        assert_eq!(seats[0].1, seats[1].1);
        let (values, runs) = (seats[0].0.context(), seats[0].0.rows());
        let mut worths = [Vec::new(), Vec::new()];
        let alone = self.both(QUESTION, rows, &mut worths, |worths, policies| {
            worths.clear();
            policies.eviction().decide(&CALL, Context { values }, runs, worths)
        });
        assert_eq!(worths[0], worths[1]);
        self.finish(QUESTION, rows, whole, alone)
    }

    fn overload(&mut self, rows: usize) -> Line {
        const QUESTION: Question = Question::Overload;
        let context = &Made::context::<OverloadSignal>();
        let (classes, replicas) = (&Made::rows::<ClassSignal>(ClassRank::COUNT), &Made::rows::<ReplicaSignal>(rows));
        let sources = OverloadSources { context, classes, replicas };
        let seat = || (OverloadSeat::new(1, CONTEXT_WINDOW_TOKENS), Vec::new());
        let mut seats = [seat(), seat()];
        let whole = self.both(QUESTION, rows, &mut seats, |(seat, actions), policies| {
            seat.ask(policies.overload(), NOW, &sources, Standing::default(), actions)
        });
        assert_eq!(seats[0].1, seats[1].1);
        let seat = &seats[0].0;
        let (context, classes, replicas) = (Context { values: seat.context() }, seat.classes(), seat.replicas());
        let asked = OverloadQuestion { context, classes, replicas };
        let mut actions = [Vec::new(), Vec::new()];
        let alone = self.both(QUESTION, rows, &mut actions, |actions, policies| {
            actions.clear();
            policies.overload().decide(&CALL, &asked, actions)
        });
        assert_eq!(actions[0], actions[1]);
        self.finish(QUESTION, rows, whole, alone)
    }
}

/// The machine that asks `question`.
fn wasm_of<'a>(
    question: Question,
    gateway: &'a mut WasmPolicies,
    replica: &'a mut WasmPolicies,
) -> &'a mut WasmPolicies {
    if matches!(question, Question::Victims | Question::Eviction) { replica } else { gateway }
}
