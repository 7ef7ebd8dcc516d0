//! How are bytes moved by a library that takes requests? A request is posted once, asked about until it is final, and cannot be
//! stopped in between.
//!
//! ```text
//!          Ready            post             final, bytes left
//!  opened ───────► waiting ──────► in flight ──────────────────► waiting
//!                     ▲                │ final, none left ─────► Doorbell (write) or Cancel (read): over
//!                     │                │ final with an error ──► the connection is lost
//!      cancel, Revoke ┘ at once        └ cancel, Revoke ───────► over once it is final, and said only then
//! ```

use std::collections::VecDeque;

use super::link::Link;
use crate::frame::Word;
use crate::operations::Operations;
use crate::{Direction, Event, Failure, Gone, Layout, OpId, PeerId, Region, Touch, Transfer, TransportError};

/// Bytes of one request: what a cancelled operation may still move, and what a turn posts. 16 MiB last 0.3 ms at 50 GB/s.
const PIECE_BYTES: u64 = 16 * 1024 * 1024;

/// Who takes requests. It belongs to the endpoint, whose regions it has registered.
pub(crate) trait Poster: Send {
    /// What a peer must know to reach the regions here.
    fn card(&mut self) -> Result<Vec<u8>, TransportError>;
    /// Takes in a peer's card. What stood with this peer before is over.
    fn meet(&mut self, peer: PeerId, card: &[u8], layouts: &[Layout]) -> Result<(), Gone>;
    /// Forgets a peer's card.
    fn part(&mut self, peer: PeerId);
    /// Posts a request.
    fn post(&mut self, wanted: &Wanted<'_>) -> Result<Box<dyn Request>, Gone>;
    /// Lets requests of peers move: over some networks nothing does unless this is called.
    fn serve(&mut self);
    /// Makes all cards that were given out void: no request of any peer touches the regions here once this has returned.
    fn fence(&mut self);
}

/// A request that has been posted. Dropped before it is final, it may still move bytes.
pub(crate) trait Request: Send {
    /// Whether all its bytes are where they belong; an error is final, too.
    fn is_final(&mut self) -> Result<bool, Gone>;
}

/// What to post.
#[cfg_attr(not(feature = "nixl"), expect(dead_code, reason = "the only one who reads it is behind a feature"))]
pub(crate) struct Wanted<'a> {
    pub(crate) peer: PeerId,
    pub(crate) direction: Direction,
    pub(crate) local: u16,
    pub(crate) remote: u16,
    pub(crate) stretches: &'a [Stretch],
}

/// Bytes that lie side by side on both ends, as distances from the beginnings of the two regions.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Stretch {
    pub(crate) local: u64,
    pub(crate) remote: u64,
    pub(crate) bytes: u64,
}

/// The stretches of a transfer that has been checked, in order. Neighbours on both sides become one.
pub(crate) fn stretches(transfer: &Transfer, block_bytes: u64) -> Vec<Stretch> {
    let mut joined: Vec<Stretch> = Vec::with_capacity(transfer.spans.len());
    for span in &transfer.spans {
        let local = u64::from(span.local) * block_bytes;
        let remote = u64::from(span.remote) * block_bytes;
        let bytes = u64::from(span.blocks) * block_bytes;
        match joined.last_mut() {
            Some(last) if last.local + last.bytes == local && last.remote + last.bytes == remote => last.bytes += bytes,
            _ => joined.push(Stretch { local, remote, bytes }),
        }
    }
    joined
}

enum Flight {
    /// Nothing is posted.
    None,
    Posted(Box<dyn Request>),
    /// The last request ended with an error: of a write, bytes may still be on their way.
    Failed,
}

/// An own operation.
struct Posting {
    op: OpId,
    direction: Direction,
    local: u16,
    remote: u16,
    /// What is not yet posted.
    left: VecDeque<Stretch>,
    bytes: u64,
    /// The peer has given leave.
    is_ready: bool,
    flight: Flight,
    /// It is to end when its request is final: with this word, and so.
    ending: Option<(Word, Failure)>,
}

