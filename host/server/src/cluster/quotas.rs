//! Which part of the tenants' quotas is this gateway's, where several stand before the same workers? It registers beside the others, looks who is there, and
//! hands what follows from each look to the engine. `docs/quotas.md` has the rules.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, Result};
use penstock_discovery::{
    Addresses, Capacity, Discovery, Event, Registration, Role, Standing, WorkerRecord, WorkerState,
};
use penstock_engine::Engine;
use penstock_sched::quota::{Leases, Member, Timing};

use super::{identity, places};
use crate::config::{Config, DiscoveryAt};

/// What follows from a look counts for this part of a registration's lease: a renewal that hangs is known before the rest is over.
const LEASE_PART: u64 = 4;
/// Looks within that time: two may fail.
const LOOKS: u32 = 3;

/// The place where gateways make themselves known: beside that of the workers.
///
/// # Errors
/// A folder that cannot be made, a setting that cannot be used.
pub fn open(config: &Config) -> Result<Box<dyn Discovery>> {
    let mut beside = config.clone();
    match &mut beside.cluster.discovery {
        DiscoveryAt::Folder(path) => {
            let mut name = path.clone().into_os_string();
            name.push("-gateways");
            *path = PathBuf::from(name);
            std::fs::create_dir_all(&*path)
                .with_context(|| format!("create {} (cluster.share_quotas)", path.display()))?;
        }
        DiscoveryAt::Etcd(_) => {
            let prefix = beside.discovery.etcd_prefix.trim_end_matches('/');
            beside.discovery.etcd_prefix = format!("{prefix}-gateways/");
        }
        // Refused with the configuration.
        DiscoveryAt::Memory | DiscoveryAt::Kubernetes => {}
    }
    places::open(&beside)
}

/// What a gateway says of itself.
pub fn record(id: penstock_discovery::WorkerId, life: u64, address: String, model: String) -> WorkerRecord {
    WorkerRecord {
        id,
        epoch: life,
        role: Role::Unified,
        state: WorkerState::Ready,
        addresses: Addresses { control: address, kv_transfer: Vec::new(), kv_events: None, kv_replay: None },
        model,
        compatibility: "gateway".to_owned(),
        capacity: Capacity::default(),
        topology: std::collections::BTreeMap::new(),
    }
}

/// How long things last, from the configuration.
pub fn timing(config: &Config) -> Timing {
    let ms = penstock_base::Duration::from_ms;
    Timing { lease: ms(config.discovery.lease_ms / LEASE_PART), hold: ms(config.limits.quota_window_ms) }
}

/// Looks and tells, as long as the gateway runs. A service that is away costs the part, once its lease is over.
pub async fn keep(engine: Arc<Engine>, discovery: Box<dyn Discovery>, record: WorkerRecord, timing: Timing) {
    let me = Member { name: identity::number(&record.id), life: record.epoch };
    let mut leases = Leases::new(me, timing);
    let pause = Duration::from_nanos(timing.lease.0) / LOOKS;
    let mut registration: Option<Registration> = None;
    loop {
        match registration.as_ref().map(Registration::standing) {
            None => match discovery.register(record.clone()).await {
                Ok(made) => registration = Some(made),
                Err(why) => {
                    tracing::warn!(%why, "the gateway is not known beside the others: it has no part of the quotas")
                }
            },
            Some(Standing::Announced) => look(&engine, discovery.as_ref(), &mut leases, pause).await,
            Some(Standing::Interrupted(why)) => {
                tracing::debug!(%why, "the gateway's registration is not renewed");
            }
            Some(Standing::Over(why)) => {
                tracing::error!(%why, "another gateway has this one's name: it has no part of the quotas any more");
                return;
            }
        }
        tokio::time::sleep(pause).await;
    }
}

/// Asks who is there. What is answered was true at some moment in between: the list is read for this question.
async fn look(engine: &Engine, discovery: &dyn Discovery, leases: &mut Leases, within: Duration) {
    let asked = engine.clock().now();
    let mut watch = discovery.watch();
    let Ok(Event::Snapshot(records)) = tokio::time::timeout(within, watch.next()).await else {
        tracing::debug!("it is not known which gateways there are");
        return;
    };
    let member = |record: &Arc<WorkerRecord>| Member { name: identity::number(&record.id), life: record.epoch };
    let members: Vec<Member> = records.iter().map(member).collect();
    let now = engine.clock().now();
    leases.see(asked, now, &members);
    if let Some(share) = leases.share(now) {
        engine.take_quota_share(share);
    }
}
