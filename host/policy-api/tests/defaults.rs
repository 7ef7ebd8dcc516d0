//! The other native defaults against numbers worked by hand.

mod support;

use penstock_base::codec::{Reader, Writer};
use penstock_base::{Generation, Instant, Refusal};
use penstock_policy_api::native::{Bounded, ClassFirst, Ladder, Lru, NativePolicies, level_after, saturation_ppm};
use penstock_policy_api::validate::Standing;
use penstock_policy_api::*;
use support::{Facts, Rows, request};

const SECOND: u64 = 1_000_000;

fn admit(changes: &[(AdmissionSignal, u64)]) -> AdmissionDecision {
    use AdmissionSignal::*;
    let mut own = changes.to_vec();
    own.extend([(QueueLimitRequests, 10), (QueueLimitTokens, 1_000), (PoolQueuedRequests, 4), (PoolQueuedTokens, 600)]);
    let facts = Facts::own(&own);
    let answer = AdmissionSeat::new(1).ask(&mut Bounded::new(), Instant(0), &request(), 0, &facts);
    assert_eq!(answer.fallback, None);
    answer.decision
}

/// The request brings 160 tokens in and at most 100 out.
#[test]
fn bounded_admits_while_queue_and_window_have_room() {
    use AdmissionSignal::*;
    let yes = AdmissionDecision::Admit { reserve_output_tokens: 100, class: penstock_base::ClassRank::default() };
    assert_eq!(admit(&[]), yes, "nothing reported, nothing estimated");
    assert_eq!(admit(&[(PoolQueuedRequests, 9)]), yes);
    assert_eq!(admit(&[(PoolQueuedTokens, 840)]), yes, "840 + 160 = 1,000");
    assert_eq!(admit(&[(TenantUsedTokens, 40), (TenantLimitTokens, 300)]), yes, "40 + 160 + 100 = 300");
    assert_eq!(admit(&[(TenantUsedTokens, 90), (TenantLimitTokens, 300), (ExpectedOutputTokens, 50)]), yes);
}

#[test]
fn bounded_refuses_beyond_and_says_when_to_come_back() {
    use AdmissionSignal::*;
    let refused = |reason, retry_after_ms| AdmissionDecision::Reject { reason, retry_after_ms };
    // 600 tokens queued at 100 a second take six seconds.
    assert_eq!(admit(&[(PoolQueuedRequests, 10), (PrefillTokensPerSec, 100)]), refused(Refusal::Capacity, 6_000));
    let full = [(PoolQueuedTokens, 841), (PrefillTokensPerSec, 100)];
    assert_eq!(admit(&full), refused(Refusal::Capacity, 8_410));
    let spent = [(TenantUsedTokens, 41), (TenantLimitTokens, 300), (PrefillTokensPerSec, 100)];
    assert_eq!(admit(&spent), refused(Refusal::Quota, 6_000));
}

#[test]
fn a_refusal_without_a_rate_is_clamped_to_a_minute() {
    let facts = Facts::own(&[(AdmissionSignal::PoolQueuedTokens, u64::MAX)]);
    let answer = AdmissionSeat::new(1).ask(&mut Bounded::new(), Instant(0), &request(), 0, &facts);
    assert_eq!(answer.decision, AdmissionDecision::Reject { reason: Refusal::Capacity, retry_after_ms: 60_000 });
    assert_eq!(answer.changed, Some(validate::Change::RetryAfterClamped));
}

fn waiting(class: u64, priority: i32, waited_s: u64, age_s: u64) -> Vec<(WaitingSignal, u64)> {
    use WaitingSignal::*;
    vec![
        (ClassRank, class),
        (PriorityBiased, penstock_base::Priority(priority).biased()),
        (WaitedUs, waited_s * SECOND),
        (AgeUs, age_s * SECOND),
    ]
}

fn order(rows: Vec<Vec<(WaitingSignal, u64)>>) -> Vec<u32> {
    let (rows, mut ranked) = (Rows { rows, max_left: None }, Vec::new());
    let answer = OrderSeat::new(1).ask(&mut ClassFirst::new(), Instant(0), &Facts::default(), &rows, &mut ranked);
    assert_eq!((answer.decision.named, answer.decision.tpot_target_us), (ranked.len(), None));
    ranked
}

