//! The registry as the contract counts it, and declarations over it.

mod support;

use penstock_policy_api::*;

fn counts<S: Signal>() -> (&'static str, usize, usize) {
    let first = S::ALL.iter().filter(|signal| signal.info().first_wave).count();
    for (index, signal) in S::ALL.iter().enumerate() {
        assert_eq!(signal.index(), index);
        assert_eq!(S::from_name(signal.name()), Some(*signal));
        let unknown_fact = signal.info().kind == Kind::Age && signal.info().fill != Fill::Number(u64::MAX);
        assert!(!unknown_fact, "{}: an unknown age is the oldest", signal.name());
    }
    (S::TABLE.name(), first, S::ALL.len())
}

#[test]
fn every_table_has_what_the_catalogue_lists() {
    assert_eq!(
        [
            counts::<CommonSignal>(),
            counts::<AdmissionSignal>(),
            counts::<RoutingSignal>(),
            counts::<ReplicaSignal>(),
            counts::<OrderSignal>(),
            counts::<WaitingSignal>(),
            counts::<VictimsSignal>(),
            counts::<RunningSignal>(),
            counts::<EvictionSignal>(),
            counts::<RunSignal>(),
            counts::<OverloadSignal>(),
            counts::<ClassSignal>(),
        ],
        [
            ("common", 7, 10),
            ("admission", 34, 53),
            ("routing", 3, 10),
            ("replica", 34, 47),
            ("order", 5, 14),
            ("waiting", 16, 33),
            ("victims", 4, 6),
            ("running", 8, 20),
            ("eviction", 4, 13),
            ("run", 15, 23),
            ("overload", 9, 17),
            ("class", 13, 14),
        ]
    );
    assert_eq!((FactKind::ALL.len(), ActionKind::ALL.len(), Table::ALL.len()), (23, 8, 12));
    let lookup = ReplicaSignal::EstCreditUs.info();
    assert_eq!((lookup.unit, lookup.owner, lookup.freshness), (Unit::Us, Owner::Model, Freshness::Est));
    assert_eq!(ReplicaSignal::ActiveBlocks.info().fill, Fill::Basis(FillBasis::TotalBlocks));
}

fn wanted(names: &[(&str, bool)]) -> Vec<Wanted> {
    names.iter().map(|(name, required)| Wanted { name: name.to_string(), required: *required }).collect()
}

fn manifest(table: &str, names: &[(&str, bool)]) -> Manifest {
    let tables = vec![TableWanted { table: table.into(), names: wanted(names) }];
    Manifest { name: "p".into(), tables, ..Manifest::default() }
}

#[test]
fn names_keep_their_order_and_unknown_optional_ones_their_place() {
    let names = [("need-blocks", true), ("warp-factor-count", false), ("known-mask", true), ("held-us", true)];
    let context = manifest("routing", &names).routing().expect("the required ones exist").context;
    let own = |signal| Some(InContext::Own(signal));
    let mask = Some(InContext::Common(CommonSignal::KnownMask));
    assert_eq!(context.entries(), [own(RoutingSignal::NeedBlocks), None, mask, own(RoutingSignal::HeldUs)]);
    assert_eq!(context.position(InContext::Own(RoutingSignal::HeldUs)), Some(3));
}

#[test]
fn an_unknown_required_name_is_refused_with_the_names_there_are() {
    let refused = manifest("order", &[("take-requests", true), ("warp-factor-count", true)]).fairness();
    let text = refused.expect_err("there is no such signal").to_string();
    assert!(text.starts_with("order has no warp-factor-count; it has take-requests, credit-tokens"), "{text}");
    assert!(text.contains("fair-age-us, known-mask, stage-code"), "common names are offered beside: {text}");
    let refused = manifest("waiting", &[("take-requests", true)]).fairness().expect_err("of another table");
    assert!(refused.to_string().starts_with("waiting has no take-requests"));
    let refused = manifest("running", &[]).admission().expect_err("of another decision");
    assert_eq!(refused.to_string(), "tables has no running; it has admission");
}

#[test]
fn routing_only_signals_are_not_offered_to_overload() {
    let names = [("overlap-blocks", true)];
    assert!(manifest("replica", &names).routing().is_ok());
    let refused = manifest("replica", &names).overload().expect_err("absent in overload");
    assert!(!refused.to_string().contains(", overlap-blocks"), "{refused}");
    let optional = manifest("replica", &[("overlap-blocks", false)]).overload().expect("optional");
    assert_eq!(optional.rows.replicas.entries(), [None]);
}

#[test]
fn a_side_carries_48_names() {
    let names = vec![("need-blocks", true); 48];
    assert!(manifest("routing", &names).routing().is_ok());
    let names = vec![("need-blocks", true); 49];
    assert_eq!(
        manifest("routing", &names).routing().expect_err("bounded").to_string(),
        "routing: 49 names, at most 48"
    );
    let mut twice = manifest("routing", &[]);
    twice.tables.push(twice.tables[0].clone());
    assert_eq!(twice.routing(), Err(DeclareError::TableTwice { table: "routing".into() }));
}

#[test]
fn facts_and_actions_resolve_like_signals() {
    let mut manifest = Manifest { facts: wanted(&[("taken", true), ("flux", false)]), ..Manifest::default() };
    assert_eq!(manifest.fairness().expect("it is told").terms.facts, FactSet::of(&[FactKind::Taken]));
    assert!(manifest.routing().is_err(), "taken goes to fairness only");
    manifest = Manifest { actions: wanted(&[("busy", true), ("flux", true)]), ..Manifest::default() };
    assert!(manifest.overload().expect_err("no flux").to_string().contains("cap-output, shed-class"));
    manifest.actions.pop();
    let terms = manifest.overload().expect("busy exists").terms;
    assert!(terms.actions.has(ActionKind::Busy) && !terms.actions.has(ActionKind::ShedClass));
}
