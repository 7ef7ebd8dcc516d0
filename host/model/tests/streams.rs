//! Detokenising and stop strings, against models too simple to be wrong.
#![allow(clippy::unwrap_used)]

use penstock_model::limits::{STOP_BYTES_MAX, STOP_STRINGS_MAX};
use penstock_model::{Detokeniser, StopHit, StopMatcher};
use proptest::prelude::*;

#[test]
fn characters_arrive_whole() {
    let mut stream = Detokeniser::new();
    assert_eq!(stream.push(b"a\xf0\x9f"), "a");
    assert_eq!(stream.held(), b"\xf0\x9f");
    assert_eq!(stream.push(b"\x98"), "");
    assert_eq!(stream.push(b"\x80b"), "😀b");
    assert_eq!(stream.push(b"\xe6\x97x"), "\u{fffd}x");
    assert_eq!(stream.push(b"\xe6\x97"), "");
    assert_eq!(stream.finish(), "\u{fffd}");
    assert_eq!(stream.finish(), "");
}

fn pieces() -> impl Strategy<Value = Vec<Vec<u8>>> {
    let text = "(\\PC){0,3}".prop_map(String::into_bytes);
    let rubbish = prop::collection::vec(any::<u8>(), 0..4);
    let lead = prop::sample::select(vec![0xe6u8, 0xf0, 0x9f, 0x98, 0x80, 0xc3, 0xa9, 0xed, 0xa0, b'a']);
    let broken = prop::collection::vec(lead, 0..4);
    prop::collection::vec(prop_oneof![text, rubbish, broken], 0..20)
}

proptest! {
    #[test]
    fn pieces_join_to_the_lossy_text(pieces in pieces()) {
        let mut stream = Detokeniser::new();
        let mut text = String::new();
        for piece in &pieces {
            text.push_str(&stream.push(piece));
            prop_assert!(stream.held().len() <= 3);
        }
        text.push_str(&stream.finish());
        let all = pieces.concat();
        prop_assert_eq!(text, String::from_utf8_lossy(&all));
    }
}

fn matcher(stops: &[&str]) -> StopMatcher {
    StopMatcher::new(stops.iter().map(|s| (*s).to_owned()).collect()).unwrap()
}

#[test]
fn a_stop_across_tokens_is_held_back_and_cut() {
    let mut stops = matcher(&["</end>", "STOP"]);
    assert_eq!(stops.push("Hi <").text, "Hi ");
    assert_eq!(stops.push("/").text, "");
    assert_eq!(stops.push("b> S").text, "</b> ");
    assert_eq!(stops.delivered_tokens(), 3);
    assert_eq!(stops.push("T").text, "");
    let last = stops.push("OP and more");
    assert_eq!(last.text, "");
    let hit = StopHit { stop: 1, delivered_tokens: 3, began_token: 3, completed_token: 5 };
    assert_eq!(last.hit, Some(hit));
    assert_eq!(stops.push("later").text, "");
    assert_eq!((stops.finish(), stops.tokens()), (String::new(), 5));
}

#[test]
fn held_text_comes_at_the_end_when_no_stop_does() {
    let mut stops = matcher(&["\n\n"]);
    assert_eq!(stops.push("a\n").text, "a");
    assert_eq!(stops.held_bytes(), 1);
    assert_eq!(stops.finish(), "\n");
    assert_eq!(stops.delivered_tokens(), 1);
    let mut none = matcher(&[]);
    assert_eq!(none.push("all").text, "all");
}

#[test]
fn bounds_of_stop_strings() {
    let many = |n: usize| StopMatcher::new(vec!["x".to_owned(); n]);
    assert!(many(STOP_STRINGS_MAX).is_ok() && many(STOP_STRINGS_MAX + 1).is_err());
    let long = |n: usize| StopMatcher::new(vec!["x".repeat(n)]);
    assert!(long(STOP_BYTES_MAX).is_ok() && long(STOP_BYTES_MAX + 1).is_err());
    assert!(long(0).is_err());
}

/// The rule by brute force: the stop whose end comes first, of those the longest; delivered is all before it.
fn naive(text: &str, stops: &[String]) -> Option<(usize, usize, usize)> {
    let mut found = Vec::new();
    for (index, stop) in stops.iter().enumerate() {
        for start in 0..text.len() {
            if text.as_bytes()[start..].starts_with(stop.as_bytes()) {
                found.push((start + stop.len(), start, index));
            }
        }
    }
    found.into_iter().min()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2_000))]

    #[test]
    fn stops_equal_the_naive_search(
        pieces in prop::collection::vec("[abé]{0,4}", 0..12),
        stops in prop::collection::vec("[abé]{1,5}", 0..4),
    ) {
        let text = pieces.concat();
        let mut stream = StopMatcher::new(stops.clone()).unwrap();
        let mut delivered = String::new();
        let mut hit = None;
        let mut seen = String::new();
        for piece in &pieces {
            let out = stream.push(piece);
            delivered.push_str(&out.text);
            seen.push_str(piece);
            prop_assert!(text.starts_with(&delivered));
            if out.hit.is_some() {
                hit = out.hit;
                break;
            }
            // Held back is only what could still begin a stop, and all of that.
            let could = |n: &usize| stops.iter().any(|s| s.len() > *n && seen.as_bytes().ends_with(&s.as_bytes()[..*n]));
            let longest = (0..=seen.len()).rev().find(|n| *n == 0 || could(n)).unwrap();
            prop_assert_eq!(stream.held_bytes(), longest);
        }
        // The token (from 1) in which a byte lies.
        let token_of = |byte: usize| {
            let mut end = 0;
            1 + pieces.iter().position(|piece| { end += piece.len(); end > byte }).unwrap() as u64
        };
        match naive(&text, &stops) {
            None => {
                prop_assert_eq!(hit, None);
                delivered.push_str(&stream.finish());
                prop_assert_eq!(delivered, text);
            }
            Some((end, start, stop)) => {
                prop_assert_eq!(&delivered, &text[..start]);
                let hit = hit.unwrap();
                prop_assert_eq!(&stops[hit.stop], &stops[stop]);
                prop_assert_eq!(hit.completed_token, token_of(end - 1));
                prop_assert_eq!(hit.began_token, token_of(start));
                prop_assert_eq!(hit.delivered_tokens, if start == 0 { 0 } else { token_of(start - 1) });
            }
        }
    }
}
