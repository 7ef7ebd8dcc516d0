//! Token ids and bytes, against llama.cpp's own tokenizer and against the text itself.
#![allow(clippy::unwrap_used)]

mod support;

use std::sync::LazyLock;

use penstock_model::gguf::tiny::TinyLlama;
use penstock_model::{Gguf, Model, ModelError, Specials, TokenKind, Tokenizer};
use proptest::prelude::*;

#[derive(serde::Deserialize)]
struct Line {
    text: String,
    parse_special: bool,
    ids: Vec<u32>,
}

#[test]
fn ids_equal_llama_cpp() {
    let (Some(path), Some(oracle)) = (support::demo_model(), support::oracle("tokenizer.jsonl")) else { return };
    let tokenizer = Tokenizer::from_gguf(&Gguf::open(&path).unwrap()).unwrap();
    let mut known = [false; 256];
    for id in 0..tokenizer.vocab_len() as u32 {
        if let [byte] = tokenizer.token_bytes(id) {
            known[usize::from(*byte)] = true;
        }
    }
    let mut wrong = Vec::new();
    let mut lines = 0;
    for line in oracle.lines().filter(|line| !line.trim().is_empty()) {
        let line: Line = serde_json::from_str(line).unwrap();
        let specials = if line.parse_special { Specials::Parsed } else { Specials::AsText };
        let ids = tokenizer.encode(&line.text, specials).unwrap();
        if ids != line.ids {
            wrong.push(format!("{:?} ({specials:?})\n  ours {ids:?}\n  told {:?}", line.text, line.ids));
        }
        let bytes: Vec<u8> = line.ids.iter().flat_map(|&id| tokenizer.token_bytes(id)).copied().collect();
        // The vocabulary lacks some rare bytes; either tokenizer leaves them out.
        let spelled: Vec<u8> = line.text.bytes().filter(|&byte| known[usize::from(byte)]).collect();
        assert_eq!(bytes, spelled, "the bytes of the ids are the text");
        lines += 1;
    }
    assert!(wrong.is_empty(), "{} of {lines} texts differ:\n{}", wrong.len(), wrong.join("\n"));
    assert!(lines > 100, "the corpus is there");
}

/// Gemma's vocabulary is SentencePiece's: tokens and scores, no merges.
#[test]
fn ids_equal_sentencepiece() {
    let (Some(path), Some(oracle)) = (support::gemma3(), support::oracle("gemma3_tokenizer.jsonl")) else { return };
    let tokenizer = Tokenizer::from_gguf(&Gguf::open(&path).unwrap()).unwrap();
    assert_eq!((tokenizer.bos(), tokenizer.eos(), tokenizer.add_bos()), (Some(2), Some(1), true));
    assert_eq!(tokenizer.vocab_len(), 262_144);
    assert!(tokenizer.ends().contains(&tokenizer.id_of("<end_of_turn>").unwrap()));
    let mut wrong = Vec::new();
    let mut lines = 0;
    for line in oracle.lines().filter(|line| !line.trim().is_empty()) {
        let line: Line = serde_json::from_str(line).unwrap();
        let specials = if line.parse_special { Specials::Parsed } else { Specials::AsText };
        let ids = tokenizer.encode(&line.text, specials).unwrap();
        if ids != line.ids {
            wrong.push(format!("{:?} ({specials:?})\n  ours {ids:?}\n  told {:?}", line.text, line.ids));
        }
        let bytes: Vec<u8> = line.ids.iter().flat_map(|&id| tokenizer.token_bytes(id)).copied().collect();
        // The mark that stands for a space is one in a text, too.
        assert_eq!(bytes, line.text.replace('\u{2581}', " ").into_bytes(), "the bytes of the ids are the text");
        lines += 1;
    }
    assert!(wrong.is_empty(), "{} of {lines} texts differ:\n{}", wrong.len(), wrong.join("\n"));
    assert!(lines > 500, "the corpus is there");
}

