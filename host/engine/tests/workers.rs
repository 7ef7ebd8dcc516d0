//! A gateway and workers that are engines of their own, with real connections between them: the answers are those of one process, and what
//! breaks ends once, typed, on both sides.

mod support;

use std::sync::Arc;

use penstock_base::{Duration, Failure, GatewayEpoch, Outcome};
use penstock_engine::{
    EngineConfig, EventStream, JoinError, Machine, PolicySource, ReplicaState, Role, SubmitError, gateway_greeting,
};
use penstock_exec::SamplingParams;
use penstock_sched::replica::ReplicaConfig;
use support::cluster::{Front, Served, await_idle, runtime};
use support::{Got, STOP_TOKEN, answer, prompt, read, submission};

fn config() -> EngineConfig {
    let mut config = EngineConfig {
        replica: ReplicaConfig {
            step_tokens: 32,
            chunk_tokens: 16,
            check_every_step: true,
            ..ReplicaConfig::default()
        },
        ..EngineConfig::default()
    };
    config.gateway.check_every_step = true;
    config
}

/// Greedy, drawn, with a token that ends it.
fn params(which: u32) -> SamplingParams {
    let stop_tokens = if which.is_multiple_of(2) { vec![STOP_TOKEN, which % 64] } else { Vec::new() };
    let temperature = if which.is_multiple_of(3) { 1.0 } else { 0.0 };
    SamplingParams { temperature, seed: u64::from(which), stop_tokens, ..SamplingParams::default() }
}

fn asked(which: u32) -> (Vec<u32>, u32, SamplingParams) {
    (prompt(which, 6 + which % 50), 1 + which % 17, params(which))
}

fn submit(front: &Front, which: u32) -> EventStream {
    let (prompt, max, params) = asked(which);
    let mut submission = submission(&front.engine, &prompt, max);
    submission.sampling = Arc::new(params);
    front.engine.submit(submission).expect("it has room").1
}

fn assert_whole(which: u32, got: &Got) {
    let (prompt, max, params) = asked(which);
    let expected = answer(&prompt, &params, max);
    assert!(got.outcome().is_success(), "{which}: {:?}", got.outcome());
    assert_eq!(got.tokens.first().cloned().unwrap_or_default(), expected, "request {which}");
    assert_eq!(got.usage().output_tokens as usize, expected.len(), "request {which}");
}

fn is_a_beginning(which: u32, got: &Got) -> bool {
    let (prompt, max, params) = asked(which);
    answer(&prompt, &params, max).starts_with(got.tokens.first().map_or(&[][..], Vec::as_slice))
}

#[test]
fn answers_are_those_of_one_process() {
    let runtime = runtime();
    let workers = [
        Served::start(&runtime, 0, 10, Role::Unified, config()),
        Served::start(&runtime, 1, 20, Role::Unified, config()),
    ];
    let front = Front::start(7, config());
    assert!(!front.engine.status().ready, "nobody is there to serve");
    // What comes before the first worker waits for it.
    let mut early = submit(&front, 3);
    for worker in &workers {
        let (joined, _) = front.join(&runtime, worker);
        assert_eq!((joined.replica, joined.epoch), (worker.identity.replica, worker.identity.epoch));
    }
    front.await_ready(2);
    assert!(front.engine.status().ready);
    assert_whole(3, &read(&mut early));
    let mut streams: Vec<_> = (0..60).map(|which| (which, submit(&front, which))).collect();
    for (which, stream) in &mut streams {
        assert_whole(*which, &read(stream));
    }
    drop(streams);
    workers.iter().for_each(await_idle);
    let steps: Vec<_> = workers.iter().map(|worker| worker.control.steps()).collect();
    assert!(steps.iter().all(|steps| *steps > 5), "both had work: {steps:?}");
    assert!(front.engine.shutdown());
    workers.into_iter().for_each(Served::stop);
}

#[test]
fn several_answers_and_log_probabilities_cross_over() {
    let runtime = runtime();
    let worker = Served::start(&runtime, 0, 1, Role::Unified, config());
    let front = Front::start(1, config());
    let _joined = front.join(&runtime, &worker);
    let prompt = prompt(5, 20);
    let mut wanted = submission(&front.engine, &prompt, 6);
    wanted.sequences = 3;
    wanted.sampling =
        Arc::new(SamplingParams { temperature: 1.0, seed: 9, logprobs: Some(2), ..SamplingParams::default() });
    let got = read(&mut front.engine.submit(wanted.clone()).expect("room").1);
    // The same from an engine that is one process.
    let rig = support::Rig::new(1, support::Sizes::default(), config());
    let whole = read(&mut rig.submit(wanted));
    assert_eq!((got.tokens.len(), &got.tokens, &got.texts), (3, &whole.tokens, &whole.texts));
    assert_eq!(got.usage(), whole.usage());
}

