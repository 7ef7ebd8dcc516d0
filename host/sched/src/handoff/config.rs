//! How a party of the protocol is set up: sizes and patience. Everything is bounded; values outside the limits are brought into them.

use penstock_base::Duration;
use penstock_base::limits::{HANDOFF_COORDINATED_MAX, HANDOFF_TRANSFERS_MAX, HANDOFF_WINDOW_MAX};

use super::message::Peer;
use super::terms::{LeaseTerms, Terms};

/// Patience, in the order in which a transfer meets it. Each wait has its own: none stands in for another.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Timing {
    /// Between two repetitions of what was not answered.
    pub repeat: Duration,
    /// Coordinator: for the receiver's promise.
    pub reserve: Duration,
    /// Coordinator: for the sender's answer.
    pub open: Duration,
    /// Sender and receiver: for the first word of the other one; also for its next word once its lease is over.
    pub bootstrap: Duration,
    /// Receiver: for the next new chunk. Longer than a prefill step and its queue.
    pub waiting: Duration,
    /// Coordinator: for the whole, from the receiver's promise to the order to take.
    pub transfer: Duration,
    /// Coordinator: for the answer of the party that is to take.
    pub settle: Duration,
}

impl Default for Timing {
    fn default() -> Self {
        Self {
            repeat: Duration::from_ms(200),
            reserve: Duration::from_ms(500),
            open: Duration::from_s(1),
            bootstrap: Duration::from_s(5),
            waiting: Duration::from_s(20),
            transfer: Duration::from_s(60),
            settle: Duration::from_s(2),
        }
    }
}

/// A replica's side: what it is and how much it takes on.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PartyConfig {
    /// Which replica, and this incarnation.
    pub me: Peer,
    /// What its KV is.
    pub terms: Terms,
    /// Patience.
    pub timing: Timing,
    /// Transfers here at once, those that wait for quarantined blocks included.
    pub transfers: u32,
    /// Chunks of one transfer that may be under way.
    pub window: u32,
    /// Sender: chunks of all transfers that may be under way.
    pub inflight_chunks: u32,
    /// Sender: blocks held for transfers; past it no further one is begun.
    pub held_blocks: u32,
    /// Sender: blocks of one chunk; more when a prompt would have too many chunks.
    pub chunk_blocks: u32,
    /// Sender: layers of one chunk.
    pub chunk_layers: u32,
    /// Receiver: the first owner of promises that is its own; it uses one for each transfer.
    pub first_owner: u32,
    /// Receiver: entries of a block table.
    pub table_blocks: u32,
}

impl PartyConfig {
    /// Sizes for a replica `me` with such KV: 64 transfers, windows of 16 chunks of 8 blocks and 8 layers.
    pub fn new(me: Peer, terms: Terms) -> Self {
        Self {
            me,
            terms,
            timing: Timing::default(),
            transfers: 64,
            window: 16,
            inflight_chunks: 256,
            held_blocks: 4_096,
            chunk_blocks: 8,
            chunk_layers: 8,
            first_owner: 0,
            table_blocks: 1_024,
        }
    }

    pub(crate) fn clamped(mut self) -> Self {
        self.transfers = self.transfers.clamp(1, HANDOFF_TRANSFERS_MAX);
        self.window = self.window.clamp(1, HANDOFF_WINDOW_MAX);
        self.inflight_chunks = self.inflight_chunks.max(1);
        self.table_blocks = self.table_blocks.max(1);
        self
    }
}

/// The coordinator's side.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct CoordinatorConfig {
    /// This incarnation; the upper bits of every transfer's id.
    pub epoch: penstock_base::GatewayEpoch,
    /// Patience.
    pub timing: Timing,
    /// As in the terms of the replicas.
    pub leases: LeaseTerms,
    /// Transfers at once, those that are being closed included.
    pub transfers: u32,
}

impl CoordinatorConfig {
    pub(super) fn clamped(mut self) -> Self {
        self.transfers = self.transfers.clamp(1, HANDOFF_COORDINATED_MAX);
        self
    }
}
