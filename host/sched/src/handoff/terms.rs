//! Do two replicas speak of the same KV? What each states at registration, and what one transfer states again.
//!
//! Nothing is converted on the way: both ends hold blocks of the same shape and meaning, or the transfer is refused by name.

use core::fmt;

use penstock_base::limits::HANDOFF_CHUNKS_MAX;
use penstock_base::{Duration, RequestId, TransferId};

use super::message::Peer;

/// Version of this protocol. Another one is refused: there is no negotiation.
pub const PROTOCOL_VERSION: u16 = 1;

/// SHA-256 of something that both ends must have alike.
pub type Digest = [u8; 32];

/// Lengths that all parties must agree on: each judges by its own clock what another one still holds.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct LeaseTerms {
    /// How long a party keeps a transfer without hearing from its coordinator.
    pub hold: Duration,
    /// How long a sender may write without hearing from its receiver.
    pub write: Duration,
    /// Longest time that a write once posted may be under way, and what clocks drift apart within one lease.
    pub grace: Duration,
}

impl Default for LeaseTerms {
    fn default() -> Self {
        Self { hold: Duration::from_s(3), write: Duration::from_s(1), grace: Duration::from_s(2) }
    }
}

/// What a replica's KV is. Stated at registration, and again in each envelope. Two of a kind may exchange blocks.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Terms {
    /// See [`PROTOCOL_VERSION`].
    pub version: u16,
    /// Weights and revision.
    pub model: Digest,
    /// Tokenizer and chat template.
    pub tokenizer: Digest,
    /// Element type of KV, by the executor's code.
    pub dtype_code: u16,
    /// Tokens of one block.
    pub block_size_tokens: u32,
    /// Layers that have KV.
    pub layers: u32,
    /// Order of elements inside a block, heads and head size.
    pub layout: Digest,
    /// Tensor-parallel slices, each with its own share of every block.
    pub slices: u16,
    /// The transport that both ends have, by its code.
    pub transport_code: u16,
    /// See [`LeaseTerms`].
    pub leases: LeaseTerms,
}

/// The first thing in which two ends differ.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Mismatch {
    /// The protocol's version.
    Version {
        /// What the other end said.
        theirs: u16,
    },
    /// Weights or revision.
    Model,
    /// Tokenizer or template.
    Tokenizer,
    /// Element type of KV.
    Dtype {
        /// What the other end said.
        theirs: u16,
    },
    /// Tokens of one block.
    BlockSize {
        /// What the other end said.
        theirs: u32,
    },
    /// Number of layers.
    Layers {
        /// What the other end said.
        theirs: u32,
    },
    /// Order of elements inside a block.
    Layout,
    /// Tensor-parallel slicing.
    Slices {
        /// What the other end said.
        theirs: u16,
    },
    /// The transport.
    Transport {
        /// What the other end said.
        theirs: u16,
    },
    /// Length of a lease or of the grace.
    Leases,
}

impl fmt::Display for Mismatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Version { theirs } => {
                write!(f, "hand-off protocol version {theirs}, this end has {PROTOCOL_VERSION}")
            }
            Self::Model => write!(f, "another model or revision"),
            Self::Tokenizer => write!(f, "another tokenizer or template"),
            Self::Dtype { theirs } => write!(f, "kv element type {theirs} is another one"),
            Self::BlockSize { theirs } => write!(f, "a block size of {theirs} tokens is another one"),
            Self::Layers { theirs } => write!(f, "{theirs} layers are another number"),
            Self::Layout => write!(f, "another layout inside a block"),
            Self::Slices { theirs } => write!(f, "{theirs} tensor-parallel slices are another number"),
            Self::Transport { theirs } => write!(f, "transport {theirs} is another one"),
            Self::Leases => write!(f, "other lease lengths"),
        }
    }
}

impl core::error::Error for Mismatch {}

impl Terms {
    /// May blocks travel between this end and one with `theirs`? The first difference, in the order of the fields.
    pub fn check(&self, theirs: &Self) -> Result<(), Mismatch> {
        let pairs = [
            (self.version == theirs.version, Mismatch::Version { theirs: theirs.version }),
            (self.model == theirs.model, Mismatch::Model),
            (self.tokenizer == theirs.tokenizer, Mismatch::Tokenizer),
            (self.dtype_code == theirs.dtype_code, Mismatch::Dtype { theirs: theirs.dtype_code }),
            (
                self.block_size_tokens == theirs.block_size_tokens,
                Mismatch::BlockSize { theirs: theirs.block_size_tokens },
            ),
            (self.layers == theirs.layers, Mismatch::Layers { theirs: theirs.layers }),
            (self.layout == theirs.layout, Mismatch::Layout),
            (self.slices == theirs.slices, Mismatch::Slices { theirs: theirs.slices }),
            (self.transport_code == theirs.transport_code, Mismatch::Transport { theirs: theirs.transport_code }),
            (self.leases == theirs.leases, Mismatch::Leases),
        ];
        pairs.into_iter().find(|(same, _)| !same).map_or(Ok(()), |(_, mismatch)| Err(mismatch))
    }
}

