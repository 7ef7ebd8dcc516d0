/// How one sequence's tokens are chosen. Sampling is a pure function of (logits, these, token index): independent of batch and preemption.
#[derive(Clone, PartialEq, Debug)]
pub struct SamplingParams {
    /// 0 is greedy.
    pub temperature: f32,
    /// Only the k most likely tokens; 0 is all.
    pub top_k: u32,
    /// Smallest set of tokens with at least this probability; 1 is all.
    pub top_p: f32,
    /// Only tokens at least this likely relative to the likeliest; 0 is all.
    pub min_p: f32,
    /// Divides (or multiplies, below zero) the logits of tokens seen in prompt or output; 1 is none.
    pub repetition_penalty: f32,
    /// Subtracted once from tokens of the output.
    pub presence_penalty: f32,
    /// Subtracted for each occurrence in the output.
    pub frequency_penalty: f32,
    /// Added to single logits.
    pub logit_bias: Vec<(u32, f32)>,
    /// Seed of this sequence; with the token index it determines each draw.
    pub seed: u64,
    /// Log-probabilities wanted: none, or of the chosen token and this many likeliest (0..=20).
    pub logprobs: Option<u8>,
    /// Stop tokens are impossible before this many tokens were generated.
    pub min_tokens: u32,
    /// Tokens that end the sequence; empty with `ignore_eos`.
    pub stop_tokens: Vec<u32>,
}

impl Default for SamplingParams {
    /// Greedy, no penalties, no stop tokens.
    fn default() -> Self {
        Self {
            temperature: 0.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            repetition_penalty: 1.0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            logit_bias: Vec::new(),
            seed: 0,
            logprobs: None,
            min_tokens: 0,
            stop_tokens: Vec::new(),
        }
    }
}

/// One chosen token.
#[derive(Clone, PartialEq, Debug)]
pub struct SampledToken {
    /// Token id.
    pub id: u32,
    /// Natural log of its probability before temperature, truncation and penalties; 0 when not asked for.
    pub logprob: f32,
    /// The likeliest tokens, likeliest first, when asked for.
    pub top: Vec<TopLogprob>,
}

/// One of the likeliest tokens at a position.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct TopLogprob {
    /// Token id.
    pub id: u32,
    /// Natural log of its probability.
    pub logprob: f32,
}
