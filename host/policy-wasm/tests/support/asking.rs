//! Asks the five questions as a machine does: through a seat that checks the answer, with candidates that are small numbers or noise.
#![allow(dead_code, reason = "each test file uses its part")]

use penstock_base::{ClassRank, Instant, Priority, RequestId, Traits};
use penstock_policy_api::validate::Standing;
use penstock_policy_api::{
    AdmissionSeat, CommonSignal, ContextSource, Decision, EvictionSeat, FallbackReason, Fill, OrderSeat, OverloadSeat,
    OverloadSources, PlaceAsked, Policies as _, Question, RequestRecord, RoutingPhase, RoutingSeat, RowSource, Signal,
    Table,
};
use penstock_policy_wasm::{WasmPolicies, limits};

/// Candidates: what the contract requires to be known, the rest known where `noise` says so.
#[derive(Clone, Copy, Debug)]
pub struct Candidates {
    pub rows: usize,
    /// 0: small numbers, and nothing that may be unknown is known. Else everything is a number drawn from it.
    pub noise: u64,
}

impl Candidates {
    fn drawn(self, at: u64) -> Option<u64> {
        (self.noise != 0).then(|| {
            let mut z = self.noise ^ at.wrapping_mul(0x9e37_79b9_7f4a_7c15);
            z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
            // Of every size, zero and the largest among them.
            z.wrapping_add(z >> 7) >> (z % 65).min(63)
        })
    }
}

impl<S: Signal> ContextSource<S> for Candidates {
    fn common(&self, which: CommonSignal) -> Option<u64> {
        self.drawn(1_000 + which.index() as u64)
    }
    fn value(&self, which: S) -> Option<u64> {
        self.drawn(which.index() as u64).or((which.info().fill == Fill::Required).then_some(1))
    }
}

impl<S: Signal> RowSource<S> for Candidates {
    fn rows(&self) -> usize {
        self.rows
    }
    fn cell(&self, which: S, row: usize) -> Option<u64> {
        // Ranks of the class table start at 0; ids and counts that a policy may divide by do not.
        let first = u64::from(S::TABLE != Table::Class);
        let small = (which.info().fill == Fill::Required).then_some(row as u64 + first);
        if self.noise == 0 { small } else { self.drawn((row as u64) << 8 | which.index() as u64) }
    }
}

/// The seats that ask, with what a call may cost.
pub struct Seats {
    admission: AdmissionSeat,
    routing: RoutingSeat,
    order: OrderSeat,
    eviction: EvictionSeat,
    overload: OverloadSeat,
}

/// How a question went.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Asked {
    /// Why the native default answered, when it did.
    pub fallback: Option<FallbackReason>,
    /// What the call used.
    pub fuel: u64,
}

impl Seats {
    pub fn new(seed: u64) -> Self {
        Self {
            admission: AdmissionSeat::new(seed),
            routing: RoutingSeat::new(seed),
            order: OrderSeat::new(seed),
            eviction: EvictionSeat::new(seed),
            overload: OverloadSeat::new(seed, 8_192),
        }
    }

    /// Puts one question, tells the keeper of nonsense as a driver does, and holds the call against its budget.
    pub fn ask(&mut self, policies: &mut WasmPolicies, decision: Decision, now: Instant, of: Candidates) -> Asked {
        let (fallback, question, rows) = match decision {
            Decision::Admission => {
                let asked = self.admission.ask(policies.admission(), now, &plain_request(), 0, &of);
                (asked.fallback, Question::Admission, 0)
            }
            Decision::Routing => {
                let request = plain_request();
                let asked = PlaceAsked { request: &request, phase: RoutingPhase::Whole };
                let asked = self.routing.ask(policies.routing(), now, asked, &of, &of);
                (asked.fallback, Question::Routing, of.rows)
            }
            Decision::Fairness => {
                let mut ranked = Vec::new();
                let asked = self.order.ask(policies.fairness(), now, &of, &of, &mut ranked);
                assert!(ranked.len() <= of.rows && ranked.iter().all(|row| (*row as usize) < of.rows));
                (asked.fallback, Question::Order, of.rows)
            }
            Decision::Eviction => {
                let mut priced = Vec::new();
                let asked = self.eviction.ask(policies.eviction(), now, &of, &of, &mut priced);
                assert_eq!(priced.len(), of.rows, "one price a run, whoever answers");
                (asked.fallback, Question::Eviction, of.rows)
            }
            Decision::Overload => {
                let classes = Candidates { rows: ClassRank::COUNT, ..of };
                let sources = OverloadSources { context: &of, classes: &classes, replicas: &of };
                let standing = Standing::default();
                let asked = self.overload.ask(policies.overload(), now, &sources, standing, &mut Vec::new());
                (asked.fallback, Question::Overload, of.rows + ClassRank::COUNT)
            }
        };
        if let Some(reason @ FallbackReason::Malformed(_)) = fallback {
            policies.strike(decision, reason);
        }
        let fuel = policies.last_fuel(decision);
        let budget = limits::FUEL_BASE_DEFAULT + limits::fuel_per_row(question) * rows as u64;
        assert!(fuel <= budget, "{decision:?} used {fuel} of {budget}");
        Asked { fallback, fuel }
    }
}

/// A small request without wishes.
fn plain_request() -> RequestRecord {
    RequestRecord {
        request_id: RequestId(1),
        tenant_id: 0,
        flow_id: 1,
        session_id: 0,
        class_rank: ClassRank::default(),
        attempt: 1,
        sequences: 1,
        priority: Priority(0),
        input_tokens: 16,
        max_output_tokens: 16,
        deadline_us: Instant::NEVER.as_us(),
        traits: Traits(0),
    }
}
