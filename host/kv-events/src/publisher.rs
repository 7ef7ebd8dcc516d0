//! How does a worker tell what it caches? A PUB socket for what happens, and a ROUTER socket for what was missed.
//!
//! The engine's thread only encodes a batch and puts it into queues. A subscriber that reads too slowly has a full queue and misses
//! batches, which the sequence numbers show it; the engine is never held up.

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use bytes::Bytes;
use tokio::io::AsyncWriteExt as _;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Notify;
use tokio::task::JoinHandle;

use crate::batch::{Batch, KvEvent};
use crate::error::{KvEventsError, PeerFault};
use crate::index::Index;
use crate::limits::{
    BUFFER_BATCHES_MAX, BUFFER_BYTES_MAX, EVENTS_MAX, HASHES_MAX, INDEX_BLOCKS_MAX, PAYLOAD_BYTES_MAX,
    QUEUE_BATCHES_MAX, QUEUE_BYTES_MAX, REPLAYS_MAX, STALL_MAX, SUBSCRIBERS_MAX, TOPIC_BYTES_MAX, TOPICS_MAX,
    UNSEEN_BATCHES_MAX,
};
use crate::msgpack::Writer;
use crate::zmtp::{Inbound, Kind, encode, in_time, shake_hands};

/// What a consumer of ours asks for instead of a number: as long as one, so that vLLM takes it for one that it has never reached, and sends
/// nothing but the end.
pub(crate) const SNAPSHOT_WANTED: &[u8; 8] = b"snapshot";
/// Topic of a snapshot's first message.
pub(crate) const SNAPSHOT: &[u8] = b"penstock-snapshot-1";
/// Number of the message that ends a replay: -1.
pub(crate) const END: [u8; 8] = [0xff; 8];

/// Where a publisher listens and what it tells.
#[derive(Clone, Debug)]
pub struct PublisherSettings {
    /// Where subscribers connect. Port 0 takes any.
    pub publish: SocketAddr,
    /// Where they ask for what they missed.
    pub replay: Option<SocketAddr>,
    /// Whether addresses that other hosts can reach are allowed.
    pub expose: bool,
    /// First frame of each message.
    pub topic: String,
    /// Data-parallel rank, told with each batch.
    pub rank: Option<u32>,
    /// Life of the worker, told with snapshots. See [`Publisher::renew`].
    pub epoch: u64,
    /// Whether the tokens of blocks are told. They are the prompts.
    pub with_tokens: bool,
    /// Batches kept for replay, at most [`BUFFER_BATCHES_MAX`].
    pub buffer_batches: usize,
    /// Batches that wait for one subscriber, at most [`QUEUE_BATCHES_MAX`].
    pub queue_batches: usize,
    /// Blocks that a snapshot may have; beyond it none is given.
    pub blocks_max: usize,
}

impl Default for PublisherSettings {
    fn default() -> Self {
        Self {
            publish: SocketAddr::from(([127, 0, 0, 1], 5557)),
            replay: None,
            expose: false,
            topic: String::new(),
            rank: None,
            epoch: 0,
            with_tokens: false,
            buffer_batches: BUFFER_BATCHES_MAX,
            queue_batches: QUEUE_BATCHES_MAX,
            blocks_max: INDEX_BLOCKS_MAX,
        }
    }
}

impl PublisherSettings {
    /// # Errors
    /// The first setting that cannot be used.
    pub fn check(&self) -> Result<(), KvEventsError> {
        for address in [Some(self.publish), self.replay].into_iter().flatten() {
            if !self.expose && !address.ip().is_loopback() {
                return Err(KvEventsError::Exposed { address });
            }
        }
        let within = |key, value: usize, max: usize| {
            let why = format!("{value} is not between 1 and {max}");
            if (1..=max).contains(&value) { Ok(()) } else { Err(KvEventsError::Setting { key, why }) }
        };
        within("kv_events.buffer_batches", self.buffer_batches, BUFFER_BATCHES_MAX)?;
        within("kv_events.queue_batches", self.queue_batches, QUEUE_BATCHES_MAX)?;
        within("kv_events.blocks_max", self.blocks_max, INDEX_BLOCKS_MAX)?;
        if self.topic.as_bytes() == SNAPSHOT {
            let why = "is the one that begins a snapshot; take another".to_owned();
            return Err(KvEventsError::Setting { key: "kv_events.topic", why });
        }
        if self.topic.len() > TOPIC_BYTES_MAX {
            let why = format!("has {} bytes, and {TOPIC_BYTES_MAX} are allowed", self.topic.len());
            return Err(KvEventsError::Setting { key: "kv_events.topic", why });
        }
        Ok(())
    }
}

