//! Policies whose every answer is drawn: what the native ones would say, the same with a field or two changed, numbers at the edges of the
//! contract, numbers at random, no opinion, faults. A function of the seed and the call alone.

use std::cell::RefCell;
use std::rc::Rc;

use penstock_base::Generation;
use penstock_policy_api::native::NativePolicies;
use penstock_policy_api::{
    Action, ActionKind, ActionSet, AdmissionDeclaration, AdmissionPolicy, Answer, Call, Context, Decision,
    EvictionDeclaration, EvictionPolicy, Fact, FactSet, FairnessDeclaration, FairnessPolicy, FaultKind, Matrix,
    OverloadDeclaration, OverloadPolicy, OverloadQuestion, Placement, Policies, Policy, Ranking, RequestRecord, Rest,
    RoutingDeclaration, RoutingPolicy, RoutingQuestion, Stance, Terms, Verdict, Worth, Yielder,
};

/// SplitMix64.
pub struct Draw(u64);

/// Numbers at which a rule of the contract begins or ends, and their neighbours.
const EDGES: [u64; 22] = [
    0,
    1,
    2,
    7,
    8,
    15,
    16,
    17,
    127,
    999,
    1_000,
    1_001,
    9_999,
    10_000,
    60_000,
    60_001,
    1_000_000,
    1_000_001,
    60_000_000,
    60_000_001,
    u32::MAX as u64,
    u64::MAX,
];

impl Draw {
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }
    fn of(seed: u64, decision: Decision, number: u64) -> Self {
        let mut draw = Self(seed ^ (decision as u64) << 56);
        draw.0 ^= draw.next() ^ number.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        draw
    }
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }
    pub fn below(&mut self, n: u64) -> u64 {
        self.next() % n.max(1)
    }
    pub fn one_in(&mut self, n: u64) -> bool {
        self.below(n) == 0
    }
    /// A number near `near`, at an edge, or of any size.
    pub fn number(&mut self, near: u64) -> u64 {
        match self.below(8) {
            0..=2 => near.wrapping_add(self.below(3)).wrapping_sub(1),
            3..=4 => self.below(near.saturating_add(1)),
            5..=6 => EDGES[self.below(EDGES.len() as u64) as usize],
            _ => self.next() >> self.below(64),
        }
    }
    /// Rows: most of the time distinct ones of the window; now and then one twice, one outside, or all of them.
    fn rows(&mut self, rows: usize, most: usize) -> Vec<u32> {
        let window = rows as u64;
        let first = self.below(window);
        let count = match self.below(4) {
            0 => 1,
            1 => most.min(rows),
            _ => self.below(most as u64 + 2) as usize,
        };
        let mut named: Vec<u32> = (0..count as u64).map(|at| ((first + at) % window.max(1)) as u32).collect();
        if !self.one_in(4) {
            named.truncate(rows);
        }
        match self.below(12) {
            0 => named.extend(named.first().copied()),
            1 => named.push(self.number(window) as u32),
            2 => named.reverse(),
            _ => {}
        }
        named
    }
    fn fault(&mut self) -> FaultKind {
        use FaultKind::{Epoch, Fuel, Memory, Rebuilding, Trap};
        [Trap, Fuel, Epoch, Memory, Rebuilding][self.below(5) as usize]
    }
}

/// What became of one call, before anything is said.
enum Turn {
    Native,
    Change,
    Invent,
    Silent,
    Fail(FaultKind),
}

impl Turn {
    fn draw(draw: &mut Draw) -> Self {
        match draw.below(16) {
            0..=4 => Self::Native,
            5..=9 => Self::Change,
            10..=13 => Self::Invent,
            14 => Self::Silent,
            _ => Self::Fail(draw.fault()),
        }
    }
}

struct Seat<D> {
    native: Rc<RefCell<NativePolicies>>,
    declaration: D,
    seed: u64,
    told: u64,
}

/// Five fuzzed seats over one native set.
pub struct Fuzzed {
    native: Rc<RefCell<NativePolicies>>,
    admission: Seat<AdmissionDeclaration>,
    routing: Seat<RoutingDeclaration>,
    fairness: Seat<FairnessDeclaration>,
    eviction: Seat<EvictionDeclaration>,
    overload: Seat<OverloadDeclaration>,
}

fn terms(of: &Terms, decision: Decision) -> Terms {
    let actions = if decision == Decision::Overload { ActionSet::all() } else { of.actions };
    Terms { facts: FactSet::all_for(decision), reasons: vec!["own".into()], actions, ..of.clone() }
}

