//! Text to token ids and token ids to bytes.
//!
//! Two readings of the same text exist. A template's output is read with [`Specials::Parsed`]: `<|im_end|>` is one control token. Text
//! that a user wrote is read with [`Specials::AsText`]: the same spelling is plain characters and can never become a control token.

mod bytes;
mod from_gguf;
mod from_json;
mod from_scores;
pub(crate) mod guard;

use std::collections::HashMap;

use tokenizers::{AddedToken, Tokenizer as Engine};

use crate::chat::RenderedChat;
use crate::error::ModelError;
use crate::limits::ENCODE_BYTES_MAX;
use crate::manifest::Digest;

/// How the spelling of a control token in a text is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Specials {
    /// As the control token: for text from a template or an operator.
    Parsed,
    /// As the characters it is spelled with: for text from a user.
    AsText,
}

/// What a token is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum TokenKind {
    /// Ordinary text.
    Normal,
    /// A control token: has a spelling, stands for no text, is left out of delivered text.
    Control,
    /// Text that the model's makers gave a token of its own; always parsed, delivered as text.
    UserDefined,
    /// A row of the embedding without a meaning.
    Unused,
}

/// Everything decided about a vocabulary before the engine is built.
struct Parts {
    /// Engine with added tokens, reading control tokens.
    engine: Engine,
    /// Spelling of each id; `None` for ids without one.
    spellings: Vec<Option<String>>,
    kinds: Vec<TokenKind>,
    /// How spellings of ordinary tokens stand for bytes.
    scheme: bytes::Scheme,
    bos: Option<u32>,
    eos: Option<u32>,
    /// Further ids that end a turn, as the files say.
    ends: Vec<u32>,
    add_bos: bool,
    digest: Digest,
}

/// A model's tokenizer. Immutable and shared; encoding takes `&self` from any thread.
pub struct Tokenizer {
    parsed: Engine,
    as_text: Engine,
    guard: guard::Guard,
    /// Bytes of all tokens, one after another, and where each begins.
    bytes: Vec<u8>,
    starts: Vec<u32>,
    kinds: Vec<TokenKind>,
    ids: HashMap<Box<str>, u32>,
    bos: Option<u32>,
    eos: Option<u32>,
    ends: Vec<u32>,
    add_bos: bool,
    digest: Digest,
}

/// Spellings that end a turn in the chat formats in use; each counts only where it is a control token of the vocabulary.
const TURN_ENDS: [&str; 9] = [
    "<|im_end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end|>",
    "<end_of_turn>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<EOT>",
    "<｜end▁of▁sentence｜>",
];

impl Tokenizer {
    fn build(parts: Parts) -> Result<Self, ModelError> {
        let Parts { engine: parsed, spellings, kinds, scheme, bos, eos, ends, add_bos, digest } = parts;
        let mut as_text = parsed.clone();
        as_text.set_encode_special_tokens(true);

        let mut bytes = Vec::new();
        let mut starts = Vec::with_capacity(spellings.len() + 1);
        let mut ids = HashMap::with_capacity(spellings.len());
        for (id, (spelling, kind)) in spellings.iter().zip(&kinds).enumerate() {
            starts.push(bytes.len() as u32);
            if let Some(spelling) = spelling {
                scheme.append(spelling, *kind, &mut bytes);
                ids.entry(spelling.as_str().into()).or_insert(id as u32);
            }
        }
        starts.push(bytes.len() as u32);

        let in_range = |id: &u32| (*id as usize) < kinds.len();
        for (name, id) in [("bos", bos), ("eos", eos)] {
            if let Some(id) = id.filter(|id| !in_range(id)) {
                return Err(ModelError::Tokenizer { what: format!("the {name} token {id} is outside the vocabulary") });
            }
        }
        let control = |id: &u32| in_range(id) && kinds[*id as usize] == TokenKind::Control;
        let mut all_ends: Vec<u32> = ends.into_iter().chain(eos).filter(in_range).collect();
        all_ends.extend(TURN_ENDS.iter().filter_map(|text| ids.get(*text).copied()).filter(control));
        all_ends.sort_unstable();
        all_ends.dedup();

        let added = parsed.get_added_tokens_decoder();
        let mut specials: Vec<(u32, AddedToken)> =
            added.into_iter().filter(|(_, token)| token.special && !token.content.is_empty()).collect();
        specials.sort_unstable_by_key(|(id, _)| *id);
        Ok(Self {
            guard: guard::Guard::new(specials),
            parsed,
            as_text,
            bytes,
            starts,
            kinds,
            ids,
            bos,
            eos,
            ends: all_ends,
            add_bos,
            digest,
        })
    }

