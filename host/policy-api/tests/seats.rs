//! A seat always gives a decision: what the policy was passed, and who answered.

mod support;

use penstock_base::{ClassRank, Instant, Traits};
use penstock_policy_api::validate::{Change, Malformed, Standing};
use penstock_policy_api::*;
use support::{Facts, Rows, request};

/// Declares by name and answers what it is told to.
struct Scripted<D, A> {
    declaration: D,
    answer: A,
    saw: Option<(Call, Vec<u64>, Matrix)>,
}

impl<D, A> Scripted<D, A> {
    fn new(declaration: D, answer: A) -> Self {
        Self { declaration, answer, saw: None }
    }
}

fn manifest(tables: &[(&str, &[&str])]) -> Manifest {
    let table = |(table, names): &(&str, &[&str])| TableWanted {
        table: table.to_string(),
        names: names.iter().map(|name| Wanted { name: name.to_string(), required: false }).collect(),
    };
    Manifest { tables: tables.iter().map(table).collect(), ..Manifest::default() }
}

type ScriptedRouting = Scripted<RoutingDeclaration, (Vec<u32>, Answer<Placement>)>;
impl Policy for ScriptedRouting {
    fn terms(&self) -> &Terms {
        &self.declaration.terms
    }
}
impl RoutingPolicy for ScriptedRouting {
    fn describe(&self) -> &RoutingDeclaration {
        &self.declaration
    }
    fn decide(&mut self, call: &Call, asked: &RoutingQuestion<'_>, ranked: &mut Vec<u32>) -> Answer<Placement> {
        assert!(ranked.is_empty());
        self.saw = Some((*call, asked.context.values.to_vec(), asked.replicas.clone()));
        ranked.extend(&self.answer.0);
        self.answer.1
    }
}

type ScriptedFairness = Scripted<FairnessDeclaration, (Vec<u32>, Answer<Ranking>)>;
impl Policy for ScriptedFairness {
    fn terms(&self) -> &Terms {
        &self.declaration.terms
    }
}
impl FairnessPolicy for ScriptedFairness {
    fn describe(&self) -> &FairnessDeclaration {
        &self.declaration
    }
    fn order(&mut self, call: &Call, context: Context<'_>, rows: &Matrix, ranked: &mut Vec<u32>) -> Answer<Ranking> {
        self.saw = Some((*call, context.values.to_vec(), rows.clone()));
        ranked.extend(&self.answer.0);
        self.answer.1
    }
    fn victims(&mut self, call: &Call, context: Context<'_>, rows: &Matrix, out: &mut Vec<Yielder>) -> Answer<()> {
        self.saw = Some((*call, context.values.to_vec(), rows.clone()));
        out.extend(self.answer.0.iter().map(|row| Yielder { row: *row, how: 0 }));
        Answer::Proposal(())
    }
}

type ScriptedAdmission = Scripted<AdmissionDeclaration, Answer<Verdict>>;
impl Policy for ScriptedAdmission {
    fn terms(&self) -> &Terms {
        &self.declaration.terms
    }
}
impl AdmissionPolicy for ScriptedAdmission {
    fn describe(&self) -> &AdmissionDeclaration {
        &self.declaration
    }
    fn decide(&mut self, call: &Call, _request: &RequestRecord, context: Context<'_>) -> Answer<Verdict> {
        self.saw = Some((*call, context.values.to_vec(), Matrix::default()));
        self.answer
    }
}

fn place(rows: &[u32]) -> (Vec<u32>, Answer<Placement>) {
    (rows.to_vec(), Answer::Proposal(Placement::Place { wait_us: 0, colocate: false }))
}

fn route(
    tables: &[(&str, &[&str])],
    answer: (Vec<u32>, Answer<Placement>),
    rows: &Rows<ReplicaSignal>,
) -> ScriptedRouting {
    let mut policy = Scripted::new(manifest(tables).routing().expect("optional names"), answer);
    let request = request();
    let asked = PlaceAsked { request: &request, phase: RoutingPhase::Whole };
    let context = Facts::own(&[(RoutingSignal::NeedBlocks, 12)]);
    RoutingSeat::new(7).ask(&mut policy, Instant(3_999), asked, &context, rows);
    policy
}

