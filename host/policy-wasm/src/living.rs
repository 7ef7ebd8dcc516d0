//! What becomes of a policy over its calls? An instance that failed is dropped and made anew from the last snapshot and the facts told
//! since; one that fails too often is not asked for a while.
//!
//! ```text
//!            ┌──────── answers ────────┐
//!            ▼                         │
//!   ──►  instance ──fails──► made anew ┘   (snapshot + facts, else snapshot + gap, else fresh; the default answers the failed call)
//!            ▲                   │ cannot be, third strike within 1,000 calls, or third snapshot in a row that failed
//!            └── calls over ── quarantine   (the default answers; facts are kept)
//! ```

use std::collections::VecDeque;
use std::mem;

use penstock_base::codec::Writer;
use penstock_policy_api::{
    Call, Fact, FallbackReason, FaultKind, Kept, Matrix, Policy, RestoreCause, RestoreError, RestoreInfo, Terms,
};
use wasmtime::StoreContextMut;

use crate::fault::{Failure, GuestCall};
use crate::host::{Host, Notes};
use crate::instance::{Budget, Instance, Setup, StartError};
use crate::limits::{HAPPENINGS_MAX, SNAPSHOT_AFTER_US, SNAPSHOT_DECISIONS, STRIKES_MAX};
use crate::report::{Happening, ResetReason, SeatStatus};
use crate::snapshot::{KeptFacts, Snapshot};
use crate::strikes::{Strikes, Turn};
use crate::worlds::World;

/// A policy with its life.
pub(crate) struct Living<W: World> {
    setup: Setup,
    /// As resolved at load, with this seat's window.
    declaration: W::Declaration,
    /// None in quarantine.
    instance: Option<Instance<W>>,
    /// Where the notes wait while there is no instance.
    notes: Notes,
    snapshot: Option<Snapshot>,
    kept: KeptFacts,
    /// Decisions since the snapshot.
    decisions: u32,
    /// Anything asked or told since the snapshot.
    is_changed: bool,
    /// When the last snapshot was taken or tried.
    snapshot_tried_us: u64,
    /// Snapshots that failed since the last one that did not.
    failed_saves: usize,
    /// The latest time that this seat has seen.
    now_us: u64,
    strikes: Strikes,
    happenings: VecDeque<Happening>,
    happenings_dropped: u64,
    status: Tally,
    /// Facts on their way, flat.
    flat: Vec<u64>,
    /// Cells on their way, where a matrix has room between its columns.
    pub(crate) cells: Vec<u64>,
}

/// Sums over a seat's life.
#[derive(Clone, Copy, Debug, Default)]
struct Tally {
    faults: u64,
    rebuilds: u64,
    resets: u64,
    snapshots: u64,
    last_fuel: u64,
    total_fuel: u64,
}

/// What a swap takes from one instance to the next.
#[derive(Clone, Debug)]
pub(crate) struct Carried {
    pub snapshot: Snapshot,
    pub kept: KeptFacts,
}

impl<W: World> Living<W> {
    /// A fresh instance, described and configured.
    pub fn start(setup: Setup, declaration: W::Declaration) -> Result<Self, StartError> {
        let instance = Instance::start(&setup, &mut Notes::default())?;
        Ok(Self {
            setup,
            declaration,
            instance: Some(instance),
            notes: Notes::default(),
            snapshot: None,
            kept: KeptFacts::default(),
            decisions: 0,
            is_changed: false,
            snapshot_tried_us: 0,
            failed_saves: 0,
            now_us: 0,
            strikes: Strikes::new(),
            happenings: VecDeque::new(),
            happenings_dropped: 0,
            status: Tally::default(),
            flat: Vec::new(),
            cells: Vec::new(),
        })
    }

    pub fn declaration(&self) -> &W::Declaration {
        &self.declaration
    }

