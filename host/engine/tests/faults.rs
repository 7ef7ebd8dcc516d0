//! Executors that fail, machines that freeze, engines that drain: every request still ends once, typed, and the rest goes on.

mod support;

use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};

use penstock_base::{CancelCause, Duration, Failure, Outcome};
use penstock_engine::{EngineConfig, EngineError, EngineLimits, Machine, PolicySource, ReplicaState, SubmitError};
use penstock_exec::SamplingParams;
use penstock_policy_api::native::NativePolicies;
use penstock_sched::replica::ReplicaConfig;
use support::{FakeExecutor, Got, Letters, Rig, Sizes, answer, prompt, read};

const FAULTS: [support::Fault; 2] = [support::Fault::Batch, support::Fault::Sampling];

/// The text is that of the model, as far as it goes.
fn assert_is_a_beginning(got: &Got, prompt: &[u32], max: u32) {
    let expected = answer(prompt, &SamplingParams::default(), max);
    let tokens = got.tokens.first().map_or(&[][..], Vec::as_slice);
    assert!(expected.starts_with(tokens), "{tokens:?} is no beginning of {expected:?}");
}

fn overlap(inflight_max: usize) -> EngineConfig {
    EngineConfig { replica: ReplicaConfig { inflight_max, ..ReplicaConfig::default() }, ..EngineConfig::default() }
}

#[test]
fn a_failed_step_fails_its_requests_and_the_next_ones_run() {
    for (fault, inflight_max) in FAULTS.into_iter().flat_map(|fault| [(fault, 1), (fault, 2)]) {
        let rig = Rig::new(1, Sizes::default(), overlap(inflight_max));
        rig.controls[0].fault_at(4, fault);
        let prompts: Vec<_> = (0..4).map(|which| prompt(which, 8)).collect();
        let mut streams: Vec<_> = prompts.iter().map(|prompt| rig.submit(rig.submission(prompt, 30))).collect();
        let mut failed = 0;
        for (stream, prompt) in streams.iter_mut().zip(&prompts) {
            let got = read(stream);
            assert_is_a_beginning(&got, prompt, 30);
            match got.outcome() {
                Outcome::Failed(Failure::Executor) => failed += 1,
                other => assert_eq!(other, Outcome::Length),
            }
        }
        assert!(failed > 0, "{fault:?}: something was in the step that failed");
        drop(streams);
        rig.wait_until_empty();
        let got = read(&mut rig.submit(rig.submission(&prompts[0], 30)));
        assert_eq!(got.tokens, [answer(&prompts[0], &SamplingParams::default(), 30)], "{fault:?}");
        assert_eq!(rig.metric("penstock_replica_freezes_total"), 0.0);
    }
}

#[test]
fn a_failed_row_fails_its_request_alone() {
    let rig = Rig::usual();
    rig.controls[0].fail_rows_of(2);
    let prompts: Vec<_> = (0..3).map(|which| prompt(which, 8)).collect();
    let mut streams: Vec<_> = prompts.iter().map(|prompt| rig.submit(rig.submission(prompt, 12))).collect();
    let outcomes: Vec<_> = streams.iter_mut().map(|stream| read(stream).outcome()).collect();
    assert_eq!(outcomes, [Outcome::Length, Outcome::Failed(Failure::Executor), Outcome::Length]);
    drop(streams);
    rig.wait_until_empty();
}

#[test]
fn an_executor_that_panics_is_lost_and_its_work_moves_or_fails() {
    for fault in [support::Fault::Panic, support::Fault::Executor] {
        let rig = Rig::new(2, Sizes { slots: 2, ..Sizes::default() }, EngineConfig::default());
        rig.wait_until("both replicas", |status| status.replicas.iter().all(|r| r.state == ReplicaState::Ready));
        rig.controls[0].fault_at(5, fault);
        let prompts: Vec<_> = (0..12).map(|which| prompt(which, 6)).collect();
        let mut streams: Vec<_> = prompts.iter().map(|prompt| rig.submit(rig.submission(prompt, 25))).collect();
        let mut done = 0;
        for (stream, prompt) in streams.iter_mut().zip(&prompts) {
            let got = read(stream);
            assert_is_a_beginning(&got, prompt, 25);
            match got.outcome() {
                Outcome::Length => done += 1,
                other => assert_eq!(other, Outcome::Failed(Failure::ReplicaLost)),
            }
        }
        assert!(
            (8..12).contains(&done),
            "two answers at most had begun at the lost replica, others are placed again: {done}"
        );
        drop(streams);
        let status = rig.engine.status();
        assert_eq!(status.replicas[0].state, ReplicaState::Lost);
        assert!(status.ready && status.live, "the other one serves");
        rig.wait_until_empty();
        assert!(rig.engine.shutdown());
    }
}

