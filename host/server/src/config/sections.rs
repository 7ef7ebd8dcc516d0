//! The sections of `penstock.toml` and their defaults.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::str::FromStr;

use clap::ValueEnum;
use serde::{Deserialize, Serialize};

use super::cluster::{ClusterConfig, DiscoveryConfig, HandoffSection, TransferConfig};
use super::kv_events::KvEventsConfig;

/// The whole file. `penstock config` prints the effective one, with every key.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Config {
    /// What is listened on, and how a stop goes.
    pub server: ServerConfig,
    /// Bounds of the HTTP edge.
    pub http: HttpConfig,
    /// Which model.
    pub model: ModelConfig,
    /// How it is computed.
    pub replicas: ReplicasConfig,
    /// Bounds of queue and requests.
    pub limits: LimitsConfig,
    /// Defaults of generation.
    pub generation: GenerationConfig,
    /// How policies are asked.
    pub policy: PolicyConfig,
    /// What is kept of decisions.
    pub decisions: DecisionsConfig,
    /// What is written down of a run.
    pub journal: JournalConfig,
    /// What is told of the prefix cache.
    pub kv_events: KvEventsConfig,
    /// Who this process is among others.
    pub cluster: ClusterConfig,
    /// How workers are found.
    pub discovery: DiscoveryConfig,
    /// Patience of hand-offs.
    pub handoff: HandoffSection,
    /// How KV travels.
    pub transfer: TransferConfig,
    /// Per class rank ("0" .. "7").
    pub classes: BTreeMap<String, ClassConfig>,
    /// What the names in `x-llm-d-inference-objective` mean.
    pub objectives: BTreeMap<String, ObjectiveConfig>,
}

/// What is listened on, and how a stop goes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ServerConfig {
    /// Address of the API. Loopback unless told.
    pub listen: SocketAddr,
    /// Where operators look and change policies.
    pub admin_listen: AdminListen,
    /// File with the bearer token of the admin listener; needed where it is not on loopback.
    pub admin_token_file: Option<PathBuf>,
    /// Key file; without it there is one open tenant.
    pub keys: Option<PathBuf>,
    /// File with the deployment secret that keys tenant ids; made beside the model cache when absent.
    pub secret_file: Option<PathBuf>,
    /// How long streams may finish after SIGTERM.
    pub drain_grace_s: u64,
    /// Threads that answer HTTP; 0 is two, or one on a single core.
    pub edge_threads: usize,
}

/// Where the admin listener is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum AdminListen {
    /// On loopback, one port above the API's.
    #[default]
    Beside,
    /// Nowhere.
    Off,
    /// There.
    At(SocketAddr),
}

impl FromStr for AdminListen {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "auto" => Ok(Self::Beside),
            "off" => Ok(Self::Off),
            _ => text.parse().map(Self::At).map_err(|_| format!("`{text}`: an address with a port, `auto` or `off`")),
        }
    }
}

impl TryFrom<String> for AdminListen {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        text.parse()
    }
}

impl From<AdminListen> for String {
    fn from(listen: AdminListen) -> Self {
        match listen {
            AdminListen::Beside => "auto".to_owned(),
            AdminListen::Off => "off".to_owned(),
            AdminListen::At(address) => address.to_string(),
        }
    }
}

/// Where what decides is kept over a restart.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(from = "String", into = "String")]
pub enum StateDir {
    /// In a folder of the listening address, beside the model cache; nowhere where the port is any free one.
    #[default]
    Auto,
    /// Nowhere.
    Off,
    /// There.
    At(PathBuf),
}

impl From<String> for StateDir {
    fn from(text: String) -> Self {
        match text.as_str() {
            "auto" => Self::Auto,
            "off" => Self::Off,
            _ => Self::At(text.into()),
        }
    }
}

impl FromStr for StateDir {
    type Err = std::convert::Infallible;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        Ok(text.to_owned().into())
    }
}

impl From<StateDir> for String {
    fn from(dir: StateDir) -> Self {
        match dir {
            StateDir::Auto => "auto".to_owned(),
            StateDir::Off => "off".to_owned(),
            StateDir::At(path) => path.to_string_lossy().into_owned(),
        }
    }
}

/// Bounds of the HTTP edge.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct HttpConfig {
    /// Most open connections; further ones wait in the kernel's backlog.
    pub connections_max: usize,
    /// Largest body.
    pub body_bytes_max: usize,
    /// Bodies being read or tokenised, together.
    pub pending_bytes_max: usize,
    /// Requests between headers and end of answer, together.
    pub requests_max: usize,
    /// Time for the headers of one request.
    pub headers_timeout_ms: u64,
    /// Time for the body of one request.
    pub body_timeout_ms: u64,
    /// A client that takes nothing for this long is cut off.
    pub send_timeout_ms: u64,
    /// Send buffer of a connection in the kernel; small, so that a slow reader is noticed.
    pub send_buffer_bytes: usize,
    /// Events of one stream that wait for its client, in bytes.
    pub stream_buffer_bytes: usize,
    /// Time between comments that keep a silent stream open.
    pub heartbeat_ms: u64,
    /// A vLLM-style `priority`, where lower is earlier, is negated.
    pub priority_lower_is_earlier: bool,
}

