//! Seeded source rows of every weight format with their values in f64, read as the format's own description says.

use penstock_kernels_cpu::SourceFormat;
use penstock_kernels_cpu::half::{f16_to_f32, f32_to_bf16, f32_to_f16};

use super::Noise;

/// Source bytes of `n` rows of `k` values, and the values.
pub fn source(format: SourceFormat, n: usize, k: usize, seed: u64) -> (Vec<u8>, Vec<f64>) {
    let mut noise = Noise(seed);
    let (mut bytes, mut values) = (Vec::new(), Vec::new());
    for _ in 0..n * k / format.block_len() {
        match format {
            SourceFormat::F32 | SourceFormat::F16 | SourceFormat::Bf16 => {
                floats(format, &mut noise, &mut bytes, &mut values);
            }
            SourceFormat::Q4K | SourceFormat::Q5K => super_block(format, &mut noise, &mut bytes, &mut values),
            SourceFormat::Q6K => sixes(&mut noise, &mut bytes, &mut values),
            _ => plain(format, &mut noise, &mut bytes, &mut values),
        }
    }
    (bytes, values)
}

/// A half near `size`, to `bytes`, and its value.
fn half(noise: &mut Noise, size: f32, bytes: &mut Vec<u8>) -> f64 {
    let bits = f32_to_f16(noise.value() * size);
    bytes.extend(bits.to_le_bytes());
    f64::from(f16_to_f32(bits))
}

fn random(noise: &mut Noise, len: usize, bytes: &mut Vec<u8>) -> Vec<u8> {
    let drawn: Vec<u8> = (0..len).map(|_| noise.bits() as u8).collect();
    bytes.extend(&drawn);
    drawn
}

fn plain(format: SourceFormat, noise: &mut Noise, bytes: &mut Vec<u8>, values: &mut Vec<f64>) {
    let scale = half(noise, if format == SourceFormat::Q8_0 { 0.01 } else { 0.1 }, bytes);
    if format == SourceFormat::Q8_0 {
        values.extend(random(noise, 32, bytes).iter().map(|&q| scale * f64::from(q as i8)));
        return;
    }
    let has_minimum = matches!(format, SourceFormat::Q4_1 | SourceFormat::Q5_1);
    let minimum = if has_minimum { half(noise, 0.5, bytes) } else { 0.0 };
    let five = matches!(format, SourceFormat::Q5_0 | SourceFormat::Q5_1);
    let fifths = if five { random(noise, 4, bytes) } else { vec![0; 4] };
    let zero = match (has_minimum, five) {
        (true, _) => 0.0,
        (false, true) => 16.0,
        (false, false) => 8.0,
    };
    let nibbles = random(noise, 16, bytes);
    for j in 0..32 {
        let q = (nibbles[j % 16] >> (j / 16 * 4) & 15) + (fifths[j / 8] >> (j % 8) & 1) * 16;
        values.push(scale * (f64::from(q) - zero) + minimum);
    }
}

/// Factors are drawn first and packed, so that the reader under test unpacks what another hand packed.
fn super_block(format: SourceFormat, noise: &mut Noise, bytes: &mut Vec<u8>, values: &mut Vec<f64>) {
    let (d, dmin) = (half(noise, 0.002, bytes), half(noise, 0.01, bytes));
    let factors: Vec<(u8, u8)> = (0..8).map(|_| (noise.below(64) as u8, noise.below(64) as u8)).collect();
    let mut packed = [0u8; 12];
    for b in 0..4 {
        let (early, late) = (factors[b], factors[b + 4]);
        packed[b] = early.0 + (late.0 / 16) * 64;
        packed[b + 4] = early.1 + (late.1 / 16) * 64;
        packed[b + 8] = late.0 % 16 + late.1 % 16 * 16;
    }
    bytes.extend(packed);
    let fifths = if format == SourceFormat::Q5K { random(noise, 32, bytes) } else { vec![0; 32] };
    let nibbles = random(noise, 128, bytes);
    for (b, (s, t)) in factors.into_iter().enumerate() {
        for j in 0..32 {
            let byte = nibbles[b / 2 * 32 + j];
            let q = if b % 2 == 0 { byte % 16 } else { byte / 16 } + (fifths[j] >> b) % 2 * 16;
            values.push(d * f64::from(s) * f64::from(q) - dmin * f64::from(t));
        }
    }
}

fn sixes(noise: &mut Noise, bytes: &mut Vec<u8>, values: &mut Vec<f64>) {
    let (nibbles, upper) = (random(noise, 128, bytes), random(noise, 64, bytes));
    let factors = random(noise, 16, bytes);
    let d = half(noise, 0.0002, bytes);
    for j in 0..256 {
        // Each half of the block has 64 bytes of nibbles, in order of value with the low ones first, and four upper pairs a byte.
        let (half, at) = (j / 128, j % 128);
        let byte = nibbles[half * 64 + at % 64];
        let low = if at < 64 { byte % 16 } else { byte / 16 };
        let pair = upper[half * 32 + at % 32] >> (at / 32 * 2) & 3;
        values.push(d * f64::from(factors[j / 16] as i8) * (f64::from(low + pair * 16) - 32.0));
    }
}

fn floats(format: SourceFormat, noise: &mut Noise, bytes: &mut Vec<u8>, values: &mut Vec<f64>) {
    for _ in 0..32 {
        let value = noise.value();
        match format {
            SourceFormat::F32 => bytes.extend(value.to_le_bytes()),
            SourceFormat::F16 => bytes.extend(f32_to_f16(value).to_le_bytes()),
            _ => bytes.extend(f32_to_bf16(value).to_le_bytes()),
        }
        values.push(match format {
            SourceFormat::F16 => f64::from(f16_to_f32(f32_to_f16(value))),
            SourceFormat::Bf16 => f64::from(f32::from_bits(u32::from(f32_to_bf16(value)) << 16)),
            _ => f64::from(value),
        });
    }
}
