//! How weights are stored, and the plain scalar reading of each type that every faster kernel is compared with.

use std::fmt;

use half::{bf16, f16};

use crate::error::ModelError;

/// A storage type that kernels read. Multi-byte fields are little endian; blocks never cross a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum DType {
    /// IEEE single.
    F32,
    /// IEEE half.
    F16,
    /// Upper half of an IEEE single.
    Bf16,
    /// Blocks of 32: f16 scale `d`, then 32 x i8 `q`; value = d·q.
    Q8_0,
    /// Blocks of 32: f16 scale `d`, then 16 bytes; byte j holds value j in its low and value j + 16 in its high nibble; value = d·(q − 8).
    Q4_0,
    /// Blocks of 32: f16 scale `d`, f16 minimum `m`, then 16 bytes as in [`DType::Q4_0`]; value = d·q + m.
    Q4_1,
    /// Blocks of 32: f16 scale `d`, u32 whose bit j is the fifth bit of value j, then 16 bytes as in [`DType::Q4_0`]; value = d·(q − 16).
    Q5_0,
    /// Blocks of 32: f16 scale `d`, f16 minimum `m`, then as [`DType::Q5_0`]; value = d·q + m.
    Q5_1,
    /// Blocks of 256: f16 `d`, f16 `dmin`, 12 bytes with eight pairs of six-bit factors `s`, `t`, then 128 bytes: 32 for each two blocks of
    /// 32, the first in the low nibbles; value = (d·s)·q − (dmin·t).
    Q4K,
    /// Blocks of 256: as [`DType::Q4K`], with 32 bytes before the nibbles: bit b of byte j is the fifth bit of value j of block b.
    Q5K,
    /// Blocks of 256: 128 bytes of nibbles, 64 bytes of upper bits, 16 x i8 factors `s` for 16 values each, f16 `d`; each half of the block
    /// has its nibbles in two runs of 32 bytes, for blocks 0 and 1 low, 2 and 3 high; value = (d·s)·(q − 32).
    Q6K,
}

impl DType {
    /// Every type, for tables and tests.
    pub const ALL: [DType; 11] = [
        DType::F32,
        DType::F16,
        DType::Bf16,
        DType::Q8_0,
        DType::Q4_0,
        DType::Q4_1,
        DType::Q5_0,
        DType::Q5_1,
        DType::Q4K,
        DType::Q5K,
        DType::Q6K,
    ];

    /// Values in one block.
    pub const fn block_len(self) -> usize {
        match self {
            DType::F32 | DType::F16 | DType::Bf16 => 1,
            DType::Q8_0 | DType::Q4_0 | DType::Q4_1 | DType::Q5_0 | DType::Q5_1 => 32,
            DType::Q4K | DType::Q5K | DType::Q6K => 256,
        }
    }

    /// Bytes of one block.
    pub const fn block_bytes(self) -> usize {
        match self {
            DType::F32 => 4,
            DType::F16 | DType::Bf16 => 2,
            DType::Q8_0 => 34,
            DType::Q4_0 => 18,
            DType::Q4_1 => 20,
            DType::Q5_0 => 22,
            DType::Q5_1 => 24,
            DType::Q4K => 144,
            DType::Q5K => 176,
            DType::Q6K => 210,
        }
    }

    /// Bytes of a row of `cols` values; `None` when `cols` is not a whole number of blocks or the product overflows.
    pub const fn row_bytes(self, cols: usize) -> Option<usize> {
        if !cols.is_multiple_of(self.block_len()) {
            return None;
        }
        (cols / self.block_len()).checked_mul(self.block_bytes())
    }

