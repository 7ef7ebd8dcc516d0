//! The same inputs give the same answers, the same bytes and the same fuel: twice, and in a fresh instance.

mod support;

use penstock_base::codec::Writer;
use penstock_policy_api::{Answer, Context, Decision, Matrix, Placed, Policies as _, Ranking};
use penstock_policy_wasm::WasmPolicies;
use support::{ANSWER, Bench, Guest, LISTS, call, time_of};

/// Ranks the rows by a mix of seed, state and what is in the first column, and keeps a running hash as its state.
const ORDER: &str = "(local $row i32) (local $hash i64)
    (local.set $hash (i64.xor (local.get $seed) (i64.load (i32.const 64))))
    (loop $next
      (local.set $hash (i64.mul (i64.xor (local.get $hash)
        (i64.load (i32.add (local.get $cells) (i32.shl (local.get $row) (i32.const 3))))) (i64.const 0x100000001b3)))
      (i32.store (i32.add (i32.const LISTS) (i32.shl (local.get $row) (i32.const 2)))
        (i32.rem_u (i32.add (local.get $row) (i32.wrap_i64 (i64.rem_u (local.get $hash) (i64.const 7)))) (local.get $rows)))
      (local.set $row (i32.add (local.get $row) (i32.const 1)))
      (br_if $next (i32.lt_u (local.get $row) (local.get $rows))))
    (i64.store (i32.const 64) (local.get $hash))
    (i32.store (i32.const ANSWER) (i32.const LISTS)) (i32.store offset=4 (i32.const ANSWER) (i32.const 1))
    (i32.store8 offset=8 (i32.const ANSWER) (i32.const 0)) (i32.store offset=12 (i32.const ANSWER) (i32.const -1))
    (i32.const ANSWER)";

fn seat(bench: &Bench) -> WasmPolicies {
    let body = ORDER.replace("LISTS", &LISTS.to_string()).replace("ANSWER", &ANSWER.to_string());
    bench.seat(
        &Guest::new(Decision::Fairness)
            .wants("waiting", &["waited-us", "flow-id"])
            .wants_fact("taken")
            .body("order", &body),
    )
}

/// Everything that a run gives: answers with their rows, fuel of each call, and the saved bytes along the way.
type Course = (Vec<(Answer<Ranking>, Vec<u32>)>, Vec<u64>, Vec<Vec<u8>>);

fn run(policies: &mut WasmPolicies) -> Course {
    let (mut answers, mut fuel, mut saved) = (Vec::new(), Vec::new(), Vec::new());
    for number in 1..=200 {
        let mut waiting = Matrix::default();
        waiting.reset(2, 1 + (number % 100) as usize);
        for (row, cell) in waiting.column_mut(0).iter_mut().enumerate() {
            *cell = (number * 31 + row as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        }
        let fact = penstock_policy_api::Taken { flow_id: number, ..Default::default() };
        policies.fairness().observe(&[fact.at(number)]).expect("it takes facts");
        fuel.push(policies.last_fuel(Decision::Fairness));
        let mut ranked = Vec::new();
        let answer = policies.fairness().order(&call(number), Context { values: &[] }, &waiting, &mut ranked);
        answers.push((answer, ranked));
        fuel.push(policies.last_fuel(Decision::Fairness));
        policies.between_steps(time_of(number * 100));
        if number % 20 == 0 {
            let mut out = Writer::new();
            policies.fairness().save(&mut out).expect("it saves");
            saved.push(out.into_bytes());
        }
    }
    (answers, fuel, saved)
}

#[test]
fn a_run_repeats_in_a_fresh_instance_and_in_another_engine() {
    let bench = Bench::new();
    let first = run(&mut seat(&bench));
    assert!(first.0.iter().all(|(answer, ranked)| matches!(answer, Answer::Proposal(_)) && ranked.len() == 1));
    assert!(first.1.iter().all(|fuel| *fuel > 0));
    assert_eq!(run(&mut seat(&bench)), first);
    assert_eq!(run(&mut seat(&Bench::new())), first);
}

#[test]
fn a_matrix_with_room_between_its_columns_is_the_same_matrix() {
    let bench = Bench::new();
    let ask = |waiting: &Matrix| {
        let mut policies = seat(&bench);
        let mut ranked = Vec::new();
        policies.fairness().order(&call(1), Context { values: &[] }, waiting, &mut ranked);
        (ranked, policies.last_fuel(Decision::Fairness))
    };
    let mut roomy = Matrix::with_capacity(2, 64);
    let mut packed = Matrix::default();
    packed.reset(2, 5);
    for row in 0..5 {
        roomy.push_row(&[row * 17, row]);
        packed.set(row as usize, 0, row * 17);
        packed.set(row as usize, 1, row);
    }
    assert!(roomy.packed().is_none() && packed.packed().is_some());
    assert_eq!(ask(&roomy), ask(&packed));
}

#[test]
fn facts_that_were_not_asked_for_do_not_cross() {
    let bench = Bench::new();
    let mut policies = seat(&bench);
    let foreign = Placed { request_id: 1, ..Placed::default() }.at(1);
    policies.fairness().observe(&[foreign]).expect("nothing to take");
    assert_eq!(policies.last_fuel(Decision::Fairness), 0);
}