/// What has happened since the start.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct PublisherCounts {
    /// Batches published.
    pub published: u64,
    /// Messages that a slow subscriber missed.
    pub dropped: u64,
    /// Subscribers now.
    pub subscribers: usize,
    /// Connections turned away because there are too many.
    pub turned_away: u64,
    /// Replays answered.
    pub replays: u64,
    /// Snapshots answered.
    pub snapshots: u64,
}

/// A batch on its way.
struct Sent {
    seq: u64,
    payload: Bytes,
    /// The whole message as bytes of the wire.
    wire: Bytes,
}

/// Batches that wait, bounded in number and bytes.
#[derive(Default)]
struct Waiting {
    batches: VecDeque<Arc<Sent>>,
    bytes: usize,
}

impl Waiting {
    fn push(&mut self, sent: Arc<Sent>) {
        self.bytes += sent.wire.len();
        self.batches.push_back(sent);
    }

    fn pop(&mut self) -> Option<Arc<Sent>> {
        let sent = self.batches.pop_front()?;
        self.bytes -= sent.wire.len();
        Some(sent)
    }

    fn has_room(&self, sent: &Sent, batches_max: usize, bytes_max: usize) -> bool {
        self.batches.len() < batches_max && self.bytes + sent.wire.len() <= bytes_max
    }
}

struct Subscriber {
    id: u64,
    topics: Vec<Bytes>,
    waiting: Waiting,
    ready: Arc<Notify>,
}

struct Hub {
    settings: PublisherSettings,
    state: Mutex<State>,
    /// Own account of what is cached, for snapshots. The engine's thread keeps it where nobody else looks at it just then, and never waits.
    mirror: Mutex<Mirror>,
}

#[derive(Default)]
struct State {
    next: u64,
    epoch: u64,
    buffer: Waiting,
    /// Batches that the mirror has not seen: while a snapshot is copied.
    unseen: Vec<Batch>,
    has_lost_unseen: bool,
    subscribers: Vec<Subscriber>,
    connections: u64,
    counts: PublisherCounts,
}

struct Mirror {
    index: Index,
    next: u64,
    /// It has missed nothing since the cache was empty.
    is_whole: bool,
}

/// Tells subscribers what a worker caches. Dropping it closes all connections.
pub struct Publisher {
    hub: Arc<Hub>,
    publish: SocketAddr,
    replay: Option<SocketAddr>,
    tasks: Vec<JoinHandle<()>>,
}

impl Drop for Publisher {
    fn drop(&mut self) {
        self.tasks.iter().for_each(JoinHandle::abort);
    }
}

