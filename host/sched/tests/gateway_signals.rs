//! Which signals have a source? Every other one is declared, filled, and its mask bit is clear.

#[path = "support/gateway_policies.rs"]
mod policies;
#[path = "support/gateway_scenario.rs"]
mod scenario;

use std::collections::BTreeSet;

use penstock_policy_api::{
    AdmissionSignal, ClassSignal, CommonSignal, OrderSignal, OverloadSignal, ReplicaSignal, RoutingSignal, Signal,
    SignalInfo, WaitingSignal,
};
use penstock_sched::gateway::GatewayConfig;
use policies::Seen;
use scenario::World;

/// A world in which everything that can be known is known, and all four questions have been asked.
fn well_known() -> World {
    let mut world = World::new(GatewayConfig::default());
    world.line("0ms up A");
    world.line("0ms up B");
    for replica in ["A", "B"] {
        world.line(&format!(
            "0ms report {replica} credit=4,512,900 active=10 running=1 prefill=64 prefill_rate=1000 token_ns=1000 step=20ms"
        ));
    }
    // Histories of outputs.
    for request in 1..=10 {
        world.line(&format!("0ms arrive r{request} out=16 tpot=50ms"));
        world.line(&format!("0ms ended A r{request} in=16 out=8"));
        world.line(&format!("0ms ended B r{request} in=16 out=8"));
        for replica in ["A", "B"] {
            world.line(&format!(
                "0ms report {replica} credit=4,512,900 active=10 running=1 prefill=64 prefill_rate=1000 token_ns=1000 step=20ms"
            ));
        }
    }
    for seat in [
        &mut world.policies.admission.records,
        &mut world.policies.routing.records,
        &mut world.policies.fairness.records,
        &mut world.policies.overload.records,
    ] {
        *seat = true;
    }
    world.line("0ms arrive r20 out=16 ttft=1s tpot=50ms session=4 keys=1,2,3,4 deadline=9s");
    world.line("0ms cache A stored k1");
    world.line("100ms tick");
    world
}

/// Names of first-wave signals of which the value passed is the fill although the mask says it is unknown.
fn unknown(rows: &[Vec<Seen>]) -> BTreeSet<&'static str> {
    let all = rows.iter().flatten().filter(|(name, _, known)| !known && *name != "known-mask");
    all.map(|(name, _, _)| *name).collect()
}

fn first_wave<S: Signal>() -> BTreeSet<&'static str> {
    let infos = S::ALL.iter().map(|signal| signal.info());
    infos.filter(|info: &&SignalInfo| info.first_wave).map(|info| info.name).collect()
}

#[test]
fn first_wave_signals_without_a_source_are_these() {
    let world = well_known();
    let (fairness, routing, overload) = (&world.policies.fairness, &world.policies.routing, &world.policies.overload);
    let of = |rows: &[Vec<Seen>], wave: BTreeSet<&'static str>| -> Vec<&'static str> {
        unknown(rows).intersection(&wave).copied().collect()
    };
    let admission = std::slice::from_ref(&world.policies.admission.seen);
    assert_eq!(of(admission, first_wave::<AdmissionSignal>()), Vec::<&str>::new());
    assert_eq!(of(std::slice::from_ref(&fairness.seen), first_wave::<OrderSignal>()), Vec::<&str>::new());
    assert_eq!(of(std::slice::from_ref(&overload.seen), first_wave::<OverloadSignal>()), Vec::<&str>::new());
    let routed = std::slice::from_ref(&routing.seen);
    assert_eq!(of(routed, first_wave::<RoutingSignal>()), Vec::<&str>::new());
    // Common ones are passed with each; a gateway alone has its whole quota.
    assert_eq!(of(routed, first_wave::<CommonSignal>()), Vec::<&str>::new());
    assert_eq!(of(&fairness.rows, first_wave::<WaitingSignal>()), Vec::<&str>::new());
    // Peers and transfer, lower tiers and topology labels have no source before hand-off and tiers ship.
    assert_eq!(
        of(&routing.rows, first_wave::<ReplicaSignal>()),
        [
            "est-transfer-us",
            "overlap-dram-blocks",
            "overlap-ssd-blocks",
            "peer-bytes-per-sec",
            "peer-rank",
            "preferred-flag"
        ]
    );
    let classes = &overload.rows[..8];
    assert_eq!(
        of(classes, first_wave::<ClassSignal>()),
        ["min-sojourn-us", "slo-ttft-us"],
        "nobody left, no target is set"
    );
}

#[test]
fn values_are_those_of_the_state() {
    let world = well_known();
    let value = |seen: &[Seen], name: &str| seen.iter().find(|seen| seen.0 == name).map(|seen| seen.1);
    let admission = &world.policies.admission.seen;
    for (name, expected) in [
        ("expected-output-tokens", 8),
        ("expected-output-high-tokens", 8),
        ("need-blocks", 2),
        ("need-start-blocks", 1),
        ("slo-ttft-us", 1_000_000),
        ("pool-total-blocks", 2_000),
        ("pool-free-blocks", 1_980),
        ("pool-queued-requests", 0),
        ("queue-limit-requests", 1_024),
        ("prefill-tokens-per-sec", 2_000),
        // Nothing queued; 16 tokens at a microsecond each, credit is there.
        ("est-ttft-us", 16),
        // And eight steps of 20 ms.
        ("est-service-us", 160_016),
        ("tenant-used-tokens", 10 * 24),
    ] {
        assert_eq!(value(admission, name), Some(expected), "{name}");
    }
    let [first, second] = &world.policies.routing.rows[..] else { panic!("two replicas") };
    assert_eq!((value(first, "replica-id"), value(second, "replica-id")), (Some(1), Some(2)));
    assert_eq!((value(first, "credit-requests"), value(first, "est-credit-us")), (Some(4), Some(0)));
    let [row] = &world.policies.fairness.rows[..] else { panic!("one row") };
    assert_eq!((value(row, "priority-biased"), value(row, "ttft-left-us")), (Some(1 << 31), Some(1_000_000)));
    let overload = &world.policies.overload;
    assert_eq!(value(&overload.seen, "since-us"), Some(100_000));
    assert_eq!(value(&overload.rows[3], "inflight-requests"), Some(1));
    assert_eq!(overload.rows.len(), 8 + 2);
}
