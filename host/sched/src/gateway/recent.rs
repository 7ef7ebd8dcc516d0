//! What happened lately, by key: how often a prefix was placed in the last minute, and which replica served a session last.

use penstock_base::codec::{DecodeError, Reader, Writer};
use penstock_base::limits::{PREFIX_HEAT_KEYS_MAX, SESSIONS_MAX};
use penstock_base::{Instant, ReplicaEpoch, ReplicaId, SessionId};

use super::table::Table;

/// Parts of the minute that are counted apart; the oldest part leaves as a whole.
const PARTS: usize = 6;
/// Length of a part in nanoseconds.
const PART_NS: u64 = 10_000_000_000;

/// Placements by prefix key in the last minute, to ten seconds.
#[derive(Clone, Debug)]
pub(super) struct PrefixHeat {
    keys: Table<u64, LastMinute>,
}

/// A count of what happened in the last minute, to ten seconds.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) struct LastMinute {
    counts: [u32; PARTS],
    /// Number of the part counted last.
    part: u64,
}

impl LastMinute {
    /// It happened once more.
    pub fn add(&mut self, now: Instant) {
        self.advance(now.0 / PART_NS);
        self.counts[(self.part % PARTS as u64) as usize] += 1;
    }

    /// How often it happened in the last minute.
    pub fn count(mut self, now: Instant) -> u64 {
        self.advance(now.0 / PART_NS);
        self.counts.iter().map(|count| u64::from(*count)).sum()
    }

    /// Writes the counts.
    pub fn encode(&self, out: &mut Writer) {
        out.u64(self.part);
        self.counts.iter().for_each(|count| out.u32(*count));
    }

    /// Reads what [`Self::encode`] wrote.
    pub fn decode(from: &mut Reader<'_>) -> Result<Self, DecodeError> {
        let mut heat = Self { part: from.u64()?, ..Self::default() };
        for count in &mut heat.counts {
            *count = from.u32()?;
        }
        Ok(heat)
    }

    /// Forgets the parts that lie a minute back.
    fn advance(&mut self, part: u64) {
        let passed = part.saturating_sub(self.part).min(PARTS as u64);
        for step in 1..=passed {
            self.counts[((self.part + step) % PARTS as u64) as usize] = 0;
        }
        self.part = self.part.max(part);
    }
}

impl PrefixHeat {
    /// Nothing was placed.
    pub fn new() -> Self {
        Self { keys: Table::with_capacity(PREFIX_HEAT_KEYS_MAX) }
    }

    /// A request with this key was placed. Key 0 is no key.
    pub fn add(&mut self, key: u64, now: Instant) {
        if key == 0 {
            return;
        }
        let slot = match self.keys.find(&key) {
            Some(slot) => slot,
            None => {
                let Some(inserted) = self.keys.insert(key, LastMinute::default()) else { return };
                self.keys.unpin(inserted.slot);
                inserted.slot
            }
        };
        self.keys.touch(slot);
        self.keys[slot].add(now);
    }

    /// Placements with this key in the last minute.
    pub fn requests(&self, key: u64, now: Instant) -> u64 {
        self.keys.find(&key).map_or(0, |slot| self.keys[slot].count(now))
    }

    /// Writes the state.
    pub fn encode(&self, out: &mut Writer) {
        self.keys.encode(out, |out, key, heat| {
            out.u64(*key);
            heat.encode(out);
        });
    }

    /// Reads what [`Self::encode`] wrote.
    pub fn decode(from: &mut Reader<'_>) -> Result<Self, DecodeError> {
        let keys = Table::decode(from, PREFIX_HEAT_KEYS_MAX, |from| Ok((from.u64()?, LastMinute::decode(from)?)))?;
        Ok(Self { keys })
    }
}

/// Where each session was served last.
#[derive(Clone, Debug)]
pub(super) struct Sessions {
    table: Table<SessionId, (ReplicaId, ReplicaEpoch)>,
}

impl Sessions {
    /// No session.
    pub fn new() -> Self {
        Self { table: Table::with_capacity(SESSIONS_MAX) }
    }

    /// A request of the session was placed there. Session 0 is none. Returns the session that made room.
    pub fn served(
        &mut self,
        session: SessionId,
        replica: ReplicaId,
        epoch: ReplicaEpoch,
    ) -> Option<(SessionId, ReplicaId)> {
        if session == SessionId(0) {
            return None;
        }
        if let Some(slot) = self.table.find(&session) {
            self.table[slot] = (replica, epoch);
            self.table.touch(slot);
            return None;
        }
        let inserted = self.table.insert(session, (replica, epoch))?;
        self.table.unpin(inserted.slot);
        inserted.evicted.map(|gone| (gone.key, gone.value.0))
    }

    /// Who served it last, and in which incarnation.
    pub fn last(&self, session: SessionId) -> Option<(ReplicaId, ReplicaEpoch)> {
        self.table.find(&session).map(|slot| self.table[slot])
    }

    /// Writes the state.
    pub fn encode(&self, out: &mut Writer) {
        self.table.encode(out, |out, session, (replica, epoch)| {
            out.u64(session.0);
            out.u32(replica.0);
            out.u64(epoch.0);
        });
    }

    /// Reads what [`Self::encode`] wrote.
    pub fn decode(from: &mut Reader<'_>) -> Result<Self, DecodeError> {
        let table = Table::decode(from, SESSIONS_MAX, |from| {
            Ok((SessionId(from.u64()?), (ReplicaId(from.u32()?), ReplicaEpoch(from.u64()?))))
        })?;
        Ok(Self { table })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn heat_is_of_the_last_minute() {
        let second = |s: u64| Instant(s * 1_000_000_000);
        let mut heat = PrefixHeat::new();
        for s in [5, 15, 16, 59] {
            heat.add(9, second(s));
        }
        heat.add(0, second(59));
        assert_eq!((heat.requests(9, second(59)), heat.requests(0, second(59))), (4, 0));
        assert_eq!(heat.requests(9, second(61)), 3, "the part of second 5 is a minute back");
        assert_eq!(heat.requests(9, second(119)), 0, "the part of second 59 has left with second 110");
        heat.add(9, second(500));
        assert_eq!(heat.requests(9, second(500)), 1);
    }

    #[test]
    fn both_tables_are_bounded() {
        let (mut heat, mut sessions) = (PrefixHeat::new(), Sessions::new());
        for key in 1..=PREFIX_HEAT_KEYS_MAX as u64 + 1 {
            heat.add(key, Instant::ZERO);
        }
        assert_eq!((heat.requests(1, Instant::ZERO), heat.requests(2, Instant::ZERO)), (0, 1));
        let mut gone = None;
        for key in 1..=SESSIONS_MAX as u64 + 1 {
            gone = sessions.served(SessionId(key), ReplicaId(1), ReplicaEpoch(1));
        }
        assert_eq!((gone, sessions.table.len()), (Some((SessionId(1), ReplicaId(1))), SESSIONS_MAX));
    }
}
