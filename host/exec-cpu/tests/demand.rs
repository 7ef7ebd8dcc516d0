//! What is demanded before a model is loaded, against what its loading, its executors and their steps take. Alone in its process, whose
//! allocator counts.

mod support;

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use penstock_base::plan::{PlanOp, PlanRow, Task, TokenSource};
use penstock_base::{BatchId, BlockRef, RequestId, SeqId, Slot};
use penstock_exec::{BatchResult, Executor, Masks, SamplingParams, SlotOpening, Step};
use penstock_exec_cpu::{CpuExecutor, CpuModel, CpuOptions, Demand, KvDtype, MemoryBudget, Numerics};
use penstock_exec_cpu::{Precision, ThreadPool, Tier};
use penstock_model::{RopeLayout, SlidingWindow};
use support::{Noise, TinyModel};

/// Counts the bytes that are held, and the most since somebody asked.
struct Counting;

static HELD: AtomicUsize = AtomicUsize::new(0);
static PEAK: AtomicUsize = AtomicUsize::new(0);

// SAFETY: the system's allocator does the work; counting touches no memory of it.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let held = HELD.fetch_add(layout.size(), Ordering::Relaxed) + layout.size();
        PEAK.fetch_max(held, Ordering::Relaxed);
        // SAFETY: the caller's promise is passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        HELD.fetch_sub(layout.size(), Ordering::Relaxed);
        // SAFETY: the caller's promise is passed on.
        unsafe { System.dealloc(at, layout) }
    }
}

#[global_allocator]
static COUNTING: Counting = Counting;

fn held() -> i64 {
    HELD.load(Ordering::Relaxed) as i64
}

/// Bytes held after `work` beyond those before, the most in between likewise, and its result.
fn taken<T>(work: impl FnOnce() -> T) -> (i64, i64, T) {
    let before = held();
    PEAK.store(before as usize, Ordering::Relaxed);
    let result = work();
    (held() - before, PEAK.load(Ordering::Relaxed) as i64 - before, result)
}

const THREADS: usize = 2;
/// Structures themselves, maps of names while loading: whatever has a size that no model decides.
const ODDS_AND_ENDS: i64 = 16 << 10;

fn options() -> CpuOptions {
    CpuOptions { kv_blocks: 240, slots: 40, step_tokens_max: 160, context_tokens_max: 96, ..CpuOptions::default() }
}

/// Every sequence nearly as long as the context in the end, all at once; parameters that need all buffers.
fn steps() -> Vec<Step> {
    let options = options();
    let (slots, context, block) = (options.slots, options.context_tokens_max, options.block_size_tokens);
    let blocks = context / block;
    let mut noise = Noise(5);
    let seq = |slot: u32| SeqId { request: RequestId(u64::from(slot)), index: 0 };
    // The first batch is as long as one may be: two prompts, and sequences that begin with one token.
    let prompt_of = |slot: u32| [80, 42].get(slot as usize).copied().unwrap_or(1);
    (0..context - 1)
        .map(|number| {
            let mut step = Step::default();
            step.plan.batch = BatchId(u64::from(number) + 1);
            for slot in 0..slots {
                let prompt = prompt_of(slot);
                let params = SamplingParams {
                    temperature: 50.0,
                    top_p: 0.999,
                    repetition_penalty: 1.1,
                    frequency_penalty: 0.1,
                    logprobs: Some(20),
                    seed: u64::from(slot),
                    ..SamplingParams::default()
                };
                if number == 0 {
                    step.plan.ops.push(PlanOp::OpenSlot { slot: Slot(slot), seq: seq(slot) });
                    step.openings.push(SlotOpening {
                        slot: Slot(slot),
                        seq: seq(slot),
                        prompt: noise.tokens(prompt as usize, 203).into(),
                        generated: Vec::new(),
                        params: Arc::new(params),
                    });
                    step.plan.ops.extend((0..blocks).map(|index| PlanOp::SetBlock {
                        slot: Slot(slot),
                        group: 0,
                        index,
                        block: BlockRef { index: slot * blocks + index, generation: 1 },
                    }));
                }
                let (start, tokens) = if number == 0 { (0, prompt) } else { (prompt + number - 1, 1) };
                if start + tokens < context {
                    step.plan.rows.push(PlanRow {
                        slot: Slot(slot),
                        seq: seq(slot),
                        start,
                        tokens,
                        input: TokenSource::Known,
                        drafts: 0,
                        sample: true,
                        adapter: 0,
                        mask: 0,
                        task: Task::Generate,
                    });
                }
            }
            step
        })
        .collect()
}

