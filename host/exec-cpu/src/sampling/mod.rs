//! Which token comes next? A pure function of logits, parameters, history counts and token index.
//!
//! The order of steps is that of vLLM: log-probabilities are read from the raw logits; then the mask, `min_tokens`, `logit_bias` and the
//! penalties (repetition, frequency, presence) change logits; then greedy choice, or temperature, `min_p`, `top_k`, `top_p` and one draw.

mod adjust;
mod draw;
mod top;

use penstock_exec::{SampledToken, SamplingParams, TopLogprob};
use penstock_kernels_cpu::{Tier, logits};

pub use adjust::SeenTokens;
pub use draw::uniform;

/// Most log-probabilities a position may report.
pub const TOP_LOGPROBS_MAX: usize = 20;

/// Temperatures below this are greedy: dividing by them would overflow.
pub const TEMPERATURE_MIN: f32 = 1e-5;

/// What a choice depends on, besides the logits.
#[derive(Clone, Copy, Debug)]
pub struct Request<'a> {
    /// The sequence's parameters.
    pub params: &'a SamplingParams,
    /// Tokens generated before this one.
    pub token_index: u64,
    /// Counts for the penalties; needed when [`SeenTokens::needed`] says so.
    pub seen: Option<&'a SeenTokens>,
    /// Allowed tokens, one bit an id; ids past its end are forbidden.
    pub mask: Option<&'a [u64]>,
}

/// Chooses tokens. Holds buffers only, no state.
#[derive(Debug)]
pub struct Sampler {
    tier: Tier,
    /// One value a token of the vocabulary.
    weights: Vec<f32>,
    /// Raw logits of the tokens that were changed, in order of change.
    changed: Vec<(u32, f32)>,
    candidates: draw::Candidates,
}

impl Sampler {
    /// A sampler whose scans run on `tier`.
    pub fn new(tier: Tier) -> Self {
        Self { tier, weights: Vec::new(), changed: Vec::new(), candidates: draw::Candidates::default() }
    }

    /// As [`Sampler::new`], with the memory for logits of `vocabulary` tokens, of which each may be changed and each may be a candidate.
    pub fn with_room(tier: Tier, vocabulary: usize) -> Self {
        Self {
            tier,
            weights: Vec::with_capacity(vocabulary),
            changed: Vec::with_capacity(vocabulary),
            candidates: draw::Candidates::with_room(vocabulary),
        }
    }

    /// Bytes of that memory. Most of it is never touched: few tokens of a vocabulary are likely enough to be candidates.
    pub const fn room_bytes(vocabulary: usize) -> usize {
        vocabulary * (size_of::<f32>() + size_of::<(u32, f32)>()) + draw::Candidates::room_bytes(vocabulary)
    }

    /// Chooses one token; `logits` is used up. `None` when the logits are not finite or no token is allowed.
    ///
    /// # Panics
    /// When the tier is not supported on this machine.
    pub fn sample(&mut self, logits: &mut [f32], request: Request<'_>) -> Option<SampledToken> {
        if !logits::all_finite(self.tier, logits) {
            return None;
        }
        let params = request.params;
        self.weights.resize(logits.len(), 0.0);
        let mut sum = 0.0;
        let mut top = Vec::new();
        if let Some(count) = params.logprobs {
            sum = logits::log_sum_exp(self.tier, logits, &mut self.weights);
            top = top::largest(logits, usize::from(count).min(TOP_LOGPROBS_MAX))
                .into_iter()
                .map(|(id, logit)| TopLogprob { id, logprob: (f64::from(logit) - sum) as f32 })
                .collect();
        }
        self.changed.clear();
        adjust::adjust(logits, request, &mut self.changed);
        let id = self.choose(logits, params, request.token_index)?;
        let raw = self.changed.iter().find(|(of, _)| *of == id).map_or(logits[id as usize], |(_, raw)| *raw);
        let logprob = if params.logprobs.is_some() { (f64::from(raw) - sum) as f32 } else { 0.0 };
        Some(SampledToken { id, logprob, top })
    }

    fn choose(&mut self, logits: &[f32], params: &SamplingParams, token_index: u64) -> Option<u32> {
        let max = logits::max(self.tier, logits);
        if !max.is_finite() {
            return None;
        }
        // Written so that a NaN is greedy too.
        let draws = params.temperature >= TEMPERATURE_MIN;
        if !draws {
            return logits::argmax(self.tier, logits).map(|id| id as u32);
        }
        let truncation = draw::Truncation::of(params, logits.len());
        let u = draw::uniform(params.seed, token_index);
        let scale = 1.0 / params.temperature;
        match truncation {
            None => draw::from_all(self.tier, logits, max, scale, u, &mut self.weights),
            Some(truncation) => {
                self.candidates.select(self.tier, logits, max, scale, truncation, &mut self.weights);
                self.candidates.draw(u)
            }
        }
    }
}
