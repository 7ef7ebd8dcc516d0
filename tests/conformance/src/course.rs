//! What does a policy make of a list of moments? Everything that leaves it, in bytes.

use penstock_base::Instant;
use penstock_base::codec::{Reader, Writer};
use penstock_policy_api::{
    AdmissionSeat, Asked, EvictionSeat, Fact, FallbackReason, OrderSeat, OverloadSeat, OverloadSources, PlaceAsked,
    RoutingSeat, VictimsSeat,
};
use penstock_policy_harness::Subject;

use crate::guest::Seated;
use crate::heard::Heard;
use crate::moment::{Moment, Question};

/// What came of one moment.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Step {
    /// The proposal as the policy gave it.
    pub proposal: Vec<u8>,
    /// Why the default answered in its place, when it did.
    pub fallback: Option<FallbackReason>,
    /// Fuel of what it was told, and of its answer.
    pub fuel: (u64, u64),
    /// Its state afterwards, where the course looked.
    pub state: Option<Vec<u8>>,
}

/// What came of a list of moments.
pub type Course = Vec<Step>;

/// The seats of the six questions. Call numbers and the fallbacks' own state are in them.
#[derive(Debug)]
pub struct Seats {
    admission: AdmissionSeat,
    routing: RoutingSeat,
    order: OrderSeat,
    victims: VictimsSeat,
    eviction: EvictionSeat,
    overload: OverloadSeat,
}

impl Seats {
    /// Seats that have asked nothing yet.
    pub fn new(run_seed: u64) -> Self {
        Self {
            admission: AdmissionSeat::new(run_seed),
            routing: RoutingSeat::new(run_seed),
            order: OrderSeat::new(run_seed),
            victims: VictimsSeat::new(run_seed),
            eviction: EvictionSeat::new(run_seed),
            overload: OverloadSeat::new(run_seed, 8_192),
        }
    }

    /// The same seats once more, at the same call numbers.
    #[must_use]
    pub fn again(&self) -> Self {
        const OWN: &str = "a seat reads what it wrote";
        let mut out = Writer::new();
        self.admission.encode(&mut out);
        self.routing.encode(&mut out);
        self.order.encode(&mut out);
        self.victims.encode(&mut out);
        self.eviction.encode(&mut out);
        self.overload.encode(&mut out);
        let mut from = Reader::new(out.bytes());
        Self {
            admission: AdmissionSeat::decode(&mut from).expect(OWN),
            routing: RoutingSeat::decode(&mut from).expect(OWN),
            order: OrderSeat::decode(&mut from).expect(OWN),
            victims: VictimsSeat::decode(&mut from).expect(OWN),
            eviction: EvictionSeat::decode(&mut from).expect(OWN),
            overload: OverloadSeat::decode(&mut from).expect(OWN),
        }
    }

    /// Puts one question. `Err` when the policy answers another decision.
    fn ask(&mut self, subject: &mut Subject, moment: &Moment) -> Result<(Vec<u8>, Option<FallbackReason>), String> {
        let now = Instant(moment.now_us.saturating_mul(1_000));
        let mut out = Writer::new();
        let reason = match (subject, &moment.question) {
            (Subject::Admission(policy), Question::Admission { request, deferrals, context }) => {
                let mut policy = Heard { policy: policy.as_mut(), out: &mut out };
                why(self.admission.ask(&mut policy, now, request, *deferrals, context))
            }
            (Subject::Routing(policy), Question::Routing { request, phase, context, replicas }) => {
                let mut policy = Heard { policy: policy.as_mut(), out: &mut out };
                let asked = PlaceAsked { request, phase: *phase };
                why(self.routing.ask(&mut policy, now, asked, context, replicas))
            }
            (Subject::Fairness(policy), Question::Order { context, waiting }) => {
                let mut policy = Heard { policy: policy.as_mut(), out: &mut out };
                why(self.order.ask(&mut policy, now, context, waiting, &mut Vec::new()))
            }
            (Subject::Fairness(policy), Question::Victims { context, running }) => {
                let mut policy = Heard { policy: policy.as_mut(), out: &mut out };
                why(self.victims.ask(&mut policy, now, context, running, &mut Vec::new()))
            }
            (Subject::Eviction(policy), Question::Eviction { context, runs }) => {
                let mut policy = Heard { policy: policy.as_mut(), out: &mut out };
                why(self.eviction.ask(&mut policy, now, context, runs, &mut Vec::new()))
            }
            (Subject::Overload(policy), Question::Overload { context, classes, replicas, standing }) => {
                let mut policy = Heard { policy: policy.as_mut(), out: &mut out };
                let sources = OverloadSources { context, classes, replicas };
                why(self.overload.ask(&mut policy, now, &sources, *standing, &mut Vec::new()))
            }
            _ => return Err("a question is put to a policy of another decision".to_owned()),
        };
        Ok((out.into_bytes(), reason))
    }
}

fn why<T>(asked: Asked<T>) -> Option<FallbackReason> {
    asked.fallback
}

/// Leads `policy` through `moments`; its state is looked at after every `save_every` of them and after the last. A fault of the policy is
/// part of the course where it answers, and an error where it is told or saves.
pub fn run(policy: &mut Seated, seats: &mut Seats, moments: &[Moment], save_every: usize) -> Result<Course, String> {
    let mut course = Course::with_capacity(moments.len());
    for (at, moment) in moments.iter().enumerate() {
        let fault = |problem: String| format!("moment {at}: {problem}");
        let wanted = policy.policy().terms().facts;
        let facts: Vec<Fact> = moment.facts.iter().copied().filter(|fact| wanted.has(fact.kind)).collect();
        let mut told = 0;
        if !facts.is_empty() {
            let taken = policy.policy().observe(&facts);
            taken.map_err(|kind| fault(format!("observe failed: {}", kind.name())))?;
            told = policy.last_fuel();
        }
        let (proposal, fallback) = seats.ask(&mut policy.subject, moment).map_err(fault)?;
        let fuel = (told, policy.last_fuel());
        let is_looked_at = (at + 1) % save_every == 0 || at + 1 == moments.len();
        let state = if is_looked_at { Some(policy.save().map_err(fault)?) } else { None };
        course.push(Step { proposal, fallback, fuel, state });
    }
    Ok(course)
}
