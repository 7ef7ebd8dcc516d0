//! What the tests of single units share: rows and a matrix of seeded numbers, and groups over them.

use super::{Group, LINE_BYTES};
use crate::activation::FloatRows;
use crate::bf16_unit::Bf16Unit;
use crate::gemm::Store;
use crate::half::{bf16_to_f32, f32_to_bf16};
use crate::lanes::LANES;
use crate::memory::MemoryBudget;
use crate::pool::{SharedMut, ThreadPool};
use crate::tier::Tier;
use crate::weights::{PackedFormat, PackedMatrix, PackedShape, SourceFormat};

/// `rows` rows by `n` outputs over `k` inputs; both sides hold bfloat16 already.
pub(super) struct Trial {
    pub(super) rows: usize,
    pub(super) n: usize,
    pub(super) k: usize,
    pub(super) x: Vec<f32>,
    pub(super) weights: Vec<f32>,
    matrix: PackedMatrix,
    held: FloatRows,
}

/// What stands in an output before the product is added to it.
pub(super) const BEFORE: f32 = 0.5;

impl Trial {
    pub(super) fn new(unit: Bf16Unit, rows: usize, n: usize, k: usize) -> Self {
        let mut state = 0x5eed_u64;
        let mut next = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            bf16_to_f32(f32_to_bf16((state >> 40) as f32 / 8_388_608.0 - 1.0))
        };
        let weights: Vec<f32> = (0..n * k).map(|_| next()).collect();
        let x: Vec<f32> = (0..rows * k).map(|_| next()).collect();
        let bytes: Vec<u8> = weights.iter().flat_map(|w| f32_to_bf16(*w).to_le_bytes()).collect();
        let shape = PackedShape::new(PackedFormat::Bf16, n, k).expect("legal");
        let matrix =
            PackedMatrix::pack_as(&MemoryBudget::new(1 << 24), &bytes, SourceFormat::Bf16, shape).expect("packs");
        let mut held = FloatRows::default();
        let source = SharedMut(x.as_ptr().cast_mut());
        // SAFETY: all rows are inside `x`.
        let row_of = |row: usize| unsafe { source.get().add(row * k) }.cast_const();
        let pool = ThreadPool::new(1).expect("starts");
        held.fill(&mut pool.enter(), unit, Tier::Scalar, rows, k, row_of).expect("no panic");
        Self { rows, n, k, x, weights, matrix, held }
    }

    /// All outputs of the rows, `at_once` tiles in a group.
    pub(super) fn outputs(&self, at_once: usize, store: Store, mut multiply: impl FnMut(&Group<'_>)) -> Vec<f32> {
        let mut out = vec![BEFORE; self.rows * self.n];
        let tiles = self.n.div_ceil(LANES);
        for tile in (0..tiles).step_by(at_once) {
            multiply(&Group {
                weights: self.matrix.tile_ptr(tile),
                tile_bytes: self.k / 2 * LINE_BYTES,
                tiles: (tiles - tile).min(at_once),
                columns: self.n - tile * LANES,
                rows: &self.held,
                pass: 0..self.rows,
                to: out.as_mut_ptr().wrapping_add(tile * LANES),
                stride: self.n,
                store,
            });
        }
        out
    }
}