impl Fuzzed {
    pub fn new(seed: u64) -> Self {
        let native = Rc::new(RefCell::new(NativePolicies::new(Generation(1), 512)));
        let mut of = native.borrow_mut();
        macro_rules! seat {
            ($seat:ident, $decision:expr) => {{
                let mut declaration = of.$seat().describe().clone();
                declaration.terms = terms(&declaration.terms, $decision);
                Seat { native: Rc::clone(&native), declaration, seed, told: 0 }
            }};
        }
        let admission = seat!(admission, Decision::Admission);
        let routing = seat!(routing, Decision::Routing);
        let fairness = seat!(fairness, Decision::Fairness);
        let eviction = seat!(eviction, Decision::Eviction);
        let overload = seat!(overload, Decision::Overload);
        drop(of);
        Self { native, admission, routing, fairness, eviction, overload }
    }
}

macro_rules! lives {
    ($($declaration:ty),*) => {$(
        impl Policy for Seat<$declaration> {
            fn terms(&self) -> &Terms {
                &self.declaration.terms
            }
            fn observe(&mut self, facts: &[Fact]) -> Result<(), FaultKind> {
                self.told += 1;
                let mut draw = Draw::new(self.seed ^ self.told << 40 ^ facts.len() as u64);
                if draw.one_in(9) { Err(draw.fault()) } else { Ok(()) }
            }
        }
    )*};
}
lives!(AdmissionDeclaration, RoutingDeclaration, FairnessDeclaration, EvictionDeclaration, OverloadDeclaration);

impl AdmissionPolicy for Seat<AdmissionDeclaration> {
    fn describe(&self) -> &AdmissionDeclaration {
        &self.declaration
    }
    fn decide(&mut self, call: &Call, request: &RequestRecord, context: Context<'_>) -> Answer<Verdict> {
        let draw = &mut Draw::of(self.seed, Decision::Admission, call.number);
        let cap = u64::from(request.max_output_tokens);
        let class = u64::from(request.class_rank.get());
        match Turn::draw(draw) {
            Turn::Native => self.native.borrow_mut().admission().decide(call, request, context),
            Turn::Silent => Answer::NoOpinion,
            Turn::Fail(kind) => Answer::Fault(kind),
            // Into the queue with less reserved than it may need: what runs outgrows the pool.
            Turn::Change => Answer::Proposal(Verdict::Admit {
                reserve_output_tokens: draw.below(cap + 1) as u32,
                class_rank: draw.below(class + 1) as u8,
            }),
            Turn::Invent => Answer::Proposal(match draw.below(4) {
                0 => Verdict::Admit {
                    reserve_output_tokens: draw.number(cap) as u32,
                    class_rank: draw.number(class) as u8,
                },
                1 => Verdict::Defer { for_us: draw.number(20_000) as u32 },
                2 => Verdict::Degrade {
                    max_output_tokens: draw.number(cap.saturating_sub(1)) as u32,
                    reserve_output_tokens: draw.number(cap / 2) as u32,
                    class_rank: draw.number(class) as u8,
                },
                _ => Verdict::Reject { reason: draw.number(16) as u16, retry_after_ms: draw.number(1_000) as u32 },
            }),
        }
    }
}

impl RoutingPolicy for Seat<RoutingDeclaration> {
    fn describe(&self) -> &RoutingDeclaration {
        &self.declaration
    }
    fn decide(&mut self, call: &Call, asked: &RoutingQuestion<'_>, ranked: &mut Vec<u32>) -> Answer<Placement> {
        let draw = &mut Draw::of(self.seed, Decision::Routing, call.number);
        let rows = asked.replicas.rows();
        match Turn::draw(draw) {
            Turn::Native => self.native.borrow_mut().routing().decide(call, asked, ranked),
            Turn::Silent => Answer::NoOpinion,
            Turn::Fail(kind) => {
                // Whatever it has written by then.
                ranked.extend(draw.rows(rows, 8));
                Answer::Fault(kind)
            }
            Turn::Change => {
                ranked.extend(draw.rows(rows, 8));
                Answer::Proposal(Placement::Place { wait_us: draw.below(200_000) as u32, colocate: draw.one_in(2) })
            }
            Turn::Invent if draw.one_in(3) => Answer::Proposal(Placement::Hold { for_us: draw.number(50_000) as u32 }),
            Turn::Invent => {
                ranked.extend((0..draw.below(12)).map(|_| draw.number(rows as u64) as u32));
                Answer::Proposal(Placement::Place { wait_us: draw.number(100_000) as u32, colocate: draw.one_in(2) })
            }
        }
    }
}

