//! Packed weights on disk: the bytes are those of packing, every way a file can be wrong is told, and none of them changes a weight.

mod support;

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use penstock_exec_cpu::{
    CpuError, CpuModel, Forward, Keep, MemoryBudget, Numerics, PackedCache, PackedMode, PackedOutcome, Precision,
    SequenceRows, ThreadPool, Unusable, packed_places,
};
use penstock_kernels_cpu::{KvPool, PackedMatrix, SourceFormat};
use penstock_model::weights::{LayerPart, TensorRole};
use penstock_model::{DType, Digest};
use support::TinyModel;

/// Matrices of three formats and an output projection of its own.
fn tiny() -> TinyModel {
    TinyModel::stored(false, |role| match role {
        TensorRole::TokenEmbedding => DType::Q6K,
        TensorRole::Layer { part: LayerPart::FfnDown, .. } => DType::F32,
        _ => DType::Q4_1,
    })
}

fn source() -> Digest {
    Digest::of(b"the weights of the small model")
}

fn cache(mode: PackedMode, places: &[&Path]) -> PackedCache {
    PackedCache { mode, source: source(), places: places.iter().map(|&place| place.to_owned()).collect() }
}

fn load(tiny: &TinyModel, cache: &PackedCache) -> (Arc<CpuModel>, PackedOutcome) {
    load_with(tiny, cache, Numerics::default())
}

fn load_with(tiny: &TinyModel, cache: &PackedCache, numerics: Numerics) -> (Arc<CpuModel>, PackedOutcome) {
    let threads = Arc::new(ThreadPool::new(2).expect("threads start"));
    let budget = MemoryBudget::new(1 << 30);
    let view = |role| tiny.view(role);
    let (model, outcome) =
        CpuModel::from_tensors_cached(&tiny.config, view, cache, threads, &budget, numerics).expect("loads");
    (Arc::new(model), outcome)
}

/// Bits of the logits after some tokens: every matrix enters.
fn logits(model: &Arc<CpuModel>) -> Vec<u32> {
    let shape = Forward::kv_shape(model, 16, 1);
    let mut kv = KvPool::new(&MemoryBudget::new(1 << 30), shape).expect("fits");
    let mut forward = Forward::new(Arc::clone(model));
    let rows = [SequenceRows { tokens: &[1, 200, 7, 31], context: 0, table: &[0], keep: Keep::Last }];
    forward.run(&mut kv, &rows).expect("no kernel panics");
    let mut out = vec![0f32; model.config().vocab];
    forward.logits(0, 1, &mut out).expect("no kernel panics");
    out.into_iter().map(f32::to_bits).collect()
}

/// The packed matrices one behind the other, by the kernels alone.
fn packed_alone(tiny: &TinyModel) -> Vec<Vec<u8>> {
    use LayerPart::{AttnK, AttnOutput, AttnQ, AttnV, FfnDown, FfnGate, FfnUp};
    let of_layers = (0..tiny.config.layers).flat_map(|index| {
        [AttnQ, AttnK, AttnV, AttnOutput, FfnGate, FfnUp, FfnDown].map(|part| TensorRole::layer(index, part))
    });
    [TensorRole::TokenEmbedding, TensorRole::Output]
        .into_iter()
        .chain(of_layers)
        .map(|role| {
            let view = tiny.view(role).expect("there");
            let format = match view.dtype {
                DType::Q6K => SourceFormat::Q6K,
                DType::F32 => SourceFormat::F32,
                _ => SourceFormat::Q4_1,
            };
            let budget = MemoryBudget::new(1 << 30);
            PackedMatrix::pack(&budget, view.bytes, format, view.rows, view.cols).expect("packs").as_bytes().to_vec()
        })
        .collect()
}

