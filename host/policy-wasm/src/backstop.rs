//! When does a call end that fuel does not end? After processor time of its own thread.
//!
//! Fuel bounds what a guest computes; the backstop bounds what fuel prices too low. It counts the time in which the calling thread ran: on a
//! machine that is overloaded, or was suspended, a call may take long by the clock, and the policy has done nothing wrong. The engine's
//! epochs only say when to look; most calls are over before the first one.

use std::sync::mpsc::{RecvTimeoutError, SyncSender, sync_channel};
use std::thread::JoinHandle;
use std::time::Duration;

use wasmtime::{Engine, UpdateDeadline};

/// Looks at the time in one backstop.
const TICKS: u32 = 4;

/// What is known of the present call's time.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct CallTime {
    /// Processor time of the thread when it was first looked at, at most a tick after the call began.
    first_seen: Option<Duration>,
}

impl CallTime {
    /// Another look: a call ends once its thread has run for `backstop` since the first one.
    pub fn on_tick(&mut self, backstop: Duration) -> UpdateDeadline {
        let now = thread_time();
        let first = *self.first_seen.get_or_insert(now);
        if now.saturating_sub(first) < backstop { UpdateDeadline::Continue(1) } else { UpdateDeadline::Interrupt }
    }
}

/// Processor time that this thread has used.
fn thread_time() -> Duration {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the call writes one timespec, and leaves it alone when it fails.
    unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &mut time) };
    Duration::new(time.tv_sec.unsigned_abs(), time.tv_nsec.unsigned_abs() as u32)
}

/// Moves the engine's epoch on, so that calls are looked at. Ends when it is dropped.
pub(crate) struct Ticker {
    stop: Option<SyncSender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Ticker {
    /// Four looks in one `backstop`.
    pub fn start(engine: Engine, backstop: Duration) -> std::io::Result<Self> {
        let tick = backstop / TICKS;
        let (stop, stopped) = sync_channel(0);
        let thread = std::thread::Builder::new().name("policy-backstop".to_owned()).spawn(move || {
            while stopped.recv_timeout(tick) == Err(RecvTimeoutError::Timeout) {
                engine.increment_epoch();
            }
        })?;
        Ok(Self { stop: Some(stop), thread: Some(thread) })
    }
}

impl Drop for Ticker {
    fn drop(&mut self) {
        self.stop.take();
        if let Some(thread) = self.thread.take() {
            // A ticker that panicked has already stopped; there is nothing more to end.
            let _ended = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn time_in_which_the_thread_does_not_run_is_not_counted() {
        let backstop = Duration::from_millis(50);
        let mut call = CallTime::default();
        assert!(matches!(call.on_tick(backstop), UpdateDeadline::Continue(1)));
        std::thread::sleep(3 * backstop);
        assert!(matches!(call.on_tick(backstop), UpdateDeadline::Continue(1)), "it slept");
        let begun = thread_time();
        while thread_time() - begun < backstop {
            std::hint::spin_loop();
        }
        assert!(matches!(call.on_tick(backstop), UpdateDeadline::Interrupt), "it ran");
    }
}