#[test]
fn order_is_class_then_priority_then_arrival() {
    assert_eq!(order(vec![waiting(3, 0, 0, 9), waiting(5, -9, 0, 1), waiting(3, 1, 0, 1)]), [1, 2, 0]);
    assert_eq!(order(vec![waiting(3, 0, 1, 1), waiting(3, 0, 1, 2), waiting(3, 0, 1, 2)]), [1, 2, 0]);
}

#[test]
fn five_seconds_of_waiting_are_worth_a_class() {
    // Class 0 after 15 s stands with class 3, and is older; after 14 s it stands with class 2.
    assert_eq!(order(vec![waiting(3, 0, 0, 0), waiting(0, 0, 15, 15)]), [1, 0]);
    assert_eq!(order(vec![waiting(3, 0, 0, 0), waiting(0, 0, 14, 14)]), [0, 1]);
    // Never beyond 7: then age decides.
    assert_eq!(order(vec![waiting(7, 0, 0, 0), waiting(6, 0, 4_000, 4_000), waiting(7, 0, 1, 5_000)]), [2, 1, 0]);
}

fn running(class: u64, recompute: u64, admitted: u64, freed: u64) -> Vec<(RunningSignal, u64)> {
    use RunningSignal::*;
    vec![(ClassRank, class), (RecomputeTokens, recompute), (AdmitCount, admitted), (FreedBlocks, freed)]
}

fn victims(context: &[(VictimsSignal, u64)], rows: Vec<Vec<(RunningSignal, u64)>>) -> Vec<(u32, YieldHow)> {
    let (rows, mut out) = (Rows { rows, max_left: None }, Vec::new());
    VictimsSeat::new(1).ask(&mut ClassFirst::new(), Instant(0), &Facts::own(context), &rows, &mut out);
    out.iter().map(|victim| (victim.row, victim.how)).collect()
}

#[test]
fn victims_are_the_least_important_and_cheapest_until_covered() {
    use VictimsSignal::*;
    use YieldHow::Recompute;
    let rows = || vec![running(3, 50, 1, 4), running(1, 90, 2, 4), running(1, 80, 3, 4), running(1, 80, 4, 4)];
    assert_eq!(victims(&[(ShortBlocks, 4)], rows()), [(3, Recompute)], "joined last among equals");
    assert_eq!(victims(&[(ShortBlocks, 9)], rows()), [(3, Recompute), (2, Recompute), (1, Recompute)]);
    assert_eq!(victims(&[(ShortBlocks, 99)], rows()).len(), 4);
    assert_eq!(victims(&[(ShortBlocks, 99), (TakeSequences, 2)], rows()), [(3, Recompute), (2, Recompute)]);
    assert_eq!(victims(&[(ShortBlocks, 0)], rows()), []);
}

#[test]
fn a_victim_is_offloaded_where_faster_and_while_there_is_room() {
    use RunningSignal::*;
    use VictimsSignal::*;
    use YieldHow::{Offload, Recompute};
    let row = |recompute_us, offload_us| {
        let mut row = running(1, 10, 1, 4);
        row.extend([(EstRecomputeUs, recompute_us), (EstOffloadUs, offload_us)]);
        row
    };
    let rows = || vec![row(9, 8), row(9, 9), row(9, 8)];
    let told = |dram| victims(&[(ShortBlocks, 12), (DramFreeBlocks, dram)], rows());
    assert_eq!(told(100), [(0, Offload), (1, Recompute), (2, Offload)]);
    assert_eq!(told(7), [(0, Offload), (1, Recompute), (2, Recompute)], "7 - 4 leaves room for 3");
    assert_eq!(told(3), [(0, Recompute), (1, Recompute), (2, Recompute)]);
    let unknown = vec![running(1, 10, 1, 4)];
    assert_eq!(victims(&[(ShortBlocks, 4), (DramFreeBlocks, 9)], unknown), [(0, Recompute)]);
}

