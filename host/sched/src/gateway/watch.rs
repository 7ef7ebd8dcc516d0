//! Does anything move? Work that waits while a replica is ready and nothing happens is a fault that must be seen.

use penstock_base::codec::{DecodeError, Reader, Writer};
use penstock_base::{Duration, Instant};

/// The watchdog.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Watch {
    /// Without movement for this long it speaks.
    patience: Duration,
    /// When something moved last, or work came to where there was none.
    moved_at: Instant,
    /// It has spoken and nothing has moved since.
    stuck: bool,
    /// There was work at the end of the last step.
    has_work: bool,
}

/// What the watchdog has to say.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Watched {
    /// Nothing has moved for too long.
    Stuck,
    /// Something moved again.
    Resumed,
}

impl Watch {
    /// All is well.
    pub fn new(patience: Duration, now: Instant) -> Self {
        Self { patience, moved_at: now, stuck: false, has_work: false }
    }

    /// Work came; the time before it, without work, does not count.
    pub fn work_came(&mut self, now: Instant) {
        if !self.has_work {
            self.has_work = true;
            self.moved_at = self.moved_at.max(now);
        }
    }

    /// Something moved: a dispatch, a start, a token, an end.
    pub fn moved(&mut self, now: Instant) {
        self.moved_at = now;
    }

    /// At the end of a step: is there work, and a replica that could do it?
    pub fn look(&mut self, now: Instant, has_work: bool, has_replica: bool) -> Option<Watched> {
        self.has_work = has_work;
        if !has_work || !has_replica {
            self.moved_at = now;
        }
        let stuck = now.since(self.moved_at) >= self.patience && has_work && has_replica;
        let before = core::mem::replace(&mut self.stuck, stuck);
        match (before, stuck) {
            (false, true) => Some(Watched::Stuck),
            (true, false) => Some(Watched::Resumed),
            _ => None,
        }
    }

    /// When it would speak if nothing moved.
    pub fn next_due(&self) -> Instant {
        if self.has_work && !self.stuck { self.moved_at + self.patience } else { Instant::NEVER }
    }

    /// Is everything moving, as far as is known?
    pub fn is_progressing(&self) -> bool {
        !self.stuck
    }

    /// Writes the state.
    pub fn encode(&self, out: &mut Writer) {
        out.u64(self.moved_at.0);
        out.bool(self.stuck);
        out.bool(self.has_work);
    }

    /// Reads what [`Self::encode`] wrote.
    pub fn decode(from: &mut Reader<'_>, patience: Duration) -> Result<Self, DecodeError> {
        Ok(Self { patience, moved_at: Instant(from.u64()?), stuck: from.bool()?, has_work: from.bool()? })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_speaks_once_and_takes_it_back() {
        let second = |s: u64| Instant(s * 1_000_000_000);
        let mut watch = Watch::new(Duration::from_s(30), Instant::ZERO);
        assert_eq!((watch.look(second(40), false, true), watch.next_due()), (None, Instant::NEVER));
        watch.work_came(second(50));
        assert_eq!((watch.look(second(79), true, true), watch.next_due()), (None, second(80)));
        assert_eq!(watch.look(second(80), true, true), Some(Watched::Stuck));
        assert_eq!((watch.look(second(99), true, true), watch.is_progressing()), (None, false));
        watch.moved(second(100));
        assert_eq!(watch.look(second(100), true, true), Some(Watched::Resumed));
        assert_eq!(watch.look(second(200), true, false), None, "no replica is another fault");
    }
}
