//! What policies say is bounded in length, number and rate, and survives them.

mod support;

use penstock_policy_api::{Answer, Context, Decision, FaultKind, Matrix, Policies as _};
use penstock_policy_wasm::{LogLevel, WasmPolicies, limits};
use support::{ANSWER, Bench, Guest, call, drained};

fn evict(policies: &mut WasmPolicies, number: u64) -> Answer<()> {
    policies.eviction().decide(&call(number), Context { values: &[] }, &Matrix::new(0), &mut Vec::new())
}

fn from_second_on(body: &str) -> Guest {
    let body = format!(
        "(local $left i32)
         (if (i64.ge_u (local.get $number) (i64.const 2)) (then {body}))
         (i64.store (i32.const {ANSWER}) (i64.const 0)) (i32.const {ANSWER})"
    );
    Guest::new(Decision::Eviction)
        .with("(data (i32.const 4096) \"hits_total\\0a\\c3\\a4\") (data (i32.const 4160) \"Bad Name\")")
        .body("decide", &body)
}

fn times(count: u32, body: &str) -> String {
    format!(
        "(local.set $left (i32.const {count}))
         (loop $on {body} (local.set $left (i32.sub (local.get $left) (i32.const 1))) (br_if $on (local.get $left)))"
    )
}

#[test]
fn a_line_reaches_the_log_on_one_line() {
    let bench = Bench::new();
    let body = "(call $log (i32.const 1) (i32.const 4096) (i32.const 13)) (call $log (i32.const 9) (i32.const 4096) (i32.const 4))";
    let mut policies = bench.seat(&from_second_on(body));
    evict(&mut policies, 2);
    let told = drained(&mut policies);
    let lines: Vec<_> = told.lines.iter().map(|line| (line.level, line.text.as_str())).collect();
    assert_eq!(lines, [(LogLevel::Warning, "hits_total \u{e4}"), (LogLevel::Debug, "hits")]);
    assert!(drained(&mut policies).lines.is_empty());
}

#[test]
fn long_lines_are_cut_and_floods_are_dropped() {
    let bench = Bench::new();
    let long = "(memory.fill (i32.const 32768) (i32.const 97) (i32.const 5000)) (call $log (i32.const 0) (i32.const 32768) (i32.const 5000))";
    let mut policies = bench.seat(&from_second_on(&times(100, long)));
    // Filling so much costs more fuel than the default.
    assert_eq!(evict(&mut policies, 2), Answer::Fault(FaultKind::Fuel));
    let told = drained(&mut policies);
    assert!(told.lines.iter().all(|line| line.text.len() == limits::LOG_TEXT_BYTES_MAX) && !told.lines.is_empty());

    let flood = times(100, "(call $log (i32.const 0) (i32.const 4096) (i32.const 4))");
    let mut policies = bench.seat(&from_second_on(&flood));
    assert_eq!(evict(&mut policies, 2), Answer::NoOpinion);
    let told = drained(&mut policies);
    assert_eq!((told.lines.len(), told.lines_dropped), (limits::LOG_LINES_MAX, 100 - limits::LOG_LINES_MAX as u64));
    // The burst is spent; a line is earned every sixteen calls.
    for number in 3..=2 + 4 * limits::LOG_CALLS_PER_LINE {
        evict(&mut policies, number);
    }
    assert_eq!(drained(&mut policies).lines.len(), 4);
}

#[test]
fn a_text_that_is_none_is_a_trap() {
    let bench = Bench::new();
    // A lone continuation byte.
    let mut policies = bench.seat(&from_second_on("(call $log (i32.const 0) (i32.const 4108) (i32.const 1))"));
    assert_eq!(evict(&mut policies, 2), Answer::Fault(FaultKind::Trap));
    // A text beyond what any call may hand over.
    let mut policies = bench.seat(&from_second_on("(call $log (i32.const 0) (i32.const 0) (i32.const 131072))"));
    assert_eq!(evict(&mut policies, 2), Answer::Fault(FaultKind::Trap));
}

#[test]
fn host_calls_are_bounded_in_one_call() {
    let bench = Bench::new();
    let count = "(call $count (i32.const 4096) (i32.const 10) (i64.const 1))";
    let mut policies = bench.seat(&from_second_on(&times(limits::HOST_CALLS_MAX, count)));
    assert_eq!(evict(&mut policies, 2), Answer::NoOpinion);
    assert_eq!(evict(&mut policies, 3), Answer::NoOpinion);
    let counted = [("hits_total".to_owned(), 2 * u64::from(limits::HOST_CALLS_MAX))];
    assert_eq!(drained(&mut policies).counts, counted);
    let mut policies = bench.seat(&from_second_on(&times(limits::HOST_CALLS_MAX + 1, count)));
    assert_eq!(evict(&mut policies, 2), Answer::Fault(FaultKind::Trap));
    let told = drained(&mut policies);
    assert_eq!(told.counts, [("hits_total".to_owned(), u64::from(limits::HOST_CALLS_MAX))], "said before it failed");
}

#[test]
fn counters_are_bounded_in_number_and_name() {
    let bench = Bench::new();
    // Names of one letter each, five of them past `z`; then one with a blank and one of nothing.
    let body = times(
        31,
        "(i32.store8 (i32.const 5000) (i32.add (i32.const 96) (local.get $left)))
         (call $count (i32.const 5000) (i32.const 1) (i64.const -1))
         (call $count (i32.const 5000) (i32.const 1) (i64.const 5))",
    );
    let body = format!(
        "{body} (call $count (i32.const 4160) (i32.const 8) (i64.const 1)) (call $count (i32.const 4096) (i32.const 0) (i64.const 1))"
    );
    let mut policies = bench.seat(&from_second_on(&body));
    assert_eq!(evict(&mut policies, 2), Answer::NoOpinion);
    let told = drained(&mut policies);
    assert_eq!(told.counts.len(), 26);
    assert!(told.counts.iter().all(|(_, by)| *by == u64::MAX), "sums saturate");
    assert_eq!(told.counts_dropped, 2 * 5 + 2);

    let many = times(
        60,
        "(i32.store8 (i32.const 5000) (i32.add (i32.const 97) (i32.and (local.get $left) (i32.const 15))))
         (i32.store8 (i32.const 5001) (i32.add (i32.const 97) (i32.shr_u (local.get $left) (i32.const 4))))
         (call $count (i32.const 5000) (i32.const 2) (i64.const 1))",
    );
    let mut policies = bench.seat(&from_second_on(&many));
    evict(&mut policies, 2);
    let told = drained(&mut policies);
    assert_eq!((told.counts.len(), told.counts_dropped), (limits::COUNTERS_MAX, 60 - limits::COUNTERS_MAX as u64));
}
