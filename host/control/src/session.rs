//! What do two ends still owe each other, when the connection between them comes and goes?
//!
//! A session outlives its connections. Messages carry dense numbers; the sender keeps what the other end has not confirmed, and hands it in
//! again on the next connection, so that each message is delivered once, in order, or the session ends for both with a reason. Pure: time
//! and connections are inputs.
//!
//! ```text
//!            attach                 connection gone or silent
//!  Waiting ─────────► Attached ───────────────────────────────► Waiting
//!     │ lease over       │ another life of the peer, broken protocol
//!     └──────────────────┴──────────────► Over
//! ```

use std::collections::VecDeque;
use std::fmt;
use std::time::{Duration, Instant};

use bytes::Bytes;

use crate::Limits;
use crate::limits::CONFIRMS_PER_WINDOW;
use crate::wire::Refusal;

/// One life of one end.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct End {
    /// Its number among those that meet: a gateway's or a worker's.
    pub id: u64,
    /// Its life. A restarted process has a larger one.
    pub epoch: u64,
}

impl fmt::Display for End {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} of epoch {}", self.id, self.epoch)
    }
}

/// A connection, by the number that the driver gave it. One session has at most one at a time; a later one has a larger number.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct ConnectionId(pub u64);

/// What one end writes to the other on a connection, after the hellos.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Frame {
    /// One message.
    Message {
        /// 1, 2, 3 .. in this session and direction.
        number: u64,
        /// Highest number received from the other end.
        received: u64,
        /// What the layer above says.
        body: Bytes,
    },
    /// A sign of life.
    Beat {
        /// Highest number received from the other end.
        received: u64,
    },
    /// This end ends the session: nothing more will come.
    Bye,
}

/// Why a session is over. Nothing more is sent or delivered in it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Ended {
    /// No connection for longer than the lease.
    Lease,
    /// Another life of the peer answers, or another session of the same life.
    Replaced,
    /// The other end said goodbye.
    Bye,
    /// This end closed it.
    Closed,
    /// The other end broke the protocol.
    Protocol(&'static str),
    /// The other end would not take the session up again.
    Refused(Refusal),
}

impl fmt::Display for Ended {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Lease => f.write_str("no connection for longer than the lease"),
            Self::Replaced => f.write_str("the peer has started anew"),
            Self::Bye => f.write_str("the peer said goodbye"),
            Self::Closed => f.write_str("closed by this end"),
            Self::Protocol(what) => write!(f, "the peer broke the protocol: {what}"),
            Self::Refused(why) => write!(f, "the peer would not go on: {why}"),
        }
    }
}

/// What the driver is to do.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Effect {
    /// Write on this connection, after what was written before.
    Write(ConnectionId, Frame),
    /// Hand to the layer above.
    Deliver(Bytes),
    /// Close this connection: it is silent, or another one took its place.
    Close(ConnectionId),
    /// Say once that the session is over.
    Ended(Ended),
}

/// Why a message was not taken. It has not been sent.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum NotSent {
    /// Back-pressure: the other end has not confirmed enough of what was sent before.
    #[error("busy: {what} not confirmed by the peer are at their limit of {limit}")]
    Full {
        /// Messages or bytes.
        what: &'static str,
        /// How many.
        limit: usize,
    },
    /// A single message over the limit.
    #[error("a message of {bytes} bytes is over the limit of {limit}")]
    TooLarge {
        /// Its length.
        bytes: usize,
        /// The most.
        limit: usize,
    },
    /// The session is over.
    #[error("the session is over")]
    Over,
}

