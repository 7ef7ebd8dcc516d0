//! The executor as a replica drives it: plans in, tokens out. Whatever the schedule, a sequence gets the same tokens.

mod support;

use std::sync::Arc;

use penstock_base::plan::{BatchFailure, Plan, PlanOp, PlanRow, Task, TokenSource};
use penstock_base::{BatchId, BlockRef, RequestId, SeqId, Slot};
use penstock_exec::{BatchResult, Executor, Masks, SamplingParams, SlotOpening, Step};
use penstock_exec_cpu::{CpuError, CpuExecutor, CpuModel, CpuOptions, KvDtype, MemoryBudget, Numerics, Tier};
use penstock_model::RopeLayout;
use support::{Noise, TinyModel};

const BLOCK: u32 = 16;

fn options() -> CpuOptions {
    CpuOptions {
        kv_blocks: 80,
        block_size_tokens: BLOCK,
        slots: 12,
        step_tokens_max: 300,
        context_tokens_max: 0,
        kv_resident: true,
        kv_shared: false,
    }
}

fn executor(model: &Arc<CpuModel>) -> CpuExecutor {
    CpuExecutor::new(Arc::clone(model), &options(), &MemoryBudget::new(1 << 30)).expect("fits")
}

fn model(threads: usize) -> Arc<CpuModel> {
    TinyModel::new(RopeLayout::Interleaved, true).load(threads, Tier::detect())
}

fn seq(number: u64) -> SeqId {
    SeqId { request: RequestId(number), index: 0 }
}

fn block(index: u32) -> BlockRef {
    BlockRef { index, generation: 1 }
}

fn row(slot: u32, of: SeqId, start: usize, tokens: usize, sample: bool) -> PlanRow {
    PlanRow {
        slot: Slot(slot),
        seq: of,
        start: start as u32,
        tokens: tokens as u32,
        input: TokenSource::Known,
        drafts: 0,
        sample,
        adapter: 0,
        mask: 0,
        task: Task::Generate,
    }
}

/// A sequence and what is known of it outside the executor.
struct Job {
    seq: SeqId,
    prompt: Arc<[u32]>,
    params: Arc<SamplingParams>,
    generated: Vec<u32>,
    want: usize,
    computed: usize,
    table: Vec<u32>,
    open: bool,
}

fn jobs(count: u64) -> Vec<Job> {
    let mut noise = Noise(11);
    (0..count)
        .map(|i| {
            let length = 1 + noise.below(60);
            let params = match i % 4 {
                0 => SamplingParams::default(),
                1 => SamplingParams { temperature: 1.0, seed: i, ..SamplingParams::default() },
                2 => SamplingParams {
                    temperature: 0.8,
                    top_k: 20,
                    top_p: 0.9,
                    repetition_penalty: 1.2,
                    seed: i,
                    ..SamplingParams::default()
                },
                _ => SamplingParams {
                    temperature: 1.3,
                    min_p: 0.05,
                    frequency_penalty: 0.5,
                    presence_penalty: 0.2,
                    logprobs: Some(3),
                    seed: i,
                    ..SamplingParams::default()
                },
            };
            Job {
                seq: seq(i),
                prompt: noise.tokens(length, 203).into(),
                params: Arc::new(params),
                generated: Vec::new(),
                want: 12,
                computed: 0,
                table: Vec::new(),
                open: false,
            }
        })
        .collect()
}

/// How a set of jobs is driven.
struct Schedule {
    /// Most prompt tokens of one row.
    chunk: usize,
    /// Jobs in the batch at once.
    width: usize,
    /// Every so many steps the first running job is preempted: dropped, and recomputed later from its history.
    preempt_every: usize,
    placement: u64,
}

