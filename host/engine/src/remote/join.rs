//! A gateway takes workers in: reads what each says, and hands it to the loops as if they were one process.

use std::sync::atomic::AtomicU32;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use penstock_base::{Generation, ReplicaEpoch, ReplicaId};
use penstock_control::{Conversation, End, Ended};
use penstock_exec::Geometry;
use penstock_sched::gateway::ReplicaFacts;
use penstock_sched::message::{FromReplica, Load};
use tokio::sync::oneshot;

use super::greeting::WorkerGreeting;
use super::port::{RemotePort, ReplicaPort};
use super::wire::{self, Endpoint, RemoteItem, ToGateway};
use crate::gateway_loop::{self, GatewayWake};
use crate::outputs::{self, OutputWake, Turn, TurnItem};
use crate::status::{ReplicaState, ReplicaStatus};
use crate::wiring::Wiring;

/// Code of the role that only computes prompts.
const PREFILL: u8 = 1;

/// A worker that was taken in.
#[derive(Debug)]
pub struct Joined {
    /// Which replica it is.
    pub replica: ReplicaId,
    /// Its incarnation as it greeted.
    pub epoch: ReplicaEpoch,
    /// Told once the session is over and the gateway knows that the replica is gone.
    pub ended: oneshot::Receiver<Ended>,
}

/// Why a worker was not taken in.
#[derive(Debug, thiserror::Error)]
pub enum JoinError {
    /// What it says of itself cannot be read.
    #[error("its greeting cannot be read ({0}): both ends must be of the same version")]
    Greeting(String),
    /// It computes something else.
    #[error("{what} is {there} there and {here} here: both must serve the same model with the same settings")]
    Differs {
        /// In what.
        what: &'static str,
        /// At the gateway.
        here: u64,
        /// At the worker.
        there: u64,
    },
    /// Another worker has its number.
    #[error("replica {replica} is another worker already: give one of them another name or another cluster.replica_id")]
    Taken {
        /// Which.
        replica: u32,
    },
    /// No more are taken.
    #[error("{0} workers are here, and no more are allowed")]
    Full(usize),
    /// The engine is no gateway, broke or was shut down.
    #[error("the gateway does not run")]
    NotRunning,
    /// The system gave no thread.
    #[error("a thread could not be started: {0}")]
    Thread(#[from] std::io::Error),
}

/// The workers before which this gateway stands.
#[derive(Debug)]
pub(crate) struct Joins {
    sizes: Geometry,
    workers_max: usize,
    workers: Mutex<Vec<Known>>,
}

#[derive(Clone, Debug)]
struct Known {
    peer: End,
    role_code: u8,
    endpoint: Endpoint,
    port: Arc<ReplicaPort>,
}

impl Joins {
    pub fn new(sizes: Geometry, workers_max: usize) -> Self {
        Self { sizes, workers_max, workers: Mutex::default() }
    }

