//! CPU kernels of a paged Llama-family decoder: packed weights, int8 products, attention over a block pool, and the threads to run them.
//!
//! The crate answers one question: how are the numbers of a forward pass computed, fast and always alike? It knows arrays, not models.
//!
//! # Numerics
//! **Row-invariant**: the bits of a row's result depend on that row and its sequence alone, not on the batch, the neighbours, the chunking
//! of a prompt, the placement of blocks, the thread count or the [`Tier`]. Each module's header says what is added in which order. Kernels
//! are written once, over sixteen abstract lanes, and instantiated per tier; the scalar instance is the oracle of the others, and the tests
//! compare all of them bit by bit, and with f64 references by normalised mean square error. Equal bits are claimed for finite values; a
//! row that is not finite stays so to the end.
//!
//! One mode is outside of this: products of bfloat16 ([`Precision::Bf16`]) are row-invariant as well, but their bits are those of the unit
//! that adds them up ([`bf16_unit`]), which the tier and the CPU decide.
//!
//! # Map
//! - [`memory`]: huge-page buffers under a budget. [`pool`]: the thread pool. [`cores`]: where its threads may run.
//! - [`weights`]: packing. [`activation`]: integers or bfloat16, alone or fused with norm and gated activation. [`gemm`]: the product of both.
//! - [`norm`], [`rope`], [`pointwise`]: what stands between products. [`kv`] and [`attention`]: the paged cache. [`logits`]: vocabulary scans.
//! - [`ceiling`]: what the machine can do at most, for figures. [`tier`]: which instruction set; `amx`: tile registers; `lanes` (private): the vocabulary the kernels are written in.

#![allow(clippy::needless_range_loop, reason = "lanes of several register arrays are indexed together")]

pub mod activation;
#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
pub mod amx;
pub mod attention;
pub mod bf16_unit;
pub mod ceiling;
pub mod cores;
pub mod gemm;
pub mod half;
pub mod kv;
pub mod logits;
pub mod memory;
pub mod norm;
pub mod pointwise;
pub mod pool;
pub mod rope;
pub mod tier;
pub mod weights;

mod lanes;

pub use activation::{Activations, Precision};
pub use attention::{AttentionLayer, AttentionPlan, AttentionRun, HeadRows, PlanRoom, attend};
pub use bf16_unit::Bf16Unit;
pub use gemm::{Part, Store, multiply};
pub use kv::{KvDtype, KvError, KvPool, KvRows, KvShape, KvSlot};
pub use memory::{HugeBuffer, MemoryBudget, MemoryError};
pub use pool::{PoolError, Session, TaskPanicked, ThreadPool};
pub use rope::{RopePairs, RopeRow};
pub use tier::{Tier, TierError};
pub use weights::{PackError, PackedFormat, PackedMatrix, PackedShape, SourceFormat};
