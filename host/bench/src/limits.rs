//! Every limit of the generator, with its reason.

use std::time::Duration;

/// Streams at once. More connections than this measure the client's kernel, not the server.
pub const STREAMS_MAX: usize = 16_384;
/// Requests of one run: each keeps a record of about 200 bytes and its gaps until the summary.
pub const REQUESTS_MAX: usize = 1_000_000;
/// Words of one synthetic prompt.
pub const PROMPT_WORDS_MAX: usize = 1_000_000;
/// Bytes of a prompt file, which is held whole.
pub const PROMPT_FILE_BYTES_MAX: u64 = 1 << 30;
/// Bytes of one line of an event stream: an event with logprobs of many tokens stays far below.
pub const LINE_BYTES_MAX: usize = 16 << 20;
/// Bytes kept of the body of an answer that is no success, for the error's text.
pub const ERROR_BODY_BYTES_MAX: usize = 64 << 10;
/// Characters of an error's message in a record.
pub const MESSAGE_CHARS_MAX: usize = 300;
/// Gaps between events kept of one request; a longer answer keeps its first ones.
pub const GAPS_MAX: usize = 65_536;
/// How long the question for the server's models may take.
pub const MODELS_TIMEOUT: Duration = Duration::from_secs(10);
/// How often progress is told.
pub const PROGRESS_EVERY: Duration = Duration::from_secs(1);
