//! A Hugging Face folder: config.json and safetensors files to configuration and roles.

use std::collections::HashMap;
use std::fs;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use memmap2::Mmap;
use serde::Deserialize;

use crate::config::{Architecture, ModelConfig, RopeLayout};
use crate::dtype::DType;
use crate::error::ModelError;
use crate::gguf::map_file;
use crate::limits::{JSON_BYTES_MAX, SAFETENSORS_HEADER_MAX, SHARDS_MAX, TENSORS_MAX};
use crate::weights::{LayerPart, Placed, TensorRole, TensorSource};

const CONFIG: &str = "config.json";
const INDEX: &str = "model.safetensors.index.json";
const SINGLE: &str = "model.safetensors";

/// The keys of config.json that decide the forward pass. Others do not change it, or are refused below by name.
#[derive(Debug, Deserialize)]
struct RawConfig {
    model_type: String,
    #[serde(default)]
    architectures: Vec<String>,
    hidden_size: usize,
    intermediate_size: usize,
    num_hidden_layers: usize,
    num_attention_heads: usize,
    num_key_value_heads: Option<usize>,
    head_dim: Option<usize>,
    max_position_embeddings: usize,
    rms_norm_eps: f64,
    rope_theta: Option<f64>,
    rope_scaling: Option<serde_json::Value>,
    rope_parameters: Option<serde_json::Value>,
    vocab_size: usize,
    #[serde(default)]
    tie_word_embeddings: bool,
    #[serde(default)]
    attention_bias: bool,
    #[serde(default)]
    mlp_bias: bool,
    hidden_act: Option<String>,
    quantization_config: Option<serde_json::Value>,
    partial_rotary_factor: Option<f64>,
}

/// Reads a small JSON file of the folder, bounded; `Ok(None)` when it is not there.
pub(crate) fn read_json_bytes(folder: &Path, name: &str) -> Result<Option<Vec<u8>>, ModelError> {
    let path = folder.join(name);
    let file = match fs::File::open(&path) {
        Ok(file) => file,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(e) => return Err(ModelError::io(&path, "open", e)),
    };
    let mut bytes = Vec::new();
    file.take(JSON_BYTES_MAX + 1).read_to_end(&mut bytes).map_err(|e| ModelError::io(&path, "read", e))?;
    if bytes.len() as u64 > JSON_BYTES_MAX {
        return Err(ModelError::json(name, format!("is larger than {JSON_BYTES_MAX} bytes")));
    }
    Ok(Some(bytes))
}

/// Like [`read_json_bytes`], parsed.
pub(crate) fn read_json<T: serde::de::DeserializeOwned>(folder: &Path, name: &str) -> Result<Option<T>, ModelError> {
    let Some(bytes) = read_json_bytes(folder, name)? else { return Ok(None) };
    serde_json::from_slice(&bytes).map(Some).map_err(|e| ModelError::json(name, e))
}

/// The configuration in a folder's config.json.
pub(crate) fn config(folder: &Path) -> Result<ModelConfig, ModelError> {
    let raw: RawConfig = read_json(folder, CONFIG)?.ok_or_else(|| ModelError::NotAModel {
        path: folder.to_path_buf(),
        what: "the folder has no config.json".to_owned(),
    })?;
    refuse_unsupported(&raw)?;
    let rope_theta = raw.rope_theta.or_else(|| raw.rope_parameters.as_ref()?.get("rope_theta")?.as_f64());
    let head_dim = match raw.head_dim {
        Some(head_dim) => head_dim,
        None => raw.hidden_size.checked_div(raw.num_attention_heads).unwrap_or(0),
    };
    let config = ModelConfig {
        architecture: Architecture::Llama,
        layers: raw.num_hidden_layers,
        hidden: raw.hidden_size,
        feed_forward: raw.intermediate_size,
        heads: raw.num_attention_heads,
        kv_heads: raw.num_key_value_heads.unwrap_or(raw.num_attention_heads),
        head_dim,
        rope_dims: head_dim,
        rope_theta: rope_theta.unwrap_or(10_000.0) as f32,
        rope_layout: RopeLayout::Halves,
        rms_eps: raw.rms_norm_eps as f32,
        context_length: raw.max_position_embeddings,
        vocab: raw.vocab_size,
        qkv_bias: false,
        qk_norm: false,
        tied_head: raw.tie_word_embeddings,
        sliding_window: None,
    };
    config.validate()?;
    Ok(config)
}

