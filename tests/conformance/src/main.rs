//! Puts a component through everything that a policy is held to: `penstock-conformance FILE [--parameters JSON] [--fuel-base N]`.
//!
//! Prints one line a rule, and fails with the first reason of each rule that is broken.

use std::process::ExitCode;

use penstock_conformance::checks::{self, Tested};
use penstock_conformance::{Bench, Seating, random};
use penstock_policy_wasm::limits::FUEL_BASE_DEFAULT;

const USAGE: &str = "usage: penstock-conformance FILE [--parameters JSON] [--fuel-base N]";
/// Random moments for each rule.
const MOMENTS: usize = 400;

/// What is to be tried.
struct Args {
    file: String,
    parameters: String,
    fuel_base: u64,
}

fn main() -> ExitCode {
    let verdict = arguments().and_then(|args| judge(&args));
    match verdict {
        Ok(0) => ExitCode::SUCCESS,
        Ok(broken) => {
            println!("{broken} broken");
            ExitCode::FAILURE
        }
        Err(fault) => {
            eprintln!("penstock-conformance: {fault}");
            ExitCode::from(2)
        }
    }
}

fn arguments() -> Result<Args, String> {
    let mut args = Args { file: String::new(), parameters: String::new(), fuel_base: FUEL_BASE_DEFAULT };
    let mut words = std::env::args().skip(1);
    while let Some(word) = words.next() {
        let mut value = || words.next().ok_or_else(|| format!("{word} needs a value"));
        match word.as_str() {
            "--parameters" => args.parameters = value()?,
            "--fuel-base" => {
                let text = value()?;
                args.fuel_base = text.parse().map_err(|_| format!("--fuel-base {text} is no number"))?;
            }
            _ if args.file.is_empty() && !word.starts_with("--") => args.file = word,
            _ => return Err(format!("{word} is not understood; {USAGE}")),
        }
    }
    if args.file.is_empty() { Err(USAGE.to_owned()) } else { Ok(args) }
}

/// Says what holds; how many rules are broken.
fn judge(args: &Args) -> Result<usize, String> {
    let bytes = std::fs::read(&args.file).map_err(|error| format!("{}: {error}", args.file))?;
    let (bench, elsewhere) = (Bench::new()?, Bench::new()?);
    let component = bench.load(&bytes).map_err(|error| format!("{} is refused: {error}", args.file))?;
    let how = Seating { parameters: &args.parameters, fuel_base: args.fuel_base };
    let tested = Tested { bench: &bench, component: &component, how };
    let decision = component.decision();
    let manifest = component.manifest();
    println!("{} {} decides {}, contract {}", manifest.name, manifest.version, decision.name(), component.contract());
    println!("sha256:{}, {} bytes", component.digest(), component.bytes());
    tested.seat().map_err(|error| format!("it cannot be seated: {error}"))?;

    let moments = random::moments(decision, 1, MOMENTS);
    let mut broken = 0;
    let mut say = |rule: &str, found: Result<String, String>| match found {
        Ok(figure) => println!("  holds   {rule} ({figure})"),
        Err(why) => {
            broken += 1;
            println!("  BROKEN  {rule}: {why}");
        }
    };
    say("it answers legally at the edges", checks::answers_at_the_edges(tested).map(|n| format!("{n} calls")));
    say("it answers legally", checks::answers_legally(tested, &moments).map(|n| format!("{n} random calls")));
    let course = checks::repeats(tested, &elsewhere, &bytes, &moments);
    say("same inputs, same bytes and fuel", course.map(|course| format!("4 runs of {} calls", course.len())));
    say(
        "what it saves it takes back",
        checks::remembers(tested, &moments).map(|n| format!("up to {n} bytes of state")),
    );
    let tried = checks::forgets_what_is_damaged(tested, &moments);
    say("damaged state leaves it as new", tried.map(|n| format!("{n} damaged states")));
    let spent = checks::measure(tested);
    let within = spent.as_ref().map_err(Clone::clone).and_then(|spent| checks::spent_within(spent));
    say("it stays within its fuel", within.map(|()| format!("base {}", args.fuel_base)));
    for spent in spent.unwrap_or_default() {
        println!(
            "          {:<9} over {:>6}: {:>9} of {:>9}, {} each",
            spent.call,
            spent.size,
            spent.fuel,
            spent.budget,
            spent.each()
        );
    }
    Ok(broken)
}
