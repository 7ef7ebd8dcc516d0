//! Which set decides first? The one that was named; else the policy folder's; else what was in force when the last run ended, as far as
//! somebody decided on it; else the one that ships with the server; else the native defaults.
//!
//! A set that was named must serve, or the server does not start. Every other one that cannot serve is named in the log, and the next is
//! taken: policies that nobody asked for keep no server down.

use std::path::{Path, PathBuf};

use anyhow::{Result, anyhow};
use penstock_engine::PolicySource;
use serde_json::{Value, json};

use super::{By, Publication, active, shown};
use crate::config::Config;
use crate::policies::maker::{ParsedSet, States};
use crate::policies::state_folder::{self, Record};
use crate::policies::{document, keeper};

/// Names the native defaults.
const NATIVE: &str = "native";
/// Names the shipped set, where something else would come first.
const SHIPPED: &str = "shipped";

/// Where the first set may come from.
#[derive(Clone, Debug)]
pub struct Wanted {
    /// Named on the command line or in the configuration: a document, `native` or `shipped`.
    pub named: Option<String>,
    /// The policy folder's document.
    pub folder: Option<PathBuf>,
    /// The shipped set's document.
    pub shipped: Option<PathBuf>,
}

enum Candidate {
    Folder(PathBuf),
    Saved(String, By),
    Shipped(PathBuf),
}

impl Wanted {
    /// By the configuration and what lies on this machine.
    pub fn of(config: &Config) -> Self {
        let policy = &config.policy;
        Self {
            named: policy.set.clone(),
            folder: policy.dir.as_deref().and_then(keeper::document_of),
            shipped: policy.shipped.clone().or_else(shipped_beside_the_binary),
        }
    }

    /// The document that was named.
    fn named_path(&self, name: &str) -> Result<PathBuf> {
        match name {
            SHIPPED => self.shipped.clone().ok_or_else(|| anyhow!("no shipped policy set: {NOT_BUILT}")),
            name => Ok(PathBuf::from(name)),
        }
    }

    /// Digest of the shipped set, where it can be read.
    fn shipped_digest(&self) -> Option<String> {
        let document = document::read(self.shipped.as_deref()?).ok()?;
        Some(ParsedSet::read(&document.set).ok()?.digest())
    }

    /// What to try in turn when nothing was named.
    fn candidates(&self, record: Option<&Record>) -> Vec<Candidate> {
        let by = record.and_then(|record| By::from_name(&record.by)).unwrap_or(By::Default);
        let saved = record.map(|record| Candidate::Saved(record.active.clone(), by));
        let shipped = self.shipped.clone().map(Candidate::Shipped);
        // Whoever returned to the set that shipped then wants the one that ships now.
        let was_shipped = record.is_some_and(|record| record.shipped.as_ref() == Some(&record.active));
        // Where it stands in for the shipped set that failed, another shipped set deserves its turn.
        let has_failed = |digest: String| record.is_some_and(|record| record.bad.contains_key(&digest));
        let replaces_another = by == By::Quarantine && self.shipped_digest().is_some_and(|digest| !has_failed(digest));
        let is_choice = by.is_choice() && !was_shipped && !replaces_another;
        let (first, second) = if is_choice { (saved, shipped) } else { (shipped, saved) };
        self.folder.clone().map(Candidate::Folder).into_iter().chain(first).chain(second).collect()
    }
}

const NOT_BUILT: &str = "none lies beside the binary; `cargo xtask policies` builds it";

/// `policies/policies.toml` beside the binary, beside the binary's folder (where cargo builds), or in `../share/penstock`.
pub fn shipped_beside_the_binary() -> Option<PathBuf> {
    let binary = std::env::current_exe().ok()?;
    let folder = binary.parent()?;
    let folders = [folder.to_owned(), folder.join(".."), folder.join("../share/penstock")];
    let mut paths = folders.iter().map(|folder| folder.join("policies/policies.toml"));
    let found = paths.find(|path| path.is_file())?;
    Some(found.canonicalize().unwrap_or(found))
}

impl Publication {
    /// Chooses the first set, before the engine starts. What the engine is to start with.
    ///
    /// # Errors
    /// The set that was named cannot serve.
    pub fn choose_first(&self, wanted: &Wanted) -> Result<PolicySource> {
        let record = self.saved_record();
        self.state().shipped = wanted.shipped_digest();
        let states = self.saved_states();
        let source = self.choose(wanted, record.as_ref(), states)?;
        let (digest, origin) = {
            let state = self.state();
            (state.active.digest.clone(), state.origin.clone())
        };
        self.note(json!({"event": "started", "set": digest, "reason": origin}));
        self.settle();
        Ok(source)
    }

