//! One replica's executor.

use std::sync::Arc;

use penstock_base::plan::BatchFailure;
use penstock_base::{BatchId, SeqId, Slot, limits};
use penstock_exec::{BatchResult, ExecError, Executor, Geometry, Masks, RowResult, SampledToken, Step};
use penstock_kernels_cpu::{KvPool, MemoryBudget, TaskPanicked};

use crate::error::CpuError;
use crate::forward::{Forward, Keep, SequenceRows};
use crate::model::CpuModel;
use crate::sampling::{Request, Sampler};
use crate::slots::{PlanLimits, SlotTable};

/// Rows of logits held at once: bounds their memory however many sequences sample in a step.
const LOGIT_ROWS: usize = 32;

/// Sizes of one replica.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CpuOptions {
    /// Blocks in the KV pool.
    pub kv_blocks: u32,
    /// Tokens per block; a multiple of 16.
    pub block_size_tokens: u32,
    /// Most sequences at once.
    pub slots: u32,
    /// Most query tokens in a step.
    pub step_tokens_max: u32,
    /// Longest sequence in tokens; 0 is the model's own limit, and more than that is cut to it.
    pub context_tokens_max: u32,
}

impl Default for CpuOptions {
    /// 1,024 blocks of 16 tokens, 32 sequences, 512 query tokens a step, the model's context.
    fn default() -> Self {
        Self { kv_blocks: 1024, block_size_tokens: 16, slots: 32, step_tokens_max: 512, context_tokens_max: 0 }
    }
}

/// Computes the steps of one replica on the CPU.
///
/// Row-invariant: the bits of a row's logits, and so its tokens, do not depend on batch, neighbours, chunking, block placement, threads or
/// instruction set.
#[derive(Debug)]
pub struct CpuExecutor {
    geometry: Geometry,
    forward: Forward,
    kv: KvPool,
    slots: SlotTable,
    /// Rows of the last batch.
    rows: Vec<BatchRow>,
    batch: BatchId,
    logits: Vec<f32>,
    samplers: Vec<Sampler>,
}

#[derive(Clone, Copy, Debug)]
struct BatchRow {
    slot: Slot,
    seq: SeqId,
    sample: bool,
    mask: u32,
}

/// One row on its way through the sampler.
struct Choice<'a> {
    row: usize,
    logits: &'a mut [f32],
    sampler: &'a mut Sampler,
    request: Option<Request<'a>>,
    token: Option<SampledToken>,
}

impl CpuExecutor {
    /// A replica of `model`, its KV pool taken from `budget`.
    ///
    /// # Errors
    /// [`CpuError`] when an option is out of range or memory runs out.
    pub fn new(model: Arc<CpuModel>, options: &CpuOptions, budget: &MemoryBudget) -> Result<Self, CpuError> {
        let check = |option, value: u32, min: u64, max: u64| {
            let value = u64::from(value);
            if (min..=max).contains(&value) { Ok(()) } else { Err(CpuError::Option { option, value, min, max }) }
        };
        check("kv_blocks", options.kv_blocks, 1, u64::from(limits::POOL_BLOCKS_MAX))?;
        check("slots", options.slots, 1, limits::SLOTS_MAX as u64)?;
        check("step_tokens_max", options.step_tokens_max, 1, u64::from(limits::STEP_TOKENS_MAX))?;
        let config = model.config();
        let context = u32::try_from(config.context_length).unwrap_or(u32::MAX);
        let shape = Forward::kv_shape(&model, options.block_size_tokens as usize, options.kv_blocks as usize);
        let kv = KvPool::new(budget, shape)?;
        let geometry = Geometry {
            block_size_tokens: options.block_size_tokens,
            blocks: options.kv_blocks,
            kv_token_bytes: shape.token_bytes().unwrap_or_default() as u64,
            slots: options.slots,
            step_tokens_max: options.step_tokens_max,
            context_tokens_max: match options.context_tokens_max {
                0 => context,
                wanted => wanted.min(context),
            },
            vocabulary: u32::try_from(config.vocab).unwrap_or(u32::MAX),
        };
        Ok(Self {
            geometry,
            forward: Forward::new(model),
            kv,
            slots: SlotTable::default(),
            rows: Vec::new(),
            batch: BatchId(0),
            logits: Vec::new(),
            samplers: Vec::new(),
        })
    }

    fn limits(&self) -> PlanLimits {
        PlanLimits {
            block_tokens: self.geometry.block_size_tokens as usize,
            blocks: self.geometry.blocks as usize,
            slots: self.geometry.slots as usize,
            step_tokens: self.geometry.step_tokens_max as usize,
            context_tokens: self.geometry.context_tokens_max as usize,
            vocabulary: self.geometry.vocabulary as usize,
        }
    }

