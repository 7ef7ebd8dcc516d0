//! What the driver keeps of a request beside its manifest: tokens, sampling, stop strings, the chain of block keys.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use penstock_base::{Manifest, RequestId, limits};
use penstock_exec::SamplingParams;
use penstock_model::{BlockKeyChain, Namespace, StopMatcher, root_key};

use crate::limits::LOGPROBS_MAX;
use crate::request::Submission;

/// Blocks whose last key is the manifest's `prefix_key`.
const PREFIX_BLOCKS: usize = 4;

/// One request as the driver knows it. Made once, shared by the loops, never changed.
#[derive(Debug)]
pub(crate) struct RequestContext {
    /// What the machines know.
    pub manifest: Arc<Manifest>,
    /// The prompt's tokens.
    pub prompt: Arc<[u32]>,
    /// How each answer samples: equal but for the seed.
    pub sampling: Box<[Arc<SamplingParams>]>,
    /// A fresh matcher for each answer is a clone of this.
    pub stops: StopMatcher,
    /// The key chain behind the prompt; each answer goes on from a clone. None when nothing is cached.
    pub chain: Option<BlockKeyChain>,
    /// Output tokens so far, of a request that may go on at another replica.
    emitted: Mutex<Vec<u32>>,
    /// Output tokens that the client got in all; set by the output loop when it ends the stream, for a replica that ends later.
    settled: Arc<AtomicU32>,
}

/// A request as the driver of a replica gets it.
#[derive(Clone, Debug)]
pub(crate) struct Placement {
    pub context: Arc<RequestContext>,
    /// Output of earlier attempts, computed again like a prompt: for the machine it is one.
    pub resumed: Box<[u32]>,
}

/// What is wrong with a submission. The edge should have refused it with these words.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum SubmissionFault {
    /// No tokens.
    #[error("the prompt is empty")]
    EmptyPrompt,
    /// More tokens than a u32 can count.
    #[error("the prompt is too long")]
    PromptTooLong,
    /// A token that the model does not have.
    #[error("token id {0} is outside the vocabulary")]
    UnknownToken(u32),
    /// n of 0 or above the limit.
    #[error("{0} answers: at least 1 and at most {max} are possible", max = limits::SEQUENCES_MAX)]
    Sequences(u16),
    /// An output cap of 0.
    #[error("the output cap is 0")]
    NoOutput,
    /// More candidates than the limit.
    #[error("{0} log-probabilities: at most {LOGPROBS_MAX} are possible")]
    Logprobs(u8),
    /// A sampling parameter outside its range.
    #[error("{0} is out of range")]
    Sampling(&'static str),
    /// Too many stop strings, or an empty or too long one.
    #[error("{0}")]
    StopStrings(String),
}

/// Facts of this engine that a request's context depends on.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ContextRules<'a> {
    pub namespace: &'a Namespace,
    pub block_size_tokens: u32,
    pub vocabulary: u32,
    pub prefix_cache: bool,
}

impl RequestContext {
    /// Checks a submission and freezes it, all but its id.
    pub fn new(submission: &Submission, rules: ContextRules<'_>) -> Result<Self, SubmissionFault> {
        let stops = check(submission, rules.vocabulary)?;
        let input_tokens = u32::try_from(submission.prompt.len()).map_err(|_| SubmissionFault::PromptTooLong)?;
        let mut chain = rules.prefix_cache.then(|| {
            let root = root_key(rules.namespace, &submission.trust.0.to_le_bytes());
            BlockKeyChain::new(root, rules.block_size_tokens as usize)
        });
        let keys = chain.as_mut().map(|chain| chain.extend(&submission.prompt, &[])).unwrap_or_default();
        let manifest = Manifest {
            request: RequestId(0),
            tenant: submission.tenant,
            flow: submission.flow,
            session: submission.session,
            trust: submission.trust,
            class: submission.class,
            priority: submission.priority,
            sequences: submission.sequences,
            input_tokens,
            max_output_tokens: submission.max_output_tokens,
            arrived: submission.arrived,
            deadline: submission.deadline,
            slo_ttft: submission.slo_ttft,
            slo_tpot: submission.slo_tpot,
            traits: submission.traits,
            prefix_key: keys.get(PREFIX_BLOCKS - 1).map_or(0, |key| key.short()),
            keys: keys.into(),
            retention: submission.retention.min(100),
            retry: submission.retry,
            terms: submission.terms,
        };
        let sampling = (0..submission.sequences).map(|index| seeded(&submission.sampling, index)).collect();
        Ok(Self {
            manifest: Arc::new(manifest),
            prompt: Arc::clone(&submission.prompt),
            sampling,
            stops,
            chain,
            emitted: Mutex::default(),
            settled: Arc::default(),
        })
    }

