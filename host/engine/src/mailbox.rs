//! How threads hand things to a loop: one queue, first in first out, with a bound for each kind of sender.
//!
//! A loop has one mailbox and one closed `Wake` enum. Senders are grouped in *lanes*; each lane has its own bound, so that a flood of one
//! kind never takes the room of another, and each lane says what happens at the bound: the sender waits ([`Mailbox::push_waiting`]), or it
//! gets the value back ([`Mailbox::try_push`]), or the newest replaces the one that waits ([`Mailbox::push_latest`]). Order is kept over
//! all lanes: what was pushed first is taken first.

use std::collections::VecDeque;
use std::io::{Read as _, Write as _};
use std::os::fd::{AsFd as _, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

/// Which bound an entry counts against.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Lane(pub usize);

/// Why an entry was not taken.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum PushError<T> {
    /// The lane is at its bound.
    Full(T),
    /// The loop has ended.
    Closed(T),
}

/// See the module.
#[derive(Debug)]
pub(crate) struct Mailbox<T> {
    state: Mutex<State<T>>,
    /// The loop waits here.
    filled: Condvar,
    /// Waiting senders wait here.
    drained: Condvar,
    /// Bound of each lane.
    bounds: Box<[usize]>,
    /// For a loop that waits for descriptors: one end is rung when something comes, the other one is waited for.
    bell: Option<(UnixStream, UnixStream)>,
}

#[derive(Debug)]
struct State<T> {
    queue: VecDeque<(Lane, T)>,
    /// Entries of each lane in the queue.
    used: Box<[usize]>,
    /// Senders that wait for room.
    waiting: usize,
    closed: bool,
}

impl<T> Mailbox<T> {
    /// A mailbox with one lane for each bound.
    pub fn new(bounds: &[usize]) -> Self {
        Self {
            state: Mutex::new(State {
                queue: VecDeque::new(),
                used: vec![0; bounds.len()].into(),
                waiting: 0,
                closed: false,
            }),
            filled: Condvar::new(),
            drained: Condvar::new(),
            bounds: bounds.into(),
            bell: None,
        }
    }

    /// The same for a loop that waits for descriptors too. Without any left in the system it has no bell, and such a loop looks by the clock.
    pub fn with_bell(bounds: &[usize]) -> Self {
        let pair = UnixStream::pair().and_then(|(rings, rung)| {
            rings.set_nonblocking(true)?;
            rung.set_nonblocking(true)?;
            Ok((rings, rung))
        });
        Self { bell: pair.ok(), ..Self::new(bounds) }
    }

