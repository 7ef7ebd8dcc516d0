//! What the parties of a hand-off tell each other. The protocol has an encoding of its own, which every wire shares; it stands here as it is.

use penstock_base::BlockRef;
use penstock_base::codec::{DecodeError, Reader, Writer};
use penstock_sched::handoff::{
    Between, Coded, End, Fallback, Grid, LeaseTerms, Open, Order, PartyConfig, Peer, Reserve, Said, Seal, Side, Timing,
    ToReceiver, ToSender, Topology,
};
use std::sync::Arc;

use super::{Decode, Encode, choice};

macro_rules! coded {
    ($($ty:ty),* $(,)?) => { $(
        impl Encode for $ty {
            fn put(&self, out: &mut Writer) {
                Coded::put(self, out);
            }
        }
        impl Decode for $ty {
            fn take(from: &mut Reader<'_>) -> Result<Self, DecodeError> {
                Coded::take(from)
            }
        }
    )* };
}

coded! {
    Between<ToReceiver>, Between<ToSender>, End, Fallback, Grid, LeaseTerms, Option<PartyConfig>, Order<Open>,
    Order<Reserve>, Peer, Said, Seal, Side, Timing, Arc<[BlockRef]>,
}

choice! { Topology, "topology" {
    0 => Any,
    1 => Preferred,
    2 => Required,
} }

impl Encode for Option<penstock_sched::gateway::HandoffConfig> {
    fn put(&self, out: &mut Writer) {
        out.option(self.as_ref(), |out, config| config.put(out));
    }
}

impl Decode for Option<penstock_sched::gateway::HandoffConfig> {
    fn take(from: &mut Reader<'_>) -> Result<Self, DecodeError> {
        from.option(Decode::take)
    }
}
