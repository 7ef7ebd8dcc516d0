//! All randomness of the simulator: SplitMix64, and streams that do not disturb each other.

/// A fixed mix of two words (SplitMix64's finaliser).
pub fn mix(a: u64, b: u64) -> u64 {
    let z = a.rotate_left(23).wrapping_add(b).wrapping_add(0x9e37_79b9_7f4a_7c15);
    let z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// SplitMix64 (Steele, Lea, Flood 2014).
#[derive(Clone, Debug)]
pub struct Rng(u64);

impl Rng {
    /// From a seed.
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// A stream of its own: drawing from it changes nothing elsewhere, so that a scenario without one fault is otherwise the same.
    pub fn stream(seed: u64, which: u64) -> Self {
        Self(mix(seed, which))
    }

    /// The next word.
    pub fn word(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// 0..n; 0 when `n` is 0.
    pub fn below(&mut self, n: u64) -> u64 {
        self.word().checked_rem(n).unwrap_or(0)
    }

    /// `from..=to`.
    pub fn between(&mut self, from: u64, to: u64) -> u64 {
        from + self.below(to.saturating_sub(from).saturating_add(1))
    }

    /// True once in `n` draws.
    pub fn one_in(&mut self, n: u64) -> bool {
        self.below(n) == 0
    }

    /// One of them.
    pub fn pick<T: Copy>(&mut self, from: &[T]) -> T {
        from[self.below(from.len() as u64) as usize]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_splitmix() {
        // The first outputs for seed 1234567 as published with the reference implementation.
        let mut rng = Rng::new(1_234_567);
        assert_eq!([rng.word(), rng.word()], [6_457_827_717_110_365_317, 3_203_168_211_198_807_973]);
    }
}
