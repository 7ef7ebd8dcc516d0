//! Which compiler can build for wasm32 here? Rustup's where it can fetch the target, else Debian's, else none.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context as _, Result, bail};

use super::TRIPLE;

/// Overrides the search: `rustup`, `debian` or `none`.
const CHOICE: &str = "PENSTOCK_WASM_TOOLCHAIN";
const DEBIAN_PACKAGES: [&str; 4] = ["rustc-web", "cargo-web", "rust-web-src", "lld-22"];
const DEBIAN_LINKER: &str = "/usr/bin/wasm-ld-22";
/// What Debian's packages put where; all of it must be there.
const DEBIAN_FILES: [&str; 3] = ["/usr/bin/rustc", "/usr/bin/cargo", DEBIAN_LINKER];

/// A way to compile for wasm32.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Toolchain {
    /// The compiler that runs this, with the target's standard library installed.
    Rustup,
    /// Debian's compiler, which builds the standard library from its sources.
    Debian,
}

impl Toolchain {
    /// For people.
    pub fn name(self) -> &'static str {
        match self {
            Self::Rustup => "the target wasm32-unknown-unknown of this tool chain",
            Self::Debian => "Debian's rustc-web and its standard library from source",
        }
    }

    /// What identifies the compiler.
    pub fn version(self) -> Result<Vec<u8>> {
        let rustc = match self {
            Self::Rustup => "rustc",
            Self::Debian => "/usr/bin/rustc",
        };
        let output = Command::new(rustc).arg("-vV").output().with_context(|| format!("run {rustc} -vV"))?;
        Ok(output.stdout)
    }

    /// Where it builds. Two compilers do not share a folder: each would rebuild what the other left.
    pub fn target_dir(self, target: &Path) -> PathBuf {
        match self {
            Self::Rustup => target.to_owned(),
            Self::Debian => target.join("debian-web"),
        }
    }

    /// Arguments behind `cargo build`.
    pub fn extra_args(self) -> &'static [&'static str] {
        match self {
            Self::Rustup => &[],
            Self::Debian => &["-Zbuild-std=std,panic_abort"],
        }
    }

    /// Its cargo, in `root`. Paths of this machine stay out of the components, so that equal sources give equal digests.
    pub fn cargo(self, root: &Path) -> Command {
        let mut command = match self {
            Self::Rustup => Command::new(env!("CARGO")),
            Self::Debian => {
                let mut command = Command::new("/usr/bin/cargo");
                command
                    .env("PATH", "/usr/bin:/bin")
                    .env("RUSTC", "/usr/bin/rustc")
                    .env("RUSTC_BOOTSTRAP", "1")
                    .env("CARGO_TARGET_WASM32_UNKNOWN_UNKNOWN_LINKER", DEBIAN_LINKER)
                    .env_remove("RUSTUP_TOOLCHAIN");
                command
            }
        };
        let mut flags = OsString::from("--remap-path-prefix=");
        flags.push(root);
        flags.push("=penstock");
        if let Some(home) = cargo_home() {
            flags.push("\u{1f}--remap-path-prefix=");
            flags.push(home);
            flags.push("=cargo");
        }
        command.current_dir(root).env("CARGO_ENCODED_RUSTFLAGS", flags).env_remove("RUSTFLAGS");
        command
    }
}

fn cargo_home() -> Option<PathBuf> {
    let named = std::env::var_os("CARGO_HOME").map(PathBuf::from);
    named.or_else(|| std::env::var_os("HOME").map(|home| PathBuf::from(home).join(".cargo")))
}

/// The tool chain to use, installing what is missing where that is possible; or why there is none.
pub fn find(root: &Path) -> Result<Result<Toolchain, String>> {
    let choice = std::env::var(CHOICE).unwrap_or_default();
    match choice.as_str() {
        "" => {}
        "none" => return Ok(Err(format!("{CHOICE} is none"))),
        "rustup" if has_target(root) || add_target(root) => return Ok(Ok(Toolchain::Rustup)),
        "debian" if has_debian() || install_debian() => return Ok(Ok(Toolchain::Debian)),
        "rustup" | "debian" => bail!("{CHOICE} is {choice}, but it is not there and could not be installed"),
        other => bail!("{CHOICE} is {other}; it can be rustup, debian or none"),
    }
    if has_target(root) || (!has_debian() && add_target(root)) {
        return Ok(Ok(Toolchain::Rustup));
    }
    if has_debian() || install_debian() {
        return Ok(Ok(Toolchain::Debian));
    }
    Ok(Err(format!(
        "nothing here compiles for {TRIPLE}. Either `rustup target add {TRIPLE}`, or on Debian as root `apt-get install {}`",
        DEBIAN_PACKAGES.join(" ")
    )))
}

/// Does the compiler that cargo uses here have the target's standard library?
fn has_target(root: &Path) -> bool {
    let output = Command::new("rustc").args(["--print", "sysroot"]).current_dir(root).output();
    output.is_ok_and(|output| {
        let sysroot = String::from_utf8_lossy(&output.stdout).trim().to_owned();
        output.status.success() && Path::new(&sysroot).join("lib/rustlib").join(TRIPLE).join("lib").is_dir()
    })
}

fn add_target(root: &Path) -> bool {
    eprintln!("asking rustup for the target {TRIPLE}");
    let status =
        Command::new("rustup").args(["target", "add", TRIPLE]).current_dir(root).stdout(Stdio::null()).status();
    status.is_ok_and(|status| status.success()) && has_target(root)
}

fn has_debian() -> bool {
    DEBIAN_FILES.iter().all(|file| Path::new(file).exists())
}

fn install_debian() -> bool {
    let is_debian = Path::new("/etc/debian_version").exists() && Path::new("/usr/bin/apt-get").exists();
    let is_root = Command::new("id").arg("-u").output().is_ok_and(|output| output.stdout.trim_ascii() == b"0");
    if !is_debian || !is_root {
        return false;
    }
    eprintln!("installing {} with apt-get", DEBIAN_PACKAGES.join(" "));
    let apt = |arguments: &[&str]| {
        let mut command = Command::new("apt-get");
        command.args(["-q", "-o", "DPkg::Lock::Timeout=300"]).args(arguments).stdout(Stdio::null());
        command.env("DEBIAN_FRONTEND", "noninteractive").status().is_ok_and(|status| status.success())
    };
    let mut install = vec!["install", "-y", "--no-install-recommends"];
    install.extend(DEBIAN_PACKAGES);
    (apt(&install) || (apt(&["update"]) && apt(&install))) && has_debian()
}
