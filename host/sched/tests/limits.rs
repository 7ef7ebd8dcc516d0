//! Every limit of the core that a configuration or a count can reach, at the limit: the last one that fits, and the first that does not.
//! Those of queues, flows, tenants, replicas and rows of the gateway are in `gateway_limits` and in scenarios.

#[path = "support/content.rs"]
mod content;
#[path = "support/replica_driver.rs"]
mod replica_driver;

use penstock_base::Instant;
use penstock_base::limits::{
    CACHE_TENANTS_MAX, CONTEXT_TOKENS_MAX, EVICTION_ROWS_MAX, INFLIGHT_MAX, POOL_BLOCKS_MAX, PREFILL_ROUNDS_MAX,
    READY_WINDOW_MAX, SLOTS_MAX, STEP_TOKENS_MAX, TENANTS_MAX, VICTIM_ROWS_MAX,
};
use penstock_sched::replica::{Replica, ReplicaConfig, ReplicaEffect, ReplicaEvent};
use replica_driver::{Driver, Spec};

fn small() -> ReplicaConfig {
    ReplicaConfig {
        blocks: 32,
        block_size_tokens: 4,
        slots: 4,
        step_tokens: 16,
        chunk_tokens: 16,
        context_tokens_max: 128,
        check_every_step: true,
        ..ReplicaConfig::default()
    }
}

#[test]
fn a_replica_s_configuration_is_brought_below_the_ceilings() {
    let absurd = ReplicaConfig {
        step_tokens: u32::MAX,
        slots: u32::MAX,
        chunk_tokens: u32::MAX,
        context_tokens_max: 256,
        inflight_max: usize::MAX,
        ready_window: usize::MAX,
        victim_rows: usize::MAX,
        eviction_rows: usize::MAX,
        ..small()
    };
    let replica = Replica::new(absurd, Instant::ZERO);
    let sane = replica.config();
    assert_eq!((sane.step_tokens, sane.chunk_tokens, sane.slots), (STEP_TOKENS_MAX, STEP_TOKENS_MAX, SLOTS_MAX as u32));
    assert_eq!((sane.inflight_max, sane.ready_window), (INFLIGHT_MAX, READY_WINDOW_MAX));
    assert_eq!((sane.victim_rows, sane.eviction_rows), (VICTIM_ROWS_MAX, EVICTION_ROWS_MAX));
    let nothing = ReplicaConfig { blocks: 0, step_tokens: 0, slots: 0, victim_rows: 0, eviction_rows: 0, ..small() };
    let replica = Replica::new(nothing, Instant::ZERO);
    let sane = replica.config();
    assert_eq!((sane.blocks, sane.step_tokens, sane.slots), (1, 1, 1));
    assert_eq!((sane.victim_rows, sane.eviction_rows), (1, 1));
    let long = Replica::new(ReplicaConfig { context_tokens_max: u32::MAX, ..small() }, Instant::ZERO);
    assert_eq!(long.config().context_tokens_max, CONTEXT_TOKENS_MAX);
}

#[test]
fn a_decode_waits_for_so_many_prefill_rounds_and_no_more() {
    let mut mixed = 0;
    for (inflight_max, seed) in [(1, 1), (1, 2), (1, 3), (1, 4), (2, 1), (2, 2), (2, 3), (2, 4)] {
        let config = ReplicaConfig { blocks: 512, slots: 8, inflight_max, prefix_cache: false, ..small() };
        let mut driver = Driver::new(config);
        let first = driver.dispatch(Spec { seed, ..Spec::new(vec![1, 2], 60) });
        driver.complete();
        // Prompts of forty tokens, each more than two whole steps, come as fast as they are taken.
        let (mut rounds, mut longest) = (0, 0);
        for at in 0..200u32 {
            driver.dispatch(Spec::new((0..40).map(|token| (token * 3 + at) % content::VOCABULARY as u32).collect(), 2));
            if driver.clients[&first].end.is_some() {
                break;
            }
            let rows = &driver.flights.back().expect("a step is in flight").plan.rows;
            let decodes = rows.iter().any(|row| row.seq.request.counter() == first);
            rounds = if decodes { 0 } else { rounds + 1 };
            longest = longest.max(rounds);
            mixed += u32::from(decodes && rows.iter().any(|row| row.tokens > 1));
            driver.complete();
        }
        assert!(driver.clients[&first].end.is_some(), "it comes to its end beside them");
        assert!(longest <= PREFILL_ROUNDS_MAX, "{longest} rounds without it");
    }
    assert!(mixed > 40, "prompts were computed beside it: {mixed}");
}

#[test]
fn a_cache_takes_as_many_tenants_as_it_has_blocks() {
    assert_eq!(CACHE_TENANTS_MAX as usize, TENANTS_MAX, "a tenant that the gateway knows can have content");
    // Thirty-two tenants with a block each are all of the pool.
    let mut driver = Driver::new(small());
    for tenant in 1..=32 {
        let mut spec = Spec::new((0..5).map(|at| (tenant * 7 + at) as u32 % 50).collect(), 1);
        spec.tenant = tenant;
        driver.dispatch(spec);
        driver.run_dry();
        let unstored = |effect: &ReplicaEffect| matches!(effect, ReplicaEffect::Event(ReplicaEvent::Unstored { .. }));
        assert!(!driver.effects.iter().any(unstored), "tenant {tenant}");
    }
    assert_eq!(driver.replica.kv().totals().unstored_blocks, 0);
}

#[test]
fn a_pool_is_at_most_two_to_the_24_blocks() {
    assert_eq!(POOL_BLOCKS_MAX, 16_777_216);
}
