//! Which blocks does a worker hold, as far as its events say?

use std::collections::HashMap;

use crate::batch::{Batch, BlockHash, KvEvent, Removed, Stored};
use crate::limits::{CHANGES_MAX, SNAPSHOT_BLOCKS};

/// Groups that are told apart; those beyond share the last.
const GROUPS: u32 = 16;
const MEDIA: [&str; 3] = ["GPU", "CPU", "STORAGE"];

/// The blocks of one worker. Holds at most so many; those that come when it is full are not kept, and it says so.
#[derive(Clone, Debug)]
pub struct Index {
    /// For each block, where it is: 16 groups for each of GPU, CPU, storage, and not named.
    blocks: HashMap<BlockHash, u64>,
    blocks_max: usize,
    not_kept: u64,
    /// What came and went, for whoever keeps a copy; none when nobody does.
    changes: Option<Changes>,
}

/// One change of an index.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Change {
    /// Nothing is in it. What is follows.
    Cleared,
    /// The block is there now.
    Stored(BlockHash),
    /// It is there no longer.
    Removed(BlockHash),
}

#[derive(Clone, Debug, Default)]
struct Changes {
    list: Vec<Change>,
    /// There were too many, or everything is another: the copy is made anew.
    is_anew: bool,
}

impl Changes {
    fn push(&mut self, change: Change) {
        if self.is_anew {
            return;
        }
        if self.list.len() >= CHANGES_MAX {
            return self.anew();
        }
        self.list.push(change);
    }

    fn anew(&mut self) {
        self.list = Vec::new();
        self.is_anew = true;
    }
}

/// One place of a medium: the bit of group 0.
fn medium_shift(medium: Option<&str>) -> u32 {
    let place = MEDIA.iter().position(|name| Some(*name) == medium).unwrap_or(MEDIA.len());
    place as u32 * GROUPS
}

fn group_bit(group: Option<u32>) -> u64 {
    1 << group.unwrap_or(0).min(GROUPS - 1)
}

impl Index {
    /// An empty one.
    #[must_use]
    pub fn new(blocks_max: usize) -> Self {
        Self { blocks: HashMap::new(), blocks_max, not_kept: 0, changes: None }
    }

    /// Keeps what changes from now on for [`Index::take_changes`], all that is in it first.
    pub(crate) fn keep_changes(&mut self) {
        self.changes = Some(Changes { list: Vec::new(), is_anew: true });
    }

    /// Takes the place of another one, whose copy is to be made anew.
    pub(crate) fn replace(&mut self, other: Self) {
        let changes = self.changes.take();
        *self = other;
        self.changes = changes;
        self.changed_wholly();
    }

    fn changed_wholly(&mut self) {
        if let Some(changes) = &mut self.changes {
            changes.anew();
        }
    }

    fn changed(&mut self, change: Change) {
        if let Some(changes) = &mut self.changes {
            changes.push(change);
        }
    }

    /// What has changed since the last time, in order; everything behind a [`Change::Cleared`] when there was too much of it.
    pub(crate) fn take_changes(&mut self, into: &mut Vec<Change>) {
        let Some(changes) = &mut self.changes else { return };
        if std::mem::take(&mut changes.is_anew) {
            into.push(Change::Cleared);
            into.extend(self.blocks.keys().copied().map(Change::Stored));
        }
        into.append(&mut changes.list);
    }

    /// Blocks in it.
    #[must_use]
    pub fn len(&self) -> usize {
        self.blocks.len()
    }

    /// Nothing in it.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.blocks.is_empty()
    }

    /// Blocks that had no room since it was empty.
    #[must_use]
    pub fn not_kept(&self) -> u64 {
        self.not_kept
    }

    /// Whether the worker has the block, wherever.
    #[must_use]
    pub fn contains(&self, hash: &BlockHash) -> bool {
        self.blocks.contains_key(hash)
    }

    /// How many of a prompt's blocks it has from the first on without a gap.
    #[must_use]
    pub fn prefix(&self, hashes: &[BlockHash]) -> usize {
        hashes.iter().take_while(|hash| self.contains(hash)).count()
    }

    pub(crate) fn apply(&mut self, batch: &Batch) {
        for event in &batch.events {
            match event {
                KvEvent::Stored(stored) => self.store(stored),
                KvEvent::Removed(removed) => self.remove(removed),
                KvEvent::Cleared => self.clear(),
            }
        }
    }

    fn store(&mut self, stored: &Stored) {
        let bit = group_bit(stored.group_idx) << medium_shift(stored.medium.as_deref());
        for hash in &stored.block_hashes {
            if let Some(places) = self.blocks.get_mut(hash) {
                *places |= bit;
            } else if self.blocks.len() < self.blocks_max {
                self.blocks.insert(*hash, bit);
                self.changed(Change::Stored(*hash));
            } else {
                self.not_kept += 1;
            }
        }
    }

    fn remove(&mut self, removed: &Removed) {
        let bit = group_bit(removed.group_idx);
        let bits = match removed.medium.as_deref() {
            // Not named: from everywhere.
            None => (0..=MEDIA.len() as u32).fold(0, |bits, medium| bits | bit << (medium * GROUPS)),
            medium => bit << medium_shift(medium),
        };
        for hash in &removed.block_hashes {
            if let Some(places) = self.blocks.get_mut(hash) {
                *places &= !bits;
                if *places == 0 {
                    self.blocks.remove(hash);
                    self.changed(Change::Removed(*hash));
                }
            }
        }
    }

    pub(crate) fn clear(&mut self) {
        // The memory goes with the blocks: a worker that restarts small must not cost what it once had.
        self.blocks = HashMap::new();
        self.not_kept = 0;
        self.changed_wholly();
    }

    /// The whole as events that make it anew, a batch each.
    pub(crate) fn snapshot(&self, ts: f64, rank: Option<u32>) -> Vec<Batch> {
        let mut batches = Vec::new();
        let anywhere = self.blocks.values().fold(0, |all, places| all | places);
        for medium in 0..=MEDIA.len() as u32 {
            for group in 0..GROUPS {
                let bit = 1_u64 << (medium * GROUPS + group);
                if anywhere & bit == 0 {
                    continue;
                }
                let here = self.blocks.iter().filter(|(_, places)| **places & bit != 0).map(|(hash, _)| *hash);
                let hashes: Vec<BlockHash> = here.collect();
                batches.extend(hashes.chunks(SNAPSHOT_BLOCKS).map(|hashes| {
                    let stored = Stored {
                        block_hashes: hashes.to_vec(),
                        medium: MEDIA.get(medium as usize).map(|name| (*name).to_owned()),
                        group_idx: (group > 0).then_some(group),
                        ..Stored::default()
                    };
                    Batch { ts, events: vec![KvEvent::Stored(stored)], rank, unknown: 0 }
                }));
            }
        }
        batches
    }
}
