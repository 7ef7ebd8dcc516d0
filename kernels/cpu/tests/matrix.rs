//! Packing, quantised activations and the matrix product.

mod support;

use penstock_kernels_cpu::half::f32_to_f16;
use penstock_kernels_cpu::{
    Activations, MemoryBudget, MemoryError, PackError, PackedFormat, PackedMatrix, Part, Precision, SourceFormat,
    Store, ThreadPool, Tier, multiply,
};
use support::weights::source;
use support::{Noise, bits, fast_tiers, nmse, tiers};

const FORMATS: [SourceFormat; 11] = SourceFormat::ALL;

fn budget() -> MemoryBudget {
    MemoryBudget::new(64 << 20)
}

fn exact(format: SourceFormat) -> bool {
    !matches!(format, SourceFormat::F32 | SourceFormat::F16 | SourceFormat::Bf16)
}

const PRECISIONS: [Precision; 2] = [Precision::Int8, Precision::Int15];

fn product(pool: &ThreadPool, tier: Tier, matrix: &PackedMatrix, x: &[f32]) -> Vec<f32> {
    product_of(Precision::Int8, pool, tier, matrix, x)
}

fn product_of(precision: Precision, pool: &ThreadPool, tier: Tier, matrix: &PackedMatrix, x: &[f32]) -> Vec<f32> {
    let mut session = pool.enter();
    let mut activations = Activations::new(precision);
    activations.quantise(&mut session, tier, &mut x.to_vec(), matrix.k()).expect("quantises");
    let mut out = vec![f32::NAN; activations.rows() * matrix.n()];
    let parts = [Part { matrix, column: 0 }];
    multiply(&mut session, tier, &activations, &parts, Store::Replace, &mut out, matrix.n()).expect("multiplies");
    out
}

fn reference(weights: &[f64], x: &[f32], k: usize) -> Vec<f64> {
    x.chunks(k)
        .flat_map(|x| weights.chunks(k).map(move |w| w.iter().zip(x).map(|(w, &x)| w * f64::from(x)).sum()))
        .collect()
}

#[test]
fn packed_rows_read_back_as_their_source_says() {
    for format in FORMATS {
        let (n, k) = (37, 3 * format.block_len());
        let (bytes, values) = source(format, n, k, 1);
        let matrix = PackedMatrix::pack(&budget(), &bytes, format, n, k).expect("packs");
        let mut got = vec![0f32; n * k];
        for (row, out) in got.chunks_mut(k).enumerate() {
            matrix.dequantise_row(row, out);
        }
        let error = nmse(&got, &values);
        // Quantised sources are exact up to one f32 rounding; floats carry int8 noise, at most (1/127)^2 / 12 of the peak's square.
        let bound = if exact(format) { 1e-14 } else { 3e-5 };
        assert!(error < bound, "{format:?}: nmse {error:e}");
    }
}

#[test]
fn the_product_is_near_its_f64_reference() {
    let pool = ThreadPool::new(1).expect("starts");
    for format in FORMATS {
        let (n, k, rows) = (40, 160.max(2 * format.block_len()), 5);
        let (bytes, weights) = source(format, n, k, 2);
        let matrix = PackedMatrix::pack(&budget(), &bytes, format, n, k).expect("packs");
        let x = Noise(3).values(rows * k);
        let wanted = reference(&weights, &x, k);
        for precision in PRECISIONS {
            let error = nmse(&product_of(precision, &pool, Tier::detect(), &matrix, &x), &wanted);
            // The noise of int8 activations, and of int8 weights where the source was not quantised; 15 bits leave 1/128^2 of the former.
            let bound = match (precision, exact(format)) {
                (Precision::Int8, true) => 1e-4,
                (Precision::Int8, false) => 2e-4,
                (Precision::Int15, true) => 1e-8,
                (Precision::Int15, false) => 1e-4,
                (Precision::Bf16, _) => unreachable!("tests/bf16.rs is about it"),
            };
            assert!(error < bound, "{format:?} {precision:?}: nmse {error:e}");
        }
        // Activations that int8 holds exactly leave only f32 rounding.
        let x: Vec<f32> =
            (0..rows * k).map(|i| if i % 32 == 0 { 127.0 } else { (i * 37 % 255) as f32 - 127.0 }).collect();
        if exact(format) {
            let error = nmse(&product(&pool, Tier::detect(), &matrix, &x), &reference(&weights, &x, k));
            assert!(error < 1e-12, "{format:?}: nmse {error:e}");
        }
    }
}

