//! docs/architecture.md against the tree: the map names every crate and every top folder, and nothing that is not there.

use std::collections::BTreeSet;
use std::path::Path;

use anyhow::{Context as _, Result};
use cargo_metadata::Metadata;

const MAP: &str = "docs/architecture.md";
/// Folders whose crates the map names together: they grow without changing the house.
const FILLED_FOLDERS: &[&str] = &["policies", "sdk/rust"];

pub fn check(root: &Path, metadata: &Metadata) -> Result<Vec<String>> {
    let text = std::fs::read_to_string(root.join(MAP)).with_context(|| format!("read {MAP}"))?;
    let mut faults = Vec::new();
    let named = paths_in(&text);
    for package in metadata.workspace_packages() {
        let dir = package.manifest_path.parent().and_then(|dir| dir.strip_prefix(&metadata.workspace_root).ok());
        let Some(dir) = dir.map(|dir| dir.to_string()) else { continue };
        let is_covered = FILLED_FOLDERS.iter().any(|folder| named.contains(folder) && dir.starts_with(folder));
        if !is_covered && !named.contains(dir.as_str()) {
            faults.push(format!("{MAP} does not name `{dir}`"));
        }
    }
    for entry in std::fs::read_dir(root)? {
        let entry = entry?;
        let name = entry.file_name().to_string_lossy().into_owned();
        let is_folder = entry.file_type()?.is_dir() && !name.starts_with('.') && name != "target";
        if is_folder && !named.iter().any(|path| path.split('/').next() == Some(&name)) {
            faults.push(format!("{MAP} does not name the folder `{name}`"));
        }
    }
    for path in &named {
        if !root.join(path).exists() {
            faults.push(format!("{MAP} names `{path}`, which is not in the tree"));
        }
    }
    Ok(faults)
}

/// Words in backticks that look like paths of the tree: they hold a slash or name a top folder with one at the end.
fn paths_in(text: &str) -> BTreeSet<&str> {
    let is_path = |word: &&str| {
        word.contains('/')
            && !word.starts_with('/')
            && word.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '/' | '-' | '_' | '.'))
    };
    text.split('`').skip(1).step_by(2).filter(is_path).map(|path| path.trim_end_matches('/')).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_paths_in_backticks_count() {
        let found = paths_in("see `host/kv`, `docs/`, not `/v1/models`, not `a b/c`, not host/x");
        assert_eq!(found.into_iter().collect::<Vec<_>>(), ["docs", "host/kv"]);
    }
}
