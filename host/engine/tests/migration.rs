//! Streams that lose their replica go on at another one, where that is allowed: without a gap, without a token twice, and with the tokens of one
//! that nothing happened to.

mod support;

use std::sync::Arc;
use std::time::{Duration as StdDuration, Instant as StdInstant};

use penstock_base::{Duration, Failure, Outcome};
use penstock_engine::{Engine, EngineConfig, EventStream, Happened, Role, Submission};
use penstock_exec::SamplingParams;
use penstock_sched::replica::ReplicaConfig;
use support::cluster::{Front, Served, await_idle, runtime};
use support::{Fault, Got, PATIENCE, Rig, STOP_TOKEN, Sizes, answer, prompt, read, submission, text_of};

fn config(migrations_max: u16, inflight_max: usize) -> EngineConfig {
    let mut config = EngineConfig {
        replica: ReplicaConfig {
            inflight_max,
            step_tokens: 64,
            chunk_tokens: 32,
            check_every_step: true,
            ..ReplicaConfig::default()
        },
        ..EngineConfig::default()
    };
    config.gateway.migrations_max = migrations_max;
    config.gateway.check_every_step = true;
    config
}

/// Greedy, drawn, with a token that ends it, with tokens before which nothing ends it.
fn params(which: u32) -> SamplingParams {
    SamplingParams {
        stop_tokens: if which.is_multiple_of(2) { vec![STOP_TOKEN, which % 64] } else { Vec::new() },
        temperature: if which.is_multiple_of(3) { 1.0 } else { 0.0 },
        min_tokens: if which.is_multiple_of(5) { 9 } else { 0 },
        seed: u64::from(which),
        ..SamplingParams::default()
    }
}

fn asked(engine: &Engine, which: u32) -> Submission {
    let mut submission = submission(engine, &prompt(which, 5 + which % 40), 20 + which % 20);
    submission.sampling = Arc::new(params(which));
    submission
}

fn submit(engine: &Engine, which: u32) -> EventStream {
    engine.submit(asked(engine, which)).expect("it has room").1
}

fn assert_whole(which: u32, got: &Got) {
    let expected = answer(&prompt(which, 5 + which % 40), &params(which), 20 + which % 20);
    assert!(got.outcome().is_success(), "{which}: {:?}", got.outcome());
    assert_eq!(got.tokens.first().cloned().unwrap_or_default(), expected, "request {which}");
    assert_eq!(got.texts.first().cloned().unwrap_or_default(), text_of(&expected), "request {which}");
    let usage = got.usage();
    assert_eq!(usage.output_tokens as usize, expected.len(), "request {which}");
    assert_eq!(usage.prompt_tokens, 5 + which % 40, "output that was computed again is nobody's prompt");
    assert!(usage.cached_tokens <= usage.prompt_tokens);
}

fn metric(engine: &Engine, name: &str) -> f64 {
    let page = engine.metrics_text();
    let lines = page.lines().filter(|line| line.starts_with(name));
    lines.filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok()).sum()
}

fn moved(engine: &Engine, cause: &str) -> f64 {
    metric(engine, &format!("penstock_migrations_total{{cause=\"{cause}\",model_name=\"fake\",outcome=\"moved\""))
}

fn wait_until(what: &str, holds: impl Fn() -> bool) {
    let deadline = StdInstant::now() + PATIENCE;
    while !holds() {
        assert!(StdInstant::now() < deadline, "{what} did not come");
        std::thread::sleep(StdDuration::from_millis(1));
    }
}

#[test]
fn a_frozen_replica_loses_no_stream() {
    for inflight_max in [1, 2] {
        for step in [3, 7, 12] {
            let rig = Rig::new(2, Sizes::default(), config(3, inflight_max));
            rig.controls[0].fault_at(step, Fault::WrongRows);
            let mut streams: Vec<_> = (0..10).map(|which| (which, submit(&rig.engine, which))).collect();
            for (which, stream) in &mut streams {
                assert_whole(*which, &read(stream));
            }
            drop(streams);
            rig.wait_until_empty();
        }
    }
}