/// One end of one session.
#[derive(Debug)]
pub struct Session {
    limits: Limits,
    /// The connection in use.
    attached: Option<ConnectionId>,
    /// The last one that was in use: an older one is not taken any more.
    latest: Option<ConnectionId>,
    /// Since when there is none; the lease runs from here.
    waiting_since: Instant,
    heard_at: Instant,
    wrote_at: Instant,
    /// Sent and not confirmed, oldest first; the first has number `confirmed + 1`.
    unconfirmed: VecDeque<Bytes>,
    unconfirmed_bytes: usize,
    confirmed: u64,
    received: u64,
    /// What of `received` the other end has been told.
    told: u64,
    /// Bytes of the messages that it has not been told of.
    untold_bytes: usize,
    over: bool,
}

impl Session {
    /// A session without a connection; its lease runs.
    pub fn new(limits: Limits, now: Instant) -> Self {
        Self {
            limits,
            attached: None,
            latest: None,
            waiting_since: now,
            heard_at: now,
            wrote_at: now,
            unconfirmed: VecDeque::new(),
            unconfirmed_bytes: 0,
            confirmed: 0,
            received: 0,
            told: 0,
            untold_bytes: 0,
            over: false,
        }
    }

    /// Highest number received: what a hello says.
    pub fn received(&self) -> u64 {
        self.received
    }

    /// Has it ended?
    pub fn is_over(&self) -> bool {
        self.over
    }

    /// Is there a connection?
    pub fn is_attached(&self) -> bool {
        self.attached.is_some()
    }

    /// Messages that the other end has not confirmed.
    pub fn unconfirmed(&self) -> usize {
        self.unconfirmed.len()
    }

    /// A connection is up, both hellos have been read, and the other end has received up to `received` of this session.
    pub fn attach(&mut self, now: Instant, connection: ConnectionId, received: u64, effects: &mut Vec<Effect>) {
        if self.over || self.latest.is_some_and(|latest| connection <= latest) {
            effects.push(Effect::Close(connection));
            return;
        }
        if let Some(before) = self.attached.take() {
            effects.push(Effect::Close(before));
        }
        self.latest = Some(connection);
        self.attached = Some(connection);
        self.heard_at = now;
        self.tell();
        if !self.confirm(received, effects) {
            return;
        }
        let (first, received) = (self.confirmed + 1, self.received);
        for (number, body) in (first..).zip(&self.unconfirmed) {
            let frame = Frame::Message { number, received, body: body.clone() };
            effects.push(Effect::Write(connection, frame));
        }
        self.wrote_at = now;
    }

    /// A connection is gone.
    pub fn detach(&mut self, now: Instant, connection: ConnectionId) {
        if self.attached == Some(connection) {
            self.attached = None;
            self.waiting_since = now;
        }
    }

    /// Takes one message for the other end: written now, or on the next connection.
    ///
    /// # Errors
    /// [`NotSent`]; nothing has changed.
    pub fn send(&mut self, now: Instant, body: Bytes, effects: &mut Vec<Effect>) -> Result<(), NotSent> {
        if self.over {
            return Err(NotSent::Over);
        }
        if body.len() > self.limits.message_bytes_max {
            return Err(NotSent::TooLarge { bytes: body.len(), limit: self.limits.message_bytes_max });
        }
        if self.unconfirmed.len() >= self.limits.messages_max {
            return Err(NotSent::Full { what: "messages", limit: self.limits.messages_max });
        }
        if self.unconfirmed_bytes + body.len() > self.limits.bytes_max {
            return Err(NotSent::Full { what: "bytes", limit: self.limits.bytes_max });
        }
        self.unconfirmed_bytes += body.len();
        self.unconfirmed.push_back(body.clone());
        let number = self.confirmed + self.unconfirmed.len() as u64;
        if let Some(connection) = self.attached {
            self.wrote(now);
            effects.push(Effect::Write(connection, Frame::Message { number, received: self.received, body }));
        }
        Ok(())
    }

