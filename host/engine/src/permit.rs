//! Submissions in flight: how many, and how many bytes of prompts they keep alive.
//!
//! A permit is taken before any work is done for a request and lives until both the engine and the client's stream have let go of it.
//! So the number of permits bounds every table, mailbox lane and send buffer that grows with requests.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

/// The pool of permits.
#[derive(Debug)]
pub(crate) struct Permits {
    held: Mutex<Held>,
    freed: Condvar,
    requests_max: usize,
    bytes_max: usize,
}

/// What is out now.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct Held {
    /// Requests in flight.
    pub requests: usize,
    /// Bytes they declared.
    pub bytes: usize,
}

/// Which bound refused.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Bound {
    /// Requests in flight.
    Requests,
    /// Their bytes.
    Bytes,
}

/// One request's share; given back on drop.
#[derive(Debug)]
pub(crate) struct Permit {
    permits: Arc<Permits>,
    bytes: usize,
}

impl Permits {
    /// A pool with these bounds.
    pub fn new(requests_max: usize, bytes_max: usize) -> Arc<Self> {
        Arc::new(Self { held: Mutex::default(), freed: Condvar::new(), requests_max, bytes_max })
    }

    /// A share for one request of `bytes`, unless a bound is reached.
    pub fn take(self: &Arc<Self>, bytes: usize) -> Result<Permit, Bound> {
        let mut held = self.lock();
        if held.requests >= self.requests_max {
            return Err(Bound::Requests);
        }
        if held.bytes.saturating_add(bytes) > self.bytes_max {
            return Err(Bound::Bytes);
        }
        held.requests += 1;
        held.bytes += bytes;
        Ok(Permit { permits: Arc::clone(self), bytes })
    }

    /// What is out now.
    pub fn held(&self) -> Held {
        *self.lock()
    }

    /// Waits until nothing is out; false when `deadline` came first.
    pub fn wait_until_idle(&self, deadline: Instant) -> bool {
        let mut held = self.lock();
        while held.requests > 0 {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return false;
            }
            held = self.freed.wait_timeout(held, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        true
    }

    fn lock(&self) -> MutexGuard<'_, Held> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        let mut held = self.permits.lock();
        held.requests -= 1;
        held.bytes -= self.bytes;
        if held.requests == 0 {
            self.permits.freed.notify_all();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_bound_refuses_at_its_limit_and_a_dropped_permit_makes_room() {
        let permits = Permits::new(2, 10);
        let first = permits.take(6).unwrap();
        assert_eq!(permits.take(5).unwrap_err(), Bound::Bytes);
        let second = permits.take(4).unwrap();
        assert_eq!(permits.take(0).unwrap_err(), Bound::Requests);
        assert_eq!(permits.held(), Held { requests: 2, bytes: 10 });
        drop(first);
        let third = permits.take(6).unwrap();
        drop((second, third));
        assert_eq!(permits.held(), Held::default());
        assert!(permits.wait_until_idle(Instant::now()));
    }
}
