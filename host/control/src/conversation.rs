//! A session with its connections: what the layer above holds, and how packets of one connection reach it.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use bytes::Bytes;
use tokio::sync::{Notify, mpsc};
use tonic::Streaming;

use crate::Limits;
use crate::limits::BEATS_WAITING_MAX;
use crate::session::{ConnectionId, Effect, End, Ended, Frame, NotSent, Session};
use crate::wire::Packet;

/// One session with a peer: its messages, in order, until it is over.
#[derive(Debug)]
pub struct Conversation {
    peer: End,
    greeting: Bytes,
    link: Link,
    inbox: mpsc::Receiver<Bytes>,
}

impl Conversation {
    /// Who is at the other end.
    pub fn peer(&self) -> End {
        self.peer
    }

    /// What it said of itself.
    pub fn greeting(&self) -> &Bytes {
        &self.greeting
    }

    /// The way to send. Any thread may have one.
    pub fn link(&self) -> Link {
        self.link.clone()
    }

    /// The next message; none once the session is over and all that came before has been read. [`Link::ended`] then says why.
    pub async fn receive(&mut self) -> Option<Bytes> {
        self.inbox.recv().await
    }

    /// The same for a thread of its own.
    pub fn receive_blocking(&mut self) -> Option<Bytes> {
        self.inbox.blocking_recv()
    }
}

impl Drop for Conversation {
    fn drop(&mut self) {
        self.link.close();
    }
}

/// The sending side of a [`Conversation`].
#[derive(Clone, Debug)]
pub struct Link {
    shared: Arc<Shared>,
}

impl Link {
    /// Hands in one message. Never waits: without a connection it is kept for the next one.
    ///
    /// # Errors
    /// [`NotSent`]: at a limit, which is back-pressure, or when the session is over.
    pub fn send(&self, body: Bytes) -> Result<(), NotSent> {
        let mut inner = self.shared.lock();
        let mut effects = Vec::new();
        let sent = inner.session.send(Instant::now(), body, &mut effects);
        self.shared.carry_out(&mut inner, effects, None);
        sent
    }

    /// Why the session is over, once it is.
    pub fn ended(&self) -> Option<Ended> {
        self.shared.lock().ended
    }

    /// Is there a connection at the moment?
    pub fn is_attached(&self) -> bool {
        self.shared.lock().session.is_attached()
    }

    /// Messages that the other end has not confirmed.
    pub fn unconfirmed(&self) -> usize {
        self.shared.lock().session.unconfirmed()
    }

    /// Ends the session; the other end is told if there is a connection.
    pub fn close(&self) {
        self.shared.end(Ended::Closed);
    }
}

/// What the tasks of one session share.
#[derive(Debug)]
pub(crate) struct Shared {
    inner: Mutex<Inner>,
    /// Told when a connection came or went, or the session ended.
    changed: Notify,
    limits: Limits,
}

#[derive(Debug)]
struct Inner {
    session: Session,
    connection: Option<Connection>,
    /// Taken away at the session's end, so that the reader sees it.
    inbox: Option<mpsc::Sender<Bytes>>,
    ended: Option<Ended>,
}

/// The writing side of the connection in use.
#[derive(Debug)]
struct Connection {
    id: ConnectionId,
    out: mpsc::Sender<Packet>,
    /// Tells its reader to stop.
    closing: Arc<Notify>,
}

/// A connection as its task holds it.
pub(crate) struct Attached {
    pub id: ConnectionId,
    pub closing: Arc<Notify>,
}

impl Shared {
    /// A session without a connection, and what the layer above gets of it. Must be called inside a tokio runtime.
    pub fn start(limits: Limits) -> (Arc<Self>, mpsc::Receiver<Bytes>) {
        let (inbox, receiver) = mpsc::channel(limits.messages_max.max(1));
        let session = Session::new(limits, Instant::now());
        let inner = Mutex::new(Inner { session, connection: None, inbox: Some(inbox), ended: None });
        let shared = Arc::new(Self { inner, changed: Notify::new(), limits });
        tokio::spawn(Arc::clone(&shared).keep_time());
        (shared, receiver)
    }

