//! Where a replica is handed things: its mailbox in this process, or the conversation with its worker.

use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, RwLock, Weak};
use std::time::Duration as StdDuration;

use bytes::Bytes;
use penstock_base::{ReplicaEpoch, ReplicaId, RequestId};
use penstock_control::{Link, NotSent};
use penstock_sched::handoff::Order;
use penstock_sched::message::ToReplica;

use super::wire;
use crate::clock::Clock;
use crate::context::RequestContext;
use crate::limits::CONTEXTS_SWEEP;
use crate::mailbox::{Lane, Mailbox, PushError};
use crate::replica_wake::ReplicaWake;

/// All replicas that this process may hand something to.
#[derive(Debug)]
pub(crate) struct Replicas {
    /// Those of this process, by index.
    locals: Box<[ReplicaId]>,
    ports: RwLock<HashMap<ReplicaId, Arc<ReplicaPort>>>,
}

impl Replicas {
    /// With those of this process.
    pub fn new(locals: impl IntoIterator<Item = (ReplicaId, Mailbox<ReplicaWake>)>) -> Self {
        let ports: Vec<_> = locals.into_iter().map(|(id, box_)| (id, Arc::new(ReplicaPort::Local(box_)))).collect();
        Self { locals: ports.iter().map(|(id, _)| *id).collect(), ports: RwLock::new(ports.into_iter().collect()) }
    }

    /// The replicas of this process, by index.
    pub fn locals(&self) -> &[ReplicaId] {
        &self.locals
    }

    /// One of them.
    pub fn get(&self, replica: ReplicaId) -> Option<Arc<ReplicaPort>> {
        self.ports.read().unwrap_or_else(PoisonError::into_inner).get(&replica).cloned()
    }

    /// One of this process, by index.
    pub fn local(&self, index: u32) -> Option<Arc<ReplicaPort>> {
        self.get(*self.locals.get(index as usize)?)
    }

    /// Every one.
    pub fn all(&self) -> Vec<Arc<ReplicaPort>> {
        self.ports.read().unwrap_or_else(PoisonError::into_inner).values().cloned().collect()
    }

    /// A worker has come. False when there is one of this id.
    pub fn add(&self, replica: ReplicaId, port: Arc<ReplicaPort>) -> bool {
        let mut ports = self.ports.write().unwrap_or_else(PoisonError::into_inner);
        let is_new = !ports.contains_key(&replica);
        if is_new {
            ports.insert(replica, port);
        }
        is_new
    }

    /// A worker has gone.
    pub fn remove(&self, replica: ReplicaId) {
        self.ports.write().unwrap_or_else(PoisonError::into_inner).remove(&replica);
    }
}

/// See the module.
pub(crate) enum ReplicaPort {
    /// A loop of this process.
    Local(Mailbox<ReplicaWake>),
    /// A worker's.
    Remote(RemotePort),
}

impl fmt::Debug for ReplicaPort {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Local(_) => f.write_str("Local"),
            Self::Remote(port) => port.fmt(f),
        }
    }
}

impl ReplicaPort {
    /// Hands `wake` in unless there is no room. Never waits.
    pub fn try_push(&self, lane: Lane, wake: ReplicaWake) -> Result<(), PushError<ReplicaWake>> {
        match self {
            Self::Local(mailbox) => mailbox.try_push(lane, wake),
            Self::Remote(port) => port.hand_over(wake),
        }
    }

    /// Hands `wake` in, in place of one of its lane that still waits.
    pub fn push_latest(&self, lane: Lane, wake: ReplicaWake) -> Result<(), PushError<ReplicaWake>> {
        match self {
            Self::Local(mailbox) => mailbox.push_latest(lane, wake),
            Self::Remote(port) => port.hand_over(wake),
        }
    }

    /// The mailbox of a loop of this process.
    pub fn local(&self) -> Option<&Mailbox<ReplicaWake>> {
        match self {
            Self::Local(mailbox) => Some(mailbox),
            Self::Remote(_) => None,
        }
    }

    /// The conversation with a worker.
    pub fn remote(&self) -> Option<&RemotePort> {
        match self {
            Self::Local(_) => None,
            Self::Remote(port) => Some(port),
        }
    }