/// Runs all jobs to their end and returns each one's tokens with their log-probability's bits.
fn drive(executor: &mut CpuExecutor, mut jobs: Vec<Job>, schedule: &Schedule) -> Vec<Vec<(u32, u32)>> {
    let mut free = Noise(schedule.placement).shuffled(80);
    let mut out: Vec<Vec<(u32, u32)>> = vec![Vec::new(); jobs.len()];
    let mut running: Vec<usize> = Vec::new();
    let mut waiting: Vec<usize> = (0..jobs.len()).rev().collect();
    let mut step_number = 0;
    let mut result = BatchResult::default();
    loop {
        while running.len() < schedule.width && !waiting.is_empty() {
            running.extend(waiting.pop());
        }
        if running.is_empty() {
            return out;
        }
        step_number += 1;
        let mut step = Step::default();
        step.plan.batch = BatchId(step_number as u64);
        let mut budget = 300;
        for &i in &running {
            let job = &mut jobs[i];
            let slot = i as u32 % 12;
            let history = job.prompt.len() + job.generated.len();
            let tokens = (history - job.computed).min(schedule.chunk).min(budget);
            if tokens == 0 {
                continue;
            }
            budget -= tokens;
            if !job.open {
                job.open = true;
                step.plan.ops.push(PlanOp::OpenSlot { slot: Slot(slot), seq: job.seq });
                step.openings.push(SlotOpening {
                    slot: Slot(slot),
                    seq: job.seq,
                    prompt: Arc::clone(&job.prompt),
                    generated: job.generated.clone(),
                    params: Arc::clone(&job.params),
                });
            }
            while job.table.len() * (BLOCK as usize) < job.computed + tokens {
                let at = free.pop().expect("enough blocks");
                let index = job.table.len() as u32;
                step.plan.ops.push(PlanOp::SetBlock { slot: Slot(slot), group: 0, index, block: block(at) });
                job.table.push(at);
            }
            let sample = job.computed + tokens == history;
            step.plan.rows.push(row(slot, job.seq, job.computed, tokens, sample));
            job.computed += tokens;
        }
        executor.forward(&step).expect("a sound plan");
        executor.sample(&Masks::default(), &mut result).expect("samples");
        assert_eq!(result.batch, step.plan.batch);
        assert_eq!(result.rows.len(), step.plan.rows.len());
        for (got, row) in result.rows.iter().zip(&step.plan.rows) {
            assert!((got.slot, got.seq) == (row.slot, row.seq) && !got.failed && !got.stop);
            assert_eq!(got.tokens.len(), usize::from(row.sample));
            for token in &got.tokens {
                let i = got.seq.request.0 as usize;
                jobs[i].generated.push(token.id);
                out[i].push((token.id, token.logprob.to_bits()));
            }
        }
        let mut drop = |i: usize, jobs: &mut Vec<Job>| {
            let mut step = Step::default();
            step.plan.ops.push(PlanOp::DropSlot { slot: Slot(i as u32 % 12) });
            executor.forward(&step).expect("a sound plan");
            jobs[i].open = false;
            jobs[i].computed = 0;
            free.append(&mut jobs[i].table);
        };
        let mut i = 0;
        while i < running.len() {
            let job = running[i];
            if jobs[job].generated.len() >= jobs[job].want {
                drop(job, &mut jobs);
                running.remove(i);
            } else {
                i += 1;
            }
        }
        if schedule.preempt_every > 0 && step_number % schedule.preempt_every == 0 && running.len() > 1 {
            let victim = running.remove(0);
            drop(victim, &mut jobs);
            waiting.insert(0, victim);
        }
    }
}

#[test]
fn tokens_do_not_depend_on_the_schedule() {
    let plain = Schedule { chunk: 300, width: 1, preempt_every: 0, placement: 1 };
    let wanted = drive(&mut executor(&model(1)), jobs(10), &plain);
    assert!(wanted.iter().all(|tokens| tokens.len() == 12));
    for (threads, schedule) in [
        (1, Schedule { width: 10, ..plain }),
        (2, Schedule { width: 10, chunk: 7, ..plain }),
        (1, Schedule { width: 4, chunk: 1, placement: 2, ..plain }),
        (3, Schedule { width: 5, chunk: 16, preempt_every: 3, placement: 3 }),
        (2, Schedule { width: 10, chunk: 40, preempt_every: 2, placement: 4 }),
    ] {
        let got = drive(&mut executor(&model(threads)), jobs(10), &schedule);
        assert_eq!(got, wanted, "width {} chunk {} preempt {}", schedule.width, schedule.chunk, schedule.preempt_every);
    }
}

