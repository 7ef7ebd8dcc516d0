//! When an index is believed it is right: a consumer without sockets beside a publisher made of plain collections.

#![allow(clippy::unwrap_used, reason = "a test")]

use std::collections::BTreeSet;

use penstock_kv_events::{Batch, BlockHash, Doubt, KvEvent, Need, Removed, Stored, Tracker, Trust};
use proptest::prelude::*;

fn hashes(blocks: &[u64]) -> Vec<BlockHash> {
    blocks.iter().copied().map(BlockHash::Int).collect()
}

fn stored(blocks: &[u64]) -> KvEvent {
    KvEvent::Stored(Stored { block_hashes: hashes(blocks), medium: Some("GPU".into()), ..Stored::default() })
}

fn removed(blocks: &[u64]) -> KvEvent {
    KvEvent::Removed(Removed { block_hashes: hashes(blocks), medium: Some("GPU".into()), ..Removed::default() })
}

fn batch(events: &[KvEvent]) -> Vec<u8> {
    Batch { events: events.to_vec(), ..Batch::default() }.encode()
}

/// A tracker that has read everything of a publisher which has said nothing yet.
fn fresh() -> Tracker {
    let mut tracker = Tracker::new(1_000);
    assert_eq!(tracker.trust(), Trust::Degraded(Doubt::Unreachable));
    assert_eq!(tracker.connected(), Need::Resync);
    assert_eq!(tracker.trust(), Trust::Degraded(Doubt::Resyncing));
    tracker.kept_began();
    assert_eq!(tracker.kept_ended(), Need::Nothing);
    assert_eq!(tracker.trust(), Trust::Whole);
    tracker
}

#[test]
fn a_gap_is_closed_by_a_replay() {
    let mut tracker = fresh();
    assert_eq!(tracker.live(0, &batch(&[stored(&[1, 2])])), Need::Nothing);
    assert_eq!(tracker.prefix(&hashes(&[1, 2, 3])), Some(2));
    assert_eq!(tracker.live(3, &batch(&[removed(&[1])])), Need::Replay(1));
    // While batches are missing, load alone decides.
    assert_eq!(tracker.trust(), Trust::Degraded(Doubt::Gap));
    assert_eq!(tracker.prefix(&hashes(&[1])), None);
    assert_eq!(tracker.replayed(1, &batch(&[stored(&[3])])), Need::Nothing);
    assert_eq!(tracker.replayed(2, &batch(&[stored(&[4])])), Need::Nothing);
    assert_eq!(tracker.replayed(3, &batch(&[removed(&[1])])), Need::Nothing);
    assert_eq!(tracker.replay_ended(), Need::Nothing);
    assert_eq!(tracker.trust(), Trust::Whole);
    assert_eq!(tracker.prefix(&hashes(&[2, 3, 4, 1])), Some(3));
    // What the replay has brought comes live as well, and is not taken twice.
    assert_eq!(tracker.live(4, &batch(&[])), Need::Nothing);
    let counts = tracker.counts();
    assert_eq!((counts.live, counts.replayed, counts.missed, counts.restarts), (2, 3, 2, 0));
}

#[test]
fn a_replay_that_comes_too_late_leads_to_a_snapshot() {
    let mut tracker = fresh();
    tracker.live(0, &batch(&[stored(&[1])]));
    assert_eq!(tracker.live(9, &batch(&[stored(&[2])])), Need::Replay(1));
    assert_eq!(tracker.replayed(5, &batch(&[stored(&[3])])), Need::Resync);
    tracker.snapshot_began(1, 9);
    assert!(tracker.snapshot_part(&batch(&[stored(&[3, 7])])));
    // The batch that showed the gap is not in the snapshot.
    assert_eq!(tracker.snapshot_ended(), Need::Replay(9));
    assert_eq!(tracker.replayed(9, &batch(&[stored(&[2])])), Need::Nothing);
    assert_eq!(tracker.replay_ended(), Need::Nothing);
    assert_eq!((tracker.trust(), tracker.prefix(&hashes(&[2, 3, 7, 1]))), (Trust::Whole, Some(3)));
}

#[test]
fn numbers_that_go_back_are_another_life() {
    let mut tracker = fresh();
    tracker.live(0, &batch(&[stored(&[1])]));
    tracker.live(1, &batch(&[stored(&[2])]));
    assert_eq!(tracker.live(0, &batch(&[stored(&[3])])), Need::Resync);
    assert!(tracker.index().is_empty());
    assert_eq!(tracker.prefix(&hashes(&[1])), None);
    assert_eq!(tracker.counts().restarts, 1);
    tracker.kept_began();
    assert_eq!(tracker.kept(0, &batch(&[stored(&[3])])), Need::Nothing);
    assert_eq!(tracker.kept_ended(), Need::Nothing);
    assert_eq!(tracker.prefix(&hashes(&[3, 1])), Some(1));
}

