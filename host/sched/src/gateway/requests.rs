//! Every live request, with the links of the lists it stands in and one timer each; and the ended ones whose delivery goes on.

use penstock_base::limits::FINISHED_REQUESTS_KEPT;
use penstock_base::{Instant, RequestId};

use super::heap::SlotHeap;
use super::io::GatewayConfig;
use super::list::Links;
use super::request::{Delivery, Place, Request};
use super::table::{NONE, Table};

/// See the module.
#[derive(Clone, Debug)]
pub(super) struct Requests {
    /// By slot; never evicted.
    pub table: Table<RequestId, Request>,
    /// Links of class lists (waiting) and of the list of deferred requests.
    pub outer: Links,
    /// Links of flow queues, of the list of held requests, and of replicas' lists.
    pub inner: Links,
    /// When each request must be looked at again.
    timers: SlotHeap,
    /// Per-token targets of dispatched requests, smallest first.
    pub tpot: SlotHeap,
    /// Ended requests whose delivery has not ended; the longest ended makes room.
    pub finished: Table<RequestId, Delivery>,
}

impl Requests {
    /// None, with room for everything that may be live at once.
    pub fn new(config: &GatewayConfig) -> Self {
        let table = Table::with_capacity(Self::capacity(config));
        let slots = table.capacity();
        Self {
            table,
            outer: Links::with_capacity(slots),
            inner: Links::with_capacity(slots),
            timers: SlotHeap::with_capacity(slots),
            tpot: SlotHeap::with_capacity(slots),
            finished: Table::with_capacity(FINISHED_REQUESTS_KEPT),
        }
    }

    /// Waiting, deferred and dispatched together, and the one that arrives.
    pub fn capacity(config: &GatewayConfig) -> usize {
        let places = [config.queue_requests_max, config.deferred_requests_max, config.running_requests_max];
        places.iter().map(|places| *places as usize).sum::<usize>() + 1
    }

    /// Sets the timer of a request from its state.
    pub fn retime(&mut self, slot: u32, config: &GatewayConfig) {
        let request = &self.table[slot];
        self.timers.set(slot, due(request, config).0, request.manifest.request.0);
    }

    /// The next timer that has come.
    pub fn due(&self, now: Instant) -> Option<u32> {
        self.timers.first().filter(|(at, _)| *at <= now.0).map(|(_, slot)| slot)
    }

    /// When the next timer comes.
    pub fn next_due(&self) -> Instant {
        self.timers.first().map_or(Instant::NEVER, |(at, _)| Instant(at))
    }

    /// Forgets a request that holds nothing; while its delivery goes on, that is still followed.
    pub fn forget(&mut self, slot: u32) {
        self.timers.remove(slot);
        self.tpot.remove(slot);
        let Some((id, request)) = self.table.remove(slot) else { return };
        if !request.delivery.is_terminal()
            && let Some(inserted) = self.finished.insert(id, request.delivery)
        {
            self.finished.unpin(inserted.slot);
        }
    }

    /// Timers are those that the states give, and targets are listed for dispatched requests only.
    pub fn check(&self, config: &GatewayConfig) -> Result<(), &'static str> {
        self.table.check()?;
        self.finished.check()?;
        let mut timed = 0;
        for (slot, request) in self.table.iter() {
            let expected = due(request, config);
            timed += usize::from(expected != Instant::NEVER);
            if self.timers.key(slot).map_or(Instant::NEVER, Instant) != expected {
                return Err("requests: a timer is not the one its state gives");
            }
            if request.wait.withheld != NONE && !request.place.is_waiting() {
                return Err("requests: credit is withheld for a request that does not wait");
            }
        }
        if timed == self.timers.len() { Ok(()) } else { Err("requests: a timer of nobody") }
    }
}

/// When a request must be looked at again.
fn due(request: &Request, config: &GatewayConfig) -> Instant {
    let deadline = request.manifest.deadline;
    match request.place {
        Place::Settling { .. } => Instant::NEVER,
        Place::Running { .. } => deadline,
        Place::Deferred => deadline.min(request.until),
        Place::Queued => deadline.min(queue_end(request, config)),
        Place::Held | Place::Reserved { .. } => {
            let left = penstock_base::Duration(
                penstock_base::limits::IDLE_HOLD_MAX.0.saturating_sub(request.wait.held_idle.0),
            );
            let idle_end = request.wait.idle_since + left;
            deadline.min(queue_end(request, config)).min(request.until).min(idle_end)
        }
    }
}

/// When its stay in the queue has lasted as long as it may.
pub(super) fn queue_end(request: &Request, config: &GatewayConfig) -> Instant {
    let left = config.queue_wait_max.0.saturating_sub(request.wait.before.0);
    request.wait.since + penstock_base::Duration(left)
}
