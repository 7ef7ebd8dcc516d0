//! Python, for what only it has: the model's package and the official client in the end-to-end suite.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context as _, Result, bail, ensure};

/// A Python 3 that has pip.
pub fn find() -> Result<String> {
    let candidates = std::env::var("PYTHON").into_iter().chain(["python3".to_owned(), "python".to_owned()]);
    for name in candidates {
        let check = Command::new(&name)
            .args(["-c", "import sys, pip; sys.exit(sys.version_info < (3, 9))"])
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .status();
        if check.is_ok_and(|status| status.success()) {
            return Ok(name);
        }
    }
    bail!("no Python 3.9 or newer with pip: install python3 and python3-pip, or set PYTHON to one that has it")
}

/// A virtual environment below `target/` with the packages of `requirements`; made once for each content of that file.
pub fn environment(root: &Path, requirements: &Path) -> Result<PathBuf> {
    let wanted = fs::read_to_string(requirements).with_context(|| format!("read {}", requirements.display()))?;
    let dir = crate::target(root).join("python");
    let stamp = dir.join("requirements.installed");
    let python = dir.join("bin/python");
    if python.exists() && fs::read_to_string(&stamp).is_ok_and(|installed| installed == wanted) {
        return Ok(python);
    }
    let base = find()?;
    let status = Command::new(&base).args(["-m", "venv", "--clear"]).arg(&dir).status().context("make a venv")?;
    ensure!(status.success(), "{base} -m venv failed: on Debian install python3-venv");
    let status = Command::new(&python)
        .args(["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "-r"])
        .arg(requirements)
        .status()
        .context("run pip")?;
    ensure!(status.success(), "pip could not install {}", requirements.display());
    fs::write(&stamp, wanted)?;
    Ok(python)
}
