//! One check over many seeds, on a few threads, with what went wrong told in order of the seeds.

use std::ops::Range;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

/// Threads that seeds are spread over.
pub const THREADS: usize = 2;
/// Failures after which no further seed is begun.
const FAILURES_MAX: usize = 5;

/// A number from the environment.
pub fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok().map(|text| text.parse().unwrap_or_else(|_| panic!("{name} is {text:?}, not a number")))
}

/// The seeds to run: `PENSTOCK_SIM_SEED` alone, else `PENSTOCK_SIM_SEEDS` of them from `PENSTOCK_SIM_FROM` on.
pub fn seeds(unless_told: u64) -> Range<u64> {
    match number("PENSTOCK_SIM_SEED") {
        Some(seed) => seed..seed + 1,
        None => {
            let from = number("PENSTOCK_SIM_FROM").unwrap_or(0);
            from..from + number("PENSTOCK_SIM_SEEDS").unwrap_or(unless_told)
        }
    }
}

/// What every seed gave, in any order; fails with the first failures otherwise.
pub fn all<T: Send>(seeds: Range<u64>, check: impl Fn(u64) -> Result<T, String> + Sync) -> Vec<T> {
    let next = AtomicU64::new(seeds.start);
    let (passed, failed) = (Mutex::new(Vec::new()), Mutex::new(Vec::new()));
    // Panics of machines are findings, told with their seed; their own messages would only be noise while a seed is reduced.
    let loud = std::panic::take_hook();
    std::panic::set_hook(Box::new(|_| {}));
    let work = || {
        loop {
            let seed = next.fetch_add(1, Ordering::Relaxed);
            if seed >= seeds.end || failed.lock().is_ok_and(|failed| failed.len() >= FAILURES_MAX) {
                break;
            }
            match check(seed) {
                Ok(sum) => passed.lock().expect("nobody panics while he holds it").push(sum),
                Err(what) => failed.lock().expect("nobody panics while he holds it").push((seed, what)),
            }
        }
    };
    std::thread::scope(|scope| {
        for _ in 0..THREADS {
            scope.spawn(work);
        }
    });
    std::panic::set_hook(loud);
    let mut failed = failed.into_inner().expect("all threads have ended well");
    failed.sort();
    let told: Vec<String> = failed.into_iter().map(|(_, what)| what).collect();
    assert!(told.is_empty(), "{} seeds failed:\n{}", told.len(), told.join("\n"));
    passed.into_inner().expect("all threads have ended well")
}
