//! How does a gateway know what a worker caches? One task a worker: listens, asks again for what it missed, and says whether it may be
//! believed.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use tokio::io::AsyncWriteExt as _;
use tokio::net::TcpStream;
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::sync::Notify;
use tokio::task::JoinHandle;
use tokio::time::{Instant, MissedTickBehavior, interval_at, sleep};

use crate::batch::BlockHash;
use crate::error::{KvEventsError, PeerFault};
use crate::index::{Change, Index};
use crate::limits::{ANSWER_MAX, INDEX_BLOCKS_MAX, PATIENCE, TOPIC_BYTES_MAX};
use crate::msgpack::{Reader, Value};
use crate::publisher::{END, SNAPSHOT, SNAPSHOT_WANTED};
use crate::tracker::{Counts, Doubt, Need, Tracker, Trust};
use crate::zmtp::{Inbound, Kind, encode, in_time, shake_hands};

/// Probes after which what could not be had is asked for once more.
const PROBES_A_RESYNC: u32 = 12;
/// Longest wait before a new connection is tried.
const BACKOFF_MAX: Duration = Duration::from_secs(5);

/// Whom to listen to.
#[derive(Clone, Debug)]
pub struct ConsumerSettings {
    /// `HOST:PORT` or `tcp://HOST:PORT` of the publisher.
    pub publish: String,
    /// The same of its replay socket. Without it nothing that was missed can be had, and a consumer that joins late is never believed
    /// until the worker clears its cache.
    pub replay: Option<String>,
    /// Begin of the topics that are wanted.
    pub topic: String,
    /// Blocks that the index may hold, at most [`INDEX_BLOCKS_MAX`].
    pub blocks_max: usize,
    /// How often it is asked whether something was missed at the end.
    pub probe: Duration,
    /// Keep what changes, for [`Consumer::take_changes`].
    pub with_changes: bool,
}

impl ConsumerSettings {
    /// Listens to all topics there.
    #[must_use]
    pub fn new(publish: impl Into<String>, replay: Option<String>) -> Self {
        let publish = publish.into();
        Self {
            publish,
            replay,
            topic: String::new(),
            blocks_max: INDEX_BLOCKS_MAX,
            probe: Duration::from_secs(5),
            with_changes: false,
        }
    }

    /// # Errors
    /// [`KvEventsError::Setting`] for the first one that cannot be used.
    pub fn check(&self) -> Result<(), KvEventsError> {
        let wrong = |key, why| Err(KvEventsError::Setting { key, why });
        for address in std::iter::once(&self.publish).chain(&self.replay) {
            let is_one = host_port(address)
                .rsplit_once(':')
                .is_some_and(|(host, port)| !host.is_empty() && port.parse::<u16>().is_ok_and(|port| port > 0));
            if !is_one {
                return wrong("kv_events", format!("{address:?} is not tcp://HOST:PORT"));
            }
        }
        if self.topic.len() > TOPIC_BYTES_MAX {
            return wrong("topic", format!("has {} bytes, and {TOPIC_BYTES_MAX} are allowed", self.topic.len()));
        }
        if self.blocks_max == 0 || self.blocks_max > INDEX_BLOCKS_MAX {
            return wrong("blocks_max", format!("{} is not between 1 and {INDEX_BLOCKS_MAX}", self.blocks_max));
        }
        if self.probe < Duration::from_millis(10) {
            return wrong("probe", format!("{:?} is shorter than 10 ms", self.probe));
        }
        Ok(())
    }
}

fn host_port(address: &str) -> &str {
    address.strip_prefix("tcp://").unwrap_or(address)
}

/// What a worker caches, as its events say. Dropping it ends the connection.
pub struct Consumer {
    shared: Arc<Shared>,
    task: JoinHandle<()>,
}

struct Shared {
    settings: ConsumerSettings,
    tracker: Mutex<Tracker>,
    /// Another life is known: connect anew.
    renewed: Notify,
    /// Something was heard, or the connection has come or gone.
    changed: Notify,
    /// Why there is no connection, or no answer to what was asked for.
    fault: Mutex<Option<String>>,
}

