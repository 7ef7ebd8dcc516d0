//! Opening a model: one path in, everything that serves it out.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde_json::Value;

use crate::chat::ChatTemplate;
use crate::config::ModelConfig;
use crate::error::ModelError;
use crate::gguf::Gguf;
use crate::gguf_model;
use crate::hf::{self, Safetensors, read_json, read_json_bytes};
use crate::manifest::{Digest, HashPolicy, ModelManifest, hash_files};
use crate::tokenizer::Tokenizer;
use crate::weights::Weights;

/// How to open a model.
#[derive(Clone, Debug, Default)]
pub struct OpenOptions {
    /// When the weights' hash may come from an earlier start.
    pub hash: HashPolicy,
    /// Refuse weights that have another hash than this.
    pub expect_weights: Option<Digest>,
    /// Where the files were fetched from, for the manifest.
    pub origin: Option<String>,
}

/// A model ready to be executed and spoken to. Immutable; parts are shared by `Arc` among replicas and threads.
#[derive(Debug)]
pub struct Model {
    config: ModelConfig,
    weights: Arc<Weights>,
    tokenizer: Arc<Tokenizer>,
    chat_template: Option<Arc<ChatTemplate>>,
    manifest: ModelManifest,
}

/// What both formats are brought to before the common checks.
struct Opened {
    name: String,
    config: ModelConfig,
    weights: Weights,
    tokenizer: Tokenizer,
    template: Option<String>,
    digest: Digest,
    weights_bytes: u64,
}

impl Model {
    /// Opens a `.gguf` file or a Hugging Face folder. `progress` is told (bytes hashed, bytes in all) now and then; a start with an
    /// unchanged file does not call it.
    pub fn open(path: &Path, options: &OpenOptions, progress: &mut dyn FnMut(u64, u64)) -> Result<Self, ModelError> {
        let metadata = std::fs::metadata(path).map_err(|e| ModelError::io(path, "open", e))?;
        let opened =
            if metadata.is_dir() { open_folder(path, options, progress)? } else { open_gguf(path, options, progress)? };
        let Opened { name, config, weights, tokenizer, template, digest, weights_bytes } = opened;
        if let Some(expected) = options.expect_weights.filter(|expected| *expected != digest) {
            return Err(ModelError::HashMismatch {
                artefact: "weights",
                found: digest.to_string(),
                expected: expected.to_string(),
            });
        }
        if tokenizer.vocab_len() > config.vocab {
            return Err(ModelError::Tokenizer {
                what: format!(
                    "has {} tokens where the model has {}; it belongs to another model",
                    tokenizer.vocab_len(),
                    config.vocab
                ),
            });
        }
        let chat_template = template.map(|source| ChatTemplate::new(&source, &tokenizer)).transpose()?;
        let dtypes: Vec<&str> = weights.dtypes().into_iter().map(crate::DType::name).collect();
        let manifest = ModelManifest {
            name,
            origin: options.origin.clone(),
            architecture: config.architecture.name(),
            weights: digest,
            weights_bytes,
            tokenizer: tokenizer.digest(),
            chat_template: chat_template.as_ref().map(ChatTemplate::digest),
            // Debug text of a plain struct of numbers: stable for one version of this crate, which is what a namespace needs.
            config: Digest::of(format!("{config:?}").as_bytes()),
            dtypes: dtypes.join(","),
        };
        Ok(Self {
            config,
            weights: Arc::new(weights),
            tokenizer: Arc::new(tokenizer),
            chat_template: chat_template.map(Arc::new),
            manifest,
        })
    }

    /// Shape and constants.
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// Weights by role.
    pub fn weights(&self) -> &Arc<Weights> {
        &self.weights
    }

    /// The tokenizer.
    pub fn tokenizer(&self) -> &Arc<Tokenizer> {
        &self.tokenizer
    }

    /// The chat template, or the typed error that says there is none.
    pub fn chat_template(&self) -> Result<&Arc<ChatTemplate>, ModelError> {
        self.chat_template.as_ref().ok_or(ModelError::TemplateMissing)
    }

    /// What was loaded, by hash.
    pub fn manifest(&self) -> &ModelManifest {
        &self.manifest
    }
}

fn open_gguf(path: &Path, options: &OpenOptions, progress: &mut dyn FnMut(u64, u64)) -> Result<Opened, ModelError> {
    let gguf = Gguf::open(path)?;
    let config = gguf_model::config(&gguf)?;
    let weights = Weights::collect(&gguf, vec![gguf.map().clone()], &config)?;
    let tokenizer = Tokenizer::from_gguf(&gguf)?;
    let template = gguf.string("tokenizer.chat_template")?.map(str::to_owned);
    let digest = hash_files(&[(path.to_path_buf(), gguf.map())], options.hash, progress)?;
    let name = gguf.string("general.name")?.map_or_else(|| file_name(path), str::to_owned);
    let weights_bytes = gguf.map().len() as u64;
    Ok(Opened { name, config, weights, tokenizer, template, digest, weights_bytes })
}

fn open_folder(folder: &Path, options: &OpenOptions, progress: &mut dyn FnMut(u64, u64)) -> Result<Opened, ModelError> {
    let config = hf::config(folder)?;
    let tensors = Safetensors::open(folder, config.architecture)?;
    let weights = Weights::collect(&tensors, tensors.files.clone(), &config)?;
    let tokenizer = Tokenizer::from_folder(folder)?;
    let files: Vec<(PathBuf, &[u8])> =
        tensors.paths.iter().cloned().zip(tensors.files.iter().map(|map| map.as_ref().as_ref())).collect();
    let weights_bytes = files.iter().map(|(_, bytes)| bytes.len() as u64).sum();
    let digest = hash_files(&files, options.hash, progress)?;
    let template = folder_template(folder)?;
    Ok(Opened { name: file_name(folder), config, weights, tokenizer, template, digest, weights_bytes })
}

/// `chat_template.jinja`, else the key of tokenizer_config.json: a string, or a list of named templates of which `default` counts.
fn folder_template(folder: &Path) -> Result<Option<String>, ModelError> {
    const FILE: &str = "chat_template.jinja";
    if let Some(bytes) = read_json_bytes(folder, FILE)? {
        return String::from_utf8(bytes).map(Some).map_err(|e| ModelError::json(FILE, e));
    }
    let settings: Value = read_json(folder, "tokenizer_config.json")?.unwrap_or(Value::Null);
    let named = |list: &Vec<Value>| {
        let default = list.iter().find(|entry| entry.get("name").and_then(Value::as_str) == Some("default"))?;
        default.get("template")?.as_str().map(str::to_owned)
    };
    Ok(match settings.get("chat_template") {
        Some(Value::String(text)) => Some(text.clone()),
        Some(Value::Array(list)) => named(list),
        _ => None,
    })
}

fn file_name(path: &Path) -> String {
    path.file_stem().map_or_else(|| "model".to_owned(), |name| name.to_string_lossy().into_owned())
}
