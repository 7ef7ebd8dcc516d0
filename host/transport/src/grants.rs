//! Who may write where? The table of an endpoint's permissions, which it alone changes.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::ops::Range;

use crate::scatter::{self, Run};
use crate::{GrantId, Limits, OpId, PeerId, Region, TransportError};

/// Permissions that stand: for a peer and a number, runs of blocks of one region, in order.
#[derive(Default)]
pub(crate) struct Grants {
    rows: BTreeMap<(PeerId, GrantId), (u16, Vec<Run>)>,
}

impl Grants {
    /// Lets `peer` write to these blocks under this number.
    pub(crate) fn insert(
        &mut self,
        (peer, grant): (PeerId, GrantId),
        (region, blocks): (u16, &[Range<u32>]),
        regions: &[Region],
        limits: &Limits,
    ) -> Result<(), TransportError> {
        let there = regions.get(usize::from(region)).ok_or(TransportError::UnknownRegion(region))?;
        let run = |blocks: &Range<u32>| Run { first: blocks.start, blocks: blocks.end.saturating_sub(blocks.start) };
        let mut runs: Vec<Run> = blocks.iter().map(run).collect();
        if runs.is_empty() {
            return Err(TransportError::Empty);
        }
        runs.iter().try_for_each(|run| scatter::check(*run, there.blocks()))?;
        runs.sort_unstable_by_key(|run| run.first);
        // Neighbours are one run, so that a write over both is looked up as one.
        runs.dedup_by(|next, last| {
            let joins = last.first.saturating_add(last.blocks) == next.first;
            if joins {
                last.blocks += next.blocks;
            }
            joins
        });
        let is_full = self.rows.len() >= limits.grants_max;
        match self.rows.entry((peer, grant)) {
            Entry::Occupied(_) => Err(TransportError::Duplicate(OpId(grant.0))),
            Entry::Vacant(_) if is_full => {
                Err(TransportError::Busy { what: "grants", limit: limits.grants_max as u64 })
            }
            Entry::Vacant(entry) => {
                entry.insert((region, runs));
                Ok(())
            }
        }
    }

    /// Takes one back. Whether it stood.
    pub(crate) fn remove(&mut self, peer: PeerId, grant: GrantId) -> bool {
        self.rows.remove(&(peer, grant)).is_some()
    }

    /// Those that stand.
    pub(crate) fn all(&self) -> Vec<(PeerId, GrantId)> {
        self.rows.keys().copied().collect()
    }

    /// Whether this one stands.
    pub(crate) fn holds(&self, peer: PeerId, grant: GrantId) -> bool {
        self.rows.contains_key(&(peer, grant))
    }

    /// Whether all of these blocks are granted to whoever writes, still.
    pub(crate) fn allow(&self, peer: PeerId, grant: GrantId, region: u16, wanted: &[Run]) -> bool {
        let Some((_, runs)) = self.rows.get(&(peer, grant)).filter(|(granted, _)| *granted == region) else {
            return false;
        };
        wanted.iter().all(|run| {
            let behind = runs.partition_point(|granted| granted.first <= run.first);
            let before = behind.checked_sub(1).map(|at| &runs[at]);
            let end = |run: &Run| u64::from(run.first) + u64::from(run.blocks);
            before.is_some_and(|granted| end(granted) >= end(run))
        })
    }
}
