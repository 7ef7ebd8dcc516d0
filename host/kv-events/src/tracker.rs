//! May a worker's index be believed? Counts sequence numbers, and says what must be asked for. Knows no socket and no clock.
//!
//! ```text
//!             connected                  snapshot, or replay from 0
//!  Degraded ──────────────► Degraded ─────────────────────────────► Whole
//!  (Unreachable)            (Resyncing)                              │  ▲
//!      ▲                       ▲  number goes back, or no replay     │  │ replay closes it
//!      │                       └───────────────────────────────┐     ▼  │
//!      └── disconnected, from anywhere                        Degraded (Gap)
//! ```

use crate::batch::{Batch, BlockHash, KvEvent};
use crate::index::{Change, Index};

/// Whether the index of a worker may decide where a request goes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Trust {
    /// It holds what the worker has said, without a gap.
    Whole,
    /// It does not: route by load alone.
    Degraded(Doubt),
}

/// What is wrong with an index.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Doubt {
    /// The publisher cannot be reached.
    Unreachable,
    /// The index is being built from the start.
    Resyncing,
    /// Batches are missing and are being asked for.
    Gap,
    /// What was missed cannot be had any more; what came since is in it.
    Incomplete,
    /// The worker has more blocks than the index may hold.
    Full,
}

/// What to ask the publisher for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Need {
    /// Nothing.
    Nothing,
    /// All batches from this number on.
    Replay(u64),
    /// Everything: a snapshot, else all batches that are kept.
    Resync,
}

/// What has happened since the start.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Counts {
    /// Batches that came live and were new.
    pub live: u64,
    /// Batches that a replay brought.
    pub replayed: u64,
    /// Batches missed in live traffic.
    pub missed: u64,
    /// Messages that could not be read.
    pub garbage: u64,
    /// Events of unknown kinds.
    pub unknown: u64,
    /// Times that numbers went back, or the publisher named another epoch.
    pub restarts: u64,
    /// Times that everything was read anew.
    pub resyncs: u64,
}

/// How far the connection is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Link {
    Down,
    /// Up, and what was said before is not known yet.
    New,
    Synced,
}

/// The state of one worker's events at a consumer.
#[derive(Debug)]
pub struct Tracker {
    index: Index,
    /// Built while a resync is under way.
    staged: Option<Index>,
    blocks_max: usize,
    link: Link,
    /// Batches are missing and are being asked for.
    has_gap: bool,
    /// What an earlier batch said is not known and cannot be had.
    is_incomplete: bool,
    /// Number of the next batch that continues the index.
    next: Option<u64>,
    /// Last number heard live on this connection.
    live: Option<u64>,
    /// The publisher's life, where it says so.
    epoch: Option<u64>,
    counts: Counts,
}

impl Tracker {
    /// Knows nothing yet.
    #[must_use]
    pub fn new(blocks_max: usize) -> Self {
        Self {
            index: Index::new(blocks_max),
            staged: None,
            blocks_max,
            link: Link::Down,
            has_gap: false,
            is_incomplete: false,
            next: None,
            live: None,
            epoch: None,
            counts: Counts::default(),
        }
    }

    /// Keeps what changes for [`Tracker::take_changes`].
    pub fn keep_changes(&mut self) {
        self.index.keep_changes();
    }

    /// What has changed in the index since the last time, in order, and whether the index may be believed with it. A first
    /// [`Change::Cleared`](crate::Change::Cleared) stands for whatever was said before.
    pub fn take_changes(&mut self, into: &mut Vec<Change>) -> Trust {
        self.index.take_changes(into);
        self.trust()
    }

    /// Whether it may be believed now.
    #[must_use]
    pub fn trust(&self) -> Trust {
        match self.link {
            Link::Down => Trust::Degraded(Doubt::Unreachable),
            Link::New => Trust::Degraded(Doubt::Resyncing),
            Link::Synced if self.has_gap => Trust::Degraded(Doubt::Gap),
            Link::Synced if self.is_incomplete => Trust::Degraded(Doubt::Incomplete),
            Link::Synced if self.index.not_kept() > 0 => Trust::Degraded(Doubt::Full),
            Link::Synced => Trust::Whole,
        }
    }

    /// What has happened.
    #[must_use]
    pub fn counts(&self) -> Counts {
        self.counts
    }

    /// What is known, believed or not.
    #[must_use]
    pub fn index(&self) -> &Index {
        &self.index
    }

    /// The publisher's life, where it has said so.
    #[must_use]
    pub fn epoch(&self) -> Option<u64> {
        self.epoch
    }

    /// Blocks of a prompt that the worker has from the first on; none when that cannot be said and load alone must decide.
    #[must_use]
    pub fn prefix(&self, hashes: &[BlockHash]) -> Option<usize> {
        match self.trust() {
            // Blocks that had no room are missing; those that are in it are there.
            Trust::Whole | Trust::Degraded(Doubt::Full) => Some(self.index.prefix(hashes)),
            Trust::Degraded(_) => None,
        }
    }

    /// A connection is up. What was said before it may be another life's.
    pub fn connected(&mut self) -> Need {
        self.live = None;
        self.link = Link::New;
        Need::Resync
    }

    /// The connection is gone. The index stays until the next one says what became of it, and is not believed.
    pub fn disconnected(&mut self) {
        self.live = None;
        self.staged = None;
        self.link = Link::Down;
    }