    /// Takes nothing any more.
    pub fn close(&self) {
        match self {
            Self::Local(mailbox) => mailbox.close(),
            Self::Remote(port) => port.link.close(),
        }
    }
}

/// The gateway's end of the conversation with one worker.
#[derive(Debug)]
pub(crate) struct RemotePort {
    replica: ReplicaId,
    link: Link,
    clock: Clock,
    /// Requests that the worker was told of, as long as anybody needs what is known of them.
    contexts: Mutex<HashMap<RequestId, Weak<RequestContext>>>,
    /// The last epoch of which the gateway knows that it is over.
    settled: Mutex<Option<ReplicaEpoch>>,
    told: Condvar,
}

impl RemotePort {
    pub fn new(replica: ReplicaId, link: Link, clock: Clock) -> Self {
        Self { replica, link, clock, contexts: Mutex::default(), settled: Mutex::default(), told: Condvar::new() }
    }

    pub fn link(&self) -> &Link {
        &self.link
    }

    /// What is known of a request that the worker was told of.
    pub fn context(&self, request: RequestId) -> Option<Arc<RequestContext>> {
        self.contexts().get(&request).and_then(Weak::upgrade)
    }

    /// The worker is done with a request.
    pub fn forget(&self, request: RequestId) {
        self.contexts().remove(&request);
    }

    /// Waits until the gateway knows that `epoch` is over. False when `given_up` says so before.
    pub fn await_settled(&self, epoch: ReplicaEpoch, given_up: impl Fn() -> bool) -> bool {
        let mut settled = self.settled.lock().unwrap_or_else(PoisonError::into_inner);
        while settled.is_none_or(|settled| settled < epoch) {
            if given_up() {
                return false;
            }
            let waited = self.told.wait_timeout(settled, StdDuration::from_millis(20));
            settled = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        true
    }

    /// Sends one message that is bytes already. What may be lost is lost where there is no room.
    pub fn pass_on(&self, body: Bytes) {
        let _ = self.link.send(body);
    }

    fn contexts(&self) -> MutexGuard<'_, HashMap<RequestId, Weak<RequestContext>>> {
        self.contexts.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn hand_over(&self, wake: ReplicaWake) -> Result<(), PushError<ReplicaWake>> {
        let body = match &wake {
            // Each process has policies of its own.
            ReplicaWake::Gateway { message: ToReplica::Policies(_), .. } | ReplicaWake::Policies(_) => return Ok(()),
            ReplicaWake::Gateway { epoch, message, placement, .. } => {
                self.note(message, placement.as_ref().map(|placement| &placement.context));
                wire::message(self.clock.now(), *epoch, message, placement.as_ref())
            }
            ReplicaWake::Feedback { epoch, inputs } => wire::feedback(*epoch, inputs),
            ReplicaWake::Settled { epoch } => {
                *self.settled.lock().unwrap_or_else(PoisonError::into_inner) = Some(*epoch);
                self.told.notify_all();
                return Ok(());
            }
            ReplicaWake::Freeze { .. } => {
                tracing::error!(replica = self.replica.0, "a worker is told nothing any more: its session ends");
                self.link.close();
                return Ok(());
            }
            ReplicaWake::Shutdown => {
                self.link.close();
                return Ok(());
            }
            _ => return Ok(()),
        };
        match self.link.send(body) {
            Ok(()) => Ok(()),
            Err(NotSent::Over) => Err(PushError::Closed(wake)),
            Err(why) => {
                // Whoever must not lose it ends the session.
                tracing::warn!(replica = self.replica.0, %why, "a worker does not confirm what it is told");
                Err(PushError::Full(wake))
            }
        }
    }

    fn note(&self, message: &ToReplica, context: Option<&Arc<RequestContext>>) {
        let mut contexts = self.contexts();
        if let Some(context) = context {
            contexts.insert(context.request(), Arc::downgrade(context));
        }
        // A request that left for another replica is not told of here: what nobody holds any more goes.
        let closes = matches!(message, ToReplica::Prefill(ordered) if matches!(ordered.order, Order::Close { .. }));
        if closes || contexts.len() >= CONTEXTS_SWEEP {
            contexts.retain(|_, context| context.strong_count() > 0);
        }
    }
}
