//! Counts things that happen once, and lets a thread wait for a number of them with a deadline.

use std::sync::{Condvar, Mutex, PoisonError};
use std::time::Instant;

/// See the module.
#[derive(Debug, Default)]
pub(crate) struct Latch {
    count: Mutex<usize>,
    changed: Condvar,
}

impl Latch {
    /// One more has happened.
    pub fn signal(&self) {
        *self.count.lock().unwrap_or_else(PoisonError::into_inner) += 1;
        self.changed.notify_all();
    }

    /// Waits until `wanted` have happened; false when `deadline` came first.
    pub fn wait(&self, wanted: usize, deadline: Instant) -> bool {
        let mut count = self.count.lock().unwrap_or_else(PoisonError::into_inner);
        while *count < wanted {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return false;
            }
            count = self.changed.wait_timeout(count, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        true
    }
}
