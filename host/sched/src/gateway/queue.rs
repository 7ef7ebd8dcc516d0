//! The queue: who waits, in which class, since when. Everything that moves a request into, out of and within the waiting places.

use penstock_base::{ClassRank, Duration, Instant};
use penstock_policy_api::{FlowActive, FlowGone as FlowGoneFact, FlowIdle};

use super::State;
use super::flows::FlowGone;
use super::list::List;
use super::request::{Compute, Place, Ranked, Wait};
use super::seats::Cx;
use super::table::NONE;

/// Waiting requests of one class.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) struct ClassQueue {
    /// By ticket, held and reserved ones included.
    pub list: List,
    /// Their input tokens.
    pub tokens: u64,
    /// Blocks that they will reserve.
    pub need_blocks: u64,
}

/// All waiting requests.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) struct Queue {
    /// By class in force.
    pub classes: [ClassQueue; ClassRank::COUNT],
    /// All of them.
    pub requests: u32,
    /// Their input tokens.
    pub tokens: u64,
    /// Blocks that they will reserve.
    pub need_blocks: u64,
    /// Ticket of the last first entry.
    pub tickets: u64,
}

impl State {
    /// Is there room in the queue for one more, of `input_tokens`?
    pub(super) fn queue_has_room(&self, input_tokens: u32) -> bool {
        self.queue.requests < self.config.queue_requests_max
            && self.queue.tokens.saturating_add(u64::from(input_tokens)) <= self.config.queue_tokens_max
    }

    /// First entry of an accepted request, in the queue's last place.
    pub(super) fn enter_queue(&mut self, slot: u32, cx: &mut Cx<'_>) {
        self.queue.tickets += 1;
        let request = &mut self.requests.table[slot];
        request.wait = Wait { ticket: self.queue.tickets, ..Wait::new(self.now) };
        let moved = request.move_to(Compute::Queued);
        debug_assert!(moved, "only an accepted request enters");
        self.wait_again(slot, cx);
    }

    /// Back from a replica, to its place.
    pub(super) fn return_to_queue(&mut self, slot: u32, cx: &mut Cx<'_>) {
        let request = &mut self.requests.table[slot];
        request.wait.since = self.now;
        request.wait.skips = 0;
        let moved = request.move_to(Compute::Queued);
        debug_assert!(moved, "only a request that may go on elsewhere comes back");
        self.wait_again(slot, cx);
    }

    fn wait_again(&mut self, slot: u32, cx: &mut Cx<'_>) {
        let block = self.config.block_size_tokens;
        let request = &mut self.requests.table[slot];
        request.place = Place::Queued;
        request.until = Instant::NEVER;
        let (class, ticket) = (request.class, request.wait.ticket);
        let (tokens, need) = (u64::from(request.manifest.input_tokens), request.need_blocks(block));
        let (flow, tenant) = (request.flow, request.tenant);

        let queue = &mut self.queue.classes[class.index()];
        let table = &self.requests.table;
        let before = queue.list.first_behind(&self.requests.outer, |other| table[other].wait.ticket > ticket);
        queue.list.insert_before(&mut self.requests.outer, slot, before);
        queue.tokens += tokens;
        queue.need_blocks += need;
        self.queue.requests += 1;
        self.queue.tokens += tokens;
        self.queue.need_blocks += need;

        let state = &mut self.flows.table[flow];
        state.waiting_requests += 1;
        state.waiting_tokens += tokens;
        self.ledger.change(tenant, |tenant| {
            tenant.queued_requests += 1;
            tenant.queued_tokens += tokens;
        });
        self.show(slot);
        self.flow_moved(flow, cx);
        self.requests.retime(slot, &self.config);
        self.wants_dispatch = true;
        self.watch.work_came(self.now);
    }

    /// Puts a waiting request into its flow's queue, by ticket.
    fn show(&mut self, slot: u32) {
        let request = &self.requests.table[slot];
        let (flow, ticket) = (request.flow, request.wait.ticket);
        let table = &self.requests.table;
        let queue = self.flows.table[flow].queue;
        let before = queue.first_behind(&self.requests.inner, |other| table[other].wait.ticket > ticket);
        self.flows.enqueue(flow, slot, before, &mut self.requests.inner);
    }

    /// Takes a waiting request out of wherever it waits, for good or for a dispatch. Its place is to be set by the caller.
    pub(super) fn leave_queue(&mut self, slot: u32) {
        self.hide(slot);
        self.end_withholding(slot);
        let now = self.now;
        let block = self.config.block_size_tokens;
        let request = &mut self.requests.table[slot];
        let sojourn = request.waited(now);
        request.wait.before = sojourn;
        request.until = Instant::NEVER;
        let (class, tenant, flow) = (request.class, request.tenant, request.flow);
        let (tokens, need) = (u64::from(request.manifest.input_tokens), request.need_blocks(block));

        let queue = &mut self.queue.classes[class.index()];
        queue.list.remove(&mut self.requests.outer, slot);
        queue.tokens -= tokens;
        queue.need_blocks -= need;
        self.queue.requests -= 1;
        self.queue.tokens -= tokens;
        self.queue.need_blocks -= need;
        let state = &mut self.flows.table[flow];
        state.waiting_requests -= 1;
        state.waiting_tokens -= tokens;
        self.ledger.change(tenant, |tenant| {
            tenant.queued_requests -= 1;
            tenant.queued_tokens -= tokens;
        });
        self.overload.left_queue(class, sojourn);
        self.capacity_freed = true;
    }

