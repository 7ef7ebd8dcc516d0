//! The other end: what a replica elsewhere says that it caches, told to the gateway's loop as if by that replica itself.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::time::Duration;

use penstock_base::{BlockKey, ReplicaId};
use penstock_kv_events::{BlockHash, Change, Consumer, ConsumerSettings, Counts, Doubt, KvEventsError, Trust};
use penstock_sched::message::CacheEvent;
use tokio::task::JoinHandle;

use crate::engine::Engine;
use crate::gateway_loop::{self, GatewayWake};
use crate::limits::NEWS_CHANGES_MAX;
use crate::mailbox::PushError;
use crate::wiring::Wiring;

/// How often it is looked whether the gateway's loop asks for something.
const LOOK: Duration = Duration::from_millis(500);
/// Wait for room at the gateway's loop.
const ROOM: Duration = Duration::from_millis(5);

/// The gateway's loop wants everything anew.
const ANEW: u8 = 1;
/// The events are of another life than the one that it knows.
const OTHER_LIFE: u8 = 2;

/// What the gateway's loop and a follower know of each other beside the news.
#[derive(Debug, Default)]
pub(crate) struct Line {
    wanted: AtomicU8,
    is_gone: AtomicBool,
}

impl Line {
    /// What was heard so far is worth nothing here: tell everything.
    pub fn ask_anew(&self) {
        self.wanted.store(ANEW, Ordering::Release);
    }

    /// Another life of the replica is known here.
    pub fn ask_for_another_life(&self) {
        self.wanted.store(OTHER_LIFE, Ordering::Release);
    }

    /// Nothing more will be heard.
    pub fn is_gone(&self) -> bool {
        self.is_gone.load(Ordering::Acquire)
    }
}

/// What a follower tells the gateway's loop.
pub(crate) struct CacheNews {
    pub replica: ReplicaId,
    /// The life that the publisher named, where it did.
    pub life: Option<u64>,
    pub events: Vec<CacheEvent>,
    /// With these, what was told is what the replica caches.
    pub is_whole: bool,
    pub line: Arc<Line>,
}

/// Listens to one replica's KV events. Dropping it ends that: what was heard is soon stale then, and the replica gets requests by its load.
pub struct CacheFollower {
    consumer: Arc<Consumer>,
    line: Arc<Line>,
    task: JoinHandle<()>,
}

impl fmt::Debug for CacheFollower {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CacheFollower").field("trust", &self.trust()).finish_non_exhaustive()
    }
}

impl Drop for CacheFollower {
    fn drop(&mut self) {
        self.line.is_gone.store(true, Ordering::Release);
        self.task.abort();
    }
}

impl CacheFollower {
    /// Whether what was heard is the whole truth.
    #[must_use]
    pub fn trust(&self) -> Trust {
        self.consumer.trust()
    }

    /// What has happened.
    #[must_use]
    pub fn counts(&self) -> Counts {
        self.consumer.counts()
    }
}

impl Engine {
    /// From now on what `replica` caches is heard from its KV events, and from nowhere else. For one that is not known yet, they count once
    /// it is. Needs a running Tokio runtime.
    ///
    /// # Errors
    /// An address or a setting that cannot be used.
    pub fn follow_cache(&self, replica: ReplicaId, settings: ConsumerSettings) -> Result<CacheFollower, KvEventsError> {
        // More than the gateway's own index holds would only push itself out of it.
        let blocks_max = settings.blocks_max.min(self.cached_keys_max());
        let settings = ConsumerSettings { with_changes: true, blocks_max, ..settings };
        let consumer = Arc::new(Consumer::start(settings)?);
        let line = Arc::<Line>::default();
        let task = tokio::spawn(follow(replica, Arc::clone(&consumer), Arc::clone(&line), Arc::clone(self.wiring())));
        Ok(CacheFollower { consumer, line, task })
    }
}

async fn follow(replica: ReplicaId, consumer: Arc<Consumer>, line: Arc<Line>, wiring: Arc<Wiring>) {
    let (mut changes, mut was, mut has_strangers) = (Vec::new(), None, false);
    loop {
        let trust = consumer.take_changes(&mut changes);
        if was.replace(trust) != Some(trust) {
            let fault = consumer.fault();
            tracing::info!(replica = replica.0, ?trust, fault, "KV events: what is heard of a replica's cache");
        }
        let strangers = changes.len();
        let mut events: Vec<_> = changes.drain(..).filter_map(event).collect();
        if strangers > events.len() && !std::mem::replace(&mut has_strangers, true) {
            tracing::warn!(
                replica = replica.0,
                "KV events name blocks by other hashes than this server's: they say nothing of its prompts"
            );
        }
        // All that fits is there: what is missing counts as not cached.
        let is_whole = matches!(trust, Trust::Whole | Trust::Degraded(Doubt::Full));
        loop {
            let rest = events.split_off(events.len().min(NEWS_CHANGES_MAX));
            let is_last = rest.is_empty();
            let life = consumer.epoch();
            let line = Arc::clone(&line);
            let mut wake =
                GatewayWake::CacheNews(CacheNews { replica, life, events, is_whole: is_whole && is_last, line });
            loop {
                match wiring.gateway.try_push(gateway_loop::CACHES, wake) {
                    Ok(()) => break,
                    Err(PushError::Closed(_)) => return,
                    Err(PushError::Full(back)) => {
                        wake = back;
                        tokio::time::sleep(ROOM).await;
                    }
                }
            }
            events = rest;
            if is_last {
                break;
            }
        }
        loop {
            match line.wanted.swap(0, Ordering::AcqRel) {
                ANEW => consumer.tell_anew(),
                OTHER_LIFE => consumer.reset(),
                _ => {}
            }
            if tokio::time::timeout(LOOK, consumer.changed()).await.is_ok() {
                break;
            }
        }
    }
}

/// As the gateway takes it; none of a block that is named by another hash than ours.
fn event(change: Change) -> Option<CacheEvent> {
    let key = |hash| match hash {
        BlockHash::Bytes { len: 16, bytes } => bytes.first_chunk::<16>().map(|key| BlockKey(*key)),
        _ => None,
    };
    match change {
        Change::Cleared => Some(CacheEvent::Cleared),
        Change::Stored(hash) => key(hash).map(|key| CacheEvent::Stored { key, depth: 0 }),
        Change::Removed(hash) => key(hash).map(|key| CacheEvent::Removed { key }),
    }
}
