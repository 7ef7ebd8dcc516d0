//! What the shipped policies are worth beside the native defaults, in virtual time: figures where a workload decides, assertions where the
//! rule promises something.

mod support;

use penstock_base::{ClassRank, Duration, Instant, Outcome, Traits};
use penstock_sim::rng::Rng;
use penstock_sim::workload::{Planned, Wish, wished};
use penstock_sim::{Happened, Report, Scenario, run_with};
use support::compiled::Compiled;
use support::contest::arena;
use support::lineup::{ADMISSION, EVICTION, Lineup, OVERLOAD, ROUTING};

fn run(scenario: &Scenario, planned: &[Planned], lineup: Lineup) -> Report {
    let cast = Compiled::lasting(&[lineup]);
    run_with(scenario, planned.to_vec(), &cast).unwrap_or_else(|violation| panic!("{violation}"))
}

/// Arrivals a random time apart, `gap` on average, until `until`.
fn arrivals(rng: &mut Rng, gap: Duration, until: Instant) -> Vec<Instant> {
    let mut at = Instant(1_000_000);
    let mut all = Vec::new();
    while at < until {
        all.push(at);
        at = at + Duration(rng.below(2 * gap.0));
    }
    all
}

fn twins(scenario: &Scenario) -> Lineup {
    Lineup::twins(scenario.gateway.context_tokens_max)
}

/// Four replicas with room for a few prompts each.
fn four(seed: u64) -> Scenario {
    let mut scenario = arena(seed, 2);
    scenario.replicas = 4;
    scenario.gateway.context_tokens_max = 256;
    let replica = &mut scenario.replica;
    (replica.context_tokens_max, replica.blocks, replica.slots) = (256, 160, 8);
    (replica.step_tokens, replica.chunk_tokens) = (128, 128);
    scenario
}

/// How often the level changed, and when it last did.
fn level_changes(report: &Report) -> (u64, Instant) {
    let (mut level, mut changes, mut last) = (0, 0, Instant::ZERO);
    for (at, happened) in &report.trace {
        if let Happened::Stance(now) = happened
            && std::mem::replace(&mut level, *now) != *now
        {
            (changes, last) = (changes + 1, *at);
        }
    }
    (changes, last)
}

/// Calm before a step down, in the parameters of `degrade-ladder`.
const CALM_MS: u64 = 2_000;

#[test]
fn a_noisy_load_does_not_make_the_ladder_flap() {
    let mut scenario = arena(1, 1);
    scenario.gateway.class_slo_ttft = [Duration::from_ms(40); ClassRank::COUNT];
    // The native ladder counts the wait of the work that it pauses, so that only the host's remedy against starving gets that going again.
    scenario.gateway.starve = Duration::from_s(5);
    let rng = &mut Rng::stream(1, 50);
    // Bursts about as long as the calm, each followed by a lull: the saturation crosses every step again and again.
    let mut wishes = Vec::new();
    let end = Instant(60_000_000_000);
    let mut at = Instant(1_000_000);
    while at < end {
        let burst = at + Duration::from_ms(rng.between(100, 1_500));
        while at < burst {
            let class = ClassRank::clamped(rng.below(6) as u8);
            let wish = Wish::plain(1 + rng.below(4), at, rng.between(1, 64) as u32, rng.between(1, 32) as u32);
            wishes.push(Wish { class, traits: Traits::STREAMING.with(Traits::MAY_DEGRADE), ..wish });
            at = at + Duration(rng.below(16_000_000));
        }
        at = at + Duration::from_ms(rng.between(100, 1_500));
    }
    let planned = wished(&scenario, wishes);
    let native = run(&scenario, &planned, twins(&scenario));
    let shipped = run(&scenario, &planned, twins(&scenario).with(OVERLOAD, "degrade-ladder", ""));
    let (changes, last) = level_changes(&shipped);
    let (native_changes, _) = level_changes(&native);
    // Each step down has had a calm of its own, so there are at most so many; and no more steps up than down, but for the four it may end on.
    let most = 2 * (last.0 / 1_000_000 / CALM_MS) + 4;
    println!(
        "figure: a minute of bursts and lulls: degrade-ladder changes its level {changes} times of at most {most}, ladder {native_changes}"
    );
    assert!(changes > 4, "the load was not noisy: {changes} changes");
    assert!(changes <= most, "{changes} changes where {most} may be");
}

#[test]
fn hits_of_a_cache_that_is_swept() {
    let mut scenario = arena(2, 1);
    scenario.replicas = 1;
    scenario.replica.blocks = 96;
    let rng = &mut Rng::stream(2, 51);
    // Three requests of five come back to one of twelve prompts, the first ones more often; the others are never seen again.
    let wishes = arrivals(rng, Duration::from_ms(12), Instant(40_000_000_000)).into_iter().map(|at| {
        let popular = rng.below(12).min(rng.below(12));
        let wish = Wish::plain(1, at, 96, 4);
        if rng.below(5) < 3 { Wish { shared: Some((popular, 80)), ..wish } } else { wish }
    });
    let planned = wished(&scenario, wishes.collect());
    let prompts: u64 = planned.iter().map(|planned| u64::from(planned.manifest.input_tokens)).sum();
    let share = |eviction| {
        let report = run(&scenario, &planned, twins(&scenario).with(EVICTION, eviction, ""));
        assert!(report.figures.hit_tokens > 0 && report.figures.evicted_blocks > 0, "{:?}", report.figures);
        report.figures.hit_tokens as f64 * 100.0 / prompts as f64
    };
    println!(
        "figure: popular prompts among one-time ones: {:.1} % of prompt tokens found by gdsf, {:.1} % by lru",
        share("gdsf"),
        share("lru")
    );
}

