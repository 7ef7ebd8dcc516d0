//! From configuration to what the engine is started with: executors, machine settings, vocabulary.

use std::borrow::Cow;
use std::path::PathBuf;
use std::sync::Arc;

use anyhow::{Context as _, Result, bail, ensure};
use penstock_base::{ClassRank, Duration, limits};
use penstock_engine::{
    DecisionsConfig, EngineConfig, EngineLimits, HandoffSetup, JournalConfig, NixlTransfer, ServedModel, TransferKind,
    TransferSettings, Vocabulary,
};
use penstock_exec::{Executor, Geometry};
use penstock_exec_cpu::{
    CpuExecutor, CpuModel, CpuOptions, Demand, KvDtype, MemoryBudget, Numerics, PackedCache, PackedMode, PackedOutcome,
    Precision, ThreadPool, Tier, packed_places,
};
use penstock_hub::{Said, Settings, Source};
use penstock_model::{Model, OpenOptions, Tokenizer, cache_dir};
use penstock_sched::gateway::{GatewayConfig, HandoffConfig};
use penstock_sched::handoff::{Fallback, LeaseTerms, Timing, Topology};
use penstock_sched::replica::ReplicaConfig;

use crate::config::{self, Config, FallbackTo, Near, PackedCacheMode, WorkerRole};
use crate::memory::{self, Memory, Needs};

/// A model on this disk.
pub struct Located {
    /// A GGUF file or a folder.
    pub path: PathBuf,
    /// What it was fetched from, when it was, pinned to a commit.
    origin: Option<Source>,
}

/// Finds the model, fetching it first when it is one of the hub's.
///
/// # Errors
/// `demo` that was not fetched, and what the hub refuses.
pub fn locate(config: &Config) -> Result<Located> {
    if let Some(source) = Source::parse(&config.model.path) {
        return fetch(&source?);
    }
    if config.model.path != "demo" {
        return Ok(Located { path: PathBuf::from(&config.model.path), origin: None });
    }
    let path = cache_dir::demo_path().context("no home directory: set PENSTOCK_CACHE, or name a model with --model")?;
    ensure!(
        path.exists(),
        "the demo model is not at {}: fetch it with `cargo xtask model`, or name another one with --model",
        path.display()
    );
    Ok(Located { path, origin: None })
}

/// Time between two lines about one file's way here.
const PROGRESS_EVERY: std::time::Duration = std::time::Duration::from_secs(5);

fn fetch(source: &Source) -> Result<Located> {
    let settings = Settings::from_variables(|name| std::env::var_os(name))?;
    tracing::info!(%source, cache = %settings.cache.display(), offline = settings.is_offline, "looking for the model");
    let mut said = std::time::Instant::now();
    let fetched = penstock_hub::fetch(source, &settings, &mut |say| match say {
        Said::Resolved { revision, commit } => {
            tracing::info!(revision, commit, pinned = %source.at(commit), "a branch or tag moves: name the commit to serve the same model again");
        }
        Said::Progress { file, done, all } => {
            if done == all || said.elapsed() >= PROGRESS_EVERY {
                said = std::time::Instant::now();
                tracing::info!(file, mib = done >> 20, of_mib = all >> 20, percent = done * 100 / all.max(1), "fetching");
            }
        }
    })
    .with_context(|| format!("the model {source} cannot be fetched"))?;
    Ok(Located { path: fetched.path, origin: Some(source.at(&fetched.commit)) })
}

/// Opens the model, saying how far the hash is.
///
/// # Errors
/// What the model crate refuses, by name.
pub fn open(located: &Located) -> Result<Model> {
    let mut said = 0;
    let options = OpenOptions { origin: located.origin.as_ref().map(ToString::to_string), ..OpenOptions::default() };
    let model = Model::open(&located.path, &options, &mut |done, all| {
        let percent = done * 100 / all.max(1);
        if percent >= said + 10 {
            said = percent;
            tracing::info!(percent, "hashing the weights (once for each file)");
        }
    });
    model.with_context(|| format!("the model {} cannot be served", located.path.display()))
}

/// Name in the API: configured, else from the repository or the path.
pub fn model_name(config: &Config, located: &Located) -> String {
    let path = &located.path;
    let from_path = || {
        let stem = if path.is_dir() { path.file_name() } else { path.file_stem() };
        stem.map_or_else(|| "model".to_owned(), |stem| stem.to_string_lossy().into_owned())
    };
    match (&config.model.name, &located.origin) {
        (Some(name), _) => name.clone(),
        // A folder of the hub is named by its commit; clients know the repository.
        (None, Some(source)) if source.file.is_none() => source.repository.clone(),
        (None, _) if config.model.path == "demo" => "smollm2-135m-instruct".to_owned(),
        (None, _) => from_path(),
    }
}

