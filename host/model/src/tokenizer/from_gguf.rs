//! A tokenizer from GGUF metadata. The file gives tokens, kinds and merges, and names the pre-tokenizer; what the name means is here.

use sha2::{Digest as _, Sha256};
use tokenizers::models::bpe::BPE;
use tokenizers::normalizers::unicode::NFC;
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::pre_tokenizers::digits::Digits;
use tokenizers::pre_tokenizers::sequence::Sequence;
use tokenizers::pre_tokenizers::split::{Split, SplitPattern};
use tokenizers::{AddedToken, NormalizerWrapper, PreTokenizerWrapper, SplitDelimiterBehavior, Tokenizer as Engine};

use super::bytes::{self, Scheme};
use super::from_scores::{self, Settings};
use super::{Parts, TokenKind, Tokenizer};
use crate::error::ModelError;
use crate::gguf::Gguf;
use crate::limits::VOCABULARY_MAX;
use crate::manifest::Digest;

/// Llama 3's split, with at most three digits in a piece.
const LLAMA3: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
/// Qwen 2's split: Llama 3's with single digits.
const QWEN2: &str =
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

/// What a value of `tokenizer.ggml.pre` stands for.
struct Pre {
    splits: Vec<PreTokenizerWrapper>,
    /// Whether a piece that is a token as a whole is taken without merging.
    ignore_merges: bool,
    /// Whether text is brought to Unicode form C first, as the model's own tokenizer does.
    nfc: bool,
    /// Whether raw prompts begin with the begin-of-sequence token when the file does not say.
    add_bos: bool,
}

impl Pre {
    fn named(name: &str) -> Result<Self, ModelError> {
        // Every piece is then written in the byte alphabet.
        let spell: PreTokenizerWrapper = ByteLevel::new(false, true, false).into();
        let gpt2: PreTokenizerWrapper = ByteLevel::new(false, true, true).into();
        let plain = |splits| Self { splits, ignore_merges: false, nfc: false, add_bos: false };
        Ok(match name {
            "smollm" => plain(vec![Digits::new(true).into(), gpt2]),
            "gpt-2" => plain(vec![gpt2]),
            "default" => plain(vec![
                split(r"[\p{P}\$\+<=>\^~\|]+")?,
                split(r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)")?,
                split(r"\p{N}+")?,
                split(r"[0-9][0-9][0-9]")?,
                spell,
            ]),
            "llama-bpe" | "llama-v3" | "llama3" => {
                Self { ignore_merges: true, add_bos: true, ..plain(vec![split(LLAMA3)?, spell]) }
            }
            "qwen2" => Self { nfc: true, ..plain(vec![split(QWEN2)?, spell]) },
            other => {
                return Err(ModelError::Unsupported {
                    what: "pre-tokenizer (tokenizer.ggml.pre)",
                    name: other.to_owned(),
                    remedy: "known are smollm, llama-bpe, qwen2, gpt-2 and default; use the model's safetensors folder instead",
                });
            }
        })
    }
}

fn split(pattern: &str) -> Result<PreTokenizerWrapper, ModelError> {
    Split::new(SplitPattern::Regex(pattern.to_owned()), SplitDelimiterBehavior::Isolated, false)
        .map(Into::into)
        .map_err(|e| ModelError::Tokenizer { what: e.to_string() })
}

/// What is read alike for both kinds of vocabulary.
struct Vocabulary<'a> {
    tokens: Vec<&'a str>,
    kinds: Vec<TokenKind>,
    bos: Option<u32>,
    eos: Option<u32>,
    ends: [Option<u32>; 2],
}

impl<'a> Vocabulary<'a> {
    fn read(gguf: &'a Gguf) -> Result<Self, ModelError> {
        let tokens = gguf.strings("tokenizer.ggml.tokens")?.ok_or_else(|| required("tokenizer.ggml.tokens"))?;
        let kinds = kinds(gguf.integers("tokenizer.ggml.token_type")?, tokens.len())?;
        Ok(Self {
            tokens,
            kinds,
            bos: id(gguf, "tokenizer.ggml.bos_token_id")?,
            eos: id(gguf, "tokenizer.ggml.eos_token_id")?,
            ends: [id(gguf, "tokenizer.ggml.eot_token_id")?, id(gguf, "tokenizer.ggml.eom_token_id")?],
        })
    }

