//! GGUF metadata to configuration and roles: what does this file's vocabulary of keys and names mean?

use crate::config::{
    Activation, Architecture, ModelConfig, RopeLayout, RopeScaling, SUPPORTED_FAMILIES, SlidingWindow,
};
use crate::error::ModelError;
use crate::gguf::{Gguf, GgufType, Value};
use crate::limits::LAYERS_MAX;
use crate::weights::{LayerPart, Placed, TensorRole, TensorSource};

/// Architectures by the name GGUF has for them.
const ARCHITECTURES: [Architecture; 4] =
    [Architecture::Llama, Architecture::Qwen2, Architecture::Qwen3, Architecture::Gemma3];

/// One layer in so many sees everything, unless the file says otherwise (Gemma 3).
const GEMMA_WINDOW_PATTERN: usize = 6;

/// Layers of the one Gemma 3 whose scores are scaled by the width per head instead of the head's size; files do not say so.
const GEMMA_27B_LAYERS: usize = 62;

/// Divisors of the rotary frequencies, one a pair (Llama 3).
const ROPE_DIVISORS: &str = "rope_freqs.weight";

/// The configuration a GGUF file describes.
pub(crate) fn config(gguf: &Gguf) -> Result<ModelConfig, ModelError> {
    let name = gguf.string("general.architecture")?.ok_or_else(|| missing("general.architecture"))?;
    let architecture = ARCHITECTURES.into_iter().find(|known| known.name() == name).ok_or_else(|| {
        ModelError::Unsupported { what: "model architecture", name: name.to_owned(), remedy: SUPPORTED_FAMILIES }
    })?;
    let keys = Keys { gguf, prefix: name };
    refuse_unsupported(&keys)?;

    let layers = keys.size("block_count")?;
    let hidden = keys.size("embedding_length")?;
    let heads = keys.size("attention.head_count")?;
    let kv_heads = keys.size_or("attention.head_count_kv", heads)?;
    let head_share = hidden.checked_div(heads).unwrap_or(0);
    // Without key_length the format defines a head as its share of the width.
    let head_dim = keys.size_or("attention.key_length", head_share)?;
    if keys.size_or("attention.value_length", head_dim)? != head_dim {
        return Err(ModelError::Unsupported {
            what: "attention shape",
            name: "value heads of another size than key heads".to_owned(),
            remedy: "supported are equal head sizes",
        });
    }
    let header = gguf.header();
    let embedding =
        header.tensor("token_embd.weight").ok_or(ModelError::TensorMissing { name: "token_embd.weight".to_owned() })?;
    let is_gemma = architecture == Architecture::Gemma3;
    let score_size = if is_gemma && layers == GEMMA_27B_LAYERS { head_share } else { head_dim };
    let rope_dims = keys.size_or("rope.dimension_count", head_dim)?;
    let config = ModelConfig {
        architecture,
        layers,
        hidden,
        feed_forward: keys.size("feed_forward_length")?,
        heads,
        kv_heads,
        head_dim,
        rope_dims,
        rope_theta: keys.float_or("rope.freq_base", if is_gemma { 1_000_000.0 } else { 10_000.0 })?,
        rope_scaling: rope_scaling(&keys)?,
        rope_layout: if architecture == Architecture::Llama { RopeLayout::Interleaved } else { RopeLayout::Halves },
        rms_eps: keys.float("attention.layer_norm_rms_epsilon")?,
        attention_scale: keys.float_or("attention.scale", (1.0 / (score_size as f64).sqrt()) as f32)?,
        embedding_scale: if is_gemma { (hidden as f32).sqrt() } else { 1.0 },
        // Converters have added Gemma's 1 already.
        norm_offset: 0.0,
        activation: if is_gemma { Activation::GeluTanh } else { Activation::Silu },
        post_norms: is_gemma,
        context_length: keys.size("context_length")?,
        vocab: keys.size_or("vocab_size", embedding.rows)?,
        qkv_bias: header.tensor("blk.0.attn_q.bias").is_some(),
        attn_output_bias: header.tensor("blk.0.attn_output.bias").is_some(),
        qk_norm: matches!(architecture, Architecture::Qwen3 | Architecture::Gemma3),
        tied_head: header.tensor("output.weight").is_none(),
        sliding_window: window(&keys, layers, is_gemma)?,
    };
    config.validate()?;
    Ok(config)
}

