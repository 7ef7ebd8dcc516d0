//! Policies that follow those of the cast most of the time, and a whim else: reserves below the cap, lowered caps, deferrals, odd
//! rankings, waits, victims, prices, stances, and now and then an answer that cannot stand or a fault.
//!
//! The defaults reserve all that a request may need, so that nothing is ever short of blocks; whims bring the machines to where they must
//! take them back. A whim is a function of the call alone: it is replayed like everything else, and it is the same whoever it overrules.

use std::cell::RefCell;
use std::rc::Rc;

use penstock_base::codec::Writer;
use penstock_base::{Generation, Instant, Traits};
use penstock_policy_api::{
    Action, AdmissionDeclaration, AdmissionPolicy, Answer, Call, Context, EvictionDeclaration, EvictionPolicy, Fact,
    FairnessDeclaration, FairnessPolicy, FaultKind, Kept, Matrix, OverloadDeclaration, OverloadPolicy,
    OverloadQuestion, Placement, Policies, Policy, Ranking, RequestRecord, Rest, RestoreError, RestoreInfo,
    RoutingDeclaration, RoutingPolicy, RoutingQuestion, Stance, Terms, Verdict, Worth, Yielder,
};

use crate::rng::Rng;
use crate::seats::Seats;

/// How a scenario's seats behave.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum PolicyKind {
    /// As the cast has it.
    Plain,
    /// With whims.
    Whims,
}

/// Whoever is overruled, shared by the five seats: one set sits there.
type Shared = Rc<RefCell<Box<dyn Seats>>>;

/// A seat with whims.
struct Whim<D> {
    inner: Shared,
    /// Of the policy behind it, read again at each switch.
    declaration: D,
}

/// The draws of a call that follows a whim.
fn draw(call: &Call) -> Option<Rng> {
    let mut rng = Rng::stream(call.seed, call.number);
    (!rng.one_in(3)).then_some(rng)
}

/// The life of each seat is that of the policy behind it.
macro_rules! lives {
    ($($declaration:ty, $seat:ident;)*) => {$(
        impl Policy for Whim<$declaration> {
            fn terms(&self) -> &Terms {
                &self.declaration.terms
            }
            fn observe(&mut self, facts: &[Fact]) -> Result<(), FaultKind> {
                self.inner.borrow_mut().$seat().observe(facts)
            }
            fn save(&mut self, out: &mut Writer) -> Result<(), FaultKind> {
                self.inner.borrow_mut().$seat().save(out)
            }
            fn restore(&mut self, info: &RestoreInfo, state: &[u8]) -> Result<Kept, RestoreError> {
                self.inner.borrow_mut().$seat().restore(info, state)
            }
        }
    )*};
}

lives! {
    AdmissionDeclaration, admission;
    RoutingDeclaration, routing;
    FairnessDeclaration, fairness;
    EvictionDeclaration, eviction;
    OverloadDeclaration, overload;
}

/// An answer that is none, or a fault: one whim in twenty.
fn useless<T>(rng: &mut Rng) -> Option<Answer<T>> {
    match rng.below(40) {
        0 => Some(Answer::NoOpinion),
        1 => Some(Answer::Fault(FaultKind::Trap)),
        _ => None,
    }
}

/// Some of `0..rows` in any order; now and then one twice, or one that is not there.
fn some_rows(rng: &mut Rng, rows: usize) -> Vec<u32> {
    let mut all: Vec<u32> = (0..rows as u32).collect();
    for at in (1..all.len()).rev() {
        all.swap(at, rng.below(at as u64 + 1) as usize);
    }
    all.truncate(rng.between(1, rows.max(1) as u64) as usize);
    if rng.one_in(30) {
        all.push(rng.below(rows as u64 + 2) as u32);
    }
    all
}

