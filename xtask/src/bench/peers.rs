//! This server beside others on one machine: the same loads, in turns, so that whatever slows the machine slows all of them.
//!
//! Servers are all started first and stay up; one works at a time. Every round takes fresh prompts, so that no cache knows them, and each
//! server gets the same. Medians of the rounds are printed, with the ratio to the better peer.

use std::collections::BTreeMap;
use std::net::{SocketAddr, TcpStream};
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use clap::Parser;

use crate::{packaged_models, policies, serve, target};

/// Name of this server, and beginning of its variants' names.
const OURS: &str = "penstock";

/// Longest that a server may take to answer its first request.
const READY_WITHIN: Duration = Duration::from_secs(300);

/// Seeds from one load's first to the next one's.
const SEEDS_PER_LOAD: u64 = 1_000;

/// Busy share of the machine below which it counts as idle.
const IDLE_SHARE: f64 = 0.08;

/// Longest that a measurement waits for an idle machine.
const SETTLE_WITHIN: Duration = Duration::from_secs(30);

/// Most that is read of a page.
const PAGE_BYTES_MAX: u64 = 4 << 20;

#[derive(Parser, Debug)]
#[command(name = "cargo xtask bench peers", after_help = HELP)]
struct PeersArgs {
    /// llama.cpp's server
    #[arg(long, value_name = "PROGRAM")]
    llama_server: Option<PathBuf>,
    /// llama.cpp's llama-bench, for the prefill without a server
    #[arg(long, value_name = "PROGRAM")]
    llama_bench: Option<PathBuf>,
    /// vLLM's `vllm`, a build for the CPU
    #[arg(long, value_name = "PROGRAM", requires = "vllm_model")]
    vllm: Option<PathBuf>,
    /// The same model as a Hugging Face folder, which vLLM loads in bfloat16
    #[arg(long, value_name = "DIR")]
    vllm_model: Option<PathBuf>,
    /// GGUF file for this server and llama.cpp [default: the demo model]
    #[arg(long, value_name = "FILE")]
    model: Option<PathBuf>,
    /// Compute threads of each server
    #[arg(long, default_value_t = 2)]
    threads: usize,
    /// Rounds; the median of each figure is printed
    #[arg(long, default_value_t = 3)]
    rounds: u64,
    /// Seed of the first round's prompts; each round has the next one, and each load others
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Only loads whose name contains this: cold, shared, single
    #[arg(long, value_name = "PART")]
    only: Option<String>,
    /// More arguments for `penstock serve`, e.g. --penstock=--overlap=1
    #[arg(long = "penstock", value_name = "ARGUMENT", allow_hyphen_values = true)]
    penstock_args: Vec<String>,
    /// One more of this server with other arguments, words of `penstock serve`, e.g. --variant "--overlap 1"; may be repeated
    #[arg(long, value_name = "ARGUMENTS", allow_hyphen_values = true)]
    variant: Vec<String>,
}

const HELP: &str = "Example, with everything on this machine:
  cargo xtask bench peers --llama-server llama.cpp/build/bin/llama-server --llama-bench llama.cpp/build/bin/llama-bench \\
    --vllm venv/bin/vllm --vllm-model smollm2-hf

llama.cpp is to be built natively (-DGGML_NATIVE=ON). Prompts are answered to the last token, greedily; figures are those of `penstock bench`.";

/// One load, as arguments of `penstock bench`.
struct Load {
    name: &'static str,
    args: &'static [&'static str],
}

const LOADS: [Load; 3] = [
    Load {
        name: "cold, 16 streams, 96 words, 64 out",
        args: &["--streams", "16", "--requests", "64", "--prompt-words", "96", "--output-tokens", "64"],
    },
    Load {
        name: "shared, 16 streams, 400 common words + 32, 64 out",
        args: &[
            "--streams",
            "16",
            "--requests",
            "64",
            "--prompt-words",
            "32",
            "--shared-words",
            "400",
            "--output-tokens",
            "64",
        ],
    },
    Load {
        name: "single, 1 stream, 96 words, 64 out",
        args: &["--streams", "1", "--requests", "6", "--prompt-words", "96", "--output-tokens", "64"],
    },
];

/// A server that this run started; it ends with it.
struct Server {
    name: String,
    port: u16,
    child: Child,
}

impl Drop for Server {
    fn drop(&mut self) {
        // With its group, for vLLM is several processes. One that has ended by itself is no concern here.
        drop(Command::new("kill").args(["-KILL", "--", &format!("-{}", self.child.id())]).status());
        drop(self.child.wait());
    }
}

