//! When does a request that was taken run, when does a preempted sequence run again, and how do its siblings start?
//!
//! Preempted sequences go before new work. A joining needs a slot for each sequence; blocks were promised when the request was taken,
//! unless running work took that promise back since.

use penstock_base::{BatchId, Failure, Instant, Manifest, Outcome};
use penstock_kv::{Admit, Keys, OwnerId};

use super::digest::Mark;
use super::sequence::{Held, NONE, Place};
use super::{Replica, ReplicaEffects};
use crate::message::FromReplica;

impl Replica {
    /// Nothing runs and nothing is in flight: whoever cannot start now never will by waiting.
    fn is_alone(&self) -> bool {
        self.running.is_empty() && self.batches.is_empty()
    }

    fn is_paused(&self, now: Instant, entry: u32) -> bool {
        self.sequence(entry).resume_at > now
    }

    /// Must new work wait for preempted sequences?
    pub(super) fn resumes_first(&self, now: Instant) -> bool {
        self.resume.iter().any(|entry| !self.is_paused(now, *entry))
    }

    /// Lets start what can: preempted sequences, then the ready window, each in its order.
    pub(super) fn start_waiting(&mut self, now: Instant, effects: &mut ReplicaEffects) {
        self.resume_preempted(now, effects);
        if self.resumes_first(now) {
            return;
        }
        while let Some(entry) = self.ready.first().copied() {
            if !self.start_ready(now, entry, effects) {
                return;
            }
        }
    }

    fn resume_preempted(&mut self, now: Instant, effects: &mut ReplicaEffects) {
        let mut at = 0;
        while let Some(entry) = self.resume.get(at).copied() {
            let alone = self.is_alone();
            let (inflight, resume_batch) = (self.sequence(entry).inflight, self.sequence(entry).resume_batch);
            if self.is_paused(now, entry) && !alone {
                at += 1;
                continue;
            }
            let same_round = resume_batch == self.next_batch && !alone;
            if inflight > 0 || same_round {
                return;
            }
            if self.resume(now, entry, effects) {
                continue;
            }
            if !alone {
                return;
            }
            // The promises of the ready window stand in the way, or the pool is too small for this sequence and always was.
            let stripped = self.strip_ready(now, u32::MAX);
            if !(stripped && self.resume(now, entry, effects)) {
                let tokens = self.sequence(entry).delivered;
                self.end_sequence(now, entry, Outcome::Failed(Failure::NoProgress), tokens, effects);
            }
        }
    }

    /// Takes promises back from ready requests, last come first, until `blocks` came free. Was there anything to take?
    pub(super) fn strip_ready(&mut self, now: Instant, blocks: u32) -> bool {
        let (before, mut any) = (self.kv.available_blocks(), false);
        for at in (0..self.ready.len()).rev() {
            let entry = self.ready[at];
            if self.request(entry).prefix.is_some() {
                self.let_go(now, entry);
                any = true;
            }
            if self.kv.available_blocks() - before >= blocks {
                break;
            }
        }
        any
    }

    fn blocks_for(&self, tokens: u64) -> u32 {
        Manifest::blocks_for(tokens, self.config.block_size_tokens).min(u64::from(u32::MAX)) as u32
    }

