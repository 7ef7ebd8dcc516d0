//! What does a policy cost behind the wall, beside the same policy natively? Two tables in one run: one call of each seat, and all calls of a
//! step in a gateway and a replica that are busy.
//!
//!     cargo xtask bench policy-cost [-- --quick]
//!
//! The native side of the first pair is the policy's own Rust, the crate that the component is built from, in its seat; that of the second
//! is the host's native default, which its component holds unchanged. So the two sides differ by the wall alone, and must answer alike.

mod facts;
mod house;
mod samples;
mod seats;
mod twins;
mod watch;

use std::error::Error;
use std::path::PathBuf;
use std::process::{Command, ExitCode};
use std::sync::Arc;

use penstock_base::Generation;
use penstock_policy_api::native::NativePolicies;
use penstock_policy_api::{Decision, Question};
use penstock_policy_wasm::limits::FUEL_BASE_DEFAULT;
use penstock_policy_wasm::{
    Component, Library, Machine, PolicySet, Prepared, Remembered, Runtime, RuntimeConfig, WasmPolicies, Workshop,
};

use house::{House, Load};
use samples::{clock_ns, spread};
use seats::{Bench, Line};
use twins::Twins;
use watch::{Seated, Spent};

const CONTEXT_WINDOW_TOKENS: u32 = 8_192;
/// By decision, in the order of [`Decision::ALL`].
const SHIPPED: [&str; 5] = ["queue-quota", "load-overlap", "vtc", "gdsf", "degrade-ladder"];
const DEFAULTS: [&str; 5] = ["bounded", "overlap-load", "class-first", "lru", "ladder"];

/// As its README says.
const VTC_FUEL_BASE: u64 = 200_000;

type Fault = Box<dyn Error>;

/// What is measured, how often, with which components.
struct Args {
    folder: PathBuf,
    /// Name of the cargo profile, to print.
    profile: String,
    /// Samples of a call of up to 64 rows.
    calls: usize,
    /// Steps of a busy house.
    steps: usize,
    /// `calls` or `steps` alone; both when absent.
    only: Option<String>,
    /// One question alone, for a profiler.
    seat: Option<String>,
}

impl Args {
    fn wants(&self, part: &str) -> bool {
        self.only.as_deref().is_none_or(|only| only == part)
    }

    fn read() -> Result<Self, Fault> {
        let folder = PathBuf::from("target/policies");
        let mut args =
            Self { folder, profile: "unnamed".to_owned(), calls: 20_000, steps: 8_000, only: None, seat: None };
        let mut given = std::env::args().skip(1);
        while let Some(arg) = given.next() {
            match arg.as_str() {
                "--quick" => (args.calls, args.steps) = (2_000, 1_500),
                "--policies" => args.folder = given.next().ok_or("--policies wants a folder")?.into(),
                "--profile" => args.profile = given.next().ok_or("--profile wants a name")?,
                "--only" => args.only = given.next(),
                "--seat" => args.seat = given.next(),
                // From `cargo bench` itself.
                "--bench" => {}
                other => {
                    return Err(format!(
                        "{other} is not known; --quick, --only calls|steps, --seat NAME, --policies FOLDER"
                    )
                    .into());
                }
            }
        }
        Ok(args)
    }
}

/// The two machines' policies of one set.
fn seat(runtime: &Runtime, args: &Args, names: [&str; 5]) -> Result<(WasmPolicies, WasmPolicies), Fault> {
    let library = Library::new();
    let mut seats = serde_json::Map::new();
    for (decision, name) in Decision::ALL.iter().zip(names) {
        let path = args.folder.join(format!("{}-{name}.wasm", decision.name()));
        let bytes = std::fs::read(&path).map_err(|error| format!("{}: {error}", path.display()))?;
        let component = Component::load(runtime, &bytes)?;
        let policy = format!("sha256:{}", component.digest());
        let fuel_base = if name == "vtc" { VTC_FUEL_BASE } else { FUEL_BASE_DEFAULT };
        seats.insert(decision.name().to_owned(), serde_json::json!({ "policy": policy, "fuel-base": fuel_base }));
        library.add(component)?;
    }
    let set = Arc::new(PolicySet::parse(&serde_json::Value::Object(seats).to_string())?);
    let workshop = Workshop { runtime, library: &library, context_window_tokens: CONTEXT_WINDOW_TOKENS };
    let made = |machine| -> Result<WasmPolicies, Fault> {
        let prepared = Prepared::new(&workshop, &set, machine, &Remembered::default())?;
        Ok(WasmPolicies::new(prepared, Generation(1)))
    };
    Ok((made(Machine::Gateway)?, made(Machine::Replica)?))
}