fn refuse_unsupported(raw: &RawConfig) -> Result<(), ModelError> {
    let refuse = |what: &'static str, name: &str, remedy: &'static str| {
        Err(ModelError::Unsupported { what, name: name.to_owned(), remedy })
    };
    if raw.model_type != "llama" {
        return refuse("model architecture", &raw.model_type, "this version runs: llama");
    }
    if let Some(other) = raw.architectures.iter().find(|a| *a != "LlamaForCausalLM") {
        return refuse("model architecture", other, "this version runs: LlamaForCausalLM");
    }
    for scaling in [&raw.rope_scaling, &raw.rope_parameters].into_iter().flatten() {
        let kind = scaling.get("rope_type").or_else(|| scaling.get("type")).and_then(|v| v.as_str());
        if !scaling.is_null() && kind != Some("default") {
            return refuse("rope scaling", kind.unwrap_or("without a type"), "use a model without rope scaling");
        }
    }
    if raw.partial_rotary_factor.is_some_and(|factor| factor != 1.0) {
        return refuse("rope", "partial rotation", "use a model that rotates whole heads");
    }
    if raw.attention_bias || raw.mlp_bias {
        return refuse("bias", "attention_bias or mlp_bias", "use a model without biases");
    }
    if let Some(act) = raw.hidden_act.as_deref().filter(|act| *act != "silu") {
        return refuse("activation", act, "this version runs: silu");
    }
    if let Some(quantization) = raw.quantization_config.as_ref().filter(|q| !q.is_null()) {
        let method = quantization.get("quant_method").and_then(|v| v.as_str()).unwrap_or("unnamed");
        return refuse("quantisation", method, "use F32, F16 or BF16 safetensors, or a GGUF file");
    }
    Ok(())
}

/// All tensors of a folder's safetensors files.
#[derive(Debug)]
pub(crate) struct Safetensors {
    pub files: Vec<Arc<Mmap>>,
    pub paths: Vec<PathBuf>,
    tensors: HashMap<String, Entry>,
}

#[derive(Debug)]
struct Entry {
    file: usize,
    dtype: Result<DType, String>,
    rows: usize,
    cols: usize,
    bytes: std::ops::Range<usize>,
}

#[derive(Deserialize)]
struct ShardIndex {
    weight_map: HashMap<String, String>,
}

impl Safetensors {
    /// Maps the single file or every shard that the index names.
    pub fn open(folder: &Path) -> Result<Self, ModelError> {
        let names = match read_json::<ShardIndex>(folder, INDEX)? {
            Some(index) => {
                let mut names: Vec<String> = index.weight_map.into_values().collect();
                names.sort_unstable();
                names.dedup();
                names
            }
            None => vec![SINGLE.to_owned()],
        };
        if names.is_empty() || names.len() > SHARDS_MAX {
            return Err(ModelError::json(INDEX, format!("names {} files, not 1..={SHARDS_MAX}", names.len())));
        }
        let mut all = Self { files: Vec::new(), paths: Vec::new(), tensors: HashMap::new() };
        for name in names {
            // A shard is a file of this folder: a name with a path in it could read anything.
            if Path::new(&name).file_name().is_none_or(|file| file != name.as_str()) {
                return Err(ModelError::json(INDEX, format!("{name} is not a plain file name")));
            }
            all.add(folder.join(name))?;
        }
        Ok(all)
    }

