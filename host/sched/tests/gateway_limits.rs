//! Every bound of the gateway at its edge. Those of queue, deferral, quota, flows, tenants, replicas and running requests are scenarios.

#[path = "support/gateway_policies.rs"]
mod policies;
#[path = "support/gateway_scenario.rs"]
mod scenario;

use std::collections::BTreeSet;

use penstock_base::limits::{
    DEFERRED_REQUESTS_MAX, DIRECTORY_KEYS_MAX, FINISHED_REQUESTS_KEPT, FLOWS_MAX, HELD_REQUESTS_MAX, ORDER_ROWS_MAX,
    OVERLOAD_INTERVAL_MAX, OVERLOAD_INTERVAL_MIN, QUEUE_REQUESTS_MAX, QUEUE_TOKENS_MAX, REPLICAS_MAX,
    RESERVED_REQUESTS_MAX, ROUTING_ROWS_MAX, RUNNING_REQUESTS_MAX, STANCE_REPEAT, TENANTS_MAX,
};
use penstock_base::{Duration, ReplicaEpoch, ReplicaId, RequestId};
use penstock_policy_api::Rest;
use penstock_sched::gateway::{DeliveryEvent, GatewayConfig, GatewayEffect, GatewayInput, ReplicaFacts};
use policies::{Order, Route};
use scenario::World;

#[test]
fn configuration_stays_below_the_ceilings() {
    let absurd = GatewayConfig {
        queue_requests_max: u32::MAX,
        queue_tokens_max: u64::MAX,
        running_requests_max: u32::MAX,
        deferred_requests_max: u32::MAX,
        flows_max: usize::MAX,
        tenants_max: usize::MAX,
        replicas_max: usize::MAX,
        order_rows: usize::MAX,
        routing_rows: usize::MAX,
        directory_keys_max: usize::MAX,
        attempts_max: 0,
        block_size_tokens: 0,
        ..GatewayConfig::default()
    };
    let sane = absurd.within_limits();
    assert_eq!(sane.queue_requests_max as usize, QUEUE_REQUESTS_MAX);
    assert_eq!(sane.queue_tokens_max, QUEUE_TOKENS_MAX);
    assert_eq!(sane.running_requests_max as usize, RUNNING_REQUESTS_MAX);
    assert_eq!(sane.deferred_requests_max as usize, DEFERRED_REQUESTS_MAX);
    assert_eq!((sane.flows_max, sane.tenants_max, sane.replicas_max), (FLOWS_MAX, TENANTS_MAX, REPLICAS_MAX));
    assert_eq!((sane.order_rows, sane.routing_rows), (ORDER_ROWS_MAX, ROUTING_ROWS_MAX));
    assert_eq!(sane.directory_keys_max, DIRECTORY_KEYS_MAX);
    let none = GatewayConfig { order_rows: 0, routing_rows: 0, ..GatewayConfig::default() }.within_limits();
    assert_eq!((none.order_rows, none.routing_rows), (1, 1), "a question has a row");
    assert_eq!((sane.attempts_max, sane.block_size_tokens), (1, 1));
}

fn facts(replica: u32) -> ReplicaFacts {
    ReplicaFacts {
        replica: ReplicaId(replica),
        epoch: ReplicaEpoch(1),
        role_code: 3,
        total_blocks: 1_000,
        slots: 16,
        round_tokens: 512,
        context_tokens_max: 4_096,
        speed_ppm: 1_000_000,
        zone_rank: 0,
        domain: 0,
    }
}

#[test]
fn as_many_replicas_as_the_ceiling_are_known() {
    let config = GatewayConfig { replicas_max: REPLICAS_MAX, ..GatewayConfig::default() };
    let mut world = World::new(config);
    let mut gateway = std::mem::replace(
        &mut world.gateway,
        penstock_sched::gateway::Gateway::new(GatewayConfig::default(), world.now),
    );
    for replica in 0..=REPLICAS_MAX as u32 {
        gateway.step(world.now, GatewayInput::ReplicaUp(facts(replica)), &mut world.policies, &mut world.effects);
    }
    gateway.check().expect("sound");
    assert_eq!((gateway.ready_replicas() as usize, gateway.counters().replicas_beyond_limit), (REPLICAS_MAX, 1));
}

