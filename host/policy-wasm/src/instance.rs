//! How is one instance made and called? Fuel, backstop and the bounds of what it may hand over are set before each call.

use std::mem;
use std::sync::Arc;

use penstock_policy_api::{Decision, FaultKind, Kept, Manifest, RestoreCause, RestoreError, RestoreInfo};
use wasmtime::component::InstancePre;
use wasmtime::{Store, StoreContextMut};

use crate::backstop::CallTime;
use crate::bindings::life::{self, Life, LifeIndices};
use crate::component::{Component, LoadError, manifest_of};
use crate::fault::{Failure, GuestCall, plain};
use crate::host::{Host, Notes};
use crate::limits::{
    ANSWER_BYTES_MAX, FAULT_TEXT_BYTES_MAX, FUEL_MAX, FUEL_PER_FACT, HOST_CALLS_MAX, LOG_TEXT_BYTES_MAX,
    MANIFEST_BYTES_MAX, NAME_BYTES_MAX,
};
use crate::runtime::Runtime;
use crate::worlds;

/// The decision's own functions of an instance.
pub(crate) trait Bound: Sized {
    /// Looks them up.
    fn bind(
        pre: &InstancePre<Host>,
        store: &mut Store<Host>,
        instance: &wasmtime::component::Instance,
    ) -> wasmtime::Result<Self>;
}

/// What one call may use.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Budget {
    pub during: GuestCall,
    pub fuel: u64,
    /// Bytes that what it hands to the host may hold, in one list or text or all of an answer.
    pub bytes: usize,
}

impl Budget {
    pub fn of_life(during: GuestCall, bytes: usize) -> Self {
        Self { during, fuel: FUEL_MAX, bytes }
    }

    pub fn of_answer(during: GuestCall, fuel: u64) -> Self {
        Self { during, fuel, bytes: ANSWER_BYTES_MAX }
    }
}

/// What an instance is started with.
#[derive(Clone, Debug)]
pub(crate) struct Setup {
    pub runtime: Runtime,
    pub component: Arc<Component>,
    /// JSON; empty is every default.
    pub parameters: Arc<str>,
    pub fuel_base: u64,
}

/// Why an instance did not start.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum StartError {
    Failed(Failure),
    Parameters { field: String, problem: String },
}

/// One instance: a store of its own, the life cycle, and the functions of its decision.
pub(crate) struct Instance<B> {
    store: Store<Host>,
    life: Life,
    bound: B,
    last_fuel: u64,
    fuel_base: u64,
    state_bytes_max: usize,
}

fn prepare(store: &mut Store<Host>, budget: Budget) -> Result<(), Failure> {
    store.set_epoch_deadline(1);
    store.data_mut().call_time = CallTime::default();
    store.set_hostcall_fuel(budget.bytes);
    store.data_mut().calls_left = HOST_CALLS_MAX;
    store.set_fuel(budget.fuel).map_err(|error| Failure::of(budget.during, &error))
}

/// Asks a throw-away instance whether every function has the contract's types, and what the component says of itself.
pub(crate) fn inspect(runtime: &Runtime, pre: &InstancePre<Host>, decision: Decision) -> Result<Manifest, LoadError> {
    let mut store = runtime.store(Notes::default());
    let shape = |error: wasmtime::Error| LoadError::Shape(plain(format!("{error:#}"), FAULT_TEXT_BYTES_MAX));
    let found = LifeIndices::new(pre).map_err(shape)?;
    let budget = Budget::of_life(GuestCall::Start, ANSWER_BYTES_MAX);
    prepare(&mut store, budget).map_err(LoadError::Describe)?;
    let failed = |during| move |error: wasmtime::Error| LoadError::Describe(Failure::of(during, &error));
    let instance = pre.instantiate(&mut store).map_err(failed(GuestCall::Start))?;
    let life = found.load(&mut store, &instance).map_err(shape)?;
    worlds::check(pre, &mut store, &instance, decision).map_err(shape)?;
    let budget = Budget::of_life(GuestCall::Describe, MANIFEST_BYTES_MAX);
    prepare(&mut store, budget).map_err(LoadError::Describe)?;
    let said = life.penstock_types_policy().call_describe(&mut store);
    said.map(manifest_of).map_err(failed(GuestCall::Describe))
}

impl<B: Bound> Instance<B> {
    /// Makes an instance and leads it through `describe` and `configure`. It takes `notes` over; when it does not start, they are back
    /// with what it said on the way.
    pub fn start(setup: &Setup, notes: &mut Notes) -> Result<Self, StartError> {
        let mut store = setup.runtime.store(mem::take(notes));
        let (life, bound) = match Self::make(setup, &mut store) {
            Ok(made) => made,
            Err(failure) => {
                *notes = store.into_data().notes;
                return Err(StartError::Failed(failure));
            }
        };
        let mut started = Self {
            store,
            life,
            bound,
            last_fuel: 0,
            fuel_base: setup.fuel_base,
            state_bytes_max: setup.runtime.state_bytes_max(),
        };
        match started.introduce(setup) {
            Ok(()) => Ok(started),
            Err(error) => {
                *notes = started.into_notes();
                Err(error)
            }
        }
    }

