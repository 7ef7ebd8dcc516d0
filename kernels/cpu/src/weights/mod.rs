//! Weight matrices, repacked at load into tiles of sixteen output columns.
//!
//! # Layout
//! A matrix has `n` outputs and `k` inputs, `k` a multiple of 32. Tile `t` holds outputs `16 t .. 16 t + 16` (the last tile is padded
//! with zero weights) for all of K, in one contiguous range that is read front to back:
//!
//! ```text
//! quants   for each 32-block of K, 512 weights; "byte 4 c + i of group g" is column c, k = 4 g + i
//!            4 bits: 4 groups of 64 bytes: group g in the low and group g + 4 in the high nibbles
//!            5 bits: as 4 bits; then 8 words of 64 bits, bit 4 c + i of word g being the fifth bit of that byte of group g
//!            6 bits: as 4 bits; then 2 times 64 bytes with the upper two bits: bits 2 j of the first are group j's, of the second group j + 4's
//!            8 bits: 8 groups of 64 bytes, stored as weight + 128
//! halves   scales: 16 halves for each 32-block, for each 256-block in K formats
//!          minima: the same again, in formats that have them
//! factors  K formats: for each 32-block 16 bytes that multiply the scale, and 16 more: for the minimum (Q4_K, Q5_K), or for the
//!          second half of the block (Q6_K, signed)
//! ```
//!
//! rounded up to 64 bytes. Four consecutive K of sixteen columns are what one VNNI instruction (and one row of an AMX tile) consumes.
//!
//! # Exactness
//! Every quantised GGUF format keeps its values exactly: products of a half and a factor fit an f32. F32, F16 and BF16 rows are quantised at
//! load the way Q8_0 is: per block of 32 the scale is the largest magnitude / 127 rounded to a half, and the weight the nearest integer to
//! value / scale, so a weight is off by at most 1/254 of the largest of its block (and a bit for the half). One numeric path then serves
//! every source, with integer products and one exact sum per block, which is why it is the same on every instruction set. A path that kept
//! 16-bit floats as they are would have to add in f32: row-invariant as well in a fixed order, but at a quarter of the products' rate and
//! twice the bytes.

mod format;
mod source;

use std::fmt;
use std::ops::Range;

use crate::half::f16_to_f32;
use crate::lanes::LANES;
use crate::memory::{HugeBuffer, MemoryBudget, MemoryError};

pub(crate) use format::Scales;
pub use format::{PackedFormat, SUPER_BLOCK, SourceFormat};
use source::SourceBlock;

/// Inputs that share one scale.
pub const BLOCK: usize = 32;

/// Why a matrix could not be packed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PackError {
    /// `k` is 0 or no multiple of 32 (256 for K formats), or `n` is 0, or the size overflows.
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
                write!(
                    f,
                    "weights of {n} x {k} cannot be packed: k must be a multiple of {BLOCK}, of {SUPER_BLOCK} for K formats"
                )
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

/// Where the parts of a tile lie, in bytes from its start.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct TileLayout {
    /// Quants of one block.
    pub(crate) block_quants: usize,
    pub(crate) scales: usize,
    pub(crate) minima: usize,
    pub(crate) factors: usize,
    /// Cache lines of the tile, shared out among its blocks, rounded up.
    pub(crate) block_lines: usize,
    /// Blocks that share their halves.
    blocks_per_half: usize,
    /// All of the tile.
    bytes: usize,
}

impl TileLayout {
    fn new(format: PackedFormat, k: usize) -> Self {
        let blocks = k / BLOCK;
        let block_quants = BLOCK * LANES * format.bits() / 8;
        let (blocks_per_half, minima_rows, factor_rows) = match format.scales() {
            Scales::Plain => (1, 0, 0),
            Scales::Minimum => (1, 1, 0),
            Scales::Super => (SUPER_BLOCK / BLOCK, 1, 2),
            Scales::SuperHalves => (SUPER_BLOCK / BLOCK, 0, 2),
        };
        let halves = blocks / blocks_per_half * LANES * 2;
        let scales = blocks * block_quants;
        let minima = scales + halves;
        let factors = minima + minima_rows * halves;
        let bytes = (factors + factor_rows * blocks * LANES).next_multiple_of(64);
        let block_lines = (bytes / 64).div_ceil(blocks);
        Self { block_quants, scales, minima, factors, block_lines, blocks_per_half, bytes }
    }
}

