//! One answer on its way from tokens to text: detokenising, stop strings, hold-back, block keys, and what counts.
//!
//! An answer outlives attempts: when its replica is lost, the next attempt goes on behind the tokens that are known, or computes the same
//! tokens again from the first; those that the client has are skipped. What the replica is told (keys, the end) belongs to the attempt; what the client gets belongs to the answer.

use std::collections::VecDeque;

use penstock_base::{BlockKey, Instant, Outcome};
use penstock_exec::SampledToken;
use penstock_model::{BlockKeyChain, Detokeniser, StopMatcher};

use crate::config::Vocabulary;
use crate::request::DeliveredToken;

/// See the module.
pub(crate) struct Answer {
    /// Tokens turned into text so far, over all attempts.
    ids: Vec<u32>,
    detokeniser: Detokeniser,
    stops: StopMatcher,
    /// Tokens before stop strings are looked for.
    min_tokens: u32,
    /// Tokens that went past the matcher because of `min_tokens`.
    unmatched: u64,
    /// Tokens whose text is not complete yet.
    held: VecDeque<DeliveredToken>,
    /// Tokens released to the client.
    released: u32,
    /// How it ended for the client.
    end: Option<AnswerEnd>,
    /// The attempt that computes it now.
    attempt: Attempt,
    /// When its first and its last token came.
    pub first_at: Option<Instant>,
    /// See `first_at`.
    pub last_at: Instant,
}

/// What belongs to one attempt.
struct Attempt {
    number: u16,
    /// Tokens that this attempt has delivered.
    seen: u32,
    chain: Option<BlockKeyChain>,
    /// Its replica knows where the answer ends.
    told_end: bool,
    /// A repeated token was not what it was the first time.
    diverged: bool,
}

/// How an answer ended for the client.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct AnswerEnd {
    pub outcome: Outcome,
    /// Output tokens that count.
    pub tokens: u32,
}

/// What some tokens led to.
#[derive(Debug, Default)]
pub(crate) struct Progress {
    /// Text that is certain now.
    pub text: String,
    /// Tokens that it completes.
    pub tokens: Vec<DeliveredToken>,
    /// Tokens that the client did not have before.
    pub new_tokens: usize,
    /// Tokens that it had.
    pub repeated: usize,
    /// Tokens behind the end.
    pub discarded: usize,
    /// The repeated tokens differ for the first time in this attempt.
    pub diverged: bool,
    /// Blocks that are full now: index of the first, and their keys.
    pub keys: Option<(u32, Vec<BlockKey>)>,
    /// The replica must be told that the answer ends here.
    pub tell_end: Option<AnswerEnd>,
    /// The answer just ended for the client.
    pub ended: Option<AnswerEnd>,
}

impl Answer {
    /// An answer without tokens. `chain` stands behind the prompt.
    pub fn new(stops: StopMatcher, min_tokens: u32, chain: Option<BlockKeyChain>) -> Self {
        Self {
            ids: Vec::new(),
            detokeniser: Detokeniser::new(),
            stops,
            min_tokens,
            unmatched: 0,
            held: VecDeque::new(),
            released: 0,
            end: None,
            attempt: Attempt { number: 0, seen: 0, chain, told_end: false, diverged: false },
            first_at: None,
            last_at: Instant::ZERO,
        }
    }

    /// How it ended, if it did.
    pub fn end(&self) -> Option<AnswerEnd> {
        self.end
    }

    /// The attempt that computes it now.
    pub fn attempt(&self) -> u16 {
        self.attempt.number
    }

    /// Tokens that the attempt has delivered.
    pub fn seen(&self) -> u32 {
        self.attempt.seen
    }

    /// Output tokens that count, up to now.
    pub fn counted_tokens(&self) -> u32 {
        self.end.map_or(self.released, |end| end.tokens)
    }

    /// Tokens turned into text so far.
    pub fn ids(&self) -> &[u32] {
        &self.ids
    }

