//! One client's stream of events: a bounded buffer that the engine fills without ever waiting, and the handle that reads it.
//!
//! The buffer has a bound in bytes and in events. At the bound, or when a client leaves events unread for longer than the send timeout
//! while more come, the stream takes no more text and its request is cancelled as a slow client: it ends, typed, and without a gap in the
//! text before. Ends always fit, since there are at most `n + 1` of them.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicI64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};

use penstock_base::{CancelCause, Failure, Instant, Outcome, RequestId};
use penstock_sched::gateway::DeliveryEvent;
use penstock_sched::message::Usage;

use crate::clock::Clock;
use crate::config::EngineLimits;
use crate::permit::Permit;
use crate::request::{DeliveredToken, RequestEvent};

/// What a stream tells the gateway of its client.
pub(crate) trait ClientSide: Send + Sync {
    /// The client is not interested any more. False when the gateway could not be told.
    fn cancel(&self, request: RequestId, cause: CancelCause) -> bool;
    /// Something happened on the delivery axis.
    fn delivery(&self, request: RequestId, event: DeliveryEvent);
}

/// Both ends share this.
struct Shared {
    request: RequestId,
    buffer: Mutex<Buffer>,
    readable: Condvar,
    bytes_max: usize,
    events_max: usize,
    send_timeout: penstock_base::Duration,
    clock: Clock,
    /// Unread bytes over all streams.
    total_bytes: Arc<AtomicI64>,
    /// The request counts as in flight until both ends are gone.
    _permit: Permit,
}

/// What waits for the client. Changed by the writing end (appends) and the reading end (takes).
#[derive(Default)]
struct Buffer {
    /// Unread events, oldest first, with the time since when they lie here; text that joins keeps the time of what it joins.
    events: VecDeque<(Instant, RequestEvent)>,
    bytes: usize,
    /// No more text is taken: the client was too slow.
    overflowed: bool,
    /// The last event is in.
    ended: bool,
    /// Nobody reads any more.
    abandoned: bool,
    /// Tokens that lay here unread when the reader left before the end: the client never got them.
    left_unread: u32,
    /// A cancel of the reader's that the gateway could not be told of.
    owes_cancel: Option<CancelCause>,
    waker: Option<Waker>,
}

/// What became of a text that was pushed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Pushed {
    /// It is in the buffer.
    Taken,
    /// The buffer just reached its bound (said once); the text was dropped.
    Overflowed,
    /// The stream takes no more text since it overflowed.
    Dropped,
    /// Nobody reads any more.
    Abandoned,
}

/// The two ends of a new stream.
pub(crate) fn stream(
    request: RequestId,
    permit: Permit,
    limits: &EngineLimits,
    clock: Clock,
    total_bytes: Arc<AtomicI64>,
    client: Arc<dyn ClientSide>,
) -> (StreamWriter, EventStream) {
    let shared = Arc::new(Shared {
        request,
        buffer: Mutex::default(),
        readable: Condvar::new(),
        bytes_max: limits.stream_bytes_max,
        events_max: limits.stream_events_max,
        send_timeout: limits.send_timeout,
        clock,
        total_bytes,
        _permit: permit,
    });
    let reader = EventStream { shared: Arc::clone(&shared), client, ended: false, streams: false, acknowledged: false };
    (StreamWriter { shared }, reader)
}

/// The engine's end. Dropping it without an end says that the engine broke.
pub(crate) struct StreamWriter {
    shared: Arc<Shared>,
}

impl StreamWriter {
    /// Appends text of one answer, joined to the last unread event where that is text of the same answer.
    pub fn text(&self, choice: u16, text: String, tokens: Vec<DeliveredToken>) -> Pushed {
        let size = text_bytes(&text, &tokens);
        let now = self.shared.clock.now();
        let mut buffer = self.shared.lock();
        if buffer.abandoned {
            return Pushed::Abandoned;
        }
        if buffer.overflowed || buffer.ended {
            return Pushed::Dropped;
        }
        let joins =
            matches!(buffer.events.back(), Some((_, RequestEvent::Text { choice: last, .. })) if *last == choice);
        let late = buffer.events.front().is_some_and(|(since, _)| now.since(*since) > self.shared.send_timeout);
        if late
            || buffer.bytes.saturating_add(size) > self.shared.bytes_max
            || (!joins && buffer.events.len() >= self.shared.events_max)
        {
            buffer.overflowed = true;
            return Pushed::Overflowed;
        }
        match buffer.events.back_mut() {
            Some((_, RequestEvent::Text { text: unread, tokens: unread_tokens, .. })) if joins => {
                unread.push_str(&text);
                unread_tokens.extend(tokens);
                self.shared.grow(&mut buffer, size);
            }
            _ => self.shared.append(&mut buffer, RequestEvent::Text { choice, text, tokens }, now),
        }
        self.shared.publish(buffer);
        Pushed::Taken
    }