#[test]
fn lru_prices_by_last_use() {
    use RunSignal::*;
    let row = |idle, load, recompute| vec![(IdleUs, idle), (EstLoadUs, load), (EstRecomputeUs, recompute)];
    let rows = Rows { rows: vec![row(1_000, 5, 9), row(0, 9, 5), row(u64::MAX, 9, 9), vec![]], max_left: None };
    let mut priced = Vec::new();
    let now = Instant(5_000_000);
    for (room, first) in [(1, Tier::Dram), (0, Tier::Drop)] {
        let facts = Facts::own(&[(EvictionSignal::DramFreeBlocks, room)]);
        EvictionSeat::new(1).ask(&mut Lru::new(), now, &facts, &rows, &mut priced);
        let (prices, tiers): (Vec<_>, Vec<_>) = priced.iter().map(|run| (run.price, run.to)).unzip();
        assert_eq!(prices, [4_000, 5_000, 0, 5_000]);
        assert_eq!(tiers, [first, Tier::Drop, Tier::Drop, Tier::Drop]);
    }
}

#[test]
fn a_step_of_the_ladder_is_left_a_tenth_below() {
    let walk = |levels: &[(u64, u8)]| {
        levels.iter().fold(0, |level, (ppm, expected)| {
            let next = level_after(level, *ppm);
            assert_eq!(next, *expected, "from {level} at {ppm}");
            next
        })
    };
    walk(&[(799_999, 0), (800_000, 1), (700_000, 1), (699_999, 0)]);
    walk(&[(900_000, 2), (800_000, 2), (799_999, 1), (899_999, 1), (900_000, 2)]);
    walk(&[(1_000_000, 3), (900_000, 3), (899_999, 2)]);
    walk(&[(u64::MAX, 4), (1_100_000, 4), (1_099_999, 3), (0, 0)]);
}

#[test]
fn saturation_is_of_nine_tenths_of_the_pool() {
    // 81 of 100 blocks are 0.9 of the 90 that count.
    assert_eq!(saturation_ppm(81, 100), 900_000);
    assert_eq!(saturation_ppm(0, 100), 0);
    assert_eq!(saturation_ppm(5, 0), 0);
    assert_eq!(saturation_ppm(u64::MAX, u64::MAX), 1_111_111);
    assert_eq!(saturation_ppm(u64::MAX, 1), u64::MAX);
}

fn pool(rows: &[(Option<u64>, u64)]) -> Rows<ReplicaSignal> {
    use ReplicaSignal::*;
    let row = |(active, age): &(Option<u64>, u64)| {
        let mut row = vec![(TotalBlocks, 100), (LoadAgeUs, *age), (InflightRequests, 1)];
        row.extend(active.map(|blocks| (ActiveBlocks, blocks)));
        row
    };
    Rows { rows: rows.iter().map(row).collect(), max_left: None }
}

fn overload(ladder: &mut Ladder, queued: u64, wait_us: u64, replicas: &Rows<ReplicaSignal>) -> (u8, Vec<StanceAction>) {
    use OverloadSignal::*;
    let context = Facts::own(&[(QueuedTokens, queued), (QueueLimitTokens, 1_000)]);
    let class = |wait| vec![(ClassSignal::OldestWaitUs, wait), (ClassSignal::SloTtftUs, 2 * SECOND)];
    let classes = Rows { rows: vec![class(0), class(wait_us)], max_left: None };
    let sources = OverloadSources { context: &context, classes: &classes, replicas };
    let mut actions = Vec::new();
    let answer = OverloadSeat::new(1, 8_192).ask(ladder, Instant(0), &sources, Standing::default(), &mut actions);
    assert_eq!(answer.fallback, None);
    (answer.decision.level, actions)
}

fn kinds(actions: &[StanceAction]) -> Vec<(ActionKind, u8, u64)> {
    actions.iter().map(|action| (action.kind, action.class.get(), action.amount)).collect()
}

#[test]
fn the_ladder_takes_the_worst_of_pool_queue_and_wait() {
    let idle = pool(&[(Some(0), 0)]);
    let level = |queued, wait, replicas: &Rows<_>| overload(&mut Ladder::new(8_192), queued, wait, replicas).0;
    assert_eq!(level(799, 0, &idle), 0);
    assert_eq!(level(800, 0, &idle), 1);
    assert_eq!(level(0, 1_800_000, &idle), 2, "1.8 of 2 s");
    // (95 + 67) of 180 blocks that count = 0.9.
    assert_eq!(level(0, 0, &pool(&[(Some(95), 0), (Some(67), 0)])), 2);
    assert_eq!(level(0, 0, &pool(&[(Some(95), 9_000_000), (Some(67), 0)])), 2, "a stale one counts as it was");
    assert_eq!(level(0, 0, &pool(&[(None, 0), (None, 0)])), 0, "a replica that never reported is not full");
    assert_eq!(level(0, 0, &pool(&[])), 0);
}