#[test]
fn a_policy_gets_its_names_in_its_order_with_fills_and_masks() {
    use ReplicaSignal::*;
    let context =
        ["slo-ttft-us", "warp-factor-count", "need-blocks", "known-mask", "expected-output-tokens", "stale-load-us"];
    let rows = ["total-blocks", "active-blocks", "known-mask", "warp-factor-count", "load-age-us"];
    let known = Rows::of(&[&[(TotalBlocks, 50), (ActiveBlocks, 20), (LoadAgeUs, 3)], &[(TotalBlocks, 70)], &[]]);
    let policy = route(&[("routing", &context), ("replica", &rows)], place(&[0]), &known);
    let (call, values, matrix) = policy.saw.expect("it was asked");
    assert_eq!((call.number, call.now_us), (1, 3));
    assert_eq!(call.seed, seed::call_seed(7, Question::Routing, 1));
    // Known are need-blocks (bit 2) and the mask itself (bit 3); the output estimate reads as the cap of 100.
    assert_eq!(values, [u64::MAX, 0, 12, 0b1100, 100, 500_000]);
    assert_eq!(matrix.column(0), [50, 70, 0]);
    assert_eq!(matrix.column(1), [20, 70, 0], "unknown use reads as a full pool");
    assert_eq!(matrix.column(2), [0b10111, 0b101, 0b100]);
    assert_eq!(matrix.column(3), [0, 0, 0]);
    assert_eq!(matrix.column(4), [3, u64::MAX, u64::MAX]);
}

#[test]
fn named_fills_read_other_quantities_of_the_row() {
    use RunningSignal::*;
    let names = ["recompute-tokens", "computed-tokens", "expected-left-tokens", "priority-biased"];
    let declaration = manifest(&[("running", &names)]).fairness().expect("optional names");
    let mut policy: ScriptedFairness = Scripted::new(declaration, (vec![0], Answer::NoOpinion));
    let mut rows = Rows::of(&[&[(ComputedTokens, 33)], &[(RecomputeTokens, 5), (ExpectedLeftTokens, 6)], &[]]);
    rows.max_left = Some(77);
    let mut victims = Vec::new();
    VictimsSeat::new(1).ask(&mut policy, Instant(0), &Facts::default(), &rows, &mut victims);
    let (_, _, matrix) = policy.saw.take().expect("it was asked");
    assert_eq!(matrix.column(0), [33, 5, 0]);
    assert_eq!(matrix.column(2), [77, 6, 77]);
    assert_eq!(matrix.column(3), [1 << 31; 3], "an unknown priority is neutral");
    let names = ["uncached-tokens", "expected-output-tokens"];
    policy.declaration = manifest(&[("waiting", &names)]).fairness().expect("optional names");
    let rows = Rows::of(&[&[(WaitingSignal::InputTokens, 9), (WaitingSignal::MaxOutputTokens, 8)]]);
    OrderSeat::new(1).ask(&mut policy, Instant(0), &Facts::default(), &rows, &mut Vec::new());
    let (_, _, matrix) = policy.saw.expect("it was asked");
    assert_eq!((matrix.get(0, 0), matrix.get(0, 1)), (9, 8));
}

