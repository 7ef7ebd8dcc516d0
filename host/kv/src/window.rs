//! How often did this happen lately? A sum over a sliding window of equal slices.

use penstock_base::codec::{DecodeError, Reader, Writer};
use penstock_base::{Duration, Instant};

/// Events of the last `N` slices, the present one included. Reading and counting cost O(slices passed), at most `N`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Window<const N: usize> {
    slice: Duration,
    counts: [u32; N],
    /// Number of the newest slice since the origin.
    newest: u64,
    sum: u64,
}

impl<const N: usize> Window<N> {
    pub(crate) const fn new(slice: Duration) -> Self {
        Self { slice, counts: [0; N], newest: 0, sum: 0 }
    }

    fn slice_of(&self, now: Instant) -> u64 {
        now.0 / self.slice.0
    }

    fn advance(&mut self, now: Instant) {
        let slice = self.slice_of(now);
        let passed = slice.saturating_sub(self.newest).min(N as u64);
        for k in 1..=passed {
            let slot = ((slice - passed + k) % N as u64) as usize;
            self.sum -= u64::from(core::mem::take(&mut self.counts[slot]));
        }
        self.newest = self.newest.max(slice);
    }

    pub(crate) fn add(&mut self, now: Instant, count: u32) {
        self.advance(now);
        let slot = &mut self.counts[(self.newest % N as u64) as usize];
        let sum = slot.saturating_add(count);
        self.sum += u64::from(sum - core::mem::replace(slot, sum));
    }

    /// The sum as seen at `now`.
    pub(crate) fn sum(&self, now: Instant) -> u64 {
        let mut seen = *self;
        seen.advance(now);
        seen.sum
    }

    pub(crate) fn encode(&self, out: &mut Writer) {
        out.u64(self.newest);
        for count in self.counts {
            out.u32(count);
        }
    }

    pub(crate) fn decode(slice: Duration, from: &mut Reader<'_>) -> Result<Self, DecodeError> {
        let mut window = Self::new(slice);
        window.newest = from.u64()?;
        for count in &mut window.counts {
            *count = from.u32()?;
            window.sum += u64::from(*count);
        }
        Ok(window)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slices_leave_when_the_window_has_passed_them() {
        let mut window = Window::<3>::new(Duration::from_s(1));
        let at = |s: u64| Instant(s * 1_000_000_000);
        window.add(at(10), 5);
        window.add(at(11), 2);
        assert_eq!((window.sum(at(11)), window.sum(at(12)), window.sum(at(13)), window.sum(at(14))), (7, 7, 2, 0));
        window.add(at(1_000), 1);
        assert_eq!(window.sum(at(1_000)), 1);
    }
}
