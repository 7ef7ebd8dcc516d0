//! How is a receiver written down and read back? What [`Receiver::decode`] returns goes on exactly as the original would.

use penstock_base::Instant;
use penstock_base::codec::{DecodeError, Reader, Writer};
use penstock_base::limits::HANDOFF_RECENT_MAX;
use penstock_base::time::MonotoneNow;
use penstock_kv::BlockTable;

use super::{Entry, Over, Receiver, ReceiverState};
use crate::handoff::codec::{Coded, choice, record};
use crate::handoff::config::PartyConfig;
use crate::handoff::slots::{DeadGateways, Recent, Slots};

choice! { ReceiverState, "state of a receiver" {
    0 => Reserved,
    1 => Landing,
    2 => Fencing,
    3 => Verifying,
    4 => Installed,
    5 => Taken,
    6 => Quarantine(why),
} }

choice! { Over, "end at a receiver" {
    0 => Taken,
    1 => Failed(why),
} }

record! {
    Entry { ask, state, hold, write, table, landing, told, inbox, seal, patience }
}

impl Coded for BlockTable {
    fn put(&self, out: &mut Writer) {
        self.encode(out);
    }
    fn take(from: &mut Reader<'_>) -> Result<Self, DecodeError> {
        Self::decode(from)
    }
}

impl Receiver {
    /// Writes the whole state for a snapshot. Equal states give equal bytes.
    pub fn encode(&self, out: &mut Writer) {
        self.clock.encode(out);
        self.slots.encode(out, |w, entry| entry.put(w));
        self.recent.encode(out);
        self.dead.encode(out);
        out.count(self.tables.len());
        out.u32(self.window);
        out.bool(self.draining);
        out.u64(self.orphans);
    }

    /// Reads what [`Self::encode`] wrote at the same configuration.
    ///
    /// # Errors
    /// Bytes that no receiver of this configuration is written as.
    pub fn decode(config: PartyConfig, from: &mut Reader<'_>) -> Result<Self, DecodeError> {
        let mut to = Self::new(config, Instant::ZERO);
        to.clock = MonotoneNow::decode(from)?;
        to.slots = Slots::decode(to.config.transfers, from, Entry::take)?;
        to.recent = Recent::decode(HANDOFF_RECENT_MAX, from)?;
        to.dead = DeadGateways::decode(from)?;
        let tables = from.index()?;
        to.window = from.u32()?;
        to.draining = from.bool()?;
        to.orphans = from.u64()?;
        let capacity = to.config.table_blocks;
        // One that was taken has given its table away.
        let sound = |entry: &Entry| {
            let taken = entry.state == ReceiverState::Taken && entry.table.capacity() == 0;
            taken || entry.table.capacity() == capacity
        };
        if tables > to.tables.len() || !to.slots.iter().all(|(_, entry)| sound(entry)) {
            return Err(DecodeError::Invalid("receiver"));
        }
        to.tables.truncate(tables);
        Ok(to)
    }
}
