//! Which instruction set runs the kernels, decided at run time.

#[cfg(target_arch = "aarch64")]
use std::arch::is_aarch64_feature_detected;
use std::fmt;

/// An instruction-set tier. All tiers give equal bits and differ in speed alone, but for products of bfloat16 ([`crate::Bf16Unit`]).
///
/// The order is from slowest to fastest, among those of one architecture.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Tier {
    /// Plain Rust on any CPU: the oracle of the other tiers.
    Scalar,
    /// AArch64 with NEON and its dot products.
    Neon,
    /// x86-64 with AVX2, FMA and F16C.
    Avx2,
    /// The same with AVX-VNNI: integer products on 256-bit registers, for CPUs without AVX-512.
    AvxVnni,
    /// x86-64 with AVX-512 F, BW, VL, DQ and VNNI.
    Avx512Vnni,
    /// The same, and AMX tiles with int8 and bfloat16 products, on Linux. All but the matrix product runs as on [`Tier::Avx512Vnni`].
    Amx,
}

/// A feature's name, and whether this CPU and its operating system have it.
type Need = (&'static str, fn() -> bool);

/// Features by the names of the standard library, whose macro for the architecture comes first.
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
macro_rules! needs {
    ($detected:ident: $($feature:tt),*) => { &[$(($feature, || $detected!($feature))),*] };
}

/// What no CPU of this build's architecture has.
#[cfg(not(target_arch = "x86_64"))]
const X86_64: &[Need] = &[("x86-64", || false)];
#[cfg(not(target_arch = "aarch64"))]
const AARCH64: &[Need] = &[("aarch64", || false)];

/// Beside tiles, the instructions that all but the matrix product run on.
#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
const AMX: &[Need] = &[
    ("avx512-vnni", || Tier::Avx512Vnni.is_supported()),
    ("AMX tiles with int8 and bfloat16", crate::amx::is_supported),
];

impl Tier {
    /// Every tier, slowest first.
    pub const ALL: [Tier; 6] = [Tier::Scalar, Tier::Neon, Tier::Avx2, Tier::AvxVnni, Tier::Avx512Vnni, Tier::Amx];

    /// The fastest tier this CPU supports.
    pub fn detect() -> Tier {
        Tier::ALL.into_iter().rev().find(|tier| tier.is_supported()).unwrap_or(Tier::Scalar)
    }

    /// The tier of that name, if it runs here; `auto` is the fastest that does.
    ///
    /// # Errors
    /// [`TierError`] for another name, and for a tier that this CPU lacks.
    pub fn choose(name: &str) -> Result<Tier, TierError> {
        if name == "auto" {
            return Ok(Tier::detect());
        }
        let Some(tier) = Tier::ALL.into_iter().find(|tier| tier.name() == name) else {
            return Err(TierError::Unknown { name: name.to_owned() });
        };
        if tier.is_supported() { Ok(tier) } else { Err(TierError::Unsupported { tier }) }
    }

    /// Whether this CPU, under this operating system, can run the tier.
    pub fn is_supported(self) -> bool {
        self.needs().iter().all(|(_, is_there)| is_there())
    }

    /// What the tier needs and this CPU lacks; nothing for a supported one.
    pub fn missing(self) -> Vec<&'static str> {
        self.needs().iter().filter(|(_, is_there)| !is_there()).map(|&(name, _)| name).collect()
    }

    fn needs(self) -> &'static [Need] {
        match self {
            Tier::Scalar => &[],
            #[cfg(target_arch = "aarch64")]
            Tier::Neon => needs!(is_aarch64_feature_detected: "neon", "dotprod"),
            #[cfg(not(target_arch = "aarch64"))]
            Tier::Neon => AARCH64,
            #[cfg(target_arch = "x86_64")]
            Tier::Avx2 => needs!(is_x86_feature_detected: "avx2", "fma", "f16c"),
            #[cfg(target_arch = "x86_64")]
            Tier::AvxVnni => needs!(is_x86_feature_detected: "avx2", "fma", "f16c", "avxvnni"),
            #[cfg(target_arch = "x86_64")]
            Tier::Avx512Vnni => {
                needs!(is_x86_feature_detected: "avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512vnni")
            }
            #[cfg(not(target_arch = "x86_64"))]
            Tier::Avx2 | Tier::AvxVnni | Tier::Avx512Vnni => X86_64,
            #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
            Tier::Amx => AMX,
            #[cfg(not(all(target_arch = "x86_64", target_os = "linux")))]
            Tier::Amx => &[("x86-64 under linux", || false)],
        }
    }

    /// The tier's name in settings, logs and reports.
    pub fn name(self) -> &'static str {
        match self {
            Tier::Scalar => "scalar",
            Tier::Neon => "neon",
            Tier::Avx2 => "avx2",
            Tier::AvxVnni => "avx-vnni",
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

/// Why a tier that was asked for by name is not to be had. The message lists those that are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TierError {
    /// No tier has the name.
    Unknown {
        /// What was asked for.
        name: String,
    },
    /// This CPU lacks some of the tier's features.
    Unsupported {
        /// What was asked for.
        tier: Tier,
    },
}

impl fmt::Display for TierError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            TierError::Unknown { name } => write!(f, "`{name}` is no instruction-set tier")?,
            TierError::Unsupported { tier } => write!(f, "tier {tier} needs {} of the CPU", tier.missing().join(", "))?,
        }
        f.write_str("; this machine has auto")?;
        Tier::ALL.into_iter().filter(|tier| tier.is_supported()).try_for_each(|tier| write!(f, ", {tier}"))
    }
}

impl std::error::Error for TierError {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_chooses_the_tier_it_names_or_is_refused_with_those_there_are() {
        assert_eq!(Tier::choose("auto"), Ok(Tier::detect()));
        assert_eq!(Tier::choose("scalar"), Ok(Tier::Scalar));
        for wrong in ["", "AVX2", "avx2 ", "avx512", "sse2"] {
            let error = Tier::choose(wrong).expect_err(wrong);
            assert_eq!(error, TierError::Unknown { name: wrong.to_owned() });
            assert!(error.to_string().contains(&format!("`{wrong}`")), "{error}");
            assert!(error.to_string().contains("auto, scalar"), "{error}");
        }
        for tier in Tier::ALL {
            if tier.is_supported() {
                assert!(tier.missing().is_empty());
                assert_eq!(Tier::choose(tier.name()), Ok(tier));
            } else {
                let error = Tier::choose(tier.name()).expect_err("the CPU lacks it");
                assert_eq!(error, TierError::Unsupported { tier });
                assert!(error.to_string().contains(tier.missing()[0]), "{error}");
            }
        }
    }

    #[test]
    fn no_cpu_has_the_tiers_of_two_architectures() {
        let foreign: &[Tier] = match std::env::consts::ARCH {
            "x86_64" => &[Tier::Neon],
            "aarch64" => &[Tier::Avx2, Tier::AvxVnni, Tier::Avx512Vnni, Tier::Amx],
            _ => &Tier::ALL[1..],
        };
        for &tier in foreign {
            assert_eq!(Tier::choose(tier.name()), Err(TierError::Unsupported { tier }));
        }
    }
}
