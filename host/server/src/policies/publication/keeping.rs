//! What outlives the process: the set in force, the good ones before it, those that failed, and what the policies remember.

use std::collections::BTreeSet;
use std::sync::PoisonError;
use std::time::{SystemTime, UNIX_EPOCH};

use penstock_engine::Engine;
use serde_json::json;

use super::{Known, Publication};
use crate::policies::document::digest_of;
use crate::policies::maker::{Maker, ParsedSet, States};
use crate::policies::state_folder::{Record, StateFolder};

/// Good sets whose components stay at hand and that outlive the process: enough to go back from a set that turns out bad, and from its
/// predecessors. With the set in force they are 25 components at most, which leaves room for new ones in the library.
const GOOD_KEPT_MAX: usize = 4;
/// Failed sets whose reason does; the rest are told again when they fail again.
const BAD_KEPT_MAX: usize = 64;

impl Publication {
    /// After every change of what is in force: keeps at hand what may come back, and writes it down. That it cannot be written changes
    /// nothing for this run.
    pub(super) fn settle(&self) {
        self.pin();
        let Some(folder) = &self.folder else { return };
        let (record, components) = self.record();
        if let Err(fault) = folder.keep_record(record) {
            return not_kept(folder, &fault);
        }
        folder.sweep(&components);
    }

    /// Components of the set in force and of the last good ones do not make room for others.
    fn pin(&self) {
        let Ok(maker) = &self.maker else { return };
        let mut state = self.state();
        let over = state.good.len().saturating_sub(GOOD_KEPT_MAX);
        let stay: BTreeSet<_> = state.good[over..].iter().chain([&state.active.digest]).cloned().collect();
        for (digest, known) in &mut state.sets {
            match (stay.contains(digest), &known.pinned) {
                (true, None) => known.pinned = Some(maker.pin(&known.set)),
                (false, Some(_)) => known.pinned = None,
                _ => {}
            }
        }
    }

    /// What is to be written, and the components that must stay.
    fn record(&self) -> (Record, BTreeSet<String>) {
        let state = self.state();
        let over = state.good.len().saturating_sub(GOOD_KEPT_MAX);
        let good = state.good[over..].to_vec();
        let named = || good.iter().chain([&state.active.digest]);
        let known = |digest: &String| state.sets.get(digest).map(|known| (digest.clone(), known.set.document()));
        let bad = state.sets.iter().filter_map(|(digest, known)| Some((digest.clone(), known.bad.clone()?)));
        let at_hand = self.maker.as_ref().map(Maker::components).unwrap_or_default();
        let at_hand = at_hand.iter().filter_map(|component| component["digest"].as_str().map(str::to_owned));
        let wanted = named().filter_map(|digest| state.sets.get(digest)).flat_map(|known| known.set.components());
        let components = at_hand.chain(wanted).collect();
        let record = Record {
            active: state.active.digest.clone(),
            by: state.active.by.name().to_owned(),
            shipped: state.shipped.clone(),
            sets: named().filter_map(known).collect(),
            bad: bad.take(BAD_KEPT_MAX).collect(),
            good,
            ..Record::default()
        };
        (record, components)
    }

    /// Keeps a component that was found good.
    pub(super) fn keep_component(&self, bytes: &[u8]) {
        let Some(folder) = &self.folder else { return };
        if let Err(fault) = folder.keep_component(&digest_of(bytes), bytes) {
            not_kept(folder, &fault);
        }
    }

    /// Writes down what the policies remember, where that has changed. Blocks until every machine has said.
    pub fn keep_states(&self, engine: &Engine) {
        let (Some(folder), Ok(maker)) = (&self.folder, &self.maker) else { return };
        let states = match engine.policy_memories() {
            Ok(memories) => maker.states(memories),
            Err(fault) => return tracing::debug!(%fault, "what policies remember is kept another time"),
        };
        let now = engine.clock().now();
        let mut kept = self.kept_states.lock().unwrap_or_else(PoisonError::into_inner);
        if *kept == states {
            return;
        }
        match folder.keep_states(maker.encode(&states, now, unix_us()).as_deref()) {
            Ok(()) => *kept = states,
            Err(fault) => not_kept(folder, &fault),
        }
    }

    /// What the last run's policies remember. Damaged is as good as nothing, and is said.
    pub(super) fn saved_states(&self) -> States {
        let (Some(folder), Ok(maker)) = (&self.folder, &self.maker) else { return States::default() };
        let read = folder.states().and_then(|bytes| {
            let bytes = bytes.unwrap_or_default();
            if bytes.is_empty() { Ok(States::default()) } else { maker.decode(&bytes, unix_us()) }
        });
        read.unwrap_or_else(|why| {
            self.start_fresh(&why, "what policies remember cannot be read: they start fresh");
            States::default()
        })
    }

    /// What the last run had in force, with its sets and components at hand again. None when there was none, or when it cannot be read.
    pub(super) fn saved_record(&self) -> Option<Record> {
        let folder = self.folder.as_ref()?;
        let mut record = match folder.record() {
            Ok(Some(record)) => record,
            Ok(None) => {
                tracing::info!(folder = %folder.path().display(), "no saved policy state: starting fresh");
                return None;
            }
            Err(why) => {
                self.start_fresh(&why, "what was in force cannot be read: starting fresh");
                return None;
            }
        };
        record.sets.retain(|digest, document| match self.take_saved(folder, digest, document) {
            Ok(()) => true,
            Err(why) => {
                self.start_fresh(&why, "a saved policy set cannot be used");
                false
            }
        });
        record.good.retain(|digest| record.sets.contains_key(digest));
        let mut state = self.state();
        state.good = record.good.clone();
        for (digest, why) in &record.bad {
            if let Some(Known { bad, .. }) = state.sets.get_mut(digest) {
                *bad = Some(why.clone());
            }
        }
        drop(state);
        Some(record)
    }

    fn take_saved(&self, folder: &StateFolder, digest: &str, document: &serde_json::Value) -> Result<(), String> {
        let set = ParsedSet::read(document)?;
        if set.digest() != digest {
            return Err(format!("policy set {digest}: its document is another set's"));
        }
        let maker = self.maker().map_err(|fault| fault.to_string())?;
        for component in set.components() {
            if maker.component(&component).is_none() {
                let bytes = folder.component(&component)?;
                maker.load(&bytes).map_err(|fault| format!("component {component}: {fault}"))?;
            }
        }
        self.load_set(document).map(|_| ()).map_err(|fault| fault.to_string())
    }

    pub(super) fn start_fresh(&self, why: &str, what: &'static str) {
        tracing::warn!(why, "{what}");
        self.note(json!({"event": "not-resumed", "set": "-", "reason": why}));
    }
}

fn not_kept(folder: &StateFolder, fault: &std::io::Error) {
    tracing::warn!(folder = %folder.path().display(), %fault, "what decides cannot be kept over a restart");
}

fn unix_us() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_micros() as u64)
}
