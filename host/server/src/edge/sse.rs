//! An answer as server-sent events. A stream always ends with `data: [DONE]`, after an error event too; `id:` counts from 1.

use std::collections::VecDeque;
use std::time::Duration;

use axum::body::Body;
use bytes::Bytes;
use futures_util::stream;
use serde_json::Value;

use penstock_base::CancelCause;
use penstock_sched::message::Usage;

use super::answer::{Answer, Part};
use super::idempotency::Claim;
use super::shape::{Choice, Envelope, finish_reason};
use super::stalled::GivenUp;

/// Media type of a stream.
pub const CONTENT_TYPE: &str = "text/event-stream; charset=utf-8";
/// Longest stream that is kept for a retry under the same `Idempotency-Key`.
const RECORDED_BYTES_MAX: usize = 1 << 20;

/// What goes along with a stream.
pub struct Options {
    /// A last chunk with usage.
    pub include_usage: bool,
    /// Time between comments that keep a silent stream open.
    pub heartbeat: Duration,
    /// What became of the connection.
    pub given_up: GivenUp,
    /// The right to answer for an idempotency key.
    pub claim: Option<Claim>,
    /// Held until the body is gone.
    pub held: Box<dyn Send>,
}

/// Numbered events that are ready to go.
#[derive(Default)]
struct Events {
    ready: VecDeque<Bytes>,
    /// Number of the last one.
    sequence: u64,
}

impl Events {
    fn push(&mut self, chunk: &Value) {
        self.sequence += 1;
        self.ready.push_back(Bytes::from(format!("id: {}\ndata: {chunk}\n\n", self.sequence)));
    }

    fn done(&mut self) {
        self.ready.push_back(Bytes::from_static(b"data: [DONE]\n\n"));
    }
}

/// One stream on its way to a client.
struct Writer {
    answer: Answer,
    events: Events,
    include_usage: bool,
    heartbeat: Duration,
    given_up: GivenUp,
    claim: Option<Claim>,
    _held: Box<dyn Send>,
    /// What was sent, while it may be kept for a retry.
    recorded: Option<Vec<u8>>,
    /// Choices that have been opened.
    opened: Vec<bool>,
    /// Characters sent of each choice.
    sent: Vec<usize>,
    done: bool,
}

/// Makes the body. `first` is the part that was awaited to know the status.
pub fn body(mut answer: Answer, first: Part, options: Options) -> Body {
    let choices = answer.choices();
    answer.mark_streaming();
    let mut writer = Writer {
        answer,
        events: Events::default(),
        recorded: options.claim.is_some().then(Vec::new),
        include_usage: options.include_usage,
        heartbeat: options.heartbeat,
        given_up: options.given_up,
        claim: options.claim,
        _held: options.held,
        opened: vec![false; choices],
        sent: vec![0; choices],
        done: false,
    };
    writer.take(first);
    Body::from_stream(stream::unfold(writer, |mut writer| async move {
        let bytes = writer.next().await?;
        Some((Ok::<_, std::convert::Infallible>(bytes), writer))
    }))
}

/// Makes the body of an answer that is complete from the start.
pub fn at_once(envelope: &Envelope, choices: &[Choice], usage: Option<&Usage>) -> Body {
    let mut events = Events::default();
    for (index, choice) in choices.iter().enumerate() {
        if !choice.text.is_empty() {
            events.push(&envelope.text(index, &choice.text, &[], 0));
        }
        if let Some(reason) = choice.outcome.and_then(finish_reason) {
            events.push(&envelope.finish(index, reason));
        }
    }
    if let Some(usage) = usage {
        events.push(&envelope.usage(usage));
    }
    events.done();
    Body::from(events.ready.into_iter().flatten().collect::<Vec<u8>>())
}

impl Drop for Writer {
    /// A stream that is let go early counts as left by its client, unless the client was given up.
    fn drop(&mut self) {
        if self.given_up.is_set() {
            self.answer.cancel(CancelCause::SlowClient);
        }
    }
}

impl Writer {
    async fn next(&mut self) -> Option<Bytes> {
        loop {
            if let Some(bytes) = self.events.ready.pop_front() {
                self.record(&bytes);
                return Some(bytes);
            }
            if self.done {
                self.answer.acknowledge();
                return None;
            }
            match tokio::time::timeout(self.heartbeat, self.answer.next()).await {
                Ok(part) => self.take(part),
                Err(_) => return Some(Bytes::from_static(b": still here\n\n")),
            }
        }
    }

    fn take(&mut self, part: Part) {
        match part {
            Part::Text { choice, text, tokens } => {
                self.open(choice);
                if !text.is_empty() || (self.answer.envelope.logprobs && !tokens.is_empty()) {
                    let chunk = self.answer.envelope.text(choice, &text, &tokens, self.sent[choice]);
                    self.sent[choice] += text.chars().count();
                    self.events.push(&chunk);
                }
            }
            Part::ChoiceEnded { choice, outcome } => {
                if let Some(reason) = finish_reason(outcome) {
                    self.open(choice);
                    let chunk = self.answer.envelope.finish(choice, reason);
                    self.events.push(&chunk);
                }
            }
            Part::Ended => self.end(),
        }
    }

    /// Role (chat) and echo (completions) come before the first text.
    fn open(&mut self, choice: usize) {
        if std::mem::replace(&mut self.opened[choice], true) {
            return;
        }
        if let Some(chunk) = self.answer.envelope.opening(choice) {
            self.events.push(&chunk);
        }
        let echo = std::mem::take(&mut self.answer.echoes[choice]);
        if !echo.is_empty() {
            let chunk = self.answer.envelope.text(choice, &echo, &[], 0);
            self.sent[choice] += echo.chars().count();
            self.events.push(&chunk);
        }
    }

    fn end(&mut self) {
        if let Some(fault) = self.answer.fault() {
            let body = fault.body();
            self.events.push(&body);
        } else if self.include_usage {
            let chunk = self.answer.envelope.usage(self.answer.usage());
            self.events.push(&chunk);
        }
        self.events.done();
        self.done = true;
    }

    /// Keeps what goes out, and hands it over for retries once a good answer is complete.
    fn record(&mut self, bytes: &Bytes) {
        let Some(recorded) = &mut self.recorded else { return };
        if self.answer.fault().is_some() || recorded.len() + bytes.len() > RECORDED_BYTES_MAX {
            // The key stays taken until the stream is over, and is free then.
            self.recorded = None;
            return;
        }
        recorded.extend_from_slice(bytes);
        if self.done
            && self.events.ready.is_empty()
            && let Some(claim) = self.claim.take()
        {
            claim.streamed(recorded);
        }
    }
}
