//! `penstock`: one binary that serves a model. The only crate that knows HTTP, the command line and configuration files.

mod bench;
mod cli;
mod cluster;
mod config;
mod deployment;
mod edge;
mod journal;
mod machines;
mod memory;
mod policies;
mod serve;
mod tenants;

use std::io::IsTerminal as _;
use std::process::ExitCode;

use clap::Parser as _;
use cli::{Cli, Command, Configures, Page};
use tracing_subscriber::EnvFilter;

/// What stands above the table of metrics.
const METRICS_PREFACE: &str = "\
# Metrics

`GET /metrics` gives these as Prometheus text. Each also carries the label `model_name`. Labels are bounded: no tenant, no request id, no
text. Times are in seconds. This page is made from the table that the exporter uses: `cargo xtask metrics`.

";

fn main() -> ExitCode {
    match Cli::parse().command {
        Command::Serve(args) => with_config(&args, |config| {
            start_logging();
            serve::run(config)
        }),
        Command::Gateway(args) => with_config(&args, |config| {
            start_logging();
            cluster::gateway::run(config)
        }),
        Command::Worker(args) => with_config(&args, |config| {
            start_logging();
            cluster::worker::run(config)
        }),
        Command::Config(args) => with_config(&args, |config| {
            let state_dir = deployment::state_dir(&config);
            let first = policies::foreseen(&policies::Wanted::of(&config), state_dir.as_deref());
            print!("{first}{}", toml::to_string(&config)?);
            Ok(())
        }),
        Command::Policy(args) => match policies::command::run(&args) {
            Ok(()) => ExitCode::SUCCESS,
            Err(fault) => {
                eprintln!("penstock policy: {fault:#}");
                ExitCode::FAILURE
            }
        },
        Command::Bench(args) => match bench::run(&args) {
            Ok(()) => ExitCode::SUCCESS,
            Err(fault) => {
                eprintln!("penstock bench: {fault:#}");
                ExitCode::FAILURE
            }
        },
        Command::Verify(args) => match journal::verify(&args) {
            Ok(code) => code,
            Err(fault) => {
                eprintln!("penstock verify: {fault:#}");
                ExitCode::FAILURE
            }
        },
        Command::Describe { what: Page::Metrics } => {
            print!("{METRICS_PREFACE}{}", penstock_engine::metrics::describe_all());
            ExitCode::SUCCESS
        }
    }
}

fn with_config(args: &impl Configures, run: impl FnOnce(config::Config) -> anyhow::Result<()>) -> ExitCode {
    let config = match args.effective() {
        Ok(config) => config,
        Err(faults) => {
            eprintln!("the configuration cannot be used:\n{faults}");
            return ExitCode::from(2);
        }
    };
    match run(config) {
        Ok(()) => ExitCode::SUCCESS,
        Err(fault) => {
            eprintln!("penstock: {fault:#}");
            ExitCode::FAILURE
        }
    }
}

/// Logs go to standard error; `PENSTOCK_LOG` chooses levels (`info`, `penstock=debug`), `PENSTOCK_LOG_FORMAT=json` the form.
fn start_logging() {
    let filter = EnvFilter::try_from_env("PENSTOCK_LOG").unwrap_or_else(|_| EnvFilter::new("info"));
    let is_json = std::env::var("PENSTOCK_LOG_FORMAT").is_ok_and(|format| format == "json");
    let logs = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_ansi(std::io::stderr().is_terminal())
        .with_writer(std::io::stderr);
    if is_json { logs.json().init() } else { logs.init() }
}
