//! What dispatched requests hold: taken at dispatch in one place, given back in one place.

use penstock_base::{ClassRank, DispatchNumber};

use super::State;
use super::request::{Compute, Need, Place, Run};
use super::table::NONE;

/// Dispatched requests of one class.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) struct Inflight {
    /// How many, settling ones included.
    pub requests: u32,
    /// Blocks reserved for them.
    pub blocks: u64,
}

impl State {
    /// Puts a request that has just left the queue at a replica, debited.
    pub(super) fn join_replica(
        &mut self,
        slot: u32,
        replica: u32,
        need: Need,
        (predicted_cached_tokens, uncached_tokens): (u32, u64),
    ) {
        self.hold_at(slot, replica, need, uncached_tokens);
        let request = &mut self.requests.table[slot];
        request.run.predicted_cached_tokens = predicted_cached_tokens;
        let moved = request.move_to(Compute::Prefilling);
        debug_assert!(moved, "only a queued request is dispatched");
        self.requests.retime(slot, &self.config);
    }

    /// Debits what a request holds at a replica from now on; `unsettled_tokens` of its prompt were told as taken.
    pub(super) fn hold_at(&mut self, slot: u32, replica: u32, need: Need, unsettled_tokens: u64) {
        let now = self.now;
        let request = &mut self.requests.table[slot];
        let expected = u64::from(request.expected_output_tokens.min(request.max_output_tokens))
            * u64::from(request.manifest.sequences);
        let (class, flow, tenant, tpot) = (request.class, request.flow, request.tenant, request.manifest.slo_tpot);
        let at = &mut self.replicas.table[replica];
        at.dispatched = DispatchNumber(at.dispatched.0 + 1);
        request.place = Place::Running { replica };
        request.run = Run {
            number: at.dispatched,
            need,
            dispatched_at: now,
            expected_left: expected,
            unsettled_tokens,
            ..Run::default()
        };
        at.requests.push_back(&mut self.requests.inner, slot);
        if at.first_uncovered == NONE {
            at.first_uncovered = slot;
        }
        at.inflight.add(&need);
        at.inflight_prefill_tokens += need.prefill_tokens;
        at.uncovered.add(&need);
        at.uncovered_requests += 1;
        at.expected_left += expected;
        if !at.draining {
            self.replicas.uncovered_blocks += need.blocks;
        }
        let inflight = &mut self.inflight[class.index()];
        inflight.requests += 1;
        inflight.blocks += need.blocks;
        self.running_requests += 1;
        self.flows.table[flow].running_requests += 1;
        self.ledger.change(tenant, |tenant| {
            tenant.running_requests += 1;
            tenant.reserved_blocks += need.blocks;
        });
        self.requests.tpot.set(slot, tpot.0, u64::from(slot));
    }

    /// Takes a dispatched or settling request from its replica: it holds nothing there any more. Its place is to be set by the caller.
    pub(super) fn leave_replica(&mut self, slot: u32) {
        let request = &mut self.requests.table[slot];
        let Some(replica) = request.place.at_replica() else { return };
        let run = request.run;
        let (class, flow, tenant) = (request.class, request.flow, request.tenant);
        let settled = core::mem::take(&mut request.run.unsettled_tokens);
        let at = &mut self.replicas.table[replica];
        if at.report.as_ref().is_none_or(|report| run.number > report.covers) {
            at.uncovered.sub(&run.need);
            at.uncovered_requests -= 1;
            if !at.draining {
                self.replicas.uncovered_blocks -= run.need.blocks;
            }
        }
        let at = &mut self.replicas.table[replica];
        if at.first_uncovered == slot {
            at.first_uncovered = self.requests.inner.next(slot);
        }
        at.requests.remove(&mut self.requests.inner, slot);
        at.inflight.sub(&run.need);
        if !run.emitted {
            at.inflight_prefill_tokens -= run.need.prefill_tokens;
        }
        at.expected_left -= run.expected_left;
        let inflight = &mut self.inflight[class.index()];
        inflight.requests -= 1;
        inflight.blocks -= run.need.blocks;
        self.running_requests -= 1;
        self.flows.table[flow].running_requests -= 1;
        if settled > 0 {
            self.flows.table[flow].served.settled_tokens += settled;
            self.flows.tell_later(flow);
        }
        self.ledger.change(tenant, |tenant| {
            tenant.running_requests -= 1;
            tenant.reserved_blocks -= run.need.blocks;
        });
        self.requests.tpot.remove(slot);
        self.wants_dispatch = true;
    }

    /// Dispatched and unfinished requests of classes up to `class`.
    pub(super) fn inflight_up_to(&self, class: ClassRank) -> u64 {
        self.inflight[..=class.index()].iter().map(|class| u64::from(class.requests)).sum()
    }

    /// Counters equal a walk, for everything that is held at replicas.
    pub(super) fn check_holdings(&self) -> Result<(), &'static str> {
        let mut by_class = [Inflight::default(); ClassRank::COUNT];
        let mut count = 0;
        for (replica, at) in self.replicas.table.iter() {
            let mut walk = Walk::default();
            let covers = at.report.as_ref().map_or(DispatchNumber(0), |report| report.covers);
            let mut last = DispatchNumber(0);
            for slot in at.requests.iter(&self.requests.inner) {
                let request = self.live(slot)?;
                if request.place.at_replica() != Some(replica) || request.run.number <= last {
                    return Err("holdings: a replica's list holds a stranger, or is out of order");
                }
                last = request.run.number;
                let inflight = &mut by_class[request.class.index()];
                inflight.requests += 1;
                inflight.blocks += request.run.need.blocks;
                count += 1;
                walk.add(slot, &request.run, covers);
            }
            let known = Walk {
                inflight: at.inflight,
                prefill_tokens: at.inflight_prefill_tokens,
                uncovered: at.uncovered,
                uncovered_requests: at.uncovered_requests,
                first_uncovered: at.first_uncovered,
                expected_left: at.expected_left,
            };
            if known != walk {
                return Err("holdings: a replica's sums differ from the walk over its requests");
            }
        }
        if by_class != self.inflight || count != self.running_requests {
            return Err("holdings: the classes' sums differ from the walk");
        }
        if self.running_requests > self.config.running_requests_max {
            return Err("holdings: more requests run than may");
        }
        Ok(())
    }
}

/// What [`State::check_holdings`] adds up.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Walk {
    inflight: Need,
    prefill_tokens: u64,
    uncovered: Need,
    uncovered_requests: u32,
    first_uncovered: u32,
    expected_left: u64,
}

impl Default for Walk {
    fn default() -> Self {
        Self {
            inflight: Need::default(),
            prefill_tokens: 0,
            uncovered: Need::default(),
            uncovered_requests: 0,
            first_uncovered: NONE,
            expected_left: 0,
        }
    }
}

impl Walk {
    fn add(&mut self, slot: u32, run: &Run, covers: DispatchNumber) {
        self.inflight.add(&run.need);
        self.prefill_tokens += if run.emitted { 0 } else { run.need.prefill_tokens };
        self.expected_left += run.expected_left;
        if run.number > covers {
            self.uncovered.add(&run.need);
            self.uncovered_requests += 1;
            if self.first_uncovered == NONE {
                self.first_uncovered = slot;
            }
        }
    }
}
