//! Whatever a component does in a call, the machine gets an answer in that call, and the next call works.

mod support;

use std::time::Duration;

use penstock_base::codec::Writer;
use penstock_base::{ClassRank, Generation, Priority, RequestId, Traits};
use penstock_policy_api::{
    Answer, Call, Context, Decision, FaultKind, Matrix, Policies as _, RequestRecord, Taken, Verdict, Worth,
};
use penstock_policy_wasm::{
    Component, Failure, GuestCall, Happening, Machine, Remembered, ResetReason, Runtime, RuntimeConfig, WasmPolicies,
};
use support::{ANSWER, Bench, Guest, LISTS, call, drained, time_of};

/// Pulls the third call's number out of the arguments and misbehaves then.
fn on_third(misbehaviour: &str) -> String {
    format!(
        "(call $bump (i64.const 1))
         (if (i64.eq (local.get $number) (i64.const 3)) (then {misbehaviour}))
         (i64.store (i32.const {ANSWER}) (i64.const 0)) (i32.const {ANSWER})"
    )
}

fn evict(policies: &mut WasmPolicies, number: u64) -> Answer<()> {
    ask_eviction(policies, &call(number), &mut Vec::new())
}

fn ask_eviction(policies: &mut WasmPolicies, call: &Call, worths: &mut Vec<Worth>) -> Answer<()> {
    policies.eviction().decide(call, Context { values: &[] }, &Matrix::new(0), worths)
}

fn state(policies: &mut WasmPolicies) -> u64 {
    let mut out = Writer::new();
    policies.eviction().save(&mut out).expect("it saves");
    u64::from_le_bytes(out.bytes().try_into().expect("eight bytes"))
}

fn faults(happenings: Vec<Happening>) -> Vec<Failure> {
    let faults = happenings.into_iter().filter_map(|happening| match happening {
        Happening::Fault { failure, .. } => Some(failure),
        _ => None,
    });
    faults.collect()
}

#[test]
fn each_kind_of_misbehaviour_costs_one_answer() {
    for (misbehaviour, kind) in [
        ("unreachable", FaultKind::Trap),
        ("(drop (i64.div_u (i64.const 1) (i64.const 0)))", FaultKind::Trap),
        ("(drop (i32.load (i32.const 0x7fffffff)))", FaultKind::Trap),
        ("(loop $on (br $on))", FaultKind::Fuel),
        ("(loop $on (drop (memory.grow (i32.const 16))) (br $on))", FaultKind::Memory),
        ("(drop (memory.grow (i32.const 65000)))", FaultKind::Memory),
        // A list that ends outside the memory, one that is not aligned, and one beyond any answer.
        (
            "(i32.store (i32.const 1024) (i32.const 0)) (i32.store (i32.const 1028) (i32.const -1)) (return (i32.const 1024))",
            FaultKind::Trap,
        ),
        (
            "(i32.store (i32.const 1024) (i32.const 3)) (i32.store (i32.const 1028) (i32.const 1)) (return (i32.const 1024))",
            FaultKind::Trap,
        ),
        (
            "(i32.store (i32.const 1024) (i32.const 0)) (i32.store (i32.const 1028) (i32.const 8000)) (return (i32.const 1024))",
            FaultKind::Trap,
        ),
        ("(return (i32.const 1025))", FaultKind::Trap),
        ("(return (i32.const -8))", FaultKind::Trap),
    ] {
        let bench = Bench::new();
        let guest = Guest::new(Decision::Eviction).body("decide", &on_third(misbehaviour));
        let mut policies = bench.seat(&guest);
        assert_eq!(evict(&mut policies, 1), Answer::NoOpinion);
        assert_eq!(evict(&mut policies, 2), Answer::NoOpinion);
        assert_eq!(evict(&mut policies, 3), Answer::Fault(kind), "{misbehaviour}");
        assert_eq!(evict(&mut policies, 4), Answer::NoOpinion, "{misbehaviour}");
        // Made anew without a snapshot: it counts from the start.
        assert_eq!(state(&mut policies), 1, "{misbehaviour}");
        let happenings = drained(&mut policies).happenings;
        assert!(happenings.contains(&Happening::Rebuilt { facts: 0 }), "{happenings:?}");
        let faults = faults(happenings);
        assert_eq!(faults.len(), 1);
        assert_eq!((faults[0].during, faults[0].kind), (GuestCall::Decide, kind));
        assert_eq!(bench.runtime.instances_alive(), 1);
    }
}

