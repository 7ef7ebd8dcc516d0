//! The rule of strikes as it was designed, for policies that fail late or now and then: three strikes within a thousand calls that were put to
//! the policy; 64 calls of quarantine, then twice as long each time up to 65,536; short again after 16,000 good calls; a machine at a time.

mod support;

use penstock_base::Generation;
use penstock_policy_api::validate::Malformed;
use penstock_policy_api::{Answer, Context, Decision, FallbackReason, FaultKind, Matrix, Policies as _};
use penstock_policy_wasm::{Happening, Machine, WasmPolicies};
use support::{ANSWER, Bench, Guest, call, drained};

/// The rule's numbers, from the contract and not from the code.
const WINDOW: u64 = 1_000;
const FIRST: u64 = 64;
const LONGEST: u64 = 65_536;
const FORGIVEN: u64 = 16_000;
/// Fails in call 7 alone. The trial before it serves puts call 1.
const BAD: &str = "(i64.eq (local.get $number) (i64.const 7))";

fn evict(policies: &mut WasmPolicies, number: u64) -> Answer<()> {
    policies.eviction().decide(&call(number), Context { values: &[] }, &Matrix::new(0), &mut Vec::new())
}

/// Fails in the calls for which `when` holds.
fn failing(when: &str) -> Guest {
    let body =
        format!("(if {when} (then unreachable)) (i64.store (i32.const {ANSWER}) (i64.const 0)) (i32.const {ANSWER})");
    Guest::new(Decision::Eviction).body("decide", &body)
}

/// Fails in every call whose number is a multiple of this.
fn every(calls: u64) -> Guest {
    failing(&format!("(i64.eqz (i64.rem_u (local.get $number) (i64.const {calls})))"))
}

/// A machine's seat, asked call after call.
struct Asking {
    policies: WasmPolicies,
    number: u64,
}

impl Asking {
    fn new(bench: &Bench, guest: &Guest) -> Self {
        Self { policies: bench.seat(guest), number: 0 }
    }

    fn ask(&mut self) -> Answer<()> {
        self.number += 1;
        evict(&mut self.policies, self.number)
    }

    /// The call with this number, out of turn.
    fn ask_as(&mut self, number: u64) -> Answer<()> {
        evict(&mut self.policies, number)
    }

    /// Calls that are answered in quarantine from here on, and the first answer after them.
    fn sit_out(&mut self, number: u64) -> (u64, Answer<()>) {
        for calls in 0.. {
            match self.ask_as(number) {
                Answer::Fault(FaultKind::Rebuilding) => {}
                answer => return (calls, answer),
            }
        }
        unreachable!("a quarantine ends")
    }

    fn numbers(&mut self) -> (u64, u64) {
        let status = self.policies.status().pop().expect("eviction is asked");
        (status.strikes, status.quarantines)
    }
}

#[test]
fn a_policy_that_behaves_for_999_calls_and_fails_in_each_thousandth_is_never_out() {
    let bench = Bench::unhurried();
    let mut asking = Asking::new(&bench, &every(WINDOW));
    for number in 1..=20 * WINDOW {
        let expected = if number % WINDOW == 0 { Answer::Fault(FaultKind::Trap) } else { Answer::NoOpinion };
        assert_eq!(asking.ask(), expected, "{number}");
    }
    assert_eq!(asking.numbers(), (20, 0), "each failure costs one answer and is counted");
}

#[test]
fn three_failures_are_out_when_the_first_and_the_third_are_less_than_a_thousand_calls_apart() {
    for (gap, is_out) in [(499, true), (500, false)] {
        let bench = Bench::unhurried();
        let mut asking = Asking::new(&bench, &every(gap));
        for _ in 0..3 * gap {
            asking.ask();
        }
        assert_eq!(asking.numbers(), (3, u64::from(is_out)), "every {gap} calls");
        assert_eq!(asking.policies.quarantined().is_empty(), !is_out);
    }
}

#[test]
fn a_thousand_good_calls_do_not_hide_three_bad_ones_in_a_row() {
    let bench = Bench::unhurried();
    let mut asking = Asking::new(&bench, &failing("(i64.gt_u (local.get $number) (i64.const 999))"));
    for _ in 1..=999 {
        assert_eq!(asking.ask(), Answer::NoOpinion);
    }
    for _ in 0..3 {
        assert_eq!(asking.ask(), Answer::Fault(FaultKind::Trap));
    }
    assert_eq!(asking.ask(), Answer::Fault(FaultKind::Rebuilding));
    let happenings = drained(&mut asking.policies).happenings;
    assert!(happenings.contains(&Happening::Quarantined { calls: FIRST, times: 1 }), "{happenings:?}");
}

#[test]
fn a_flapping_policy_is_left_alone_twice_as_long_each_time_up_to_the_bound_and_is_forgiven_in_the_end() {
    let bench = Bench::unhurried();
    let mut asking = Asking::new(&bench, &failing(BAD));
    let mut expected = FIRST;
    let mut lengths = Vec::new();
    for _ in 0..13 {
        for _ in 0..3 {
            assert_eq!(asking.ask_as(7), Answer::Fault(FaultKind::Trap));
        }
        // It comes back well: that alone forgives nothing.
        let (calls, back) = asking.sit_out(2);
        assert_eq!((calls, back), (expected, Answer::NoOpinion));
        lengths.push(calls);
        expected = (2 * expected).min(LONGEST);
    }
    assert_eq!(
        (lengths[10], lengths[11], lengths[12]),
        (LONGEST, LONGEST, LONGEST),
        "64 doubled ten times, then no more"
    );
    // One call short of a long good time, and then the whole of it; its last quarantine ended with one good call.
    for (good, next) in [(FORGIVEN - 3, LONGEST), (FORGIVEN, FIRST)] {
        for _ in 0..good {
            assert_eq!(asking.ask_as(2), Answer::NoOpinion);
        }
        for _ in 0..3 {
            assert_eq!(asking.ask_as(7), Answer::Fault(FaultKind::Trap));
        }
        assert_eq!(asking.sit_out(2).0, next, "after {good} good calls");
    }
}