    /// Appends news without text. At the bound it is left out: nothing depends on it.
    pub fn news(&self, event: RequestEvent) {
        let mut buffer = self.shared.lock();
        if !buffer.overflowed && !buffer.ended && buffer.events.len() < self.shared.events_max {
            self.shared.append(&mut buffer, event, self.shared.clock.now());
            self.shared.publish(buffer);
        }
    }

    /// Says that one answer is complete. At most once an answer; always fits.
    pub fn choice_ended(&self, choice: u16, outcome: Outcome, tokens: u32) {
        let mut buffer = self.shared.lock();
        if !buffer.ended {
            self.shared.append(
                &mut buffer,
                RequestEvent::ChoiceEnded { choice, outcome, tokens },
                self.shared.clock.now(),
            );
            self.shared.publish(buffer);
        }
    }

    /// Tokens that were in the stream, unread, when its reader left before the end. They count as not delivered.
    pub fn left_unread(&self) -> u32 {
        self.shared.lock().left_unread
    }

    /// The reader's cancel that the gateway could not be told of. Handed over once.
    pub fn take_owed_cancel(&self) -> Option<CancelCause> {
        self.shared.lock().owes_cancel.take()
    }

    /// Ends the stream. Always fits.
    pub fn end(self, outcome: Outcome, usage: Usage, retry_after_ms: u32) {
        self.shared.end(outcome, usage, retry_after_ms);
    }
}

impl Drop for StreamWriter {
    fn drop(&mut self) {
        // A no-op after a proper end: the first end stands.
        self.shared.end(Outcome::Failed(Failure::Internal), Usage::default(), 0);
    }
}

impl Shared {
    fn append(&self, buffer: &mut Buffer, event: RequestEvent, now: Instant) {
        if buffer.abandoned {
            return;
        }
        let size = event_bytes(&event);
        buffer.events.push_back((now, event));
        self.grow(buffer, size);
    }

    fn grow(&self, buffer: &mut Buffer, bytes: usize) {
        buffer.bytes += bytes;
        self.total_bytes.fetch_add(bytes as i64, Ordering::Relaxed);
    }

    /// Lets the lock go and wakes the reader.
    fn publish(&self, mut buffer: MutexGuard<'_, Buffer>) {
        let waker = buffer.waker.take();
        drop(buffer);
        if let Some(waker) = waker {
            waker.wake();
        }
        self.readable.notify_one();
    }

    fn end(&self, outcome: Outcome, usage: Usage, retry_after_ms: u32) {
        let mut buffer = self.lock();
        if !buffer.ended {
            self.append(&mut buffer, RequestEvent::Ended { outcome, usage, retry_after_ms }, self.clock.now());
            buffer.ended = true;
            self.publish(buffer);
        }
    }

    fn take(&self, buffer: &mut Buffer) -> Option<RequestEvent> {
        let (_, event) = buffer.events.pop_front()?;
        // Sizes add up over joins, and an event's size is the sum of its parts.
        let size = event_bytes(&event);
        buffer.bytes -= size;
        self.total_bytes.fetch_sub(size as i64, Ordering::Relaxed);
        Some(event)
    }

    fn lock(&self) -> MutexGuard<'_, Buffer> {
        self.buffer.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// No event came in time.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("no event within the time given")]
pub struct RecvTimeout;

/// The client's end of a request: its events in order, [`RequestEvent::Ended`] last and exactly once.
///
/// Dropping it before the end cancels the request; its work stops within one step, and tokens that lay here unread are not billed.
pub struct EventStream {
    shared: Arc<Shared>,
    client: Arc<dyn ClientSide>,
    /// [`RequestEvent::Ended`] was taken.
    ended: bool,
    /// The first byte was written.
    streams: bool,
    /// The terminal event was written.
    acknowledged: bool,
}

impl EventStream {
    /// Which request this is.
    pub fn request(&self) -> RequestId {
        self.shared.request
    }

