//! `cargo xtask tidy`: is the house as its map says? Every fault is listed, not only the first.

mod arrows;
mod licences;
mod map;
mod texts;

use anyhow::{Result, bail};
use cargo_metadata::MetadataCommand;

use crate::root;

/// Runs every check over the tree.
pub fn run() -> Result<()> {
    let root = root()?;
    let metadata = MetadataCommand::new().manifest_path(root.join("Cargo.toml")).exec()?;
    let mut faults = arrows::check(&metadata);
    faults.extend(licences::check(&root, &metadata)?);
    faults.extend(map::check(&root, &metadata)?);
    faults.extend(texts::check(&root)?);
    for fault in &faults {
        println!("tidy: {fault}");
    }
    if !faults.is_empty() {
        bail!("{} faults", faults.len());
    }
    Ok(())
}