    /// The name that GGUF uses.
    pub const fn name(self) -> &'static str {
        match self {
            DType::F32 => "F32",
            DType::F16 => "F16",
            DType::Bf16 => "BF16",
            DType::Q8_0 => "Q8_0",
            DType::Q4_0 => "Q4_0",
            DType::Q4_1 => "Q4_1",
            DType::Q5_0 => "Q5_0",
            DType::Q5_1 => "Q5_1",
            DType::Q4K => "Q4_K",
            DType::Q5K => "Q5_K",
            DType::Q6K => "Q6_K",
        }
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Reads one stored row into `out`, one multiplication (and with a minimum one addition) a value in f32: the oracle of every kernel.
///
/// Fails when `bytes` is not exactly the row of `out.len()` values.
pub fn dequantise_row(dtype: DType, bytes: &[u8], out: &mut [f32]) -> Result<(), ModelError> {
    if dtype.row_bytes(out.len()) != Some(bytes.len()) {
        return Err(ModelError::RowLength { dtype, bytes: bytes.len(), values: out.len() });
    }
    let blocks = bytes.chunks_exact(dtype.block_bytes()).zip(out.chunks_exact_mut(dtype.block_len()));
    for (block, values) in blocks {
        match dtype {
            DType::F32 => values[0] = f32::from_le_bytes([block[0], block[1], block[2], block[3]]),
            DType::F16 => values[0] = half_at(block, 0),
            DType::Bf16 => values[0] = bf16::from_le_bytes([block[0], block[1]]).to_f32(),
            DType::Q8_0 => {
                let d = half_at(block, 0);
                for (value, &q) in values.iter_mut().zip(&block[2..]) {
                    *value = d * f32::from(q.cast_signed());
                }
            }
            DType::Q4_0 => {
                let d = half_at(block, 0);
                nibbles(&block[2..], values, |q| d * (f32::from(q) - 8.0));
            }
            DType::Q4_1 => {
                let (d, m) = (half_at(block, 0), half_at(block, 2));
                nibbles(&block[4..], values, |q| d * f32::from(q) + m);
            }
            DType::Q5_0 => {
                let d = half_at(block, 0);
                fives(&block[2..], values, |q| d * (f32::from(q) - 16.0));
            }
            DType::Q5_1 => {
                let (d, m) = (half_at(block, 0), half_at(block, 2));
                fives(&block[4..], values, |q| d * f32::from(q) + m);
            }
            DType::Q4K => super_block(block, &[0; 32], &block[16..], values),
            DType::Q5K => super_block(block, &block[16..48], &block[48..], values),
            DType::Q6K => sixes(block, values),
        }
    }
    Ok(())
}

fn half_at(block: &[u8], at: usize) -> f32 {
    f16::from_le_bytes([block[at], block[at + 1]]).to_f32()
}

fn nibbles(bytes: &[u8], values: &mut [f32], value_of: impl Fn(u8) -> f32) {
    let (low, high) = values.split_at_mut(bytes.len());
    for ((&byte, low), high) in bytes.iter().zip(low).zip(high) {
        *low = value_of(byte & 15);
        *high = value_of(byte >> 4);
    }
}

fn fives(bytes: &[u8], values: &mut [f32], value_of: impl Fn(u8) -> f32) {
    let fifths = u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
    for (j, value) in values.iter_mut().enumerate() {
        let nibble = bytes[4 + j % 16] >> (j / 16 * 4) & 15;
        *value = value_of(nibble + (fifths >> j & 1) as u8 * 16);
    }
}

/// Q4_K and Q5_K, the former with no fifth bit set.
fn super_block(block: &[u8], fifths: &[u8], nibbles: &[u8], values: &mut [f32]) {
    let (d, dmin, packed) = (half_at(block, 0), half_at(block, 2), &block[4..16]);
    for (b, values) in values.chunks_exact_mut(32).enumerate() {
        // Factors of blocks 0 to 3 are whole; those of 4 to 7 have four bits in the last bytes and two above the first ones'.
        let (s, t) = if b < 4 {
            (packed[b] & 63, packed[b + 4] & 63)
        } else {
            let low = packed[b + 4];
            ((low & 15) + (packed[b - 4] >> 6) * 16, (low >> 4) + (packed[b] >> 6) * 16)
        };
        let (scale, minimum) = (d * f32::from(s), dmin * f32::from(t));
        for (j, value) in values.iter_mut().enumerate() {
            let q = (nibbles[b / 2 * 32 + j] >> (b % 2 * 4) & 15) + (fifths[j] >> b & 1) * 16;
            *value = scale * f32::from(q) - minimum;
        }
    }
}

fn sixes(block: &[u8], values: &mut [f32]) {
    let d = half_at(block, 208);
    for (j, value) in values.iter_mut().enumerate() {
        let (half, quarter, at) = (j / 128, j % 128 / 32, j % 32);
        let nibble = block[half * 64 + quarter % 2 * 32 + at] >> (quarter / 2 * 4) & 15;
        let upper = block[128 + half * 32 + at] >> (quarter * 2) & 3;
        let factor = f32::from(block[192 + j / 16].cast_signed());
        *value = d * factor * (f32::from(nibble + upper * 16) - 32.0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(dtype: DType, bytes: &[u8], expected: &[f32]) {
        let mut out = vec![f32::NAN; expected.len()];
        dequantise_row(dtype, bytes, &mut out).unwrap();
        assert_eq!(out, expected, "{dtype}");
    }

    /// Half 0x3800 is 0.5, 0xC000 is -2, 0x4000 is 2 (IEEE 754 tables).
    #[test]
    fn worked_blocks() {
        check(DType::F32, &[0, 0, 0xc0, 0x3f, 0, 0, 0, 0x80], &[1.5, -0.0]);
        check(DType::F16, &[0x00, 0x38, 0x00, 0xc0], &[0.5, -2.0]);
        check(DType::Bf16, &[0xc0, 0x3f, 0x00, 0xc0], &[1.5, -2.0]);

        let mut q8 = vec![0x00, 0x38];
        q8.extend((0..32).map(|i| (i as i8 - 16).cast_unsigned()));
        let expected: Vec<f32> = (0..32).map(|i| (i as f32 - 16.0) / 2.0).collect();
        check(DType::Q8_0, &q8, &expected);

        // Byte j = low nibble j, high nibble 15 - j.
        let packed: Vec<u8> = (0..16u8).map(|j| j | ((15 - j) << 4)).collect();
        let mut q4 = vec![0x00, 0x38];
        q4.extend(&packed);
        let expected: Vec<f32> =
            (0..16).map(|j| (j as f32 - 8.0) / 2.0).chain((0..16).map(|j| (7.0 - j as f32) / 2.0)).collect();
        check(DType::Q4_0, &q4, &expected);

        let mut q41 = vec![0x00, 0x38, 0x00, 0xc0];
        q41.extend(&packed);
        let expected: Vec<f32> =
            (0..16).map(|j| j as f32 / 2.0 - 2.0).chain((0..16).map(|j| (15.0 - j as f32) / 2.0 - 2.0)).collect();
        check(DType::Q4_1, &q41, &expected);
    }

    /// Blocks of seeded bytes and what the gguf package reads in them, bit by bit: tests/oracle/blocks.py.
    #[test]
    fn blocks_read_as_another_implementation_reads_them() {
        let hex = |text: &str| -> Vec<u8> {
            (0..text.len()).step_by(2).map(|at| u8::from_str_radix(&text[at..at + 2], 16).unwrap()).collect()
        };
        let mut seen = Vec::new();
        for line in include_str!("../../../tests/oracle/blocks.txt").lines().filter(|line| !line.starts_with('#')) {
            let mut fields = line.split(' ');
            let (name, bytes, values) = (fields.next().unwrap(), fields.next().unwrap(), fields.next().unwrap());
            let dtype = DType::ALL.into_iter().find(|dtype| dtype.name() == name).unwrap();
            let wanted: Vec<u32> =
                hex(values).chunks_exact(4).map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect();
            let mut out = vec![f32::NAN; wanted.len()];
            dequantise_row(dtype, &hex(bytes), &mut out).unwrap();
            let got: Vec<u32> = out.iter().map(|value| value.to_bits()).collect();
            assert_eq!(got, wanted, "{name}");
            seen.push(dtype);
        }
        seen.sort_unstable();
        seen.dedup();
        let quantised: Vec<DType> = DType::ALL.into_iter().filter(|dtype| dtype.block_len() > 1).collect();
        assert_eq!(seen, quantised);
    }

    #[test]
    fn wrong_lengths_are_refused() {
        for dtype in DType::ALL {
            let mut out = vec![0.0; dtype.block_len().max(32)];
            let right = dtype.row_bytes(out.len()).unwrap();
            assert!(dequantise_row(dtype, &vec![0; right], &mut out).is_ok());
            assert!(dequantise_row(dtype, &vec![0; right - 1], &mut out).is_err());
            assert!(dequantise_row(dtype, &vec![0; right + 1], &mut out).is_err());
        }
        assert_eq!(DType::Q4_1.row_bytes(33), None);
        assert_eq!(DType::F32.row_bytes(usize::MAX), None);
    }
}
