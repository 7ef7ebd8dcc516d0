//! Is the state sound? Every counter against a walk, every request in exactly one place.

use penstock_base::ClassRank;

use super::State;
use super::request::{Compute, Place, Request};
use super::table::NONE;

impl State {
    /// The full walk. Costs time in the size of the state; free of effects.
    pub(super) fn check(&self) -> Result<(), &'static str> {
        self.check_counts()?;
        self.requests.check(&self.config)?;
        self.flows.check(&self.requests.inner)?;
        self.ledger.check()?;
        self.replicas.check(&self.requests.inner)?;
        self.outputs.check()?;
        self.directory.check(|replica| self.replicas.table.get(replica).is_some_and(|at| at.cache.complete))?;
        self.check_holdings()?;
        self.check_handoffs()?;
        self.check_waiting()?;
        self.check_owners()
    }

    /// The request in a slot that some structure names.
    pub(super) fn live(&self, slot: u32) -> Result<&Request, &'static str> {
        self.requests.table.get(slot).ok_or("places: a structure names a request that is not there")
    }

    /// Lists and counters of everything that waits equal a walk.
    pub(super) fn check_waiting(&self) -> Result<(), &'static str> {
        let (mut requests, mut tokens, mut need_blocks) = (0, 0, 0);
        for class in ClassRank::all() {
            let queue = &self.queue.classes[class.index()];
            queue.list.check(&self.requests.outer)?;
            let (mut class_tokens, mut class_need, mut last) = (0, 0, 0);
            for slot in queue.list.iter(&self.requests.outer) {
                let request = self.live(slot)?;
                if request.class != class || !request.place.is_waiting() || request.wait.ticket <= last {
                    return Err("queue: a class list holds a stranger, or is out of order");
                }
                last = request.wait.ticket;
                class_tokens += u64::from(request.manifest.input_tokens);
                class_need += request.need_blocks(self.config.block_size_tokens);
            }
            if (class_tokens, class_need) != (queue.tokens, queue.need_blocks) {
                return Err("queue: a class's sums differ from the walk");
            }
            requests += queue.list.len;
            tokens += class_tokens;
            need_blocks += class_need;
        }
        if (requests, tokens, need_blocks) != (self.queue.requests, self.queue.tokens, self.queue.need_blocks) {
            return Err("queue: the sums differ from the walk");
        }
        // Requests that came back from a lost replica may stand above the bound that arrivals are held to.
        if requests > self.config.queue_requests_max + self.config.running_requests_max {
            return Err("queue: more than the bound");
        }
        self.check_places()
    }

    /// Every request is in exactly the one structure that its place names.
    fn check_places(&self) -> Result<(), &'static str> {
        let mut found = [0u32; 3];
        for list in [(0, &self.held), (1, &self.deferred)] {
            let links = if list.0 == 0 { &self.requests.inner } else { &self.requests.outer };
            list.1.check(links)?;
            for slot in list.1.iter(links) {
                let place = self.live(slot)?.place;
                if (place == Place::Held) != (list.0 == 0) || (place == Place::Deferred) != (list.0 == 1) {
                    return Err("places: a stranger among the held or deferred");
                }
            }
            found[list.0] = list.1.len;
        }
        let mut queued = 0;
        for (_, flow) in self.flows.table.iter() {
            let mut last = 0;
            for slot in flow.queue.iter(&self.requests.inner) {
                let request = self.live(slot)?;
                if request.place != Place::Queued || request.wait.ticket <= last {
                    return Err("places: a flow's queue holds a stranger, or is out of order");
                }
                last = request.wait.ticket;
                queued += 1;
            }
        }
        for (replica, at) in self.replicas.table.iter() {
            for slot in at.reserved.as_slice() {
                if self.requests.table.get(*slot).map(|request| request.place) != Some(Place::Reserved { replica }) {
                    return Err("places: a stranger among the reserved");
                }
                found[2] += 1;
            }
            let withheld = self.requests.table.get(at.withheld_for).map(|request| request.wait.withheld);
            if at.withheld_for != NONE && withheld != Some(replica) {
                return Err("places: credit is withheld for nobody");
            }
        }
        let mut counted = [0u32; 4];
        for (_, request) in self.requests.table.iter() {
            let terminal = request.compute.is_terminal();
            let (index, legal) = match request.place {
                Place::Held => (0, request.compute == Compute::Queued),
                Place::Deferred => (1, request.compute == Compute::Accepted),
                Place::Reserved { .. } => (2, request.compute == Compute::Queued),
                Place::Queued => (3, request.compute == Compute::Queued),
                Place::Running { .. } => (4, matches!(request.compute, Compute::Prefilling | Compute::Decoding)),
                Place::Settling { .. } => (4, terminal),
            };
            if !legal || request.outcome.is_some() != terminal {
                return Err("places: compute state and place disagree");
            }
            if let Some(count) = counted.get_mut(index) {
                *count += 1;
            }
        }
        if counted != [found[0], found[1], found[2], queued] {
            return Err("places: a request is not where its place says");
        }
        Ok(())
    }

    /// Counters of tenants and flows equal a walk over requests.
    pub(super) fn check_owners(&self) -> Result<(), &'static str> {
        let (mut live, mut reserved, mut waiting, mut running) = (0u64, 0u128, 0u64, 0u64);
        for (_, request) in self.requests.table.iter() {
            let flowless = request.place == Place::Deferred;
            let flow = self.flows.table.get(request.flow);
            if !self.ledger.knows(request.tenant) || flow.is_none() != flowless {
                return Err("owners: a request without its tenant or flow");
            }
            live += 1;
            reserved += u128::from(request.reserved_tokens);
            waiting += u64::from(request.place.is_waiting());
            running += u64::from(request.place.at_replica().is_some());
        }
        let mut tenants = (0u64, 0u128, 0u64, 0u64);
        for (_, tenant) in self.ledger.iter() {
            tenants.0 += u64::from(tenant.live_requests);
            tenants.1 += u128::from(tenant.reserved_tokens);
            tenants.2 += u64::from(tenant.queued_requests);
            tenants.3 += u64::from(tenant.running_requests);
        }
        let mut flows = (0u64, 0u64);
        for (_, flow) in self.flows.table.iter() {
            flows.0 += u64::from(flow.waiting_requests);
            flows.1 += u64::from(flow.running_requests);
        }
        if tenants != (live, reserved, waiting, running) || flows != (waiting, running) {
            return Err("owners: tenants' or flows' sums differ from the walk over requests");
        }
        Ok(())
    }
}
