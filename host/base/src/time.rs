//! Time as data. An [`Instant`] is nanoseconds since the origin of the process (or of the simulation); nothing here reads a clock.

use core::fmt;
use core::ops::{Add, Sub};

/// Nanoseconds since the process's origin. On a wire only remaining and elapsed times travel, never an instant.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub struct Instant(pub u64);

/// A length of time in nanoseconds. Arithmetic saturates.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub struct Duration(pub u64);

impl Instant {
    /// The origin.
    pub const ZERO: Self = Self(0);
    /// A moment that never comes: "no deadline".
    pub const NEVER: Self = Self(u64::MAX);

    /// Microseconds since the origin, as policies see it.
    pub fn as_us(self) -> u64 {
        if self == Self::NEVER { u64::MAX } else { self.0 / 1_000 }
    }

    /// Time since `earlier`; zero when `earlier` lies ahead.
    pub fn since(self, earlier: Self) -> Duration {
        Duration(self.0.saturating_sub(earlier.0))
    }

    /// Time until `later`; [`Duration::MAX`] when `later` never comes, zero when it has passed.
    pub fn until(self, later: Self) -> Duration {
        if later == Self::NEVER { Duration::MAX } else { later.since(self) }
    }
}

impl Duration {
    /// No time.
    pub const ZERO: Self = Self(0);
    /// Longer than anything that is waited for.
    pub const MAX: Self = Self(u64::MAX);

    /// From nanoseconds.
    pub const fn from_ns(ns: u64) -> Self {
        Self(ns)
    }
    /// From microseconds, saturating.
    pub const fn from_us(us: u64) -> Self {
        Self(us.saturating_mul(1_000))
    }
    /// From milliseconds, saturating.
    pub const fn from_ms(ms: u64) -> Self {
        Self(ms.saturating_mul(1_000_000))
    }
    /// From seconds, saturating.
    pub const fn from_s(s: u64) -> Self {
        Self(s.saturating_mul(1_000_000_000))
    }
    /// Whole microseconds; [`u64::MAX`] stays `u64::MAX`, so that "none" is one value in every unit.
    pub fn as_us(self) -> u64 {
        if self == Self::MAX { u64::MAX } else { self.0 / 1_000 }
    }
    /// Whole milliseconds, with the same rule.
    pub fn as_ms(self) -> u64 {
        if self == Self::MAX { u64::MAX } else { self.0 / 1_000_000 }
    }
}

impl Add<Duration> for Instant {
    type Output = Self;
    fn add(self, by: Duration) -> Self {
        Self(self.0.saturating_add(by.0))
    }
}

impl Sub<Duration> for Instant {
    type Output = Self;
    fn sub(self, by: Duration) -> Self {
        Self(self.0.saturating_sub(by.0))
    }
}

impl Add for Duration {
    type Output = Self;
    fn add(self, by: Self) -> Self {
        Self(self.0.saturating_add(by.0))
    }
}

impl fmt::Display for Duration {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} us", self.as_us())
    }
}

/// Makes a machine's `now` monotone: a smaller one is clamped to the last and counted.
///
/// Question answered: what time is it for this machine, whatever the driver says?
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct MonotoneNow {
    last: Instant,
    clamped_count: u64,
}

impl MonotoneNow {
    /// Starts at `origin`.
    pub fn starting_at(origin: Instant) -> Self {
        Self { last: origin, clamped_count: 0 }
    }

    /// The time to use for this step.
    pub fn observe(&mut self, now: Instant) -> Instant {
        if now < self.last {
            self.clamped_count += 1;
        } else {
            self.last = now;
        }
        self.last
    }

    /// The last time observed.
    pub fn last(&self) -> Instant {
        self.last
    }

    /// How often a driver's clock ran backwards.
    pub fn clamped_count(&self) -> u64 {
        self.clamped_count
    }

    /// Writes the state for a snapshot.
    pub fn encode(&self, out: &mut crate::codec::Writer) {
        out.u64(self.last.0);
        out.u64(self.clamped_count);
    }

    /// Reads what [`Self::encode`] wrote.
    pub fn decode(from: &mut crate::codec::Reader<'_>) -> Result<Self, crate::codec::DecodeError> {
        Ok(Self { last: Instant(from.u64()?), clamped_count: from.u64()? })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_clock_that_runs_backwards_is_clamped_and_counted() {
        let mut now = MonotoneNow::starting_at(Instant(10));
        assert_eq!(now.observe(Instant(5)), Instant(10));
        assert_eq!(now.observe(Instant(12)), Instant(12));
        assert_eq!(now.clamped_count(), 1);
    }

    #[test]
    fn never_stays_never_in_every_unit() {
        assert_eq!(Instant::NEVER.as_us(), u64::MAX);
        assert_eq!(Instant(7).until(Instant::NEVER).as_us(), u64::MAX);
        assert_eq!(Instant(7).until(Instant(3)), Duration::ZERO);
    }
}
