//! What has the prefix cache done so far, and lately?

use penstock_base::codec::{DecodeError, Reader, Writer};
use penstock_base::{Duration, Instant};

use crate::event::RemoveCause;
use crate::window::Window;

/// Evictions and regrets are looked at over this time.
pub const EVICTED_WINDOW: Duration = Duration::from_s(60);
const EVICTED_SLICE: Duration = Duration::from_s(1);
const HIT_SLICE: Duration = Duration::from_ms(100);

/// Counters since the start of the epoch; they only grow.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct CacheTotals {
    /// Blocks found at admission.
    pub hit_blocks: u64,
    /// Full blocks looked for at admission.
    pub queried_blocks: u64,
    /// Blocks stored.
    pub stored_blocks: u64,
    /// Blocks computed although the content was stored by then; the first one was kept.
    pub duplicate_blocks: u64,
    /// A key led to content with another parent: not served, not stored.
    pub collisions: u64,
    /// Blocks that could not be stored: no room for another tenant, a broken chain, or time up.
    pub unstored_blocks: u64,
    /// Evicted content that was computed again within [`EVICTED_WINDOW`].
    pub regret_blocks: u64,
    /// Blocks whose content left, by cause in the order of [`RemoveCause::ALL`].
    pub removed_blocks: [u64; RemoveCause::COUNT],
}

#[derive(Clone, Debug)]
pub(crate) struct CacheStats {
    pub(crate) totals: CacheTotals,
    /// Price of the leaf that left last for want of room.
    pub(crate) left_price: u64,
    evicted: Window<60>,
    regret: Window<60>,
    hits: Window<10>,
}

impl CacheStats {
    pub(crate) const fn new() -> Self {
        Self {
            totals: CacheTotals {
                hit_blocks: 0,
                queried_blocks: 0,
                stored_blocks: 0,
                duplicate_blocks: 0,
                collisions: 0,
                unstored_blocks: 0,
                regret_blocks: 0,
                removed_blocks: [0; RemoveCause::COUNT],
            },
            left_price: 0,
            evicted: Window::new(EVICTED_SLICE),
            regret: Window::new(EVICTED_SLICE),
            hits: Window::new(HIT_SLICE),
        }
    }

    pub(crate) fn on_match(&mut self, now: Instant, queried: u32, hit: u32) {
        self.totals.queried_blocks += u64::from(queried);
        self.totals.hit_blocks += u64::from(hit);
        self.hits.add(now, hit);
    }

    pub(crate) fn on_stored(&mut self, now: Instant, evicted_before: Option<Duration>) {
        self.totals.stored_blocks += 1;
        if evicted_before.is_some_and(|age| age <= EVICTED_WINDOW) {
            self.totals.regret_blocks += 1;
            self.regret.add(now, 1);
        }
    }

    pub(crate) fn on_removed(&mut self, now: Instant, cause: RemoveCause, idle: bool) {
        self.totals.removed_blocks[cause as usize] += 1;
        if cause.is_eviction() && idle {
            self.evicted.add(now, 1);
        }
    }

    pub(crate) fn evicted(&self, now: Instant) -> u64 {
        self.evicted.sum(now)
    }

    pub(crate) fn regret(&self, now: Instant) -> u64 {
        self.regret.sum(now)
    }

    pub(crate) fn hits_per_sec(&self, now: Instant) -> u64 {
        self.hits.sum(now)
    }

    pub(crate) fn encode(&self, out: &mut Writer) {
        let t = &self.totals;
        for count in [
            t.hit_blocks,
            t.queried_blocks,
            t.stored_blocks,
            t.duplicate_blocks,
            t.collisions,
            t.unstored_blocks,
            t.regret_blocks,
            self.left_price,
        ] {
            out.u64(count);
        }
        for count in t.removed_blocks {
            out.u64(count);
        }
        self.evicted.encode(out);
        self.regret.encode(out);
        self.hits.encode(out);
    }

    pub(crate) fn decode(from: &mut Reader<'_>) -> Result<Self, DecodeError> {
        let mut stats = Self::new();
        let t = &mut stats.totals;
        for count in [
            &mut t.hit_blocks,
            &mut t.queried_blocks,
            &mut t.stored_blocks,
            &mut t.duplicate_blocks,
            &mut t.collisions,
            &mut t.unstored_blocks,
            &mut t.regret_blocks,
            &mut stats.left_price,
        ] {
            *count = from.u64()?;
        }
        for count in &mut t.removed_blocks {
            *count = from.u64()?;
        }
        stats.evicted = Window::decode(EVICTED_SLICE, from)?;
        stats.regret = Window::decode(EVICTED_SLICE, from)?;
        stats.hits = Window::decode(HIT_SLICE, from)?;
        Ok(stats)
    }
}
