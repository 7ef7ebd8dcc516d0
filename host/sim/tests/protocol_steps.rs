//! One hand-off, with the real gateway and replica machines, and one thing that goes wrong right after each step of any machine that has to
//! do with it: each party crashes, each link is cut. And the checkers themselves: what a driver does wrong on purpose must be found.

#![allow(clippy::disallowed_macros, reason = "figures of a run are printed")]

use penstock_base::{Duration, Instant};
use penstock_sched::handoff::{Fallback, Timing};
use penstock_sim::agenda::{Latency, Node};
use penstock_sim::network::Ways;
use penstock_sim::workload::{Wish, wished};
use penstock_sim::{
    Cluster, Faults, Figures, Mishap, Natives, PolicyKind, Report, Sabotage, Scenario, Violation, run_with,
};

const SENDER: usize = 0;
const RECEIVER: usize = 1;

/// One replica that computes prompts, one that decodes, and two requests that are handed off.
fn scenario(fallback: Fallback) -> Scenario {
    let mut scenario = Scenario::from_seed(5, 1);
    scenario.faults = Faults::NONE;
    scenario.policies = PolicyKind::Plain;
    scenario.gateways = 1;
    scenario.gateway = penstock_sched::gateway::GatewayConfig { block_size_tokens: 4, ..Default::default() };
    scenario.replica = penstock_sched::replica::ReplicaConfig {
        blocks: 64,
        block_size_tokens: 4,
        slots: 4,
        step_tokens: 32,
        chunk_tokens: 12,
        context_tokens_max: 128,
        check_every_step: false,
        ..Default::default()
    };
    scenario.latency = Latency { base: Duration::from_us(300), jitter: Duration::from_us(200) };
    let mut cluster = Cluster::of(vec![1, 2], 4);
    cluster.handoff.prefill_tokens_min = 8;
    cluster.handoff.fallback = fallback;
    // Long enough for everything, short enough that two thousand runs end.
    let timing = Timing { transfer: Duration::from_s(8), waiting: Duration::from_s(3), ..Timing::default() };
    cluster.handoff.timing = timing;
    cluster.party.timing = timing;
    cluster.party.chunk_blocks = 2;
    cluster.party.window = 3;
    cluster.session_lease = Duration::from_s(2);
    scenario.replicas = cluster.roles.len();
    scenario.gateway.handoff = Some(cluster.handoff);
    scenario.cluster = Some(cluster);
    scenario
}

fn play(scenario: &Scenario) -> Result<Report, Violation> {
    let ms = |ms: u64| Instant(ms * 1_000_000);
    let wishes = vec![Wish::plain(1, ms(300), 37, 6), Wish::plain(2, ms(302), 22, 5)];
    run_with(scenario, wished(scenario, wishes), &Natives)
}

#[test]
fn without_faults_both_are_handed_off() {
    let report = play(&scenario(Fallback::AtSender)).expect("nothing goes wrong");
    let figures = report.figures;
    assert_eq!((figures.completed, figures.handoffs, figures.handed_off), (2, 2, 2), "{figures:?}");
    // 37 and 22 tokens in blocks of 4, whole blocks: 40 and 24 tokens of 23,040 bytes.
    assert_eq!(figures.kv_bytes, 64 * 23_040);
    assert!(
        figures.early_chunks > 0 && figures.early_chunks < figures.chunks,
        "transfer overlaps prefill: {figures:?}"
    );
    assert_eq!(report.requests.iter().map(|request| request.usage.output_tokens).collect::<Vec<_>>(), [6, 5]);
}

/// Runs every mishap after every step of the undisturbed run.
fn after_every_step(base: &Scenario, mishaps: &[Mishap]) -> (u64, Figures) {
    let steps = play(base).expect("nothing goes wrong").figures.protocol_steps;
    let mut sum = Figures::default();
    for step in 1..=steps {
        for mishap in mishaps {
            let scenario = Scenario { mishaps: vec![(step, *mishap)], ..base.clone() };
            match play(&scenario) {
                Ok(report) => sum.add(&report.figures),
                Err(violation) => panic!("{mishap:?} after step {step} of {steps}: {violation}"),
            }
        }
    }
    (steps, sum)
}

fn tell(what: &str, (steps, sum): (u64, Figures)) {
    println!(
        "figure: {what} after each of {steps} steps: handed off {}, kept at the sender {}, anew {}, failed or cancelled {}, swept {}",
        sum.handed_off, sum.kept_at_sender, sum.handed_back, sum.handoffs_ended, sum.swept
    );
    assert!(steps > 60, "the protocol has more steps than {steps}");
    let met = [sum.completed, sum.handed_off, sum.kept_at_sender + sum.handed_back];
    assert!(met.iter().all(|count| *count > 0), "every kind of end is met: {sum:?}");
}

