//! docs/metrics.md, from the table that the server's exporter uses.

use std::process::Command;

use anyhow::{Context as _, Result, ensure};

use crate::{root, serve, target};

const PAGE: &str = "docs/metrics.md";

/// Asks the built server for its table and writes the page, or with `check` fails when it differs.
pub fn generate(check: bool) -> Result<()> {
    let root = root()?;
    serve::build(&root)?;
    let output = Command::new(target(&root).join(serve::PROFILE).join("penstock"))
        .args(["describe", "metrics"])
        .output()
        .context("run penstock describe metrics")?;
    ensure!(output.status.success(), "penstock describe metrics failed: {}", String::from_utf8_lossy(&output.stderr));
    let page = root.join(PAGE);
    if check {
        let found = std::fs::read(&page).with_context(|| format!("read {PAGE}"))?;
        ensure!(found == output.stdout, "{PAGE} is out of date: run `cargo xtask metrics`");
        return Ok(());
    }
    std::fs::write(&page, &output.stdout).with_context(|| format!("write {PAGE}"))
}
