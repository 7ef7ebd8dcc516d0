//! Prompts computed by one worker and decoded by another one, each an engine of its own, with KV going by each transport: the answers are
//! those of one process, and what breaks ends once.

mod support;

use std::sync::Arc;
use std::time::Duration as StdDuration;

use penstock_base::{Failure, Outcome};
use penstock_engine::{EngineConfig, EventStream, HandoffSetup, ReplicaState, Role, TransferKind, TransferSettings};
use penstock_exec::SamplingParams;
use penstock_sched::gateway::HandoffConfig;
use penstock_sched::replica::ReplicaConfig;
use support::cluster::{Front, Served, await_idle, runtime};
use support::{Got, PATIENCE, answer, prompt, read, submission};

fn config(kinds: &[TransferKind]) -> EngineConfig {
    let gateway = HandoffConfig { prefill_tokens_min: 12, ..HandoffConfig::default() };
    let memfd_dir =
        std::env::temp_dir().join(format!("penstock-workers-{}-{:?}", std::process::id(), std::thread::current().id()));
    let mut config = EngineConfig {
        replica: ReplicaConfig {
            step_tokens: 32,
            chunk_tokens: 16,
            check_every_step: true,
            ..ReplicaConfig::default()
        },
        handoff: Some(HandoffSetup { prefill: 0, gateway }),
        transfer: TransferSettings { kinds: kinds.to_vec(), memfd_dir, ..TransferSettings::default() },
        ..EngineConfig::default()
    };
    config.gateway.check_every_step = true;
    config
}

/// Greedy and drawn.
fn params(which: u32) -> SamplingParams {
    let temperature = if which.is_multiple_of(3) { 1.0 } else { 0.0 };
    SamplingParams { temperature, seed: u64::from(which), ..SamplingParams::default() }
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

fn expected(which: u32) -> Vec<u32> {
    let (prompt, max, params) = asked(which);
    answer(&prompt, &params, max)
}

fn assert_whole(which: u32, got: &Got) {
    assert!(got.outcome().is_success(), "{which}: {:?}", got.outcome());
    assert_eq!(got.tokens.first().cloned().unwrap_or_default(), expected(which), "request {which}");
}

fn metric(text: &str, name: &str) -> f64 {
    let lines = text.lines().filter(|line| line.starts_with(name));
    lines.filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok()).sum()
}

fn handed_off(front: &Front) -> f64 {
    metric(&front.engine.metrics_text(), "penstock_handoffs_total{end=\"handed_off\"")
}

/// Waits until a worker's mover reaches so many others.
fn await_ways(worker: &Served, count: usize) {
    let until = std::time::Instant::now() + PATIENCE;
    let reached = || worker.worker.engine().ways().iter().filter(|way| way.kind.is_some()).count();
    while reached() != count {
        assert!(std::time::Instant::now() < until, "{:?}", worker.worker.engine().ways());
        std::thread::sleep(StdDuration::from_millis(2));
    }
}

#[test]
fn answers_are_those_of_one_process_by_each_transport() {
    let runtime = runtime();
    for (kinds, taken) in [
        (vec![TransferKind::Tcp], TransferKind::Tcp),
        (vec![TransferKind::Memfd], TransferKind::Memfd),
        (vec![TransferKind::Memfd, TransferKind::Tcp], TransferKind::Memfd),
    ] {
        let workers = [
            Served::start(&runtime, 0, 10, Role::Prefill, config(&kinds)),
            Served::start(&runtime, 1, 20, Role::Decode, config(&kinds)),
            Served::start(&runtime, 2, 30, Role::Decode, config(&kinds)),
        ];
        let front = Front::start(7, config(&kinds));
        let _joined: Vec<_> = workers.iter().map(|worker| front.join(&runtime, worker)).collect();
        front.await_ready(3);
        await_ways(&workers[0], 2);
        for way in workers[0].worker.engine().ways() {
            assert_eq!(way.kind, Some(taken), "{way:?}");
            assert!(way.why.starts_with(&format!("{taken}: ")), "{way:?}");
        }
        let page = workers[0].worker.engine().metrics_text();
        assert_eq!(metric(&page, &format!("penstock_kv_transport_peers{{kind=\"{taken}\"")), 2.0);
        let mut streams: Vec<_> = (0..60).map(|which| (which, submit(&front, which))).collect();
        for (which, stream) in &mut streams {
            assert_whole(*which, &read(stream));
        }
        drop(streams);
        workers.iter().for_each(await_idle);
        assert!(handed_off(&front) > 30.0, "{taken}: {}", front.engine.metrics_text());
        let page = workers[0].worker.engine().metrics_text();
        assert!(metric(&page, "penstock_kv_transfer_bytes_total") > 0.0);
        assert!(front.engine.shutdown());
        workers.into_iter().for_each(Served::stop);
    }
}

