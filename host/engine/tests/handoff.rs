//! Prompts computed at one replica and decoded at another: the answers are those of one, whatever happens to either of the two.

mod support;

use std::sync::Arc;

use penstock_base::{CancelCause, Failure, Outcome};
use penstock_engine::{EngineConfig, EngineError, HandoffSetup, ReplicaState};
use penstock_exec::SamplingParams;
use penstock_sched::gateway::HandoffConfig;
use penstock_sched::replica::ReplicaConfig;
use support::{Fault, Got, Rig, STOP_TOKEN, Sizes, answer, prompt, read};

fn config(prefill: u32, inflight_max: usize) -> EngineConfig {
    let gateway = HandoffConfig { prefill_tokens_min: 12, ..HandoffConfig::default() };
    let mut config = EngineConfig {
        replica: ReplicaConfig {
            inflight_max,
            step_tokens: 32,
            chunk_tokens: 16,
            check_every_step: true,
            ..ReplicaConfig::default()
        },
        handoff: Some(HandoffSetup { prefill, gateway }),
        ..EngineConfig::default()
    };
    config.gateway.check_every_step = true;
    config
}

fn rig(replicas: usize, prefill: u32, inflight_max: usize) -> Rig {
    let rig = Rig::new(replicas, Sizes::default(), config(prefill, inflight_max));
    rig.wait_until("all replicas", |status| status.replicas.iter().all(|r| r.state == ReplicaState::Ready));
    rig
}

fn handoffs(rig: &Rig, end: &str) -> f64 {
    rig.metric(&format!("penstock_handoffs_total{{end=\"{end}\""))
}

/// Greedy, drawn, with a token that ends it.
fn params(which: u32) -> SamplingParams {
    let stop_tokens = if which.is_multiple_of(2) { vec![STOP_TOKEN, which % 64] } else { Vec::new() };
    let temperature = if which.is_multiple_of(3) { 1.0 } else { 0.0 };
    SamplingParams { temperature, seed: u64::from(which), stop_tokens, ..SamplingParams::default() }
}

fn is_a_beginning(got: &Got, expected: &[u32]) -> bool {
    expected.starts_with(got.tokens.first().map_or(&[][..], Vec::as_slice))
}

#[test]
fn answers_are_those_of_one_replica() {
    for inflight_max in [1, 2] {
        let rig = rig(3, 1, inflight_max);
        let all: Vec<u32> = (0..60).collect();
        let asked = |which: u32| (prompt(which, 6 + which % 50), 1 + which % 17, params(which));
        let mut streams = Vec::new();
        for which in &all {
            let (prompt, max, params) = asked(*which);
            let mut submission = rig.submission(&prompt, max);
            submission.sampling = Arc::new(params);
            streams.push(rig.submit(submission));
        }
        let mut ended_at_once = 0;
        for (which, stream) in all.iter().zip(&mut streams) {
            let (prompt, max, params) = asked(*which);
            let (got, expected) = (read(stream), answer(&prompt, &params, max));
            assert!(got.outcome().is_success(), "{which}: {:?}", got.outcome());
            assert_eq!(got.tokens.first().cloned().unwrap_or_default(), expected, "request {which}");
            assert_eq!(got.usage().output_tokens as usize, expected.len(), "request {which}");
            ended_at_once += u32::from(expected.len() <= 1 && prompt.len() >= 12);
        }
        drop(streams);
        assert!(ended_at_once > 0, "some end with the token that is handed over");
        assert!(handoffs(&rig, "handed_off") > 30.0);
        assert_eq!(handoffs(&rig, "anew") + handoffs(&rig, "failed") + handoffs(&rig, "at_sender"), 0.0);
        rig.wait_until_empty();
        assert!(rig.engine.shutdown());
    }
}

