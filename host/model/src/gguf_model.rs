//! GGUF metadata to configuration and roles: what does this file's vocabulary of keys and names mean?

use crate::config::{Architecture, ModelConfig, RopeLayout};
use crate::error::ModelError;
use crate::gguf::{Gguf, GgufType, Value};
use crate::weights::{LayerPart, Placed, TensorRole, TensorSource};

/// The configuration a GGUF file describes.
pub(crate) fn config(gguf: &Gguf) -> Result<ModelConfig, ModelError> {
    let architecture = gguf.string("general.architecture")?.ok_or_else(|| missing("general.architecture"))?;
    if architecture != Architecture::Llama.name() {
        return Err(ModelError::Unsupported {
            what: "model architecture",
            name: architecture.to_owned(),
            remedy: "this version runs: llama",
        });
    }
    let keys = Keys { gguf, prefix: architecture };
    refuse_rope_scaling(&keys)?;
    refuse_experts(&keys)?;

    let hidden = keys.size("embedding_length")?;
    let heads = keys.size("attention.head_count")?;
    let kv_heads = keys.size_or("attention.head_count_kv", heads)?;
    // Without key_length the format defines a head as its share of the width.
    let head_dim = keys.size_or("attention.key_length", hidden.checked_div(heads).unwrap_or(0))?;
    if keys.size_or("attention.value_length", head_dim)? != head_dim {
        return Err(ModelError::Unsupported {
            what: "attention shape",
            name: "value heads of another size than key heads".to_owned(),
            remedy: "use a model with equal head sizes",
        });
    }
    let embedding = gguf
        .header()
        .tensor("token_embd.weight")
        .ok_or(ModelError::TensorMissing { name: "token_embd.weight".to_owned() })?;
    let config = ModelConfig {
        architecture: Architecture::Llama,
        layers: keys.size("block_count")?,
        hidden,
        feed_forward: keys.size("feed_forward_length")?,
        heads,
        kv_heads,
        head_dim,
        rope_dims: keys.size_or("rope.dimension_count", head_dim)?,
        rope_theta: keys.float_or("rope.freq_base", 10_000.0)?,
        rope_layout: RopeLayout::Interleaved,
        rms_eps: keys.float("attention.layer_norm_rms_epsilon")?,
        context_length: keys.size("context_length")?,
        vocab: keys.size_or("vocab_size", embedding.rows)?,
        qkv_bias: gguf.header().tensor("blk.0.attn_q.bias").is_some(),
        qk_norm: false,
        tied_head: gguf.header().tensor("output.weight").is_none(),
        sliding_window: match keys.size_or("attention.sliding_window", 0)? {
            0 => None,
            tokens => Some(tokens),
        },
    };
    config.validate()?;
    Ok(config)
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

fn refuse_rope_scaling(keys: &Keys<'_>) -> Result<(), ModelError> {
    let unsupported = |name: String| {
        Err(ModelError::Unsupported { what: "rope scaling", name, remedy: "use a model without rope scaling" })
    };
    if let Some(kind) = keys.gguf.string(&keys.name("rope.scaling.type"))?
        && kind != "none"
    {
        return unsupported(kind.to_owned());
    }
    if keys.float_or("rope.scale_linear", 1.0)? != 1.0 {
        return unsupported("linear".to_owned());
    }
    if keys.gguf.header().tensor("rope_freqs.weight").is_some() {
        return unsupported("llama3 (frequency factors)".to_owned());
    }
    Ok(())
}

fn refuse_experts(keys: &Keys<'_>) -> Result<(), ModelError> {
    match keys.size_or("expert_count", 0)? {
        0 => Ok(()),
        count => Err(ModelError::Unsupported {
            what: "feed-forward block",
            name: format!("mixture of {count} experts"),
            remedy: "use a dense model",
        }),
    }
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
                    LayerPart::FfnNorm => "ffn_norm.weight",
                    LayerPart::FfnGate => "ffn_gate.weight",
                    LayerPart::FfnUp => "ffn_up.weight",
                    LayerPart::FfnDown => "ffn_down.weight",
                };
                format!("blk.{index}.{part}")
            }
        }
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