#[test]
fn with_no_executor_left_everything_ends_and_the_process_should_be_restarted() {
    let rig = Rig::new(1, Sizes { slots: 1, ..Sizes::default() }, EngineConfig::default());
    rig.controls[0].hold();
    rig.controls[0].fault_at(3, support::Fault::Executor);
    let mut streams: Vec<_> = (0..4).map(|which| rig.submit(rig.submission(&prompt(which, 4), 8))).collect();
    rig.wait_until("a queue", |status| status.queue.placed_requests > 0 && status.queue.waiting_requests > 0);
    rig.controls[0].release();
    for stream in &mut streams {
        let outcome = read(stream).outcome();
        assert!(matches!(outcome, Outcome::Failed(failure) if failure.is_retryable()), "{outcome:?}");
    }
    let status = rig.engine.status();
    assert!(!status.ready && !status.live);
    assert_eq!(rig.metric("penstock_replicas{model_name=\"fake\",state=\"terminated\"}"), 1.0);
    assert_eq!(rig.engine.submit(rig.submission(&prompt(2, 4), 4)).unwrap_err(), SubmitError::NotRunning);
    assert!(rig.engine.shutdown());
}

#[test]
fn a_wrong_answer_of_the_executor_freezes_the_replica_and_it_starts_anew() {
    for inflight_max in [1, 2] {
        let rig = Rig::new(1, Sizes::default(), overlap(inflight_max));
        rig.controls[0].fault_at(3, support::Fault::WrongRows);
        let prompt = prompt(1, 8);
        let mut stream = rig.submit(rig.submission(&prompt, 30));
        let got = read(&mut stream);
        assert_is_a_beginning(&got, &prompt, 30);
        assert_eq!(got.outcome(), Outcome::Failed(Failure::ReplicaLost));
        drop(stream);
        rig.wait_until("a new epoch", |status| status.ready && status.replicas[0].epoch.0 == 2);
        let got = read(&mut rig.submit(rig.submission(&prompt, 30)));
        assert_eq!(got.tokens, [answer(&prompt, &SamplingParams::default(), 30)]);
        assert_eq!(rig.metric("penstock_replica_freezes_total"), 1.0);
        rig.wait_until_empty();
    }
}

#[test]
fn a_request_without_a_token_yet_is_placed_again_after_a_freeze() {
    let rig = Rig::usual();
    rig.controls[0].fault_next(support::Fault::WrongRows);
    let prompt = prompt(1, 8);
    let got = read(&mut rig.submit(rig.submission(&prompt, 30)));
    assert_eq!(got.tokens, [answer(&prompt, &SamplingParams::default(), 30)]);
    assert_eq!(rig.engine.status().replicas[0].epoch.0, 2);
}

#[test]
fn what_breaks_a_replica_again_and_again_is_given_up() {
    let rig = Rig::usual();
    for epoch in 1..=6 {
        rig.wait_until("the epoch", |status| status.ready && status.replicas[0].epoch.0 == epoch);
        // Behind its first token: before it, the request would be placed again.
        rig.controls[0].fault_at(rig.controls[0].steps() + 2, support::Fault::WrongRows);
        let got = read(&mut rig.submit(rig.submission(&prompt(1, 4), 4)));
        assert_eq!(got.outcome(), Outcome::Failed(Failure::ReplicaLost));
    }
    rig.wait_until("the end of patience", |status| status.replicas[0].state == ReplicaState::Lost);
    assert_eq!(rig.metric("penstock_replica_freezes_total"), 6.0);
}