impl Drop for Consumer {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Consumer {
    /// Begins to listen. A publisher that is not there is asked again and again. Needs a running Tokio runtime.
    ///
    /// # Errors
    /// [`KvEventsError::Setting`] when a setting cannot be used.
    pub fn start(settings: ConsumerSettings) -> Result<Self, KvEventsError> {
        settings.check()?;
        let mut tracker = Tracker::new(settings.blocks_max);
        if settings.with_changes {
            tracker.keep_changes();
        }
        let shared = Arc::new(Shared {
            settings,
            tracker: Mutex::new(tracker),
            renewed: Notify::new(),
            changed: Notify::new(),
            fault: Mutex::new(None),
        });
        let task = tokio::spawn(run(Arc::clone(&shared)));
        Ok(Self { shared, task })
    }

    /// Whether the index may decide where a request goes.
    #[must_use]
    pub fn trust(&self) -> Trust {
        self.shared.tracker().trust()
    }

    /// Blocks of a prompt that the worker has from the first on; none when that cannot be said and load alone must decide.
    #[must_use]
    pub fn prefix(&self, hashes: &[BlockHash]) -> Option<usize> {
        self.shared.tracker().prefix(hashes)
    }

    /// Looks at all that is known, believed or not. Nothing is taken in meanwhile.
    pub fn look<T>(&self, at: impl FnOnce(&Index) -> T) -> T {
        at(self.shared.tracker().index())
    }

    /// Waits until something was heard, or trust may have changed, since the last time. For one caller.
    pub async fn changed(&self) {
        self.shared.changed.notified().await;
    }

    /// What has changed since the last time, and whether it may be believed: see [`Tracker::take_changes`]. Nothing unless
    /// `with_changes` is set.
    pub fn take_changes(&self, into: &mut Vec<Change>) -> Trust {
        self.shared.tracker().take_changes(into)
    }

    /// Whoever keeps a copy has lost it: the next [`Consumer::take_changes`] brings everything.
    pub fn tell_anew(&self) {
        if self.shared.settings.with_changes {
            self.shared.tracker().keep_changes();
            self.shared.changed.notify_one();
        }
    }

    /// What has happened.
    #[must_use]
    pub fn counts(&self) -> Counts {
        self.shared.tracker().counts()
    }

    /// The publisher's life, where it has said so.
    #[must_use]
    pub fn epoch(&self) -> Option<u64> {
        self.shared.tracker().epoch()
    }

