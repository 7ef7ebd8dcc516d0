//! The gateway and its replicas, some of which compute prompts for the others: every request has one end and one owner, and what was
//! computed elsewhere is what it would be here.

#![allow(clippy::disallowed_macros, reason = "figures of a run are printed")]

#[path = "support/cluster.rs"]
mod cluster;

use cluster::{Cluster, Links, Mail, Shape};
use penstock_base::{CancelCause, Duration, Generation, Instant, Outcome, ReplicaEpoch, ReplicaId, RequestId};
use penstock_policy_api::native::NativePolicies;
use penstock_sched::gateway::{GatewayEvent, GatewayInput, HandoffConfig};
use penstock_sched::handoff::{LeaseTerms, PROTOCOL_VERSION, PartyConfig, Peer, Terms, Topology};

fn terms() -> Terms {
    Terms {
        version: PROTOCOL_VERSION,
        model: [1; 32],
        tokenizer: [2; 32],
        dtype_code: 0,
        block_size_tokens: 16,
        layers: 4,
        layout: [3; 32],
        slices: 1,
        transport_code: 0,
        leases: LeaseTerms::default(),
    }
}

/// Two replicas that compute prompts, two that decode.
fn shape(inflight_max: usize, links: Links) -> Shape {
    let mut shape = Shape::roomy(4, inflight_max);
    shape.roles = vec![1, 1, 2, 2];
    shape.links = links;
    shape.gateway.handoff = Some(HandoffConfig { prefill_tokens_min: 48, ..HandoffConfig::default() });
    let me = Peer { replica: ReplicaId(0), epoch: ReplicaEpoch(0) };
    let party = PartyConfig { chunk_blocks: 2, chunk_layers: 4, transfers: 8, ..PartyConfig::new(me, terms()) };
    shape.replica.handoff = Some(party);
    shape.replica.chunk_tokens = 16;
    shape.families = 19;
    // Whoever decodes grants slots alone: a request that was computed elsewhere cannot stand ready beside the batch.
    shape.replica.ready_window = 0;
    shape
}

fn cluster(shape: Shape) -> Cluster {
    Cluster::with(shape, Box::new(|_| Box::new(NativePolicies::new(Generation(1), 512))))
}

#[test]
fn prompts_are_computed_here_and_decoded_there() {
    for inflight_max in [1, 2] {
        let mut cluster = cluster(shape(inflight_max, Links { latency_us: 400, ..Links::default() }));
        let mut asked = Vec::new();
        for n in 1..=160 {
            asked.push(cluster.arrive(n));
            let until = cluster.now + Duration::from_ms(4);
            cluster.run(until);
        }
        let until = cluster.now + Duration::from_s(60);
        cluster.run(until);
        for manifest in &asked {
            let (outcome, usage) = cluster.ended[&manifest.request];
            let expected = manifest.max_output_tokens * u32::from(manifest.sequences);
            assert_eq!(
                (outcome, usage.output_tokens, usage.prompt_tokens),
                (Outcome::Length, expected, manifest.input_tokens)
            );
        }
        let counters = cluster.gateway.counters();
        let single = |manifest: &&std::sync::Arc<penstock_base::Manifest>| manifest.sequences == 1;
        let long = asked.iter().filter(single).filter(|manifest| manifest.input_tokens >= 48).count() as u64;
        assert!(counters.handed_off > long / 2, "{counters:?} of {long}");
        assert_eq!((counters.kept_at_sender, counters.handed_back), (0, 0), "nothing goes wrong");
        assert_eq!(counters.refused_dispatches, 0, "what is granted is honoured");
        assert!(cluster.wires.early_chunks > 0, "chunks travel while their prompt is still computed");
        assert!(!cluster.events.contains(&GatewayEvent::NoProgress));
        cluster.assert_at_rest();
    }
}

