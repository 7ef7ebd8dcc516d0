//! How large a packed matrix is, and where the parts of its tiles lie.

use super::format::{PackedFormat, SUPER_BLOCK, Scales};
use super::{BLOCK, PackError};
use crate::lanes::LANES;

/// Format and size of a packed matrix; legal by construction.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PackedShape {
    pub(super) format: PackedFormat,
    pub(super) n: usize,
    pub(super) k: usize,
}

impl PackedShape {
    /// `n` outputs of `k` inputs.
    ///
    /// # Errors
    /// [`PackError::Shape`] when one of them is 0, `k` is no multiple of the format's block, or the size overflows.
    pub fn new(format: PackedFormat, n: usize, k: usize) -> Result<Self, PackError> {
        let shape = PackError::Shape { n, k };
        if n == 0 || k == 0 || !k.is_multiple_of(format.k_step()) || i32::try_from(k).is_err() {
            return Err(shape);
        }
        // A float source is up to four bytes a weight, a packed one at most two: neither may overflow.
        let weights = n.checked_next_multiple_of(LANES).and_then(|rows| rows.checked_mul(k)).ok_or(shape.clone())?;
        weights.checked_mul(4).filter(|&bytes| isize::try_from(bytes).is_ok()).ok_or(shape)?;
        Ok(Self { format, n, k })
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

    /// Bytes of all tiles; a multiple of 64.
    pub fn bytes(&self) -> usize {
        self.layout().bytes * self.n.div_ceil(LANES)
    }

    pub(crate) fn layout(&self) -> TileLayout {
        TileLayout::new(self.format, self.k)
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
    pub(super) blocks_per_half: usize,
    /// All of the tile.
    pub(super) bytes: usize,
}

impl TileLayout {
    pub(super) fn new(format: PackedFormat, k: usize) -> Self {
        let blocks = k / BLOCK;
        let block_quants = BLOCK * LANES * format.bits() / 8;
        let (blocks_per_half, minima_rows, factor_rows) = match format.scales() {
            Scales::Plain => (1, 0, 0),
            Scales::Minimum => (1, 1, 0),
            Scales::Super => (SUPER_BLOCK / BLOCK, 1, 2),
            Scales::SuperHalves => (SUPER_BLOCK / BLOCK, 0, 2),
            Scales::None => (1, 0, 0),
        };
        let halves = if matches!(format.scales(), Scales::None) { 0 } else { blocks / blocks_per_half * LANES * 2 };
        let scales = blocks * block_quants;
        let minima = scales + halves;
        let factors = minima + minima_rows * halves;
        let bytes = (factors + factor_rows * blocks * LANES).next_multiple_of(64);
        let block_lines = (bytes / 64).div_ceil(blocks);
        Self { block_quants, scales, minima, factors, block_lines, blocks_per_half, bytes }
    }
}