    /// From now on attempt `number` computes it, behind the first `seen` tokens. `chain` stands behind the prompt. False when there are not so
    /// many tokens: what would come in between is nobody's.
    pub fn begin_attempt(&mut self, number: u16, seen: u32, mut chain: Option<BlockKeyChain>) -> bool {
        let Some(before) = self.ids.get(..seen as usize) else { return false };
        if let Some(chain) = &mut chain {
            for id in before {
                let _ = chain.push(*id);
            }
        }
        self.attempt = Attempt { number, seen, chain, told_end: false, diverged: false };
        true
    }

    /// Takes the next tokens of the attempt.
    pub fn push(&mut self, tokens: Vec<SampledToken>, block_size_tokens: u32, vocabulary: &dyn Vocabulary) -> Progress {
        let mut progress = Progress::default();
        for token in tokens {
            let position = self.attempt.seen as usize;
            self.attempt.seen += 1;
            self.extend_keys(token.id, block_size_tokens, &mut progress);
            if let Some(&before) = self.ids.get(position) {
                progress.repeated += 1;
                if before != token.id && !std::mem::replace(&mut self.attempt.diverged, true) {
                    progress.diverged = true;
                }
            } else if self.end.is_some() {
                progress.discarded += 1;
            } else {
                progress.new_tokens += 1;
                self.add(token, vocabulary, &mut progress);
            }
        }
        self.release(&mut progress);
        if let Some(end) = self.end.filter(|end| end.tokens <= self.attempt.seen && !self.attempt.told_end) {
            self.attempt.told_end = true;
            progress.tell_end = Some(end);
        }
        progress
    }

    /// Ends it without a stop string: text that was held back for one is certain now. None when it had ended already.
    ///
    /// `tokens` is what the replica counted, where a replica says so.
    pub fn finish(&mut self, outcome: Outcome, tokens: Option<u32>) -> Option<Progress> {
        if self.end.is_some() {
            return None;
        }
        let mut progress = Progress::default();
        let rest = self.detokeniser.finish();
        if !rest.is_empty() {
            self.add_text(&rest, &mut progress);
        }
        if self.end.is_none() {
            progress.text.push_str(&self.stops.finish());
            progress.tokens.extend(self.held.drain(..));
            self.released += progress.tokens.len() as u32;
            // No more than there are, whatever the replica counted.
            let tokens = tokens.unwrap_or(self.released).min(self.ids.len() as u32);
            self.end = Some(AnswerEnd { outcome, tokens });
            progress.ended = self.end;
        }
        self.attempt.told_end = true;
        Some(progress)
    }

    /// Ends it because its client was too slow: what was released last did not reach the stream.
    pub fn cut(&mut self, outcome: Outcome, dropped_tokens: usize) {
        self.released = self.released.saturating_sub(dropped_tokens as u32);
        self.end = Some(AnswerEnd { outcome, tokens: self.released });
        self.held.clear();
    }

    fn extend_keys(&mut self, id: u32, block_size_tokens: u32, progress: &mut Progress) {
        let Some(chain) = &mut self.attempt.chain else { return };
        let Some(key) = chain.push(id) else { return };
        let index = chain.tokens() / u64::from(block_size_tokens.max(1)) - 1;
        let (_, keys) = progress.keys.get_or_insert_with(|| (index as u32, Vec::new()));
        keys.push(key);
    }

    fn add(&mut self, token: SampledToken, vocabulary: &dyn Vocabulary, progress: &mut Progress) {
        self.ids.push(token.id);
        let bytes = vocabulary.token_bytes(token.id).into_owned();
        let piece = self.detokeniser.push(&bytes);
        let top =
            token.top.iter().map(|top| (top.id, vocabulary.token_bytes(top.id).into_owned(), top.logprob)).collect();
        self.held.push_back(DeliveredToken { id: token.id, bytes, logprob: token.logprob, top });
        if self.ids.len() as u64 <= u64::from(self.min_tokens) {
            self.unmatched += 1;
            progress.text.push_str(&piece);
        } else {
            self.add_text(&piece, progress);
        }
    }

