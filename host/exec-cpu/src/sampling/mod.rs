//! Which token comes next? A pure function of logits, parameters, history counts and token index.
//!
//! The order of steps is that of vLLM: log-probabilities are read from the raw logits; then the mask, `min_tokens`, `logit_bias` and the
//! penalties (repetition, frequency, presence) change logits; then greedy choice, or temperature, `min_p`, `top_k`, `top_p` and one draw.

mod adjust;
mod draw;
mod select;

use penstock_exec::{SampledToken, SamplingParams, TopLogprob};
use penstock_kernels_cpu::Tier;
use penstock_kernels_cpu::logits::{BLOCK, Row, Softmax, scan};

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
    /// The greatest logit of each block of the row.
    maxima: Vec<f32>,
    /// What the kept tokens of each block weigh.
    sums: Vec<f32>,
    adjuster: adjust::Adjuster,
    selector: select::Selector,
}

impl Sampler {
    /// A sampler whose scans run on `tier`.
    pub fn new(tier: Tier) -> Self {
        let (adjuster, selector) = (adjust::Adjuster::default(), select::Selector::default());
        Self { tier, maxima: Vec::new(), sums: Vec::new(), adjuster, selector }
    }

    /// As [`Sampler::new`], with the memory for logits of `vocabulary` tokens, of which each may be changed and each may be a candidate.
    pub fn with_room(tier: Tier, vocabulary: usize) -> Self {
        let blocks = vocabulary.div_ceil(BLOCK);
        Self {
            tier,
            maxima: Vec::with_capacity(blocks),
            sums: Vec::with_capacity(blocks),
            adjuster: adjust::Adjuster::with_room(vocabulary),
            selector: select::Selector::with_room(vocabulary),
        }
    }

    /// Bytes of that memory. Most of it is never touched: few tokens of a vocabulary are looked at one by one.
    pub const fn room_bytes(vocabulary: usize) -> usize {
        let blocks = vocabulary.div_ceil(BLOCK) * 2 * size_of::<f32>();
        blocks + adjust::Adjuster::room_bytes(vocabulary) + select::Selector::room_bytes(vocabulary)
    }

    /// Chooses one token; `logits` is used up. `None` when the logits are not finite or no token is allowed.
    ///
    /// # Panics
    /// When the tier is not supported on this machine.
    pub fn sample(&mut self, logits: &mut [f32], request: Request<'_>) -> Option<SampledToken> {
        if !scan(self.tier, logits, &mut self.maxima) {
            return None;
        }
        let params = request.params;
        let mut sum = 0.0;
        let mut top = Vec::new();
        if let Some(count) = params.logprobs {
            let row = Row::new(self.tier, logits, &self.maxima);
            sum = row.log_sum_exp();
            top = (self.selector.largest(self.tier, row, usize::from(count).min(TOP_LOGPROBS_MAX)).into_iter())
                .map(|token| TopLogprob { id: token.id, logprob: (f64::from(token.logit) - sum) as f32 })
                .collect();
        }
        self.adjuster.adjust(self.tier, logits, &mut self.maxima, request);
        let id = self.choose(logits, params, request.token_index)?;
        let raw = || self.adjuster.raw(id).unwrap_or(logits[id as usize]);
        let logprob = if params.logprobs.is_some() { (f64::from(raw()) - sum) as f32 } else { 0.0 };
        Some(SampledToken { id, logprob, top })
    }

    fn choose(&mut self, logits: &[f32], params: &SamplingParams, token_index: u64) -> Option<u32> {
        let row = Row::new(self.tier, logits, &self.maxima);
        let max = row.max();
        if !max.is_finite() {
            return None;
        }
        // Written so that a NaN is greedy too.
        let draws = params.temperature >= TEMPERATURE_MIN;
        if !draws {
            return row.first_max().map(|id| id as u32);
        }
        let softmax = Softmax { max, scale: 1.0 / params.temperature };
        let kept = draw::kept(self.tier, row, softmax, params, &mut self.selector);
        draw::draw(row, softmax, kept, draw::uniform(params.seed, token_index), &mut self.sums)
    }
}
