//! Weights and activations in bfloat16: rounding, the product's distance from the exact sum, and bits that depend on the row alone.

mod support;

use penstock_kernels_cpu::norm::rms_norm;
use penstock_kernels_cpu::pointwise::{Gate, gated};
use penstock_kernels_cpu::{
    Activations, Bf16Unit, MemoryBudget, PackError, PackedFormat, PackedMatrix, PackedShape, Part, Precision,
    SourceFormat, Store, ThreadPool, Tier, multiply,
};
use support::weights::source;
use support::{Noise, bits, fast_tiers, tiers};

/// Half the distance between 1 and the next f32.
const U: f64 = 1.0 / 16_777_216.0;

fn pack(bytes: &[u8], format: SourceFormat, n: usize, k: usize) -> PackedMatrix {
    let shape = PackedShape::new(format.packed_for(Precision::Bf16), n, k).expect("legal");
    PackedMatrix::pack_as(&MemoryBudget::new(64 << 20), bytes, format, shape).expect("packs")
}

fn rounded(pool: &ThreadPool, tier: Tier, x: &[f32], k: usize) -> Activations {
    let mut activations = Activations::new(Precision::Bf16);
    activations.quantise(&mut pool.enter(), tier, &mut x.to_vec(), k).expect("rounds");
    activations
}

fn times(pool: &ThreadPool, tier: Tier, activations: &Activations, matrix: &PackedMatrix) -> Vec<f32> {
    let mut out = vec![f32::NAN; activations.rows() * matrix.n()];
    let parts = [Part { matrix, column: 0 }];
    multiply(&mut pool.enter(), tier, activations, &parts, Store::Replace, &mut out, matrix.n()).expect("multiplies");
    out
}

fn product(pool: &ThreadPool, tier: Tier, matrix: &PackedMatrix, x: &[f32]) -> Vec<f32> {
    times(pool, tier, &rounded(pool, tier, x, matrix.k()), matrix)
}

/// The nearest bfloat16, the even one of two: found among the two around the value, in f64.
fn nearest(value: f64) -> f64 {
    let low = f64::from(f32::from_bits((value as f32).to_bits() & 0xffff_0000));
    // Away from zero, the neighbour of what was cut.
    let high = f64::from(f32::from_bits(((low as f32).to_bits()) + 0x1_0000));
    let (down, up) = ((value - low).abs(), (high - value).abs());
    let is_even = (low as f32).to_bits() & 0x1_0000 == 0;
    if down < up || (down == up && is_even) { low } else { high }
}

/// Weights as they are packed, read back.
fn read_back(matrix: &PackedMatrix) -> Vec<f64> {
    let mut row = vec![0f32; matrix.k()];
    let mut all = Vec::new();
    for index in 0..matrix.n() {
        matrix.dequantise_row(index, &mut row);
        all.extend(row.iter().map(|&w| f64::from(w)));
    }
    all
}

#[test]
fn packed_weights_are_the_nearest_bfloat16_of_their_source() {
    for format in SourceFormat::ALL {
        let (n, k) = (37, 3 * format.block_len());
        let (bytes, values) = source(format, n, k, 1);
        let got = read_back(&pack(&bytes, format, n, k));
        let mut doubly = 0;
        for (&got, &value) in got.iter().zip(&values) {
            if format == SourceFormat::Bf16 {
                assert_eq!(got, value, "a bfloat16 stays as it is");
            }
            // A weight with a minimum is rounded to f32 first, which can tip one that lies almost in the middle.
            doubly += usize::from(got != nearest(value));
            assert!((got - value).abs() <= value.abs() / 256.0, "{format:?}: {got} for {value}");
        }
        assert!(doubly * 10_000 <= values.len(), "{format:?}: {doubly} of {}", values.len());
    }
}

