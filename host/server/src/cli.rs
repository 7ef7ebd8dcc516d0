//! The command line. Flags override `penstock.toml`, which overrides the defaults.

use std::net::SocketAddr;
use std::path::PathBuf;

use clap::{Args, Parser, Subcommand};

use crate::bench::BenchArgs;
use crate::config::{AdminListen, Config, Faults, KvDtype, PackedCacheMode, Precision, StateDir};
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
    /// Print the effective configuration, with every key and its value, and check it.
    Config(ServeArgs),
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

/// Flags of `serve` and `config`.
#[derive(Clone, Debug, Default, Args)]
pub struct ServeArgs {
    /// Configuration file.
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// A GGUF file, a Hugging Face folder, `hf:OWNER/NAME[@REVISION][:FILE.gguf]` of the hub, or `demo` [default: demo].
    #[arg(long, value_name = "PATH")]
    pub model: Option<String>,
    /// Name of the model in the API [default: from the path].
    #[arg(long, value_name = "NAME")]
    pub served_model_name: Option<String>,
    /// Packed weights of earlier starts: read into huge pages (copy), mapped and shared among processes (map), or neither read nor written (off) [default: copy].
    #[arg(long, value_name = "MODE", value_enum, hide_possible_values = true)]
    pub packed_cache: Option<PackedCacheMode>,
    /// Address to listen on [default: 127.0.0.1:8000].
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
    /// Replicas in this process; they share weights and threads [default: 1].
    #[arg(long, value_name = "N")]
    pub replicas: Option<u32>,
    /// Replicas that compute prompts, and hand what they have computed to the ones of --decode [default: none].
    #[arg(long, value_name = "N", requires = "decode", conflicts_with = "replicas")]
    pub prefill: Option<u32>,
    /// Replicas that decode what the ones of --prefill computed [default: none].
    #[arg(long, value_name = "N", requires = "prefill", conflicts_with = "replicas")]
    pub decode: Option<u32>,
    /// Compute threads [default: one a core].
    #[arg(long, value_name = "N")]
    pub threads: Option<usize>,
    /// Instruction set of the kernels; all give the same tokens, but for --precision bf16 [default: $PENSTOCK_CPU_TIER, else the fastest of this machine].
    #[arg(long, value_name = "NAME")]
    pub cpu_tier: Option<String>,
    /// Keep each compute thread to a core of its own; there must be as many cores as threads [default: threads move freely].
    #[arg(long)]
    pub pin_threads: bool,
    /// KV blocks of each replica, 16 tokens each; 0 is as many as fit [default: 0].
    #[arg(long, value_name = "N")]
    pub kv_blocks: Option<u32>,
    /// Most memory that the process may use; 0 is what the control group or the machine allows [default: 0].
    #[arg(long, value_name = "BYTES")]
    pub memory_bytes: Option<u64>,
    /// Longest sequence, prompt and output together; 0 is the model's context [default: 0].
    #[arg(long, value_name = "N")]
    pub context_tokens: Option<u32>,
    /// How weights and activations of products are rounded: bf16 takes two bytes a weight, and its answers depend on the kind of CPU [default: int15].
    #[arg(long, value_name = "PRECISION")]
    pub precision: Option<Precision>,
    /// How keys and values are held: int8 takes about half the memory, so that twice the blocks fit, and changes answers a little [default: bf16].
    #[arg(long, value_name = "DTYPE")]
    pub kv_dtype: Option<KvDtype>,
    /// Key file that maps API keys to tenants [default: one open tenant].
    #[arg(long, value_name = "FILE")]
    pub keys: Option<PathBuf>,
    /// Steps in flight: 1 or 2 [default: 2].
    #[arg(long, value_name = "N")]
    pub overlap: Option<usize>,
    /// How long streams may finish after SIGTERM [default: 30].
    #[arg(long, value_name = "SECONDS")]
    pub drain_grace: Option<u64>,
}

impl ServeArgs {
    /// File, then flags.
    ///
    /// # Errors
    /// Every fault of both.
    pub fn effective(&self) -> Result<Config, Faults> {
        let (mut config, mut faults) = crate::config::read(self.config.as_deref());
        let args = self.clone();
        set(&mut config.model.path, args.model);
        set(&mut config.model.packed_cache, args.packed_cache);
        config.replicas.pin_threads |= args.pin_threads;
        set(&mut config.server.listen, args.listen);
        set(&mut config.replicas.count, args.replicas);
        set(&mut config.replicas.prefill, args.prefill);
        set(&mut config.replicas.decode, args.decode);
        set(&mut config.replicas.threads, args.threads);
        set(&mut config.replicas.cpu_tier, args.cpu_tier.or_else(tier_of_environment));
        set(&mut config.replicas.kv_blocks, args.kv_blocks);
        set(&mut config.replicas.memory_bytes, args.memory_bytes);
        set(&mut config.replicas.context_tokens, args.context_tokens);
        set(&mut config.replicas.precision, args.precision);
        set(&mut config.replicas.kv_dtype, args.kv_dtype);
        set(&mut config.replicas.overlap, args.overlap);
        set(&mut config.server.drain_grace_s, args.drain_grace);
        config.model.name = args.served_model_name.or(config.model.name);
        set(&mut config.server.admin_listen, args.admin_listen);
        config.server.admin_token_file = args.admin_token_file.or(config.server.admin_token_file);
        config.policy.set = args.policies.or(config.policy.set);
        config.policy.dir = args.policy_dir.or(config.policy.dir);
        set(&mut config.policy.state_dir, args.state_dir);
        config.journal.dir = args.journal.or(config.journal.dir);
        config.server.keys = args.keys.or(config.server.keys);
        config.name_all_classes();
        faults.extend(config.check());
        if faults.is_empty() { Ok(config) } else { Err(faults) }
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
