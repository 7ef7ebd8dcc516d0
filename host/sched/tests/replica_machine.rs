//! Limits, reports, snapshots, and every pair of features at once.

#[path = "support/content.rs"]
mod content;
#[path = "support/replica_driver.rs"]
mod replica_driver;

use content::mix;
use penstock_base::codec::{Reader, Writer};
use penstock_base::limits::{GATEWAYS_MAX, PREEMPTIONS_MAX, READY_WINDOW_MAX, REPORT_INTERVAL, SLOTS_MAX};
use penstock_base::{CancelCause, Duration, GatewayEpoch, Generation, Instant, Outcome};
use penstock_policy_api::native::NativePolicies;
use penstock_sched::message::{FromReplica, Report};
use penstock_sched::replica::{CacheChange, Replica, ReplicaConfig, ReplicaEffect, ReplicaEvent, ReplicaInput};
use replica_driver::{Driver, GATEWAY, Spec};

fn small() -> ReplicaConfig {
    ReplicaConfig {
        blocks: 24,
        block_size_tokens: 4,
        slots: 4,
        step_tokens: 16,
        chunk_tokens: 16,
        context_tokens_max: 64,
        check_every_step: true,
        ..ReplicaConfig::default()
    }
}

fn prompt(of: u64, length: u64) -> Vec<u32> {
    (0..length).map(|at| (mix(of, at) % content::VOCABULARY) as u32).collect()
}

/// A spec whose answers never stop by themselves.
fn steady(of: u64, length: u64, max_output: u32) -> Spec {
    Spec { seed: 0, ..Spec::new(prompt(of, length), max_output) }
}

fn reports(effects: &[ReplicaEffect]) -> Vec<(GatewayEpoch, Report)> {
    let report = |effect: &ReplicaEffect| match effect {
        ReplicaEffect::Send { gateway, message: FromReplica::Report(report) } => Some((*gateway, *report)),
        _ => None,
    };
    effects.iter().filter_map(report).collect()
}

// --- Features in combination ---------------------------------------------------------------------------------------------------

#[derive(Clone, Copy, Debug)]
struct Features {
    chunked: bool,
    cached: bool,
    preempted: bool,
    several: bool,
    overlap: bool,
    cancelled: bool,
    truncated: bool,
}

impl Features {
    fn of(bits: u64) -> Self {
        let on = |bit: u64| bits >> bit & 1 == 1;
        Self {
            chunked: on(0),
            cached: on(1),
            preempted: on(2),
            several: on(3),
            overlap: on(4),
            cancelled: on(5),
            truncated: on(6),
        }
    }

    fn config(self) -> ReplicaConfig {
        ReplicaConfig {
            blocks: if self.preempted { 11 } else { 80 },
            slots: 6,
            step_tokens: if self.chunked { 12 } else { 64 },
            chunk_tokens: if self.chunked { 5 } else { 64 },
            inflight_max: 1 + usize::from(self.overlap),
            prefix_cache: self.cached,
            ..small()
        }
    }
}

/// Which of the features really happened.
#[derive(Default)]
struct Met {
    chunks: bool,
    hits: bool,
    preemptions: bool,
    several: bool,
    overlap: bool,
    cancels: bool,
    cuts: bool,
}

