//! Where does guest code run? One engine a process, with fuel, a backstop in time, and a pool of bounded instances.

use std::fmt;
use std::hash::{Hash, Hasher};
use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use sha2::{Digest as _, Sha256};
use wasmtime::component::Linker;
use wasmtime::{Config, Engine, InstanceAllocationStrategy, PoolingAllocationConfig, Store, WasmFeatures};

use crate::backstop::Ticker;
use crate::bindings::life;
use crate::cache::{Cache, CacheSecret};
use crate::digest::Digest;
use crate::host::{Alive, Host, Notes};
use crate::limits::{
    CORE_INSTANCES_MAX, FAULT_FRAMES_MAX, INSTANCES_DEFAULT, MEMORIES_MAX, MEMORY_BYTES_DEFAULT, STACK_BYTES_MAX,
    STATE_BYTES_DEFAULT, STATE_BYTES_MAX, TABLE_ELEMENTS_MAX,
};

/// What a [`Runtime`] may use.
#[derive(Clone, Debug)]
pub struct RuntimeConfig {
    /// Linear memory of one instance.
    pub memory_bytes_max: usize,
    /// Instances alive at once. Address space is reserved for each, 4 GiB and its guards; memory is not.
    pub instances_max: u32,
    /// Saved state of one instance; at most [`STATE_BYTES_MAX`].
    pub state_bytes_max: usize,
    /// Processor time after which any call ends, however much fuel it has left. Time in which its thread did not run is not the policy's.
    pub backstop: Duration,
    /// Where compiled components are kept, and the secret that vouches for them. None compiles at every start.
    pub cache: Option<(PathBuf, CacheSecret)>,
}

impl Default for RuntimeConfig {
    fn default() -> Self {
        Self {
            memory_bytes_max: MEMORY_BYTES_DEFAULT,
            instances_max: INSTANCES_DEFAULT,
            state_bytes_max: STATE_BYTES_DEFAULT,
            backstop: Duration::from_millis(100),
            cache: None,
        }
    }
}

/// Why there is no runtime.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum RuntimeError {
    /// The engine does not start, e.g. for want of address space.
    #[error("the wasm engine does not start: {0}")]
    Engine(String),
    /// A limit outside its range.
    #[error("{0}")]
    Limit(&'static str),
    /// The directory of compiled components cannot be used.
    #[error("cannot keep compiled components in {path}: {problem}")]
    Cache {
        /// The directory.
        path: PathBuf,
        /// What the system says.
        problem: String,
    },
}

/// Runs components. Cheap to clone; the engine ends with the last clone and the last instance.
#[derive(Clone)]
pub struct Runtime {
    inner: Arc<Inner>,
}

struct Inner {
    engine: Engine,
    linker: Linker<Host>,
    /// Everything that compiled code depends on beside the component.
    config_digest: Digest,
    backstop: Duration,
    memory_bytes_max: usize,
    state_bytes_max: usize,
    cache: Option<Cache>,
    alive: Arc<AtomicUsize>,
    /// Kept for its `Drop`.
    _ticker: Ticker,
}

impl Runtime {
    /// Starts the engine and its ticker.
    pub fn new(config: RuntimeConfig) -> Result<Self, RuntimeError> {
        if config.state_bytes_max > STATE_BYTES_MAX {
            return Err(RuntimeError::Limit("saved state is at most 1 MiB"));
        }
        if config.instances_max == 0 || config.memory_bytes_max > 1 << 32 || config.backstop < Duration::from_millis(4)
        {
            return Err(RuntimeError::Limit(
                "at least one instance, at most 4 GiB of memory, a backstop of at least 4 ms",
            ));
        }
        let said = |error: wasmtime::Error| RuntimeError::Engine(format!("{error:#}"));
        let engine = Engine::new(&engine_config(&config)).map_err(said)?;
        let mut linker = Linker::new(&engine);
        life::host::add_to_linker::<_, wasmtime::component::HasSelf<_>>(&mut linker, |host: &mut Host| host)
            .map_err(said)?;
        let cache = match config.cache {
            None => None,
            Some((path, secret)) => {
                let opened = Cache::open(path.clone(), secret);
                Some(opened.map_err(|error| RuntimeError::Cache { path, problem: error.to_string() })?)
            }
        };
        let ticker =
            Ticker::start(engine.clone(), config.backstop).map_err(|error| RuntimeError::Engine(error.to_string()))?;
        let inner = Inner {
            config_digest: config_digest(&engine),
            engine,
            linker,
            backstop: config.backstop,
            memory_bytes_max: config.memory_bytes_max,
            state_bytes_max: config.state_bytes_max,
            cache,
            alive: Arc::default(),
            _ticker: ticker,
        };
        Ok(Self { inner: Arc::new(inner) })
    }

