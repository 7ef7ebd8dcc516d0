//! `penstock gateway`: the HTTP edge and the gateway machine before workers that are processes of their own.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use penstock_base::GatewayEpoch;
use penstock_control::{End, Identity, Limits};
use penstock_discovery::{Discovery, Watch};
use penstock_engine::{Engine, EngineConfig, HandoffSetup, gateway_greeting};
use tokio::sync::watch;
use tokio::task::JoinSet;

use super::caller::{self, Line};
use super::roster::{Goal, Roster};
use super::sight::Sight;
use super::{Cluster, identity, places, quotas};
use crate::config::{Config, DiscoveryAt};
use crate::edge::{App, Idempotency, Parts};
use crate::machines;
use crate::policies::Keeper;
use crate::serve::{self, Beginning, Chosen, Listeners};

/// Time for the last words to workers to leave the process.
const GOODBYE: Duration = Duration::from_millis(100);
/// How often the age of what discovery says is measured.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// Runs the gateway to its end.
///
/// # Errors
/// Whatever keeps it from starting. Workers that are not there keep it from nothing: it waits for them.
pub fn run(config: Config) -> Result<()> {
    let start = Instant::now();
    let beginning = Beginning::of(&config)?;
    let Beginning { secret, identity: tenant_ids, admin_token, runtime, listeners } = beginning;
    let tenants = serve::read_tenants(&config, &tenant_ids)?;
    let token = config.cluster.token_file.as_deref().map(identity::token).transpose()?;
    let name = identity::name(&config, listeners.api.address.port())?;
    let api = listeners.api.address.to_string();
    let discovery = places::open(&config)?;
    let located = machines::locate(&config)?;
    let model = Arc::new(machines::open(&located)?);
    let model_name = machines::model_name(&config, &located);
    let sizes = machines::geometry(&config, &model)?;
    let context_tokens_max = sizes.context_tokens_max;
    let served = machines::served_model(&config, model_name.clone(), &model)?;
    let compatibility = identity::compatibility(&config, &served.namespace);
    let chosen = Chosen::first(&config, &secret, 0, context_tokens_max)?;
    let mut engine_config = EngineConfig { policies: chosen.source, ..machines::engine_config(&config)? };
    let epoch = identity::gateway_epoch(&name, engine_config.gateway.epoch);
    engine_config.gateway.epoch = epoch;
    // Which of its workers prefill, they say themselves.
    engine_config.handoff = Some(HandoffSetup { prefill: 1, gateway: machines::handoff_config(&config) });
    let engine = Engine::start_gateway(engine_config, served, sizes, config.cluster.workers_max);
    let engine = Arc::new(engine.context("start the gateway")?);
    let shares = place_of_gateways(&config)?;
    let sight = Arc::new(Sight::new(discovery.describe(), engine.metrics()));
    let line = Line {
        engine: Arc::clone(&engine),
        sight: Arc::clone(&sight),
        identity: me(identity::number(&name), epoch, compatibility.clone(), token),
        limits: limits(&config),
        pause_max: Duration::from_millis(config.cluster.redial_ms),
        follows_events: config.cluster.follow_kv_events,
    };
    let roster = Roster::new(compatibility.clone(), &config.cluster.workers, config.cluster.workers_max);
    let idempotency = Idempotency::new(secret, serve::interrupted_calls(&config, epoch));
    let app = Arc::new(App::new(Parts {
        engine,
        model,
        model_name,
        config,
        identity: tenant_ids,
        tenants,
        context_tokens_max,
        publication: chosen.publication,
        admin_token,
        idempotency,
        cluster: Cluster::Gateway(sight),
    }));
    let keeper = Keeper::start(Arc::clone(&app), chosen.inbox, chosen.folder)?;
    let is_watched = app.config.cluster.discovery != DiscoveryAt::Memory;
    runtime.block_on(async {
        let calls = tokio::spawn(call_all(Arc::new(line), roster, discovery, is_watched));
        let shares = shares.map(|place| {
            let record = quotas::record(name.clone(), identity::life(), api.clone(), app.model_name.clone());
            tokio::spawn(quotas::keep(Arc::clone(&app.engine), place, record, quotas::timing(&app.config)))
        });
        let announce = |app: &App, listeners: &Listeners| {
            announce(app, listeners, name.as_str(), epoch, &compatibility, start);
        };
        let served = serve::serve(Arc::clone(&app), listeners, announce).await;
        calls.abort();
        if let Some(shares) = shares {
            shares.abort();
        }
        served
    })?;
    keeper.end();
    let is_joined = app.engine.shutdown();
    // Its goodbyes are on their way: workers that hear them need not wait for a lease.
    std::thread::sleep(GOODBYE);
    tracing::info!(joined = is_joined, "stopped");
    Ok(())
}

/// Where gateways make themselves known, when they share the tenants' quotas.
fn place_of_gateways(config: &Config) -> Result<Option<Box<dyn Discovery>>> {
    config.cluster.share_quotas.then(|| quotas::open(config)).transpose()
}

