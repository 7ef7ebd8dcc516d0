//! Case files on every implementation: what all policies of a decision may answer, and what one rule does answer, natively and as a
//! component.

use std::fs;
use std::path::{Path, PathBuf};

use penstock_policy_api::Decision;
use penstock_policy_harness::{Subject, answers, check, transcript};

use crate::shelf::{NATIVE, Shipped, bench, components, here, native, root};

/// The case files of a folder; none where there is no such folder.
fn case_files(folder: &Path) -> Vec<(PathBuf, String)> {
    let Ok(entries) = fs::read_dir(folder) else { return Vec::new() };
    let mut files: Vec<_> = entries.map(|entry| entry.expect("the folder can be read").path()).collect();
    files.retain(|file| file.extension().is_some_and(|ending| ending == "case"));
    files.sort();
    let read = |file: PathBuf| {
        let text = fs::read_to_string(&file).expect("a listed file can be read");
        (file, text)
    };
    files.into_iter().map(read).collect()
}

/// Those of one rule: beside the policy, and here where it has no folder for them.
fn of_rule(decision: Decision, rule: &str) -> Vec<(PathBuf, String)> {
    let beside = root().join("policies").join(decision.name()).join(rule).join("cases");
    let mut files = case_files(&beside);
    files.extend(case_files(&here().join("cases").join(decision.name()).join(rule)));
    files
}

/// Does an answer fit one of the alternatives? They stand between bars; `*` is one word, `..` at the end any number of them.
fn fits(given: &str, expected: &str) -> bool {
    let words: Vec<&str> = given.split(' ').collect();
    expected.split(" | ").any(|alternative| {
        let pattern: Vec<&str> = alternative.split(' ').collect();
        let (pattern, is_open) = match pattern.split_last() {
            Some((&"..", head)) => (head, true),
            _ => (&pattern[..], false),
        };
        let is_long_enough = if is_open { words.len() >= pattern.len() } else { words.len() == pattern.len() };
        is_long_enough && pattern.iter().zip(&words).all(|(want, word)| *want == "*" || want == word)
    })
}

fn check_shared(name: &str, decision: Decision, make: &dyn Fn(&str) -> Result<Subject, String>) -> usize {
    let files = case_files(&here().join("cases").join(decision.name()).join("every"));
    assert!(!files.is_empty(), "{}: no shared cases", decision.name());
    let mut asked = 0;
    for (file, text) in files {
        let all = answers(&text, make).unwrap_or_else(|fault| panic!("{name}, {}: {fault}", file.display()));
        for answer in all {
            asked += 1;
            assert!(
                fits(&answer.given, &answer.expected),
                "{name}, {}, case {}, line {}: answered {}",
                file.display(),
                answer.case,
                answer.line,
                answer.given
            );
        }
    }
    asked
}

fn seat(shipped: &Shipped, bench: &penstock_conformance::Bench, parameters: &str) -> Result<Subject, String> {
    let mut tested = shipped.tested(bench);
    tested.how.parameters = parameters;
    bench.seat(tested.component, tested.how).map(|seated| seated.subject)
}

#[test]
fn a_pattern_is_read_word_by_word() {
    assert!(fits("place 0 wait 5", "no opinion | place 0 .."));
    assert!(fits("place 0", "place 0 .."));
    assert!(!fits("place 0 1", "place 0 | place 1"));
    assert!(fits("admit reserve 5 class 3", "admit reserve * class 3"));
    assert!(!fits("admit reserve 5 class 4", "admit reserve * class 3"));
    assert!(!fits("worth 1 2", "worth *"));
}

#[test]
fn every_policy_answers_the_shared_cases_as_it_may() {
    for (decision, rule) in NATIVE {
        check_shared(rule, decision, &|parameters| native(rule, parameters));
    }
    let bench = bench();
    for shipped in components(&bench) {
        let decision = shipped.component.decision();
        let asked = check_shared(&shipped.name, decision, &|parameters| seat(&shipped, &bench, parameters));
        println!("figure: {} answers {asked} shared cases", shipped.name);
    }
}

#[test]
fn every_rule_has_cases_and_keeps_them_natively() {
    for (decision, rule) in NATIVE {
        let files = of_rule(decision, rule);
        assert!(!files.is_empty(), "{rule} has no cases");
        for (file, text) in files {
            if let Err(faults) = check(&text, &|parameters| native(rule, parameters)) {
                panic!("{}\n{faults}", file.display());
            }
        }
    }
}

#[test]
fn a_component_keeps_the_cases_of_its_rule_and_the_state_of_its_twin() {
    let bench = bench();
    for shipped in components(&bench) {
        let files = of_rule(shipped.component.decision(), shipped.rule());
        assert!(!files.is_empty(), "{}: its rule has no cases", shipped.name);
        for (file, text) in files {
            let make = |parameters: &str| seat(&shipped, &bench, parameters);
            if let Err(faults) = check(&text, &make) {
                panic!("{}, {}\n{faults}", shipped.name, file.display());
            }
            let by_component = transcript(&text, &make).expect("it was checked");
            let by_native =
                transcript(&text, &|parameters| native(shipped.rule(), parameters)).expect("it was checked");
            assert_eq!(by_component, by_native, "{}, {}", shipped.name, file.display());
        }
    }
}