    /// What becomes readable when something comes, until [`Self::hush`].
    pub fn bell(&self) -> Option<BorrowedFd<'_>> {
        self.bell.as_ref().map(|(_, rung)| rung.as_fd())
    }

    /// Silences the bell. To be called before the mailbox is emptied, so that what comes meanwhile rings again.
    pub fn hush(&self) {
        if let Some((_, rung)) = &self.bell {
            let mut heard = [0; 64];
            while matches!((&*rung).read(&mut heard), Ok(64)) {}
        }
    }

    fn ring(&self) {
        if let Some((rings, _)) = &self.bell {
            // A bell that is full is ringing.
            let _ = (&*rings).write(&[1]);
        }
    }

    /// Hands `value` in unless its lane is full. Never waits for the loop.
    pub fn try_push(&self, lane: Lane, value: T) -> Result<(), PushError<T>> {
        let state = self.lock();
        if state.closed {
            return Err(PushError::Closed(value));
        }
        if state.used[lane.0] >= self.bounds[lane.0] {
            return Err(PushError::Full(value));
        }
        self.put(state, lane, value);
        Ok(())
    }

    /// Hands `value` in, waiting while its lane is full. Only for senders that nothing of the loop waits for.
    pub fn push_waiting(&self, lane: Lane, value: T) -> Result<(), PushError<T>> {
        let mut state = self.lock();
        while !state.closed && state.used[lane.0] >= self.bounds[lane.0] {
            state.waiting += 1;
            state = self.drained.wait(state).unwrap_or_else(PoisonError::into_inner);
            state.waiting -= 1;
        }
        if state.closed {
            return Err(PushError::Closed(value));
        }
        self.put(state, lane, value);
        Ok(())
    }

    /// Hands `value` in; if one of its lane still waits, takes that one's place in the queue. For values of which only the newest counts.
    pub fn push_latest(&self, lane: Lane, value: T) -> Result<(), PushError<T>> {
        let mut state = self.lock();
        if state.closed {
            return Err(PushError::Closed(value));
        }
        if state.used[lane.0] > 0
            && let Some((_, waiting)) = state.queue.iter_mut().find(|(of, _)| *of == lane)
        {
            *waiting = value;
            return Ok(());
        }
        self.put(state, lane, value);
        Ok(())
    }

    /// Takes everything that waits, in order, appending to `into`. Waits until there is something, or until `deadline`.
    pub fn take_all(&self, into: &mut Vec<T>, deadline: Option<std::time::Instant>) {
        let mut state = self.lock();
        while state.queue.is_empty() && !state.closed {
            match deadline {
                None => state = self.filled.wait(state).unwrap_or_else(PoisonError::into_inner),
                Some(deadline) => {
                    let left = deadline.saturating_duration_since(std::time::Instant::now());
                    if left.is_zero() {
                        return;
                    }
                    state = self.filled.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
                }
            }
        }
        into.extend(state.queue.drain(..).map(|(_, value)| value));
        state.used.fill(0);
        if state.waiting > 0 {
            self.drained.notify_all();
        }
    }

    /// Refuses everything from now on and wakes everyone. What waits can still be taken.
    pub fn close(&self) {
        self.lock().closed = true;
        self.ring();
        self.filled.notify_all();
        self.drained.notify_all();
    }

    /// Is everything refused?
    pub fn is_closed(&self) -> bool {
        self.lock().closed
    }

    /// Queues the value, lets the lock go and wakes the loop if it may be waiting.
    fn put(&self, mut state: MutexGuard<'_, State<T>>, lane: Lane, value: T) {
        let was_empty = state.queue.is_empty();
        state.used[lane.0] += 1;
        state.queue.push_back((lane, value));
        drop(state);
        if was_empty {
            self.ring();
            self.filled.notify_one();
        }
    }

    fn lock(&self) -> MutexGuard<'_, State<T>> {
        // Nothing here can panic half way through a change, so that a poisoned lock still guards a whole state.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;

    const A: Lane = Lane(0);
    const B: Lane = Lane(1);

    fn taken(mailbox: &Mailbox<u32>) -> Vec<u32> {
        let mut into = Vec::new();
        mailbox.take_all(&mut into, Some(std::time::Instant::now()));
        into
    }

    #[test]
    fn order_is_kept_over_lanes_and_bounds_are_apart() {
        let mailbox = Mailbox::new(&[2, 1]);
        mailbox.try_push(A, 1).unwrap();
        mailbox.try_push(B, 2).unwrap();
        mailbox.try_push(A, 3).unwrap();
        assert_eq!(mailbox.try_push(A, 4), Err(PushError::Full(4)));
        assert_eq!(mailbox.try_push(B, 5), Err(PushError::Full(5)));
        assert_eq!(taken(&mailbox), [1, 2, 3]);
        mailbox.try_push(A, 6).unwrap();
        assert_eq!(taken(&mailbox), [6]);
    }

    #[test]
    fn the_newest_takes_the_place_of_the_one_that_waits() {
        let mailbox = Mailbox::new(&[4, 1]);
        mailbox.push_latest(B, 1).unwrap();
        mailbox.try_push(A, 2).unwrap();
        mailbox.push_latest(B, 3).unwrap();
        assert_eq!(taken(&mailbox), [3, 2]);
    }

    #[test]
    fn a_waiting_sender_goes_on_when_there_is_room_or_the_loop_ends() {
        let mailbox = Arc::new(Mailbox::new(&[1]));
        mailbox.try_push(A, 1).unwrap();
        let sender = {
            let mailbox = Arc::clone(&mailbox);
            std::thread::spawn(move || (mailbox.push_waiting(A, 2), mailbox.push_waiting(A, 3)))
        };
        let mut got = Vec::new();
        while got.len() < 2 {
            mailbox.take_all(&mut got, None);
        }
        mailbox.close();
        let (first, _) = sender.join().unwrap();
        assert_eq!(first, Ok(()));
        assert_eq!(got[..2], [1, 2]);
        assert_eq!(mailbox.try_push(A, 4), Err(PushError::Closed(4)));
    }
}