/// Which model.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ModelConfig {
    /// A GGUF file, a Hugging Face folder, `hf:OWNER/NAME[@REVISION][:FILE.gguf]` of the hub, or `demo`.
    pub path: String,
    /// Name in the API; derived from the path when absent.
    pub name: Option<String>,
    /// What is done with files of packed weights.
    pub packed_cache: PackedCacheMode,
}

/// What is done with files of packed weights, which spare a start the packing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum PackedCacheMode {
    /// They are read into huge pages.
    #[default]
    Copy,
    /// They are mapped, and shared by all processes that do so.
    Map,
    /// There are none: every start packs.
    Off,
}

/// How it is computed.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ReplicasConfig {
    /// Replicas in this process; they share weights and threads.
    pub count: u32,
    /// Instead of `count`: replicas that compute prompts for the ones in `decode`; 0 is that each replica does whole requests.
    pub prefill: u32,
    /// Instead of `count`: replicas that decode what the ones in `prefill` computed.
    pub decode: u32,
    /// Prompts with fewer tokens to compute are computed where they are decoded.
    pub handoff_tokens_min: u32,
    /// Compute threads; 0 is one a core.
    pub threads: usize,
    /// Instruction set of the kernels, by name; `auto` is the fastest of this machine.
    pub cpu_tier: String,
    /// Keep compute threads to a core each.
    pub pin_threads: bool,
    /// Most memory that the process may use; 0 is what the control group or the machine allows.
    pub memory_bytes: u64,
    /// KV blocks of each replica; 0 is as many as fit.
    pub kv_blocks: u32,
    /// Longest sequence, prompt and output together; 0 is the model's context.
    pub context_tokens: u32,
    /// How weights and activations of products are rounded.
    pub precision: Precision,
    /// How keys and values are held.
    pub kv_dtype: KvDtype,
    /// Tokens in a block.
    pub block_size_tokens: u32,
    /// Most sequences in a step.
    pub slots: u32,
    /// Query tokens in a step.
    pub step_tokens: u32,
    /// Prefill tokens of one sequence in a step that also decodes.
    pub chunk_tokens: u32,
    /// Steps in flight: 1 or 2.
    pub overlap: usize,
    /// Requests held ready beside the batch: 0..=2.
    pub ready_window: usize,
    /// Reuse computed prefixes.
    pub prefix_cache: bool,
}

/// How weights and activations of products are rounded.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Precision {
    /// Activations to 15 bits, weights as quantised files hold them: exact sums, equal on every CPU.
    #[default]
    Int15,
    /// Both to bfloat16: two bytes a weight, and sums whose bits depend on the CPU.
    Bf16,
}

impl ReplicasConfig {
    /// Replicas in all.
    pub fn total(&self) -> u32 {
        if self.prefill > 0 { self.prefill.saturating_add(self.decode) } else { self.count }
    }
}

/// How keys and values are held.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum KvDtype {
    /// Two bytes a number.
    #[default]
    Bf16,
    /// One byte a number, and a scale for each head of a token.
    Int8,
}

/// Bounds of queue and requests.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct LimitsConfig {
    /// Most requests in the queue.
    pub queue_requests_max: u32,
    /// Most input tokens in the queue.
    pub queue_tokens_max: u64,
    /// Longest stay in the queue.
    pub queue_wait_ms: u64,
    /// Longest life of a request unless its headers say less.
    pub request_timeout_ms: u64,
    /// After this wait a request is served whatever the policy says.
    pub starve_ms: u64,
    /// Nothing moved for this long although work waits: not ready.
    pub no_progress_ms: u64,
    /// How often a stream may go on at another replica when its own is lost or drains; 0 is never.
    pub migrations_max: u16,
    /// Length of a tenant's quota window.
    pub quota_window_ms: u64,
    /// Prompts in one completions call.
    pub prompts_max: usize,
}

/// Defaults of generation.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct GenerationConfig {
    /// Output cap of a chat answer that names none (or what the context leaves, if less).
    pub chat_output_tokens: u32,
    /// Output cap of a completion that names none.
    pub completion_output_tokens: u32,
}