#[test]
fn what_may_not_move_ends_typed_and_is_counted() {
    let rig = Rig::new(2, Sizes::default(), config(0, 1));
    rig.controls.iter().for_each(|control| control.fault_at(8, Fault::WrongRows));
    let mut streams: Vec<_> = (0..8).map(|which| submit(&rig.engine, which)).collect();
    let ends: Vec<_> = streams.iter_mut().map(|stream| read(stream).outcome()).collect();
    assert!(ends.contains(&Outcome::Failed(Failure::ReplicaLost)), "{ends:?}");
    assert!(rig.metric("penstock_migrations_total{cause=\"lost\",model_name=\"fake\",outcome=\"refused_limit\"") > 0.0);

    let rig = Rig::new(2, Sizes::default(), config(5, 1));
    rig.controls.iter().for_each(|control| control.fault_at(8, Fault::WrongRows));
    let mut several = asked(&rig.engine, 1);
    several.sequences = 2;
    let outcome = read(&mut rig.submit(several)).outcome();
    assert_eq!(outcome, Outcome::Failed(Failure::ReplicaLost));
    assert_eq!(
        rig.metric("penstock_migrations_total{cause=\"lost\",model_name=\"fake\",outcome=\"refused_sequences\""),
        1.0
    );

    // One replica alone: there is nowhere to go.
    let rig = Rig::new(1, Sizes::default(), config(5, 1));
    rig.controls[0].fault_at(8, Fault::WrongRows);
    assert_eq!(read(&mut submit(&rig.engine, 1)).outcome(), Outcome::Failed(Failure::ReplicaLost));
    assert_eq!(
        rig.metric("penstock_migrations_total{cause=\"lost\",model_name=\"fake\",outcome=\"refused_nowhere\""),
        1.0
    );
}

#[test]
fn a_stop_string_across_the_move_is_found() {
    let (prompt, params) = (prompt(7, 11), SamplingParams::default());
    let whole = text_of(&answer(&prompt, &params, 30));
    // Five letters from the middle of the answer, so that they straddle tokens; wherever they stand first is the end.
    let stop = whole[25..30].to_owned();
    let expected = &whole[..whole.find(&stop).expect("it is there")];
    let mut moves = 0.0;
    for step in 2..16 {
        let rig = Rig::new(2, Sizes::default(), config(3, 1));
        rig.controls[0].fault_at(step, Fault::WrongRows);
        let mut asked = submission(&rig.engine, &prompt, 30);
        asked.stop_strings = vec![stop.clone()].into();
        let got = read(&mut rig.submit(asked));
        assert_eq!((got.outcome(), got.texts[0].as_str()), (Outcome::Stop, expected), "fault in {step} steps");
        moves += moved(&rig.engine, "lost");
    }
    assert!(moves > 5.0, "{moves} moves");
}

#[test]
fn a_cut_session_loses_no_stream() {
    let runtime = runtime();
    let workers: Vec<_> = (0..2).map(|which| Served::start(&runtime, which, 1, Role::Unified, config(0, 1))).collect();
    let front = Front::start(1, config(4, 1));
    let (mut first, link) = front.join(&runtime, &workers[0]);
    let _second = front.join(&runtime, &workers[1]);
    front.await_ready(2);
    workers[0].control.let_through(9);
    workers[1].control.hold();
    let mut streams: Vec<_> = (0..12).map(|which| (which, submit(&front.engine, which))).collect();
    wait_until("tokens of the first", || metric(&front.engine, "vllm:generation_tokens_total") >= 3.0);
    link.close();
    runtime.block_on(&mut first.ended).expect("it is told");
    workers.iter().for_each(|worker| worker.control.release());
    for (which, stream) in &mut streams {
        assert_whole(*which, &read(stream));
    }
    assert!(moved(&front.engine, "lost") > 0.0);
    workers.iter().for_each(await_idle);
}

#[test]
fn a_worker_that_drains_hands_its_streams_on() {
    let runtime = runtime();
    let workers: Vec<_> = (0..2).map(|which| Served::start(&runtime, which, 1, Role::Unified, config(0, 2))).collect();
    let front = Front::start(1, config(1, 1));
    let _joined: Vec<_> = workers.iter().map(|worker| front.join(&runtime, worker)).collect();
    front.await_ready(2);
    workers[0].control.let_through(12);
    let mut streams: Vec<_> = (0..8).map(|which| (which, submit(&front.engine, which))).collect();
    wait_until("steps", || workers[0].control.steps() >= 12);
    workers[0].worker.engine().begin_drain();
    wait_until("moves", || moved(&front.engine, "drain") > 0.0);
    workers[0].control.release();
    let report = workers[0].worker.engine().drain(Duration::from_s(60));
    assert_eq!(report.cancelled, 0);
    let mut told = 0;
    for (which, stream) in &mut streams {
        assert_whole(*which, &read(stream));
        let request = stream.request();
        told += front.engine.moments(request).iter().filter(|m| matches!(m.what, Happened::Migrated { .. })).count();
    }
    assert!(told > 0, "the story of a stream says that it moved");
    assert_eq!(metric(&front.engine, "penstock_diverged_sequences_total"), 0.0);
    workers.iter().for_each(await_idle);
}