#[test]
fn the_demo_models_roles_are_found() {
    let Some(path) = support::demo_model() else { return };
    let tokenizer = Tokenizer::from_gguf(&Gguf::open(&path).unwrap()).unwrap();
    // research: SmolLM2's tokenizer_config names <|im_start|> and <|im_end|>; <|endoftext|> ends documents.
    assert_eq!((tokenizer.bos(), tokenizer.eos(), tokenizer.ends()), (Some(1), Some(2), &[0u32, 2][..]));
    assert!(!tokenizer.add_bos());
    assert_eq!(tokenizer.vocab_len(), 49_152);
    assert_eq!(tokenizer.token_bytes(2), b"<|im_end|>");
    assert_eq!(tokenizer.delivered_bytes(2), b"");
    assert_eq!(tokenizer.kind(2), TokenKind::Control);
    assert_eq!(tokenizer.kind(60_000), TokenKind::Unused);
    assert_eq!(tokenizer.token_bytes(60_000), b"");
}

fn tiny() -> &'static Tokenizer {
    static TINY: LazyLock<Model> = LazyLock::new(support::tiny);
    TINY.tokenizer()
}

/// Ids by hand: three control tokens, then byte b at 3 + b, then the merged tokens he, ll, hell, hello and " w" from 259 on.
#[test]
fn merges_digits_and_control_tokens_by_hand() {
    let tokenizer = tiny();
    let byte = |b: u8| 3 + u32::from(b);
    let check = |text: &str, specials, expected: &[u32]| {
        assert_eq!(tokenizer.encode(text, specials).unwrap(), expected, "{text}");
    };
    check("hello", Specials::AsText, &[262]);
    check("hello w12", Specials::AsText, &[262, 263, byte(b'1'), byte(b'2')]);
    check("<|im_end|>", Specials::Parsed, &[2]);
    let plain: Vec<u32> = "<|im_end|>".bytes().map(byte).collect();
    check("<|im_end|>", Specials::AsText, &plain);
    check("", Specials::Parsed, &[]);
}

#[test]
fn unknown_pre_tokenizers_are_refused_by_name() {
    let mut file = TinyLlama::default().file();
    let at = file.windows(6).position(|w| w == b"smollm").unwrap();
    file[at..at + 6].copy_from_slice(b"chatty");
    match support::open_bytes(&file) {
        Err(ModelError::Unsupported { name, .. }) => assert_eq!(name, "chatty"),
        other => panic!("{other:?}"),
    }
}

/// Long runs without a split point, and runs that make a backtracking matcher work hard, are encoded whole and in reasonable time.
#[test]
fn long_runs_survive() {
    let tokenizer = tiny();
    for text in [" ".repeat(300_000) + "x", "a".repeat(100_000), "\n".repeat(100_000), "1".repeat(100_000)] {
        let ids = tokenizer.encode(&text, Specials::AsText).unwrap();
        let bytes: Vec<u8> = ids.iter().flat_map(|&id| tokenizer.token_bytes(id)).copied().collect();
        assert!(bytes == text.as_bytes());
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Whatever the text, its ids spell it byte for byte, and text read as text never makes a control token.
    #[test]
    fn bytes_of_ids_are_the_text(text in "(\\PC|\\s|<\\|im_end\\|>|<\\|im_start\\|>|hello){0,40}") {
        let tokenizer = tiny();
        for specials in [Specials::AsText, Specials::Parsed] {
            let ids = tokenizer.encode(&text, specials).unwrap();
            let bytes: Vec<u8> = ids.iter().flat_map(|&id| tokenizer.token_bytes(id)).copied().collect();
            prop_assert_eq!(bytes, text.as_bytes());
            if specials == Specials::AsText {
                prop_assert!(ids.iter().all(|&id| tokenizer.kind(id) != TokenKind::Control));
            }
        }
    }
}
