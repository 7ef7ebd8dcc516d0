//! `penstock worker`: one replica behind gateways. Known before it loads, called once it is ready, gone in order.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, anyhow};
use penstock_base::ReplicaEpoch;
use penstock_control::{End, Identity, ListenSettings};
use penstock_discovery::{Addresses, Capacity, Discovery, Role as KnownRole, WorkerId, WorkerRecord, WorkerState};
use penstock_engine::{EngineConfig, HandoffSetup, ReplicaState, Role, Worker, WorkerIdentity};
use penstock_hub::Source;
use tokio::runtime::Runtime;
use tokio::sync::watch;
use tokio::task::JoinSet;

use super::doors::{Doors, Reserved};
use super::drain::{self, Patience};
use super::duty::Duty;
use super::registrar::Registrar;
use super::stop::Stop;
use super::worker_edge::{self, WorkerEdge};
use super::{Cluster, gateway, identity, places};
use crate::config::{Config, DiscoveryAt, WorkerRole, pair};
use crate::edge::{self, App, Idempotency, Parts};
use crate::machines;
use crate::memory::Memory;
use crate::policies::Keeper;
use crate::serve::{self, ADMIN_CONNECTIONS_MAX, Beginning, Chosen, Listeners};
use crate::tenants::Tenants;

/// How often it is looked whether the replica serves.
const LOOK_EVERY: Duration = Duration::from_millis(200);
/// A replica that starts anew inside its process is away for moments; one that does not come back in this time is unhealthy.
const UNHEALTHY_AFTER: Duration = Duration::from_secs(2);
/// Longest wait for discovery to forget a worker that ends.
const LEAVE_WITHIN: Duration = Duration::from_secs(5);
/// After a drain: how long connections to the probes may take to close.
const CLOSE_GRACE: Duration = Duration::from_secs(2);
/// Text of a record before the model has been opened.
const NOT_YET: &str = "not known before the model is open";

/// How a worker's service came to its end.
enum Ending {
    /// It was asked to.
    Asked,
    /// A later life has its place.
    Superseded(String),
    /// Its executor is gone and will not come back in this process.
    Lost,
}