#[test]
fn a_replica_machine_that_panics_freezes_alone_and_starts_anew() {
    for inflight_max in [1, 2] {
        let fuse = Arc::new(AtomicI64::new(i64::MAX));
        let fused = Arc::clone(&fuse);
        let policies = PolicySource::new(move |machine| match machine {
            Machine::Replica(1) => Box::new(support::FusedPolicies::new(&fused)),
            _ => Box::new(NativePolicies::new(penstock_base::Generation(1), 4_096)),
        });
        let config = EngineConfig { policies, ..overlap(inflight_max) };
        let rig = Rig::new(2, Sizes { slots: 2, ..Sizes::default() }, config);
        rig.controls.iter().for_each(|control| control.hold());
        let prompts: Vec<_> = (0..10).map(|which| prompt(which, 6)).collect();
        let mut streams: Vec<_> = prompts.iter().map(|prompt| rig.submit(rig.submission(prompt, 25))).collect();
        rig.wait_until("work on both", |status| status.replicas.iter().all(|r| r.load.running_requests > 0));
        fuse.store(1, Ordering::Relaxed);
        rig.controls.iter().for_each(|control| control.release());
        for (stream, prompt) in streams.iter_mut().zip(&prompts) {
            let got = read(stream);
            assert_is_a_beginning(&got, prompt, 25);
            assert!(matches!(got.outcome(), Outcome::Length | Outcome::Failed(Failure::ReplicaLost)), "{:?}", got.end);
        }
        drop(streams);
        rig.wait_until_empty();
        let replicas = rig.engine.status().replicas;
        assert_eq!((replicas[0].epoch.0, replicas[1].epoch.0), (1, 2));
        assert_eq!(replicas[1].state, ReplicaState::Ready);
        assert_eq!(rig.metric("penstock_replica_freezes_total{cause=\"panic\""), 1.0);
        let got = read(&mut rig.submit(rig.submission(&prompts[0], 25)));
        assert_eq!(got.tokens, [answer(&prompts[0], &SamplingParams::default(), 25)]);
    }
}

#[test]
fn a_drain_lets_streams_finish() {
    let rig = Rig::usual();
    let prompt = prompt(1, 8);
    rig.controls[0].hold();
    let mut stream = rig.submit(rig.submission(&prompt, 10));
    rig.engine.begin_drain();
    assert!(!rig.engine.status().ready);
    assert_eq!(rig.engine.submit(rig.submission(&prompt, 10)).unwrap_err(), SubmitError::Draining);
    rig.controls[0].release();
    std::thread::scope(|scope| {
        let reader = scope.spawn(move || read(&mut stream));
        let report = rig.engine.drain(Duration::from_s(60));
        assert_eq!((report.cancelled, report.left), (0, 0));
        assert_eq!(reader.join().unwrap().tokens, [answer(&prompt, &SamplingParams::default(), 10)]);
    });
    assert!(rig.engine.shutdown());
}

#[test]
fn a_drain_s_grace_ends_what_is_left() {
    let limits = EngineLimits { drain_flush: Duration::from_ms(50), ..EngineLimits::default() };
    let rig = Rig::new(1, Sizes { slots: 1, ..Sizes::default() }, EngineConfig { limits, ..EngineConfig::default() });
    rig.controls[0].hold();
    let mut streams: Vec<_> = (0..3).map(|which| rig.submit(rig.submission(&prompt(which, 8), 10))).collect();
    let report = rig.engine.drain(Duration::from_ms(20));
    assert_eq!((report.cancelled, report.left), (3, 3), "nobody has read the ends yet");
    for stream in &mut streams {
        assert_eq!(read(stream).outcome(), Outcome::Cancelled(CancelCause::Drain));
    }
    rig.controls[0].release();
    drop(streams);
    rig.wait_until_empty();
    assert!(rig.engine.shutdown());
    assert!(rig.engine.shutdown(), "a second time is nothing");
}

#[test]
fn a_shutdown_ends_open_streams_and_later_submissions_are_refused() {
    let rig = Rig::usual();
    rig.controls[0].hold();
    rig.controls[0].let_through(2);
    let mut stream = rig.submit(rig.submission(&prompt(1, 8), 1_000));
    rig.wait_until("text", |status| status.queue.send_buffer_bytes > 200);
    rig.controls[0].release();
    assert!(rig.engine.shutdown());
    assert!(matches!(read(&mut stream).outcome(), Outcome::Cancelled(CancelCause::Drain)));
    assert_eq!(rig.engine.submit(rig.submission(&prompt(1, 8), 10)).unwrap_err(), SubmitError::Draining);
}

#[test]
fn a_gateway_that_panics_ends_everything_and_says_so() {
    use penstock_engine::{Engine, ServedModel};

    let policies = PolicySource::new(|machine| match machine {
        Machine::Gateway => Box::new(support::PanickingPolicies),
        Machine::Replica(_) => Box::new(NativePolicies::new(penstock_base::Generation(1), 4_096)),
    });
    let config = EngineConfig { policies, ..EngineConfig::default() };
    let control = support::Control::open();
    let model = ServedModel {
        name: "fake".into(),
        namespace: penstock_model::Namespace([0; 32]),
        vocabulary: Arc::new(Letters),
    };
    let executor = Box::new(FakeExecutor::new(Sizes::default(), control));
    let engine = Engine::start(config, model, vec![executor]).unwrap();
    // The first question to its policies may be asked before the request arrives: then the submission itself is refused.
    match engine.submit(support::submission(&engine, &prompt(1, 4), 4)) {
        Ok((_, mut stream)) => assert_eq!(read(&mut stream).outcome(), Outcome::Failed(Failure::Internal)),
        Err(error) => assert_eq!(error, SubmitError::NotRunning),
    }
    let deadline = std::time::Instant::now() + support::PATIENCE;
    while engine.status().live {
        assert!(std::time::Instant::now() < deadline);
        std::thread::yield_now();
    }
    assert!(!engine.status().ready);
    assert_eq!(engine.submit(support::submission(&engine, &prompt(1, 4), 4)).unwrap_err(), SubmitError::NotRunning);
    assert!(engine.shutdown());
}

