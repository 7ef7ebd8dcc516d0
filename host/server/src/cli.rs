//! The command line. Flags override `penstock.toml`, which overrides the defaults.

use std::net::SocketAddr;
use std::path::PathBuf;

use clap::{Args, Parser, Subcommand};

use crate::config::{Config, Faults};

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
  penstock serve --keys keys.toml --config penstock.toml

Signals: SIGTERM and SIGINT drain (not ready, no new work, streams finish within the grace), SIGHUP reads the key file again.")]
    Serve(ServeArgs),
    /// Print the effective configuration, with every key and its value, and check it.
    Config(ServeArgs),
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
    /// A GGUF file, a Hugging Face folder (config.json, tokenizer.json, *.safetensors), or `demo` [default: demo].
    #[arg(long, value_name = "PATH")]
    pub model: Option<String>,
    /// Name of the model in the API [default: from the path].
    #[arg(long, value_name = "NAME")]
    pub served_model_name: Option<String>,
    /// Address to listen on [default: 127.0.0.1:8000].
    #[arg(long, value_name = "ADDRESS:PORT")]
    pub listen: Option<SocketAddr>,
    /// Address of the admin listener (effective configuration, replicas); loopback only [default: none].
    #[arg(long, value_name = "ADDRESS:PORT")]
    pub admin_listen: Option<SocketAddr>,
    /// Replicas in this process; they share weights and threads [default: 1].
    #[arg(long, value_name = "N")]
    pub replicas: Option<u32>,
    /// Compute threads [default: one a core].
    #[arg(long, value_name = "N")]
    pub threads: Option<usize>,
    /// KV blocks of each replica, 16 tokens each [default: 2048].
    #[arg(long, value_name = "N")]
    pub kv_blocks: Option<u32>,
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
        set(&mut config.server.listen, args.listen);
        set(&mut config.replicas.count, args.replicas);
        set(&mut config.replicas.threads, args.threads);
        set(&mut config.replicas.kv_blocks, args.kv_blocks);
        set(&mut config.replicas.overlap, args.overlap);
        set(&mut config.server.drain_grace_s, args.drain_grace);
        config.model.name = args.served_model_name.or(config.model.name);
        config.server.admin_listen = args.admin_listen.or(config.server.admin_listen);
        config.server.keys = args.keys.or(config.server.keys);
        config.name_all_classes();
        faults.extend(config.check());
        if faults.is_empty() { Ok(config) } else { Err(faults) }
    }
}

fn set<T>(value: &mut T, flag: Option<T>) {
    if let Some(flag) = flag {
        *value = flag;
    }
}
