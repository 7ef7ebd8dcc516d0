//! The command line. Flags override `penstock.toml`, which overrides the defaults.

use std::net::SocketAddr;
use std::path::PathBuf;

use clap::{Args, Parser, Subcommand};

use crate::bench::BenchArgs;
use crate::config::{
    AdminListen, Config, DiscoveryAt, Faults, Job, KvDtype, PackedCacheMode, Precision, StateDir, WorkerRole,
};
use crate::journal::VerifyArgs;
use crate::policies::command::PolicyArgs;

/// Serves language models over an OpenAI-style HTTP API.
#[derive(Debug, Parser)]
#[command(name = "penstock", version, about)]
pub struct Cli {
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// What to do.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Load a model and answer the HTTP API until SIGTERM.
    #[command(after_help = "\
Examples:
  penstock serve                                   the demo model on http://127.0.0.1:8000
  penstock serve --model model.gguf --threads 8    another model
  penstock serve --replicas 2 --kv-blocks 4096     two replicas sharing weights and threads
  penstock serve --prefill 1 --decode 1            one computes prompts, the other decodes
  penstock serve --keys keys.toml --config penstock.toml

Signals: SIGTERM and SIGINT drain (not ready, no new work, streams finish within the grace), SIGHUP reads the key file again.")]
    Serve(ServeArgs),
    /// Answer the HTTP API before workers that compute: in a cluster, one or several gateways and any number of workers.
    #[command(after_help = "\
Examples:
  penstock gateway --worker 127.0.0.1:8200 --worker 127.0.0.1:8201     two workers, named one by one
  penstock gateway --discovery folder:/mnt/penstock --token-file token workers that make themselves known in a folder
  penstock gateway --discovery etcd:http://10.0.0.1:2379 --token-file token
  penstock gateway --config penstock.toml                              everything else as for serve

It opens the model for its tokenizer and its identity, and loads no weights. Workers of another model, precision or block size are refused.

Signals: SIGTERM and SIGINT drain (not ready, no new work, streams finish within the grace), SIGHUP reads the key file again.")]
    Gateway(GatewayArgs),
    /// Compute for gateways: one replica, which makes itself known and waits to be called.
    #[command(after_help = "\
Examples:
  penstock worker                                                      whole requests, for gateways on this machine
  penstock worker --role prefill --discovery etcd:http://10.0.0.1:2379 --token-file token \\
      --control-listen 0.0.0.0:8200 --control-advertise worker-1:8200 --listen 0.0.0.0:8000
  penstock worker --role decode --control-listen 127.0.0.1:8201 --listen 127.0.0.1:8010
  penstock worker --label zone=a --label host=worker-1                 where it stands, for hand-offs that should stay near

Its HTTP listener has /live, /health and /metrics; its admin listener is that of serve.

Signals: SIGTERM and SIGINT drain in order (known as draining, no new work, running work finishes within the grace, computed prompts are
fetched, sessions close, the registration goes); a second one ends the process at once.")]
    Worker(WorkerArgs),
    /// Print the effective configuration, with every key and its value, and check it.
    Config(ConfigArgs),
    /// Load, activate, roll back, list and explain the policies of a running server.
    #[command(after_help = "\
Examples:
  penstock policy list                          what decides now, and what happened lately
  penstock policy load my-routing.wasm          hand over a component; prints its digest
  penstock policy activate policies.toml        put a set in force, with the components that it names as file:NAME.wasm
  penstock policy rollback                      return to the set before
  penstock policy log -n 50 --question routing  the last decisions
  penstock policy log --inputs 17               everything that the policy of decision 17 was told
  penstock policy explain chatcmpl-0001…        the story of one request")]
    Policy(PolicyArgs),
    /// Measure a server that speaks the OpenAI API: this one or any other.
    #[command(after_help = "\
Examples:
  penstock bench                                          16 streams against http://127.0.0.1:8000
  penstock bench --streams 1 --requests 8                 one caller: how fast is a single answer?
  penstock bench --rate 4 --requests 240                  Poisson arrivals, 4 a second
  penstock bench --shared-words 400 --prompt-words 32     a long beginning that all share
  penstock bench --rate 4 --slo-ttft-ms 500 --slo-tpot-ms 50 --save results
  penstock bench --url http://127.0.0.1:9000 --seed 7     another server, the same prompts

Times are those of vLLM's benchmark: TTFT from sending to the first text, TPOT = (last - first) / (tokens - 1). Tokens are what the
server counts; where it does not say, an event with text is one. The client runs on one thread and says by how much it sent late.")]
    Bench(BenchArgs),
    /// Replay a journal and see that everything in it comes out again.
    #[command(after_help = "\
Examples:
  penstock verify journal/                              every segment of a folder
  penstock verify journal/ --components my-policies/    ask these policies again, where the journal names them

Exit status: 0 everything holds (segments that are broken off are named, and hold as far as they go), 1 nothing to verify,
3 a segment is damaged, 4 something is decided differently.")]
    Verify(VerifyArgs),
    /// Print a reference page.
    Describe {
        /// Which one.
        #[arg(value_enum)]
        what: Page,
    },
}

