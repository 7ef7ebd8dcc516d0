//! The gateway joined to real replicas by a mailbox: what one says the other understands, credit is honest, and everything comes back.

#[path = "support/cluster.rs"]
mod cluster;

use cluster::{Cluster, Mail};
use penstock_base::{CancelCause, Duration, Outcome, ReplicaEpoch, ReplicaId, RequestId};
use penstock_sched::gateway::{GatewayEvent, GatewayInput};

#[test]
fn everything_that_arrives_is_served_and_credit_is_honest() {
    for inflight_max in [1, 2] {
        let mut cluster = Cluster::new(2, inflight_max);
        let mut asked = Vec::new();
        for n in 1..=120 {
            asked.push(cluster.arrive(n));
            let until = cluster.now + Duration::from_ms(3);
            cluster.run(until);
        }
        let until = cluster.now + Duration::from_s(60);
        cluster.run(until);
        for manifest in asked {
            let (outcome, usage) = cluster.ended[&manifest.request];
            let expected = manifest.max_output_tokens * u32::from(manifest.sequences);
            assert_eq!(
                (outcome, usage.output_tokens, usage.prompt_tokens),
                (Outcome::Length, expected, manifest.input_tokens)
            );
        }
        assert_eq!(cluster.gateway.counters().refused_dispatches, 0, "what is granted is honoured");
        assert_eq!(cluster.gateway.counters().stale, 0);
        assert!(!cluster.events.contains(&GatewayEvent::NoProgress));
        let cached: u64 = cluster.ended.values().map(|(_, usage)| u64::from(usage.cached_tokens)).sum();
        assert!(cached > 0, "prefixes are found again");
        cluster.assert_at_rest();
    }
}

#[test]
fn cancels_and_a_lost_replica_leave_nothing_behind() {
    let mut cluster = Cluster::new(3, 2);
    for n in 1..=150 {
        cluster.arrive(n);
        let until = cluster.now + Duration::from_ms(2);
        cluster.run(until);
        if n % 3 == 0 {
            let request = RequestId(n - n % 5);
            cluster.mail.push_back(Mail::ToGateway(GatewayInput::Cancel { request, cause: CancelCause::Client }));
        }
        if n == 90 {
            let epoch = cluster.nodes[&2].epoch;
            cluster.nodes.remove(&2);
            cluster.mail.push_back(Mail::ToGateway(GatewayInput::ReplicaDown { replica: ReplicaId(2), epoch }));
        }
        if n == 120 {
            cluster.start(2, ReplicaEpoch(2));
        }
    }
    let until = cluster.now + Duration::from_s(60);
    cluster.run(until);
    assert_eq!(cluster.ended.len(), 150);
    assert!(cluster.ended.values().any(|(outcome, _)| *outcome == Outcome::Cancelled(CancelCause::Client)));
    cluster.assert_at_rest();
}
