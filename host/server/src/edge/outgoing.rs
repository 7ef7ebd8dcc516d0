//! A whole answer on its way out: in pieces, so that what it holds (slot, stream, bytes) counts until the client has taken it.

use axum::body::Body;
use bytes::Bytes;
use futures_util::stream;
use tokio::sync::OwnedSemaphorePermit;

use super::answer::Answer;

/// The connection takes the next piece once the last one is on its way; a larger piece would leave our books while it is still in memory.
const PIECE_BYTES: usize = 16 << 10;

/// What is left to send, and what it holds.
struct Outgoing {
    left: Bytes,
    answer: Answer,
    _slot: OwnedSemaphorePermit,
}

/// Makes the body. The answer counts as received when its last piece was asked past.
pub fn body(bytes: Bytes, answer: Answer, slot: OwnedSemaphorePermit) -> Body {
    let outgoing = Outgoing { left: bytes, answer, _slot: slot };
    Body::from_stream(stream::unfold(outgoing, |mut outgoing| async move {
        if outgoing.left.is_empty() {
            outgoing.answer.acknowledge();
            return None;
        }
        let piece = outgoing.left.split_to(PIECE_BYTES.min(outgoing.left.len()));
        Some((Ok::<_, std::convert::Infallible>(piece), outgoing))
    }))
}