    /// Another life of the worker is known from elsewhere: nothing of the old one is true.
    pub fn reset(&mut self) {
        self.forget();
        self.counts.restarts += 1;
        if self.link == Link::Synced {
            self.link = Link::New;
        }
    }

    fn forget(&mut self) {
        self.forget_index();
        self.live = None;
        self.epoch = None;
    }

    /// A live batch.
    pub fn live(&mut self, seq: u64, payload: &[u8]) -> Need {
        if self.live.is_some_and(|live| seq <= live) {
            // On one connection numbers only grow: this is another life.
            self.reset();
            self.live = Some(seq);
            return Need::Resync;
        }
        self.live = Some(seq);
        match self.next {
            None => Need::Resync,
            Some(next) if seq < next => Need::Nothing,
            Some(next) if seq == next => {
                self.counts.live += 1;
                self.take(seq, payload)
            }
            Some(next) => {
                self.counts.missed = self.counts.missed.saturating_add(seq - next);
                self.has_gap = true;
                Need::Replay(next)
            }
        }
    }

    /// A message that has not even a number.
    pub fn garbage(&mut self) {
        self.counts.garbage += 1;
    }

    /// What to ask for when nothing has come for a while: whether something was missed at the end.
    #[must_use]
    pub fn probe(&self) -> Need {
        self.next.map_or(Need::Resync, Need::Replay)
    }

    fn take(&mut self, seq: u64, payload: &[u8]) -> Need {
        let Ok(batch) = Batch::decode(payload) else {
            self.counts.garbage += 1;
            self.has_gap = true;
            // A replay would bring the same bytes.
            self.next = None;
            return Need::Resync;
        };
        self.counts.unknown += u64::from(batch.unknown);
        self.next = Some(seq.saturating_add(1));
        self.index.apply(&batch);
        if batch.events.contains(&KvEvent::Cleared) {
            // Nothing from before is there any more, known or not.
            self.is_incomplete = false;
        }
        Need::Nothing
    }

    /// One batch of a replay that was asked for.
    pub fn replayed(&mut self, seq: u64, payload: &[u8]) -> Need {
        match self.next {
            Some(next) if seq < next => Need::Nothing,
            Some(next) if seq == next => {
                self.counts.replayed += 1;
                self.take(seq, payload)
            }
            // What lies between is not kept any more.
            _ => Need::Resync,
        }
    }

    /// The replay has ended.
    pub fn replay_ended(&mut self) -> Need {
        let is_closed = self.live.is_none_or(|live| self.next.is_some_and(|next| live < next));
        if !is_closed {
            return Need::Resync;
        }
        self.has_gap = false;
        Need::Nothing
    }

    /// A snapshot begins, of this life, before the batch `next`.
    pub fn snapshot_began(&mut self, epoch: u64, next: u64) {
        self.counts.resyncs += 1;
        if self.epoch.is_some_and(|known| known != epoch) {
            self.counts.restarts += 1;
            self.index.clear();
        }
        self.epoch = Some(epoch);
        self.next = Some(next);
        self.staged = Some(Index::new(self.blocks_max));
    }

    /// A part of it. False: it is none, and the snapshot is worth nothing.
    pub fn snapshot_part(&mut self, payload: &[u8]) -> bool {
        let (Ok(batch), Some(staged)) = (Batch::decode(payload), &mut self.staged) else {
            self.counts.garbage += 1;
            return false;
        };
        staged.apply(&batch);
        true
    }

    /// The snapshot is whole. What has come live since then is asked for.
    pub fn snapshot_ended(&mut self) -> Need {
        let Some(staged) = self.staged.take() else { return Need::Resync };
        self.index.replace(staged);
        self.link = Link::Synced;
        self.has_gap = false;
        self.is_incomplete = false;
        match (self.live, self.next) {
            (Some(live), Some(next)) if live >= next => {
                self.has_gap = true;
                Need::Replay(next)
            }
            _ => Need::Nothing,
        }
    }

    /// There is no snapshot: all batches that are kept follow by [`Tracker::kept`], then [`Tracker::kept_ended`].
    pub fn kept_began(&mut self) {
        self.counts.resyncs += 1;
        self.forget_index();
        self.link = Link::New;
    }

    fn forget_index(&mut self) {
        self.index.clear();
        self.staged = None;
        self.next = None;
        self.has_gap = false;
        self.is_incomplete = false;
    }

    /// One of the batches that are kept.
    pub fn kept(&mut self, seq: u64, payload: &[u8]) -> Need {
        if self.next.is_none() && seq > 0 {
            // The first ones are gone: what they said is not known.
            self.is_incomplete = true;
        }
        if self.next.is_some_and(|next| seq != next) {
            return Need::Resync;
        }
        self.counts.replayed += 1;
        self.take(seq, payload)
    }

    /// That were all.
    pub fn kept_ended(&mut self) -> Need {
        let next = *self.next.get_or_insert(0);
        self.link = Link::Synced;
        if let Some(live) = self.live.filter(|live| *live >= next) {
            // Heard live and not kept: the publisher keeps nothing.
            self.next = Some(live.saturating_add(1));
            self.is_incomplete = true;
        }
        Need::Nothing
    }

    /// Nothing can be asked for, or the answer was none. What comes live is taken in, and not believed, until the worker clears its cache.
    pub fn resync_failed(&mut self) {
        self.forget_index();
        self.next = self.live.and_then(|live| live.checked_add(1));
        self.link = Link::Synced;
        self.is_incomplete = true;
    }
}
