//! Packing of whole models: many matrices at once, and the bytes that kept files rely on.

mod support;

use std::sync::Arc;

use penstock_kernels_cpu::weights::{LAYOUT_VERSION, PackJob, StorageError, WeightBytes, WeightMemory, pack_all};
use penstock_kernels_cpu::{
    MemoryBudget, PackError, PackedFormat, PackedMatrix, PackedShape, SourceFormat, ThreadPool,
};
use support::weights::source;

/// Matrices whose sizes end inside and at the border of a tile, and one that is cut into several pieces of work.
const SIZES: [(usize, usize); 4] = [(16, 256), (33, 512), (1, 256), (40_000, 256)];

#[test]
fn many_matrices_at_once_are_those_packed_one_by_one() {
    let budget = MemoryBudget::new(1 << 30);
    let formats = [SourceFormat::Q4_1, SourceFormat::Q5_0, SourceFormat::Q6K, SourceFormat::Bf16];
    let to_integers = formats.map(|format| (format, format.packed()));
    for (format, packed) in to_integers.into_iter().chain(formats.map(|format| (format, PackedFormat::Bf16))) {
        let sources = SIZES.map(|(n, k)| source(format, n, k, 3).0);
        let shapes = SIZES.map(|(n, k)| PackedShape::new(packed, n, k).expect("legal"));
        for threads in [1, 3] {
            let pool = ThreadPool::new(threads).expect("starts");
            // What stood there before must not show.
            let mut targets = shapes.map(|shape| vec![0xa5; shape.bytes()]);
            let jobs = sources.iter().zip(shapes).zip(&mut targets);
            let jobs = jobs.map(|((source, shape), to)| PackJob { source, format, shape, to }).collect();
            pack_all(&mut pool.enter(), jobs).expect("packs");
            for ((shape, source), target) in shapes.into_iter().zip(&sources).zip(&targets) {
                let alone = PackedMatrix::pack_as(&budget, source, format, shape).expect("packs");
                assert!(alone.as_bytes() == target.as_slice(), "{format:?} as {shape:?}, {threads} threads");
            }
        }
    }
}

#[test]
fn the_first_fault_is_named_by_job_and_row() {
    let pool = ThreadPool::new(2).expect("starts");
    let shape = PackedShape::new(SourceFormat::F32.packed(), 70_000, 32).expect("legal");
    let good = vec![0; 70_000 * 128];
    let mut bad = good.clone();
    // The second row is in a later piece of work than the first, and reached before it by another thread.
    for row in [60_001, 50_001] {
        bad[row * 128..][..4].copy_from_slice(&f32::NAN.to_le_bytes());
    }
    let mut targets = [vec![0; shape.bytes()], vec![0; shape.bytes()]];
    let mut fault = |sources: [&[u8]; 2]| {
        let jobs = sources.into_iter().zip(&mut targets);
        let jobs = jobs.map(|(source, to)| PackJob { source, format: SourceFormat::F32, shape, to }).collect();
        pack_all(&mut pool.enter(), jobs).err()
    };
    assert_eq!(fault([&good, &bad]), Some((1, PackError::NotFinite { row: 50_001 })));
    assert_eq!(fault([&good, &bad[..128]]), Some((1, PackError::SourceLength { wanted: 70_000 * 128, given: 128 })));
}

#[test]
fn bytes_of_another_length_or_place_are_refused() {
    let buffer = MemoryBudget::new(1 << 30).allocate(4096).expect("fits");
    let memory = Arc::new(WeightMemory::Huge(buffer));
    assert_eq!(
        WeightBytes::new(Arc::clone(&memory), 4000..4097).err(),
        Some(StorageError { wanted: 4097, given: 4096 })
    );
    // 16 x 32 at eight bits: 512 quants and 16 halves.
    let shape = PackedShape::new(SourceFormat::Q8_0.packed(), 16, 32).expect("legal");
    assert_eq!(shape.bytes(), 576);
    let bytes = |end| WeightBytes::new(Arc::clone(&memory), 64..end).expect("inside");
    assert_eq!(PackedMatrix::over(shape, bytes(639)).err(), Some(StorageError { wanted: 576, given: 575 }));
    let matrix = PackedMatrix::over(shape, bytes(640)).expect("fits");
    // All bytes 0 stand for the quant -128 and the scale 0.
    let mut row = [1.0; 32];
    matrix.dequantise_row(3, &mut row);
    assert_eq!(row, [0.0; 32]);
}

/// FNV-1a: a few lines that no one changes, unlike a hasher of a library.
fn fnv(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash, &byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3))
}

/// Files of packed weights outlive this build: whatever changes what packing writes must count up the version. The numbers are what this
/// version writes; that they are right is what the products' tests say.
#[test]
fn packed_bytes_are_those_of_their_version() {
    let budget = MemoryBudget::new(1 << 30);
    let hashes = SourceFormat::ALL.map(|format| {
        let (bytes, _) = source(format, 19, 512, 21);
        fnv(PackedMatrix::pack(&budget, &bytes, format, 19, 512).expect("packs").as_bytes())
    });
    assert_eq!((LAYOUT_VERSION, hashes), (1, PACKED_BY_VERSION_1), "another layout: count up LAYOUT_VERSION");
    let hashes = SourceFormat::ALL.map(|format| {
        let (bytes, _) = source(format, 19, 512, 21);
        let shape = PackedShape::new(PackedFormat::Bf16, 19, 512).expect("legal");
        fnv(PackedMatrix::pack_as(&budget, &bytes, format, shape).expect("packs").as_bytes())
    });
    assert_eq!(hashes, BF16_BY_VERSION_1, "another layout: count up LAYOUT_VERSION");
}

const BF16_BY_VERSION_1: [u64; 11] = [
    17_519_785_853_084_377_674,
    17_815_145_424_606_132_188,
    18_258_020_528_829_686_424,
    12_555_678_349_924_586_737,
    7_430_989_346_211_030_376,
    15_032_879_568_208_486_822,
    15_822_240_611_246_163_446,
    12_607_458_800_740_968_289,
    1_500_186_836_293_447_505,
    7_928_845_237_465_423_725,
    1_500_186_836_293_447_505,
];

const PACKED_BY_VERSION_1: [u64; 11] = [
    8_029_434_990_705_194_040,
    7_313_299_275_819_257_132,
    16_277_570_892_923_310_259,
    14_000_101_310_250_127_561,
    6_219_706_038_255_143_666,
    17_566_789_279_888_069_689,
    14_729_377_639_061_022_600,
    13_792_281_121_598_227_124,
    4_983_181_842_187_371_262,
    1_943_194_425_287_555_438,
    12_925_155_586_258_712_481,
];