/// Every layer has the window, or for Gemma all but one in so many.
fn window(keys: &Keys<'_>, layers: usize, is_gemma: bool) -> Result<Option<SlidingWindow>, ModelError> {
    let tokens = keys.size_or("attention.sliding_window", 0)?;
    let pattern = keys.size_or("attention.sliding_window_pattern", if is_gemma { GEMMA_WINDOW_PATTERN } else { 0 })?;
    if tokens == 0 {
        return Ok(None);
    }
    let has_window = |layer: usize| pattern == 0 || !(layer + 1).is_multiple_of(pattern);
    Ok(Some(SlidingWindow {
        tokens,
        layers: (0..layers.min(LAYERS_MAX)).map(has_window).collect(),
        rope_theta: if is_gemma { Some(keys.float_or("rope.freq_base_swa", 10_000.0)?) } else { None },
    }))
}

struct Keys<'a> {
    gguf: &'a Gguf,
    prefix: &'a str,
}

impl Keys<'_> {
    fn name(&self, key: &str) -> String {
        format!("{}.{key}", self.prefix)
    }

    fn size_opt(&self, key: &str) -> Result<Option<usize>, ModelError> {
        let name = self.name(key);
        if let Some(Value::Array { .. }) = self.gguf.header().value(&name) {
            return Err(ModelError::Unsupported {
                what: "per-layer configuration",
                name,
                remedy: "use a model whose layers are all alike",
            });
        }
        let value = self.gguf.unsigned(&name)?;
        value
            .map(|v| usize::try_from(v).map_err(|_| ModelError::config(&name, format!("{v} is too large"))))
            .transpose()
    }

    fn size(&self, key: &str) -> Result<usize, ModelError> {
        self.size_opt(key)?.ok_or_else(|| missing(&self.name(key)))
    }

    fn size_or(&self, key: &str, default: usize) -> Result<usize, ModelError> {
        Ok(self.size_opt(key)?.unwrap_or(default))
    }

    fn float_opt(&self, key: &str) -> Result<Option<f32>, ModelError> {
        Ok(self.gguf.float(&self.name(key))?.map(|v| v as f32))
    }

    fn float(&self, key: &str) -> Result<f32, ModelError> {
        self.float_opt(key)?.ok_or_else(|| missing(&self.name(key)))
    }

    fn float_or(&self, key: &str, default: f32) -> Result<f32, ModelError> {
        Ok(self.float_opt(key)?.unwrap_or(default))
    }
}

fn missing(key: &str) -> ModelError {
    ModelError::config(key, "is missing")
}

fn rope_scaling(keys: &Keys<'_>) -> Result<RopeScaling, ModelError> {
    let unsupported = |name: &str| {
        Err(ModelError::Unsupported {
            what: "rope scaling",
            name: name.to_owned(),
            remedy: "supported are none, linear and frequency divisors (llama3) over whole heads",
        })
    };
    let divisors = keys.gguf.values(ROPE_DIVISORS)?;
    let linear = match keys.gguf.string(&keys.name("rope.scaling.type"))? {
        None => keys.float_or("rope.scale_linear", 1.0)?,
        Some("none") => 1.0,
        Some("linear") => keys.float_or("rope.scaling.factor", 1.0)?,
        Some(other) => return unsupported(other),
    };
    match (divisors, linear) {
        (None, 1.0) => Ok(RopeScaling::None),
        (None, factor) => Ok(RopeScaling::Linear(factor)),
        (Some(each), 1.0) => Ok(RopeScaling::Divisors(each)),
        (Some(_), _) => unsupported("linear together with frequency divisors"),
    }
}

