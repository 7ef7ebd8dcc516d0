//! Why an executor could not be built.

use penstock_kernels_cpu::{KvError, MemoryError, PackError, PoolError};

/// What stands in the way of a model on this executor.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CpuError {
    /// The model needs something that these kernels do not do.
    #[error("the cpu executor cannot run this model: {what}")]
    Unsupported {
        /// What, with the value that matters.
        what: String,
    },
    /// The file lacks a tensor that the configuration implies.
    #[error("the model has no tensor {name}")]
    TensorMissing {
        /// Which.
        name: String,
    },
    /// A tensor could not be packed.
    #[error("tensor {name}: {source}")]
    Pack {
        /// Which.
        name: String,
        /// Why.
        source: PackError,
    },
    /// There is no memory for the packed weights.
    #[error("weights: {0}")]
    Weights(MemoryError),
    /// The KV pool could not be made.
    #[error("kv pool: {0}")]
    Kv(#[from] KvError),
    /// The thread pool could not be made.
    #[error(transparent)]
    Threads(#[from] PoolError),
    /// An option is out of range.
    #[error("{option} is {value}, which is outside {min}..={max}")]
    Option {
        /// Its name.
        option: &'static str,
        /// What was asked for.
        value: u64,
        /// Least legal value.
        min: u64,
        /// Greatest legal value.
        max: u64,
    },
}