/// First-token target of the routing workload.
const TARGET: Duration = Duration::from_ms(150);

/// Mean time to the first token in milliseconds, requests inside the target per second, share of prompt tokens found in percent.
fn served(report: &Report, planned: &[Planned]) -> (f64, f64, f64) {
    let waits = report.requests.iter().filter(|request| request.first_token_at != Instant::NEVER);
    let waits: Vec<u64> = waits.map(|request| request.first_token_at.since(request.arrived).0).collect();
    let good = waits.iter().filter(|wait| **wait <= TARGET.0).count();
    let prompts: u64 = planned.iter().map(|planned| u64::from(planned.manifest.input_tokens)).sum();
    let last = planned.iter().map(|planned| planned.at.0).max().unwrap_or(1);
    (
        waits.iter().sum::<u64>() as f64 / waits.len().max(1) as f64 / 1e6,
        good as f64 * 1e9 / last as f64,
        report.figures.hit_tokens as f64 * 100.0 / prompts as f64,
    )
}

#[test]
fn routing_under_skewed_prefixes() {
    let scenario = four(3);
    for (load, gap_us) in [("half of the capacity", 2_000), ("more than the capacity", 1_000)] {
        let rng = &mut Rng::stream(3, 52);
        let wishes = arrivals(rng, Duration::from_us(gap_us), Instant(8_000_000_000)).into_iter().map(|at| {
            // Half of the traffic belongs to two of ten families.
            let family = if rng.one_in(2) { rng.below(2) } else { 2 + rng.below(8) };
            Wish { shared: Some((family, 160)), ..Wish::plain(family + 1, at, 192, rng.between(1, 24) as u32) }
        });
        let planned = wished(&scenario, wishes.collect());
        let mut told = Vec::new();
        for routing in ["load-overlap", "overlap-load"] {
            let report = run(&scenario, &planned, twins(&scenario).with(ROUTING, routing, ""));
            assert!(report.figures.hit_tokens > 0, "{:?}", report.figures);
            let (wait, good, found) = served(&report, &planned);
            told.push(format!(
                "{routing} first token after {wait:.1} ms, {good:.1} requests/s within {} ms, {found:.1} % of prompts found",
                TARGET.0 / 1_000_000
            ));
        }
        println!("figure: skewed prefixes, {load}: {}", told.join("; "));
    }
}

#[test]
fn who_may_be_degraded_is_not_refused() {
    const FLOOR: u32 = 16;
    let scenario = arena(4, 1);
    let rng = &mut Rng::stream(4, 53);
    // More than the pool may be promised; every other client takes a shorter answer.
    let wishes = arrivals(rng, Duration::from_ms(2), Instant(2_000_000_000)).into_iter().map(|at| {
        let traits = if rng.one_in(2) { Traits::STREAMING.with(Traits::MAY_DEGRADE) } else { Traits::STREAMING };
        Wish { traits, ..Wish::plain(1 + rng.below(4), at, rng.between(1, 16) as u32, 80) }
    });
    let planned = wished(&scenario, wishes.collect());
    let parameters = format!(r#"{{"degrade-floor-tokens":{FLOOR}}}"#);
    let report = run(&scenario, &planned, twins(&scenario).with(ADMISSION, "queue-quota", &parameters));
    let count = |may: bool, outcome: fn(&Outcome) -> bool| {
        let pairs = report.requests.iter().zip(&planned);
        let whose = pairs.filter(|(_, planned)| planned.manifest.traits.has(Traits::MAY_DEGRADE) == may);
        whose.filter(|(request, _)| request.outcome.as_ref().is_some_and(outcome)).count()
    };
    let answered = |outcome: &Outcome| outcome.is_success();
    let refused = |outcome: &Outcome| matches!(outcome, Outcome::Refused(_));
    let [done, gone, done_else, gone_else] =
        [count(true, answered), count(true, refused), count(false, answered), count(false, refused)];
    println!(
        "figure: queue-quota under a flood: of those that may be degraded {done} answered and {gone} refused, of the others {done_else} and \
         {gone_else}; {} answers were shortened",
        report.figures.degraded
    );
    for (request, planned) in report.requests.iter().zip(&planned) {
        let asked = planned.manifest.max_output_tokens;
        let may = planned.manifest.traits.has(Traits::MAY_DEGRADE);
        assert!(request.cap == asked || (may && (FLOOR..asked).contains(&request.cap)), "{request:?}");
    }
    assert!(report.figures.degraded > 0 && gone_else > 0, "{:?}", report.figures);
    // Whoever takes a shorter answer is admitted wherever the others are, and beyond.
    assert!(done * (done_else + gone_else) > done_else * (done + gone), "{done} of {}, {done_else}", done + gone);
    let bounded = run(&scenario, &planned, twins(&scenario));
    assert_eq!(bounded.figures.degraded, 0, "the native default knows no shorter answers");
}