#[test]
fn whatever_a_router_answers_there_is_a_ranking() {
    use FallbackReason::{Fault, Malformed as Bad, NoOpinion};
    let good = |wait_us| Answer::Proposal(Placement::Place { wait_us, colocate: true });
    let hold = |for_us| Answer::Proposal(Placement::Hold { for_us });
    let cases = [
        (vec![2, 0], good(0), None, None),
        (vec![1], good(1_000_001), None, Some(Change::WaitClamped)),
        (vec![], good(0), Some(NoOpinion), None),
        (vec![0], Answer::NoOpinion, Some(NoOpinion), None),
        (vec![0], Answer::Fault(FaultKind::Fuel), Some(Fault(FaultKind::Fuel)), None),
        (vec![3], good(0), Some(Bad(Malformed::RowOutOfRange)), None),
        (vec![1, 1], good(0), Some(Bad(Malformed::RowTwice)), None),
        (vec![0; 9], good(0), Some(Bad(Malformed::TooManyRows)), None),
        (vec![], hold(1_000), None, None),
        (vec![], hold(999), Some(Bad(Malformed::HoldOutOfRange)), None),
        (vec![], hold(1_000_001), Some(Bad(Malformed::HoldOutOfRange)), None),
    ];
    let rows = Rows::of(&[
        &[(ReplicaSignal::ReplicaId, 7)],
        &[(ReplicaSignal::ReplicaId, 6)],
        &[(ReplicaSignal::ReplicaId, 5)],
    ]);
    let (request, mut seat) = (request(), RoutingSeat::new(1));
    for (at, (ranked, answer, fallback, changed)) in cases.into_iter().enumerate() {
        let declaration = Manifest::default().routing().expect("nothing asked for");
        let mut policy = Scripted::new(declaration, (ranked.clone(), answer));
        let asked = PlaceAsked { request: &request, phase: RoutingPhase::Whole };
        let got = seat.ask(&mut policy, Instant(0), asked, &Facts::default(), &rows);
        assert_eq!((got.call, got.fallback, got.changed), (at as u64 + 1, fallback, changed), "{ranked:?} {answer:?}");
        if fallback.is_some() {
            let RoutingDecision::Place { ranked, .. } = got.decision else { panic!("the default places") };
            assert_eq!(ranked.as_slice(), [2, 1, 0], "all unknown: by id");
            assert_eq!(fallback.is_some_and(FallbackReason::is_strike), fallback != Some(NoOpinion));
        }
    }
    assert_eq!((seat.rows().names(), seat.context().len()), (0, 0), "what the policy was passed, not its default");
}

#[test]
fn unnamed_rows_follow_in_native_order_or_wait() {
    let declaration = || Manifest::default().fairness().expect("nothing asked for");
    let class = |rank| vec![(WaitingSignal::ClassRank, rank)];
    let rows = Rows { rows: vec![class(1), class(5), class(2), class(5)], max_left: None };
    let ask = |named: &[u32], rest, tpot_target_us| {
        let answer = Answer::Proposal(Ranking { rest, tpot_target_us });
        let mut policy = Scripted::new(declaration(), (named.to_vec(), answer));
        let mut ranked = vec![9, 9, 9];
        let got = OrderSeat::new(1).ask(&mut policy, Instant(0), &Facts::default(), &rows, &mut ranked);
        (ranked, got.decision.named, got.decision.tpot_target_us, got.fallback)
    };
    assert_eq!(ask(&[2], Rest::Append, 1_000), (vec![2, 1, 3, 0], 1, Some(1_000), None));
    assert_eq!(ask(&[2], Rest::Keep, u32::MAX), (vec![2], 1, None, None));
    assert_eq!(ask(&[], Rest::Keep, u32::MAX), (vec![], 0, None, None), "all wait");
    assert_eq!(ask(&[], Rest::Append, 2_000), (vec![1, 3, 2, 0], 0, Some(2_000), None));
    let silent = Some(FallbackReason::NoOpinion);
    assert_eq!(ask(&[], Rest::Append, u32::MAX), (vec![1, 3, 2, 0], 4, None, silent));
    let bad = |why| Some(FallbackReason::Malformed(why));
    assert_eq!(ask(&[0], Rest::Append, 999).3, bad(Malformed::TargetOutOfRange));
    assert_eq!(ask(&[0, 0], Rest::Append, u32::MAX), (vec![1, 3, 2, 0], 4, None, bad(Malformed::RowTwice)));
}

#[test]
fn victims_beyond_the_number_asked_for_are_cut() {
    let mut policy =
        Scripted::new(Manifest::default().fairness().expect("nothing asked for"), (vec![3, 1, 0], Answer::NoOpinion));
    let (rows, mut victims) = (Rows::all(4, 1), Vec::new());
    let context = Facts::own(&[(VictimsSignal::TakeSequences, 2)]);
    let got = VictimsSeat::new(1).ask(&mut policy, Instant(0), &context, &rows, &mut victims);
    assert_eq!((got.fallback, got.changed), (None, Some(Change::VictimsCut)));
    assert_eq!(victims.iter().map(|victim| victim.row).collect::<Vec<_>>(), [3, 1]);
}

