//! What may a later version change? Frozen guests in a host of the next minor and of the next break, and guests of the next minor in this
//! host: they link where nothing new is needed, and are refused by name where something is.

use penstock_conformance::random::moments;
use penstock_conformance::{Seating, Seats, run};
use penstock_policy_api::Decision;
use wit_component::{ComponentEncoder, StringEncoding, embed_component_metadata};

use crate::frozen::{FROZEN, component};
use crate::next_host::{NextHost, contract};
use crate::shelf::bench;
use crate::wat_guest;

/// The contract's minor is the last number while the first is 0.
const NEXT_MINOR: &str = "0.1.1";
const NEXT_BREAK: &str = "0.2.0";
const SEED: u64 = 8;

/// A guest of another version, with one more import where one is named: interface, function and its core signature.
fn guest_of(version: &str, decision: Decision, import: Option<(&str, &str, &str)>) -> Vec<u8> {
    let mut text = wat_guest::Guest::new(decision).wat().replace("@0.1.0", &format!("@{version}"));
    if let Some((interface, function, signature)) = import {
        let import =
            format!(r#"(module (import "penstock:types/{interface}@{version}" "{function}" (func {signature}))"#);
        text = text.replacen("(module", &import, 1);
    }
    let mut module = wat::parse_str(text).expect("the module is well-formed");
    let resolve = contract(version);
    let own = resolve.packages.iter().find(|(_, package)| package.name.name == decision.name()).expect("its package").0;
    let world = resolve.select_world(&[own], Some(&format!("{}-policy", decision.name()))).expect("its world");
    embed_component_metadata(&mut module, &resolve, world, StringEncoding::UTF8).expect("the world fits");
    let encoder = ComponentEncoder::default().validate(true).module(&module).expect("the module fits its world");
    { encoder }.encode().expect("the component is well-formed")
}

/// Every frozen component, with what this host makes of it, beside the same in a host that `host` makes.
fn compare(host: impl Fn(&[u8]) -> NextHost) {
    let bench = bench();
    for (version, components) in FROZEN {
        for (decision, _) in components {
            let name = format!("{version} {}", decision.name());
            let bytes = component(version, decision);
            let loaded = bench.load(&bytes).expect("this host loads it");
            let mut here = bench.seat(&loaded, Seating::default()).expect("it can be seated");
            let moments = moments(decision, 80, 120);
            let course = run(&mut here, &mut Seats::new(SEED), &moments, 10).expect("it answers");
            let mut there = host(&bytes);
            for (at, (moment, step)) in moments.iter().zip(&course).enumerate() {
                let (proposal, fuel) = there.ask(moment, SEED);
                assert_eq!(proposal, step.proposal, "{name}, moment {at}: {:?}", moment.question);
                assert_eq!(fuel, step.fuel.1, "{name}, moment {at}: fuel");
                if let Some(state) = &step.state {
                    assert_eq!(&there.save(), state, "{name}, moment {at}: saved state");
                }
            }
        }
    }
}

#[test]
fn a_frozen_component_answers_a_host_of_the_next_minor_as_this_one() {
    compare(|bytes| NextHost::new(bytes, &[(NEXT_MINOR, contract(NEXT_MINOR))], NEXT_MINOR).expect("it links"));
}

#[test]
fn a_host_of_the_next_break_that_keeps_offering_this_version_serves_its_guests() {
    let offered = || [("0.1.0", contract("0.1.0")), (NEXT_BREAK, contract(NEXT_BREAK))];
    compare(|bytes| NextHost::new(bytes, &offered(), "0.1.0").expect("it links"));
}

#[test]
fn a_host_of_the_next_break_that_does_not_is_no_host_for_them() {
    let bytes = component("0.1.0", Decision::Routing);
    let refused = NextHost::new(&bytes, &[(NEXT_BREAK, contract(NEXT_BREAK))], NEXT_BREAK);
    let said = format!("{:#}", refused.map(drop).expect_err("nothing offers what it imports"));
    assert!(said.contains("penstock:types/host@0.1.0"), "{said}");
}

#[test]
fn a_guest_of_the_next_minor_that_needs_nothing_new_serves_here() {
    let bench = bench();
    for decision in Decision::ALL {
        let loaded = bench.load(&guest_of(NEXT_MINOR, decision, None)).expect("this host loads it");
        assert_eq!((loaded.contract(), loaded.decision()), (NEXT_MINOR, decision));
        let mut seat = bench.seat(&loaded, Seating::default()).expect("it can be seated");
        let course = run(&mut seat, &mut Seats::new(1), &moments(decision, 90, 5), 5).expect("it answers");
        // It has no opinion, which is one byte, and counts its calls in its state: a rehearsal is on an instance of its own.
        assert!(course.iter().all(|step| step.proposal == [0]), "{}: {course:?}", decision.name());
        assert_eq!(course[4].state.as_deref(), Some(&5_u64.to_le_bytes()[..]), "{}", decision.name());
    }
}

#[test]
fn a_guest_that_needs_what_the_next_minor_adds_is_refused_by_name() {
    let bench = bench();
    let refused =
        |import| bench.load(&guest_of(NEXT_MINOR, Decision::Routing, Some(import))).expect_err("it is refused");
    let said = refused(("host", "trace", "(param i32 i32 i32) (result i32)"));
    assert!(said.contains("penstock:types/host@0.1.1") && said.contains("trace"), "a new function: {said}");
    let said = refused(("almanac", "moon", "(result i64)"));
    assert!(said.contains("imports what is not offered: penstock:types/almanac@0.1.1"), "a new interface: {said}");
    let load = |guest: wat_guest::Guest| bench.load(&guest.component()).expect_err("it is refused");
    let said = load(wat_guest::Guest::new(Decision::Routing).wants("replica", &["mood-level"]));
    assert!(said.contains("replica has no mood-level") && said.contains("overlap-blocks"), "a new signal: {said}");
    let said = load(wat_guest::Guest::new(Decision::Fairness).wants_fact("eclipse"));
    assert!(said.contains("facts has no eclipse") && said.contains("taken"), "a new fact: {said}");
}

#[test]
fn a_guest_of_the_next_break_is_refused_by_its_version() {
    let said = bench().load(&guest_of(NEXT_BREAK, Decision::Eviction, None)).expect_err("it is refused");
    assert!(said.contains("@0.2.0 is not of this host's contract, >=0.1.0, <0.2.0"), "{said}");
}
