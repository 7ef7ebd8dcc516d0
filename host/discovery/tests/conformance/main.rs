//! One suite for every implementation: `cases` says what must hold, each other module where it is tried.

#![allow(clippy::unwrap_used, reason = "a test")]

mod api_server;
mod cases;
mod etcd;
mod etcd_server;
mod folder;
mod kubernetes;
mod memory;

use std::time::Duration;

use penstock_discovery::{
    Addresses, Capacity, Discovery, Event, Registration, Role, Settings, Watch, WorkerRecord, WorkerState,
};
use tokio::time::{sleep, timeout};

/// A service of the test's own, and what may befall it.
trait Arena: Sized {
    type Service: Discovery;

    /// None when it cannot run here, which has been said aloud.
    async fn open(settings: Settings) -> Option<Self>;
    /// A client of the service. Each call gives another one.
    fn client(&self) -> Self::Service;
    /// One that takes so many workers at most.
    fn narrow(&self, workers_max: usize) -> Self::Service;
    /// Makes the place that a worker needs before it can register.
    async fn host(&self, _id: &str) {}
    /// The worker's process ends without a word.
    async fn crash(&self, _id: &str, registration: Registration) {
        drop(registration);
    }
    /// The service goes away.
    async fn lose(&mut self);
    /// And comes back.
    async fn restore(&mut self);
}

/// Bounds a wait that should be short, so that a fault ends the test instead of hanging it.
const PATIENCE: Duration = Duration::from_secs(60);

fn settings() -> Settings {
    Settings { lease: Duration::from_secs(3), ..Settings::default() }
}

fn record(id: &str, epoch: u64) -> WorkerRecord {
    WorkerRecord {
        id: id.parse().unwrap(),
        epoch,
        role: Role::Decode,
        state: WorkerState::Ready,
        addresses: Addresses {
            control: "10.1.2.3:7000".into(),
            kv_transfer: vec!["tcp://10.1.2.3:7001".into()],
            kv_events: Some("tcp://10.1.2.3:5557".into()),
            kv_replay: None,
        },
        model: "SmolLM2-135M-Instruct".into(),
        compatibility: "0f1e2d3c".into(),
        capacity: Capacity { blocks: 4_096, block_tokens: 16, slots: 64, context_tokens: 8_192 },
        topology: [("zone".to_owned(), "a".to_owned())].into(),
    }
}

async fn next(watch: &mut Watch) -> Event {
    timeout(PATIENCE, watch.next()).await.expect("an event")
}

/// The next event, which must not be one of the service's health: those come in between wherever a machine is slow.
async fn next_change(watch: &mut Watch) -> Event {
    loop {
        match next(watch).await {
            Event::Stale { .. } | Event::Fresh => {}
            event => return event,
        }
    }
}

/// Nothing is told for so long, an outage least of all.
async fn quiet(watch: &mut Watch, time: Duration) {
    if let Ok(event) = timeout(time, watch.next()).await {
        panic!("unexpected: {event:?}");
    }
}

async fn until(mut holds: impl FnMut() -> bool, what: &str) {
    let wait = async {
        while !holds() {
            sleep(Duration::from_millis(20)).await;
        }
    };
    timeout(PATIENCE, wait).await.unwrap_or_else(|_| panic!("never came: {what}"));
}

fn ids(watch: &Watch) -> Vec<String> {
    watch.view().workers.iter().map(|worker| worker.id.to_string()).collect()
}
