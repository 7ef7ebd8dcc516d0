//! Reading source rows: every format becomes quants of 32 inputs and the numbers that scale them.

use super::BLOCK;
use super::format::{SUPER_BLOCK, SourceFormat};
use crate::half::{bf16_to_f32, f16_to_f32, f32_to_bf16, f32_to_f16};

/// One block of one row, as the packed format of its source holds it.
pub(super) struct SourceBlock {
    /// Quants in order of K, zero point included.
    pub quants: [u8; BLOCK],
    /// Scale (and minimum), of the block or of its super-block.
    pub halves: [u16; 2],
    /// Factors of the block, for K formats.
    pub factors: [u8; 2],
}

/// A weight is infinite or NaN.
pub(super) struct NotFinite;

/// Reads one source block (32 values, or 256 for K formats) as blocks of 32, in order.
pub(super) fn read(
    format: SourceFormat,
    bytes: &[u8],
    mut put: impl FnMut(usize, SourceBlock),
) -> Result<(), NotFinite> {
    let half = |at: usize| u16::from_le_bytes([bytes[at], bytes[at + 1]]);
    match format {
        SourceFormat::Q4_0 | SourceFormat::Q5_0 | SourceFormat::Q8_0 => {
            let quants = plain_quants(format, &bytes[2..]);
            put(0, SourceBlock { quants, halves: finite([half(0), 0])?, factors: [0; 2] });
        }
        SourceFormat::Q4_1 | SourceFormat::Q5_1 => {
            let quants = plain_quants(format, &bytes[4..]);
            put(0, SourceBlock { quants, halves: finite([half(0), half(2)])?, factors: [0; 2] });
        }
        SourceFormat::Q4K | SourceFormat::Q5K => {
            // The file subtracts its minima; the packed form adds them.
            let halves = finite([half(0), half(2) ^ 0x8000])?;
            for block in 0..SUPER_BLOCK / BLOCK {
                let factors = six_bit_factors(&bytes[4..16], block);
                put(block, SourceBlock { quants: super_quants(format, &bytes[16..], block), halves, factors });
            }
        }
        SourceFormat::Q6K => {
            let halves = finite([half(208), 0])?;
            for block in 0..SUPER_BLOCK / BLOCK {
                let factors = [bytes[192 + 2 * block], bytes[193 + 2 * block]];
                put(block, SourceBlock { quants: six_bit_quants(bytes, block), halves, factors });
            }
        }
        SourceFormat::F32 | SourceFormat::F16 | SourceFormat::Bf16 => put(0, rounded(format, bytes)?),
    }
    Ok(())
}

/// Reads one source block as blocks of 32 weights in bfloat16, in order. A weight is rounded once to f32, where it has a minimum, and once
/// to bfloat16, to nearest even; one that is a bfloat16 stays as it is.
pub(super) fn read_bf16(
    format: SourceFormat,
    bytes: &[u8],
    mut put: impl FnMut(usize, [u16; BLOCK]),
) -> Result<(), NotFinite> {
    let mut is_finite = true;
    let mut round = |block: usize, values: [f32; BLOCK]| {
        let rounded = values.map(f32_to_bf16);
        is_finite &= rounded.iter().all(|&bits| bf16_to_f32(bits).is_finite());
        put(block, rounded);
    };
    match format {
        SourceFormat::F32 | SourceFormat::F16 | SourceFormat::Bf16 => round(0, floats(format, bytes)),
        _ => read(format, bytes, |block, from| {
            let zero = f32::from(format.packed().zero());
            let (scales, minimum) = format.packed().scale(from.halves.map(f16_to_f32), from.factors);
            let value = |k: usize| scales[k / (BLOCK / 2)] * (f32::from(from.quants[k]) - zero) + minimum;
            round(block, std::array::from_fn(value));
        })?,
    }
    if is_finite { Ok(()) } else { Err(NotFinite) }
}

fn finite(halves: [u16; 2]) -> Result<[u16; 2], NotFinite> {
    if halves.iter().all(|&bits| f16_to_f32(bits).is_finite()) { Ok(halves) } else { Err(NotFinite) }
}

