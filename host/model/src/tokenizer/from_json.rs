//! A tokenizer from a Hugging Face folder: tokenizer.json for the engine, tokenizer_config.json and generation_config.json for roles.

use std::path::Path;

use serde_json::Value;
use sha2::{Digest as _, Sha256};
use tokenizers::{DecoderWrapper, Tokenizer as Engine};

use super::bytes::Scheme;
use super::{Parts, TokenKind, Tokenizer};
use crate::error::ModelError;
use crate::hf::{read_json, read_json_bytes};
use crate::limits::VOCABULARY_MAX;
use crate::manifest::Digest;

const FILE: &str = "tokenizer.json";

impl Tokenizer {
    /// Builds the tokenizer of a model folder.
    pub fn from_folder(folder: &Path) -> Result<Self, ModelError> {
        let json = read_json_bytes(folder, FILE)?.ok_or_else(|| ModelError::NotAModel {
            path: folder.to_path_buf(),
            what: "the folder has no tokenizer.json".to_owned(),
        })?;
        let settings: Value = read_json(folder, "tokenizer_config.json")?.unwrap_or(Value::Null);
        let generation: Value = read_json(folder, "generation_config.json")?.unwrap_or(Value::Null);
        let config: Value = read_json(folder, "config.json")?.unwrap_or(Value::Null);

        let mut engine = Engine::from_bytes(&json).map_err(|e| ModelError::json(FILE, e))?;
        // A file may carry a training-time cut or fill; a prompt is never cut or filled silently.
        engine.with_truncation(None).map_err(|e| ModelError::json(FILE, e))?;
        engine.with_padding(None);
        let scheme = scheme(&engine)?;
        let (spellings, kinds) = vocabulary(&engine)?;

        let bos =
            token_named(&engine, &settings, "bos_token").or_else(|| ids(&config, "bos_token_id").first().copied());
        let mut ends = ids(&generation, "eos_token_id");
        ends.extend(ids(&config, "eos_token_id"));
        let eos = token_named(&engine, &settings, "eos_token").or_else(|| ends.first().copied());
        let add_bos = match settings.get("add_bos_token").and_then(Value::as_bool) {
            Some(told) => told,
            None => {
                // The post-processor is what adds tokens: it shows on the empty text.
                let empty = engine.encode_fast("", true).map_err(|e| ModelError::json(FILE, e))?;
                bos.is_some() && empty.get_ids().first() == bos.as_ref()
            }
        };
        let mut hash = Sha256::new();
        hash.update(b"penstock-json-tokenizer-1\0");
        hash.update((json.len() as u64).to_le_bytes());
        hash.update(&json);
        for id in ends.iter().copied().chain(bos).chain(eos) {
            hash.update(id.to_le_bytes());
        }
        hash.update([u8::from(add_bos)]);
        let digest = Digest(hash.finalize().into());
        Self::build(Parts { engine, spellings, kinds, scheme, bos, eos, ends, add_bos, digest })
    }
}

fn scheme(engine: &Engine) -> Result<Scheme, ModelError> {
    let refuse = |name: &str| {
        Err(ModelError::Unsupported {
            what: "tokenizer decoder",
            name: name.to_owned(),
            remedy: "byte-level and SentencePiece-style decoders are read",
        })
    };
    match engine.get_decoder() {
        Some(DecoderWrapper::ByteLevel(_)) => Ok(Scheme::ByteLevel),
        Some(DecoderWrapper::Metaspace(_)) => Ok(Scheme::Metaspace),
        Some(DecoderWrapper::Sequence(sequence)) => {
            let parts = sequence.get_decoders();
            if parts.iter().any(|part| matches!(part, DecoderWrapper::ByteLevel(_))) {
                Ok(Scheme::ByteLevel)
            } else if parts
                .iter()
                .any(|part| matches!(part, DecoderWrapper::ByteFallback(_) | DecoderWrapper::Metaspace(_)))
            {
                Ok(Scheme::Metaspace)
            } else {
                refuse("a sequence without ByteLevel, ByteFallback or Metaspace")
            }
        }
        Some(_) => refuse("another than ByteLevel, Metaspace or ByteFallback"),
        None => refuse("none"),
    }
}

fn vocabulary(engine: &Engine) -> Result<(Vec<Option<String>>, Vec<TokenKind>), ModelError> {
    let vocab = engine.get_vocab(true);
    let len = vocab.values().max().map_or(0, |&id| id as usize + 1);
    if len == 0 || len > VOCABULARY_MAX {
        return Err(ModelError::json(FILE, format!("{len} token ids are outside 1..={VOCABULARY_MAX}")));
    }
    let mut spellings = vec![None; len];
    let mut kinds = vec![TokenKind::Unused; len];
    for (spelling, id) in vocab {
        kinds[id as usize] = TokenKind::Normal;
        spellings[id as usize] = Some(spelling);
    }
    for (id, token) in engine.get_added_tokens_decoder() {
        let Some(kind) = kinds.get_mut(id as usize) else { continue };
        *kind = if token.special { TokenKind::Control } else { TokenKind::UserDefined };
        spellings[id as usize] = Some(token.content);
    }
    Ok((spellings, kinds))
}

/// A token that the settings give by spelling, as a string or as an object with `content`.
fn token_named(engine: &Engine, settings: &Value, key: &str) -> Option<u32> {
    let value = settings.get(key)?;
    let text = value.as_str().or_else(|| value.get("content")?.as_str())?;
    engine.token_to_id(text)
}

/// One id or a list of ids.
fn ids(settings: &Value, key: &str) -> Vec<u32> {
    let id = |value: &Value| value.as_u64().and_then(|id| u32::try_from(id).ok());
    match settings.get(key) {
        Some(Value::Array(list)) => list.iter().filter_map(id).collect(),
        Some(one) => id(one).into_iter().collect(),
        None => Vec::new(),
    }
}
