//! Weight matrices, repacked at load into tiles of sixteen output columns.
//!
//! # Layout
//! A matrix has `n` outputs and `k` inputs, `k` a multiple of 32. Tile `t` holds outputs `16 t .. 16 t + 16` (the last tile is padded
//! with zero weights) for all of K, in one contiguous range that is read front to back:
//!
//! ```text
//! quants   for each 32-block of K: 512 weights
//!            nibbles: 4 groups of 64 bytes; byte 4 c + i of group g is column c, k = 4 g + i in the low and 16 + 4 g + i in the high nibble
//!            bytes:   8 groups of 64 bytes; byte 4 c + i of group g is column c, k = 4 g + i, stored as weight + 128
//! scales   for each 32-block: 16 halves
//! minima   for each 32-block: 16 halves (Q4_1 alone)
//! ```
//!
//! rounded up to 64 bytes. Four consecutive K of sixteen columns are what one VNNI instruction (and one row of an AMX tile) consumes.
//!
//! # Formats
//! GGUF's Q4_0, Q4_1 and Q8_0 blocks keep their values exactly. F32, F16 and BF16 rows are quantised at load the way Q8_0 is: per block
//! of 32 the scale is the largest magnitude / 127 rounded to a half, and the weight the nearest integer to value / scale. One numeric
//! path then serves every source: int8 activations, one exact integer sum per block.

use std::fmt;
use std::ops::Range;

use crate::half::{bf16_to_f32, f16_to_f32, f32_to_f16};
use crate::lanes::LANES;
use crate::memory::{HugeBuffer, MemoryBudget, MemoryError};

/// Inputs that share one scale.
pub const BLOCK: usize = 32;

/// How packed weights are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum PackedFormat {
    /// Four bits: scale * (q - 8).
    Q4_0,
    /// Four bits: scale * q + minimum.
    Q4_1,
    /// Eight bits: scale * q.
    Q8_0,
}

impl PackedFormat {
    pub(crate) fn quant_bytes(self) -> usize {
        match self {
            PackedFormat::Q4_0 | PackedFormat::Q4_1 => BLOCK * LANES / 2,
            PackedFormat::Q8_0 => BLOCK * LANES,
        }
    }

    fn half_rows(self) -> usize {
        match self {
            PackedFormat::Q4_1 => 2,
            PackedFormat::Q4_0 | PackedFormat::Q8_0 => 1,
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
    /// GGUF Q8_0: 34 bytes per 32 values.
    Q8_0,
    /// Little-endian f32.
    F32,
    /// Little-endian IEEE half.
    F16,
    /// Little-endian bfloat16.
    Bf16,
}

impl SourceFormat {
    /// Bytes of 32 values.
    pub fn block_bytes(self) -> usize {
        match self {
            SourceFormat::Q4_0 => 18,
            SourceFormat::Q4_1 => 20,
            SourceFormat::Q8_0 => 34,
            SourceFormat::F32 => 128,
            SourceFormat::F16 | SourceFormat::Bf16 => 64,
        }
    }

    /// What rows of this format are packed into.
    pub fn packed(self) -> PackedFormat {
        match self {
            SourceFormat::Q4_0 => PackedFormat::Q4_0,
            SourceFormat::Q4_1 => PackedFormat::Q4_1,
            SourceFormat::Q8_0 | SourceFormat::F32 | SourceFormat::F16 | SourceFormat::Bf16 => PackedFormat::Q8_0,
        }
    }
}

/// Why a matrix could not be packed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PackError {
    /// `k` is 0 or no multiple of 32, or `n` is 0, or the size overflows.
    Shape {
        /// Outputs.
        n: usize,
        /// Inputs.
        k: usize,
    },
    /// The source has another length than the shape needs.
    SourceLength {
        /// Bytes that the shape needs.
        wanted: usize,
        /// Bytes given.
        given: usize,
    },
    /// A float weight or a scale is infinite or NaN.
    NotFinite {
        /// Output whose row holds it.
        row: usize,
    },
    /// No memory.
    Memory(MemoryError),
}

impl fmt::Display for PackError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            PackError::Shape { n, k } => {
                write!(f, "weights of {n} x {k} cannot be packed: k must be a multiple of {BLOCK}")
            }
            PackError::SourceLength { wanted, given } => {
                write!(f, "weight source has {given} bytes, its shape needs {wanted}")
            }
            PackError::NotFinite { row } => write!(f, "weight row {row} holds an infinity or a NaN"),
            PackError::Memory(error) => error.fmt(f),
        }
    }
}