/// How policies are asked.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct PolicyConfig {
    /// The first set, which must serve: a document (TOML or JSON), `native` or `shipped`. Absent: the folder's, else what was in force when
    /// the last run ended, else the shipped one, else the native defaults.
    pub set: Option<String>,
    /// A folder that is watched: the set in its `policies.toml` or `policies.json` is put in force whenever it changes.
    pub dir: Option<PathBuf>,
    /// The document of the set that ships with the server. Absent: `policies/policies.toml` beside the binary.
    pub shipped: Option<PathBuf>,
    /// Where what decides is kept over a restart.
    pub state_dir: StateDir,
    /// Seed of everything random in the machines; with it a run can be repeated.
    pub run_seed: u64,
    /// Time between two overload questions.
    pub overload_tick_ms: u64,
    /// Age from which a load report is stale.
    pub stale_load_ms: u64,
    /// Age from which the prefix index is stale.
    pub stale_cache_ms: u64,
}

/// What is kept of decisions, in memory.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct DecisionsConfig {
    /// Requests whose questions are kept with everything that the policy was told, in parts of a million.
    pub sample_ppm: u32,
    /// Memory for it, of each machine.
    pub inputs_bytes: usize,
}

/// The journal on disk.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct JournalConfig {
    /// Its folder; none is no journal.
    pub dir: Option<PathBuf>,
    /// A segment that has grown beyond it ends.
    pub segment_bytes: u64,
    /// Most bytes in the folder; the oldest segments leave.
    pub total_bytes: u64,
    /// Most bytes that wait for the writer.
    pub queue_bytes: usize,
}

/// One class.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ClassConfig {
    /// The product allows shedding it; classes 0 to 2 unless told.
    pub sheddable: Option<bool>,
    /// KV blocks kept for it.
    pub floor_blocks: u64,
    /// Target for the first token.
    pub slo_ttft_ms: Option<u64>,
}

/// One named objective.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ObjectiveConfig {
    /// 0..=7.
    pub class: u8,
    /// May be shed.
    #[serde(default)]
    pub sheddable: bool,
    /// Belongs to a batch job.
    #[serde(default)]
    pub batch: bool,
}

impl Default for ServerConfig {
    fn default() -> Self {
        Self {
            listen: SocketAddr::from(([127, 0, 0, 1], 8000)),
            admin_listen: AdminListen::Beside,
            admin_token_file: None,
            keys: None,
            secret_file: None,
            drain_grace_s: 30,
            edge_threads: 0,
        }
    }
}

impl Default for HttpConfig {
    fn default() -> Self {
        Self {
            connections_max: 4_096,
            body_bytes_max: 8 << 20,
            pending_bytes_max: 64 << 20,
            requests_max: 2_048,
            headers_timeout_ms: 10_000,
            body_timeout_ms: 30_000,
            send_timeout_ms: 20_000,
            send_buffer_bytes: 128 << 10,
            stream_buffer_bytes: 256 << 10,
            heartbeat_ms: 15_000,
            priority_lower_is_earlier: false,
        }
    }
}

impl Default for ModelConfig {
    fn default() -> Self {
        Self { path: "demo".to_owned(), name: None, packed_cache: PackedCacheMode::Copy }
    }
}

impl Default for ReplicasConfig {
    fn default() -> Self {
        Self {
            count: 1,
            prefill: 0,
            decode: 0,
            handoff_tokens_min: 256,
            threads: 0,
            cpu_tier: "auto".to_owned(),
            pin_threads: false,
            memory_bytes: 0,
            kv_blocks: 0,
            context_tokens: 0,
            precision: Precision::default(),
            kv_dtype: KvDtype::default(),
            block_size_tokens: 16,
            slots: 64,
            step_tokens: 160,
            chunk_tokens: 160,
            overlap: 2,
            ready_window: 2,
            prefix_cache: true,
        }
    }
}

impl Default for LimitsConfig {
    fn default() -> Self {
        Self {
            queue_requests_max: 1_024,
            queue_tokens_max: 1 << 20,
            queue_wait_ms: 120_000,
            request_timeout_ms: 600_000,
            starve_ms: 30_000,
            no_progress_ms: 30_000,
            migrations_max: 0,
            quota_window_ms: 60_000,
            prompts_max: 32,
        }
    }
}

impl Default for GenerationConfig {
    fn default() -> Self {
        Self { chat_output_tokens: 1_024, completion_output_tokens: 16 }
    }
}

impl Default for DecisionsConfig {
    fn default() -> Self {
        let engine = penstock_engine::DecisionsConfig::default();
        Self { sample_ppm: engine.sample_ppm, inputs_bytes: engine.inputs_bytes }
    }
}

impl Default for JournalConfig {
    fn default() -> Self {
        // Some hours of a busy small server; a second of a very busy one waits for the disk at most.
        Self { dir: None, segment_bytes: 64 << 20, total_bytes: 1 << 30, queue_bytes: 32 << 20 }
    }
}

impl Default for PolicyConfig {
    fn default() -> Self {
        Self {
            set: None,
            dir: None,
            shipped: None,
            state_dir: StateDir::Auto,
            run_seed: 0,
            overload_tick_ms: 100,
            stale_load_ms: 500,
            stale_cache_ms: 2_000,
        }
    }
}
