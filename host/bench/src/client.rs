//! Sends one request and watches its answer.

use std::time::{Duration, Instant};

use bytes::Bytes;
use http_body_util::{BodyExt as _, Full, Limited};
use hyper::body::Incoming;
use hyper::{Request, Response, StatusCode, header};
use serde_json::{Map, Value};

use crate::limits::{ERROR_BODY_BYTES_MAX, GAPS_MAX, MESSAGE_CHARS_MAX};
use crate::plan::Plan;
use crate::prompts::Line;
use crate::record::{Outcome, Record};
use crate::sse::Events;
use crate::target::{Connections, reason};

/// What all requests of a run have in common.
#[derive(Debug)]
pub struct Caller {
    /// Connections that are used again.
    pub connections: Connections,
    /// Root of the API.
    pub root: String,
    /// The model's name.
    pub model: String,
    /// The plan.
    pub plan: Plan,
    /// When the run began: the origin of all times in records.
    pub start: Instant,
}

impl Caller {
    /// One request from sending to its end. It always ends: by its answer, a fault, or the plan's timeout.
    pub async fn call(&self, index: usize, due: Instant, prompt: Line) -> Record {
        let request_id = format!("bench-{:x}-{index}", self.plan.seed);
        let mut watch = Watch::default();
        let request = self.request(&request_id, prompt);
        let sent = Instant::now();
        let end = match request {
            Ok(request) => {
                let answer = self.answer(request, &mut watch);
                match tokio::time::timeout(self.plan.timeout, answer).await {
                    Ok(end) => end,
                    Err(_) => {
                        End::new(Outcome::TimedOut, format!("no end within {} s", self.plan.timeout.as_secs_f64()))
                    }
                }
            }
            Err(message) => End::new(Outcome::Unconnected, message),
        };
        let ended = Instant::now();
        let ms = |at: Instant| at.saturating_duration_since(self.start).as_secs_f64() * 1e3;
        let since = |at: Instant| at.saturating_duration_since(sent).as_secs_f64() * 1e3;
        let output_tokens = watch.usage_tokens.unwrap_or(watch.texts);
        let tpot_ms = match (watch.first, watch.last) {
            (Some(first), Some(last)) if output_tokens > 1 => {
                Some(last.duration_since(first).as_secs_f64() * 1e3 / (output_tokens - 1) as f64)
            }
            _ => None,
        };
        Record {
            index,
            request_id,
            due_ms: ms(due),
            sent_ms: ms(sent),
            outcome: end.outcome,
            status: watch.status.map(|status| status.as_u16()),
            message: end.message,
            input_tokens: watch.input_tokens,
            cached_tokens: watch.cached_tokens,
            output_tokens,
            is_server_count: watch.usage_tokens.is_some(),
            ttft_ms: watch.first.map(since),
            tpot_ms,
            e2el_ms: since(ended),
            gaps_ms: watch.gaps_ms,
        }
    }

    fn request(&self, request_id: &str, prompt: Line) -> Result<Request<Full<Bytes>>, String> {
        let plan = &self.plan;
        let mut body = Map::new();
        body.insert("model".into(), self.model.clone().into());
        body.insert("max_tokens".into(), prompt.output_tokens.unwrap_or(plan.output_tokens).into());
        body.insert("temperature".into(), 0.into());
        body.insert("stream".into(), true.into());
        body.insert("stream_options".into(), serde_json::json!({ "include_usage": true }));
        if plan.ignore_eos {
            body.insert("ignore_eos".into(), true.into());
        }
        prompt.put(plan.endpoint, &mut body);
        let mut request = Request::post(format!("{}{}", self.root, plan.endpoint.path()))
            .header(header::CONTENT_TYPE, "application/json")
            .header("x-request-id", request_id);
        if let Some(key) = &plan.api_key {
            request = request.header(header::AUTHORIZATION, format!("Bearer {key}"));
        }
        let objectives = [("x-slo-ttft-ms", plan.objectives.ttft_ms), ("x-slo-tpot-ms", plan.objectives.tpot_ms)];
        for (name, value) in objectives {
            if let Some(value) = value {
                // The server wants whole milliseconds; the judgement here stays exact.
                request = request.header(name, format!("{:.0}", value.ceil()));
            }
        }
        for (name, value) in &plan.headers {
            request = request.header(name, value);
        }
        request.body(Full::from(Value::from(body).to_string())).map_err(|fault| fault.to_string())
    }

