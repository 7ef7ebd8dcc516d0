//! Packing: source rows become tiles, many matrices at a time on all threads.

use super::format::{PackedFormat, Scales, SourceFormat};
use super::shape::{PackedShape, TileLayout};
use super::source::{self, NotFinite, SourceBlock};
use super::{BLOCK, PackError};
use crate::lanes::LANES;
use crate::pool::Session;

/// One matrix to be packed.
#[derive(Debug)]
pub struct PackJob<'a> {
    /// Its rows, one behind the other.
    pub source: &'a [u8],
    /// How they are stored.
    pub format: SourceFormat,
    /// What they become.
    pub shape: PackedShape,
    /// Where to: [`PackedShape::bytes`] long.
    pub to: &'a mut [u8],
}

/// Source bytes that one task packs, about: some milliseconds of work, so that threads end together.
const PIECE_BYTES: usize = 4 << 20;

/// Packs all matrices. The bytes do not depend on the threads, nor on what stood in `to`.
///
/// # Errors
/// The first job that cannot be packed, by number, with the reason. The contents of every `to` are then undefined.
///
/// # Panics
/// When a job's `to` is not as long as its shape needs.
pub fn pack_all(session: &mut Session<'_>, jobs: Vec<PackJob<'_>>) -> Result<(), (usize, PackError)> {
    struct Piece<'a> {
        job: usize,
        first_row: usize,
        work: PackJob<'a>,
        outcome: Result<(), PackError>,
    }
    let mut pieces = Vec::new();
    for (job, PackJob { source, format, shape, to }) in jobs.into_iter().enumerate() {
        check_source(source, format, shape).map_err(|error| (job, error))?;
        assert_eq!(to.len(), shape.bytes(), "the target has the shape's size");
        let row_bytes = source.len() / shape.n();
        let rows = (PIECE_BYTES / row_bytes).max(1).next_multiple_of(LANES);
        let tiles_bytes = rows / LANES * shape.layout().bytes;
        let parts = source.chunks(rows * row_bytes).zip(to.chunks_mut(tiles_bytes));
        for (index, (source, to)) in parts.enumerate() {
            let shape = PackedShape { n: source.len() / row_bytes, ..shape };
            let work = PackJob { source, format, shape, to };
            pieces.push(Piece { job, first_row: index * rows, work, outcome: Ok(()) });
        }
    }
    session
        .each(&mut pieces, |_, piece| {
            let PackJob { source, format, shape, to } = &mut piece.work;
            piece.outcome = pack_tiles(source, *format, *shape, to);
        })
        .map_err(|panic| (0, panic.into()))?;
    for piece in pieces {
        piece.outcome.map_err(|error| match error {
            PackError::NotFinite { row } => (piece.job, PackError::NotFinite { row: piece.first_row + row }),
            other => (piece.job, other),
        })?;
    }
    Ok(())
}

/// Whether `source` has whole blocks in each row and is as long as the shape needs.
pub(super) fn check_source(source: &[u8], format: SourceFormat, shape: PackedShape) -> Result<(), PackError> {
    let (packed, wanted) = (shape.format(), format.packed());
    assert!(packed == wanted || packed == PackedFormat::Bf16, "a {format:?} source becomes {wanted:?} or bfloat16");
    if !shape.k().is_multiple_of(format.block_len()) {
        return Err(PackError::Shape { n: shape.n(), k: shape.k() });
    }
    let wanted = shape.k() / format.block_len() * format.block_bytes() * shape.n();
    if source.len() == wanted { Ok(()) } else { Err(PackError::SourceLength { wanted, given: source.len() }) }
}

/// Packs one run of rows whose first one begins a tile. The source's length was checked.
pub(super) fn pack_tiles(
    source: &[u8],
    format: SourceFormat,
    shape: PackedShape,
    to: &mut [u8],
) -> Result<(), PackError> {
    if shape.format() == PackedFormat::Bf16 {
        return pack_bf16_tiles(source, format, shape, to);
    }
    let mut tiles = Tiles { shape, layout: shape.layout(), data: to };
    tiles.pad();
    for (row, bytes) in source.chunks_exact(source.len() / shape.n()).enumerate() {
        for (block, bytes) in bytes.chunks_exact(format.block_bytes()).enumerate() {
            let first = block * (format.block_len() / BLOCK);
            source::read(format, bytes, |i, block| tiles.put(row, first + i, &block))
                .map_err(|NotFinite| PackError::NotFinite { row })?;
        }
    }
    Ok(())
}

/// The same into tiles of bfloat16, whose columns past `n` are zero.
fn pack_bf16_tiles(source: &[u8], format: SourceFormat, shape: PackedShape, to: &mut [u8]) -> Result<(), PackError> {
    let tile_bytes = shape.layout().bytes;
    if !shape.n().is_multiple_of(LANES) {
        let last = shape.n() / LANES * tile_bytes;
        to[last..].fill(0);
    }
    for (row, bytes) in source.chunks_exact(source.len() / shape.n()).enumerate() {
        let tile = &mut to[row / LANES * tile_bytes..][..tile_bytes];
        for (block, bytes) in bytes.chunks_exact(format.block_bytes()).enumerate() {
            let first = block * (format.block_len() / BLOCK);
            source::read_bf16(format, bytes, |i, values| {
                let lines = tile[(first + i) * BLOCK * LANES * 2..].chunks_exact_mut(LANES * 4);
                for (line, pair) in lines.zip(values.chunks_exact(2)) {
                    let to = &mut line[row % LANES * 4..][..4];
                    to[..2].copy_from_slice(&pair[0].to_le_bytes());
                    to[2..].copy_from_slice(&pair[1].to_le_bytes());
                }
            })
            .map_err(|NotFinite| PackError::NotFinite { row })?;
        }
    }
    Ok(())
}

/// Tiles being written.
struct Tiles<'a> {
    shape: PackedShape,
    layout: TileLayout,
    data: &'a mut [u8],
}

impl Tiles<'_> {
    /// Columns past `n` have scale 0; their quants are the zero point all the same, so that integer sums stay small. What rounds a tile up
    /// is zero.
    fn pad(&mut self) {
        for tile in self.data.chunks_exact_mut(self.layout.bytes) {
            tile[self.layout.bytes - 64..].fill(0);
        }
        let blank = SourceBlock { quants: [self.shape.format().zero(); BLOCK], halves: [0; 2], factors: [0; 2] };
        for row in self.shape.n()..self.shape.n().next_multiple_of(LANES) {
            for block in 0..self.shape.k() / BLOCK {
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
        let count = 1 + usize::from(super::has_minima(self.shape.format()));
        for (bits, section) in from.halves.into_iter().zip(sections).take(count) {
            self.data[start + section + half..][..2].copy_from_slice(&bits.to_le_bytes());
        }
        if matches!(self.shape.format().scales(), Scales::Super | Scales::SuperHalves) {
            for (i, factor) in from.factors.into_iter().enumerate() {
                self.data[start + self.layout.factors + (2 * block + i) * LANES + column] = factor;
            }
        }
    }

    fn put_quants(&mut self, row: usize, block: usize, quants: &[u8; BLOCK]) {
        let start = self.tile_start(row / LANES) + block * self.layout.block_quants;
        let column = row % LANES * 4;
        let block = &mut self.data[start..][..self.layout.block_quants];
        if self.shape.format().bits() == 8 {
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
        match self.shape.format().bits() {
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
}
