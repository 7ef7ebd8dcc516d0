//! Which matrices a configuration implies, in which order, and where each lies in the memory that all share.

use std::collections::HashMap;
use std::sync::Arc;

use penstock_kernels_cpu::weights::{PackJob, WeightBytes, WeightMemory, pack_all};
use penstock_kernels_cpu::{HugeBuffer, MemoryBudget, PackedMatrix, PackedShape, Precision, SourceFormat, ThreadPool};
use penstock_model::weights::{LayerPart, TensorRole, TensorView};
use penstock_model::{DType, ModelConfig};

use crate::error::CpuError;

/// The parts of a layer that are matrices.
pub(crate) const LAYER_MATRICES: [LayerPart; 7] = [
    LayerPart::AttnQ,
    LayerPart::AttnK,
    LayerPart::AttnV,
    LayerPart::AttnOutput,
    LayerPart::FfnGate,
    LayerPart::FfnUp,
    LayerPart::FfnDown,
];

/// One matrix of a model.
pub(crate) struct Planned<'a> {
    role: TensorRole,
    source: TensorView<'a>,
    format: SourceFormat,
    pub(crate) shape: PackedShape,
}

/// All matrices of a model, packed or to be packed one behind the other: the token table, the output projection where it is another one,
/// then the layers in order.
pub(crate) struct MatrixPlan<'a> {
    pub(crate) matrices: Vec<Planned<'a>>,
}

impl<'a> MatrixPlan<'a> {
    /// Finds every matrix that `config` implies, to be packed for products of that precision.
    pub(crate) fn new(
        config: &ModelConfig,
        precision: Precision,
        tensor: impl Fn(TensorRole) -> Option<TensorView<'a>>,
    ) -> Result<Self, CpuError> {
        let head = if config.tied_head { None } else { Some(TensorRole::Output) };
        let layers = (0..config.layers).flat_map(|index| LAYER_MATRICES.map(|part| TensorRole::layer(index, part)));
        let roles = std::iter::once(TensorRole::TokenEmbedding).chain(head).chain(layers);
        let matrices = roles.map(|role| {
            let source = tensor(role).ok_or_else(|| CpuError::TensorMissing { name: format!("{role:?}") })?;
            let format = source_format(source.dtype);
            let shape = PackedShape::new(format.packed_for(precision), source.rows, source.cols)
                .map_err(|source| CpuError::Pack { name: format!("{role:?}"), source })?;
            Ok(Planned { role, source, format, shape })
        });
        Ok(Self { matrices: matrices.collect::<Result<_, CpuError>>()? })
    }

    /// Inputs of the widest matrix.
    pub(crate) fn longest_input(&self) -> usize {
        self.matrices.iter().map(|planned| planned.shape.k()).max().unwrap_or(0)
    }

    /// Bytes of all packed matrices; each is a multiple of a cache line long.
    pub(crate) fn bytes(&self) -> usize {
        self.matrices.iter().map(|planned| planned.shape.bytes()).sum()
    }

    /// Cuts memory of [`MatrixPlan::bytes`] into its matrices.
    pub(crate) fn cut<'m>(&self, mut memory: &'m [u8]) -> Vec<&'m [u8]> {
        let cut = |planned: &Planned<'_>| {
            let (matrix, rest) = memory.split_at(planned.shape.bytes());
            memory = rest;
            matrix
        };
        self.matrices.iter().map(cut).collect()
    }

    /// As [`MatrixPlan::cut`], to be written.
    pub(crate) fn cut_mut<'m>(&self, mut memory: &'m mut [u8]) -> Vec<&'m mut [u8]> {
        let cut = |planned: &Planned<'_>| {
            let (matrix, rest) = std::mem::take(&mut memory).split_at_mut(planned.shape.bytes());
            memory = rest;
            matrix
        };
        self.matrices.iter().map(cut).collect()
    }

    /// Packs everything on all threads.
    pub(crate) fn pack(&self, threads: &ThreadPool, budget: &MemoryBudget) -> Result<HugeBuffer, CpuError> {
        let mut memory = budget.allocate(self.bytes()).map_err(CpuError::Weights)?;
        let targets = self.cut_mut(&mut memory);
        let jobs = self.matrices.iter().zip(targets).map(|(planned, to)| PackJob {
            source: planned.source.bytes,
            format: planned.format,
            shape: planned.shape,
            to,
        });
        pack_all(&mut threads.enter(), jobs.collect())
            .map_err(|(job, source)| CpuError::Pack { name: format!("{:?}", self.matrices[job].role), source })?;
        Ok(memory)
    }

    /// The matrices in `memory`, the first one at `start`.
    ///
    /// # Panics
    /// When the memory ends before the last one.
    pub(crate) fn matrices_in(&self, memory: WeightMemory, start: usize) -> HashMap<TensorRole, PackedMatrix> {
        let memory = Arc::new(memory);
        let mut at = start;
        let place = |planned: &Planned<'_>| {
            let range = at..at + planned.shape.bytes();
            at = range.end;
            let bytes = WeightBytes::new(Arc::clone(&memory), range).expect("the memory holds the whole plan");
            let matrix = PackedMatrix::over(planned.shape, bytes).expect("the range has the shape's size");
            (planned.role, matrix)
        };
        self.matrices.iter().map(place).collect()
    }
}

fn source_format(dtype: DType) -> SourceFormat {
    match dtype {
        DType::F32 => SourceFormat::F32,
        DType::F16 => SourceFormat::F16,
        DType::Bf16 => SourceFormat::Bf16,
        DType::Q8_0 => SourceFormat::Q8_0,
        DType::Q4_0 => SourceFormat::Q4_0,
        DType::Q4_1 => SourceFormat::Q4_1,
        DType::Q5_0 => SourceFormat::Q5_0,
        DType::Q5_1 => SourceFormat::Q5_1,
        DType::Q4K => SourceFormat::Q4K,
        DType::Q5K => SourceFormat::Q5K,
        DType::Q6K => SourceFormat::Q6K,
    }
}