/// What one load gave on one server.
#[derive(Clone, Copy)]
struct Figures {
    tokens_per_second: f64,
    ttft_ms: f64,
    tpot_ms: f64,
}

/// Measures and prints.
pub fn run(root: &Path, profile: &str, args: &[String]) -> Result<()> {
    let args = PeersArgs::parse_from(std::iter::once("peers".to_owned()).chain(args.iter().cloned()));
    if args.llama_server.is_none() && args.vllm.is_none() && args.llama_bench.is_none() {
        println!("no peer was named, so this server is measured alone (`cargo xtask bench peers --help`)");
    }
    let model = match &args.model {
        Some(model) => model.clone(),
        None => packaged_models::demo()?,
    };
    serve::build(root)?;
    policies::build(root)?;
    let penstock = target(root).join(profile).join("penstock");
    prefill(root, profile, &args, &model)?;
    let servers = start(&args, &penstock, &model)?;
    for (index, load) in LOADS.iter().enumerate() {
        if !args.only.as_deref().is_none_or(|part| load.name.contains(part)) {
            continue;
        }
        let mut figures: BTreeMap<&str, Vec<Figures>> = BTreeMap::new();
        for round in 0..args.rounds {
            for server in &servers {
                // Prompts of one seed are the same under each load, and would be in the caches.
                let seed = args.seed + round + index as u64 * SEEDS_PER_LOAD;
                settle()?;
                let one = measure(&penstock, server, load, seed)?;
                eprintln!(
                    "{}: {} round {round}: {:.1} tok/s, TTFT {:.0} ms, TPOT {:.1} ms",
                    load.name, server.name, one.tokens_per_second, one.ttft_ms, one.tpot_ms
                );
                figures.entry(&server.name).or_default().push(one);
            }
        }
        print_load(load, &servers, &figures);
    }
    for server in servers.iter().filter(|server| server.name.starts_with(OURS)) {
        let share = metric(server.port, "penstock_step_outside_ratio")?;
        println!("{}: {:.2} % of busy step time outside the executor", server.name, share * 100.0);
    }
    Ok(())
}

fn start(args: &PeersArgs, penstock: &Path, model: &Path) -> Result<Vec<Server>> {
    let threads = args.threads.to_string();
    let mut servers = Vec::new();
    let ours = |port: u16| {
        let mut command = Command::new(penstock);
        command.args([
            "serve",
            "--listen",
            &format!("127.0.0.1:{port}"),
            "--admin-listen",
            "off",
            "--state-dir",
            "off",
        ]);
        command.arg("--model").arg(model).args(["--threads", &threads]);
        // A pool of its own from the start, as the others have.
        command.args(["--kv-blocks", "2048"]).args(&args.penstock_args);
        command
    };
    servers.push(start_one(OURS, 8021, ours(8021))?);
    for (port, variant) in (8024..).zip(&args.variant) {
        let mut command = ours(port);
        command.args(variant.split_whitespace());
        servers.push(start_one(&format!("{OURS} {variant}"), port, command)?);
    }
    if let Some(program) = &args.llama_server {
        let mut command = Command::new(program);
        command.arg("-m").arg(model).args(["--host", "127.0.0.1", "--port", "8022", "-t", &threads, "-tb", &threads]);
        command.args(["-np", "16", "-c", "32768", "-fa", "on", "--no-webui", "--alias", "model"]);
        servers.push(start_one("llama.cpp", 8022, command)?);
    }
    if let (Some(program), Some(folder)) = (&args.vllm, &args.vllm_model) {
        let mut command = Command::new(program);
        command.arg("serve").arg(folder).args([
            "--served-model-name",
            "model",
            "--host",
            "127.0.0.1",
            "--port",
            "8023",
        ]);
        command.args(["--dtype", "bfloat16", "--max-model-len", "2048", "--max-num-seqs", "32", "--enforce-eager"]);
        command.env("VLLM_CPU_OMP_THREADS_BIND", format!("0-{}", args.threads.saturating_sub(1)));
        command.env("VLLM_CPU_KVCACHE_SPACE", "2");
        servers.push(start_one("vLLM", 8023, command)?);
    }
    Ok(servers)
}

