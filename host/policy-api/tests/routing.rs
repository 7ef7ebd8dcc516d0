//! Native routing against numbers worked by hand.

mod support;

use penstock_base::Instant;
use penstock_policy_api::ReplicaSignal::*;
use penstock_policy_api::native::{BestCredit, OverlapLoad};
use penstock_policy_api::{
    CommonSignal, PlaceAsked, ReplicaSignal, RequestRecord, RoutingDecision, RoutingPhase, RoutingPolicy, RoutingSeat,
    RoutingSignal,
};
use support::{Facts, Rows, request};

type Row = Vec<(ReplicaSignal, u64)>;

/// A replica with room for the request, reported 1 ms ago.
fn replica(id: u64) -> Row {
    vec![
        (ReplicaId, id),
        (LoadAgeUs, 1_000),
        (CacheAgeUs, 1_000),
        (PrefillTokens, 0),
        (ActiveBlocks, 0),
        (CreditRequests, 1),
        (CreditTokens, 512),
        (CreditBlocks, 100),
        (OverlapBlocks, 0),
    ]
}

fn with(mut row: Row, changes: &[(ReplicaSignal, u64)]) -> Row {
    for (signal, value) in changes {
        row.retain(|(which, _)| which != signal);
        row.push((*signal, *value));
    }
    row
}

fn without(mut row: Row, signal: ReplicaSignal) -> Row {
    row.retain(|(which, _)| *which != signal);
    row
}

fn ask(policy: &mut dyn RoutingPolicy, rows: &[Row]) -> (Vec<u32>, u32) {
    ask_for(1, policy, rows)
}

fn ask_for(sequences: u16, policy: &mut dyn RoutingPolicy, rows: &[Row]) -> (Vec<u32>, u32) {
    let context = Facts {
        common: vec![
            (CommonSignal::BlockSizeTokens, 16),
            (CommonSignal::StaleLoadUs, 500_000),
            (CommonSignal::StaleCacheUs, 2_000_000),
        ],
        own: vec![(RoutingSignal::NeedBlocks, 12)],
    };
    let rows = Rows { rows: rows.to_vec(), max_left: None };
    let request = RequestRecord { sequences, ..request() };
    let asked = PlaceAsked { request: &request, phase: RoutingPhase::Whole };
    let answer = RoutingSeat::new(7).ask(policy, Instant(9_000), asked, &context, &rows);
    assert_eq!((answer.fallback, answer.changed, answer.call), (None, None, 1));
    match answer.decision {
        RoutingDecision::Place { ranked, wait_us, colocate: false } => (ranked.as_slice().to_vec(), wait_us),
        other => panic!("{other:?}"),
    }
}

fn overlap_load(rows: &[Row]) -> Vec<u32> {
    let (ranked, wait_us) = ask(&mut OverlapLoad::new(), rows);
    assert_eq!(wait_us, 0);
    ranked
}

/// A saves 20 ms of prefill but its queue takes 50 ms; B has no prefix and its queue takes 5 ms. A prefill of 30 ms without the prefix
/// is 10 ms with it, so A is ready after 60 ms and B after 35: B is better by 25 ms.
#[test]
fn a_short_queue_beats_a_cached_prefix_by_25_ms() {
    let (a_credit, b_credit, prefill, saved) = (50_000, 5_000, 30_000, 20_000);
    let (a, b) = (a_credit + prefill - saved, b_credit + prefill);
    assert_eq!(a - b, 25_000);
    let rows = [
        vec![(ReplicaId, 1), (EstCreditUs, a_credit), (EstPrefillUs, prefill - saved)],
        vec![(ReplicaId, 2), (EstCreditUs, b_credit), (EstPrefillUs, prefill)],
    ];
    let (ranked, wait_us) = ask(&mut BestCredit::new(), &rows);
    assert_eq!(ranked, [1, 0]);
    assert_eq!(wait_us, 5_000, "as long as the best replica's credit takes");
}

#[test]
fn a_prefix_worth_more_than_the_wait_is_waited_for() {
    let rows = [
        vec![(ReplicaId, 1), (EstCreditUs, 15_000), (EstPrefillUs, 10_000)],
        vec![(ReplicaId, 2), (EstCreditUs, 0), (EstPrefillUs, 30_000)],
    ];
    assert_eq!(ask(&mut BestCredit::new(), &rows), (vec![0, 1], 15_000));
}

#[test]
fn equal_times_go_to_fewer_in_flight_then_to_the_smaller_id() {
    let row = |id, inflight| vec![(ReplicaId, id), (EstCreditUs, 0), (EstPrefillUs, 9), (InflightRequests, inflight)];
    assert_eq!(ask(&mut BestCredit::new(), &[row(4, 2), row(3, 1), row(2, 1)]).0, [2, 1, 0]);
}

