//! How much happened lately? Rates and sums over sliding time, in integers.

use penstock_base::codec::{DecodeError, Reader, Writer};
use penstock_base::{Duration, Instant};

const SECOND_NS: u128 = 1_000_000_000;
/// Binary places kept below one per second.
const SCALE_BITS: u32 = 10;

/// Events per second, smoothed over one second: `r' = (r * 1 s + n) / (1 s + dt)`. A steady flow reads as its rate; silence fades it.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) struct Rate {
    /// Per second, scaled.
    scaled: u64,
    /// When `scaled` was true.
    as_of: Instant,
    /// Counted since then.
    pending: u64,
}

impl Rate {
    pub(super) fn starting_at(now: Instant) -> Self {
        Self { as_of: now, ..Self::default() }
    }

    fn seen_at(&self, now: Instant) -> Self {
        let dt = u128::from(now.since(self.as_of).0);
        if dt == 0 {
            return *self;
        }
        let counted = (u128::from(self.pending) * SECOND_NS) << SCALE_BITS;
        let scaled = (u128::from(self.scaled) * SECOND_NS + counted) / (SECOND_NS + dt);
        Self { scaled: u64::try_from(scaled).unwrap_or(u64::MAX), as_of: now, pending: 0 }
    }

    pub(super) fn add(&mut self, now: Instant, count: u64) {
        *self = self.seen_at(now);
        self.pending = self.pending.saturating_add(count);
    }

    pub(super) fn per_sec(&self, now: Instant) -> u64 {
        self.seen_at(now).scaled >> SCALE_BITS
    }

    pub(super) fn encode(&self, out: &mut Writer) {
        out.u64(self.scaled);
        out.u64(self.as_of.0);
        out.u64(self.pending);
    }

    pub(super) fn decode(from: &mut Reader<'_>) -> Result<Self, DecodeError> {
        Ok(Self { scaled: from.u64()?, as_of: Instant(from.u64()?), pending: from.u64()? })
    }
}

/// A sum over the last `N` slices of time, the present one included.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct SlidingSum<const N: usize> {
    slice: Duration,
    slots: [u64; N],
    /// Number of the newest slice since the origin.
    newest: u64,
}

impl<const N: usize> SlidingSum<N> {
    pub(super) const fn new(slice: Duration) -> Self {
        Self { slice, slots: [0; N], newest: 0 }
    }

    fn advance(&mut self, now: Instant) {
        let slice = now.0 / self.slice.0.max(1);
        let passed = slice.saturating_sub(self.newest).min(N as u64);
        for back in 0..passed {
            self.slots[((slice - back) % N as u64) as usize] = 0;
        }
        self.newest = self.newest.max(slice);
    }

    pub(super) fn add(&mut self, now: Instant, count: u64) {
        self.advance(now);
        let slot = &mut self.slots[(self.newest % N as u64) as usize];
        *slot = slot.saturating_add(count);
    }

    pub(super) fn sum(&self, now: Instant) -> u64 {
        let mut seen = *self;
        seen.advance(now);
        seen.slots.iter().fold(0, |sum, slot| sum.saturating_add(*slot))
    }

    pub(super) fn encode(&self, out: &mut Writer) {
        out.u64(self.newest);
        for slot in self.slots {
            out.u64(slot);
        }
    }

    pub(super) fn decode(slice: Duration, from: &mut Reader<'_>) -> Result<Self, DecodeError> {
        let mut sum = Self::new(slice);
        sum.newest = from.u64()?;
        for slot in &mut sum.slots {
            *slot = from.u64()?;
        }
        Ok(sum)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn ms(ms: u64) -> Instant {
        Instant(ms * 1_000_000)
    }

    #[test]
    fn a_steady_flow_reads_as_its_rate_and_silence_fades_it() {
        // Fixed point of r = (r + n) / (1 + dt): r = n / dt = 5 / 0.1 s.
        let mut rate = Rate::starting_at(ms(0));
        for i in 0..200 {
            rate.add(ms(i * 100), 5);
        }
        assert_eq!(rate.per_sec(ms(20_000)), 49, "50 a second, rounded down on the way");
        // One second of silence halves it: r / (1 + 1).
        assert_eq!(rate.per_sec(ms(20_900)), 27, "(49.99 + 5) / 2");
        assert_eq!(Rate::default().per_sec(ms(5)), 0);
    }

    #[test]
    fn a_sum_forgets_what_left_the_window() {
        let mut sum = SlidingSum::<3>::new(Duration::from_s(1));
        sum.add(ms(10_500), 5);
        sum.add(ms(11_999), 2);
        assert_eq!((sum.sum(ms(12_999)), sum.sum(ms(13_000)), sum.sum(ms(14_000))), (7, 2, 0));
        sum.add(ms(900_000), 1);
        assert_eq!(sum.sum(ms(900_000)), 1);
    }
}