#[test]
fn each_step_adds_its_actions() {
    use ActionKind::*;
    let steps = [
        (0, vec![]),
        (800, vec![(PauseClass, 0, 0)]),
        (900, vec![(PauseClass, 0, 0), (CapOutput, 7, 512), (RefuseLong, 2, 2_048)]),
        (1_000, vec![(PauseClass, 0, 0), (CapOutput, 7, 512), (RefuseLong, 2, 2_048), (ShedClass, 2, 1_000_000)]),
        (1_200, vec![(PauseClass, 0, 0), (CapOutput, 7, 512), (RefuseLong, 2, 2_048), (ShedClass, 2, 1_000_000)]),
    ];
    for (level, (queued, expected)) in steps.into_iter().enumerate() {
        let (stood, actions) = overload(&mut Ladder::new(8_192), queued, 0, &pool(&[(Some(10), 0)]));
        assert_eq!((usize::from(stood), kinds(&actions)), (level, expected));
    }
    let full = |rows: &[(Option<u64>, u64)]| {
        kinds(&overload(&mut Ladder::new(8_192), 1_200, 0, &pool(rows)).1).contains(&(Busy, 7, 0))
    };
    assert!(full(&[(Some(100), 0), (Some(120), 0)]));
    assert!(!full(&[(Some(100), 0), (Some(99), 0)]), "one has a block to give");
    assert!(!full(&[(Some(100), 0), (Some(100), 500_000)]), "a stale one is not full");
    assert!(!full(&[(Some(100), 0), (None, 0)]), "an unknown one is not full");
}

#[test]
fn the_ladder_keeps_its_level_through_save_and_restore() {
    let mut ladder = Ladder::new(8_192);
    overload(&mut ladder, 900, 0, &pool(&[]));
    let mut out = Writer::new();
    ladder.save(&mut out).expect("a native policy saves");
    let info = RestoreInfo { schema: 1, cause: RestoreCause::Swap, saved_now_us: 5, now_us: 9, elapsed_us: 1 };
    let mut again = Ladder::new(8_192);
    assert_eq!(again.restore(&info, out.bytes()), Ok(Kept::Kept));
    assert_eq!((again.level(), overload(&mut again, 850, 0, &pool(&[])).0), (2, 2));
    assert_eq!(again.restore(&info, &[9]), Err(RestoreError::Damaged));
    assert_eq!(again.level(), 0, "as new after a refusal");
    assert_eq!(again.restore(&RestoreInfo { schema: 2, ..info }, &[1]), Err(RestoreError::UnknownSchema));
    // 5 us into the saver's time, of which 1 us has passed, is 8 us into ours.
    assert_eq!((info.moved(5), info.moved(0), info.moved(u64::MAX)), (8, 3, u64::MAX));
}

#[test]
fn a_seat_goes_on_where_it_was_saved() {
    let rows = pool(&[]);
    let context: Facts<OverloadSignal> =
        Facts::own(&[(OverloadSignal::QueuedTokens, 950), (OverloadSignal::QueueLimitTokens, 1_000)]);
    let calm = Facts::own(&[(OverloadSignal::QueuedTokens, 850), (OverloadSignal::QueueLimitTokens, 1_000)]);
    let classes = Rows::none();
    let mut policies = NativePolicies::new(Generation(1), 8_192);
    let mut seat = OverloadSeat::new(42, 8_192);
    let mut actions = Vec::new();
    let sources = OverloadSources { context: &context, classes: &classes, replicas: &rows };
    let first = seat.ask(policies.overload(), Instant(1), &sources, Standing::default(), &mut actions);
    let mut out = Writer::new();
    seat.encode(&mut out);
    let mut from = Reader::new(out.bytes());
    let mut again = OverloadSeat::decode(&mut from).expect("it was just written");
    assert_eq!(from.finish(), Ok(()));
    let sources = OverloadSources { context: &calm, classes: &classes, replicas: &rows };
    let there = seat.ask(policies.overload(), Instant(2), &sources, Standing::default(), &mut actions);
    let here = again.ask(policies.overload(), Instant(2), &sources, Standing::default(), &mut actions);
    assert_eq!((first.call, there), (1, here));
}