#[test]
fn unknown_times_come_last_and_are_not_waited_for() {
    let unknown = vec![(ReplicaId, 1)];
    let known = vec![(ReplicaId, 2), (EstCreditUs, 900_000), (EstPrefillUs, 900_000)];
    assert_eq!(ask(&mut BestCredit::new(), &[unknown.clone(), known]), (vec![1, 0], 900_000));
    assert_eq!(ask(&mut BestCredit::new(), &[unknown]), (vec![0], 0));
}

/// Without any overlap the prompt costs the same everywhere, 160 / 16 = 10 blocks, and so does what it needs, 12. What differs is load.
#[test]
fn without_overlap_it_is_pure_load() {
    let rows = [
        with(replica(1), &[(PrefillTokens, 320), (ActiveBlocks, 5)]), // 30 + 17 = 47
        with(replica(2), &[(ActiveBlocks, 20)]),                      // 10 + 32 = 42
        with(replica(3), &[(UnreportedPrefillTokens, 160), (ActiveBlocks, 4), (UnreportedBlocks, 2)]), // 20 + 18 = 38
        with(replica(4), &[(ActiveBlocks, 30)]),                      // 10 + 42 = 52
    ];
    assert_eq!(overlap_load(&rows), [2, 1, 0, 3]);
}

#[test]
fn no_replica_is_left_idle_for_a_tie() {
    let rows = [with(replica(1), &[(InflightRequests, 3)]), replica(2), with(replica(3), &[(InflightRequests, 1)])];
    assert_eq!(overlap_load(&rows), [1, 2, 0], "ties go to fewer in flight");
    assert_eq!(overlap_load(&[replica(9), replica(8)]), [1, 0], "then to the smaller id");
}

/// 8 cached blocks leave 160 - 128 = 32 tokens, 2 blocks of work: worth 8 blocks of load and no more.
#[test]
fn an_overlap_is_worth_its_blocks() {
    let cached = |active| with(replica(1), &[(OverlapBlocks, 8), (ActiveBlocks, active)]);
    assert_eq!(overlap_load(&[replica(2), cached(7)]), [1, 0]);
    assert_eq!(overlap_load(&[replica(2), cached(9)]), [0, 1]);
}

#[test]
fn an_overlap_of_a_stale_or_gapped_index_counts_nothing() {
    let cached = |age| with(replica(2), &[(OverlapBlocks, 10), (CacheAgeUs, age)]);
    assert_eq!(overlap_load(&[replica(1), cached(1_999_999)]), [1, 0]);
    assert_eq!(overlap_load(&[replica(1), cached(2_000_000)]), [0, 1]);
    assert_eq!(overlap_load(&[replica(1), without(cached(0), CacheAgeUs)]), [0, 1], "unknown age is no age");
    assert_eq!(overlap_load(&[replica(1), without(cached(0), OverlapBlocks)]), [0, 1]);
}

#[test]
fn credit_comes_before_load() {
    let busy = with(replica(1), &[(ActiveBlocks, 90)]);
    for lacking in [(CreditRequests, 0), (CreditTokens, 0), (CreditBlocks, 11)] {
        assert_eq!(overlap_load(&[with(replica(2), &[lacking]), busy.clone()]), [1, 0], "{lacking:?}");
    }
    assert_eq!(overlap_load(&[with(replica(2), &[(CreditBlocks, 12)]), busy.clone()]), [0, 1]);
    let roomy = with(busy, &[(CreditRequests, 2)]);
    assert_eq!(ask_for(2, &mut OverlapLoad::new(), &[replica(2), roomy]).0, [1, 0], "two answers need two slots");
}

#[test]
fn stale_and_unknown_loads_come_after_every_known_one() {
    let loaded = with(replica(1), &[(ActiveBlocks, 5_000), (CreditRequests, 0)]);
    let stale = with(replica(2), &[(LoadAgeUs, 500_000), (InflightRequests, 2)]);
    let unknown = with(without(replica(3), ActiveBlocks), &[(InflightRequests, 1)]);
    assert_eq!(overlap_load(&[stale, unknown, loaded]), [2, 1, 0], "by requests in flight among themselves");
}

#[test]
fn the_native_ranking_names_every_row() {
    let rows: Vec<Row> = (0..20).map(|id| with(replica(id), &[(ActiveBlocks, 20 - id)])).collect();
    assert_eq!(overlap_load(&rows), [19, 18, 17, 16, 15, 14, 13, 12], "a placement names eight");
    let (rows, request) = (Rows { rows, max_left: None }, request());
    let asked = PlaceAsked { request: &request, phase: RoutingPhase::Whole };
    let mut ranked = Vec::new();
    RoutingSeat::new(7).rank_natively(asked, &Facts::default(), &rows, &mut ranked);
    assert_eq!(ranked, (0..20).rev().collect::<Vec<u32>>());
}
