//! What a component saves it takes back, for whatever cause; what is damaged leaves it as new.

use penstock_conformance::checks;
use penstock_conformance::random::moments;

use crate::shelf::{bench, components};

#[test]
fn a_restored_instance_goes_on_as_if_nothing_had_happened() {
    let bench = bench();
    for shipped in components(&bench) {
        for seed in [50, 51] {
            let moments = moments(shipped.component.decision(), seed, 120);
            match checks::remembers(shipped.tested(&bench), &moments) {
                Ok(bytes) => println!("figure: {} keeps up to {bytes} bytes of state, seed {seed}", shipped.name),
                Err(problem) => panic!("{}, seed {seed}: {problem}", shipped.name),
            }
        }
    }
}

#[test]
fn damaged_state_leaves_an_instance_as_new() {
    let bench = bench();
    for shipped in components(&bench) {
        let moments = moments(shipped.component.decision(), 60, 80);
        match checks::forgets_what_is_damaged(shipped.tested(&bench), &moments) {
            Ok(tried) => println!("figure: {} is given {tried} damaged states", shipped.name),
            Err(problem) => panic!("{}: {problem}", shipped.name),
        }
    }
}
