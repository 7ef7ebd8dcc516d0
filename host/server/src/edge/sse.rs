//! An answer as server-sent events. A stream always ends with `data: [DONE]`, after an error event too; `id:` counts from 1.

use std::collections::VecDeque;
use std::time::Duration;

use axum::body::Body;
use bytes::Bytes;
use futures_util::stream;
use serde_json::Value;

use super::answer::{Answer, Part};
use super::shape::finish_reason;

/// One stream on its way to a client.
struct Writer {
    answer: Answer,
    /// Events that are ready to go.
    ready: VecDeque<Bytes>,
    /// Number of the last event.
    sequence: u64,
    include_usage: bool,
    heartbeat: Duration,
    /// Choices that have been opened.
    opened: Vec<bool>,
    /// Characters sent of each choice.
    sent: Vec<usize>,
    done: bool,
    /// Held until the body is gone.
    _held: Box<dyn Send>,
}

/// Makes the body. `first` is the part that was awaited to know the status; `held` is kept until the body is gone.
pub fn body(answer: Answer, first: Part, include_usage: bool, heartbeat: Duration, held: Box<dyn Send>) -> Body {
    let choices = answer.choices();
    answer.mark_streaming();
    let mut writer = Writer {
        answer,
        ready: VecDeque::new(),
        sequence: 0,
        include_usage,
        heartbeat,
        opened: vec![false; choices],
        sent: vec![0; choices],
        done: false,
        _held: held,
    };
    writer.take(first);
    Body::from_stream(stream::unfold(writer, |mut writer| async move {
        let bytes = writer.next().await?;
        Some((Ok::<_, std::convert::Infallible>(bytes), writer))
    }))
}

impl Writer {
    async fn next(&mut self) -> Option<Bytes> {
        loop {
            if let Some(bytes) = self.ready.pop_front() {
                return Some(bytes);
            }
            if self.done {
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
                    self.push(&chunk);
                }
            }
            Part::ChoiceEnded { choice, outcome } => {
                if let Some(reason) = finish_reason(outcome) {
                    self.open(choice);
                    let chunk = self.answer.envelope.finish(choice, reason);
                    self.push(&chunk);
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
            self.push(&chunk);
        }
        let echo = std::mem::take(&mut self.answer.echoes[choice]);
        if !echo.is_empty() {
            let chunk = self.answer.envelope.text(choice, &echo, &[], 0);
            self.sent[choice] += echo.chars().count();
            self.push(&chunk);
        }
    }

    fn end(&mut self) {
        if let Some(fault) = self.answer.fault() {
            let body = fault.body();
            self.push(&body);
        } else if self.include_usage {
            let chunk = self.answer.envelope.usage(self.answer.usage());
            self.push(&chunk);
        }
        self.ready.push_back(Bytes::from_static(b"data: [DONE]\n\n"));
        self.done = true;
    }

    fn push(&mut self, chunk: &Value) {
        self.sequence += 1;
        self.ready.push_back(Bytes::from(format!("id: {}\ndata: {chunk}\n\n", self.sequence)));
    }
}
