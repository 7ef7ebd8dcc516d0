//! NIXL for the transports' tests: its library and libclang, which builds the bindings, from their packages for Python, unpacked below
//! `target/`. Nothing of NVIDIA need be installed.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context as _, Result, bail, ensure};

use crate::python;

/// The first brings NIXL with UCX and all else that it loads; of what it asks for in Python nothing is needed.
const PACKAGES: [&str; 2] = ["nixl-cu12==1.5.1", "libclang==18.1.1"];

/// What a build with the feature and its tests need in their environment.
pub fn environment(root: &Path) -> Result<Vec<(&'static str, String)>> {
    let dir = installed(root)?;
    let library = find(&dir, "libnixl_capi.so")?;
    let libclang = find(&dir, "libclang.so")?;
    let headers = Command::new("g++").arg("-print-file-name=include").output();
    let headers = headers.ok().filter(|output| output.status.success()).context("g++ is missing: install it")?;
    let headers = String::from_utf8_lossy(&headers.stdout).trim().to_owned();
    let mut environment = vec![
        ("LIBCLANG_PATH", libclang.display().to_string()),
        // libclang from its package comes without the compiler's own headers.
        ("BINDGEN_EXTRA_CLANG_ARGS", format!("-I{headers}")),
        ("PENSTOCK_NIXL", library.display().to_string()),
        // As in the transport's own defaults.
        ("UCX_TLS", "^shm".to_owned()),
    ];
    if !Path::new("/sys/class/infiniband").exists() {
        environment.push(("UCX_MODULES", "^ib".to_owned()));
    }
    Ok(environment)
}

/// Folder with the packages; installed once for each choice of versions.
fn installed(root: &Path) -> Result<PathBuf> {
    let dir = crate::target(root).join("nixl");
    let stamp = dir.join("packages.installed");
    let wanted = PACKAGES.join("\n");
    if fs::read_to_string(&stamp).is_ok_and(|installed| installed == wanted) {
        return Ok(dir);
    }
    if dir.exists() {
        fs::remove_dir_all(&dir).with_context(|| format!("remove {}", dir.display()))?;
    }
    let base = python::find()?;
    let status = Command::new(&base)
        .args(["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps", "--target"])
        .arg(&dir)
        .args(PACKAGES)
        .stdout(Stdio::null())
        .status()
        .context("run pip")?;
    ensure!(status.success(), "pip could not install {}", PACKAGES.join(" and "));
    fs::write(&stamp, wanted)?;
    Ok(dir)
}

/// The folder below `dir` that has this file.
fn find(dir: &Path, name: &str) -> Result<PathBuf> {
    let mut open = vec![dir.to_owned()];
    while let Some(dir) = open.pop() {
        if dir.join(name).is_file() {
            return Ok(dir);
        }
        let entries = fs::read_dir(&dir).with_context(|| format!("read {}", dir.display()))?;
        open.extend(entries.filter_map(|entry| entry.ok().map(|entry| entry.path())).filter(|path| path.is_dir()));
    }
    bail!("the packages {} have no {name}", PACKAGES.join(" and "))
}