#[test]
fn a_replica_has_a_handful_of_reserved_requests_and_the_rest_does_not_wait() {
    let mut world = World::new(GatewayConfig::default());
    for line in [
        "0ms up A",
        "0ms up B",
        "0ms report A credit=0,512,1000 running=1",
        "0ms report B credit=16,512,1000 running=1",
        "0ms routing place A,B wait=1s",
    ] {
        world.line(line);
    }
    for request in 1..=RESERVED_REQUESTS_MAX + 1 {
        world.line(&format!("1ms arrive r{request}"));
    }
    assert_eq!(world.gateway.queued_requests() as usize, RESERVED_REQUESTS_MAX);
    assert_eq!(world.gateway.running_requests(), 1, "the ninth went to B at once");
}

#[test]
fn holds_are_bounded_and_what_is_beyond_is_placed() {
    let mut world = World::new(GatewayConfig::default());
    world.line("0ms up A blocks=100000 slots=1000");
    world.line("0ms report A credit=1000,99999,100000 running=1");
    world.policies.routing.script = Route::Hold(1_000_000);
    for request in 1..=HELD_REQUESTS_MAX + 1 {
        world.line(&format!("1ms arrive r{request}"));
    }
    assert_eq!(world.gateway.queued_requests() as usize, HELD_REQUESTS_MAX);
    assert_eq!(world.gateway.running_requests(), 1);
}

#[test]
fn the_prefix_index_is_bounded() {
    let mut world = World::new(GatewayConfig { directory_keys_max: 3, ..GatewayConfig::default() });
    world.line("0ms up A");
    (1..=5).for_each(|key| world.line(&format!("0ms cache A stored k{key}")));
    assert_eq!(world.gateway.directory_keys(), 3);
}

/// The rows of the last `order` call, as request ids.
fn shown(world: &World) -> Vec<RequestId> {
    let id = |row: &Vec<policies::Seen>| row.iter().find(|seen| seen.0 == "request-id").map(|seen| RequestId(seen.1));
    world.policies.fairness.rows.iter().filter_map(id).collect()
}

/// Asks `order` again without placing anything.
fn ask_again(world: &mut World, round: u64) {
    world.line(&format!("{round}ms report A credit=1,512,{round} running=1"));
}

/// A world where `order` is recorded and nothing fits, so that everything stays in the queue.
fn looking(config: GatewayConfig) -> World {
    let mut world = World::new(config);
    world.line("0ms up A");
    world.policies.fairness.records = true;
    world
}

#[test]
fn one_flow_fills_the_window() {
    let mut world = looking(GatewayConfig::default());
    for request in 1..=200 {
        world.line(&format!("0ms arrive r{request} flow=1 in=160 out=160"));
    }
    ask_again(&mut world, 1);
    assert_eq!(shown(&world), (1..=128).map(RequestId).collect::<Vec<_>>());
}

#[test]
fn the_window_shows_each_flow_and_then_one_more_of_each() {
    let mut world = looking(GatewayConfig { order_rows: 6, ..GatewayConfig::default() });
    for (request, flow) in [(1, 1), (2, 1), (3, 1), (4, 1), (5, 2), (6, 2), (7, 3), (8, 3)] {
        world.line(&format!("0ms arrive r{request} flow={flow} in=160 out=160"));
    }
    ask_again(&mut world, 1);
    assert_eq!(shown(&world), [1, 2, 5, 6, 7, 8].map(RequestId), "in the order in which they were queued");
}

#[test]
fn every_flow_is_shown_within_its_turn() {
    // 300 flows in windows of 128, half of which turn: within ceil(300 / 64) = 5 calls each head is shown.
    let mut world = looking(GatewayConfig::default());
    for request in 1..=300 {
        world.line(&format!("0ms arrive r{request} in=160 out=160"));
    }
    let mut seen = BTreeSet::new();
    for round in 1..=5 {
        ask_again(&mut world, round);
        let rows = shown(&world);
        assert_eq!(rows.len(), 128);
        assert!((1..=64).all(|request| rows.contains(&RequestId(request))), "the longest waiting are always there");
        seen.extend(rows);
    }
    assert_eq!(seen.len(), 300);
}