    /// Puts a preempted sequence back into the batch, with what the cache still holds of it. False when the blocks are not there.
    fn resume(&mut self, now: Instant, entry: u32, effects: &mut ReplicaEffects) -> bool {
        let (owner, len) = (self.sequence(entry).request, self.sequence(entry).len());
        let request = self.request(owner);
        let whole = u64::from(request.prompt()) + u64::from(request.max_output);
        // Room for a block more than it had, so that it is not the next victim at once.
        let roomy = u64::from(len) + u64::from(self.config.block_size_tokens);
        let roomy = roomy.max(u64::from(request.prompt()) + u64::from(request.reserve_output)).min(whole);
        let (roomy, least) = (self.blocks_for(roomy), self.blocks_for(u64::from(len)));
        let found = self.admit_sequence(now, entry, roomy);
        let found = if found.is_none() && self.is_alone() { self.admit_sequence(now, entry, least) } else { found };
        let Some(found) = found else { return false };

        self.resume.retain(|other| *other != entry);
        let (before, again) = {
            let seq = self.sequence_mut(entry);
            seq.place = Place::Running;
            seq.scheduled = found;
            seq.computed = found;
            seq.confirmed = found;
            seq.source = None;
            seq.resuming = true;
            seq.joined_at = now;
            (seq.preemptions, seq.len() - found)
        };
        Self::insert_by_joining(&self.sequences, &mut self.running, entry);
        self.digest.mix(Mark::Resume, u64::from(entry), u64::from(found));
        let request = self.requests[owner as usize].as_mut().expect("a preempted sequence has its request");
        if !request.started {
            request.cached_tokens = found.min(request.prompt());
            request.charged = request.charged.max(request.cached_tokens);
        }
        if before > 0 {
            let (gateway, id, attempt) = (request.gateway, request.id(), request.attempt);
            self.facts.on_resumed(now, request, again);
            self.send(gateway, FromReplica::Resumed { request: id, attempt, recomputed_tokens: again }, effects);
        }
        true
    }

    /// References the cached part of a sequence without blocks and promises the rest of `total`; the tokens found.
    fn admit_sequence(&mut self, now: Instant, entry: u32, total: u32) -> Option<u32> {
        let seq = &mut self.sequences[entry as usize];
        let request = self.requests[seq.request as usize].as_ref()?;
        let keys = if self.config.prefix_cache {
            Keys { prompt: &request.manifest.keys, generated: &seq.keys }
        } else {
            Keys::default()
        };
        let input_tokens = seq.prompt + seq.sampled.min(seq.max_output - 1);
        let ask = Admit { owner: OwnerId(seq.request), keys, input_tokens, total_blocks: total, class: request.class };
        let spare = self.kv.available_blocks().saturating_sub(self.growth_blocks);
        if total.saturating_sub(self.kv.lookup(now, keys, input_tokens).blocks) > spare {
            return None;
        }
        self.kv.admit(now, ask, &mut seq.table).ok().map(|admitted| admitted.prefix.tokens)
    }

    fn start_ready(&mut self, now: Instant, entry: u32, effects: &mut ReplicaEffects) -> bool {
        if self.vacant_slots() < u32::from(self.request(entry).manifest.sequences) {
            return false;
        }
        if self.request(entry).prefix.is_none() && !self.hold_again(now, entry) {
            if !self.is_alone() {
                return false;
            }
            self.strip_ready(now, u32::MAX);
            if !self.hold_again(now, entry) {
                self.end_request(now, entry, Outcome::Failed(Failure::NoProgress), effects);
                return true;
            }
        }
        self.join(now, entry);
        true
    }

    fn hold_again(&mut self, now: Instant, entry: u32) -> bool {
        let Some(mut request) = self.requests[entry as usize].take() else { return false };
        let size = self.config.block_size_tokens;
        let total = Manifest::need_blocks(request.prompt(), request.reserve_output, request.manifest.sequences, size);
        let held = u32::try_from(total).is_ok_and(|total| self.hold(now, entry, &mut request, total));
        self.requests[entry as usize] = Some(request);
        held
    }

    /// The request leaves the ready window: its first sequence runs, the others wait for the prompt.
    pub(super) fn join(&mut self, now: Instant, owner: u32) {
        self.ready.retain(|other| *other != owner);
        let sequences = self.request(owner).manifest.sequences;
        for index in 0..sequences {
            let Some(entry) = self.sequence_entries.take() else { break };
            self.serial += 1;
            self.joined += 1;
            let (serial, joined) = (self.serial, self.joined);
            let request = self.requests[owner as usize].as_mut().expect("a ready request is here");
            request.sequences[usize::from(index)] = entry;
            let seq = &mut self.sequences[entry as usize];
            seq.reset();
            seq.place = if index == 0 { Place::Running } else { Place::Waiting };
            seq.serial = serial;
            seq.request = owner;
            seq.index = index;
            seq.prompt = request.prompt();
            seq.max_output = request.max_output;
            seq.joined = joined;
            seq.joined_at = now;
            seq.held = if request.sending.is_some() { Held::Prompt } else { Held::Free };
            if index > 0 {
                continue;
            }
            if let Some(mut table) = request.prefix.take() {
                core::mem::swap(&mut table, &mut seq.table);
                self.tables.push(table);
            }
            let found = seq.table.cached_blocks() * self.config.block_size_tokens;
            (seq.scheduled, seq.computed, seq.confirmed) = (found, found, found);
            request.cached_tokens = found;
            request.charged = found;
            self.running.push(entry);
        }
        let request = self.request_mut(owner);
        request.ready = false;
        request.leader = 0;
        request.waiting = sequences > 1;
    }

