//! Stop strings across token borders: how much of the text may be delivered, and where does it end?

use std::collections::VecDeque;

use crate::error::ModelError;
use crate::limits::{STOP_BYTES_MAX, STOP_STRINGS_MAX};

const _: () = assert!(STOP_BYTES_MAX <= u16::MAX as usize, "the tables hold u16");

/// What one token's text led to.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StopPiece {
    /// Text that is now safe to deliver: no stop string can begin in it. Never holds any part of a stop that was hit.
    pub text: String,
    /// The stop that ended the text. Later pushes deliver nothing.
    pub hit: Option<StopHit>,
}

/// Where a stop string ended the text. Tokens are counted from 1 in the order of pushes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StopHit {
    /// Which stop string, by its place in the list.
    pub stop: usize,
    /// Tokens whose text contributes to what was delivered: the last delivered byte lies in this token; 0 when nothing was delivered.
    pub delivered_tokens: u64,
    /// The token in which the stop string begins.
    pub began_token: u64,
    /// The token that completed it: tokens needed in all. What the executor made after it is discarded and not billed.
    pub completed_token: u64,
}

/// One stop string with its Knuth-Morris-Pratt table: constant work per byte whatever the string.
#[derive(Clone, Debug)]
struct Stop {
    text: String,
    /// For each length matched, the longest shorter beginning that the same bytes also end with.
    shorter: Vec<u16>,
    /// Bytes of `text` that the text seen so far ends with.
    matched: usize,
}

impl Stop {
    fn new(text: String) -> Self {
        let bytes = text.as_bytes();
        let mut shorter = vec![0u16; bytes.len() + 1];
        let mut length = 0usize;
        for at in 1..bytes.len() {
            while length > 0 && bytes[at] != bytes[length] {
                length = usize::from(shorter[length]);
            }
            length += usize::from(bytes[at] == bytes[length]);
            shorter[at + 1] = length as u16;
        }
        Self { text, shorter, matched: 0 }
    }

    /// Takes one byte of the text; true when the stop string ends here.
    fn advance(&mut self, byte: u8) -> bool {
        let bytes = self.text.as_bytes();
        while self.matched > 0 && bytes[self.matched] != byte {
            self.matched = usize::from(self.shorter[self.matched]);
        }
        self.matched += usize::from(bytes[self.matched] == byte);
        self.matched == bytes.len()
    }
}

/// Finds the first stop string in a text that arrives in pieces, and holds back what might become one.
///
/// The stop that counts is the one whose last byte comes first; of several that end there, the longest. This does not depend on
/// where pieces are cut, and the delivered text never contains a stop string. The default has no stop strings.
#[derive(Clone, Default, Debug)]
pub struct StopMatcher {
    stops: Vec<Stop>,
    /// Text seen and not delivered: the longest end of the text that begins some stop string.
    held: String,
    /// Bytes delivered.
    delivered: u64,
    /// Tokens pushed.
    tokens: u64,
    /// Token of the last delivered byte.
    delivered_tokens: u64,
    /// Tokens with text not delivered: (token, end of its text in bytes from the start).
    ends: VecDeque<(u64, u64)>,
    hit: Option<StopHit>,
}

impl StopMatcher {
    /// A matcher for some stop strings; with none, text passes at once.
    pub fn new(stops: Vec<String>) -> Result<Self, ModelError> {
        let refuse = |what: String| Err(ModelError::Stop { what });
        if stops.len() > STOP_STRINGS_MAX {
            return refuse(format!("{} are given, at most {STOP_STRINGS_MAX} are allowed", stops.len()));
        }
        if stops.iter().any(String::is_empty) {
            return refuse("an empty string would stop before the first token".to_owned());
        }
        if let Some(long) = stops.iter().find(|stop| stop.len() > STOP_BYTES_MAX) {
            return refuse(format!("one has {} bytes, at most {STOP_BYTES_MAX} are allowed", long.len()));
        }
        Ok(Self {
            stops: stops.into_iter().map(Stop::new).collect(),
            held: String::new(),
            delivered: 0,
            tokens: 0,
            delivered_tokens: 0,
            ends: VecDeque::new(),
            hit: None,
        })
    }

    /// Adds the text of one token (empty while a character is incomplete).
    pub fn push(&mut self, piece: &str) -> StopPiece {
        if self.hit.is_some() {
            return StopPiece { text: String::new(), hit: self.hit };
        }
        self.tokens += 1;
        if piece.is_empty() {
            return StopPiece::default();
        }
        let before = self.held.len();
        self.held.push_str(piece);
        self.ends.push_back((self.tokens, self.delivered + self.held.len() as u64));
        for (at, byte) in piece.bytes().enumerate() {
            let longest = self
                .stops
                .iter_mut()
                .enumerate()
                .filter_map(|(index, stop)| stop.advance(byte).then_some((stop.text.len(), index)));
            if let Some((length, index)) = longest.max_by_key(|&(length, _)| length) {
                return self.end(before + at + 1 - length, index);
            }
        }
        let keep = self.stops.iter().map(|stop| stop.matched).max().unwrap_or(0);
        StopPiece { text: self.deliver(self.held.len() - keep), hit: None }
    }

    /// Ends the text at a stop that begins at byte `start` of the held text.
    fn end(&mut self, start: usize, stop: usize) -> StopPiece {
        let began_token = self.token_at(self.delivered + start as u64);
        let text = self.deliver(start);
        self.held = String::new();
        self.ends = VecDeque::new();
        let (delivered_tokens, completed_token) = (self.delivered_tokens, self.tokens);
        self.hit = Some(StopHit { stop, delivered_tokens, began_token, completed_token });
        StopPiece { text, hit: self.hit }
    }

    /// Ends the text without a stop: what was held back.
    pub fn finish(&mut self) -> String {
        self.deliver(self.held.len())
    }

    /// The stop that ended the text.
    pub fn hit(&self) -> Option<StopHit> {
        self.hit
    }

    /// Bytes held back now.
    pub fn held_bytes(&self) -> usize {
        self.held.len()
    }

    /// Tokens pushed before the end.
    pub fn tokens(&self) -> u64 {
        self.tokens
    }

    /// Tokens whose text has been delivered in full or in part: the last delivered byte lies in this token.
    pub fn delivered_tokens(&self) -> u64 {
        self.delivered_tokens
    }

    fn token_at(&self, byte: u64) -> u64 {
        self.ends.iter().find(|(_, end)| *end > byte).map_or(self.tokens, |(token, _)| *token)
    }

    fn deliver(&mut self, bytes: usize) -> String {
        if bytes == 0 {
            return String::new();
        }
        let rest = self.held.split_off(bytes);
        let text = std::mem::replace(&mut self.held, rest);
        self.delivered_tokens = self.token_at(self.delivered + bytes as u64 - 1);
        self.delivered += bytes as u64;
        while self.ends.front().is_some_and(|(_, end)| *end <= self.delivered) {
            self.ends.pop_front();
        }
        text
    }
}