    /// Ids of a text. No begin-of-sequence token is added.
    pub fn encode(&self, text: &str, specials: Specials) -> Result<Vec<u32>, ModelError> {
        if text.len() > ENCODE_BYTES_MAX {
            return Err(ModelError::Encode { what: format!("{} bytes exceed {ENCODE_BYTES_MAX}", text.len()) });
        }
        let engine = match specials {
            Specials::Parsed => &self.parsed,
            Specials::AsText => &self.as_text,
        };
        let encoding = engine.encode_fast(text, false).map_err(|e| ModelError::Encode { what: e.to_string() })?;
        Ok(encoding.get_ids().iter().copied().filter(|&id| (id as usize) < self.kinds.len()).collect())
    }

    /// Ids of a raw prompt: with the begin-of-sequence token in front where the model wants one.
    pub fn encode_prompt(&self, text: &str, specials: Specials) -> Result<Vec<u32>, ModelError> {
        let mut ids = self.encode(text, specials)?;
        if let Some(bos) = self.bos.filter(|bos| self.add_bos && ids.first() != Some(bos)) {
            ids.insert(0, bos);
        }
        Ok(ids)
    }

    /// Ids of a rendered conversation: control tokens of the template are parsed, their spellings in message text are not.
    /// The template places the begin-of-sequence token itself.
    pub fn encode_chat(&self, chat: &RenderedChat) -> Result<Vec<u32>, ModelError> {
        if chat.barriers.is_empty() {
            return self.encode(&chat.text, Specials::Parsed);
        }
        let mut ids = Vec::new();
        for part in self.guard.split(&chat.text, &chat.barriers) {
            match part {
                guard::Part::Text(text) => ids.extend(self.encode(text, Specials::AsText)?),
                guard::Part::Special(id) => ids.push(id),
            }
        }
        Ok(ids)
    }

    /// Control-token spellings, for keeping message text apart from them.
    pub(crate) fn guard(&self) -> &guard::Guard {
        &self.guard
    }

    /// Whether a text spells a control token.
    pub fn spells_special(&self, text: &str) -> bool {
        self.guard.spelled(text).is_some()
    }

    /// The exact bytes a token stands for, control tokens included (their spelling). Empty for ids that stand for nothing.
    pub fn token_bytes(&self, id: u32) -> &[u8] {
        match self.starts.get(id as usize..).and_then(|starts| starts.get(..2)) {
            Some(&[start, end]) => &self.bytes[start as usize..end as usize],
            _ => &[],
        }
    }

    /// The bytes a token adds to delivered text: none for control tokens.
    pub fn delivered_bytes(&self, id: u32) -> &[u8] {
        if self.kind(id) == TokenKind::Control { &[] } else { self.token_bytes(id) }
    }

    /// What a token is for. Ids outside the vocabulary are [`TokenKind::Unused`].
    pub fn kind(&self, id: u32) -> TokenKind {
        self.kinds.get(id as usize).copied().unwrap_or(TokenKind::Unused)
    }

    /// The id of a token by its spelling in the vocabulary (byte-level spelling for ordinary tokens).
    pub fn id_of(&self, spelling: &str) -> Option<u32> {
        self.ids.get(spelling).copied()
    }

    /// Number of ids. The model's embedding may have more rows.
    pub fn vocab_len(&self) -> usize {
        self.kinds.len()
    }

    /// Begin-of-sequence token.
    pub fn bos(&self) -> Option<u32> {
        self.bos
    }

    /// End-of-sequence token.
    pub fn eos(&self) -> Option<u32> {
        self.eos
    }

    /// All tokens that end generation unless it is told to ignore them: end of sequence and end of turn, ascending.
    pub fn ends(&self) -> &[u32] {
        &self.ends
    }

    /// Whether raw prompts begin with [`Tokenizer::bos`].
    pub fn add_bos(&self) -> bool {
        self.add_bos
    }

    /// Hash of everything that decides ids.
    pub fn digest(&self) -> Digest {
        self.digest
    }

    /// The lossy text of some tokens, control tokens left out. For logs and tests; streams use [`crate::Detokeniser`].
    pub fn decode_lossy(&self, ids: &[u32]) -> String {
        let bytes: Vec<u8> = ids.iter().flat_map(|&id| self.delivered_bytes(id)).copied().collect();
        String::from_utf8_lossy(&bytes).into_owned()
    }

    /// The spelling of a token for templates (`bos_token`).
    pub(crate) fn spelling(&self, id: Option<u32>) -> String {
        id.map(|id| String::from_utf8_lossy(self.token_bytes(id)).into_owned()).unwrap_or_default()
    }
}

impl std::fmt::Debug for Tokenizer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Tokenizer").field("vocab_len", &self.vocab_len()).field("digest", &self.digest).finish()
    }
}
