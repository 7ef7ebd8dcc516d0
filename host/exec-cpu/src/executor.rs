//! One replica's executor.

use std::ptr::NonNull;
use std::sync::Arc;

use penstock_base::plan::BatchFailure;
use penstock_base::{BatchId, SeqId, Slot, limits};
use penstock_exec::{
    BatchResult, ExecError, Executor, Geometry, KvBytes, KvMemory, Masks, RowResult, SampledToken, Step,
};
use penstock_kernels_cpu::{HugeBuffer, KvDtype, KvPool, MemoryBudget, TaskPanicked};
use penstock_model::ModelConfig;

use crate::error::CpuError;
use crate::forward::{Forward, ForwardRoom, Keep, SequenceRows};
use crate::model::CpuModel;
use crate::sampling::{Request, Sampler};
use crate::slots::{PlanLimits, SlotTable};

/// Rows of logits held at once: bounds their memory however many sequences sample in a step.
const LOGIT_ROWS: usize = 32;

/// Samplers a thread gets, each for some of the rows: enough to even out rows of unequal work, and few, since one holds several numbers for
/// every token of the vocabulary.
const SAMPLERS_PER_THREAD: usize = 4;

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
    /// The KV pool is resident from the start; otherwise a page of it becomes so when its first token is stored.
    pub kv_resident: bool,
    /// The KV pool lies in a memfd, from which other processes of the host can read: for workers that hand off by `memfd`.
    pub kv_shared: bool,
}

impl Default for CpuOptions {
    /// 1,024 blocks of 16 tokens, 32 sequences, 512 query tokens a step, the model's context.
    fn default() -> Self {
        Self {
            kv_blocks: 1024,
            block_size_tokens: 16,
            slots: 32,
            step_tokens_max: 512,
            context_tokens_max: 0,
            kv_resident: true,
            kv_shared: false,
        }
    }
}

impl CpuOptions {
    /// The sizes of an executor with these options, which whoever only sends it requests must know too.
    pub fn geometry(&self, config: &ModelConfig, kv_dtype: KvDtype) -> Geometry {
        let shape = Forward::kv_shape_of(config, kv_dtype, self.block_size_tokens as usize, 1);
        Geometry {
            block_size_tokens: self.block_size_tokens,
            blocks: self.kv_blocks,
            kv_token_bytes: shape.token_bytes().unwrap_or_default() as u64,
            slots: self.slots,
            step_tokens_max: self.step_tokens_max,
            context_tokens_max: self.context_tokens(config),
            vocabulary: u32::try_from(config.vocab).unwrap_or(u32::MAX),
        }
    }

    /// Longest sequence of a model.
    pub(crate) fn context_tokens(&self, config: &ModelConfig) -> u32 {
        let context = u32::try_from(config.context_length).unwrap_or(u32::MAX);
        if self.context_tokens_max == 0 { context } else { self.context_tokens_max.min(context) }
    }

    /// What the passes of a model hold.
    pub(crate) fn room(&self, config: &ModelConfig) -> ForwardRoom {
        ForwardRoom {
            batch_rows: self.step_tokens_max as usize,
            kept_rows: self.slots.min(self.step_tokens_max) as usize,
            logit_rows: self.logit_rows(),
            table_blocks: self.context_tokens(config).div_ceil(self.block_size_tokens.max(1)) as usize,
        }
    }

    /// Rows of logits held at once.
    pub(crate) fn logit_rows(&self) -> usize {
        LOGIT_ROWS.min(self.slots as usize)
    }

    /// Samplers that work beside each other on as many threads.
    pub(crate) fn samplers(&self, threads: usize) -> usize {
        self.logit_rows().min(threads * SAMPLERS_PER_THREAD)
    }
}

/// Computes the steps of one replica on the CPU.
///
/// Row-invariant: the bits of a row's logits, and so its tokens, do not depend on batch, neighbours, chunking, block placement or threads, nor,
/// but with [`crate::Precision::Bf16`], on the instruction set.
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

/// One row on its way through a sampler.
struct Choice<'a> {
    row: usize,
    logits: &'a mut [f32],
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
        let (block_tokens, blocks) = (options.block_size_tokens as usize, options.kv_blocks as usize);
        let shape = Forward::kv_shape(&model, block_tokens, blocks);
        let kv = match (options.kv_shared, options.kv_resident) {
            (true, is_resident) => KvPool::shared(budget, shape, is_resident)?,
            (false, true) => KvPool::new(budget, shape)?,
            (false, false) => KvPool::on_use(budget, shape)?,
        };
        let geometry = options.geometry(config, shape.dtype);
        let (room, vocab) = (options.room(config), config.vocab);
        let samplers =
            (0..options.samplers(model.threads().threads())).map(|_| Sampler::with_room(model.tier(), vocab));
        Ok(Self {
            geometry,
            kv,
            slots: SlotTable::default(),
            rows: Vec::with_capacity(options.slots as usize),
            batch: BatchId(0),
            logits: Vec::with_capacity(room.logit_rows * vocab),
            samplers: samplers.collect(),
            forward: Forward::with_room(model, room),
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
        let mut choices: Vec<Choice<'_>> = chosen
            .iter()
            .zip(self.logits.chunks_exact_mut(vocab))
            .map(|(&row, logits)| {
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
                Choice { row, logits, request, token: None }
            })
            .collect();
        let share = choices.len().div_ceil(self.samplers.len()).max(1);
        let mut work: Vec<_> = choices.chunks_mut(share).zip(&mut self.samplers).collect();
        model.threads().enter().each(&mut work, |_, (choices, sampler)| {
            for choice in choices.iter_mut() {
                choice.token = choice.request.and_then(|request| sampler.sample(choice.logits, request));
            }
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

struct PoolBytes(Arc<HugeBuffer>);

// SAFETY: the mapping lives as long as the buffer, which is kept here, and the pool is accessed by address alone, block by block.
unsafe impl KvBytes for PoolBytes {
    fn base(&self) -> NonNull<u8> {
        self.0.base()
    }

    fn bytes(&self) -> usize {
        self.0.bytes()
    }

    #[cfg(target_os = "linux")]
    fn memfd(&self) -> Option<std::os::fd::BorrowedFd<'_>> {
        self.0.memfd()
    }
}

impl Executor for CpuExecutor {
    fn geometry(&self) -> &Geometry {
        &self.geometry
    }

    fn kv_memory(&self) -> Option<KvMemory> {
        let shape = self.kv.shape();
        let dtype_code = match shape.dtype {
            KvDtype::Bf16 => 1,
            KvDtype::Int8 => 2,
        };
        let memory = Arc::new(PoolBytes(self.kv.memory()));
        Some(KvMemory { memory, layers: u32::try_from(shape.layers).ok()?, dtype_code })
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
        let together = LOGIT_ROWS.min(self.geometry.slots as usize);
        for (chunk, rows) in chosen.chunks(together).enumerate() {
            self.sample_chunk(rows, chunk * together, masks, &mut out.rows).map_err(broken)?;
        }
        self.rows.clear();
        Ok(())
    }
}
