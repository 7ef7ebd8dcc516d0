//! What a replica's loop does about KV events: it collects the changes of a turn and hands them over, if there is room.
//!
//! Without room they are dropped and counted. What was dropped shows as missing numbers; once the publisher has caught up, it gets
//! everything that is cached, behind a word that nothing is.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use penstock_base::ReplicaEpoch;
use penstock_sched::replica::CacheChange;
use tokio::sync::mpsc;

use crate::limits::TAPPED_CHANGES_MAX;
use crate::metrics::Metrics;

/// One change, with the block's tokens where they are told.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Told {
    pub change: CacheChange,
    pub tokens: Vec<u32>,
}

/// What a turn brought.
#[derive(Debug)]
pub(crate) struct TurnOfChanges {
    /// The replica's life.
    pub epoch: ReplicaEpoch,
    /// Turns before this one that found no room.
    pub lost: u64,
    pub changes: Vec<Told>,
}

/// See the module.
#[derive(Debug)]
pub(crate) struct CacheTap {
    outlet: Option<Outlet>,
    epoch: ReplicaEpoch,
    changes: Vec<Told>,
    /// Turns that found no room since the last one that did.
    lost: u64,
    /// The life is another than the one that was told last.
    renewed: bool,
}

#[derive(Debug)]
struct Outlet {
    sender: mpsc::Sender<TurnOfChanges>,
    /// Changes that the publisher has not taken yet.
    waiting: Arc<AtomicUsize>,
    with_tokens: bool,
    metrics: Arc<Metrics>,
}

impl CacheTap {
    /// Where nobody listens.
    pub fn closed() -> Self {
        Self { outlet: None, epoch: ReplicaEpoch(0), changes: Vec::new(), lost: 0, renewed: false }
    }

    pub(super) fn open(
        sender: mpsc::Sender<TurnOfChanges>,
        waiting: Arc<AtomicUsize>,
        with_tokens: bool,
        metrics: Arc<Metrics>,
    ) -> Self {
        Self { outlet: Some(Outlet { sender, waiting, with_tokens, metrics }), ..Self::closed() }
    }

    /// Does anybody listen?
    pub fn is_open(&self) -> bool {
        self.outlet.is_some()
    }

    /// Are tokens told?
    pub fn wants_tokens(&self) -> bool {
        self.outlet.as_ref().is_some_and(|outlet| outlet.with_tokens)
    }

    /// The replica lives anew, with an empty cache.
    pub fn begin(&mut self, epoch: ReplicaEpoch) {
        self.epoch = epoch;
        self.changes.clear();
        self.renewed = true;
    }

    /// Something changed.
    pub fn note(&mut self, told: Told) {
        self.changes.push(told);
    }

    /// Hands the turn over. `list` is everything that is cached now.
    pub fn flush(&mut self, list: impl FnOnce() -> Vec<CacheChange>) {
        let Some(outlet) = &self.outlet else { return };
        let is_news = self.renewed || !self.changes.is_empty();
        let waiting = outlet.waiting.load(Ordering::Acquire);
        let changes = if self.lost == 0 {
            if !is_news {
                return;
            }
            std::mem::take(&mut self.changes)
        } else {
            // What came since is part of what is listed.
            self.changes.clear();
            if waiting > 0 {
                self.lost += u64::from(is_news);
                return;
            }
            let all = std::iter::once(CacheChange::Cleared).chain(list());
            all.map(|change| Told { change, tokens: Vec::new() }).collect()
        };
        let count = changes.len();
        let is_crowded = waiting > 0 && waiting + count > TAPPED_CHANGES_MAX;
        let turn = TurnOfChanges { epoch: self.epoch, lost: self.lost, changes };
        outlet.waiting.fetch_add(count, Ordering::AcqRel);
        if is_crowded || outlet.sender.try_send(turn).is_err() {
            outlet.waiting.fetch_sub(count, Ordering::AcqRel);
            outlet.metrics.caches().turn_dropped();
            if self.lost == 0 {
                tracing::warn!("KV events are not published as fast as they come: subscribers will see a gap");
            }
            self.lost += 1;
            return;
        }
        self.lost = 0;
        self.renewed = false;
    }
}

