//! What does the next step compute? One query-token budget over all rows: decodes first, then prompts in chunks.
//!
//! A step holds, in this order: one token for each sequence whose newest token waits; prompts that are computed again after preemption;
//! prompts of sequences that run; of those, a chunk at a time while something decodes. Blocks are in the table before a row is planned
//! (KV-06); a row that finds none waits for the next step.

use alloc::vec::Vec;

use penstock_base::limits::PREFILL_ROUNDS_MAX;
use penstock_base::plan::{Plan, PlanOp, PlanRow, Task, TokenSource};
use penstock_base::{BatchId, Instant};
use penstock_kv::{Extend, OwnerId};
use penstock_policy_api::Policies;

use super::confirm::{Batch, BatchRow};
use super::cost::StepShape;
use super::sequence::{Place, slot};
use super::{Replica, ReplicaEffect, ReplicaEffects, ReplicaEvent};
use crate::message::FromReplica;

/// A step while it is put together.
struct Draft {
    plan: Plan,
    rows: Vec<BatchRow>,
    shape: StepShape,
    /// Query tokens that may still be planned.
    left: u32,
}

impl Replica {
    /// Plans and submits one step. False when there is nothing to compute.
    pub(super) fn plan_step(
        &mut self,
        now: Instant,
        policies: &mut dyn Policies,
        effects: &mut ReplicaEffects,
    ) -> bool {
        self.repriced = false;
        self.free_for_order(now, policies, effects);
        self.free_for_growth(now, policies, effects);
        self.start_waiting(now, effects);
        self.keep_watermark(now, policies, effects);

        let mut plan = self.plans.pop().unwrap_or_default();
        plan.clear();
        plan.batch = self.next_batch;
        plan.ops.extend(self.drops.iter().map(|entry| PlanOp::DropSlot { slot: slot(*entry) }));
        let rows = self.row_buffers.pop().unwrap_or_default();
        let mut draft = Draft { plan, rows, shape: StepShape::default(), left: self.config.step_tokens };
        let stalled = self.draft_decodes(now, policies, &mut draft, effects);
        self.draft_prefills(now, policies, &mut draft, stalled, effects);
        if draft.rows.is_empty() {
            self.recycle(draft.plan);
            self.row_buffers.push(draft.rows);
            return false;
        }
        self.submit(draft, effects);
        true
    }

    /// One token for each sequence that decodes; how many found no block.
    fn draft_decodes(
        &mut self,
        now: Instant,
        policies: &mut dyn Policies,
        draft: &mut Draft,
        effects: &mut ReplicaEffects,
    ) -> u32 {
        let mut stalled = 0;
        for at in 0..self.running.len() {
            let entry = self.running[at];
            if draft.left == 0 || !self.sequence(entry).decodes() || self.sequence(entry).waits_for_owner() {
                continue;
            }
            let reads = self.sequence(entry).scheduled + 1;
            self.make_room(now, 1, policies, effects);
            if self.draft_row(now, entry, 1, draft) {
                draft.shape.decode_rows += 1;
                draft.shape.kv_tokens += u64::from(reads);
            } else {
                stalled += 1;
            }
        }
        stalled
    }

    /// Prompts with what the decodes leave of the budget.
    fn draft_prefills(
        &mut self,
        now: Instant,
        policies: &mut dyn Policies,
        draft: &mut Draft,
        stalled: u32,
        effects: &mut ReplicaEffects,
    ) {
        let decodes = draft.shape.decode_rows;
        let waits = stalled > 0 && decodes == 0;
        if waits && self.prefill_rounds >= PREFILL_ROUNDS_MAX && !self.batches.is_empty() {
            return;
        }
        let mut chunk = self.config.step_tokens;
        if decodes > 0 {
            chunk = self.config.chunk_tokens;
            if let Some(target) = self.peers.tpot_target(now) {
                let within = self.cost.prefill_within(draft.shape, target).max(self.config.block_size_tokens);
                draft.left = draft.left.min(within);
                chunk = self.config.step_tokens;
            }
        }
        for resuming in [true, false] {
            for at in 0..self.running.len() {
                // A sequence may leave the list while it is looked at (a match that no longer holds).
                let Some(entry) = self.running.get(at).copied() else { break };
                if draft.left == 0 || self.sequence(entry).resuming != resuming || self.sequence(entry).decodes() {
                    continue;
                }
                self.draft_chunk(now, entry, chunk, policies, draft, effects);
            }
        }
        let prefills = draft.shape.prefill_tokens > 0;
        self.prefill_rounds = if waits && prefills { (self.prefill_rounds + 1).min(PREFILL_ROUNDS_MAX) } else { 0 };
    }