#[test]
fn a_guest_that_calls_itself_for_ever_ends_at_its_stack() {
    let bench = Bench::new();
    let guest =
        Guest::new(Decision::Eviction).with("(func $deep (call $deep))").body("decide", &on_third("(call $deep)"));
    let name = bench.load(&guest);
    let set = bench.set(Decision::Eviction, &name, r#", "fuel-base": 20000000"#);
    let mut policies = WasmPolicies::new(bench.prepare(&set, Machine::Replica), Generation(1));
    assert_eq!(evict(&mut policies, 3), Answer::Fault(FaultKind::Trap));
    let faults = faults(drained(&mut policies).happenings);
    assert!(faults[0].text.contains("call stack exhausted") && faults[0].text.ends_with("< ..."), "{}", faults[0].text);
    assert_eq!(evict(&mut policies, 4), Answer::NoOpinion);
}

#[test]
fn a_trap_names_the_guests_functions() {
    let bench = Bench::new();
    let guest = Guest::new(Decision::Eviction)
        .with("(func $weigh_run (unreachable)) (func $weigh_all (call $weigh_run))")
        .body("decide", &on_third("(call $weigh_all)"));
    let mut policies = bench.seat(&guest);
    for number in 1..=3 {
        evict(&mut policies, number);
    }
    let faults = faults(drained(&mut policies).happenings);
    let said = &faults[0].text;
    assert!(said.contains("weigh_run < weigh_all <") && said.contains("unreachable"), "{said}");
}

#[test]
fn what_was_saved_and_told_survives_a_trap() {
    let bench = Bench::new();
    let guest = Guest::new(Decision::Fairness).wants_fact("taken").body(
        "order",
        &format!(
            "(call $bump (i64.const 100)) (if (i64.eq (local.get $number) (i64.const 9)) (then unreachable))
             (i64.store (i32.const {ANSWER}) (i64.const 0)) (i32.store8 (i32.const 1032) (i32.const 0))
             (i32.store (i32.const 1036) (i32.const -1)) (i32.const {ANSWER})"
        ),
    );
    let mut policies = bench.seat(&guest);
    let order = |policies: &mut WasmPolicies, number| {
        policies.fairness().order(&call(number), Context { values: &[] }, &Matrix::new(0), &mut Vec::new())
    };
    let fact = |at_us| Taken { request_id: 7, ..Taken::default() }.at(at_us);
    order(&mut policies, 1);
    policies.fairness().observe(&[fact(1_000), fact(1_001)]).expect("it takes facts");
    // Due after a second; 100 for the decision and 1 for each fact so far.
    policies.between_steps(time_of(1_500));
    assert_eq!(policies.status()[2].snapshots, 1);
    // Since: a decision, which is lost, and three facts, which are told again.
    order(&mut policies, 8);
    policies.fairness().observe(&[fact(8_000); 3]).expect("it takes facts");
    assert_eq!(order(&mut policies, 9), Answer::Fault(FaultKind::Trap));
    let mut out = Writer::new();
    policies.fairness().save(&mut out).expect("it saves");
    assert_eq!(out.bytes(), (100 + 2 + 3_u64).to_le_bytes());
    let happenings = drained(&mut policies).happenings;
    assert!(happenings.contains(&Happening::Rebuilt { facts: 3 }), "{happenings:?}");
}

#[test]
fn a_fact_that_kills_is_told_twice_and_then_never_again() {
    let bench = Bench::new();
    let poison = "(block $done (loop $next
          (br_if $done (i32.eqz (local.get $len)))
          (if (i64.eq (i64.load offset=16 (local.get $ptr)) (i64.const 13)) (then unreachable))
          (call $bump (i64.const 1))
          (local.set $ptr (i32.add (local.get $ptr) (i32.const 64)))
          (local.set $len (i32.sub (local.get $len) (i32.const 8)))
          (br $next)))
        (call $reset)";
    let guest = Guest::new(Decision::Eviction).wants_fact("stored").body("observe", poison);
    let mut policies = bench.seat(&guest);
    let fact = |run_hash| penstock_policy_api::Stored { run_hash, ..Default::default() }.at(1);
    policies.eviction().observe(&[fact(1)]).expect("it takes facts");
    assert_eq!(policies.eviction().observe(&[fact(13)]), Err(FaultKind::Trap));
    policies.eviction().observe(&[fact(2)]).expect("the next instance takes facts");
    assert_eq!(state(&mut policies), 1, "what was told since the last snapshot went with the poison");
    let happenings = drained(&mut policies).happenings;
    assert!(happenings.contains(&Happening::Reset(ResetReason::FactsLost)), "{happenings:?}");
    assert_eq!(policies.status()[1].strikes, 1);
}