    /// The cache may know more of the prompt by now than when the request was taken. Only before the first row.
    pub(super) fn match_again(&mut self, now: Instant, entry: u32) {
        let seq = &self.sequences[entry as usize];
        let request = self.request(seq.request);
        let is_first = !request.started && seq.last_batch.is_none() && seq.scheduled == request.cached_tokens;
        if !is_first || !self.config.prefix_cache {
            return;
        }
        let found = self.kv.lookup(now, Keys::prompt(&request.manifest.keys), seq.prompt).blocks;
        if found <= seq.table.len() {
            return;
        }
        let owner = seq.request;
        let total = seq.table.len() + self.kv.reservations().of(OwnerId(owner));
        self.kv.unreserve(OwnerId(owner), u32::MAX);
        let seq = &mut self.sequences[entry as usize];
        self.kv.release(now, &mut seq.table, None);
        let Some(found) = self.admit_sequence(now, entry, total) else {
            // A longer match needs no more than the shorter one held, but others that may grow now have a claim to what was given back.
            return self.park(entry);
        };
        let seq = self.sequence_mut(entry);
        (seq.scheduled, seq.computed, seq.confirmed) = (found, found, found);
        let request = self.request_mut(owner);
        request.cached_tokens = found;
        request.charged = found;
    }

    /// A running sequence without blocks goes to those that wait for room.
    fn park(&mut self, entry: u32) {
        self.leave_lists(entry, Place::Running);
        let seq = self.sequence_mut(entry);
        (seq.scheduled, seq.computed, seq.confirmed) = (0, 0, 0);
        seq.place = Place::Preempted;
        seq.resume_batch = BatchId(0);
        Self::insert_by_joining(&self.sequences, &mut self.resume, entry);
    }

    /// The prompt is planned up to its last token: the siblings share its blocks and compute that token themselves. `batch` is the one
    /// that completes what they share.
    pub(super) fn fork_waiting(&mut self, owner: u32, batch: BatchId) {
        let Some(request) = self.requests[owner as usize].as_ref().filter(|request| request.waiting) else { return };
        let leader = request.sequences[usize::from(request.leader)];
        let shared_tokens = request.prompt() - 1;
        if leader == NONE || self.sequence(leader).scheduled < shared_tokens {
            return;
        }
        let (blocks, sequences) = (self.blocks_for(u64::from(shared_tokens)), request.sequences);
        for entry in sequences.into_iter().filter(|entry| *entry != NONE) {
            if self.sequence(entry).place != Place::Waiting {
                continue;
            }
            let Ok([from, to]) = self.sequences.get_disjoint_mut([leader as usize, entry as usize]) else { continue };
            if self.kv.fork(&from.table, &mut to.table, blocks).is_err() {
                debug_assert!(false, "the leader holds the blocks of what it planned");
                to.place = Place::Preempted;
                Self::insert_by_joining(&self.sequences, &mut self.resume, entry);
                continue;
            }
            to.place = Place::Running;
            to.scheduled = shared_tokens;
            if from.computed >= shared_tokens {
                (to.computed, to.confirmed) = (shared_tokens, shared_tokens);
            } else {
                to.shares = Some(batch);
            }
            Self::insert_by_joining(&self.sequences, &mut self.running, entry);
        }
        self.request_mut(owner).waiting = false;
    }
}
