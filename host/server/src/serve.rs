//! `penstock serve`: start in order, serve, drain in order.

use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use penstock_base::GatewayEpoch;
use penstock_engine::{Engine, EngineConfig, PolicySource};
use tokio::runtime::Runtime;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::watch;

use crate::cluster::Cluster;
use crate::config::{AdminListen, Config};
use crate::deployment;
use crate::edge::{self, AdminToken, App, Listener, Parts, Timeouts};
use crate::machines;
use crate::memory::Memory;
use crate::policies::{Folder, Inbox, Keeper, MakerSettings, Publication, Wanted};
use crate::tenants::{Identity, Tenants};

/// After a drain: how long connections may take to close at least, when nothing of the grace is left.
const CLOSE_GRACE: Duration = Duration::from_secs(2);

/// Threads for what blocks: long texts to tokenise (two at a time), policy sets being made, the drain, names being resolved. They exist
/// while there is such work.
const BLOCKING_THREADS_MAX: usize = 16;

/// Threads that answer HTTP. The model has the cores, and the edge needs little of them: two, so that nobody waits behind one slow task. On
/// a single core a second would only take turns with the first.
fn edge_threads(wanted: usize, cores: usize) -> usize {
    if wanted == 0 { cores.clamp(1, 2) } else { wanted }
}

/// Runs the server to its end.
///
/// # Errors
/// Whatever keeps it from starting. Nothing listens before everything is ready.
pub fn run(mut config: Config) -> Result<()> {
    let start = Instant::now();
    let Beginning { secret, identity, admin_token, runtime, listeners } = Beginning::of(&config)?;
    let tenants = read_tenants(&config, &identity)?;
    let located = machines::locate(&config)?;
    let model = Arc::new(machines::open(&located)?);
    let name = machines::model_name(&config, &located);
    let memory = machines::memory(&config, &model)?;
    let executors = machines::executors(&config, &located, &model, &memory)?;
    // From here on the number in force is the configuration's.
    config.replicas.kv_blocks = memory.ledger.blocks;
    let served = machines::served_model(&config, name.clone(), &model)?;
    let context_tokens_max = executors.first().map_or(0, |executor| executor.geometry().context_tokens_max);
    let chosen = Chosen::first(&config, &secret, config.replicas.total(), context_tokens_max)?;
    let engine_config = EngineConfig { policies: chosen.source, ..machines::engine_config(&config)? };
    let engine = Engine::start(engine_config, served, executors).context("start the engine")?;
    engine.metrics().memory(memory.uses());
    let context_tokens_max = longest_sequence(&engine, &config);
    let idempotency = edge::Idempotency::new(secret, interrupted_calls(&config, engine.gateway_epoch()));
    let app = Arc::new(App::new(Parts {
        engine: Arc::new(engine),
        model,
        model_name: name,
        config,
        identity,
        tenants,
        context_tokens_max,
        publication: chosen.publication,
        admin_token,
        idempotency,
        cluster: Cluster::Alone,
    }));
    let keeper = Keeper::start(Arc::clone(&app), chosen.inbox, chosen.folder)?;
    let serving = serve(Arc::clone(&app), listeners, |app, listeners| announce(app, listeners, &memory, start));
    runtime.block_on(serving)?;
    keeper.end();
    let is_joined = app.engine.shutdown();
    tracing::info!(joined = is_joined, "stopped");
    Ok(())
}

/// What earlier lives of this server left unanswered; none where nothing is kept over a restart.
pub fn interrupted_calls(config: &Config, gateway: GatewayEpoch) -> Option<edge::Interrupted> {
    let dir = deployment::state_dir(config)?;
    match edge::Interrupted::open(&dir, gateway, edge::unix_s()) {
        Ok(calls) => {
            tracing::info!(calls = calls.left(), dir = %dir.display(), "calls that an earlier life of this server did not end");
            Some(calls)
        }
        Err(fault) => {
            tracing::warn!(fault, "idempotency keys in flight are not kept over a restart");
            None
        }
    }
}

/// What every role has before it looks at its model.
pub struct Beginning {
    /// The deployment's.
    pub secret: [u8; deployment::SECRET_BYTES],
    /// Made from it.
    pub identity: Identity,
    /// Of the admin listener.
    pub admin_token: Option<AdminToken>,
    /// Where the edge runs.
    pub runtime: Runtime,
    /// Bound first: an address that is taken is known before the model is loaded.
    pub listeners: Listeners,
}