impl Publisher {
    /// Listens. Needs a running Tokio runtime; [`Publisher::publish`] does not.
    ///
    /// # Errors
    /// [`KvEventsError`] when a setting or an address cannot be used.
    pub async fn bind(settings: PublisherSettings) -> Result<Self, KvEventsError> {
        settings.check()?;
        let listen = async |address: SocketAddr| {
            let fault = |why| KvEventsError::Bind { address, why };
            let listener = TcpListener::bind(address).await.map_err(fault)?;
            let address = listener.local_addr().map_err(fault)?;
            Ok::<_, KvEventsError>((listener, address))
        };
        let (publish, publish_at) = listen(settings.publish).await?;
        let replay = match settings.replay {
            Some(address) => Some(listen(address).await?),
            None => None,
        };
        let mirror = Mirror { index: Index::new(settings.blocks_max), next: 0, is_whole: true };
        let state = State { epoch: settings.epoch, ..State::default() };
        let hub = Arc::new(Hub { settings, state: Mutex::new(state), mirror: Mutex::new(mirror) });
        let mut tasks = vec![tokio::spawn(accept(publish, Arc::clone(&hub), Kind::Pub))];
        let replay_at = replay.as_ref().map(|(_, address)| *address);
        if let Some((listener, _)) = replay {
            tasks.push(tokio::spawn(accept(listener, Arc::clone(&hub), Kind::Router)));
        }
        Ok(Self { hub, publish: publish_at, replay: replay_at, tasks })
    }

    /// Where subscribers connect.
    #[must_use]
    pub fn publish_address(&self) -> SocketAddr {
        self.publish
    }

    /// Where they ask again.
    #[must_use]
    pub fn replay_address(&self) -> Option<SocketAddr> {
        self.replay
    }

    /// Tells what has happened, in one batch with the time `ts` (seconds since 1970), and gives its number. Never waits for a peer. Tokens
    /// are left out unless they are to be told. Events too large for one batch are told as a cleared cache, which is true of what
    /// consumers know from then on.
    pub fn publish(&self, ts: f64, mut events: Vec<KvEvent>) -> u64 {
        if !self.hub.settings.with_tokens {
            for event in &mut events {
                if let KvEvent::Stored(stored) = event {
                    stored.token_ids = Vec::new();
                    // What went into the hash beside tokens can be a user's content as well.
                    stored.raw.extra_keys = Vec::new();
                }
            }
        }
        let blocks = |event: &KvEvent| match event {
            KvEvent::Stored(stored) => stored.block_hashes.len(),
            KvEvent::Removed(removed) => removed.block_hashes.len(),
            KvEvent::Cleared => 0,
        };
        if events.len() > EVENTS_MAX || events.iter().map(blocks).sum::<usize>() > HASHES_MAX {
            events = vec![KvEvent::Cleared];
        }
        let rank = self.hub.settings.rank;
        let mut batch = Batch { ts, events, rank, unknown: 0 };
        let mut payload = batch.encode();
        if payload.len() > PAYLOAD_BYTES_MAX {
            batch.events = vec![KvEvent::Cleared];
            payload = batch.encode();
        }
        self.hub.publish(batch, &payload)
    }

    /// The worker lives anew: its cache is told as cleared, and snapshots name `epoch` from now on.
    pub fn renew(&self, ts: f64, epoch: u64) -> u64 {
        self.hub.lock().epoch = epoch;
        self.publish(ts, vec![KvEvent::Cleared])
    }

    /// This many batches were lost before they came here: consumers see their numbers missing, and get no snapshot until the cache is told
    /// as cleared, which whoever lost them does before it tells everything anew.
    pub fn lost(&self, batches: u64) {
        let mut state = self.hub.lock();
        state.next = state.next.saturating_add(batches);
        state.unseen = Vec::new();
        state.has_lost_unseen |= batches > 0;
    }

    /// What has happened.
    #[must_use]
    pub fn counts(&self) -> PublisherCounts {
        let state = self.hub.lock();
        PublisherCounts { subscribers: state.subscribers.len(), ..state.counts }
    }
}

