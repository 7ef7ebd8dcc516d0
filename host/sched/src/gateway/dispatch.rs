//! Who is placed next, while some replica grants credit and something waits? Starving requests, then withheld and reserved credit, then
//! what `order` ranks.

use penstock_base::limits::{IDLE_HOLD_MAX, SKIPS_MAX, STARVING_ROWS_MAX};
use penstock_base::{ClassRank, Instant};
use penstock_policy_api::{Decision, Rest, Skipped};

use super::State;
use super::feedback::SKIPPED_IN_VAIN;
use super::io::{GatewayEffect, GatewayEvent};
use super::place::{How, Placed};
use super::replicas::Replica;
use super::request::{Need, Place};
use super::seats::Cx;
use super::signals::{OrderFacts, WaitingRows};
use super::table::NONE;
use crate::message::Credit;

/// Why a ranked row came to nothing, as facts number it.
const SKIPPED_NO_FIT: u64 = 0;
/// See [`SKIPPED_NO_FIT`].
const SKIPPED_NO_CREDIT: u64 = 3;

/// Credit of all ready replicas together.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) struct Granted {
    /// Sequences that may be started.
    pub take: u64,
    /// Prompt tokens.
    pub tokens: u64,
    /// Blocks.
    pub blocks: u64,
}

/// Does this credit let anything start? Slots alone do not.
fn startable(replica: &Replica, credit: Credit) -> bool {
    replica.decodes() && replica.withheld_for == NONE && credit.blocks > 0 && credit.prefill_tokens > 0
}

impl State {
    /// What ready replicas grant now, in one walk over them; and how many sequences may be started: by credit that is not withheld, within
    /// the bound on running requests.
    fn granted(&self) -> Granted {
        let mut granted = Granted::default();
        for (_, replica) in self.replicas.iter_ready() {
            let credit = replica.credit();
            granted.tokens = granted.tokens.saturating_add(credit.prefill_tokens);
            granted.blocks = granted.blocks.saturating_add(credit.blocks);
            if startable(replica, credit) {
                granted.take += u64::from(credit.requests);
            }
        }
        let room = self.config.running_requests_max - self.running_requests;
        granted.take = granted.take.min(u64::from(room));
        granted
    }

    /// May any sequence be started? The first replica that grants one tells.
    fn takes_any(&self) -> bool {
        let grants = |(_, replica): (u32, &Replica)| {
            let credit = replica.credit();
            startable(replica, credit) && credit.requests > 0
        };
        self.config.running_requests_max > self.running_requests && self.replicas.iter_ready().any(grants)
    }

    /// At the end of a step that changed who waits or what is granted.
    pub(super) fn run_dispatch(&mut self, cx: &mut Cx<'_>) {
        if self.queue.requests == 0 {
            self.wants_dispatch = false;
            self.kept_since = Instant::NEVER;
        }
        if !core::mem::take(&mut self.wants_dispatch) {
            return;
        }
        self.round += 1;
        self.serve_starving(cx);
        self.serve_withheld(cx);
        self.serve_reserved(cx);
        self.kept_idle = false;
        while self.order_once(cx) {}
        if !self.kept_idle {
            self.kept_since = Instant::NEVER;
        }
        // Placing changes what waits and what is granted; this round has seen to it.
        self.wants_dispatch = false;
    }

    /// Requests that have waited too long go first, whatever is ranked, reserved, kept or paused.
    fn serve_starving(&mut self, cx: &mut Cx<'_>) {
        let mut slots = core::mem::take(&mut cx.seats.scratch.slots);
        slots.clear();
        for class in ClassRank::all() {
            let list = self.queue.classes[class.index()].list;
            let waited = |slot: &u32| self.requests.table[*slot].waited(self.now) >= self.config.starve;
            slots.extend(list.iter(&self.requests.outer).take(STARVING_ROWS_MAX).filter(waited));
        }
        slots.sort_unstable_by_key(|slot| self.requests.table[*slot].wait.ticket);
        for slot in &slots {
            if !self.takes_any() {
                break;
            }
            let request = &self.requests.table[*slot];
            if !self.may_start(request.class, request.manifest.traits, true) {
                continue;
            }
            if matches!(request.place, Place::Held | Place::Reserved { .. }) {
                self.unhold(*slot);
            }
            if let Placed::NoFit { .. } = self.place(*slot, How::Starving, cx) {
                self.count_skip(*slot, cx);
            }
        }
        cx.seats.scratch.slots = slots;
    }

    /// Replicas that collect credit for one request give it when it is enough, and stop when that one may not start.
    fn serve_withheld(&mut self, cx: &mut Cx<'_>) {
        for at in 0..self.replicas.slots().len() {
            let replica = self.replicas.slots()[at];
            let slot = self.replicas.table[replica].withheld_for;
            let Some(request) = self.requests.table.get(slot) else { continue };
            if self.may_start(request.class, request.manifest.traits, self.starves(slot)) {
                self.dispatch_if_covered(slot, replica, How::Host, cx);
            } else {
                self.end_withholding(slot);
            }
        }
    }