#[test]
fn what_cannot_be_had_is_doubted_until_all_is_cleared() {
    let mut tracker = Tracker::new(1_000);
    tracker.connected();
    tracker.kept_began();
    assert_eq!(tracker.kept(7, &batch(&[stored(&[1])])), Need::Nothing);
    assert_eq!(tracker.kept_ended(), Need::Nothing);
    assert_eq!(tracker.trust(), Trust::Degraded(Doubt::Incomplete));
    assert_eq!(tracker.prefix(&hashes(&[1])), None);
    // A replay of what is missing at the end does not make it whole either.
    assert_eq!(tracker.replay_ended(), Need::Nothing);
    assert_eq!(tracker.trust(), Trust::Degraded(Doubt::Incomplete));
    assert_eq!(tracker.live(8, &batch(&[KvEvent::Cleared, stored(&[5])])), Need::Nothing);
    assert_eq!((tracker.trust(), tracker.prefix(&hashes(&[5, 1]))), (Trust::Whole, Some(1)));
}

#[test]
fn a_full_index_says_so_and_holds_no_more() {
    let mut tracker = Tracker::new(3);
    tracker.connected();
    tracker.kept_began();
    tracker.kept_ended();
    tracker.live(0, &batch(&[stored(&[1, 2, 3, 4, 5])]));
    assert_eq!((tracker.index().len(), tracker.index().not_kept()), (3, 2));
    assert_eq!(tracker.trust(), Trust::Degraded(Doubt::Full));
    // Blocks in it are there; those that are not may be.
    assert_eq!(tracker.prefix(&hashes(&[1, 2, 3, 4])), Some(3));
    tracker.live(1, &batch(&[KvEvent::Cleared]));
    assert_eq!(tracker.trust(), Trust::Whole);
}

#[test]
fn another_epoch_drops_what_is_known() {
    let mut tracker = fresh();
    tracker.live(0, &batch(&[stored(&[1])]));
    tracker.snapshot_began(5, 1);
    assert_eq!(tracker.snapshot_ended(), Need::Nothing);
    assert_eq!(tracker.epoch(), Some(5));
    tracker.live(1, &batch(&[stored(&[2])]));
    tracker.disconnected();
    assert_eq!(tracker.trust(), Trust::Degraded(Doubt::Unreachable));
    assert_eq!(tracker.index().len(), 1, "kept until it is known what became of it");
    tracker.connected();
    tracker.snapshot_began(6, 0);
    assert!(tracker.index().is_empty());
    assert_eq!(tracker.snapshot_ended(), Need::Nothing);
    assert_eq!(tracker.counts().restarts, 1);
}

/// A block in two media or two groups of layers is there until it has left all of them.
#[test]
fn media_and_groups_are_told_apart() {
    let mut tracker = fresh();
    let at = |medium: Option<&str>, group: u32| {
        let medium = medium.map(str::to_owned);
        Stored { block_hashes: hashes(&[1]), medium, group_idx: Some(group), ..Stored::default() }
    };
    let gone = |medium: Option<&str>, group: u32| {
        let medium = medium.map(str::to_owned);
        KvEvent::Removed(Removed { block_hashes: hashes(&[1]), medium, group_idx: Some(group), ..Removed::default() })
    };
    let all = [at(Some("GPU"), 0), at(Some("CPU"), 0), at(Some("GPU"), 1)].map(KvEvent::Stored);
    tracker.live(0, &batch(&all));
    let mut seq = 0;
    let mut after = |event: KvEvent| {
        seq += 1;
        tracker.live(seq, &batch(&[event]));
        tracker.prefix(&hashes(&[1]))
    };
    assert_eq!(after(gone(Some("GPU"), 0)), Some(1));
    assert_eq!(after(gone(Some("STORAGE"), 0)), Some(1));
    assert_eq!(after(gone(Some("GPU"), 1)), Some(1));
    // Without a medium: from all of them.
    assert_eq!(after(gone(None, 0)), Some(0));
}

#[derive(Clone, Debug)]
enum Step {
    Say(Vec<(bool, u64)>),
    Clear,
    /// The next batches are not heard.
    Withhold(u8),
    Restart,
    Reconnect,
    Garbage(Vec<u8>),
}

fn any_step() -> impl Strategy<Value = Step> {
    prop_oneof![
        12 => proptest::collection::vec((any::<bool>(), 0..30_u64), 0..6).prop_map(Step::Say),
        1 => Just(Step::Clear),
        3 => (1..6_u8).prop_map(Step::Withhold),
        1 => Just(Step::Restart),
        1 => Just(Step::Reconnect),
        1 => proptest::collection::vec(any::<u8>(), 0..20).prop_map(Step::Garbage),
    ]
}

/// The publisher as a set and a list.
#[derive(Default)]
struct World {
    truth: BTreeSet<u64>,
    kept: Vec<(u64, Vec<u8>)>,
    next: u64,
    epoch: u64,
    kept_max: usize,
    has_snapshots: bool,
}

impl World {
    fn say(&mut self, payload: Vec<u8>) -> (u64, Vec<u8>) {
        let seq = self.next;
        self.next += 1;
        self.kept.push((seq, payload.clone()));
        if self.kept.len() > self.kept_max {
            self.kept.remove(0);
        }
        (seq, payload)
    }

