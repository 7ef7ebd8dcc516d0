//! What do gateways hear of this replica, and what do metrics see?
//!
//! Credits are absolute and for one report; the parts of all gateways add up to what there is. A report goes out at the end of a step
//! when something that it says has changed, and every 100 ms otherwise.

use core::hash::BuildHasher;

use penstock_base::codec::{DecodeError, Reader, Writer};
use penstock_base::limits::REPORT_INTERVAL;
use penstock_base::map::FixedState;
use penstock_base::{ClassRank, Duration, Instant, Manifest};
use penstock_policy_api::native::{level_after, saturation_ppm};

use super::meter::{Rate, SlidingSum};
use super::peers::Told;
use super::sequence::Place;
use super::{Replica, ReplicaEffect, ReplicaEffects};
use crate::message::{Credit, FromReplica, Load, Report};

const BUSY_SLICE: Duration = Duration::from_s(1);
const PREEMPTED_SLICE: Duration = Duration::from_s(1);
/// Steps' worth of prompt tokens that a replica wants to hold: one to compute, one ready behind it.
const PREFILL_STEPS: u64 = 2;

/// What this replica measures of itself.
#[derive(Clone, Debug)]
pub(super) struct Meters {
    /// Device time of the last 60 s, in nanoseconds.
    busy: SlidingSum<60>,
    /// Preemptions of the last 10 s.
    pub(super) preempted: SlidingSum<10>,
    prefill: Rate,
    decode: Rate,
    /// Counted in the batch being confirmed.
    pub(super) prefilled: u64,
    pub(super) decoded: u64,
    /// Since the start.
    totals: Totals,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
struct Totals {
    steps: u64,
    prefill_tokens: u64,
    decode_tokens: u64,
    preemptions: u64,
    queried_tokens: u64,
    hit_tokens: u64,
}

impl Meters {
    pub(super) fn starting_at(now: Instant) -> Self {
        Self {
            busy: SlidingSum::new(BUSY_SLICE),
            preempted: SlidingSum::new(PREEMPTED_SLICE),
            prefill: Rate::starting_at(now),
            decode: Rate::starting_at(now),
            prefilled: 0,
            decoded: 0,
            totals: Totals::default(),
        }
    }

    pub(super) fn on_step(&mut self, now: Instant, took: Duration) {
        self.busy.add(now, took.0);
        self.totals.steps += 1;
        let (prefilled, decoded) = (core::mem::take(&mut self.prefilled), core::mem::take(&mut self.decoded));
        self.prefill.add(now, prefilled);
        self.decode.add(now, decoded);
        self.totals.prefill_tokens += prefilled;
        self.totals.decode_tokens += decoded;
    }

    pub(super) fn on_preempted(&mut self, now: Instant) {
        self.preempted.add(now, 1);
        self.totals.preemptions += 1;
    }

    pub(super) fn on_lookup(&mut self, queried_tokens: u64, hit_tokens: u64) {
        self.totals.queried_tokens += queried_tokens;
        self.totals.hit_tokens += hit_tokens;
    }

    pub(super) fn encode(&self, out: &mut Writer) {
        self.busy.encode(out);
        self.preempted.encode(out);
        self.prefill.encode(out);
        self.decode.encode(out);
        let t = &self.totals;
        let totals = [t.steps, t.prefill_tokens, t.decode_tokens, t.preemptions, t.queried_tokens, t.hit_tokens];
        totals.into_iter().for_each(|total| out.u64(total));
    }

    pub(super) fn decode(from: &mut Reader<'_>) -> Result<Self, DecodeError> {
        Ok(Self {
            busy: SlidingSum::decode(BUSY_SLICE, from)?,
            preempted: SlidingSum::decode(PREEMPTED_SLICE, from)?,
            prefill: Rate::decode(from)?,
            decode: Rate::decode(from)?,
            prefilled: 0,
            decoded: 0,
            totals: Totals {
                steps: from.u64()?,
                prefill_tokens: from.u64()?,
                decode_tokens: from.u64()?,
                preemptions: from.u64()?,
                queried_tokens: from.u64()?,
                hit_tokens: from.u64()?,
            },
        })
    }
}

/// What metrics show of a replica.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Gauges {
    /// Blocks by state; they add up to the pool.
    pub blocks: penstock_kv::Counts,
    /// Promised and not handed out.
    pub reserved_blocks: u64,
    /// Requests with a sequence in the batch.
    pub running_requests: u32,
    /// Requests in the ready window, and preempted ones.
    pub ready_requests: u32,
    /// Steps in flight.
    pub inflight_steps: u32,
    /// Finished steps since the start.
    pub steps_total: u64,
    /// Prompt tokens computed for the first time.
    pub prefill_tokens_total: u64,
    /// Output tokens delivered.
    pub decode_tokens_total: u64,
    /// Preemptions.
    pub preemptions_total: u64,
    /// Prompt tokens that could have been cached when their request started.
    pub prefix_queried_tokens_total: u64,
    /// Of these, cached.
    pub prefix_hit_tokens_total: u64,
    /// Inputs and results that named something dead.
    pub stale_total: u64,
    /// Steps with a clock that ran backwards.
    pub clock_clamped_total: u64,
}

