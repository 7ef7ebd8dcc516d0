//! How long do two ways of doing the same take? Sampled in one loop, one after the other, so that what disturbs one disturbs both.

use std::fmt;
use std::time::Instant;

/// Times of one way, in nanoseconds, less what reading the clock costs.
#[derive(Clone, Copy, Debug, Default)]
pub struct Spread {
    pub p50: u64,
    pub p99: u64,
}

/// Both ways.
#[derive(Clone, Copy, Debug)]
pub struct Pair {
    pub native: Spread,
    pub wasm: Spread,
}

impl Pair {
    /// Wasm over native, medians.
    pub fn ratio(&self) -> f64 {
        self.wasm.p50 as f64 / self.native.p50.max(1) as f64
    }
}

impl fmt::Display for Pair {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { native, wasm } = self;
        write!(f, "{:>7} {:>7} {:>7} {:>7} {:>5.2}", native.p50, native.p99, wasm.p50, wasm.p99, self.ratio())
    }
}

/// Sorts `times` and reads them.
pub fn spread(times: &mut [u64], clock_ns: u64) -> Spread {
    if times.is_empty() {
        return Spread::default();
    }
    times.sort_unstable();
    let at = |per_mille: usize| times[(times.len() * per_mille / 1_000).min(times.len() - 1)].saturating_sub(clock_ns);
    Spread { p50: at(500), p99: at(990) }
}

/// What reading the clock twice costs by itself: the median.
pub fn clock_ns() -> u64 {
    let mut times: Vec<u64> = (0..100_000)
        .map(|_| {
            let from = Instant::now();
            from.elapsed().as_nanos() as u64
        })
        .collect();
    spread(&mut times, 0).p50
}

/// Interleaves `calls` samples of each, after a tenth as many unmeasured ones; who goes first alternates.
pub fn interleave(calls: usize, clock_ns: u64, native: &mut dyn FnMut(), wasm: &mut dyn FnMut()) -> Pair {
    let timed = |run: &mut dyn FnMut()| {
        let from = Instant::now();
        run();
        from.elapsed().as_nanos() as u64
    };
    for _ in 0..(calls / 10).max(100) {
        native();
        wasm();
    }
    let (mut by_native, mut by_wasm) = (Vec::with_capacity(calls), Vec::with_capacity(calls));
    for turn in 0..calls {
        if turn % 2 == 0 {
            by_native.push(timed(native));
            by_wasm.push(timed(wasm));
        } else {
            by_wasm.push(timed(wasm));
            by_native.push(timed(native));
        }
    }
    Pair { native: spread(&mut by_native, clock_ns), wasm: spread(&mut by_wasm, clock_ns) }
}
