//! The executor that computes on this machine's CPU: the embedded default.
//!
//! Layer 3. The question this crate answers is "which token comes next?", for a batch of sequences at a time, on top of
//! `penstock-kernels-cpu` (the numbers) and `penstock-model` (the weights). It is row-invariant: see [`penstock_exec::Executor`]. With
//! [`Precision::Bf16`] it is so as well, on one kind of CPU: what two kinds compute then differs.
//!
//! - [`CpuModel`] packs weights once; replicas share it, and its threads, behind an `Arc`.
//! - [`CpuExecutor`] is one replica: slots, a KV pool, and the buffers of a pass. It implements [`penstock_exec::Executor`].
//! - [`Forward`] is the pass itself, usable without slots and plans: the tests and the comparison with other implementations use it.
//! - [`Demand`] says what a model and its replicas take of memory before any of it is taken; [`Ledger`] what then fits into how much.
//! - [`sampling`] chooses tokens: a pure function of logits, parameters and token index.

pub mod sampling;

mod demand;
mod error;
mod executor;
mod forward;
mod ledger;
mod matrices;
mod model;
mod packed_cache;
mod packed_file;
mod slots;

pub use demand::Demand;
pub use error::CpuError;
pub use executor::{CpuExecutor, CpuOptions};
pub use forward::{Forward, ForwardRoom, Keep, SequenceRows};
pub use ledger::{Blocks, Claims, Ledger, Shortage};
pub use model::{CpuModel, Numerics};
pub use packed_cache::{PackedCache, PackedMode, PackedOutcome, packed_places};
pub use packed_file::Unusable;
pub use penstock_kernels_cpu::memory::HUGE_PAGE_BYTES;
pub use penstock_kernels_cpu::pool::THREADS_MAX;
pub use penstock_kernels_cpu::{Bf16Unit, KvDtype, MemoryBudget, Precision, ThreadPool, Tier, TierError};
