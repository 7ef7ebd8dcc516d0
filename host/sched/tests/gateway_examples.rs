//! Worked examples, with their exact numbers.

#[path = "support/gateway_policies.rs"]
mod policies;
#[path = "support/gateway_scenario.rs"]
mod scenario;

use std::collections::BTreeMap;

use penstock_base::RequestId;
use penstock_policy_api::native::BestCredit;
use penstock_sched::gateway::{GatewayConfig, GatewayEffect};
use penstock_sched::message::ToReplica;
use scenario::World;

/// Dispatches in the last step.
fn dispatched(world: &World) -> Vec<(RequestId, u32)> {
    let effects = world.effects.iter().filter_map(|effect| match effect {
        GatewayEffect::Send { replica, message: ToReplica::Dispatch(dispatch), .. } => {
            Some((dispatch.manifest.request, replica.0))
        }
        _ => None,
    });
    effects.collect()
}

/// One replica with one slot serves requests one after the other; how long each waited, and when all work was done.
fn serve_alone(arrivals: &[&str], service_ms: &BTreeMap<u64, u64>) -> (Vec<u64>, u64) {
    let mut world = World::new(GatewayConfig::default());
    world.line("0ms up A slots=1");
    arrivals.iter().for_each(|arrival| world.line(arrival));
    let mut waits = Vec::new();
    let mut now_ms = 0;
    // One slot is granted; it is back with each end.
    world.line("0ms report A credit=1,512,1000 running=0");
    for _ in arrivals {
        let [(request, 1)] = dispatched(&world)[..] else { panic!("one at a time: {}", world.trace) };
        waits.push(now_ms);
        now_ms += service_ms[&request.0];
        world.line(&format!("{now_ms}ms ended A r{request} in=16 out=16"));
    }
    (waits, now_ms)
}

#[test]
fn priority_changes_who_waits_and_not_how_much_work_there_is() {
    // SCH-08: A takes 8 ms, B and C take 2 ms, all queued at 0; no preemption, no batching.
    let service_ms = BTreeMap::from([(1, 8), (2, 2), (3, 2)]);
    let first_come = serve_alone(&["0ms arrive r1", "0ms arrive r2", "0ms arrive r3"], &service_ms);
    assert_eq!(first_come, (vec![0, 8, 10], 12));
    let by_priority = ["0ms arrive r1", "0ms arrive r2 prio=2", "0ms arrive r3 prio=1"];
    assert_eq!(serve_alone(&by_priority, &service_ms), (vec![0, 2, 4], 12));
}

#[test]
fn a_pool_holds_as_many_sequences_as_its_blocks() {
    // CAP-04: 24 GiB less 14.901 GiB of weights, 2 GiB of workspace and 1 GiB of margin leave 6.099 GiB. A sequence of 8,192 tokens
    // takes 1.125 GiB (144 KiB a token), so 5 fit; twice as long, 2. In blocks of 16 tokens: 2.25 MiB each.
    let pool_blocks = (24.0 * 1024.0 - 16_000_000_000.0 / 1_048_576.0 - 2_048.0 - 1_024.0) / 2.25;
    let blocks = pool_blocks as u64;
    for (tokens, fits) in [(8_192, 5), (16_384, 2)] {
        let mut world = World::new(GatewayConfig::default());
        world.line(&format!("0ms up A slots=64 blocks={blocks} context=16384"));
        world.line(&format!("0ms report A credit=64,999999,{blocks} running=1"));
        for request in 1..=8 {
            world.line(&format!("0ms arrive r{request} in={} out=192", tokens - 192));
        }
        assert_eq!(world.gateway.running_requests(), fits, "{tokens} tokens");
    }
}

/// A saves 20 ms of a prefill of 25 ms and has 50 ms of prompts ahead, B saves nothing and has 5 ms ahead; C is free and ten times slower.
fn cached_or_free() -> World {
    let mut world = World::new(GatewayConfig::default());
    for replica in ["A", "B", "C"] {
        world.line(&format!("0ms up {replica} context=65536 blocks=4000"));
    }
    // Prefill credit is spent at A and B: each is short by what is ahead of it, at a microsecond a token.
    world.line("0ms report A credit=8,0,4000 running=1 prefill=50000 token_ns=1000");
    world.line("0ms report B credit=8,0,4000 running=1 prefill=5000 token_ns=1000");
    world.line("0ms report C credit=8,512,4000 running=1 token_ns=10000");
    (1..=1_250).for_each(|key| world.line(&format!("0ms cache A stored k{key}")));
    world
}

/// 25,000 tokens, of which A holds 1,250 blocks of 16.
fn long_prompt() -> String {
    let keys: Vec<String> = (1..=1_250).map(|key| key.to_string()).collect();
    format!("1ms arrive r1 in=25000 out=16 keys={}", keys.join(","))
}

#[test]
fn a_cached_prefix_does_not_outweigh_a_longer_wait() {
    // RT-03.
    let mut world = cached_or_free();
    world.policies.routing.records = true;
    world.line(&long_prompt());
    let seen = |row: usize, name| {
        let value = world.policies.routing.rows[row].iter().find(|(other, _, _)| *other == name);
        value.map(|(_, value, _)| *value).expect("a signal")
    };
    let ready_us = |row| seen(row, "est-credit-us") + seen(row, "est-prefill-us");
    assert_eq!([0, 1].map(|row| seen(row, "est-credit-us")), [50_000, 5_000]);
    assert_eq!(seen(1, "est-prefill-us") - seen(0, "est-prefill-us"), 20_000);
    assert_eq!(ready_us(0) - ready_us(1), 25_000);

    let mut world = cached_or_free();
    world.policies.best_credit = Some(BestCredit::new());
    world.line(&long_prompt());
    assert_eq!(dispatched(&world), [], "it waits for B although C is free");
    world.line("5ms report B credit=8,512,4000 running=1 token_ns=1000");
    assert_eq!(dispatched(&world), [(RequestId(1), 2)]);
}
