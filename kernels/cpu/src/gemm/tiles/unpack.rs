//! Packed weights as AMX takes them: bfloat16 rows of a tile, with the scales beside them in f32.
//!
//! A block of 32 inputs is one tile of sixteen rows. Row 8 h + 2 g + o holds inputs 16 h + 4 g + o and 16 h + 4 g + o + 2 of each column:
//! the two bytes of equal parity that lie in one dword of a packed group. So the order is that of activations whose four bytes of a group
//! have their middle two exchanged, and unpacking moves no byte across a 16-bit word. Zero points are taken off here.

use std::arch::x86_64::*;

use crate::activation::Line;
use crate::gemm::{AHEAD_BYTES, MINIMUM, PLAIN, SUPER, SUPER_HALVES};
use crate::lanes::avx512::Avx512;
use crate::lanes::{LANES, Lanes};
use crate::weights::{BLOCK, PackedMatrix, SUPER_BLOCK};

/// One block of sixteen columns, of `ROWS` rows: sixteen, or two tiles of sixteen, each with half of the block and zeros in place of the
/// other half.
#[repr(C, align(64))]
pub(super) struct BlockWeights<const ROWS: usize> {
    /// Rows of the tile, or of both.
    pub(super) rows: [Line; ROWS],
    /// Scale of each column.
    pub(super) scales: [f32; LANES],
    /// What each column adds, in formats with minima.
    pub(super) minima: [f32; LANES],
    /// Factors of the block's two halves, in formats that have them.
    pub(super) factors: [[i32; LANES]; 2],
}

/// Lines of 64 bytes that `blocks` blocks need.
pub(super) const fn lines<const ROWS: usize>(blocks: usize) -> usize {
    blocks * size_of::<BlockWeights<ROWS>>() / size_of::<Line>()
}

/// The bfloat16 form of `i % modulus - zero` for 64 values of `i`.
const fn table(modulus: i32, zero: i32) -> [u16; 64] {
    let mut table = [0; 64];
    let mut i = 0;
    while i < 64 {
        table[i] = ((i as i32 % modulus - zero) as f32).to_bits().wrapping_shr(16) as u16;
        i += 1;
    }
    table
}

/// Unpacks all of tile `tile`.
///
/// # Safety
/// The CPU has the features of [`Avx512`], the matrix is of `BITS` and `SCALES`, and `to` has room for all its blocks.
#[inline(always)]
pub(super) unsafe fn unpack<const BITS: usize, const SCALES: u8, const ROWS: usize>(
    matrix: &PackedMatrix,
    tile: usize,
    to: *mut BlockWeights<ROWS>,
) {
    let in_super_blocks = SCALES == SUPER || SCALES == SUPER_HALVES;
    let blocks_per_half = if in_super_blocks { SUPER_BLOCK / BLOCK } else { 1 };
    let layout = matrix.layout();
    // SAFETY: offsets stay inside the tile by the layout in `weights`; the rest is the caller's promise.
    unsafe {
        let start = matrix.tile_ptr(tile);
        for block in 0..matrix.k() / BLOCK {
            let to = to.add(block);
            for line in 0..layout.block_lines {
                Avx512::prefetch(start.wrapping_add(AHEAD_BYTES + (block * layout.block_lines + line) * 64));
            }
            unpack_quants::<BITS, SCALES, ROWS>(start.add(block * layout.block_quants), (*to).rows.as_mut_ptr());
            let half = block / blocks_per_half * LANES;
            let factors = start.add(layout.factors + block * 2 * LANES);
            let scale = Avx512::load_f16(start.add(layout.scales).cast::<u16>().add(half));
            let scale = if SCALES == SUPER { Avx512::mul(scale, Avx512::load_bytes(factors)) } else { scale };
            Avx512::store((*to).scales.as_mut_ptr(), scale);
            if SCALES == MINIMUM || SCALES == SUPER {
                let minimum = Avx512::load_f16(start.add(layout.minima).cast::<u16>().add(half));
                let minimum = if SCALES == SUPER {
                    Avx512::mul(minimum, Avx512::load_bytes(factors.add(LANES)))
                } else {
                    minimum
                };
                Avx512::store((*to).minima.as_mut_ptr(), minimum);
            }
            if SCALES == SUPER_HALVES {
                for half in 0..2 {
                    let factors = Avx512::load_signed(factors.add(half * LANES).cast::<i8>());
                    Avx512::store_int((*to).factors[half].as_mut_ptr(), factors);
                }
            }
        }
    }
}