impl Beginning {
    /// As configured.
    ///
    /// # Errors
    /// Files that cannot be read, addresses that are taken, no threads.
    pub fn of(config: &Config) -> Result<Self> {
        let secret = deployment::secret(config.server.secret_file.as_deref())?;
        let identity = Identity::new(secret);
        let admin_token = config.server.admin_token_file.as_deref().map(AdminToken::read).transpose()?;
        let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(edge_threads(config.server.edge_threads, cores))
            .max_blocking_threads(BLOCKING_THREADS_MAX)
            .thread_name("penstock-edge")
            .enable_all()
            .build()
            .context("start the async runtime")?;
        let listeners = {
            let _inside = runtime.enter();
            Listeners::bind(config)?
        };
        Ok(Self { secret, identity, admin_token, runtime, listeners })
    }
}

/// The sets, with the first one chosen.
pub struct Chosen {
    /// The sets.
    pub publication: Publication,
    /// Where their reports come in.
    pub inbox: Inbox,
    /// The policy folder.
    pub folder: Option<Folder>,
    /// What the engine is to start with.
    pub source: PolicySource,
}

impl Chosen {
    /// For a process of so many replicas.
    ///
    /// # Errors
    /// The set that was named cannot serve.
    pub fn first(config: &Config, secret: &[u8], replicas: u32, context_tokens_max: u32) -> Result<Self> {
        let (reports, inbox) = Keeper::inbox();
        let settings = MakerSettings {
            cache_dir: deployment::default_dir("compiled-policies"),
            state_dir: deployment::state_dir(config),
            secret: secret.to_vec(),
            replicas,
            context_tokens_max,
        };
        let publication = Publication::new(&settings, reports);
        // Seen before the first set is chosen: what changes in the folder meanwhile is a change.
        let folder = config.policy.dir.clone().map(Folder::new);
        let source = publication.choose_first(&Wanted::of(config))?;
        Ok(Self { publication, inbox, folder, source })
    }
}

/// The key file's tenants, or an open one.
///
/// # Errors
/// A key file that cannot be used.
pub fn read_tenants(config: &Config, identity: &Identity) -> Result<Tenants> {
    match &config.server.keys {
        None => Ok(Tenants::open(identity)),
        Some(path) => Ok(Tenants::read(path, identity)?),
    }
}

/// What one replica can hold for one sequence: the model's context or the whole pool, whichever is less.
fn longest_sequence(engine: &Engine, config: &Config) -> u32 {
    let pool = u64::from(config.replicas.kv_blocks) * u64::from(config.replicas.block_size_tokens);
    u64::from(engine.geometry().context_tokens_max).min(pool) as u32
}

/// Bound, and not served yet.
pub struct Listeners {
    /// The API's.
    pub api: Listener,
    /// The admin's.
    pub admin: Option<Listener>,
}

impl Listeners {
    fn bind(config: &Config) -> Result<Self> {
        let api = Listener::bind(config.server.listen)?;
        let admin = match config.server.admin_listen {
            AdminListen::Off => None,
            AdminListen::At(address) => Some(Listener::bind(address)?),
            AdminListen::Beside => bind_beside(config.server.listen.port()),
        };
        Ok(Self { api, admin })
    }
}

/// The admin listener that nobody asked for by address. A port that is taken costs it, not the server.
fn bind_beside(api_port: u16) -> Option<Listener> {
    let port = if api_port == 0 { 0 } else { api_port.checked_add(1)? };
    match Listener::bind(SocketAddr::from(([127, 0, 0, 1], port))) {
        Ok(listener) => Some(listener),
        Err(fault) => {
            tracing::warn!(
                port,
                fault = format!("{fault:#}"),
                "no admin listener: name another address with --admin-listen"
            );
            None
        }
    }
}

/// Waits of a connection, as configured.
pub fn timeouts(config: &Config) -> Timeouts {
    let http = &config.http;
    Timeouts {
        headers: Duration::from_millis(http.headers_timeout_ms),
        send: Duration::from_millis(http.send_timeout_ms),
        send_buffer_bytes: http.send_buffer_bytes,
    }
}

/// Most connections of the admin listener.
pub const ADMIN_CONNECTIONS_MAX: usize = 16;