    fn finish(self, engine: Engine, scheme: Scheme, add_bos: bool, digest: Digest) -> Result<Tokenizer, ModelError> {
        Tokenizer::build(Parts {
            engine,
            spellings: self.tokens.iter().map(|token| Some((*token).to_owned())).collect(),
            kinds: self.kinds,
            scheme,
            bos: self.bos,
            eos: self.eos,
            ends: self.ends.into_iter().flatten().collect(),
            add_bos,
            digest,
        })
    }
}

fn required(key: &str) -> ModelError {
    ModelError::config(key, "is missing")
}

fn id(gguf: &Gguf, key: &str) -> Result<Option<u32>, ModelError> {
    let value = gguf.unsigned(key)?;
    value.map(|v| u32::try_from(v).map_err(|_| ModelError::config(key, format!("{v} is no token")))).transpose()
}

impl Tokenizer {
    /// Builds the tokenizer that a GGUF file describes.
    pub fn from_gguf(gguf: &Gguf) -> Result<Self, ModelError> {
        let model = gguf.string("tokenizer.ggml.model")?.ok_or_else(|| required("tokenizer.ggml.model"))?;
        match model {
            "gpt2" => byte_level(gguf),
            "llama" => sentencepiece(gguf),
            other => Err(ModelError::Unsupported {
                what: "tokenizer (tokenizer.ggml.model)",
                name: other.to_owned(),
                remedy: "byte-level BPE (gpt2) and SentencePiece (llama) are read from GGUF; use the model's safetensors folder instead",
            }),
        }
    }
}

fn byte_level(gguf: &Gguf) -> Result<Tokenizer, ModelError> {
    let pre_name = gguf.string("tokenizer.ggml.pre")?.ok_or_else(|| {
        ModelError::config("tokenizer.ggml.pre", "is missing; convert the model again with a current converter")
    })?;
    let pre = Pre::named(pre_name)?;
    let all = Vocabulary::read(gguf)?;
    let merges = gguf.strings("tokenizer.ggml.merges")?.ok_or_else(|| required("tokenizer.ggml.merges"))?;
    let add_bos = gguf.boolean("tokenizer.ggml.add_bos_token")?.unwrap_or(pre.add_bos);
    let ids = [all.bos, all.eos, all.ends[0], all.ends[1]];
    let digest = digest(pre_name, &all.tokens, &merges, &all.kinds, &ids, add_bos);
    let engine = engine(pre, &all.tokens, &merges, &all.kinds)?;
    all.finish(engine, Scheme::ByteLevel, add_bos, digest)
}

fn sentencepiece(gguf: &Gguf) -> Result<Tokenizer, ModelError> {
    let all = Vocabulary::read(gguf)?;
    let scores = gguf.floats("tokenizer.ggml.scores")?.ok_or_else(|| required("tokenizer.ggml.scores"))?;
    let settings = Settings {
        unknown: id(gguf, "tokenizer.ggml.unknown_token_id")?.unwrap_or(0),
        add_space_prefix: gguf.boolean("tokenizer.ggml.add_space_prefix")?.unwrap_or(true),
    };
    let add_bos = gguf.boolean("tokenizer.ggml.add_bos_token")?.unwrap_or(true);
    let mut engine = from_scores::engine(&all.tokens, &scores, &all.kinds, settings)?;
    add_tokens(&mut engine, &all.tokens, &all.kinds)?;
    // The scores stand where byte-level vocabularies have merges.
    let spelled: Vec<String> = scores.iter().map(|score| score.to_bits().to_string()).collect();
    let spelled: Vec<&str> = spelled.iter().map(String::as_str).collect();
    let ids = [all.bos, all.eos, all.ends[0], all.ends[1], Some(settings.unknown)];
    let name = if settings.add_space_prefix { "sentencepiece, space in front" } else { "sentencepiece" };
    let digest = digest(name, &all.tokens, &spelled, &all.kinds, &ids, add_bos);
    all.finish(engine, Scheme::Metaspace, add_bos, digest)
}