    /// Requests that wait for a replica's credit are served in their order, before new work.
    fn serve_reserved(&mut self, cx: &mut Cx<'_>) {
        if self.reserved_requests == 0 {
            return;
        }
        for at in 0..self.replicas.slots().len() {
            let replica = self.replicas.slots()[at];
            while let Some(slot) = self.replicas.table[replica].reserved.as_slice().first().copied() {
                let request = &self.requests.table[slot];
                let may_start = self.may_start(request.class, request.manifest.traits, false);
                if !may_start || !self.dispatch_if_covered(slot, replica, How::Policy, cx) {
                    break;
                }
            }
        }
    }

    /// One question. `true` when something left the queues that `order` sees, and more may be placed.
    fn order_once(&mut self, cx: &mut Cx<'_>) -> bool {
        if self.flows.ring.is_empty() {
            return false;
        }
        let granted = self.granted();
        let take = granted.take;
        if take == 0 {
            return false;
        }
        let rows = cx.policies.fairness().terms().window(self.config.order_rows);
        self.build_window(rows, &mut cx.seats.scratch);
        if cx.seats.scratch.window.is_empty() {
            return false;
        }
        self.deliver_facts(Decision::Fairness, cx);
        let has_overlaps = self.fill_overlap_columns(cx.policies, &mut cx.seats.scratch);
        let asked = {
            let seats = &mut *cx.seats;
            let facts = OrderFacts { state: self, granted };
            let waiting = WaitingRows { state: self, rows: &seats.scratch.window, has_overlaps };
            seats.order.ask(cx.policies.fairness(), self.now, &facts, &waiting, &mut seats.scratch.ranked)
        };
        self.note_checked(Decision::Fairness, &asked, cx);
        if let Some(target_us) = asked.decision.tpot_target_us {
            self.stance.take_tpot_target(target_us, self.now);
        }
        self.digest.add(&[2, asked.call, asked.decision.named as u64]);
        for row in cx.seats.scratch.ranked.iter().take(usize::try_from(take).unwrap_or(usize::MAX)) {
            self.digest.add(&[u64::from(*row)]);
        }
        let by_policy = asked.fallback.is_none();
        if asked.decision.rest == Rest::Keep {
            self.end_keeping(cx);
        }
        self.place_ranked(take, if by_policy { asked.decision.named } else { 0 }, cx)
    }

    /// Rows that the policy keeps waiting follow after all, once a replica that could take one has idled long enough meanwhile.
    fn end_keeping(&mut self, cx: &mut Cx<'_>) {
        let scratch = &mut cx.seats.scratch;
        if scratch.ranked.len() >= scratch.window.len() {
            return;
        }
        let named = scratch.ranked.len();
        let is_kept = |row: &u32| !scratch.ranked[..named].contains(row);
        let idles = (0..scratch.window.len() as u32)
            .filter(is_kept)
            .any(|row| self.feasible_idles(scratch.window[row as usize].slot));
        if !idles {
            return;
        }
        self.kept_idle = true;
        if self.kept_since == Instant::NEVER {
            self.kept_since = self.now;
        }
        if self.kept_since + IDLE_HOLD_MAX > self.now {
            return;
        }
        for row in 0..scratch.window.len() as u32 {
            if !scratch.ranked[..named].contains(&row) {
                scratch.ranked.push(row);
            }
        }
        self.counters.keeps_ended += 1;
    }

    fn place_ranked(&mut self, take: u64, named: usize, cx: &mut Cx<'_>) -> bool {
        let ranked = core::mem::take(&mut cx.seats.scratch.ranked);
        let window = core::mem::take(&mut cx.seats.scratch.window);
        let mut moved = false;
        let mut exhausted = false;
        for (rank, row) in ranked.iter().enumerate() {
            let Some(slot) = window.get(*row as usize).map(|row| row.slot) else { continue };
            let Some(request) = self.requests.table.get(slot).filter(|request| request.place == Place::Queued) else {
                continue;
            };
            if exhausted && rank as u64 >= take {
                break;
            }
            let may_start = self.may_start(request.class, request.manifest.traits, self.starves(slot));
            let how = if rank < named { How::Policy } else { How::Native };
            let result = if exhausted || !may_start { Placed::NoCredit } else { self.place(slot, how, cx) };
            match result {
                Placed::Dispatched => {
                    moved = true;
                    exhausted = !self.takes_any();
                }
                Placed::Waits | Placed::Ended => moved = true,
                Placed::NoFit { short_blocks } => {
                    self.count_skip(slot, cx);
                    if (rank as u64) < take {
                        self.tell_skipped(slot, SKIPPED_NO_FIT, short_blocks, cx);
                    }
                }
                Placed::NoCredit => {
                    if (rank as u64) < take {
                        self.tell_skipped(slot, SKIPPED_NO_CREDIT, 0, cx);
                    }
                }
            }
        }
        cx.seats.scratch.ranked = ranked;
        cx.seats.scratch.window = window;
        moved && !exhausted
    }

