//! Ids. All of them come from inputs or from counters of one epoch, never from randomness, so that a replay mints the same ones.

use core::fmt;

macro_rules! id {
    ($(#[$doc:meta])* $name:ident($inner:ty)) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
        pub struct $name(pub $inner);

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.0.fmt(f)
            }
        }
    };
}

id!(
    /// Which incarnation of a gateway speaks. Grows at each start; the upper 16 bits of every [`RequestId`] it mints.
    GatewayEpoch(u16)
);
id!(
    /// One logical request: gateway epoch (16 bits) and a counter (48 bits). Never the client's `x-request-id`.
    RequestId(u64)
);
id!(
    /// One hand-off of a request's KV: gateway epoch (16 bits) and a counter (48 bits), like a [`RequestId`].
    TransferId(u64)
);
id!(
    /// A logical replica (a whole tensor-parallel group counts as one).
    ReplicaId(u32)
);
id!(
    /// Which incarnation of a replica speaks. State and callbacks of an older epoch are dead.
    ReplicaEpoch(u64)
);
id!(
    /// One submitted step of a replica; grows by one within an epoch. Fences are batch ids.
    BatchId(u64)
);
id!(
    /// Number of a dispatch from one gateway to one replica; a report names the last one that it covers.
    DispatchNumber(u64)
);
id!(
    /// Keyed hash of the authenticated tenant; 0 is the open tenant.
    TenantId(u64)
);
id!(
    /// Hash of tenant, class and fairness id: the unit of fairness.
    FlowId(u64)
);
id!(
    /// Keyed hash of the session key; 0 is none.
    SessionId(u64)
);
id!(
    /// The cache-sharing domain. Equal prompts of two groups have different block keys.
    TrustGroup(u64)
);
id!(
    /// Generation of the policy set; grows with every activation.
    Generation(u64)
);
id!(
    /// Where an executor keeps one sequence's state (token history, penalty counts). Reused after a drop.
    Slot(u32)
);

impl RequestId {
    /// Largest counter value of one gateway epoch.
    pub const COUNTER_MAX: u64 = (1 << 48) - 1;

    /// Joins epoch and counter. The counter wraps nowhere: past [`Self::COUNTER_MAX`] there is no id.
    pub fn new(epoch: GatewayEpoch, counter: u64) -> Option<Self> {
        (counter <= Self::COUNTER_MAX).then_some(Self((u64::from(epoch.0) << 48) | counter))
    }

    /// The gateway incarnation that minted this id.
    pub fn gateway_epoch(self) -> GatewayEpoch {
        GatewayEpoch((self.0 >> 48) as u16)
    }

    /// The counter inside that epoch.
    pub fn counter(self) -> u64 {
        self.0 & Self::COUNTER_MAX
    }
}

impl TransferId {
    /// Joins epoch and counter; past [`RequestId::COUNTER_MAX`] there is no id.
    pub fn new(epoch: GatewayEpoch, counter: u64) -> Option<Self> {
        RequestId::new(epoch, counter).map(|id| Self(id.0))
    }

    /// The gateway incarnation that coordinates it.
    pub fn gateway_epoch(self) -> GatewayEpoch {
        RequestId(self.0).gateway_epoch()
    }
}

/// One decode stream of a request. A request with `n` answers has `n` sequences sharing the prompt's blocks.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub struct SeqId {
    /// The request it belongs to.
    pub request: RequestId,
    /// 0..n.
    pub index: u16,
}

impl SeqId {
    /// As one number, for policies and logs: request counter over index. Unique inside a gateway epoch.
    pub fn as_u64(self) -> u64 {
        (self.request.0 << 3) | u64::from(self.index & 7)
    }
}

impl fmt::Display for SeqId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.request, self.index)
    }
}

/// A physical KV block together with the generation of its content: a reference of an older generation is stale.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub struct BlockRef {
    /// Position in the pool.
    pub index: u32,
    /// Grows each time the block is handed out.
    pub generation: u32,
}
