//! A step that has nothing to decide asks nobody: neither a native policy nor, behind the wall, a component.

#[path = "../benches/policy_cost/facts.rs"]
#[allow(dead_code, reason = "shared with the benchmark, which uses more of it")]
mod facts;
#[path = "../benches/policy_cost/house.rs"]
#[allow(dead_code, reason = "shared with the benchmark, which uses more of it")]
mod house;
mod support;
#[path = "../benches/policy_cost/watch.rs"]
#[allow(dead_code, reason = "shared with the benchmark, which uses more of it")]
mod watch;

use std::sync::Arc;

use penstock_base::Generation;
use penstock_policy_api::native::NativePolicies;
use penstock_policy_api::{Decision, Question};
use penstock_policy_wasm::{Machine, PolicySet, WasmPolicies};

use house::{House, Load, STEP};
use support::{Bench, Guest};
use watch::{Seated, Spent};

const SEQUENCES: u32 = 32;
/// Room for everything twice over, and answers that outlast the test's quiet part.
const ROOMY: Load = Load { sequences: SEQUENCES, blocks: 8_192, waiting: 0, output_tokens: 400 };
/// Between two questions about overload while something lives at the gateway.
const TICK_STEPS: u64 = 100_000_000 / STEP.0;

fn natives(load: Load) -> House<NativePolicies> {
    let policies = || NativePolicies::new(Generation(1), 8_192);
    House::new(load, policies(), policies(), 0)
}

/// Components without an opinion in all seats; fairness wants to hear what was served.
fn components(load: Load) -> House<WasmPolicies> {
    let bench = Bench::new();
    let seat = |decision: Decision| {
        let mut guest = Guest::new(decision);
        if decision == Decision::Fairness {
            guest = guest.wants_fact("served");
        }
        format!(r#""{}": {{ "policy": "{}" }}"#, decision.name(), bench.load(&guest))
    };
    let text = format!("{{ {} }}", Decision::ALL.map(seat).join(", "));
    let set = Arc::new(PolicySet::parse(&text).expect("five seats"));
    let made = |machine| WasmPolicies::new(bench.prepare(&set, machine), Generation(1));
    House::new(load, made(Machine::Gateway), made(Machine::Replica), 0)
}

fn steps(house: &mut House<impl Seated>, count: u64) -> Spent {
    let mut spent = Spent::default();
    (0..count).for_each(|_| spent.add(&house.step()));
    spent
}

/// Questions other than overload's.
fn decisions(spent: &Spent) -> [u64; 5] {
    [Question::Admission, Question::Routing, Question::Order, Question::Victims, Question::Eviction]
        .map(|question| spent.asked[question as usize])
}

/// A house in which nothing has happened: ticks and idle reports ask nobody and tell nobody anything.
fn stays_silent_when_idle(house: &mut House<impl Seated>) {
    steps(house, 4);
    let spent = steps(house, 400);
    assert_eq!((spent.calls(), spent.told), (0, 0), "ten seconds of reports");
}

/// Everybody decodes and nobody waits.
fn asks_only_the_tick_while_all_decode(house: &mut House<impl Seated>) {
    (0..SEQUENCES).for_each(|_| house.arrive());
    let start = steps(house, 60);
    assert_eq!(start.asked[Question::Admission as usize], u64::from(SEQUENCES), "once an arrival");
    assert!(start.asked[Question::Order as usize] > 0 && start.asked[Question::Routing as usize] > 0);
    assert_eq!(house.state(), (SEQUENCES as usize, 0));
    let spent = steps(house, 200);
    assert_eq!(house.state(), (SEQUENCES as usize, 0), "nothing ended");
    assert_eq!(decisions(&spent), [0; 5], "200 steps of decodes");
    let ticks = spent.asked[Question::Overload as usize];
    assert!(ticks > 0 && ticks <= 200 / TICK_STEPS, "{ticks} questions about overload");
    assert!(spent.told <= 200 / TICK_STEPS, "{} batches of facts", spent.told);
}

/// Every slot is taken and requests wait: there is nothing to place until one ends.
fn asks_nobody_while_nothing_can_be_placed(house: &mut House<impl Seated>) {
    (0..2 * SEQUENCES).for_each(|_| house.arrive());
    steps(house, 60);
    let full = (SEQUENCES as usize, SEQUENCES as usize);
    let (running, waiting) = house.state();
    assert!(running >= full.0 && running + waiting == full.0 + full.1, "{running} run, {waiting} wait");
    let before = house.state();
    let spent = steps(house, 200);
    assert_eq!(house.state(), before, "nothing ended");
    assert_eq!(decisions(&spent), [0; 5], "200 steps without credit");
    // The first answers end, and only then there is something to decide again.
    let spent = steps(house, 400);
    assert!(house.state().1 < before.1);
    let asked = |question: Question| spent.asked[question as usize];
    assert!(asked(Question::Order) > 0 && asked(Question::Routing) > 0);
    assert!(asked(Question::Eviction) > 0, "runs that came out of use are priced");
    assert!(asked(Question::Order) <= u64::from(SEQUENCES), "one question for each end at the most");
}

#[test]
fn a_house_of_natives_that_idles_is_silent() {
    stays_silent_when_idle(&mut natives(ROOMY));
}

#[test]
fn a_house_of_components_that_idles_is_silent() {
    let mut house = components(ROOMY);
    let fuel = |house: &mut House<WasmPolicies>| {
        house.policies().map(|policies| policies.status().iter().map(|seat| seat.total_fuel).sum::<u64>())
    };
    steps(&mut house, 4);
    let before = fuel(&mut house);
    stays_silent_when_idle(&mut house);
    assert_eq!(fuel(&mut house), before, "no guest ran");
}

#[test]
fn steps_of_decodes_ask_natives_about_overload_only() {
    asks_only_the_tick_while_all_decode(&mut natives(ROOMY));
}

#[test]
fn steps_of_decodes_ask_components_about_overload_only() {
    let mut house = components(ROOMY);
    asks_only_the_tick_while_all_decode(&mut house);
    let [_, at_replica] = house.policies();
    assert!(at_replica.status().iter().all(|seat| seat.calls == 0), "the replica had nothing to decide from the start");
}

#[test]
fn a_full_house_asks_natives_nothing_until_one_ends() {
    asks_nobody_while_nothing_can_be_placed(&mut natives(ROOMY));
}

#[test]
fn a_full_house_asks_components_nothing_until_one_ends() {
    asks_nobody_while_nothing_can_be_placed(&mut components(ROOMY));
}

#[test]
fn components_without_opinion_and_natives_give_one_history() {
    let (mut natively, mut behind_the_wall) = (natives(ROOMY), components(ROOMY));
    for _ in 0..3 {
        (0..SEQUENCES).for_each(|_| natively.arrive());
        (0..SEQUENCES).for_each(|_| behind_the_wall.arrive());
        let (native, wasm) = (steps(&mut natively, 150), steps(&mut behind_the_wall, 150));
        assert_eq!(native.asked, wasm.asked, "the same steps ask the same questions");
    }
    assert_eq!(natively.digests(), behind_the_wall.digests());
}
