//! How does a sequence end, and a request? Blocks go behind their fence, the slot is forgotten with the next plan, rows in flight are
//! discarded when they come: "ended" and "resources reusable" are two moments.

use penstock_base::{BatchId, Instant, Outcome, Phase, SeqId};
use penstock_kv::OwnerId;

use super::digest::Mark;
use super::sequence::{NONE, Place};
use super::{FinishedTokens, HandoffEffect, Replica, ReplicaEffect, ReplicaEffects};
use crate::message::{FromReplica, Progress, Usage};

impl Replica {
    /// The driver found the end in the text: output ends behind `end.tokens`.
    pub(super) fn finish(&mut self, now: Instant, end: FinishedTokens, effects: &mut ReplicaEffects) {
        match self.find(end.seq).filter(|entry| end.tokens <= self.sequence(*entry).delivered) {
            Some(entry) => self.end_sequence(now, entry, end.outcome, end.tokens, effects),
            None => self.stale(effects),
        }
    }

    /// The entry of a sequence that lives.
    pub(super) fn find(&self, seq: penstock_base::SeqId) -> Option<u32> {
        let request = self.by_id.get(&seq.request)?;
        let entry = *self.request(*request).sequences.get(usize::from(seq.index))?;
        (entry != NONE).then_some(entry)
    }

    /// Ends what lives of the request. Nothing new is planned for it from here on.
    pub(super) fn end_request(&mut self, now: Instant, entry: u32, outcome: Outcome, effects: &mut ReplicaEffects) {
        if self.request(entry).live == 0 {
            return;
        }
        if self.request(entry).ready {
            return self.end_ready(now, entry, outcome, effects);
        }
        self.request_mut(entry).waiting = false;
        for index in 0..self.request(entry).manifest.sequences {
            let seq = self.request(entry).sequences[usize::from(index)];
            if seq != NONE {
                let tokens = self.sequence(seq).delivered;
                self.end_sequence(now, seq, outcome, tokens, effects);
            }
        }
    }

    fn end_ready(&mut self, now: Instant, entry: u32, outcome: Outcome, effects: &mut ReplicaEffects) {
        self.let_go(now, entry);
        self.ready.retain(|other| *other != entry);
        let request = self.request_mut(entry);
        request.ready = false;
        request.live = 0;
        request.failure = (!outcome.is_success()).then_some(outcome);
        request.first = Some(outcome);
        self.hush(entry);
        for index in 0..self.request(entry).manifest.sequences {
            let seq = self.request(entry).seq_id(index);
            effects.push(self.ended_effect(entry, (seq, outcome, 0)));
        }
        self.note_end(outcome, u64::from(entry));
        self.ended.push(entry);
    }

    /// Takes back what a ready request holds: its cached prefix and its promise.
    pub(super) fn let_go(&mut self, now: Instant, entry: u32) {
        self.kv.unreserve(OwnerId(entry), u32::MAX);
        if let Some(mut table) = self.request_mut(entry).prefix.take() {
            self.kv.release(now, &mut table, None);
            self.tables.push(table);
        }
    }

    /// What is not this replica's own ends silently: its sender hears of it, and nobody else.
    fn hush(&mut self, owner: u32) {
        if let Some(sending) = self.request_mut(owner).sending.take() {
            self.request_mut(owner).silent = true;
            self.failed_prefills.push(sending.transfer);
        }
    }

    fn ended_effect(&self, owner: u32, (seq, outcome, tokens): (SeqId, Outcome, u32)) -> ReplicaEffect {
        if self.request(owner).silent {
            ReplicaEffect::Handoff(HandoffEffect::Leave { seq })
        } else {
            ReplicaEffect::SequenceEnded { seq, outcome, tokens }
        }
    }

    fn note_end(&mut self, outcome: Outcome, what: u64) {
        let (kind, detail) = outcome.code();
        self.digest.mix(Mark::SequenceEnd, what, u64::from(kind) << 16 | u64::from(detail));
    }

    /// Ends one sequence with `tokens` of its output counting.
    pub(super) fn end_sequence(
        &mut self,
        now: Instant,
        entry: u32,
        outcome: Outcome,
        tokens: u32,
        effects: &mut ReplicaEffects,
    ) {
        let (owner, index, place) = {
            let seq = self.sequence(entry);
            (seq.request, seq.index, seq.place)
        };
        self.leave_lists(entry, place);
        self.release_blocks(now, entry);
        let seq = self.sequence_mut(entry);
        seq.reset();
        self.sequence_entries.give(entry);

        self.hush(owner);
        let request = self.request_mut(owner);
        request.sequences[usize::from(index)] = NONE;
        request.live -= 1;
        request.output_tokens += tokens;
        if index == 0 {
            request.first = Some(outcome);
        }
        if !outcome.is_success() && request.failure.is_none() {
            request.failure = Some(outcome);
        }
        let (seq, live, leads) = (request.seq_id(index), request.live, request.waiting && request.leader == index);
        effects.push(self.ended_effect(owner, (seq, outcome, tokens)));
        self.note_end(outcome, seq.as_u64());
        if live == 0 {
            self.kv.unreserve(OwnerId(owner), u32::MAX);
            self.ended.push(owner);
            return;
        }
        self.trim_promise(owner);
        if leads {
            self.pass_the_lead(owner);
        }
    }