impl std::error::Error for PackError {}

impl From<MemoryError> for PackError {
    fn from(error: MemoryError) -> Self {
        PackError::Memory(error)
    }
}

/// Packed weights of one linear layer. Immutable; shared by replicas behind an `Arc`.
#[derive(Debug)]
pub struct PackedMatrix {
    format: PackedFormat,
    n: usize,
    k: usize,
    tile_bytes: usize,
    data: HugeBuffer,
}

impl PackedMatrix {
    /// Packs `n` rows of `k` values from `source`.
    ///
    /// # Errors
    /// [`PackError`] when the shape or the source does not fit, a value is not finite, or there is no memory.
    pub fn pack(
        budget: &MemoryBudget,
        source: &[u8],
        format: SourceFormat,
        n: usize,
        k: usize,
    ) -> Result<Self, PackError> {
        let shape = PackError::Shape { n, k };
        if n == 0 || k == 0 || !k.is_multiple_of(BLOCK) || i32::try_from(k).is_err() {
            return Err(shape);
        }
        let row_bytes = (k / BLOCK).checked_mul(format.block_bytes()).ok_or(shape.clone())?;
        let wanted = row_bytes.checked_mul(n).ok_or(shape.clone())?;
        if source.len() != wanted {
            return Err(PackError::SourceLength { wanted, given: source.len() });
        }
        let packed = format.packed();
        let block_bytes = packed.quant_bytes() + packed.half_rows() * LANES * 2;
        let tile_bytes = (k / BLOCK * block_bytes).next_multiple_of(64);
        let total = tile_bytes.checked_mul(n.div_ceil(LANES)).ok_or(shape)?;
        let mut matrix = Self { format: packed, n, k, tile_bytes, data: budget.allocate(total)? };
        if packed == PackedFormat::Q8_0 && !n.is_multiple_of(LANES) {
            // The padding of the last tile must read as weight 0, which is stored as 128.
            let start = matrix.tile_start(n / LANES);
            matrix.data[start..start + k / BLOCK * packed.quant_bytes()].fill(128);
        }
        for (row, bytes) in source.chunks_exact(row_bytes).enumerate() {
            for (block, bytes) in bytes.chunks_exact(format.block_bytes()).enumerate() {
                matrix.pack_block(format, row, block, bytes)?;
            }
        }
        Ok(matrix)
    }

    fn tile_start(&self, tile: usize) -> usize {
        tile * self.tile_bytes
    }

    fn pack_block(&mut self, format: SourceFormat, row: usize, block: usize, bytes: &[u8]) -> Result<(), PackError> {
        let half = |i: usize| u16::from_le_bytes([bytes[i], bytes[i + 1]]);
        match format {
            SourceFormat::Q4_0 | SourceFormat::Q4_1 => {
                let halves = if format == SourceFormat::Q4_1 { 2 } else { 1 };
                self.put_quants(row, block, &bytes[2 * halves..]);
                for i in 0..halves {
                    self.put_half(row, block, i, half(2 * i))?;
                }
            }
            SourceFormat::Q8_0 => {
                let mut quants = [0u8; BLOCK];
                for (to, from) in quants.iter_mut().zip(&bytes[2..]) {
                    *to = from ^ 0x80;
                }
                self.put_quants(row, block, &quants);
                self.put_half(row, block, 0, half(0))?;
            }
            SourceFormat::F32 | SourceFormat::F16 | SourceFormat::Bf16 => {
                let mut values = [0f32; BLOCK];
                for (i, value) in values.iter_mut().enumerate() {
                    *value = match format {
                        SourceFormat::F16 => f16_to_f32(half(2 * i)),
                        SourceFormat::Bf16 => bf16_to_f32(half(2 * i)),
                        _ => f32::from_le_bytes([bytes[4 * i], bytes[4 * i + 1], bytes[4 * i + 2], bytes[4 * i + 3]]),
                    };
                }
                if values.iter().any(|v| !v.is_finite()) {
                    return Err(PackError::NotFinite { row });
                }
                let scale = f32_to_f16(values.iter().fold(0f32, |m, v| m.max(v.abs())) / 127.0);
                let inverse = match f16_to_f32(scale) {
                    0.0 => 0.0,
                    scale => 1.0 / scale,
                };
                let quants = values.map(|v| ((v * inverse).round_ties_even().clamp(-127.0, 127.0) as i8 as u8) ^ 0x80);
                self.put_quants(row, block, &quants);
                self.put_half(row, block, 0, scale)?;
            }
        }
        Ok(())
    }