    pub fn conversation(self: &Arc<Self>, peer: End, greeting: Bytes, inbox: mpsc::Receiver<Bytes>) -> Conversation {
        Conversation { peer, greeting, link: Link { shared: Arc::clone(self) }, inbox }
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        // Nothing here can panic half way through a change.
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn received(&self) -> u64 {
        self.lock().session.received()
    }

    pub fn is_over(&self) -> bool {
        self.lock().session.is_over()
    }

    /// Ends the session at this end.
    pub fn end(&self, why: Ended) {
        let mut inner = self.lock();
        let mut effects = Vec::new();
        inner.session.close(why, &mut effects);
        self.carry_out(&mut inner, effects, None);
    }

    /// Room for all that may wait for one connection.
    pub fn channel(&self) -> (mpsc::Sender<Packet>, mpsc::Receiver<Packet>) {
        mpsc::channel(self.limits.messages_max + BEATS_WAITING_MAX)
    }

    /// A connection is up whose other end has received up to `received`. None when a later one, or the end, was first.
    pub fn attach(&self, id: ConnectionId, out: mpsc::Sender<Packet>, received: u64) -> Option<Attached> {
        let mut inner = self.lock();
        let closing = Arc::new(Notify::new());
        let before = inner.connection.replace(Connection { id, out, closing: Arc::clone(&closing) });
        let mut effects = Vec::new();
        inner.session.attach(Instant::now(), id, received, &mut effects);
        let is_refused = matches!(effects.first(), Some(Effect::Close(refused)) if *refused == id);
        if is_refused {
            inner.connection = before;
        } else if let Some(before) = before {
            before.closing.notify_one();
        }
        self.carry_out(&mut inner, effects, None);
        drop(inner);
        self.changed.notify_one();
        (!is_refused).then_some(Attached { id, closing })
    }

    /// Reads one connection until it, or the session, is over.
    pub async fn pump(&self, attached: Attached, mut packets: Streaming<Packet>) {
        let Attached { id, closing } = attached;
        loop {
            let Some(inbox) = self.lock().inbox.clone() else { return };
            // One packet is one message at most, and is read only when there is room for it: a reader that is slow slows the other end.
            let room = loop {
                tokio::select! {
                    room = inbox.clone().reserve_owned() => match room {
                        Ok(room) => break room,
                        Err(_) => return self.end(Ended::Closed),
                    },
                    () = tokio::time::sleep(self.limits.beat) => self.lock().session.hold(Instant::now()),
                    () = closing.notified() => return,
                }
            };
            drop(inbox);
            let packet = tokio::select! {
                packet = packets.message() => packet,
                () = closing.notified() => return,
            };
            let mut inner = self.lock();
            let now = Instant::now();
            let frame = match packet {
                Ok(Some(packet)) => packet.into_frame(),
                Ok(None) | Err(_) => {
                    inner.session.detach(now, id);
                    inner.connection.take_if(|connection| connection.id == id);
                    drop(inner);
                    return self.changed.notify_one();
                }
            };
            let mut effects = Vec::new();
            match frame {
                Some(frame) => inner.session.frame(now, id, frame, &mut effects),
                None => inner.session.close(Ended::Protocol("a word out of place"), &mut effects),
            }
            self.carry_out(&mut inner, effects, Some(room));
        }
    }

    async fn keep_time(self: Arc<Self>) {
        loop {
            let Some(at) = self.lock().session.next_tick() else { return };
            tokio::select! {
                () = tokio::time::sleep_until(at.into()) => {}
                () = self.changed.notified() => {}
            }
            let mut inner = self.lock();
            let mut effects = Vec::new();
            inner.session.tick(Instant::now(), &mut effects);
            self.carry_out(&mut inner, effects, None);
        }
    }

    /// Waits until there is no connection. False when the session is over.
    pub async fn detached(&self) -> bool {
        loop {
            {
                let inner = self.lock();
                if inner.session.is_over() {
                    return false;
                }
                if inner.connection.is_none() {
                    return true;
                }
            }
            tokio::time::sleep(self.limits.beat / 8).await;
        }
    }

    fn carry_out(&self, inner: &mut Inner, effects: Vec<Effect>, mut room: Option<mpsc::OwnedPermit<Bytes>>) {
        for effect in effects {
            match effect {
                Effect::Write(id, frame) => self.write(inner, id, frame),
                Effect::Deliver(body) => {
                    // The session delivers at most one message a frame.
                    if let Some(room) = room.take() {
                        room.send(body);
                    }
                }
                Effect::Close(id) => {
                    if let Some(connection) = inner.connection.take_if(|connection| connection.id == id) {
                        connection.closing.notify_one();
                    }
                }
                Effect::Ended(why) => {
                    inner.ended = Some(why);
                    inner.inbox = None;
                    self.changed.notify_one();
                }
            }
        }
    }

    fn write(&self, inner: &mut Inner, id: ConnectionId, frame: Frame) {
        let Some(connection) = inner.connection.as_ref().filter(|connection| connection.id == id) else { return };
        if connection.out.try_send(Packet::of_frame(frame)).is_err() {
            // Its task has ended, or nothing has moved for long: another connection is to carry on.
            connection.closing.notify_one();
            inner.connection = None;
            inner.session.detach(Instant::now(), id);
            self.changed.notify_one();
        }
    }
}
