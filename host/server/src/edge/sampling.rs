//! The fields that chat and completions share: how to sample, how much, and what the host may do.

use penstock_base::Traits;
use penstock_exec::SamplingParams;
use serde_json::Value;

use super::error::ApiError;
use super::fields::Fields;

const STOPS_MAX: usize = 16;
const STOP_BYTES_MAX: usize = 1_024;
const BIASES_MAX: usize = 1_024;
const STOP_TOKENS_MAX: usize = 64;

/// What generation needs beside the prompt.
#[derive(Debug)]
pub struct Generation {
    /// Answers.
    pub n: u16,
    /// Server-sent events.
    pub stream: bool,
    /// A last chunk with usage.
    pub include_usage: bool,
    /// Output cap as asked; absent means the default.
    pub max_tokens: Option<u32>,
    /// How to sample; `stop_tokens` holds only the request's own, `logprobs` is set by the caller.
    pub sampling: SamplingParams,
    /// End-of-sequence tokens do not end the answer.
    pub ignore_eos: bool,
    /// Strings that end an answer.
    pub stop_strings: Vec<String>,
    /// Order inside the class, as sent.
    pub priority: i32,
    /// From the `penstock` extension and others.
    pub traits: Traits,
    /// Retention hint, 0..=100.
    pub retention: u8,
}

impl Generation {
    /// Takes the shared fields out of the body.
    ///
    /// # Errors
    /// 400 for a bad value, 422 for what is known and not built.
    pub fn take(body: &mut Fields, vocabulary: u32) -> Result<Self, ApiError> {
        refuse_not_built(body)?;
        let stream = body.flag("stream")?.unwrap_or(false);
        let include_usage = match body.object("stream_options")? {
            Some(_) if !stream => {
                return Err(ApiError::bad_field("stream_options", "`stream_options` only goes with `stream: true`"));
            }
            Some(mut options) => options.flag("include_usage")?.unwrap_or(false),
            None => false,
        };
        let newer = body.integer("max_completion_tokens", 0..=i64::from(i32::MAX))?;
        let max_tokens = body.integer("max_tokens", 0..=i64::from(i32::MAX))?.or(newer).map(|tokens| tokens as u32);
        let stop_strings = body.texts("stop", STOPS_MAX)?;
        if stop_strings.iter().any(|stop| stop.len() > STOP_BYTES_MAX) {
            return Err(ApiError::bad_field("stop", format!("a stop string has at most {STOP_BYTES_MAX} bytes")));
        }
        let mut traits = if stream { Traits::STREAMING } else { Traits::default() };
        let retention = extension(body, &mut traits)?;
        Ok(Self {
            n: body.integer("n", 1..=i64::from(penstock_base::limits::SEQUENCES_MAX))?.unwrap_or(1) as u16,
            stream,
            include_usage,
            max_tokens,
            sampling: sampling(body, vocabulary)?,
            ignore_eos: body.flag("ignore_eos")?.unwrap_or(false),
            stop_strings,
            priority: body.integer("priority", i64::from(i32::MIN)..=i64::from(i32::MAX))?.unwrap_or(0) as i32,
            traits,
            retention,
        })
    }
}

fn sampling(body: &mut Fields, vocabulary: u32) -> Result<SamplingParams, ApiError> {
    let real = |value: Option<f64>, default: f64| value.unwrap_or(default) as f32;
    let top_k = body.integer("top_k", -1..=i64::from(i32::MAX))?.unwrap_or(0).max(0) as u32;
    let seed = body.integer("seed", i64::MIN..=i64::MAX)?.map(|seed| seed as u64);
    Ok(SamplingParams {
        temperature: real(body.number("temperature", 0.0..=2.0)?, 1.0),
        top_k,
        top_p: top_p(body)?,
        min_p: real(body.number("min_p", 0.0..=1.0)?, 0.0),
        repetition_penalty: real(body.number("repetition_penalty", 0.01..=100.0)?, 1.0),
        presence_penalty: real(body.number("presence_penalty", -2.0..=2.0)?, 0.0),
        frequency_penalty: real(body.number("frequency_penalty", -2.0..=2.0)?, 0.0),
        logit_bias: logit_bias(body, vocabulary)?,
        seed: seed.unwrap_or_else(crate::tenants::entropy),
        logprobs: None,
        min_tokens: body.integer("min_tokens", 0..=i64::from(i32::MAX))?.unwrap_or(0) as u32,
        stop_tokens: stop_tokens(body, vocabulary)?,
    })
}

/// 0 is excluded: it would leave no token.
fn top_p(body: &mut Fields) -> Result<f32, ApiError> {
    let top_p = body.number("top_p", 0.0..=1.0)?.unwrap_or(1.0) as f32;
    if top_p == 0.0 { Err(ApiError::bad_field("top_p", "`top_p` must be above 0 and at most 1")) } else { Ok(top_p) }
}

