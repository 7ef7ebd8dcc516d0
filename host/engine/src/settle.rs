//! Do the executors and the values fit together, and what does each machine's configuration come to?

use penstock_base::{ReplicaEpoch, ReplicaId, limits};
use penstock_exec::{Executor, Geometry};
use penstock_sched::gateway::GatewayConfig;
use penstock_sched::message::Load;
use penstock_sched::replica::ReplicaConfig;

use crate::config::EngineConfig;
use crate::engine::EngineError;
use crate::policies::machine::FIRST;
use crate::policies::seats::{Machine, PolicySource, PreparedPolicies};
use crate::status::{ReplicaState, ReplicaStatus};

/// Sizes that hold for every executor; block size, KV bytes and vocabulary must be equal.
pub(crate) fn common_geometry(executors: &[Box<dyn Executor>]) -> Result<Geometry, EngineError> {
    if executors.is_empty() || executors.len() > limits::REPLICAS_MAX {
        return Err(EngineError::Executors(executors.len()));
    }
    let mut common = executors[0].geometry().clone();
    for (replica, executor) in executors.iter().enumerate() {
        let geometry = executor.geometry();
        let differs = |what| Err(EngineError::Mixed { replica, what });
        if geometry.block_size_tokens != common.block_size_tokens {
            return differs("block size");
        }
        if geometry.kv_token_bytes != common.kv_token_bytes {
            return differs("KV bytes of a token");
        }
        if geometry.vocabulary != common.vocabulary {
            return differs("vocabulary");
        }
        common.blocks = common.blocks.min(geometry.blocks);
        common.slots = common.slots.min(geometry.slots);
        common.step_tokens_max = common.step_tokens_max.min(geometry.step_tokens_max);
        common.context_tokens_max = common.context_tokens_max.min(geometry.context_tokens_max);
    }
    Ok(common)
}

/// The first set of each machine.
pub(crate) fn first_policies(
    source: &PolicySource,
    machines: impl Iterator<Item = Machine>,
    context_tokens_max: u32,
) -> Result<Vec<Box<dyn PreparedPolicies>>, EngineError> {
    let make = |machine| {
        let made = source.prepare(machine, None, context_tokens_max);
        made.map_err(|why| EngineError::Policies { machine, why })
    };
    machines.map(make).collect()
}

/// The machines' configurations, with what only the executors know.
pub(crate) fn machine_configs(
    config: &EngineConfig,
    executors: &[Box<dyn Executor>],
) -> Result<(GatewayConfig, Vec<ReplicaConfig>), EngineError> {
    let gateway = gateway_config(config, executors[0].geometry())?;
    let replica = |(index, executor): (usize, &dyn Executor)| {
        let geometry = executor.geometry();
        let step_tokens = config.replica.step_tokens.min(geometry.step_tokens_max);
        ReplicaConfig {
            replica: ReplicaId(index as u32),
            epoch: ReplicaEpoch(config.replica.epoch.0.max(1)),
            blocks: geometry.blocks,
            block_size_tokens: geometry.block_size_tokens,
            slots: config.replica.slots.min(geometry.slots),
            step_tokens,
            chunk_tokens: config.replica.chunk_tokens.min(step_tokens),
            context_tokens_max: config.replica.context_tokens_max.min(geometry.context_tokens_max),
            ..config.replica.clone()
        }
    };
    let replicas: Vec<_> = executors.iter().map(Box::as_ref).enumerate().map(replica).collect();
    for replica in &replicas {
        check(replica)?;
    }
    Ok((gateway, replicas))
}

/// The gateway machine's, with what only the sizes say.
pub(crate) fn gateway_config(config: &EngineConfig, sizes: &Geometry) -> Result<GatewayConfig, EngineError> {
    if config.limits.requests_max == 0 {
        return Err(EngineError::Config { key: "requests_max", value: 0, why: "at least 1" });
    }
    Ok(GatewayConfig {
        block_size_tokens: sizes.block_size_tokens,
        kv_token_bytes: sizes.kv_token_bytes,
        ..config.gateway.clone()
    })
}

fn check(config: &ReplicaConfig) -> Result<(), EngineError> {
    let rules: [(&'static str, u64, u64, u64, &'static str); 7] = [
        ("blocks", config.blocks.into(), 1, limits::POOL_BLOCKS_MAX.into(), "1 to the pool's limit"),
        ("block_size_tokens", config.block_size_tokens.into(), 1, u32::MAX.into(), "at least 1"),
        ("slots", config.slots.into(), 1, limits::SLOTS_MAX as u64, "1 to the limit of slots"),
        ("step_tokens", config.step_tokens.into(), 1, limits::STEP_TOKENS_MAX.into(), "1 to the limit of a step"),
        ("inflight_max", config.inflight_max as u64, 1, limits::INFLIGHT_MAX as u64, "1 or 2"),
        ("ready_window", config.ready_window as u64, 0, limits::READY_WINDOW_MAX as u64, "0 to 2"),
        ("context_tokens_max", config.context_tokens_max.into(), 2, u32::MAX.into(), "at least 2"),
    ];
    for (key, value, least, most, why) in rules {
        if !(least..=most).contains(&value) {
            return Err(EngineError::Config { key, value, why });
        }
    }
    Ok(())
}

pub(crate) fn first_status(config: &ReplicaConfig) -> ReplicaStatus {
    ReplicaStatus {
        replica: config.replica,
        epoch: config.epoch,
        state: ReplicaState::Warming,
        load: Load::default(),
        generation: FIRST,
        slots: config.slots,
        block_size_tokens: config.block_size_tokens,
        context_tokens_max: config.context_tokens_max,
    }
}