fn combined(features: Features, seed: u64, met: &mut Met) {
    let mut driver = Driver::new(features.config());
    driver.copy_every = 7;
    for round in 0..40 {
        driver.now = driver.now + Duration::from_ms(5);
        if round % 4 == 0 {
            let spec = Spec {
                seed: mix(seed, round),
                sequences: if features.several { 1 + (round / 4 % 3) as u16 } else { 1 },
                reserve_output: if features.preempted { 1 } else { 14 },
                stop_string: features.truncated,
                ..Spec::new(prompt(round / 4 % 2, 14 + round / 4), 14)
            };
            driver.dispatch(spec);
        }
        if features.cancelled && round % 13 == 3 {
            let alive = driver.clients.iter().find(|(_, client)| client.taken && client.end.is_none());
            if let Some(number) = alive.map(|(number, _)| *number) {
                driver.cancel(number, Outcome::Cancelled(CancelCause::Client));
                met.cancels = true;
            }
        }
        met.overlap |= driver.flights.len() == 2;
        for _ in 0..2 {
            if !driver.flights.is_empty() {
                met.chunks |= driver.flights[0].plan.rows.iter().any(|row| !row.sample);
                driver.complete();
            }
        }
        while driver.pay() {}
    }
    driver.run_dry();
    driver.assert_outputs();
    met.hits |= driver.hit_tokens > 0;
    met.preemptions |= driver.preemptions > 0;
    met.several |= driver.clients.values().any(|client| client.end.is_some() && client.spec.sequences > 1);
    let cut = |client: &replica_driver::Client| {
        client.ends.iter().zip(&client.outputs).any(|(end, output)| *end == Some(Outcome::Stop) && output.len() < 14)
    };
    met.cuts |= features.truncated && driver.clients.values().any(cut);
}

#[test]
fn every_combination_of_features_gives_the_same_tokens() {
    for bits in 0..1 << 7 {
        let (features, mut met) = (Features::of(bits), Met::default());
        for seed in 0..2 {
            combined(features, seed, &mut met);
        }
        // What is on has happened, so that each pair (and each larger set) was tried together.
        let met_all = (met.chunks || !features.chunked)
            && (met.hits == features.cached)
            && (met.preemptions || !features.preempted)
            && met.several == features.several
            && met.overlap == features.overlap
            && met.cancels == features.cancelled
            && (met.cuts || !features.truncated);
        assert!(met_all, "{features:?}");
    }
}

#[test]
fn without_shortage_nobody_yields() {
    let mut driver = Driver::new(ReplicaConfig { blocks: 64, ..small() });
    for of in 0..12 {
        driver.dispatch(Spec { reserve_output: 1, ..steady(of, 9, 20) });
        for _ in 0..15 {
            if !driver.flights.is_empty() {
                driver.complete();
            }
        }
    }
    driver.run_dry();
    assert_eq!(driver.preemptions, 0);
}

#[test]
fn decodes_are_in_every_step_while_prompts_keep_coming() {
    let mut driver = Driver::new(ReplicaConfig { step_tokens: 8, blocks: 200, ready_window: 2, ..small() });
    driver.dispatch(steady(1, 2, 40));
    driver.complete();
    for of in 0..30 {
        driver.dispatch(steady(10 + of, 40, 1));
        let before = driver.clients[&1].outputs[0].len();
        driver.complete();
        assert_eq!(driver.clients[&1].outputs[0].len(), before + 1, "a token each step, whatever is waiting");
    }
}

// --- Reports -----------------------------------------------------------------------------------------------------------------

#[test]
fn reports_go_out_on_a_change_and_every_hundred_milliseconds() {
    let mut driver = Driver::new(small());
    assert_eq!(reports(&driver.effects).len(), 1, "a gateway hears at once");
    driver.step(ReplicaInput::Tick);
    assert!(reports(&driver.effects).is_empty(), "nothing changed");
    assert_eq!(driver.replica.next_wake(), Instant::ZERO + REPORT_INTERVAL);
    driver.now = driver.replica.next_wake();
    driver.step(ReplicaInput::Tick);
    let idle = reports(&driver.effects)[0].1;
    assert_eq!((idle.number, idle.as_of, idle.covers.0), (2, driver.now, 0));
    // Four slots and a window of two; twice a step's budget; all blocks.
    assert_eq!((idle.credit.requests, idle.credit.prefill_tokens, idle.credit.blocks), (6, 32, 24));
    driver.dispatch(steady(1, 30, 2));
    let busy = reports(&driver.effects)[0].1;
    // 30 + 2 tokens are 8 blocks; 16 of the 30 prompt tokens are in the step in flight.
    assert_eq!((busy.covers.0, busy.credit.requests, busy.credit.blocks), (1, 5, 16));
    assert_eq!((busy.load.prefill_tokens, busy.credit.prefill_tokens), (14, 18));
    assert_eq!((busy.load.active_blocks, busy.load.reserved_blocks, busy.load.free_blocks), (4, 4, 20));
    assert_eq!((busy.load.running_requests, busy.load.ready_requests), (1, 0));
    assert_eq!(busy.load.class_active_blocks, [0, 0, 0, 4, 0, 0, 0, 0]);
    driver.complete();
    driver.run_dry();
    driver.dispatch(Spec { reserve_output: 1, ..steady(2, 30, 9) });
    // 39 tokens are 10 blocks, 31 are 8: two more may be wanted than were promised.
    let load = reports(&driver.effects)[0].1.load;
    assert_eq!((load.active_blocks, load.reserved_blocks, load.growth_blocks), (4, 4, 2));
    driver.step(ReplicaInput::Drain);
    let draining = reports(&driver.effects)[0].1.credit;
    assert_eq!((draining.requests, draining.prefill_tokens, draining.blocks), (0, 0, 0));
}

