//! What does a gateway see of its workers? Told to operators and counted.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use penstock_base::{ReplicaEpoch, ReplicaId};
use penstock_discovery::{View, WorkerRecord};
use penstock_engine::Metrics;
use serde_json::{Value, json};

use super::roster::Goal;

/// Workers by name, and how discovery stands.
pub struct Sight {
    place: String,
    metrics: Arc<Metrics>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    workers: BTreeMap<String, Row>,
    discovery: Option<View>,
}

/// One worker.
struct Row {
    goal: Goal,
    record: Option<Arc<WorkerRecord>>,
    link: LinkState,
    since: Instant,
}

/// How the connection to a worker stands.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum LinkState {
    /// Nobody calls it.
    Idle,
    /// It is being called.
    Calling,
    /// The last call came to nothing; another follows.
    Failed(String),
    /// It is one of the gateway's replicas.
    Connected {
        /// Which.
        replica: ReplicaId,
        /// Its life as the machines know it.
        epoch: ReplicaEpoch,
    },
}

impl LinkState {
    fn name(&self) -> &'static str {
        match self {
            Self::Idle => "idle",
            Self::Calling => "calling",
            Self::Failed(_) => "failed",
            Self::Connected { .. } => "connected",
        }
    }
}

impl Sight {
    /// Nothing is seen yet. `place` says where workers make themselves known.
    pub fn new(place: String, metrics: Arc<Metrics>) -> Self {
        Self { place, metrics, state: Mutex::default() }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // Nothing can panic half way through a change.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What is known of workers now; who is gone for good leaves.
    pub fn known(&self, goals: &BTreeMap<String, Goal>, record: impl Fn(&str) -> Option<Arc<WorkerRecord>>) {
        let mut state = self.state();
        let is_connected = |row: &Row| matches!(row.link, LinkState::Connected { .. });
        state.workers.retain(|key, row| goals.contains_key(key) || is_connected(row));
        for (key, goal) in goals {
            let row = state.workers.entry(key.clone()).or_insert_with(|| Row {
                goal: goal.clone(),
                record: None,
                link: LinkState::Idle,
                since: Instant::now(),
            });
            row.goal = goal.clone();
            // What it was stays shown while its session goes on.
            row.record = record(key).or_else(|| row.record.take());
        }
        self.count(&state);
    }

    /// How the connection to a worker stands now.
    pub fn link(&self, key: &str, link: LinkState) {
        let mut state = self.state();
        if let Some(row) = state.workers.get_mut(key).filter(|row| row.link != link) {
            // One failure after another is one time without a connection.
            if row.link.name() != link.name() {
                row.since = Instant::now();
            }
            row.link = link;
        }
        self.count(&state);
    }

    /// A worker's session is over and nobody calls it any more.
    pub fn gone(&self, key: &str) {
        let mut state = self.state();
        state.workers.remove(key);
        self.count(&state);
    }

    /// What discovery says now.
    pub fn discovery(&self, view: View) {
        self.metrics.discovery_age(view.stale.unwrap_or_default());
        self.state().discovery = Some(view);
    }

    fn count(&self, state: &State) {
        let of = |fits: fn(&Row) -> bool| state.workers.values().filter(|row| fits(row)).count();
        self.metrics.workers("known", state.workers.len());
        self.metrics.workers("connected", of(|row| matches!(row.link, LinkState::Connected { .. })));
        self.metrics.workers("failed", of(|row| matches!(row.link, LinkState::Failed(_))));
        self.metrics.workers("held", of(|row| row.goal.hold));
        self.metrics.workers("refused", of(|row| row.goal.refused.is_some()));
    }

    /// For operators.
    pub fn shown(&self) -> Value {
        let state = self.state();
        let workers = state.workers.iter().map(|(name, row)| {
            let record = row.record.as_deref();
            let (replica, epoch) = match row.link {
                LinkState::Connected { replica, epoch } => (Some(replica.0), Some(epoch.0)),
                _ => (None, None),
            };
            let why = match &row.link {
                LinkState::Failed(why) => Some(why.as_str()),
                _ => row.goal.refused.as_deref(),
            };
            json!({
                "worker": name,
                "role": record.map(|record| record.role.to_string()),
                "life": row.goal.life,
                "state": record.map(|record| record.state),
                "address": row.goal.address,
                "topology": record.map(|record| &record.topology),
                "connection": row.link.name(),
                "since_s": row.since.elapsed().as_secs(),
                "replica": replica,
                "epoch": epoch,
                "held": row.goal.hold,
                "why": why,
            })
        });
        let workers: Vec<Value> = workers.collect();
        let discovery = state.discovery.as_ref().map(|view| {
            let faults = view.faults.iter().map(|(place, why)| json!({"place": place, "why": why}));
            json!({
                "place": self.place,
                "fresh": view.stale.is_none(),
                "age_s": view.stale.unwrap_or_default().as_secs_f64(),
                "workers": view.workers.len(),
                "turned_away": view.turned_away,
                "faults": faults.collect::<Vec<_>>(),
            })
        });
        json!({"workers": workers, "discovery": discovery})
    }
}
