//! Text in, effects out: a scenario drives one replica and writes down what it does.
//!
//! ```text
//! config blocks=16 block=4 slots=4 step=8 chunk=8 depth=1 window=2 ops   before anything else
//! dispatch A prompt=24 out=8 reserve=4 n=2 class=5 like=B:16 seed=7 no_store deadline=50ms
//! done 3                 the three oldest steps are done, each as soon as it can be; keys of filled blocks follow
//! dry                    all steps are done until nothing is left
//! cancel A               by the client
//! finish A.0 3           the text of answer 0 ends behind three tokens
//! fail rows 0,2 | fail batch | fail executor
//! stance 1 preempt=4 class=2 tpot=20ms
//! wait 100ms             time passes; the replica is stepped when it asks for it
//! drain | flush
//! show blocks            a look at the observers
//! ```
//! Prompts without `like` share nothing; `like=B:16` starts with the first 16 tokens of B's. Answers never stop by themselves unless
//! they have a seed.

use std::panic::{AssertUnwindSafe, catch_unwind};

use penstock_base::plan::BatchFailure;
use penstock_base::{CancelCause, ClassRank, Duration, Instant, Outcome};
use penstock_sched::message::{ReplicaStance, ToReplica};
use penstock_sched::replica::{FinishedTokens, ReplicaConfig, ReplicaInput};

use crate::content::mix;
use crate::replica_driver::{Driver, Spec};

/// Runs a scenario and returns its trace.
pub fn run(text: &str) -> String {
    let lines =
        || text.lines().map(|line| line.split('#').next().unwrap_or_default().trim()).filter(|line| !line.is_empty());
    let mut driver = Driver::new(config(lines()));
    driver.show_ops = lines().any(|line| line.starts_with("config") && line.split(' ').any(|word| word == "ops"));
    driver.copy_every = 1;
    let mut trace = String::new();
    for line in lines().filter(|line| !line.starts_with("config")) {
        driver.trace.clear();
        let done = catch_unwind(AssertUnwindSafe(|| command(&mut driver, line)));
        done.unwrap_or_else(|_| panic!("at: {line}"));
        trace += line;
        trace += "\n";
        for effect in driver.trace.iter().flat_map(|effect| effect.lines()) {
            trace += &format!("    {effect}\n");
        }
    }
    driver.assert_outputs();
    trace
}

fn config<'a>(lines: impl Iterator<Item = &'a str>) -> ReplicaConfig {
    let mut config = ReplicaConfig { check_every_step: true, context_tokens_max: 256, ..ReplicaConfig::default() };
    for word in lines.filter_map(|line| line.strip_prefix("config ")).flat_map(str::split_whitespace) {
        let (key, value) = word.split_once('=').unwrap_or((word, "1"));
        let number: u32 = value.parse().expect("a number");
        match key {
            "blocks" => config.blocks = number,
            "block" => config.block_size_tokens = number,
            "slots" => config.slots = number,
            "step" => config.step_tokens = number,
            "chunk" => config.chunk_tokens = number,
            "depth" => config.inflight_max = number as usize,
            "window" => config.ready_window = number as usize,
            "context" => config.context_tokens_max = number,
            "cache" => config.prefix_cache = number > 0,
            "low_ppm" => config.watermarks.low_ppm = u64::from(number),
            "high_ppm" => config.watermarks.high_ppm = u64::from(number),
            "ops" => {}
            other => panic!("no such setting: {other}"),
        }
    }
    config
}

fn duration(text: &str) -> Duration {
    let split = text.find(|c: char| !c.is_ascii_digit()).expect("a unit");
    let number = text[..split].parse().expect("a number");
    match &text[split..] {
        "us" => Duration::from_us(number),
        "ms" => Duration::from_ms(number),
        "s" => Duration::from_s(number),
        other => panic!("no such unit: {other}"),
    }
}

fn number_of(driver: &Driver, label: &str) -> u64 {
    let found = driver.clients.iter().rev().find(|(_, client)| client.label == label);
    *found.unwrap_or_else(|| panic!("no request {label}")).0
}

