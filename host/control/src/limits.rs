//! Every bound of a conversation, with its reason.

use std::time::Duration;

/// How often the receiver confirms while a sender's window fills. Eight: seven eighths of it are always usable.
pub(crate) const CONFIRMS_PER_WINDOW: usize = 8;

/// Time for the first word on a connection, and for the answer to it.
pub(crate) const HELLO_WITHIN: Duration = Duration::from_secs(5);

/// Time for a TCP connection.
pub(crate) const CONNECT_WITHIN: Duration = Duration::from_secs(2);

/// Pause before a connection is tried again: the first, doubled up to the last.
pub(crate) const PAUSE_FIRST: Duration = Duration::from_millis(50);
/// See [`PAUSE_FIRST`].
pub(crate) const PAUSE_LAST: Duration = Duration::from_secs(1);

/// Packets beyond the unconfirmed messages that may wait for one connection: beats and confirmations of some seconds.
pub(crate) const BEATS_WAITING_MAX: usize = 256;

/// Bytes of HTTP/2 that one end takes before it is read: a few large prompts.
pub(crate) const WINDOW_BYTES: u32 = 4 << 20;

/// Streams of one HTTP/2 connection. A caller needs one; a second may come before the first is seen to be gone.
pub(crate) const STREAMS_MAX: u32 = 4;

/// Bytes of a packet beyond its message's body.
pub(crate) const PACKET_OVERHEAD_BYTES: usize = 64;

/// Greeting of either end, and the text of compatibility.
pub(crate) const GREETING_BYTES_MAX: usize = 64 << 10;

/// Bounds of one session.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Limits {
    /// Messages that the other end has not confirmed. 8,192: some seconds of a busy worker's steps.
    pub messages_max: usize,
    /// Their bytes. 64 MiB: prompts travel with dispatches, and credit bounds how many are under way.
    pub bytes_max: usize,
    /// One message. 16 MiB: a prompt of 2^20 tokens and all that goes with it is below 5.
    pub message_bytes_max: usize,
    /// Longest time between two frames from this end. 250 ms: reports are due each 100 ms anyway, so a beat is rare.
    pub beat: Duration,
    /// A connection without a frame for so long is given up, and made anew. Twelve beats.
    pub silence_max: Duration,
    /// A session without a connection for so long is over, and with it everything that one end did for the other. 10 s: a switch that
    /// restarts is outlived, and a dead host is not waited for.
    pub lease: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            messages_max: 8_192,
            bytes_max: 64 << 20,
            message_bytes_max: 16 << 20,
            beat: Duration::from_millis(250),
            silence_max: Duration::from_secs(3),
            lease: Duration::from_secs(10),
        }
    }
}

impl Limits {
    /// Messages received after which the other end is told at once.
    pub(crate) fn confirm_after(&self) -> u64 {
        (self.messages_max / CONFIRMS_PER_WINDOW).max(1) as u64
    }
}
