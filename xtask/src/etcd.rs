//! A real etcd for the tests of discovery: the one on the path, or Debian's package unpacked below `target/`, which needs no root.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context as _, Result, bail, ensure};

const PACKAGE: &str = "etcd-server";

/// Path of an etcd; fetches it when there is none yet.
pub fn ensure_there(root: &Path) -> Result<PathBuf> {
    let dirs = std::env::var_os("PATH").unwrap_or_default();
    let on_path = std::env::split_paths(&dirs).map(|dir| dir.join("etcd")).find(|path| path.is_file());
    // The tests look in both places as well.
    let dir = crate::target(root).join("etcd");
    let fetched = dir.join("usr/bin/etcd");
    if let Some(path) = on_path.or_else(|| fetched.is_file().then(|| fetched.clone())) {
        return Ok(path);
    }
    fs::create_dir_all(&dir)?;
    if !succeeds(Command::new("apt-get").args(["download", PACKAGE]).current_dir(&dir)) {
        // Only root may read the package lists anew.
        let is_updated = succeeds(Command::new("apt-get").args(["update", "-qq"]));
        let is_there = is_updated && succeeds(Command::new("apt-get").args(["download", PACKAGE]).current_dir(&dir));
        if !is_there {
            bail!("apt-get cannot download {PACKAGE}: install an etcd of 3.4 or newer by hand, or set PENSTOCK_ETCD");
        }
    }
    let package = fs::read_dir(&dir)?.filter_map(|entry| entry.ok().map(|entry| entry.path()));
    let package = package.into_iter().find(|path| path.extension().is_some_and(|end| end == "deb"));
    let package = package.context("apt-get has downloaded no package")?;
    ensure!(
        succeeds(Command::new("dpkg").arg("-x").arg(&package).arg(&dir)),
        "dpkg cannot unpack {}",
        package.display()
    );
    fs::remove_file(&package)?;
    ensure!(fetched.is_file(), "the package {PACKAGE} has no etcd");
    Ok(fetched)
}

fn succeeds(command: &mut Command) -> bool {
    let quiet = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    quiet.status().is_ok_and(|status| status.success())
}