fn said(program: &str, args: &[&str]) -> String {
    let output = Command::new(program).args(args).output();
    output.map(|output| String::from_utf8_lossy(&output.stdout).trim().to_owned()).unwrap_or_default()
}

fn print_place(profile: &str, clock: u64) {
    let cpus = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let model = cpus.lines().find_map(|line| line.strip_prefix("model name")).unwrap_or("an unnamed CPU");
    let threads = std::thread::available_parallelism().map_or(0, usize::from);
    let load = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
    let commit = said("git", &["describe", "--always", "--dirty", "--abbrev=12"]);
    println!("commit    {commit}");
    println!("machine   {}, {threads} threads, load {}", model.trim_start_matches([' ', '\t', ':']), load.trim());
    let checks = if cfg!(debug_assertions) { "with debug assertions" } else { "without debug assertions" };
    println!("profile   {profile}, {checks}; components: profile guest");
    println!(
        "clock     reading it costs {clock} ns, taken off every figure; times below are nanoseconds unless they say otherwise"
    );
}

fn print_lines(title: &str, lines: &[Line]) {
    println!("\n{title}");
    println!("                     whole call                              the policy's part alone");
    println!(
        "{:<10} {:>5}  {:>7} {:>7} {:>7} {:>7} {:>5}   {:>7} {:>7} {:>7} {:>7} {:>5}  {:>8}",
        "seat", "rows", "native", "p99", "wasm", "p99", "ratio", "native", "p99", "wasm", "p99", "ratio", "fuel"
    );
    for line in lines {
        let name = line.question.name();
        println!("{name:<10} {:>5}  {}   {}  {:>8}", line.rows, line.whole, line.alone, line.fuel);
    }
}

fn measure_calls(title: &str, args: &Args, mut bench: Bench<'_>) {
    bench.introduce_flows();
    let mut lines = Vec::new();
    let is_wanted = |question: &Question| args.seat.as_deref().is_none_or(|seat| seat == question.name());
    for question in Question::ALL.into_iter().filter(is_wanted) {
        let rows: &[usize] = if question == Question::Admission { &[0] } else { &[1, 8, 64, 1_000] };
        lines.extend(rows.iter().map(|rows| bench.line(question, *rows)));
    }
    print_lines(title, &lines);
}

/// Times of one way's steps, part by part.
struct Steps {
    /// In the order of [`PARTS`].
    parts: [Vec<u64>; PARTS.len()],
    sum: Spent,
}

const PARTS: [&str; 5] = ["in all", "columns", "answers", "facts", "snapshots"];

impl Steps {
    fn new(steps: usize) -> Self {
        Self { parts: std::array::from_fn(|_| Vec::with_capacity(steps)), sum: Spent::default() }
    }

    fn add(&mut self, spent: &Spent) {
        let parts = [spent.total_ns(), spent.fill_ns, spent.answer_ns, spent.observe_ns, spent.save_ns];
        self.parts.iter_mut().zip(parts).for_each(|(times, part)| times.push(part));
        self.sum.add(spent);
    }

    fn print(&mut self, name: &str) {
        let steps = self.parts[0].len() as f64;
        print!("  {name:<7}");
        for (part, times) in PARTS.iter().zip(&mut self.parts) {
            let spread = spread(times, 0);
            print!(" {part} {:.1} us p50 {:.1} us p99;", spread.p50 as f64 / 1e3, spread.p99 as f64 / 1e3);
        }
        println!(" {:.1} calls", self.sum.calls() as f64 / steps);
    }