/// Sizes of one replica, but for the number of blocks that `0` leaves open.
fn options(config: &Config) -> CpuOptions {
    CpuOptions {
        kv_blocks: config.replicas.kv_blocks,
        block_size_tokens: config.replicas.block_size_tokens,
        slots: config.replicas.slots,
        step_tokens_max: config.replicas.step_tokens,
        context_tokens_max: config.replicas.context_tokens,
        // Whoever names a number gets it at once; a pool as large as fits would take memory that nobody may ever use.
        kv_resident: config.replicas.kv_blocks != 0,
        kv_shared: is_kv_shared(config),
    }
}

/// Does the KV pool lie where other processes of the host can read? Only that of a worker that hands off, where it may.
fn is_kv_shared(config: &Config) -> bool {
    let kinds = &config.transfer.kinds;
    config.cluster.role != WorkerRole::Unified && (kinds.is_empty() || kinds.contains(&config::TransferKind::Memfd))
}

fn threads(config: &Config) -> usize {
    let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    if config.replicas.threads == 0 { cores } else { config.replicas.threads }
}

/// Settles where the memory goes, before any of it is taken.
///
/// # Errors
/// What the kernels do not do, and what does not fit.
pub fn memory(config: &Config, model: &Model) -> Result<Memory> {
    let options = options(config);
    let demand = Demand::of(model, numerics(config)?, threads(config), &options)?;
    let context_tokens_max = demand.context_blocks.saturating_mul(options.block_size_tokens);
    let books = ReplicaConfig { context_tokens_max, ..replica_config(config) }.books();
    let limit = memory::find(config.replicas.memory_bytes);
    let needs = Needs { demand, books, vocabulary: model.tokenizer().vocab_len() };
    let memory = Memory::settle(config, limit, &needs).context("the memory does not suffice")?;
    memory.log();
    Ok(memory)
}

/// One executor a replica, sharing weights and threads.
///
/// # Errors
/// What the kernels do not do, and memory that is not there.
pub fn executors(config: &Config, located: &Located, model: &Model, memory: &Memory) -> Result<Vec<Box<dyn Executor>>> {
    let threads = threads(config);
    let threads = if config.replicas.pin_threads { ThreadPool::pinned(threads) } else { ThreadPool::new(threads) };
    let threads = Arc::new(threads.context("start compute threads (replicas.threads, replicas.pin_threads)")?);
    let budget = MemoryBudget::new(memory.budget_bytes());
    let numerics = numerics(config)?;
    tracing::info!(tier = %numerics.tier, precision = numerics.products(), kv_dtype = %numerics.kv_dtype, threads = threads.threads(), pinned = config.replicas.pin_threads, "loading the weights");
    let source = model.manifest().weights;
    let cache = PackedCache {
        mode: match config.model.packed_cache {
            PackedCacheMode::Copy => PackedMode::Copy,
            PackedCacheMode::Map => PackedMode::Map,
            PackedCacheMode::Off => PackedMode::Off,
        },
        source,
        places: packed_places(&located.path, &source, numerics.precision, cache_dir::packed_dir().as_deref()),
    };
    let start = std::time::Instant::now();
    let (weights, outcome) = CpuModel::load_cached(model, &cache, threads, &budget, numerics)?;
    tell(&outcome, start.elapsed());
    let weights = Arc::new(weights);
    let options = CpuOptions { kv_blocks: memory.ledger.blocks, ..options(config) };
    let mut executors: Vec<Box<dyn Executor>> = Vec::new();
    for replica in 0..config.replicas.total() {
        let executor = CpuExecutor::new(Arc::clone(&weights), &options, &budget).with_context(|| {
            format!(
                "make replica {replica} of {}: fewer --kv-blocks or --replicas need less memory",
                config.replicas.total()
            )
        })?;
        executors.push(Box::new(executor));
    }
    Ok(executors)
}

