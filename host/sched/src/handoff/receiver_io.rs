//! What goes into a receiver, what comes out, and where a transfer stands there.

use alloc::sync::Arc;
use alloc::vec::Vec;

use penstock_base::{BlockRef, GatewayEpoch, Manifest, TransferId};
use penstock_kv::{BlockTable, OwnerId};

#[cfg(doc)]
use super::Receiver;
#[cfg(doc)]
use super::message::SenderWord;
use super::message::{Between, Caps, Failure, Order, Peer, Reserve, Said, ToReceiver, ToSender};
use super::terms::Grid;

/// What happens to a receiver.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum ReceiverEvent {
    /// The coordinator's word, for the incarnation `to`.
    Order {
        /// About which transfer.
        transfer: TransferId,
        /// For which incarnation.
        to: Peer,
        /// What.
        order: Order<Reserve>,
    },
    /// The sender's word, or a chunk.
    Sender(Between<ToReceiver>),
    /// The transport's word: nothing can write to the blocks of this transfer any more.
    Fenced(TransferId),
    /// The sum over what lies in the transfer's blocks and tail, as asked by [`ReceiverEffect::Digest`].
    Digested {
        /// Of which transfer.
        transfer: TransferId,
        /// Sum of [`chunk_sum`](super::chunk_sum) over all chunks, wrapping.
        sum: u64,
    },
    /// This replica ends it on its own account.
    GiveUp(TransferId),
    /// A replica has this incarnation now.
    PeerUp(Peer),
    /// This incarnation of a gateway speaks to this replica, perhaps again.
    GatewayUp(GatewayEpoch),
    /// This incarnation of a gateway is gone.
    GatewayDown(GatewayEpoch),
    /// Explicit back-pressure: so many chunks of each transfer may be under way from now on; 0 is none.
    Window(u32),
    /// Take nothing new.
    Drain,
    /// Time has passed.
    Tick,
}

/// What a receiver wants done.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum ReceiverEffect {
    /// To the coordinator of the transfer.
    Say(Said),
    /// To the sender.
    Send(Between<ToSender>),
    /// This peer, and nobody else, may write to these blocks for this transfer from now on, and to no others. They lie in the order of the
    /// grid. Taken back by [`Self::Fence`].
    Grant {
        /// For which transfer.
        transfer: TransferId,
        /// Who may.
        to: Peer,
        /// How the transfer is cut.
        grid: Grid,
        /// Where, the first one for the grid's first block.
        blocks: Arc<[BlockRef]>,
    },
    /// Make sure that nothing can write to the transfer's blocks any more, then say [`ReceiverEvent::Fenced`]. Safe to do twice.
    Fence(TransferId),
    /// Nothing writes any more: digest what lies there, and say [`ReceiverEvent::Digested`]. A transport that places chunks itself, each
    /// once, has the digests already.
    Digest(TransferId),
    /// The request is this replica's. Promised and unused blocks are still the owner's: move them before the next step.
    Start(Started),
    /// End the work on a request that was started: its coordinator said so, or was not heard of for a lease.
    Stop(TransferId),
    /// Nobody asked for this any more and it held room: its lease ran out.
    Swept(TransferId),
    /// Something of an old incarnation, an unknown transfer or a wrong peer. Counted, without effect.
    Stale,
}

/// A request that was handed off to this replica.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Started {
    /// By which transfer.
    pub transfer: TransferId,
    /// The request.
    pub manifest: Arc<Manifest>,
    /// Which attempt of it.
    pub attempt: u16,
    /// What its output may come to.
    pub caps: Caps,
    /// Its blocks, all of the prompt. Comes back through [`Receiver::recycle`] when its content is taken over.
    pub table: BlockTable,
    /// Who holds the promise for its output.
    pub owner: OwnerId,
    /// Tokens that were sampled and not sent.
    pub sampled_tokens: u32,
}

/// The effects of one step.
pub type ReceiverEffects = Vec<ReceiverEffect>;

/// Where a transfer stands here. The diagram is at the top of `receiver.rs`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ReceiverState {
    /// Room is promised.
    Reserved,
    /// Blocks are there to be written.
    Landing,
    /// All is here; a write may still be repeated until the fence.
    Fencing,
    /// Nothing can write any more; what lies there is digested.
    Verifying,
    /// Ready to be taken.
    Installed,
    /// The replica's.
    Taken,
    /// Given up; a write may still arrive.
    Quarantine(Failure),
}