impl AdmissionPolicy for Whim<AdmissionDeclaration> {
    fn describe(&self) -> &AdmissionDeclaration {
        &self.declaration
    }
    fn decide(&mut self, call: &Call, request: &RequestRecord, context: Context<'_>) -> Answer<Verdict> {
        let native = self.inner.borrow_mut().admission().decide(call, request, context);
        let Some(mut rng) = draw(call) else { return native };
        if let Some(answer) = useless(&mut rng) {
            return answer;
        }
        let Answer::Proposal(Verdict::Admit { class_rank, .. }) = native else { return native };
        let cap = request.max_output_tokens;
        let reserve_output_tokens = rng.below(u64::from(cap) + 1) as u32;
        Answer::Proposal(match rng.below(10) {
            0 if request.traits.has(Traits::MAY_DEFER) => Verdict::Defer { for_us: rng.below(2_000_000) as u32 },
            1 if request.traits.has(Traits::MAY_DEGRADE) => Verdict::Degrade {
                max_output_tokens: rng.between(1, u64::from(cap)) as u32,
                reserve_output_tokens: 0,
                class_rank,
            },
            2 => Verdict::Admit { reserve_output_tokens, class_rank: rng.below(9) as u8 },
            _ => Verdict::Admit { reserve_output_tokens, class_rank },
        })
    }
}

impl RoutingPolicy for Whim<RoutingDeclaration> {
    fn describe(&self) -> &RoutingDeclaration {
        &self.declaration
    }
    fn decide(&mut self, call: &Call, asked: &RoutingQuestion<'_>, ranked: &mut Vec<u32>) -> Answer<Placement> {
        let Some(mut rng) = draw(call) else { return self.inner.borrow_mut().routing().decide(call, asked, ranked) };
        if let Some(answer) = useless(&mut rng) {
            return answer;
        }
        if rng.one_in(12) {
            return Answer::Proposal(Placement::Hold { for_us: rng.below(300_000) as u32 });
        }
        ranked.extend(some_rows(&mut rng, asked.replicas.rows()));
        Answer::Proposal(Placement::Place { wait_us: rng.pick(&[0, 0, 1_000, 200_000]), colocate: true })
    }
}

impl FairnessPolicy for Whim<FairnessDeclaration> {
    fn describe(&self) -> &FairnessDeclaration {
        &self.declaration
    }
    fn order(&mut self, call: &Call, context: Context<'_>, waiting: &Matrix, ranked: &mut Vec<u32>) -> Answer<Ranking> {
        let Some(mut rng) = draw(call) else {
            return self.inner.borrow_mut().fairness().order(call, context, waiting, ranked);
        };
        if let Some(answer) = useless(&mut rng) {
            return answer;
        }
        ranked.extend(some_rows(&mut rng, waiting.rows()));
        let rest = if rng.one_in(4) { Rest::Keep } else { Rest::Append };
        Answer::Proposal(Ranking { rest, tpot_target_us: rng.pick(&[u32::MAX, 1_000, 20_000]) })
    }
    fn victims(
        &mut self,
        call: &Call,
        context: Context<'_>,
        running: &Matrix,
        yielders: &mut Vec<Yielder>,
    ) -> Answer<()> {
        let Some(mut rng) = draw(call) else {
            return self.inner.borrow_mut().fairness().victims(call, context, running, yielders);
        };
        if let Some(answer) = useless(&mut rng) {
            return answer;
        }
        let rows = some_rows(&mut rng, running.rows());
        yielders.extend(rows.into_iter().map(|row| Yielder { row, how: rng.below(2) as u8 }));
        Answer::Proposal(())
    }
}

impl EvictionPolicy for Whim<EvictionDeclaration> {
    fn describe(&self) -> &EvictionDeclaration {
        &self.declaration
    }
    fn decide(&mut self, call: &Call, context: Context<'_>, runs: &Matrix, worths: &mut Vec<Worth>) -> Answer<()> {
        let Some(mut rng) = draw(call) else {
            return self.inner.borrow_mut().eviction().decide(call, context, runs, worths);
        };
        if let Some(answer) = useless(&mut rng) {
            return answer;
        }
        let rows = runs.rows() - usize::from(rng.one_in(30) && runs.rows() > 0);
        worths.extend((0..rows).map(|_| Worth { price: rng.below(4), to: rng.below(3) as u8 }));
        Answer::Proposal(())
    }
}

