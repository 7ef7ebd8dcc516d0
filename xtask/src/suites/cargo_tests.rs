//! Suites that cargo's own test runner runs.

use std::fs;
use std::io::{BufRead as _, BufReader, Write as _};
use std::process::{Command, Stdio};

use anyhow::{Context as _, Result, bail};

use super::{Counts, Setting, cargo, skipped};
use crate::{nixl, serve, target};

/// Seeds of the simulator in the whole run, and in the inner loop (which runs them inside `unit`).
const SEEDS: &str = "1000";
const SEEDS_QUICK: &str = "60";

/// Everything in the workspace, documentation examples included.
pub fn unit(setting: &Setting) -> Result<Counts> {
    let mut command = cargo(&setting.root, &["test", "--workspace", "--no-fail-fast", "--profile", serve::PROFILE]);
    command.args(["--", "--show-output"]).env("PENSTOCK_SIM_SEEDS", SEEDS_QUICK);
    run(setting, "unit", command)
}

/// The simulator's seeds: natively at both overlap depths, with components in the seats, and clusters over links that fail. What else the simulator tests has no seeds to
/// be told, and runs in `unit`.
pub fn simulation(setting: &Setting) -> Result<Counts> {
    // The whole workspace is selected, as everywhere: another selection has other features, and compiles Wasmtime again.
    let mut command = cargo(&setting.root, &["test", "--workspace", "--profile", serve::PROFILE]);
    command.args(["--test", "seeds", "--test", "components", "--test", "clusters"]);
    command.args(["--", "--show-output", "--test-threads", "1"]);
    command.env("PENSTOCK_SIM_SEEDS", SEEDS);
    run(setting, "simulation", command)
}

/// The transports again, in a build that has NIXL. The build output is the shared one: what the feature adds lies beside the rest.
pub fn nixl(setting: &Setting) -> Result<Counts> {
    let environment = match nixl::environment(&setting.root) {
        Ok(environment) => environment,
        Err(fault) => return skipped(&format!("nixl: {fault:#}")),
    };
    let mut command = cargo(&setting.root, &["test", "--no-fail-fast", "--profile", serve::PROFILE]);
    command.args(["--package", "penstock-transport", "--features", "nixl", "--lib"]);
    command.args([
        "--test",
        "conformance",
        "--test",
        "fence",
        "--test",
        "grants",
        "--test",
        "grants_far",
        "--test",
        "processes",
    ]);
    // One after the other: they share one library, and each moves some hundred MiB.
    command.args(["--", "--show-output", "--test-threads", "1"]).envs(environment);
    // One test runs this one in a process of its own.
    command.args(["--skip", "namespaces_by_nixl::the_near_end"]);
    run(setting, "nixl", command)
}

/// Runs one `cargo test`, shows what a reader wants to see, and keeps the rest in a log.
pub(super) fn run(setting: &Setting, name: &str, mut command: Command) -> Result<Counts> {
    if let Some(model) = &setting.model {
        command.env("PENSTOCK_DEMO_MODEL", model);
    }
    let logs = target(&setting.root).join("test-logs");
    fs::create_dir_all(&logs)?;
    let log_path = logs.join(format!("{name}.log"));
    let mut log = fs::File::create(&log_path)?;
    let mut child = command.stdout(Stdio::piped()).spawn().with_context(|| format!("run {command:?}"))?;
    let output = BufReader::new(child.stdout.take().context("stdout is piped")?);
    let mut counts = Counts::default();
    let mut tail = Vec::new();
    for line in output.split(b'\n') {
        let line = String::from_utf8_lossy(&line?).into_owned();
        writeln!(log, "{line}")?;
        if let Some(result) = Counts::from_libtest(&line) {
            counts.add(result);
            println!("{line}");
        } else if line.contains("SKIPPED") {
            counts.skipped += 1;
            println!("{line}");
        } else if line.starts_with("test ") && line.ends_with("FAILED") {
            setting.note_failure(&format!("{name}: {line}"));
            println!("{line}");
        } else if line.contains("FAILED") || line.contains("panicked at") || line.starts_with("figure:") {
            println!("{line}");
        }
        tail.push(line);
        if tail.len() > 4_000 {
            tail.drain(..2_000);
        }
    }
    let status = child.wait()?;
    if !status.success() {
        if let Some(from) = tail.iter().position(|line| line == "failures:") {
            tail.iter().skip(from).take(400).for_each(|line| println!("{line}"));
        }
        println!("whole log: {}", log_path.display());
        if counts.failed == 0 {
            bail!("{command:?}: {status}");
        }
    }
    Ok(counts)
}