fn me(id: u64, epoch: GatewayEpoch, compatibility: String, token: Option<String>) -> Identity {
    let greeting = gateway_greeting(epoch);
    Identity { end: End { id, epoch: identity::life() }, compatibility, greeting, token }
}

/// Bounds of the sessions of a cluster.
pub fn limits(config: &Config) -> Limits {
    Limits { lease: Duration::from_millis(config.cluster.session_lease_ms), ..Limits::default() }
}

fn announce(app: &App, listeners: &Listeners, name: &str, epoch: GatewayEpoch, compatibility: &str, start: Instant) {
    let address = listeners.api.address;
    let admin = listeners.admin.as_ref().map(|listener| listener.address.to_string());
    let cluster = &app.config.cluster;
    tracing::info!(
        %address,
        admin = admin.as_deref().unwrap_or("none"),
        gateway = name,
        number = epoch.0,
        model = app.model_name,
        compatibility,
        discovery = %cluster.discovery,
        workers = cluster.workers.join(","),
        context_tokens = app.context_tokens_max,
        tenants = app.tenants().len(),
        policies = app.publication.summary(),
        seconds = start.elapsed().as_secs_f32(),
        "the gateway listens and waits for workers"
    );
    eprintln!(
        "\nPenstock serves {} on http://{address}\n  gateway {name}, before the workers of {}{}\n  decided by: {}\n",
        app.model_name,
        cluster.discovery,
        cluster.workers.iter().map(|worker| format!(" {worker}")).collect::<String>(),
        app.publication.summary(),
    );
}

/// One task a worker.
struct Calls {
    line: Arc<Line>,
    goals: BTreeMap<String, watch::Sender<Option<Goal>>>,
    tasks: JoinSet<String>,
}

impl Calls {
    /// Sees that each worker's task has its goal.
    fn set(&mut self, roster: &Roster) {
        let goals = roster.goals();
        self.line.sight.known(&goals, |key| roster.record(key).cloned());
        for (key, sender) in &self.goals {
            let goal = goals.get(key).cloned();
            sender.send_if_modified(|now| {
                let is_new = *now != goal;
                *now = goal;
                is_new
            });
        }
        for (key, goal) in goals {
            if !self.goals.contains_key(&key) {
                if let Some(why) = &goal.refused {
                    tracing::warn!(worker = key, address = goal.address, why, "a worker is not called");
                }
                let (sender, receiver) = watch::channel(Some(goal));
                let (line, name) = (Arc::clone(&self.line), key.clone());
                self.tasks.spawn(async move {
                    caller::follow(line, name.clone(), receiver).await;
                    name
                });
                self.goals.insert(key, sender);
            }
        }
    }
}

/// Hears discovery and follows it, for ever.
async fn call_all(line: Arc<Line>, mut roster: Roster, discovery: Box<dyn Discovery>, is_watched: bool) {
    let mut watch = is_watched.then(|| discovery.watch());
    let mut calls = Calls { line, goals: BTreeMap::new(), tasks: JoinSet::new() };
    let mut look = tokio::time::interval(LOOK_EVERY);
    calls.set(&roster);
    loop {
        tokio::select! {
            event = next(&mut watch) => {
                tell(&event);
                roster.heard(&event);
                calls.set(&roster);
            }
            Some(ended) = calls.tasks.join_next() => {
                // It knew of no goal any more; meanwhile there may be one again.
                match ended {
                    Ok(key) => drop(calls.goals.remove(&key)),
                    Err(fault) => tracing::error!(%fault, "the task of a worker has broken"),
                }
                calls.set(&roster);
            }
            _ = look.tick() => {}
        }
        if let Some(watch) = &watch {
            calls.line.sight.discovery(watch.view());
        }
    }
}

async fn next(watch: &mut Option<Watch>) -> penstock_discovery::Event {
    match watch {
        Some(watch) => watch.next().await,
        None => std::future::pending().await,
    }
}

fn tell(event: &penstock_discovery::Event) {
    use penstock_discovery::Event;
    match event {
        Event::Snapshot(workers) => tracing::info!(workers = workers.len(), "discovery has told all workers"),
        Event::Joined(worker) => {
            tracing::info!(worker = %worker.id, role = %worker.role, state = ?worker.state, "a worker is known");
        }
        Event::Changed(worker) => tracing::info!(worker = %worker.id, state = ?worker.state, "a worker has changed"),
        Event::Restarted { old_epoch, record } => {
            tracing::info!(worker = %record.id, old_epoch, life = record.epoch, "a worker has started anew");
        }
        Event::Left { id, .. } => tracing::info!(worker = %id, "a worker is known no more"),
        Event::Stale { why } => {
            tracing::warn!(why, "discovery does not answer: the workers known last stay, and what runs goes on");
        }
        Event::Fresh => tracing::info!("discovery answers again"),
        _ => {}
    }
}
