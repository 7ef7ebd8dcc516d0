//! The sets: known ones, the one in force, those that were good before it, and what became of every attempt.
//!
//! [`first`] chooses the first one, [`keeping`] writes down what must outlive the process, [`shown`] says how things are.

mod first;
mod keeping;
mod shown;

use std::collections::{BTreeMap, VecDeque};
use std::sync::mpsc::SyncSender;
use std::sync::{Mutex, MutexGuard, PoisonError};

use penstock_engine::Engine;
use serde_json::{Value, json};

use super::document::Document;
use super::maker::{Maker, ParsedSet, Pinned, States};
use super::report::{Report, Said};
use super::state_folder::StateFolder;
use super::{Fault, MakerSettings};
use crate::edge::unix_s;
pub use first::{Wanted, foreseen, shipped_beside_the_binary};

/// Sets that are known at once; the one known longest that is neither in force nor good makes room.
const SETS_MAX: usize = 64;
/// Good sets that are remembered, for one rollback after another.
const GOOD_MAX: usize = 16;
/// Events that are remembered.
const HISTORY_MAX: usize = 64;
/// Names under which policies count, all together.
const COUNTERS_MAX: usize = 256;

/// Who wanted it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum By {
    /// The command line or the configuration, at the start.
    Start,
    /// Nobody: it is the set that ships with the server.
    Shipped,
    /// Nobody: there was nothing but the native defaults.
    Default,
    /// An operator, over the admin listener.
    Admin,
    /// The policy folder.
    Folder,
    /// The server itself, since a policy failed too often.
    Quarantine,
}

impl By {
    fn name(self) -> &'static str {
        match self {
            Self::Start => "start",
            Self::Shipped => "shipped",
            Self::Default => "default",
            Self::Admin => "admin",
            Self::Folder => "folder",
            Self::Quarantine => "quarantine",
        }
    }

    /// Did somebody decide on it, so that it comes back with the next start?
    fn is_choice(self) -> bool {
        !matches!(self, Self::Shipped | Self::Default)
    }

    fn from_name(name: &str) -> Option<Self> {
        [Self::Start, Self::Shipped, Self::Default, Self::Admin, Self::Folder, Self::Quarantine]
            .into_iter()
            .find(|by| by.name() == name)
    }
}

/// See the module. Shared by the admin listener and the keeper.
pub struct Publication {
    maker: Result<Maker, String>,
    state: Mutex<State>,
    /// Held through a change of the set in force, so that what is done follows from what was seen.
    turn: Mutex<()>,
    /// Where what must outlive the process is kept.
    folder: Option<StateFolder>,
    /// What the folder says that policies remember.
    kept_states: Mutex<States>,
}

struct State {
    sets: BTreeMap<String, Known>,
    /// In force.
    active: Active,
    /// Where the first one came from, in words.
    origin: String,
    /// Digest of the set that ships with the server, where there is one.
    shipped: Option<String>,
    /// Digests of sets that were in force and left in good standing, the latest last.
    good: Vec<String>,
    history: VecDeque<Value>,
    counters: BTreeMap<(&'static str, String, String), u64>,
    /// Counts sets as they come.
    clock: u64,
}

struct Known {
    set: ParsedSet,
    came: u64,
    /// The generation as which it was last put in force.
    generation: u64,
    /// Why it must not come back by itself.
    bad: Option<String>,
    /// While it is in force or may come back by itself, its components stay.
    pinned: Option<Pinned>,
}

struct Active {
    digest: String,
    generation: u64,
    since_s: u64,
    by: By,
}

impl Publication {
    /// With the native defaults in force, until [`Self::choose_first`].
    pub fn new(settings: &MakerSettings, reports: SyncSender<Report>) -> Self {
        let maker = Maker::start(settings, reports);
        // A server that cannot run components leaves what is kept of them to the next one that can.
        let folder = settings.state_dir.as_deref().filter(|_| maker.is_ok()).and_then(|path| {
            StateFolder::open(path)
                .map_err(|why| tracing::warn!(why, "what decides is not kept over a restart: name another --state-dir"))
                .ok()
        });
        let native = ParsedSet::native();
        let active = active(&native.digest(), 1, By::Default);
        let known = Known { set: native, came: 0, generation: 1, bad: None, pinned: None };
        let state = State {
            sets: BTreeMap::from([(active.digest.clone(), known)]),
            active,
            origin: String::new(),
            shipped: None,
            good: Vec::new(),
            history: VecDeque::new(),
            counters: BTreeMap::new(),
            clock: 0,
        };
        let (state, turn, kept_states) = (Mutex::new(state), Mutex::default(), Mutex::default());
        Self { maker, state, turn, folder, kept_states }
    }