impl Hub {
    fn lock(&self) -> MutexGuard<'_, State> {
        // Nothing between lock and unlock leaves the state half changed.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn publish(&self, batch: Batch, payload: &[u8]) -> u64 {
        let mut guard = self.lock();
        let state = &mut *guard;
        let seq = state.next;
        state.next += 1;
        state.counts.published += 1;
        let topic = self.settings.topic.as_bytes();
        let wire = encode(&[topic, &seq.to_be_bytes(), payload]);
        // The same memory: the payload is the message's end.
        let payload = wire.slice(wire.len() - payload.len()..);
        let sent = Arc::new(Sent { seq, payload, wire });
        while !state.buffer.has_room(&sent, self.settings.buffer_batches, BUFFER_BYTES_MAX) {
            if state.buffer.pop().is_none() {
                break;
            }
        }
        state.buffer.push(Arc::clone(&sent));
        for subscriber in &mut state.subscribers {
            if !subscriber.topics.iter().any(|prefix| topic.starts_with(prefix)) {
                continue;
            }
            if subscriber.waiting.has_room(&sent, self.settings.queue_batches, QUEUE_BYTES_MAX) {
                subscriber.waiting.push(Arc::clone(&sent));
                subscriber.ready.notify_one();
            } else {
                state.counts.dropped += 1;
            }
        }
        if self.settings.replay.is_some() {
            if state.unseen.len() < UNSEEN_BATCHES_MAX {
                state.unseen.push(batch);
            } else {
                state.unseen = Vec::new();
                state.has_lost_unseen = true;
            }
        }
        drop(guard);
        if let Ok(mut mirror) = self.mirror.try_lock() {
            self.reflect(&mut mirror);
        }
        seq
    }

    fn kept_from(&self, from: u64) -> Vec<Arc<Sent>> {
        let state = self.lock();
        let skip = state.buffer.batches.partition_point(|sent| sent.seq < from);
        state.buffer.batches.iter().skip(skip).cloned().collect()
    }

    /// Brings the mirror up to what has been published.
    fn reflect(&self, mirror: &mut Mirror) {
        let (unseen, has_lost, next) = {
            let mut state = self.lock();
            (std::mem::take(&mut state.unseen), std::mem::take(&mut state.has_lost_unseen), state.next)
        };
        mirror.is_whole &= !has_lost;
        mirror.next = next;
        for batch in unseen {
            mirror.is_whole |= batch.events.contains(&KvEvent::Cleared);
            mirror.index.apply(&batch);
        }
    }

    /// The messages of a snapshot; none when there is no true one.
    fn snapshot(&self) -> Option<Vec<Bytes>> {
        let (index, next, epoch) = {
            let mut mirror = self.mirror.lock().unwrap_or_else(PoisonError::into_inner);
            self.reflect(&mut mirror);
            if !mirror.is_whole || mirror.index.not_kept() > 0 {
                return None;
            }
            // Under the mirror's lock: the life that its content is of, or a later one, in which the content is told again.
            (mirror.index.clone(), mirror.next.to_be_bytes(), self.lock().epoch)
        };
        let batches = index.snapshot(0.0, self.settings.rank);
        let blocks = index.len();
        let mut head = Writer::default();
        head.map(3);
        head.text("epoch");
        head.uint(epoch);
        head.text("blocks");
        head.uint(blocks as u64);
        head.text("parts");
        head.uint(batches.len() as u64);
        let topic = self.settings.topic.as_bytes();
        let head = encode(&[b"", SNAPSHOT, &next, &head.bytes]);
        let parts = batches.iter().map(|batch| encode(&[b"", topic, &next, &batch.encode()]));
        Some(std::iter::once(head).chain(parts).collect())
    }
}

async fn accept(listener: TcpListener, hub: Arc<Hub>, kind: Kind) {
    let mut peers = tokio::task::JoinSet::new();
    loop {
        tokio::select! {
            accepted = listener.accept() => {
                // Out of descriptors, or the peer left in the queue: the next one may do better.
                let Ok((stream, _)) = accepted else {
                    tokio::time::sleep(std::time::Duration::from_millis(100)).await;
                    continue;
                };
                let limit = if kind == Kind::Pub { SUBSCRIBERS_MAX } else { REPLAYS_MAX };
                if peers.len() >= limit {
                    hub.lock().counts.turned_away += 1;
                    continue;
                }
                let hub = Arc::clone(&hub);
                // A peer that fails has gone; there is nobody to tell.
                peers.spawn(async move {
                    _ = match kind {
                        Kind::Pub => serve_subscriber(stream, hub).await,
                        _ => serve_replay(stream, hub).await,
                    };
                });
            }
            Some(_) = peers.join_next() => {}
        }
    }
}

