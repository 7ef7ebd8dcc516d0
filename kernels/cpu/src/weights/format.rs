//! The formats that weights come in, and those they are packed into.

use super::BLOCK;
use crate::activation::Precision;

/// Inputs of a super-block: what K formats give one pair of halves for.
pub const SUPER_BLOCK: usize = 256;

/// How packed weights are stored. A weight is `scale * (q - zero)`, plus a minimum where the format has one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum PackedFormat {
    /// Four bits: scale * (q - 8).
    Q4_0,
    /// Four bits: scale * q + minimum.
    Q4_1,
    /// Five bits: scale * (q - 16).
    Q5_0,
    /// Five bits: scale * q + minimum.
    Q5_1,
    /// Eight bits: scale * q.
    Q8_0,
    /// Four bits: (d * factor) * q + (m * factor), with halves d and m per 256 and two factors of six bits per 32.
    Q4K,
    /// Five bits, otherwise as [`PackedFormat::Q4K`].
    Q5K,
    /// Six bits: d * (factor * (q - 32)), with a half d per 256 and a signed factor of eight bits per 16.
    Q6K,
    /// The weights themselves, as bfloat16: for activations of [`Precision::Bf16`], whatever the source.
    Bf16,
}

/// What stands beside the quants of a packed matrix.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Scales {
    /// One half per block.
    Plain,
    /// Two halves per block: scale and minimum.
    Minimum,
    /// Two halves per super-block and two bytes per block: scale and minimum are products of a half and a byte.
    Super,
    /// One half per super-block and two signed bytes per block, one for each half of it.
    SuperHalves,
    /// Nothing.
    None,
}

impl PackedFormat {
    /// Every format, for tables and tests.
    pub const ALL: [PackedFormat; 9] = [
        PackedFormat::Q4_0,
        PackedFormat::Q4_1,
        PackedFormat::Q5_0,
        PackedFormat::Q5_1,
        PackedFormat::Q8_0,
        PackedFormat::Q4K,
        PackedFormat::Q5K,
        PackedFormat::Q6K,
        PackedFormat::Bf16,
    ];

    /// Bits of a weight, without what scales it.
    pub const fn bits(self) -> usize {
        match self {
            PackedFormat::Q4_0 | PackedFormat::Q4_1 | PackedFormat::Q4K => 4,
            PackedFormat::Q5_0 | PackedFormat::Q5_1 | PackedFormat::Q5K => 5,
            PackedFormat::Q6K => 6,
            PackedFormat::Q8_0 => 8,
            PackedFormat::Bf16 => 16,
        }
    }

    pub(crate) const fn scales(self) -> Scales {
        match self {
            PackedFormat::Q4_0 | PackedFormat::Q5_0 | PackedFormat::Q8_0 => Scales::Plain,
            PackedFormat::Q4_1 | PackedFormat::Q5_1 => Scales::Minimum,
            PackedFormat::Q4K | PackedFormat::Q5K => Scales::Super,
            PackedFormat::Q6K => Scales::SuperHalves,
            PackedFormat::Bf16 => Scales::None,
        }
    }

    /// What multiplies each half of a block, and what is added, from the block's halves and factors. Exact but for the minimum's sum.
    pub(crate) fn scale(self, halves: [f32; 2], factors: [u8; 2]) -> ([f32; 2], f32) {
        let [scale, minimum] = halves;
        match self.scales() {
            Scales::Plain => ([scale; 2], 0.0),
            Scales::Minimum => ([scale; 2], minimum),
            Scales::Super => ([scale * f32::from(factors[0]); 2], minimum * f32::from(factors[1])),
            Scales::SuperHalves => (factors.map(|factor| scale * f32::from(factor as i8)), 0.0),
            Scales::None => ([1.0; 2], 0.0),
        }
    }