/// Says where the weights came from. What kept a file from being used or written costs time and nothing else.
fn tell(outcome: &PackedOutcome, took: std::time::Duration) {
    for (path, why) in &outcome.unusable {
        tracing::warn!(path = %path.display(), %why, "a file of packed weights cannot be used");
    }
    for (path, why) in &outcome.unwritable {
        // Beside a model that others own nothing can be written; that is no fault while another place will do.
        if outcome.written.is_some() {
            tracing::debug!(path = %path.display(), %why, "packed weights are not kept here");
        } else {
            tracing::warn!(path = %path.display(), %why, "packed weights are not kept here");
        }
    }
    let is_hit = outcome.read.is_some();
    tracing::info!(%outcome, hit = is_hit, mib = outcome.bytes >> 20, seconds = took.as_secs_f32(), "weights are ready");
}

/// Settings of the engine and its machines.
///
/// # Errors
/// Classes that do not parse (the configuration's check has refused them before).
pub fn engine_config(config: &Config) -> Result<EngineConfig> {
    let ms = Duration::from_ms;
    let mut gateway = GatewayConfig {
        epoch: crate::deployment::next_epoch_or_any(),
        run_seed: config.policy.run_seed,
        queue_requests_max: config.limits.queue_requests_max,
        queue_tokens_max: config.limits.queue_tokens_max,
        queue_wait_max: ms(config.limits.queue_wait_ms),
        starve: ms(config.limits.starve_ms),
        stale_load: ms(config.policy.stale_load_ms),
        stale_cache: ms(config.policy.stale_cache_ms),
        overload_tick: ms(config.policy.overload_tick_ms),
        no_progress: ms(config.limits.no_progress_ms),
        migrations_max: config.limits.migrations_max,
        // More than one: what is this one's is said by lease.
        gateways: if config.cluster.share_quotas { 2 } else { 1 },
        quota_floor_ppm: config.cluster.quota_floor_ppm,
        quota_window: ms(config.limits.quota_window_ms),
        // The full walk is for tests; a live server walks now and then.
        check_every_step: false,
        // As many as a key file may name: an entry that makes room for another forgets what its tenant used.
        tenants_max: limits::TENANTS_MAX,
        flows_max: limits::FLOWS_MAX,
        ..GatewayConfig::default()
    };
    for (name, class) in &config.classes {
        let Some(rank) = name.parse().ok().and_then(ClassRank::new) else { bail!("classes.{name} is not a class") };
        gateway.class_sheddable[rank.index()] = class.sheddable.unwrap_or(gateway.class_sheddable[rank.index()]);
        gateway.class_floor_blocks[rank.index()] = class.floor_blocks;
        gateway.class_slo_ttft[rank.index()] = class.slo_ttft_ms.map_or(Duration::MAX, ms);
    }
    let bounds = EngineLimits {
        requests_max: config.http.requests_max.saturating_mul(2),
        stream_bytes_max: config.http.stream_buffer_bytes,
        send_timeout: ms(config.http.send_timeout_ms),
        ..EngineLimits::default()
    };
    let decisions =
        DecisionsConfig { sample_ppm: config.decisions.sample_ppm, inputs_bytes: config.decisions.inputs_bytes };
    let journal = config.journal.dir.clone().map(|dir| JournalConfig {
        dir,
        segment_bytes: config.journal.segment_bytes,
        total_bytes: config.journal.total_bytes,
        queue_bytes: config.journal.queue_bytes,
        build: crate::journal::own_build(),
    });
    let replica = replica_config(config);
    let handoff = (config.replicas.prefill > 0)
        .then(|| HandoffSetup { prefill: config.replicas.prefill, gateway: handoff_config(config) });
    let kv_events = config.kv_events.settings();
    Ok(EngineConfig {
        gateway,
        replica,
        handoff,
        transfer: transfer_settings(config),
        limits: bounds,
        decisions,
        journal,
        kv_events,
        ..EngineConfig::default()
    })
}

/// How KV gets to other workers.
fn transfer_settings(config: &Config) -> TransferSettings {
    let section = &config.transfer;
    let pairs = |list: &[String]| {
        let pairs = list.iter().filter_map(|text| config::pair(text));
        pairs.map(|(name, value)| (name.to_owned(), value.to_owned())).collect()
    };
    let defaults = TransferSettings::default();
    TransferSettings {
        kinds: section.kinds.iter().map(|kind| kind_of(*kind)).collect(),
        tcp_bind: section.tcp_listen,
        tcp_advertise: section.tcp_advertise,
        memfd_dir: section.memfd_dir.clone().unwrap_or(defaults.memfd_dir),
        nixl: NixlTransfer {
            bind: section.nixl_listen,
            advertise: section.nixl_advertise,
            library_dir: section.nixl_library_dir.clone(),
            plugin: section.nixl_plugin.clone(),
            plugin_parameters: pairs(&section.nixl_parameters),
            environment: pairs(&section.nixl_environment),
        },
    }
}

