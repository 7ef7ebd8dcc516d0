//! How much memory do a model and its replicas take? Said before any of it is taken, by the formulas that it is taken by.

use penstock_kernels_cpu::gemm::thread_bytes;
use penstock_kernels_cpu::memory::{HUGE_PAGE_BYTES, mapped_bytes};
use penstock_model::weights::{LayerPart, TensorRole, TensorView};
use penstock_model::{Model, ModelConfig};

use crate::error::CpuError;
use crate::executor::CpuOptions;
use crate::forward::Forward;
use crate::matrices::{LAYER_MATRICES, MatrixPlan};
use crate::model::{Numerics, check};
use crate::sampling::Sampler;

/// Bytes that the lists of one step hold for a row: what is to be computed, for whom, and what came out, log-probabilities included.
const STEP_ROW_BYTES: usize = 2 << 10;

/// Bytes that a slot holds for a token of its sequence: the token, in a list that may have grown to twice its length, and its entry among those
/// that penalties look at.
const HISTORY_TOKEN_BYTES: usize = 2 * size_of::<u32>() + 24;

/// What is asked for, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Demand {
    /// Packed matrices and the vectors beside them, once for all replicas.
    pub weights_bytes: u64,
    /// What the compute threads keep, once for all replicas.
    pub threads_bytes: u64,
    /// Buffers of one replica's passes, its logits and samplers: there from the start.
    pub buffers_bytes: u64,
    /// Histories of one replica's sequences, as long as the context each, and the lists of a step.
    pub sequences_bytes: u64,
    /// Keys and values of a block.
    pub block_bytes: u64,
    /// Blocks of a sequence as long as the context.
    pub context_blocks: u32,
}

impl Demand {
    /// All that a replica takes beside its blocks: the rest of the last huge page of its pool, too.
    pub fn workspace_bytes(&self) -> u64 {
        self.buffers_bytes.saturating_add(self.sequences_bytes).saturating_add(HUGE_PAGE_BYTES as u64)
    }

    /// What `model` takes on `threads` threads, in replicas of these sizes. The number of blocks in `options` plays no part.
    ///
    /// # Errors
    /// [`CpuError`] when the model needs what these kernels do not do, or the blocks have no legal size.
    pub fn of(model: &Model, numerics: Numerics, threads: usize, options: &CpuOptions) -> Result<Self, CpuError> {
        Self::of_tensors(model.config(), |role| model.weights().get(role), numerics, threads, options)
    }

    /// As [`Demand::of`], from tensors of any source.
    ///
    /// # Errors
    /// As for [`Demand::of`], or [`CpuError::TensorMissing`].
    pub fn of_tensors<'a>(
        config: &ModelConfig,
        tensor: impl Fn(TensorRole) -> Option<TensorView<'a>>,
        numerics: Numerics,
        threads: usize,
        options: &CpuOptions,
    ) -> Result<Self, CpuError> {
        check(config, numerics.tier)?;
        let plan = MatrixPlan::new(config, numerics.precision, tensor)?;
        let shape = Forward::kv_shape_of(config, numerics.kv_dtype, options.block_size_tokens as usize, 1);
        let block_bytes = shape.block_bytes().ok_or(penstock_kernels_cpu::KvError::Shape(shape))?;
        let matrices = mapped_bytes(plan.bytes()).unwrap_or(usize::MAX);
        let room = options.room(config);
        let context = options.context_tokens(config) as usize;
        let slot = context.saturating_mul(HISTORY_TOKEN_BYTES) + 2 * room.table_blocks * size_of::<u32>();
        let logits = room.logit_rows * config.vocab * size_of::<f32>();
        let samplers = options.samplers(threads) * Sampler::room_bytes(config.vocab);
        Ok(Self {
            weights_bytes: matrices.saturating_add(vector_bytes(config)) as u64,
            threads_bytes: (threads * thread_bytes(numerics.precision, numerics.tier, plan.longest_input())) as u64,
            buffers_bytes: (room.bytes(config, numerics) + logits + samplers) as u64,
            sequences_bytes: slot.saturating_add(STEP_ROW_BYTES).saturating_mul(options.slots as usize) as u64,
            block_bytes: block_bytes as u64,
            context_blocks: u32::try_from(room.table_blocks).unwrap_or(u32::MAX),
        })
    }
}

/// Norms, biases and rotary frequencies.
fn vector_bytes(config: &ModelConfig) -> usize {
    let vectors = LayerPart::ALL.into_iter().filter(|part| !LAYER_MATRICES.contains(part));
    let layer: usize = vectors.filter_map(|part| part.shape(config)).map(|(rows, cols)| rows * cols).sum();
    let frequencies = config.rope_frequencies().len() + config.window_rope_frequencies().map_or(0, |list| list.len());
    (config.layers * layer + config.hidden) * size_of::<f32>() + frequencies * size_of::<f64>()
}
