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
}

impl DType {
    /// Every type, for tables and tests.
    pub const ALL: [DType; 6] = [DType::F32, DType::F16, DType::Bf16, DType::Q8_0, DType::Q4_0, DType::Q4_1];

    /// Values in one block.
    pub const fn block_len(self) -> usize {
        match self {
            DType::F32 | DType::F16 | DType::Bf16 => 1,
            DType::Q8_0 | DType::Q4_0 | DType::Q4_1 => 32,
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
        }
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Reads one stored row into `out`, one multiplication (and for Q4_1 one addition) a value in f32: the oracle of every kernel.
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

    #[test]
    fn wrong_lengths_are_refused() {
        let mut out = [0.0; 32];
        for dtype in DType::ALL {
            let right = dtype.row_bytes(32).unwrap();
            assert!(dequantise_row(dtype, &vec![0; right], &mut out).is_ok());
            assert!(dequantise_row(dtype, &vec![0; right - 1], &mut out).is_err());
            assert!(dequantise_row(dtype, &vec![0; right + 1], &mut out).is_err());
        }
        assert_eq!(DType::Q4_1.row_bytes(33), None);
        assert_eq!(DType::F32.row_bytes(usize::MAX), None);
    }
}