/// Unpacks the quants of one block.
#[inline(always)]
unsafe fn unpack_quants<const BITS: usize, const SCALES: u8, const ROWS: usize>(quants: *const u8, rows: *mut Line) {
    const NIBBLES: [u16; 64] = table(16, 0);
    const NIBBLES_BELOW_8: [u16; 64] = table(16, 8);
    const FIVES: [u16; 64] = table(32, 0);
    const FIVES_BELOW_16: [u16; 64] = table(32, 16);
    const SIXES: [u16; 64] = table(64, 32);
    let values = match (BITS, SCALES == PLAIN) {
        (4, false) => &NIBBLES,
        (4, true) => &NIBBLES_BELOW_8,
        (5, false) => &FIVES,
        (5, true) => &FIVES_BELOW_16,
        _ => &SIXES,
    };
    // SAFETY: the caller vouches for the features, the quants of one block and sixteen rows.
    unsafe {
        let row = |index: usize| {
            let second_tile = if ROWS > 16 && index >= 8 { 16 } else { 0 };
            rows.add(index + second_tile).cast::<__m512i>()
        };
        if ROWS > 16 {
            for blank in 8..24 {
                rows.add(blank).cast::<__m512i>().write(_mm512_setzero_si512());
            }
        }
        let first_values = _mm512_loadu_si512(values.as_ptr().cast());
        let last_values = _mm512_loadu_si512(values.as_ptr().add(32).cast());
        for group in 0..4 {
            let bytes = _mm512_loadu_si512(quants.add(group * 64).cast());
            match BITS {
                4 => {
                    // The look-up reads five bits of each word; its table repeats after sixteen.
                    let look_up = |word| _mm512_permutexvar_epi16(word, first_values);
                    row(2 * group).write(look_up(bytes));
                    row(2 * group + 8).write(look_up(_mm512_srli_epi16::<4>(bytes)));
                    row(2 * group + 1).write(look_up(_mm512_srli_epi16::<8>(bytes)));
                    row(2 * group + 9).write(look_up(_mm512_srli_epi16::<12>(bytes)));
                }
                8 => {
                    for half in 0..2 {
                        let bytes = _mm512_loadu_si512(quants.add((group + 4 * half) * 64).cast());
                        row(2 * group + 8 * half).write(bytes_below_128(bytes));
                        row(2 * group + 8 * half + 1).write(bytes_below_128(_mm512_srli_epi16::<8>(bytes)));
                    }
                }
                _ => {
                    for half in 0..2 {
                        let nibbles = if half == 0 { Avx512::low_nibbles(bytes) } else { Avx512::high_nibbles(bytes) };
                        let look_up = |word| {
                            if BITS == 5 {
                                _mm512_permutexvar_epi16(word, first_values)
                            } else {
                                _mm512_permutex2var_epi16(first_values, word, last_values)
                            }
                        };
                        let whole = if BITS == 5 {
                            Avx512::add_fifth_bits(nibbles, quants.add(256 + (group + 4 * half) * 8))
                        } else {
                            let upper = _mm512_loadu_si512(quants.add(256 + half * 64).cast());
                            Avx512::add_upper_bits(nibbles, upper, group)
                        };
                        row(2 * group + 8 * half).write(look_up(whole));
                        row(2 * group + 8 * half + 1).write(look_up(_mm512_srli_epi16::<8>(whole)));
                    }
                }
            }
        }
    }
}

/// The lower byte of each word minus 128, as bfloat16.
#[inline(always)]
unsafe fn bytes_below_128(words: __m512i) -> __m512i {
    /// Upper halves of sixteen dwords and of sixteen more, taken in turns.
    const UPPER: [u16; 32] = {
        let mut from = [0; 32];
        let mut i = 0;
        while i < 32 {
            from[i] = (i / 2 * 2 + i % 2 * 32 + 1) as u16;
            i += 1;
        }
        from
    };
    // SAFETY: the caller vouches for the features.
    unsafe {
        // The bits of 2^23 with a byte in the lowest ones are 2^23 + byte; the difference is exact and fits bfloat16.
        let (magic, byte) = (_mm512_set1_epi32(0x4b00_0000), _mm512_set1_epi32(255));
        let away = _mm512_set1_ps(8_388_608.0 + 128.0);
        let value = |dwords| {
            let bits = _mm512_or_si512(_mm512_and_si512(dwords, byte), magic);
            _mm512_castps_si512(_mm512_sub_ps(_mm512_castsi512_ps(bits), away))
        };
        let (even, odd) = (value(words), value(_mm512_srli_epi32::<16>(words)));
        _mm512_permutex2var_epi16(even, _mm512_loadu_si512(UPPER.as_ptr().cast()), odd)
    }
}
