//! `penstock.toml`: one typed file. Every key has a unit in its name, a default, and an owner; command-line flags override it.
//!
//! All faults of a file are reported at once, each with its place and the remedy.

mod check;
mod sections;

pub use check::Faults;
pub use sections::{ClassConfig, Config, ObjectiveConfig};

use std::path::Path;

/// Reads a file, or the defaults when there is none.
///
/// # Errors
/// Every fault of the file: syntax, unknown keys, wrong types, values out of range.
pub fn read(path: Option<&Path>) -> Result<Config, Faults> {
    let Some(path) = path else { return Ok(Config::default()) };
    let text = std::fs::read_to_string(path)
        .map_err(|fault| Faults::one(format!("{}: {fault}: is the path right?", path.display())))?;
    parse(&text).map_err(|faults| faults.in_file(path))
}

/// Parses the text of a file.
///
/// # Errors
/// As for [`read`].
pub fn parse(text: &str) -> Result<Config, Faults> {
    let table: toml::Table = text.parse().map_err(|fault: toml::de::Error| Faults::one(fault.to_string()))?;
    let (config, mut faults) = check::sections(table);
    faults.extend(config.check());
    if faults.is_empty() { Ok(config) } else { Err(faults) }
}