    /// One that a gateway has placed here: its text is made there.
    pub fn placed(manifest: Arc<Manifest>, prompt: Arc<[u32]>, sampling: Box<[Arc<SamplingParams>]>) -> Self {
        Self {
            manifest,
            prompt,
            sampling,
            stops: StopMatcher::default(),
            chain: None,
            emitted: Mutex::default(),
            settled: Arc::default(),
        }
    }

    /// Gives it its id, before anybody else sees it.
    pub fn name(&mut self, request: RequestId) {
        Arc::make_mut(&mut self.manifest).request = request;
    }

    /// Keeps output tokens: they follow those that are kept.
    pub fn keep_output(&self, tokens: &[u32]) {
        self.emitted.lock().unwrap_or_else(PoisonError::into_inner).extend_from_slice(tokens);
    }

    /// The output tokens that are kept.
    pub fn kept_output(&self) -> Vec<u32> {
        self.emitted.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Says how many output tokens the client got in all.
    pub fn settle_tokens(&self, tokens: u32) {
        self.settled.store(tokens, Ordering::Release);
    }

    /// How many output tokens the client got in all, once its stream has ended: outlives the rest of the context.
    pub fn settled(&self) -> Arc<AtomicU32> {
        Arc::clone(&self.settled)
    }

    /// Its id.
    pub fn request(&self) -> RequestId {
        self.manifest.request
    }
}

/// Bytes that a submission keeps alive while it is in flight.
pub(crate) fn pending_bytes(submission: &Submission) -> usize {
    let stops: usize = submission.stop_strings.iter().map(String::len).sum();
    let bias = submission.sampling.logit_bias.len() * size_of::<(u32, f32)>();
    submission.prompt.len() * size_of::<u32>() + usize::from(submission.sequences) * bias + stops
}

fn check(submission: &Submission, vocabulary: u32) -> Result<StopMatcher, SubmissionFault> {
    if submission.prompt.is_empty() {
        return Err(SubmissionFault::EmptyPrompt);
    }
    if !(1..=limits::SEQUENCES_MAX).contains(&submission.sequences) {
        return Err(SubmissionFault::Sequences(submission.sequences));
    }
    if submission.max_output_tokens == 0 {
        return Err(SubmissionFault::NoOutput);
    }
    let sampling = &submission.sampling;
    if let Some(logprobs) = sampling.logprobs.filter(|&logprobs| logprobs > LOGPROBS_MAX) {
        return Err(SubmissionFault::Logprobs(logprobs));
    }
    let ranges = [
        ("temperature", sampling.temperature >= 0.0),
        ("top_p", sampling.top_p > 0.0 && sampling.top_p <= 1.0),
        ("min_p", (0.0..=1.0).contains(&sampling.min_p)),
        ("repetition_penalty", sampling.repetition_penalty > 0.0),
        ("presence_penalty", true),
        ("frequency_penalty", true),
    ];
    let values = [
        sampling.temperature,
        sampling.top_p,
        sampling.min_p,
        sampling.repetition_penalty,
        sampling.presence_penalty,
        sampling.frequency_penalty,
    ];
    for ((name, in_range), value) in ranges.into_iter().zip(values) {
        if !in_range || !value.is_finite() {
            return Err(SubmissionFault::Sampling(name));
        }
    }
    if sampling.logit_bias.iter().any(|(_, bias)| bias.is_nan()) {
        return Err(SubmissionFault::Sampling("logit_bias"));
    }
    let biased = sampling.logit_bias.iter().map(|(id, _)| id);
    if let Some(&id) = submission.prompt.iter().chain(biased).find(|&&id| id >= vocabulary) {
        return Err(SubmissionFault::UnknownToken(id));
    }
    StopMatcher::new(submission.stop_strings.to_vec()).map_err(|error| SubmissionFault::StopStrings(error.to_string()))
}

/// The parameters of one answer. The first answer keeps the seed, so that it equals the only answer of the same request with n = 1.
fn seeded(params: &Arc<SamplingParams>, index: u16) -> Arc<SamplingParams> {
    if index == 0 {
        return Arc::clone(params);
    }
    let mut own = SamplingParams::clone(params);
    own.seed = mixed(params.seed.wrapping_add(u64::from(index).wrapping_mul(0x9e37_79b9_7f4a_7c15)));
    Arc::new(own)
}

/// The finaliser of SplitMix64: neighbouring seeds give unrelated ones.
fn mixed(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_have_seeds_of_their_own_and_the_first_keeps_the_request_s() {
        let params = Arc::new(SamplingParams::default());
        // SplitMix64 seeded with 0 yields these as its first three values (the published reference).
        assert_eq!(seeded(&params, 0).seed, 0);
        assert_eq!(seeded(&params, 1).seed, 0xe220_a839_7b1d_cdaf);
        assert_eq!(seeded(&params, 2).seed, 0x6e78_9e6a_a1b9_65f4);
        assert_eq!(seeded(&params, 3).seed, 0x06c4_5d18_8009_454f);
    }
}
