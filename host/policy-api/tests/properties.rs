//! For any proposal and any facts: nothing out of bounds passes, and the native defaults pass their own checks.

mod support;

use std::collections::BTreeSet;

use penstock_base::{ClassRank, Instant, Traits};
use penstock_policy_api::native::NativePolicies;
use penstock_policy_api::validate::{self, RowMarks, StanceCheck, Standing, VerdictCheck};
use penstock_policy_api::*;
use proptest::collection::vec;
use proptest::prelude::*;
use support::{Facts, Rows, request};

/// Numbers near the ends, where checks go wrong.
fn edgy() -> impl Strategy<Value = u64> {
    prop_oneof![0..4u64, Just(u64::MAX), Just(1 << 32), 0..2_000_000u64, any::<u64>()]
}

fn edgy32() -> impl Strategy<Value = u32> {
    prop_oneof![0..20u32, 990..1_010u32, 59_999_990..60_000_010u32, Just(u32::MAX), any::<u32>()]
}

fn verdict() -> impl Strategy<Value = Verdict> {
    prop_oneof![
        (edgy32(), 0..10u8)
            .prop_map(|(reserve_output_tokens, class_rank)| Verdict::Admit { reserve_output_tokens, class_rank }),
        edgy32().prop_map(|for_us| Verdict::Defer { for_us }),
        (edgy32(), edgy32(), 0..10u8).prop_map(|(max_output_tokens, reserve_output_tokens, class_rank)| {
            Verdict::Degrade { max_output_tokens, reserve_output_tokens, class_rank }
        }),
        (0..20u16, edgy32()).prop_map(|(reason, retry_after_ms)| Verdict::Reject { reason, retry_after_ms }),
    ]
}

fn distinct_and_inside(rows: impl IntoIterator<Item = u32>, window: usize) -> bool {
    let mut seen = BTreeSet::new();
    rows.into_iter().all(|row| (row as usize) < window && seen.insert(row))
}

/// Rows in which each signal is known or not, with any value.
fn rows<S: Signal>(most: usize) -> impl Strategy<Value = Rows<S>> {
    let row = vec(proptest::option::of(edgy()), S::ALL.len()).prop_map(|cells| {
        S::ALL.iter().zip(cells).filter_map(|(signal, cell)| cell.map(|cell| (*signal, cell))).collect::<Vec<_>>()
    });
    let max_left = proptest::option::of(edgy());
    (vec(row, 0..=most), max_left).prop_map(|(rows, max_left)| Rows { rows, max_left })
}

fn facts<S: Signal>() -> impl Strategy<Value = Facts<S>> {
    let common = vec(proptest::option::of(edgy()), CommonSignal::ALL.len());
    let own = vec(proptest::option::of(edgy()), S::ALL.len());
    (common, own).prop_map(|(common, own)| Facts {
        common: CommonSignal::ALL.iter().zip(common).filter_map(|(signal, value)| Some((*signal, value?))).collect(),
        own: S::ALL.iter().zip(own).filter_map(|(signal, value)| Some((*signal, value?))).collect(),
    })
}

fn any_request() -> impl Strategy<Value = RequestRecord> {
    (0..8u8, edgy32(), edgy32(), edgy(), 0..128u32).prop_map(|(class, input_tokens, cap, deadline_us, traits)| {
        RequestRecord {
            class_rank: ClassRank::clamped(class),
            input_tokens,
            max_output_tokens: cap,
            deadline_us,
            traits: Traits(traits),
            ..request()
        }
    })
}