#[test]
fn verdicts_are_held_to_the_contract() {
    use AdmissionDecision as Decided;
    let mut asked = request();
    asked.traits = Traits::MAY_DEFER.with(Traits::MAY_DEGRADE);
    asked.deadline_us = 100_000;
    let class = ClassRank::default();
    let mut seat = AdmissionSeat::new(1);
    let mut put = |request: &RequestRecord, deferrals, verdict| {
        let mut policy = Scripted::new(Manifest::default().admission().expect("nothing"), Answer::Proposal(verdict));
        let got = seat.ask(&mut policy, Instant(0), request, deferrals, &Facts::default());
        match got.fallback {
            None => Ok((got.decision, got.changed)),
            Some(FallbackReason::Malformed(why)) => Err(why),
            Some(other) => panic!("{other:?}"),
        }
    };
    let admit = |reserve_output_tokens, class_rank| Verdict::Admit { reserve_output_tokens, class_rank };
    assert_eq!(
        put(&asked, 0, admit(100, 0)).expect("lower").0,
        Decided::Admit { reserve_output_tokens: 100, class: ClassRank::MIN }
    );
    assert_eq!(put(&asked, 0, admit(101, 3)), Err(Malformed::ReserveAboveCap));
    assert_eq!(put(&asked, 0, admit(1, 4)), Err(Malformed::ClassRaised));
    assert_eq!(put(&asked, 0, admit(1, 8)), Err(Malformed::ClassOutOfRange));

    let defer = |for_us| Verdict::Defer { for_us };
    let at_once = (Decided::Admit { reserve_output_tokens: 100, class }, Some(Change::DeferBecameAdmit));
    assert_eq!(put(&asked, 0, defer(20_000)), Ok((Decided::Defer { for_us: 20_000 }, None)));
    assert_eq!(put(&asked, 0, defer(1_000)), Ok((Decided::Defer { for_us: 10_000 }, Some(Change::DeferRaised))));
    assert_eq!(put(&asked, 8, defer(20_000)), Ok(at_once), "asked eight times");
    assert_eq!(put(&request(), 0, defer(20_000)), Ok(at_once), "it may not be deferred");
    let late = Decided::Reject { reason: penstock_base::Refusal::Deadline, retry_after_ms: 1_000 };
    assert_eq!(put(&asked, 0, defer(100_001)), Ok((late, Some(Change::DeferPastDeadline))));
    assert_eq!(put(&asked, 0, defer(999)), Err(Malformed::DeferOutOfRange));
    assert_eq!(put(&asked, 0, defer(60_000_001)), Err(Malformed::DeferOutOfRange));

    let degrade = |max_output_tokens, reserve_output_tokens| Verdict::Degrade {
        max_output_tokens,
        reserve_output_tokens,
        class_rank: 3,
    };
    let smaller = Decided::Degrade { max_output_tokens: 16, reserve_output_tokens: 16, class };
    assert_eq!(put(&asked, 0, degrade(16, 16)), Ok((smaller, None)));
    assert_eq!(put(&asked, 0, degrade(15, 1)), Err(Malformed::CapOutOfRange));
    assert_eq!(put(&asked, 0, degrade(100, 1)), Err(Malformed::CapOutOfRange));
    assert_eq!(put(&asked, 0, degrade(99, 100)), Err(Malformed::ReserveAboveCap));
    assert_eq!(put(&request(), 0, degrade(16, 16)), Err(Malformed::MayNotDegrade));

    let reject = |reason, retry_after_ms| Verdict::Reject { reason, retry_after_ms };
    let refused = |retry_after_ms| Decided::Reject { reason: penstock_base::Refusal::TooLong, retry_after_ms };
    assert_eq!(put(&asked, 0, reject(4, 1_000)), Ok((refused(1_000), None)));
    assert_eq!(put(&asked, 0, reject(4, 0)), Ok((refused(1_000), Some(Change::RetryAfterClamped))));
    assert_eq!(put(&asked, 0, reject(4, 60_001)), Ok((refused(60_000), Some(Change::RetryAfterClamped))));
    assert_eq!(put(&asked, 0, reject(5, 1_000)), Err(Malformed::UnknownReason), "the host's own");
    assert_eq!(put(&asked, 0, reject(16, 1_000)), Err(Malformed::UnknownReason), "not named in the manifest");
    let named = Manifest { reasons: vec!["moon".into()], ..Manifest::default() }.admission().expect("nothing");
    let mut policy = Scripted::new(named, Answer::Proposal(reject(16, 1_000)));
    let got = seat.ask(&mut policy, Instant(0), &asked, 0, &Facts::default());
    assert_eq!(got.decision, Decided::Reject { reason: penstock_base::Refusal::Policy(16), retry_after_ms: 1_000 });
}