    pub(super) fn leave_lists(&mut self, entry: u32, place: Place) {
        match place {
            Place::Running => self.running.retain(|other| *other != entry),
            Place::Preempted => self.resume.retain(|other| *other != entry),
            Place::Waiting | Place::Vacant => {}
        }
    }

    /// Stops references to the blocks of a sequence; they come back when its last batch is done. What became of them.
    pub(super) fn release_blocks(&mut self, now: Instant, entry: u32) -> penstock_kv::Released {
        let seq = &mut self.sequences[entry as usize];
        if seq.opened {
            seq.opened = false;
            self.drops.push(entry);
        }
        seq.told = 0;
        self.kv.release(now, &mut seq.table, seq.last_batch)
    }

    /// The request keeps promised what its other sequences still need, and no more.
    pub(super) fn trim_promise(&mut self, owner: u32) {
        let still: u32 = self.request(owner).live_sequences().map(|entry| self.promise_of(entry)).sum();
        let had = self.kv.reservations().of(OwnerId(owner));
        self.kv.unreserve(OwnerId(owner), had.saturating_sub(still));
    }

    /// Blocks that a sequence may come to hold beyond its table, by what was reserved for it.
    fn promise_of(&self, entry: u32) -> u32 {
        let seq = self.sequence(entry);
        let request = self.request(seq.request);
        let size = self.config.block_size_tokens;
        let total = u64::from(seq.prompt) + u64::from(request.reserve_output);
        let total = total.div_ceil(u64::from(size)) as u32;
        match seq.place {
            Place::Vacant | Place::Preempted => 0,
            Place::Waiting => total - (seq.prompt - 1) / size,
            Place::Running => {
                // The block that it is about to write in is another's too: it gets its own.
                let shared =
                    seq.table.get(seq.scheduled / size).is_some_and(|block| !self.kv.pool().is_writable(block));
                total.saturating_sub(seq.table.len()) + u32::from(shared)
            }
        }
    }

    /// The leader ended before the prompt was computed: the next one that waits computes it.
    fn pass_the_lead(&mut self, owner: u32) {
        let next = self.request(owner).live_sequences().find(|entry| self.sequence(*entry).place == Place::Waiting);
        let Some(entry) = next else {
            self.request_mut(owner).waiting = false;
            return;
        };
        let index = self.sequence(entry).index;
        self.request_mut(owner).leader = index;
        self.joined += 1;
        let joined = self.joined;
        let seq = self.sequence_mut(entry);
        seq.place = Place::Preempted;
        seq.joined = joined;
        seq.resume_batch = BatchId(0);
        seq.resume_at = Instant::ZERO;
        Self::insert_by_joining(&self.sequences, &mut self.resume, entry);
        self.trim_promise(owner);
    }

    /// Ends everything whose deadline has passed.
    pub(super) fn end_overdue(&mut self, now: Instant, effects: &mut ReplicaEffects) {
        if now < self.next_deadline {
            return;
        }
        let mut next = Instant::NEVER;
        for entry in 0..self.requests.len() as u32 {
            let Some(request) = self.requests[entry as usize].as_ref().filter(|request| request.live > 0) else {
                continue;
            };
            if now < request.manifest.deadline {
                next = next.min(request.manifest.deadline);
                continue;
            }
            let phase = if request.first_token { Phase::Decode } else { Phase::Prefill };
            self.end_request(now, entry, Outcome::TimedOut(phase), effects);
        }
        self.next_deadline = next;
    }

    /// One progress message for each request that the batch just confirmed did something for, then the ends.
    pub(super) fn tell_progress(&mut self, effects: &mut ReplicaEffects) {
        let mut touched = core::mem::take(&mut self.touched);
        for entry in touched.drain(..) {
            let request = self.request_mut(entry);
            let done = core::mem::take(&mut request.done);
            let progress = Progress {
                request: request.id(),
                attempt: request.attempt,
                prefill_tokens: done.prefill_tokens,
                decode_tokens: done.decode_tokens,
                first_token: done.first_token,
                device_us: done.device_us,
            };
            let gateway = request.gateway;
            if progress.prefill_tokens > 0 || progress.decode_tokens > 0 {
                self.send(gateway, FromReplica::Progress(progress), effects);
            }
        }
        self.touched = touched;
        self.tell_ended(effects);
    }

    /// One end for each request whose sequences have all ended; its entry is free then.
    pub(super) fn tell_ended(&mut self, effects: &mut ReplicaEffects) {
        let mut ended = core::mem::take(&mut self.ended);
        for entry in ended.drain(..) {
            let Some(request) = self.requests[entry as usize].take() else { continue };
            self.by_id.remove(&request.id());
            self.request_entries.give(entry);
            // Nothing was done with the prompt of a request that no row was planned for: the gateway tells its client the same.
            let prompt_tokens = if request.started { request.prompt() } else { 0 };
            let usage = Usage {
                prompt_tokens,
                cached_tokens: request.cached_tokens.min(prompt_tokens),
                output_tokens: request.output_tokens,
                preemptions: request.preemptions,
            };
            let message = FromReplica::Ended {
                request: request.id(),
                attempt: request.attempt,
                outcome: request.outcome(),
                usage,
            };
            self.facts.on_ended(self.clock.last(), &request);
            if !request.silent {
                self.send(request.gateway, message, effects);
            }
        }
        self.ended = ended;
    }
}