#[test]
fn all_tiers_give_equal_bits() {
    let pool = ThreadPool::new(1).expect("starts");
    for format in FORMATS {
        for (n, k, rows) in [(16, 32, 1), (37, 96, 15), (48, 576, 3)] {
            let k = usize::next_multiple_of(k, format.block_len());
            let (bytes, _) = source(format, n, k, 4);
            let matrix = PackedMatrix::pack(&budget(), &bytes, format, n, k).expect("packs");
            let x = Noise(5).values(rows * k);
            for precision in PRECISIONS {
                let oracle = bits(&product_of(precision, &pool, Tier::Scalar, &matrix, &x));
                for tier in fast_tiers() {
                    let got = bits(&product_of(precision, &pool, tier, &matrix, &x));
                    assert_eq!(got, oracle, "{format:?} {n}x{k} rows {rows} {tier} {precision:?}");
                }
            }
        }
    }
}

/// Row counts on both sides of every change of panels, and columns that fill no tile.
#[test]
fn all_tiers_give_equal_bits_at_every_row_count() {
    let pool = ThreadPool::new(2).expect("starts");
    let tiers = fast_tiers();
    for format in FORMATS {
        let (n, k) = (35, 96.max(format.block_len()));
        let (bytes, _) = source(format, n, k, 15);
        let matrix = PackedMatrix::pack(&budget(), &bytes, format, n, k).expect("packs");
        let x = Noise(16).values(70 * k);
        for precision in PRECISIONS {
            let oracle = bits(&product_of(precision, &pool, Tier::Scalar, &matrix, &x));
            for &tier in &tiers {
                for rows in 1..=70 {
                    let got = bits(&product_of(precision, &pool, tier, &matrix, &x[..rows * k]));
                    assert!(got == oracle[..rows * n], "{format:?} {precision:?} {tier} rows {rows}");
                }
            }
        }
    }
}

/// More rows and a longer K than one pass over a tile takes, and one block, the shortest K.
#[test]
fn many_rows_and_few_blocks_give_equal_bits() {
    let pool = ThreadPool::new(2).expect("starts");
    for (format, n, k, rows) in [(SourceFormat::Q4_1, 17, 2048, 200), (SourceFormat::Q8_0, 16, 32, 64)] {
        let (bytes, _) = source(format, n, k, 17);
        let matrix = PackedMatrix::pack(&budget(), &bytes, format, n, k).expect("packs");
        let x = Noise(18).values(rows * k);
        let oracle = bits(&product_of(Precision::Int15, &pool, Tier::Scalar, &matrix, &x));
        for tier in fast_tiers() {
            assert!(bits(&product_of(Precision::Int15, &pool, tier, &matrix, &x)) == oracle, "{format:?} {tier}");
        }
    }
}

#[test]
fn extreme_quants_do_not_saturate() {
    let pool = ThreadPool::new(1).expect("starts");
    let (n, k) = (16, 64);
    for (format, quant) in [(SourceFormat::Q8_0, 0x80u8), (SourceFormat::Q8_0, 0x7f), (SourceFormat::Q4_1, 0xff)] {
        let mut bytes = Vec::new();
        for _ in 0..n * k / 32 {
            bytes.extend(f32_to_f16(1.0).to_le_bytes());
            if format == SourceFormat::Q4_1 {
                bytes.extend(f32_to_f16(0.0).to_le_bytes());
            }
            bytes.extend(vec![quant; format.block_bytes() - if format == SourceFormat::Q4_1 { 4 } else { 2 }]);
        }
        let matrix = PackedMatrix::pack(&budget(), &bytes, format, n, k).expect("packs");
        let weight = if format == SourceFormat::Q4_1 { 15.0 } else { f32::from(quant as i8) };
        for x in [127.0f32, -127.0] {
            for tier in tiers() {
                for (precision, rows) in PRECISIONS.into_iter().flat_map(|precision| [(precision, 1), (precision, 32)])
                {
                    let out = product_of(precision, &pool, tier, &matrix, &vec![x; rows * k]);
                    let wanted = weight * x * 64.0;
                    assert!(out.iter().all(|&y| y == wanted), "{format:?} {quant} {x} {tier} {precision:?}: {out:?}");
                }
            }
        }
    }
}