    /// Why there is no connection, or why what was missed could not be had, when that is so.
    #[must_use]
    pub fn fault(&self) -> Option<String> {
        self.shared.fault.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Another life of the worker is known from elsewhere, from discovery for instance: what is known is dropped at once, and the connection
    /// made anew.
    pub fn reset(&self) {
        self.shared.tracker().reset();
        self.shared.changed.notify_one();
        self.shared.renewed.notify_one();
    }
}

impl Shared {
    fn tracker(&self) -> MutexGuard<'_, Tracker> {
        // Nothing between lock and unlock leaves the tracker half changed.
        self.tracker.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn note(&self, fault: Option<String>) {
        *self.fault.lock().unwrap_or_else(PoisonError::into_inner) = fault;
    }
}

async fn run(shared: Arc<Shared>) {
    let mut backoff = Duration::from_millis(50);
    loop {
        let mut was_connected = false;
        if let Err(why) = listen(&shared, &mut was_connected).await {
            shared.note(Some(why.to_string()));
        }
        shared.tracker().disconnected();
        shared.changed.notify_one();
        backoff = if was_connected { Duration::from_millis(50) } else { (backoff * 2).min(BACKOFF_MAX) };
        sleep(backoff).await;
    }
}

async fn connect(address: &str, kind: Kind) -> Result<(Inbound<OwnedReadHalf>, OwnedWriteHalf), PeerFault> {
    let stream = in_time(PATIENCE, async { Ok(TcpStream::connect(host_port(address)).await?) }).await?;
    stream.set_nodelay(true)?;
    let (inbound, mut outbound) = stream.into_split();
    let mut inbound = Inbound::new(inbound);
    shake_hands(&mut inbound, &mut outbound, kind).await?;
    Ok((inbound, outbound))
}

/// One connection, from its beginning to its end.
async fn listen(shared: &Shared, was_connected: &mut bool) -> Result<(), PeerFault> {
    let (mut inbound, mut outbound) = connect(&shared.settings.publish, Kind::Sub).await?;
    let subscription = [&[1], shared.settings.topic.as_bytes()].concat();
    in_time(PATIENCE, async { Ok(outbound.write_all(&encode(&[&subscription])).await?) }).await?;
    *was_connected = true;
    shared.note(None);
    let need = shared.tracker().connected();
    meet(shared, need).await;
    shared.changed.notify_one();
    let mut probe = interval_at(Instant::now() + shared.settings.probe, shared.settings.probe);
    probe.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut probes = 0_u32;
    loop {
        let need = tokio::select! {
            message = inbound.message() => hear(shared, &message?),
            _ = probe.tick() => {
                probes += 1;
                let tracker = shared.tracker();
                let may_come_right = shared.settings.replay.is_some()
                    && matches!(tracker.trust(), Trust::Degraded(doubt) if doubt != Doubt::Full);
                if may_come_right && probes.is_multiple_of(PROBES_A_RESYNC) { Need::Resync } else { tracker.probe() }
            }
            () = shared.renewed.notified() => return Err(PeerFault::Answer("the worker has another life")),
        };
        meet(shared, need).await;
        shared.changed.notify_one();
    }
}

/// One live message: topic, number, payload.
fn hear(shared: &Shared, message: &[Bytes]) -> Need {
    let mut tracker = shared.tracker();
    let [topic, seq, payload] = message else {
        tracker.garbage();
        return Need::Nothing;
    };
    match <[u8; 8]>::try_from(&seq[..]) {
        Ok(seq) if topic.starts_with(shared.settings.topic.as_bytes()) => {
            tracker.live(u64::from_be_bytes(seq), payload)
        }
        _ => {
            tracker.garbage();
            Need::Nothing
        }
    }
}

/// Asks for what is needed. What cannot be had leaves the index in doubt, and is asked for again later.
async fn meet(shared: &Shared, need: Need) {
    let Some(replay) = &shared.settings.replay else {
        if need == Need::Resync || shared.tracker().trust() == Trust::Degraded(Doubt::Gap) {
            shared.tracker().resync_failed();
        }
        return;
    };
    let mut need = need;
    // A replay that is too late is followed by a resync, and that by the replay of what came meanwhile.
    for _ in 0..4 {
        let met = match need {
            Need::Nothing => return,
            Need::Replay(from) => in_time(ANSWER_MAX, replay_from(shared, replay, from)).await,
            Need::Resync => in_time(ANSWER_MAX, resync(shared, replay)).await,
        };
        match met {
            Ok(next) => {
                shared.note(None);
                need = next;
            }
            Err(why) => {
                shared.note(Some(format!("replay at {replay}: {why}")));
                break;
            }
        }
    }
    if need != Need::Nothing {
        let mut tracker = shared.tracker();
        // A probe that failed says nothing against what is known: the live connection will break too if the publisher is gone.
        if need == Need::Resync || tracker.trust() != Trust::Whole {
            tracker.resync_failed();
        }
    }
}

/// What one message of an answer is.
enum Part {
    End,
    /// Begin of a snapshot: the life, and the number of the next batch.
    Snapshot(u64, u64),
    Batch(u64, Bytes),
}

struct Answers {
    inbound: Inbound<OwnedReadHalf>,
    _outbound: OwnedWriteHalf,
}

impl Answers {
    async fn ask(replay: &str, question: &[u8]) -> Result<Self, PeerFault> {
        let (inbound, mut outbound) = connect(replay, Kind::Dealer).await?;
        in_time(PATIENCE, async { Ok(outbound.write_all(&encode(&[b"", question])).await?) }).await?;
        Ok(Self { inbound, _outbound: outbound })
    }