#[test]
fn a_cut_session_ends_or_repeats_what_ran_and_the_worker_comes_back() {
    let runtime = runtime();
    let worker = Served::start(&runtime, 0, 1, Role::Unified, config());
    let front = Front::start(1, config());
    let (mut joined, link) = front.join(&runtime, &worker);
    front.await_ready(1);
    worker.control.let_through(30);
    // One that cannot be over by then, whoever goes first.
    let long = prompt(99, 10);
    let mut begun = front.engine.submit(submission(&front.engine, &long, 200)).expect("it has room").1;
    let mut streams: Vec<_> = (0..12).map(|which| (which, submit(&front, which))).collect();
    let deadline = std::time::Instant::now() + support::PATIENCE;
    let tokens = || {
        let page = front.engine.metrics_text();
        let line = page.lines().find(|line| line.starts_with("vllm:generation_tokens_total")).map(str::to_owned);
        line.and_then(|line| line.rsplit(' ').next()?.parse::<f64>().ok()).unwrap_or(0.0)
    };
    while tokens() < 5.0 {
        assert!(std::time::Instant::now() < deadline);
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
    link.close();
    runtime.block_on(&mut joined.ended).expect("it is told");
    worker.control.release();
    front.await_ready(0);
    // The same life of the worker, another session.
    let (again, _) = front.join(&runtime, &worker);
    assert_eq!(again.epoch, worker.identity.epoch);
    let got = read(&mut begun);
    let expected = answer(&long, &SamplingParams::default(), 200);
    assert_eq!(got.outcome(), Outcome::Failed(Failure::ReplicaLost), "it had been read in part");
    assert!(!got.tokens[0].is_empty() && expected.starts_with(&got.tokens[0]));
    let mut whole = 0;
    for (which, stream) in &mut streams {
        let got = read(stream);
        assert!(is_a_beginning(*which, &got), "request {which}");
        match got.outcome() {
            Outcome::Failed(Failure::ReplicaLost) => {}
            outcome => {
                assert!(outcome.is_success(), "request {which}: {outcome:?}");
                assert_whole(*which, &got);
                whole += 1;
            }
        }
    }
    assert!(whole > 0, "what nobody has read of is repeated");
    for which in 20..30 {
        assert_whole(which, &read(&mut submit(&front, which)));
    }
    await_idle(&worker);
}

#[test]
fn a_worker_that_starts_its_replica_anew_says_so() {
    let runtime = runtime();
    let worker = Served::start(&runtime, 0, 5, Role::Unified, config());
    let front = Front::start(1, config());
    let _joined = front.join(&runtime, &worker);
    front.await_ready(1);
    worker.control.fault_at(4, support::Fault::WrongRows);
    let mut streams: Vec<_> = (0..8).map(|which| (which, submit(&front, which))).collect();
    for (which, stream) in &mut streams {
        let got = read(stream);
        assert!(is_a_beginning(*which, &got));
        assert!(matches!(got.outcome(), Outcome::Failed(Failure::ReplicaLost)) || got.outcome().is_success());
    }
    front.await_ready(1);
    assert_eq!(front.engine.status().replicas[0].epoch.0, 6, "the next epoch of the same worker");
    assert_whole(40, &read(&mut submit(&front, 40)));
    await_idle(&worker);
}

#[test]
fn two_gateways_share_a_worker_and_one_that_leaves_takes_its_work_along() {
    let runtime = runtime();
    let worker = Served::start(&runtime, 0, 1, Role::Unified, config());
    let fronts = [Front::start(3, config()), Front::start(4, config())];
    let links: Vec<_> = fronts.iter().map(|front| front.join(&runtime, &worker)).collect();
    let mut streams = Vec::new();
    for which in 0..40 {
        let front = which as usize % 2;
        streams.push((which, submit(&fronts[front], which)));
    }
    for (which, stream) in &mut streams {
        assert_whole(*which, &read(stream));
    }
    drop(streams);
    worker.control.hold();
    let mut streams: Vec<_> = (0..8).map(|which| (which, submit(&fronts[which as usize % 2], which))).collect();
    let deadline = std::time::Instant::now() + support::PATIENCE;
    while worker.worker.engine().status().queue.placed_requests < 2 {
        assert!(std::time::Instant::now() < deadline);
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
    links[0].1.close();
    let gone = || worker.worker.gateways().len() == 1;
    while !gone() {
        assert!(std::time::Instant::now() < deadline);
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
    worker.control.release();
    for (which, stream) in streams.iter_mut().filter(|(which, _)| which % 2 == 1) {
        assert_whole(*which, &read(stream));
    }
    await_idle(&worker);
    assert!(fronts[0].engine.shutdown());
}

#[test]
fn a_gateway_that_starts_anew_finds_the_worker_empty() {
    let runtime = runtime();
    let worker = Served::start(&runtime, 0, 1, Role::Unified, config());
    let front = Front::start(1, config());
    let (_joined, link) = front.join(&runtime, &worker);
    front.await_ready(1);
    worker.control.hold();
    let _streams: Vec<_> = (0..6).map(|which| submit(&front, which)).collect();
    let deadline = std::time::Instant::now() + support::PATIENCE;
    while worker.worker.engine().status().queue.placed_requests == 0 {
        assert!(std::time::Instant::now() < deadline);
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
    // Its process is gone: nothing is said any more.
    link.close();
    let after = Front::start(2, config());
    let _after = after.join(&runtime, &worker);
    worker.control.release();
    assert_whole(31, &read(&mut submit(&after, 31)));
    await_idle(&worker);
}

#[test]
fn a_gateway_tells_workers_that_do_not_fit_why() {
    let runtime = runtime();
    let worker = Served::start(&runtime, 0, 1, Role::Unified, config());
    let twin = Served::start_as(&runtime, (0, 1), 1, Role::Unified, config());
    let other = Served::start(&runtime, 1, 1, Role::Unified, config());
    let front = Front::start_for(1, config(), Front::sizes(), 1);
    let _joined = front.join(&runtime, &worker);
    front.await_ready(1);
    let number = worker.identity.replica.0;
    let taken = front.try_join(&runtime, &twin).map(|_| ());
    assert!(matches!(taken, Err(JoinError::Taken { replica }) if replica == number), "{taken:?}");
    let full = front.try_join(&runtime, &other).map(|_| ());
    assert!(matches!(full, Err(JoinError::Full(1))), "{full:?}");
    let mut sizes = Front::sizes();
    sizes.kv_token_bytes += 1;
    let there = Front::sizes().kv_token_bytes;
    let odd = Front::start_for(2, config(), sizes, 8);
    let differs = odd.try_join(&runtime, &other).map(|_| ());
    let fits = |error: &JoinError| matches!(error, JoinError::Differs { here, there: at, .. } if (*here, *at) == (there + 1, there));
    assert!(differs.as_ref().is_err_and(fits), "{differs:?}");
    // Whoever came first is none the worse for it.
    assert_whole(2, &read(&mut submit(&front, 2)));
    // An engine with replicas of its own takes no workers, and a worker no requests of clients.
    let rig = support::Rig::usual();
    let conversation = support::cluster::dial_raw(&runtime, &other, 9, gateway_greeting(GatewayEpoch(9)));
    assert!(matches!(rig.engine.join(conversation), Err(JoinError::NotRunning)));
    let engine = worker.worker.engine();
    assert!(matches!(engine.submit(submission(engine, &[1, 2], 3)), Err(SubmitError::NotRunning)));
}

#[test]
fn a_worker_turns_gateways_away_that_it_cannot_tell_apart_or_understand() {
    let runtime = runtime();
    let worker = Served::start(&runtime, 0, 1, Role::Unified, config());
    let front = Front::start(5, config());
    let _joined = front.join(&runtime, &worker);
    front.await_ready(1);
    // Another process with the same number, and one that greets in another language: both are left.
    for (process, greeting) in [(77, gateway_greeting(GatewayEpoch(5))), (78, bytes::Bytes::from_static(&[9, 9]))] {
        let mut conversation = support::cluster::dial_raw(&runtime, &worker, process, greeting);
        let left = runtime.block_on(async {
            while conversation.receive().await.is_some() {}
            conversation.link().ended()
        });
        assert_eq!(left, Some(penstock_control::Ended::Bye), "process {process}");
        assert_eq!(worker.worker.gateways(), [GatewayEpoch(5)]);
    }
    assert_whole(3, &read(&mut submit(&front, 3)));
}

#[test]
fn a_worker_drains_what_it_has() {
    let runtime = runtime();
    let workers = [
        Served::start(&runtime, 0, 1, Role::Unified, config()),
        Served::start(&runtime, 1, 1, Role::Unified, config()),
    ];
    let front = Front::start(1, config());
    let mut joined: Vec<_> = workers.iter().map(|worker| front.join(&runtime, worker)).collect();
    front.await_ready(2);
    workers[0].control.hold();
    let mut streams: Vec<_> = (0..12).map(|which| (which, submit(&front, which))).collect();
    let deadline = std::time::Instant::now() + support::PATIENCE;
    while workers[0].worker.engine().status().queue.placed_requests == 0 {
        assert!(std::time::Instant::now() < deadline);
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
    workers[0].worker.engine().begin_drain();
    workers[0].control.release();
    let report = workers[0].worker.engine().drain(Duration::from_s(60));
    assert_eq!(report.cancelled, 0, "all of it has finished");
    let before = workers[0].control.tokens();
    for (which, stream) in &mut streams {
        assert_whole(*which, &read(stream));
    }
    for which in 12..24 {
        assert_whole(which, &read(&mut submit(&front, which)));
    }
    assert_eq!(workers[0].control.tokens(), before, "nothing new came");
    assert!(workers[0].worker.engine().shutdown());
    let why = runtime.block_on(&mut joined[0].0.ended).expect("it is told");
    assert_eq!(why, penstock_control::Ended::Bye);
    assert_whole(50, &read(&mut submit(&front, 50)));
}

#[test]
fn a_worker_has_policies_of_its_own() {
    let runtime = runtime();
    let worker = Served::start(&runtime, 0, 1, Role::Unified, config());
    let front = Front::start(1, config());
    let _joined = front.join(&runtime, &worker);
    let switched = worker.worker.engine().activate(&PolicySource::native()).expect("native policies serve");
    assert_eq!(switched.generation.0, 2);
    assert_eq!(switched.pauses.iter().map(|(machine, _)| *machine).collect::<Vec<_>>(), [Machine::Replica(0)]);
    assert_eq!(worker.worker.engine().policy_generation().0, 2);
    let switched = front.engine.activate(&PolicySource::native()).expect("native policies serve");
    assert_eq!(switched.pauses.iter().map(|(machine, _)| *machine).collect::<Vec<_>>(), [Machine::Gateway]);
    assert_whole(8, &read(&mut submit(&front, 8)));
    assert_eq!(worker.worker.engine().status().replicas[0].state, ReplicaState::Ready);
}

#[test]
fn nonsense_ends_the_session_and_nothing_else() {
    let runtime = runtime();
    let worker = Served::start(&runtime, 0, 1, Role::Unified, config());
    let front = Front::start(1, config());
    let (mut joined, link) = front.join(&runtime, &worker);
    front.await_ready(1);
    link.send(bytes::Bytes::from_static(&[1, 2, 3])).expect("it is open");
    runtime.block_on(&mut joined.ended).expect("the worker has ended it");
    let _joined = front.join(&runtime, &worker);
    assert_whole(9, &read(&mut submit(&front, 9)));
    await_idle(&worker);
}

#[test]
fn what_a_client_got_before_it_left_is_charged() {
    let runtime = runtime();
    let worker = Served::start(&runtime, 0, 1, Role::Unified, config());
    let front = Front::start(1, config());
    let _joined = front.join(&runtime, &worker);
    front.await_ready(1);
    // A quota of tokens that a few cut answers use up, and that prompts alone would not.
    let mut asked = submission(&front.engine, &prompt(3, 8), 40);
    asked.terms.window_tokens_max = 100;
    let mut taken = 0;
    for _ in 0..12 {
        asked.arrived = front.engine.clock().now();
        worker.control.hold();
        let Ok((ticket, mut stream)) = front.engine.submit(asked.clone()) else { break };
        worker.control.let_through(24);
        let mut got = Got::default();
        while got.tokens.first().map_or(0, Vec::len) < 4 && got.end.is_none() {
            let event = stream.recv_timeout(support::PATIENCE).expect("it goes on").expect("it has not ended");
            got.take(event);
        }
        if got.end.is_some() {
            break;
        }
        assert!(front.engine.cancel(ticket.request, penstock_base::CancelCause::Client));
        worker.control.release();
        read(&mut stream);
        drop(stream);
        await_idle(&worker);
        taken += 1;
    }
    // 8 prompt tokens and at least 4 of output each, and 48 reserved for the one that asks: prompts alone would let all twelve in.
    assert!((1..=5).contains(&taken), "{taken} were taken");
}