#[test]
fn it_is_asked_again_once_and_a_relapse_takes_three_strikes_anew() {
    let bench = Bench::unhurried();
    let mut asking = Asking::new(&bench, &failing(BAD));
    for _ in 0..3 {
        asking.ask_as(7);
    }
    let (_, back) = asking.sit_out(7);
    assert_eq!(back, Answer::Fault(FaultKind::Trap), "the first call after it fails as well");
    assert!(asking.policies.quarantined().is_empty(), "one strike of three");
    assert_eq!(asking.ask_as(2), Answer::NoOpinion);
    asking.ask_as(7);
    assert!(asking.policies.quarantined().is_empty());
    asking.ask_as(7);
    assert_eq!(asking.policies.quarantined(), [Decision::Eviction]);
    assert_eq!(asking.numbers(), (6, 2));
}

#[test]
fn faults_and_nonsense_count_together() {
    let bench = Bench::unhurried();
    let mut asking = Asking::new(&bench, &failing(BAD));
    let refuse = |asking: &mut Asking| {
        asking.ask_as(2);
        asking.policies.strike(Decision::Eviction, FallbackReason::Malformed(Malformed::UnknownTier));
    };
    refuse(&mut asking);
    asking.ask_as(7);
    assert!(asking.policies.quarantined().is_empty());
    refuse(&mut asking);
    assert_eq!(asking.policies.quarantined(), [Decision::Eviction]);
    assert_eq!(bench.runtime.instances_alive(), 0);
}

#[test]
fn a_busy_policy_that_cannot_save_is_out_at_the_third_snapshot_however_many_calls_lie_between() {
    for gap in [1_000, 5_000] {
        let bench = Bench::unhurried();
        // Saves its eight bytes in the trial, and traps once it has counted beyond.
        let save = "(if (i64.gt_u (i64.load (i32.const 64)) (i64.const 1)) (then unreachable))
            (i32.store (i32.const 3072) (i32.const 64)) (i32.store (i32.const 3076) (i32.const 8)) (i32.const 3072)";
        let mut asking = Asking::new(&bench, &Guest::new(Decision::Eviction).body("save", save));
        for snapshot in 1..=3 {
            assert!(asking.policies.quarantined().is_empty(), "before snapshot {snapshot}");
            for _ in 0..gap {
                assert_eq!(asking.ask(), Answer::NoOpinion, "every decision stands");
            }
            asking.policies.between_steps(support::time_of(asking.number));
            assert_eq!(asking.numbers().0, snapshot);
        }
        assert_eq!(asking.policies.quarantined(), [Decision::Eviction], "{gap} calls apart");
        assert_eq!(bench.runtime.instances_alive(), 0);
    }
}

#[test]
fn a_snapshot_that_works_forgives_those_that_did_not() {
    let bench = Bench::unhurried();
    // Cannot save an odd count above one.
    let save = "(if (i64.gt_u (i64.load (i32.const 64)) (i64.const 1)) (then
          (if (i32.wrap_i64 (i64.and (i64.load (i32.const 64)) (i64.const 1))) (then unreachable))))
        (i32.store (i32.const 3072) (i32.const 64)) (i32.store (i32.const 3076) (i32.const 8)) (i32.const 3072)";
    let mut asking = Asking::new(&bench, &Guest::new(Decision::Eviction).body("save", save));
    for round in 1..=5 {
        // From an even count on: an odd one fails, and what comes back is the even one.
        for calls in [2_001, 2_001, 2_000] {
            for _ in 0..calls {
                asking.ask();
            }
            asking.policies.between_steps(support::time_of(asking.number));
        }
        assert_eq!(asking.numbers(), (2 * round, 0), "two failures, then a snapshot, in every round");
    }
}

#[test]
fn a_quarantine_is_of_one_seat_at_one_machine() {
    let bench = Bench::unhurried();
    let guest = failing(BAD);
    let fair = Guest::new(Decision::Fairness);
    let names = [bench.load(&guest), bench.load(&fair)];
    let text =
        format!(r#"{{ "eviction": {{ "policy": "{}" }}, "fairness": {{ "policy": "{}" }} }}"#, names[0], names[1]);
    let set = std::sync::Arc::new(penstock_policy_wasm::PolicySet::parse(&text).expect("well-formed"));
    let [mut one, mut two] = [(); 2].map(|()| WasmPolicies::new(bench.prepare(&set, Machine::Replica), Generation(1)));
    assert_eq!(bench.runtime.instances_alive(), 4);
    for _ in 0..3 {
        assert_eq!(evict(&mut one, 7), Answer::Fault(FaultKind::Trap));
    }
    assert_eq!((one.quarantined(), two.quarantined()), (vec![Decision::Eviction], vec![]));
    assert_eq!(evict(&mut one, 2), Answer::Fault(FaultKind::Rebuilding));
    assert_eq!(evict(&mut two, 2), Answer::NoOpinion, "the other machine's instance knows nothing of it");
    let victims = one.fairness().victims(&call(3), Context { values: &[] }, &Matrix::new(0), &mut Vec::new());
    assert_eq!(victims, Answer::NoOpinion, "nor does the other seat of the same machine");
    assert_eq!(bench.runtime.instances_alive(), 3);
}
