//! `penstock verify`: does a journal say what happened? Every segment is replayed, and its policies are asked again where they are at
//! hand.

#[cfg_attr(feature = "wasm", path = "remake_wasm.rs")]
#[cfg_attr(not(feature = "wasm"), path = "remake_native.rs")]
mod remake;

use std::fs::File;
use std::io::BufReader;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context as _, Result, ensure};
use clap::Args;
use penstock_journal::{Ending, Examined, JournalError, MachineId, MachineKind, VerifyError, examine};
use remake::Remaker;

use crate::policies::shipped_beside_the_binary;

/// How far components are looked for: folders below a named one, and files in all.
const COMPONENT_FOLDERS_MAX: usize = 256;

/// Some segment is damaged: its bytes were changed, or are none of a journal.
const DAMAGED: u8 = 3;
/// Some decision does not come out as recorded.
const DIFFERENT: u8 = 4;

/// What to verify.
#[derive(Clone, Debug, Args)]
pub struct VerifyArgs {
    /// A journal's folder, or one segment's file.
    pub journal: PathBuf,
    /// Folder with policy components (*.wasm), by any name: those whose digests the journal names are asked again. May be repeated. The
    /// program's own folder and that of the shipped policies are always looked into.
    #[arg(long, value_name = "DIR")]
    pub components: Vec<PathBuf>,
    /// Say something about good segments, too.
    #[arg(long, short)]
    pub verbose: bool,
}

/// Verifies. 0: everything holds. 3: something is damaged. 4: something was decided otherwise.
///
/// # Errors
/// There is no journal to verify.
pub fn verify(args: &VerifyArgs) -> Result<ExitCode> {
    let segments = segments(&args.journal)?;
    let mut remaker = Remaker::new(components(&args.components));
    let mut sums = Sums::default();
    for path in &segments {
        let file = File::open(path).with_context(|| format!("open {}", path.display()))?;
        let examined = examine(BufReader::new(file), Some(&mut remaker));
        let name =
            path.file_name().map_or_else(|| path.display().to_string(), |name| name.to_string_lossy().into_owned());
        match examined {
            Ok(examined) => sums.add(&name, &examined, args.verbose),
            Err(fault) => sums.add_unreadable(&name, &fault),
        }
    }
    print!("{}", sums.said(segments.len()));
    Ok(sums.code())
}

fn segments(path: &Path) -> Result<Vec<PathBuf>> {
    if path.is_file() {
        return Ok(vec![path.to_owned()]);
    }
    let entries = std::fs::read_dir(path).with_context(|| format!("read the folder {}", path.display()))?;
    let mut found: Vec<_> = entries
        .filter_map(|entry| entry.ok().map(|entry| entry.path()))
        .filter(|path| path.extension().is_some_and(|extension| extension == "journal"))
        .collect();
    ensure!(!found.is_empty(), "{}: no segment (*.journal) is in this folder", path.display());
    found.sort();
    Ok(found)
}

/// Files that may be components.
fn components(named: &[PathBuf]) -> Vec<PathBuf> {
    let own = std::env::current_exe().ok().and_then(|path| path.parent().map(Path::to_owned));
    let shipped = shipped_beside_the_binary().and_then(|set| set.parent().map(Path::to_owned));
    let mut folders: Vec<_> = named.iter().cloned().chain(own).chain(shipped).map(|folder| (folder, 2)).collect();
    let mut found = Vec::new();
    let mut seen = 0;
    while let Some((folder, deeper)) = folders.pop() {
        seen += 1;
        for entry in std::fs::read_dir(folder).into_iter().flatten().flatten() {
            let path = entry.path();
            if path.extension().is_some_and(|extension| extension == "wasm") {
                found.push(path);
            } else if deeper > 0 && seen + folders.len() < COMPONENT_FOLDERS_MAX && path.is_dir() {
                folders.push((path, deeper - 1));
            }
        }
    }
    found.sort();
    found
}

/// What all segments come to.
#[derive(Default)]
struct Sums {
    lines: String,
    complete: usize,
    broken: usize,
    damaged: usize,
    different: usize,
    steps: u64,
    answers: u64,
    same: u64,
    changed: u64,
    not_at_hand: u64,
    not_comparable: u64,
    fuel_same: u64,
    fuel_different: u64,
    why_not: Option<String>,
    builds: std::collections::BTreeSet<String>,
}

impl Sums {
    fn line(&mut self, text: &str) {
        self.lines += text;
        self.lines.push('\n');
    }

    fn add_unreadable(&mut self, name: &str, fault: &JournalError) {
        // A writer that was killed while it opened a segment leaves a header that is not whole.
        if matches!(fault, JournalError::Truncated { record: 0 }) {
            self.broken += 1;
            return self.line(&format!("{name}: broken off in its opening: nothing is known of it"));
        }
        self.damaged += 1;
        self.line(&format!("{name}: DAMAGED: {fault}"));
    }