    fn maker(&self) -> Result<&Maker, Fault> {
        self.maker.as_ref().map_err(|why| Fault::NativeOnly(why.clone()))
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // No step between two whole states can panic.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Keeps a component. What it says of itself.
    ///
    /// # Errors
    /// What is wrong with it. Takes as long as compiling takes.
    pub fn load_component(&self, bytes: &[u8]) -> Result<Value, Fault> {
        let told = self.maker()?.load(bytes)?;
        self.keep_component(bytes);
        Ok(told)
    }

    /// Keeps a set. Its digest.
    ///
    /// # Errors
    /// Everything that is wrong with it.
    pub fn load_set(&self, document: &Value) -> Result<String, Fault> {
        let set = self.maker()?.parse(document)?;
        let digest = set.digest();
        let mut state = self.state();
        state.clock += 1;
        let came = state.clock;
        if let Some(known) = state.sets.get_mut(&digest) {
            known.came = came;
            return Ok(digest);
        }
        if state.sets.len() >= SETS_MAX {
            let native = ParsedSet::native().digest();
            let is_free =
                |digest: &String| *digest != state.active.digest && *digest != native && !state.good.contains(digest);
            let oldest = state.sets.iter().filter(|(digest, _)| is_free(digest)).min_by_key(|(_, known)| known.came);
            let oldest = oldest.map(|(digest, _)| digest.clone()).ok_or_else(|| Fault::Full("too many sets".into()))?;
            state.sets.remove(&oldest);
        }
        state.sets.insert(digest.clone(), Known { set, came, generation: 0, bad: None, pinned: None });
        Ok(digest)
    }

    /// Keeps a document's components and its set. Its digest.
    ///
    /// # Errors
    /// What is wrong with any of them.
    pub fn load(&self, document: &Document) -> Result<String, Fault> {
        for (digest, bytes) in &document.components {
            let maker = self.maker()?;
            if maker.component(digest).is_none() {
                maker.load(bytes).map_err(|fault| match fault {
                    Fault::Refused(why) => Fault::Refused(format!("component {digest}: {why}")),
                    other => other,
                })?;
            }
            self.keep_component(bytes);
        }
        self.load_set(&document.set)
    }

    /// Puts a known set in force. Blocks until every machine has it. The new generation.
    ///
    /// # Errors
    /// No such set, or a machine refused it; then the present one stays in force.
    pub fn activate(&self, engine: &Engine, digest: &str, by: By) -> Result<u64, Fault> {
        let _turn = self.turn.lock().unwrap_or_else(PoisonError::into_inner);
        let generation = self.put_in_force(engine, digest, by)?;
        let mut state = self.state();
        let former = std::mem::replace(&mut state.active, active(digest, generation, by)).digest;
        if former != digest && state.sets.get(&former).is_some_and(|known| known.bad.is_none()) {
            state.good.retain(|good| *good != former && *good != digest);
            state.good.push(former);
            let over = state.good.len().saturating_sub(GOOD_MAX);
            state.good.drain(..over);
        }
        // Whoever asks for it by name wants it tried again.
        if let Some(known) = state.sets.get_mut(digest) {
            known.bad = None;
        }
        drop(state);
        self.settle();
        Ok(generation)
    }

    /// Returns to the set that was in force before and was good; to the native defaults when there is none. Digest and generation.
    ///
    /// # Errors
    /// The native defaults are in force and nothing was before them.
    pub fn roll_back(&self, engine: &Engine, by: By) -> Result<(String, u64), Fault> {
        let _turn = self.turn.lock().unwrap_or_else(PoisonError::into_inner);
        self.roll_back_in_turn(engine, by)
    }

    fn roll_back_in_turn(&self, engine: &Engine, by: By) -> Result<(String, u64), Fault> {
        loop {
            let native = ParsedSet::native().digest();
            let (digest, is_last) = {
                let mut state = self.state();
                match state.good.pop() {
                    Some(good) if good == state.active.digest => continue,
                    Some(good) => (good, false),
                    None if state.active.digest == native => return Err(Fault::NothingBefore),
                    None => (native, true),
                }
            };
            match self.put_in_force(engine, &digest, by) {
                Ok(generation) => {
                    self.state().active = active(&digest, generation, by);
                    self.settle();
                    engine.metrics().policy_rolled_back(by == By::Quarantine);
                    tracing::warn!(set = digest, generation, by = by.name(), "returned to an earlier policy set");
                    return Ok((digest, generation));
                }
                Err(fault) if is_last => return Err(fault),
                Err(fault) => tracing::error!(%fault, set = digest, "an earlier policy set cannot serve any more"),
            }
        }
    }

    fn put_in_force(&self, engine: &Engine, digest: &str, by: By) -> Result<u64, Fault> {
        let maker = self.maker()?;
        let set = self.state().sets.get(digest).map(|known| known.set.clone());
        let Some(set) = set else { return Err(Fault::Unknown(format!("policy set {digest}"))) };
        match engine.activate(&maker.source(&set)) {
            Ok(activation) => {
                let pauses = activation.pauses.iter().map(|(machine, pause)| format!("{machine} {} µs", pause.as_us()));
                let pauses = pauses.collect::<Vec<_>>().join(", ");
                let generation = activation.generation.0;
                if let Some(known) = self.state().sets.get_mut(digest) {
                    known.generation = generation;
                }
                tracing::info!(set = digest, generation, by = by.name(), pauses, "a policy set is in force");
                self.note(json!({"event": "activated", "set": digest, "generation": generation, "by": by.name()}));
                Ok(generation)
            }
            Err(fault) => {
                tracing::error!(set = digest, by = by.name(), %fault, "a policy set was refused: the present one stays");
                self.refused(digest, &fault.to_string(), by);
                Err(Fault::Refused(fault.to_string()))
            }
        }
    }

    /// Remembers a refusal, of a set or of what was to become one.
    pub fn refused(&self, what: &str, why: &str, by: By) {
        self.note(json!({"event": "refused", "set": what, "reason": why, "by": by.name()}));
    }

    fn note(&self, mut event: Value) {
        event["at_s"] = unix_s().into();
        let mut state = self.state();
        if state.history.len() >= HISTORY_MAX {
            state.history.pop_front();
        }
        state.history.push_back(event);
    }

    /// Takes in what a policy said. A quarantine of a policy in force brings the last good set back.
    pub(super) fn heard(&self, engine: &Engine, report: Report) {
        let Report { set, generation, machine, decision, policy, said } = report;
        let metrics = engine.metrics();
        match said {
            Said::Line(0, text) => tracing::error!(target: "penstock::policy", policy, decision, %machine, text),
            Said::Line(1, text) => tracing::warn!(target: "penstock::policy", policy, decision, %machine, text),
            Said::Line(2, text) => tracing::info!(target: "penstock::policy", policy, decision, %machine, text),
            Said::Line(_, text) => tracing::debug!(target: "penstock::policy", policy, decision, %machine, text),
            Said::Count(name, by) => self.count(decision, policy, name, by),
            Said::Renewed(how) => tracing::warn!(policy, decision, %machine, how, "a policy was made anew"),
            Said::Resumed(how) => {
                tracing::info!(policy, decision, %machine, how, "a policy of the last run goes on");
                let machine = machine.to_string();
                self.note(
                    json!({"event": "resumed", "set": &*set, "seat": decision, "policy": policy, "machine": machine,
                    "reason": how}),
                );
            }
            Said::Dropped(what, count) => tracing::debug!(policy, decision, what, count, "a policy said too much"),
            Said::Struck(kind, why) => {
                metrics.policy_struck(decision, kind);
                tracing::warn!(policy, decision, %machine, kind, why, "a policy failed");
                let machine = machine.to_string();
                self.note(
                    json!({"event": "failed", "set": &*set, "seat": decision, "policy": policy, "machine": machine,
                    "kind": kind, "reason": why}),
                );
            }
            Said::Quarantined { calls } => {
                metrics.policy_quarantined(decision);
                let why = format!("{policy} in the seat of {decision} failed too often at the {machine}");
                tracing::error!(set = &*set, policy, decision, %machine, calls, "a policy is in quarantine");
                self.quarantined(engine, &set, generation, why);
            }
        }
    }

    fn count(&self, decision: &'static str, policy: String, name: String, by: u64) {
        let mut state = self.state();
        let key = (decision, policy, name);
        if state.counters.len() < COUNTERS_MAX || state.counters.contains_key(&key) {
            let sum = state.counters.entry(key).or_default();
            *sum = sum.saturating_add(by);
        }
    }

    fn quarantined(&self, engine: &Engine, set: &str, generation: u64, why: String) {
        let _turn = self.turn.lock().unwrap_or_else(PoisonError::into_inner);
        self.note(json!({"event": "quarantined", "set": set, "generation": generation, "reason": why}));
        if !self.state().quarantine(set, generation, why) {
            self.settle();
            return;
        }
        if let Err(fault) = self.roll_back_in_turn(engine, By::Quarantine) {
            tracing::error!(%fault, "no earlier policy set can serve: the defaults answer for what is in quarantine");
        }
    }

    /// Digest of the set in force.
    pub fn in_force(&self) -> String {
        self.state().active.digest.clone()
    }
}

impl State {
    /// A policy of `set` failed too often while it sat there as `generation`. True when the last good set must come back: not when the set
    /// has left, nor when it was put in force again since, for the report is about its last term.
    fn quarantine(&mut self, set: &str, generation: u64, why: String) -> bool {
        match self.sets.get_mut(set) {
            Some(known) if generation < known.generation => return false,
            Some(known) => known.bad = Some(why),
            None => {}
        }
        self.good.retain(|good| good != set);
        self.active.digest == set
    }
}

fn active(digest: &str, generation: u64, by: By) -> Active {
    Active { digest: digest.to_owned(), generation, since_s: unix_s(), by }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn state(active_generation: u64) -> State {
        let known = |generation| Known { set: ParsedSet::native(), came: 0, generation, bad: None, pinned: None };
        State {
            sets: BTreeMap::from([("one".to_owned(), known(active_generation)), ("two".to_owned(), known(2))]),
            active: active("one", active_generation, By::Admin),
            origin: String::new(),
            shipped: None,
            good: vec!["two".to_owned()],
            history: VecDeque::new(),
            counters: BTreeMap::new(),
            clock: 0,
        }
    }

    #[test]
    fn a_quarantine_of_the_set_in_force_brings_the_last_good_one_back() {
        let mut state = state(3);
        assert!(state.quarantine("one", 3, "it trapped".into()));
        assert_eq!((state.sets["one"].bad.as_deref(), &*state.good), (Some("it trapped"), &["two".to_owned()][..]));
    }

    #[test]
    fn a_late_report_about_an_earlier_term_does_not_end_the_present_one() {
        // In force as 1, replaced by 2, asked for again as 3; only now is it heard what became of its first term.
        let mut state = state(3);
        assert!(!state.quarantine("one", 1, "it trapped".into()));
        assert_eq!(state.sets["one"].bad, None);
    }

    #[test]
    fn a_set_that_has_left_is_no_longer_good() {
        let mut state = state(3);
        assert!(!state.quarantine("two", 2, "it trapped".into()));
        assert!(state.good.is_empty());
        assert_eq!(state.sets["two"].bad.as_deref(), Some("it trapped"));
    }
}
