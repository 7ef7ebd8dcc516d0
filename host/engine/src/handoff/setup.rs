//! Which replicas hand off, and with what?

use std::sync::Arc;
use std::time::Duration;

use penstock_base::ReplicaId;
use penstock_exec::{Executor, KvMemory};
use penstock_model::Namespace;
use penstock_sched::gateway::{GatewayConfig, HandoffConfig};
use penstock_sched::handoff::{PROTOCOL_VERSION, PartyConfig, Peer, Terms};
use penstock_sched::replica::ReplicaConfig;
use penstock_transport::{ByReference, Kind, Limits, PeerId, Region, Setup, Transport};

use super::mover::{MoverWake, lanes};
use super::settings::{EndpointError, TransferSettings};
use super::ways::Ways;
use super::{bytes, settings};
use crate::mailbox::Mailbox;

/// Code of the by-reference transport in the terms of a hand-off.
const BY_REFERENCE: u16 = 0;
/// Code that says: the two ends choose among what both have.
const NEGOTIATED: u16 = 1;
/// The one life of this process, for those within it.
const LIFE: u64 = 1;

/// Replicas that compute prompts for others, and when it is worth it. The other replicas decode.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct HandoffSetup {
    /// How many of this process's replicas, the first ones; at least one more must be there to decode. A gateway and a worker do not look at
    /// it: there each worker says what it does.
    pub prefill: u32,
    /// See [`HandoffConfig`].
    pub gateway: HandoffConfig,
}

/// What is kept for each replica that takes part: by replica id, none without hand-offs.
#[derive(Default)]
pub(crate) struct Movers {
    pub mailboxes: Box<[Mailbox<MoverWake>]>,
    /// How they reach each other.
    pub ways: Ways,
}

impl Movers {
    /// For so many replicas.
    pub fn new(count: usize) -> Self {
        let mailboxes = (0..count).map(|_| Mailbox::with_bell(&lanes()));
        Self { mailboxes: mailboxes.collect(), ways: Ways::default() }
    }
}

/// A mover that is known: its replica, the life of its process, its descriptors.
pub(crate) type Known = (ReplicaId, u64, Vec<Vec<u8>>);

/// A mover that has not begun.
pub(crate) struct Prepared {
    pub ends: Vec<Box<dyn Transport>>,
    pub region: Region,
    pub layers: u32,
    /// Which transports are preferred, as in the settings.
    pub order: Box<[Kind]>,
    /// How long one chunk may take.
    pub copy_max: Duration,
    /// Those that are known from the start.
    pub peers: Arc<[Known]>,
}

impl Prepared {
    /// What other processes must know to reach it. It holds secrets.
    pub fn descriptors(&self) -> Vec<Vec<u8>> {
        self.ends.iter().map(|end| end.descriptor().encode()).collect()
    }
}

/// What a worker's part in hand-offs is made of.
pub(crate) struct WorkerParty<'a> {
    /// How its KV travels.
    pub transfer: &'a TransferSettings,
    /// Times and leases, as the gateways have them.
    pub handoff: &'a HandoffConfig,
    /// What its KV is.
    pub namespace: &'a Namespace,
    /// The life of this process, greater than any before of this replica.
    pub life: u64,
    /// It decodes what others computed.
    pub decodes: bool,
}

/// Sets a worker's machine up and makes the endpoints of its mover.
///
/// # Errors
/// What cannot be had, and why.
pub(crate) fn prepare_worker(
    party: &WorkerParty<'_>,
    config: &mut ReplicaConfig,
    executor: &dyn Executor,
) -> Result<Prepared, PartyError> {
    let kv = executor.kv_memory().ok_or(PartyError::Fixed)?;
    take_part(config, party.namespace, party.handoff, (&kv, NEGOTIATED));
    if party.decodes {
        config.ready_window = 0;
    }
    let region = bytes::region(&kv, config.blocks).map_err(|_| PartyError::Fixed)?;
    let identity = PeerId { endpoint: u64::from(config.replica.0), epoch: party.life };
    Ok(Prepared {
        ends: settings::endpoints(party.transfer, identity, &region)?,
        region,
        layers: kv.layers,
        order: party.transfer.kinds.clone().into(),
        copy_max: copy_max(party.handoff),
        peers: Arc::new([]),
    })
}

/// Why a worker takes no part in hand-offs.
#[derive(Debug, thiserror::Error)]
pub enum PartyError {
    /// See the executor.
    #[error("the executor does not let its KV be moved")]
    Fixed,
    /// No way for its KV.
    #[error(transparent)]
    Endpoint(#[from] EndpointError),
}

/// A write once posted is under way no longer than the grace that the leases count with.
fn copy_max(handoff: &HandoffConfig) -> Duration {
    Duration::from_nanos(handoff.leases.grace.0).max(Duration::from_millis(10))
}

/// The machine's side of it.
fn take_part(
    config: &mut ReplicaConfig,
    namespace: &Namespace,
    handoff: &HandoffConfig,
    (kv, transport_code): (&KvMemory, u16),
) {
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
        transport_code,
        leases: handoff.leases,
    };
    let me = Peer { replica: config.replica, epoch: config.epoch };
    config.handoff = Some(PartyConfig {
        timing: handoff.timing,
        // A step computes all layers of its tokens before anything of it can be read.
        chunk_layers: kv.layers,
        held_blocks: config.blocks,
        ..PartyConfig::new(me, terms)
    });
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
        take_part(config, namespace, &setup.gateway, (&kv, BY_REFERENCE));
        // A request that was computed elsewhere cannot stand ready beside the batch: whoever decodes grants slots alone.
        if index as u64 >= prefill {
            config.ready_window = 0;
        }
        let region = bytes::region(&kv, config.blocks).map_err(|_| missing)?;
        let identity = PeerId { endpoint: u64::from(config.replica.0), epoch: LIFE };
        let limits = Limits::default();
        let end = ByReference::new(Setup { identity, regions: vec![region.clone()], is_guarded: true, limits });
        ends.push((config.replica, end.map_err(|_| missing)?, region, kv.layers));
    }
    let peers: Arc<[Known]> =
        ends.iter().map(|(replica, end, ..)| (*replica, LIFE, vec![end.descriptor().encode()])).collect();
    let prepared = |(_, end, region, layers): (ReplicaId, ByReference, Region, u32)| Prepared {
        ends: vec![Box::new(end)],
        region,
        layers,
        order: Box::new([]),
        copy_max: copy_max(&setup.gateway),
        peers: Arc::clone(&peers),
    };
    Ok(ends.into_iter().map(prepared).collect())
}