    /// The quant that stands for 0, before a minimum.
    pub(crate) const fn zero(self) -> u8 {
        match self {
            PackedFormat::Q4_0 => 8,
            PackedFormat::Q5_0 => 16,
            PackedFormat::Q6K => 32,
            PackedFormat::Q8_0 => 128,
            PackedFormat::Q4_1 | PackedFormat::Q5_1 | PackedFormat::Q4K | PackedFormat::Q5K | PackedFormat::Bf16 => 0,
        }
    }

    /// Inputs that K must be a multiple of.
    pub const fn k_step(self) -> usize {
        match self.scales() {
            Scales::Plain | Scales::Minimum | Scales::None => BLOCK,
            Scales::Super | Scales::SuperHalves => SUPER_BLOCK,
        }
    }
}

/// How source rows are stored, each row `k` values of a GGUF or safetensors tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum SourceFormat {
    /// GGUF Q4_0: 18 bytes per 32 values.
    Q4_0,
    /// GGUF Q4_1: 20 bytes per 32 values.
    Q4_1,
    /// GGUF Q5_0: 22 bytes per 32 values.
    Q5_0,
    /// GGUF Q5_1: 24 bytes per 32 values.
    Q5_1,
    /// GGUF Q8_0: 34 bytes per 32 values.
    Q8_0,
    /// GGUF Q4_K: 144 bytes per 256 values.
    Q4K,
    /// GGUF Q5_K: 176 bytes per 256 values.
    Q5K,
    /// GGUF Q6_K: 210 bytes per 256 values.
    Q6K,
    /// Little-endian f32.
    F32,
    /// Little-endian IEEE half.
    F16,
    /// Little-endian bfloat16.
    Bf16,
}

impl SourceFormat {
    /// Every format, for tables and tests.
    pub const ALL: [SourceFormat; 11] = [
        SourceFormat::Q4_0,
        SourceFormat::Q4_1,
        SourceFormat::Q5_0,
        SourceFormat::Q5_1,
        SourceFormat::Q8_0,
        SourceFormat::Q4K,
        SourceFormat::Q5K,
        SourceFormat::Q6K,
        SourceFormat::F32,
        SourceFormat::F16,
        SourceFormat::Bf16,
    ];

    /// Values that the smallest range of whole bytes holds: 32, or 256 for K formats.
    pub const fn block_len(self) -> usize {
        self.packed().k_step()
    }

    /// Bytes of [`SourceFormat::block_len`] values.
    pub const fn block_bytes(self) -> usize {
        match self {
            SourceFormat::Q4_0 => 18,
            SourceFormat::Q4_1 => 20,
            SourceFormat::Q5_0 => 22,
            SourceFormat::Q5_1 => 24,
            SourceFormat::Q8_0 => 34,
            SourceFormat::Q4K => 144,
            SourceFormat::Q5K => 176,
            SourceFormat::Q6K => 210,
            SourceFormat::F32 => 128,
            SourceFormat::F16 | SourceFormat::Bf16 => 64,
        }
    }

    /// What rows of this format are packed into for activations of that precision.
    pub const fn packed_for(self, precision: Precision) -> PackedFormat {
        match precision {
            Precision::Int8 | Precision::Int15 => self.packed(),
            Precision::Bf16 => PackedFormat::Bf16,
        }
    }

    /// What rows of this format are packed into for integer activations.
    pub const fn packed(self) -> PackedFormat {
        match self {
            SourceFormat::Q4_0 => PackedFormat::Q4_0,
            SourceFormat::Q4_1 => PackedFormat::Q4_1,
            SourceFormat::Q5_0 => PackedFormat::Q5_0,
            SourceFormat::Q5_1 => PackedFormat::Q5_1,
            SourceFormat::Q4K => PackedFormat::Q4K,
            SourceFormat::Q5K => PackedFormat::Q5K,
            SourceFormat::Q6K => PackedFormat::Q6K,
            SourceFormat::Q8_0 | SourceFormat::F32 | SourceFormat::F16 | SourceFormat::Bf16 => PackedFormat::Q8_0,
        }
    }
}
