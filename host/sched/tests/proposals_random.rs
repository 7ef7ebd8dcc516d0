//! Whatever five policies propose, at the gateway and at its replicas: both machines are sound after every step, every request ends once, and
//! nothing is held for anybody in the end. `PENSTOCK_PROPOSALS_SEED=n` runs one life again, `PENSTOCK_PROPOSALS_LIVES=n` more of them.

#[path = "support/cluster.rs"]
mod cluster;
#[path = "support/fuzzed_policies.rs"]
mod fuzzed;

use std::collections::BTreeMap;

use cluster::{Cluster, Mail, Shape};
use fuzzed::{Draw, Fuzzed};
use penstock_base::{CancelCause, Duration, Outcome, ReplicaEpoch, ReplicaId, RequestId};
use penstock_sched::gateway::{GatewayConfig, GatewayEvent, GatewayInput};
use penstock_sched::replica::{ReplicaConfig, ReplicaEvent};

/// What the proposals of a life came to.
#[derive(Default, PartialEq, Eq, Debug)]
struct Sum {
    steps: u64,
    /// Answers that were not used: faults, nonsense.
    unused: [u64; 2],
    /// The same by decision.
    by_decision: [u64; 5],
    preempted: u64,
    outcomes: BTreeMap<(u8, u16), u64>,
    digest: u64,
}

impl Sum {
    fn fallback(&mut self, decision: u8, reason: u8) {
        self.unused[usize::from(reason >= 16)] += 1;
        self.by_decision[usize::from(decision)] += 1;
    }
}

fn live(seed: u64) -> Sum {
    let mut draw = Draw::new(seed);
    let mut shape = Shape::roomy(1 + draw.below(3) as u32, 1 + draw.below(2) as usize);
    // Short of blocks and of queue now and then.
    shape.replica =
        ReplicaConfig { blocks: 30 + draw.below(60) as u32, slots: 2 + draw.below(6) as u32, ..shape.replica };
    shape.gateway = GatewayConfig {
        run_seed: seed,
        queue_requests_max: 4 + draw.below(60) as u32,
        starve: Duration::from_ms(200 + draw.below(2_000)),
        queue_wait_max: Duration::from_ms(2_000 + draw.below(10_000)),
        overload_tick: Duration::from_ms(10 + draw.below(100)),
        ..shape.gateway
    };
    let replicas = shape.replicas;
    let mut cluster =
        Cluster::with(shape, Box::new(move |machine| Box::new(Fuzzed::new(seed ^ u64::from(machine) << 32))));
    let arrivals = 40 + draw.below(60);
    let mut epoch = 1;
    for n in 1..=arrivals {
        cluster.arrive(n);
        if draw.one_in(12) {
            let request = RequestId(1 + draw.below(n));
            cluster.mail.push_back(Mail::ToGateway(GatewayInput::Cancel { request, cause: CancelCause::Client }));
        }
        if draw.one_in(60) {
            let lost = 1 + draw.below(u64::from(replicas)) as u32;
            let of = cluster.nodes.remove(&lost).expect("it runs").epoch;
            cluster.mail.push_back(Mail::ToGateway(GatewayInput::ReplicaDown { replica: ReplicaId(lost), epoch: of }));
            epoch += 1;
            cluster.start(lost, ReplicaEpoch(epoch));
        }
        let until = cluster.now + Duration::from_ms(draw.below(12));
        cluster.run(until);
    }
    let until = cluster.now + Duration::from_s(120);
    cluster.run(until);
    assert_eq!(cluster.ended.len() as u64, arrivals, "every request ends");
    cluster.assert_at_rest();
    let mut sum = Sum { steps: cluster.steps, digest: cluster.gateway.decision_digest(), ..Sum::default() };
    for event in &cluster.events {
        match *event {
            GatewayEvent::Fallback { decision, reason, .. } => sum.fallback(decision, reason),
            GatewayEvent::Broken(what) => panic!("{what}"),
            _ => {}
        }
    }
    for event in &cluster.replica_events {
        match *event {
            ReplicaEvent::Fallback { decision, reason, .. } => sum.fallback(decision, reason),
            ReplicaEvent::Preempted { .. } => sum.preempted += 1,
            _ => {}
        }
    }
    for (outcome, usage) in cluster.ended.values() {
        *sum.outcomes.entry(outcome.code()).or_default() += 1;
        assert!(usage.output_tokens <= 3 * 24, "no more than was asked for");
        assert!(!matches!(outcome, Outcome::Failed(penstock_base::Failure::Internal)), "{outcome:?}");
    }
    sum
}

#[allow(clippy::disallowed_methods, reason = "a test may be asked for more work")]
fn asked(name: &str) -> Option<u64> {
    std::env::var(name).ok().and_then(|number| number.parse().ok())
}

#[test]
#[allow(clippy::disallowed_macros, reason = "figures of a test are printed")]
fn no_proposal_breaks_an_invariant_or_loses_a_request() {
    if let Some(seed) = asked("PENSTOCK_PROPOSALS_SEED") {
        println!("{:?}", live(seed));
        return;
    }
    let lives = asked("PENSTOCK_PROPOSALS_LIVES").unwrap_or(80);
    let mut all = Sum::default();
    for seed in 0..lives {
        let Ok(sum) = std::panic::catch_unwind(|| live(seed)) else {
            panic!("PENSTOCK_PROPOSALS_SEED={seed} repeats it");
        };
        if seed % 20 == 0 {
            assert_eq!(live(seed), sum, "PENSTOCK_PROPOSALS_SEED={seed} goes the same way again");
        }
        all.steps += sum.steps;
        all.preempted += sum.preempted;
        (0..2).for_each(|kind| all.unused[kind] += sum.unused[kind]);
        (0..5).for_each(|decision| all.by_decision[decision] += sum.by_decision[decision]);
        sum.outcomes.into_iter().for_each(|(outcome, count)| *all.outcomes.entry(outcome).or_default() += count);
    }
    println!("figure: {lives} lives under random proposals, {} steps, {:?} answers unused", all.steps, all.unused);
    // It did what it is for: every kind of answer of every seat was met, sequences had to yield, requests went through all the same.
    assert!(all.unused.iter().all(|count| *count > lives), "{:?}", all.unused);
    assert!(all.by_decision.iter().all(|count| *count > lives), "{:?}", all.by_decision);
    assert!(all.preempted > 0 && all.outcomes.len() > 3, "{} {:?}", all.preempted, all.outcomes);
    let served = all.outcomes.get(&Outcome::Length.code()).copied().unwrap_or(0);
    assert!(served > 10 * lives, "{:?}", all.outcomes);
}
