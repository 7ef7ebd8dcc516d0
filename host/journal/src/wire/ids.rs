//! Ids, times, keys, ranks and reasons.

use penstock_base::codec::{DecodeError, Reader, Writer};
use penstock_base::{
    BatchId, BlockKey, BlockRef, CancelCause, ClassRank, DispatchNumber, Duration, GatewayEpoch, Generation, Instant,
    Outcome, RefuseReason, ReplicaEpoch, ReplicaId, RequestId, SeqId, Slot, TransferId,
};

use super::{Decode, Encode, record};

macro_rules! wrapped {
    ($($ty:ident),* $(,)?) => { $(
        impl Encode for $ty {
            fn put(&self, out: &mut Writer) {
                self.0.put(out);
            }
        }
        impl Decode for $ty {
            fn take(from: &mut Reader<'_>) -> Result<Self, DecodeError> {
                Decode::take(from).map(Self)
            }
        }
    )* };
}

wrapped! {
    GatewayEpoch, RequestId, ReplicaId, ReplicaEpoch, BatchId, DispatchNumber, Generation, Slot, Instant, Duration,
    TransferId,
}

record! {
    SeqId { request, index }
    BlockRef { index, generation }
}

impl Encode for BlockKey {
    fn put(&self, out: &mut Writer) {
        out.raw(&self.0);
    }
}

impl Decode for BlockKey {
    fn take(from: &mut Reader<'_>) -> Result<Self, DecodeError> {
        Self::decode(from)
    }
}

impl Encode for ClassRank {
    fn put(&self, out: &mut Writer) {
        out.u8(self.get());
    }
}

impl Decode for ClassRank {
    fn take(from: &mut Reader<'_>) -> Result<Self, DecodeError> {
        Self::new(from.u8()?).ok_or(DecodeError::Invalid("class"))
    }
}

impl Encode for Outcome {
    fn put(&self, out: &mut Writer) {
        let (kind, detail) = self.code();
        out.u8(kind);
        out.u16(detail);
    }
}

impl Decode for Outcome {
    fn take(from: &mut Reader<'_>) -> Result<Self, DecodeError> {
        let (kind, detail) = (from.u8()?, from.u16()?);
        // One way to write each: a detail where there is none is damage.
        let outcome = Self::from_code(kind, detail).filter(|outcome| outcome.code() == (kind, detail));
        outcome.ok_or(DecodeError::Invalid("outcome"))
    }
}

macro_rules! coded {
    ($($ty:ident: $what:literal),* $(,)?) => { $(
        impl Encode for $ty {
            fn put(&self, out: &mut Writer) {
                out.u16(self.code());
            }
        }
        impl Decode for $ty {
            fn take(from: &mut Reader<'_>) -> Result<Self, DecodeError> {
                Self::from_code(from.u16()?).ok_or(DecodeError::Invalid($what))
            }
        }
    )* };
}

coded! { CancelCause: "cancel cause", RefuseReason: "refuse reason" }
