//! Storing f32 values in each type, for test models: plain roundings, never a conversion tool.

use half::{bf16, f16};

use crate::dtype::DType;

/// Stores values: round to nearest, block scales as the reference quantisers choose them (largest magnitude for symmetric types, minimum and
/// range for those with a minimum; K types take the plain choice, without a search). `values.len()` must be whole blocks; a rest is left out.
pub fn quantise(dtype: DType, values: &[f32]) -> Vec<u8> {
    let mut out = Vec::new();
    for block in values.chunks_exact(dtype.block_len()) {
        match dtype {
            DType::F32 => out.extend(block[0].to_le_bytes()),
            DType::F16 => out.extend(f16::from_f32(block[0]).to_le_bytes()),
            DType::Bf16 => out.extend(bf16::from_f32(block[0]).to_le_bytes()),
            DType::Q8_0 => {
                // Values are divided by the scale before it is rounded, as ggml's own quantiser does: tests/oracle compares the bytes.
                let d = largest(block).abs() / 127.0;
                let inverse = if d == 0.0 { 0.0 } else { 1.0 / d };
                out.extend(f16::from_f32(d).to_le_bytes());
                out.extend(block.iter().map(|v| ((v * inverse).round() as i8).cast_unsigned()));
            }
            DType::Q4_0 => {
                let d = f16::from_f32(largest(block) / -8.0);
                out.extend(d.to_le_bytes());
                pack_nibbles(&mut out, &codes(block, d.to_f32(), 0.0, 8, 15));
            }
            DType::Q5_0 => {
                let d = f16::from_f32(largest(block) / -16.0);
                out.extend(d.to_le_bytes());
                pack_fives(&mut out, &codes(block, d.to_f32(), 0.0, 16, 31));
            }
            DType::Q4_1 | DType::Q5_1 => {
                let most = if dtype == DType::Q4_1 { 15 } else { 31 };
                let (low, high) = range(block);
                let (d, m) = (f16::from_f32((high - low) / f32::from(most)), f16::from_f32(low));
                out.extend(d.to_le_bytes());
                out.extend(m.to_le_bytes());
                let codes = codes(block, d.to_f32(), m.to_f32(), 0, most);
                if dtype == DType::Q4_1 { pack_nibbles(&mut out, &codes) } else { pack_fives(&mut out, &codes) }
            }
            DType::Q4K | DType::Q5K => super_block(&mut out, dtype, block),
            DType::Q6K => sixes(&mut out, block),
        }
    }
    out
}

/// The value of largest magnitude.
fn largest(block: &[f32]) -> f32 {
    block.iter().fold(0.0f32, |m: f32, v| if v.abs() > m.abs() { *v } else { m })
}

fn range(block: &[f32]) -> (f32, f32) {
    block.iter().fold((f32::INFINITY, f32::NEG_INFINITY), |(low, high), &v| (low.min(v), high.max(v)))
}

fn scaled(value: f32, d: f32) -> f32 {
    if d == 0.0 { 0.0 } else { (value / d).round() }
}

fn codes(block: &[f32], d: f32, minimum: f32, zero: u8, most: u8) -> Vec<u8> {
    block.iter().map(|&v| (scaled(v - minimum, d) + f32::from(zero)).clamp(0.0, f32::from(most)) as u8).collect()
}

fn pack_nibbles(out: &mut Vec<u8>, codes: &[u8]) {
    let (low, high) = codes.split_at(codes.len() / 2);
    out.extend(low.iter().zip(high).map(|(l, h)| (l & 15) | (h & 15) << 4));
}

fn pack_fives(out: &mut Vec<u8>, codes: &[u8]) {
    let fifths = codes.iter().enumerate().fold(0u32, |bits, (j, code)| bits | u32::from(code >> 4) << j);
    out.extend(fifths.to_le_bytes());
    pack_nibbles(out, codes);
}

/// Q4_K and Q5_K.
fn super_block(out: &mut Vec<u8>, dtype: DType, block: &[f32]) {
    let most: u8 = if dtype == DType::Q4K { 15 } else { 31 };
    // A minimum can only lower: blocks above zero have none.
    let ranges: Vec<(f32, f32)> =
        block.chunks(32).map(range).map(|(low, high)| (low.min(0.0), high.max(0.0))).collect();
    let scale = |(low, high): &(f32, f32)| (high - low) / f32::from(most);
    let d = f16::from_f32(ranges.iter().map(scale).fold(0.0, f32::max) / 63.0);
    let dmin = f16::from_f32(ranges.iter().map(|(low, _)| -low).fold(0.0, f32::max) / 63.0);
    let factor = |value: f32, unit: f16| scaled(value, unit.to_f32()).clamp(0.0, 63.0) as u8;
    let factors: Vec<(u8, u8)> = ranges.iter().map(|r| (factor(scale(r), d), factor(-r.0, dmin))).collect();
    let mut packed = [0u8; 12];
    for (b, &(s, t)) in factors.iter().enumerate() {
        if b < 4 {
            (packed[b], packed[b + 4]) = (packed[b] | s, packed[b + 4] | t);
        } else {
            packed[b + 4] = (s & 15) | (t & 15) << 4;
            packed[b - 4] |= (s >> 4) << 6;
            packed[b] |= (t >> 4) << 6;
        }
    }
    out.extend(d.to_le_bytes());
    out.extend(dmin.to_le_bytes());
    out.extend(packed);
    let codes: Vec<Vec<u8>> = block
        .chunks(32)
        .zip(&factors)
        .map(|(v, &(s, t))| codes(v, d.to_f32() * f32::from(s), -(dmin.to_f32() * f32::from(t)), 0, most))
        .collect();
    if dtype == DType::Q5K {
        out.extend((0..32).map(|j| codes.iter().enumerate().fold(0u8, |bits, (b, codes)| bits | (codes[j] >> 4) << b)));
    }
    for pair in codes.chunks(2) {
        pack_nibbles(out, &pair.concat());
    }
}

fn sixes(out: &mut Vec<u8>, block: &[f32]) {
    let scales: Vec<f32> = block.chunks(16).map(|part| largest(part) / -32.0).collect();
    let d = f16::from_f32(largest(&scales).abs() / 127.0);
    let factors: Vec<i8> = scales.iter().map(|&s| scaled(s, d.to_f32()).clamp(-127.0, 127.0) as i8).collect();
    let codes: Vec<u8> = block
        .chunks(16)
        .zip(&factors)
        .flat_map(|(part, &factor)| codes(part, d.to_f32() * f32::from(factor), 0.0, 32, 63))
        .collect();
    for half in codes.chunks(128) {
        out.extend((0..64).map(|j| (half[j] & 15) | (half[j + 64] & 15) << 4));
    }
    for half in codes.chunks(128) {
        out.extend(
            (0..32).map(|j| (0..4).fold(0u8, |bits, quarter| bits | (half[quarter * 32 + j] >> 4) << (2 * quarter))),
        );
    }
    out.extend(factors.iter().map(|factor| factor.cast_unsigned()));
    out.extend(d.to_le_bytes());
}
