//! `cargo xtask policies`: every policy under `policies/` as a component in `target/policies`, with whichever tool chain is there.

mod fingerprint;
mod toolchain;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

use anyhow::{Context as _, Result, ensure};
use sha2::{Digest as _, Sha256};

use crate::{serve, target};
use toolchain::Toolchain;

/// The decisions, which are the folders of `policies/` that hold components.
pub const DECISIONS: [&str; 5] = ["admission", "routing", "fairness", "eviction", "overload"];
/// The cargo profile of a component.
const PROFILE: &str = "guest";
const TRIPLE: &str = "wasm32-unknown-unknown";
/// The set that the server seats unless told otherwise, in `policies/`;
const SHIPPED: &str = "shipped.toml";
/// and its name beside the components, where the server looks for it.
pub const SHIPPED_BUILT: &str = "policies.toml";

/// What a build gave.
#[derive(Debug)]
pub struct Built {
    /// By decision, then name. Empty when nothing could be built.
    pub components: Vec<Component>,
    /// Why nothing was built, when there is no tool chain.
    pub skipped: Option<String>,
}

/// One policy as a component: `DECISION-NAME.wasm`, beside it `DECISION-NAME.wasm.sha256`.
#[derive(Clone, Debug)]
pub struct Component {
    /// Whose question it answers.
    pub decision: &'static str,
    /// Its folder's name.
    pub name: String,
    /// The component.
    pub path: PathBuf,
    /// Its digest, in hexadecimal digits.
    pub sha256: String,
    /// Its size.
    pub bytes: u64,
}

/// Builds what has changed. A second run of an unchanged tree reads the sources and nothing else.
pub fn build(root: &Path) -> Result<Built> {
    let start = Instant::now();
    let folder = target(root).join("policies");
    fs::create_dir_all(&folder).with_context(|| format!("make {}", folder.display()))?;
    let guests = guests(root)?;
    let toolchain = match toolchain::find(root)? {
        Ok(toolchain) => toolchain,
        Err(why) => return Ok(skip(why)),
    };
    let stamp = folder.join("stamp");
    let fingerprint = fingerprint::of(root, &toolchain)?;
    if fs::read_to_string(&stamp).is_ok_and(|last| last == fingerprint) {
        let there: Result<Vec<_>> = guests.iter().map(|guest| guest.component(&folder)).collect();
        if let Ok(components) = there {
            ship(root, &folder)?;
            return Ok(Built { components, skipped: None });
        }
    }
    eprintln!("building {} policies with {}", guests.len(), toolchain.name());
    let modules = compile(root, &toolchain, &guests)?;
    let componentise = componentiser(root)?;
    for (guest, module) in guests.iter().zip(&modules) {
        guest.componentise(&componentise, module, &folder)?;
    }
    ship(root, &folder)?;
    fs::write(&stamp, fingerprint).with_context(|| format!("write {}", stamp.display()))?;
    let components: Vec<_> = guests.iter().map(|guest| guest.component(&folder)).collect::<Result<_>>()?;
    for component in &components {
        let digest = component.sha256.get(..12).unwrap_or_default();
        eprintln!(
            "  {:<28} {:>7} bytes  {digest}",
            format!("{}-{}", component.decision, component.name),
            component.bytes
        );
    }
    eprintln!("{} components in {} ({:.0} s)", components.len(), folder.display(), start.elapsed().as_secs_f64());
    Ok(Built { components, skipped: None })
}

/// The command: builds, and prints what there is.
pub fn run(root: &Path) -> Result<()> {
    let built = build(root)?;
    for component in &built.components {
        println!("{}  {}", component.sha256, component.path.display());
    }
    if built.skipped.is_none() {
        println!("the shipped set: {}", target(root).join("policies").join(SHIPPED_BUILT).display());
    }
    Ok(())
}

/// Puts one component, whoever built it, through what every policy is held to; says which rules it keeps.
pub fn check(root: &Path, file: &Path, args: &[String]) -> Result<()> {
    let file = fs::canonicalize(file).with_context(|| format!("look for {}", file.display()))?;
    let name = "penstock-conformance";
    serve::build_program(root, name)?;
    let mut command = Command::new(target(root).join(serve::PROFILE).join(name));
    let status = command.arg(&file).args(args).current_dir(root).status().context("run penstock-conformance")?;
    ensure!(status.success(), "{} does not keep the contract: see above", file.display());
    Ok(())
}

/// Puts the shipped set beside the components that it names. A running server that watches the folder sees all of it or nothing.
fn ship(root: &Path, folder: &Path) -> Result<()> {
    let path = root.join("policies").join(SHIPPED);
    let text = fs::read_to_string(&path).with_context(|| format!("read {}", path.display()))?;
    for file in files_of(&text).with_context(|| format!("{}: not a policy set", path.display()))? {
        ensure!(folder.join(&file).is_file(), "{} names {file}, which no policy becomes", path.display());
    }
    let unfinished = folder.join("policies.toml.unfinished");
    fs::write(&unfinished, text).with_context(|| format!("write {}", unfinished.display()))?;
    fs::rename(&unfinished, folder.join(SHIPPED_BUILT)).context("put the shipped set in its place")
}

/// The component files that a set names.
fn files_of(set: &str) -> Result<Vec<String>> {
    let seats: toml::Table = set.parse()?;
    let policies = seats.values().filter_map(|seat| seat.get("policy")?.as_str());
    Ok(policies.filter_map(|policy| policy.strip_prefix("file:")).map(str::to_owned).collect())
}