/// Serves until it is asked to stop, then drains.
///
/// # Errors
/// The system does not let it listen for signals.
pub async fn serve(app: Arc<App>, listeners: Listeners, announce: impl FnOnce(&App, &Listeners)) -> Result<()> {
    let mut signals = Signals::new()?;
    let (stop, stopped) = watch::channel(false);
    let http = &app.config.http;
    let timeouts = timeouts(&app.config);
    announce(&app, &listeners);
    let mut serving = tokio::task::JoinSet::new();
    let api = edge::api(Arc::clone(&app));
    serving.spawn(edge::serve(listeners.api, api, http.connections_max, timeouts, stopped.clone()));
    if let Some(listener) = listeners.admin {
        serving.spawn(edge::serve(listener, edge::admin(Arc::clone(&app)), ADMIN_CONNECTIONS_MAX, timeouts, stopped));
    }
    signals.until_stop(&app).await;
    let grace = Duration::from_secs(app.config.server.drain_grace_s);
    let until = Instant::now() + grace;
    drain(&app).await?;
    // Only now does the listener close: while draining, probes and new callers are told so.
    stop.send_replace(true);
    let closing = async { while serving.join_next().await.is_some() {} };
    let left = until.saturating_duration_since(Instant::now()).max(CLOSE_GRACE);
    if tokio::time::timeout(left, closing).await.is_err() {
        tracing::warn!("some connections did not close in time");
    }
    Ok(())
}

fn announce(app: &App, listeners: &Listeners, memory: &Memory, start: Instant) {
    let address = listeners.api.address;
    let admin = listeners.admin.as_ref().map(|listener| listener.address.to_string());
    tracing::info!(
        %address,
        admin = admin.as_deref().unwrap_or("none"),
        model = app.model_name,
        fingerprint = app.engine.namespace().fingerprint(),
        origin = app.model.manifest().origin.as_deref().unwrap_or("this machine"),
        precision = ?app.config.replicas.precision,
        replicas = app.config.replicas.total(),
        kv_blocks = app.config.replicas.kv_blocks,
        kv_dtype = ?app.config.replicas.kv_dtype,
        context_tokens = app.context_tokens_max,
        tenants = app.tenants().len(),
        policies = app.publication.summary(),
        seconds = start.elapsed().as_secs_f32(),
        "ready"
    );
    eprintln!(
        "\nPenstock serves {} on http://{address}\n  decided by: {}\n  memory:\n{memory}\n  try: curl http://{address}/v1/chat/completions -H 'Content-Type: application/json' \\\n    -d '{{\"model\": \"{}\", \"temperature\": 0, \"messages\": [{{\"role\": \"user\", \"content\": \"What is the capital of France?\"}}]}}'\n",
        app.model_name,
        app.publication.summary(),
        app.model_name
    );
}

async fn drain(app: &Arc<App>) -> Result<()> {
    let grace = penstock_base::Duration::from_s(app.config.server.drain_grace_s);
    let draining = Arc::clone(app);
    let report = tokio::task::spawn_blocking(move || draining.engine.drain(grace)).await.context("drain")?;
    tracing::info!(cancelled = report.cancelled, left = report.left, "drained");
    Ok(())
}

struct Signals {
    terminate: Signal,
    interrupt: Signal,
    hangup: Signal,
}

impl Signals {
    fn new() -> Result<Self> {
        let listen = |kind| signal(kind).context("listen for signals");
        Ok(Self {
            terminate: listen(SignalKind::terminate())?,
            interrupt: listen(SignalKind::interrupt())?,
            hangup: listen(SignalKind::hangup())?,
        })
    }

    async fn until_stop(&mut self, app: &App) {
        loop {
            tokio::select! {
                _ = self.terminate.recv() => break,
                _ = self.interrupt.recv() => break,
                _ = self.hangup.recv() => reload(app, app.config.server.keys.as_deref()),
            }
        }
        // Before anything is said: whoever reads the log must find the probe failing already.
        app.engine.begin_drain();
        tracing::info!(grace_s = app.config.server.drain_grace_s, "asked to stop: draining");
    }
}

/// Reads the key file again; a broken one keeps the last good.
fn reload(app: &App, keys: Option<&Path>) {
    let Some(path) = keys else {
        tracing::info!("no key file to read again");
        return;
    };
    match Tenants::read(path, &app.identity) {
        Ok(tenants) => {
            tracing::info!(tenants = tenants.len(), "read the key file again");
            app.replace_tenants(tenants);
        }
        Err(faults) => tracing::error!(%faults, "the key file is broken: the last good one stays in force"),
    }
}

#[cfg(test)]
mod tests {
    use super::edge_threads;

    #[test]
    fn the_edge_takes_two_threads_at_most_unless_told() {
        assert_eq!([1, 2, 96].map(|cores| edge_threads(0, cores)), [1, 2, 2]);
        assert_eq!([1, 96].map(|cores| edge_threads(5, cores)), [5, 5]);
    }
}