/// Runs the worker to its end.
///
/// # Errors
/// Whatever keeps it from starting, a later life of the same worker, a lost executor.
pub fn run(config: Config) -> Result<()> {
    let start = Instant::now();
    let Beginning { secret, identity: tenant_ids, admin_token, runtime, listeners } = Beginning::of(&config)?;
    let token = config.cluster.token_file.as_deref().map(identity::token).transpose()?;
    let reserved = Reserved::bind(config.cluster.control_listen)?;
    let name = identity::name(&config, reserved.address.port())?;
    let discovery: Arc<dyn Discovery> = Arc::from(places::open(&config)?);
    let life = identity::life();
    let record = first_record(&config, &name, life, reserved.address);
    let duty = Arc::new(Duty::new(discovery.describe(), record.clone()));
    let edge = Arc::new(WorkerEdge { duty: Arc::clone(&duty), engine: OnceLock::new() });
    let Listeners { api, admin } = listeners;
    let (end_edges, stopped) = watch::channel(false);
    let (mut stop, registrar, mut serving) = {
        let _inside = runtime.enter();
        let stop = Stop::listen()?;
        let registrar = Arc::new(Registrar::start(discovery, record, Arc::clone(&duty)));
        let mut serving = JoinSet::new();
        let (most, waits) = (config.http.connections_max, serve::timeouts(&config));
        let probes = api.address;
        serving.spawn(edge::serve(api, worker_edge::router(Arc::clone(&edge)), most, waits, stopped.clone()));
        tracing::info!(worker = %name, life, role = ?config.cluster.role, %probes, "the worker begins: its probes answer");
        (stop, registrar, serving)
    };
    // Loading may take long, and may be given up.
    let start_up = {
        let (config, duty, registrar) = (config.clone(), Arc::clone(&duty), Arc::clone(&registrar));
        let identity = WorkerIdentity {
            replica: identity::replica(&config, &name),
            epoch: ReplicaEpoch(life),
            role: role(config.cluster.role),
            domain: identity::domain(&config),
        };
        move || load(config, &secret, identity, &duty, &registrar)
    };
    let loaded = runtime.block_on(async {
        tokio::select! {
            loaded = tokio::task::spawn_blocking(start_up) => loaded.context("load the model")?.map(Some),
            () = stop.asked(1) => Ok(None),
            why = registrar.must_end() => Err(anyhow!("{why}")),
        }
    });
    let Some(loaded) = leave_unless_loaded(loaded, &runtime, &registrar)? else {
        runtime.shutdown_background();
        return Ok(());
    };
    let Loaded { worker, model, model_name, memory, chosen, config, compatibility } = loaded;
    drop(edge.engine.set(Arc::clone(worker.engine())));
    duty.runs(Arc::clone(&worker));
    let app = Arc::new(App::new(Parts {
        engine: Arc::clone(worker.engine()),
        model,
        model_name,
        tenants: Tenants::open(&tenant_ids),
        identity: tenant_ids,
        context_tokens_max: worker.engine().geometry().context_tokens_max,
        config,
        publication: chosen.publication,
        admin_token,
        // It has no clients of its own.
        idempotency: Idempotency::new(secret, None),
        cluster: Cluster::Worker(Arc::clone(&duty)),
    }));
    let keeper = Keeper::start(Arc::clone(&app), chosen.inbox, chosen.folder)?;
    let ending = runtime.block_on(async {
        let me = Identity {
            end: End { id: identity::number(&name), epoch: life },
            compatibility,
            greeting: worker.greeting(),
            token,
        };
        let settings = ListenSettings {
            identity: me,
            limits: gateway::limits(&app.config),
            sessions_max: app.config.cluster.gateways_max,
        };
        let control = reserved.address;
        let doors = reserved.open(settings, Arc::clone(&worker))?;
        if let Some(admin) = admin {
            let waits = serve::timeouts(&app.config);
            let address = admin.address;
            serving.spawn(edge::serve(admin, edge::admin(Arc::clone(&app)), ADMIN_CONNECTIONS_MAX, waits, stopped));
            tracing::info!(admin = %address, "the admin listener answers");
        }
        registrar.tell(duty.change(|record| record.state = WorkerState::Ready));
        announce(&app, &duty, control, &memory, start);
        let ending = serve_until(&mut stop, &worker, &duty, &registrar).await;
        let ending = end(ending, &mut stop, &worker, &duty, &registrar, doors, patience(&app.config)).await;
        end_edges.send_replace(true);
        let closing = async { while serving.join_next().await.is_some() {} };
        if tokio::time::timeout(CLOSE_GRACE, closing).await.is_err() {
            tracing::warn!("some connections did not close in time");
        }
        ending
    });
    keeper.end();
    let is_joined = app.engine.shutdown();
    tracing::info!(joined = is_joined, "stopped");
    ending
}

/// What a worker consists of once it has its model.
struct Loaded {
    worker: Arc<Worker>,
    model: Arc<penstock_model::Model>,
    model_name: String,
    memory: Memory,
    chosen: Chosen,
    /// With what the memory has settled.
    config: Config,
    compatibility: String,
}

