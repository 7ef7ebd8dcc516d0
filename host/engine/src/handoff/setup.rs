//! Which replicas hand off, and with what?

use std::sync::Arc;

use penstock_exec::Executor;
use penstock_model::Namespace;
use penstock_sched::gateway::{GatewayConfig, HandoffConfig};
use penstock_sched::handoff::{PROTOCOL_VERSION, PartyConfig, Peer, Terms};
use penstock_sched::replica::ReplicaConfig;
use penstock_transport::{ByReference, Limits, PeerId, Region, Setup, Transport};

use super::bytes;
use super::mover::MoverWake;
use crate::mailbox::Mailbox;

/// Code of the by-reference transport in the terms of a hand-off.
const BY_REFERENCE: u16 = 0;

/// Replicas that compute prompts for others, and when it is worth it. The other replicas decode.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct HandoffSetup {
    /// How many, the first ones. At least one replica more must be there to decode.
    pub prefill: u32,
    /// See [`HandoffConfig`].
    pub gateway: HandoffConfig,
}

/// What is kept for each replica that takes part: by replica id, none without hand-offs.
#[derive(Default)]
pub(crate) struct Movers {
    pub mailboxes: Box<[Mailbox<MoverWake>]>,
}

/// A mover that has not begun.
pub(crate) struct Prepared {
    pub transport: ByReference,
    pub region: Region,
    pub layers: u32,
    /// Of all endpoints, by replica id.
    pub peers: Arc<[Vec<u8>]>,
}

/// Sets the machines' configurations up and makes an endpoint for each replica.
///
/// # Errors
/// The key that cannot work, its value, and why.
pub(crate) fn prepare(
    setup: &HandoffSetup,
    namespace: &Namespace,
    gateway: &mut GatewayConfig,
    replicas: &mut [ReplicaConfig],
    executors: &[Box<dyn Executor>],
) -> Result<Vec<Prepared>, (&'static str, u64, &'static str)> {
    let prefill = u64::from(setup.prefill);
    if setup.prefill == 0 || prefill >= replicas.len() as u64 {
        return Err(("prefill", prefill, "at least 1, and fewer than there are replicas: the others decode"));
    }
    gateway.handoff = Some(setup.gateway);
    let mut ends = Vec::new();
    for (index, (config, executor)) in replicas.iter_mut().zip(executors).enumerate() {
        let missing = ("prefill", prefill, "the executor does not let its KV be moved");
        let kv = executor.kv_memory().ok_or(missing)?;
        let terms = Terms {
            version: PROTOCOL_VERSION,
            // The namespace covers weights, tokenizer, template, element type and layout.
            model: namespace.0,
            tokenizer: namespace.0,
            dtype_code: kv.dtype_code,
            block_size_tokens: config.block_size_tokens,
            layers: kv.layers,
            layout: namespace.0,
            slices: 1,
            transport_code: BY_REFERENCE,
            leases: setup.gateway.leases,
        };
        let me = Peer { replica: config.replica, epoch: config.epoch };
        config.handoff = Some(PartyConfig {
            timing: setup.gateway.timing,
            // A step computes all layers of its tokens before anything of it can be read.
            chunk_layers: kv.layers,
            held_blocks: config.blocks,
            ..PartyConfig::new(me, terms)
        });
        // A request that was computed elsewhere cannot stand ready beside the batch: whoever decodes grants slots alone.
        if index as u64 >= prefill {
            config.ready_window = 0;
        }
        let region = bytes::region(&kv, config.blocks).map_err(|_| missing)?;
        let identity = PeerId { endpoint: u64::from(config.replica.0), epoch: 1 };
        let limits = Limits::default();
        let end = ByReference::new(Setup { identity, regions: vec![region.clone()], is_guarded: true, limits });
        ends.push((end.map_err(|_| missing)?, region, kv.layers));
    }
    let peers: Arc<[Vec<u8>]> = ends.iter().map(|(end, ..)| end.descriptor().encode()).collect();
    let prepared = |(transport, region, layers)| Prepared { transport, region, layers, peers: Arc::clone(&peers) };
    Ok(ends.into_iter().map(prepared).collect())
}