#[test]
fn a_replica_is_named_by_what_it_does_and_gets_work_only_when_ready() {
    let rig = Rig::new(2, Sizes::default(), EngineConfig::default());
    let shown = |state| rig.metric(&format!("penstock_replicas{{model_name=\"fake\",state=\"{state}\"}}"));
    rig.wait_until("both", |status| status.replicas.iter().all(|replica| replica.state == ReplicaState::Ready));
    assert_eq!((shown("ready"), shown("draining"), shown("unhealthy")), (2.0, 0.0, 0.0));
    let first = rig.engine.status().replicas[0].replica;
    rig.engine.hold(first);
    rig.wait_until("one that drains", |status| status.replicas[0].state == ReplicaState::Draining);
    assert!(rig.engine.status().ready, "the other one takes work");
    let before = rig.controls[0].steps();
    for which in 0..4 {
        assert_eq!(read(&mut rig.submit(rig.submission(&prompt(which, 8), 4))).outcome(), Outcome::Length);
    }
    assert_eq!(rig.controls[0].steps(), before, "nothing new went to it");
    rig.engine.begin_drain();
    let status = rig.engine.status();
    assert!(!status.ready && status.live && status.replicas.iter().all(|r| r.state == ReplicaState::Draining));
    assert_eq!((shown("ready"), shown("draining")), (0.0, 2.0));
    assert!(rig.engine.shutdown());
}

#[test]
fn an_output_side_that_panics_ends_every_stream() {
    use penstock_engine::{Engine, ServedModel};
    let control = support::Control::open();
    control.hold();
    let model = ServedModel {
        name: "fake".into(),
        namespace: penstock_model::Namespace([0; 32]),
        vocabulary: Arc::new(support::PanickingVocabulary),
    };
    let executor = Box::new(FakeExecutor::new(Sizes::default(), Arc::clone(&control)));
    let engine = Engine::start(EngineConfig::default(), model, vec![executor]).unwrap();
    let submit = |which| engine.submit(support::submission(&engine, &prompt(which, 4), 4)).unwrap().1;
    let mut streams: Vec<_> = (0..20).map(submit).collect();
    control.release();
    for stream in &mut streams {
        assert_eq!(read(stream).outcome(), Outcome::Failed(Failure::Internal));
    }
    assert!(!engine.status().live);
    assert!(engine.shutdown());
}

#[test]
fn executors_that_do_not_fit_together_are_refused() {
    use penstock_engine::{Engine, ServedModel};
    let model = || ServedModel {
        name: "fake".into(),
        namespace: penstock_model::Namespace([0; 32]),
        vocabulary: Arc::new(Letters),
    };
    let fake = |sizes| Box::new(FakeExecutor::new(sizes, support::Control::open())) as Box<dyn penstock_exec::Executor>;
    assert!(matches!(Engine::start(EngineConfig::default(), model(), Vec::new()), Err(EngineError::Executors(0))));
    let mixed = vec![fake(Sizes::default()), fake(Sizes { block_size_tokens: 8, ..Sizes::default() })];
    let refused = Engine::start(EngineConfig::default(), model(), mixed);
    assert!(matches!(refused, Err(EngineError::Mixed { replica: 1, what: "block size" })));
    let config = overlap(3);
    let refused = Engine::start(config, model(), vec![fake(Sizes::default())]);
    assert!(matches!(refused, Err(EngineError::Config { key: "inflight_max", value: 3, .. })));
}

#[test]
fn an_idle_engine_computes_nothing_and_stays_ready() {
    let rig = Rig::usual();
    read(&mut rig.submit(rig.submission(&prompt(1, 8), 10)));
    rig.wait_until_empty();
    let steps = rig.controls[0].steps();
    std::thread::sleep(std::time::Duration::from_millis(300));
    assert_eq!(rig.controls[0].steps(), steps);
    assert!(rig.engine.status().ready);
    for machine in ["gateway", "replica"] {
        assert_eq!(rig.metric(&format!("penstock_stale_inputs_total{{machine=\"{machine}\"")), 0.0, "{machine}");
    }
}