impl Posting {
    /// The next piece, taken off what is left.
    fn next_piece(&mut self) -> Vec<Stretch> {
        let mut piece = Vec::new();
        let mut room = PIECE_BYTES;
        while room > 0
            && let Some(mut stretch) = self.left.pop_front()
        {
            let bytes = stretch.bytes.min(room);
            piece.push(Stretch { bytes, ..stretch });
            room -= bytes;
            if bytes < stretch.bytes {
                stretch = Stretch {
                    local: stretch.local + bytes,
                    remote: stretch.remote + bytes,
                    bytes: stretch.bytes - bytes,
                };
                self.left.push_front(stretch);
            }
        }
        piece
    }

    fn is_in_flight(&self) -> bool {
        matches!(self.flight, Flight::Posted(_))
    }
}

/// A request whose connection is gone. It is asked about until it is final.
pub(crate) struct Drifting {
    pub(crate) peer: PeerId,
    op: OpId,
    direction: Direction,
    request: Box<dyn Request>,
}

impl Drifting {
    /// Whether it is over; then the operation it was part of settles, where that is certain.
    pub(crate) fn is_over(&mut self, operations: &mut Operations, events: &mut Vec<Event>) -> bool {
        match self.request.is_final() {
            Ok(false) => return false,
            Ok(true) => operations.settle(self.op, events),
            // Bytes of a write that failed may still be on their way: the receiver's word decides.
            Err(_) if self.direction == Direction::Read => operations.settle(self.op, events),
            Err(_) => {}
        }
        true
    }
}

/// The operations with one peer, which take turns, a piece each.
#[derive(Default)]
pub(crate) struct Postings {
    rows: VecDeque<Posting>,
}

impl Postings {
    pub(crate) fn start(&mut self, transfer: &Transfer, local: &Region) {
        let left = stretches(transfer, local.block_bytes() as u64);
        self.rows.push_back(Posting {
            op: transfer.op,
            direction: transfer.direction,
            local: transfer.local,
            remote: transfer.remote,
            bytes: left.iter().map(|stretch| stretch.bytes).sum(),
            left: left.into(),
            is_ready: false,
            flight: Flight::None,
            ending: None,
        });
    }

    /// The peer gives leave.
    pub(crate) fn allow(&mut self, op: OpId) {
        if let Some(row) = self.rows.iter_mut().find(|row| row.op == op) {
            row.is_ready = true;
        }
    }

    /// Ends an operation. In flight it ends later, and `word` is said only then; else the caller says it.
    pub(crate) fn stop(&mut self, op: OpId, word: Word, failure: Failure) -> Touch {
        let Some(at) = self.rows.iter().position(|row| row.op == op) else { return Touch::Settled };
        let row = &mut self.rows[at];
        if row.is_in_flight() {
            row.ending.get_or_insert((word, failure));
            return Touch::Quarantined;
        }
        self.rows.remove(at);
        Touch::Settled
    }

    /// Whether bytes of this operation may be on their way.
    pub(crate) fn may_move(&self, op: OpId) -> bool {
        self.rows.iter().any(|row| row.op == op && !matches!(row.flight, Flight::None))
    }

    pub(crate) fn is_in_flight(&self) -> bool {
        self.rows.iter().any(Posting::is_in_flight)
    }

    /// Asks and posts. Returns whether anything moved.
    pub(crate) fn turn(
        &mut self,
        peer: PeerId,
        poster: &mut dyn Poster,
        link: &mut Link,
        operations: &mut Operations,
        events: &mut Vec<Event>,
    ) -> Result<bool, Gone> {
        let mut budget = PIECE_BYTES;
        let mut moved = false;
        for _ in 0..self.rows.len() {
            let Some(mut row) = self.rows.pop_front() else { break };
            let is_over = row.turn(peer, poster, &mut budget, &mut moved);
            match is_over {
                Ok(false) => self.rows.push_back(row),
                Ok(true) => row.finish(link, operations, events),
                Err(why) => {
                    self.rows.push_back(row);
                    return Err(why);
                }
            }
        }
        Ok(moved)
    }

    /// The connection is gone. Returns the operations of which bytes may still move, and puts what is in flight among the drifting.
    pub(crate) fn abandon(self, peer: PeerId, is_over: bool, drifting: &mut Vec<Drifting>) -> Vec<OpId> {
        let mut unsettled = Vec::new();
        for row in self.rows {
            let is_write = row.direction == Direction::Write;
            // A write's destination has gone with a peer that has gone. A read's is here.
            let is_harmless = match row.flight {
                Flight::None => true,
                Flight::Posted(_) => is_write && is_over,
                Flight::Failed => !is_write || is_over,
            };
            if !is_harmless {
                unsettled.push(row.op);
            }
            if let Flight::Posted(request) = row.flight {
                drifting.push(Drifting { peer, op: row.op, direction: row.direction, request });
            }
        }
        unsettled
    }
}