    fn add(&mut self, name: &str, examined: &Examined, verbose: bool) {
        let Examined { verified, build, span: (from, to), asked, fault } = examined;
        let whose = whose(verified.machine);
        self.steps += verified.steps;
        self.answers += asked.answers;
        self.same += asked.same;
        self.changed += asked.different;
        self.not_at_hand += asked.not_at_hand;
        self.not_comparable += asked.not_comparable;
        self.fuel_same += asked.fuel_same;
        self.fuel_different += asked.fuel_different;
        if let Some(why) = &asked.why_not {
            self.why_not.get_or_insert_with(|| why.clone());
        }
        self.builds.insert(build.clone());
        let (records, steps) = (verified.records, verified.steps);
        let held = format!("{whose}: {records} records, {steps} steps");
        match fault {
            None => match verified.ending {
                Ending::Complete => {
                    self.complete += 1;
                    if verbose {
                        self.line(&format!("{name}: complete, {held}, {} s", to.since(*from).as_ms() as f64 / 1e3));
                    }
                }
                Ending::Broken(cause) => {
                    self.broken += 1;
                    self.line(&format!(
                        "{name}: broken off after record {} ({}), {held} hold",
                        records - 1,
                        cause.words()
                    ));
                }
                Ending::CutOff => {
                    self.broken += 1;
                    self.line(&format!("{name}: broken off after record {records} (its writer was gone), {held} hold"));
                }
            },
            Some(VerifyError::Journal(JournalError::Truncated { record })) => {
                self.broken += 1;
                self.line(&format!("{name}: broken off inside record {record} (its writer was gone), {held} hold"));
            }
            Some(VerifyError::Journal(_) | VerifyError::Order { .. } | VerifyError::Snapshot(_)) => {
                self.damaged += 1;
                let fault = fault.as_ref().map(ToString::to_string).unwrap_or_default();
                self.line(&format!("{name}: DAMAGED: {fault}; {held} hold before it"));
            }
            Some(fault) => {
                self.different += 1;
                self.line(&format!("{name}: DIFFERENT: {fault}; {held} hold before it"));
            }
        }
        if let Some(first) = &asked.first {
            self.line(&format!(
                "{name}: DIFFERENT: decision {} ({}) of {}: recorded {:?}, asked again {:?}; {} answers differ in this segment",
                first.sequence,
                first.question.name(),
                first.policy,
                first.recorded,
                first.again,
                asked.different
            ));
        }
    }

    fn said(&self, segments: usize) -> String {
        let mut out = self.lines.clone();
        out += &format!(
            "{segments} segments: {} complete, {} broken off, {} damaged; {} steps and {} decisions checked\n",
            self.complete, self.broken, self.damaged, self.steps, self.answers
        );
        if self.same + self.changed > 0 {
            out += &format!("policies asked again: {} answers equal, {} different", self.same, self.changed);
            if self.fuel_same + self.fuel_different > 0 {
                out += &format!("; fuel equal in {}, different in {}", self.fuel_same, self.fuel_different);
            }
            out.push('\n');
        }
        if self.not_comparable > 0 {
            out += &format!(
                "{} answers stand as recorded: the policy was being made anew, or its time was up, which no replay repeats\n",
                self.not_comparable
            );
        }
        if self.not_at_hand > 0 {
            let why = self.why_not.as_deref().unwrap_or("unknown");
            out += &format!("{} answers stand as recorded, their policies are not at hand: {why}\n", self.not_at_hand);
        }
        let own = own_build();
        for build in self.builds.iter().filter(|build| **build != own) {
            out += &format!("written by {build:?}, verified by {own:?}: what differs may be due to that\n");
        }
        out += match (self.damaged, self.different + usize::from(self.changed > 0)) {
            (0, 0) => "verified: everything that is recorded comes out again\n",
            (0, _) => "NOT verified: something comes out differently\n",
            _ => "NOT verified: a segment is damaged\n",
        };
        out
    }

    fn code(&self) -> ExitCode {
        match (self.damaged, self.different as u64 + self.changed) {
            (0, 0) => ExitCode::SUCCESS,
            (0, _) => ExitCode::from(DIFFERENT),
            _ => ExitCode::from(DAMAGED),
        }
    }
}

fn whose(machine: MachineId) -> String {
    match machine.kind {
        MachineKind::Gateway => format!("gateway, epoch {}", machine.epoch),
        MachineKind::Replica => format!("replica {}, epoch {}", machine.number, machine.epoch),
    }
}

/// What stands in the segments that this program writes.
pub fn own_build() -> String {
    format!("penstock {}", env!("CARGO_PKG_VERSION"))
}