#[cfg(test)]
mod tests {
    use penstock_base::BlockKey;

    use super::*;

    fn stored(n: u8) -> CacheChange {
        CacheChange::Stored { key: BlockKey([n; 16]), parent: None, depth_blocks: 1 }
    }

    fn told(change: CacheChange) -> Told {
        Told { change, tokens: Vec::new() }
    }

    fn tap(turns: usize) -> (CacheTap, mpsc::Receiver<TurnOfChanges>, Arc<AtomicUsize>, Arc<Metrics>) {
        let (sender, receiver) = mpsc::channel(turns);
        let (waiting, metrics) = (Arc::new(AtomicUsize::new(0)), Arc::new(Metrics::new("demo")));
        let mut tap = CacheTap::open(sender, Arc::clone(&waiting), false, Arc::clone(&metrics));
        tap.begin(ReplicaEpoch(4));
        tap.flush(|| panic!("nothing was lost"));
        (tap, receiver, waiting, metrics)
    }

    fn taken(receiver: &mut mpsc::Receiver<TurnOfChanges>, waiting: &AtomicUsize) -> Option<(u64, Vec<CacheChange>)> {
        let turn = receiver.try_recv().ok()?;
        assert_eq!(turn.epoch, ReplicaEpoch(4));
        waiting.fetch_sub(turn.changes.len(), Ordering::AcqRel);
        Some((turn.lost, turn.changes.into_iter().map(|told| told.change).collect()))
    }

    #[test]
    fn what_finds_no_room_is_counted_and_everything_is_told_behind_it() {
        let (mut tap, mut receiver, waiting, metrics) = tap(2);
        for n in 1..=5 {
            tap.note(told(stored(n)));
            tap.flush(|| panic!("it is told once there is room"));
        }
        // The first word of the life and one turn are in the queue; four turns found no room, one of them while the queue was not looked at.
        assert_eq!(taken(&mut receiver, &waiting), Some((0, vec![])));
        tap.flush(|| panic!("the publisher is not through yet"));
        assert_eq!(taken(&mut receiver, &waiting), Some((0, vec![stored(1)])));
        assert_eq!(taken(&mut receiver, &waiting), None);
        tap.note(told(CacheChange::Removed { key: BlockKey([1; 16]) }));
        tap.flush(|| vec![stored(2), stored(5)]);
        assert_eq!(taken(&mut receiver, &waiting), Some((4, vec![CacheChange::Cleared, stored(2), stored(5)])));
        tap.note(told(stored(6)));
        tap.flush(|| panic!("nothing was lost"));
        assert_eq!(taken(&mut receiver, &waiting), Some((0, vec![stored(6)])));
        let page = metrics.render(&crate::rig::quiet_status());
        assert!(page.contains("penstock_kv_event_drops_total{at=\"queue\",model_name=\"demo\"} 1"), "{page}");
    }

    #[test]
    fn no_more_changes_wait_than_are_allowed_but_one_turn_always_may() {
        let (mut tap, mut receiver, waiting, _) = tap(1_000);
        assert!(taken(&mut receiver, &waiting).is_some());
        let large = |tap: &mut CacheTap, count| {
            (0..count).for_each(|n| tap.note(told(stored(n as u8))));
            tap.flush(Vec::new);
        };
        large(&mut tap, TAPPED_CHANGES_MAX + 7);
        large(&mut tap, 1);
        assert_eq!(taken(&mut receiver, &waiting).map(|turn| turn.1.len()), Some(TAPPED_CHANGES_MAX + 7));
        assert_eq!(taken(&mut receiver, &waiting), None, "it was too much beside what waited");
        tap.flush(Vec::new);
        assert_eq!(taken(&mut receiver, &waiting), Some((1, vec![CacheChange::Cleared])));
        assert_eq!(waiting.load(Ordering::Acquire), 0);
    }
}
