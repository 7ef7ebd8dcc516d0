//! What the kernel tests share: seeded inputs, the error measure, and the list of tiers.
#![allow(dead_code, reason = "each test binary uses its own part")]

pub mod weights;

use std::sync::Once;

use penstock_kernels_cpu::Tier;

/// A seeded stream of numbers (SplitMix64).
pub struct Noise(pub u64);

impl Noise {
    pub fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Uniform in -1..1.
    pub fn value(&mut self) -> f32 {
        (self.bits() >> 40) as f32 / 8_388_608.0 - 1.0
    }

    pub fn values(&mut self, len: usize) -> Vec<f32> {
        (0..len).map(|_| self.value()).collect()
    }

    pub fn below(&mut self, n: usize) -> usize {
        (self.bits() % n as u64) as usize
    }

    pub fn shuffled(&mut self, n: usize) -> Vec<u32> {
        let mut order: Vec<u32> = (0..n as u32).collect();
        for i in (1..n).rev() {
            order.swap(i, self.below(i + 1));
        }
        order
    }
}

/// Every tier that this machine can run, the oracle first. Those of its architecture that it cannot are named aloud, once in a test binary;
/// on another architecture these tests run apart (`cargo xtask test --only neon`).
pub fn tiers() -> Vec<Tier> {
    static SAID: Once = Once::new();
    SAID.call_once(|| {
        let is_foreign = |tier: Tier| (tier == Tier::Neon) != cfg!(target_arch = "aarch64");
        let lacking = |tier: Tier| format!("{tier} (no {})", tier.missing().join(", "));
        let missing: Vec<String> = Tier::ALL[1..]
            .iter()
            .filter(|tier| !tier.is_supported() && !is_foreign(**tier))
            .map(|&tier| lacking(tier))
            .collect();
        if !missing.is_empty() {
            eprintln!("SKIPPED tiers that this CPU lacks: {}", missing.join("; "));
        }
    });
    Tier::ALL.into_iter().filter(|tier| tier.is_supported()).collect()
}

/// The same without the oracle.
pub fn fast_tiers() -> Vec<Tier> {
    tiers().into_iter().filter(|&tier| tier != Tier::Scalar).collect()
}

/// Mean squared error over mean square of the reference.
pub fn nmse(got: &[f32], wanted: &[f64]) -> f64 {
    assert_eq!(got.len(), wanted.len());
    let error: f64 = got.iter().zip(wanted).map(|(&g, w)| (f64::from(g) - w).powi(2)).sum();
    let power: f64 = wanted.iter().map(|w| w * w).sum();
    error / power
}

/// Bits, for comparisons that take -0.0 and 0.0 as different.
pub fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|v| v.to_bits()).collect()
}
