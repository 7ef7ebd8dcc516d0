//! How do the protocol's messages become bytes? Little-endian, in the order of the declarations, one byte for a variant.
//!
//! Snapshots of the machines, journals and every wire share this one encoding. A test holds the bytes against
//! [`PROTOCOL_VERSION`](super::PROTOCOL_VERSION), so that a change cannot slip through under the old number.

use alloc::sync::Arc;
use alloc::vec::Vec;

use penstock_base::codec::{DecodeError, Reader, Writer};
use penstock_base::{
    BlockRef, ClassRank, Duration, GatewayEpoch, Instant, Manifest, ReplicaEpoch, ReplicaId, RequestId, TransferId,
};

use super::config::{CoordinatorConfig, PartyConfig, Timing};
use super::coordinator::{Ask, End, Fallback, Side};
use super::message::{
    Ack, Between, Caps, Failure, Open, Order, Peer, Refusal, Report, Reserve, Said, SenderWord, ToReceiver, ToSender,
};
use super::terms::{Envelope, Grid, LeaseTerms, Mismatch, Seal, Terms};

/// Can be written and read back. What is read is either a value that was written, or an error.
pub trait Coded: Sized {
    /// Appends the value.
    fn put(&self, out: &mut Writer);

    /// Reads what [`Self::put`] wrote.
    ///
    /// # Errors
    /// Bytes that end early, or that no value is written as.
    fn take(from: &mut Reader<'_>) -> Result<Self, DecodeError>;
}

/// A struct is its fields, in this order.
macro_rules! record {
    ($($ty:ty { $($field:ident),* $(,)? })*) => { $(
        impl $crate::handoff::codec::Coded for $ty {
            fn put(&self, out: &mut penstock_base::codec::Writer) {
                $($crate::handoff::codec::Coded::put(&self.$field, out);)*
            }
            fn take(from: &mut penstock_base::codec::Reader<'_>) -> Result<Self, penstock_base::codec::DecodeError> {
                Ok(Self { $($field: $crate::handoff::codec::Coded::take(from)?),* })
            }
        }
    )* };
}

/// An enum is one byte for the variant, then the variant's parts.
macro_rules! choice {
    ($(@[$($generic:tt)*])? $ty:ty, $what:literal {
        $($tag:literal => $variant:ident $(($($part:ident),*))? $({$($field:ident),* $(,)?})?),* $(,)?
    }) => {
        impl $(<$($generic)*>)? $crate::handoff::codec::Coded for $ty {
            fn put(&self, out: &mut penstock_base::codec::Writer) {
                match self {
                    $(Self::$variant $(($($part),*))? $({$($field),*})? => {
                        out.u8($tag);
                        $($($crate::handoff::codec::Coded::put($part, out);)*)?
                        $($($crate::handoff::codec::Coded::put($field, out);)*)?
                    })*
                }
            }
            fn take(from: &mut penstock_base::codec::Reader<'_>) -> Result<Self, penstock_base::codec::DecodeError> {
                Ok(match from.u8()? {
                    $($tag => {
                        $($(let $part = $crate::handoff::codec::Coded::take(from)?;)*)?
                        $($(let $field = $crate::handoff::codec::Coded::take(from)?;)*)?
                        Self::$variant $(($($part),*))? $({$($field),*})?
                    })*
                    _ => return Err(penstock_base::codec::DecodeError::Invalid($what)),
                })
            }
        }
    };
}

pub(super) use {choice, record};

macro_rules! plain {
    ($($ty:ty: $method:ident),* $(,)?) => { $(
        impl Coded for $ty {
            fn put(&self, out: &mut Writer) {
                out.$method(*self);
            }
            fn take(from: &mut Reader<'_>) -> Result<Self, DecodeError> {
                from.$method()
            }
        }
    )* };
}

plain! { bool: bool, u16: u16, u32: u32, u64: u64 }

macro_rules! wrapped {
    ($($ty:ident),* $(,)?) => { $(
        impl Coded for $ty {
            fn put(&self, out: &mut Writer) {
                self.0.put(out);
            }
            fn take(from: &mut Reader<'_>) -> Result<Self, DecodeError> {
                Coded::take(from).map(Self)
            }
        }
    )* };
}

wrapped! { Duration, GatewayEpoch, Instant, ReplicaEpoch, ReplicaId, RequestId, TransferId }

impl Coded for [u8; 32] {
    fn put(&self, out: &mut Writer) {
        out.raw(self);
    }
    fn take(from: &mut Reader<'_>) -> Result<Self, DecodeError> {
        let mut digest = [0; 32];
        digest.copy_from_slice(from.raw(32)?);
        Ok(digest)
    }
}

impl Coded for ClassRank {
    fn put(&self, out: &mut Writer) {
        out.u8(self.get());
    }
    fn take(from: &mut Reader<'_>) -> Result<Self, DecodeError> {
        Self::new(from.u8()?).ok_or(DecodeError::Invalid("class"))
    }
}

impl Coded for Arc<Manifest> {
    fn put(&self, out: &mut Writer) {
        self.encode(out);
    }
    fn take(from: &mut Reader<'_>) -> Result<Self, DecodeError> {
        Manifest::decode(from).map(Arc::new)
    }
}

impl Coded for Arc<Envelope> {
    fn put(&self, out: &mut Writer) {
        (**self).put(out);
    }
    fn take(from: &mut Reader<'_>) -> Result<Self, DecodeError> {
        Envelope::take(from).map(Arc::new)
    }
}

impl Coded for Arc<[BlockRef]> {
    fn put(&self, out: &mut Writer) {
        out.list(self.iter(), |w, block| block.put(w));
    }
    fn take(from: &mut Reader<'_>) -> Result<Self, DecodeError> {
        Ok(Vec::take(from)?.into())
    }
}

impl<T: Coded> Coded for Option<T> {
    fn put(&self, out: &mut Writer) {
        out.option(self.as_ref(), |w, value| value.put(w));
    }
    fn take(from: &mut Reader<'_>) -> Result<Self, DecodeError> {
        from.option(T::take)
    }
}

impl<T: Coded> Coded for Vec<T> {
    fn put(&self, out: &mut Writer) {
        out.list(self.iter(), |w, value| value.put(w));
    }
    fn take(from: &mut Reader<'_>) -> Result<Self, DecodeError> {
        // Grown as it is read: a count in damaged bytes takes no more memory than the bytes themselves would.
        let mut all = Self::new();
        for _ in 0..from.count()? {
            all.push(T::take(from)?);
        }
        Ok(all)
    }
}

impl<M: Coded> Coded for Between<M> {
    fn put(&self, out: &mut Writer) {
        self.transfer.put(out);
        self.from.put(out);
        self.to.put(out);
        self.body.put(out);
    }
    fn take(from: &mut Reader<'_>) -> Result<Self, DecodeError> {
        Ok(Self {
            transfer: Coded::take(from)?,
            from: Coded::take(from)?,
            to: Coded::take(from)?,
            body: Coded::take(from)?,
        })
    }
}

record! {
    BlockRef { index, generation }
    Peer { replica, epoch }
    Reserve { manifest, attempt, source, caps }
    Open { manifest, attempt, destination, first_block, caps }
    Caps { class, max_output_tokens, reserve_output_tokens, expected_output_tokens }
    Said { transfer, from, stamp, report }
    ToReceiver { stamp, word }
    Ack { base, mask, window, sealed }
    LeaseTerms { hold, write, grace }
    Terms {
        version, model, tokenizer, dtype_code, block_size_tokens, layers, layout, slices, transport_code, leases,
    }
    Grid { first_block, blocks, chunk_blocks, layers, chunk_layers }
    Envelope { terms, transfer, request, attempt, source, destination, input_tokens, grid }
    Seal { sum, sampled_tokens }
    Ask { manifest, attempt, sender, receiver, caps, fallback }
    Timing { repeat, reserve, open, bootstrap, waiting, transfer, settle }
    PartyConfig {
        me, terms, timing, transfers, window, inflight_chunks, held_blocks, chunk_blocks, chunk_layers, first_owner,
        table_blocks,
    }
    CoordinatorConfig { epoch, timing, leases, transfers }
}

choice! { @[B: Coded] Order<B>, "order" {
    0 => Begin(begin),
    1 => Keep { echo },
    2 => Probe,
    3 => Take,
    4 => Close { end_work },
} }

choice! { Report, "report of a party" {
    0 => Ready { first_block },
    1 => Delivered,
    2 => Installed,
    3 => Stuck(why),
    4 => Taken,
    5 => Refused(why),
    6 => Failed(why),
    7 => Unknown,
    8 => Closed,
} }

choice! { SenderWord, "word of a sender" {
    0 => Hello(envelope),
    1 => Chunk { index, sent, arrived },
    2 => Seal(seal),
    3 => Beat,
} }

choice! { ToSender, "word of a receiver" {
    0 => Welcome { blocks, echo, ack },
    1 => Ack { echo, ack },
    2 => Refuse(why),
    3 => Failed(why),
} }

choice! { Refusal, "refusal of a hand-off" {
    0 => Terms(mismatch),
    1 => Envelope,
    2 => StaleEpoch,
    3 => WrongPeer,
    4 => Unknown,
    5 => NoBlocks { short_blocks },
    6 => NeverFits,
    7 => NoSlot,
    8 => Congested,
    9 => NotReady,
    10 => Sequences,
} }

choice! { Mismatch, "difference of terms" {
    0 => Version { theirs },
    1 => Model,
    2 => Tokenizer,
    3 => Dtype { theirs },
    4 => BlockSize { theirs },
    5 => Layers { theirs },
    6 => Layout,
    7 => Slices { theirs },
    8 => Transport { theirs },
    9 => Leases,
} }

choice! { Failure, "failure of a hand-off" {
    0 => ReserveTimeout,
    1 => OpenTimeout,
    2 => BootstrapTimeout,
    3 => WaitingTimeout,
    4 => TransferTimeout,
    5 => Silent,
    6 => LeaseExpired,
    7 => Stalled,
    8 => Checksum,
    9 => SealMismatch,
    10 => PeerRestarted,
    11 => PeerRefused(refusal),
    12 => PeerFailed,
    13 => Prefill,
    14 => GivenUp,
    15 => GatewayGone,
    16 => Closed,
    17 => TableFull,
} }

choice! { Fallback, "fallback" {
    0 => AtSender,
    1 => Anew,
    2 => Never,
} }

choice! { Side, "side" {
    0 => Sender,
    1 => Receiver,
} }

choice! { End, "end of a hand-off" {
    0 => HandedOff(peer),
    1 => AtSender(peer, why),
    2 => Anew(why),
    3 => Failed(why),
    4 => Cancelled,
} }
