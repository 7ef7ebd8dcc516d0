//! Where sets end that have left: on a thread of its own, since ending an instance may give much memory back to the system.

use std::any::Any;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{SyncSender, TrySendError, sync_channel};

/// What may wait to be ended. Swaps are seconds apart; this is room for a hundred machines that swap at once.
const WAITING_MAX: usize = 256;

/// See the module. The thread ends with the last handle.
#[derive(Clone, Debug)]
pub(crate) struct Reaper {
    gone: SyncSender<Box<dyn Any + Send>>,
    waiting: Arc<AtomicUsize>,
}

impl Reaper {
    /// Starts the thread.
    pub fn start() -> std::io::Result<Self> {
        let (gone, take) = sync_channel::<Box<dyn Any + Send>>(WAITING_MAX);
        let waiting = Arc::new(AtomicUsize::new(0));
        let left = Arc::clone(&waiting);
        std::thread::Builder::new().name("penstock-reap".into()).spawn(move || {
            for retired in take {
                // What ends badly must not keep the others from ending.
                if std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| drop(retired))).is_err() {
                    tracing::error!("a policy set that had left panicked while it ended");
                }
                left.fetch_sub(1, Ordering::Release);
            }
        })?;
        Ok(Self { gone, waiting })
    }

    /// Takes what is to be ended. Never waits; where too much waits already it ends here.
    pub fn take(&self, retired: Box<dyn Any + Send>) {
        self.waiting.fetch_add(1, Ordering::AcqRel);
        if let Err(TrySendError::Full(retired) | TrySendError::Disconnected(retired)) = self.gone.try_send(retired) {
            drop(retired);
            self.waiting.fetch_sub(1, Ordering::Release);
        }
    }

    /// How many wait to be ended.
    pub fn waiting(&self) -> usize {
        self.waiting.load(Ordering::Acquire)
    }
}
