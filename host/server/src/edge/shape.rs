//! The JSON of answers: chat and completions, whole and in chunks.

use penstock_base::Outcome;
use penstock_engine::DeliveredToken;
use penstock_sched::message::Usage;
use serde_json::{Map, Value, json};

/// Which of the two APIs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Api {
    /// `/v1/chat/completions`.
    Chat,
    /// `/v1/completions`.
    Completion,
}

/// What all chunks of one answer share.
#[derive(Clone, Debug)]
pub struct Envelope {
    /// Which API.
    pub api: Api,
    /// `chatcmpl-..` or `cmpl-..`.
    pub id: String,
    /// Unix seconds.
    pub created: u64,
    /// Model name.
    pub model: String,
    /// What exactly was loaded.
    pub fingerprint: String,
    /// Log-probabilities were asked for.
    pub logprobs: bool,
}

/// One answer as far as it is known.
#[derive(Clone, Debug, Default)]
pub struct Choice {
    /// Its text.
    pub text: String,
    /// Its tokens, when log-probabilities were asked for.
    pub tokens: Vec<DeliveredToken>,
    /// How it ended.
    pub outcome: Option<Outcome>,
}

/// `stop` or `length`; None for an answer that did not end well.
pub fn finish_reason(outcome: Outcome) -> Option<&'static str> {
    match outcome {
        Outcome::Stop => Some("stop"),
        Outcome::Length => Some("length"),
        _ => None,
    }
}

impl Envelope {
    fn wrap(&self, object: &str, choices: Value) -> Map<String, Value> {
        let Value::Object(map) = json!({
            "id": self.id,
            "object": object,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
            "choices": choices,
        }) else {
            return Map::new();
        };
        map
    }

    fn chunk(&self, choices: Value) -> Value {
        let object = match self.api {
            Api::Chat => "chat.completion.chunk",
            Api::Completion => "text_completion",
        };
        Value::Object(self.wrap(object, choices))
    }

    /// The first chunk of a chat answer: its role.
    pub fn opening(&self, index: usize) -> Option<Value> {
        (self.api == Api::Chat).then(|| {
            let delta = json!({"role": "assistant", "content": ""});
            self.chunk(json!([{"index": index, "delta": delta, "logprobs": null, "finish_reason": null}]))
        })
    }

    /// More text. `offset` is the number of characters before it, for completions' `text_offset`.
    pub fn text(&self, index: usize, text: &str, tokens: &[DeliveredToken], offset: usize) -> Value {
        let logprobs = self.logprobs(tokens, offset);
        let choice = match self.api {
            Api::Chat => {
                json!({"index": index, "delta": {"content": text}, "logprobs": logprobs, "finish_reason": null})
            }
            Api::Completion => json!({"index": index, "text": text, "logprobs": logprobs, "finish_reason": null}),
        };
        self.chunk(json!([choice]))
    }

    /// The end of one answer.
    pub fn finish(&self, index: usize, reason: &str) -> Value {
        let choice = match self.api {
            Api::Chat => json!({"index": index, "delta": {}, "logprobs": null, "finish_reason": reason}),
            Api::Completion => json!({"index": index, "text": "", "logprobs": null, "finish_reason": reason}),
        };
        self.chunk(json!([choice]))
    }

    /// The chunk that carries usage and no choice.
    pub fn usage(&self, usage: &Usage) -> Value {
        let mut chunk = self.chunk(json!([]));
        chunk["usage"] = usage_of(usage);
        chunk
    }

    /// The whole answer.
    pub fn whole(&self, choices: &[Choice], echoes: &[usize], usage: &Usage) -> Value {
        let choices: Vec<Value> = choices
            .iter()
            .enumerate()
            .map(|(index, choice)| {
                let reason = choice.outcome.and_then(finish_reason);
                let logprobs = self.logprobs(&choice.tokens, echoes.get(index).copied().unwrap_or(0));
                match self.api {
                    Api::Chat => {
                        let message = json!({"role": "assistant", "content": choice.text, "refusal": null});
                        json!({"index": index, "message": message, "logprobs": logprobs, "finish_reason": reason})
                    }
                    Api::Completion => {
                        json!({"index": index, "text": choice.text, "logprobs": logprobs, "finish_reason": reason})
                    }
                }
            })
            .collect();
        let object = match self.api {
            Api::Chat => "chat.completion",
            Api::Completion => "text_completion",
        };
        let mut whole = self.wrap(object, Value::Array(choices));
        whole.insert("usage".to_owned(), usage_of(usage));
        Value::Object(whole)
    }

    fn logprobs(&self, tokens: &[DeliveredToken], offset: usize) -> Value {
        match self.api {
            _ if !self.logprobs => Value::Null,
            Api::Chat => json!({"content": tokens.iter().map(chat_logprob).collect::<Vec<_>>(), "refusal": null}),
            Api::Completion => completion_logprobs(tokens, offset),
        }
    }
}

fn spelled(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

fn chat_logprob(token: &DeliveredToken) -> Value {
    let top = token
        .top
        .iter()
        .map(|(_, bytes, logprob)| json!({"token": spelled(bytes), "logprob": logprob, "bytes": bytes}));
    json!({
        "token": spelled(&token.bytes),
        "logprob": token.logprob,
        "bytes": token.bytes,
        "top_logprobs": top.collect::<Vec<_>>(),
    })
}

fn completion_logprobs(tokens: &[DeliveredToken], mut offset: usize) -> Value {
    let mut spellings = Vec::with_capacity(tokens.len());
    let mut offsets = Vec::with_capacity(tokens.len());
    let mut tops = Vec::with_capacity(tokens.len());
    for token in tokens {
        let text = spelled(&token.bytes);
        offsets.push(offset);
        offset += text.chars().count();
        spellings.push(text);
        let top = token.top.iter().map(|(_, bytes, logprob)| (spelled(bytes), json!(logprob)));
        tops.push(Value::Object(top.collect()));
    }
    json!({
        "tokens": spellings,
        "token_logprobs": tokens.iter().map(|token| token.logprob).collect::<Vec<_>>(),
        "top_logprobs": tops,
        "text_offset": offsets,
    })
}

/// `usage` as the API has it.
pub fn usage_of(usage: &Usage) -> Value {
    json!({
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.output_tokens,
        "total_tokens": usage.prompt_tokens + usage.output_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    })
}