    /// Writes a row's quants of one block, in the order of the source: groups of four bytes to the row's column.
    fn put_quants(&mut self, row: usize, block: usize, quants: &[u8]) {
        let start = self.tile_start(row / LANES) + block * self.format.quant_bytes() + row % LANES * 4;
        for (group, four) in quants.chunks_exact(4).enumerate() {
            self.data[start + group * 64..][..4].copy_from_slice(four);
        }
    }

    fn put_half(&mut self, row: usize, block: usize, which: usize, bits: u16) -> Result<(), PackError> {
        if !f16_to_f32(bits).is_finite() {
            return Err(PackError::NotFinite { row });
        }
        let at = self.half_start(row / LANES, which) + (block * LANES + row % LANES) * 2;
        self.data[at..at + 2].copy_from_slice(&bits.to_le_bytes());
        Ok(())
    }

    /// Where the scales (`which` 0) or minima (1) of a tile begin.
    fn half_start(&self, tile: usize, which: usize) -> usize {
        let blocks = self.k / BLOCK;
        self.tile_start(tile) + blocks * self.format.quant_bytes() + which * blocks * LANES * 2
    }

    fn half_at(&self, row: usize, block: usize, which: usize) -> f32 {
        let at = self.half_start(row / LANES, which) + (block * LANES + row % LANES) * 2;
        f16_to_f32(u16::from_le_bytes([self.data[at], self.data[at + 1]]))
    }

    /// Storage format.
    pub fn format(&self) -> PackedFormat {
        self.format
    }

    /// Outputs.
    pub fn n(&self) -> usize {
        self.n
    }

    /// Inputs.
    pub fn k(&self) -> usize {
        self.k
    }

    /// Bytes that one product reads.
    pub fn bytes(&self) -> usize {
        self.data.len()
    }

    /// Tiles of sixteen outputs.
    pub(crate) fn tiles(&self) -> Range<usize> {
        0..self.n.div_ceil(LANES)
    }

    /// Start of a tile; its scales and minima follow as the module's layout says.
    pub(crate) fn tile_ptr(&self, tile: usize) -> *const u8 {
        self.data[tile * self.tile_bytes..][..self.tile_bytes].as_ptr()
    }

    /// Widens row `row` (an embedding, when the matrix is the token table) into `out`. Each value is rounded once or twice, always alike.
    ///
    /// # Panics
    /// When `row` is out of range or `out` is not `k` long.
    pub fn dequantise_row(&self, row: usize, out: &mut [f32]) {
        assert!(row < self.n && out.len() == self.k, "row {row} of {}, {} values of {}", self.n, out.len(), self.k);
        let column = self.tile_start(row / LANES) + row % LANES * 4;
        for (block, out) in out.chunks_exact_mut(BLOCK).enumerate() {
            let scale = self.half_at(row, block, 0);
            let start = column + block * self.format.quant_bytes();
            match self.format {
                PackedFormat::Q8_0 => {
                    for (group, out) in out.chunks_exact_mut(4).enumerate() {
                        for (value, &q) in out.iter_mut().zip(&self.data[start + group * 64..][..4]) {
                            *value = scale * f32::from((q ^ 0x80) as i8);
                        }
                    }
                }
                PackedFormat::Q4_0 | PackedFormat::Q4_1 => {
                    let (zero, minimum) = match self.format {
                        PackedFormat::Q4_0 => (8.0, 0.0),
                        _ => (0.0, self.half_at(row, block, 1)),
                    };
                    let (low, high) = out.split_at_mut(BLOCK / 2);
                    for (group, (low, high)) in low.chunks_exact_mut(4).zip(high.chunks_exact_mut(4)).enumerate() {
                        for (i, &q) in self.data[start + group * 64..][..4].iter().enumerate() {
                            low[i] = scale * (f32::from(q & 15) - zero) + minimum;
                            high[i] = scale * (f32::from(q >> 4) - zero) + minimum;
                        }
                    }
                }
            }
        }
    }
}