    fn starves(&self, slot: u32) -> bool {
        self.requests.table[slot].waited(self.now) >= self.config.starve
    }

    fn tell_skipped(&mut self, slot: u32, reason_code: u64, short_blocks: u64, cx: &mut Cx<'_>) {
        let request = &self.requests.table[slot];
        let fact = Skipped {
            request_id: request.manifest.request.0,
            flow_id: request.manifest.flow.0,
            uncached_tokens: u64::from(request.manifest.input_tokens),
            short_blocks,
            reason_code,
            taken_flag: 0,
        };
        self.tell(fact.at(self.now.as_us()), cx);
    }

    /// A round passed over it. After enough of them one replica collects its credit for it.
    fn count_skip(&mut self, slot: u32, cx: &mut Cx<'_>) {
        if self.requests.table.get(slot).is_none() {
            return;
        }
        let request = &mut self.requests.table[slot];
        if request.wait.skipped_round == self.round {
            return;
        }
        request.wait.skipped_round = self.round;
        request.wait.skips += 1;
        if request.wait.skips < SKIPS_MAX || request.wait.withheld != NONE {
            return;
        }
        let request = &self.requests.table[slot];
        let fits = self.eligible(request).filter(|(_, replica)| replica.withheld_for == NONE);
        let roomiest =
            fits.max_by_key(|(_, replica)| (replica.credit().blocks, core::cmp::Reverse(replica.facts.replica)));
        let Some(replica) = roomiest.map(|(replica, _)| replica) else { return };
        self.requests.table[slot].wait.withheld = replica;
        let at = &mut self.replicas.table[replica];
        at.withheld_for = slot;
        self.counters.withheld += 1;
        cx.effects.push(GatewayEffect::Event(GatewayEvent::HeldCredit { replica: at.facts.replica }));
    }

    /// Does a replica that could take it right now have nothing to do?
    pub(super) fn feasible_idles(&self, slot: u32) -> bool {
        let request = &self.requests.table[slot];
        let need = Need {
            slots: u32::from(request.manifest.sequences),
            prefill_tokens: 1,
            blocks: request.need_blocks(self.config.block_size_tokens),
        };
        let free = |withheld: u32| withheld == NONE || withheld == slot;
        self.eligible(request)
            .any(|(_, replica)| replica.is_idle() && free(replica.withheld_for) && replica.covers(&need))
    }

    /// Notes since when a replica that could take a held or reserved request idles.
    pub(super) fn note_idle_of(&mut self, slot: u32) {
        let idles = self.feasible_idles(slot);
        let now = self.now;
        let wait = &mut self.requests.table[slot].wait;
        match (idles, wait.idle_since != Instant::NEVER) {
            (true, false) => wait.idle_since = now,
            (false, true) => {
                wait.held_idle = wait.held_idle + now.since(wait.idle_since);
                wait.idle_since = Instant::NEVER;
            }
            _ => {}
        }
        self.requests.retime(slot, &self.config);
    }

    /// The same for all of them, at the end of a step.
    pub(super) fn note_idle(&mut self, cx: &mut Cx<'_>) {
        if self.held.is_empty() && self.reserved_requests == 0 {
            return;
        }
        let mut slots = core::mem::take(&mut cx.seats.scratch.slots);
        slots.clear();
        slots.extend(self.held.iter(&self.requests.inner));
        for (_, replica) in self.replicas.iter() {
            slots.extend_from_slice(replica.reserved.as_slice());
        }
        slots.iter().for_each(|slot| self.note_idle_of(*slot));
        cx.seats.scratch.slots = slots;
    }

    /// May it be held or reserved (again)? Not once it has been for long enough while replicas idled.
    pub(super) fn may_hold(&self, slot: u32) -> bool {
        self.requests.table[slot].wait.held_idle < IDLE_HOLD_MAX || !self.feasible_idles(slot)
    }

    /// A hold ended without a placement.
    pub(super) fn tell_in_vain(&mut self, slot: u32, cx: &mut Cx<'_>) {
        self.tell_skipped(slot, SKIPPED_IN_VAIN, 0, cx);
    }

    /// When the next waiting request begins to starve; those that do already are passed over.
    pub(super) fn starve_due(&self) -> Instant {
        let next = |class: ClassRank| {
            let list = self.queue.classes[class.index()].list;
            let due = |slot: u32| {
                let wait = &self.requests.table[slot].wait;
                wait.since + penstock_base::Duration(self.config.starve.0.saturating_sub(wait.before.0))
            };
            let ahead = list.iter(&self.requests.outer).take(STARVING_ROWS_MAX).map(due).find(|due| *due > self.now);
            ahead.unwrap_or(Instant::NEVER)
        };
        ClassRank::all().map(next).min().unwrap_or(Instant::NEVER)
    }

    /// When rows that are kept waiting follow after all.
    pub(super) fn keep_due(&self) -> Instant {
        self.kept_since + IDLE_HOLD_MAX
    }
}
