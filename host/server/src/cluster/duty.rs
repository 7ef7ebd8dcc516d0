//! How far is this worker, and who may know? Its state, its registration, its gateways.

use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Instant;

use penstock_discovery::{WorkerRecord, WorkerState};
use penstock_engine::{Metrics, Worker};
use serde_json::{Value, json};

/// States that a worker may be in, as metrics and operators have them.
const STATES: [(WorkerState, &str); 7] = [
    (WorkerState::Downloading, "downloading"),
    (WorkerState::Loading, "loading"),
    (WorkerState::Warming, "warming"),
    (WorkerState::Ready, "ready"),
    (WorkerState::Draining, "draining"),
    (WorkerState::Unhealthy, "unhealthy"),
    (WorkerState::Terminated, "terminated"),
];

/// What is to be known of a worker while it loads, serves and ends.
pub struct Duty {
    /// Where it makes itself known.
    place: String,
    state: Mutex<State>,
    /// Once it runs.
    worker: OnceLock<(Arc<Worker>, Arc<Metrics>)>,
}

struct State {
    record: WorkerRecord,
    since: Instant,
    registration: String,
}

impl Duty {
    /// As the record has it, and not registered.
    pub fn new(place: String, record: WorkerRecord) -> Self {
        let state = State { record, since: Instant::now(), registration: "not yet".to_owned() };
        Self { place, state: Mutex::new(state), worker: OnceLock::new() }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // Nothing can panic half way through a change.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The record now.
    pub fn record(&self) -> WorkerRecord {
        self.state().record.clone()
    }

    /// Changes the record. What is to be registered from now on.
    pub fn change(&self, change: impl FnOnce(&mut WorkerRecord)) -> WorkerRecord {
        let mut state = self.state();
        let before = state.record.state;
        change(&mut state.record);
        if state.record.state != before {
            state.since = Instant::now();
            tracing::info!(worker = %state.record.id, from = name(before), to = name(state.record.state), "worker state");
        }
        let record = state.record.clone();
        drop(state);
        self.count();
        record
    }

    /// How the registration stands.
    pub fn registration(&self, standing: String) {
        self.state().registration = standing;
    }

    /// It runs.
    pub fn runs(&self, worker: Arc<Worker>) {
        let metrics = worker.engine().metrics();
        drop(self.worker.set((worker, metrics)));
        self.count();
    }

    /// The worker, once it runs.
    pub fn worker(&self) -> Option<&Arc<Worker>> {
        self.worker.get().map(|(worker, _)| worker)
    }

    /// Sets the gauges.
    pub fn count(&self) {
        let Some((worker, metrics)) = self.worker.get() else { return };
        let now = self.state().record.state;
        for (state, name) in STATES {
            metrics.worker_state(name, state == now);
        }
        metrics.gateways(worker.gateways().len());
    }

    /// Where it is in its life, as a word.
    pub fn state_name(&self) -> &'static str {
        name(self.state().record.state)
    }

    /// For operators.
    pub fn shown(&self) -> Value {
        let gateways: Vec<u16> =
            self.worker().map(|worker| worker.gateways().iter().map(|gateway| gateway.0).collect()).unwrap_or_default();
        let state = self.state();
        json!({
            "worker": state.record.id,
            "life": state.record.epoch,
            "role": state.record.role,
            "state": state.record.state,
            "since_s": state.since.elapsed().as_secs(),
            "address": state.record.addresses.control,
            "compatibility": state.record.compatibility,
            "topology": state.record.topology,
            "gateways": gateways,
            "discovery": {"place": self.place, "registration": state.registration},
        })
    }
}

fn name(state: WorkerState) -> &'static str {
    STATES.iter().find(|(known, _)| *known == state).map_or("unknown", |(_, name)| name)
}