fn check_verdict(decision: AdmissionDecision, request: &RequestRecord, deferrals: u32) {
    match decision {
        AdmissionDecision::Admit { reserve_output_tokens, class } => {
            assert!(reserve_output_tokens <= request.max_output_tokens && class <= request.class_rank);
        }
        AdmissionDecision::Degrade { max_output_tokens, reserve_output_tokens, class } => {
            assert!(request.traits.has(Traits::MAY_DEGRADE) && class <= request.class_rank);
            assert!((16..request.max_output_tokens).contains(&max_output_tokens));
            assert!(reserve_output_tokens <= max_output_tokens);
        }
        AdmissionDecision::Defer { for_us } => {
            assert!(request.traits.has(Traits::MAY_DEFER) && deferrals < 8);
            assert!((10_000..=60_000_000).contains(&for_us));
        }
        AdmissionDecision::Reject { retry_after_ms, .. } => assert!((1_000..=60_000).contains(&retry_after_ms)),
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn no_verdict_out_of_bounds_passes(request in any_request(), verdict in verdict(), deferrals in 0..10u32, now_us in edgy()) {
        let terms = Terms { reasons: vec!["own".into()], ..Terms::native("t") };
        let check = VerdictCheck { request: &request, deferrals, now_us, terms: &terms };
        if let Ok(valid) = check.verdict(verdict) {
            check_verdict(valid.proposal, &request, deferrals);
        }
    }

    #[test]
    fn no_placement_out_of_bounds_passes(
        ranked in vec(0..12u32, 0..12), window in 0..12usize, wait_us in edgy32(), for_us in edgy32(),
    ) {
        let mut marks = RowMarks::default();
        let place = Placement::Place { wait_us, colocate: true };
        if let Ok(valid) = validate::placement(place, &ranked, window, &mut marks) {
            let RoutingDecision::Place { ranked: kept, wait_us, .. } = valid.proposal else { panic!("it was a placement") };
            prop_assert!(kept.as_slice() == ranked && wait_us <= 1_000_000);
            prop_assert!(distinct_and_inside(ranked, window));
        }
        let hold = validate::placement(Placement::Hold { for_us }, &[], window, &mut marks);
        prop_assert_eq!(hold.is_ok(), (1_000..=1_000_000).contains(&for_us));
    }

    #[test]
    fn no_ranking_out_of_bounds_passes(ranked in vec(0..40u32, 0..40), window in 0..40usize, tpot_target_us in edgy32()) {
        let mut marks = RowMarks::default();
        let proposal = Ranking { rest: Rest::Keep, tpot_target_us };
        if let Ok(valid) = validate::ranking(proposal, &ranked, window, &mut marks) {
            prop_assert_eq!(valid.proposal.named, ranked.len());
            prop_assert!(valid.proposal.tpot_target_us.is_none_or(|us| us >= 1_000));
            prop_assert!(distinct_and_inside(ranked, window));
        }
    }

    #[test]
    fn no_victim_or_price_out_of_bounds_passes(
        named in vec((0..12u32, 0..4u8), 0..12), window in 0..12usize, take in edgy(), worths in vec((edgy(), 0..4u8), 0..12),
    ) {
        let yielders: Vec<_> = named.iter().map(|(row, how)| Yielder { row: *row, how: *how }).collect();
        let mut out = Vec::new();
        if validate::victims(&yielders, window, take, &mut RowMarks::default(), &mut out).is_ok() {
            prop_assert!(out.len() as u64 <= take && out.len() <= yielders.len());
            prop_assert!(distinct_and_inside(out.iter().map(|victim| victim.row), window));
        }
        let worths: Vec<_> = worths.iter().map(|(price, to)| Worth { price: *price, to: *to }).collect();
        let mut out = Vec::new();
        let passed = validate::worths(&worths, window, &mut out).is_ok();
        prop_assert_eq!(passed, worths.len() == window && worths.iter().all(|worth| worth.to <= 2));
    }

    #[test]
    fn no_stance_out_of_bounds_passes(
        level in 0..7u8, hold_us in edgy32(), actions in vec((0..10u16, 0..10u8, edgy()), 0..20), standing in (0..6u8, edgy()), founded: bool,
    ) {
        let terms = Terms { actions: ActionSet::all(), ..Terms::native("t") };
        let standing = Standing { level: standing.0, held_us: standing.1 };
        let actions: Vec<_> = actions.iter().map(|(what, class_rank, amount)| Action { what: *what, class_rank: *class_rank, amount: *amount }).collect();
        let mut out = Vec::new();
        let check = StanceCheck { terms: &terms, standing, busy_founded: founded };
        if let Ok(valid) = check.stance(Stance { level, hold_us }, &actions, &mut out) {
            prop_assert!(valid.proposal.level <= 4 && valid.proposal.level + 1 >= standing.level.min(4));
            prop_assert!((1..=60_000_000).contains(&valid.proposal.hold_us) && out.len() <= 16);
            for action in out {
                prop_assert!(founded || action.kind != ActionKind::Busy);
                prop_assert!(action.kind != ActionKind::ShedClass || action.amount <= 1_000_000);
                // Downward: whoever is reached, everyone below is.
                for pair in ClassRank::all().collect::<Vec<_>>().windows(2) {
                    prop_assert!(action.reaches(pair[0]) || !action.reaches(pair[1]));
                }
            }
        }
    }

    #[test]
    fn gateway_defaults_pass_their_own_checks(
        request in any_request(), now in edgy(), admission in facts(), routing in facts(), replicas in rows(12), order in facts(),
        waiting in rows(12),
    ) {
        let mut policies = NativePolicies::new(penstock_base::Generation(1), 2_048);
        let now = Instant(now);
        let got = AdmissionSeat::new(1).ask(policies.admission(), now, &request, 0, &admission);
        prop_assert_eq!(got.fallback, None);
        check_verdict(got.decision, &request, 0);

        let asked = PlaceAsked { request: &request, phase: RoutingPhase::Whole };
        let mut best = native::BestCredit::new();
        for policy in [policies.routing(), &mut best as &mut dyn RoutingPolicy] {
            let got = RoutingSeat::new(1).ask(policy, now, asked, &routing, &replicas);
            prop_assert!(got.fallback.is_none() || replicas.rows.is_empty());
            let RoutingDecision::Place { ranked, .. } = got.decision else { panic!("the defaults never hold") };
            prop_assert_eq!(ranked.as_slice().len(), replicas.rows.len().min(8));
        }

        let mut ranked = Vec::new();
        let got = OrderSeat::new(1).ask(policies.fairness(), now, &order, &waiting, &mut ranked);
        prop_assert!(got.fallback.is_none() || waiting.rows.is_empty());
        prop_assert_eq!(ranked.len(), waiting.rows.len());
        prop_assert!(distinct_and_inside(ranked, waiting.rows.len()));
    }

    #[test]
    fn replica_and_overload_defaults_pass_their_own_checks(
        now in edgy(), victims in facts(), running in rows(12), eviction in facts(), runs in rows(12), overload in facts(),
        classes in rows(8), replicas in rows(8), standing in (0..5u8, edgy()),
    ) {
        let mut policies = NativePolicies::new(penstock_base::Generation(1), u32::MAX);
        let now = Instant(now);
        let mut named = Vec::new();
        let got = VictimsSeat::new(1).ask(policies.fairness(), now, &victims, &running, &mut named);
        prop_assert!(got.fallback.is_none() || named.is_empty());
        prop_assert!(got.changed.is_none() && distinct_and_inside(named.iter().map(|victim| victim.row), running.rows.len()));

        let mut priced = Vec::new();
        let got = EvictionSeat::new(1).ask(policies.eviction(), now, &eviction, &runs, &mut priced);
        prop_assert!(got.fallback.is_none() || runs.rows.is_empty());
        prop_assert_eq!(priced.len(), runs.rows.len());

        let sources = OverloadSources { context: &overload, classes: &classes, replicas: &replicas };
        let standing = Standing { level: standing.0, held_us: standing.1 };
        let got = OverloadSeat::new(1, 2_048).ask(policies.overload(), now, &sources, standing, &mut Vec::new());
        prop_assert_eq!(got.fallback, None);
    }
}

#[test]
fn everything_at_its_largest_overflows_nothing() {
    let mut policies = NativePolicies::new(penstock_base::Generation(1), u32::MAX);
    let now = Instant(u64::MAX);
    let request =
        RequestRecord { input_tokens: u32::MAX, max_output_tokens: u32::MAX, sequences: u16::MAX, ..request() };
    fn all<S: Signal>() -> Facts<S> {
        Facts {
            common: CommonSignal::ALL.iter().map(|signal| (*signal, u64::MAX)).collect(),
            own: S::ALL.iter().map(|signal| (*signal, u64::MAX)).collect(),
        }
    }
    AdmissionSeat::new(u64::MAX).ask(policies.admission(), now, &request, u32::MAX, &all());
    let asked = PlaceAsked { request: &request, phase: RoutingPhase::Prefill };
    RoutingSeat::new(u64::MAX).ask(policies.routing(), now, asked, &all(), &Rows::all(3, u64::MAX));
    RoutingSeat::new(u64::MAX).ask(&mut native::BestCredit::new(), now, asked, &all(), &Rows::all(3, u64::MAX));
    OrderSeat::new(u64::MAX).ask(policies.fairness(), now, &all(), &Rows::all(3, u64::MAX), &mut Vec::new());
    VictimsSeat::new(u64::MAX).ask(policies.fairness(), now, &all(), &Rows::all(3, u64::MAX), &mut Vec::new());
    EvictionSeat::new(u64::MAX).ask(policies.eviction(), now, &all(), &Rows::all(3, u64::MAX), &mut Vec::new());
    let (context, classes, replicas) = (all(), Rows::all(8, u64::MAX), Rows::all(3, u64::MAX));
    let sources = OverloadSources { context: &context, classes: &classes, replicas: &replicas };
    let standing = Standing { level: u8::MAX, held_us: u64::MAX };
    OverloadSeat::new(u64::MAX, u32::MAX).ask(policies.overload(), now, &sources, standing, &mut Vec::new());
}