/// Each stream ends once: whole, or as lost with the beginning of what it should be.
fn read_all(streams: Vec<(u32, EventStream)>) -> usize {
    let mut whole = 0;
    for (which, mut stream) in streams {
        let got = read(&mut stream);
        let tokens = got.tokens.first().cloned().unwrap_or_default();
        assert!(expected(which).starts_with(&tokens), "request {which}: {got:?}");
        match got.outcome() {
            outcome if outcome.is_success() => {
                assert_eq!(tokens, expected(which), "request {which}");
                whole += 1;
            }
            outcome => assert_eq!(outcome, Outcome::Failed(Failure::ReplicaLost), "request {which}"),
        }
    }
    whole
}

#[test]
fn a_worker_that_goes_takes_only_its_own_along_and_its_next_life_is_used_again() {
    let runtime = runtime();
    for (kind, lost) in
        [(TransferKind::Tcp, 0), (TransferKind::Tcp, 1), (TransferKind::Memfd, 0), (TransferKind::Memfd, 1)]
    {
        let kinds = [kind];
        let role = |which| if which == 0 { Role::Prefill } else { Role::Decode };
        let mut workers: Vec<_> =
            (0..3).map(|which| Served::start(&runtime, which, 10, role(which), config(&kinds))).collect();
        let front = Front::start(7, config(&kinds));
        let joined: Vec<_> = workers.iter().map(|worker| front.join(&runtime, worker)).collect();
        front.await_ready(3);
        let streams: Vec<_> = (0..40).map(|which| (which, submit(&front, which))).collect();
        // In the middle of it.
        std::thread::sleep(StdDuration::from_millis(15));
        workers.remove(lost).stop();
        let whole = read_all(streams);
        assert!(whole > 0, "{kind}: the others go on");
        drop(joined);
        let until = std::time::Instant::now() + PATIENCE;
        let is_gone = || front.engine.status().replicas.iter().filter(|r| r.state == ReplicaState::Ready).count() == 2;
        while !is_gone() {
            assert!(std::time::Instant::now() < until, "{:?}", front.engine.status().replicas);
            std::thread::sleep(StdDuration::from_millis(2));
        }
        workers.iter().for_each(await_idle);
        // The same worker in its next life.
        let next = Served::start(&runtime, lost as u32, 1_000, role(lost as u32), config(&kinds));
        let _joined = front.join(&runtime, &next);
        front.await_ready(3);
        let before = handed_off(&front);
        let streams: Vec<_> = (100..140).map(|which| (which, submit(&front, which))).collect();
        assert_eq!(read_all(streams), 40, "{kind}");
        assert!(handed_off(&front) > before + 10.0, "{kind}: {} then {}", before, handed_off(&front));
        workers.push(next);
        workers.iter().for_each(await_idle);
        assert!(front.engine.shutdown());
        workers.into_iter().for_each(Served::stop);
    }
}

#[test]
fn workers_without_a_way_between_them_still_answer() {
    let runtime = runtime();
    let computes = Served::start(&runtime, 0, 1, Role::Prefill, config(&[TransferKind::Tcp]));
    let decodes = Served::start(&runtime, 1, 1, Role::Decode, config(&[TransferKind::Memfd]));
    let front = Front::start(3, config(&[]));
    let _joined = [front.join(&runtime, &computes), front.join(&runtime, &decodes)];
    front.await_ready(2);
    let ways = || computes.worker.engine().ways();
    let until = std::time::Instant::now() + PATIENCE;
    while ways().is_empty() {
        assert!(std::time::Instant::now() < until);
        std::thread::sleep(StdDuration::from_millis(2));
    }
    let way = ways().remove(0);
    assert_eq!(way.kind, None);
    assert!(way.why.starts_with("no transport in common: "), "{way:?}");
    let mut stream = submit(&front, 45);
    assert_whole(45, &read(&mut stream));
    assert_eq!(handed_off(&front), 0.0);
    drop(stream);
    assert!(front.engine.shutdown());
    computes.stop();
    decodes.stop();
}