    /// Puts one question. `rows` in all matrices together, at `fuel_per_row` each.
    pub fn ask<T>(
        &mut self,
        during: GuestCall,
        call: &Call,
        row_fuel: u64,
        f: impl FnOnce(&W, StoreContextMut<'_, Host>) -> wasmtime::Result<T>,
    ) -> Result<T, FaultKind> {
        self.now_us = self.now_us.max(call.now_us);
        self.status.last_fuel = 0;
        if self.strikes.turn() == Turn::Quarantined {
            return Err(FaultKind::Rebuilding);
        }
        let calls = self.strikes.calls();
        if self.instance.is_none() {
            self.rebuild();
        }
        let budget = Budget::of_answer(during, self.setup.fuel_base.saturating_add(row_fuel));
        let Some(instance) = self.instance.as_mut() else { return Err(FaultKind::Rebuilding) };
        instance.notes_mut().earn(calls);
        self.decisions = self.decisions.saturating_add(1);
        self.is_changed = true;
        let answer = instance.call(budget, |bound, _, store| f(bound, store));
        let fuel = instance.last_fuel();
        self.spent(fuel);
        answer.map_err(|failure| self.fail(failure))
    }

    fn spent(&mut self, fuel: u64) {
        self.status.last_fuel = fuel;
        self.status.total_fuel = self.status.total_fuel.saturating_add(fuel);
    }

    /// A call failed: the instance is of no use any more.
    fn fail(&mut self, failure: Failure) -> FaultKind {
        let kind = failure.kind;
        self.note_fault(failure);
        let is_out = self.strikes.strike();
        self.drop_instance();
        if is_out {
            self.note_quarantine();
        } else {
            self.rebuild();
        }
        kind
    }

    /// The host refused an answer. Faults of the guest are counted where they happen.
    pub fn strike(&mut self, reason: FallbackReason) {
        if let FallbackReason::Malformed(why) = reason {
            self.happen(Happening::Malformed(why));
            if self.strikes.strike() {
                self.drop_instance();
                self.note_quarantine();
            }
        }
    }

    fn drop_instance(&mut self) {
        if let Some(instance) = self.instance.take() {
            self.notes = instance.into_notes();
        }
    }

    /// Makes the instance anew, with as much of its memory as does not make it fail again.
    fn rebuild(&mut self) {
        self.drop_instance();
        self.status.rebuilds = self.status.rebuilds.saturating_add(1);
        if self.try_rebuild(true) {
            self.happen(Happening::Rebuilt { facts: self.kept.len() });
            return;
        }
        if !self.kept.is_empty() {
            self.kept.lose_all();
            if self.try_rebuild(true) {
                self.happen(Happening::Reset(ResetReason::FactsLost));
                return;
            }
        }
        self.status.resets = self.status.resets.saturating_add(1);
        self.snapshot = None;
        self.kept.clear();
        if self.try_rebuild(false) {
            self.happen(Happening::Reset(ResetReason::StateLost));
            return;
        }
        self.strikes.quarantine();
        self.note_quarantine();
    }

    fn try_rebuild(&mut self, with_state: bool) -> bool {
        let mut instance = match Instance::start(&self.setup, &mut self.notes) {
            Ok(instance) => instance,
            Err(error) => {
                self.note_start(error);
                return false;
            }
        };
        let remembered = if with_state { self.remember(&mut instance) } else { Ok(()) };
        match remembered {
            Ok(()) => {
                self.instance = Some(instance);
                true
            }
            Err(failure) => {
                self.notes = instance.into_notes();
                self.note_fault(failure);
                false
            }
        }
    }

    fn remember(&mut self, instance: &mut Instance<W>) -> Result<(), Failure> {
        if let Some(snapshot) = &self.snapshot {
            let info = snapshot.info(RestoreCause::Trap, self.now_us);
            if let Err(refused) = instance.restore(&info, &snapshot.bytes)? {
                let text = format!("refused its own snapshot: {refused}");
                return Err(Failure::new(GuestCall::Restore, FaultKind::Trap, text));
            }
        }
        for batch in self.kept.batches(W::terms(&self.declaration).facts) {
            self.flat.clear();
            Fact::flatten_into(&batch, &mut self.flat);
            instance.observe(&self.flat, batch.len())?;
        }
        Ok(())
    }

    /// Takes a snapshot when one is due. Called between two steps.
    pub fn between_steps(&mut self, now_us: u64) {
        self.now_us = self.now_us.max(now_us);
        if !self.is_changed || self.instance.is_none() {
            return;
        }
        let waited_us = self.now_us.saturating_sub(self.snapshot_tried_us);
        if self.decisions < SNAPSHOT_DECISIONS && waited_us < SNAPSHOT_AFTER_US {
            return;
        }
        self.decisions = 0;
        self.snapshot_tried_us = self.now_us;
        if let Err(failure) = self.take_snapshot() {
            self.fail_snapshot(failure);
        }
    }

    /// Too much state leaves the instance as it is; a trap does not. At a busy seat snapshots are as many calls apart as the window of
    /// strikes is long, so that a policy that cannot save is out after as many failures in a row, whatever lies between them.
    fn fail_snapshot(&mut self, failure: Failure) -> FaultKind {
        self.failed_saves += 1;
        let kind = failure.kind;
        if kind == FaultKind::Memory {
            self.note_fault(failure);
            if self.strikes.strike() {
                self.drop_instance();
                self.note_quarantine();
            }
        } else {
            self.fail(failure);
        }
        if self.failed_saves >= STRIKES_MAX {
            self.failed_saves = 0;
            if !self.is_quarantined() {
                self.strikes.quarantine();
                self.drop_instance();
                self.note_quarantine();
            }
        }
        kind
    }

    fn take_snapshot(&mut self) -> Result<(), Failure> {
        let Some(instance) = self.instance.as_mut() else { return Ok(()) };
        let saved = instance.save();
        let fuel = instance.last_fuel();
        self.spent(fuel);
        let schema = W::terms(&self.declaration).state_schema;
        self.snapshot = Some(Snapshot::here(schema, self.now_us, saved?));
        self.failed_saves = 0;
        self.kept.clear();
        self.is_changed = false;
        self.status.snapshots = self.status.snapshots.saturating_add(1);
        Ok(())
    }

    /// The state to hand to a successor: as of now where it can still say, else as of the last snapshot with the facts since.
    pub fn carry_out(&mut self, now_us: u64) -> Option<Carried> {
        self.now_us = self.now_us.max(now_us);
        if self.is_changed
            && let Err(failure) = self.take_snapshot()
        {
            self.note_fault(failure);
        }
        let kept = mem::take(&mut self.kept);
        self.snapshot.clone().map(|snapshot| Carried { snapshot, kept })
    }

    /// Takes over. On any fault it is as new.
    pub fn carry_in(&mut self, carried: Carried, now_us: u64) -> Result<Kept, RestoreError> {
        let info = carried.snapshot.info(RestoreCause::Swap, now_us);
        let kept = self.restore(&info, &carried.snapshot.bytes)?;
        for batch in carried.kept.batches(W::terms(&self.declaration).facts) {
            self.observe(&batch).map_err(RestoreError::Fault)?;
        }
        Ok(kept)
    }

    /// The last snapshot, without asking the instance.
    pub fn snapshot(&self) -> Option<&Snapshot> {
        self.snapshot.as_ref()
    }

    pub fn setup(&self) -> &Setup {
        &self.setup
    }

    pub fn is_quarantined(&self) -> bool {
        self.strikes.is_quarantined()
    }

    pub fn last_fuel(&self) -> u64 {
        self.status.last_fuel
    }

    pub fn rebuilds(&self) -> u64 {
        self.status.rebuilds
    }

    pub fn status(&self) -> SeatStatus {
        let terms = W::terms(&self.declaration);
        SeatStatus {
            decision: W::DECISION,
            policy: terms.name.clone(),
            version: terms.version.clone(),
            component: Some(self.setup.component.digest()),
            calls: self.strikes.calls(),
            faults: self.status.faults,
            strikes: self.strikes.total(),
            quarantines: self.strikes.quarantines(),
            quarantine_calls_left: self.strikes.left(),
            rebuilds: self.status.rebuilds,
            resets: self.status.resets,
            snapshots: self.status.snapshots,
            snapshot_bytes: self.snapshot.as_ref().map_or(0, |snapshot| snapshot.bytes.len()),
            memory_bytes: self.instance.as_ref().map_or(0, Instance::memory_bytes),
            last_fuel: self.status.last_fuel,
            total_fuel: self.status.total_fuel,
        }
    }

    pub fn notes_mut(&mut self) -> &mut Notes {
        self.instance.as_mut().map_or(&mut self.notes, Instance::notes_mut)
    }

    pub fn take_happenings(&mut self) -> (VecDeque<Happening>, u64) {
        (mem::take(&mut self.happenings), mem::take(&mut self.happenings_dropped))
    }

    fn happen(&mut self, happening: Happening) {
        if self.happenings.len() >= HAPPENINGS_MAX {
            self.happenings.pop_front();
            self.happenings_dropped = self.happenings_dropped.saturating_add(1);
        }
        self.happenings.push_back(happening);
    }

    fn note_fault(&mut self, failure: Failure) {
        self.status.faults = self.status.faults.saturating_add(1);
        let (call, now_us) = (self.strikes.calls(), self.now_us);
        self.happen(Happening::Fault { failure, call, now_us });
    }

    fn note_start(&mut self, error: StartError) {
        self.note_fault(match error {
            StartError::Failed(failure) => failure,
            StartError::Parameters { field, problem } => {
                let text = format!("refused parameters that it took before: {field}: {problem}");
                Failure::new(GuestCall::Configure, FaultKind::Trap, text)
            }
        });
    }

    fn note_quarantine(&mut self) {
        self.happen(Happening::Quarantined { calls: self.strikes.left(), times: self.strikes.quarantines() });
    }
}

impl<W: World> Policy for Living<W> {
    fn terms(&self) -> &Terms {
        W::terms(&self.declaration)
    }