    /// Samples for the rows `chosen` (numbers in the batch), whose hidden states begin at kept row `first`.
    fn sample_chunk(
        &mut self,
        chosen: &[usize],
        first: usize,
        masks: &Masks<'_>,
        results: &mut [RowResult],
    ) -> Result<(), TaskPanicked> {
        let model = Arc::clone(self.forward.model());
        let vocab = model.config().vocab;
        self.logits.resize(chosen.len() * vocab, 0.0);
        self.forward.logits(first, chosen.len(), &mut self.logits)?;
        if self.samplers.len() < chosen.len() {
            self.samplers.resize_with(chosen.len(), || Sampler::new(model.tier()));
        }
        let buffers = self.logits.chunks_exact_mut(vocab).zip(&mut self.samplers);
        let mut choices: Vec<Choice<'_>> = chosen
            .iter()
            .zip(buffers)
            .map(|(&row, (logits, sampler))| {
                let BatchRow { slot, mask, .. } = self.rows[row];
                let mask = match mask {
                    0 => Some(None),
                    handle => masks.entries.iter().find(|(of, _)| *of == handle).map(|(_, bits)| Some(*bits)),
                };
                let request = self.slots.get(slot).zip(mask).map(|(state, mask)| Request {
                    params: &state.params,
                    token_index: state.generated_len() as u64,
                    seen: state.seen.as_ref(),
                    mask,
                });
                Choice { row, logits, sampler, request, token: None }
            })
            .collect();
        model.threads().enter().each(&mut choices, |_, choice| {
            choice.token = choice.request.and_then(|request| choice.sampler.sample(choice.logits, request));
        })?;
        let tokens: Vec<(usize, Option<SampledToken>)> =
            choices.into_iter().map(|choice| (choice.row, choice.token)).collect();
        for (row, token) in tokens {
            let result = &mut results[row];
            match (token, self.slots.get_mut(result.slot)) {
                (Some(token), Some(state)) => {
                    result.stop = state.params.stop_tokens.contains(&token.id);
                    state.push(token.id);
                    result.tokens.push(token);
                }
                _ => result.failed = true,
            }
        }
        Ok(())
    }
}

/// A kernel that panicked leaves blocks half written: nothing of this executor can be trusted further.
fn broken(panic: TaskPanicked) -> ExecError {
    ExecError { failure: BatchFailure::Executor, message: panic.to_string() }
}

impl Executor for CpuExecutor {
    fn geometry(&self) -> &Geometry {
        &self.geometry
    }

    fn forward(&mut self, step: &Step) -> Result<(), ExecError> {
        self.rows.clear();
        self.batch = step.plan.batch;
        self.slots
            .check(step, &self.limits())
            .map_err(|message| ExecError { failure: BatchFailure::Batch, message })?;
        self.slots.apply(step, |from, to| self.kv.copy_block(from, to));
        let batch: Vec<SequenceRows<'_>> = step
            .plan
            .rows
            .iter()
            .filter_map(|row| {
                let state = self.slots.get(row.slot)?;
                let (start, end) = (row.start as usize, row.start as usize + row.tokens as usize);
                Some(SequenceRows {
                    tokens: &state.tokens[start..end],
                    context: start,
                    table: &state.table,
                    keep: if row.sample { Keep::Last } else { Keep::None },
                })
            })
            .collect();
        self.forward.run(&mut self.kv, &batch).map_err(broken)?;
        self.rows.extend(step.plan.rows.iter().map(|row| BatchRow {
            slot: row.slot,
            seq: row.seq,
            sample: row.sample,
            mask: row.mask,
        }));
        Ok(())
    }

    fn sample(&mut self, masks: &Masks<'_>, out: &mut BatchResult) -> Result<(), ExecError> {
        out.batch = self.batch;
        out.rows.clear();
        out.rows.extend(self.rows.iter().map(|row| RowResult {
            slot: row.slot,
            seq: row.seq,
            tokens: Vec::new(),
            stop: false,
            failed: false,
        }));
        let chosen: Vec<usize> = (0..self.rows.len()).filter(|&row| self.rows[row].sample).collect();
        for (chunk, rows) in chosen.chunks(LOGIT_ROWS).enumerate() {
            self.sample_chunk(rows, chunk * LOGIT_ROWS, masks, &mut out.rows).map_err(broken)?;
        }
        self.rows.clear();
        Ok(())
    }
}
