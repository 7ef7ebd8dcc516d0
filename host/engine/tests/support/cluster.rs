//! A gateway and workers, each an engine of its own, joined by control conversations over loopback.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration as StdDuration;

use penstock_base::{GatewayEpoch, ReplicaEpoch, ReplicaId};
use penstock_control::{DialSettings, Identity, Limits, Link, ListenSettings, dial, listen};
use penstock_engine::{
    Engine, EngineConfig, JoinError, Joined, Role, ServedModel, Worker, WorkerIdentity, gateway_greeting,
};
use penstock_exec::{Executor as _, Geometry};
use penstock_model::Namespace;
use tokio::runtime::Runtime;

use super::{Control, FakeExecutor, Letters, PATIENCE, Sizes};

/// Sessions of tests end soon after their connection: a second is long for loopback.
pub fn limits() -> Limits {
    Limits {
        beat: StdDuration::from_millis(50),
        silence_max: StdDuration::from_secs(10),
        lease: StdDuration::from_millis(1_500),
        ..Limits::default()
    }
}

/// For the connections.
pub fn runtime() -> Runtime {
    tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().expect("a runtime")
}

fn model() -> ServedModel {
    ServedModel { name: "fake".into(), namespace: Namespace([3; 32]), vocabulary: Arc::new(Letters) }
}

fn identity(id: u64, epoch: u64, greeting: bytes::Bytes) -> Identity {
    let end = penstock_control::End { id, epoch };
    Identity { end, compatibility: "fake/1".into(), greeting, token: None }
}

/// A worker that listens.
pub struct Served {
    pub worker: Arc<Worker>,
    pub control: Arc<Control>,
    pub address: SocketAddr,
    pub identity: WorkerIdentity,
    accepts: tokio::task::JoinHandle<()>,
}

impl Served {
    /// Starts one.
    pub fn start(runtime: &Runtime, which: u32, epoch: u64, role: Role, config: EngineConfig) -> Self {
        Self::start_as(runtime, (which, 0), epoch, role, config)
    }

    /// Starts one whose process has another number than its replica by `process`.
    pub fn start_as(
        runtime: &Runtime,
        (which, process): (u32, u64),
        epoch: u64,
        role: Role,
        config: EngineConfig,
    ) -> Self {
        let control = Control::open();
        let executor = FakeExecutor::new(Sizes::default(), Arc::clone(&control));
        // Numbers that no index could be taken for.
        let replica = ReplicaId(70_000 + 1_000 * which);
        let identity_of = WorkerIdentity { replica, epoch: ReplicaEpoch(epoch), role, domain: 0 };
        let worker = Worker::start(config, model(), identity_of, Box::new(executor)).expect("values that can work");
        let worker = Arc::new(worker);
        let settings = ListenSettings {
            identity: identity(u64::from(replica.0) + process, epoch, worker.greeting()),
            limits: limits(),
            sessions_max: 16,
        };
        let listening = runtime.block_on(listen(([127, 0, 0, 1], 0).into(), settings)).expect("a port");
        let (address, taker) = (listening.address(), Arc::clone(&worker));
        let accepts = runtime.spawn(async move {
            let mut listening = listening;
            while let Some(conversation) = listening.accept().await {
                let _ = taker.take_gateway(conversation);
            }
        });
        Self { worker, control, address, identity: identity_of, accepts }
    }

    /// Ends it without a word to its replica: gateways hear goodbye.
    pub fn stop(self) {
        self.accepts.abort();
        self.control.release();
        assert!(self.worker.engine().shutdown());
    }
}

/// A gateway.
pub struct Front {
    pub engine: Engine,
    pub epoch: GatewayEpoch,
}

impl Front {
    pub fn start(epoch: u16, config: EngineConfig) -> Self {
        Self::start_for(epoch, config, Self::sizes(), 8)
    }

    /// Starts one for a model of these sizes and so many workers.
    pub fn start_for(epoch: u16, mut config: EngineConfig, sizes: Geometry, workers_max: usize) -> Self {
        config.gateway.epoch = GatewayEpoch(epoch);
        let engine = Engine::start_gateway(config, model(), sizes, workers_max).expect("values that can work");
        Self { engine, epoch: GatewayEpoch(epoch) }
    }

    /// The sizes that the workers here have.
    pub fn sizes() -> Geometry {
        FakeExecutor::new(Sizes::default(), Control::open()).geometry().clone()
    }

    /// Dials a worker and takes it in.
    pub fn join(&self, runtime: &Runtime, served: &Served) -> (Joined, Link) {
        self.try_join(runtime, served).expect("it is taken in")
    }

    pub fn try_join(&self, runtime: &Runtime, served: &Served) -> Result<(Joined, Link), JoinError> {
        let settings = DialSettings {
            address: served.address.to_string(),
            epoch: None,
            identity: identity(u64::from(self.epoch.0), 1, gateway_greeting(self.epoch)),
            limits: limits(),
        };
        let conversation = runtime.block_on(dial(settings)).expect("it listens");
        let link = conversation.link();
        self.engine.join(conversation).map(|joined| (joined, link))
    }

    /// Waits until so many replicas are ready.
    pub fn await_ready(&self, replicas: usize) {
        let deadline = std::time::Instant::now() + PATIENCE;
        let ready = || {
            let status = self.engine.status();
            let is_ready = |r: &&penstock_engine::ReplicaStatus| r.state == penstock_engine::ReplicaState::Ready;
            status.replicas.iter().filter(is_ready).count()
        };
        while ready() != replicas {
            assert!(std::time::Instant::now() < deadline, "{replicas} replicas: {:?}", self.engine.status().replicas);
            std::thread::sleep(StdDuration::from_millis(2));
        }
    }
}

/// Waits until a worker's pool is as if nothing had ever run, but for what its cache keeps.
pub fn await_idle(served: &Served) {
    let deadline = std::time::Instant::now() + PATIENCE;
    loop {
        let status = served.worker.engine().status();
        let load = status.replicas[0].load;
        let busy = load.active_blocks + load.transfer_blocks + load.reserved_blocks + load.running_requests;
        if busy + load.ready_requests == 0 && status.queue.placed_requests == 0 {
            return;
        }
        assert!(std::time::Instant::now() < deadline, "still busy: {status:?}");
        std::thread::sleep(StdDuration::from_millis(2));
    }
}

/// A conversation with a worker by somebody with this number and greeting.
pub fn dial_raw(runtime: &Runtime, served: &Served, id: u64, greeting: bytes::Bytes) -> penstock_control::Conversation {
    let identity = identity(id, 1, greeting);
    let settings = DialSettings { address: served.address.to_string(), epoch: None, identity, limits: limits() };
    runtime.block_on(dial(settings)).expect("it listens")
}
