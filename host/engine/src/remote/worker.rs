//! The handle of a worker: one replica, and the gateways before it.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use bytes::Bytes;
use penstock_base::{GatewayEpoch, ReplicaEpoch, ReplicaId};
use penstock_control::{Conversation, Link};
use penstock_exec::Executor;

use super::greeting::{WorkerGreeting, read_gateway_greeting};
use super::serve::Server;
use super::wire::Endpoint;
use crate::config::{EngineConfig, ServedModel};
use crate::engine::{Engine, EngineError};
use crate::replica_loop::Role;
use crate::wiring::Wiring;

/// Who a worker is in its cluster.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct WorkerIdentity {
    /// Its number, the same over restarts and no other worker's.
    pub replica: ReplicaId,
    /// Its incarnation: larger after each restart, with room above it for the epochs that follow when the replica starts anew inside the process.
    pub epoch: ReplicaEpoch,
    /// What it does.
    pub role: Role,
    /// Workers with the same number are near each other; 0 is nowhere.
    pub domain: u32,
}

/// Why a gateway was turned away. Its session ends.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum RefusedGateway {
    /// What it says of itself cannot be read.
    #[error("its greeting cannot be read ({0}): both ends must be of the same version")]
    Greeting(String),
    /// Another gateway has its number.
    #[error("gateway number {0} is in use by another gateway: start this one again, it will take another number")]
    Taken(u16),
    /// The worker ends.
    #[error("the worker does not run")]
    NotRunning,
    /// The system gave no thread.
    #[error("a thread could not be started: {0}")]
    Thread(String),
}

/// A running worker.
#[derive(Debug)]
pub struct Worker {
    engine: Arc<Engine>,
    greeting: Bytes,
    /// Gateways that are here, with the number of the process behind each.
    gateways: Arc<Mutex<HashMap<GatewayEpoch, Seat>>>,
}

#[derive(Debug)]
struct Seat {
    process: u64,
    link: Link,
}

impl Worker {
    /// Starts the replica. Gateways come by [`Self::take_gateway`].
    ///
    /// # Errors
    /// Values that cannot work, no threads.
    pub fn start(
        config: EngineConfig,
        model: ServedModel,
        identity: WorkerIdentity,
        executor: Box<dyn Executor>,
    ) -> Result<Self, EngineError> {
        let (engine, facts, descriptors) = Engine::start_worker(config, model, identity, executor)?;
        let endpoint = Endpoint { replica: identity.replica, life: identity.epoch.0, descriptors };
        let greeting = WorkerGreeting::new(facts, engine.geometry(), endpoint).write();
        Ok(Self { engine: Arc::new(engine), greeting, gateways: Arc::default() })
    }

    /// Its status, metrics, policies; and its end.
    pub fn engine(&self) -> &Arc<Engine> {
        &self.engine
    }

    /// What it says of itself to each gateway: for the identity of the end that listens. Holds what is needed to reach its memory, so that it
    /// belongs into control conversations and nowhere else.
    pub fn greeting(&self) -> Bytes {
        self.greeting.clone()
    }

    /// Gateways that are here now.
    pub fn gateways(&self) -> Vec<GatewayEpoch> {
        let mut all: Vec<_> = lock(&self.gateways).keys().copied().collect();
        all.sort_unstable();
        all
    }

    /// Serves a gateway until its session is over. A later session of the same process takes the place of an earlier one.
    ///
    /// # Errors
    /// See [`RefusedGateway`]; the session is closed.
    pub fn take_gateway(&self, conversation: Conversation) -> Result<GatewayEpoch, RefusedGateway> {
        let gateway = read_gateway_greeting(conversation.greeting());
        let gateway = gateway.map_err(|error| RefusedGateway::Greeting(error.to_string()))?;
        let wiring = Arc::clone(self.engine.wiring());
        let Some(port) = wiring.replicas.locals().first().and_then(|replica| wiring.replica(*replica)) else {
            return Err(RefusedGateway::NotRunning);
        };
        let (process, link) = (conversation.peer().id, conversation.link());
        if let Some(seat) = lock(&self.gateways).get(&gateway) {
            if seat.process != process {
                return Err(RefusedGateway::Taken(gateway.0));
            }
            seat.link.close();
        }
        let gateways = Arc::clone(&self.gateways);
        let thread = std::thread::Builder::new().name(format!("penstock-link-{gateway}"));
        let serve = move || {
            if sit(&gateways, gateway, Seat { process, link: link.clone() }, &wiring) {
                Server { wiring, port, gateway, conversation }.run();
                lock(&gateways).remove(&gateway);
            }
        };
        thread.spawn(serve).map_err(|error| RefusedGateway::Thread(error.to_string()))?;
        Ok(gateway)
    }
}

fn lock(gateways: &Mutex<HashMap<GatewayEpoch, Seat>>) -> MutexGuard<'_, HashMap<GatewayEpoch, Seat>> {
    gateways.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Waits until an earlier session of the same gateway has left. False when this one is over before.
fn sit(gateways: &Mutex<HashMap<GatewayEpoch, Seat>>, gateway: GatewayEpoch, seat: Seat, wiring: &Wiring) -> bool {
    loop {
        {
            let mut gateways = lock(gateways);
            if let Entry::Vacant(place) = gateways.entry(gateway) {
                place.insert(seat);
                return true;
            }
        }
        if seat.link.ended().is_some() || wiring.board.dead.load(std::sync::atomic::Ordering::Acquire) {
            return false;
        }
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
}