/// Sums over what is here.
#[derive(Clone, Copy, Default)]
struct Survey {
    running_requests: u32,
    ready_requests: u32,
    ready_blocks: u64,
    ready_slots: u32,
    growth_blocks: u64,
    held_blocks: u64,
    prefill_tokens: u64,
    class_blocks: [u32; ClassRank::COUNT],
}

impl Replica {
    fn survey(&self) -> Survey {
        let mut sum = Survey::default();
        let size = self.config.block_size_tokens;
        for request in self.requests.iter().flatten().filter(|request| request.live > 0) {
            let prompt = u64::from(request.prompt());
            let own = u64::from(request.live) * u64::from(request.own_blocks);
            sum.growth_blocks += u64::from(request.shared_blocks) + own;
            if request.ready {
                let held = request.prefix.as_ref().map_or(0, |table| table.len());
                let reserve =
                    Manifest::need_blocks(request.prompt(), request.reserve_output, request.manifest.sequences, size);
                sum.ready_requests += 1;
                sum.ready_slots += u32::from(request.manifest.sequences);
                sum.ready_blocks += reserve.saturating_sub(u64::from(held));
                sum.prefill_tokens += prompt - u64::from(held * size).min(prompt);
                sum.held_blocks += u64::from(held);
                sum.class_blocks[request.class.index()] += held;
                continue;
            }
            let (mut runs, mut waits, mut shared) = (false, false, 0);
            for entry in request.live_sequences() {
                let seq = self.sequence(entry);
                // What siblings share is counted with the first of them.
                let held = seq.table.len().saturating_sub(shared);
                sum.class_blocks[request.class.index()] += held;
                sum.prefill_tokens += u64::from(seq.prompt.saturating_sub(seq.scheduled.max(shared * size)));
                sum.held_blocks += u64::from(held);
                shared = request.shared_blocks;
                match seq.place {
                    Place::Running => runs = true,
                    Place::Preempted => {
                        waits = true;
                        sum.ready_blocks += u64::from(seq.len().div_ceil(size));
                    }
                    Place::Waiting | Place::Vacant => {}
                }
            }
            sum.running_requests += u32::from(runs);
            sum.ready_requests += u32::from(waits && !runs);
        }
        let promised = self.kv.reservations().total();
        sum.growth_blocks = sum.growth_blocks.saturating_sub(sum.held_blocks).saturating_sub(promised);
        sum
    }

    /// Its load as of now, for a driver whose replica reports to nobody.
    pub fn present_load(&self, now: Instant) -> Load {
        self.load(now, &self.survey())
    }

    fn load(&self, now: Instant, sum: &Survey) -> Load {
        let counts = self.kv.counts();
        Load {
            total_blocks: self.config.blocks,
            active_blocks: counts.active,
            cached_blocks: counts.cached,
            free_blocks: counts.free,
            reclaimable_blocks: counts.reclaimable,
            transfer_blocks: counts.in_transfer(),
            reserved_blocks: self.kv.reservations().total().min(u64::from(u32::MAX)) as u32,
            growth_blocks: sum.growth_blocks,
            ready_requests: sum.ready_requests,
            ready_blocks: sum.ready_blocks.min(u64::from(u32::MAX)) as u32,
            running_requests: sum.running_requests,
            prefill_tokens: sum.prefill_tokens,
            step: self.cost.step(),
            busy: Duration(self.meters.busy.sum(now)),
            hit_blocks_per_sec: self.kv.hit_blocks_per_sec(now),
            preempted_requests: self.meters.preempted.sum(now).min(u64::from(u32::MAX)) as u32,
            prefill_tokens_per_sec: self.meters.prefill.per_sec(now),
            decode_tokens_per_sec: self.meters.decode.per_sec(now),
            class_active_blocks: sum.class_blocks,
            prefill_token_ns: self.cost.prefill_token_ns(),
        }
    }

