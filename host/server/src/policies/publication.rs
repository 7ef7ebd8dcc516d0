//! The sets: known ones, the one in force, those that were good before it, and what became of every attempt.

use std::collections::{BTreeMap, VecDeque};
use std::sync::mpsc::SyncSender;
use std::sync::{Mutex, MutexGuard, PoisonError};

use penstock_engine::{Engine, PolicySource};
use serde_json::{Value, json};

use super::document::Document;
use super::maker::{Maker, ParsedSet};
use super::report::{Report, Said};
use super::{Fault, MakerSettings};
use crate::edge::unix_s;

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
            Self::Admin => "admin",
            Self::Folder => "folder",
            Self::Quarantine => "quarantine",
        }
    }
}

/// See the module. Shared by the admin listener and the keeper.
pub struct Publication {
    maker: Result<Maker, String>,
    state: Mutex<State>,
    /// Held through a change of the set in force, so that what is done follows from what was seen.
    turn: Mutex<()>,
}

struct State {
    sets: BTreeMap<String, Known>,
    /// In force.
    active: Active,
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
    /// Why it must not come back by itself.
    bad: Option<String>,
}

struct Active {
    digest: String,
    generation: u64,
    since_s: u64,
    by: By,
}

impl Publication {
    /// With the native defaults in force.
    pub fn new(settings: &MakerSettings, reports: SyncSender<Report>) -> Self {
        let maker = Maker::start(settings, reports);
        if let Err(why) = &maker {
            tracing::warn!(why, "no policy components can run: the native defaults serve");
        }
        let native = ParsedSet::native();
        let active = Active { digest: native.digest(), generation: 1, since_s: unix_s(), by: By::Start };
        let known = Known { set: native, came: 0, bad: None };
        let state = State {
            sets: BTreeMap::from([(active.digest.clone(), known)]),
            active,
            good: Vec::new(),
            history: VecDeque::new(),
            counters: BTreeMap::new(),
            clock: 0,
        };
        Self { maker, state: Mutex::new(state), turn: Mutex::default() }
    }