#[test]
fn a_crash_of_each_party_after_every_step() {
    let downs = [Duration::from_ms(5), Duration::from_s(9)];
    let crashes = downs.into_iter().flat_map(|down| {
        [
            Mishap::LoseReplica { replica: SENDER, down },
            Mishap::LoseReplica { replica: RECEIVER, down },
            Mishap::LoseGateway { gateway: 0, down },
        ]
    });
    let crashes: Vec<Mishap> = crashes.collect();
    for fallback in [Fallback::AtSender, Fallback::Anew, Fallback::Never] {
        for one_sided in [false, true] {
            let mut base = scenario(fallback);
            if let Some(cluster) = &mut base.cluster {
                cluster.one_sided = one_sided;
            }
            let (steps, sum) = after_every_step(&base, &crashes);
            if fallback == Fallback::AtSender {
                tell("a crash of each party", (steps, sum));
            }
            assert!(fallback != Fallback::Never || sum.handed_back == 0, "never is never: {sum:?}");
        }
    }
}

#[test]
fn a_crash_that_shows_only_at_the_next_epoch() {
    let mut base = scenario(Fallback::AtSender);
    base.faults = Faults::SILENT_LOSS;
    let down = Duration::from_ms(1_500);
    let crashes = [SENDER, RECEIVER].map(|replica| Mishap::LoseReplica { replica, down });
    tell("a crash that nobody tells of", after_every_step(&base, &crashes));
}

#[test]
fn a_partition_of_each_pair_after_every_step() {
    let pairs = [
        (Node::Gateway(0), Node::Replica(SENDER)),
        (Node::Gateway(0), Node::Replica(RECEIVER)),
        (Node::Replica(SENDER), Node::Replica(RECEIVER)),
    ];
    let base = scenario(Fallback::AtSender);
    for ways in [Ways::Both, Ways::There] {
        let lasts = [Duration::from_ms(700), Duration::from_s(4), Duration::from_s(30)];
        let cuts = pairs.iter().flat_map(|pair| lasts.map(|lasts| Mishap::Cut { pair: *pair, ways, lasts }));
        let cuts: Vec<Mishap> = cuts.collect();
        tell("a partition of each pair", after_every_step(&base, &cuts));
    }
}

#[test]
fn who_waits_for_a_hand_off_to_be_over_is_placed_when_it_is() {
    // One hand-off at a time, and the replica that decodes cannot be reached: nothing but the end of the first one lets the second begin.
    let mut base = scenario(Fallback::Never);
    if let (Some(cluster), Some(handoff)) = (&mut base.cluster, &mut base.gateway.handoff) {
        cluster.session_lease = Duration::from_s(60);
        handoff.transfers = 1;
    }
    let pair = (Node::Gateway(0), Node::Replica(RECEIVER));
    base.mishaps = vec![(1, Mishap::Cut { pair, ways: Ways::Both, lasts: Duration::from_s(30) })];
    let report = play(&base).expect("all is in order");
    assert_eq!((report.figures.handoffs, report.figures.failed), (2, 2));
    // Half a second for the promise, and seven for what is held meanwhile, twice.
    assert!(report.requests.iter().all(|request| request.ended_at < Instant(16_000_000_000)), "{report:?}");
}

#[test]
fn what_a_driver_does_wrong_is_found() {
    let found = |sabotage, faults| {
        let scenario = Scenario { sabotage: Some(sabotage), faults, ..scenario(Fallback::AtSender) };
        play(&scenario).expect_err(&format!("{sabotage:?} must be found")).what
    };
    let cases = [
        (Sabotage::SkipFence, Faults::NONE, "writes to"),
        (Sabotage::BlindSums, Faults::BROKEN_CHUNKS, "holds another content"),
        (Sabotage::EmitTwice, Faults::NONE, "is emitted by"),
        (Sabotage::LoseToken, Faults::NONE, "the client gets token 3 behind 2"),
        (Sabotage::EndTwice, Faults::NONE, "ends twice"),
        (Sabotage::KeepLeases, Faults::NONE, "its mover holds"),
        (Sabotage::WrongBlock, Faults::NONE, "holds another content"),
        (Sabotage::SwapTail, Faults::NONE, "as its first token"),
    ];
    for (sabotage, faults, words) in cases {
        let what = found(sabotage, faults);
        assert!(what.contains(words), "{sabotage:?} is found as: {what}");
    }
}

#[test]
fn the_same_driver_without_its_fault_is_not_accused() {
    let scenario = Scenario { faults: Faults::BROKEN_CHUNKS, ..scenario(Fallback::AtSender) };
    assert_eq!(play(&scenario).expect("broken chunks are found by the protocol").figures.completed, 2);
}
