//! Turns the core module that rustc builds of a policy into a component: `penstock-componentise MODULE COMPONENT`.
//!
//! The module carries its world in a custom section, so nothing else is needed. Function names stay, so that a trap can say where it was.
//! A program of its own, because what it is made of takes minutes to build and only policies need it.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context as _, Result, bail};
use wit_component::ComponentEncoder;

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(fault) => {
            eprintln!("penstock-componentise: {fault:#}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> Result<()> {
    let arguments: Vec<PathBuf> = std::env::args_os().skip(1).map(PathBuf::from).collect();
    let [module, component] = arguments.as_slice() else { bail!("usage: penstock-componentise MODULE COMPONENT") };
    let bytes = std::fs::read(module).with_context(|| format!("read {}", module.display()))?;
    let encoder = ComponentEncoder::default().validate(true).module(&bytes).context("read the module's world")?;
    let encoded = { encoder }.encode().context("encode the component")?;
    // Through a neighbour, so that whoever watches the folder never sees half a component.
    let partial = component.with_extension("partial");
    std::fs::write(&partial, encoded).with_context(|| format!("write {}", partial.display()))?;
    std::fs::rename(&partial, component).with_context(|| format!("write {}", component.display()))
}
