//! The harness itself, on policies whose rules are written down elsewhere: the host's native defaults.

use penstock_policy_api::native::{Bounded, Lru, OverlapLoad};
use penstock_policy_harness::{Subject, check, transcript};

fn lru(_parameters: &str) -> Result<Subject, String> {
    Ok(Subject::Eviction(Box::new(Lru::new())))
}

fn overlap_load(_parameters: &str) -> Result<Subject, String> {
    Ok(Subject::Routing(Box::new(OverlapLoad::new())))
}

const LRU: &str = "decision eviction
case the price is the time of last use; an estimate that is not known keeps it out of DRAM
  call now-us=1_000
  context dram-free-blocks=1
  rows run: idle-us est-recompute-us est-load-us
    400 20 10
    0 ? 10
    1_001 10 20
  expect worth 600:dram 1000:dram 0
";

#[test]
fn what_holds_passes_and_what_does_not_is_shown_with_its_line() {
    check(LRU, &lru).unwrap();
    let wrong = LRU.replace("0:dram 0", "1:dram 0");
    let fault = check(&wrong, &lru).unwrap_err();
    assert!(
        fault.contains("line 9:\n  expected worth 600:dram 1001:dram 0\n  answered worth 600:dram 1000:dram 0"),
        "{fault}"
    );
}

#[test]
fn unknown_is_not_zero() {
    // The first replica's load is not known: it comes last although it would read as idle. What is not mentioned is unknown, too.
    let text = "decision routing
case unknown load comes last
  context need-blocks=1 block-size-tokens=16
  rows replica: replica-id load-age-us prefill-tokens active-blocks credit-requests credit-tokens credit-blocks
    1 0 ? ? 9 9 9
    2 0 900 90 0 0 0
  expect place 1 0
";
    check(text, &overlap_load).unwrap();
}

#[test]
fn a_name_that_the_registry_does_not_have_is_a_fault() {
    let text = "decision eviction\ncase a\n  rows run: idle-pages\n    1\n  expect worth 1\n";
    assert!(check(text, &lru).unwrap_err().ends_with("there is no signal idle-pages here"));
    let text = "decision eviction\ncase a\n  rows replica: replica-id\n    1\n  expect worth 1\n";
    assert!(check(text, &lru).unwrap_err().ends_with("this question has no rows replica"));
    let text = "decision admission\ncase a\n  expect no opinion\n";
    assert_eq!(check(text, &lru).unwrap_err(), "a file for admission is put to a policy of another decision");
}

#[test]
fn a_transcript_holds_every_answer_and_the_state() {
    let bounded = |_: &str| Ok(Subject::Admission(Box::new(Bounded::new())));
    let text = "decision admission
case two
  context queue-limit-requests=1 queue-limit-tokens=100
  expect anything
  context pool-queued-requests=1
  expect anything
";
    let told = transcript(text, &bounded).unwrap();
    assert_eq!(told, "case two\n  admit reserve 64 class 3\n  reject capacity retry-ms 0\n  state \n");
}