#[test]
fn stances_are_held_to_the_contract() {
    let terms = Terms { actions: ActionSet::all(), ..Terms::native("t") };
    let action = |kind: ActionKind, class_rank, amount| Action { what: kind.code(), class_rank, amount };
    let put = |stance: (u8, u32), actions: &[Action], standing: (u8, u64), founded| {
        let standing = Standing { level: standing.0, held_us: standing.1 };
        let check = validate::StanceCheck { terms: &terms, standing, busy_founded: founded };
        let mut out = Vec::new();
        let got = check.stance(Stance { level: stance.0, hold_us: stance.1 }, actions, &mut out);
        got.map(|valid| (valid.proposal.level, valid.changed, out.len()))
    };
    assert_eq!(put((0, 1), &[], (0, 0), false), Ok((0, None, 0)));
    assert_eq!(put((4, 60_000_000), &[], (0, 0), false), Ok((4, None, 0)), "up at once");
    assert_eq!(put((0, 1), &[], (4, 1_000_000), false), Ok((3, Some(Change::LevelFallSlowed), 0)));
    assert_eq!(put((3, 1), &[], (4, 999_999), false), Ok((4, Some(Change::LevelFallSlowed), 0)));
    assert_eq!(put((5, 1), &[], (0, 0), false), Err(Malformed::LevelOutOfRange));
    assert_eq!(put((0, 0), &[], (0, 0), false), Err(Malformed::HoldOutOfRange));
    assert_eq!(put((0, 60_000_001), &[], (0, 0), false), Err(Malformed::HoldOutOfRange));
    let pause = action(ActionKind::PauseClass, 7, 0);
    assert_eq!(put((1, 1), &[pause; 16], (0, 0), false), Ok((1, None, 16)));
    assert_eq!(put((1, 1), &[pause; 17], (0, 0), false), Err(Malformed::TooManyActions));
    assert_eq!(put((1, 1), &[action(ActionKind::PauseClass, 8, 0)], (0, 0), false), Err(Malformed::ClassOutOfRange));
    assert_eq!(
        put((1, 1), &[Action { what: 9, class_rank: 0, amount: 0 }], (0, 0), false),
        Err(Malformed::UnknownAction)
    );
    let busy = action(ActionKind::Busy, 7, 0);
    assert_eq!(put((4, 1), &[busy, pause], (0, 0), true), Ok((4, None, 2)));
    assert_eq!(put((4, 1), &[busy, pause], (0, 0), false), Ok((4, Some(Change::BusyDropped), 1)));
    let shed = action(ActionKind::ShedClass, 2, 1_000_001);
    assert_eq!(put((3, 1), &[shed], (0, 0), false), Ok((3, Some(Change::AmountClamped), 1)));
    let undeclared =
        validate::StanceCheck { terms: &Terms::native("t"), standing: Standing::default(), busy_founded: true };
    let got = undeclared.stance(Stance { level: 4, hold_us: 1 }, &[busy], &mut Vec::new());
    assert_eq!(got.map(|valid| valid.changed), Err(Malformed::UnknownAction));
}

#[test]
fn busy_needs_every_replica_known_fresh_and_loaded() {
    use ReplicaSignal::*;
    let loaded: &[(ReplicaSignal, u64)] = &[(LoadAgeUs, 499_999), (ActiveBlocks, 1)];
    let founded = |rows: &[&[(ReplicaSignal, u64)]]| busy_is_founded(&Rows::of(rows), 500_000);
    assert!(founded(&[loaded, &[(LoadAgeUs, 0), (InflightRequests, 3)]]));
    assert!(!founded(&[]));
    assert!(!founded(&[loaded, &[(LoadAgeUs, 0), (ActiveBlocks, 0)]]), "one is idle");
    assert!(!founded(&[loaded, &[(LoadAgeUs, 500_000), (ActiveBlocks, 9)]]), "one is stale");
    assert!(!founded(&[loaded, &[(ActiveBlocks, 9)]]), "one is unknown");
}