    /// A frame came in.
    pub fn frame(&mut self, now: Instant, connection: ConnectionId, frame: Frame, effects: &mut Vec<Effect>) {
        if self.over || self.attached != Some(connection) {
            return;
        }
        self.heard_at = now;
        match frame {
            Frame::Message { number, received, body } => {
                if !self.confirm(received, effects) {
                    return;
                }
                if number > self.received + 1 {
                    return self.end(Ended::Protocol("a message is missing"), effects);
                }
                // What was on its way when the last connection broke may come twice.
                if number == self.received + 1 {
                    self.received = number;
                    self.untold_bytes += body.len();
                    effects.push(Effect::Deliver(body));
                }
                // The other end must not wait for a beat while its room runs out.
                if self.received - self.told >= self.limits.confirm_after()
                    || self.untold_bytes >= self.limits.bytes_max / CONFIRMS_PER_WINDOW
                {
                    self.beat(now, connection, effects);
                }
            }
            Frame::Beat { received } => _ = self.confirm(received, effects),
            Frame::Bye => self.end(Ended::Bye, effects),
        }
    }

    /// Frames wait unread by this end's own doing, so the other end's silence means nothing.
    pub fn hold(&mut self, now: Instant) {
        self.heard_at = now;
    }

    /// Time passes.
    pub fn tick(&mut self, now: Instant, effects: &mut Vec<Effect>) {
        if self.over {
            return;
        }
        match self.attached {
            Some(connection) if now.saturating_duration_since(self.heard_at) >= self.limits.silence_max => {
                self.attached = None;
                self.waiting_since = now;
                effects.push(Effect::Close(connection));
            }
            Some(connection) if now.saturating_duration_since(self.wrote_at) >= self.limits.beat => {
                self.beat(now, connection, effects);
            }
            None if now.saturating_duration_since(self.waiting_since) >= self.limits.lease => {
                self.end(Ended::Lease, effects);
            }
            _ => {}
        }
    }

    /// When [`tick`](Self::tick) has something to do, if nothing else happens.
    pub fn next_tick(&self) -> Option<Instant> {
        if self.over {
            return None;
        }
        let at = |from: Instant, after: Duration| from.checked_add(after);
        match self.attached {
            Some(_) => at(self.heard_at, self.limits.silence_max).min(at(self.wrote_at, self.limits.beat)),
            None => at(self.waiting_since, self.limits.lease),
        }
    }

    /// Ends the session at this end, with a word to the other.
    pub fn close(&mut self, why: Ended, effects: &mut Vec<Effect>) {
        if let (false, Some(connection)) = (self.over, self.attached) {
            effects.push(Effect::Write(connection, Frame::Bye));
        }
        self.end(why, effects);
    }

    fn beat(&mut self, now: Instant, connection: ConnectionId, effects: &mut Vec<Effect>) {
        self.wrote(now);
        effects.push(Effect::Write(connection, Frame::Beat { received: self.received }));
    }

    fn wrote(&mut self, now: Instant) {
        self.wrote_at = now;
        self.tell();
    }

    fn tell(&mut self) {
        self.told = self.received;
        self.untold_bytes = 0;
    }

    /// Drops what the other end has received. False when it claims what cannot be; then the session is over.
    fn confirm(&mut self, received: u64, effects: &mut Vec<Effect>) -> bool {
        // A smaller number is an older frame's, overtaken by a hello.
        let newly = received.saturating_sub(self.confirmed);
        if newly > self.unconfirmed.len() as u64 {
            self.end(Ended::Protocol("it confirms what was never sent"), effects);
            return false;
        }
        for body in self.unconfirmed.drain(..newly as usize) {
            self.unconfirmed_bytes -= body.len();
        }
        self.confirmed += newly;
        true
    }

    fn end(&mut self, why: Ended, effects: &mut Vec<Effect>) {
        if std::mem::replace(&mut self.over, true) {
            return;
        }
        self.unconfirmed.clear();
        self.unconfirmed_bytes = 0;
        if let Some(connection) = self.attached.take() {
            effects.push(Effect::Close(connection));
        }
        effects.push(Effect::Ended(why));
    }
}
