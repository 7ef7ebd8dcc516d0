//! Who gives blocks back when a running sequence cannot grow, or when an overload action asks?
//!
//! In this order: the promises of the ready window; blocks that come free when the steps in flight are done; then the policy names
//! victims among the sequences whose blocks can be freed. A victim's tokens are computed again when it runs again. Without shortage
//! nobody yields. A sequence yields [`PREEMPTIONS_MAX`] times at most, so that every request moves on or ends: after that it is passed
//! over while another of its class or below may yield, and ends before a more important one has to.

use penstock_base::limits::{PREEMPTIONS_MAX, STANCE_FRESH, VICTIMS_MAX};
use penstock_base::{ClassRank, Failure, Instant, Outcome};
use penstock_kv::OwnerId;
use penstock_policy_api::Policies;

use super::digest::Mark;
use super::peers::PreemptOrder;
use super::sequence::{Held, Place};
use super::signals::{RunningRow, VictimsContext, VictimsRows};
use super::{Replica, ReplicaEffect, ReplicaEffects, ReplicaEvent};
use crate::message::FromReplica;

/// Why a sequence yields. The number is the contract's cause code.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub(super) enum Cause {
    Shortage = 0,
    Overload = 1,
}

/// What the next token of every running sequence needs beyond promises.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Growth {
    blocks: u32,
    /// Of these, missing.
    short_blocks: u32,
    /// The first sequence that cannot grow.
    needy: Option<u32>,
}

/// A question about victims.
#[derive(Clone, Copy, Debug)]
struct Wanted {
    blocks: u64,
    cause: Cause,
    /// Only classes up to this one.
    class: ClassRank,
    needy: Option<u32>,
}

impl Replica {
    /// Sees to it that running sequences can write their next token, as far as that is possible in this step.
    pub(super) fn free_for_growth(&mut self, now: Instant, policies: &mut dyn Policies, effects: &mut ReplicaEffects) {
        // Each round ends with something given up or somebody gone.
        for _ in 0..=2 * self.config.slots + self.config.ready_window as u32 {
            let growth = self.growth();
            self.growth_blocks = growth.blocks;
            let (short, Some(needy)) = (growth.short_blocks, growth.needy) else { return };
            if self.strip_ready(now, short) {
                continue;
            }
            let counts = self.kv.counts();
            let coming = counts.reclaimable + counts.leased;
            if coming >= short {
                return;
            }
            if self.running.len() <= 1 {
                if self.batches.is_empty() && coming == 0 {
                    self.end_short(now, needy, Failure::NoProgress, effects);
                    continue;
                }
                return;
            }
            let wanted = Wanted {
                blocks: u64::from(short - coming),
                cause: Cause::Shortage,
                class: ClassRank::MAX,
                needy: Some(needy),
            };
            if self.ask_victims(now, wanted, policies, effects) > 0 {
                continue;
            }
            // Nobody may yield whom those that may not any more would have to give way to.
            let Some(last) = self.least_important() else { return };
            self.end_short(now, last, Failure::PreemptedTooOften, effects);
        }
    }

    /// Carries out an overload action: blocks from the classes it names.
    pub(super) fn free_for_order(&mut self, now: Instant, policies: &mut dyn Policies, effects: &mut ReplicaEffects) {
        let Some(PreemptOrder { blocks, class }) = self.preempt_order.take() else { return };
        let mut left = blocks;
        while left > 0 && self.running.len() > 1 {
            let wanted = Wanted { blocks: left, cause: Cause::Overload, class, needy: None };
            let freed = self.ask_victims(now, wanted, policies, effects);
            if freed == 0 {
                return;
            }
            left = left.saturating_sub(u64::from(freed));
        }
    }

    fn end_short(&mut self, now: Instant, entry: u32, failure: Failure, effects: &mut ReplicaEffects) {
        let tokens = self.sequence(entry).delivered;
        self.end_sequence(now, entry, Outcome::Failed(failure), tokens, effects);
    }

    /// Blocks that the next token of this sequence needs: 0 or 1.
    fn next_blocks(&self, entry: u32) -> u32 {
        let seq = self.sequence(entry);
        if seq.pending() == 0 || seq.waits_for_owner() {
            return 0;
        }
        let block = seq.table.get(seq.scheduled / self.config.block_size_tokens);
        u32::from(block.is_none_or(|block| !self.kv.pool().is_writable(block)))
    }

    /// How far running sequences outgrow their promises in the next step.
    fn growth(&mut self) -> Growth {
        let available = self.kv.available_blocks();
        let (mut growth, mut needy) = (0, None);
        let mut promised = core::mem::take(&mut self.scratch.promised);
        promised.clear();
        for entry in self.running.iter().copied() {
            let need = self.next_blocks(entry);
            if need == 0 {
                continue;
            }
            let owner = self.sequence(entry).request;
            let used = match promised.iter_mut().rev().find(|(other, _)| *other == owner) {
                Some((_, used)) => used,
                None => {
                    promised.push((owner, 0));
                    &mut promised.last_mut().expect("it was pushed").1
                }
            };
            if *used < self.kv.reservations().of(OwnerId(owner)) {
                *used += 1;
                continue;
            }
            growth += 1;
            if growth > available && needy.is_none() {
                needy = Some(entry);
            }
        }
        self.scratch.promised = promised;
        Growth { blocks: growth, short_blocks: growth.saturating_sub(available), needy }
    }