/// Every output within what [`penstock_kernels_cpu::gemm`] derives: k roundings at most between a product and the sum.
#[test]
fn every_output_is_within_its_bound_of_the_exact_sum() {
    let pool = ThreadPool::new(1).expect("starts");
    for format in SourceFormat::ALL {
        for (n, rows) in [(40, 1), (19, 5), (33, 37)] {
            let k = 1536;
            let (bytes, _) = source(format, n, k, 2);
            let matrix = pack(&bytes, format, n, k);
            let weights = read_back(&matrix);
            let x = Noise(3).values(rows * k);
            let exact: Vec<f64> = x.iter().map(|&x| nearest(f64::from(x))).collect();
            for tier in tiers() {
                let got = product(&pool, tier, &matrix, &x);
                let (mut squares, mut power) = (0.0, 0.0);
                for (index, got) in got.into_iter().enumerate() {
                    let (row, column) = (index / n, index % n);
                    let products = weights[column * k..][..k].iter().zip(&exact[row * k..][..k]).map(|(w, x)| w * x);
                    let (sum, size) = products.fold((0.0, 0.0), |(sum, size), p: f64| (sum + p, size + p.abs()));
                    let bound = k as f64 * U / (1.0 - k as f64 * U) * size;
                    let error = (f64::from(got) - sum).abs();
                    assert!(error <= bound, "{format:?} {tier} row {row} column {column}: {error:e} over {bound:e}");
                    squares += error * error;
                    power += sum * sum;
                }
                // Roundings do not all point one way: by their mean square the bound is far off.
                assert!(squares / power < 1e-11, "{format:?} {tier}: nmse {:e}", squares / power);
            }
        }
    }
}

#[test]
fn tiers_of_one_unit_give_equal_bits() {
    let pool = ThreadPool::new(2).expect("starts");
    for format in [SourceFormat::Bf16, SourceFormat::Q4_1, SourceFormat::Q6K] {
        let (n, k, rows) = (3 * 16 + 5, 256, 29);
        let (bytes, _) = source(format, n, k, 4);
        let matrix = pack(&bytes, format, n, k);
        let x = Noise(5).values(rows * k);
        let oracle = bits(&product(&pool, Tier::Scalar, &matrix, &x));
        assert_eq!(Bf16Unit::of(Tier::Scalar), Bf16Unit::Fma);
        for tier in fast_tiers() {
            let unit = Bf16Unit::of(tier);
            let got = bits(&product(&pool, tier, &matrix, &x));
            // Other units add in another order: equal bits over 1,500 sums would mean that they were not used.
            assert_eq!(got == oracle, unit == Bf16Unit::Fma, "{format:?} {tier} ({unit})");
        }
    }
    for unit in [Bf16Unit::Avx512Bf16, Bf16Unit::Amx] {
        if !tiers().into_iter().any(|tier| Bf16Unit::of(tier) == unit) {
            eprintln!("SKIPPED bfloat16 products by {unit}: this CPU lacks it");
        }
    }
}

/// In batches of 1 to 200 rows, wherever the row stands in them, the bits are those of the row alone.
#[test]
fn a_row_has_the_same_bits_alone_and_anywhere_in_a_batch() {
    let pool = ThreadPool::new(1).expect("starts");
    let (n, k, rows) = (37, 96, 200);
    let (bytes, _) = source(SourceFormat::Bf16, n, k, 6);
    let matrix = pack(&bytes, SourceFormat::Bf16, n, k);
    let x = Noise(7).values(rows * k);
    for tier in tiers() {
        let alone: Vec<u32> = x.chunks(k).flat_map(|row| bits(&product(&pool, tier, &matrix, row))).collect();
        for size in 2..=rows {
            // Batches that begin elsewhere put each row at other places. The oracle is slow: one of them.
            let firsts = if tier == Tier::Scalar { 1 } else { 9.min(rows - size + 1) };
            for first in (0..firsts).map(|i| i * (rows - size) / firsts.max(2)) {
                let got = bits(&product(&pool, tier, &matrix, &x[first * k..][..size * k]));
                assert!(got == alone[first * n..][..size * n], "{tier}: {size} rows from {first} on");
            }
        }
        // One row at every place of batches of some sizes.
        for size in [2, 3, 8, 17, 33, 64] {
            for place in 0..size {
                let mut batch = x[k..][..size * k].to_vec();
                batch[place * k..][..k].copy_from_slice(&x[..k]);
                let got = bits(&product(&pool, tier, &matrix, &batch));
                assert!(got[place * n..][..n] == alone[..n], "{tier}: place {place} of {size}");
            }
        }
    }
}