fn kind_of(kind: config::TransferKind) -> TransferKind {
    match kind {
        config::TransferKind::Memfd => TransferKind::Memfd,
        config::TransferKind::Nixl => TransferKind::Nixl,
        config::TransferKind::Tcp => TransferKind::Tcp,
    }
}

/// When a hand-off is worth it, and how long each part of it may take.
pub fn handoff_config(config: &Config) -> HandoffConfig {
    let ms = Duration::from_ms;
    let section = &config.handoff;
    HandoffConfig {
        timing: Timing {
            repeat: ms(section.repeat_ms),
            reserve: ms(section.reserve_ms),
            open: ms(section.open_ms),
            bootstrap: ms(section.bootstrap_ms),
            waiting: ms(section.waiting_ms),
            transfer: ms(section.transfer_ms),
            settle: ms(section.settle_ms),
        },
        leases: LeaseTerms {
            hold: ms(section.hold_lease_ms),
            write: ms(section.write_lease_ms),
            grace: ms(section.grace_ms),
        },
        transfers: section.transfers_max,
        prefill_tokens_min: config.replicas.handoff_tokens_min,
        topology: match config.cluster.near {
            Near::Any => Topology::Any,
            Near::Preferred => Topology::Preferred,
            Near::Required => Topology::Required,
        },
        fallback: match section.fallback {
            FallbackTo::Sender => Fallback::AtSender,
            FallbackTo::Anew => Fallback::Anew,
            FallbackTo::Never => Fallback::Never,
        },
    }
}

/// A replica machine's settings, but for what it takes from its executor.
fn replica_config(config: &Config) -> ReplicaConfig {
    ReplicaConfig {
        run_seed: config.policy.run_seed,
        blocks: config.replicas.kv_blocks,
        block_size_tokens: config.replicas.block_size_tokens,
        slots: config.replicas.slots,
        step_tokens: config.replicas.step_tokens,
        chunk_tokens: config.replicas.chunk_tokens,
        inflight_max: config.replicas.overlap,
        ready_window: config.replicas.ready_window,
        prefix_cache: config.replicas.prefix_cache,
        // The full walk is for tests; a live server walks now and then.
        check_every_step: false,
        context_tokens_max: u32::MAX,
        ..ReplicaConfig::default()
    }
}

/// Sizes that whoever sends requests to executors of this configuration must know, without one.
///
/// # Errors
/// As [`numerics`].
pub fn geometry(config: &Config, model: &Model) -> Result<Geometry> {
    // Each worker says itself how many blocks it has.
    let options = CpuOptions { kv_blocks: limits::POOL_BLOCKS_MAX, ..options(config) };
    Ok(options.geometry(model.config(), numerics(config)?.kv_dtype))
}

/// How the executors compute.
///
/// # Errors
/// A tier that is not there (the configuration's check has refused it before).
fn numerics(config: &Config) -> Result<Numerics> {
    let replicas = &config.replicas;
    Ok(Numerics {
        tier: Tier::choose(&replicas.cpu_tier).context("replicas.cpu_tier")?,
        precision: match replicas.precision {
            config::Precision::Int15 => Precision::Int15,
            config::Precision::Bf16 => Precision::Bf16,
        },
        kv_dtype: match replicas.kv_dtype {
            config::KvDtype::Bf16 => KvDtype::Bf16,
            config::KvDtype::Int8 => KvDtype::Int8,
        },
    })
}

/// The model as the engine must know it.
///
/// # Errors
/// As [`numerics`].
pub fn served_model(config: &Config, name: String, model: &Model) -> Result<ServedModel> {
    let numerics = numerics(config)?;
    // What the CPU kernels store and how they round on the way there: both are part of the identity of cached blocks.
    let layout = format!("paged-by-head/{}", numerics.products());
    let namespace = model.manifest().namespace(None, numerics.kv_dtype.name(), &layout);
    Ok(ServedModel { name, namespace, vocabulary: Arc::new(Bytes(Arc::clone(model.tokenizer()))) })
}

struct Bytes(Arc<Tokenizer>);

impl Vocabulary for Bytes {
    fn token_bytes(&self, id: u32) -> Cow<'_, [u8]> {
        Cow::Borrowed(self.0.delivered_bytes(id))
    }
}
