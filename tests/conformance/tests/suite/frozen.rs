//! Components of the contract's first version, on this host: they load, and they answer what was written down when they were frozen.

use std::path::PathBuf;

use penstock_conformance::checks::{self, Tested};
use penstock_conformance::random::moments;
use penstock_conformance::{Bench, Seating};
use penstock_policy_api::Decision;
use penstock_policy_harness::check;
use sha2::{Digest as _, Sha256};

use crate::shelf::{bench, here};

/// Versions, and the digest of each component: the bytes are never changed.
pub const FROZEN: [(&str, [(Decision, &str); 5]); 1] = [(
    "0.1.0",
    [
        (Decision::Admission, "a3882608aaa93fc9c309f5bd0507dc764c95149726f42eebb51f8a48fca06133"),
        (Decision::Routing, "c6b0872984eb3bddaa5bf09fadd7fc827b8a16071681ac59419802d2eac148f0"),
        (Decision::Fairness, "681f6b53e3e9fa0aa31c1d06841e683a985ffd1c0d31f34cb7ec51aade5f21a9"),
        (Decision::Eviction, "fa603990fd588fdee54a85b33f1a16837e101c94667bea1cccac58df03a80dd2"),
        (Decision::Overload, "a6737340de068c3dbba3957465ad983c89b695f0aae057c62c187a2995e12318"),
    ],
)];

fn file(version: &str, decision: Decision, ending: &str) -> PathBuf {
    here().join("frozen").join(version).join(format!("{}.{ending}", decision.name()))
}

/// The bytes of a frozen component.
pub fn component(version: &str, decision: Decision) -> Vec<u8> {
    std::fs::read(file(version, decision, "wasm")).expect("a frozen component is there")
}

#[test]
fn frozen_bytes_are_those_that_were_frozen() {
    for (version, components) in FROZEN {
        for (decision, digest) in components {
            let hash = Sha256::digest(component(version, decision));
            let hex: String = hash.iter().map(|byte| format!("{byte:02x}")).collect();
            assert_eq!(hex, digest, "{version} {}", decision.name());
        }
    }
}

#[test]
fn a_frozen_component_answers_what_was_written_down_with_it() {
    let bench = bench();
    for (version, components) in FROZEN {
        for (decision, _) in components {
            let loaded = bench.load(&component(version, decision)).expect("this host loads it");
            assert_eq!((loaded.contract(), loaded.decision()), (version, decision));
            let text = std::fs::read_to_string(file(version, decision, "case")).expect("its cases are there");
            let make = |parameters: &str| {
                let how = Seating { parameters, ..Seating::default() };
                bench.seat(&loaded, how).map(|seated| seated.subject)
            };
            if let Err(faults) = check(&text, &make) {
                panic!("{version} {}\n{faults}", decision.name());
            }
        }
    }
}

#[test]
fn a_frozen_component_keeps_the_rules_of_today() {
    let (bench, elsewhere) = (bench(), Bench::new().expect("a second engine starts"));
    for (version, components) in FROZEN {
        for (decision, _) in components {
            let bytes = component(version, decision);
            let loaded = bench.load(&bytes).expect("this host loads it");
            let tested = Tested { bench: &bench, component: &loaded, how: Seating::default() };
            let moments = moments(decision, 70, 60);
            let fault = |problem| panic!("{version} {}: {problem}", decision.name());
            checks::answers_at_the_edges(tested).map(drop).unwrap_or_else(fault);
            checks::repeats(tested, &elsewhere, &bytes, &moments).map(drop).unwrap_or_else(fault);
            checks::remembers(tested, &moments).map(drop).unwrap_or_else(fault);
        }
    }
}