/// Several passes over the tiles, several parts, more tiles than tasks and fewer.
#[test]
fn threads_parts_and_passes_leave_no_trace() {
    let (k, rows) = (3072, 150);
    let sizes = [20, 170, 16, 7];
    let matrices: Vec<PackedMatrix> = sizes
        .iter()
        .map(|&n| pack(&source(SourceFormat::F16, n, k, 8 + n as u64).0, SourceFormat::F16, n, k))
        .collect();
    let x = Noise(9).values(rows * k);
    let (columns, stride) = ([1, 21, 200, 217], 230);
    let parts: Vec<Part<'_>> = matrices.iter().zip(columns).map(|(matrix, column)| Part { matrix, column }).collect();
    for tier in fast_tiers() {
        let one = ThreadPool::new(1).expect("starts");
        for threads in [1, 2, 3] {
            let pool = ThreadPool::new(threads).expect("starts");
            let activations = rounded(&pool, tier, &x, k);
            let mut out = vec![100f32; rows * stride];
            multiply(&mut pool.enter(), tier, &activations, &parts, Store::Add, &mut out, stride).expect("multiplies");
            for (matrix, column) in matrices.iter().zip(columns) {
                for row in [0, 1, 31, 32, 84, 149] {
                    let alone = product(&one, tier, matrix, &x[row * k..][..k]);
                    let wanted: Vec<f32> = alone.iter().map(|y| 100.0 + y).collect();
                    let got = &out[row * stride + column..][..matrix.n()];
                    assert_eq!(bits(got), bits(&wanted), "{tier} row {row} column {column} {threads} threads");
                }
                for row in out.chunks_mut(stride) {
                    row[column..][..matrix.n()].fill(100.0);
                }
            }
            assert!(out.iter().all(|&y| y == 100.0), "columns outside the parts are untouched");
        }
    }
}

#[test]
fn fused_inputs_equal_separate_ones() {
    let pool = ThreadPool::new(2).expect("starts");
    let (k, rows) = (96, 11);
    let mut noise = Noise(10);
    let (x, weight, gate_up) = (noise.values(rows * k), noise.values(k), noise.values(rows * 2 * k));
    let (bytes, _) = source(SourceFormat::Q8_0, 16, k, 11);
    let matrix = pack(&bytes, SourceFormat::Q8_0, 16, k);
    for tier in tiers() {
        let mut scratch = vec![0f32; rows * k];
        let mut fused = Activations::new(Precision::Bf16);
        fused.norm_quantise(&mut pool.enter(), tier, &x, &weight, 1e-5, &mut scratch).expect("rounds");
        let mut separate = vec![0f32; rows * k];
        for (x, out) in x.chunks(k).zip(separate.chunks_mut(k)) {
            rms_norm(Tier::Scalar, x, &weight, 1e-5, out);
        }
        assert_eq!(bits(&times(&pool, tier, &fused, &matrix)), bits(&product(&pool, tier, &matrix, &separate)));
        fused.gated_quantise(&mut pool.enter(), tier, Gate::Silu, &gate_up, k, &mut scratch).expect("rounds");
        for (row, out) in gate_up.chunks(2 * k).zip(separate.chunks_mut(k)) {
            gated(Tier::Scalar, Gate::Silu, &row[..k], &row[k..], out);
        }
        assert_eq!(bits(&times(&pool, tier, &fused, &matrix)), bits(&product(&pool, tier, &matrix, &separate)));
    }
}