    /// All that may be dispatched here now, over all gateways.
    fn credit(&self, now: Instant, sum: &Survey) -> Credit {
        if self.draining || !self.sends() {
            return Credit::default();
        }
        let window = (self.config.ready_window.saturating_sub(self.ready.len())) as u32;
        // While preempted sequences wait, new work could only stand in the ready window.
        let slots = if self.resumes_first(now) { 0 } else { self.vacant_slots().saturating_sub(sum.ready_slots) };
        let wanted = PREFILL_STEPS * u64::from(self.config.step_tokens);
        Credit {
            requests: slots + window,
            prefill_tokens: wanted.saturating_sub(sum.prefill_tokens),
            blocks: u64::from(self.kv.available_blocks().saturating_sub(self.growth_blocks)),
        }
    }

    /// At the end of a step: the ladder looks at the pool, and gateways hear what changed.
    pub(super) fn tell_load(&mut self, now: Instant, effects: &mut ReplicaEffects) {
        let counts = self.kv.counts();
        self.ladder_level =
            level_after(self.ladder_level, saturation_ppm(u64::from(counts.active), u64::from(self.config.blocks)));
        if self.peers.as_slice().is_empty() {
            return;
        }
        let sum = self.survey();
        let (load, credit) = (self.load(now, &sum), self.credit(now, &sum));
        let key = [
            u64::from(load.active_blocks),
            u64::from(load.cached_blocks),
            u64::from(load.free_blocks),
            u64::from(load.reserved_blocks),
            u64::from(load.ready_requests),
            u64::from(load.running_requests),
            load.prefill_tokens,
        ];
        // One turn for all that are told now, and no rhythm in whose it is: steps and reports have rhythms of their own.
        let turn = FixedState.hash_one(self.report_number) >> 32;
        let shared = !self.by_id.is_empty();
        for at in 0..self.peers.as_slice().len() {
            let peer = self.peers.as_slice()[at];
            let unchanged = |told: Told| told.covers == peer.covers && told.total == credit && told.load == key;
            if peer.told.is_some_and(|told| unchanged(told) && now.since(told.at) < REPORT_INTERVAL) {
                continue;
            }
            self.report_number += 1;
            let part = |total| self.peers.share(at, turn, total, shared);
            // Any part of this one covers a prompt of whatever length: nobody needs the whole.
            let prefill_tokens = self.peers.share(at, turn, credit.prefill_tokens, true);
            let report = Report {
                number: self.report_number,
                as_of: now,
                covers: peer.covers,
                credit: Credit {
                    requests: part(u64::from(credit.requests)) as u32,
                    prefill_tokens,
                    blocks: part(credit.blocks),
                },
                load,
                cache_sequence: peer.cache_sequence,
            };
            self.peers.as_mut_slice()[at].told = Some(Told { at: now, covers: peer.covers, total: credit, load: key });
            effects.push(ReplicaEffect::Send { gateway: peer.epoch, message: FromReplica::Report(report) });
        }
    }

    /// When the next report is due without a change.
    pub(super) fn next_report(&self) -> Instant {
        let due = |told: Option<Told>| told.map_or(Instant::ZERO, |told| told.at + REPORT_INTERVAL);
        self.peers.as_slice().iter().map(|peer| due(peer.told)).min().unwrap_or(Instant::NEVER)
    }

    /// What metrics show.
    pub fn gauges(&self) -> Gauges {
        let (sum, totals) = (self.survey(), &self.meters.totals);
        Gauges {
            blocks: self.kv.counts(),
            reserved_blocks: self.kv.reservations().total(),
            running_requests: sum.running_requests,
            ready_requests: sum.ready_requests,
            inflight_steps: self.batches.len() as u32,
            steps_total: totals.steps,
            prefill_tokens_total: totals.prefill_tokens,
            decode_tokens_total: totals.decode_tokens,
            preemptions_total: totals.preemptions,
            prefix_queried_tokens_total: totals.queried_tokens,
            prefix_hit_tokens_total: totals.hit_tokens,
            stale_total: self.stale_count,
            clock_clamped_total: self.clock.clamped_count(),
        }
    }
}