    fn meet(&self, tracker: &mut Tracker, mut need: Need) {
        for _ in 0..4 {
            need = match need {
                Need::Nothing => return,
                Need::Replay(from) => {
                    let later = self.kept.iter().filter(|(seq, _)| *seq >= from);
                    let mut found = Need::Nothing;
                    for (seq, payload) in later {
                        found = tracker.replayed(*seq, payload);
                        if found != Need::Nothing {
                            break;
                        }
                    }
                    if found == Need::Nothing { tracker.replay_ended() } else { found }
                }
                Need::Resync if self.has_snapshots => {
                    tracker.snapshot_began(self.epoch, self.next);
                    let blocks: Vec<u64> = self.truth.iter().copied().collect();
                    assert!(tracker.snapshot_part(&batch(&[stored(&blocks)])));
                    tracker.snapshot_ended()
                }
                Need::Resync => {
                    tracker.kept_began();
                    if self.kept.iter().any(|(seq, payload)| tracker.kept(*seq, payload) != Need::Nothing) {
                        break;
                    }
                    tracker.kept_ended()
                }
            };
        }
        if need != Need::Nothing {
            tracker.resync_failed();
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2_000))]

    #[test]
    fn what_is_believed_is_true(
        steps in proptest::collection::vec(any_step(), 1..60),
        // One that keeps not even its last batch cannot show that one was missed at the end.
        kept_max in 1..12_usize,
        has_snapshots in any::<bool>(),
    ) {
        let mut world = World { kept_max, has_snapshots, epoch: 1, ..World::default() };
        let mut tracker = Tracker::new(1_000);
        let need = tracker.connected();
        world.meet(&mut tracker, need);
        let mut withheld = 0;
        let mut has_heard_all = true;
        for step in steps {
            let payload = match step {
                Step::Say(changes) => {
                    let mut events = Vec::new();
                    for (is_stored, block) in changes {
                        if is_stored {
                            world.truth.insert(block);
                            events.push(stored(&[block]));
                        } else {
                            world.truth.remove(&block);
                            events.push(removed(&[block]));
                        }
                    }
                    batch(&events)
                }
                Step::Clear => {
                    world.truth.clear();
                    batch(&[KvEvent::Cleared])
                }
                Step::Withhold(count) => {
                    withheld = count;
                    continue;
                }
                Step::Restart => {
                    let World { kept_max, has_snapshots, epoch, .. } = world;
                    world = World { kept_max, has_snapshots, epoch: epoch + 1, ..World::default() };
                    tracker.disconnected();
                    let need = tracker.connected();
                    world.meet(&mut tracker, need);
                    has_heard_all = true;
                    continue;
                }
                Step::Reconnect => {
                    tracker.disconnected();
                    prop_assert_eq!(tracker.prefix(&[]), None);
                    let need = tracker.connected();
                    world.meet(&mut tracker, need);
                    has_heard_all = true;
                    continue;
                }
                // Garbage in the shape of a message says nothing that anybody could know; a publisher does not send it.
                Step::Garbage(bytes) if Batch::decode(&bytes).is_err() => bytes,
                Step::Garbage(_) => continue,
            };
            let (seq, payload) = world.say(payload);
            if withheld > 0 {
                withheld -= 1;
                has_heard_all = false;
                continue;
            }
            let need = tracker.live(seq, &payload);
            world.meet(&mut tracker, need);
            has_heard_all = true;
            prop_assert!(tracker.index().len() <= 1_000);
        }
        if !has_heard_all {
            // What a probe would find.
            let need = tracker.probe();
            world.meet(&mut tracker, need);
        }
        if let Some(known) = tracker.prefix(&[]).map(|_| tracker.index().len()) {
            let truth: Vec<u64> = world.truth.iter().copied().collect();
            prop_assert!(hashes(&truth).iter().all(|hash| tracker.index().contains(hash)));
            prop_assert_eq!(known, truth.len());
        }
        if has_snapshots {
            prop_assert_eq!(tracker.trust(), Trust::Whole, "with snapshots everything can be had");
        }
    }

    #[test]
    fn any_input_in_any_order_is_taken(
        inputs in proptest::collection::vec((0..12_u8, 0..20_u64, proptest::collection::vec(any::<u8>(), 0..30)), 0..60),
    ) {
        let mut tracker = Tracker::new(10);
        for (which, number, bytes) in inputs {
            let number = if number == 19 { u64::MAX } else { number };
            let payload = if number.is_multiple_of(2) { batch(&[stored(&[number, number + 1])]) } else { bytes };
            match which {
                0 => _ = tracker.connected(),
                1 => tracker.disconnected(),
                2 => _ = tracker.live(number, &payload),
                3 => _ = tracker.replayed(number, &payload),
                4 => _ = tracker.replay_ended(),
                5 => tracker.snapshot_began(number, number),
                6 => _ = tracker.snapshot_part(&payload),
                7 => _ = tracker.snapshot_ended(),
                8 => tracker.kept_began(),
                9 => _ = tracker.kept(number, &payload),
                10 => _ = tracker.kept_ended(),
                _ => tracker.resync_failed(),
            }
            prop_assert!(tracker.index().len() <= 10);
        }
    }
}