fn start_one(name: &str, port: u16, mut command: Command) -> Result<Server> {
    let address = SocketAddr::from(([127, 0, 0, 1], port));
    ensure!(TcpStream::connect(address).is_err(), "port {port}, wanted for {name}, is taken: end what listens there");
    let begun = Instant::now();
    let child = command
        .process_group(0)
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .with_context(|| format!("start {command:?}"))?;
    let mut server = Server { name: name.to_owned(), port, child };
    while !is_ready(address) {
        if let Some(status) = server.child.try_wait()? {
            bail!("{name} ended while it started ({status}): run it by hand to see why: {command:?}");
        }
        ensure!(begun.elapsed() < READY_WITHIN, "{name} did not become ready within {READY_WITHIN:?}");
        std::thread::sleep(Duration::from_millis(20));
    }
    println!("{name}: ready after {:.2} s", begun.elapsed().as_secs_f64());
    Ok(server)
}

/// Waits until nothing works: some servers' threads spin on for seconds after their last request, and would slow the next server.
fn settle() -> Result<()> {
    let begun = Instant::now();
    loop {
        let (busy, all) = processor_ticks()?;
        std::thread::sleep(Duration::from_millis(500));
        let (busy_then, all_then) = processor_ticks()?;
        let share = (busy_then - busy) as f64 / (all_then - all).max(1) as f64;
        if share < IDLE_SHARE {
            return Ok(());
        }
        if begun.elapsed() > SETTLE_WITHIN {
            eprintln!(
                "the machine is {:.0} % busy with something else: the figures that follow suffer from it",
                share * 100.0
            );
            return Ok(());
        }
    }
}

/// Ticks that the machine's processors have worked, and all there were.
fn processor_ticks() -> Result<(u64, u64)> {
    let text = std::fs::read_to_string("/proc/stat").context("read /proc/stat")?;
    let line = text.lines().next().context("/proc/stat is empty")?;
    // user, nice, system, idle, iowait, irq, softirq, steal
    let ticks: Vec<u64> = line.split_whitespace().skip(1).take(8).filter_map(|tick| tick.parse().ok()).collect();
    ensure!(ticks.len() == 8, "/proc/stat begins with {line:?}");
    let all = ticks.iter().sum();
    Ok((all - ticks[3] - ticks[4], all))
}

/// Whether the server's health page says 200. All three servers have one under this name.
fn is_ready(address: SocketAddr) -> bool {
    get(address, "/health").is_ok_and(|answer| answer.split("\r\n").next().is_some_and(|line| line.contains(" 200")))
}

/// Mean of a gauge over its label sets.
fn metric(port: u16, name: &str) -> Result<f64> {
    let page = get(SocketAddr::from(([127, 0, 0, 1], port)), "/metrics").context("ask for the metrics")?;
    let lines = page.lines().filter(|line| line.starts_with(name) && !line.starts_with('#'));
    let values: Vec<f64> = lines.filter_map(|line| line.rsplit(' ').next()?.parse().ok()).collect();
    ensure!(!values.is_empty(), "the metrics page lacks {name}");
    Ok(values.iter().sum::<f64>() / values.len() as f64)
}

/// Head and body of a page.
fn get(address: SocketAddr, path: &str) -> std::io::Result<String> {
    use std::io::{Read as _, Write as _};
    let mut stream = TcpStream::connect(address)?;
    stream.set_read_timeout(Some(Duration::from_secs(5)))?;
    stream.write_all(format!("GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n").as_bytes())?;
    let mut answer = Vec::new();
    stream.take(PAGE_BYTES_MAX).read_to_end(&mut answer)?;
    Ok(String::from_utf8_lossy(&answer).into_owned())
}

fn measure(penstock: &Path, server: &Server, load: &Load, seed: u64) -> Result<Figures> {
    let output = Command::new(penstock)
        .args(["bench", "--json", "--url", &format!("http://127.0.0.1:{}", server.port), "--seed", &seed.to_string()])
        .args(load.args)
        .stderr(Stdio::null())
        .output()
        .context("run penstock bench")?;
    let summary: serde_json::Value = serde_json::from_slice(&output.stdout)
        .with_context(|| format!("{} under `{}` gave no summary ({})", server.name, load.name, output.status))?;
    let number = |key: &str| summary[key].as_f64().with_context(|| format!("the summary lacks {key}"));
    let failed = number("failed")?;
    if failed > 0.0 {
        // A peer's own trouble is told, and its figures are of what it finished; ours would be a fault.
        ensure!(!server.name.starts_with(OURS), "{} failed requests: {}", server.name, summary["errors"]);
        eprintln!("{}: {failed} requests failed under `{}`: {}", server.name, load.name, summary["errors"]);
    }
    Ok(Figures {
        tokens_per_second: number("output_throughput")?,
        ttft_ms: number("median_ttft_ms")?,
        tpot_ms: number("median_tpot_ms")?,
    })
}