#[test]
fn a_second_start_reads_the_bytes_that_packing_gives() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("tiny.packed");
    let tiny = tiny();
    let wanted = logits(&load(&tiny, &cache(PackedMode::Off, &[&path])).0);
    assert!(!path.exists(), "nothing is written when it is off");
    let (model, first) = load(&tiny, &cache(PackedMode::Copy, &[&path]));
    assert_eq!((first.read, first.written.as_deref()), (None, Some(path.as_path())));
    assert_eq!(logits(&model), wanted);
    let matrices = packed_alone(&tiny);
    let file = fs::read(&path).unwrap();
    let data: usize = matrices.iter().map(Vec::len).sum();
    // 56 bytes, 40 for each of 16 matrices and 4, rounded up to a page.
    assert_eq!(file.len(), 4096 + data);
    assert!(file[4096..] == matrices.concat(), "the bytes of packing");
    for mode in [PackedMode::Copy, PackedMode::Map] {
        let (model, second) = load(&tiny, &cache(mode, &[&path]));
        assert_eq!((second.read.as_deref(), second.written, second.bytes), (Some(path.as_path()), None, data));
        assert!(second.unusable.is_empty() && second.unwritable.is_empty());
        assert_eq!(logits(&model), wanted, "{mode:?}");
    }
}

/// A place in the file, what is done there, and what is then said.
type Damage = (&'static str, fn(&mut Vec<u8>), fn(&Unusable) -> bool);

/// Bit-wise CRC-32 (IEEE), from its definition.
fn crc32(bytes: &[u8]) -> u32 {
    !bytes.iter().fold(!0, |crc, &byte| {
        (0..8).fold(crc ^ u32::from(byte), |crc, _| crc >> 1 ^ if crc & 1 == 1 { 0xedb8_8320 } else { 0 })
    })
}

/// End of the table of 16 matrices.
const TABLE_END: usize = 56 + 16 * 40;

/// Makes the header whole again after a change.
fn seal(file: &mut [u8]) {
    let sum = crc32(&file[..TABLE_END]);
    file[TABLE_END..TABLE_END + 4].copy_from_slice(&sum.to_le_bytes());
}

const DAMAGES: [Damage; 19] = [
    ("empty", Vec::clear, |why| matches!(why, Unusable::NotPacked)),
    ("magic", |file| file[3] ^= 1, |why| matches!(why, Unusable::NotPacked)),
    ("a byte of the version", |file| file[9] ^= 1, |why| matches!(why, Unusable::Version { found: 257 })),
    (
        "a whole file of the next version",
        |file| {
            file[8] += 1;
            seal(file);
        },
        |why| matches!(why, Unusable::Version { found: 2 }),
    ),
    ("count", |file| file[12] ^= 1, |why| matches!(why, Unusable::Matrices)),
    ("digest", |file| file[47] ^= 0x80, |why| matches!(why, Unusable::Source)),
    ("length", |file| file[50] ^= 1, |why| matches!(why, Unusable::Header)),
    ("format in the table", |file| file[56] ^= 1, |why| matches!(why, Unusable::Header)),
    ("checksum in the table", |file| file[60] ^= 1, |why| matches!(why, Unusable::Header)),
    (
        "a whole header with another format",
        |file| {
            file[56] ^= 1;
            seal(file);
        },
        |why| matches!(why, Unusable::Matrices),
    ),
    (
        "a whole header with another place",
        |file| {
            file[56 + 24] ^= 64;
            seal(file);
        },
        |why| matches!(why, Unusable::Matrices),
    ),
    (
        "a whole header with another checksum",
        |file| {
            file[56 + 40 + 4] ^= 1;
            seal(file);
        },
        |why| matches!(why, Unusable::Matrix { index: 1 }),
    ),
    ("last row of the table", |file| file[TABLE_END - 1] ^= 1, |why| matches!(why, Unusable::Header)),
    ("the header's checksum", |file| file[TABLE_END] ^= 1, |why| matches!(why, Unusable::Header)),
    ("what fills the page", |file| file[4095] = 1, |why| matches!(why, Unusable::Header)),
    ("first byte of the weights", |file| file[4096] ^= 1, |why| matches!(why, Unusable::Matrix { index: 0 })),
    (
        "last byte of the weights",
        |file| *file.last_mut().expect("not empty") ^= 0x80,
        |why| matches!(why, Unusable::Matrix { index: 15 }),
    ),
    ("cut", |file| file.truncate(file.len() - 1), |why| matches!(why, Unusable::Length { .. })),
    ("grown", |file| file.push(0), |why| matches!(why, Unusable::Length { .. })),
];

#[test]
fn whatever_is_wrong_with_a_file_is_told_and_packed_over() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("tiny.packed");
    let tiny = tiny();
    let (model, _) = load(&tiny, &cache(PackedMode::Copy, &[&path]));
    let wanted = logits(&model);
    let good = fs::read(&path).unwrap();
    // The checksum of the test is that of the file.
    let mut sealed = good.clone();
    seal(&mut sealed);
    assert!(sealed == good);
    for mode in [PackedMode::Copy, PackedMode::Map] {
        for (what, damage, is_told) in DAMAGES {
            let mut bytes = good.clone();
            damage(&mut bytes);
            // As a new file: the old one may still be mapped.
            fs::remove_file(&path).unwrap();
            fs::write(&path, &bytes).unwrap();
            let (model, outcome) = load(&tiny, &cache(mode, &[&path]));
            assert_eq!((outcome.read, outcome.written.as_deref()), (None, Some(path.as_path())), "{what}");
            assert!(matches!(&outcome.unusable[..], [(_, why)] if is_told(why)), "{what}: {:?}", outcome.unusable);
            assert_eq!(logits(&model), wanted, "{what}");
            assert!(fs::read(&path).unwrap() == good, "{what}: the file is whole again");
        }
    }
}

