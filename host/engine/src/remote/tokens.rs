//! Tokens and sampling parameters as bytes. The machines do not know them, so that they have no encoding below the driver.

use std::sync::Arc;

use penstock_base::codec::{DecodeError, Reader, Writer};
use penstock_base::limits::SEQUENCES_MAX;
use penstock_exec::{SampledToken, SamplingParams, TopLogprob};

use crate::limits::LOGPROBS_MAX;

pub(crate) fn put_ids(out: &mut Writer, ids: &[u32]) {
    out.count(ids.len());
    for id in ids {
        out.u32(*id);
    }
}

pub(crate) fn take_ids(from: &mut Reader<'_>) -> Result<Vec<u32>, DecodeError> {
    from.list(Reader::u32)
}

pub(crate) fn put_tokens(out: &mut Writer, tokens: &[SampledToken]) {
    out.list(tokens.iter(), |out, token| {
        out.u32(token.id);
        out.u32(token.logprob.to_bits());
        out.list(token.top.iter(), |out, top| {
            out.u32(top.id);
            out.u32(top.logprob.to_bits());
        });
    });
}

pub(crate) fn take_tokens(from: &mut Reader<'_>) -> Result<Vec<SampledToken>, DecodeError> {
    from.list(|from| {
        let (id, logprob) = (from.u32()?, take_f32(from)?);
        let top = from.list(|from| Ok(TopLogprob { id: from.u32()?, logprob: take_f32(from)? }))?;
        if top.len() > usize::from(LOGPROBS_MAX) {
            return Err(DecodeError::Invalid("log-probabilities"));
        }
        Ok(SampledToken { id, logprob, top })
    })
}

fn take_f32(from: &mut Reader<'_>) -> Result<f32, DecodeError> {
    Ok(f32::from_bits(from.u32()?))
}

/// Of all answers of one request.
pub(crate) fn put_sampling(out: &mut Writer, all: &[Arc<SamplingParams>]) {
    out.list(all.iter(), |out, params| {
        let SamplingParams {
            temperature,
            top_k,
            top_p,
            min_p,
            repetition_penalty,
            presence_penalty,
            frequency_penalty,
            logit_bias,
            seed,
            logprobs,
            min_tokens,
            stop_tokens,
        } = params.as_ref();
        for value in [temperature, top_p, min_p, repetition_penalty, presence_penalty, frequency_penalty] {
            out.u32(value.to_bits());
        }
        out.u32(*top_k);
        out.list(logit_bias.iter(), |out, (id, bias)| {
            out.u32(*id);
            out.u32(bias.to_bits());
        });
        out.u64(*seed);
        out.option(*logprobs, Writer::u8);
        out.u32(*min_tokens);
        put_ids(out, stop_tokens);
    });
}

pub(crate) fn take_sampling(from: &mut Reader<'_>) -> Result<Box<[Arc<SamplingParams>]>, DecodeError> {
    let all = from.list(|from| {
        let mut values = [0.0; 6];
        for value in &mut values {
            *value = take_f32(from)?;
        }
        let [temperature, top_p, min_p, repetition_penalty, presence_penalty, frequency_penalty] = values;
        Ok(Arc::new(SamplingParams {
            temperature,
            top_k: from.u32()?,
            top_p,
            min_p,
            repetition_penalty,
            presence_penalty,
            frequency_penalty,
            logit_bias: from.list(|from| Ok((from.u32()?, take_f32(from)?)))?,
            seed: from.u64()?,
            logprobs: from.option(Reader::u8)?,
            min_tokens: from.u32()?,
            stop_tokens: take_ids(from)?,
        }))
    })?;
    if all.is_empty() || all.len() > usize::from(SEQUENCES_MAX) {
        return Err(DecodeError::Invalid("number of answers"));
    }
    Ok(all.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_and_parameters_come_back_as_they_were() {
        let top = vec![TopLogprob { id: 7, logprob: -0.5 }, TopLogprob { id: 8, logprob: f32::NEG_INFINITY }];
        let tokens = vec![
            SampledToken { id: 7, logprob: -0.5, top },
            SampledToken { id: u32::MAX, logprob: 0.0, top: Vec::new() },
        ];
        let params = SamplingParams {
            temperature: 0.7,
            top_k: 40,
            top_p: 0.9,
            min_p: 0.05,
            repetition_penalty: 1.1,
            presence_penalty: -0.3,
            frequency_penalty: 0.2,
            logit_bias: vec![(3, -100.0), (9, 1.5)],
            seed: u64::MAX - 5,
            logprobs: Some(0),
            min_tokens: 4,
            stop_tokens: vec![2, 0],
        };
        let all = [Arc::new(params), Arc::new(SamplingParams::default())];
        let mut out = Writer::new();
        put_tokens(&mut out, &tokens);
        put_sampling(&mut out, &all);
        let bytes = out.into_bytes();
        let mut from = Reader::new(&bytes);
        assert_eq!(take_tokens(&mut from).unwrap(), tokens);
        assert_eq!(*take_sampling(&mut from).unwrap(), all);
        from.finish().unwrap();
        for end in 0..bytes.len() {
            let mut from = Reader::new(&bytes[..end]);
            assert!(take_tokens(&mut from).and_then(|_| take_sampling(&mut from)).is_err(), "cut at {end}");
        }
    }

    #[test]
    fn no_more_is_taken_than_a_request_can_have() {
        let mut out = Writer::new();
        let one = || Arc::new(SamplingParams::default());
        put_sampling(&mut out, &std::iter::repeat_with(one).take(usize::from(SEQUENCES_MAX) + 1).collect::<Vec<_>>());
        assert!(take_sampling(&mut Reader::new(out.bytes())).is_err());
        let mut out = Writer::new();
        put_sampling(&mut out, &[]);
        assert!(take_sampling(&mut Reader::new(out.bytes())).is_err());
        let top = vec![TopLogprob { id: 0, logprob: 0.0 }; usize::from(LOGPROBS_MAX) + 1];
        let mut out = Writer::new();
        put_tokens(&mut out, &[SampledToken { id: 0, logprob: 0.0, top }]);
        assert!(take_tokens(&mut Reader::new(out.bytes())).is_err());
    }
}
