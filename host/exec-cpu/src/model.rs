//! A model's weights as the kernels want them.

use std::collections::HashMap;
use std::sync::Arc;

use penstock_kernels_cpu::attention::HEAD_DIM_MAX;
use penstock_kernels_cpu::pointwise::Gate;
use penstock_kernels_cpu::weights::{BLOCK, WeightMemory};
use penstock_kernels_cpu::{Bf16Unit, KvDtype, MemoryBudget, PackedMatrix, Precision, RopePairs, ThreadPool, Tier};
use penstock_model::weights::{LayerPart, TensorRole, TensorView};
use penstock_model::{Activation, Model, ModelConfig, RopeLayout};

use crate::error::CpuError;
use crate::matrices::MatrixPlan;
use crate::packed_cache::{PackedCache, PackedOutcome};

/// How a model is to be computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Numerics {
    /// Instruction set. All give equal bits, but for `Precision::Bf16`.
    pub tier: Tier,
    /// How the inputs of products are rounded. This changes results, so replicas that serve one model must agree on it.
    ///
    /// On the demo model, against f32 activations: `Int15` ranks the same token first at 99.5 % of positions, `Int8` at 95.9 %, for 1.2 to
    /// 1.8 times the speed. `Bf16` also packs the weights as bfloat16; its bits depend on what the tier and the CPU multiply those with.
    pub precision: Precision,
    /// How keys and values are held. This changes results, too, so that blocks of one kind are of no use to a replica of the other.
    ///
    /// On the demo model `Int8` takes 0.53 of the memory of `Bf16`.
    pub kv_dtype: KvDtype,
}

impl Numerics {
    /// What decides the bits of products, by name: `int15`, or `bf16/avx512-bf16` with the unit that this CPU multiplies bfloat16 with.
    /// Keys and values of differing names are not each other's, whatever else is equal; how they are held ([`KvDtype`]) is named apart.
    pub fn products(&self) -> String {
        match self.precision {
            Precision::Bf16 => format!("{}/{}", self.precision.name(), Bf16Unit::of(self.tier)),
            Precision::Int8 | Precision::Int15 => self.precision.name().to_owned(),
        }
    }
}

impl Default for Numerics {
    /// The fastest tier of this machine, the fine rounding, and bfloat16 keys and values.
    fn default() -> Self {
        Self { tier: Tier::detect(), precision: Precision::Int15, kv_dtype: KvDtype::Bf16 }
    }
}

/// Packed weights and the threads that multiply by them. Immutable; shared by the replicas of a process.
#[derive(Debug)]
pub struct CpuModel {
    pub(crate) config: ModelConfig,
    pub(crate) tier: Tier,
    pub(crate) precision: Precision,
    pub(crate) kv_dtype: KvDtype,
    pub(crate) threads: Arc<ThreadPool>,
    pub(crate) embedding: PackedMatrix,
    /// The output projection, unless it is the embedding.
    pub(crate) output: Option<PackedMatrix>,
    pub(crate) output_norm: Vec<f32>,
    pub(crate) layers: Vec<LayerWeights>,
    pub(crate) rope_pairs: RopePairs,
    /// Angle per position of each pair of a head.
    pub(crate) rope_frequencies: Vec<f64>,
    /// The same for layers with a window, where they rotate in their own way.
    pub(crate) window_rope_frequencies: Option<Vec<f64>>,
    pub(crate) gate: Gate,
}

/// One decoder layer.
#[derive(Debug)]
pub(crate) struct LayerWeights {
    pub(crate) attn_norm: Vec<f32>,
    pub(crate) q: PackedMatrix,
    pub(crate) k: PackedMatrix,
    pub(crate) v: PackedMatrix,
    /// Bias of the rows of q, k and v, one behind the other.
    pub(crate) qkv_bias: Option<Vec<f32>>,
    /// Norms of each head of q and of k.
    pub(crate) qk_norm: Option<[Vec<f32>; 2]>,
    pub(crate) attn_output: PackedMatrix,
    pub(crate) attn_output_bias: Option<Vec<f32>>,
    /// Norm of what attention adds to the residual stream.
    pub(crate) attn_post_norm: Option<Vec<f32>>,
    pub(crate) ffn_norm: Vec<f32>,
    pub(crate) gate: PackedMatrix,
    pub(crate) up: PackedMatrix,
    pub(crate) down: PackedMatrix,
    /// Norm of what the feed-forward block adds.
    pub(crate) ffn_post_norm: Option<Vec<f32>>,
    /// Tokens that a row sees in this layer; `None` for all.
    pub(crate) window: Option<usize>,
}

