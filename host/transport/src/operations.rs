//! Which operations did this endpoint start, and which of them may still write?

use std::collections::BTreeMap;
use std::time::Instant;

use crate::scatter::{self, Run, Scatter};
use crate::{Direction, Event, Failure, Layout, Limits, OpId, PeerId, Region, Touch, Transfer, TransportError};

/// The table of an endpoint's own operations, from start to settlement.
pub(crate) struct Operations {
    limits: Limits,
    rows: BTreeMap<OpId, Row>,
    /// Sum over the rows.
    bytes: u64,
}

struct Row {
    peer: PeerId,
    bytes: u64,
    deadline: Instant,
    /// It has ended and may still write.
    is_quarantined: bool,
}

/// What a transfer comes to once it has been checked.
pub(crate) struct Admitted {
    pub(crate) local: Scatter,
    pub(crate) remote: Vec<Run>,
}

impl Operations {
    pub(crate) fn new(limits: Limits) -> Self {
        Self { limits, rows: BTreeMap::new(), bytes: 0 }
    }

    /// Checks a transfer against the bounds and both regions, and counts it in.
    pub(crate) fn admit(
        &mut self,
        transfer: &Transfer,
        ours: &[Region],
        theirs: &[Layout],
    ) -> Result<Admitted, TransportError> {
        let Transfer { op, direction, spans, .. } = transfer;
        if self.rows.contains_key(op) {
            return Err(TransportError::Duplicate(*op));
        }
        let local = ours.get(usize::from(transfer.local)).ok_or(TransportError::UnknownRegion(transfer.local))?;
        let remote = theirs.get(usize::from(transfer.remote)).ok_or(TransportError::UnknownRegion(transfer.remote))?;
        if local.block_bytes() as u64 != remote.block_bytes {
            return Err(TransportError::Layout { ours: local.block_bytes() as u64, theirs: remote.block_bytes });
        }
        if spans.len() > self.limits.spans_max {
            let (value, limit) = (spans.len() as u64, self.limits.spans_max as u64);
            return Err(TransportError::TooLarge { what: "spans", value, limit });
        }
        let here = spans.iter().map(|span| Run { first: span.local, blocks: span.blocks });
        let there = spans.iter().map(|span| Run { first: span.remote, blocks: span.blocks });
        there.clone().try_for_each(|run| scatter::check(run, remote.blocks))?;
        let local = Scatter::new(local.clone(), here.clone())?;
        let twice = match direction {
            Direction::Write => scatter::overlap(there.clone()),
            Direction::Read => scatter::overlap(here),
        };
        if let Some(block) = twice {
            return Err(TransportError::WrittenTwice(block));
        }
        let bytes = local.bytes();
        if bytes > self.limits.bytes_max {
            return Err(TransportError::TooLarge { what: "bytes", value: bytes, limit: self.limits.bytes_max });
        }
        if self.rows.len() >= self.limits.ops_max {
            return Err(TransportError::Busy { what: "operations", limit: self.limits.ops_max as u64 });
        }
        if self.bytes + bytes > self.limits.bytes_max {
            return Err(TransportError::Busy { what: "bytes in flight", limit: self.limits.bytes_max });
        }
        self.bytes += bytes;
        let row = Row { peer: transfer.peer, bytes, deadline: transfer.deadline, is_quarantined: false };
        self.rows.insert(*op, row);
        Ok(Admitted { local, remote: there.collect() })
    }

    /// Forgets an operation that was admitted and could not begin.
    pub(crate) fn forget(&mut self, op: OpId) {
        if let Some(row) = self.rows.remove(&op) {
            self.bytes -= row.bytes;
        }
    }

    /// Ends a running operation; one in quarantine only settles. An unknown one is a late word about a settled one.
    pub(crate) fn end(&mut self, op: OpId, outcome: Result<(), Failure>, touch: Touch, events: &mut Vec<Event>) {
        let Some(row) = self.rows.get_mut(&op) else { return };
        let settled = touch == Touch::Settled;
        if row.is_quarantined {
            if settled {
                self.forget(op);
                events.push(Event::Settled { op });
            }
            return;
        }
        row.is_quarantined = true;
        if settled {
            self.forget(op);
        }
        events.push(Event::Ended { op, outcome, settled });
    }

    /// An operation that ended unsettled can write no more.
    pub(crate) fn settle(&mut self, op: OpId, events: &mut Vec<Event>) {
        self.end(op, Err(Failure::Cancelled), Touch::Settled, events);
    }

    /// Whether it runs, is in quarantine, or is unknown.
    pub(crate) fn state(&self, op: OpId) -> Option<(PeerId, Touch)> {
        let row = self.rows.get(&op)?;
        Some((row.peer, if row.is_quarantined { Touch::Quarantined } else { Touch::Settled }))
    }

    /// Running operations whose deadline is not after `now`.
    pub(crate) fn expired(&self, now: Instant) -> Vec<OpId> {
        let is_due = |row: &Row| !row.is_quarantined && row.deadline <= now;
        self.rows.iter().filter(|(_, row)| is_due(row)).map(|(op, _)| *op).collect()
    }

    /// All operations with this peer.
    pub(crate) fn of_peer(&self, peer: PeerId) -> Vec<OpId> {
        self.rows.iter().filter(|(_, row)| row.peer == peer).map(|(op, _)| *op).collect()
    }

    /// The earliest deadline of a running operation.
    pub(crate) fn next_deadline(&self) -> Option<Instant> {
        self.rows.values().filter(|row| !row.is_quarantined).map(|row| row.deadline).min()
    }
}
