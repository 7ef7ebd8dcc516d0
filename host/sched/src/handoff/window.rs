//! Which chunks are under way, and which have arrived? A sliding window of at most 64 chunks on both sides.
//!
//! The receiver's word is its lowest missing chunk and a mask of what came behind it; any later word covers all earlier ones, so a lost
//! one costs nothing, and a late one is a subset of what is known.

use penstock_base::limits::HANDOFF_WINDOW_MAX;

use super::message::Ack;
use super::terms::chunk_sum;

/// The receiver's side.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) struct Inbox {
    /// Lowest chunk that is missing.
    base: u32,
    /// Bit i: chunk base + i is here. Bit 0 never is.
    mask: u64,
    /// Of everything that is here.
    sum: u64,
    chunks: u32,
    /// Chunks that came broken.
    pub(super) corrupt: u32,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Arrival {
    New,
    Duplicate,
    /// No such chunk, or further ahead than any window.
    OutOfRange,
}

super::codec::record! {
    Inbox { base, mask, sum, chunks, corrupt }
    Outbox { base, mask, next, ready, chunks, window }
}

impl Inbox {
    pub(super) fn new(chunks: u32) -> Self {
        Self { chunks, ..Self::default() }
    }

    pub(super) fn take(&mut self, index: u32, digest: u64) -> Arrival {
        if index < self.base {
            return Arrival::Duplicate;
        }
        let ahead = index - self.base;
        if index >= self.chunks || ahead >= HANDOFF_WINDOW_MAX {
            return Arrival::OutOfRange;
        }
        let bit = 1u64 << ahead;
        if self.mask & bit != 0 {
            return Arrival::Duplicate;
        }
        self.mask |= bit;
        self.sum = self.sum.wrapping_add(chunk_sum(index, digest));
        let done = self.mask.trailing_ones();
        self.base += done;
        self.mask = self.mask.checked_shr(done).unwrap_or(0);
        Arrival::New
    }

    pub(super) fn is_complete(&self) -> bool {
        self.base == self.chunks
    }

    pub(super) fn sum(&self) -> u64 {
        self.sum
    }

    pub(super) fn base_and_mask(&self) -> (u32, u64) {
        (self.base, self.mask)
    }
}

/// The sender's side.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) struct Outbox {
    /// All below are there.
    base: u32,
    /// Bit i: chunk base + i is there.
    mask: u64,
    /// The next one that was never sent.
    next: u32,
    /// Computed so far.
    ready: u32,
    chunks: u32,
    /// What the receiver lets be under way.
    window: u32,
}

impl Outbox {
    pub(super) fn new(chunks: u32) -> Self {
        Self { chunks, ..Self::default() }
    }

    /// More is computed. Never less.
    pub(super) fn set_ready(&mut self, ready: u32) {
        self.ready = self.ready.max(ready.min(self.chunks));
    }

    /// The next chunk, if it is computed and the window has room for it.
    pub(super) fn send_next(&mut self) -> Option<u32> {
        let end = self.base.saturating_add(self.window).min(self.ready);
        (self.next < end).then(|| {
            self.next += 1;
            self.next - 1
        })
    }

    /// Sent, and not known to be there.
    pub(super) fn missing(&self) -> impl Iterator<Item = u32> + use<> {
        let (base, mask, next) = (self.base, self.mask, self.next);
        (base..next).filter(move |index| mask >> (index - base) & 1 == 0)
    }

    pub(super) fn inflight(&self) -> u32 {
        self.next - self.base - self.mask.count_ones()
    }

    /// The receiver's word. Did it bring something new?
    pub(super) fn take_ack(&mut self, ack: &Ack) -> bool {
        self.window = ack.window.min(HANDOFF_WINDOW_MAX);
        if ack.base > self.next || ack.base < self.base {
            return false;
        }
        let before = (self.base, self.mask);
        self.mask = self.mask.checked_shr(ack.base - self.base).unwrap_or(0);
        self.base = ack.base;
        let sent = self.next - self.base;
        let known = if sent >= u64::BITS { u64::MAX } else { (1u64 << sent) - 1 };
        self.mask |= ack.mask & known;
        before != (self.base, self.mask)
    }

    pub(super) fn is_delivered(&self) -> bool {
        self.base == self.chunks
    }

    pub(super) fn is_sound(&self) -> bool {
        self.base <= self.next
            && self.next <= self.ready
            && self.ready <= self.chunks
            && self.next - self.base <= HANDOFF_WINDOW_MAX
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ack(base: u32, mask: u64, window: u32) -> Ack {
        Ack { base, mask, window, sealed: false }
    }

    #[test]
    fn every_order_of_arrival_with_repetitions_ends_alike() {
        let digests = [11, 22, 33, 44];
        let expected =
            digests.iter().zip(0..).fold(0u64, |sum, (digest, index)| sum.wrapping_add(chunk_sum(index, *digest)));
        for order in [[0, 1, 2, 3, 3, 0], [3, 2, 1, 0, 2, 1], [2, 2, 0, 3, 1, 1], [1, 0, 1, 3, 3, 2]] {
            let mut inbox = Inbox::new(4);
            let new = order.iter().filter(|i| inbox.take(**i, digests[**i as usize]) == Arrival::New).count();
            assert_eq!((new, inbox.is_complete(), inbox.sum()), (4, true, expected), "{order:?}");
        }
    }

    #[test]
    fn what_is_beyond_the_window_or_the_end_is_not_taken() {
        let mut inbox = Inbox::new(100);
        assert_eq!(inbox.take(64, 0), Arrival::OutOfRange);
        assert_eq!(inbox.take(63, 0), Arrival::New);
        for index in 0..63 {
            assert_eq!(inbox.take(index, 0), Arrival::New);
        }
        assert_eq!((inbox.base_and_mask(), inbox.take(100, 0)), ((64, 0), Arrival::OutOfRange));
    }

    #[test]
    fn the_sender_keeps_within_the_window_and_learns_from_any_word() {
        let mut out = Outbox::new(6);
        out.set_ready(5);
        assert_eq!(out.send_next(), None, "nothing is granted yet");
        out.take_ack(&ack(0, 0, 3));
        assert_eq!(
            [out.send_next(), out.send_next(), out.send_next(), out.send_next()],
            [Some(0), Some(1), Some(2), None]
        );
        assert!(out.take_ack(&ack(0, 0b110, 3)));
        assert_eq!((out.missing().collect::<alloc::vec::Vec<_>>(), out.inflight()), (alloc::vec![0], 1));
        assert!(out.take_ack(&ack(3, 0, 3)) && !out.take_ack(&ack(1, 0b10, 3)), "a late word brings nothing");
        assert!(!out.take_ack(&ack(5, 0, 3)), "a word about what was never sent is nobody's");
        assert_eq!([out.send_next(), out.send_next(), out.send_next()], [Some(3), Some(4), None]);
        out.set_ready(6);
        assert_eq!(out.send_next(), Some(5));
        out.take_ack(&ack(6, 0, 3));
        assert!(out.is_delivered() && out.is_sound());
    }
}
