//! Rules that a reader of single files can check: length, room names, purity, links.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, ensure};

/// A file answers one question and is read in one sitting. Generated ones do not count.
const LINES_MAX: usize = 700;
const ROOM_NAMES_BANNED: &[&str] = &["utils", "util", "common", "helpers", "helper", "misc", "manager"];
const PURE: &[&str] = &["host/base", "host/kv", "host/policy-api", "host/sched"];

pub fn check(root: &Path) -> Result<Vec<String>> {
    let mut faults = Vec::new();
    for path in tracked(root)? {
        let name = path.to_string_lossy().replace('\\', "/");
        let stem = path.file_stem().map(|stem| stem.to_string_lossy().into_owned()).unwrap_or_default();
        let is_generated = name.contains("/generated/");
        let mut parts = path.components().map(|part| part.as_os_str().to_string_lossy().into_owned());
        let is_banned = |part: &str| ROOM_NAMES_BANNED.contains(&part);
        if !is_generated && (is_banned(&stem) || parts.any(|part| is_banned(&part))) {
            faults.push(format!("{name}: a room needs a name that says what is in it"));
        }
        let Ok(text) = std::fs::read_to_string(root.join(&path)) else { continue };
        if name.ends_with(".rs") && !is_generated {
            let lines = text.lines().count();
            if lines > LINES_MAX {
                faults.push(format!("{name}: {lines} lines, more than {LINES_MAX}; which question is the second one?"));
            }
        }
        if name.ends_with(".md") {
            faults.extend(dead_links(root, &path, &text));
        }
    }
    for dir in PURE {
        let text = std::fs::read_to_string(root.join(dir).join("src/lib.rs"))?;
        if !text.contains("#![no_std]") {
            faults.push(format!("{dir}: layers 0 to 2 are no_std"));
        }
    }
    Ok(faults)
}

fn tracked(root: &Path) -> Result<Vec<PathBuf>> {
    let output = Command::new("git").args(["ls-files", "-z"]).current_dir(root).output().context("run git ls-files")?;
    ensure!(output.status.success(), "git ls-files failed: {}", String::from_utf8_lossy(&output.stderr));
    let names = String::from_utf8_lossy(&output.stdout).into_owned();
    Ok(names.split('\0').filter(|name| !name.is_empty()).map(PathBuf::from).collect())
}

/// Links of a page to files of the tree that are not there.
fn dead_links(root: &Path, page: &Path, text: &str) -> Vec<String> {
    let folder = root.join(page.parent().unwrap_or(Path::new("")));
    let targets = text.split("](").skip(1).filter_map(|rest| rest.split([')', '#']).next());
    targets
        .filter(|target| !target.is_empty() && !target.contains("://") && !target.contains(' '))
        .filter(|target| !folder.join(target).exists())
        .map(|target| format!("{}: the link to {target} leads nowhere", page.display()))
        .collect()
}
