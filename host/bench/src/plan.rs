//! What shall be sent, how fast, and what counts as good.

use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::time::Duration;

use crate::error::BenchError;
use crate::limits::{PROMPT_WORDS_MAX, REQUESTS_MAX, STREAMS_MAX};

/// A whole run.
#[derive(Clone, Debug)]
pub struct Plan {
    /// Root of the API, with or without `/v1`: `http://127.0.0.1:8000`.
    pub url: String,
    /// Name of the model; none asks the server and takes its first.
    pub model: Option<String>,
    /// Which API.
    pub endpoint: Endpoint,
    /// How requests arrive.
    pub load: Load,
    /// How many are sent and measured.
    pub requests: usize,
    /// Sent before them, one after the other, and not measured.
    pub warmup_requests: usize,
    /// What they ask.
    pub prompts: Prompts,
    /// Tokens that each shall answer with, unless its prompt says otherwise.
    pub output_tokens: u32,
    /// Asks the server to go on past the end-of-text token, so that every answer has the same length.
    pub ignore_eos: bool,
    /// What a good answer is. Sent along as `x-slo-ttft-ms` and `x-slo-tpot-ms`.
    pub objectives: Objectives,
    /// Prompts and arrivals follow from it alone.
    pub seed: u64,
    /// Longest that one request may take, from sending to its last byte.
    pub timeout: Duration,
    /// Bearer token. Never printed or kept.
    pub api_key: Option<String>,
    /// Sent with each request, as (name, value).
    pub headers: Vec<(String, String)>,
}

/// Which API is asked.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Endpoint {
    /// `/v1/completions`: the prompt is a text.
    Completions,
    /// `/v1/chat/completions`: the prompt is one user message, or the messages of a prompt file.
    Chat,
}

impl Endpoint {
    /// Its path.
    #[must_use]
    pub fn path(self) -> &'static str {
        match self {
            Self::Completions => "/v1/completions",
            Self::Chat => "/v1/chat/completions",
        }
    }
}

/// How requests arrive.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Load {
    /// So many streams, each sending its next request when the last has ended.
    Closed {
        /// Streams at once.
        streams: NonZeroUsize,
    },
    /// Poisson arrivals, whatever the server does.
    Open {
        /// Mean arrivals per second.
        per_second: f64,
        /// Requests in flight beyond which the next waits at the client; the wait is reported as lateness, not hidden.
        in_flight_max: NonZeroUsize,
    },
}

/// Where prompts come from.
#[derive(Clone, Debug, PartialEq)]
pub enum Prompts {
    /// Made of common words.
    Synthetic(Synthetic),
    /// One JSON object a line: `prompt` or `messages`, and optionally `max_tokens`. Taken in order, and again from the start.
    File(PathBuf),
}

/// Prompts of common words: a shared beginning, then words of their own.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Synthetic {
    /// Words that no other request has in this order.
    pub own_words: usize,
    /// Words at the start that all requests of a group share.
    pub shared_words: usize,
    /// Different beginnings; request `i` belongs to group `i mod groups`.
    pub groups: NonZeroUsize,
}

/// What a good answer is; what is not set is not judged.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Objectives {
    /// Longest time to the first token, in milliseconds.
    pub ttft_ms: Option<f64>,
    /// Longest time per further token, in milliseconds.
    pub tpot_ms: Option<f64>,
}

impl Objectives {
    /// Is anything judged?
    #[must_use]
    pub fn is_set(self) -> bool {
        self.ttft_ms.is_some() || self.tpot_ms.is_some()
    }
}

impl Plan {
    /// Refuses what cannot be done, naming the flag and what would be right.
    ///
    /// # Errors
    /// The first fault.
    pub fn check(&self) -> Result<(), BenchError> {
        let fault = |flag, problem: String| Err(BenchError::Plan { flag, problem });
        if self.requests == 0 || self.requests > REQUESTS_MAX {
            return fault("--requests", format!("{} is not between 1 and {REQUESTS_MAX}", self.requests));
        }
        let at_once = match self.load {
            Load::Closed { streams } => streams,
            Load::Open { per_second, .. } if !(per_second.is_finite() && per_second > 0.0) => {
                return fault("--rate", format!("{per_second} is no rate: give requests per second above 0"));
            }
            Load::Open { in_flight_max, .. } => in_flight_max,
        };
        if at_once.get() > STREAMS_MAX {
            return fault("--streams", format!("{at_once} is more than {STREAMS_MAX}"));
        }
        if let Prompts::Synthetic(words) = &self.prompts {
            let total = words.own_words.saturating_add(words.shared_words);
            if total == 0 || total > PROMPT_WORDS_MAX {
                return fault(
                    "--prompt-words",
                    format!("{total} words in all is not between 1 and {PROMPT_WORDS_MAX}"),
                );
            }
        }
        if self.output_tokens == 0 {
            return fault("--output-tokens", "0 leaves nothing to measure: give 1 or more".into());
        }
        if self.timeout.is_zero() {
            return fault("--timeout", "0 ends every request at once: give seconds above 0".into());
        }
        Ok(())
    }
}