#[test]
fn a_row_that_is_not_finite_stays_so_and_alone() {
    let pool = ThreadPool::new(1).expect("starts");
    let (bytes, _) = source(SourceFormat::F32, 16, 64, 13);
    let matrix = pack(&bytes, SourceFormat::F32, 16, 64);
    for tier in tiers() {
        // The last is finite as f32 and rounds to an infinity.
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, f32::MAX] {
            for rows in [3, 9, 32] {
                let mut x = Noise(14).values(rows * 64);
                x[64 + 50] = bad;
                let out = product(&pool, tier, &matrix, &x);
                assert!(out[16..32].iter().all(|y| !y.is_finite()), "{tier} {bad} {rows} rows");
                assert!(out[..16].iter().chain(&out[32..]).all(|y| y.is_finite()), "{tier} {bad} {rows} rows");
            }
        }
    }
}

#[test]
fn small_integers_are_exact_on_every_unit() {
    let pool = ThreadPool::new(1).expect("starts");
    let (n, k, rows) = (21, 64, 19);
    let weight = |i: usize| (i * 37 % 255) as f32 - 127.0;
    let bytes: Vec<u8> = (0..n * k).flat_map(|i| weight(i).to_le_bytes()).collect();
    let matrix = pack(&bytes, SourceFormat::F32, n, k);
    let x: Vec<f32> = (0..rows * k).map(|i| (i * 91 % 253) as f32 - 126.0).collect();
    for tier in tiers() {
        let got = product(&pool, tier, &matrix, &x);
        for (index, got) in got.into_iter().enumerate() {
            let (row, column) = (index / n, index % n);
            let wanted: i64 = (0..k).map(|i| weight(column * k + i) as i64 * x[row * k + i] as i64).sum();
            assert_eq!(got, wanted as f32, "{tier} row {row} column {column}");
        }
    }
}

#[test]
fn what_cannot_be_packed_is_a_typed_error() {
    let shape = |n, k| PackedShape::new(PackedFormat::Bf16, n, k);
    let pack = |bytes: &[u8], format, n, k| {
        PackedMatrix::pack_as(&MemoryBudget::new(64 << 20), bytes, format, shape(n, k).expect("legal")).err()
    };
    assert_eq!(shape(1, 33), Err(PackError::Shape { n: 1, k: 33 }));
    assert_eq!(shape(16, 32).expect("legal").bytes(), 16 * 32 * 2);
    assert_eq!(shape(17, 32).expect("legal").bytes(), 2 * 16 * 32 * 2);
    // Bfloat16 takes any 32, a K format comes in blocks of 256.
    assert_eq!(pack(&[0; 210], SourceFormat::Q6K, 1, 288), Some(PackError::Shape { n: 1, k: 288 }));
    assert_eq!(pack(&[0; 63], SourceFormat::Bf16, 1, 32), Some(PackError::SourceLength { wanted: 64, given: 63 }));
    let mut bytes = [0u8; 256];
    for bad in [f32::INFINITY, f32::NAN, f32::MAX] {
        bytes[132..136].copy_from_slice(&bad.to_le_bytes());
        assert_eq!(pack(&bytes, SourceFormat::F32, 2, 32), Some(PackError::NotFinite { row: 1 }), "{bad}");
    }
    let mut bytes = [0u8; 18];
    bytes[..2].copy_from_slice(&0x7e00u16.to_le_bytes());
    assert_eq!(pack(&bytes, SourceFormat::Q4_0, 1, 32), Some(PackError::NotFinite { row: 0 }));
}

#[test]
#[should_panic(expected = "Q8_0 weights by Bf16")]
fn weights_of_integers_are_not_multiplied_by_bfloat16() {
    let pool = ThreadPool::new(1).expect("starts");
    let (bytes, _) = source(SourceFormat::Q8_0, 16, 32, 15);
    let matrix = PackedMatrix::pack(&MemoryBudget::new(64 << 20), &bytes, SourceFormat::Q8_0, 16, 32).expect("packs");
    product(&pool, Tier::Scalar, &matrix, &[0.0; 32]);
}
