//! What coordinator, sender and receiver tell each other. Counts, ids and keys; KV itself is the transport's.
//!
//! Any message may be lost, late, repeated or overtaken. Each names its transfer, and each end by epoch: what is meant for another
//! incarnation is refused, never guessed at.

use alloc::sync::Arc;
use core::fmt;

use penstock_base::{BlockRef, ClassRank, Instant, Manifest, ReplicaEpoch, ReplicaId, TransferId};

use super::terms::{Envelope, Mismatch, Seal};

/// One incarnation of a replica.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub struct Peer {
    /// Which replica.
    pub replica: ReplicaId,
    /// Which incarnation of it.
    pub epoch: ReplicaEpoch,
}

impl Peer {
    /// Is `self` an earlier incarnation of `other`?
    pub fn is_before(self, other: Self) -> bool {
        self.replica == other.replica && self.epoch < other.epoch
    }
}

impl fmt::Display for Peer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "replica {} epoch {}", self.replica, self.epoch)
    }
}

/// What the coordinator tells a party about one transfer. `B` is what begins it there.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Order<B> {
    /// Begin. Repeated until it is answered.
    Begin(B),
    /// Your lease is renewed: the stamp of your report comes back.
    Keep {
        /// The party's own clock, from its report.
        echo: Instant,
    },
    /// Say how you stand.
    Probe,
    /// The request is yours from the moment that you take this: emit. Said to one party at a time.
    Take,
    /// Let go. Blocks come free once nothing can touch them.
    Close {
        /// Also end the work, should you have taken the request. False after a take that was heard: the work goes on without this protocol.
        end_work: bool,
    },
}

/// What the gateway has decided about the output of a request that is handed off.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Caps {
    /// Class in force, never above the manifest's.
    pub class: ClassRank,
    /// Output cap in force, never above the manifest's.
    pub max_output_tokens: u32,
    /// Output whose blocks are promised with the prompt's, where it is decoded.
    pub reserve_output_tokens: u32,
    /// Median output expected.
    pub expected_output_tokens: u32,
}

/// Begins a transfer at the receiver: promise room before anything is computed.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Reserve {
    /// The request.
    pub manifest: Arc<Manifest>,
    /// Which attempt of it.
    pub attempt: u16,
    /// Where its KV will come from.
    pub source: Peer,
    /// What of its output is promised here, and what it may come to.
    pub caps: Caps,
}

/// Begins a transfer at the sender: compute the prompt, and send while it is computed.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Open {
    /// The request.
    pub manifest: Arc<Manifest>,
    /// Which attempt of it.
    pub attempt: u16,
    /// Where its KV goes.
    pub destination: Peer,
    /// Leading blocks that the receiver has cached; they do not travel.
    pub first_block: u32,
    /// What its output may come to, should it be decoded here after all.
    pub caps: Caps,
}

/// How a party stands with a transfer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Report {
    /// Begun; the answer to [`Order::Begin`].
    Ready {
        /// Leading blocks found in the receiver's cache; the sender repeats what it was told.
        first_block: u32,
    },
    /// Sender: everything has arrived, as far as the receiver said.
    Delivered,
    /// Receiver: everything is here, checked, and out of reach of any write. It may be told to take.
    Installed,
    /// Sender: KV does not get across. It is kept; the request may be taken here.
    Stuck(Failure),
    /// The request is taken: this party emits.
    Taken,
    /// Not begun, and never will be for this order.
    Refused(Refusal),
    /// Over: this party will never take the request.
    Failed(Failure),
    /// Nothing is known of it here.
    Unknown,
    /// Let go, as ordered.
    Closed,
}

/// A party's word to its coordinator.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Said {
    /// About which transfer.
    pub transfer: TransferId,
    /// Who says it.
    pub from: Peer,
    /// The party's clock, when it wants its lease renewed.
    pub stamp: Option<Instant>,
    /// What.
    pub report: Report,
}

