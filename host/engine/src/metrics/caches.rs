//! What is told of caches, and what is believed of them.

use penstock_kv_events::PublisherCounts;
use prometheus::{IntCounter, IntCounterVec, IntGauge};

use super::{Maker, signed, table as t};

/// See the module.
#[derive(Debug)]
pub(crate) struct CacheMetrics {
    gaps: IntCounter,
    doubts: IntCounter,
    doubted: IntGauge,
    batches: IntCounter,
    drops: IntCounterVec,
    subscribers: IntGauge,
}

impl CacheMetrics {
    pub(super) fn new(make: &Maker<'_>) -> Self {
        Self {
            gaps: make.counter(&t::CACHE_GAPS),
            doubts: make.counter(&t::CACHE_DOUBTS),
            doubted: make.gauge(&t::CACHES_DOUBTED),
            batches: make.counter(&t::KV_EVENT_BATCHES),
            drops: make.counters(&t::KV_EVENT_DROPS),
            subscribers: make.gauge(&t::KV_EVENT_SUBSCRIBERS),
        }
    }

    /// Events of a replica are missing.
    pub(crate) fn gap(&self) {
        self.gaps.inc();
    }

    /// What is known of a replica's cache is believed again, or no longer.
    pub(crate) fn belief(&self, believed: bool) {
        self.doubts.inc_by(u64::from(!believed));
    }

    /// Replicas that are not believed about now.
    pub(crate) fn doubted(&self, replicas: usize) {
        self.doubted.set(signed(replicas as u64));
    }

    /// A turn's changes found no room on their way to the publisher.
    pub(crate) fn turn_dropped(&self) {
        self.drops.with_label_values(&["queue"]).inc();
    }

    /// What one publisher did between two looks.
    pub(crate) fn published(&self, before: &PublisherCounts, now: &PublisherCounts) {
        self.batches.inc_by(now.published - before.published);
        self.drops.with_label_values(&["subscriber"]).inc_by(now.dropped - before.dropped);
        self.subscribers.add(signed(now.subscribers as u64) - signed(before.subscribers as u64));
    }
}
