//! config.json to a configuration: which decoder is this, of what shape?

use std::path::Path;

use serde::Deserialize;
use serde_json::{Map, Value};

use super::{read_json, refuse, rope};
use crate::config::{Activation, Architecture, ModelConfig, RopeLayout, SlidingWindow};
use crate::error::ModelError;

const CONFIG: &str = "config.json";

/// A kind of config.json that is run.
#[derive(Debug)]
pub(super) struct Family {
    /// Its `model_type`.
    pub model_type: &'static str,
    /// The class in `architectures`.
    pub class: &'static str,
    architecture: Architecture,
    /// Whether the head is the embedding when the file does not say.
    is_tied: bool,
    /// Base of the rotary frequencies when the file does not say.
    rope_theta: f64,
}

pub(super) const FAMILIES: [Family; 5] = [
    Family::new("llama", "LlamaForCausalLM", Architecture::Llama),
    Family::new("mistral", "MistralForCausalLM", Architecture::Llama),
    Family::new("qwen2", "Qwen2ForCausalLM", Architecture::Qwen2),
    Family::new("qwen3", "Qwen3ForCausalLM", Architecture::Qwen3),
    Family {
        is_tied: true,
        rope_theta: 1_000_000.0,
        ..Family::new("gemma3_text", "Gemma3ForCausalLM", Architecture::Gemma3)
    },
];

impl Family {
    const fn new(model_type: &'static str, class: &'static str, architecture: Architecture) -> Self {
        Self { model_type, class, architecture, is_tied: false, rope_theta: 10_000.0 }
    }
}

/// The keys of config.json that decide the shape of the forward pass. Others do not change it, or are refused by name.
#[derive(Debug, Deserialize)]
struct RawConfig {
    hidden_size: usize,
    intermediate_size: usize,
    num_hidden_layers: usize,
    num_attention_heads: usize,
    num_key_value_heads: Option<usize>,
    head_dim: Option<usize>,
    max_position_embeddings: usize,
    rms_norm_eps: Option<f64>,
    vocab_size: usize,
    tie_word_embeddings: Option<bool>,
    #[serde(default)]
    attention_bias: bool,
    query_pre_attn_scalar: Option<f64>,
    sliding_window: Option<usize>,
    #[serde(default)]
    use_sliding_window: bool,
    max_window_layers: Option<usize>,
    #[serde(alias = "_sliding_window_pattern")]
    sliding_window_pattern: Option<usize>,
    layer_types: Option<Vec<String>>,
}

/// The configuration in a folder's config.json.
pub(crate) fn config(folder: &Path) -> Result<ModelConfig, ModelError> {
    let keys: Map<String, Value> = read_json(folder, CONFIG)?.ok_or_else(|| ModelError::NotAModel {
        path: folder.to_path_buf(),
        what: "the folder has no config.json".to_owned(),
    })?;
    let family = refuse::family(&keys)?;
    let rope = rope::read(&keys)?;
    let raw: RawConfig = serde_json::from_value(Value::Object(keys)).map_err(|e| ModelError::json(CONFIG, e))?;
    let head_dim = raw.head_dim.unwrap_or_else(|| raw.hidden_size.checked_div(raw.num_attention_heads).unwrap_or(0));
    let is_gemma = family.architecture == Architecture::Gemma3;
    let score_size = raw.query_pre_attn_scalar.filter(|_| is_gemma).unwrap_or(head_dim as f64);
    let config = ModelConfig {
        architecture: family.architecture,
        layers: raw.num_hidden_layers,
        hidden: raw.hidden_size,
        feed_forward: raw.intermediate_size,
        heads: raw.num_attention_heads,
        kv_heads: raw.num_key_value_heads.unwrap_or(raw.num_attention_heads),
        head_dim,
        rope_dims: head_dim,
        rope_theta: rope.theta.unwrap_or(family.rope_theta) as f32,
        rope_scaling: rope.scaling,
        rope_layout: RopeLayout::Halves,
        rms_eps: raw.rms_norm_eps.unwrap_or(1e-6) as f32,
        attention_scale: (1.0 / score_size.sqrt()) as f32,
        embedding_scale: if is_gemma { (raw.hidden_size as f32).sqrt() } else { 1.0 },
        norm_offset: if is_gemma { 1.0 } else { 0.0 },
        activation: if is_gemma { Activation::GeluTanh } else { Activation::Silu },
        post_norms: is_gemma,
        context_length: raw.max_position_embeddings,
        vocab: raw.vocab_size,
        qkv_bias: family.architecture == Architecture::Qwen2 || raw.attention_bias,
        attn_output_bias: family.architecture != Architecture::Qwen2 && raw.attention_bias,
        qk_norm: matches!(family.architecture, Architecture::Qwen3 | Architecture::Gemma3),
        tied_head: raw.tie_word_embeddings.unwrap_or(family.is_tied),
        sliding_window: window(family, &raw, rope.window_theta)?,
    };
    config.validate()?;
    Ok(config)
}

/// Which layers have a window. Each family says it in its own way; `layer_types`, where present, is the last word.
fn window(family: &Family, raw: &RawConfig, theta: Option<f64>) -> Result<Option<SlidingWindow>, ModelError> {
    let is_gemma = family.architecture == Architecture::Gemma3;
    let tokens = match family.model_type {
        "mistral" | "gemma3_text" => raw.sliding_window,
        "qwen2" | "qwen3" => raw.sliding_window.filter(|_| raw.use_sliding_window),
        _ => None,
    };
    let has_window = |layer: usize| match family.model_type {
        "gemma3_text" => !(layer + 1).is_multiple_of(raw.sliding_window_pattern.unwrap_or(6)),
        "qwen2" | "qwen3" => layer >= raw.max_window_layers.unwrap_or(28),
        _ => true,
    };
    let layers: Vec<bool> = match &raw.layer_types {
        None => (0..raw.num_hidden_layers.min(crate::limits::LAYERS_MAX)).map(has_window).collect(),
        Some(kinds) => kinds.iter().map(|kind| layer_kind(kind)).collect::<Result<_, _>>()?,
    };
    let Some(tokens) = tokens else {
        if layers.contains(&true) && raw.layer_types.is_some() {
            return Err(ModelError::json(
                CONFIG,
                "layer_types names sliding_attention, and sliding_window is not given",
            ));
        }
        return Ok(None);
    };
    // Gemma's local layers rotate by a base of their own.
    let rope_theta = if is_gemma { Some(theta.unwrap_or(10_000.0) as f32) } else { None };
    Ok(layers.contains(&true).then_some(SlidingWindow { tokens, layers, rope_theta }))
}

fn layer_kind(kind: &str) -> Result<bool, ModelError> {
    match kind {
        "full_attention" => Ok(false),
        "sliding_attention" => Ok(true),
        other => Err(ModelError::Unsupported {
            what: "kind of layer (layer_types)",
            name: other.to_owned(),
            remedy: "supported are full_attention and sliding_attention",
        }),
    }
}