/// A message between sender and receiver.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Between<M> {
    /// About which transfer.
    pub transfer: TransferId,
    /// From which incarnation.
    pub from: Peer,
    /// To which incarnation.
    pub to: Peer,
    /// What.
    pub body: M,
}

/// Sender to receiver. Each carries a stamp of the sender's clock, and the answer brings it back: the lease to write.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ToReceiver {
    /// The sender's clock.
    pub stamp: Instant,
    /// What.
    pub word: SenderWord,
}

/// What a sender says.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum SenderWord {
    /// What is going to come.
    Hello(Arc<Envelope>),
    /// Chunk `index` was written. The driver of the receiver has looked at what lies there.
    Chunk {
        /// Which.
        index: u32,
        /// Digest of what was sent.
        sent: u64,
        /// Digest of what arrived, computed at the receiver.
        arrived: u64,
    },
    /// Prefill is done and this is the sum.
    Seal(Seal),
    /// Nothing new; the lease is to be renewed.
    Beat,
}

/// Receiver to sender.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum ToSender {
    /// Write to these blocks, the first one for the envelope's first block.
    Welcome {
        /// Where.
        blocks: Arc<[BlockRef]>,
        /// Stamp of the message that this answers.
        echo: Instant,
        /// What is here.
        ack: Ack,
    },
    /// What is here.
    Ack {
        /// Stamp of the message that this answers; none when the lease to write is not renewed any more.
        echo: Option<Instant>,
        /// What is here.
        ack: Ack,
    },
    /// Not to be.
    Refuse(Refusal),
    /// The receiver has given up.
    Failed(Failure),
}

/// What a receiver has, and how much may be under way.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Ack {
    /// Lowest chunk that is missing.
    pub base: u32,
    /// Bit i: chunk base + i is here.
    pub mask: u64,
    /// Chunks from `base` on that may be under way. 0 is "wait".
    pub window: u32,
    /// The seal is here.
    pub sealed: bool,
}

/// Why a transfer is not begun.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Refusal {
    /// The two ends differ.
    Terms(Mismatch),
    /// The envelope contradicts itself or the reservation: tokens, blocks, chunks, request.
    Envelope,
    /// The message is for another incarnation of this replica.
    StaleEpoch,
    /// The transfer was announced with another peer, or another incarnation of it.
    WrongPeer,
    /// No such transfer here.
    Unknown,
    /// So many blocks are missing.
    NoBlocks {
        /// Blocks missing.
        short_blocks: u32,
    },
    /// The request fits no block table of this replica.
    NeverFits,
    /// As many transfers as allowed are under way.
    NoSlot,
    /// KV of earlier transfers waits to be taken off; more would pile up.
    Congested,
    /// Draining.
    NotReady,
    /// Requests of several sequences are not handed off.
    Sequences,
}

/// Why a transfer that had begun ended here.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Failure {
    /// The receiver gave no word about the reservation in time.
    ReserveTimeout,
    /// The sender gave no word about the order in time.
    OpenTimeout,
    /// The peer was not heard of at all.
    BootstrapTimeout,
    /// Nothing new came for too long.
    WaitingTimeout,
    /// The whole took too long.
    TransferTimeout,
    /// The party that was to take did not say so, and its lease is over.
    Silent,
    /// Its coordinator was not heard of for one lease.
    LeaseExpired,
    /// What is sent does not arrive, however often.
    Stalled,
    /// Chunks came broken too often.
    Checksum,
    /// All chunks came and their sum is another one.
    SealMismatch,
    /// The peer has another incarnation now.
    PeerRestarted,
    /// The peer refused.
    PeerRefused(Refusal),
    /// The peer gave up.
    PeerFailed,
    /// Prefill failed.
    Prefill,
    /// Ended on this replica's own account.
    GivenUp,
    /// The coordinator is gone.
    GatewayGone,
    /// The coordinator said so.
    Closed,
    /// As many transfers as allowed are under way at the coordinator.
    TableFull,
}