#[test]
fn other_weights_are_not_taken_for_these() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("tiny.packed");
    let first = tiny();
    load(&first, &cache(PackedMode::Copy, &[&path]));
    // The same shapes, every weight another one.
    let second = TinyModel::stored(false, |role| match role {
        TensorRole::TokenEmbedding => DType::Q6K,
        TensorRole::Layer { part: LayerPart::FfnDown, .. } => DType::F32,
        _ => DType::Q4_0,
    });
    let other = PackedCache { source: Digest::of(b"others"), ..cache(PackedMode::Copy, &[&path]) };
    let (model, outcome) = load(&second, &other);
    assert!(matches!(&outcome.unusable[..], [(_, Unusable::Source)]), "{:?}", outcome.unusable);
    assert_eq!(logits(&model), logits(&load(&second, &cache(PackedMode::Off, &[])).0));
    assert_ne!(logits(&model), logits(&load(&first, &cache(PackedMode::Off, &[])).0));
}

#[test]
fn a_place_that_cannot_be_written_is_told_and_the_next_one_taken() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("a-file");
    fs::write(&file, b"").unwrap();
    let (below_a_file, second) = (file.join("tiny.packed"), dir.path().join("cache/tiny.packed"));
    let tiny = tiny();
    let (_, outcome) = load(&tiny, &cache(PackedMode::Copy, &[&below_a_file, &second]));
    assert_eq!(outcome.written.as_deref(), Some(second.as_path()));
    assert!(matches!(&outcome.unwritable[..], [(path, _)] if *path == below_a_file), "{:?}", outcome.unwritable);
    let (_, outcome) = load(&tiny, &cache(PackedMode::Copy, &[&below_a_file, &second]));
    assert_eq!(outcome.read.as_deref(), Some(second.as_path()));
    assert!(outcome.unusable.is_empty());
    let (_, outcome) = load(&tiny, &cache(PackedMode::Copy, &[&below_a_file]));
    assert_eq!((outcome.read, outcome.written, outcome.unwritable.len()), (None, None, 1));
}

#[test]
fn a_folder_without_the_right_to_write_is_told() {
    use std::os::unix::fs::PermissionsExt as _;
    let dir = tempfile::tempdir().unwrap();
    fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o555)).unwrap();
    if fs::write(dir.path().join("probe"), b"").is_ok() {
        eprintln!("SKIPPED: this user may write everywhere");
        return;
    }
    let (_, outcome) = load(&tiny(), &cache(PackedMode::Copy, &[&dir.path().join("tiny.packed")]));
    assert_eq!((outcome.written, outcome.unwritable.len()), (None, 1));
}

