//! When is the pool short, and how much should leave?

/// Parts of the pool that should stay free, in millionths.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Watermarks {
    /// Fewer free blocks than this part of the pool: time to evict.
    pub low_ppm: u32,
    /// Eviction refills to this part.
    pub high_ppm: u32,
}

impl Default for Watermarks {
    /// 5 % and 8 %.
    fn default() -> Self {
        Self { low_ppm: 50_000, high_ppm: 80_000 }
    }
}

/// An answer of [`Watermarks::pressure`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Pressure {
    /// Blocks to free; never more than can leave.
    pub want_blocks: u32,
    /// An allocation waits for it: the blocks needed now are more than the free ones.
    pub urgent: bool,
}

/// What the watermarks look at.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PoolLevel {
    /// Size of the pool.
    pub total: u32,
    /// Free blocks.
    pub free: u32,
    /// Cached blocks that could leave.
    pub evictable: u32,
    /// Blocks that this step is going to allocate.
    pub needed: u32,
}

impl Watermarks {
    /// Both marks lie in 0..=1,000,000 and in order?
    pub fn is_valid(&self) -> bool {
        self.low_ppm <= self.high_ppm && self.high_ppm <= 1_000_000
    }

    /// Must blocks leave now? None while enough are free, or when nothing can leave.
    pub fn pressure(&self, level: PoolLevel) -> Option<Pressure> {
        let part = |ppm: u32| (u64::from(level.total) * u64::from(ppm) / 1_000_000) as u32;
        let urgent = level.free < level.needed;
        if !urgent && level.free >= part(self.low_ppm) {
            return None;
        }
        let target = part(self.high_ppm).max(level.needed);
        let want_blocks = target.saturating_sub(level.free).min(level.evictable);
        (want_blocks > 0).then_some(Pressure { want_blocks, urgent })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn level(free: u32, evictable: u32, needed: u32) -> PoolLevel {
        PoolLevel { total: 1_000, free, evictable, needed }
    }

    #[test]
    fn under_five_percent_refills_to_eight() {
        let marks = Watermarks::default();
        assert_eq!(marks.pressure(level(50, 500, 0)), None);
        assert_eq!(marks.pressure(level(49, 500, 0)), Some(Pressure { want_blocks: 31, urgent: false }));
        assert_eq!(marks.pressure(level(49, 10, 0)), Some(Pressure { want_blocks: 10, urgent: false }));
        assert_eq!(marks.pressure(level(0, 0, 5)), None, "nothing can leave");
    }

    #[test]
    fn an_allocation_that_does_not_fit_is_urgent() {
        let marks = Watermarks::default();
        assert_eq!(marks.pressure(level(60, 500, 61)), Some(Pressure { want_blocks: 20, urgent: true }));
        assert_eq!(marks.pressure(level(60, 500, 200)), Some(Pressure { want_blocks: 140, urgent: true }));
    }
}