    fn add(&mut self, path: PathBuf) -> Result<(), ModelError> {
        let map = map_file(&path)?;
        let file = self.files.len();
        let malformed = |at: u64, what: String| ModelError::Malformed { format: "safetensors", at, what };
        let header_len = map.get(..8).and_then(|b| b.try_into().ok()).map(u64::from_le_bytes);
        let Some(header_len) = header_len.filter(|&n| n <= SAFETENSORS_HEADER_MAX && n <= map.len() as u64 - 8) else {
            return Err(malformed(0, format!("{}: the header does not fit in the file", path.display())));
        };
        let data_offset = 8 + header_len as usize;
        let parsed = safetensors::SafeTensors::deserialize(&map)
            .map_err(|e| malformed(8, format!("{}: {e}", path.display())))?;
        for (name, view) in parsed.iter() {
            let data = view.data();
            // The library checked the view's place; only its offset within the mapping is needed here.
            let start = data.as_ptr().addr() - map.as_ptr().addr();
            let (rows, cols) = match view.shape() {
                [] => (1, 1),
                [cols] => (1, *cols),
                [rest @ .., cols] => {
                    let rows = rest.iter().try_fold(1usize, |product, extent| product.checked_mul(*extent));
                    (rows.ok_or_else(|| malformed(8, format!("the shape of {name} overflows")))?, *cols)
                }
            };
            let dtype = match view.dtype() {
                safetensors::Dtype::F32 => Ok(DType::F32),
                safetensors::Dtype::F16 => Ok(DType::F16),
                safetensors::Dtype::BF16 => Ok(DType::Bf16),
                other => Err(format!("{other:?}")),
            };
            if rows == 0 || cols == 0 || start < data_offset {
                return Err(malformed(8, format!("tensor {name} is empty")));
            }
            let entry = Entry { file, dtype, rows, cols, bytes: start..start + data.len() };
            if self.tensors.insert(name.to_owned(), entry).is_some() {
                return Err(malformed(8, format!("tensor {name} is in two files")));
            }
        }
        if self.tensors.len() as u64 > TENSORS_MAX {
            return Err(malformed(8, format!("{} tensors exceed the limit of {TENSORS_MAX}", self.tensors.len())));
        }
        self.files.push(map);
        self.paths.push(path);
        Ok(())
    }
}

impl TensorSource for Safetensors {
    fn name_of(&self, role: TensorRole) -> String {
        match role {
            TensorRole::TokenEmbedding => "model.embed_tokens.weight".to_owned(),
            TensorRole::OutputNorm => "model.norm.weight".to_owned(),
            TensorRole::Output => "lm_head.weight".to_owned(),
            TensorRole::Layer { index, part } => {
                let part = match part {
                    LayerPart::AttnNorm => "input_layernorm.weight",
                    LayerPart::AttnQ => "self_attn.q_proj.weight",
                    LayerPart::AttnK => "self_attn.k_proj.weight",
                    LayerPart::AttnV => "self_attn.v_proj.weight",
                    LayerPart::AttnQBias => "self_attn.q_proj.bias",
                    LayerPart::AttnKBias => "self_attn.k_proj.bias",
                    LayerPart::AttnVBias => "self_attn.v_proj.bias",
                    LayerPart::AttnQNorm => "self_attn.q_norm.weight",
                    LayerPart::AttnKNorm => "self_attn.k_norm.weight",
                    LayerPart::AttnOutput => "self_attn.o_proj.weight",
                    LayerPart::FfnNorm => "post_attention_layernorm.weight",
                    LayerPart::FfnGate => "mlp.gate_proj.weight",
                    LayerPart::FfnUp => "mlp.up_proj.weight",
                    LayerPart::FfnDown => "mlp.down_proj.weight",
                };
                format!("model.layers.{index}.{part}")
            }
        }
    }

    fn find(&self, name: &str) -> Result<Option<Placed>, ModelError> {
        let Some(entry) = self.tensors.get(name) else { return Ok(None) };
        let dtype = entry.dtype.clone().map_err(|dtype| ModelError::TensorType { name: name.to_owned(), dtype })?;
        Ok(Some(Placed {
            name: name.to_owned(),
            file: entry.file,
            dtype,
            rows: entry.rows,
            cols: entry.cols,
            bytes: entry.bytes.clone(),
        }))
    }
}
