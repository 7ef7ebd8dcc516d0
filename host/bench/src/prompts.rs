//! What does request `i` ask?

use std::fs;
use std::path::Path;

use rand::{RngExt as _, SeedableRng as _};
use rand_chacha::ChaCha8Rng;
use serde_json::{Value, json};

use crate::error::BenchError;
use crate::limits::PROMPT_FILE_BYTES_MAX;
use crate::plan::{Endpoint, Prompts, Synthetic};

/// A source of prompts: request `i` always asks the same.
#[derive(Debug)]
pub enum Source {
    /// Common words.
    Synthetic { words: Synthetic, seed: u64 },
    /// Lines of a file.
    Lines(Vec<Line>),
}

/// What one request asks.
#[derive(Clone, Debug, PartialEq)]
pub struct Line {
    ask: Ask,
    /// Tokens to answer with, when this prompt says so.
    pub output_tokens: Option<u32>,
}

#[derive(Clone, Debug, PartialEq)]
enum Ask {
    Text(String),
    Messages(Value),
}

impl Source {
    /// Reads the file or makes ready to make words up.
    pub fn new(prompts: &Prompts, seed: u64, endpoint: Endpoint) -> Result<Self, BenchError> {
        match prompts {
            Prompts::Synthetic(words) => Ok(Self::Synthetic { words: *words, seed }),
            Prompts::File(path) => read(path, endpoint).map(Self::Lines),
        }
    }

    /// The prompt of request `index`.
    pub fn prompt(&self, index: usize) -> Line {
        match self {
            Self::Synthetic { words, seed } => Line { ask: Ask::Text(text(*words, *seed, index)), output_tokens: None },
            Self::Lines(lines) => lines[index % lines.len()].clone(),
        }
    }
}

impl Line {
    /// Writes the prompt into a request's body.
    pub fn put(self, endpoint: Endpoint, body: &mut serde_json::Map<String, Value>) {
        match (endpoint, self.ask) {
            (Endpoint::Completions, Ask::Text(text)) => body.insert("prompt".into(), text.into()),
            (Endpoint::Chat, Ask::Text(text)) => {
                body.insert("messages".into(), json!([{ "role": "user", "content": text }]))
            }
            (_, Ask::Messages(messages)) => body.insert("messages".into(), messages),
        };
    }
}

fn text(words: Synthetic, seed: u64, index: usize) -> String {
    let group = (index % words.groups) as u64;
    let mut shared = stream(seed, SHARED, group);
    let mut own = stream(seed, OWN, index as u64);
    let shared = (0..words.shared_words).map(|_| word(&mut shared));
    let own = (0..words.own_words).map(|_| word(&mut own));
    shared.chain(own).collect::<Vec<_>>().join(" ")
}

fn word(random: &mut ChaCha8Rng) -> &'static str {
    WORDS[random.random_range(0..WORDS.len())]
}

/// Random numbers of their own for each (purpose, index): no request depends on how many came before it.
fn stream(seed: u64, purpose: u64, index: u64) -> ChaCha8Rng {
    let mut random = ChaCha8Rng::seed_from_u64(seed ^ purpose);
    random.set_stream(index);
    random
}

const SHARED: u64 = 0x7368_6172_6564;
const OWN: u64 = 0x006f_776e;

/// Short common words, each a token or two in the usual vocabularies.
const WORDS: [&str; 64] = [
    "river", "stone", "light", "water", "house", "green", "north", "paper", "music", "table", "winter", "summer",
    "garden", "market", "bridge", "window", "letter", "number", "person", "story", "morning", "evening", "road",
    "field", "horse", "bread", "glass", "metal", "cloud", "ocean", "island", "village", "the", "and", "of", "to", "in",
    "with", "from", "under", "over", "near", "after", "before", "when", "where", "small", "large", "old", "new",
    "open", "quiet", "early", "late", "first", "last", "runs", "turns", "holds", "brings", "finds", "keeps", "gives",
    "takes",
];

fn read(path: &Path, endpoint: Endpoint) -> Result<Vec<Line>, BenchError> {
    let shown = path.display().to_string();
    let fault = |line, problem: String| BenchError::Prompts { path: shown.clone(), line, problem };
    let bytes = fs::metadata(path).map_err(|cause| fault(None, cause.to_string()))?.len();
    if bytes > PROMPT_FILE_BYTES_MAX {
        return Err(fault(None, format!("{bytes} bytes; {PROMPT_FILE_BYTES_MAX} are the most")));
    }
    let text = fs::read_to_string(path).map_err(|cause| fault(None, cause.to_string()))?;
    let lines = text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty());
    let lines: Result<Vec<_>, _> =
        lines.map(|(at, line)| parse(line, endpoint).map_err(|problem| fault(Some(at + 1), problem))).collect();
    let lines = lines?;
    if lines.is_empty() {
        return Err(fault(None, "no prompt in it; each line is an object with `prompt` or `messages`".into()));
    }
    Ok(lines)
}

fn parse(line: &str, endpoint: Endpoint) -> Result<Line, String> {
    let mut value: Value = serde_json::from_str(line).map_err(|fault| fault.to_string())?;
    let object = value.as_object_mut().ok_or("not an object")?;
    let ask = match (object.remove("prompt"), object.remove("messages")) {
        (Some(Value::String(text)), None) => Ask::Text(text),
        (None, Some(messages @ Value::Array(_))) if endpoint == Endpoint::Chat => Ask::Messages(messages),
        (None, Some(Value::Array(_))) => return Err("`messages` needs --endpoint chat".into()),
        _ => return Err("wants either `prompt` (a text) or `messages` (a list)".into()),
    };
    let output_tokens = match object.remove("max_tokens") {
        None => None,
        Some(value) => Some(
            value
                .as_u64()
                .and_then(|tokens| u32::try_from(tokens).ok())
                .filter(|tokens| *tokens > 0)
                .ok_or("`max_tokens` is no number of tokens above 0")?,
        ),
    };
    Ok(Line { ask, output_tokens })
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroUsize;

    use super::*;

    fn words(own_words: usize, shared_words: usize, groups: usize) -> Synthetic {
        Synthetic { own_words, shared_words, groups: NonZeroUsize::new(groups).expect("not 0") }
    }

    #[test]
    fn a_group_shares_its_beginning_and_nothing_else() {
        let shape = words(20, 30, 2);
        let texts: Vec<_> = (0..4).map(|index| text(shape, 9, index)).collect();
        let split: Vec<Vec<&str>> = texts.iter().map(|text| text.split(' ').collect()).collect();
        assert!(split.iter().all(|words| words.len() == 50));
        assert_eq!(split[0][..30], split[2][..30]);
        assert_eq!(split[1][..30], split[3][..30]);
        assert_ne!(split[0][..30], split[1][..30]);
        assert_ne!(split[0][30..], split[2][30..]);
    }

    #[test]
    fn another_seed_asks_something_else() {
        assert_eq!(text(words(8, 0, 1), 1, 5), text(words(8, 0, 1), 1, 5));
        assert_ne!(text(words(8, 0, 1), 1, 5), text(words(8, 0, 1), 2, 5));
    }

    #[test]
    fn lines_say_what_is_wrong_with_them() {
        let said = |line| parse(line, Endpoint::Completions).expect_err("is refused");
        assert!(said("{").contains("EOF"));
        assert_eq!(said("[]"), "not an object");
        assert!(said(r#"{"prompt": 3}"#).contains("a text"));
        assert!(said(r#"{"messages": []}"#).contains("--endpoint chat"));
        assert!(said(r#"{"prompt": "a", "max_tokens": 0}"#).contains("above 0"));
    }
}
