//! Where sets end that have left: on a thread of its own, since ending an instance may give much memory back to the system.
//!
//! What lives on here is bounded by who activates: the next set is made only once everything that left before has ended. So there are never
//! more sets than those in force, those about to be, and what one swap leaves behind.

use std::any::Any;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{SyncSender, TrySendError, sync_channel};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Instant as Moment;

/// What may wait to be ended. Swaps are seconds apart; this is room for a hundred machines that swap at once.
const WAITING_MAX: usize = 256;

/// See the module. The thread ends with the last handle.
#[derive(Clone, Debug)]
pub(crate) struct Reaper {
    gone: SyncSender<Box<dyn Any + Send>>,
    waiting: Arc<Waiting>,
}

/// What has not ended yet.
#[derive(Debug, Default)]
struct Waiting {
    count: AtomicUsize,
    /// Held by nobody for longer than it takes to wake up.
    turn: Mutex<()>,
    ended: Condvar,
}

impl Waiting {
    fn one_ended(&self) {
        self.count.fetch_sub(1, Ordering::AcqRel);
        drop(self.turn.lock().unwrap_or_else(PoisonError::into_inner));
        self.ended.notify_all();
    }
}

impl Reaper {
    /// Starts the thread.
    pub fn start() -> std::io::Result<Self> {
        let (gone, take) = sync_channel::<Box<dyn Any + Send>>(WAITING_MAX);
        let waiting = Arc::<Waiting>::default();
        let left = Arc::clone(&waiting);
        std::thread::Builder::new().name("penstock-reap".into()).spawn(move || {
            for retired in take {
                // What ends badly must not keep the others from ending.
                if std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| drop(retired))).is_err() {
                    tracing::error!("a policy set that had left panicked while it ended");
                }
                left.one_ended();
            }
        })?;
        Ok(Self { gone, waiting })
    }

    /// Takes what is to be ended. Never waits; where too much waits already it ends here.
    pub fn take(&self, retired: Box<dyn Any + Send>) {
        self.waiting.count.fetch_add(1, Ordering::AcqRel);
        if let Err(TrySendError::Full(retired) | TrySendError::Disconnected(retired)) = self.gone.try_send(retired) {
            drop(retired);
            self.waiting.one_ended();
        }
    }

    /// How many wait to be ended.
    pub fn waiting(&self) -> usize {
        self.waiting.count.load(Ordering::Acquire)
    }

    /// Waits until everything has ended, at most until `deadline`. How many have not.
    pub fn await_all(&self, deadline: Moment) -> usize {
        let mut turn = self.waiting.turn.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            let left = deadline.saturating_duration_since(Moment::now());
            let waiting = self.waiting();
            if waiting == 0 || left.is_zero() {
                return waiting;
            }
            turn = self.waiting.ended.wait_timeout(turn, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}