/// A reference page made from the tables in the program.
#[derive(Clone, Copy, Debug, clap::ValueEnum)]
pub enum Page {
    /// Every metric: name, kind, labels, meaning.
    Metrics,
}

/// Flags that every role has.
#[derive(Clone, Debug, Default, Args)]
pub struct SharedArgs {
    /// Configuration file.
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// A GGUF file, a Hugging Face folder, `hf:OWNER/NAME[@REVISION][:FILE.gguf]` of the hub, or `demo` [default: demo].
    #[arg(long, value_name = "PATH")]
    pub model: Option<String>,
    /// Name of the model in the API [default: from the path].
    #[arg(long, value_name = "NAME")]
    pub served_model_name: Option<String>,
    /// Address to listen on; a worker has its probes and metrics there [default: 127.0.0.1:8000].
    #[arg(long, value_name = "ADDRESS:PORT")]
    pub listen: Option<SocketAddr>,
    /// Address of the admin listener (configuration, replicas, policies), or `off` [default: loopback, one port above the API's].
    #[arg(long, value_name = "ADDRESS:PORT")]
    pub admin_listen: Option<AdminListen>,
    /// File with the bearer token that the admin listener wants; needed where it is not on loopback [default: none].
    #[arg(long, value_name = "FILE")]
    pub admin_token_file: Option<PathBuf>,
    /// First policy set: a document (TOML or JSON), `native` or `shipped`; it must serve. Unless named: that of --policy-dir, else what was in force when the last run ended, else the shipped set, else the native defaults.
    #[arg(long, value_name = "FILE")]
    pub policies: Option<String>,
    /// Folder that is watched: the set in its policies.toml or policies.json is put in force whenever it changes [default: none].
    #[arg(long, value_name = "DIR")]
    pub policy_dir: Option<PathBuf>,
    /// Folder where what decides is kept over a restart, or `off` [default: one for each listening address, beside the model cache].
    #[arg(long, value_name = "DIR")]
    pub state_dir: Option<StateDir>,
    /// Folder for the journal: what the machines did, to be replayed and verified [default: none].
    #[arg(long, value_name = "DIR")]
    pub journal: Option<PathBuf>,
    /// Instruction set of the kernels; all give the same tokens, but for --precision bf16 [default: $PENSTOCK_CPU_TIER, else the fastest of this machine].
    #[arg(long, value_name = "NAME")]
    pub cpu_tier: Option<String>,
    /// Longest sequence, prompt and output together; 0 is the model's context [default: 0].
    #[arg(long, value_name = "N")]
    pub context_tokens: Option<u32>,
    /// How weights and activations of products are rounded: bf16 takes two bytes a weight, and its answers depend on the kind of CPU [default: int15].
    #[arg(long, value_name = "PRECISION")]
    pub precision: Option<Precision>,
    /// How keys and values are held: int8 takes about half the memory, so that twice the blocks fit, and changes answers a little [default: bf16].
    #[arg(long, value_name = "DTYPE")]
    pub kv_dtype: Option<KvDtype>,
    /// How long streams may finish after SIGTERM [default: 30].
    #[arg(long, value_name = "SECONDS")]
    pub drain_grace: Option<u64>,
}

/// Flags of whoever computes.
#[derive(Clone, Debug, Default, Args)]
pub struct ComputeArgs {
    /// Packed weights of earlier starts: read into huge pages (copy), mapped and shared among processes (map), or neither read nor written (off) [default: copy].
    #[arg(long, value_name = "MODE", value_enum, hide_possible_values = true)]
    pub packed_cache: Option<PackedCacheMode>,
    /// Compute threads [default: one a core].
    #[arg(long, value_name = "N")]
    pub threads: Option<usize>,
    /// Keep each compute thread to a core of its own; there must be as many cores as threads [default: threads move freely].
    #[arg(long)]
    pub pin_threads: bool,
    /// KV blocks of each replica, 16 tokens each; 0 is as many as fit [default: 0].
    #[arg(long, value_name = "N")]
    pub kv_blocks: Option<u32>,
    /// Most memory that the process may use; 0 is what the control group or the machine allows [default: 0].
    #[arg(long, value_name = "BYTES")]
    pub memory_bytes: Option<u64>,
    /// Steps in flight: 1 or 2 [default: 2].
    #[arg(long, value_name = "N")]
    pub overlap: Option<usize>,
}

