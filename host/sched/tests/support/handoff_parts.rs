//! What hand-off tests build their parties from: terms, configurations, requests.

use std::sync::Arc;

use penstock_base::{
    ClassRank, Duration, FlowId, Instant, Manifest, Priority, ReplicaEpoch, ReplicaId, RequestId, SessionId, TenantId,
    TenantTerms, Traits, TrustGroup,
};
use penstock_kv::{Kv, KvConfig};
use penstock_sched::handoff::{Caps, LeaseTerms, PROTOCOL_VERSION, PartyConfig, Peer, Terms, Timing};

pub const BLOCK_TOKENS: u32 = 16;
pub const LAYERS: u32 = 4;
pub const POOL: u32 = 40;
/// Entries of a block table.
pub const TABLE: u32 = 24;

/// Who.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
#[allow(dead_code, reason = "each test binary compiles this file, and not each has all three")]
pub enum Party {
    Coordinator,
    Sender,
    Receiver,
}

pub fn terms(leases: LeaseTerms) -> Terms {
    Terms {
        version: PROTOCOL_VERSION,
        model: [1; 32],
        tokenizer: [2; 32],
        dtype_code: 3,
        block_size_tokens: BLOCK_TOKENS,
        layers: LAYERS,
        layout: [4; 32],
        slices: 1,
        transport_code: 5,
        leases,
    }
}

pub fn peer(party: Party, epoch: u64) -> Peer {
    Peer { replica: ReplicaId(party as u32), epoch: ReplicaEpoch(epoch) }
}

pub fn config(party: Party, epoch: u64, timing: Timing) -> PartyConfig {
    PartyConfig {
        timing,
        transfers: 6,
        window: 4,
        inflight_chunks: 6,
        held_blocks: 30,
        chunk_blocks: 2,
        chunk_layers: 2,
        table_blocks: TABLE,
        ..PartyConfig::new(peer(party, epoch), terms(LeaseTerms::default()))
    }
}

pub fn manifest(request: RequestId, input_tokens: u32, sequences: u16) -> Arc<Manifest> {
    Arc::new(Manifest {
        request,
        tenant: TenantId(0),
        flow: FlowId(0),
        session: SessionId(0),
        trust: TrustGroup(0),
        class: ClassRank::default(),
        priority: Priority(0),
        sequences,
        input_tokens,
        max_output_tokens: 16,
        arrived: Instant::ZERO,
        deadline: Instant::NEVER,
        slo_ttft: Duration::MAX,
        slo_tpot: Duration::MAX,
        traits: Traits::default(),
        keys: Box::default(),
        prefix_key: 0,
        retention: 50,
        retry: false,
        terms: TenantTerms::default(),
    })
}

pub fn caps() -> Caps {
    let class = ClassRank::default();
    Caps { class, max_output_tokens: 16, reserve_output_tokens: 16, expected_output_tokens: 8 }
}

pub fn pool() -> Kv {
    Kv::new(KvConfig { owners: 64, tenants: 4, events: 64, ..KvConfig::with_blocks(POOL) }).expect("sizes")
}