fn kinds(types: Option<Vec<i64>>, vocab: usize) -> Result<Vec<TokenKind>, ModelError> {
    const KEY: &str = "tokenizer.ggml.token_type";
    if vocab == 0 || vocab > VOCABULARY_MAX {
        return Err(ModelError::config(
            "tokenizer.ggml.tokens",
            format!("{vocab} tokens are outside 1..={VOCABULARY_MAX}"),
        ));
    }
    let Some(types) = types else { return Ok(vec![TokenKind::Normal; vocab]) };
    if types.len() != vocab {
        return Err(ModelError::config(KEY, format!("has {} entries for {vocab} tokens", types.len())));
    }
    let kind = |id: &i64| match id {
        1 | 6 => Ok(TokenKind::Normal),
        2 | 3 => Ok(TokenKind::Control),
        4 => Ok(TokenKind::UserDefined),
        5 => Ok(TokenKind::Unused),
        other => Err(ModelError::config(KEY, format!("{other} is no token type"))),
    };
    types.iter().map(kind).collect()
}

fn engine(pre: Pre, tokens: &[&str], merges: &[&str], kinds: &[TokenKind]) -> Result<Engine, ModelError> {
    let fault = |what: String| ModelError::Tokenizer { what };
    let mut vocab = tokenizers::models::bpe::Vocab::default();
    for (id, token) in tokens.iter().enumerate() {
        if vocab.insert((*token).to_owned(), id as u32).is_some() {
            return Err(fault(format!("token {token:?} appears twice")));
        }
    }
    // A vocabulary may lack tokens for rare bytes. They get ids past its end, which encoding leaves out: so such a byte vanishes but still
    // parts its neighbours, as in llama.cpp; without an id the engine would merge across the gap.
    for character in bytes::alphabet() {
        let next = vocab.len() as u32;
        vocab.entry(character.to_string()).or_insert(next);
    }
    let pair = |merge: &&str| -> Result<(String, String), ModelError> {
        let (left, right) =
            merge.split_once(' ').ok_or_else(|| fault(format!("the merge {merge:?} is not two tokens")))?;
        Ok((left.to_owned(), right.to_owned()))
    };
    let merges = merges.iter().map(pair).collect::<Result<Vec<_>, _>>()?;
    let bpe = BPE::builder()
        .vocab_and_merges(vocab, merges)
        .ignore_merges(pre.ignore_merges)
        .build()
        .map_err(|e| fault(e.to_string()))?;
    let mut engine = Engine::new(bpe);
    if pre.nfc {
        engine.with_normalizer(Some(NormalizerWrapper::from(NFC))).map_err(|e| fault(e.to_string()))?;
    }
    engine.with_pre_tokenizer(Some(PreTokenizerWrapper::from(Sequence::new(pre.splits))));
    add_tokens(&mut engine, tokens, kinds)?;
    Ok(engine)
}

/// Control tokens and those of the model's makers, which are found in a text before anything else is.
fn add_tokens(engine: &mut Engine, tokens: &[&str], kinds: &[TokenKind]) -> Result<(), ModelError> {
    let is_added = |kind| matches!(kind, TokenKind::Control | TokenKind::UserDefined);
    let all = tokens.iter().zip(kinds).filter(|(token, kind)| is_added(**kind) && !token.is_empty());
    let token = |(text, kind): (&&str, &TokenKind)| {
        AddedToken::from((*text).to_owned(), *kind == TokenKind::Control).normalized(false)
    };
    let (special, plain): (Vec<AddedToken>, Vec<AddedToken>) = all.map(token).partition(|token| token.special);
    // All at once: the engine rebuilds its search with every call.
    engine.add_special_tokens(special).map_err(|e| ModelError::Tokenizer { what: e.to_string() })?;
    engine.add_tokens(plain).map_err(|e| ModelError::Tokenizer { what: e.to_string() })?;
    Ok(())
}

fn digest(
    pre: &str,
    tokens: &[&str],
    merges: &[&str],
    kinds: &[TokenKind],
    ids: &[Option<u32>],
    add_bos: bool,
) -> Digest {
    let mut hash = Sha256::new();
    hash.update(b"penstock-gguf-tokenizer-1\0");
    let mut field = |bytes: &[u8]| {
        hash.update((bytes.len() as u64).to_le_bytes());
        hash.update(bytes);
    };
    field(pre.as_bytes());
    for list in [tokens, merges] {
        field(&(list.len() as u64).to_le_bytes());
        list.iter().for_each(|text| field(text.as_bytes()));
    }
    field(&kinds.iter().map(|kind| *kind as u8).collect::<Vec<u8>>());
    ids.iter().for_each(|id| field(&id.map_or(-1, i64::from).to_le_bytes()));
    field(&[u8::from(add_bos)]);
    Digest(hash.finalize().into())
}
