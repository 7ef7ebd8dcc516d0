//! What changes logits before a choice: mask, `min_tokens`, bias, penalties.

use penstock_exec::SamplingParams;
use penstock_kernels_cpu::Tier;
use penstock_kernels_cpu::logits::{BLOCK, Penalties, forbid, penalise, rescan, scan};

use super::Request;

/// How often each token occurs: in the output, or 0 times for one that only the prompt has.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SeenTokens {
    /// Token and count, by ascending token.
    counts: Vec<(u32, u32)>,
}

impl SeenTokens {
    /// Whether these parameters look at what was seen.
    pub fn needed(params: &SamplingParams) -> bool {
        params.repetition_penalty != 1.0 || params.presence_penalty != 0.0 || params.frequency_penalty != 0.0
    }

    /// Counts of a whole history.
    pub fn from_history(prompt: &[u32], generated: &[u32]) -> Self {
        let mut all: Vec<(u32, u32)> = prompt.iter().map(|&token| (token, 0)).collect();
        all.extend(generated.iter().map(|&token| (token, 1)));
        all.sort_unstable();
        let mut seen = Self::default();
        for (token, times) in all {
            match seen.counts.last_mut() {
                Some((last, count)) if *last == token => *count = count.saturating_add(times),
                _ => seen.counts.push((token, times)),
            }
        }
        seen
    }

    /// Counts one more token of the output.
    pub fn generated(&mut self, token: u32) {
        match self.counts.binary_search_by_key(&token, |&(token, _)| token) {
            Ok(at) => self.counts[at].1 = self.counts[at].1.saturating_add(1),
            Err(at) => self.counts.insert(at, (token, 1)),
        }
    }
}

/// Changes one row. Holds buffers only.
#[derive(Debug, Default)]
pub(super) struct Adjuster {
    /// Raw logits of the tokens that were changed and may still be chosen, in order of change.
    changed: Vec<(u32, f32)>,
    /// Logits of the tokens that were seen, and their counts.
    picked: Vec<f32>,
    counts: Vec<f32>,
    /// Blocks with a changed logit.
    touched: Vec<bool>,
}

impl Adjuster {
    /// With the memory for a row in which each token is changed.
    pub(super) fn with_room(vocabulary: usize) -> Self {
        Self {
            changed: Vec::with_capacity(vocabulary),
            picked: Vec::with_capacity(vocabulary),
            counts: Vec::with_capacity(vocabulary),
            touched: Vec::with_capacity(vocabulary.div_ceil(BLOCK)),
        }
    }

    /// Bytes of that memory.
    pub(super) const fn room_bytes(vocabulary: usize) -> usize {
        vocabulary * (size_of::<(u32, f32)>() + 2 * size_of::<f32>()) + vocabulary.div_ceil(BLOCK) * size_of::<bool>()
    }

    /// Applies everything in order, and keeps `maxima` the greatest logit of each block.
    pub(super) fn adjust(&mut self, tier: Tier, logits: &mut [f32], maxima: &mut Vec<f32>, request: Request<'_>) {
        let params = request.params;
        self.changed.clear();
        if let Some(mask) = request.mask {
            forbid(tier, logits, mask);
            scan(tier, logits, maxima);
        }
        self.touched.clear();
        self.touched.resize(maxima.len(), false);
        if request.token_index < u64::from(params.min_tokens) {
            for &id in &params.stop_tokens {
                if let Some(logit) = logits.get_mut(id as usize) {
                    *logit = f32::NEG_INFINITY;
                    self.touched[id as usize / BLOCK] = true;
                }
            }
        }
        for &(id, bias) in &params.logit_bias {
            if let Some(logit) = logits.get_mut(id as usize) {
                self.changed.push((id, *logit));
                *logit += bias;
                self.touched[id as usize / BLOCK] = true;
            }
        }
        self.penalise(tier, logits, request);
        for (block, _) in self.touched.iter().enumerate().filter(|&(_, &is_touched)| is_touched) {
            rescan(tier, logits, maxima, (block * BLOCK) as u32);
        }
    }

    fn penalise(&mut self, tier: Tier, logits: &mut [f32], request: Request<'_>) {
        let (Some(seen), params) = (request.seen, request.params) else { return };
        // Tokens ascend, so those that the row lacks are the last.
        let known = seen.counts.partition_point(|&(token, _)| (token as usize) < logits.len());
        let seen = &seen.counts[..known];
        self.picked.clear();
        self.picked.extend(seen.iter().map(|&(token, _)| logits[token as usize]));
        self.counts.clear();
        self.counts.extend(seen.iter().map(|&(_, count)| count as f32));
        if params.logprobs.is_some() {
            self.changed.extend(seen.iter().zip(&self.picked).map(|(&(token, _), &logit)| (token, logit)));
        }
        let penalties = Penalties {
            repetition: params.repetition_penalty,
            frequency: params.frequency_penalty,
            presence: params.presence_penalty,
        };
        penalise(tier, &mut self.picked, &self.counts, penalties);
        for (&(token, _), &logit) in seen.iter().zip(&self.picked) {
            logits[token as usize] = logit;
            self.touched[token as usize / BLOCK] = true;
        }
    }

    /// The logit that a token had before, if its log-probability is wanted and its logit was changed.
    pub(super) fn raw(&self, id: u32) -> Option<f32> {
        self.changed.iter().find(|(of, _)| *of == id).map(|(_, raw)| *raw)
    }
}