/// From the model's name to a replica that could serve. Says how far it is.
fn load(
    mut config: Config,
    secret: &[u8],
    identity: WorkerIdentity,
    duty: &Duty,
    registrar: &Registrar,
) -> Result<Loaded> {
    let is_of_the_hub = Source::parse(&config.model.path).is_some();
    let located = machines::locate(&config)?;
    if is_of_the_hub {
        registrar.tell(duty.change(|record| record.state = WorkerState::Loading));
    }
    let model = Arc::new(machines::open(&located)?);
    let model_name = machines::model_name(&config, &located);
    let served = machines::served_model(&config, model_name.clone(), &model)?;
    let compatibility = identity::compatibility(&config, &served.namespace);
    let memory = machines::memory(&config, &model)?;
    config.replicas.kv_blocks = memory.ledger.blocks;
    registrar.tell(duty.change(|record| {
        record.model.clone_from(&model_name);
        record.compatibility.clone_from(&compatibility);
    }));
    let executor =
        machines::executors(&config, &located, &model, &memory)?.pop().context("a worker has one replica")?;
    let sizes = executor.geometry().clone();
    registrar.tell(duty.change(|record| {
        record.state = WorkerState::Warming;
        record.capacity = Capacity {
            blocks: sizes.blocks,
            block_tokens: sizes.block_size_tokens,
            slots: sizes.slots,
            context_tokens: sizes.context_tokens_max,
        };
    }));
    let chosen = Chosen::first(&config, secret, 1, sizes.context_tokens_max)?;
    let engine_config = EngineConfig {
        policies: chosen.source.clone(),
        handoff: Some(HandoffSetup { prefill: 1, gateway: machines::handoff_config(&config) }),
        ..machines::engine_config(&config)?
    };
    let worker = Worker::start(engine_config, served, identity, executor).context("start the replica")?;
    worker.engine().metrics().memory(memory.uses());
    Ok(Loaded { worker: Arc::new(worker), model, model_name, memory, chosen, config, compatibility })
}

/// Takes the registration out where loading came to nothing. None: it was asked to end meanwhile.
fn leave_unless_loaded(
    loaded: Result<Option<Loaded>>,
    runtime: &Runtime,
    registrar: &Registrar,
) -> Result<Option<Loaded>> {
    if !matches!(loaded, Ok(Some(_))) {
        let left = runtime.block_on(async { tokio::time::timeout(LEAVE_WITHIN, registrar.leave()).await });
        tracing::info!(removed = matches!(left, Ok(Ok(()))), "the worker ends before it was ready");
    }
    loaded
}

fn role(role: WorkerRole) -> Role {
    match role {
        WorkerRole::Unified => Role::Unified,
        WorkerRole::Prefill => Role::Prefill,
        WorkerRole::Decode => Role::Decode,
    }
}

/// What is known of it before anything is loaded.
fn first_record(config: &Config, name: &WorkerId, life: u64, control: SocketAddr) -> WorkerRecord {
    let cluster = &config.cluster;
    let is_of_the_hub = Source::parse(&config.model.path).is_some();
    let labels = cluster.labels.iter().filter_map(|label| pair(label));
    let topology: BTreeMap<String, String> = labels.map(|(name, value)| (name.to_owned(), value.to_owned())).collect();
    WorkerRecord {
        id: name.clone(),
        epoch: life,
        role: match cluster.role {
            WorkerRole::Unified => KnownRole::Unified,
            WorkerRole::Prefill => KnownRole::Prefill,
            WorkerRole::Decode => KnownRole::Decode,
        },
        state: if is_of_the_hub { WorkerState::Downloading } else { WorkerState::Loading },
        addresses: Addresses {
            control: cluster.control_advertise.clone().unwrap_or_else(|| control.to_string()),
            kv_transfer: Vec::new(),
            kv_events: config.kv_events.publish.map(|at| told_at(at, cluster.control_advertise.as_deref())),
            kv_replay: config.kv_events.replay.map(|at| told_at(at, cluster.control_advertise.as_deref())),
        },
        model: NOT_YET.to_owned(),
        compatibility: NOT_YET.to_owned(),
        capacity: Capacity::default(),
        topology,
    }
}

/// Where gateways listen to KV events: by the host at which they call, where the worker publishes at all its addresses.
fn told_at(at: SocketAddr, advertised: Option<&str>) -> String {
    let host = advertised.and_then(|address| address.rsplit_once(':'));
    match host.filter(|_| at.ip().is_unspecified()) {
        Some((host, _)) => format!("tcp://{host}:{}", at.port()),
        None => format!("tcp://{at}"),
    }
}