#[test]
fn a_report_tells_blocks_that_a_step_may_still_read_from_those_that_are_referenced() {
    let mut driver = Driver::new(small());
    driver.dispatch(steady(1, 15, 2));
    // 15 tokens are 4 blocks of 4, all computed in the step in flight.
    let blocks = |driver: &Driver| {
        let load = reports(&driver.effects)[0].1.load;
        assert_eq!(load.transfer_blocks, 0);
        (load.active_blocks, load.reclaimable_blocks, load.cached_blocks, load.free_blocks)
    };
    assert_eq!(blocks(&driver), (4, 0, 0, 20));
    driver.cancel(1, Outcome::Cancelled(CancelCause::Client));
    assert_eq!(blocks(&driver), (0, 4, 0, 20), "nobody refers to them, and the step still writes them");
    driver.complete();
    let (active, reclaimable, cached, free) = blocks(&driver);
    assert_eq!((active, reclaimable, cached + free), (0, 0, 24));
}

#[test]
fn gateways_share_the_credit_and_their_requests_go_with_them() {
    let mut policies = NativePolicies::new(Generation(1), 64);
    let mut replica = Replica::new(small(), Instant::ZERO);
    let mut step = |replica: &mut Replica, now: u64, input| {
        let mut effects = Vec::new();
        replica.step(Instant(now * 1_000_000), input, &mut policies, &mut effects);
        effects
    };
    for epoch in 0..3 {
        step(&mut replica, 0, ReplicaInput::GatewayUp(GatewayEpoch(epoch)));
    }
    for turn in 1..10 {
        let told = reports(&step(&mut replica, turn * 100, ReplicaInput::Tick));
        assert_eq!(told.len(), 3);
        // Nothing is here: one of them in turn may send what needs the whole, the others have their third.
        let mut offered: Vec<_> = told.iter().map(|(_, r)| (r.credit.blocks, r.credit.requests)).collect();
        offered.sort_unstable();
        assert_eq!(offered, [(8, 2), (8, 2), (24, 6)]);
        assert_eq!(told.iter().map(|(_, report)| report.credit.prefill_tokens).sum::<u64>(), 32);
    }
    for epoch in 3..GATEWAYS_MAX as u16 {
        assert!(!step(&mut replica, 2_000, ReplicaInput::GatewayUp(GatewayEpoch(epoch))).is_empty());
    }
    let one_more = step(&mut replica, 2_000, ReplicaInput::GatewayUp(GatewayEpoch(99)));
    assert!(one_more.contains(&ReplicaEffect::Event(ReplicaEvent::Stale)), "the table of gateways is full");
}

#[test]
fn what_a_lost_gateway_sent_ends_and_is_not_told_to_it() {
    let mut driver = Driver::new(small());
    driver.dispatch(steady(1, 6, 9));
    driver.step(ReplicaInput::GatewayDown(GATEWAY));
    let ended = driver.clients[&1].ends[0];
    assert_eq!((ended, driver.clients[&1].end), (Some(Outcome::Cancelled(CancelCause::Drain)), None));
    let sent = driver.effects.iter().any(|effect| matches!(effect, ReplicaEffect::Send { .. }));
    assert!(!sent);
    driver.complete();
    assert!(driver.replica.is_idle());
}

