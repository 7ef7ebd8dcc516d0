//! Scenarios of the replica: `tests/replica/*.txt`, each a script and the trace that it must give.
//!
//! The trace stands behind the line `----`. `PENSTOCK_BLESS=1` writes what the machine does; what is blessed is read against the rules
//! before it is committed. After every input of every scenario the machine is also read back from its bytes and goes on as a copy.

#[path = "support/content.rs"]
mod content;
#[path = "support/replica_driver.rs"]
mod replica_driver;
#[path = "support/replica_scenario.rs"]
mod scenario;

use std::path::Path;
use std::{env, fs};

const CUT: &str = "\n----\n";

#[test]
fn every_scenario_gives_its_trace() {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/replica");
    let entries = fs::read_dir(&dir).expect("the scenarios");
    let mut files: Vec<_> = entries.map(|entry| entry.expect("an entry").path()).collect();
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
            let differs = expected.lines().zip(trace.lines()).position(|(a, b)| a != b);
            let at = differs.unwrap_or(expected.lines().count().min(trace.lines().count()));
            let part = |text: &str| text.lines().skip(at.saturating_sub(3)).take(8).collect::<Vec<_>>().join("\n");
            wrong.push(format!("{}:\nexpected\n{}\ngot\n{}", file.display(), part(expected), part(&trace)));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n\n"));
}
