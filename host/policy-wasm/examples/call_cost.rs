//! What does a call through the wall cost beside the same rule in the host? Prints nanoseconds through one seat, both in one run.
//!
//!     cargo run --release -p penstock-policy-wasm --example call_cost [LRU_COMPONENT.wasm]
//!
//! Without a component it uses the rule of the native `lru`, written by hand in WebAssembly text.

use std::error::Error;
use std::hint::black_box;
use std::sync::Arc;
use std::time::Instant as Clock;

use penstock_base::{Generation, Instant};
use penstock_policy_api::native::Lru;
use penstock_policy_api::{
    CommonSignal, ContextSource, Decision, EvictionPolicy, EvictionSeat, EvictionSignal, Policies as _, RowSource,
    RunSignal,
};
use penstock_policy_wasm::{
    Component, Library, Machine, PolicySet, Prepared, Remembered, Runtime, RuntimeConfig, WasmPolicies, Workshop,
};

#[path = "../tests/support/mod.rs"]
mod support;

/// Runs of which everything is known.
struct Runs {
    columns: [Vec<u64>; 3],
}

impl Runs {
    fn new(rows: usize) -> Self {
        let column =
            |salt: u64| (0..rows as u64).map(move |row| (row + salt).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 44);
        Self { columns: [column(1).collect(), column(2).collect(), column(3).collect()] }
    }
}

impl ContextSource<EvictionSignal> for Runs {
    fn common(&self, _which: CommonSignal) -> Option<u64> {
        None
    }
    fn value(&self, _which: EvictionSignal) -> Option<u64> {
        Some(1)
    }
}

impl RowSource<RunSignal> for Runs {
    fn rows(&self) -> usize {
        self.columns[0].len()
    }
    fn cell(&self, which: RunSignal, row: usize) -> Option<u64> {
        match which {
            RunSignal::IdleUs => Some(self.columns[0][row]),
            RunSignal::EstRecomputeUs => Some(self.columns[1][row]),
            RunSignal::EstLoadUs => Some(self.columns[2][row]),
            _ => Some(0),
        }
    }
}

/// The rule of the native `lru`: idle, then recompute and load times, in the columns' order.
fn hand_written() -> Vec<u8> {
    let body = "(local $row i32) (local $at i32) (local $out i32) (local $stride i32) (local $room i32)
        (local.set $stride (i32.shl (local.get $rows) (i32.const 3)))
        (local.set $room (i64.ne (i64.load (local.get $context)) (i64.const 0)))
        (local.set $at (local.get $cells))
        (local.set $out (i32.const 81920))
        (block $done (loop $next
          (br_if $done (i32.eq (local.get $row) (local.get $rows)))
          (i64.store (local.get $out) (select (i64.const 0) (i64.sub (local.get $now) (i64.load (local.get $at)))
            (i64.gt_u (i64.load (local.get $at)) (local.get $now))))
          (i32.store8 offset=8 (local.get $out) (i32.and (local.get $room) (i64.lt_u
            (i64.load (i32.add (local.get $at) (i32.shl (local.get $stride) (i32.const 1))))
            (i64.load (i32.add (local.get $at) (local.get $stride))))))
          (local.set $at (i32.add (local.get $at) (i32.const 8)))
          (local.set $out (i32.add (local.get $out) (i32.const 16)))
          (local.set $row (i32.add (local.get $row) (i32.const 1)))
          (br $next)))
        (i32.store (i32.const 1024) (i32.const 81920)) (i32.store offset=4 (i32.const 1024) (local.get $rows))
        (i32.const 1024)";
    support::Guest::new(Decision::Eviction)
        .wants("eviction", &["dram-free-blocks"])
        .wants("run", &["idle-us", "est-recompute-us", "est-load-us"])
        .body("decide", body)
        .component()
}

/// Median and 99th percentile, in nanoseconds.
fn measure(rows: usize, mut ask: impl FnMut()) -> (u64, u64) {
    let calls = if rows >= 1_000 { 5_000 } else { 50_000 };
    for _ in 0..calls / 10 {
        ask();
    }
    let mut took: Vec<u64> = (0..calls)
        .map(|_| {
            let from = Clock::now();
            ask();
            from.elapsed().as_nanos() as u64
        })
        .collect();
    took.sort_unstable();
    (took[calls / 2], took[calls * 99 / 100])
}

fn main() -> Result<(), Box<dyn Error>> {
    let bytes = match std::env::args_os().nth(1) {
        Some(path) => std::fs::read(path)?,
        None => hand_written(),
    };
    let runtime = Runtime::new(RuntimeConfig::default())?;
    let from = Clock::now();
    let component = Component::load(&runtime, &bytes)?;
    println!("load {} KiB: {:.1} ms", bytes.len() / 1_024, from.elapsed().as_secs_f64() * 1e3);
    let library = Library::new();
    let text = format!(r#"{{ "eviction": {{ "policy": "sha256:{}" }} }}"#, component.digest());
    library.add(component)?;
    let set = Arc::new(PolicySet::parse(&text)?);
    let workshop = Workshop { runtime: &runtime, library: &library, context_window_tokens: 8_192 };
    let prepare = || Prepared::new(&workshop, &set, Machine::Replica, &Remembered::default());
    let from = Clock::now();
    let mut policies = WasmPolicies::new(prepare()?, Generation(1));
    println!("prepare a replica: {:.1} us", from.elapsed().as_secs_f64() * 1e6);

    println!(
        "{:>6} {:>12} {:>12} {:>12} {:>12} {:>7} {:>9}",
        "rows", "native p50", "p99", "wasm p50", "p99", "ratio", "fuel"
    );
    for rows in [1, 8, 64, 1_000] {
        let runs = Runs::new(rows);
        let now = Instant(1 << 40);
        let (mut priced, mut other) = (Vec::new(), Vec::new());
        let mut native = Lru::new();
        let ask = |policy: &mut dyn EvictionPolicy, priced: &mut Vec<_>, seat: &mut EvictionSeat| {
            seat.ask(policy, now, &runs, &runs, priced)
        };
        let (mut native_seat, mut wasm_seat) = (EvictionSeat::new(1), EvictionSeat::new(1));
        let by_native = measure(rows, || {
            black_box(ask(&mut native, &mut priced, &mut native_seat));
        });
        let by_wasm = measure(rows, || {
            black_box(ask(policies.eviction(), &mut other, &mut wasm_seat));
        });
        assert_eq!(priced, other, "the same rule gives the same prices");
        let fuel = policies.last_fuel(Decision::Eviction);
        let ratio = by_wasm.0 as f64 / by_native.0 as f64;
        println!(
            "{rows:>6} {:>12} {:>12} {:>12} {:>12} {ratio:>7.2} {fuel:>9}",
            by_native.0, by_native.1, by_wasm.0, by_wasm.1
        );
    }
    Ok(())
}
