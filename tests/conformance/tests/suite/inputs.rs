//! Nobody, one, the most; nothing known, all zero, all of the largest number: every component answers, legally and within its fuel.

use penstock_conformance::checks;
use penstock_conformance::random::moments;
use penstock_conformance::{Seats, run};

use penstock_policy_api::Decision;

use crate::shelf::{NATIVE, bench, components, twin};

#[test]
fn every_component_answers_at_the_edges() {
    let bench = bench();
    for shipped in components(&bench) {
        match checks::answers_at_the_edges(shipped.tested(&bench)) {
            Ok(calls) => println!("figure: {} answers {calls} calls at the edges", shipped.name),
            Err(problem) => panic!("{}: {problem}", shipped.name),
        }
    }
}

#[test]
fn every_component_answers_what_a_machine_may_ask() {
    let bench = bench();
    for shipped in components(&bench) {
        for seed in 10..14 {
            let moments = moments(shipped.component.decision(), seed, 250);
            if let Err(problem) = checks::answers_legally(shipped.tested(&bench), &moments) {
                panic!("{}, seed {seed}: {problem}", shipped.name);
            }
        }
    }
}

#[test]
fn every_native_policy_answers_what_a_machine_may_ask() {
    for (decision, rule) in NATIVE {
        let moments = moments(decision, 20, 500);
        let mut policy = twin(rule).expect("it is listed");
        let course =
            run(&mut policy, &mut Seats::new(1), &moments, 50).unwrap_or_else(|fault| panic!("{rule}: {fault}"));
        let strike = course.iter().position(|step| step.fallback.is_some_and(|why| why.is_strike()));
        assert_eq!(strike, None, "{rule}: {:?}", strike.map(|at| course[at].fallback));
        let proposals: std::collections::BTreeSet<_> = course.iter().map(|step| &step.proposal).collect();
        // A ladder has few steps; everyone else finds something new to say.
        let least = if decision == Decision::Overload { 4 } else { 20 };
        assert!(proposals.len() >= least, "{rule}: the random world asks nearly always the same: {}", proposals.len());
    }
}
