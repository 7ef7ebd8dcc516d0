//! Where a replica is handed things: its mailbox in this process, or the conversation with its worker.

use std::collections::HashMap;
use std::fmt;
use std::sync::atomic::AtomicU32;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, RwLock};
use std::time::Duration as StdDuration;

use bytes::Bytes;
use penstock_base::{ReplicaEpoch, ReplicaId, RequestId};
use penstock_control::{Link, NotSent};
use penstock_sched::handoff::Order;
use penstock_sched::message::{Ordered, ToReplica};

use super::wire;
use crate::clock::Clock;
use crate::context::RequestContext;
use crate::limits::TOLD_OF_SWEEP;
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

#[expect(clippy::result_large_err, reason = "what finds no room is rare, and goes back as it came")]
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

/// What stays known of a request that a worker was told of.
#[derive(Debug)]
struct ToldOf {
    attempt: u16,
    /// What its client got in all, once its stream has ended.
    settled: Arc<AtomicU32>,
}

/// The gateway's end of the conversation with one worker.
#[derive(Debug)]
pub(crate) struct RemotePort {
    replica: ReplicaId,
    link: Link,
    clock: Clock,
    /// Requests that the worker was told of, until it is done with them.
    told_of: Mutex<HashMap<RequestId, ToldOf>>,
    /// The last epoch of which the gateway knows that it is over.
    settled: Mutex<Option<ReplicaEpoch>>,
    told: Condvar,
}

impl RemotePort {
    pub fn new(replica: ReplicaId, link: Link, clock: Clock) -> Self {
        Self { replica, link, clock, told_of: Mutex::default(), settled: Mutex::default(), told: Condvar::new() }
    }

    pub fn link(&self) -> &Link {
        &self.link
    }

    /// Was the worker told of this attempt?
    pub fn was_told(&self, request: RequestId, attempt: u16) -> bool {
        self.told_of().get(&request).is_some_and(|told| told.attempt == attempt)
    }

    /// The worker is done with this attempt. What its client got in all.
    pub fn forget(&self, request: RequestId, attempt: u16) -> Option<Arc<AtomicU32>> {
        let mut told_of = self.told_of();
        told_of.get(&request).filter(|told| told.attempt == attempt)?;
        told_of.remove(&request).map(|told| told.settled)
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

    fn told_of(&self) -> MutexGuard<'_, HashMap<RequestId, ToldOf>> {
        self.told_of.lock().unwrap_or_else(PoisonError::into_inner)
    }

    #[expect(clippy::result_large_err, reason = "as above")]
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
        let attempt = match message {
            ToReplica::Dispatch(dispatch) => Some(dispatch.attempt),
            ToReplica::Prefill(Ordered { order: Order::Begin(open), .. }) => Some(open.attempt),
            ToReplica::Decode(Ordered { order: Order::Begin(reserve), .. }) => Some(reserve.attempt),
            _ => None,
        };
        let (Some(context), Some(attempt)) = (context, attempt) else { return };
        let mut told_of = self.told_of();
        if told_of.len() >= TOLD_OF_SWEEP {
            // Those that went on elsewhere are not told to be over here: what nobody else holds any more goes.
            told_of.retain(|_, told| Arc::strong_count(&told.settled) > 1);
        }
        told_of.insert(context.request(), ToldOf { attempt, settled: context.settled() });
    }
}