impl CpuModel {
    /// Packs the weights of an opened model, taking memory from `budget`, to run on `threads`.
    ///
    /// # Errors
    /// [`CpuError`] when the model needs what these kernels do not do, or memory runs out.
    pub fn load(
        model: &Model,
        threads: Arc<ThreadPool>,
        budget: &MemoryBudget,
        numerics: Numerics,
    ) -> Result<Self, CpuError> {
        Self::from_tensors(model.config(), |role| model.weights().get(role), threads, budget, numerics)
    }

    /// As [`CpuModel::load`], from tensors of any source.
    ///
    /// # Errors
    /// As for [`CpuModel::load`], or [`CpuError::TensorMissing`] when `tensor` lacks one that the configuration implies.
    pub fn from_tensors<'a>(
        config: &ModelConfig,
        tensor: impl Fn(TensorRole) -> Option<TensorView<'a>>,
        threads: Arc<ThreadPool>,
        budget: &MemoryBudget,
        numerics: Numerics,
    ) -> Result<Self, CpuError> {
        check(config, numerics.tier)?;
        let plan = MatrixPlan::new(config, numerics.precision, &tensor)?;
        let packed = plan.pack(&threads, budget)?;
        let matrices = plan.matrices_in(WeightMemory::Huge(packed), 0);
        Self::assemble(config, tensor, matrices, threads, numerics)
    }

    /// As [`CpuModel::load`], but where `cache` holds the packed weights of an earlier start they are read instead, and where it does not
    /// they are written for the next one. Tells what happened.
    ///
    /// # Errors
    /// As for [`CpuModel::load`]. A file that cannot be used or written is no error: the weights are packed, and the outcome says why.
    pub fn load_cached(
        model: &Model,
        cache: &PackedCache,
        threads: Arc<ThreadPool>,
        budget: &MemoryBudget,
        numerics: Numerics,
    ) -> Result<(Self, PackedOutcome), CpuError> {
        let tensor = |role| model.weights().get(role);
        Self::from_tensors_cached(model.config(), tensor, cache, threads, budget, numerics)
    }

    /// As [`CpuModel::load_cached`], from tensors of any source, which `cache` names by their digest.
    ///
    /// # Errors
    /// As for [`CpuModel::from_tensors`].
    pub fn from_tensors_cached<'a>(
        config: &ModelConfig,
        tensor: impl Fn(TensorRole) -> Option<TensorView<'a>>,
        cache: &PackedCache,
        threads: Arc<ThreadPool>,
        budget: &MemoryBudget,
        numerics: Numerics,
    ) -> Result<(Self, PackedOutcome), CpuError> {
        check(config, numerics.tier)?;
        let plan = MatrixPlan::new(config, numerics.precision, &tensor)?;
        let (matrices, outcome) = cache.matrices(&plan, &threads, budget)?;
        Ok((Self::assemble(config, tensor, matrices, threads, numerics)?, outcome))
    }

    /// Puts a model together from its packed matrices and the vectors of the source.
    fn assemble<'a>(
        config: &ModelConfig,
        tensor: impl Fn(TensorRole) -> Option<TensorView<'a>>,
        mut matrices: HashMap<TensorRole, PackedMatrix>,
        threads: Arc<ThreadPool>,
        numerics: Numerics,
    ) -> Result<Self, CpuError> {
        let missing = |role| CpuError::TensorMissing { name: format!("{role:?}") };
        let find = |role| tensor(role).ok_or_else(|| missing(role));
        let mut matrix = |role| matrices.remove(&role).ok_or_else(|| missing(role));
        let vector = |role| find(role).map(|view| view.to_f32());
        let norm = |role| -> Result<Vec<f32>, CpuError> {
            let stored = vector(role)?;
            Ok(stored.into_iter().map(|weight| weight + config.norm_offset).collect())
        };
        let mut layer = |index| -> Result<LayerWeights, CpuError> {
            let of = |part| TensorRole::layer(index, part);
            let post_norm = |part| config.post_norms.then(|| norm(of(part))).transpose();
            let qkv_bias = || -> Result<Vec<f32>, CpuError> {
                let parts = [LayerPart::AttnQBias, LayerPart::AttnKBias, LayerPart::AttnVBias];
                Ok(parts.into_iter().map(|part| vector(of(part))).collect::<Result<Vec<_>, _>>()?.concat())
            };
            let qk_norm = || -> Result<[Vec<f32>; 2], CpuError> {
                Ok([norm(of(LayerPart::AttnQNorm))?, norm(of(LayerPart::AttnKNorm))?])
            };
            let output_bias = || vector(of(LayerPart::AttnOutputBias));
            Ok(LayerWeights {
                attn_norm: norm(of(LayerPart::AttnNorm))?,
                q: matrix(of(LayerPart::AttnQ))?,
                k: matrix(of(LayerPart::AttnK))?,
                v: matrix(of(LayerPart::AttnV))?,
                qkv_bias: config.qkv_bias.then(qkv_bias).transpose()?,
                qk_norm: config.qk_norm.then(qk_norm).transpose()?,
                attn_output: matrix(of(LayerPart::AttnOutput))?,
                attn_output_bias: config.attn_output_bias.then(output_bias).transpose()?,
                attn_post_norm: post_norm(LayerPart::AttnPostNorm)?,
                ffn_norm: norm(of(LayerPart::FfnNorm))?,
                gate: matrix(of(LayerPart::FfnGate))?,
                up: matrix(of(LayerPart::FfnUp))?,
                down: matrix(of(LayerPart::FfnDown))?,
                ffn_post_norm: post_norm(LayerPart::FfnPostNorm)?,
                window: config.window_of(index),
            })
        };
        let layers = (0..config.layers).map(&mut layer).collect::<Result<_, _>>()?;
        Ok(Self {
            tier: numerics.tier,
            precision: numerics.precision,
            kv_dtype: numerics.kv_dtype,
            threads,
            embedding: matrix(TensorRole::TokenEmbedding)?,
            output: if config.tied_head { None } else { Some(matrix(TensorRole::Output)?) },
            output_norm: norm(TensorRole::OutputNorm)?,
            layers,
            rope_pairs: match config.rope_layout {
                RopeLayout::Interleaved => RopePairs::Interleaved,
                RopeLayout::Halves => RopePairs::Halves,
            },
            rope_frequencies: config.rope_frequencies(),
            window_rope_frequencies: config.window_rope_frequencies(),
            gate: match config.activation {
                Activation::Silu => Gate::Silu,
                Activation::GeluTanh => Gate::GeluTanh,
            },
            config: config.clone(),
        })
    }

    /// Shape and constants of the model.
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// The instruction set in use.
    pub fn tier(&self) -> Tier {
        self.tier
    }

    /// How the inputs of products are rounded.
    pub fn precision(&self) -> Precision {
        self.precision
    }

    /// The threads in use.
    pub fn threads(&self) -> &Arc<ThreadPool> {
        &self.threads
    }

    /// The output projection.
    pub(crate) fn head(&self) -> &PackedMatrix {
        self.output.as_ref().unwrap_or(&self.embedding)
    }

    /// Bytes of packed matrices.
    pub fn weight_bytes(&self) -> usize {
        let layer = |l: &LayerWeights| -> usize {
            [&l.q, &l.k, &l.v, &l.attn_output, &l.gate, &l.up, &l.down].iter().map(|m| m.bytes()).sum()
        };
        let table = self.embedding.bytes() + self.output.as_ref().map_or(0, PackedMatrix::bytes);
        table + self.layers.iter().map(layer).sum::<usize>()
    }
}

/// Refuses, by name, everything that the pass does not do.
pub(crate) fn check(config: &ModelConfig, tier: Tier) -> Result<(), CpuError> {
    let require = |holds: bool, what: String| if holds { Ok(()) } else { Err(CpuError::Unsupported { what }) };
    require(tier.is_supported(), format!("tier {tier} is not supported on this machine"))?;
    for (name, value) in
        [("hidden size", config.hidden), ("feed-forward size", config.feed_forward), ("query width", config.q_rows())]
    {
        require(value.is_multiple_of(BLOCK), format!("{name} {value} is not a multiple of {BLOCK}"))?;
    }
    let step = if config.rope_layout == RopeLayout::Halves { 32 } else { 16 };
    require(
        config.head_dim.is_multiple_of(step) && config.head_dim <= HEAD_DIM_MAX,
        format!("head dimension {} is not a multiple of {step} up to {HEAD_DIM_MAX}", config.head_dim),
    )?;
    require(config.rope_dims == config.head_dim, "only a part of each head is rotated".to_owned())
}