/// Largest quants, factors and activations of one sign: the sums that come nearest to the end of i32 stay exact.
#[test]
fn extreme_super_blocks_do_not_overflow() {
    let pool = ThreadPool::new(1).expect("starts");
    let one = f32_to_f16(1.0).to_le_bytes();
    let mut six = vec![0x00u8; 192];
    six.extend([0x80u8; 16]);
    six.extend(one);
    let mut five: Vec<u8> = [one, [0, 0]].concat();
    five.extend([0xffu8; 172]);
    // Q6_K: quant 0 is -32, factor -128; Q5_K: quant 31, factor 63, no minimum.
    for (format, block, weight) in [(SourceFormat::Q6K, six, 4096.0f64), (SourceFormat::Q5K, five, 1953.0)] {
        let matrix = PackedMatrix::pack(&budget(), &block.repeat(16), format, 16, 256).expect("packs");
        for x in [1.0f32, -1.0] {
            for tier in tiers() {
                for (precision, rows) in PRECISIONS.into_iter().flat_map(|precision| [(precision, 1), (precision, 32)])
                {
                    let out = product_of(precision, &pool, tier, &matrix, &vec![x; rows * 256]);
                    let wanted = weight * f64::from(x) * 256.0;
                    // Eight sums of up to 31 bits, each rounded to 24, and the rounded inverse scale.
                    let near = out.iter().all(|&y| (f64::from(y) / wanted - 1.0).abs() < 1e-6);
                    assert!(near, "{format:?} {x} {tier} {precision:?}: {out:?} for {wanted}");
                }
            }
        }
    }
}

#[test]
fn a_row_does_not_see_its_neighbours_or_the_threads() {
    let (n, rows) = (80, 45);
    for format in FORMATS {
        let k = 96.max(format.block_len());
        let (bytes, _) = source(format, n, k, 6);
        let matrix = PackedMatrix::pack(&budget(), &bytes, format, n, k).expect("packs");
        let x = Noise(7).values(rows * k);
        let one = ThreadPool::new(1).expect("starts");
        for (tier, precision) in
            [Tier::Scalar, Tier::detect()].into_iter().flat_map(|tier| PRECISIONS.map(|p| (tier, p)))
        {
            let all = product_of(precision, &one, tier, &matrix, &x);
            for row in 0..rows {
                let alone = product_of(precision, &one, tier, &matrix, &x[row * k..][..k]);
                assert_eq!(bits(&alone), bits(&all[row * n..][..n]), "{format:?} {tier} {precision:?} row {row}");
            }
            for threads in [2, 3] {
                let pool = ThreadPool::new(threads).expect("starts");
                let got = product_of(precision, &pool, tier, &matrix, &x);
                assert_eq!(bits(&got), bits(&all), "{format:?} {tier} {precision:?} {threads} threads");
            }
        }
    }
}

#[test]
fn parts_fill_their_columns_and_may_add() {
    let pool = ThreadPool::new(2).expect("starts");
    let (k, rows) = (64, 3);
    let sizes = [(SourceFormat::Q4_1, 20), (SourceFormat::Q8_0, 16), (SourceFormat::Q4_0, 7)];
    let matrices: Vec<PackedMatrix> = sizes
        .iter()
        .map(|&(format, n)| PackedMatrix::pack(&budget(), &source(format, n, k, 8).0, format, n, k).expect("packs"))
        .collect();
    let x = Noise(9).values(rows * k);
    let mut session = pool.enter();
    let mut activations = Activations::new(Precision::Int8);
    activations.quantise(&mut session, Tier::detect(), &mut x.clone(), k).expect("quantises");
    let columns = [1, 21, 40];
    let stride = 50;
    let parts: Vec<Part<'_>> = matrices.iter().zip(columns).map(|(matrix, column)| Part { matrix, column }).collect();
    let mut out = vec![100f32; rows * stride];
    multiply(&mut session, Tier::detect(), &activations, &parts, Store::Add, &mut out, stride).expect("multiplies");
    drop(session);
    for (matrix, column) in matrices.iter().zip(columns) {
        let alone = product(&pool, Tier::Scalar, matrix, &x);
        for row in 0..rows {
            let got = &mut out[row * stride + column..][..matrix.n()];
            let wanted: Vec<f32> = alone[row * matrix.n()..][..matrix.n()].iter().map(|y| 100.0 + y).collect();
            assert_eq!(bits(got), bits(&wanted));
            got.fill(100.0);
        }
    }
    assert!(out.iter().all(|&y| y == 100.0), "columns outside the parts are untouched");
}