#[test]
fn a_gateway_that_comes_up_late_gets_the_whole_cache() {
    let mut driver = Driver::new(small());
    driver.dispatch(steady(1, 13, 1));
    driver.complete();
    let mut policies = NativePolicies::new(Generation(1), 64);
    let mut effects = Vec::new();
    driver.replica.step(driver.now, ReplicaInput::GatewayUp(GatewayEpoch(7)), &mut policies, &mut effects);
    let mut depths = Vec::new();
    for effect in &effects {
        if let ReplicaEffect::Send { gateway: GatewayEpoch(7), message: FromReplica::Cache { sequence, event } } =
            effect
        {
            let penstock_sched::message::CacheEvent::Stored { key, depth } = event else { panic!("{event:?}") };
            assert_eq!(*sequence as usize, depths.len() + 1, "dense, from 1");
            assert_eq!(*key, driver.clients[&1].manifest.keys[*depth as usize]);
            depths.push(*depth);
        }
    }
    depths.sort_unstable();
    assert_eq!(depths, [0, 1, 2]);
}

#[test]
fn changes_of_the_cache_are_told_with_what_they_hang_on_whether_a_gateway_is_there_or_not() {
    let mut driver = Driver::new(small());
    driver.dispatch(steady(1, 13, 1));
    driver.complete();
    let keys = driver.clients[&1].manifest.keys.clone();
    let parents = [None, Some(keys[0]), Some(keys[1])];
    let stored = |at: usize| CacheChange::Stored { key: keys[at], parent: parents[at], depth_blocks: at as u32 + 1 };
    let listed = driver.replica.listed();
    assert_eq!(listed, [0, 1, 2].map(stored), "the one before comes before");
    driver.step(ReplicaInput::GatewayDown(GATEWAY));
    driver.step(ReplicaInput::FlushCache);
    let mut told: Vec<_> = driver
        .effects
        .iter()
        .filter_map(|effect| if let ReplicaEffect::Cached(change) = effect { Some(*change) } else { None })
        .collect();
    assert!(driver.replica.listed().is_empty());
    let mut expected: Vec<_> = keys[..3].iter().map(|key| CacheChange::Removed { key: *key }).collect();
    expected.push(CacheChange::Cleared);
    let by_key = |change: &CacheChange| if let CacheChange::Removed { key } = change { Some(key.0) } else { None };
    told.sort_unstable_by_key(by_key);
    expected.sort_unstable_by_key(by_key);
    assert_eq!(told, expected);
}

// --- Limits ------------------------------------------------------------------------------------------------------------------

#[test]
fn sizes_are_brought_into_the_limits() {
    let config = ReplicaConfig {
        blocks: 0,
        block_size_tokens: 0,
        slots: u32::MAX,
        step_tokens: 5_000,
        inflight_max: 9,
        ready_window: 9,
        ..ReplicaConfig::default()
    };
    let replica = Replica::new(config, Instant::ZERO);
    let config = replica.config();
    assert_eq!((config.blocks, config.block_size_tokens), (1, 1));
    assert_eq!((config.slots as usize, config.inflight_max, config.ready_window), (SLOTS_MAX, 2, READY_WINDOW_MAX));
    let few = Replica::new(ReplicaConfig { step_tokens: 3, slots: 8, ..ReplicaConfig::default() }, Instant::ZERO);
    assert_eq!(few.config().slots, 3, "each sequence must find room for a token in a step");
}

