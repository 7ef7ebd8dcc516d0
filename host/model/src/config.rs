//! What an executor must know about a model besides its weights.

use crate::error::ModelError;
use crate::limits::{EXTENT_MAX, LAYERS_MAX, VOCABULARY_MAX};

/// The family whose forward pass the weights belong to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Architecture {
    /// Llama: pre-norm RMSNorm, rotary attention with grouped KV heads, gated SiLU feed-forward. SmolLM2 and Mistral are such.
    Llama,
    /// Qwen 2 and 2.5: Llama with biases of Q, K and V.
    Qwen2,
    /// Qwen 3: Llama with norms of Q and K per head, and a head size of its own.
    Qwen3,
    /// Gemma 3, text: norms on both sides of each block, norms of Q and K, GELU, scaled embeddings, windows in five layers of six.
    Gemma3,
}

/// The families that run, for refusals.
pub(crate) const SUPPORTED_FAMILIES: &str = "supported are Llama, Mistral, Qwen2, Qwen3 and Gemma 3 (text): from Hugging Face folders LlamaForCausalLM, MistralForCausalLM, \
     Qwen2ForCausalLM, Qwen3ForCausalLM and Gemma3ForCausalLM, from GGUF files llama, qwen2, qwen3 and gemma3";

impl Architecture {
    /// The name GGUF uses, and the manifest.
    pub const fn name(self) -> &'static str {
        match self {
            Architecture::Llama => "llama",
            Architecture::Qwen2 => "qwen2",
            Architecture::Qwen3 => "qwen3",
            Architecture::Gemma3 => "gemma3",
        }
    }
}

/// How rotary frequencies were changed so that a model reaches further than it was first trained for.
#[derive(Clone, Debug, PartialEq)]
pub enum RopeScaling {
    /// Not at all.
    None,
    /// Every frequency divided by this.
    Linear(f32),
    /// Llama 3: see [`Llama3Rope`].
    Llama3(Llama3Rope),
    /// Each pair's frequency divided by its own number, as a GGUF file gives them in `rope_freqs.weight`. One for each pair.
    Divisors(Vec<f32>),
}

/// Llama 3's scaling: short waves stay, long ones are stretched, those between are blended.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Llama3Rope {
    /// What the long waves' frequencies are divided by.
    pub factor: f32,
    /// Waves longer than the original context divided by this are long.
    pub low_freq_factor: f32,
    /// Waves shorter than the original context divided by this are short; above `low_freq_factor`.
    pub high_freq_factor: f32,
    /// Context of the first training, in tokens.
    pub original_context: usize,
}

impl Llama3Rope {
    fn scale(&self, frequency: f64) -> f64 {
        let turns = self.original_context as f64 * frequency / std::f64::consts::TAU;
        let (low, high) = (f64::from(self.low_freq_factor), f64::from(self.high_freq_factor));
        let stretched = frequency / f64::from(self.factor);
        if turns > high {
            frequency
        } else if turns < low {
            stretched
        } else {
            let kept = (turns - low) / (high - low);
            (1.0 - kept) * stretched + kept * frequency
        }
    }
}

/// What the gate of the feed-forward block passes through.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Activation {
    /// x times its logistic function.
    Silu,
    /// GELU in its hyperbolic tangent form.
    GeluTanh,
}

/// A limited view of the past, in some layers.
#[derive(Clone, Debug, PartialEq)]
pub struct SlidingWindow {
    /// Tokens that a row of such a layer sees, itself included.
    pub tokens: usize,
    /// For each layer, whether it has the window.
    pub layers: Vec<bool>,
    /// Base of the rotary frequencies in such layers, which are not scaled; `None` where they rotate as the others do.
    pub rope_theta: Option<f32>,
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
    /// How the frequencies are changed.
    pub rope_scaling: RopeScaling,
    /// Pairing of rotated elements.
    pub rope_layout: RopeLayout,
    /// Epsilon of every RMSNorm.
    pub rms_eps: f32,
    /// Longest context the model was trained for, in tokens.
    pub context_length: usize,
    /// Rows of the embedding; logits have this many entries.
    pub vocab: usize,
    /// Factor of attention scores; the inverse root of the head size unless the model says otherwise.
    pub attention_scale: f32,
    /// Factor of token embeddings on their way in (Gemma: the root of the width).
    pub embedding_scale: f32,
    /// What is added to every stored norm weight before use: 1 for Gemma's Hugging Face files, which store the difference to 1.
    pub norm_offset: f32,
    /// Activation of the feed-forward gate.
    pub activation: Activation,
    /// Whether the outputs of attention and feed-forward are normalised before they join the residual stream (Gemma).
    pub post_norms: bool,
    /// Whether Q, K and V have bias vectors (Qwen2).
    pub qkv_bias: bool,
    /// Whether the output projection of attention has one.
    pub attn_output_bias: bool,
    /// Whether Q and K are normalised per head before rotation (Qwen3, Gemma 3).
    pub qk_norm: bool,
    /// Whether the output projection is the token embedding itself.
    pub tied_head: bool,
    /// Attention window, where layers have one.
    pub sliding_window: Option<SlidingWindow>,
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