impl Posting {
    /// Returns whether it is over.
    fn turn(
        &mut self,
        peer: PeerId,
        poster: &mut dyn Poster,
        budget: &mut u64,
        moved: &mut bool,
    ) -> Result<bool, Gone> {
        loop {
            if let Flight::Posted(request) = &mut self.flight {
                match request.is_final() {
                    Ok(false) => return Ok(false),
                    Ok(true) => self.flight = Flight::None,
                    Err(why) => {
                        self.flight = Flight::Failed;
                        return Err(why);
                    }
                }
                *moved = true;
            }
            if self.ending.is_some() || (self.is_ready && self.left.is_empty()) {
                return Ok(true);
            }
            if !self.is_ready || *budget == 0 {
                return Ok(false);
            }
            let piece = self.next_piece();
            let bytes: u64 = piece.iter().map(|stretch| stretch.bytes).sum();
            *budget = budget.saturating_sub(bytes);
            let Self { direction, local, remote, .. } = *self;
            match poster.post(&Wanted { peer, direction, local, remote, stretches: &piece }) {
                Ok(request) => self.flight = Flight::Posted(request),
                Err(why) => {
                    self.flight = Flight::Failed;
                    return Err(why);
                }
            }
            *moved = true;
        }
    }

    fn finish(self, link: &mut Link, operations: &mut Operations, events: &mut Vec<Event>) {
        match (self.ending, self.direction) {
            (Some((word, failure)), _) => {
                operations.end(self.op, Err(failure), Touch::Settled, events);
                link.say(word, self.op, 0, &[]);
            }
            (None, Direction::Write) => link.say(Word::Doorbell, self.op, self.bytes, &[]),
            (None, Direction::Read) => {
                operations.end(self.op, Ok(()), Touch::Settled, events);
                // So that the peer lends its blocks no longer.
                link.say(Word::Cancel, self.op, 0, &[]);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::*;
    use crate::Span;

    fn posting(spans: Vec<Span>) -> Posting {
        let region = Region::private(1024, 65_536).unwrap();
        let peer = PeerId { endpoint: 1, epoch: 1 };
        let (op, direction) = (OpId(1), Direction::Write);
        let transfer = Transfer { op, peer, direction, local: 0, remote: 0, spans, deadline: Instant::now() };
        let mut postings = Postings::default();
        postings.start(&transfer, &region);
        postings.rows.pop_front().unwrap()
    }

    fn span(local: u32, remote: u32, blocks: u32) -> Span {
        Span { local, remote, blocks }
    }

    #[test]
    fn neighbours_on_both_sides_are_one_stretch() {
        let joined = posting(vec![span(0, 8, 2), span(2, 10, 1), span(3, 12, 1), span(5, 13, 1)]);
        let stretch = |local: u64, remote: u64, bytes: u64| Stretch {
            local: local * 1024,
            remote: remote * 1024,
            bytes: bytes * 1024,
        };
        // The third follows here but not there, the fourth there but not here.
        assert_eq!(joined.left, [stretch(0, 8, 3), stretch(3, 12, 1), stretch(5, 13, 1)]);
        assert_eq!(joined.bytes, 5 * 1024);
    }

    #[test]
    fn a_piece_is_cut_where_it_is_full() {
        // 40 MiB in one stretch, then one block apart from it.
        let mut long = posting(vec![span(0, 0, 40_960), span(50_000, 60_000, 1)]);
        let mib = 1024 * 1024;
        let part = |at: u64, bytes| Stretch { local: at, remote: at, bytes };
        assert_eq!(long.next_piece(), [part(0, 16 * mib)]);
        assert_eq!(long.next_piece(), [part(16 * mib, 16 * mib)]);
        let last = Stretch { local: 50_000 * 1024, remote: 60_000 * 1024, bytes: 1024 };
        assert_eq!(long.next_piece(), [part(32 * mib, 8 * mib), last]);
        assert_eq!(long.next_piece(), []);
    }
}
