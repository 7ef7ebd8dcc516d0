//! SentencePiece's byte-pair encoding from tokens and scores: of all neighbours whose union is a token, the best-scored are joined first.
//!
//! The engine wants a list of merges. It follows from the scores: every way to split a token into two others is a merge, and a better
//! score of the union comes first. (The reference joins the leftmost of equals; so does the engine for one and the same merge.)

use std::collections::HashMap;

use tokenizers::models::bpe::BPE;
use tokenizers::normalizers::prepend::Prepend;
use tokenizers::normalizers::replace::Replace;
use tokenizers::normalizers::utils::Sequence;
use tokenizers::{NormalizerWrapper, Tokenizer as Engine};

use super::TokenKind;
use crate::error::ModelError;
use crate::limits::TOKEN_CHARS_MAX;

/// How SentencePiece writes a space.
const SPACE: &str = "\u{2581}";

/// What a file says beside tokens and scores.
#[derive(Clone, Copy, Debug)]
pub(super) struct Settings {
    /// The token of what no token stands for.
    pub unknown: u32,
    /// Whether every text begins with a space that is not there (Llama 2; not Gemma).
    pub add_space_prefix: bool,
}

/// The engine, without added tokens.
pub(super) fn engine(
    tokens: &[&str],
    scores: &[f32],
    kinds: &[TokenKind],
    settings: Settings,
) -> Result<Engine, ModelError> {
    let fault = |what: String| ModelError::Tokenizer { what };
    if scores.len() != tokens.len() {
        return Err(ModelError::config(
            "tokenizer.ggml.scores",
            format!("has {} entries for {} tokens", scores.len(), tokens.len()),
        ));
    }
    let unknown = tokens.get(settings.unknown as usize);
    let unknown =
        unknown.ok_or_else(|| fault(format!("the unknown token {} is outside the vocabulary", settings.unknown)))?;
    let mut vocab = tokenizers::models::bpe::Vocab::default();
    let mut ids: HashMap<&str, u32> = HashMap::with_capacity(tokens.len());
    for (id, token) in tokens.iter().enumerate() {
        if vocab.insert((*token).to_owned(), id as u32).is_some() {
            return Err(fault(format!("token {token:?} appears twice")));
        }
        if kinds[id] == TokenKind::Normal {
            ids.insert(token, id as u32);
        }
    }
    let bpe = BPE::builder()
        .vocab_and_merges(vocab, merges(tokens, scores, &ids))
        .unk_token((*unknown).to_owned())
        .fuse_unk(true)
        .byte_fallback(true)
        .build()
        .map_err(|e| fault(e.to_string()))?;
    let mut engine = Engine::new(bpe);
    let spell: NormalizerWrapper = Replace::new(" ", SPACE).map_err(|e| fault(e.to_string()))?.into();
    let normalizer = if settings.add_space_prefix {
        NormalizerWrapper::from(Sequence::new(vec![Prepend::new(SPACE.to_owned()).into(), spell]))
    } else {
        spell
    };
    engine.with_normalizer(Some(normalizer)).map_err(|e| fault(e.to_string()))?;
    Ok(engine)
}

/// Every split of a token into two tokens, best score of the whole first; equal ones by their parts' ids, so that the order is always the same.
fn merges(tokens: &[&str], scores: &[f32], ids: &HashMap<&str, u32>) -> Vec<(String, String)> {
    let mut found: Vec<(f32, u32, u32)> = Vec::new();
    for (token, &id) in ids {
        // A token is at most so long; what is longer is no word of a language and is reached whole or not at all.
        for (at, _) in token.char_indices().skip(1).take(TOKEN_CHARS_MAX) {
            let (left, right) = token.split_at(at);
            if let (Some(&left), Some(&right)) = (ids.get(left), ids.get(right)) {
                found.push((scores[id as usize], left, right));
            }
        }
    }
    found.sort_unstable_by(|a, b| b.0.total_cmp(&a.0).then((a.1, a.2).cmp(&(b.1, b.2))));
    let spell = |id: u32| tokens[id as usize].to_owned();
    found.into_iter().map(|(_, left, right)| (spell(left), spell(right))).collect()
}
