//! What the loops share: mailboxes, the clock, metrics and the board that status is read from.
//!
//! Who may wait for whom: a replica loop waits for room at the output loop and at the gateway loop, the output loop waits for room at the
//! gateway loop, and the gateway loop waits for nobody. A mover waits for room at its replica's loop, which never waits for a mover. There is no circle, so nothing can lock up.

use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use penstock_base::{CancelCause, Instant, ReplicaId, RequestId};
use penstock_sched::gateway::DeliveryEvent;

use crate::clock::Clock;
use crate::config::EngineLimits;
use crate::gateway_loop::{self, GatewayWake};
use crate::handoff::{MoverWake, Movers};
use crate::journal::Journal;
use crate::limits::BEAT_MAX;
use crate::mailbox::{Mailbox, PushError};
use crate::metrics::Metrics;
use crate::outputs::OutputWake;
use crate::permit::Permits;
use crate::policies::machine::PolicyPlane;
use crate::remote::{GatewayLinks, Joins, ReplicaPort, Replicas};
use crate::status::{QueueStatus, ReplicaState, ReplicaStatus, Status};

/// Shared by every loop and by the engine's handle.
pub(crate) struct Wiring {
    pub clock: Clock,
    pub metrics: Arc<Metrics>,
    pub board: Board,
    pub limits: EngineLimits,
    pub policies: PolicyPlane,
    /// Where the machines write down what they do.
    pub journal: Option<Journal>,
    /// Output is kept, since a request may go on at another replica.
    pub keeps_output: bool,
    /// Longest sequence that every replica takes.
    pub context_tokens_max: u32,
    pub gateway: Mailbox<GatewayWake>,
    pub replicas: Replicas,
    /// At a worker: the gateways before it. Its own gateway mailbox and output mailbox are closed.
    pub links: Option<GatewayLinks>,
    /// At a gateway: the workers behind it.
    pub joins: Option<Joins>,
    /// Of the replicas' movers; none without hand-offs.
    pub movers: Movers,
    pub outputs: Mailbox<OutputWake>,
}

impl Wiring {
    /// Is there a gateway machine in this process?
    pub fn has_gateway(&self) -> bool {
        self.links.is_none()
    }

    /// Where one replica is handed things.
    pub fn replica(&self, replica: ReplicaId) -> Option<Arc<ReplicaPort>> {
        self.replicas.get(replica)
    }

    /// The mailbox of the mover of one replica of this process.
    pub fn mover(&self, replica: ReplicaId) -> Option<&Mailbox<MoverWake>> {
        let index = self.replicas.locals().iter().position(|local| *local == replica)?;
        self.movers.mailboxes.get(index)
    }

    /// Something broke that no replica can be blamed for: every loop ends, and with it every stream.
    pub fn die(&self) {
        self.board.dead.store(true, Ordering::Release);
        self.gateway.close();
        self.replicas.all().iter().for_each(|port| port.close());
        if let Some(links) = &self.links {
            links.close();
        }
        self.movers.mailboxes.iter().for_each(Mailbox::close);
        self.outputs.close();
    }

    /// Asks the gateway to end a request. False when it could not be told: its lane is full, or its loop has ended and everything with it.
    pub fn cancel(&self, request: RequestId, cause: CancelCause) -> bool {
        let wake = GatewayWake::Cancel { request, cause };
        match self.gateway.try_push(gateway_loop::CANCELS, wake) {
            Ok(()) => true,
            Err(PushError::Full(_)) => {
                tracing::warn!(
                    request = request.0,
                    ?cause,
                    "the gateway is behind with cancels: one is told again later"
                );
                false
            }
            Err(PushError::Closed(_)) => {
                tracing::debug!(request = request.0, ?cause, "a cancel came after the gateway loop's end");
                false
            }
        }
    }
}

impl crate::stream::ClientSide for Wiring {
    fn cancel(&self, request: RequestId, cause: CancelCause) -> bool {
        Wiring::cancel(self, request, cause)
    }

    fn delivery(&self, request: RequestId, event: DeliveryEvent) {
        // News only: nothing that is computed depends on it, so it is left out when the loop is far behind.
        let _ = self.gateway.try_push(gateway_loop::DELIVERY, GatewayWake::Delivery { request, event });
    }
}

