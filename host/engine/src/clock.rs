//! The one place where the wall clock becomes an [`Instant`].

use penstock_base::Instant;

/// Nanoseconds since the engine was started. Copies share the origin.
#[derive(Clone, Copy, Debug)]
pub struct Clock {
    origin: std::time::Instant,
}

impl Clock {
    /// A clock whose origin is now.
    pub fn starting_now() -> Self {
        Self { origin: std::time::Instant::now() }
    }

    /// The time.
    pub fn now(&self) -> Instant {
        Instant(u64::try_from(self.origin.elapsed().as_nanos()).unwrap_or(u64::MAX))
    }

    /// When to wake up for `at`; none for an instant that never comes (or lies beyond what the system can wait for).
    pub fn wake_at(&self, at: Instant) -> Option<std::time::Instant> {
        if at == Instant::NEVER {
            return None;
        }
        self.origin.checked_add(std::time::Duration::from_nanos(at.0))
    }
}
