//! `penstock.toml`: one typed file. Every key has a unit in its name, a default, and an owner; command-line flags override it.
//!
//! All faults of a file are reported at once, each with its place and the remedy.

mod check;
mod check_cluster;
mod cluster;
mod kv_events;
mod sections;

pub use check::Faults;
pub use check_cluster::Job;
pub use cluster::{DiscoveryAt, FallbackTo, Near, TransferKind, WorkerRole, pair};
pub use sections::{AdminListen, ClassConfig, Config, KvDtype, ObjectiveConfig, PackedCacheMode, Precision, StateDir};

use std::path::Path;

/// Reads a file, or the defaults when there is none, with everything that is wrong with its form. Values are checked by
/// [`Config::check`], once flags have had their say.
pub fn read(path: Option<&Path>) -> (Config, Faults) {
    let Some(path) = path else { return (Config::default(), Faults::default()) };
    match std::fs::read_to_string(path) {
        Ok(text) => {
            let (config, faults) = parse(&text);
            (config, faults.in_file(path))
        }
        Err(fault) => {
            let fault = format!("{}: {fault}: is the path right?", path.display());
            (Config::default(), Faults::one(fault))
        }
    }
}

/// Parses the text of a file.
pub fn parse(text: &str) -> (Config, Faults) {
    match text.parse::<toml::Table>() {
        Ok(table) => check::sections(table),
        Err(fault) => (Config::default(), Faults::one(fault.to_string())),
    }
}
