//! When does each request of an open loop arrive?

use std::time::Duration;

use rand::SeedableRng as _;
use rand_chacha::ChaCha8Rng;
use rand_distr::{Distribution as _, Exp};

/// Offsets from the start of the run, ascending: a Poisson process, whose gaps are exponential with mean `1 / per_second`.
///
/// `per_second` must be finite and above 0, which `Plan::check` sees to.
pub fn poisson(seed: u64, per_second: f64, requests: usize) -> Vec<Duration> {
    let gaps = Exp::new(per_second).expect("the plan was checked: the rate is above 0");
    let mut random = ChaCha8Rng::seed_from_u64(seed ^ ARRIVALS);
    let mut at_s = 0.0;
    let arrivals = (0..requests).map(|_| {
        at_s += gaps.sample(&mut random);
        Duration::from_secs_f64(at_s)
    });
    arrivals.collect()
}

/// Keeps arrivals apart from prompts, so that a change of one leaves the other as it was.
const ARRIVALS: u64 = 0x6172_7269_7661_6c73;

#[cfg(test)]
mod tests {
    use super::*;

    /// Kolmogorov and Smirnov: the largest distance between the gaps' empirical distribution and the exponential one.
    fn distance(gaps: &mut [f64], per_second: f64) -> f64 {
        gaps.sort_by(f64::total_cmp);
        let count = gaps.len() as f64;
        let distances = gaps.iter().enumerate().map(|(at, gap)| {
            let due = 1.0 - (-per_second * gap).exp();
            (due - at as f64 / count).abs().max(((at + 1) as f64 / count - due).abs())
        });
        distances.fold(0.0, f64::max)
    }

    fn gaps(arrivals: &[Duration]) -> Vec<f64> {
        let starts = std::iter::once(Duration::ZERO).chain(arrivals.iter().copied());
        starts.zip(arrivals).map(|(before, at)| (*at - before).as_secs_f64()).collect()
    }

    #[test]
    fn the_gaps_are_exponential() {
        for seed in 0..20 {
            let mut gaps = gaps(&poisson(seed, 7.5, 4_000));
            // The 0.1 % point of the statistic for n = 4,000 is 1.95 / sqrt(n).
            assert!(distance(&mut gaps, 7.5) < 1.95 / 4_000_f64.sqrt(), "seed {seed}");
        }
    }

    #[test]
    fn even_gaps_would_be_noticed() {
        let mut gaps = vec![1.0 / 7.5; 4_000];
        assert!(distance(&mut gaps, 7.5) > 0.3);
    }

    #[test]
    fn a_seed_says_everything() {
        assert_eq!(poisson(3, 2.0, 50), poisson(3, 2.0, 50));
        assert_ne!(poisson(3, 2.0, 50), poisson(4, 2.0, 50));
    }
}