    fn maker(&self) -> Result<&Maker, Fault> {
        self.maker.as_ref().map_err(|why| Fault::NativeOnly(why.clone()))
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // No step between two whole states can panic.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What the engine starts with: the native defaults, seated so that any other set can take over from them.
    pub fn first_source(&self) -> PolicySource {
        match &self.maker {
            Ok(maker) => maker.source(&ParsedSet::native()),
            Err(_) => PolicySource::native(),
        }
    }

    /// Keeps a component. What it says of itself.
    ///
    /// # Errors
    /// What is wrong with it. Takes as long as compiling takes.
    pub fn load_component(&self, bytes: &[u8]) -> Result<Value, Fault> {
        self.maker()?.load(bytes)
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
        state.sets.insert(digest.clone(), Known { set, came, bad: None });
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
        let Report { set, machine, decision, policy, said } = report;
        let metrics = engine.metrics();
        match said {
            Said::Line(0, text) => tracing::error!(target: "penstock::policy", policy, decision, %machine, text),
            Said::Line(1, text) => tracing::warn!(target: "penstock::policy", policy, decision, %machine, text),
            Said::Line(2, text) => tracing::info!(target: "penstock::policy", policy, decision, %machine, text),
            Said::Line(_, text) => tracing::debug!(target: "penstock::policy", policy, decision, %machine, text),
            Said::Count(name, by) => self.count(decision, policy, name, by),
            Said::Renewed(how) => tracing::warn!(policy, decision, %machine, how, "a policy was made anew"),
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
                self.quarantined(engine, &set, why);
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

    fn quarantined(&self, engine: &Engine, set: &str, why: String) {
        let _turn = self.turn.lock().unwrap_or_else(PoisonError::into_inner);
        self.note(json!({"event": "quarantined", "set": set, "reason": why}));
        {
            let mut state = self.state();
            state.good.retain(|good| good != set);
            if let Some(known) = state.sets.get_mut(set) {
                known.bad = Some(why);
            }
            if state.active.digest != set {
                return;
            }
        }
        if let Err(fault) = self.roll_back_in_turn(engine, By::Quarantine) {
            tracing::error!(%fault, "no earlier policy set can serve: the defaults answer for what is in quarantine");
        }
    }

    /// Digest of the set in force.
    pub fn in_force(&self) -> String {
        self.state().active.digest.clone()
    }

    /// In words, for the log and the first line of the server.
    pub fn summary(&self) -> String {
        let state = self.state();
        if state.active.digest == ParsedSet::native().digest() {
            return "native defaults".to_owned();
        }
        let seats = state.sets.get(&state.active.digest).map(|known| known.set.seats(self.maker.as_ref().ok()));
        let names = seats.into_iter().flatten().map(|seat| seat["policy"].as_str().unwrap_or_default().to_owned());
        names.collect::<Vec<_>>().join(", ")
    }

    /// Everything: what is in force, by seat; every known set with its state; components; what happened lately.
    pub fn list(&self, engine: &Engine) -> Value {
        let maker = self.maker.as_ref().ok();
        let state = self.state();
        let set = |(digest, known): (&String, &Known)| {
            let standing = match &known.bad {
                _ if *digest == state.active.digest => "in-force",
                Some(_) => "quarantined",
                None if state.good.last() == Some(digest) => "last-good",
                None if state.good.contains(digest) => "good",
                None => "known",
            };
            json!({"digest": digest, "state": standing, "reason": known.bad})
        };
        let active = state.sets.get(&state.active.digest);
        let replicas = engine.status().replicas;
        json!({
            "generation": state.active.generation,
            "digest": state.active.digest,
            "since_s": state.active.since_s,
            "by": state.active.by.name(),
            "seats": active.map(|known| known.set.seats(maker)),
            "replicas": replicas.iter()
                .map(|replica| json!({"replica": replica.replica.0, "generation": replica.generation.0}))
                .collect::<Vec<_>>(),
            "sets": state.sets.iter().map(set).collect::<Vec<_>>(),
            "components": maker.map(Maker::components).unwrap_or_default(),
            "native_only": self.maker.as_ref().err(),
            "instances_alive": maker.map_or(0, Maker::instances_alive),
            "sets_leaving": engine.policies_leaving(),
            "counters": state.counters.iter()
                .map(|((decision, policy, name), sum)| json!({"seat": decision, "policy": policy, "name": name, "count": sum}))
                .collect::<Vec<_>>(),
            "history": state.history,
        })
    }

    /// One set, or one component, by its digest.
    ///
    /// # Errors
    /// Neither is known.
    pub fn inspect(&self, digest: &str) -> Result<Value, Fault> {
        let maker = self.maker.as_ref().ok();
        let digest = digest.strip_prefix("sha256:").unwrap_or(digest);
        if let Some(known) = self.state().sets.get(digest) {
            let mut seats = known.set.seats(maker);
            for seat in &mut seats {
                let component = seat["component"].as_str().and_then(|component| maker?.component(component));
                if let Some(component) = component {
                    seat["declares"] = component["declares"].clone();
                    seat["version"] = component["version"].clone();
                }
            }
            return Ok(
                json!({"digest": digest, "document": known.set.document(), "seats": seats, "reason": known.bad}),
            );
        }
        maker
            .and_then(|maker| maker.component(digest))
            .ok_or_else(|| Fault::Unknown(format!("policy set or component {digest}")))
    }

    /// The known set or component whose digest begins so, when it is the only one.
    pub fn whole_digest(&self, head: &str) -> Option<String> {
        let head = head.strip_prefix("sha256:").unwrap_or(head);
        let state = self.state();
        let components = self.maker.as_ref().map(Maker::components).unwrap_or_default();
        let components = components.iter().filter_map(|component| component["digest"].as_str().map(str::to_owned));
        let mut found = state.sets.keys().cloned().chain(components).filter(|digest| digest.starts_with(head));
        let only = found.next()?;
        found.next().is_none().then_some(only)
    }
}

fn active(digest: &str, generation: u64, by: By) -> Active {
    Active { digest: digest.to_owned(), generation, since_s: unix_s(), by }
}
