//! What a replica is among others: for gateways, which see it from outside.

use penstock_sched::gateway::ReplicaFacts;
use penstock_sched::replica::ReplicaConfig;

/// Which part a replica has, by the numbers of the contract.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Role {
    /// Computes prompts for others.
    Prefill = 1,
    /// Decodes what others computed, and whole requests.
    Decode = 2,
    /// Whole requests.
    Unified = 3,
}

/// What a replica is among others.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Standing {
    /// Its place among the replicas of this process.
    pub index: u32,
    pub role: Role,
    /// Those with the same number are near each other.
    pub domain: u32,
}

/// What the gateways must know of a replica with this configuration.
pub(crate) fn facts(config: &ReplicaConfig, standing: Standing) -> ReplicaFacts {
    ReplicaFacts {
        replica: config.replica,
        epoch: config.epoch,
        role_code: standing.role as u8,
        total_blocks: config.blocks,
        slots: config.slots,
        round_tokens: config.step_tokens,
        context_tokens_max: config.context_tokens_max,
        speed_ppm: 1_000_000,
        zone_rank: 0,
        domain: standing.domain,
    }
}