    /// Instances alive now, in every seat of every machine.
    pub fn instances_alive(&self) -> usize {
        self.inner.alive.load(Ordering::Relaxed)
    }

    pub(crate) fn engine(&self) -> &Engine {
        &self.inner.engine
    }

    pub(crate) fn linker(&self) -> &Linker<Host> {
        &self.inner.linker
    }

    pub(crate) fn config_digest(&self) -> Digest {
        self.inner.config_digest
    }

    pub(crate) fn cache(&self) -> Option<&Cache> {
        self.inner.cache.as_ref()
    }

    pub(crate) fn state_bytes_max(&self) -> usize {
        self.inner.state_bytes_max
    }

    /// A store for one instance, without fuel.
    pub(crate) fn store(&self, notes: Notes) -> Store<Host> {
        let host = Host::new(self.inner.memory_bytes_max, notes, Alive::new(&self.inner.alive));
        let mut store = Store::new(&self.inner.engine, host);
        store.limiter(|host| host);
        let backstop = self.inner.backstop;
        store.epoch_deadline_callback(move |mut store| Ok(store.data_mut().call_time.on_tick(backstop)));
        store
    }
}

impl fmt::Debug for Runtime {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Runtime").field("instances_alive", &self.instances_alive()).finish_non_exhaustive()
    }
}

fn engine_config(limits: &RuntimeConfig) -> Config {
    let mut pool = PoolingAllocationConfig::new();
    pool.total_component_instances(limits.instances_max)
        .total_core_instances(limits.instances_max.saturating_mul(8))
        .total_memories(limits.instances_max.saturating_mul(2))
        .total_tables(limits.instances_max.saturating_mul(4))
        .max_core_instances_per_component(CORE_INSTANCES_MAX)
        .max_memories_per_component(MEMORIES_MAX)
        .max_tables_per_component(MEMORIES_MAX)
        .table_elements(TABLE_ELEMENTS_MAX)
        .max_memory_size(limits.memory_bytes_max)
        // What a compiled policy touches stays mapped for the next instance; beyond it pages go back at once.
        .linear_memory_keep_resident(128 << 10)
        .table_keep_resident(16 << 10);
    let mut config = Config::new();
    config
        .wasm_component_model(true)
        .consume_fuel(true)
        .epoch_interruption(true)
        .concurrency_support(false)
        .max_wasm_stack(STACK_BYTES_MAX)
        .allocation_strategy(InstanceAllocationStrategy::Pooling(pool))
        // Only integers cross the wall, so a NaN's bits decide nothing; the check would cost 2.7 times the call.
        .cranelift_nan_canonicalization(false)
        // The same bits on every machine, and one thread.
        .wasm_relaxed_simd(false)
        .wasm_features(WasmFeatures::THREADS, false)
        .wasm_features(WasmFeatures::MEMORY64, false)
        .generate_address_map(true)
        .wasm_backtrace_max_frames(NonZeroUsize::new(FAULT_FRAMES_MAX + 1));
    config
}

/// Of whatever makes compiled code fit this engine: version, target, flags.
fn config_digest(engine: &Engine) -> Digest {
    struct Collect(Sha256);
    impl Hasher for Collect {
        fn write(&mut self, bytes: &[u8]) {
            self.0.update(bytes);
        }
        fn finish(&self) -> u64 {
            0
        }
    }
    let mut collect = Collect(Sha256::new());
    engine.precompile_compatibility_hash().hash(&mut collect);
    let bytes: [u8; 32] = collect.0.finalize().into();
    Digest::of_pieces(&[b"penstock engine", &bytes])
}