fn skip(why: String) -> Built {
    eprintln!("SKIPPED building policies: {why}");
    eprintln!("SKIPPED the native defaults decide everything until there are components");
    Built { components: Vec::new(), skipped: Some(why) }
}

/// A policy's crate.
#[derive(Debug)]
struct Guest {
    decision: &'static str,
    name: String,
}

impl Guest {
    fn package(&self) -> String {
        format!("penstock-{}-{}", self.decision, self.name)
    }

    fn module(&self) -> String {
        format!("{}.wasm", self.package().replace('-', "_"))
    }

    fn path(&self, folder: &Path) -> PathBuf {
        folder.join(format!("{}-{}.wasm", self.decision, self.name))
    }

    fn componentise(&self, program: &Path, module: &Path, folder: &Path) -> Result<()> {
        let path = self.path(folder);
        let status = Command::new(program).arg(module).arg(&path).status().context("run penstock-componentise")?;
        ensure!(status.success(), "{} is no component: see above", self.package());
        let bytes = fs::read(&path).with_context(|| format!("read {}", path.display()))?;
        fs::write(digest_path(&path), hex(&Sha256::digest(&bytes))).context("write the digest")
    }

    /// The component as it lies there; an error when it or its digest does not.
    fn component(&self, folder: &Path) -> Result<Component> {
        let path = self.path(folder);
        let bytes = fs::metadata(&path).with_context(|| format!("look at {}", path.display()))?.len();
        let sha256 = fs::read_to_string(digest_path(&path)).context("read the digest")?;
        Ok(Component { decision: self.decision, name: self.name.clone(), path, sha256, bytes })
    }
}

fn digest_path(component: &Path) -> PathBuf {
    component.with_extension("wasm.sha256")
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Every folder `policies/DECISION/NAME` with a manifest.
fn guests(root: &Path) -> Result<Vec<Guest>> {
    let mut guests = Vec::new();
    for decision in DECISIONS {
        let dir = root.join("policies").join(decision);
        let entries = fs::read_dir(&dir).with_context(|| format!("list {}", dir.display()))?;
        let mut names = Vec::new();
        for entry in entries {
            let entry = entry?;
            if entry.path().join("Cargo.toml").exists() {
                names.push(entry.file_name().to_string_lossy().into_owned());
            }
        }
        names.sort();
        guests.extend(names.into_iter().map(|name| Guest { decision, name }));
    }
    Ok(guests)
}

/// Compiles all guests in one run of cargo; their core modules, in the order of `guests`.
fn compile(root: &Path, toolchain: &Toolchain, guests: &[Guest]) -> Result<Vec<PathBuf>> {
    let target = toolchain.target_dir(&target(root));
    let mut command = toolchain.cargo(root);
    command.args(["build", "--quiet", "--profile", PROFILE, "--target", TRIPLE]).args(toolchain.extra_args());
    for guest in guests {
        command.args(["--package", &guest.package()]);
    }
    command.env("CARGO_TARGET_DIR", &target);
    let status = command.status().with_context(|| format!("run {command:?}"))?;
    ensure!(status.success(), "the policies did not compile: see above");
    Ok(guests.iter().map(|guest| target.join(TRIPLE).join(PROFILE).join(guest.module())).collect())
}

/// The program that turns core modules into components, built with the host's own tool chain.
fn componentiser(root: &Path) -> Result<PathBuf> {
    let status = Command::new(env!("CARGO"))
        .args(["build", "--quiet", "--profile", serve::PROFILE, "--package", "penstock-componentise"])
        .current_dir(root)
        .status()
        .context("run cargo build")?;
    ensure!(status.success(), "penstock-componentise did not build: see above");
    Ok(target(root).join(serve::PROFILE).join("penstock-componentise"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_guest_is_named_after_its_folder() {
        let guest = Guest { decision: "routing", name: "load-overlap".into() };
        assert_eq!(guest.package(), "penstock-routing-load-overlap");
        assert_eq!(guest.module(), "penstock_routing_load_overlap.wasm");
        let path = guest.path(Path::new("out"));
        assert_eq!(path, Path::new("out/routing-load-overlap.wasm"));
        assert_eq!(digest_path(&path), Path::new("out/routing-load-overlap.wasm.sha256"));
    }

    #[test]
    fn the_shipped_set_seats_a_policy_of_the_tree_in_every_seat() {
        let root = crate::root().expect("xtask lies in the repository");
        let text = fs::read_to_string(root.join("policies").join(SHIPPED)).expect("it is in the tree");
        let mut shipped = files_of(&text).expect("it is a set");
        shipped.sort();
        let folder = Path::new("");
        let built: Vec<_> = guests(&root).expect("policies/ is there").iter().map(|guest| guest.path(folder)).collect();
        assert!(shipped.iter().all(|file| built.iter().any(|path| path == Path::new(file))), "{shipped:?}");
        let mut decisions = DECISIONS;
        decisions.sort_unstable();
        let seats: Vec<_> = shipped.iter().filter_map(|file| file.split('-').next()).collect();
        assert_eq!(seats, decisions);
    }

    #[test]
    fn every_decision_has_a_policy_and_a_crate_of_its_name() {
        let root = crate::root().expect("xtask lies in the repository");
        let guests = guests(&root).expect("policies/ is there");
        for decision in DECISIONS {
            assert!(guests.iter().any(|guest| guest.decision == decision), "no policy for {decision}");
        }
        for guest in &guests {
            let manifest = root.join("policies").join(guest.decision).join(&guest.name).join("Cargo.toml");
            let text = fs::read_to_string(&manifest).expect("listed because it is there");
            assert!(text.contains(&format!("name = \"{}\"", guest.package())), "{}", manifest.display());
        }
    }
}
