//! What leaves the prefix cache, and what is it worth? The policy prices, the block books order and free.

use alloc::vec::Vec;

use penstock_base::Instant;
use penstock_base::limits::EXPIRED_STEP_MAX;
use penstock_kv::{KvChange, KvEvent};
use penstock_policy_api::{Asked, Decision, FallbackReason, Policies};

use super::digest::Mark;
use super::signals::{EvictionContext, EvictionRows};
use super::{CacheChange, Replica, ReplicaEffect, ReplicaEffects, ReplicaEvent};
use crate::message::{CacheEvent, FromReplica};

impl Replica {
    /// Under the low watermark: prices the cheapest runs again and frees up to the high one.
    pub(super) fn keep_watermark(&mut self, now: Instant, policies: &mut dyn Policies, effects: &mut ReplicaEffects) {
        self.kv.expire(now, EXPIRED_STEP_MAX);
        let Some(pressure) = self.kv.pressure(0) else { return };
        self.reprice(now, pressure.want_blocks, false, policies, effects);
        self.kv.evict(now, pressure.want_blocks);
    }

    /// Before `blocks` are allocated: if some have to leave for it, the policy prices the cheapest ones first, once a step.
    pub(super) fn make_room(
        &mut self,
        now: Instant,
        blocks: u32,
        policies: &mut dyn Policies,
        effects: &mut ReplicaEffects,
    ) {
        if self.kv.counts().free >= blocks || self.kv.evictable_blocks() == 0 {
            return;
        }
        let want = self.kv.pressure(blocks).map_or(0, |pressure| pressure.want_blocks);
        self.reprice(now, want, true, policies, effects);
    }

    fn reprice(
        &mut self,
        now: Instant,
        want: u32,
        urgent: bool,
        policies: &mut dyn Policies,
        effects: &mut ReplicaEffects,
    ) {
        if core::mem::replace(&mut self.repriced, true) {
            return;
        }
        self.scratch.runs.clear();
        let window = policies.eviction().terms().window(self.config.eviction_rows);
        self.kv.cheapest(now, window, &mut self.scratch.runs);
        self.ask_prices(now, Some((want, urgent)), policies, effects);
    }

    /// Once a step: runs that came out of use and were not priced since.
    pub(super) fn price_waiting(&mut self, now: Instant, policies: &mut dyn Policies, effects: &mut ReplicaEffects) {
        if self.kv.unpriced_blocks() == 0 {
            return;
        }
        self.scratch.runs.clear();
        let window = policies.eviction().terms().window(self.config.eviction_rows);
        self.kv.take_unpriced(now, window, &mut self.scratch.runs);
        self.ask_prices(now, None, policies, effects);
    }

    fn ask_prices(
        &mut self,
        now: Instant,
        reprice: Option<(u32, bool)>,
        policies: &mut dyn Policies,
        effects: &mut ReplicaEffects,
    ) {
        if self.scratch.runs.is_empty() {
            return;
        }
        self.tell_eviction(policies, effects);
        let runs = core::mem::take(&mut self.scratch.runs);
        let mut priced = core::mem::take(&mut self.scratch.priced);
        let context = EvictionContext { common: self.common(now), kv: &self.kv, reprice, now };
        let rows = EvictionRows { rows: &runs, cost: &self.cost };
        let asked = self.eviction_seat.ask(policies.eviction(), now, &context, &rows, &mut priced);
        for (run, worth) in runs.iter().zip(&priced) {
            // An answer about a run that is in use again comes too late and is passed over.
            if self.kv.set_price(run.block, worth.price) == Ok(true) {
                self.digest.mix(Mark::Price, run.run_hash, worth.price);
            }
        }
        self.scratch.runs = runs;
        self.scratch.priced = priced;
        self.note_checked(Decision::Eviction, &asked, effects);
    }

    /// A policy's answer was not used, or not as it was.
    pub(super) fn note_checked<T>(&mut self, decision: Decision, asked: &Asked<T>, effects: &mut ReplicaEffects) {
        if let Some(reason) = asked.fallback {
            return self.note_fallback(decision, asked.call, reason, effects);
        }
        if let Some(change) = asked.changed {
            let event = ReplicaEvent::Changed { decision: decision as u8, call: asked.call, change: change as u8 };
            effects.push(ReplicaEffect::Event(event));
        }
    }