    /// The next event; none after the end. Works under any async runtime; dropping the future loses nothing.
    pub async fn recv(&mut self) -> Option<RequestEvent> {
        std::future::poll_fn(|context| self.poll_recv(context)).await
    }

    /// The next event, for hand-written futures and streams.
    pub fn poll_recv(&mut self, context: &mut Context<'_>) -> Poll<Option<RequestEvent>> {
        if self.ended {
            return Poll::Ready(None);
        }
        let mut buffer = self.shared.lock();
        match self.shared.take(&mut buffer) {
            Some(event) => {
                drop(buffer);
                Poll::Ready(Some(self.taken(event)))
            }
            None => {
                buffer.waker = Some(context.waker().clone());
                Poll::Pending
            }
        }
    }

    /// The next event if one is there.
    pub fn try_recv(&mut self) -> Option<RequestEvent> {
        let event = self.shared.take(&mut self.shared.lock())?;
        Some(self.taken(event))
    }

    /// The next event, blocking the thread; none after the end.
    pub fn recv_timeout(&mut self, timeout: std::time::Duration) -> Result<Option<RequestEvent>, RecvTimeout> {
        if self.ended {
            return Ok(None);
        }
        let deadline = std::time::Instant::now() + timeout;
        let mut buffer = self.shared.lock();
        let event = loop {
            if let Some(event) = self.shared.take(&mut buffer) {
                break event;
            }
            let left = deadline.saturating_duration_since(std::time::Instant::now());
            if left.is_zero() {
                return Err(RecvTimeout);
            }
            buffer = self.shared.readable.wait_timeout(buffer, left).unwrap_or_else(PoisonError::into_inner).0;
        };
        drop(buffer);
        Ok(Some(self.taken(event)))
    }

    /// Says that the first byte of the answer was written to the client. Idempotent.
    pub fn streaming(&mut self) {
        if std::mem::replace(&mut self.streams, true) {
            return;
        }
        self.client.delivery(self.shared.request, DeliveryEvent::Streaming);
    }

    /// Says that the terminal event was written to the client. Idempotent.
    pub fn acknowledge(&mut self) {
        if !std::mem::replace(&mut self.acknowledged, true) {
            self.client.delivery(self.shared.request, DeliveryEvent::Acknowledged);
        }
    }

    /// Ends the request early for a reason other than the client's leaving; the stream still ends with its typed end.
    pub fn cancel(&self, cause: CancelCause) {
        if !self.client.cancel(self.shared.request, cause) {
            // The writing end tells it when it has the next text.
            self.shared.lock().owes_cancel.get_or_insert(cause);
        }
    }

    fn taken(&mut self, event: RequestEvent) -> RequestEvent {
        self.ended |= matches!(event, RequestEvent::Ended { .. });
        event
    }
}

impl std::fmt::Debug for EventStream {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("EventStream")
            .field("request", &self.shared.request)
            .field("ended", &self.ended)
            .finish_non_exhaustive()
    }
}

impl Drop for EventStream {
    fn drop(&mut self) {
        let over = {
            let mut buffer = self.shared.lock();
            self.shared.total_bytes.fetch_sub(buffer.bytes as i64, Ordering::Relaxed);
            buffer.bytes = 0;
            let unread = std::mem::take(&mut buffer.events);
            buffer.abandoned = true;
            if !buffer.ended {
                buffer.left_unread = unread.iter().map(|(_, event)| tokens_of(event)).sum();
            }
            buffer.ended
        };
        if !self.acknowledged {
            self.client.delivery(self.shared.request, DeliveryEvent::Disconnected);
        }
        if !over {
            self.cancel(CancelCause::Client);
        }
    }
}

/// Tokens that an event brings.
fn tokens_of(event: &RequestEvent) -> u32 {
    match event {
        RequestEvent::Text { tokens, .. } => u32::try_from(tokens.len()).unwrap_or(u32::MAX),
        _ => 0,
    }
}

/// Bytes of an event without text or tokens; what the queue entry itself takes.
const EVENT_BYTES: usize = size_of::<RequestEvent>();
/// Bytes of a token without its own bytes and candidates.
const TOKEN_BYTES: usize = size_of::<DeliveredToken>();
/// Bytes of a candidate without its own bytes.
const CANDIDATE_BYTES: usize = size_of::<(u32, Vec<u8>, f32)>();

fn event_bytes(event: &RequestEvent) -> usize {
    match event {
        RequestEvent::Text { text, tokens, .. } => EVENT_BYTES + text_bytes(text, tokens),
        _ => EVENT_BYTES,
    }
}

