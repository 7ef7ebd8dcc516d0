//! The suite `neon`: the kernels' tests that compare tiers, compiled for AArch64 and run under an emulator.
//!
//! Nothing is installed for it: the tools belong to another architecture. What is missing is named with the commands that bring it.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::Result;

use super::{Counts, Setting, cargo_tests, skipped};
use crate::{serve, target};

const TRIPLE: &str = "aarch64-unknown-linux-gnu";
const PACKAGE: &str = "penstock-kernels-cpu";
const LINKER: &str = "aarch64-linux-gnu-gcc";
const DEBIAN_CARGO: &str = "/usr/bin/cargo";
const DEBIAN_RUSTC: &str = "/usr/bin/rustc";
const EMULATORS: [&str; 2] = ["qemu-aarch64", "qemu-aarch64-static"];

/// Test files of the kernels that compare every tier with the oracle.
const TESTS: [&str; 4] = ["vector", "logits", "matrix", "attention"];

const REMEDY: &str = "on Debian as root `dpkg --add-architecture arm64 && apt-get update && apt-get install rustc-web cargo-web \
     libstd-rust-web-dev:arm64 gcc-aarch64-linux-gnu libc6-dev-arm64-cross qemu-user`; elsewhere `rustup target add \
     aarch64-unknown-linux-gnu`, and a C linker for it and qemu's user emulation from the system's packages";

/// A compiler with the target's standard library.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Compiler {
    /// The one that runs this.
    Own,
    /// Debian's.
    Debian,
}

impl Compiler {
    fn find(root: &Path) -> Option<Self> {
        let has_target = |rustc: &str| {
            let output = Command::new(rustc).args(["--print", "sysroot"]).current_dir(root).output();
            output.is_ok_and(|output| {
                let sysroot = PathBuf::from(String::from_utf8_lossy(&output.stdout).trim());
                has_standard_library(&sysroot.join("lib/rustlib").join(TRIPLE).join("lib"))
            })
        };
        if has_target("rustc") {
            return Some(Self::Own);
        }
        let has_debian = Path::new(DEBIAN_CARGO).exists() && has_target(DEBIAN_RUSTC);
        has_debian.then_some(Self::Debian)
    }

    fn cargo(self, root: &Path) -> Command {
        let mut command = match self {
            Self::Own => Command::new(env!("CARGO")),
            Self::Debian => {
                let mut command = Command::new(DEBIAN_CARGO);
                command.env("PATH", "/usr/bin:/bin").env("RUSTC", DEBIAN_RUSTC).env_remove("RUSTUP_TOOLCHAIN");
                command
            }
        };
        command.current_dir(root);
        command
    }
}

/// Whether a folder has the standard library; it may be there without.
fn has_standard_library(folder: &Path) -> bool {
    let Ok(entries) = folder.read_dir() else { return false };
    entries.flatten().any(|entry| entry.file_name().to_string_lossy().starts_with("libstd-"))
}

fn is_on_path(program: &str) -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path).any(|folder| folder.join(program).is_file())
}

/// Compiles and runs them, or says what is missing.
pub fn run(setting: &Setting) -> Result<Counts> {
    if cfg!(target_arch = "aarch64") {
        println!("this machine is AArch64: the suite `unit` runs these tests on it");
        return Ok(Counts::default());
    }
    let missing = |what: &str| skipped(&format!("neon: {what} is missing; {REMEDY}"));
    let Some(compiler) = Compiler::find(&setting.root) else {
        return missing(&format!("a standard library for {TRIPLE}"));
    };
    if !is_on_path(LINKER) {
        return missing(LINKER);
    }
    let Some(emulator) = EMULATORS.into_iter().find(|emulator| is_on_path(emulator)) else {
        return missing(EMULATORS[0]);
    };
    let mut command = compiler.cargo(&setting.root);
    // A folder of its own: two compilers would rebuild what the other left. Linked statically: the emulator has no libraries of the
    // target, and old ones hang on dynamic ones.
    command
        .args(["test", "--no-fail-fast", "--profile", serve::PROFILE, "--package", PACKAGE, "--target", TRIPLE])
        .args(TESTS.iter().flat_map(|test| ["--test", test]))
        .arg("--target-dir")
        .arg(target(&setting.root).join("neon"))
        .args(["--", "--show-output"])
        .env("CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER", LINKER)
        .env("CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_RUNNER", format!("{emulator} -cpu max"))
        .env("RUSTFLAGS", "-Ctarget-feature=+crt-static")
        .env_remove("CARGO_ENCODED_RUSTFLAGS");
    cargo_tests::run(setting, "neon", command)
}
