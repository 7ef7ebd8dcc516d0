//! Which unit adds up products of bfloat16 ([`crate::Precision::Bf16`]), and in which order each does.

use std::fmt;

use crate::tier::Tier;

/// What a tier multiplies bfloat16 with. For one unit a row's bits depend on that row alone, as everywhere in this crate. Between units they
/// differ, because the hardware's order of additions is not ours to choose.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub enum Bf16Unit {
    /// Fused multiply-adds in f32, k by k. Equal bits on every tier that has no unit for bfloat16: `scalar`, `neon`, `avx2`, `avx-vnni`, and
    /// `avx512-vnni` on a CPU without AVX-512 BF16.
    #[default]
    Fma,
    /// `vdpbf16ps`: two products of one lane are added to its sum, the way the CPU does it, pair by pair. Subnormal numbers count as zero.
    Avx512Bf16,
    /// AMX tiles, for every row count: even and odd products of a block of 32 in sums of their own, which are then added to the sum of
    /// the blocks before. Subnormal numbers count as zero.
    Amx,
}

impl Bf16Unit {
    /// The unit that `tier` uses on this CPU.
    pub fn of(tier: Tier) -> Self {
        match tier {
            Tier::Amx => Bf16Unit::Amx,
            #[cfg(target_arch = "x86_64")]
            Tier::Avx512Vnni if is_x86_feature_detected!("avx512bf16") => Bf16Unit::Avx512Bf16,
            _ => Bf16Unit::Fma,
        }
    }

    /// The unit's name in logs and in what tells numbers of one kind from others.
    pub fn name(self) -> &'static str {
        match self {
            Bf16Unit::Fma => "fma",
            Bf16Unit::Avx512Bf16 => "avx512-bf16",
            Bf16Unit::Amx => "amx-bf16",
        }
    }
}

impl fmt::Display for Bf16Unit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