    async fn next(&mut self) -> Result<Part, PeerFault> {
        let frames = in_time(PATIENCE, self.inbound.message()).await?;
        // From the end, since older releases leave out the topic.
        let [.., seq, payload] = &frames[..] else { return Err(PeerFault::Answer("an answer of one frame")) };
        let seq = <[u8; 8]>::try_from(&seq[..]).map_err(|_| PeerFault::Answer("an answer without a number"))?;
        if seq == END {
            return Ok(Part::End);
        }
        let seq = u64::from_be_bytes(seq);
        let is_snapshot = frames.len() >= 4 && frames[frames.len() - 3] == SNAPSHOT;
        if is_snapshot {
            let epoch = read_epoch(payload).ok_or(PeerFault::Answer("a snapshot without an epoch"))?;
            return Ok(Part::Snapshot(epoch, seq));
        }
        Ok(Part::Batch(seq, payload.clone()))
    }
}

fn read_epoch(head: &[u8]) -> Option<u64> {
    let mut reader = Reader::new(head);
    let Ok(Value::Map(count)) = reader.next() else { return None };
    let mut epoch = None;
    for _ in 0..count {
        match (reader.next().ok()?, epoch) {
            (Value::Text("epoch"), None) => match reader.next().ok()? {
                Value::Uint(value) => epoch = Some(value),
                _ => return None,
            },
            _ => _ = reader.skip().ok()?,
        }
    }
    epoch
}

async fn replay_from(shared: &Shared, replay: &str, from: u64) -> Result<Need, PeerFault> {
    let mut answers = Answers::ask(replay, &from.to_be_bytes()).await?;
    loop {
        match answers.next().await? {
            Part::End => return Ok(shared.tracker().replay_ended()),
            Part::Snapshot(..) => return Err(PeerFault::Answer("a snapshot that nobody asked for")),
            Part::Batch(seq, payload) => {
                let need = shared.tracker().replayed(seq, &payload);
                if need != Need::Nothing {
                    return Ok(need);
                }
            }
        }
    }
}

/// Everything anew: by a snapshot, else by all that is kept.
async fn resync(shared: &Shared, replay: &str) -> Result<Need, PeerFault> {
    if let Ok(Some(need)) = snapshot(shared, replay).await {
        return Ok(need);
    }
    let mut answers = Answers::ask(replay, &0_u64.to_be_bytes()).await?;
    shared.tracker().kept_began();
    loop {
        match answers.next().await? {
            Part::End => return Ok(shared.tracker().kept_ended()),
            Part::Snapshot(..) => return Err(PeerFault::Answer("a snapshot that nobody asked for")),
            Part::Batch(seq, payload) => {
                if shared.tracker().kept(seq, &payload) != Need::Nothing {
                    return Err(PeerFault::Answer("what is kept has a gap or cannot be read"));
                }
            }
        }
    }
}

/// None: the publisher gives none, as vLLM.
async fn snapshot(shared: &Shared, replay: &str) -> Result<Option<Need>, PeerFault> {
    let mut answers = Answers::ask(replay, SNAPSHOT_WANTED).await?;
    let Part::Snapshot(epoch, next) = answers.next().await? else { return Ok(None) };
    shared.tracker().snapshot_began(epoch, next);
    loop {
        match answers.next().await? {
            Part::End => return Ok(Some(shared.tracker().snapshot_ended())),
            Part::Batch(_, payload) if shared.tracker().snapshot_part(&payload) => {}
            _ => return Err(PeerFault::Answer("a part of the snapshot cannot be read")),
        }
    }
}
