//! What became of one request, by the client's clocks.

use serde::Serialize;

/// One request. Times are milliseconds from the start of the run, or between two moments of the request.
#[derive(Clone, Debug, Serialize)]
pub struct Record {
    /// Its place in the plan, from 0.
    pub index: usize,
    /// The `x-request-id` that was sent, by which the server's logs know it.
    pub request_id: String,
    /// When it was to be sent: its arrival in an open loop, else when its stream became free.
    pub due_ms: f64,
    /// When it was sent.
    pub sent_ms: f64,
    /// How it ended.
    pub outcome: Outcome,
    /// The answer's HTTP status, once there was one.
    pub status: Option<u16>,
    /// What went wrong, in short.
    pub message: Option<String>,
    /// Prompt tokens, as the server counts them.
    pub input_tokens: Option<u64>,
    /// Of these, found in the server's prefix cache, as the server counts them.
    pub cached_tokens: Option<u64>,
    /// Tokens answered.
    pub output_tokens: u64,
    /// Are the output tokens the server's count (`usage`)? Else each event with text counted as one token.
    pub is_server_count: bool,
    /// From sending to the first text.
    pub ttft_ms: Option<f64>,
    /// (last text - first text) / (tokens - 1). Not there for answers of one token.
    pub tpot_ms: Option<f64>,
    /// From sending to the end of the answer.
    pub e2el_ms: f64,
    /// Between events with text. An event may carry several tokens.
    pub gaps_ms: Vec<f64>,
}

/// How a request ended.
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Outcome {
    /// A whole answer.
    Completed,
    /// 429: quota, full queue, shed.
    TooManyRequests,
    /// 503: nothing ready, all busy, draining.
    Unavailable,
    /// Another status that is no success.
    Refused,
    /// The stream said that it failed.
    StreamError,
    /// The answer ended before it was whole.
    Closed,
    /// No connection.
    Unconnected,
    /// Longer than the plan allows.
    TimedOut,
}

impl Outcome {
    /// As it stands in results.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Completed => "completed",
            Self::TooManyRequests => "too_many_requests",
            Self::Unavailable => "unavailable",
            Self::Refused => "refused",
            Self::StreamError => "stream_error",
            Self::Closed => "closed",
            Self::Unconnected => "unconnected",
            Self::TimedOut => "timed_out",
        }
    }
}
