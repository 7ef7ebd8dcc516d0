//! How is a sender written down and read back? What [`Sender::decode`] returns goes on exactly as the original would.

use penstock_base::Instant;
use penstock_base::codec::{DecodeError, Reader, Writer};
use penstock_base::limits::HANDOFF_RECENT_MAX;
use penstock_base::time::MonotoneNow;

use super::{Entry, Over, Sender, SenderState};
use crate::handoff::codec::{Coded, choice, record};
use crate::handoff::config::PartyConfig;
use crate::handoff::slots::{DeadGateways, Recent, Slots};

choice! { SenderState, "state of a sender" {
    0 => Opening,
    1 => Moving,
    2 => Delivered,
    3 => Stuck(why),
    4 => Local,
    5 => Draining(why),
} }

choice! { Over, "end at a sender" {
    0 => Taken,
    1 => Failed(why),
} }

record! {
    Entry {
        ask, envelope, state, hold, write, out, sources, seal, sealed, resend_at, resends, patience, quiet_by,
    }
}

impl Sender {
    /// Writes the whole state for a snapshot. Equal states give equal bytes.
    pub fn encode(&self, out: &mut Writer) {
        self.clock.encode(out);
        self.slots.encode(out, |w, entry| entry.put(w));
        self.recent.encode(out);
        self.dead.encode(out);
        out.u32(self.turn);
        out.bool(self.draining);
        out.bool(self.accepting);
        out.u64(self.orphans);
    }

    /// Reads what [`Self::encode`] wrote at the same configuration.
    ///
    /// # Errors
    /// Bytes that no sender of this configuration is written as.
    pub fn decode(config: PartyConfig, from: &mut Reader<'_>) -> Result<Self, DecodeError> {
        let mut to = Self::new(config, Instant::ZERO);
        to.clock = MonotoneNow::decode(from)?;
        to.slots = Slots::decode(to.config.transfers, from, Entry::take)?;
        to.recent = Recent::decode(HANDOFF_RECENT_MAX, from)?;
        to.dead = DeadGateways::decode(from)?;
        to.turn = from.u32()?;
        to.draining = from.bool()?;
        to.accepting = from.bool()?;
        to.orphans = from.u64()?;
        let sound = |entry: &Entry| entry.envelope.grid.is_valid() && entry.out.is_sound();
        if to.turn >= to.slots.places() || !to.slots.iter().all(|(_, entry)| sound(entry)) {
            return Err(DecodeError::Invalid("sender"));
        }
        Ok(to)
    }
}
