//! How is a coordinator written down and read back? What [`Coordinator::decode`] returns goes on exactly as the original would.

use penstock_base::Instant;
use penstock_base::codec::{DecodeError, Reader, Writer};
use penstock_base::time::MonotoneNow;

use super::{Coordinator, CoordinatorState, Entry, Party};
use crate::handoff::codec::{Coded, choice, record};
use crate::handoff::config::CoordinatorConfig;
use crate::handoff::slots::Slots;

choice! { CoordinatorState, "state of a hand-off" {
    0 => Reserving,
    1 => Opening,
    2 => Moving,
    3 => Settling(side),
    4 => Fencing(side),
    5 => Closing,
} }

record! {
    Party { peer, begun, done, told_to_take, gone, closed, granted, asked }
    Entry { ask, state, sender, receiver, first_block, deadline, repeat_at, owner, why }
}

impl Coordinator {
    /// Writes the whole state for a snapshot. Equal states give equal bytes.
    pub fn encode(&self, out: &mut Writer) {
        self.clock.encode(out);
        self.slots.encode(out, |w, entry| entry.put(w));
        out.u64(self.next);
    }

    /// Reads what [`Self::encode`] wrote at the same configuration.
    ///
    /// # Errors
    /// Bytes that no coordinator of this configuration is written as, or one whose invariants do not hold.
    pub fn decode(config: CoordinatorConfig, from: &mut Reader<'_>) -> Result<Self, DecodeError> {
        let mut to = Self::new(config, Instant::ZERO);
        to.clock = MonotoneNow::decode(from)?;
        to.slots = Slots::decode(to.config.transfers, from, Entry::take)?;
        to.next = from.u64()?;
        to.check().map_err(DecodeError::Invalid)?;
        Ok(to)
    }
}