impl OverloadPolicy for Whim<OverloadDeclaration> {
    fn describe(&self) -> &OverloadDeclaration {
        &self.declaration
    }
    fn decide(&mut self, call: &Call, asked: &OverloadQuestion<'_>, actions: &mut Vec<Action>) -> Answer<Stance> {
        let native = self.inner.borrow_mut().overload().decide(call, asked, actions);
        let Some(mut rng) = draw(call).filter(|_| call.number.is_multiple_of(4)) else { return native };
        actions.clear();
        if let Some(answer) = useless(&mut rng) {
            return answer;
        }
        for _ in 0..rng.below(3) {
            let (what, amount) = (1 + rng.below(9) as u16, rng.pick(&[0, 1, 8, 40]));
            actions.push(Action { what, class_rank: rng.below(8) as u8, amount });
        }
        Answer::Proposal(Stance { level: rng.below(6) as u8, hold_us: rng.between(1, 300_000) as u32 })
    }
}

/// The seats of one machine, each with whims.
pub struct WhimSeats {
    inner: Shared,
    admission: Whim<AdmissionDeclaration>,
    routing: Whim<RoutingDeclaration>,
    fairness: Whim<FairnessDeclaration>,
    eviction: Whim<EvictionDeclaration>,
    overload: Whim<OverloadDeclaration>,
}

impl WhimSeats {
    /// Whims before `inner`.
    pub fn new(mut inner: Box<dyn Seats>) -> Self {
        let (admission, routing) = (inner.admission().describe().clone(), inner.routing().describe().clone());
        let (fairness, eviction) = (inner.fairness().describe().clone(), inner.eviction().describe().clone());
        let overload = inner.overload().describe().clone();
        let inner = Rc::new(RefCell::new(inner));
        Self {
            admission: Whim { inner: Rc::clone(&inner), declaration: admission },
            routing: Whim { inner: Rc::clone(&inner), declaration: routing },
            fairness: Whim { inner: Rc::clone(&inner), declaration: fairness },
            eviction: Whim { inner: Rc::clone(&inner), declaration: eviction },
            overload: Whim { inner: Rc::clone(&inner), declaration: overload },
            inner,
        }
    }
}

impl Policies for WhimSeats {
    fn generation(&self) -> Generation {
        self.inner.borrow().generation()
    }
    fn admission(&mut self) -> &mut dyn AdmissionPolicy {
        &mut self.admission
    }
    fn routing(&mut self) -> &mut dyn RoutingPolicy {
        &mut self.routing
    }
    fn fairness(&mut self) -> &mut dyn FairnessPolicy {
        &mut self.fairness
    }
    fn eviction(&mut self) -> &mut dyn EvictionPolicy {
        &mut self.eviction
    }
    fn overload(&mut self) -> &mut dyn OverloadPolicy {
        &mut self.overload
    }
}

impl Seats for WhimSeats {
    fn switch(&mut self, generation: Generation, now: Instant) -> Result<(), String> {
        let mut inner = self.inner.borrow_mut();
        inner.switch(generation, now)?;
        self.admission.declaration = inner.admission().describe().clone();
        self.routing.declaration = inner.routing().describe().clone();
        self.fairness.declaration = inner.fairness().describe().clone();
        self.eviction.declaration = inner.eviction().describe().clone();
        self.overload.declaration = inner.overload().describe().clone();
        Ok(())
    }

    fn between_steps(&mut self, now: Instant) -> Result<(), String> {
        self.inner.borrow_mut().between_steps(now)
    }
}