#[test]
fn starts_at_once_leave_one_whole_file() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("tiny.packed");
    let tiny = tiny();
    let wanted = logits(&load(&tiny, &cache(PackedMode::Off, &[])).0);
    for round in 0..20 {
        let outcomes: Vec<(Vec<u32>, PackedOutcome)> = std::thread::scope(|scope| {
            let start = || {
                let (model, outcome) = load(&tiny, &cache(PackedMode::Copy, &[&path]));
                (logits(&model), outcome)
            };
            let starts: Vec<_> = (0..4).map(|_| scope.spawn(start)).collect();
            starts.into_iter().map(|start| start.join().unwrap()).collect()
        });
        for (logits, outcome) in &outcomes {
            assert_eq!(*logits, wanted, "round {round}");
            // Whoever looks sees all of the file or none.
            assert!(outcome.unusable.is_empty(), "round {round}: {:?}", outcome.unusable);
        }
        assert!(outcomes.iter().any(|(_, outcome)| outcome.written.is_some()), "round {round}");
        assert_eq!(load(&tiny, &cache(PackedMode::Copy, &[&path])).1.read.as_deref(), Some(path.as_path()));
        assert_eq!(names(dir.path()), ["tiny.packed"], "round {round}");
        fs::remove_file(&path).unwrap();
    }
}

#[test]
fn a_writer_that_is_at_work_is_left_alone_and_what_a_killed_one_left_is_taken_over() {
    let dir = tempfile::tempdir().unwrap();
    let (path, aside) = (dir.path().join("tiny.packed"), dir.path().join("tiny.packed-tmp"));
    let tiny = tiny();
    let writer = fs::File::create(&aside).unwrap();
    fs::write(&aside, b"half of it").unwrap();
    writer.lock().unwrap();
    let (_, outcome) = load(&tiny, &cache(PackedMode::Copy, &[&path]));
    assert_eq!((outcome.read, outcome.written, outcome.unwritable.len()), (None, None, 1));
    assert_eq!(fs::read(&aside).unwrap(), b"half of it");
    drop(writer);
    let (_, outcome) = load(&tiny, &cache(PackedMode::Copy, &[&path]));
    assert_eq!(outcome.written.as_deref(), Some(path.as_path()));
    assert_eq!(names(dir.path()), ["tiny.packed"]);
    assert!(load(&tiny, &cache(PackedMode::Copy, &[&path])).1.read.is_some());
}

fn names(dir: &Path) -> Vec<String> {
    let name = |entry: std::io::Result<fs::DirEntry>| entry.expect("listed").file_name().to_string_lossy().into_owned();
    let mut names: Vec<String> = fs::read_dir(dir).expect("there").map(name).collect();
    names.sort();
    names
}

#[test]
fn a_new_file_replaces_those_of_the_same_model_file_and_no_others() {
    let dir = tempfile::tempdir().unwrap();
    let model = dir.path().join("model.gguf");
    fs::write(&model, b"").unwrap();
    let place = |path: &Path, digest: &[u8]| -> PathBuf {
        packed_places(path, &Digest::of(digest), Precision::Int15, None)[0].clone()
    };
    let neighbour = dir.path().join("model.gguf.other");
    let (before, others) = (place(&model, b"before"), place(&neighbour, b"before"));
    // "before" in hexadecimal begins with the digits of its SHA-256.
    assert_eq!(before.file_name().unwrap().to_str(), Some(".model.gguf.6db7d803e74f1ffa.packed"));
    for path in [&before, &others, &dir.path().join(".model.gguf.notes.packed")] {
        fs::write(path, b"old").unwrap();
    }
    let now = packed_places(&model, &source(), Precision::Int15, None);
    let places: Vec<&Path> = now.iter().map(PathBuf::as_path).collect();
    load(&tiny(), &cache(PackedMode::Copy, &places));
    assert!(now[0].exists() && others.exists() && !before.exists(), "{:?}", names(dir.path()));
    assert!(dir.path().join(".model.gguf.notes.packed").exists());
}

