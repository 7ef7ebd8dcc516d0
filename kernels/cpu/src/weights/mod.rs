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
//! Tiles of bfloat16 have no blocks: line p of 64 bytes holds k = 2 p and 2 p + 1 of column c in its bytes 4 c .. 4 c + 4, which is what one
//! `vdpbf16ps` (and one row of an AMX tile) consumes.
//!
//! # Exactness
//! Every quantised GGUF format keeps its values exactly: products of a half and a factor fit an f32. F32, F16 and BF16 rows are quantised at
//! load the way Q8_0 is: per block of 32 the scale is the largest magnitude / 127 rounded to a half, and the weight the nearest integer to
//! value / scale, so a weight is off by at most 1/254 of the largest of its block (and a bit for the half). One numeric path then serves
//! every source, with integer products and one exact sum per block, which is why it is the same on every instruction set.
//!
//! For [`crate::Precision::Bf16`] every source becomes bfloat16 instead, rounded to nearest even: a normal weight is off by at most 2^-8 of itself,
//! and one that was bfloat16 is not off at all. Two bytes a weight whatever the source.

mod format;
mod pack;
mod shape;
mod source;
mod storage;

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use crate::half::{bf16_to_f32, f16_to_f32};
use crate::lanes::LANES;
use crate::memory::{MemoryBudget, MemoryError};
use crate::pool::TaskPanicked;

pub(crate) use format::Scales;
pub use format::{PackedFormat, SUPER_BLOCK, SourceFormat};
pub use pack::{PackJob, pack_all};
pub use shape::PackedShape;
pub(crate) use shape::TileLayout;
pub use storage::{StorageError, WeightBytes, WeightMemory};

/// Inputs that share one scale.
pub const BLOCK: usize = 32;

/// Version of the layout above and of the rounding of float sources. Packed bytes that are kept carry it; whoever changes what packing
/// writes counts it up (a test holds the bytes of each format).
pub const LAYOUT_VERSION: u32 = 1;

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
    /// Packing panicked.
    Panicked(TaskPanicked),
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
            PackError::Panicked(panic) => panic.fmt(f),
        }
    }
}

impl std::error::Error for PackError {}

impl From<TaskPanicked> for PackError {
    fn from(panic: TaskPanicked) -> Self {
        PackError::Panicked(panic)
    }
}

impl From<MemoryError> for PackError {
    fn from(error: MemoryError) -> Self {
        PackError::Memory(error)
    }
}

/// Whether blocks of the format have a minimum beside their scale.
fn has_minima(format: PackedFormat) -> bool {
    matches!(format.scales(), Scales::Minimum | Scales::Super)
}

/// Packed weights of one linear layer. Immutable; shared by replicas behind an `Arc`.
#[derive(Debug)]
pub struct PackedMatrix {
    shape: PackedShape,
    layout: TileLayout,
    data: WeightBytes,
}

impl PackedMatrix {
    /// Packs `n` rows of `k` values from `source` into memory of its own, on this thread. [`pack_all`] packs a model.
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
        Self::pack_as(budget, source, format, PackedShape::new(format.packed(), n, k)?)
    }

    /// As [`PackedMatrix::pack`], into the shape given: its format is [`SourceFormat::packed_for`] some precision.
    ///
    /// # Errors
    /// As for [`PackedMatrix::pack`].
    ///
    /// # Panics
    /// When the source cannot become the shape's format.
    pub fn pack_as(
        budget: &MemoryBudget,
        source: &[u8],
        format: SourceFormat,
        shape: PackedShape,
    ) -> Result<Self, PackError> {
        pack::check_source(source, format, shape)?;
        let mut buffer = budget.allocate(shape.bytes())?;
        pack::pack_tiles(source, format, shape, &mut buffer)?;
        let memory = Arc::new(WeightMemory::Huge(buffer));
        let data = WeightBytes::new(memory, 0..shape.bytes()).expect("the buffer has the shape's size");
        Ok(Self::over(shape, data).expect("the bytes have the shape's size"))
    }

    /// A matrix over bytes that [`pack_all`] wrote, now or in an earlier run of the same [`LAYOUT_VERSION`]. Whether they are those of the
    /// wanted weights is the caller's to know: any bytes are numbers.
    ///
    /// # Errors
    /// [`StorageError`] when the bytes are not as many as the shape needs.
    pub fn over(shape: PackedShape, data: WeightBytes) -> Result<Self, StorageError> {
        if data.len() != shape.bytes() {
            return Err(StorageError { wanted: shape.bytes(), given: data.len() });
        }
        Ok(Self { shape, layout: shape.layout(), data })
    }

    fn tile_start(&self, tile: usize) -> usize {
        tile * self.layout.bytes
    }

    fn quants(&self, row: usize, block: usize) -> [u8; BLOCK] {
        let start = self.tile_start(row / LANES) + block * self.layout.block_quants;
        let column = row % LANES * 4;
        let block = &self.data[start..][..self.layout.block_quants];
        std::array::from_fn(|k| {
            let (group, byte) = (k / 4, column + k % 4);
            let nibble = || block[group % 4 * 64 + byte] >> (group / 4 * 4) & 15;
            match self.shape.format().bits() {
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
        let format = self.shape.format();
        let minimum = if has_minima(format) { half(self.layout.minima) } else { 0.0 };
        let has_factors = matches!(format.scales(), Scales::Super | Scales::SuperHalves);
        let factors = if has_factors { [factor(0), factor(1)] } else { [0; 2] };
        format.scale([half(self.layout.scales), minimum], factors)
    }

    /// Storage format.
    pub fn format(&self) -> PackedFormat {
        self.shape.format()
    }

    /// Outputs.
    pub fn n(&self) -> usize {
        self.shape.n()
    }

    /// Inputs.
    pub fn k(&self) -> usize {
        self.shape.k()
    }

    /// The packed bytes, tile behind tile.
    pub fn as_bytes(&self) -> &[u8] {
        &self.data
    }

    /// Bytes that one product reads.
    pub fn bytes(&self) -> usize {
        self.data.len()
    }

    /// Tiles of sixteen outputs.
    pub(crate) fn tiles(&self) -> Range<usize> {
        0..self.shape.n().div_ceil(LANES)
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
        let PackedShape { n, k, .. } = self.shape;
        assert!(row < n && out.len() == k, "row {row} of {n}, {} values of {k}", out.len());
        if self.shape.format() == PackedFormat::Bf16 {
            let tile = &self.data[self.tile_start(row / LANES)..][..self.layout.bytes];
            for (line, out) in tile.chunks_exact(LANES * 4).zip(out.chunks_exact_mut(2)) {
                let pair = &line[row % LANES * 4..][..4];
                out[0] = bf16_to_f32(u16::from_le_bytes([pair[0], pair[1]]));
                out[1] = bf16_to_f32(u16::from_le_bytes([pair[2], pair[3]]));
            }
            return;
        }
        let zero = f32::from(self.shape.format().zero());
        for (block, out) in out.chunks_exact_mut(BLOCK).enumerate() {
            let quants = self.quants(row, block);
            let (scales, minimum) = self.scales_at(row, block);
            for (k, (value, quant)) in out.iter_mut().zip(quants).enumerate() {
                *value = scales[k / (BLOCK / 2)] * (f32::from(quant) - zero) + minimum;
            }
        }
    }
}