#[test]
fn replicas_share_weights_and_threads() {
    let model = model(2);
    let schedule = Schedule { chunk: 50, width: 5, preempt_every: 0, placement: 1 };
    let wanted = drive(&mut executor(&model), jobs(6), &schedule);
    let handles: Vec<_> = (0..3)
        .map(|placement| {
            let mut executor = executor(&model);
            std::thread::spawn(move || {
                drive(&mut executor, jobs(6), &Schedule { chunk: 50, width: 5, preempt_every: 0, placement })
            })
        })
        .collect();
    for handle in handles {
        assert_eq!(handle.join().expect("no replica panics"), wanted);
    }
}

/// A step that opens slot 0 with `prompt`, sets its blocks and samples behind it.
#[cfg(target_os = "linux")]
#[test]
fn a_pool_in_a_memfd_computes_the_same_and_others_can_read_it() {
    use std::os::unix::fs::FileExt as _;
    let model = model(2);
    let schedule = Schedule { chunk: 16, width: 4, preempt_every: 7, placement: 3 };
    let mut private = executor(&model);
    assert!(private.kv_memory().expect("it lets its KV be moved").memory.memfd().is_none());
    for kv_resident in [false, true] {
        let options = CpuOptions { kv_shared: true, kv_resident, ..options() };
        let budget = MemoryBudget::new(1 << 30);
        let mut shared = CpuExecutor::new(Arc::clone(&model), &options, &budget).expect("fits");
        let expected = drive(&mut private, jobs(8), &schedule);
        assert_eq!(drive(&mut shared, jobs(8), &schedule), expected);
        // What another process would find there is what this one has.
        let kv = shared.kv_memory().expect("it lets its KV be moved").memory;
        let memfd = kv.memfd().expect("it lies in one").try_clone_to_owned().expect("a descriptor");
        let mut bytes = vec![0; kv.bytes()];
        std::fs::File::from(memfd).read_exact_at(&mut bytes, 0).expect("it is as long as the pool");
        // SAFETY: nobody writes the pool now, and it is kept here.
        let own = unsafe { std::slice::from_raw_parts(kv.base().as_ptr(), kv.bytes()) };
        assert!(bytes == own && own.iter().any(|byte| *byte != 0));
    }
}

fn opening(prompt: &[u32], params: SamplingParams) -> Step {
    let mut step = Step {
        plan: Plan { batch: BatchId(1), ..Plan::default() },
        openings: vec![SlotOpening {
            slot: Slot(0),
            seq: seq(7),
            prompt: prompt.into(),
            generated: Vec::new(),
            params: Arc::new(params),
        }],
    };
    step.plan.ops.push(PlanOp::OpenSlot { slot: Slot(0), seq: seq(7) });
    for index in 0..(prompt.len() as u32 + 8).div_ceil(BLOCK) {
        step.plan.ops.push(PlanOp::SetBlock { slot: Slot(0), group: 0, index, block: block(index) });
    }
    step.plan.rows.push(row(0, seq(7), 0, prompt.len(), true));
    step
}

fn sampled(executor: &mut CpuExecutor, step: &Step) -> BatchResult {
    executor.forward(step).expect("a sound plan");
    let mut result = BatchResult::default();
    executor.sample(&Masks::default(), &mut result).expect("samples");
    result
}

#[test]
fn a_fork_by_copied_block_continues_like_its_parent() {
    let mut executor = executor(&model(1));
    let prompt = Noise(3).tokens(21, 203);
    let first = sampled(&mut executor, &opening(&prompt, SamplingParams::default())).rows[0].tokens[0].id;
    // The second sequence shares the full block 0 and copies the partly filled block 1.
    let mut step = Step { openings: vec![], plan: Plan { batch: BatchId(2), ..Plan::default() } };
    step.openings.push(SlotOpening {
        slot: Slot(1),
        seq: seq(8),
        prompt: prompt.clone().into(),
        generated: vec![first],
        params: Arc::new(SamplingParams::default()),
    });
    step.plan.ops.extend([
        PlanOp::OpenSlot { slot: Slot(1), seq: seq(8) },
        PlanOp::SetBlock { slot: Slot(1), group: 0, index: 0, block: block(0) },
        PlanOp::CopyBlock { from: block(1), to: block(40), tokens: 5 },
        PlanOp::SetBlock { slot: Slot(1), group: 0, index: 1, block: block(40) },
    ]);
    step.plan.rows = vec![row(0, seq(7), 21, 1, true), row(1, seq(8), 21, 1, true)];
    let both = sampled(&mut executor, &step);
    assert_eq!(both.rows[0].tokens, both.rows[1].tokens);
    // A prefix from the cache (block 0) and the rest computed: equal again.
    let mut step = opening(&prompt, SamplingParams::default());
    step.plan.ops[2] = PlanOp::SetBlock { slot: Slot(0), group: 0, index: 1, block: block(50) };
    step.plan.rows = vec![row(0, seq(7), 16, 5, true)];
    assert_eq!(sampled(&mut executor, &step).rows[0].tokens[0].id, first);
}