    fn choose(&self, wanted: &Wanted, record: Option<&Record>, states: States) -> Result<PolicySource> {
        match wanted.named.as_deref() {
            None => {}
            Some(NATIVE) => {
                let origin = "native defaults, as named at the start".to_owned();
                return Ok(self.begin_natively(By::Start, origin, states));
            }
            Some(name) => {
                let path = wanted.named_path(name)?;
                let begun =
                    self.begin_with(&path, By::Start, format!("named at the start: {}", path.display()), &states);
                return begun.map_err(|why| {
                    anyhow!(
                        "the policy set {} cannot serve: {why}. `--policies native` starts without it",
                        path.display()
                    )
                });
            }
        }
        let candidates = if self.maker.is_ok() { wanted.candidates(record) } else { Vec::new() };
        for candidate in candidates {
            let (what, begun) = match candidate {
                Candidate::Folder(path) => {
                    let origin = format!("of the policy folder: {}", path.display());
                    (path.display().to_string(), self.begin_with(&path, By::Folder, origin, &states))
                }
                Candidate::Shipped(path) => {
                    let origin = format!("the shipped set: {}", path.display());
                    (path.display().to_string(), self.begin_with(&path, By::Shipped, origin, &states))
                }
                Candidate::Saved(digest, by) => {
                    let origin = format!(
                        "in force when the last run ended, by {}; `--policies shipped` seats the shipped set",
                        by.name()
                    );
                    let begun = self.begin(&digest, by, origin, &states);
                    (digest, begun)
                }
            };
            match begun {
                Ok(source) => return Ok(source),
                Err(why) => {
                    tracing::error!(set = what, why, "a policy set cannot serve: the next one is tried");
                    self.refused(&what, &why, By::Start);
                }
            }
        }
        let why = match &self.maker {
            Err(why) => why.clone(),
            Ok(_) if wanted.shipped.is_none() => NOT_BUILT.to_owned(),
            Ok(_) => "no other set can serve".to_owned(),
        };
        tracing::warn!(why, "NATIVE DEFAULTS DECIDE: no policy component is in force");
        Ok(self.begin_natively(By::Default, format!("native defaults: {why}"), states))
    }

    /// With the set at `path`, or why not.
    fn begin_with(&self, path: &Path, by: By, origin: String, states: &States) -> Result<PolicySource, String> {
        let document = document::read(path)?;
        let digest = self.load(&document).map_err(|fault| fault.to_string())?;
        self.begin(&digest, by, origin, states)
    }

    /// With a known set, or why not.
    fn begin(&self, digest: &str, by: By, origin: String, states: &States) -> Result<PolicySource, String> {
        let maker = self.maker().map_err(|fault| fault.to_string())?;
        let set = self.state().sets.get(digest).map(|known| known.set.clone());
        let set = set.ok_or_else(|| format!("policy set {digest} is not at hand"))?;
        let mut states = states.clone();
        if let Err(fault) = maker.try_out(&set, &states) {
            if states.is_empty() {
                return Err(fault.to_string());
            }
            states = States::default();
            maker.try_out(&set, &states).map_err(|fault| fault.to_string())?;
            self.start_fresh(&fault.to_string(), "policies cannot live with what they remember: they start fresh");
        }
        self.take_place(digest, by, origin);
        Ok(maker.first_source(&set, states))
    }

    /// With the native defaults, seated so that any other set can take over from them where components can run.
    fn begin_natively(&self, by: By, origin: String, states: States) -> PolicySource {
        let native = ParsedSet::native();
        self.take_place(&native.digest(), by, origin);
        match &self.maker {
            Ok(maker) => maker.first_source(&native, states),
            Err(_) => PolicySource::native(),
        }
    }

    fn take_place(&self, digest: &str, by: By, origin: String) {
        let mut state = self.state();
        state.active = active(digest, 1, by);
        state.origin = origin;
        state.good.retain(|good| good != digest);
        if let Some(known) = state.sets.get_mut(digest) {
            known.generation = 1;
        }
    }
}