    pub fn workers_max(&self) -> usize {
        self.workers_max
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Known>> {
        self.workers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn fit(&self, greeting: &WorkerGreeting) -> Result<(), JoinError> {
        let pairs = [
            ("the block size", self.sizes.block_size_tokens.into(), greeting.block_size_tokens.into()),
            ("the size of a token's KV", self.sizes.kv_token_bytes, greeting.kv_token_bytes),
            ("the vocabulary", self.sizes.vocabulary.into(), greeting.vocabulary.into()),
        ];
        match pairs.into_iter().find(|(_, here, there)| here != there) {
            Some((what, here, there)) => Err(JoinError::Differs { what, here, there }),
            None => Ok(()),
        }
    }

    /// Tells a worker and those that may hand off with it how they reach each other.
    fn introduce(&self, new: Known) {
        let mut workers = self.lock();
        for other in workers.iter().filter(|other| meet(other, &new)) {
            tell(&other.port, &new.endpoint);
            tell(&new.port, &other.endpoint);
        }
        workers.push(new);
    }

    fn part(&self, replica: ReplicaId) {
        let mut workers = self.lock();
        let Some(at) = workers.iter().position(|known| known.endpoint.replica == replica) else { return };
        let gone = workers.swap_remove(at);
        for other in workers.iter().filter(|other| meet(other, &gone)) {
            if let Some(port) = other.port.remote() {
                port.pass_on(wire::endpoint_gone(replica, gone.endpoint.life));
            }
        }
    }
}

/// May one compute for the other?
fn meet(one: &Known, other: &Known) -> bool {
    (one.role_code == PREFILL) != (other.role_code == PREFILL)
}

fn tell(port: &ReplicaPort, endpoint: &Endpoint) {
    if let Some(port) = port.remote()
        && port.link().send(wire::endpoint(endpoint)).is_err()
    {
        port.link().close();
    }
}

/// Takes a worker in: checks what it says of itself, and has a thread read the rest.
pub(crate) fn join(wiring: &Arc<Wiring>, conversation: Conversation) -> Result<Joined, JoinError> {
    let Some(joins) = wiring.joins.as_ref().filter(|_| !wiring.gateway.is_closed()) else {
        return Err(JoinError::NotRunning);
    };
    let greeting = WorkerGreeting::read(conversation.greeting());
    let greeting = greeting.map_err(|error| JoinError::Greeting(error.to_string()))?;
    joins.fit(&greeting)?;
    let (replica, peer) = (greeting.facts.replica, conversation.peer());
    let before = {
        let workers = joins.lock();
        let before = workers.iter().find(|known| known.endpoint.replica == replica).cloned();
        if before.is_none() && workers.len() >= joins.workers_max {
            return Err(JoinError::Full(workers.len()));
        }
        before
    };
    if let Some(before) = before {
        if before.peer.id != peer.id {
            return Err(JoinError::Taken { replica: replica.0 });
        }
        // A later session of the same worker: the earlier one is over, whether it knows or not.
        before.port.close();
    }
    let port = RemotePort::new(replica, conversation.link(), wiring.clock);
    let port = Arc::new(ReplicaPort::Remote(port));
    let known = Known { peer, role_code: greeting.facts.role_code, endpoint: greeting.endpoint, port };
    let epoch = greeting.facts.epoch;
    let reader = Reader { wiring: Arc::clone(wiring), replica, known, conversation, up: None };
    let (tell_end, ended) = oneshot::channel();
    std::thread::Builder::new().name(format!("penstock-link-{replica}")).spawn(move || {
        let why = reader.run();
        // Whoever joined it may not care.
        let _ = tell_end.send(why);
    })?;
    Ok(Joined { replica, epoch, ended })
}

/// Reads what one worker says, until the session is over.
struct Reader {
    wiring: Arc<Wiring>,
    replica: ReplicaId,
    known: Known,
    conversation: Conversation,
    /// The epoch that the gateway believes to be up.
    up: Option<ReplicaEpoch>,
}

impl Reader {
    fn run(mut self) -> Ended {
        let link = self.conversation.link();
        if self.enter() {
            while let Some(body) = self.conversation.receive_blocking() {
                let now = self.wiring.clock.now();
                let handled = ToGateway::read(&body, now).map_err(|error| error.to_string());
                if let Err(why) = handled.and_then(|said| self.hear(said)) {
                    tracing::error!(
                        replica = self.replica.0,
                        why,
                        "a worker's message makes no sense: its session ends"
                    );
                    link.close();
                    break;
                }
            }
            self.leave();
        }
        link.close();
        let why = link.ended().unwrap_or(Ended::Closed);
        tracing::warn!(replica = self.replica.0, %why, "a worker has left");
        why
    }

    /// Takes the place of an earlier session, once that has left it.
    fn enter(&self) -> bool {
        let link = self.conversation.link();
        while !self.wiring.replicas.add(self.replica, Arc::clone(&self.known.port)) {
            if link.ended().is_some() || self.wiring.gateway.is_closed() {
                return false;
            }
            std::thread::sleep(std::time::Duration::from_millis(5));
        }
        if let Some(joins) = &self.wiring.joins {
            joins.introduce(self.known.clone());
        }
        true
    }

    fn leave(&mut self) {
        if let Some(epoch) = self.up.take() {
            self.down(epoch, false);
        }
        self.wiring.board.forget_replica(self.replica);
        if let Some(joins) = &self.wiring.joins {
            joins.part(self.replica);
        }
        self.wiring.replicas.remove(self.replica);
    }

    fn hear(&mut self, said: ToGateway) -> Result<(), String> {
        let replica = self.replica;
        match said {
            ToGateway::Up(facts) => self.came_up(facts)?,
            ToGateway::Said { epoch, messages } => {
                for message in &messages {
                    match message {
                        FromReplica::Report(report) => {
                            self.wiring.board.update_replica(replica, |status| status.load = report.load);
                        }
                        FromReplica::Refuse { request, attempt, .. } => _ = self.forget(*request, *attempt),
                        _ => {}
                    }
                }
                self.push(gateway_loop::REPLICAS, GatewayWake::Replica { replica, epoch, messages });
            }
            ToGateway::Turn { epoch, items } => {
                let items = items.into_iter().filter_map(|item| self.whole(item)).collect();
                self.turn(epoch, items);
            }
            ToGateway::Down { epoch, lost } => {
                if self.up == Some(epoch) {
                    self.up = None;
                    self.down(epoch, lost);
                }
            }
            ToGateway::Draining { epoch } => {
                self.push(gateway_loop::CONTROL, GatewayWake::ReplicaDrain { replica, epoch });
            }
            ToGateway::Word { to, body } => {
                // One that has gone hears nothing; words are said again.
                if let Some(port) = self.wiring.replica(to.replica)
                    && let Some(port) = port.remote()
                {
                    port.pass_on(body);
                }
            }
        }
        Ok(())
    }

    fn came_up(&mut self, facts: ReplicaFacts) -> Result<(), String> {
        if facts.replica != self.replica {
            return Err(format!("it greeted as replica {} and comes up as {}", self.replica, facts.replica));
        }
        if let Some(epoch) = self.up.take() {
            self.down(epoch, false);
        }
        self.up = Some(facts.epoch);
        self.wiring.board.know_replica(ReplicaStatus {
            replica: facts.replica,
            epoch: facts.epoch,
            state: ReplicaState::Ready,
            load: Load::default(),
            generation: Generation(0),
            slots: facts.slots,
            block_size_tokens: self.wiring.joins.as_ref().map_or(0, |joins| joins.sizes.block_size_tokens),
            context_tokens_max: facts.context_tokens_max,
        });
        tracing::info!(replica = self.replica.0, epoch = facts.epoch.0, "a worker's replica is ready");
        self.push(gateway_loop::CONTROL, GatewayWake::ReplicaUp(facts));
        Ok(())
    }

    /// This epoch is over. Comes back once the gateway knows: what the next epoch says must not overtake that.
    fn down(&self, epoch: ReplicaEpoch, lost: bool) {
        let state = if lost { ReplicaState::Lost } else { ReplicaState::Frozen };
        self.wiring.board.update_replica(self.replica, |status| {
            status.state = state;
            status.load = Load::default();
        });
        self.turn(epoch, vec![TurnItem::Down { lost: false }]);
        if let Some(port) = self.known.port.remote() {
            port.await_settled(epoch, || self.wiring.gateway.is_closed() || self.wiring.outputs.is_closed());
        }
    }

    /// What is said of a request that the worker was not told of, or of another attempt of it, is nobody's.
    fn whole(&self, item: RemoteItem) -> Option<TurnItem> {
        let port = self.known.port.remote()?;
        match item {
            RemoteItem::Whole(item) => {
                let (TurnItem::Tokens { seq, attempt, .. } | TurnItem::SequenceEnded { seq, attempt, .. }) = &item
                else {
                    return None;
                };
                let is_its = port.was_told(seq.request, *attempt);
                if !is_its {
                    self.wiring.metrics.stale("gateway");
                }
                is_its.then_some(item)
            }
            RemoteItem::Ended { request, attempt, outcome, usage } => {
                let settled = Some(port.forget(request, attempt)?);
                Some(TurnItem::Ended { request, settled, attempt, outcome, usage })
            }
        }
    }

    fn forget(&self, request: penstock_base::RequestId, attempt: u16) -> Option<Arc<AtomicU32>> {
        self.known.port.remote()?.forget(request, attempt)
    }

    /// Waits while the gateway is far behind; fails only when its loop has ended.
    fn push(&self, lane: crate::mailbox::Lane, wake: GatewayWake) {
        let _ = self.wiring.gateway.push_waiting(lane, wake);
    }

    fn turn(&self, epoch: ReplicaEpoch, items: Vec<TurnItem>) {
        let turn = Turn { replica: self.replica, epoch, items };
        let _ = self.wiring.outputs.push_waiting(outputs::TURNS, OutputWake::Turn(turn));
    }
}