/// Quants of a block whose low nibbles are its first and high nibbles its second half, or of a block of bytes.
fn plain_quants(format: SourceFormat, bytes: &[u8]) -> [u8; BLOCK] {
    let mut quants = [0u8; BLOCK];
    let nibbles = match format {
        SourceFormat::Q8_0 => {
            for (quant, byte) in quants.iter_mut().zip(bytes) {
                *quant = byte ^ 0x80;
            }
            return quants;
        }
        SourceFormat::Q5_0 | SourceFormat::Q5_1 => {
            let fifths = u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
            for (i, quant) in quants.iter_mut().enumerate() {
                *quant = (fifths >> i & 1) as u8 * 16;
            }
            &bytes[4..]
        }
        _ => bytes,
    };
    let (low, high) = quants.split_at_mut(BLOCK / 2);
    for ((low, high), byte) in low.iter_mut().zip(high).zip(nibbles) {
        *low |= byte & 15;
        *high |= byte >> 4;
    }
    quants
}

/// Scale and minimum factor of one block of Q4_K or Q5_K: six bits each, the upper two of the last four blocks kept apart.
fn six_bit_factors(packed: &[u8], block: usize) -> [u8; 2] {
    if block < 4 {
        return [packed[block] & 63, packed[block + 4] & 63];
    }
    let low = packed[block + 4];
    [(low & 15) | (packed[block - 4] >> 6) << 4, (low >> 4) | (packed[block] >> 6) << 4]
}

/// Quants of one block of Q4_K or Q5_K: two blocks share 32 bytes of nibbles, all eight share 32 bytes of fifth bits.
fn super_quants(format: SourceFormat, bytes: &[u8], block: usize) -> [u8; BLOCK] {
    let (fifths, nibbles) = if format == SourceFormat::Q5K { bytes.split_at(32) } else { (&[0u8; 32][..], bytes) };
    let mut quants = [0u8; BLOCK];
    for (i, quant) in quants.iter_mut().enumerate() {
        let nibble = nibbles[block / 2 * 32 + i] >> (block % 2 * 4) & 15;
        *quant = nibble + (fifths[i] >> block & 1) * 16;
    }
    quants
}

/// Quants of one block of Q6_K: each half of the super-block has 64 bytes of nibbles and 32 bytes of upper bits for four blocks.
fn six_bit_quants(bytes: &[u8], block: usize) -> [u8; BLOCK] {
    let (half, quarter) = (block / 4, block % 4);
    let nibbles = &bytes[half * 64 + quarter % 2 * 32..];
    let upper = &bytes[128 + half * 32..];
    let mut quants = [0u8; BLOCK];
    for (i, quant) in quants.iter_mut().enumerate() {
        *quant = (nibbles[i] >> (quarter / 2 * 4) & 15) | (upper[i] >> (quarter * 2) & 3) << 4;
    }
    quants
}

/// A block of floats.
fn floats(format: SourceFormat, bytes: &[u8]) -> [f32; BLOCK] {
    let half = |at: usize| u16::from_le_bytes([bytes[at], bytes[at + 1]]);
    std::array::from_fn(|i| match format {
        SourceFormat::F16 => f16_to_f32(half(2 * i)),
        SourceFormat::Bf16 => bf16_to_f32(half(2 * i)),
        _ => f32::from_le_bytes([bytes[4 * i], bytes[4 * i + 1], bytes[4 * i + 2], bytes[4 * i + 3]]),
    })
}

/// A block of floats, rounded to eight bits.
fn rounded(format: SourceFormat, bytes: &[u8]) -> Result<SourceBlock, NotFinite> {
    let values = floats(format, bytes);
    if values.iter().any(|v| !v.is_finite()) {
        return Err(NotFinite);
    }
    let scale = f32_to_f16(values.iter().fold(0f32, |m, v| m.max(v.abs())) / 127.0);
    let inverse = match f16_to_f32(scale) {
        0.0 => 0.0,
        scale => 1.0 / scale,
    };
    let quants = values.map(|v| ((v * inverse).round_ties_even().clamp(-127.0, 127.0) as i8 as u8) ^ 0x80);
    Ok(SourceBlock { quants, halves: finite([scale, 0])?, factors: [0; 2] })
}
