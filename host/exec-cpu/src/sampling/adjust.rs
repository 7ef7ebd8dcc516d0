//! What changes logits before a choice: mask, `min_tokens`, bias, penalties.

use std::collections::BTreeMap;

use penstock_exec::SamplingParams;

use super::Request;

/// How often each token occurs: in the output, or 0 times for one that only the prompt has.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SeenTokens {
    counts: BTreeMap<u32, u32>,
}

impl SeenTokens {
    /// Whether these parameters look at what was seen.
    pub fn needed(params: &SamplingParams) -> bool {
        params.repetition_penalty != 1.0 || params.presence_penalty != 0.0 || params.frequency_penalty != 0.0
    }

    /// Counts of a whole history.
    pub fn from_history(prompt: &[u32], generated: &[u32]) -> Self {
        let mut seen = Self { counts: prompt.iter().map(|&token| (token, 0)).collect() };
        for &token in generated {
            seen.generated(token);
        }
        seen
    }

    /// Counts one more token of the output.
    pub fn generated(&mut self, token: u32) {
        let count = self.counts.entry(token).or_insert(0);
        *count = count.saturating_add(1);
    }
}

/// Applies everything in order. `changed` gets the old logit of each token whose logit is changed and may still be chosen.
pub(super) fn adjust(logits: &mut [f32], request: Request<'_>, changed: &mut Vec<(u32, f32)>) {
    let params = request.params;
    if let Some(mask) = request.mask {
        for (id, logit) in logits.iter_mut().enumerate() {
            let allowed = mask.get(id / 64).is_some_and(|word| word >> (id % 64) & 1 == 1);
            if !allowed {
                *logit = f32::NEG_INFINITY;
            }
        }
    }
    if request.token_index < u64::from(params.min_tokens) {
        for &id in &params.stop_tokens {
            if let Some(logit) = logits.get_mut(id as usize) {
                *logit = f32::NEG_INFINITY;
            }
        }
    }
    let mut change = |id: u32, new: &dyn Fn(f32) -> f32| {
        if let Some(logit) = logits.get_mut(id as usize) {
            changed.push((id, *logit));
            *logit = new(*logit);
        }
    };
    for &(id, bias) in &params.logit_bias {
        change(id, &|logit| logit + bias);
    }
    let Some(seen) = request.seen else { return };
    for (&id, &count) in &seen.counts {
        change(id, &|logit| {
            let repetition = params.repetition_penalty;
            let logit = if logit > 0.0 { logit / repetition } else { logit * repetition };
            let presence = if count > 0 { params.presence_penalty } else { 0.0 };
            logit - count as f32 * params.frequency_penalty - presence
        });
    }
}