fn spec(driver: &Driver, label: &str, words: &[&str]) -> Spec {
    let own = label.bytes().fold(17, |sum, byte| mix(sum, u64::from(byte)));
    let token = |at: usize| (mix(own, at as u64) % 23) as u32;
    let mut spec = Spec { seed: 0, ..Spec::new(Vec::new(), 1) };
    let (mut length, mut like, mut reserve) = (1, Vec::new(), None);
    for word in words {
        let (key, value) = word.split_once('=').unwrap_or((word, ""));
        let number = || value.parse::<u32>().expect("a number");
        match key {
            "prompt" => length = number() as usize,
            "out" => spec.max_output = number(),
            "reserve" => reserve = Some(number()),
            "n" => spec.sequences = number() as u16,
            "class" => spec.class = number() as u8,
            "seed" => spec.seed = u64::from(number()),
            "trust" => spec.trust = u64::from(number()),
            "no_store" => spec.no_store = true,
            "deadline" => spec.deadline = driver.now + duration(value),
            "like" => {
                let (other, tokens) = value.split_once(':').expect("request:tokens");
                let client = &driver.clients[&number_of(driver, other)];
                let tokens = tokens.parse().expect("a number");
                like = client.spec.prompt.iter().chain(&client.outputs[0]).take(tokens).copied().collect();
            }
            other => panic!("no such word: {other}"),
        }
    }
    spec.reserve_output = reserve.unwrap_or(spec.max_output);
    spec.prompt = (0..length).map(|at| like.get(at).copied().unwrap_or_else(|| token(at))).collect();
    spec
}

fn command(driver: &mut Driver, line: &str) {
    let words: Vec<&str> = line.split_whitespace().collect();
    match words[..] {
        ["dispatch", label, ..] => {
            let spec = spec(driver, label, &words[2..]);
            driver.dispatch_as(label.to_string(), spec);
        }
        ["again", label] => driver.dispatch_again(number_of(driver, label)),
        ["done", ..] => {
            let times = words.get(1).map_or(1, |times| times.parse().expect("a number"));
            for _ in 0..times {
                driver.complete();
                while driver.pay() {}
            }
        }
        ["dry"] => driver.run_dry(),
        ["cancel", label] => driver.cancel(number_of(driver, label), Outcome::Cancelled(CancelCause::Client)),
        ["finish", name, tokens] => {
            let (label, index) = name.split_once('.').expect("request.index");
            let number = number_of(driver, label);
            let client = driver.clients.get_mut(&number).expect("it was found");
            client.cut = true;
            let request = client.manifest.request;
            let seq = penstock_base::SeqId { request, index: index.parse().expect("an index") };
            let tokens = tokens.parse().expect("a number");
            driver.step(ReplicaInput::Finish(FinishedTokens { seq, tokens, outcome: Outcome::Stop }));
        }
        ["fail", "rows", rows] => {
            driver.fail_rows(rows.split(',').map(|row| row.parse().expect("a row")).collect());
        }
        ["fail", "batch"] => driver.fail_batch(),
        ["fail", "executor"] => {
            driver.may_break = true;
            let batch = driver.flights.pop_front().expect("a step is in flight").plan.batch;
            let failure = BatchFailure::Executor;
            driver.step(ReplicaInput::BatchFailed { batch, failure, rows: Vec::new(), done: Vec::new() });
        }
        ["stance", number, ..] => {
            let mut stance = ReplicaStance { tpot_target_us: u32::MAX, ..ReplicaStance::default() };
            stance.number = number.parse().expect("a number");
            for (key, value) in words[2..].iter().filter_map(|word| word.split_once('=')) {
                match key {
                    "preempt" => stance.preempt_blocks = value.parse().expect("blocks"),
                    "class" => stance.preempt_class = ClassRank::clamped(value.parse().expect("a class")),
                    "tpot" => stance.tpot_target_us = duration(value).as_us() as u32,
                    other => panic!("no such word: {other}"),
                }
            }
            driver.message(ToReplica::Stance(stance));
        }
        ["wait", time] => {
            let until = driver.now + duration(time);
            while driver.replica.next_wake() <= until {
                driver.now = driver.now.max(driver.replica.next_wake());
                driver.step(ReplicaInput::Tick);
            }
            driver.now = until;
        }
        ["drain"] => driver.step(ReplicaInput::Drain),
        ["flush"] => driver.step(ReplicaInput::FlushCache),
        ["show", "blocks"] => {
            let gauges = driver.replica.gauges();
            let b = gauges.blocks;
            driver.trace.push(format!(
                "free {} active {} cached {} reclaimable {} reserved {}",
                b.free, b.active, b.cached, b.reclaimable, gauges.reserved_blocks
            ));
        }
        ["show", "requests"] => {
            let gauges = driver.replica.gauges();
            driver.trace.push(format!("running {} ready {}", gauges.running_requests, gauges.ready_requests));
        }
        _ => panic!("no such command: {line}"),
    }
    assert!(driver.replica.next_wake() >= Instant::ZERO);
}