fn median(values: impl Iterator<Item = f64>) -> f64 {
    let mut values: Vec<f64> = values.collect();
    values.sort_by(f64::total_cmp);
    match values.len() {
        0 => f64::NAN,
        n if n % 2 == 1 => values[n / 2],
        n => (values[n / 2 - 1] + values[n / 2]) / 2.0,
    }
}

fn print_load(load: &Load, servers: &[Server], figures: &BTreeMap<&str, Vec<Figures>>) {
    println!("\n{}", load.name);
    println!("  {:24} {:>9} {:>12} {:>12}", "server", "tok/s", "TTFT p50 ms", "TPOT p50 ms");
    let medians: Vec<(&str, Figures)> = servers
        .iter()
        .filter_map(|server| figures.get(server.name.as_str()).map(|all| (server.name.as_str(), all)))
        .map(|(name, all)| {
            let of = |pick: fn(&Figures) -> f64| median(all.iter().map(pick));
            let tokens_per_second = of(|one| one.tokens_per_second);
            (name, Figures { tokens_per_second, ttft_ms: of(|one| one.ttft_ms), tpot_ms: of(|one| one.tpot_ms) })
        })
        .collect();
    for (name, one) in &medians {
        println!("  {name:24} {:>9.1} {:>12.0} {:>12.1}", one.tokens_per_second, one.ttft_ms, one.tpot_ms);
    }
    let peers = medians.iter().filter(|(name, _)| !name.starts_with(OURS));
    let better = peers.max_by(|a, b| a.1.tokens_per_second.total_cmp(&b.1.tokens_per_second));
    if let (Some((_, ours)), Some((name, peer))) = (medians.first(), better) {
        println!(
            "  against {name}, the peer that is better in tok/s: tok/s {:.2}x, TTFT {:.2}x, TPOT {:.2}x",
            ours.tokens_per_second / peer.tokens_per_second,
            ours.ttft_ms / peer.ttft_ms,
            ours.tpot_ms / peer.tpot_ms
        );
    }
}

/// Prefill of 512 tokens without a server, on one thread and on `threads`, beside llama-bench.
fn prefill(root: &Path, profile: &str, args: &PeersArgs, model: &Path) -> Result<()> {
    if args.only.as_deref().is_some_and(|part| part != "prefill") {
        return Ok(());
    }
    let status = Command::new(env!("CARGO"))
        .args(["build", "--workspace", "--example", "throughput", "--profile", profile])
        .current_dir(root)
        .status()
        .context("run cargo build")?;
    ensure!(status.success(), "the build failed: see above");
    let ours = target(root).join(profile).join("examples").join("throughput");
    let (mut one, mut all, mut theirs) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..args.rounds {
        one.push(our_prefill(&ours, model, 1)?);
        all.push(our_prefill(&ours, model, args.threads)?);
        if let Some(program) = &args.llama_bench {
            theirs.push(llama_prefill(program, model, args.threads)?);
        }
    }
    let (one, all, theirs) = (median(one.into_iter()), median(all.into_iter()), median(theirs.into_iter()));
    println!(
        "prefill of 512, tok/s by the clock: {all:.0} on {} threads, {one:.0} on one ({:.2}x)",
        args.threads,
        all / one
    );
    if theirs.is_finite() {
        println!("  llama-bench on {} threads {theirs:.0}: {:.2}x", args.threads, all / theirs);
    }
    Ok(())
}

fn our_prefill(program: &Path, model: &Path, threads: usize) -> Result<f64> {
    let output =
        Command::new(program).arg(model).args([&threads.to_string(), "prefill"]).output().context("run throughput")?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let line =
        text.lines().find_map(|line| line.strip_prefix("prefill 512: ")).context("throughput printed no prefill")?;
    let wall = line.split("wall ").nth(1).and_then(|rest| rest.split(')').next()).context("no rate by the clock")?;
    wall.parse().with_context(|| format!("{wall:?} is no rate"))
}

fn llama_prefill(program: &Path, model: &Path, threads: usize) -> Result<f64> {
    let output = Command::new(program)
        .arg("-m")
        .arg(model)
        .args(["-t", &threads.to_string(), "-p", "512", "-n", "0", "-r", "3", "-fa", "1", "-o", "json"])
        .stderr(Stdio::null())
        .output()
        .context("run llama-bench")?;
    let rows: serde_json::Value = serde_json::from_slice(&output.stdout).context("read llama-bench's answer")?;
    rows[0]["avg_ts"].as_f64().context("llama-bench gave no rate")
}