#[test]
fn stop_tokens_are_reported_and_min_tokens_keeps_them_away() {
    let prompt = Noise(4).tokens(9, 203);
    let greedy = sampled(&mut executor(&model(1)), &opening(&prompt, SamplingParams::default())).rows[0].tokens[0].id;
    let stopping = SamplingParams { stop_tokens: vec![greedy], ..SamplingParams::default() };
    let stopped = sampled(&mut executor(&model(1)), &opening(&prompt, stopping.clone()));
    assert!(stopped.rows[0].stop && stopped.rows[0].tokens[0].id == greedy);
    let later = SamplingParams { min_tokens: 1, ..stopping };
    let went_on = sampled(&mut executor(&model(1)), &opening(&prompt, later));
    assert!(!went_on.rows[0].stop && went_on.rows[0].tokens[0].id != greedy);
}

#[test]
fn a_mask_is_found_by_its_handle() {
    let mut executor = executor(&model(1));
    let mut step = opening(&[1, 2, 3], SamplingParams::default());
    step.plan.rows[0].mask = 5;
    let allowed = [0u64, 1 << 11, 0, 0];
    executor.forward(&step).expect("a sound plan");
    let mut result = BatchResult::default();
    executor.sample(&Masks { entries: &[(4, &[1]), (5, &allowed)] }, &mut result).expect("samples");
    assert_eq!(result.rows[0].tokens[0].id, 75);
    step.plan.ops.clear();
    step.openings.clear();
    step.plan.rows = vec![PlanRow { mask: 6, ..row(0, seq(7), 3, 1, true) }];
    executor.forward(&step).expect("a sound plan");
    executor.sample(&Masks::default(), &mut result).expect("samples");
    assert!(result.rows[0].failed, "a row whose mask is missing fails alone");
}