/// Flags of whoever has clients.
#[derive(Clone, Debug, Default, Args)]
pub struct EdgeArgs {
    /// Key file that maps API keys to tenants [default: one open tenant].
    #[arg(long, value_name = "FILE")]
    pub keys: Option<PathBuf>,
}

/// Flags of gateways and workers.
#[derive(Clone, Debug, Default, Args)]
pub struct ClusterArgs {
    /// Name of this process in the cluster, the same over restarts [default: host and port; in Kubernetes the pod's].
    #[arg(long, value_name = "NAME")]
    pub name: Option<String>,
    /// Where workers make themselves known: memory, folder:PATH, etcd:http://HOST:PORT,.. or kubernetes [default: memory, which is nowhere].
    #[arg(long, value_name = "WHERE")]
    pub discovery: Option<DiscoveryAt>,
    /// File with the token that gateways and workers show each other; needed away from loopback [default: none].
    #[arg(long, value_name = "FILE")]
    pub token_file: Option<PathBuf>,
    /// Where this process stands, for hand-offs that should stay near; may be repeated [default: none].
    #[arg(long, value_name = "NAME=VALUE")]
    pub label: Vec<String>,
}

/// Flags of `serve`.
#[derive(Clone, Debug, Default, Args)]
pub struct ServeArgs {
    #[command(flatten)]
    shared: SharedArgs,
    #[command(flatten)]
    compute: ComputeArgs,
    #[command(flatten)]
    edge: EdgeArgs,
    /// Replicas in this process; they share weights and threads [default: 1].
    #[arg(long, value_name = "N")]
    replicas: Option<u32>,
    /// Replicas that compute prompts, and hand what they have computed to the ones of --decode [default: none].
    #[arg(long, value_name = "N", requires = "decode", conflicts_with = "replicas")]
    prefill: Option<u32>,
    /// Replicas that decode what the ones of --prefill computed [default: none].
    #[arg(long, value_name = "N", requires = "prefill", conflicts_with = "replicas")]
    decode: Option<u32>,
}

/// Flags of `gateway`.
#[derive(Clone, Debug, Default, Args)]
pub struct GatewayArgs {
    #[command(flatten)]
    shared: SharedArgs,
    #[command(flatten)]
    edge: EdgeArgs,
    #[command(flatten)]
    cluster: ClusterArgs,
    /// A worker's control address, for one that is not found by discovery; may be repeated [default: none].
    #[arg(long, value_name = "HOST:PORT")]
    worker: Vec<String>,
}

/// Flags of `worker`.
#[derive(Clone, Debug, Default, Args)]
pub struct WorkerArgs {
    #[command(flatten)]
    shared: SharedArgs,
    #[command(flatten)]
    compute: ComputeArgs,
    #[command(flatten)]
    cluster: ClusterArgs,
    #[command(flatten)]
    place: WorkerPlaceArgs,
}

/// What a worker is and where gateways reach it.
#[derive(Clone, Debug, Default, Args)]
pub struct WorkerPlaceArgs {
    /// What it does: whole requests, prompts for others, or decoding what others prefilled [default: unified].
    #[arg(long, value_name = "ROLE", value_enum)]
    role: Option<WorkerRole>,
    /// Where it listens for gateways; away from loopback it needs --token-file [default: 127.0.0.1:8200].
    #[arg(long, value_name = "ADDRESS:PORT")]
    control_listen: Option<SocketAddr>,
    /// Address by which gateways reach it [default: where it listens].
    #[arg(long, value_name = "HOST:PORT")]
    control_advertise: Option<String>,
}

/// Flags of `config`: those of every role.
#[derive(Clone, Debug, Default, Args)]
pub struct ConfigArgs {
    #[command(flatten)]
    serve: ServeArgs,
    #[command(flatten)]
    cluster: ClusterArgs,
    #[command(flatten)]
    place: WorkerPlaceArgs,
    /// A worker's control address; may be repeated [default: none].
    #[arg(long, value_name = "HOST:PORT")]
    worker: Vec<String>,
    /// Check it for this role as well [default: serve].
    #[arg(long = "for", value_name = "ROLE", value_enum)]
    job: Option<Job>,
}

/// Flags that end up in a configuration.
pub trait Configures {
    /// The file, then the flags, then the checks.
    ///
    /// # Errors
    /// Every fault of all three.
    fn effective(&self) -> Result<Config, Faults>;
}

