//! Weights of a Hugging Face folder: one safetensors file, or the shards that an index names.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use memmap2::Mmap;
use serde::Deserialize;

use super::read_json;
use crate::config::Architecture;
use crate::dtype::DType;
use crate::error::ModelError;
use crate::gguf::map_file;
use crate::limits::{SAFETENSORS_HEADER_MAX, SHARDS_MAX, TENSORS_MAX};
use crate::weights::{LayerPart, Placed, TensorRole, TensorSource};

const INDEX: &str = "model.safetensors.index.json";
const SINGLE: &str = "model.safetensors";

/// All tensors of a folder's safetensors files.
#[derive(Debug)]
pub(crate) struct Safetensors {
    pub files: Vec<Arc<Mmap>>,
    pub paths: Vec<PathBuf>,
    architecture: Architecture,
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
    /// Maps the single file or every shard that the index names, and holds the index to what the shards hold.
    pub fn open(folder: &Path, architecture: Architecture) -> Result<Self, ModelError> {
        let index = read_json::<ShardIndex>(folder, INDEX)?;
        let mut names: Vec<&str> = match &index {
            Some(index) => index.weight_map.values().map(String::as_str).collect(),
            None => vec![SINGLE],
        };
        names.sort_unstable();
        names.dedup();
        if names.is_empty() || names.len() > SHARDS_MAX {
            return Err(ModelError::json(INDEX, format!("names {} files, not 1..={SHARDS_MAX}", names.len())));
        }
        let mut all = Self { files: Vec::new(), paths: Vec::new(), architecture, tensors: HashMap::new() };
        for name in &names {
            // A shard is a file of this folder: a name with a path in it could read anything.
            if Path::new(name).file_name().is_none_or(|file| file != *name) {
                return Err(ModelError::json(INDEX, format!("{name} is not a plain file name")));
            }
            let path = folder.join(name);
            if !path.exists() {
                return Err(missing(folder, name, index.is_some()));
            }
            all.add(path)?;
        }
        if let Some(index) = &index {
            all.check_index(index, &names)?;
        }
        Ok(all)
    }

    /// Every tensor of the index lies where it says. The other way round is the caller's check for tensors without a role.
    fn check_index(&self, index: &ShardIndex, names: &[&str]) -> Result<(), ModelError> {
        // In order of name, so that a broken index is always refused with the same words.
        let mut told: Vec<(&String, &String)> = index.weight_map.iter().collect();
        told.sort_unstable();
        for (tensor, shard) in told {
            let holder = self.tensors.get(tensor).map(|entry| names[entry.file]);
            if holder != Some(shard.as_str()) {
                let what = match holder {
                    None => format!("lacks the tensor {tensor}, which {INDEX} places there; no other shard has it"),
                    Some(other) => format!("lacks the tensor {tensor}, which {INDEX} places there; {other} has it"),
                };
                return Err(ModelError::Shard { file: shard.clone(), what });
            }
        }
        Ok(())
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
            if let Some(first) = self.tensors.insert(name.to_owned(), entry) {
                let other = self.paths[first.file].file_name().unwrap_or_default().to_string_lossy().into_owned();
                let what = format!("holds the tensor {name}, which {other} holds as well");
                return Err(ModelError::Shard {
                    file: path.file_name().unwrap_or_default().to_string_lossy().into_owned(),
                    what,
                });
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

/// What to say of a weight file that is not there.
fn missing(folder: &Path, name: &str, is_sharded: bool) -> ModelError {
    if is_sharded {
        let what = format!("is missing, although {INDEX} names it; fetch it again");
        return ModelError::Shard { file: name.to_owned(), what };
    }
    let has_pickle =
        ["pytorch_model.bin", "pytorch_model.bin.index.json"].iter().any(|name| folder.join(name).exists());
    let what = if has_pickle {
        "the folder has pytorch_model.bin and no model.safetensors: pickled weights are not read, since reading them runs their code"
    } else {
        "the folder has no model.safetensors and no model.safetensors.index.json"
    };
    ModelError::NotAModel { path: folder.to_path_buf(), what: what.to_owned() }
}

impl TensorSource for Safetensors {
    fn name_of(&self, role: TensorRole) -> String {
        let is_gemma = self.architecture == Architecture::Gemma3;
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
                    LayerPart::AttnOutputBias => "self_attn.o_proj.bias",
                    LayerPart::AttnPostNorm => "post_attention_layernorm.weight",
                    LayerPart::FfnNorm if is_gemma => "pre_feedforward_layernorm.weight",
                    LayerPart::FfnNorm => "post_attention_layernorm.weight",
                    LayerPart::FfnGate => "mlp.gate_proj.weight",
                    LayerPart::FfnUp => "mlp.up_proj.weight",
                    LayerPart::FfnDown => "mlp.down_proj.weight",
                    LayerPart::FfnPostNorm => "post_feedforward_layernorm.weight",
                };
                format!("model.layers.{index}.{part}")
            }
        }
    }

    fn names(&self) -> Vec<&str> {
        self.tensors.keys().map(String::as_str).collect()
    }

    fn is_ignored(&self, name: &str) -> bool {
        // Tables that old files carry and every reader computes.
        name.ends_with(".rotary_emb.inv_freq")
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
