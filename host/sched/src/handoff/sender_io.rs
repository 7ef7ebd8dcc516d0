//! What goes into a sender, what comes out, and where a transfer stands there.

use alloc::sync::Arc;
use alloc::vec::Vec;

use penstock_base::{BlockRef, GatewayEpoch, Instant, Manifest, TransferId};

#[cfg(doc)]
use super::message::SenderWord;
use super::message::{Between, Caps, Failure, Open, Order, Peer, Said, ToReceiver, ToSender};
use super::terms::{Grid, Seal};

/// What happens to a sender.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum SenderEvent {
    /// The coordinator's word, for the incarnation `to`.
    Order {
        /// About which transfer.
        transfer: TransferId,
        /// For which incarnation.
        to: Peer,
        /// What.
        order: Order<Open>,
    },
    /// The receiver's word.
    Receiver(Between<ToSender>),
    /// These blocks of the prompt are in the sequence's table now, behind the ones that were told before; the first is the envelope's first.
    Placed {
        /// Of which transfer.
        transfer: TransferId,
        /// Active blocks. They are leased from here on.
        blocks: Vec<BlockRef>,
    },
    /// Prefill has come this far: all layers of the sequence's first `blocks` blocks, and `layers` layers of the chunk of blocks behind them.
    Computed {
        /// Of which transfer.
        transfer: TransferId,
        /// Blocks, counted from the sequence's start.
        blocks: u32,
        /// Layers.
        layers: u32,
    },
    /// Prefill is done, the first token sampled, and the tail may be read.
    Prefilled {
        /// Of which transfer.
        transfer: TransferId,
        /// The sum over all that travels.
        seal: Seal,
    },
    /// Prefill cannot be done.
    PrefillFailed(TransferId),
    /// The transport's word: nothing reads the blocks of this transfer any more.
    Quiet(TransferId),
    /// A replica has this incarnation now.
    PeerUp(Peer),
    /// This incarnation of a gateway speaks to this replica, perhaps again.
    GatewayUp(GatewayEpoch),
    /// This incarnation of a gateway is gone.
    GatewayDown(GatewayEpoch),
    /// Take nothing new.
    Drain,
    /// Time has passed.
    Tick,
}

/// What a sender wants done.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum SenderEffect {
    /// To the coordinator of the transfer.
    Say(Said),
    /// To the receiver.
    Send(Between<ToReceiver>),
    /// Compute this prompt; report blocks and layers as they come.
    Prefill {
        /// For which transfer.
        transfer: TransferId,
        /// The request.
        manifest: Arc<Manifest>,
        /// Which attempt of it.
        attempt: u16,
        /// What its output may come to, should it be decoded here.
        caps: Caps,
        /// How it travels.
        grid: Grid,
    },
    /// Write to these blocks from now on, the first one for the grid's first block.
    Bind {
        /// For which transfer.
        transfer: TransferId,
        /// Where.
        to: Peer,
        /// Blocks there.
        blocks: Arc<[BlockRef]>,
    },
    /// Write one chunk, then send [`SenderWord::Chunk`] with this stamp behind it. Safe to do twice.
    Write {
        /// Of which transfer.
        transfer: TransferId,
        /// Which.
        index: u32,
        /// Goes with it.
        stamp: Instant,
    },
    /// Begin no further write, and say [`SenderEvent::Quiet`] when nothing reads the transfer's blocks any more.
    StopWrites(TransferId),
    /// The request is this replica's: go on with it here, from prefill or from the first token.
    Continue(TransferId),
    /// End the sequence; nobody is going to take it here.
    Drop(TransferId),
    /// Nobody asked for this any more and it held room: its lease ran out.
    Swept(TransferId),
    /// Explicit back-pressure: whether another transfer would be begun. Said on change.
    Accepting(bool),
    /// Something of an old incarnation, an unknown transfer or a wrong peer. Counted, without effect.
    Stale,
}

/// The effects of one step.
pub type SenderEffects = Vec<SenderEffect>;

/// Where a transfer stands here. The diagram is at the top of `sender.rs`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum SenderState {
    /// The receiver has not answered.
    Opening,
    /// Chunks are written as they are computed.
    Moving,
    /// All has arrived.
    Delivered,
    /// It does not get across; kept for whoever takes it here.
    Stuck(Failure),
    /// Taken here.
    Local,
    /// Over; a write may still read the blocks.
    Draining(Failure),
}
