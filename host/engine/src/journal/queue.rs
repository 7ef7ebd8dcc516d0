//! From the machines' threads to the writer: bounded in bytes, nobody waits but the writer.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Condvar, Mutex, PoisonError};

use penstock_base::Instant;
use penstock_journal::{BreakCause, SegmentHeader};

/// What the writer is to do for one machine's log.
#[derive(Debug)]
pub(super) struct Order {
    /// Which machine's.
    pub log: usize,
    pub what: What,
}

#[derive(Debug)]
pub(super) enum What {
    /// A segment opens.
    Open(Box<SegmentHeader>),
    /// Records, each a kind, a length and a payload.
    Records(Vec<u8>),
    /// The segment is complete.
    Complete { steps: u64, now: Instant },
    /// The segment ends here, broken off.
    Broken(BreakCause),
}

#[derive(Debug)]
pub(super) struct Queue {
    state: Mutex<State>,
    changed: Condvar,
    bytes_max: usize,
    /// By log: the writer could not write, and the segment is over.
    failed: Box<[AtomicBool]>,
}

#[derive(Debug, Default)]
struct State {
    orders: VecDeque<Order>,
    bytes: usize,
    is_closed: bool,
}

impl Queue {
    pub fn new(bytes_max: usize, logs: usize) -> Self {
        let failed = (0..logs).map(|_| AtomicBool::new(false)).collect();
        Self { state: Mutex::default(), changed: Condvar::new(), bytes_max, failed }
    }

    fn state(&self) -> std::sync::MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Puts an order in, unless its bytes do not fit. Ends take no room: there is one for each segment that opened.
    pub fn put(&self, order: Order) -> bool {
        let bytes = bytes_of(&order.what);
        let mut state = self.state();
        if state.is_closed || bytes > 0 && state.bytes + bytes > self.bytes_max {
            return false;
        }
        state.bytes += bytes;
        state.orders.push_back(order);
        drop(state);
        self.changed.notify_one();
        true
    }

    /// The next order; waits for it. `None` when it is closed and empty.
    pub fn next(&self) -> Option<Order> {
        let mut state = self.state();
        loop {
            if let Some(order) = state.orders.pop_front() {
                state.bytes -= bytes_of(&order.what);
                return Some(order);
            }
            if state.is_closed {
                return None;
            }
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Room for a segment's opening: half of the queue, so that one that has just overflowed does not do so again at once.
    pub fn has_room(&self) -> bool {
        self.state().bytes <= self.bytes_max / 2
    }

    pub fn waiting_bytes(&self) -> usize {
        self.state().bytes
    }

    pub fn close(&self) {
        self.state().is_closed = true;
        self.changed.notify_all();
    }

    /// The writer's word that a log's segment is over.
    pub fn fail(&self, log: usize) {
        if let Some(failed) = self.failed.get(log) {
            failed.store(true, Ordering::Release);
        }
    }

    /// Was there such a word? It is heard once.
    pub fn has_failed(&self, log: usize) -> bool {
        self.failed.get(log).is_some_and(|failed| failed.swap(false, Ordering::AcqRel))
    }
}

fn bytes_of(what: &What) -> usize {
    match what {
        What::Open(header) => {
            let states =
                header.seated.saved.iter().filter_map(|saved| saved.state.as_ref()).map(Vec::len).sum::<usize>();
            header.config.len() + header.snapshot.len() + header.seated.set.len() + states
        }
        What::Records(bytes) => bytes.len(),
        What::Complete { .. } | What::Broken(_) => 0,
    }
}