#[test]
fn the_routing_window_keeps_the_best_of_each_kind() {
    let config = GatewayConfig { routing_rows: 8, ..GatewayConfig::default() };
    let mut world = World::new(config);
    for at in 0..20u8 {
        let name = char::from(b'A' + at);
        world.line(&format!("0ms up {name}"));
        world.line(&format!("0ms report {name} credit=4,512,1000 active={} running=1", 500 - u32::from(at)));
    }
    for (name, blocks) in [('B', 3), ('C', 2), ('D', 1)] {
        (1..=blocks).for_each(|key| world.line(&format!("0ms cache {name} stored k{key}")));
    }
    // The session was served by E before, when that one was the least loaded.
    world.line("0ms report E credit=4,512,1000 active=0 running=1");
    world.line("0ms arrive r1 session=9");
    assert_eq!(world.gateway.replicas().find(|view| view.replica.0 == 5).map(|view| view.inflight_requests), Some(1));
    world.line("0ms report E credit=4,512,1000 active=496 running=1");
    world.policies.routing.records = true;
    world.line("1ms arrive r2 session=9 in=160 out=16 keys=1,2,3,4");
    let id = |row: &Vec<policies::Seen>| row.iter().find(|seen| seen.0 == "replica-id").map(|seen| seen.1);
    let rows: Vec<u64> = world.policies.routing.rows.iter().filter_map(id).collect();
    assert_eq!(rows.len(), 8);
    assert!(rows.is_sorted());
    // Three by overlap (24/64 of 8), three by load (the last ones), the session's.
    for replica in [2, 3, 4, 18, 19, 20, 5] {
        assert!(rows.contains(&replica), "{replica} in {rows:?}");
    }
}

#[test]
fn a_policy_that_keeps_everything_holds_back_no_longer_than_it_may() {
    let mut world = World::new(GatewayConfig::default());
    world.line("0ms up A");
    world.line("0ms report A credit=4,512,100 running=0");
    world.policies.fairness.script = Order::Rank { requests: vec![], rest: Rest::Keep, tpot_target_us: u32::MAX };
    world.line("0ms arrive r1");
    world.line("run 99ms");
    assert_eq!(world.gateway.queued_requests(), 1);
    world.line("run 1ms");
    assert_eq!(world.gateway.queued_requests(), 0);
}

#[test]
fn the_delivery_of_so_many_ended_requests_is_followed_and_the_longest_ended_is_forgotten() {
    let mut world = World::new(GatewayConfig::default());
    let last = FINISHED_REQUESTS_KEPT as u64 + 1;
    for request in 1..=last {
        world.line(&format!("0ms arrive r{request}"));
        world.line(&format!("0ms cancel r{request}"));
    }
    let stale = world.gateway.counters().stale;
    let mut deliver = |request| {
        let input = GatewayInput::Delivery { request: RequestId(request), event: DeliveryEvent::Streaming };
        world.gateway.step(world.now, input, &mut world.policies, &mut world.effects);
        world.gateway.counters().stale - stale
    };
    assert_eq!([deliver(last), deliver(2)], [0, 0], "the last 1,024 are known");
    assert_eq!(deliver(1), 1, "the first is not any more");
}

/// Overload questions within `span_ms`, one due every `tick`, while a request waits.
fn overload_questions(tick: Duration, span_ms: u64) -> usize {
    let mut world = World::new(GatewayConfig { overload_tick: tick, ..GatewayConfig::default() });
    world.line("0ms up A");
    world.line("0ms arrive r1");
    let before = world.policies.overload.calls;
    world.line(&format!("run {span_ms}ms"));
    world.policies.overload.calls - before
}

#[test]
fn overload_is_asked_neither_more_often_nor_more_seldom_than_the_limits_say() {
    // A hundred milliseconds hold ten intervals of ten milliseconds, half a minute three of ten seconds.
    assert_eq!(overload_questions(Duration::ZERO, 100), 10);
    assert_eq!(overload_questions(Duration::from_s(3_600), 29_999), 2);
    assert_eq!((OVERLOAD_INTERVAL_MIN, OVERLOAD_INTERVAL_MAX), (Duration::from_ms(10), Duration::from_s(10)));
}

#[test]
fn a_stance_is_repeated_often_enough_to_stay_fresh() {
    let mut world = World::new(GatewayConfig::default());
    ["0ms up A", "0ms report A credit=0,0,0 running=1", "0ms arrive r1", "run 3s"]
        .iter()
        .for_each(|line| world.line(line));
    let told = |effect: &GatewayEffect| {
        matches!(effect, GatewayEffect::Send { message: penstock_sched::message::ToReplica::Stance(_), .. })
    };
    // Asked at every tick; what is sent is seen step by step.
    let (mut last, mut times) = (world.now, 0);
    while times < 3 {
        world.now = world.gateway.next_wake();
        world.effects.clear();
        world.gateway.step(world.now, GatewayInput::Tick, &mut world.policies, &mut world.effects);
        if world.effects.iter().any(told) {
            assert!(world.now.since(last) <= Duration(STANCE_REPEAT.0 + 100_000_000), "a tick late at most");
            (last, times) = (world.now, times + 1);
        }
    }
}
