//! Which waiting requests does `order` see? The head of every flow while they fit, and a turn for each flow when they do not.

use penstock_base::ClassRank;
use penstock_base::limits::PROMISED_KEYS_MAX;
use penstock_policy_api::{Policies, WaitingSignal};

use super::State;
use super::directory::Overlaps;
use super::lead::{Best, Lead};
use super::replicas::Replica;
use super::request::Place;
use super::seats::{Scratch, ShownFlow, WindowRow};
use super::table::NONE;

impl State {
    /// Fills the window, in enqueue order. Half of a window that cannot hold every head goes to those that wait longest, half by turn.
    pub(super) fn build_window(&mut self, rows: usize, scratch: &mut Scratch) {
        scratch.window.clear();
        scratch.shown.clear();
        let rows = rows.clamp(1, scratch.window.capacity().max(1));
        let flows = self.flows.ring.len as usize;
        if flows > rows {
            self.show_longest_waiting(rows / 2, scratch);
            for _ in 0..flows {
                if scratch.window.len() >= rows {
                    break;
                }
                let Some(flow) = self.flows.turn() else { break };
                let head = self.flows.table[flow].queue.head;
                if !scratch.window.iter().any(|row| row.slot == head) {
                    self.show_head(flow, scratch);
                }
            }
        } else {
            for _ in 0..flows {
                let Some(flow) = self.flows.turn() else { break };
                self.show_head(flow, scratch);
            }
            self.show_further(rows, scratch);
        }
        scratch.window.sort_unstable_by_key(|row| row.ticket);
    }

    fn show_head(&self, flow: u32, scratch: &mut Scratch) {
        let head = self.flows.table[flow].queue.head;
        if let Some(next) = self.show_row(head, 0, scratch) {
            scratch.shown.push(ShownFlow { next, shown: 1 });
        }
    }

    /// Shows one request, when it may start; the next one of its flow.
    fn show_row(&self, slot: u32, ahead: u32, scratch: &mut Scratch) -> Option<u32> {
        let request = self.requests.table.get(slot)?;
        let starves = request.waited(self.now) >= self.config.starve;
        if !self.may_start(request.class, request.manifest.traits, starves) {
            return None;
        }
        scratch.window.push(WindowRow {
            slot,
            ticket: request.wait.ticket,
            ahead,
            cached_tokens: 0,
            credited_overlap: true,
            shared_tokens: 0,
        });
        Some(self.requests.inner.next(slot))
    }

    /// Heads in the order of their tickets, over all classes; looks at a bounded number of requests.
    fn show_longest_waiting(&self, heads: usize, scratch: &mut Scratch) {
        let mut cursors = [NONE; ClassRank::COUNT];
        for (cursor, class) in cursors.iter_mut().zip(&self.queue.classes) {
            *cursor = class.list.head;
        }
        for _ in 0..heads.saturating_mul(8) {
            if scratch.window.len() >= heads {
                return;
            }
            let ticket = |slot: u32| self.requests.table.get(slot).map(|request| request.wait.ticket);
            let first = cursors.iter_mut().filter(|cursor| **cursor != NONE).min_by_key(|cursor| ticket(**cursor));
            let Some(cursor) = first else { return };
            let slot = *cursor;
            *cursor = self.requests.outer.next(slot);
            let request = &self.requests.table[slot];
            if request.place == Place::Queued && self.flows.table[request.flow].queue.head == slot {
                self.show_head(request.flow, scratch);
            }
        }
    }

    /// Fills what is left of the window in rounds, one more of each flow a round.
    fn show_further(&self, rows: usize, scratch: &mut Scratch) {
        let mut more = true;
        while more && scratch.window.len() < rows {
            more = false;
            for at in 0..scratch.shown.len() {
                let ShownFlow { next, shown } = scratch.shown[at];
                if next == NONE || scratch.window.len() >= rows {
                    continue;
                }
                let next = self.show_row(next, shown, scratch).unwrap_or(NONE);
                scratch.shown[at] = ShownFlow { next, shown: shown + 1 };
                more = true;
            }
        }
    }

    /// Fills the window's columns about prefixes, when the policy in the seat asks for one of them.
    pub(super) fn fill_overlap_columns(&mut self, policies: &mut dyn Policies, scratch: &mut Scratch) -> bool {
        let names = &policies.fairness().describe().waiting;
        let wants = |signal| names.position(signal).is_some();
        let wants_shared = wants(WaitingSignal::SharedTokens);
        let wanted = wants_shared
            || wants(WaitingSignal::CachedTokens)
            || wants(WaitingSignal::UncachedTokens)
            || wants(WaitingSignal::CreditedOverlapFlag);
        if !wanted {
            return false;
        }
        scratch.promised.clear();
        if wants_shared {
            self.promise_running_prefills(scratch);
        }
        for at in 0..scratch.window.len() {
            let Best { credited, uncredited } = self.best_lead(scratch.window[at].slot, &mut scratch.overlaps);
            let manifest = &self.requests.table[scratch.window[at].slot].manifest;
            let cached = self.overlap_tokens(manifest, credited);
            let mut shared = 0;
            if wants_shared {
                let behind = manifest.keys.get(credited as usize..).unwrap_or_default();
                let promised = behind.iter().take_while(|key| scratch.promised.contains_key(key)).count();
                let blocks = credited + u32::try_from(promised).unwrap_or(u32::MAX);
                shared = self.overlap_tokens(manifest, blocks) - cached;
                promise(&manifest.keys, scratch);
            }
            let row = &mut scratch.window[at];
            row.cached_tokens = cached;
            row.credited_overlap = uncredited <= credited;
            row.shared_tokens = shared;
        }
        true
    }

    /// The longest lead of a request's prompt at a replica with credit, and at one without.
    fn best_lead(&mut self, slot: u32, overlaps: &mut Overlaps) -> Best {
        let (replicas, directory) = (&self.replicas, &self.directory);
        let request = &mut self.requests.table[slot];
        let (keys, lead) = (&request.manifest.keys, &mut request.wait.lead);
        let takes =
            |replica: &Replica| (!replica.draining && replica.cache.believed).then(|| replica.credit().requests > 0);
        if !lead.is_current(keys, directory) {
            *lead = Lead::look(keys, directory, replicas.iter().map(|(slot, _)| slot), overlaps);
        }
        let known = lead.best(|replica| replicas.table.get(replica).and_then(takes));
        known.unwrap_or_else(|| {
            directory.overlaps(keys, overlaps);
            let mut best = Best::default();
            for (slot, replica) in replicas.iter() {
                let Some(credit) = takes(replica) else { continue };
                let kind = if credit { &mut best.credited } else { &mut best.uncredited };
                *kind = (*kind).max(overlaps.blocks(slot));
            }
            best
        })
    }

    /// Dispatched prompts that are still being computed.
    fn promise_running_prefills(&self, scratch: &mut Scratch) {
        for (_, replica) in self.replicas.iter_ready() {
            for slot in replica.requests.iter(&self.requests.inner) {
                let request = &self.requests.table[slot];
                if !request.run.emitted && !request.compute.is_terminal() {
                    promise(&request.manifest.keys, scratch);
                }
            }
        }
    }
}

fn promise(keys: &[penstock_base::BlockKey], scratch: &mut Scratch) {
    for key in keys {
        if scratch.promised.len() >= PROMISED_KEYS_MAX {
            return;
        }
        scratch.promised.insert(*key, ());
    }
}