/// Past the leases nobody may fetch what was computed for others; the grace comes on top.
fn patience(config: &Config) -> Patience {
    let handoff = &config.handoff;
    let keep = handoff.hold_lease_ms.saturating_add(handoff.write_lease_ms).saturating_add(handoff.grace_ms);
    Patience { grace: penstock_base::Duration::from_s(config.server.drain_grace_s), keep: Duration::from_millis(keep) }
}

/// Serves, following the replica's state, until there is a reason to end.
async fn serve_until(stop: &mut Stop, worker: &Worker, duty: &Duty, registrar: &Registrar) -> Ending {
    let mut look = tokio::time::interval(LOOK_EVERY);
    let mut away_since: Option<Instant> = None;
    loop {
        tokio::select! {
            () = stop.asked(1) => return Ending::Asked,
            why = registrar.must_end() => return Ending::Superseded(why),
            _ = look.tick() => {}
        }
        let status = worker.engine().status();
        if !status.live || status.replicas.iter().any(|replica| replica.state == ReplicaState::Lost) {
            return Ending::Lost;
        }
        let serves = status.ready;
        away_since = if serves { None } else { away_since.or_else(|| Some(Instant::now())) };
        let state = match away_since {
            Some(since) if since.elapsed() >= UNHEALTHY_AFTER => WorkerState::Unhealthy,
            // As it was: it may be back in a moment.
            Some(_) => duty.record().state,
            None => WorkerState::Ready,
        };
        if state != duty.record().state {
            registrar.tell(duty.change(|record| record.state = state));
        } else {
            duty.count();
        }
    }
}

/// Ends the service in the way that its end asks for.
async fn end(
    ending: Ending,
    stop: &mut Stop,
    worker: &Arc<Worker>,
    duty: &Duty,
    registrar: &Registrar,
    doors: Doors,
    patience: Patience,
) -> Result<()> {
    match ending {
        Ending::Asked => {
            tracing::info!(grace_s = patience.grace.as_ms() / 1_000, "asked to stop: draining");
            tokio::select! {
                drained = drain::drain(worker, duty, registrar, doors, patience) => drained,
                () = stop.asked(2) => {
                    tracing::warn!("asked to stop again: ending at once");
                    // Nothing is kept: whoever asks twice does not want to wait for threads either.
                    std::process::exit(1);
                }
            }
        }
        Ending::Superseded(why) => {
            tracing::error!(why, "superseded: this process ends");
            doors.close().await;
            Err(anyhow!("{why}"))
        }
        Ending::Lost => {
            registrar.tell(duty.change(|record| record.state = WorkerState::Unhealthy));
            tracing::error!("the executor is lost: this process ends, so that another life may begin");
            doors.close().await;
            let _ = tokio::time::timeout(LEAVE_WITHIN, registrar.leave()).await;
            Err(anyhow!("the executor is lost"))
        }
    }
}

fn announce(app: &App, duty: &Duty, control: SocketAddr, memory: &Memory, start: Instant) {
    let record = duty.record();
    if app.config.cluster.discovery == DiscoveryAt::Memory {
        let at = &record.addresses.control;
        tracing::warn!(
            "no gateway finds this worker by itself: start one with --worker {at}, or both with --discovery"
        );
    }
    tracing::info!(
        worker = %record.id,
        life = record.epoch,
        role = %record.role,
        %control,
        advertised = record.addresses.control,
        model = app.model_name,
        compatibility = record.compatibility,
        discovery = %app.config.cluster.discovery,
        kv_blocks = app.config.replicas.kv_blocks,
        kv_dtype = ?app.config.replicas.kv_dtype,
        context_tokens = app.context_tokens_max,
        policies = app.publication.summary(),
        seconds = start.elapsed().as_secs_f32(),
        "the worker is ready"
    );
    eprintln!(
        "\nPenstock worker {} ({}) computes {} for gateways at {control}\n  decided by: {}\n  memory:\n{memory}\n",
        record.id,
        record.role,
        app.model_name,
        app.publication.summary()
    );
}