    /// Takes a waiting request out of its flow's queue, the held ones or a replica's reservations.
    fn hide(&mut self, slot: u32) {
        let request = &self.requests.table[slot];
        match request.place {
            Place::Queued => self.flows.dequeue(request.flow, slot, &mut self.requests.inner),
            Place::Held => self.held.remove(&mut self.requests.inner, slot),
            Place::Reserved { replica } => {
                self.replicas.table[replica].reserved.remove(slot);
                self.reserved_requests -= 1;
            }
            Place::Deferred | Place::Running { .. } | Place::Settling { .. } => {}
        }
        self.stop_holding(slot);
    }

    /// A waiting request is held back until `until`.
    pub(super) fn hold(&mut self, slot: u32, until: Instant) {
        self.hide(slot);
        self.held.push_back(&mut self.requests.inner, slot);
        self.start_holding(slot, Place::Held, until);
    }

    /// A waiting request waits for the next credit of `replica`, until `until`. `false`, and no change, when its list is full.
    pub(super) fn reserve(&mut self, slot: u32, replica: u32, until: Instant) -> bool {
        if self.replicas.table[replica].reserved.is_full() {
            return false;
        }
        self.hide(slot);
        self.replicas.table[replica].reserved.push(slot);
        self.reserved_requests += 1;
        self.start_holding(slot, Place::Reserved { replica }, until);
        true
    }

    /// A held or reserved request is in its flow's queue again.
    pub(super) fn unhold(&mut self, slot: u32) {
        self.hide(slot);
        self.requests.table[slot].place = Place::Queued;
        self.requests.table[slot].until = Instant::NEVER;
        self.show(slot);
        self.requests.retime(slot, &self.config);
        self.wants_dispatch = true;
    }

    fn start_holding(&mut self, slot: u32, place: Place, until: Instant) {
        let request = &mut self.requests.table[slot];
        request.place = place;
        request.until = until;
        request.wait.held_since = self.now;
        self.note_idle_of(slot);
    }

    fn stop_holding(&mut self, slot: u32) {
        let now = self.now;
        let wait = &mut self.requests.table[slot].wait;
        if wait.held_since != Instant::NEVER {
            wait.held = wait.held + now.since(wait.held_since);
            wait.held_since = Instant::NEVER;
        }
        if wait.idle_since != Instant::NEVER {
            wait.held_idle = wait.held_idle + now.since(wait.idle_since);
            wait.idle_since = Instant::NEVER;
        }
    }

    /// A new stay starts with a clean slate of rankings; time held while replicas idled counts on.
    pub(super) fn forget_ranking(&mut self, slot: u32) {
        self.requests.table[slot].wait.ranked = Ranked::default();
    }

    /// No credit is withheld for it any more.
    pub(super) fn end_withholding(&mut self, slot: u32) {
        let replica = core::mem::replace(&mut self.requests.table[slot].wait.withheld, NONE);
        if let Some(replica) = self.replicas.table.get(replica).map(|_| replica) {
            self.replicas.table[replica].withheld_for = NONE;
            self.wants_dispatch = true;
        }
    }

    /// Tells when a flow begins or ends to have something.
    pub(super) fn flow_moved(&mut self, flow: u32, cx: &mut Cx<'_>) {
        let Some(id) = self.flows.table.key(flow) else { return };
        let state = &self.flows.table[flow];
        let (tenant, class, weight_ppm) = (state.tenant, state.class, state.weight_ppm);
        if state.is_active() {
            if self.flows.wake(flow, self.now) {
                let idle_us = self.flows.table[flow].idle_before.as_us();
                let fact = FlowActive {
                    flow_id: id.0,
                    tenant_id: tenant.0,
                    class_rank: u64::from(class.get()),
                    weight_ppm,
                    idle_us,
                };
                self.tell(fact.at(self.now.as_us()), cx);
            }
        } else if self.flows.rest(flow, self.now) {
            self.tell_served_of(flow, cx);
            self.tell(FlowIdle { flow_id: id.0, tenant_id: tenant.0 }.at(self.now.as_us()), cx);
        }
    }

    /// A flow is forgotten.
    pub(super) fn flow_gone(&mut self, gone: FlowGone, cx: &mut Cx<'_>) {
        self.tell(FlowGoneFact { flow_id: gone.id.0, tenant_id: gone.tenant.0 }.at(self.now.as_us()), cx);
    }

    /// Flows that have been idle for long are forgotten.
    pub(super) fn forget_idle_flows(&mut self, cx: &mut Cx<'_>) {
        while let Some((slot, since)) = self.flows.longest_idle() {
            if since + penstock_base::limits::FLOW_GONE_AFTER > self.now {
                return;
            }
            self.tell_served_of(slot, cx);
            if let Some(gone) = self.flows.forget(slot) {
                self.flow_gone(gone, cx);
            }
        }
    }

    /// The longest wait in a class.
    pub(super) fn oldest_wait(&self, class: ClassRank) -> Duration {
        let head = self.queue.classes[class.index()].list.head;
        self.requests.table.get(head).map_or(Duration::ZERO, |request| request.waited(self.now))
    }

    /// The longest wait of all.
    pub(super) fn oldest_wait_of_all(&self) -> Duration {
        ClassRank::all().map(|class| self.oldest_wait(class)).max().unwrap_or(Duration::ZERO)
    }
}