fn text_bytes(text: &str, tokens: &[DeliveredToken]) -> usize {
    let token = |token: &DeliveredToken| {
        let candidates: usize = token.top.iter().map(|(_, bytes, _)| CANDIDATE_BYTES + bytes.len()).sum();
        TOKEN_BYTES + token.bytes.len() + candidates
    };
    text.len() + tokens.iter().map(token).sum::<usize>()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::permit::Permits;
    use penstock_base::Duration;
    use std::time::Duration as StdDuration;

    #[derive(Default)]
    struct Told(Mutex<Vec<String>>, std::sync::atomic::AtomicBool);

    impl ClientSide for Told {
        fn cancel(&self, _: RequestId, cause: CancelCause) -> bool {
            self.0.lock().unwrap().push(format!("cancel {cause:?}"));
            !self.1.load(Ordering::Relaxed)
        }
        fn delivery(&self, _: RequestId, event: DeliveryEvent) {
            self.0.lock().unwrap().push(format!("{event:?}"));
        }
    }

    struct Rig {
        permits: Arc<Permits>,
        told: Arc<Told>,
        total: Arc<AtomicI64>,
    }

    fn rig(limits: EngineLimits) -> (Rig, StreamWriter, EventStream) {
        let rig = Rig { permits: Permits::new(4, 100), told: Arc::default(), total: Arc::default() };
        let permit = rig.permits.take(1).unwrap();
        let (writer, reader) = stream(
            RequestId(7),
            permit,
            &limits,
            Clock::starting_now(),
            Arc::clone(&rig.total),
            Arc::clone(&rig.told) as Arc<dyn ClientSide>,
        );
        (rig, writer, reader)
    }

    fn token(id: u32) -> DeliveredToken {
        DeliveredToken { id, bytes: vec![b'x'; 3], logprob: 0.0, top: vec![(1, vec![1, 2], -1.0)] }
    }

    fn texts(reader: &mut EventStream) -> (String, Vec<Outcome>) {
        let (mut all, mut ends) = (String::new(), Vec::new());
        while let Ok(Some(event)) = reader.recv_timeout(StdDuration::from_millis(0)) {
            match event {
                RequestEvent::Text { text, .. } => all.push_str(&text),
                RequestEvent::Ended { outcome, .. } => ends.push(outcome),
                _ => {}
            }
        }
        (all, ends)
    }

    #[test]
    fn unread_text_of_one_answer_is_joined_and_of_two_is_not() {
        let (rig, writer, mut reader) = rig(EngineLimits::default());
        writer.text(0, "a".into(), vec![token(1)]);
        writer.text(0, "b".into(), vec![token(2)]);
        writer.text(1, "c".into(), vec![]);
        assert!(
            matches!(reader.try_recv(), Some(RequestEvent::Text { text, tokens, .. }) if text == "ab" && tokens.len() == 2)
        );
        assert!(matches!(reader.try_recv(), Some(RequestEvent::Text { choice: 1, .. })));
        assert_eq!(rig.total.load(Ordering::Relaxed), 0, "read bytes are no longer buffered");
        writer.end(Outcome::Stop, Usage::default(), 0);
        assert_eq!(texts(&mut reader), (String::new(), vec![Outcome::Stop]));
        assert!(reader.recv_timeout(StdDuration::ZERO).unwrap().is_none());
        reader.acknowledge();
        drop(reader);
        assert_eq!(*rig.told.0.lock().unwrap(), ["Acknowledged"]);
        assert_eq!(rig.permits.held().requests, 0);
    }

    #[test]
    fn at_the_bound_text_stops_without_a_gap_and_the_end_still_fits() {
        let limits = EngineLimits { stream_bytes_max: 2 * EVENT_BYTES + 10, ..EngineLimits::default() };
        let (_rig, writer, mut reader) = rig(limits);
        assert_eq!(writer.text(0, "12345".into(), vec![]), Pushed::Taken);
        let long = "x".repeat(2 * EVENT_BYTES + 10);
        assert_eq!(writer.text(0, long, vec![]), Pushed::Overflowed);
        assert_eq!(writer.text(0, "6".into(), vec![]), Pushed::Dropped);
        writer.end(Outcome::Cancelled(CancelCause::SlowClient), Usage::default(), 0);
        assert_eq!(texts(&mut reader), ("12345".into(), vec![Outcome::Cancelled(CancelCause::SlowClient)]));
    }

    #[test]
    fn the_bound_on_events_and_the_send_timeout_bite_as_well() {
        let (_rig, writer, _reader) = rig(EngineLimits { stream_events_max: 2, ..EngineLimits::default() });
        assert_eq!(writer.text(0, "a".into(), vec![]), Pushed::Taken);
        assert_eq!(writer.text(1, "b".into(), vec![]), Pushed::Taken);
        assert_eq!(writer.text(0, "c".into(), vec![]), Pushed::Overflowed);

        let (_rig, writer, _reader) = rig(EngineLimits { send_timeout: Duration::ZERO, ..EngineLimits::default() });
        assert_eq!(writer.text(0, "a".into(), vec![]), Pushed::Taken);
        while writer.shared.clock.now() == writer.shared.lock().events[0].0 {}
        assert_eq!(writer.text(0, "b".into(), vec![]), Pushed::Overflowed);
    }

    #[test]
    fn a_reader_that_leaves_cancels_and_its_bytes_are_forgotten() {
        let (rig, writer, reader) = rig(EngineLimits::default());
        writer.text(0, "a".into(), vec![token(1)]);
        drop(reader);
        assert_eq!(*rig.told.0.lock().unwrap(), ["Disconnected", "cancel Client"]);
        assert_eq!(rig.total.load(Ordering::Relaxed), 0);
        assert_eq!(writer.text(0, "b".into(), vec![]), Pushed::Abandoned);
        assert_eq!(rig.permits.held().requests, 1, "the engine still works on it");
        drop(writer);
        assert_eq!(rig.permits.held().requests, 0);
        assert_eq!(rig.total.load(Ordering::Relaxed), 0);
    }

    #[test]
    fn tokens_that_lie_unread_when_the_reader_leaves_are_counted_and_read_ones_are_not() {
        let (_rig, writer, mut reader) = rig(EngineLimits::default());
        writer.text(0, "ab".into(), vec![token(1), token(2)]);
        assert!(matches!(reader.try_recv(), Some(RequestEvent::Text { .. })));
        writer.text(0, "cde".into(), vec![token(3), token(4), token(5)]);
        writer.text(1, "f".into(), vec![token(6)]);
        assert_eq!(writer.left_unread(), 0, "it may still read them");
        drop(reader);
        assert_eq!(writer.left_unread(), 4);

        let (_rig, writer, reader) = rig(EngineLimits::default());
        writer.text(0, "a".into(), vec![token(1)]);
        let shared = Arc::clone(&writer.shared);
        writer.end(Outcome::Stop, Usage::default(), 0);
        drop(reader);
        assert_eq!(shared.lock().left_unread, 0, "the end had said what counts");
    }

    #[test]
    fn a_cancel_that_found_no_room_is_left_to_the_writer_once() {
        let (rig, writer, reader) = rig(EngineLimits::default());
        rig.told.1.store(true, Ordering::Relaxed);
        reader.cancel(CancelCause::SlowClient);
        drop(reader);
        assert_eq!(writer.take_owed_cancel(), Some(CancelCause::SlowClient), "the first one");
        assert_eq!(writer.take_owed_cancel(), None);
        let (_rig, writer, reader) = self::rig(EngineLimits::default());
        drop(reader);
        assert_eq!(writer.take_owed_cancel(), None, "the gateway knows");
    }

    #[test]
    fn the_oldest_unread_event_has_its_own_age_whatever_is_read_before_it() {
        let (_rig, writer, mut reader) = rig(EngineLimits::default());
        writer.text(0, "a".into(), vec![]);
        writer.text(1, "b".into(), vec![]);
        let second = writer.shared.lock().events[1].0;
        while writer.shared.clock.now() == second {}
        assert!(reader.try_recv().is_some());
        assert_eq!(writer.shared.lock().events[0].0, second, "reading the first does not make the second younger");
        writer.text(1, "c".into(), vec![]);
        let buffer = writer.shared.lock();
        assert_eq!((buffer.events.len(), buffer.events[0].0), (1, second), "nor does text that joins it");
    }

    #[test]
    fn a_writer_that_vanishes_is_an_internal_failure() {
        let (_rig, writer, mut reader) = rig(EngineLimits::default());
        drop(writer);
        assert_eq!(texts(&mut reader).1, [Outcome::Failed(Failure::Internal)]);
    }
}
