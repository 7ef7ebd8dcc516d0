//! `cargo xtask bench NAME`: figures for people. Nothing here passes or fails; the checks are in `cargo xtask test`.

mod peers;

use std::path::Path;
use std::process::Command;

use anyhow::{Context as _, Result, ensure};
use clap::ValueEnum;

use crate::{policies, serve, target};

/// What can be measured.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub enum Bench {
    /// One call of each seat, and all calls of a step, behind the wall and natively: docs/performance-policies.md.
    PolicyCost,
    /// Where computing prompts apart from decoding pays, in virtual time: docs/prefill-decode.md. A path behind `--` gets the picture.
    PrefillDecode,
    /// What a request costs the gateway's machine before 10, 100 and 1,000 workers: docs/performance-gateway.md.
    GatewayCost,
    /// This server beside llama.cpp's and vLLM's, taking turns on the same loads: docs/performance.md.
    Peers,
}

/// Measures, in the profile that serves unless told otherwise. `args` go to the benchmark.
pub fn run(root: &Path, bench: Bench, profile: Option<&str>, args: &[String]) -> Result<()> {
    let profile = profile.unwrap_or(serve::PROFILE);
    match bench {
        Bench::PolicyCost => policy_cost(root, profile, args),
        Bench::Peers => peers::run(root, profile, args),
        Bench::PrefillDecode => of_simulator(root, "prefill_decode", profile, args),
        Bench::GatewayCost => of_simulator(root, "gateway_cost", profile, args),
    }
}

/// A benchmark of the simulator's crate. The whole workspace is selected, as everywhere, so that nothing is compiled with other features.
fn of_simulator(root: &Path, name: &str, profile: &str, args: &[String]) -> Result<()> {
    let mut command = Command::new(env!("CARGO"));
    command.args(["bench", "--workspace", "--bench", name, "--profile", profile, "--"]).args(args);
    let status = command.current_dir(root).status().with_context(|| format!("run {command:?}"))?;
    ensure!(status.success(), "{command:?}: {status}");
    Ok(())
}

fn policy_cost(root: &Path, profile: &str, args: &[String]) -> Result<()> {
    let built = policies::build(root)?;
    if let Some(why) = built.skipped {
        println!("SKIPPED policy-cost: {why}");
        return Ok(());
    }
    let mut command = Command::new(env!("CARGO"));
    // With the whole workspace's features, so that what the tests built is used and the engine is not compiled once more.
    command.args(["bench", "--workspace", "--bench", "policy_cost", "--profile", profile, "--"]);
    command.arg("--policies").arg(target(root).join("policies")).args(["--profile", profile]).args(args);
    let status = command.current_dir(root).status().with_context(|| format!("run {command:?}"))?;
    ensure!(status.success(), "{command:?}: {status}");
    Ok(())
}