/// Takes the subscriber out of the list, however its connection ends.
struct Seat {
    hub: Arc<Hub>,
    id: u64,
}

impl Drop for Seat {
    fn drop(&mut self) {
        self.hub.lock().subscribers.retain(|subscriber| subscriber.id != self.id);
    }
}

async fn serve_subscriber(stream: TcpStream, hub: Arc<Hub>) -> Result<(), PeerFault> {
    stream.set_nodelay(true)?;
    let (inbound, mut outbound) = stream.into_split();
    let mut inbound = Inbound::new(inbound);
    shake_hands(&mut inbound, &mut outbound, Kind::Pub).await?;
    let ready = Arc::new(Notify::new());
    let seat = {
        let mut state = hub.lock();
        state.connections += 1;
        let id = state.connections;
        let ready = Arc::clone(&ready);
        state.subscribers.push(Subscriber { id, topics: Vec::new(), waiting: Waiting::default(), ready });
        Seat { hub: Arc::clone(&hub), id }
    };
    let hear = async {
        loop {
            let message = inbound.message().await?;
            let [frame] = &message[..] else { return Err(PeerFault::Protocol("a subscription has one frame")) };
            let mut state = hub.lock();
            let Some(subscriber) = state.subscribers.iter_mut().find(|subscriber| subscriber.id == seat.id) else {
                return Err(PeerFault::Closed);
            };
            match frame.split_first() {
                Some((1, topic)) if topic.len() <= TOPIC_BYTES_MAX && subscriber.topics.len() < TOPICS_MAX => {
                    subscriber.topics.push(frame.slice(1..));
                }
                Some((0, topic)) => {
                    if let Some(place) = subscriber.topics.iter().position(|known| known == topic) {
                        subscriber.topics.remove(place);
                    }
                }
                _ => return Err(PeerFault::Protocol("no subscription, or one too many")),
            }
        }
    };
    let tell = async {
        loop {
            let next = {
                let mut state = hub.lock();
                let subscriber = state.subscribers.iter_mut().find(|subscriber| subscriber.id == seat.id);
                subscriber.and_then(|subscriber| subscriber.waiting.pop())
            };
            match next {
                Some(sent) => in_time(STALL_MAX, async { Ok(outbound.write_all(&sent.wire).await?) }).await?,
                None => ready.notified().await,
            }
        }
    };
    tokio::select! {
        ended = hear => ended,
        ended = tell => ended,
    }
}

async fn serve_replay(stream: TcpStream, hub: Arc<Hub>) -> Result<(), PeerFault> {
    stream.set_nodelay(true)?;
    let (inbound, mut outbound) = stream.into_split();
    let mut inbound = Inbound::new(inbound);
    shake_hands(&mut inbound, &mut outbound, Kind::Router).await?;
    loop {
        let question = in_time(STALL_MAX, inbound.message()).await?;
        // A DEALER may leave out the empty frame that a REQ socket sends.
        let question = question.last().cloned().unwrap_or_default();
        let mut answer = Vec::new();
        if question == SNAPSHOT_WANTED[..] {
            hub.lock().counts.snapshots += 1;
            answer = hub.snapshot().unwrap_or_default();
        } else if let Ok(from) = <[u8; 8]>::try_from(&question[..]) {
            hub.lock().counts.replays += 1;
            let topic = hub.settings.topic.as_bytes();
            for sent in hub.kept_from(u64::from_be_bytes(from)) {
                let wire = encode(&[b"", topic, &sent.seq.to_be_bytes(), &sent.payload]);
                in_time(STALL_MAX, async { Ok(outbound.write_all(&wire).await?) }).await?;
            }
        }
        answer.push(encode(&[b"", b"", &END, b""]));
        for wire in answer {
            in_time(STALL_MAX, async { Ok(outbound.write_all(&wire).await?) }).await?;
        }
    }
}