    fn add_text(&mut self, piece: &str, progress: &mut Progress) {
        let matched = self.stops.push(piece);
        progress.text.push_str(&matched.text);
        if let Some(hit) = matched.hit {
            // Tokens released before may have no text of their own; they were delivered all the same.
            let counted = (self.unmatched + hit.delivered_tokens).min(self.ids.len() as u64) as u32;
            let counted = if hit.delivered_tokens == 0 { self.released.max(self.unmatched as u32) } else { counted };
            self.end = Some(AnswerEnd { outcome: Outcome::Stop, tokens: counted.max(self.released) });
            progress.ended = self.end;
            self.release(progress);
        }
    }

    /// Moves the tokens whose text is certain to the client's side.
    fn release(&mut self, progress: &mut Progress) {
        let certain = match self.end {
            Some(end) => end.tokens,
            None if self.stops.held_bytes() == 0 && self.detokeniser.held().is_empty() => self.ids.len() as u32,
            None if self.stops.delivered_tokens() > 0 => (self.unmatched + self.stops.delivered_tokens()) as u32,
            None => self.released,
        };
        while self.released < certain {
            let Some(token) = self.held.pop_front() else { break };
            progress.tokens.push(token);
            self.released += 1;
        }
        if self.end.is_some() {
            progress.discarded += self.held.len();
            self.held.clear();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::borrow::Cow;

    /// Token ids are indices into a list of byte pieces.
    struct Pieces(&'static [&'static [u8]]);

    impl Vocabulary for Pieces {
        fn token_bytes(&self, id: u32) -> Cow<'_, [u8]> {
            Cow::Borrowed(self.0[id as usize])
        }
    }

    const PIECES: Pieces = Pieces(&[b"one ", b"two", b" th", b"ree", b"\xe2\x82", b"\xac", b"", b"STO", b"P it"]);

    fn token(id: u32) -> SampledToken {
        SampledToken { id, logprob: 0.0, top: Vec::new() }
    }

    fn answer(stops: &[&str]) -> Answer {
        Answer::new(StopMatcher::new(stops.iter().map(|stop| stop.to_string()).collect()).unwrap(), 0, None)
    }

    fn push(answer: &mut Answer, ids: &[u32]) -> (String, Vec<u32>, Progress) {
        let mut progress = answer.push(ids.iter().map(|&id| token(id)).collect(), 4, &PIECES);
        let tokens = std::mem::take(&mut progress.tokens).iter().map(|token| token.id).collect();
        (std::mem::take(&mut progress.text), tokens, progress)
    }

    #[test]
    fn a_stop_string_over_token_borders_is_held_back_and_never_seen() {
        let mut answer = answer(&["STOP", "two three"]);
        assert_eq!((push(&mut answer, &[0]).0, push(&mut answer, &[1]).0), ("one ".into(), "".into()));
        let (text, tokens, _) = push(&mut answer, &[7]);
        assert_eq!((text.as_str(), tokens), ("two", vec![1]), "no longer the beginning of the second stop");
        let (text, tokens, progress) = push(&mut answer, &[8, 3]);
        assert_eq!((text.as_str(), tokens), ("", vec![]));
        let end = AnswerEnd { outcome: Outcome::Stop, tokens: 2 };
        assert_eq!((progress.tell_end, progress.ended), (Some(end), Some(end)), "one, two: what the client sees");
        assert_eq!(progress.discarded, 3, "the two tokens of the stop and the one behind it");
        let (_, _, later) = push(&mut answer, &[0]);
        assert_eq!((later.tell_end, later.ended, later.discarded), (None, None, 1));
        assert!(answer.finish(Outcome::Length, Some(9)).is_none(), "the end stands");
    }