    /// Tokens that a row of a layer sees, itself included; `None` for all.
    pub fn window_of(&self, layer: usize) -> Option<usize> {
        let window = self.sliding_window.as_ref()?;
        window.layers.get(layer).copied().unwrap_or(false).then_some(window.tokens)
    }

    /// Angle per position of each rotated pair, for layers without a window. In f64, so that far positions lose nothing.
    pub fn rope_frequencies(&self) -> Vec<f64> {
        let plain = self.frequencies(self.rope_theta).into_iter();
        match &self.rope_scaling {
            RopeScaling::None => plain.collect(),
            RopeScaling::Linear(factor) => plain.map(|frequency| frequency / f64::from(*factor)).collect(),
            RopeScaling::Llama3(llama3) => plain.map(|frequency| llama3.scale(frequency)).collect(),
            RopeScaling::Divisors(each) => plain.zip(each).map(|(frequency, by)| frequency / f64::from(*by)).collect(),
        }
    }

    /// The same for layers with a window; `None` where they rotate as the others do.
    pub fn window_rope_frequencies(&self) -> Option<Vec<f64>> {
        self.sliding_window.as_ref()?.rope_theta.map(|theta| self.frequencies(theta))
    }

    fn frequencies(&self, theta: f32) -> Vec<f64> {
        let dims = self.rope_dims as f64;
        (0..self.rope_dims / 2).map(|i| f64::from(theta).powf(-2.0 * i as f64 / dims)).collect()
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
        let bases = [Some(self.rope_theta), self.sliding_window.as_ref().and_then(|window| window.rope_theta)];
        for base in bases.into_iter().flatten() {
            require(
                base.is_finite() && base >= 1.0,
                "rope theta",
                format!("{base} is not a finite base of at least 1"),
            )?;
        }
        require(
            self.rms_eps.is_finite() && self.rms_eps > 0.0 && self.rms_eps < 1.0,
            "rms norm epsilon",
            format!("{} is not inside 0..1", self.rms_eps),
        )?;
        for (key, factor) in [("attention scale", self.attention_scale), ("embedding scale", self.embedding_scale)] {
            require(factor.is_finite() && factor > 0.0, key, format!("{factor} is not a positive factor"))?;
        }
        self.validate_rope_scaling()?;
        match &self.sliding_window {
            None => Ok(()),
            Some(window) => {
                require(window.tokens > 0, "sliding window", "0 tokens".to_owned())?;
                require(
                    window.layers.len() == self.layers,
                    "sliding window",
                    format!("{} layers are told of, {} there are", window.layers.len(), self.layers),
                )
            }
        }
    }

    fn validate_rope_scaling(&self) -> Result<(), ModelError> {
        let positive = |value: f32| value.is_finite() && value > 0.0;
        let holds = match &self.rope_scaling {
            RopeScaling::None => true,
            RopeScaling::Linear(factor) => positive(*factor),
            RopeScaling::Llama3(llama3) => {
                let numbers = [llama3.factor, llama3.low_freq_factor, llama3.high_freq_factor];
                numbers.into_iter().all(positive)
                    && llama3.low_freq_factor < llama3.high_freq_factor
                    && (1..=EXTENT_MAX).contains(&(llama3.original_context as u64))
            }
            RopeScaling::Divisors(each) => each.len() == self.rope_dims / 2 && each.iter().copied().all(positive),
        };
        if holds {
            return Ok(());
        }
        let what = format!("{:?} is out of range for {} rotated dimensions", self.rope_scaling, self.rope_dims);
        Err(ModelError::config("rope scaling", what))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The three regions by hand: original context 64, so that a wave of 64 tokens makes one turn in it.
    #[test]
    fn llama3_keeps_short_waves_and_stretches_long_ones() {
        let llama3 = Llama3Rope { factor: 8.0, low_freq_factor: 1.0, high_freq_factor: 4.0, original_context: 64 };
        let of_wave = |tokens: f64| std::f64::consts::TAU / tokens;
        let check = |tokens: f64, wanted: f64| {
            let got = llama3.scale(of_wave(tokens)) / of_wave(tokens);
            assert!((got - wanted).abs() < 1e-12, "a wave of {tokens} tokens: {got} of its frequency, not {wanted}");
        };
        check(15.0, 1.0);
        check(16.0, 1.0);
        check(64.0, 0.125);
        check(65.0, 0.125);
        // 25.6 tokens make 2.5 turns, half way between 1 and 4.
        check(25.6, 0.5625);
    }
}