    fn make(setup: &Setup, store: &mut Store<Host>) -> Result<(Life, B), Failure> {
        let pre = setup.component.pre();
        let budget = Budget::of_life(GuestCall::Start, ANSWER_BYTES_MAX);
        prepare(store, budget)?;
        let failed = |error: wasmtime::Error| Failure::of(GuestCall::Start, &error);
        let instance = pre.instantiate(&mut *store).map_err(failed)?;
        let life = LifeIndices::new(pre).and_then(|found| found.load(&mut *store, &instance)).map_err(failed)?;
        let bound = B::bind(pre, store, &instance).map_err(failed)?;
        Ok((life, bound))
    }

    fn introduce(&mut self, setup: &Setup) -> Result<(), StartError> {
        let said = self.describe().map_err(StartError::Failed)?;
        if said != *setup.component.manifest() {
            let text = "describes itself differently than when it was loaded".to_owned();
            return Err(StartError::Failed(Failure::new(GuestCall::Describe, FaultKind::Trap, text)));
        }
        self.configure(&setup.parameters)
    }

    /// One call under a budget.
    pub fn call<T>(
        &mut self,
        budget: Budget,
        f: impl FnOnce(&B, &Life, StoreContextMut<'_, Host>) -> wasmtime::Result<T>,
    ) -> Result<T, Failure> {
        use wasmtime::AsContextMut as _;
        prepare(&mut self.store, budget)?;
        let answer = f(&self.bound, &self.life, self.store.as_context_mut());
        // Fuel is metered by construction, so the store has a number; without one the call counts as having used it all.
        self.last_fuel = budget.fuel.saturating_sub(self.store.get_fuel().unwrap_or(0));
        answer.map_err(|error| Failure::of(budget.during, &error))
    }

    fn describe(&mut self) -> Result<Manifest, Failure> {
        let budget = Budget::of_life(GuestCall::Describe, MANIFEST_BYTES_MAX);
        self.call(budget, |_, life, store| life.penstock_types_policy().call_describe(store)).map(manifest_of)
    }

    fn configure(&mut self, parameters: &str) -> Result<(), StartError> {
        let budget = Budget::of_life(GuestCall::Configure, ANSWER_BYTES_MAX);
        let answer = self.call(budget, |_, life, store| life.penstock_types_policy().call_configure(store, parameters));
        match answer {
            Ok(Ok(())) => Ok(()),
            Ok(Err(refused)) => Err(StartError::Parameters {
                field: plain(refused.field, NAME_BYTES_MAX),
                problem: plain(refused.problem, LOG_TEXT_BYTES_MAX),
            }),
            Err(failure) => Err(StartError::Failed(failure)),
        }
    }

    /// Tells facts in their flat form, `Fact::STRIDE` numbers each.
    pub fn observe(&mut self, flat: &[u64], facts: usize) -> Result<(), Failure> {
        let fuel = self.fuel_base.saturating_add(FUEL_PER_FACT.saturating_mul(facts as u64));
        let budget = Budget::of_answer(GuestCall::Observe, fuel);
        self.call(budget, |_, life, store| life.penstock_types_policy().call_observe(store, flat))
    }

    /// Its state, at most as much as the runtime allows.
    pub fn save(&mut self) -> Result<Vec<u8>, Failure> {
        let limit = self.state_bytes_max;
        // Twice as much may cross, so that what is a little too large is refused here and not inside the engine: the instance lives on.
        let budget = Budget::of_life(GuestCall::Save, 2 * limit);
        let state = self.call(budget, |_, life, store| life.penstock_types_policy().call_save(store))?;
        if state.len() > limit {
            let text = format!("saved {} bytes, at most {limit}", state.len());
            return Err(Failure::new(GuestCall::Save, FaultKind::Memory, text));
        }
        Ok(state)
    }

    /// Hands state back.
    pub fn restore(&mut self, info: &RestoreInfo, state: &[u8]) -> Result<Result<Kept, RestoreError>, Failure> {
        let budget = Budget::of_life(GuestCall::Restore, ANSWER_BYTES_MAX);
        let info = life::types::RestoreInfo {
            schema: info.schema,
            cause: match info.cause {
                RestoreCause::Swap => life::types::Cause::Swap,
                RestoreCause::Trap => life::types::Cause::Trap,
                RestoreCause::Restart => life::types::Cause::Restart,
                RestoreCause::Replay => life::types::Cause::Replay,
            },
            saved_now_us: info.saved_now_us,
            now_us: info.now_us,
            elapsed_us: info.elapsed_us,
        };
        let answer =
            self.call(budget, |_, life, store| life.penstock_types_policy().call_restore(store, info, state))?;
        Ok(match answer {
            Ok(life::types::Kept::Kept) => Ok(Kept::Kept),
            Ok(life::types::Kept::Migrated) => Ok(Kept::Migrated),
            Err(life::types::RestoreError::UnknownSchema) => Err(RestoreError::UnknownSchema),
            Err(life::types::RestoreError::Damaged) => Err(RestoreError::Damaged),
        })
    }

    pub fn last_fuel(&self) -> u64 {
        self.last_fuel
    }

    pub fn memory_bytes(&self) -> usize {
        self.store.data().memory_bytes
    }

    pub fn notes_mut(&mut self) -> &mut Notes {
        &mut self.store.data_mut().notes
    }

    /// Ends it; what it said stays.
    pub fn into_notes(self) -> Notes {
        self.store.into_data().notes
    }
}

impl<B> std::fmt::Debug for Instance<B> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Instance").field("last_fuel", &self.last_fuel).finish_non_exhaustive()
    }
}