#[test]
fn fused_inputs_equal_separate_ones() {
    use penstock_kernels_cpu::{
        norm::rms_norm,
        pointwise::{Gate, gated},
    };
    let pool = ThreadPool::new(2).expect("starts");
    let (k, rows) = (96, 11);
    let mut noise = Noise(10);
    let (x, weight, gate_up) = (noise.values(rows * k), noise.values(k), noise.values(rows * 2 * k));
    let (bytes, _) = source(SourceFormat::Q8_0, 16, k, 11);
    let matrix = PackedMatrix::pack(&budget(), &bytes, SourceFormat::Q8_0, 16, k).expect("packs");
    let run = |activations: &Activations| {
        let mut out = vec![0f32; rows * 16];
        let parts = [Part { matrix: &matrix, column: 0 }];
        multiply(&mut pool.enter(), Tier::detect(), activations, &parts, Store::Replace, &mut out, 16)
            .expect("multiplies");
        bits(&out)
    };
    let mut scratch = vec![0f32; rows * k];
    let mut fused = Activations::new(Precision::Int8);
    fused.norm_quantise(&mut pool.enter(), Tier::detect(), &x, &weight, 1e-5, &mut scratch).expect("quantises");
    let mut separate = vec![0f32; rows * k];
    for (x, out) in x.chunks(k).zip(separate.chunks_mut(k)) {
        rms_norm(Tier::Scalar, x, &weight, 1e-5, out);
    }
    assert_eq!(run(&fused), bits(&product(&pool, Tier::Scalar, &matrix, &separate)));
    fused.gated_quantise(&mut pool.enter(), Tier::detect(), Gate::Silu, &gate_up, k, &mut scratch).expect("quantises");
    for (row, out) in gate_up.chunks(2 * k).zip(separate.chunks_mut(k)) {
        gated(Tier::Scalar, Gate::Silu, &row[..k], &row[k..], out);
    }
    assert_eq!(run(&fused), bits(&product(&pool, Tier::Scalar, &matrix, &separate)));
}

#[test]
fn what_cannot_be_packed_is_a_typed_error() {
    let pack = |bytes: &[u8], format, n, k| PackedMatrix::pack(&budget(), bytes, format, n, k).err();
    assert_eq!(pack(&[], SourceFormat::Q8_0, 1, 33), Some(PackError::Shape { n: 1, k: 33 }));
    assert_eq!(pack(&[], SourceFormat::Q6K, 1, 128), Some(PackError::Shape { n: 1, k: 128 }));
    assert_eq!(pack(&[], SourceFormat::Q8_0, 0, 32), Some(PackError::Shape { n: 0, k: 32 }));
    let huge = usize::MAX / 2;
    assert_eq!(pack(&[], SourceFormat::F32, huge, 32), Some(PackError::Shape { n: huge, k: 32 }));
    assert_eq!(pack(&[0; 33], SourceFormat::Q8_0, 1, 32), Some(PackError::SourceLength { wanted: 34, given: 33 }));
    let mut bytes = [0u8; 256];
    bytes[128..132].copy_from_slice(&f32::INFINITY.to_le_bytes());
    assert_eq!(pack(&bytes, SourceFormat::F32, 2, 32), Some(PackError::NotFinite { row: 1 }));
    let mut bytes = [0u8; 18];
    bytes[..2].copy_from_slice(&0x7e00u16.to_le_bytes());
    assert_eq!(pack(&bytes, SourceFormat::Q4_0, 1, 32), Some(PackError::NotFinite { row: 0 }));
    let small = MemoryBudget::new(1 << 20);
    let error = PackedMatrix::pack(&small, &[0; 34], SourceFormat::Q8_0, 1, 32).err();
    assert!(matches!(error, Some(PackError::Memory(MemoryError::OverBudget { .. }))));
}

#[test]
fn formats_map_to_their_packed_form() {
    let packed = FORMATS.map(SourceFormat::packed);
    use PackedFormat::{Q4_0, Q4_1, Q4K, Q5_0, Q5_1, Q5K, Q6K, Q8_0};
    assert_eq!(packed, [Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4K, Q5K, Q6K, Q8_0, Q8_0, Q8_0]);
}

#[test]
fn zero_and_tiny_blocks_stay_zero() {
    let pool = ThreadPool::new(1).expect("starts");
    let (bytes, _) = source(SourceFormat::Q4_1, 16, 32, 12);
    let matrix = PackedMatrix::pack(&budget(), &bytes, SourceFormat::Q4_1, 16, 32).expect("packs");
    for tier in tiers() {
        for value in [0.0, 1e-38, -1e-31] {
            for rows in [1, 32] {
                assert!(product(&pool, tier, &matrix, &vec![value; rows * 32]).iter().all(|&y| y == 0.0));
            }
        }
    }
}

#[test]
fn a_row_that_is_not_finite_stays_so_and_alone() {
    let pool = ThreadPool::new(1).expect("starts");
    let (bytes, _) = source(SourceFormat::Q8_0, 16, 64, 13);
    let matrix = PackedMatrix::pack(&budget(), &bytes, SourceFormat::Q8_0, 16, 64).expect("packs");
    for tier in tiers() {
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            for (precision, rows) in PRECISIONS.into_iter().flat_map(|precision| [(precision, 3), (precision, 32)]) {
                let mut x = Noise(14).values(rows * 64);
                x[64 + 50] = bad;
                let out = product_of(precision, &pool, tier, &matrix, &x);
                assert!(out[16..32].iter().all(|y| y.is_nan()), "{tier} {bad}");
                assert!(out[..16].iter().chain(&out[32..]).all(|y| y.is_finite()), "{tier} {bad}");
            }
        }
    }
}