impl FairnessPolicy for Seat<FairnessDeclaration> {
    fn describe(&self) -> &FairnessDeclaration {
        &self.declaration
    }
    fn order(&mut self, call: &Call, context: Context<'_>, waiting: &Matrix, ranked: &mut Vec<u32>) -> Answer<Ranking> {
        let draw = &mut Draw::of(self.seed, Decision::Fairness, call.number);
        let rows = waiting.rows();
        let rest = if draw.one_in(3) { Rest::Keep } else { Rest::Append };
        match Turn::draw(draw) {
            Turn::Native => self.native.borrow_mut().fairness().order(call, context, waiting, ranked),
            Turn::Silent => Answer::NoOpinion,
            Turn::Fail(kind) => Answer::Fault(kind),
            Turn::Change => {
                ranked.extend(draw.rows(rows, rows));
                Answer::Proposal(Ranking { rest, tpot_target_us: u32::MAX })
            }
            Turn::Invent => {
                ranked.extend((0..draw.below(20)).map(|_| draw.number(rows as u64) as u32));
                Answer::Proposal(Ranking { rest, tpot_target_us: draw.number(5_000) as u32 })
            }
        }
    }
    fn victims(
        &mut self,
        call: &Call,
        context: Context<'_>,
        running: &Matrix,
        yielders: &mut Vec<Yielder>,
    ) -> Answer<()> {
        let draw = &mut Draw::of(!self.seed, Decision::Fairness, call.number);
        let rows = running.rows();
        match Turn::draw(draw) {
            Turn::Native => self.native.borrow_mut().fairness().victims(call, context, running, yielders),
            Turn::Silent => Answer::NoOpinion,
            Turn::Fail(kind) => Answer::Fault(kind),
            Turn::Change => {
                let named = draw.rows(rows, rows);
                yielders.extend(named.into_iter().map(|row| Yielder { row, how: draw.below(2) as u8 }));
                Answer::Proposal(())
            }
            Turn::Invent => {
                let named = (0..draw.below(9))
                    .map(|_| Yielder { row: draw.number(rows as u64) as u32, how: draw.number(1) as u8 })
                    .collect::<Vec<_>>();
                yielders.extend(named);
                Answer::Proposal(())
            }
        }
    }
}

impl EvictionPolicy for Seat<EvictionDeclaration> {
    fn describe(&self) -> &EvictionDeclaration {
        &self.declaration
    }
    fn decide(&mut self, call: &Call, context: Context<'_>, runs: &Matrix, worths: &mut Vec<Worth>) -> Answer<()> {
        let draw = &mut Draw::of(self.seed, Decision::Eviction, call.number);
        match Turn::draw(draw) {
            Turn::Native => return self.native.borrow_mut().eviction().decide(call, context, runs, worths),
            Turn::Silent => return Answer::NoOpinion,
            Turn::Fail(kind) => return Answer::Fault(kind),
            Turn::Change => {
                worths
                    .extend((0..runs.rows()).map(|_| Worth { price: draw.number(1_000_000), to: draw.below(3) as u8 }));
            }
            Turn::Invent => {
                let count = draw.number(runs.rows() as u64).min(2_000);
                worths.extend((0..count).map(|_| Worth { price: draw.next(), to: draw.number(2) as u8 }));
            }
        }
        Answer::Proposal(())
    }
}

impl OverloadPolicy for Seat<OverloadDeclaration> {
    fn describe(&self) -> &OverloadDeclaration {
        &self.declaration
    }
    fn decide(&mut self, call: &Call, asked: &OverloadQuestion<'_>, actions: &mut Vec<Action>) -> Answer<Stance> {
        let draw = &mut Draw::of(self.seed, Decision::Overload, call.number);
        let known = ActionKind::ALL.len() as u64;
        match Turn::draw(draw) {
            Turn::Native => self.native.borrow_mut().overload().decide(call, asked, actions),
            Turn::Silent => Answer::NoOpinion,
            Turn::Fail(kind) => Answer::Fault(kind),
            Turn::Change => {
                actions.extend((0..draw.below(5)).map(|_| Action {
                    what: ActionKind::ALL[draw.below(known) as usize].code(),
                    class_rank: draw.below(8) as u8,
                    amount: draw.number(100),
                }));
                Answer::Proposal(Stance { level: draw.below(5) as u8, hold_us: 1 + draw.below(400_000) as u32 })
            }
            Turn::Invent => {
                actions.extend((0..draw.below(20)).map(|_| Action {
                    what: draw.number(known) as u16,
                    class_rank: draw.number(7) as u8,
                    amount: draw.number(1_000_000),
                }));
                Answer::Proposal(Stance { level: draw.number(4) as u8, hold_us: draw.number(1_000_000) as u32 })
            }
        }
    }
}

impl Policies for Fuzzed {
    fn generation(&self) -> Generation {
        self.native.borrow().generation()
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