#[test]
fn a_policy_that_fails_on_its_own_state_starts_fresh() {
    let bench = Bench::new();
    // Traps whenever it is given a state above three, which its trial at start does not show.
    let guest = Guest::new(Decision::Eviction)
        .body("restore", "(if (i64.gt_u (i64.load (local.get $ptr)) (i64.const 3)) (then unreachable)) (i32.store16 (i32.const 3072) (i32.const 0)) (i32.const 3072)")
        .body("decide", &on_third("unreachable").replace("i64.const 3", "i64.const 6"));
    let mut policies = bench.seat(&guest);
    for number in 1..=5 {
        evict(&mut policies, number);
    }
    policies.between_steps(time_of(2_000));
    assert_eq!(evict(&mut policies, 6), Answer::Fault(FaultKind::Trap));
    assert_eq!(state(&mut policies), 0);
    let told = drained(&mut policies);
    assert!(told.happenings.contains(&Happening::Reset(ResetReason::StateLost)), "{:?}", told.happenings);
    assert_eq!((policies.status()[1].strikes, policies.status()[1].resets), (1, 1));
}

#[test]
fn too_much_state_is_a_strike_and_no_snapshot() {
    let bench = Bench::new();
    let huge = "(drop (memory.grow (i32.const 32))) (i32.store (i32.const 3072) (i32.const 0))
        (i32.store (i32.const 3076) (i32.const 2000000)) (i32.const 3072)";
    let guest = Guest::new(Decision::Eviction).body("save", huge);
    let name = bench.load(&guest);
    let set = bench.set(Decision::Eviction, &name, "");
    let faults = bench.try_prepare(&set, Machine::Replica, &Remembered::default()).expect_err("its trial shows it");
    assert!(faults.to_string().contains("in save"), "{faults}");

    // The same once its state has grown.
    let later = "(if (i64.gt_u (i64.load (i32.const 64)) (i64.const 4)) (then
           (drop (memory.grow (i32.const 32)))
           (i32.store (i32.const 3072) (i32.const 0)) (i32.store (i32.const 3076) (i32.const 262145))
           (return (i32.const 3072))))
         (i32.store (i32.const 3072) (i32.const 64)) (i32.store (i32.const 3076) (i32.const 8)) (i32.const 3072)";
    let mut policies = bench.seat(&Guest::new(Decision::Eviction).body("save", later));
    for number in 1..=9 {
        assert_eq!(evict(&mut policies, number), Answer::NoOpinion);
    }
    policies.between_steps(time_of(5_000));
    let status = &policies.status()[1];
    assert_eq!((status.snapshots, status.strikes, status.rebuilds), (0, 1, 0));
    assert_eq!(evict(&mut policies, 10), Answer::NoOpinion, "the instance goes on");
}

