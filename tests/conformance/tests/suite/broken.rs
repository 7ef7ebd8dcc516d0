//! Policies that break one rule each: a suite that lets them pass would let everything pass.

use std::sync::Arc;

use penstock_conformance::checks::{self, Tested};
use penstock_conformance::random::moments;
use penstock_conformance::{Bench, Seating};
use penstock_policy_api::Decision;
use penstock_policy_wasm::Component;

use crate::shelf::bench;
use crate::wat_guest::Guest;

/// An eviction policy with one body replaced.
fn loaded(bench: &Bench, function: &'static str, body: &str) -> (Vec<u8>, Arc<Component>) {
    let bytes = Guest::new(Decision::Eviction).body(function, body).component();
    let component = bench.load(&bytes).expect("nothing is wrong with it at load");
    (bytes, component)
}

fn judged<T>(bench: &Bench, component: &Component, rule: impl FnOnce(Tested<'_>) -> Result<T, String>) -> String {
    let tested = Tested { bench, component, how: Seating::default() };
    rule(tested).map(drop).expect_err("it breaks this rule")
}

#[test]
fn an_answer_of_the_wrong_length_is_seen() {
    // Three prices, however many runs there are; the first question with a row is the rehearsal's, so it comes once it was asked.
    let body = "(call $bump (i64.const 1)) (i32.store (i32.const 1024) (i32.const 81920))
        (i32.store offset=4 (i32.const 1024) (select (i32.const 1) (i32.const 3) (i64.eq (i64.load (i32.const 64)) (i64.const 1))))
        (i32.const 1024)";
    let bench = bench();
    let (_, component) = loaded(&bench, "decide", body);
    let said = judged(&bench, &component, checks::answers_at_the_edges);
    assert!(said.ends_with("its answer cannot stand: wrong-count"), "{said}");
    let moments = moments(Decision::Eviction, 1, 30);
    let said = judged(&bench, &component, |tested| checks::answers_legally(tested, &moments));
    assert!(said.ends_with("its answer cannot stand: wrong-count"), "{said}");
}

#[test]
fn memory_that_is_not_saved_is_seen() {
    // The price is how often it was asked, which its state does not hold.
    let body = "(i64.store (i32.const 72) (i64.add (i64.load (i32.const 72)) (i64.const 1)))
        (i64.store (i32.const 81920) (i64.load (i32.const 72)))
        (i32.store (i32.const 1024) (i32.const 81920)) (i32.store offset=4 (i32.const 1024) (local.get $rows)) (i32.const 1024)";
    let bench = bench();
    let (bytes, component) = loaded(&bench, "decide", body);
    let moments = moments(Decision::Eviction, 2, 40);
    let elsewhere = Bench::new().expect("a second engine starts");
    let said = judged(&bench, &component, |tested| checks::repeats(tested, &elsewhere, &bytes, &moments));
    assert!(said.starts_with("twice in one instance") && said.ends_with("the proposal differs"), "{said}");
    let said = judged(&bench, &component, |tested| checks::remembers(tested, &moments));
    assert!(said.ends_with("the proposal differs"), "{said}");
}

#[test]
fn state_that_is_not_taken_back_is_seen() {
    let kept =
        "(i32.store8 (i32.const 3072) (i32.const 0)) (i32.store8 (i32.const 3073) (i32.const 0)) (i32.const 3072)";
    let bench = bench();
    let moments = moments(Decision::Eviction, 3, 40);
    let (_, component) = loaded(&bench, "restore", kept);
    let said = judged(&bench, &component, |tested| checks::remembers(tested, &moments));
    assert!(said.ends_with("it saves something else than it was given"), "{said}");
    let said = judged(&bench, &component, |tested| checks::forgets_what_is_damaged(tested, &moments));
    assert_eq!(said, "another schema: it takes it");
    let (_, component) = loaded(&bench, "restore", "unreachable");
    let said = judged(&bench, &component, |tested| checks::forgets_what_is_damaged(tested, &moments));
    assert_eq!(said, "another schema: it fails on it: trap");
}

#[test]
fn a_policy_beyond_its_fuel_is_seen_with_how_far() {
    // A thousand turns a run, several units each; a run may cost 2,000.
    let body = "(local $i i32) (local.set $i (i32.mul (local.get $rows) (i32.const 1000)))
        (block $done (loop $next (br_if $done (i32.eqz (local.get $i)))
          (local.set $i (i32.sub (local.get $i) (i32.const 1))) (br $next)))
        (i64.store (i32.const 1024) (i64.const 0)) (i32.const 1024)";
    let bench = bench();
    let (_, component) = loaded(&bench, "decide", body);
    let said = judged(&bench, &component, checks::answers_at_the_edges);
    assert!(said.ends_with("its answer cannot stand: fuel"), "{said}");
    let tested = Tested { bench: &bench, component: &component, how: Seating::default() };
    let spent = checks::measure(tested).expect("it is measured with fuel to spare");
    assert!(spent[0].size == 512 && spent[0].each() > 3_000, "{spent:?}");
    assert!(checks::spent_within(&spent).expect_err("it is beyond").contains("eviction over 512 burns"));
}