/// How the blocks of one transfer are cut into chunks: groups of blocks, and inside each group of blocks groups of layers.
///
/// Chunks are numbered in the order in which prefill computes them, so that "what is ready" is one number. The last chunk is the tail:
/// the executor's state of the sequence (tokens sampled and not sent, sampler counter, penalties, stop and grammar state).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Grid {
    /// First block of the sequence that travels; the ones before are in the receiver's cache.
    pub first_block: u32,
    /// Blocks that travel, at least 1.
    pub blocks: u32,
    /// Blocks of one chunk, at least 1.
    pub chunk_blocks: u32,
    /// Layers of the model, at least 1.
    pub layers: u32,
    /// Layers of one chunk, at least 1.
    pub chunk_layers: u32,
}

/// What one chunk carries.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Part {
    /// Some layers of some blocks.
    Kv {
        /// First block, counted from the sequence's start.
        first_block: u32,
        /// Blocks.
        blocks: u32,
        /// First layer.
        first_layer: u32,
        /// Layers.
        layers: u32,
    },
    /// The executor's state of the sequence. It goes to no block.
    Tail,
}

impl Grid {
    /// The grid with chunks of at least these sizes that stays within the limit of chunks.
    pub fn fitting(mut self) -> Self {
        self.chunk_layers = self.chunk_layers.clamp(1, self.layers.max(1));
        self.chunk_blocks = self.chunk_blocks.clamp(1, self.blocks.max(1));
        while !self.fits() && self.chunk_blocks < self.blocks {
            self.chunk_blocks = self.chunk_blocks.saturating_mul(2).min(self.blocks);
        }
        self
    }

    fn fits(&self) -> bool {
        let groups = u64::from(self.blocks.div_ceil(self.chunk_blocks));
        groups * u64::from(self.layers.div_ceil(self.chunk_layers)) < u64::from(HANDOFF_CHUNKS_MAX)
    }

    /// Sizes in range, and no more chunks than the limit.
    pub fn is_valid(&self) -> bool {
        let sized = self.blocks > 0 && self.chunk_blocks > 0 && self.layers > 0 && self.chunk_layers > 0;
        sized && self.first_block.checked_add(self.blocks).is_some() && self.fits()
    }

    fn layer_groups(&self) -> u32 {
        self.layers.div_ceil(self.chunk_layers)
    }

    /// Chunks in all, the tail included.
    pub fn chunks(&self) -> u32 {
        self.blocks.div_ceil(self.chunk_blocks) * self.layer_groups() + 1
    }

    /// What chunk `index` carries; none past the tail.
    pub fn part(&self, index: u32) -> Option<Part> {
        if index + 1 >= self.chunks() {
            return (index + 1 == self.chunks()).then_some(Part::Tail);
        }
        let (group, layer_group) = (index / self.layer_groups(), index % self.layer_groups());
        let (block, layer) = (group * self.chunk_blocks, layer_group * self.chunk_layers);
        Some(Part::Kv {
            first_block: self.first_block + block,
            blocks: self.chunk_blocks.min(self.blocks - block),
            first_layer: layer,
            layers: self.chunk_layers.min(self.layers - layer),
        })
    }

    /// Chunks that may be sent once all layers of the sequence's first `blocks` blocks are computed, and of the blocks behind them up to
    /// the end of their chunk the first `layers` layers. The tail is not among them.
    pub fn ready(&self, blocks: u32, layers: u32) -> u32 {
        let done = blocks.saturating_sub(self.first_block).min(self.blocks);
        if done == self.blocks {
            return self.chunks() - 1;
        }
        let partial = if done.is_multiple_of(self.chunk_blocks) && blocks >= self.first_block {
            layers.min(self.layers) / self.chunk_layers
        } else {
            0
        };
        done / self.chunk_blocks * self.layer_groups() + partial.min(self.layer_groups() - 1)
    }
}

/// What one transfer is. Sent before the first chunk; the receiver checks all of it against its own terms and the reservation.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Envelope {
    /// Of the sending replica.
    pub terms: Terms,
    /// Which transfer.
    pub transfer: TransferId,
    /// For which request.
    pub request: RequestId,
    /// Which attempt of it.
    pub attempt: u16,
    /// Where KV is computed.
    pub source: Peer,
    /// Where it goes.
    pub destination: Peer,
    /// Tokens of the prompt: positions 0..input_tokens.
    pub input_tokens: u32,
    /// How it is cut.
    pub grid: Grid,
}

/// What the sender says when prefill is done: the sum over everything that travels.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Seal {
    /// Sum of [`chunk_sum`] over all chunks, wrapping: it does not depend on the order of arrival.
    pub sum: u64,
    /// Output tokens that were sampled and not sent; they are in the tail.
    pub sampled_tokens: u32,
}

/// A chunk's place and content as one summand of the seal.
pub fn chunk_sum(index: u32, digest: u64) -> u64 {
    let mixed = (digest ^ u64::from(index).wrapping_mul(0x9e37_79b9_7f4a_7c15)).wrapping_mul(0xff51_afd7_ed55_8ccd);
    mixed ^ (mixed >> 33)
}