#[test]
fn losses_broken_chunks_cancels_and_lost_replicas_leave_nothing_behind() {
    let (mut handed, mut kept, mut back, mut turned_away) = (0, 0, 0, 0);
    for seed in 0..24 {
        let links = Links {
            seed,
            latency_us: [300, 4_000, 60_000][seed as usize % 3],
            loss_ppm: [0, 20_000, 200_000][seed as usize / 3 % 3],
            broken_ppm: [0, 30_000, 600_000][seed as usize / 9 % 3],
            cut: (seed % 5 == 4)
                .then_some((Instant(150_000_000), Duration::from_ms([400, 2_500, 9_000][seed as usize % 3]))),
        };
        let mut cluster = cluster(shape(1 + seed as usize % 2, links));
        for n in 1..=60 {
            cluster.arrive(n);
            let until = cluster.now + Duration::from_ms(6);
            cluster.run(until);
            if (n + seed) % 7 == 0 {
                let request = RequestId(n - n % 5);
                cluster.mail.push_back(Mail::ToGateway(GatewayInput::Cancel { request, cause: CancelCause::Client }));
            }
            if n % 4 == 0 {
                cluster.read_back();
            }
            // Each of the four in turn, the two kinds alike.
            let lost = 1 + (seed % 4) as u32;
            if n == 25 + seed % 11 {
                let epoch = cluster.nodes[&lost].epoch;
                cluster.nodes.remove(&lost);
                let down = GatewayInput::ReplicaDown { replica: ReplicaId(lost), epoch };
                cluster.mail.push_back(Mail::ToGateway(down));
            }
            if n == 40 + seed % 7 {
                cluster.start(lost, ReplicaEpoch(2));
            }
        }
        let until = cluster.now + Duration::from_s(120);
        cluster.run(until);
        assert_eq!(cluster.ended.len(), 60, "seed {seed}");
        cluster.assert_at_rest();
        let counters = cluster.gateway.counters();
        handed += counters.handed_off;
        kept += counters.kept_at_sender;
        back += counters.handed_back;
        turned_away += cluster.wires.writes_turned_away;
    }
    println!("figure: handed off {handed}, kept at the sender {kept}, anew {back}, writes turned away {turned_away}");
    assert!(handed > 100 && kept > 0 && back > 0 && turned_away > 0, "the seeds meet every kind of end");
}

#[test]
fn without_a_near_pair_required_goes_whole_and_preferred_goes_far() {
    for (topology, handed) in [(Topology::Required, false), (Topology::Preferred, true)] {
        let mut shape = shape(1, Links::default());
        shape.domains = vec![1, 1, 2, 2];
        if let Some(handoff) = &mut shape.gateway.handoff {
            handoff.topology = topology;
        }
        let mut cluster = cluster(shape);
        for n in (3..=60).step_by(3) {
            cluster.arrive(n);
            let until = cluster.now + Duration::from_ms(10);
            cluster.run(until);
        }
        let until = cluster.now + Duration::from_s(20);
        cluster.run(until);
        assert!(cluster.ended.values().all(|(outcome, _)| *outcome == Outcome::Length));
        assert_eq!(cluster.gateway.counters().handed_off > 0, handed, "{topology:?}");
        cluster.assert_at_rest();
    }
}

#[test]
fn a_replica_that_takes_whole_requests_alone_takes_part_in_no_hand_off() {
    let mut shape = shape(1, Links::default());
    // One that computes prompts, one of the third role: nobody decodes for others.
    (shape.replicas, shape.roles) = (2, vec![1, 3]);
    let mut cluster = cluster(shape);
    let asked: Vec<_> = (3..=30).step_by(3).map(|n| cluster.arrive(n)).collect();
    cluster.run(Instant(20_000_000_000));
    assert!(asked.iter().all(|manifest| cluster.ended[&manifest.request].0 == Outcome::Length));
    let begun = |event: &GatewayEvent| matches!(event, GatewayEvent::HandoffBegun { .. });
    assert!(!cluster.events.iter().any(begun), "whole requests go the whole path");
    cluster.assert_at_rest();
}
