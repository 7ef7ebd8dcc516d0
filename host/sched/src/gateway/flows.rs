//! The flow queues: who waits behind whom, and which flow's head is looked at next.
//!
//! A flow is the unit of fairness. Its waiting requests stand in order of their tickets; flows with something waiting stand in a ring
//! that is turned as their heads are shown, so that each head is shown within ceil(flows / half a window) windows.

use penstock_base::codec::{DecodeError, Reader, Writer};
use penstock_base::{ClassRank, Duration, FlowId, Instant, TenantId};

use super::list::{Links, List};
use super::table::{NONE, Table};

/// One flow.
#[derive(Clone, Debug)]
pub(super) struct Flow {
    /// Who pays.
    pub tenant: TenantId,
    /// Class before admission lowers it.
    pub class: ClassRank,
    /// Share of service; newest terms.
    pub weight_ppm: u64,
    /// Requests that `order` may see, by ticket; held and reserved ones are not in it.
    pub queue: List,
    /// Waiting requests, held and reserved ones included.
    pub waiting_requests: u32,
    /// Their input tokens.
    pub waiting_tokens: u64,
    /// Dispatched requests, settling ones included.
    pub running_requests: u32,
    /// Prompt tokens computed since the flow was first seen.
    pub prefill_tokens: u64,
    /// Output tokens since the flow was first seen.
    pub decode_tokens: u64,
    /// Since when it has had nothing; [`Instant::NEVER`] while it has something.
    pub idle_since: Instant,
    /// How long it had nothing before its present backlog.
    pub idle_before: Duration,
    /// Served since the last fact about it.
    pub served: ServedSum,
}

/// What the next `served` fact of a flow will say.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) struct ServedSum {
    /// Prompt tokens computed.
    pub prefill_tokens: u64,
    /// Output tokens.
    pub decode_tokens: u64,
    /// Device time.
    pub device_us: u64,
    /// Estimates that are now replaced.
    pub settled_tokens: u64,
    /// It is in the list of flows with something to tell.
    pub listed: bool,
}

impl Flow {
    fn new(tenant: TenantId, class: ClassRank, weight_ppm: u64, now: Instant) -> Self {
        Self {
            tenant,
            class,
            weight_ppm,
            queue: List::default(),
            waiting_requests: 0,
            waiting_tokens: 0,
            running_requests: 0,
            prefill_tokens: 0,
            decode_tokens: 0,
            idle_since: now,
            idle_before: Duration::ZERO,
            served: ServedSum::default(),
        }
    }

    /// Something waits or runs.
    pub fn is_active(&self) -> bool {
        self.waiting_requests + self.running_requests > 0
    }
}

/// All flows.
#[derive(Clone, Debug)]
pub(super) struct Flows {
    /// Active flows are pinned; idle ones make room, longest idle first.
    pub table: Table<FlowId, Flow>,
    /// Flows with a queue that `order` may see, in the order in which their heads are shown.
    pub ring: List,
    /// Links of `ring`.
    ring_links: Links,
    /// Flows with something served that no fact has told.
    pub told_later: List,
    /// Links of `told_later`.
    told_links: Links,
}

/// A flow that was forgotten.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct FlowGone {
    /// Which.
    pub id: FlowId,
    /// Whose.
    pub tenant: TenantId,
}

impl Flows {
    /// No flow yet.
    pub fn new(flows_max: usize) -> Self {
        let table = Table::with_capacity(flows_max);
        let slots = table.capacity();
        Self {
            table,
            ring: List::default(),
            ring_links: Links::with_capacity(slots),
            told_later: List::default(),
            told_links: Links::with_capacity(slots),
        }
    }

    /// The flow's slot, with its newest weight, and the flow that made room. `None` when every flow is active.
    pub fn open(
        &mut self,
        id: FlowId,
        tenant: TenantId,
        class: ClassRank,
        weight_ppm: u64,
        now: Instant,
    ) -> Option<(u32, Option<FlowGone>)> {
        if let Some(slot) = self.table.find(&id) {
            self.table[slot].weight_ppm = weight_ppm;
            return Some((slot, None));
        }
        let inserted = self.table.insert(id, Flow::new(tenant, class, weight_ppm, now))?;
        self.table.unpin(inserted.slot);
        let gone = inserted.evicted.map(|gone| FlowGone { id: gone.key, tenant: gone.value.tenant });
        Some((inserted.slot, gone))
    }

    /// Something of the flow waits or runs again. `true` when it had nothing before.
    pub fn wake(&mut self, slot: u32, now: Instant) -> bool {
        let flow = &mut self.table[slot];
        if flow.idle_since == Instant::NEVER {
            return false;
        }
        flow.idle_before = now.since(flow.idle_since);
        flow.idle_since = Instant::NEVER;
        self.table.pin(slot);
        true
    }

    /// Nothing of the flow waits or runs any more. `true` when it had something until now.
    pub fn rest(&mut self, slot: u32, now: Instant) -> bool {
        let flow = &mut self.table[slot];
        if flow.is_active() || flow.idle_since != Instant::NEVER {
            return false;
        }
        flow.idle_since = now;
        self.table.unpin(slot);
        true
    }