fn settle(shared: &SharedArgs, job: Job, flags: impl FnOnce(&mut Config)) -> Result<Config, Faults> {
    let (mut config, mut faults) = crate::config::read(shared.config.as_deref());
    shared.clone().put(&mut config);
    flags(&mut config);
    config.name_all_classes();
    faults.extend(config.check());
    faults.extend(config.check_as(job));
    if faults.is_empty() { Ok(config) } else { Err(faults) }
}

impl Configures for ServeArgs {
    fn effective(&self) -> Result<Config, Faults> {
        settle(&self.shared, Job::Serve, |config| self.clone().put(config))
    }
}

impl Configures for GatewayArgs {
    fn effective(&self) -> Result<Config, Faults> {
        let Self { shared, edge, cluster, worker } = self.clone();
        settle(&shared, Job::Gateway, |config| {
            edge.put(config);
            cluster.put(config);
            set_list(&mut config.cluster.workers, worker);
        })
    }
}

impl Configures for WorkerArgs {
    fn effective(&self) -> Result<Config, Faults> {
        let Self { shared, compute, cluster, place } = self.clone();
        settle(&shared, Job::Worker, |config| {
            compute.put(config);
            cluster.put(config);
            place.put(config);
        })
    }
}

impl Configures for ConfigArgs {
    fn effective(&self) -> Result<Config, Faults> {
        let Self { serve, cluster, place, worker, job } = self.clone();
        settle(&serve.shared.clone(), job.unwrap_or(Job::Serve), |config| {
            serve.put(config);
            cluster.put(config);
            place.put(config);
            set_list(&mut config.cluster.workers, worker);
        })
    }
}

impl SharedArgs {
    fn put(self, config: &mut Config) {
        set(&mut config.model.path, self.model);
        config.model.name = self.served_model_name.or(config.model.name.take());
        set(&mut config.server.listen, self.listen);
        set(&mut config.server.admin_listen, self.admin_listen);
        set_some(&mut config.server.admin_token_file, self.admin_token_file);
        set(&mut config.server.drain_grace_s, self.drain_grace);
        set_some(&mut config.policy.set, self.policies);
        set_some(&mut config.policy.dir, self.policy_dir);
        set(&mut config.policy.state_dir, self.state_dir);
        set_some(&mut config.journal.dir, self.journal);
        set(&mut config.replicas.cpu_tier, self.cpu_tier.or_else(tier_of_environment));
        set(&mut config.replicas.context_tokens, self.context_tokens);
        set(&mut config.replicas.precision, self.precision);
        set(&mut config.replicas.kv_dtype, self.kv_dtype);
    }
}

impl ComputeArgs {
    fn put(self, config: &mut Config) {
        set(&mut config.model.packed_cache, self.packed_cache);
        set(&mut config.replicas.threads, self.threads);
        config.replicas.pin_threads |= self.pin_threads;
        set(&mut config.replicas.kv_blocks, self.kv_blocks);
        set(&mut config.replicas.memory_bytes, self.memory_bytes);
        set(&mut config.replicas.overlap, self.overlap);
    }
}

impl EdgeArgs {
    fn put(self, config: &mut Config) {
        set_some(&mut config.server.keys, self.keys);
    }
}

impl ServeArgs {
    fn put(self, config: &mut Config) {
        self.compute.put(config);
        self.edge.put(config);
        set(&mut config.replicas.count, self.replicas);
        set(&mut config.replicas.prefill, self.prefill);
        set(&mut config.replicas.decode, self.decode);
    }
}

impl ClusterArgs {
    fn put(self, config: &mut Config) {
        let cluster = &mut config.cluster;
        set_some(&mut cluster.name, self.name);
        set(&mut cluster.discovery, self.discovery);
        set_some(&mut cluster.token_file, self.token_file);
        set_list(&mut cluster.labels, self.label);
    }
}

impl WorkerPlaceArgs {
    fn put(self, config: &mut Config) {
        let cluster = &mut config.cluster;
        set(&mut cluster.role, self.role);
        set(&mut cluster.control_listen, self.control_listen);
        set_some(&mut cluster.control_advertise, self.control_advertise);
    }
}

/// The variable, unless it is empty. What is no text is refused later, as a name that no tier has.
fn tier_of_environment() -> Option<String> {
    let name = std::env::var_os("PENSTOCK_CPU_TIER").filter(|name| !name.is_empty())?;
    Some(name.to_string_lossy().into_owned())
}

fn set<T>(value: &mut T, flag: Option<T>) {
    if let Some(flag) = flag {
        *value = flag;
    }
}

fn set_some<T>(value: &mut Option<T>, flag: Option<T>) {
    if flag.is_some() {
        *value = flag;
    }
}

/// A list on the command line takes the place of the file's.
fn set_list<T>(value: &mut Vec<T>, flags: Vec<T>) {
    if !flags.is_empty() {
        *value = flags;
    }
}
