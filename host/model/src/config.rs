//! What an executor must know about a model besides its weights.

use crate::error::ModelError;
use crate::limits::{EXTENT_MAX, LAYERS_MAX, VOCABULARY_MAX};

/// The family whose forward pass the weights belong to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Architecture {
    /// Llama: pre-norm RMSNorm, rotary attention with grouped KV heads, gated SiLU feed-forward. SmolLM2 is one.
    Llama,
}

impl Architecture {
    /// The name GGUF and `model_type` use.
    pub const fn name(self) -> &'static str {
        match self {
            Architecture::Llama => "llama",
        }
    }
}

/// Which two elements of a head the rotary embedding turns together. It is a property of how the rows of the Q and K weights are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum RopeLayout {
    /// Elements 2i and 2i + 1 ("norm"): GGUF files of the Llama architecture, whose Q and K rows are permuted for it.
    Interleaved,
    /// Elements i and i + dims/2 ("neox"): Hugging Face weights, and GGUF files of the Qwen and Gemma architectures.
    Halves,
}

/// Shape and constants of a decoder. Immutable; validated when made.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelConfig {
    /// Which forward pass.
    pub architecture: Architecture,
    /// Number of layers.
    pub layers: usize,
    /// Width of the residual stream.
    pub hidden: usize,
    /// Width of the feed-forward block.
    pub feed_forward: usize,
    /// Query heads.
    pub heads: usize,
    /// Key and value heads; divides `heads`.
    pub kv_heads: usize,
    /// Elements of one head. Given explicitly: it need not be `hidden / heads`.
    pub head_dim: usize,
    /// Leading elements of a head that are rotated; even, at most `head_dim`.
    pub rope_dims: usize,
    /// Base of the rotary frequencies.
    pub rope_theta: f32,
    /// Pairing of rotated elements.
    pub rope_layout: RopeLayout,
    /// Epsilon of every RMSNorm.
    pub rms_eps: f32,
    /// Longest context the model was trained for, in tokens.
    pub context_length: usize,
    /// Rows of the embedding; logits have this many entries.
    pub vocab: usize,
    /// Whether Q, K and V have bias vectors (Qwen2).
    pub qkv_bias: bool,
    /// Whether Q and K are normalised per head before rotation (Qwen3, Gemma 3).
    pub qk_norm: bool,
    /// Whether the output projection is the token embedding itself.
    pub tied_head: bool,
    /// Attention window in tokens, where layers have one.
    pub sliding_window: Option<usize>,
}

impl ModelConfig {
    /// Rows of the Q projection.
    pub const fn q_rows(&self) -> usize {
        self.heads * self.head_dim
    }

    /// Rows of the K and of the V projection.
    pub const fn kv_rows(&self) -> usize {
        self.kv_heads * self.head_dim
    }

    /// Checks ranges and divisibility, so that no later product overflows and no division is by zero.
    pub fn validate(&self) -> Result<(), ModelError> {
        let extents = [
            ("hidden size", self.hidden),
            ("feed-forward size", self.feed_forward),
            ("heads", self.heads),
            ("kv heads", self.kv_heads),
            ("head dimension", self.head_dim),
            ("context length", self.context_length),
        ];
        for (key, value) in extents {
            if value == 0 || value as u64 > EXTENT_MAX {
                return Err(ModelError::config(key, format!("{value} is outside 1..={EXTENT_MAX}")));
            }
        }
        let require =
            |holds: bool, key: &str, what: String| if holds { Ok(()) } else { Err(ModelError::config(key, what)) };
        require(
            (1..=LAYERS_MAX).contains(&self.layers),
            "layers",
            format!("{} is outside 1..={LAYERS_MAX}", self.layers),
        )?;
        require(
            (1..=VOCABULARY_MAX).contains(&self.vocab),
            "vocabulary",
            format!("{} is outside 1..={VOCABULARY_MAX}", self.vocab),
        )?;
        require(
            self.heads.is_multiple_of(self.kv_heads),
            "kv heads",
            format!("{} does not divide the {} query heads", self.kv_heads, self.heads),
        )?;
        require(
            self.rope_dims >= 2 && self.rope_dims.is_multiple_of(2) && self.rope_dims <= self.head_dim,
            "rope dimensions",
            format!("{} is not an even number in 2..={}", self.rope_dims, self.head_dim),
        )?;
        require(
            self.heads as u64 * self.head_dim as u64 <= EXTENT_MAX,
            "head dimension",
            format!("{} heads of {} exceed {EXTENT_MAX}", self.heads, self.head_dim),
        )?;
        require(
            self.rope_theta.is_finite() && self.rope_theta >= 1.0,
            "rope theta",
            format!("{} is not a finite base of at least 1", self.rope_theta),
        )?;
        require(
            self.rms_eps.is_finite() && self.rms_eps > 0.0 && self.rms_eps < 1.0,
            "rms norm epsilon",
            format!("{} is not inside 0..1", self.rms_eps),
        )?;
        require(self.sliding_window != Some(0), "sliding window", "0 tokens".to_owned())
    }
}