fn check(name: &str, tiny: &TinyModel, numerics: Numerics) {
    let (view, options) = (|role| tiny.view(role), options());
    let demand = Demand::of_tensors(&tiny.config, view, numerics, THREADS, &options).expect("these kernels do it");
    let budget = MemoryBudget::new(1 << 30);
    let threads = Arc::new(ThreadPool::new(THREADS).expect("threads start"));

    let (held, _, model) = taken(|| CpuModel::from_tensors(&tiny.config, view, threads, &budget, numerics));
    let model = Arc::new(model.expect("loads"));
    let weights = held + (1 << 30) - budget.left_bytes() as i64;
    let wanted = demand.weights_bytes as i64;
    assert!((wanted..wanted + ODDS_AND_ENDS).contains(&weights), "{name}: weights take {weights}, demanded {wanted}");

    let left = budget.left_bytes();
    let (buffers, _, executor) = taken(|| CpuExecutor::new(model, &options, &budget));
    let mut executor = executor.expect("fits");
    let wanted = demand.buffers_bytes as i64;
    assert!((wanted..wanted + ODDS_AND_ENDS).contains(&buffers), "{name}: buffers take {buffers}, demanded {wanted}");
    let pool = left - budget.left_bytes();
    let blocks = demand.block_bytes as usize * options.kv_blocks as usize;
    assert!((blocks..blocks + (2 << 20)).contains(&pool), "{name}: the pool takes {pool}, demanded {blocks}");

    let (steps, mut result) = (steps(), BatchResult::default());
    let (mut grown, mut most) = (0, 0);
    for step in &steps {
        let (held, peak, ()) = taken(|| {
            executor.forward(step).expect("a sound plan");
            executor.sample(&Masks::default(), &mut result).expect("samples");
        });
        assert!(result.rows.iter().all(|row| !row.failed && row.tokens.len() == 1));
        most = most.max(grown + peak);
        grown += held;
    }
    let wanted = (demand.sequences_bytes + demand.threads_bytes) as i64;
    assert!(most <= wanted, "{name}: sequences and lists take {most}, demanded {wanted}");
    assert!(most > wanted / 8, "{name}: sequences and lists take {most}, and {wanted} are demanded for them");

    // Without sequences nothing is held beyond the buffers of the start and the last result: no pass has made them grow.
    let mut end = Step::default();
    end.plan.ops.extend((0..options.slots).map(|slot| PlanOp::DropSlot { slot: Slot(slot) }));
    let (given_back, _, ()) = taken(|| {
        executor.forward(&end).expect("a sound plan");
        drop(result);
    });
    let kept = grown + given_back;
    let wanted = demand.threads_bytes as i64 + ODDS_AND_ENDS;
    assert!(kept <= wanted, "{name}: {kept} bytes are kept without a sequence");
}

#[test]
fn what_is_demanded_is_what_is_taken() {
    for tier in Tier::ALL.into_iter().filter(|tier| tier.is_supported()) {
        for (precision, kv_dtype) in
            [(Precision::Int15, KvDtype::Bf16), (Precision::Int8, KvDtype::Int8), (Precision::Bf16, KvDtype::Bf16)]
        {
            let numerics = Numerics { tier, precision, kv_dtype };
            check(&format!("{tier}"), &TinyModel::new(RopeLayout::Interleaved, true), numerics);
            let mut gemma = TinyModel::new(RopeLayout::Halves, false).config;
            gemma.post_norms = true;
            gemma.qk_norm = true;
            gemma.qkv_bias = true;
            gemma.attn_output_bias = true;
            gemma.sliding_window =
                Some(SlidingWindow { tokens: 40, layers: vec![true, false], rope_theta: Some(1_000.0) });
            check(&format!("{tier}, with all parts"), &TinyModel::with_config(gemma), numerics);
        }
    }
}