#[test]
fn the_backstop_ends_what_fuel_does_not() {
    let config = RuntimeConfig { instances_max: 8, backstop: Duration::from_millis(4), ..RuntimeConfig::default() };
    let bench = Bench { runtime: Runtime::new(config).expect("the engine starts"), ..Bench::new() };
    // Growing by nothing costs little fuel and much time.
    let guest = Guest::new(Decision::Eviction)
        .body("decide", &on_third("(loop $on (drop (memory.grow (i32.const 0))) (br $on))"));
    let name = bench.load(&guest);
    let set = bench.set(Decision::Eviction, &name, r#", "fuel-base": 20000000"#);
    let mut policies = WasmPolicies::new(bench.prepare(&set, Machine::Replica), Generation(1));
    evict(&mut policies, 1);
    evict(&mut policies, 2);
    assert_eq!(evict(&mut policies, 3), Answer::Fault(FaultKind::Epoch));
    assert_eq!(evict(&mut policies, 4), Answer::NoOpinion);
}

#[test]
fn the_fuel_of_a_call_is_the_base_and_so_much_a_row() {
    let bench = Bench::new();
    // Spins once per row, three hundred instructions or so: within the rows' fuel, whatever the window.
    let body = "(local $left i32)
        (local.set $left (i32.mul (local.get $rows) (i32.const 190)))
        (block $done (loop $on
          (br_if $done (i32.eqz (local.get $left)))
          (local.set $left (i32.sub (local.get $left) (i32.const 1))) (br $on)))
        (i64.store (i32.const 1024) (i64.const 0)) (i32.const 1024)";
    let name = bench.load(&Guest::new(Decision::Eviction).wants("run", &["run-blocks"]).body("decide", body));
    let set = bench.set(Decision::Eviction, &name, r#", "fuel-base": 1000"#);
    let mut policies = WasmPolicies::new(bench.prepare(&set, Machine::Replica), Generation(1));
    for rows in [1, 64, 512] {
        let mut runs = Matrix::default();
        runs.reset(1, rows);
        let answer = policies.eviction().decide(&call(1), Context { values: &[] }, &runs, &mut Vec::new());
        assert_eq!(answer, Answer::NoOpinion, "{rows} rows");
        let fuel = policies.last_fuel(Decision::Eviction);
        assert!((rows as u64 * 1_000..=rows as u64 * 2_000 + 1_000).contains(&fuel), "{fuel} for {rows} rows");
    }
}

#[test]
fn lists_are_cut_one_past_what_can_be_valid() {
    let bench = Bench::new();
    // From the third call on it answers with three thousand prices, whatever was asked.
    let many = format!(
        "(i32.store (i32.const {ANSWER}) (i32.const {LISTS})) (i32.store offset=4 (i32.const {ANSWER}) (i32.const 3000))"
    );
    let mut policies = bench.seat(
        &Guest::new(Decision::Eviction).body("decide", &on_third(&format!("{many} (return (i32.const {ANSWER}))"))),
    );
    let mut worths = Vec::new();
    assert_eq!(ask_eviction(&mut policies, &call(3), &mut worths), Answer::Proposal(()));
    assert_eq!(worths.len(), 1, "one past the no rows that there were");
}

#[test]
fn an_admission_verdict_crosses_whole() {
    let bench = Bench::new();
    // Reserves the cap less the class less the first context value, and keeps the class.
    let body = "(i32.store8 (i32.const 1024) (i32.const 1))
        (i32.store (i32.const 1028) (i32.sub (i32.sub
            (i32.load offset=68 (local.get $args)) (i32.load8_u offset=56 (local.get $args)))
            (i32.load (i32.load offset=88 (local.get $args)))))
        (i32.store8 (i32.const 1032) (i32.load8_u offset=56 (local.get $args)))
        (i32.const 1024)";
    let guest = Guest::new(Decision::Admission).wants("admission", &["need-blocks"]).body("decide", body);
    let mut policies = bench.seat(&guest);
    let record = RequestRecord {
        request_id: RequestId(1),
        tenant_id: 2,
        flow_id: 3,
        session_id: 4,
        class_rank: ClassRank::clamped(6),
        attempt: 1,
        sequences: 1,
        priority: Priority(-1),
        input_tokens: 10,
        max_output_tokens: 100,
        deadline_us: u64::MAX,
        traits: Traits(0),
    };
    let answer = policies.admission().decide(&call(1), &record, Context { values: &[5] });
    assert_eq!(answer, Answer::Proposal(Verdict::Admit { reserve_output_tokens: 89, class_rank: 6 }));
}

#[test]
fn an_answer_that_is_nonsense_for_a_plain_question_is_found_before_it_serves() {
    let bench = Bench::new();
    // Degrades a request that may not be degraded.
    let body = "(i32.store8 (i32.const 1024) (i32.const 3)) (i32.store (i32.const 1028) (i32.const 16))
        (i32.store (i32.const 1032) (i32.const 1)) (i32.store8 (i32.const 1036) (i32.const 0)) (i32.const 1024)";
    let name = bench.load(&Guest::new(Decision::Admission).body("decide", body));
    let set = bench.set(Decision::Admission, &name, "");
    let faults = bench.try_prepare(&set, Machine::Gateway, &Remembered::default()).expect_err("refused");
    assert!(faults.to_string().contains("may-not-degrade"), "{faults}");
}

#[test]
fn a_component_is_loaded_once_and_used_by_many() {
    let bench = Bench::new();
    let guest = Guest::new(Decision::Eviction);
    let name = bench.load(&guest);
    let set = bench.set(Decision::Eviction, &name, "");
    let many: Vec<_> = (0..10).map(|_| bench.prepare(&set, Machine::Replica)).collect();
    assert_eq!(bench.runtime.instances_alive(), 10);
    drop(many);
    assert_eq!(bench.runtime.instances_alive(), 0);
    assert!(Component::load(&bench.runtime, &guest.component()).is_ok());
}