    /// The next chunk of a prompt, cut to the budget and to the blocks that are there.
    fn draft_chunk(
        &mut self,
        now: Instant,
        entry: u32,
        chunk: u32,
        policies: &mut dyn Policies,
        draft: &mut Draft,
        effects: &mut ReplicaEffects,
    ) {
        self.match_again(now, entry);
        let seq = self.sequence(entry);
        if seq.place != Place::Running || seq.pending() == 0 {
            return;
        }
        let size = self.config.block_size_tokens;
        let tokens = seq.pending().min(chunk).min(draft.left);
        let held = seq.table.len() * size - seq.scheduled;
        self.make_room(now, tokens.saturating_sub(held).div_ceil(size) + 1, policies, effects);
        // Promised blocks are always there; a sequence that outgrew its promise may have to make do with one.
        let least = tokens.min(size - self.sequence(entry).scheduled % size);
        let planned = if self.draft_row(now, entry, tokens, draft) {
            tokens
        } else if least < tokens && self.draft_row(now, entry, least, draft) {
            least
        } else {
            return;
        };
        draft.shape.prefill_tokens += planned;
        self.tell_started(entry, effects);
    }

    fn tell_started(&mut self, entry: u32, effects: &mut ReplicaEffects) {
        let owner = self.sequence(entry).request;
        let size = self.config.block_size_tokens;
        let caches = self.config.prefix_cache;
        let request = self.requests[owner as usize].as_mut().expect("a running sequence has its request");
        if core::mem::replace(&mut request.started, true) {
            return;
        }
        let message = FromReplica::Started {
            request: request.id(),
            attempt: request.attempt,
            cached_tokens: request.cached_tokens,
        };
        let is_own = request.sending.is_none();
        let whole = ((request.prompt() - 1) / size).min(request.manifest.keys.len() as u32);
        let (gateway, hit_tokens) = (request.gateway, request.cached_tokens);
        self.facts.on_hit(self.clock.last(), request, hit_tokens / size);
        if caches {
            self.meters.on_lookup(u64::from(whole * size), u64::from(hit_tokens));
            let lookup = ReplicaEvent::PrefixLookup { queried_tokens: whole * size, hit_tokens };
            effects.push(ReplicaEffect::Event(lookup));
        }
        // What is computed for another replica starts there.
        if is_own {
            self.send(gateway, message, effects);
        }
    }

    /// Puts blocks under the next `tokens` positions, patches the table at the executor, adds the row. False, and nothing changed, when
    /// the blocks are not there.
    fn draft_row(&mut self, now: Instant, entry: u32, tokens: u32, draft: &mut Draft) -> bool {
        let batch = draft.plan.batch;
        let seq = &mut self.sequences[entry as usize];
        let owner = OwnerId(seq.request);
        let row = Extend { owner, start: seq.scheduled, tokens, batch };
        self.scratch.copies.clear();
        if self.kv.extend(now, row, &mut seq.table, &mut self.scratch.copies).is_err() {
            return false;
        }
        let request = self.requests[seq.request as usize].as_ref().expect("a running sequence has its request");
        let id = request.seq_id(seq.index);
        let opens = !core::mem::replace(&mut seq.opened, true);
        if opens {
            draft.plan.ops.push(PlanOp::OpenSlot { slot: slot(entry), seq: id });
            seq.told = 0;
        }
        for copy in &self.scratch.copies {
            seq.told = seq.told.min(copy.index);
            if copy.tokens > 0 {
                draft.plan.ops.push(PlanOp::CopyBlock { from: copy.from, to: copy.to, tokens: copy.tokens });
            }
        }
        for (index, block) in (seq.told..).zip(&seq.table.blocks()[seq.told as usize..]) {
            draft.plan.ops.push(PlanOp::SetBlock { slot: slot(entry), group: 0, index, block: *block });
        }
        seq.told = seq.table.len();

        let start = seq.scheduled;
        let last_known = start + tokens - 1 < seq.prompt + seq.generated;
        let sample = start + tokens == seq.len();
        let place = draft.rows.len() as u32;
        let source = match seq.source {
            Some((batch, row)) if !last_known => TokenSource::FromBatch { batch, row },
            _ => TokenSource::Known,
        };
        draft.plan.rows.push(PlanRow {
            slot: slot(entry),
            seq: id,
            start,
            tokens,
            input: source,
            drafts: 0,
            sample,
            adapter: 0,
            mask: 0,
            task: Task::Generate,
        });
        draft.rows.push(BatchRow {
            entry,
            serial: seq.serial,
            request: seq.request,
            request_serial: request.serial,
            seq: id,
            start,
            tokens,
            sample,
            opens,
        });
        seq.scheduled += tokens;
        seq.last_batch = Some(batch);
        seq.inflight += 1;
        if sample {
            seq.sampled += 1;
            seq.source = Some((batch, place));
            seq.resuming = false;
        }
        draft.left -= tokens;
        true
    }

    fn submit(&mut self, draft: Draft, effects: &mut ReplicaEffects) {
        let batch = draft.plan.batch;
        self.next_batch = BatchId(batch.0 + 1);
        self.drops.clear();
        self.digest.mix_plan(&draft.plan);
        let shape = draft.shape;
        effects.push(ReplicaEffect::Event(ReplicaEvent::Step {
            decodes: shape.decode_rows,
            prefill_tokens: shape.prefill_tokens,
        }));
        for row in &draft.rows {
            self.fork_waiting(row.request, batch);
        }
        let query_tokens = draft.plan.query_tokens();
        self.batches.push(Batch { id: batch, rows: draft.rows, shape, query_tokens });
        effects.push(ReplicaEffect::Submit(draft.plan));
    }
}
