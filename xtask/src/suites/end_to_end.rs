//! The end-to-end suite: the built server, the real model, the official client.

use std::io::{BufRead as _, BufReader};
use std::path::PathBuf;
use std::process::{Command, Stdio};

use anyhow::{Context as _, Result, bail};

use super::{Counts, Setting, cargo, skipped, succeed};
use crate::{policies, python, serve, target};

const DIR: &str = "tests/e2e";
/// What its Python has to have, and that of tests in other suites.
pub const REQUIREMENTS: &str = "tests/e2e/requirements.txt";

/// Builds the server, its policies and the hostile ones, makes the Python environment, runs the folder.
pub fn run(setting: &Setting) -> Result<Counts> {
    let Some(model) = &setting.model else {
        return skipped("end-to-end: the demo model could not be had");
    };
    serve::build(&setting.root)?;
    // Without a tool chain the native defaults serve, and the tests of components say that they were skipped.
    policies::build(&setting.root)?;
    let hostile = hostile(setting)?;
    let dir = setting.root.join(DIR);
    let python = match python::environment(&setting.root, &setting.root.join(REQUIREMENTS)) {
        Ok(python) => python,
        Err(fault) => return skipped(&format!("end-to-end: {fault:#}")),
    };
    let mut command = Command::new(python);
    command
        .args(["-m", "pytest", "-q", "-rfEs", "-p", "no:cacheprovider", "--color=no"])
        .arg(&dir)
        .current_dir(&setting.root)
        .env("PENSTOCK_BIN", target(&setting.root).join(serve::PROFILE).join("penstock"))
        .env("PENSTOCK_DEMO_MODEL", model)
        .env("PENSTOCK_POLICIES", target(&setting.root).join("policies"))
        .env("PENSTOCK_HOSTILE", hostile)
        .env("PYTHONUNBUFFERED", "1")
        .env("PYTHONDONTWRITEBYTECODE", "1")
        .env("PENSTOCK_TEST_QUICK", if setting.quick { "1" } else { "" })
        .env("PENSTOCK_TEST_FAULTS", if setting.faults { "1" } else { "" })
        .stdout(Stdio::piped());
    let mut child = command.spawn().context("run pytest")?;
    let output = BufReader::new(child.stdout.take().context("stdout is piped")?);
    let mut counts = None;
    for line in output.lines() {
        let line = line?;
        println!("{line}");
        if line.starts_with("FAILED ") || line.starts_with("ERROR ") {
            setting.note_failure(&line);
        }
        counts = Counts::from_pytest(&line).or(counts);
    }
    let status = child.wait()?;
    match counts {
        Some(counts) if status.success() || counts.failed > 0 => Ok(counts),
        _ => bail!("pytest ended with {status} and no counts"),
    }
}

/// Writes the guests that break every rule. They are text, so they need no tool chain for guests.
fn hostile(setting: &Setting) -> Result<PathBuf> {
    let folder = target(&setting.root).join("hostile");
    let mut command = cargo(&setting.root, &["run", "--quiet", "--profile", serve::PROFILE]);
    command
        .args(["--package", "penstock-hostile-guests", "--example", "write", "--"])
        .arg(&folder)
        .stdout(Stdio::null());
    succeed(command, "the hostile guests could not be written")?;
    Ok(folder)
}
