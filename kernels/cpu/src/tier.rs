//! Which instruction set runs the kernels, decided at run time.

use std::fmt;

/// An instruction-set tier. All tiers give equal bits; they differ in speed alone.
///
/// The order is from slowest to fastest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Tier {
    /// Plain Rust on any CPU: the oracle of the other tiers.
    Scalar,
    /// x86-64 with AVX2, FMA and F16C.
    Avx2,
    /// x86-64 with AVX-512 F, BW, VL, DQ and VNNI.
    Avx512Vnni,
    /// The same, and AMX tiles with int8 and bfloat16 products, on Linux. All but the matrix product runs as on [`Tier::Avx512Vnni`].
    Amx,
}

impl Tier {
    /// Every tier, slowest first.
    pub const ALL: [Tier; 4] = [Tier::Scalar, Tier::Avx2, Tier::Avx512Vnni, Tier::Amx];

    /// The fastest tier this CPU supports.
    pub fn detect() -> Tier {
        Tier::ALL.into_iter().rev().find(|tier| tier.is_supported()).unwrap_or(Tier::Scalar)
    }

    /// Whether this CPU, under this operating system, can run the tier.
    pub fn is_supported(self) -> bool {
        match self {
            Tier::Scalar => true,
            #[cfg(target_arch = "x86_64")]
            Tier::Avx2 => {
                is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") && is_x86_feature_detected!("f16c")
            }
            #[cfg(target_arch = "x86_64")]
            Tier::Avx512Vnni => {
                Tier::Avx2.is_supported()
                    && is_x86_feature_detected!("avx512f")
                    && is_x86_feature_detected!("avx512bw")
                    && is_x86_feature_detected!("avx512vl")
                    && is_x86_feature_detected!("avx512dq")
                    && is_x86_feature_detected!("avx512vnni")
            }
            #[cfg(not(target_arch = "x86_64"))]
            Tier::Avx2 | Tier::Avx512Vnni => false,
            #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
            Tier::Amx => Tier::Avx512Vnni.is_supported() && crate::amx::is_supported(),
            #[cfg(not(all(target_arch = "x86_64", target_os = "linux")))]
            Tier::Amx => false,
        }
    }

    /// The tier's name in logs and reports.
    pub fn name(self) -> &'static str {
        match self {
            Tier::Scalar => "scalar",
            Tier::Avx2 => "avx2",
            Tier::Avx512Vnni => "avx512-vnni",
            Tier::Amx => "amx",
        }
    }
}

impl fmt::Display for Tier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