    /// How often what was asked.
    fn print_questions(&self) {
        let steps = self.parts[0].len() as f64;
        let asked = |question: Question| {
            let (calls, rows) = (self.sum.asked[question as usize], self.sum.rows[question as usize]);
            format!("{} {:.2} ({} rows)", question.name(), calls as f64 / steps, rows / calls.max(1))
        };
        let told = self.sum.told as f64 / steps;
        println!("  questions a step: {}; batches of facts {told:.2}", Question::ALL.map(asked).join(", "));
    }
}

/// Runs two houses in lockstep until each has its state, then measures.
fn measure_steps(title: &str, steps: usize, mut native: House<impl Seated>, mut wasm: House<impl Seated>) {
    const WARM_UP_STEPS: usize = 600;
    let (mut by_native, mut by_wasm) = (Steps::new(steps), Steps::new(steps));
    let (mut running, mut waiting) = (0, 0);
    for at in 0..WARM_UP_STEPS + steps {
        // Who goes first alternates.
        let (first, second) = if at % 2 == 0 {
            let first = native.step();
            (first, wasm.step())
        } else {
            let second = wasm.step();
            (native.step(), second)
        };
        if at < WARM_UP_STEPS {
            continue;
        }
        by_native.add(&first);
        by_wasm.add(&second);
        let state = native.state();
        running += state.0;
        waiting += state.1;
    }
    assert_eq!(native.digests(), wasm.digests(), "one rule, one history");
    let (running, waiting, flows) = (running / steps, waiting / steps, facts::FLOWS);
    println!("\n{title}");
    println!("  {running} sequences run and {waiting} requests of {flows} flows wait; {steps} steps");
    by_native.print("native");
    by_wasm.print("wasm");
    by_wasm.print_questions();
}

fn run() -> Result<(), Fault> {
    let args = Args::read()?;
    let runtime = Runtime::new(RuntimeConfig::default())?;
    if !args.folder.is_dir() {
        println!("SKIPPED no components in {}; `cargo xtask policies` builds them", args.folder.display());
        return Ok(());
    }
    let clock_ns = clock_ns();
    print_place(&args.profile, clock_ns);
    let (calls, steps) = (args.calls, args.steps);
    let natives = || NativePolicies::new(Generation(1), CONTEXT_WINDOW_TOKENS);

    if args.wants("calls") {
        let (mut gateway, mut replica) = seat(&runtime, &args, SHIPPED)?;
        let (gateway, replica, native) = (&mut gateway, &mut replica, &mut Twins::new());
        let bench = Bench { native, gateway, replica, calls, clock_ns };
        measure_calls("The shipped policies, beside their own Rust", &args, bench);
        let (mut gateway, mut replica) = seat(&runtime, &args, DEFAULTS)?;
        let (gateway, replica, native) = (&mut gateway, &mut replica, &mut natives());
        let bench = Bench { native, gateway, replica, calls, clock_ns };
        measure_calls("The native defaults as components, beside themselves", &args, bench);
    }
    if args.wants("steps") {
        let (gateway, replica) = seat(&runtime, &args, SHIPPED)?;
        let native = House::new(Load::BUSY, Twins::new(), Twins::new(), clock_ns);
        let wasm = House::new(Load::BUSY, gateway, replica, clock_ns);
        measure_steps("All policies of a step: the shipped ones", steps, native, wasm);
        let (gateway, replica) = seat(&runtime, &args, DEFAULTS)?;
        let native = House::new(Load::BUSY, natives(), natives(), clock_ns);
        let wasm = House::new(Load::BUSY, gateway, replica, clock_ns);
        measure_steps("All policies of a step: the native defaults and their components", steps, native, wasm);
    }
    Ok(())
}

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(fault) => {
            eprintln!("policy-cost: {fault}");
            ExitCode::FAILURE
        }
    }
}