#[test]
fn a_full_house_uses_every_slot_and_the_window_and_no_more() {
    let mut driver = Driver::new(ReplicaConfig { blocks: 64, slots: 8, ready_window: 2, ..small() });
    for of in 0..11 {
        driver.dispatch(steady(of, 4, 9));
    }
    let refused = driver.clients.values().filter(|client| client.refused.is_some()).count();
    assert_eq!(refused, 1, "eight run, two are ready, one is sent back");
    let mut eight = Driver::new(ReplicaConfig { blocks: 64, slots: 8, ready_window: 0, ..small() });
    eight.dispatch(Spec { sequences: 8, ..steady(1, 6, 3) });
    assert_eq!(eight.clients[&1].refused, None);
    eight.run_dry();
    eight.assert_outputs();
}

#[test]
fn nobody_is_preempted_more_often_than_the_limit() {
    for seed in 0..20 {
        let mut driver = Driver::new(ReplicaConfig { blocks: 12, slots: 4, ..small() });
        for round in 0..12 {
            driver.dispatch(Spec {
                reserve_output: 1,
                class: (mix(seed, round) % 8) as u8,
                ..steady(mix(seed, round), 7, 20)
            });
            for _ in 0..7 {
                if !driver.flights.is_empty() {
                    driver.complete();
                }
            }
        }
        driver.run_dry();
        driver.assert_outputs();
        let most = driver.clients.values().filter_map(|client| client.end).map(|(_, usage)| usage.preemptions).max();
        assert!(most <= Some(PREEMPTIONS_MAX), "{most:?}");
    }
}

// --- Snapshots -----------------------------------------------------------------------------------------------------------------

fn busy() -> Driver {
    let mut driver = Driver::new(ReplicaConfig { inflight_max: 2, blocks: 14, ..small() });
    for of in 0..6 {
        driver.dispatch(Spec { reserve_output: 1, sequences: 1 + (of % 2) as u16, ..steady(of % 2, 9, 12) });
        for _ in 0..3 {
            if !driver.flights.is_empty() {
                driver.complete();
            }
        }
        driver.pay();
    }
    driver
}

#[test]
fn damaged_bytes_are_refused_or_give_a_machine_that_is_whole() {
    let driver = busy();
    let mut out = Writer::new();
    driver.replica.encode(&mut out);
    let bytes = out.into_bytes();
    let decode = |bytes: &[u8]| Replica::decode(driver.replica.config().clone(), &mut Reader::new(bytes));
    decode(&bytes).expect("whole bytes").check().expect("a whole machine");
    for cut in (0..bytes.len()).step_by(97) {
        assert!(decode(&bytes[..cut]).is_err());
    }
    let mut refused = 0;
    for flip in 0..2_000u64 {
        let mut damaged = bytes.clone();
        let at = mix(flip, 1) as usize % damaged.len();
        damaged[at] ^= 1 << (mix(flip, 2) % 8);
        match decode(&damaged) {
            Ok(machine) => machine.check().expect("what is taken is whole"),
            Err(_) => refused += 1,
        }
    }
    assert!(refused > 500, "{refused}");
    let other = ReplicaConfig { blocks: 15, ..driver.replica.config().clone() };
    assert!(Replica::decode(other, &mut Reader::new(&bytes)).is_err());
}

#[test]
fn equal_inputs_give_equal_decisions() {
    let (one, two) = (busy(), busy());
    assert_eq!(one.replica.decision_digest(), two.replica.decision_digest());
    assert_eq!(one.trace, two.trace);
    let mut other = busy();
    let alive = other.clients.iter().find(|(_, client)| client.taken && client.end.is_none());
    let number = *alive.expect("somebody is here").0;
    other.cancel(number, Outcome::Cancelled(CancelCause::Client));
    assert_ne!(one.replica.decision_digest(), other.replica.decision_digest());
}

#[test]
fn a_clock_that_runs_backwards_is_clamped_and_counted() {
    let mut driver = Driver::new(small());
    driver.now = Instant(1_000);
    driver.step(ReplicaInput::Tick);
    driver.now = Instant(10);
    driver.step(ReplicaInput::Tick);
    assert!(driver.effects.contains(&ReplicaEffect::Event(ReplicaEvent::ClockClamped)));
    assert_eq!(driver.replica.gauges().clock_clamped_total, 1);
}