    /// `call` is 0 when the policy failed on facts that it was told.
    pub(super) fn note_fallback(
        &mut self,
        decision: Decision,
        call: u64,
        reason: FallbackReason,
        effects: &mut ReplicaEffects,
    ) {
        if reason.is_strike() {
            self.digest.mix(Mark::Fallback, decision as u64, 0);
            let event = ReplicaEvent::Fallback { decision: decision as u8, call, reason: reason.code() };
            effects.push(ReplicaEffect::Event(event));
        }
    }

    /// Tells gateways and policies what changed in the cache.
    pub(super) fn tell_cache(&mut self, now: Instant, effects: &mut ReplicaEffects) {
        let lost = self.kv.lost_events();
        if lost > core::mem::replace(&mut self.cache_events_lost, lost) {
            self.list_cache_again(effects);
            return;
        }
        let mut events = core::mem::take(&mut self.scratch.events);
        self.kv.take_events(&mut events);
        let mut evicted = 0;
        for KvEvent { change, .. } in events.drain(..) {
            let (event, told) = match change {
                KvChange::Stored { key, parent, depth_blocks, .. } => (
                    CacheEvent::Stored { key, depth: depth_blocks - 1 },
                    CacheChange::Stored { key, parent, depth_blocks },
                ),
                KvChange::Removed { key, cause, .. } => {
                    evicted += u32::from(cause.is_eviction());
                    self.digest.mix(Mark::Evict, key.short(), cause as u64);
                    (CacheEvent::Removed { key }, CacheChange::Removed { key })
                }
                KvChange::Cleared => (CacheEvent::Cleared, CacheChange::Cleared),
            };
            self.facts.on_cache(now, &change);
            effects.push(ReplicaEffect::Cached(told));
            self.tell_all(event, effects);
        }
        self.scratch.events = events;
        if evicted > 0 {
            effects.push(ReplicaEffect::Event(ReplicaEvent::Evicted { blocks: evicted }));
        }
    }

    /// Says how much of what was computed the prefix cache could not take.
    pub(super) fn tell_unstored(&mut self, effects: &mut ReplicaEffects) {
        let unstored = self.kv.totals().unstored_blocks;
        let blocks = unstored - core::mem::replace(&mut self.unstored_told, unstored);
        if blocks > 0 {
            effects.push(ReplicaEffect::Event(ReplicaEvent::Unstored { blocks }));
        }
    }

    fn tell_all(&mut self, event: CacheEvent, effects: &mut ReplicaEffects) {
        for peer in self.peers.as_mut_slice() {
            peer.cache_sequence += 1;
            let message = FromReplica::Cache { sequence: peer.cache_sequence, event };
            effects.push(ReplicaEffect::Send { gateway: peer.epoch, message });
        }
    }

    /// Everything that can be matched, for a gateway that has just come up. Walks the pool.
    pub(super) fn list_cache(&mut self, gateway: penstock_base::GatewayEpoch, effects: &mut ReplicaEffects) {
        // What waits to be told to everybody is part of the listing; telling it again would only repeat it.
        let Some(peer) = self.peers.get_mut(gateway) else { return };
        let sequence = &mut peer.cache_sequence;
        self.kv.for_each_stored_at(|key, depth_blocks| {
            *sequence += 1;
            let event = CacheEvent::Stored { key, depth: depth_blocks - 1 };
            effects.push(ReplicaEffect::Send { gateway, message: FromReplica::Cache { sequence: *sequence, event } });
        });
    }

    /// Everything that can be found, each block behind the one that it hangs on. Walks the pool.
    pub fn listed(&self) -> Vec<CacheChange> {
        let mut blocks = Vec::new();
        self.kv.for_each_stored_behind(|key, parent, depth_blocks| blocks.push((depth_blocks, key, parent)));
        blocks.sort_unstable();
        let stored = |(depth_blocks, key, parent)| CacheChange::Stored { key, parent, depth_blocks };
        blocks.into_iter().map(stored).collect()
    }

    /// Events were lost between two steps: everybody starts over from a listing.
    fn list_cache_again(&mut self, effects: &mut ReplicaEffects) {
        self.scratch.events.clear();
        let mut events = core::mem::take(&mut self.scratch.events);
        self.kv.take_events(&mut events);
        events.clear();
        self.scratch.events = events;
        effects.push(ReplicaEffect::Cached(CacheChange::Cleared));
        effects.extend(self.listed().into_iter().map(ReplicaEffect::Cached));
        self.tell_all(CacheEvent::Cleared, effects);
        for at in 0..self.peers.as_slice().len() {
            let gateway = self.peers.as_slice()[at].epoch;
            self.list_cache(gateway, effects);
        }
    }
}