/// State that probes and gauges read. Written by the loops, read by anyone.
#[derive(Debug)]
pub(crate) struct Board {
    /// The gateway loop ended by a panic.
    pub dead: AtomicBool,
    /// New work is refused.
    pub draining: AtomicBool,
    /// There is a gateway loop here, which must turn.
    has_gateway: bool,
    /// The gateway's watchdog sees no progress.
    pub stuck: AtomicBool,
    /// When the gateway loop last turned, in nanoseconds of the clock.
    pub beat_ns: AtomicU64,
    /// Requests that the gateway has and no replica.
    pub waiting_requests: AtomicI64,
    /// Their prompt tokens.
    pub waiting_tokens: AtomicI64,
    /// Requests placed and not over.
    pub placed_requests: AtomicUsize,
    /// Unread bytes in clients' streams.
    pub send_buffer_bytes: Arc<AtomicI64>,
    /// Submissions in flight.
    pub permits: Arc<Permits>,
    /// By replica id.
    pub replicas: Mutex<Vec<ReplicaStatus>>,
}

impl Board {
    /// Of an engine that has not started.
    pub fn new(permits: Arc<Permits>, replicas: Vec<ReplicaStatus>, has_gateway: bool) -> Self {
        Self {
            dead: AtomicBool::new(false),
            draining: AtomicBool::new(false),
            has_gateway,
            stuck: AtomicBool::new(false),
            beat_ns: AtomicU64::new(0),
            waiting_requests: AtomicI64::new(0),
            waiting_tokens: AtomicI64::new(0),
            placed_requests: AtomicUsize::new(0),
            send_buffer_bytes: Arc::default(),
            permits,
            replicas: Mutex::new(replicas),
        }
    }

    /// Requests came to or left the gateway's queue, with their prompt tokens.
    pub fn waiting(&self, requests: i64, tokens: i64) {
        self.waiting_requests.fetch_add(requests, Ordering::Relaxed);
        self.waiting_tokens.fetch_add(tokens, Ordering::Relaxed);
    }

    /// Changes what is known of one replica.
    pub fn update_replica(&self, replica: ReplicaId, change: impl FnOnce(&mut ReplicaStatus)) {
        let mut replicas = self.replicas.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(status) = replicas.iter_mut().find(|status| status.replica == replica) {
            change(status);
        }
    }

    /// A worker's replica is there, in this state.
    pub fn know_replica(&self, status: ReplicaStatus) {
        let mut replicas = self.replicas.lock().unwrap_or_else(PoisonError::into_inner);
        replicas.retain(|known| known.replica != status.replica);
        replicas.push(status);
        replicas.sort_unstable_by_key(|known| known.replica);
    }

    /// A worker's replica has left.
    pub fn forget_replica(&self, replica: ReplicaId) {
        self.replicas.lock().unwrap_or_else(PoisonError::into_inner).retain(|known| known.replica != replica);
    }

    /// Everything at once.
    pub fn status(&self, now: Instant) -> Status {
        let mut replicas = self.replicas.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let live = !self.dead.load(Ordering::Acquire);
        let draining = self.draining.load(Ordering::Acquire);
        let beat = Instant(self.beat_ns.load(Ordering::Relaxed));
        let stuck = self.stuck.load(Ordering::Relaxed) || (self.has_gateway && now.since(beat) > BEAT_MAX);
        let held = self.permits.held();
        let serves = replicas.iter().any(|replica| replica.state == ReplicaState::Ready);
        if draining {
            let ready = replicas.iter_mut().filter(|replica| replica.state == ReplicaState::Ready);
            ready.for_each(|replica| replica.state = ReplicaState::Draining);
        }
        Status {
            ready: live && serves && !draining && !stuck,
            live,
            draining,
            stuck,
            replicas,
            queue: QueueStatus {
                waiting_requests: unsigned(&self.waiting_requests) as usize,
                waiting_tokens: unsigned(&self.waiting_tokens),
                placed_requests: self.placed_requests.load(Ordering::Relaxed),
                in_flight_requests: held.requests,
                pending_bytes: held.bytes,
                send_buffer_bytes: unsigned(&self.send_buffer_bytes) as usize,
            },
        }
    }
}

/// A count that two threads change in turn may be read in between as less than nothing.
fn unsigned(count: &AtomicI64) -> u64 {
    u64::try_from(count.load(Ordering::Relaxed)).unwrap_or(0)
}
