//! What does each shipped policy burn where there is most to do? Held to its budget, and to ceilings that are written down, so that a
//! policy that becomes dearer is seen.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use penstock_conformance::checks::{self, Spent};

use crate::shelf::{bench, components, here};

/// What compilers may differ by.
const SLACK_PERCENT: u64 = 15;

/// `COMPONENT CALL SIZE FUEL` a line.
fn ceilings() -> BTreeMap<(String, String), (usize, u64)> {
    let text = std::fs::read_to_string(here().join("fuel-ceilings.txt")).expect("the ceilings are written down");
    let lines = text.lines().filter(|line| !line.is_empty() && !line.starts_with('#'));
    let entry = |line: &str| {
        let words: Vec<&str> = line.split_whitespace().collect();
        let [component, call, size, fuel] = words[..] else { panic!("not COMPONENT CALL SIZE FUEL: {line}") };
        let number = |text: &str| text.replace('_', "").parse().expect("a number");
        ((component.to_owned(), call.to_owned()), (number(size) as usize, number(fuel)))
    };
    lines.map(entry).collect()
}

fn written(all: &[(String, Vec<Spent>)]) -> String {
    let mut out = String::from(
        "# Most fuel of one call, over the most candidates or facts that it may be given: COMPONENT CALL SIZE FUEL.\n\
         # Written by PENSTOCK_BLESS=1 with room for what compilers differ by; a policy that needs more is to say why.\n",
    );
    for (name, spent) in all {
        for one in spent {
            let ceiling = one.fuel + one.fuel * SLACK_PERCENT / 100;
            writeln!(out, "{name} {} {} {ceiling}", one.call, one.size).expect("a string takes everything");
        }
    }
    out
}

#[test]
fn every_call_stays_within_its_budget_and_its_ceiling() {
    let bench = bench();
    let mut all = Vec::new();
    for shipped in components(&bench) {
        let spent = checks::measure(shipped.tested(&bench)).unwrap_or_else(|fault| panic!("{}: {fault}", shipped.name));
        for one in &spent {
            println!(
                "figure: {} {} over {}: fuel {} of {}, {} each ({})",
                shipped.name,
                one.call,
                one.size,
                one.fuel,
                one.budget,
                one.each(),
                one.input
            );
        }
        all.push((shipped.name, spent));
    }
    if all.is_empty() {
        return;
    }
    if std::env::var_os("PENSTOCK_BLESS").is_some() {
        std::fs::write(here().join("fuel-ceilings.txt"), written(&all)).expect("the ceilings can be written");
    }
    let ceilings = ceilings();
    for (name, spent) in &all {
        if let Err(over) = checks::spent_within(spent) {
            panic!("{name}: {over}");
        }
        for one in spent {
            let ceiling = ceilings.get(&(name.clone(), one.call.to_owned()));
            let Some((size, most)) = ceiling else { panic!("{name} {}: no ceiling is written down", one.call) };
            assert_eq!((*size, one.fuel <= *most), (one.size, true), "{name} {}: {one:?}, at most {most}", one.call);
        }
    }
}