    fn observe(&mut self, facts: &[Fact]) -> Result<(), FaultKind> {
        let wanted = W::terms(&self.declaration).facts;
        self.flat.clear();
        let mut told = 0;
        for fact in facts.iter().filter(|fact| wanted.has(fact.kind)) {
            self.flat.extend_from_slice(&fact.flat());
            self.kept.push(*fact);
            self.now_us = self.now_us.max(fact.at_us);
            told += 1;
        }
        if told == 0 {
            return Ok(());
        }
        self.is_changed = true;
        // In quarantine they are kept for the instance to come.
        let Some(instance) = self.instance.as_mut() else { return Ok(()) };
        let taken = instance.observe(&self.flat, told);
        let fuel = instance.last_fuel();
        self.spent(fuel);
        taken.map_err(|failure| self.fail(failure))
    }

    fn save(&mut self, out: &mut Writer) -> Result<(), FaultKind> {
        if self.instance.is_none() {
            return Err(FaultKind::Rebuilding);
        }
        if let Err(failure) = self.take_snapshot() {
            return Err(self.fail_snapshot(failure));
        }
        if let Some(snapshot) = &self.snapshot {
            out.raw(&snapshot.bytes);
        }
        Ok(())
    }

    fn restore(&mut self, info: &RestoreInfo, state: &[u8]) -> Result<Kept, RestoreError> {
        self.now_us = self.now_us.max(info.now_us);
        self.snapshot = None;
        self.kept.clear();
        self.is_changed = false;
        self.decisions = 0;
        self.snapshot_tried_us = self.now_us;
        let Some(instance) = self.instance.as_mut() else { return Err(RestoreError::Fault(FaultKind::Rebuilding)) };
        let answer = instance.restore(info, state);
        let fuel = instance.last_fuel();
        self.spent(fuel);
        match answer {
            Ok(Ok(kept)) => {
                self.snapshot = Some(Snapshot::brought(info, state));
                Ok(kept)
            }
            Ok(Err(refused)) => {
                self.status.resets = self.status.resets.saturating_add(1);
                Err(refused)
            }
            Err(failure) => Err(RestoreError::Fault(self.fail(failure))),
        }
    }
}

impl<W: World> std::fmt::Debug for Living<W> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Living").field("decision", &W::DECISION).field("status", &self.status).finish_non_exhaustive()
    }
}

/// The cells of `matrix` without gaps, copied only where its columns stand apart.
pub(crate) fn packed<'a>(matrix: &'a Matrix, scratch: &'a mut Vec<u64>) -> &'a [u64] {
    match matrix.packed() {
        Some(cells) => cells,
        None => {
            scratch.clear();
            matrix.pack_into(scratch);
            scratch
        }
    }
}