    /// Who would be missed least, by the native order: lowest class, joined last.
    fn least_important(&self) -> Option<u32> {
        let class = |entry: u32| self.request(self.sequence(entry).request).class;
        let joined = |entry: u32| self.sequence(entry).joined;
        let own = self.running.iter().copied().filter(|entry| self.sequence(*entry).held == Held::Free);
        own.min_by_key(|entry| (class(*entry), core::cmp::Reverse(joined(*entry))))
    }

    /// The lowest class of a running sequence that may not yield any more.
    fn spent_class(&self) -> ClassRank {
        let spent =
            self.running.iter().map(|entry| self.sequence(*entry)).filter(|seq| seq.preemptions >= PREEMPTIONS_MAX);
        spent.map(|seq| self.request(seq.request).class).min().unwrap_or(ClassRank::MAX)
    }

    /// Asks for victims and preempts them until the shortage is covered. Blocks that came or will come free.
    fn ask_victims(
        &mut self,
        now: Instant,
        wanted: Wanted,
        policies: &mut dyn Policies,
        effects: &mut ReplicaEffects,
    ) -> u32 {
        self.gather_rows(now, &wanted, policies);
        if self.scratch.rows.is_empty() {
            return 0;
        }
        self.tell_fairness(policies, effects);
        let needy = wanted.needy.map(|entry| self.request(self.sequence(entry).request));
        let context = VictimsContext {
            common: self.common(now),
            short_blocks: wanted.blocks,
            cause: wanted.cause as u8,
            take: VICTIMS_MAX as u64,
            needy_flow: needy.map_or(0, |request| request.manifest.flow.0),
            needy_class: needy.map_or(ClassRank::MAX, |request| request.class),
        };
        let rows = core::mem::take(&mut self.scratch.rows);
        let mut victims = core::mem::take(&mut self.scratch.victims);
        let asked = self.victims_seat.ask(policies.fairness(), now, &context, &VictimsRows(&rows), &mut victims);
        self.note_checked(penstock_policy_api::Decision::Fairness, &asked, effects);
        let mut freed = 0;
        for victim in &victims {
            // An overload action never stops the last one: it would start again at once.
            let last = wanted.cause == Cause::Overload && self.running.len() <= 1;
            if u64::from(freed) >= wanted.blocks || last {
                break;
            }
            if let Some(row) = rows.get(victim.row as usize) {
                freed += row.freed_blocks;
                self.preempt(now, row.entry, wanted.cause, effects);
            }
        }
        self.scratch.rows = rows;
        self.scratch.victims = victims;
        freed
    }

    fn gather_rows(&mut self, now: Instant, wanted: &Wanted, policies: &mut dyn Policies) {
        let mut rows = core::mem::take(&mut self.scratch.rows);
        rows.clear();
        let window = policies.fairness().terms().window(self.config.victim_rows);
        let most = if wanted.cause == Cause::Overload { wanted.class } else { wanted.class.min(self.spent_class()) };
        for entry in self.running.iter().copied() {
            if rows.len() >= window {
                break;
            }
            let seq = self.sequence(entry);
            let request = self.request(seq.request);
            let freed_blocks = self.kv.exclusive_blocks(&seq.table);
            // What is computed for another replica keeps its blocks: they are being read.
            let own = seq.held == Held::Free;
            let may = own && seq.preemptions < PREEMPTIONS_MAX && request.class <= most && freed_blocks > 0;
            if may {
                rows.push(RunningRow::of(seq, request, (entry, freed_blocks), (&self.config, &self.cost), now));
            }
        }
        self.scratch.rows = rows;
    }

    /// The sequence gives its blocks back and waits for its turn to compute its tokens again.
    fn preempt(&mut self, now: Instant, entry: u32, cause: Cause, effects: &mut ReplicaEffects) {
        let freed_blocks = self.kv.exclusive_blocks(&self.sequence(entry).table);
        let computed_tokens = self.sequence(entry).confirmed;
        let owner = self.sequence(entry).request;
        self.leave_lists(entry, Place::Running);
        self.release_blocks(now, entry);
        let resume_batch = self.next_batch;
        let seq = self.sequence_mut(entry);
        (seq.scheduled, seq.computed, seq.confirmed) = (0, 0, 0);
        seq.shares = None;
        seq.resuming = false;
        seq.place = Place::Preempted;
        seq.preemptions += 1;
        seq.resume_batch = resume_batch;
        seq.resume_at = if cause == Cause::Overload { now + STANCE_FRESH } else { Instant::ZERO };
        let index = seq.index;
        Self::insert_by_joining(&self.sequences, &mut self.resume, entry);
        self.trim_promise(owner);
        self.meters.on_preempted(now);
        let request = self.requests[owner as usize].as_mut().expect("a running sequence has its request");
        request.preemptions += 1;
        let (seq, gateway) = (request.seq_id(index), request.gateway);
        let message = FromReplica::Preempted {
            request: request.id(),
            attempt: request.attempt,
            computed_tokens,
            freed_blocks,
            cause_code: cause as u8,
        };
        self.facts.on_preempted(now, request, (computed_tokens, freed_blocks), cause as u8);
        self.digest.mix(Mark::Preempt, seq.as_u64(), u64::from(freed_blocks));
        effects.push(ReplicaEffect::Event(ReplicaEvent::Preempted { seq }));
        self.send(gateway, message, effects);
    }
}
