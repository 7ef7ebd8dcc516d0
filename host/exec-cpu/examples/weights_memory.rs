//! What it is worth where packed weights lie: in huge pages, in small anonymous pages, or in a mapped file. The three take turns; printed are
//! times of reading and checking, and medians of the ratio of decode times to those in huge pages, in processor time.
//!
//! `cargo run --profile ci -p penstock-exec-cpu --example weights_memory -- MODEL.gguf [threads]`

use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use penstock_exec_cpu::{
    CpuModel, Forward, Keep, MemoryBudget, Numerics, PackedCache, PackedMode, SequenceRows, ThreadPool,
};
use penstock_kernels_cpu::KvPool;
use penstock_model::{Model, OpenOptions};

const CONTEXT: usize = 128;
const ROUNDS: usize = 15;

fn main() {
    let mut arguments = std::env::args().skip(1);
    let Some(path) = arguments.next() else {
        eprintln!("usage: weights_memory MODEL.gguf [threads]");
        return;
    };
    let threads = arguments.next().and_then(|count| count.parse().ok()).unwrap_or(1);
    let model = Model::open(Path::new(&path), &OpenOptions::default(), &mut |_, _| {}).expect("opens");
    let pool = Arc::new(ThreadPool::new(threads).expect("threads start"));
    let file = std::env::temp_dir().join(format!("penstock-weights-{}.packed", std::process::id()));
    let load = |mode, name: &str| {
        let cache = PackedCache { mode, source: model.manifest().weights, places: vec![file.clone()] };
        let (start, used) = (Instant::now(), processor_seconds());
        let budget = MemoryBudget::new(8 << 30);
        let loaded = CpuModel::load_cached(&model, &cache, Arc::clone(&pool), &budget, Numerics::default());
        let (cpu, outcome) = loaded.expect("loads");
        let (took, used) = (start.elapsed().as_secs_f64(), processor_seconds() - used);
        let rate = outcome.bytes as f64 / used / 1e9;
        println!("{name}: {outcome}: {took:.3} s, {used:.3} s of processor time, {rate:.1} GB/s of it");
        let [anonymous, of_files] = huge_kib();
        println!("             mapped by huge pages so far: {} MiB, of files {} MiB", anonymous >> 10, of_files >> 10);
        Bench::new(Arc::new(cpu))
    };
    let huge = load(PackedMode::Copy, "first start");
    drop(huge);
    let mut huge = load(PackedMode::Copy, "huge pages ");
    forget(&file);
    let mut mapped = load(PackedMode::Map, "mapped file");
    // SAFETY: the call changes how later mappings of this process are backed, and no memory.
    unsafe { libc::prctl(libc::PR_SET_THP_DISABLE, 1, 0, 0, 0) };
    let mut small = load(PackedMode::Copy, "small pages");
    let _ = std::fs::remove_file(&file);
    for rows in [1, 16] {
        let mut ratios: [Vec<f64>; 2] = Default::default();
        let mut least = f64::INFINITY;
        for _ in 0..ROUNDS {
            let base = huge.decode(rows);
            least = least.min(base);
            ratios[0].push(small.decode(rows) / base);
            ratios[1].push(mapped.decode(rows) / base);
        }
        let [small, mapped] = ratios.map(median);
        println!(
            "{rows:2} rows: huge {:.2} ms; small pages {small:.2} times, mapped {mapped:.2} times that",
            least * 1e3
        );
    }
}

/// Takes the file out of the page cache, so that mapping reads it back as a start of another day does.
fn forget(file: &Path) {
    use std::os::fd::AsRawFd as _;
    let file = std::fs::File::open(file).expect("there");
    // SAFETY: the call names an open file and changes no memory.
    let code = unsafe { libc::posix_fadvise(file.as_raw_fd(), 0, 0, libc::POSIX_FADV_DONTNEED) };
    assert_eq!(code, 0, "the advice is understood");
}

/// KiB of this process that are mapped by huge pages, of anonymous memory and of files.
fn huge_kib() -> [u64; 2] {
    let text = std::fs::read_to_string("/proc/self/smaps_rollup").unwrap_or_default();
    ["AnonHugePages:", "FilePmdMapped:"].map(|key| {
        let line = text.lines().find_map(|line| line.strip_prefix(key)).unwrap_or_default();
        line.split_whitespace().next().and_then(|kib| kib.parse().ok()).unwrap_or(0)
    })
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

struct Bench {
    forward: Forward,
    kv: KvPool,
    logits: Vec<f32>,
}

impl Bench {
    fn new(model: Arc<CpuModel>) -> Self {
        let shape = Forward::kv_shape(&model, 16, 16 * (CONTEXT + 16) / 16);
        let kv = KvPool::new(&MemoryBudget::new(8 << 30), shape).expect("fits");
        let logits = vec![0.0; 16 * model.config().vocab];
        Self { forward: Forward::new(model), kv, logits }
    }

    /// Processor seconds of one step of `rows` sequences, layers and head.
    fn decode(&mut self, rows: usize) -> f64 {
        let blocks = (CONTEXT + 16) as u32 / 16;
        let tables: Vec<Vec<u32>> = (0..rows as u32).map(|row| (row * blocks..(row + 1) * blocks).collect()).collect();
        let batch =
            tables.iter().map(|table| SequenceRows { tokens: &[1000], context: CONTEXT, table, keep: Keep::Last });
        let batch: Vec<SequenceRows<'_>> = batch.collect();
        let start = processor_seconds();
        self.forward.run(&mut self.kv, &batch).expect("runs");
        let vocab = self.logits.len() / 16;
        self.forward.logits(0, rows, &mut self.logits[..rows * vocab]).expect("runs");
        processor_seconds() - start
    }
}

/// Processor time of this process so far.
fn processor_seconds() -> f64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the call writes one timespec.
    unsafe { libc::clock_gettime(libc::CLOCK_PROCESS_CPUTIME_ID, &mut time) };
    time.tv_sec as f64 + time.tv_nsec as f64 / 1e9
}