    /// Puts a request into the flow's queue before `before` ([`NONE`]: at the end).
    pub fn enqueue(&mut self, slot: u32, request: u32, before: u32, links: &mut Links) {
        let flow = &mut self.table[slot];
        if flow.queue.is_empty() {
            self.ring.push_back(&mut self.ring_links, slot);
        }
        flow.queue.insert_before(links, request, before);
    }

    /// Takes a request out of the flow's queue.
    pub fn dequeue(&mut self, slot: u32, request: u32, links: &mut Links) {
        let flow = &mut self.table[slot];
        flow.queue.remove(links, request);
        if flow.queue.is_empty() {
            self.ring.remove(&mut self.ring_links, slot);
        }
    }

    /// The flow whose head has not been shown for longest goes to the end of the ring, and is returned.
    pub fn turn(&mut self) -> Option<u32> {
        let slot = self.ring.head;
        if slot == NONE {
            return None;
        }
        self.ring.remove(&mut self.ring_links, slot);
        self.ring.push_back(&mut self.ring_links, slot);
        Some(slot)
    }

    /// The flow has something to tell.
    pub fn tell_later(&mut self, slot: u32) {
        if !self.table[slot].served.listed {
            self.table[slot].served.listed = true;
            self.told_later.push_back(&mut self.told_links, slot);
        }
    }

    /// Takes what the flow has to tell.
    pub fn take_served(&mut self, slot: u32) -> Option<ServedSum> {
        let served = core::mem::take(&mut self.table[slot].served);
        if !served.listed {
            return None;
        }
        self.told_later.remove(&mut self.told_links, slot);
        Some(served)
    }

    /// The longest idle flow, and since when.
    pub fn longest_idle(&self) -> Option<(u32, Instant)> {
        self.table.oldest().map(|slot| (slot, self.table[slot].idle_since))
    }

    /// Forgets an idle flow.
    pub fn forget(&mut self, slot: u32) -> Option<FlowGone> {
        let (id, flow) = self.table.remove(slot)?;
        Some(FlowGone { id, tenant: flow.tenant })
    }

    /// Queues, ring and idleness agree.
    pub fn check(&self, links: &Links) -> Result<(), &'static str> {
        self.table.check()?;
        self.ring.check(&self.ring_links)?;
        self.told_later.check(&self.told_links)?;
        let (mut with_queue, mut to_tell) = (0, 0);
        for (_, flow) in self.table.iter() {
            flow.queue.check(links)?;
            with_queue += u32::from(!flow.queue.is_empty());
            to_tell += u32::from(flow.served.listed);
            if flow.is_active() == (flow.idle_since != Instant::NEVER) {
                return Err("flows: idleness and activity disagree");
            }
            if flow.queue.len > flow.waiting_requests {
                return Err("flows: more in the queue than wait");
            }
        }
        if with_queue != self.ring.len || to_tell != self.told_later.len {
            return Err("flows: the ring does not hold exactly the flows with a queue");
        }
        Ok(())
    }

    /// Writes the state.
    pub fn encode(&self, out: &mut Writer) {
        self.table.encode(out, |out, id, flow| {
            out.u64(id.0);
            out.u64(flow.tenant.0);
            out.u8(flow.class.get());
            out.u64(flow.weight_ppm);
            flow.queue.encode(out);
            out.u32(flow.waiting_requests);
            out.u64(flow.waiting_tokens);
            out.u32(flow.running_requests);
            out.u64(flow.prefill_tokens);
            out.u64(flow.decode_tokens);
            out.u64(flow.idle_since.0);
            out.u64(flow.idle_before.0);
            out.u64(flow.served.prefill_tokens);
            out.u64(flow.served.decode_tokens);
            out.u64(flow.served.device_us);
            out.u64(flow.served.settled_tokens);
            out.bool(flow.served.listed);
        });
        self.ring.encode(out);
        self.ring_links.encode(self.table.slots_end(), out);
        self.told_later.encode(out);
        self.told_links.encode(self.table.slots_end(), out);
    }

    /// Reads what [`Self::encode`] wrote.
    pub fn decode(from: &mut Reader<'_>, flows_max: usize) -> Result<Self, DecodeError> {
        let table = Table::decode(from, flows_max, |from| {
            let id = FlowId(from.u64()?);
            let flow = Flow {
                tenant: TenantId(from.u64()?),
                class: ClassRank::new(from.u8()?).ok_or(DecodeError::Invalid("class"))?,
                weight_ppm: from.u64()?,
                queue: List::decode(from)?,
                waiting_requests: from.u32()?,
                waiting_tokens: from.u64()?,
                running_requests: from.u32()?,
                prefill_tokens: from.u64()?,
                decode_tokens: from.u64()?,
                idle_since: Instant(from.u64()?),
                idle_before: Duration(from.u64()?),
                served: ServedSum {
                    prefill_tokens: from.u64()?,
                    decode_tokens: from.u64()?,
                    device_us: from.u64()?,
                    settled_tokens: from.u64()?,
                    listed: from.bool()?,
                },
            };
            Ok((id, flow))
        })?;
        let (end, slots) = (table.slots_end(), table.capacity());
        Ok(Self {
            ring: List::decode(from)?,
            ring_links: Links::decode(from, end, slots)?,
            told_later: List::decode(from)?,
            told_links: Links::decode(from, end, slots)?,
            table,
        })
    }
}