fn logit_bias(body: &mut Fields, vocabulary: u32) -> Result<Vec<(u32, f32)>, ApiError> {
    let bad = |what: String| ApiError::bad_field("logit_bias", what);
    let Some(object) = body.object("logit_bias")? else { return Ok(Vec::new()) };
    let entries = object.rest();
    if entries.len() > BIASES_MAX {
        return Err(bad(format!("`logit_bias` has at most {BIASES_MAX} entries")));
    }
    let mut biases = Vec::with_capacity(entries.len());
    for (token, bias) in entries {
        let id = token.parse::<u32>().ok().filter(|id| *id < vocabulary);
        let id = id.ok_or_else(|| bad(format!("keys of `logit_bias` are token ids below {vocabulary}")))?;
        let bias = bias.as_f64().filter(|bias| (-100.0..=100.0).contains(bias));
        biases.push((id, bias.ok_or_else(|| bad("values of `logit_bias` are from -100 to 100".to_owned()))? as f32));
    }
    biases.sort_by_key(|(id, _)| *id);
    Ok(biases)
}

fn stop_tokens(body: &mut Fields, vocabulary: u32) -> Result<Vec<u32>, ApiError> {
    let what = || {
        let message =
            format!("`stop_token_ids` must be a list of up to {STOP_TOKENS_MAX} token ids below {vocabulary}");
        ApiError::bad_field("stop_token_ids", message)
    };
    let list = match body.take("stop_token_ids") {
        None => return Ok(Vec::new()),
        Some(Value::Array(list)) if list.len() <= STOP_TOKENS_MAX => list,
        Some(_) => return Err(what()),
    };
    let ids = list.iter().map(|value| {
        value.as_u64().and_then(|id| u32::try_from(id).ok()).filter(|id| *id < vocabulary).ok_or_else(what)
    });
    ids.collect()
}

/// `penstock: {may_degrade, may_defer, no_store, retention}`, and `cache_salt`, which has no effect: the salt is the server's.
fn extension(body: &mut Fields, traits: &mut Traits) -> Result<u8, ApiError> {
    body.text("cache_salt")?;
    let Some(mut extension) = body.object("penstock")? else { return Ok(50) };
    let flags =
        [("may_degrade", Traits::MAY_DEGRADE), ("may_defer", Traits::MAY_DEFER), ("no_store", Traits::NO_STORE)];
    for (field, bit) in flags {
        if extension.flag(field)?.unwrap_or(false) {
            *traits = traits.with(bit);
        }
    }
    Ok(extension.integer("retention", 0..=100)?.unwrap_or(50) as u8)
}

fn refuse_not_built(body: &mut Fields) -> Result<(), ApiError> {
    let is_empty = |value: &Value| value.as_array().is_some_and(Vec::is_empty);
    body.not_built("tools", is_empty)?;
    body.not_built("functions", is_empty)?;
    body.not_built("tool_choice", |value| value == "none" || value == "auto")?;
    body.not_built("function_call", |value| value == "none" || value == "auto")?;
    body.not_built("response_format", |value| value["type"] == "text")?;
    body.not_built("best_of", |value| value == 1)?;
    body.not_built("use_beam_search", |value| value == false)?;
    body.not_built("suffix", |value| value == "")?;
    body.not_built("audio", |_| false)?;
    body.not_built("prediction", |_| false)?;
    body.not_built("modalities", |value| *value == serde_json::json!(["text"]))?;
    body.not_built("prompt_logprobs", |_| false)?;
    body.not_built("guided_json", |_| false)?;
    body.not_built("store", |value| value == false)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn take(text: &str) -> Result<Generation, ApiError> {
        Generation::take(&mut Fields::parse(text.as_bytes()).unwrap(), 100)
    }

    #[test]
    fn defaults_are_those_of_the_api() {
        let generation = take("{}").unwrap();
        assert_eq!((generation.n, generation.stream, generation.max_tokens), (1, false, None));
        assert_eq!((generation.sampling.temperature, generation.sampling.top_p, generation.retention), (1.0, 1.0, 50));
    }

    #[test]
    fn bad_values_are_400s_that_name_the_field() {
        for (text, field) in [
            (r#"{"n": 0}"#, "n"),
            (r#"{"n": 9}"#, "n"),
            (r#"{"temperature": -1}"#, "temperature"),
            (r#"{"top_p": 0}"#, "top_p"),
            (r#"{"logit_bias": {"100": 1}}"#, "logit_bias"),
            (r#"{"logit_bias": {"5": 101}}"#, "logit_bias"),
            (r#"{"stop": ["a", ""]}"#, "stop"),
            (r#"{"stop_token_ids": [-1]}"#, "stop_token_ids"),
            (r#"{"stream_options": {}}"#, "stream_options"),
            (r#"{"max_tokens": -1}"#, "max_tokens"),
            (r#"{"penstock": {"retention": 101}}"#, "penstock.retention"),
        ] {
            let error = take(text).unwrap_err();
            assert_eq!((error.status.as_u16(), error.param.as_deref()), (400, Some(field)), "{text}");
        }
    }

    #[test]
    fn known_and_not_built_is_a_422_never_ignored() {
        for text in [
            r#"{"tools": [{}]}"#,
            r#"{"tool_choice": "required"}"#,
            r#"{"response_format": {"type": "json_object"}}"#,
            r#"{"best_of": 3}"#,
            r#"{"use_beam_search": true}"#,
            r#"{"suffix": "x"}"#,
            r#"{"audio": {}}"#,
            r#"{"prediction": {}}"#,
        ] {
            assert_eq!(take(text).unwrap_err().status.as_u16(), 422, "{text}");
        }
        assert!(take(r#"{"tools": [], "response_format": {"type": "text"}, "store": false, "user": "u"}"#).is_ok());
    }
}
