//! Has anything changed that a component is made of?

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};
use sha2::{Digest as _, Sha256};

use super::{hex, toolchain::Toolchain};

/// Everything that goes into a component: sources, contract, versions of what others wrote.
const INPUTS: &[&str] = &[
    "Cargo.toml",
    "Cargo.lock",
    "wit",
    "sdk/rust",
    "policies",
    "host/base",
    "host/policy-api",
    "xtask/src/policies.rs",
];

/// A digest over the content of all inputs and the tool chain.
pub fn of(root: &Path, toolchain: &Toolchain) -> Result<String> {
    let mut files = Vec::new();
    for input in INPUTS {
        collect(&root.join(input), &mut files)?;
    }
    files.sort();
    let mut all = Sha256::new();
    all.update(toolchain.version()?);
    for file in files {
        let name = file.strip_prefix(root).unwrap_or(&file).to_string_lossy().into_owned();
        let content = fs::read(&file).with_context(|| format!("read {}", file.display()))?;
        all.update(name.as_bytes());
        all.update([0]);
        all.update(Sha256::digest(&content));
    }
    Ok(hex(&all.finalize()))
}

fn collect(path: &Path, files: &mut Vec<PathBuf>) -> Result<()> {
    if path.is_file() {
        files.push(path.to_owned());
        return Ok(());
    }
    for entry in fs::read_dir(path).with_context(|| format!("list {}", path.display()))? {
        let entry = entry?;
        let is_hidden = entry.file_name().to_string_lossy().starts_with('.');
        if !is_hidden && entry.file_name() != "target" {
            collect(&entry.path(), files)?;
        }
    }
    Ok(())
}