/// Packed weights of one linear layer. Immutable; shared by replicas behind an `Arc`.
#[derive(Debug)]
pub struct PackedMatrix {
    format: PackedFormat,
    n: usize,
    k: usize,
    layout: TileLayout,
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
        if n == 0 || k == 0 || !k.is_multiple_of(format.block_len()) || i32::try_from(k).is_err() {
            return Err(shape);
        }
        let row_bytes = (k / format.block_len()).checked_mul(format.block_bytes()).ok_or(shape.clone())?;
        let wanted = row_bytes.checked_mul(n).ok_or(shape.clone())?;
        if source.len() != wanted {
            return Err(PackError::SourceLength { wanted, given: source.len() });
        }
        let packed = format.packed();
        let layout = TileLayout::new(packed, k);
        let total = layout.bytes.checked_mul(n.div_ceil(LANES)).ok_or(shape)?;
        let mut matrix = Self { format: packed, n, k, layout, data: budget.allocate(total)? };
        matrix.pad();
        for (row, bytes) in source.chunks_exact(row_bytes).enumerate() {
            for (block, bytes) in bytes.chunks_exact(format.block_bytes()).enumerate() {
                let first = block * (format.block_len() / BLOCK);
                source::read(format, bytes, |i, block| matrix.put(row, first + i, &block))
                    .map_err(|source::NotFinite| PackError::NotFinite { row })?;
            }
        }
        Ok(matrix)
    }

    /// Columns past `n` have scale 0; their quants are the zero point all the same, so that integer sums stay small.
    fn pad(&mut self) {
        let blank = SourceBlock { quants: [self.format.zero(); BLOCK], halves: [0; 2], factors: [0; 2] };
        for row in self.n..self.n.next_multiple_of(LANES) {
            for block in 0..self.k / BLOCK {
                self.put(row, block, &blank);
            }
        }
    }

    fn tile_start(&self, tile: usize) -> usize {
        tile * self.layout.bytes
    }

    fn put(&mut self, row: usize, block: usize, from: &SourceBlock) {
        self.put_quants(row, block, &from.quants);
        let start = self.tile_start(row / LANES);
        let column = row % LANES;
        let half = (block / self.layout.blocks_per_half * LANES + column) * 2;
        let sections = [self.layout.scales, self.layout.minima];
        let count = 1 + usize::from(matches!(self.format.scales(), Scales::Minimum | Scales::Super));
        for (bits, section) in from.halves.into_iter().zip(sections).take(count) {
            self.data[start + section + half..][..2].copy_from_slice(&bits.to_le_bytes());
        }
        if matches!(self.format.scales(), Scales::Super | Scales::SuperHalves) {
            for (i, factor) in from.factors.into_iter().enumerate() {
                self.data[start + self.layout.factors + (2 * block + i) * LANES + column] = factor;
            }
        }
    }

    fn put_quants(&mut self, row: usize, block: usize, quants: &[u8; BLOCK]) {
        let start = self.tile_start(row / LANES) + block * self.layout.block_quants;
        let column = row % LANES * 4;
        let block = &mut self.data[start..][..self.layout.block_quants];
        if self.format.bits() == 8 {
            for (group, four) in quants.chunks_exact(4).enumerate() {
                block[group * 64 + column..][..4].copy_from_slice(four);
            }
            return;
        }
        // Nibbles of both halves share bytes, in order of K; so do the bits above them.
        let byte_of = |half_shift: u32, shift: u32, mask: u8| -> [u8; BLOCK / 2] {
            std::array::from_fn(|i| (quants[i] >> shift & mask) | (quants[BLOCK / 2 + i] >> shift & mask) << half_shift)
        };
        for (group, four) in byte_of(4, 0, 15).chunks_exact(4).enumerate() {
            block[group * 64 + column..][..4].copy_from_slice(four);
        }
        match self.format.bits() {
            5 => {
                for (group, four) in quants.chunks_exact(4).enumerate() {
                    let bits = four.iter().rev().fold(0, |bits, quant| bits << 1 | quant >> 4);
                    let to = &mut block[256 + group * 8 + column / 8];
                    *to = *to & !(15 << (column % 8)) | bits << (column % 8);
                }
            }
            6 => {
                for (vector, half) in quants.chunks_exact(BLOCK / 2).enumerate() {
                    for i in 0..4 {
                        let bits = (0..4).rev().fold(0, |bits, group| bits << 2 | half[group * 4 + i] >> 4);
                        block[256 + vector * 64 + column + i] = bits;
                    }
                }
            }
            _ => {}
        }
    }

    fn quants(&self, row: usize, block: usize) -> [u8; BLOCK] {
        let start = self.tile_start(row / LANES) + block * self.layout.block_quants;
        let column = row % LANES * 4;
        let block = &self.data[start..][..self.layout.block_quants];
        std::array::from_fn(|k| {
            let (group, byte) = (k / 4, column + k % 4);
            let nibble = || block[group % 4 * 64 + byte] >> (group / 4 * 4) & 15;
            match self.format.bits() {
                8 => block[group * 64 + byte],
                6 => nibble() | (block[256 + group / 4 * 64 + byte] >> (group % 4 * 2) & 3) << 4,
                5 => nibble() | (block[256 + group * 8 + byte / 8] >> (byte % 8) & 1) << 4,
                _ => nibble(),
            }
        })
    }

    /// What multiplies each half of a block, and what is added.
    fn scales_at(&self, row: usize, block: usize) -> ([f32; 2], f32) {
        let start = self.tile_start(row / LANES);
        let half = |section: usize| {
            let at = start + section + (block / self.layout.blocks_per_half * LANES + row % LANES) * 2;
            f16_to_f32(u16::from_le_bytes([self.data[at], self.data[at + 1]]))
        };
        let factor = |i: usize| self.data[start + self.layout.factors + (2 * block + i) * LANES + row % LANES];
        let scale = half(self.layout.scales);
        match self.format.scales() {
            Scales::Plain => ([scale; 2], 0.0),
            Scales::Minimum => ([scale; 2], half(self.layout.minima)),
            Scales::Super => ([scale * f32::from(factor(0)); 2], half(self.layout.minima) * f32::from(factor(1))),
            Scales::SuperHalves => ([0, 1].map(|i| scale * f32::from(factor(i) as i8)), 0.0),
        }
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

    /// Where the parts of each tile lie.
    pub(crate) fn layout(&self) -> TileLayout {
        self.layout
    }

    /// Start of a tile.
    pub(crate) fn tile_ptr(&self, tile: usize) -> *const u8 {
        self.data[self.tile_start(tile)..][..self.layout.bytes].as_ptr()
    }

    /// Widens row `row` (an embedding, when the matrix is the token table) into `out`. Each value is rounded once or twice, always alike.
    ///
    /// # Panics
    /// When `row` is out of range or `out` is not `k` long.
    pub fn dequantise_row(&self, row: usize, out: &mut [f32]) {
        assert!(row < self.n && out.len() == self.k, "row {row} of {}, {} values of {}", self.n, out.len(), self.k);
        let zero = f32::from(self.format.zero());
        for (block, out) in out.chunks_exact_mut(BLOCK).enumerate() {
            let quants = self.quants(row, block);
            let (scales, minimum) = self.scales_at(row, block);
            for (k, (value, quant)) in out.iter_mut().zip(quants).enumerate() {
                *value = scales[k / (BLOCK / 2)] * (f32::from(quant) - zero) + minimum;
            }
        }
    }
}
