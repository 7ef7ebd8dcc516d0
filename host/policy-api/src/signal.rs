//! What is known about every signal: its unit, who owns it, how old it can be, and what an unknown value reads as.

use core::fmt::Debug;

use crate::generated::Table;

/// One row of the registry.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SignalInfo {
    /// The name in manifests; its last word is the unit.
    pub name: &'static str,
    /// How to read the number.
    pub kind: Kind,
    /// What one of it is.
    pub unit: Unit,
    /// Who knows it.
    pub owner: Owner,
    /// How old it can be.
    pub freshness: Freshness,
    /// What an unknown value reads as.
    pub fill: Fill,
    /// Needed by the shipped policies.
    pub first_wave: bool,
    /// Of table `replica`: absent when the rows are offered to overload.
    pub routing_only: bool,
    /// In one line.
    pub meaning: &'static str,
}

/// How to read a signal's number.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Kind {
    /// A count or a duration.
    Int,
    /// `now` minus the as-of time of a report; MAX when there is none.
    Age,
    /// 0 or 1.
    Bool,
    /// An order on a small scale.
    Rank,
    /// A named code.
    Enum,
    /// Opaque; equal or not.
    Id,
    /// Opaque; equal contents, equal hash.
    Hash,
    /// 1,000,000 is one.
    Ppm,
    /// A price of an eviction policy.
    Price,
    /// One bit a declared signal.
    Mask,
}

/// The closed set of unit suffixes.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
#[allow(missing_docs, reason = "each is the suffix it is spelt as")]
pub enum Unit {
    Us,
    Tokens,
    Blocks,
    Bytes,
    Requests,
    Sequences,
    Replicas,
    Flows,
    Count,
    Price,
    Ppm,
    Rank,
    Level,
    Code,
    Flag,
    Id,
    Hash,
    Epoch,
    Biased,
    Mask,
    TokensPerSec,
    BytesPerSec,
    BlocksPerSec,
}

/// Who knows a signal.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Owner {
    /// The machine that asks.
    Host,
    /// The gateway.
    Gateway,
    /// A replica's scheduler, through its report.
    Engine,
    /// A replica's block pool and cache.
    Kv,
    /// The prefix index of a gateway.
    Directory,
    /// Quotas and service counters.
    Ledger,
    /// The list of replicas.
    Registry,
    /// The cost model.
    Model,
    /// Configuration.
    Config,
    /// The request itself.
    Request,
    /// The KV transport.
    Transfer,
}

/// How old a signal can be.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Freshness {
    /// Of the same step of the same machine.
    Exact,
    /// Changes with configuration or epoch only.
    Static,
    /// Computed by the cost model.
    Est,
    /// As old as the named age signal of the same table, or of the question's context, says.
    Lag(&'static str),
}

/// What an unknown value reads as: conservative for a naive policy, never a reason to refuse.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Fill {
    /// This number.
    Number(u64),
    /// The host always knows it. A source that does not is a fault of the host; the value reads 0 and its mask bit is clear.
    Required,
    /// Another quantity of the same request or row.
    Basis(FillBasis),
}

/// A quantity that stands in for an unknown estimate.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum FillBasis {
    /// The output cap of the request.
    MaxOutput,
    /// Its input tokens.
    Input,
    /// The pool of the replica.
    TotalBlocks,
    /// Tokens computed for the sequence.
    Computed,
    /// The output cap of the sequence, less what it has emitted.
    MaxLeft,
}

/// The signals of one table. Implemented by the generated enums.
pub trait Signal: Copy + Eq + Debug + 'static {
    /// Which table.
    const TABLE: Table;
    /// Every signal, in the registry's order.
    const ALL: &'static [Self];
    /// The table's own mask of known values, where it has one.
    const KNOWN_MASK: Option<Self>;

    /// Position in [`Self::ALL`].
    fn index(self) -> usize;
    /// Its row of the registry.
    fn info(self) -> &'static SignalInfo;
    /// The signal of this table that a named fill means.
    fn basis_signal(basis: FillBasis) -> Option<Self>;

    /// The name in manifests.
    fn name(self) -> &'static str {
        self.info().name
    }
    /// The signal of that name.
    fn from_name(name: &str) -> Option<Self> {
        Self::ALL.iter().copied().find(|signal| signal.name() == name)
    }
}