    #[test]
    fn a_token_counts_when_a_part_of_its_text_was_delivered() {
        let mut answer = answer(&["hre"]);
        let (text, tokens, progress) = push(&mut answer, &[0, 2, 3]);
        assert_eq!((text.as_str(), tokens), ("one  t", vec![0, 2]));
        assert_eq!(progress.ended.unwrap().tokens, 2);
    }

    #[test]
    fn characters_are_never_split_and_an_incomplete_one_ends_as_a_replacement() {
        let mut answer = answer(&[]);
        assert_eq!(push(&mut answer, &[4]).0, "");
        let (text, tokens, _) = push(&mut answer, &[5]);
        assert_eq!((text.as_str(), tokens), ("\u{20ac}", vec![4, 5]));
        assert_eq!(push(&mut answer, &[6, 4]).0, "");
        let last = answer.finish(Outcome::Length, Some(4)).unwrap();
        assert_eq!(last.text, "\u{fffd}");
        assert_eq!(last.tokens.len(), 2);
        assert_eq!(last.ended, Some(AnswerEnd { outcome: Outcome::Length, tokens: 4 }));
    }

    #[test]
    fn what_was_held_back_for_a_stop_that_does_not_come_is_delivered_at_the_end() {
        let mut answer = answer(&["STOP!"]);
        assert_eq!(push(&mut answer, &[0, 7]).0, "one ");
        assert_eq!(answer.finish(Outcome::Length, None).unwrap().text, "STO");
        assert_eq!(answer.end().unwrap().tokens, 2);
    }

    #[test]
    fn stop_strings_are_not_looked_for_before_min_tokens() {
        let stops = StopMatcher::new(vec!["two".into()]).unwrap();
        let mut answer = Answer::new(stops, 2, None);
        assert_eq!(push(&mut answer, &[0, 1]).0, "one two");
        let (text, tokens, progress) = push(&mut answer, &[0, 1]);
        assert_eq!((text.as_str(), tokens), ("one ", vec![0]));
        assert_eq!(progress.ended.unwrap().tokens, 3);
    }

    #[test]
    fn a_second_attempt_repeats_nothing_and_tells_its_replica_where_the_answer_ends() {
        let mut answer = answer(&["STOP"]);
        assert_eq!(push(&mut answer, &[0, 1]).0, "one two");
        assert!(answer.begin_attempt(2, 0, None));
        let (text, tokens, progress) = push(&mut answer, &[0, 1, 7]);
        assert_eq!((text.as_str(), tokens, progress.repeated), ("", vec![], 2));
        assert_eq!(push(&mut answer, &[8]).2.tell_end.unwrap().tokens, 2);
        assert!(answer.begin_attempt(3, 0, None));
        assert_eq!(push(&mut answer, &[0]).2.tell_end, None, "this replica has not got there yet");
        let (_, _, progress) = push(&mut answer, &[0]);
        assert!(progress.diverged, "the second token differs");
        assert_eq!(progress.tell_end.unwrap().tokens, 2);
    }

    #[test]
    fn keys_of_generated_blocks_go_on_behind_the_prompt() {
        let root = BlockKey([7; 16]);
        let mut chain = BlockKeyChain::new(root, 4);
        let prompt_keys = chain.extend(&[9, 9, 9, 9, 9, 9], &[]);
        let mut answer = Answer::new(StopMatcher::new(vec![]).unwrap(), 0, Some(chain));
        assert!(push(&mut answer, &[0]).2.keys.is_none());
        let (first, keys) = push(&mut answer, &[1, 2, 3, 0, 1]).2.keys.unwrap();
        let all = penstock_model::block_keys(root, 4, &[9, 9, 9, 9, 9, 9, 0, 1, 2, 3, 0, 1], &[]);
        assert_eq!(prompt_keys, all[..1]);
        assert_eq!((first, keys.as_slice()), (1, &all[1..]));
    }
}
