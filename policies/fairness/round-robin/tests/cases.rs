//! The case files of this policy, natively.

use std::path::Path;

use penstock_fairness_round_robin::Seat;
use penstock_policy_harness::{Subject, check_folder};
use penstock_policy_sdk::Load as _;

#[test]
fn the_cases_hold() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("cases");
    let make = |parameters: &str| {
        let seat = Seat::configure(parameters).map_err(|error| error.to_string())?;
        Ok(Subject::Fairness(Box::new(seat)))
    };
    if let Err(faults) = check_folder(&folder, &make) {
        panic!("{faults}");
    }
}
