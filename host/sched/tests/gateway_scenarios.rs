//! Scenarios of the gateway: `tests/gateway/*.txt`, each a script and the trace that it must give.
//!
//! The trace stands behind the line `----`. `PENSTOCK_BLESS=1` writes what the machine does; what is blessed is read against the rules
//! before it is committed.

#[path = "support/gateway_policies.rs"]
mod policies;
#[path = "support/gateway_scenario.rs"]
mod scenario;

use std::path::Path;
use std::{env, fs};

const CUT: &str = "\n----\n";

#[test]
fn every_scenario_gives_its_trace() {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/gateway");
    let mut files: Vec<_> =
        fs::read_dir(&dir).expect("the scenarios").map(|entry| entry.expect("an entry").path()).collect();
    files.sort();
    assert!(!files.is_empty());
    let bless = env::var_os("PENSTOCK_BLESS").is_some();
    let mut wrong = Vec::new();
    for file in files {
        let text = fs::read_to_string(&file).expect("a scenario");
        let (script, expected) = text.split_once(CUT).unwrap_or((text.trim_end(), ""));
        let trace = scenario::run(script);
        if bless {
            fs::write(&file, format!("{}{CUT}{trace}", script.trim_end())).expect("writes");
        } else if trace != expected {
            wrong.push(format!("{}:\n{}", file.display(), difference(expected, &trace)));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

fn difference(expected: &str, got: &str) -> String {
    let at = expected.lines().zip(got.lines()).position(|(a, b)| a != b);
    let at = at.unwrap_or(expected.lines().count().min(got.lines().count()));
    let part = |text: &str| text.lines().skip(at.saturating_sub(3)).take(8).collect::<Vec<_>>().join("\n");
    format!("first differs in line {}\n--- expected\n{}\n--- got\n{}", at + 1, part(expected), part(got))
}