    async fn answer(&self, request: Request<Full<Bytes>>, watch: &mut Watch) -> End {
        let again = request.clone();
        let answer = match self.connections.request(request).await {
            // Some servers end a kept connection after a number of requests without a word, in the moment it is used again.
            Err(fault) if !fault.is_connect() => self.connections.request(again).await,
            first => first,
        };
        let answer = match answer {
            Ok(answer) => answer,
            Err(fault) if fault.is_connect() => return End::new(Outcome::Unconnected, reason(&fault)),
            Err(fault) => return End::new(Outcome::Closed, reason(&fault)),
        };
        let status = answer.status();
        watch.status = Some(status);
        if status.is_success() { stream(answer, watch).await } else { refusal(status, answer).await }
    }
}

async fn refusal(status: StatusCode, answer: Response<Incoming>) -> End {
    let body = Limited::new(answer.into_body(), ERROR_BODY_BYTES_MAX).collect().await;
    let bytes = body.map(|body| body.to_bytes()).unwrap_or_default();
    let said = serde_json::from_slice::<Value>(&bytes).ok().and_then(|body| error_message(&body));
    let outcome = match status {
        StatusCode::TOO_MANY_REQUESTS => Outcome::TooManyRequests,
        StatusCode::SERVICE_UNAVAILABLE => Outcome::Unavailable,
        _ => Outcome::Refused,
    };
    End::new(outcome, said.unwrap_or_else(|| format!("status {}", status.as_u16())))
}

async fn stream(answer: Response<Incoming>, watch: &mut Watch) -> End {
    let mut body = answer.into_body();
    let mut events = Events::default();
    while let Some(frame) = body.frame().await {
        let bytes = match frame.map(|frame| frame.into_data()) {
            Ok(Ok(bytes)) => bytes,
            Ok(Err(_trailers)) => continue,
            Err(fault) => return End::new(Outcome::Closed, reason(&fault)),
        };
        let at = Instant::now();
        if events.take(&bytes, |data| watch.event(data, at)).is_err() {
            return End::new(Outcome::StreamError, "an event without end".into());
        }
    }
    match (watch.error.take(), watch.is_done) {
        (Some(message), _) => End::new(Outcome::StreamError, message),
        (None, true) => End { outcome: Outcome::Completed, message: None },
        (None, false) => End::new(Outcome::Closed, "the stream ended without [DONE]".into()),
    }
}

/// How it ended and why.
#[derive(Debug)]
struct End {
    outcome: Outcome,
    message: Option<String>,
}

impl End {
    fn new(outcome: Outcome, message: String) -> Self {
        Self { outcome, message: Some(message.chars().take(MESSAGE_CHARS_MAX).collect()) }
    }
}

/// What has been seen of an answer.
#[derive(Debug, Default)]
struct Watch {
    status: Option<StatusCode>,
    first: Option<Instant>,
    last: Option<Instant>,
    gaps_ms: Vec<f64>,
    texts: u64,
    input_tokens: Option<u64>,
    cached_tokens: Option<u64>,
    usage_tokens: Option<u64>,
    error: Option<String>,
    is_done: bool,
}

impl Watch {
    fn event(&mut self, data: &[u8], at: Instant) {
        if data == b"[DONE]" {
            self.is_done = true;
            return;
        }
        let Ok(event) = serde_json::from_slice::<Value>(data) else {
            self.error.get_or_insert_with(|| "an event that is no JSON".into());
            return;
        };
        if let Some(message) = error_message(&event) {
            self.error.get_or_insert(message);
            return;
        }
        if has_text(&event) {
            self.text(at);
        }
        let count = |pointer| event.pointer(pointer).and_then(Value::as_u64);
        self.input_tokens = count("/usage/prompt_tokens").or(self.input_tokens);
        self.cached_tokens = count("/usage/prompt_tokens_details/cached_tokens").or(self.cached_tokens);
        self.usage_tokens = count("/usage/completion_tokens").or(self.usage_tokens);
    }

    fn text(&mut self, at: Instant) {
        self.texts += 1;
        self.first.get_or_insert(at);
        if let Some(last) = self.last
            && self.gaps_ms.len() < GAPS_MAX
        {
            self.gaps_ms.push(ms(at.duration_since(last)));
        }
        self.last = Some(at);
    }
}

fn ms(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}

fn error_message(body: &Value) -> Option<String> {
    let error = body.get("error").filter(|error| !error.is_null())?;
    let message = error.get("message").unwrap_or(error);
    Some(message.as_str().map_or_else(|| message.to_string(), str::to_owned))
}

/// Does any choice carry text? A chat stream opens with a role and no text: that is no token.
fn has_text(event: &Value) -> bool {
    let is_text = |value: Option<&Value>| value.and_then(Value::as_str).is_some_and(|text| !text.is_empty());
    let choices = event.get("choices").and_then(Value::as_array);
    choices.into_iter().flatten().any(|choice| {
        let delta = choice.get("delta");
        let in_delta = |name| is_text(delta.and_then(|delta| delta.get(name)));
        is_text(choice.get("text")) || in_delta("content") || in_delta("reasoning_content")
    })
}