#[test]
fn an_unsound_plan_fails_whole_and_changes_nothing() {
    type Spoil = fn(&mut Step);
    let spoils: [(&str, Spoil); 22] = [
        ("unknown slot", |s| s.plan.rows.push(row(3, seq(7), 0, 1, false))),
        ("another sequence", |s| s.plan.rows[0].seq = seq(9)),
        ("two rows", |s| s.plan.rows.push(row(0, seq(7), 0, 1, false))),
        ("no token", |s| s.plan.rows[0].tokens = 0),
        ("past the history", |s| s.plan.rows[0].start = 1),
        ("position overflow", |s| s.plan.rows[0].start = u32::MAX),
        ("sampling inside the history", |s| s.plan.rows[0].tokens = 5),
        ("drafts", |s| s.plan.rows[0].drafts = 1),
        ("adapter", |s| s.plan.rows[0].adapter = 1),
        ("pooling", |s| s.plan.rows[0].task = Task::Pool),
        ("table too short", |s| s.plan.ops.truncate(2)),
        ("table with a gap", |s| {
            s.plan.ops.push(PlanOp::SetBlock { slot: Slot(0), group: 0, index: 9, block: block(9) })
        }),
        ("kv group", |s| s.plan.ops.push(PlanOp::SetBlock { slot: Slot(0), group: 1, index: 0, block: block(9) })),
        ("block", |s| s.plan.ops.push(PlanOp::SetBlock { slot: Slot(0), group: 0, index: 0, block: block(80) })),
        ("copy from", |s| s.plan.ops.push(PlanOp::CopyBlock { from: block(80), to: block(9), tokens: 1 })),
        ("copy to", |s| s.plan.ops.push(PlanOp::CopyBlock { from: block(9), to: block(80), tokens: 1 })),
        ("copy length", |s| s.plan.ops.push(PlanOp::CopyBlock { from: block(9), to: block(8), tokens: 17 })),
        ("dropped slot", |s| s.plan.ops.push(PlanOp::DropSlot { slot: Slot(0) })),
        ("no opening", |s| s.openings.clear()),
        ("opening of another", |s| s.openings[0].seq = seq(9)),
        ("opening too many", |s| s.openings.push(s.openings[0].clone())),
        ("token out of range", |s| s.openings[0].prompt = vec![203; 25].into()),
    ];
    let prompt = Noise(5).tokens(25, 203);
    let wanted = sampled(&mut executor(&model(1)), &opening(&prompt, SamplingParams::default()));
    let mut executor = executor(&model(1));
    for (name, spoil) in spoils {
        let mut step = opening(&prompt, SamplingParams::default());
        // A copy that must not happen when the plan fails: it would overwrite nothing visible, but the slot below would exist.
        spoil(&mut step);
        let error = executor.forward(&step).expect_err(name);
        assert_eq!(error.failure, BatchFailure::Batch, "{name}: {error}");
        let mut result = BatchResult::default();
        executor.sample(&Masks::default(), &mut result).expect("nothing to sample");
        assert!(result.rows.is_empty(), "{name}");
        let mut step = Step::default();
        step.plan.rows.push(row(0, seq(7), 0, 1, false));
        executor.forward(&step).expect_err("the slot was never opened");
        step.plan.rows.clear();
        step.plan.ops.push(PlanOp::DropSlot { slot: Slot(0) });
        executor.forward(&step).expect("dropping what is not open is how a driver cleans up");
    }
    let slots_full = Step {
        plan: Plan { ops: vec![PlanOp::OpenSlot { slot: Slot(12), seq: seq(7) }], ..Plan::default() },
        openings: vec![SlotOpening {
            slot: Slot(12),
            ..opening(&prompt, SamplingParams::default()).openings[0].clone()
        }],
    };
    executor.forward(&slots_full).expect_err("slot 12 of 12");
    let long = opening(&Noise(6).tokens(301, 203), SamplingParams::default());
    assert!(executor.forward(&long).expect_err("301 of 300").message.contains("301 query tokens"));
    let got = sampled(&mut executor, &opening(&prompt, SamplingParams::default()));
    assert_eq!(got.rows[0].tokens, wanted.rows[0].tokens);
}

#[test]
fn geometry_and_options_are_checked() {
    let model = model(1);
    let executor = executor(&model);
    let geometry = executor.geometry();
    assert_eq!((geometry.block_size_tokens, geometry.blocks, geometry.slots), (16, 80, 12));
    // Two layers, keys and values of two heads of 32, two bytes each.
    assert_eq!(geometry.kv_token_bytes, 2 * 2 * 2 * 32 * 2);
    // A byte each in int8, and a scale of four for the keys and one for the values of each head.
    let numerics = Numerics { kv_dtype: KvDtype::Int8, ..Numerics::default() };
    let int8 = self::executor(&TinyModel::new(RopeLayout::Interleaved, true).load_with(1, numerics));
    assert_eq!(int8.geometry().kv_token_bytes, 2 * 2 * 2 * (32 + 4));
    assert_eq!((geometry.context_tokens_max, geometry.vocabulary, geometry.step_tokens_max), (512, 203, 300));
    let build = |options: CpuOptions, budget: usize| {
        CpuExecutor::new(Arc::clone(&model), &options, &MemoryBudget::new(budget)).map(|e| e.geometry().clone())
    };
    let budget = 1 << 30;
    assert_eq!(
        build(CpuOptions { context_tokens_max: 100, ..options() }, budget).expect("fits").context_tokens_max,
        100
    );
    assert_eq!(
        build(CpuOptions { context_tokens_max: 9999, ..options() }, budget).expect("fits").context_tokens_max,
        512
    );
    for bad in [
        CpuOptions { kv_blocks: 0, ..options() },
        CpuOptions { slots: 0, ..options() },
        CpuOptions { slots: 1025, ..options() },
        CpuOptions { step_tokens_max: 0, ..options() },
    ] {
        assert!(matches!(build(bad, budget), Err(CpuError::Option { .. })), "{bad:?}");
    }
    assert!(matches!(build(CpuOptions { block_size_tokens: 10, ..options() }, budget), Err(CpuError::Kv(_))));
    assert!(matches!(build(options(), 1 << 20), Err(CpuError::Kv(_))));
}
