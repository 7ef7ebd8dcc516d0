//! Model files to plain values: weights by role, configuration, tokenizer, chat template, identity.
//!
//! Layer 3. The question this crate answers is "what is this model?": it opens a GGUF file or a Hugging Face folder, refuses what it
//! cannot read faithfully, and hands out borrowed bytes and small immutable values. It knows nothing of batches, sequences, schedulers or
//! executors, and it never copies weights: tensors are views of the mapped file.
//!
//! Start at [`Model::open`]. Text goes in through [`Tokenizer`] (and [`ChatTemplate`]) and comes out through [`Detokeniser`] and
//! [`StopMatcher`]; [`keys`] derives the identity of cached blocks from token ids; [`ModelManifest`] pins what was loaded by hash.

pub mod cache_dir;
pub mod chat;
pub mod config;
pub mod detokenise;
pub mod dtype;
pub mod error;
pub mod gguf;
pub mod keys;
pub mod limits;
pub mod manifest;
pub mod model;
pub mod stop;
pub mod tokenizer;
pub mod weights;

mod gguf_model;
mod hf;
mod json_text;

pub use chat::{ChatOptions, ChatTemplate, CivilTime, RenderedChat};
pub use config::{Activation, Architecture, Llama3Rope, ModelConfig, RopeLayout, RopeScaling, SlidingWindow};
pub use detokenise::Detokeniser;
pub use dtype::{DType, dequantise_row};
pub use error::ModelError;
pub use gguf::{Gguf, GgufHeader};
pub use keys::{BlockKeyChain, SpanKey, block_keys, root_key};
pub use manifest::{Digest, HashPolicy, ModelManifest, Namespace};
pub use model::{Model, OpenOptions};
pub use stop::{StopHit, StopMatcher, StopPiece};
pub use tokenizer::{Specials, TokenKind, Tokenizer};
pub use weights::{LayerPart, TensorRole, TensorView, Weights};