#[test]
fn a_replica_that_starts_anew_takes_nothing_of_another_with_it() {
    for (victim, step) in [(0, 3), (0, 6), (1, 4), (1, 9), (2, 5)] {
        let rig = rig(3, 1, 2);
        rig.controls[victim].fault_at(step, Fault::WrongRows);
        let prompts: Vec<_> = (0..24).map(|which| prompt(which, 30 + which)).collect();
        let mut streams: Vec<_> = prompts.iter().map(|prompt| rig.submit(rig.submission(prompt, 20))).collect();
        let mut done = 0;
        for (stream, prompt) in streams.iter_mut().zip(&prompts) {
            let (got, expected) = (read(stream), answer(prompt, &SamplingParams::default(), 20));
            assert!(is_a_beginning(&got, &expected), "{got:?}");
            match got.outcome() {
                Outcome::Length => done += 1,
                other => assert_eq!(other, Outcome::Failed(Failure::ReplicaLost)),
            }
        }
        drop(streams);
        assert!(done >= 8, "replica {victim} at step {step}: {done} of 24");
        assert_eq!(rig.metric("penstock_replica_freezes_total"), 1.0);
        rig.wait_until_empty();
        let before = handoffs(&rig, "handed_off");
        let got = read(&mut rig.submit(rig.submission(&prompt(99, 40), 10)));
        assert_eq!(got.tokens, [answer(&prompt(99, 40), &SamplingParams::default(), 10)]);
        assert_eq!(handoffs(&rig, "handed_off"), before + 1.0, "replica {victim} is back");
        assert!(rig.engine.shutdown());
    }
}

#[test]
fn without_a_replica_that_computes_prompts_those_that_decode_do_it_all() {
    let rig = rig(2, 1, 1);
    rig.controls[0].fault_at(2, Fault::Executor);
    let prompts: Vec<_> = (0..10).map(|which| prompt(which, 40)).collect();
    let mut streams: Vec<_> = prompts.iter().map(|prompt| rig.submit(rig.submission(prompt, 8))).collect();
    for (stream, prompt) in streams.iter_mut().zip(&prompts) {
        let got = read(stream);
        assert_eq!(got.outcome(), Outcome::Length, "nothing was emitted for it: it is placed anew");
        assert_eq!(got.tokens, [answer(prompt, &SamplingParams::default(), 8)]);
    }
    drop(streams);
    assert_eq!(rig.engine.status().replicas[0].state, ReplicaState::Lost);
    rig.wait_until_empty();
    assert!(rig.engine.shutdown());
}

#[test]
fn clients_that_leave_at_any_moment_give_everything_back() {
    let rig = rig(3, 1, 2);
    for round in 0..6 {
        let mut streams = Vec::new();
        for which in 0..12 {
            let submission = rig.submission(&prompt(which + 100 * round, 40), 60);
            let (ticket, stream) = rig.engine.submit(submission).expect("there is room");
            streams.push((ticket, stream));
            if which % 3 == 0 {
                std::thread::sleep(std::time::Duration::from_millis(u64::from(round)));
            }
        }
        for (ticket, mut stream) in streams {
            rig.engine.cancel(ticket.request, CancelCause::Client);
            let outcome = read(&mut stream).outcome();
            assert!(matches!(outcome, Outcome::Cancelled(CancelCause::Client) | Outcome::Length), "{outcome:?}");
        }
        rig.wait_until_empty();
    }
    assert_eq!(rig.metric("penstock_handoffs_running"), 0.0);
    assert_eq!(rig.metric("penstock_replica_freezes_total"), 0.0);
    assert!(rig.engine.shutdown());
}

#[test]
fn somebody_must_compute_and_somebody_decode() {
    for (replicas, prefill) in [(1, 1), (2, 2), (2, 0)] {
        let executors: Vec<Box<dyn penstock_exec::Executor>> = (0..replicas)
            .map(|_| support::FakeExecutor::new(Sizes::default(), support::Control::open()))
            .map(|fake| Box::new(fake) as Box<dyn penstock_exec::Executor>)
            .collect();
        let model = penstock_engine::ServedModel {
            name: "fake".into(),
            namespace: penstock_model::Namespace([3; 32]),
            vocabulary: Arc::new(support::Letters),
        };
        let error = penstock_engine::Engine::start(config(prefill, 1), model, executors).expect_err("nobody is left");
        assert!(matches!(error, EngineError::Config { key: "prefill", .. }), "{error}");
    }
}
