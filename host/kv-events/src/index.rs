//! Which blocks does a worker hold, as far as its events say?

use std::collections::HashMap;

use crate::batch::{Batch, BlockHash, KvEvent, Removed, Stored};
use crate::limits::SNAPSHOT_BLOCKS;

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
        Self { blocks: HashMap::new(), blocks_max, not_kept: 0 }
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
                }
            }
        }
    }

    pub(crate) fn clear(&mut self) {
        // The memory goes with the blocks: a worker that restarts small must not cost what it once had.
        self.blocks = HashMap::new();
        self.not_kept = 0;
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