/// A key, after the architecture's name, whose value above 0 means that the model computes what is not there.
const REFUSALS: [(&str, &str, &str); 7] = [
    ("expert_count", "mixture of experts", "supported are dense models"),
    ("attn_logit_softcapping", "soft cap", "supported are models without soft caps"),
    ("final_logit_softcapping", "soft cap", "supported are models without soft caps"),
    ("attention.max_alibi_bias", "position embedding", "supported is the rotary one"),
    ("attention.clamp_kqv", "attention", "supported is attention without clamped values"),
    ("logit_scale", "scale of logits", "supported are models without one"),
    ("residual_scale", "scale of the residual stream", "supported are models without one"),
];

fn refuse_unsupported(keys: &Keys<'_>) -> Result<(), ModelError> {
    for (key, what, remedy) in REFUSALS {
        let name = keys.name(key);
        let is_used = match keys.gguf.header().value(&name) {
            None => false,
            Some(Value::Unsigned(value)) => *value > 0,
            Some(Value::Float(value)) => *value != 0.0,
            Some(_) => true,
        };
        if is_used {
            return Err(ModelError::Unsupported { what, name, remedy });
        }
    }
    if keys.gguf.boolean(&keys.name("attention.causal"))? == Some(false) {
        return Err(ModelError::Unsupported {
            what: "attention",
            name: keys.name("attention.causal = false"),
            remedy: "supported is causal attention",
        });
    }
    if let Some(count) = keys.gguf.unsigned("split.count")?.filter(|&count| count > 1) {
        return Err(ModelError::Unsupported {
            what: "file",
            name: format!("one part of {count} (split.count)"),
            remedy: "supported are whole GGUF files; join the parts with gguf-split --merge",
        });
    }
    Ok(())
}

impl TensorSource for Gguf {
    fn name_of(&self, role: TensorRole) -> String {
        match role {
            TensorRole::TokenEmbedding => "token_embd.weight".to_owned(),
            TensorRole::OutputNorm => "output_norm.weight".to_owned(),
            TensorRole::Output => "output.weight".to_owned(),
            TensorRole::Layer { index, part } => {
                let part = match part {
                    LayerPart::AttnNorm => "attn_norm.weight",
                    LayerPart::AttnQ => "attn_q.weight",
                    LayerPart::AttnK => "attn_k.weight",
                    LayerPart::AttnV => "attn_v.weight",
                    LayerPart::AttnQBias => "attn_q.bias",
                    LayerPart::AttnKBias => "attn_k.bias",
                    LayerPart::AttnVBias => "attn_v.bias",
                    LayerPart::AttnQNorm => "attn_q_norm.weight",
                    LayerPart::AttnKNorm => "attn_k_norm.weight",
                    LayerPart::AttnOutput => "attn_output.weight",
                    LayerPart::AttnOutputBias => "attn_output.bias",
                    LayerPart::AttnPostNorm => "post_attention_norm.weight",
                    LayerPart::FfnNorm => "ffn_norm.weight",
                    LayerPart::FfnGate => "ffn_gate.weight",
                    LayerPart::FfnUp => "ffn_up.weight",
                    LayerPart::FfnDown => "ffn_down.weight",
                    LayerPart::FfnPostNorm => "post_ffw_norm.weight",
                };
                format!("blk.{index}.{part}")
            }
        }
    }

    fn names(&self) -> Vec<&str> {
        self.header().tensors().iter().map(|tensor| tensor.name.as_str()).collect()
    }

    fn is_ignored(&self, name: &str) -> bool {
        // Read with the configuration.
        name == ROPE_DIVISORS
    }

    fn find(&self, name: &str) -> Result<Option<Placed>, ModelError> {
        let Some(info) = self.header().tensor(name) else { return Ok(None) };
        match info.kind {
            GgufType::Supported(dtype) => Ok(Some(Placed {
                name: name.to_owned(),
                file: 0,
                dtype,
                rows: info.rows,
                cols: info.cols,
                bytes: info.bytes.clone(),
            })),
            GgufType::Unsupported { id, name: kind } => {
                Err(ModelError::TensorType { name: name.to_owned(), dtype: format!("{kind} (type {id})") })
            }
        }
    }
}
