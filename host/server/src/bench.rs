//! `penstock bench`: measures any OpenAI-compatible server from the chair of its clients.

use std::io::IsTerminal as _;
use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::{Context as _, Result, bail};
use clap::{Args, ValueEnum};
use penstock_bench::{Endpoint, Load, Objectives, Plan, Progress, Prompts, Synthetic};

/// Flags of `bench`.
#[derive(Clone, Debug, Args)]
pub struct BenchArgs {
    /// The server, with or without /v1.
    #[arg(long, value_name = "URL", default_value = "http://127.0.0.1:8000")]
    url: String,
    /// Name of the model [default: the first that the server names].
    #[arg(long, value_name = "NAME")]
    model: Option<String>,
    /// Which API.
    #[arg(long, value_enum, default_value_t = Api::Completions)]
    endpoint: Api,
    /// Closed loop: streams at once, each sending its next request when the last has ended. With --rate: most requests in flight [default there: 1024].
    #[arg(long, value_name = "N")]
    streams: Option<NonZeroUsize>,
    /// Open loop instead: Poisson arrivals, so many a second on average, whatever the server does.
    #[arg(long, value_name = "PER_SECOND")]
    rate: Option<f64>,
    /// Requests that are measured [default: three a stream, or 60 seconds of arrivals].
    #[arg(long, value_name = "N")]
    requests: Option<usize>,
    /// Requests before them that are not measured.
    #[arg(long, value_name = "N", default_value_t = 1)]
    warmup: usize,
    /// Words of each prompt that no other request has. A word is one or two tokens.
    #[arg(long, value_name = "N", default_value_t = 96)]
    prompt_words: usize,
    /// Words at the start of each prompt that the requests of a group share.
    #[arg(long, value_name = "N", default_value_t = 0)]
    shared_words: usize,
    /// Groups of shared beginnings.
    #[arg(long, value_name = "N", default_value = "1")]
    groups: NonZeroUsize,
    /// Prompts from a file instead: a JSON object a line, with `prompt` or `messages`, and optionally `max_tokens`.
    #[arg(long, value_name = "FILE", conflicts_with_all = ["prompt_words", "shared_words", "groups"])]
    prompts: Option<PathBuf>,
    /// Tokens to answer with.
    #[arg(long, value_name = "N", default_value_t = 64)]
    output_tokens: u32,
    /// Let an answer end where the model ends it, instead of at --output-tokens.
    #[arg(long)]
    allow_eos: bool,
    /// A good answer begins within so many milliseconds; goodput counts only good ones.
    #[arg(long, value_name = "MS")]
    slo_ttft_ms: Option<f64>,
    /// A good answer goes on with so many milliseconds a token at most.
    #[arg(long, value_name = "MS")]
    slo_tpot_ms: Option<f64>,
    /// Prompts and arrivals follow from it [default: a fresh one each run, so that no cache knows the prompts].
    #[arg(long, value_name = "N")]
    seed: Option<u64>,
    /// Longest that one request may take.
    #[arg(long, value_name = "SECONDS", default_value_t = 600)]
    timeout: u64,
    /// API key.
    #[arg(long, value_name = "KEY", env = "OPENAI_API_KEY", hide_env_values = true)]
    api_key: Option<String>,
    /// Header to send with each request, as NAME:VALUE; may be repeated.
    #[arg(long, value_name = "NAME:VALUE", value_parser = header)]
    header: Vec<(String, String)>,
    /// Keep requests.jsonl and summary.json in this folder.
    #[arg(long, value_name = "DIR")]
    save: Option<PathBuf>,
    /// Print the summary as JSON instead of a table.
    #[arg(long)]
    json: bool,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum Api {
    /// /v1/completions.
    Completions,
    /// /v1/chat/completions.
    Chat,
}

/// Streams of a closed loop that names none.
const STREAMS: usize = 16;
/// Requests in flight of an open loop that names no limit.
const IN_FLIGHT_MAX: usize = 1_024;

/// Runs, prints, keeps. Fails when nothing was answered.
pub fn run(args: &BenchArgs) -> Result<()> {
    let plan = args.plan();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().context("start the client")?;
    let is_terminal = std::io::stderr().is_terminal();
    let stop = async {
        // Without a handler there is only the other way to end: the run's own end.
        if tokio::signal::ctrl_c().await.is_err() {
            std::future::pending::<()>().await;
        }
    };
    eprintln!("measuring {} (seed {}); Ctrl-C ends early and keeps what was measured", plan.url, plan.seed);
    let (summary, records) =
        runtime.block_on(penstock_bench::run(&plan, stop, |progress| tell(progress, is_terminal)))?;
    if is_terminal {
        eprintln!();
    }
    if args.json {
        println!("{}", serde_json::to_string_pretty(&summary)?);
    } else {
        print!("{}", penstock_bench::table(&summary));
    }
    if let Some(folder) = &args.save {
        penstock_bench::save(folder, &summary, &records)?;
        eprintln!("kept in {}", folder.display());
    }
    if summary.completed == 0 {
        let first = records.iter().find_map(|record| record.message.as_deref());
        bail!(
            "no request was answered{}",
            first.map(|message| format!("; the first fault: {message}")).unwrap_or_default()
        );
    }
    Ok(())
}

fn tell(progress: Progress, is_terminal: bool) {
    let Progress { elapsed, ended, failed, in_flight, requests, output_tokens } = progress;
    let seconds = elapsed.as_secs();
    let line = format!(
        "{seconds:>4} s  {ended}/{requests} ended, {failed} failed, {in_flight} in flight, {output_tokens} tokens"
    );
    if is_terminal {
        eprint!("\r{line}   ");
    } else if seconds > 0 && seconds.is_multiple_of(10) {
        eprintln!("{line}");
    }
}

impl BenchArgs {
    fn plan(&self) -> Plan {
        let count = |value| NonZeroUsize::new(value).expect("a constant above 0");
        let load = match self.rate {
            None => Load::Closed { streams: self.streams.unwrap_or(count(STREAMS)) },
            Some(per_second) => Load::Open { per_second, in_flight_max: self.streams.unwrap_or(count(IN_FLIGHT_MAX)) },
        };
        let requests = self.requests.unwrap_or(match load {
            Load::Closed { streams } => streams.get().saturating_mul(3),
            Load::Open { per_second, .. } => (per_second * 60.0).ceil().max(1.0) as usize,
        });
        let synthetic =
            Synthetic { own_words: self.prompt_words, shared_words: self.shared_words, groups: self.groups };
        Plan {
            url: self.url.clone(),
            model: self.model.clone(),
            endpoint: match self.endpoint {
                Api::Completions => Endpoint::Completions,
                Api::Chat => Endpoint::Chat,
            },
            load,
            requests,
            warmup_requests: self.warmup,
            prompts: self.prompts.clone().map_or(Prompts::Synthetic(synthetic), Prompts::File),
            output_tokens: self.output_tokens,
            ignore_eos: !self.allow_eos,
            objectives: Objectives { ttft_ms: self.slo_ttft_ms, tpot_ms: self.slo_tpot_ms },
            seed: self.seed.unwrap_or_else(fresh_seed),
            timeout: Duration::from_secs(self.timeout),
            api_key: self.api_key.clone(),
            headers: self.header.clone(),
        }
    }
}

fn fresh_seed() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_millis() as u64)
}

fn header(text: &str) -> Result<(String, String), String> {
    let (name, value) = text.split_once(':').ok_or("wants NAME:VALUE")?;
    Ok((name.trim().to_owned(), value.trim().to_owned()))
}