/// Which set a server with this configuration would begin with, as comments for `penstock config`. Loads no component and tries nothing.
pub fn foreseen(wanted: &Wanted, state_dir: Option<&Path>) -> String {
    let record = state_dir.and_then(|folder| state_folder::read_record(folder).ok().flatten());
    let of_path = |path: &Path| document::read(path).map(|document| (path.display().to_string(), document.set));
    let found: Result<(String, Value), String> = match wanted.named.as_deref() {
        Some(NATIVE) => Ok((NATIVE.to_owned(), json!({}))),
        Some(name) => wanted.named_path(name).map_err(|fault| fault.to_string()).and_then(|path| of_path(&path)),
        None => match wanted.candidates(record.as_ref()).into_iter().next() {
            None => Ok((format!("{NATIVE}: {NOT_BUILT}"), json!({}))),
            Some(Candidate::Folder(path) | Candidate::Shipped(path)) => of_path(&path),
            Some(Candidate::Saved(digest, by)) => {
                let document = record.as_ref().and_then(|record| record.sets.get(&digest)).cloned();
                let what = format!("in force when the last run ended, by {}", by.name());
                document.map(|document| (what, document)).ok_or_else(|| format!("{digest}: its document is not kept"))
            }
        },
    };
    let seats = found.and_then(|(what, document)| Ok((what, ParsedSet::read(&document)?)));
    match seats {
        Ok((what, set)) => {
            let head = format!("# first policy set: {} ({what})\n", set.digest());
            set.seats(None).iter().fold(head, |text, seat| text + &shown::seat_comment(seat))
        }
        Err(why) => format!("# first policy set: cannot be read: {}\n", why.replace('\n', " ")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn wanted(folder: bool, shipped: bool) -> Wanted {
        Wanted {
            named: None,
            folder: folder.then(|| "folder/policies.toml".into()),
            shipped: shipped.then(|| "shipped/policies.toml".into()),
        }
    }

    fn order(wanted: &Wanted, by: Option<&str>) -> Vec<&'static str> {
        order_of(wanted, by.map(|by| Record { active: "a1".into(), by: by.into(), ..Record::default() }).as_ref())
    }

    fn order_of(wanted: &Wanted, record: Option<&Record>) -> Vec<&'static str> {
        let candidates = wanted.candidates(record);
        let name = |candidate: &Candidate| match candidate {
            Candidate::Folder(_) => "folder",
            Candidate::Saved(..) => "saved",
            Candidate::Shipped(_) => "shipped",
        };
        candidates.iter().map(name).collect()
    }

    #[test]
    fn what_somebody_decided_on_comes_before_what_is_shipped() {
        assert_eq!(order(&wanted(true, true), Some("admin")), ["folder", "saved", "shipped"]);
        assert_eq!(order(&wanted(false, true), Some("start")), ["saved", "shipped"]);
        assert_eq!(order(&wanted(false, true), None), ["shipped"]);
        assert_eq!(order(&wanted(false, false), None), [""; 0]);
    }

    #[test]
    fn a_default_does_not_outlive_its_successor() {
        // A new release ships another set: the old one was nobody's choice. It is still better than none.
        assert_eq!(order(&wanted(false, true), Some("shipped")), ["shipped", "saved"]);
        assert_eq!(order(&wanted(false, true), Some("default")), ["shipped", "saved"]);
        assert_eq!(order(&wanted(false, false), Some("shipped")), ["saved"]);
    }

    #[test]
    fn whoever_returned_to_the_shipped_set_gets_the_one_that_ships_now() {
        let record = |active: &str| Record {
            active: active.into(),
            by: "admin".into(),
            shipped: Some("a1".into()),
            ..Record::default()
        };
        let first = |active| order_of(&wanted(false, true), Some(&record(active)))[0];
        assert_eq!((first("a1"), first("b2")), ("shipped", "saved"));
    }

    #[test]
    fn after_a_quarantine_only_the_set_that_failed_stays_away() {
        let folder = std::env::temp_dir().join(format!("penstock-first-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let path = folder.join("policies.toml");
        std::fs::write(&path, "[routing]\npolicy = \"native:best-credit\"\n").unwrap();
        let wanted = Wanted { named: None, folder: None, shipped: Some(path) };
        let mut record = Record { active: "a1".into(), by: "quarantine".into(), ..Record::default() };
        assert!(matches!(wanted.candidates(Some(&record))[0], Candidate::Shipped(_)));
        let set = ParsedSet::read(&json!({"routing": {"policy": "native:best-credit"}}));
        if let Ok(set) = set {
            record.bad.insert(set.digest(), "it trapped".into());
            assert!(matches!(wanted.candidates(Some(&record))[0], Candidate::Saved(..)));
        }
        std::fs::remove_dir_all(folder).unwrap();
    }
}
