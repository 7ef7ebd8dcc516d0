//! Policies that follow the native defaults most of the time, and a whim else: reserves below the cap, lowered caps, deferrals, odd
//! rankings, waits, victims, prices, stances, and now and then an answer that cannot stand or a fault.
//!
//! The defaults reserve all that a request may need, so that nothing is ever short of blocks; whims bring the machines to where they must
//! take them back. A whim is a function of the call alone: it is replayed like everything else.

use penstock_base::codec::Writer;
use penstock_base::{Generation, Traits};
use penstock_policy_api::native::{Bounded, ClassFirst, Ladder, Lru, OverlapLoad};
use penstock_policy_api::{
    Action, AdmissionDeclaration, AdmissionPolicy, Answer, Call, Context, EvictionDeclaration, EvictionPolicy, Fact,
    FairnessDeclaration, FairnessPolicy, FaultKind, Kept, Matrix, OverloadDeclaration, OverloadPolicy,
    OverloadQuestion, Placement, Policies, Policy, Ranking, RequestRecord, Rest, RestoreError, RestoreInfo,
    RoutingDeclaration, RoutingPolicy, RoutingQuestion, Stance, Terms, Verdict, Worth, Yielder,
};

use crate::rng::Rng;

/// Who sits in the seats of a scenario's machines.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum PolicyKind {
    /// The native defaults.
    Native,
    /// The native defaults with whims.
    Whims,
}

/// A policy with whims.
#[derive(Debug)]
struct Whim<P> {
    inner: P,
    on: bool,
}

impl<P> Whim<P> {
    /// The draws of a call that follows a whim.
    fn draw(&self, call: &Call) -> Option<Rng> {
        let mut rng = Rng::stream(call.seed, call.number);
        (self.on && !rng.one_in(3)).then_some(rng)
    }
}

impl<P: Policy> Policy for Whim<P> {
    fn terms(&self) -> &Terms {
        self.inner.terms()
    }
    fn observe(&mut self, facts: &[Fact]) -> Result<(), FaultKind> {
        self.inner.observe(facts)
    }
    fn save(&mut self, out: &mut Writer) -> Result<(), FaultKind> {
        self.inner.save(out)
    }
    fn restore(&mut self, info: &RestoreInfo, state: &[u8]) -> Result<Kept, RestoreError> {
        self.inner.restore(info, state)
    }
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

impl AdmissionPolicy for Whim<Bounded> {
    fn describe(&self) -> &AdmissionDeclaration {
        self.inner.describe()
    }
    fn decide(&mut self, call: &Call, request: &RequestRecord, context: Context<'_>) -> Answer<Verdict> {
        let native = self.inner.decide(call, request, context);
        let Some(mut rng) = self.draw(call) else { return native };
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

impl RoutingPolicy for Whim<OverlapLoad> {
    fn describe(&self) -> &RoutingDeclaration {
        self.inner.describe()
    }
    fn decide(&mut self, call: &Call, asked: &RoutingQuestion<'_>, ranked: &mut Vec<u32>) -> Answer<Placement> {
        let Some(mut rng) = self.draw(call) else { return self.inner.decide(call, asked, ranked) };
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

impl FairnessPolicy for Whim<ClassFirst> {
    fn describe(&self) -> &FairnessDeclaration {
        self.inner.describe()
    }
    fn order(&mut self, call: &Call, context: Context<'_>, waiting: &Matrix, ranked: &mut Vec<u32>) -> Answer<Ranking> {
        let Some(mut rng) = self.draw(call) else { return self.inner.order(call, context, waiting, ranked) };
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
        let Some(mut rng) = self.draw(call) else { return self.inner.victims(call, context, running, yielders) };
        if let Some(answer) = useless(&mut rng) {
            return answer;
        }
        let rows = some_rows(&mut rng, running.rows());
        yielders.extend(rows.into_iter().map(|row| Yielder { row, how: rng.below(2) as u8 }));
        Answer::Proposal(())
    }
}

impl EvictionPolicy for Whim<Lru> {
    fn describe(&self) -> &EvictionDeclaration {
        self.inner.describe()
    }
    fn decide(&mut self, call: &Call, context: Context<'_>, runs: &Matrix, worths: &mut Vec<Worth>) -> Answer<()> {
        let Some(mut rng) = self.draw(call) else { return self.inner.decide(call, context, runs, worths) };
        if let Some(answer) = useless(&mut rng) {
            return answer;
        }
        let rows = runs.rows() - usize::from(rng.one_in(30) && runs.rows() > 0);
        worths.extend((0..rows).map(|_| Worth { price: rng.below(4), to: rng.below(3) as u8 }));
        Answer::Proposal(())
    }
}

impl OverloadPolicy for Whim<Ladder> {
    fn describe(&self) -> &OverloadDeclaration {
        self.inner.describe()
    }
    fn decide(&mut self, call: &Call, asked: &OverloadQuestion<'_>, actions: &mut Vec<Action>) -> Answer<Stance> {
        let native = self.inner.decide(call, asked, actions);
        let Some(mut rng) = self.draw(call).filter(|_| call.number.is_multiple_of(4)) else { return native };
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

/// The seats of one machine.
#[derive(Debug)]
pub struct Seats {
    generation: Generation,
    admission: Whim<Bounded>,
    routing: Whim<OverlapLoad>,
    fairness: Whim<ClassFirst>,
    eviction: Whim<Lru>,
    overload: Whim<Ladder>,
}

impl Seats {
    /// A fresh set for a machine with this context window.
    pub fn new(kind: PolicyKind, context_tokens_max: u32) -> Self {
        let on = kind == PolicyKind::Whims;
        Self {
            generation: Generation(0),
            admission: Whim { inner: Bounded::new(), on },
            routing: Whim { inner: OverlapLoad::new(), on },
            fairness: Whim { inner: ClassFirst::new(), on },
            eviction: Whim { inner: Lru::new(), on },
            overload: Whim { inner: Ladder::new(context_tokens_max), on },
        }
    }
}

impl Policies for Seats {
    fn generation(&self) -> Generation {
        self.generation
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