#[test]
fn weights_in_bfloat16_are_kept_beside_the_others_and_never_taken_for_them() {
    let dir = tempfile::tempdir().unwrap();
    let model = dir.path().join("model.gguf");
    fs::write(&model, b"").unwrap();
    let tiny = tiny();
    let bf16 = Numerics { precision: Precision::Bf16, ..Numerics::default() };
    let place = |source: &Digest, numerics: Numerics| packed_places(&model, source, numerics.precision, None);
    let cache = |places: &[PathBuf]| PackedCache { mode: PackedMode::Copy, source: source(), places: places.to_vec() };
    let wanted = [Numerics::default(), bf16].map(|numerics| logits(&load_with(&tiny, &cache(&[]), numerics).0));
    assert_ne!(wanted[0], wanted[1]);
    // An older file of each kind goes when one of its own kind is written.
    for numerics in [Numerics::default(), bf16] {
        fs::write(&place(&Digest::of(b"before"), numerics)[0], b"old").unwrap();
    }
    for round in 0..2 {
        for (numerics, wanted) in [Numerics::default(), bf16].into_iter().zip(&wanted) {
            let places = place(&source(), numerics);
            let (model, outcome) = load_with(&tiny, &cache(&places), numerics);
            assert!(outcome.unusable.is_empty(), "{:?}", outcome.unusable);
            assert_eq!((outcome.read.is_some(), outcome.written.is_some()), (round == 1, round == 0), "{numerics:?}");
            assert_eq!(logits(&model), *wanted, "{numerics:?}");
        }
    }
    let digits = &source().to_string()[..16];
    assert_eq!(
        names(dir.path()),
        [format!(".model.gguf.{digits}.bf16.packed"), format!(".model.gguf.{digits}.packed"), "model.gguf".to_owned()]
    );
    // Two bytes a weight: the table of 203 rows is filled up to 208, as is the output projection; both layers have 256 by 256 matrices but
    // for keys and values, of 64 rows.
    let rows = 2 * 208 + 2 * (5 * 256 + 2 * 64);
    let (_, outcome) = load_with(&tiny, &cache(&place(&source(), bf16)), bf16);
    assert_eq!(outcome.bytes, rows * 256 * 2);
    // One file in the other's place is told and packed over.
    let swapped = place(&source(), Numerics::default());
    let (model, outcome) = load_with(&tiny, &cache(&swapped), bf16);
    assert!(matches!(&outcome.unusable[..], [(_, Unusable::Length { .. })]), "{:?}", outcome.unusable);
    assert_eq!(logits(&model), wanted[1]);
}

#[test]
fn a_folder_keeps_its_file_inside_and_a_cache_folder_tells_models_of_one_name_apart() {
    let dir = tempfile::tempdir().unwrap();
    let cache = dir.path().join("packed");
    let (one, two) = (dir.path().join("one"), dir.path().join("two"));
    fs::create_dir_all(&one).unwrap();
    fs::create_dir_all(&two).unwrap();
    let places = packed_places(&one, &source(), Precision::Int15, Some(&cache));
    assert_eq!(places[0].parent(), Some(one.as_path()));
    assert_eq!(places[1].parent(), Some(cache.as_path()));
    let of = |path: &Path| packed_places(path, &source(), Precision::Int15, Some(&cache))[1].clone();
    assert_ne!(of(&one.join("model.gguf")), of(&two.join("model.gguf")));
}

#[test]
fn memory_that_is_not_there_is_an_error_and_no_reason_to_pack() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("tiny.packed");
    let tiny = tiny();
    load(&tiny, &cache(PackedMode::Copy, &[&path]));
    let threads = Arc::new(ThreadPool::new(1).expect("threads start"));
    let budget = MemoryBudget::new(1 << 20);
    let view = |role| tiny.view(role);
    let cache = cache(PackedMode::Copy, &[&path]);
    let fault = CpuModel::from_tensors_cached(&tiny.config, view, &cache, threads, &budget, Numerics::default()).err();
    assert!(matches!(fault, Some(CpuError::Weights(_))), "{fault:?}");
}
