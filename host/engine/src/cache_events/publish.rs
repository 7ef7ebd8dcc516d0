//! The publishers' thread: one publisher a replica, on addresses whose ports follow one another, as vLLM's ranks have them.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use penstock_base::{BlockKey, ReplicaEpoch};
use penstock_kv_events::{
    BlockHash, KvEvent, KvEventsError, Publisher, PublisherCounts, PublisherSettings, Removed, Stored,
};
use penstock_sched::replica::CacheChange;
use tokio::runtime::Runtime;
use tokio::sync::mpsc;

use super::tap::{CacheTap, Told, TurnOfChanges};
use crate::limits::{TAPPED_TURNS_MAX, TOLD_CHANGES_MAX};
use crate::metrics::Metrics;

/// Where the model computes from, in vLLM's words: whoever reads the events knows no other name for it, whatever the memory is.
const MEDIUM: &str = "GPU";
/// How often counts are looked at while nothing happens.
const IDLE: Duration = Duration::from_secs(1);

/// What the thread runs until every tap is gone.
pub(crate) type Run = Box<dyn FnOnce() + Send>;

/// Binds one publisher for each replica; the taps, in the same order, and what the thread does.
///
/// # Errors
/// An address or a setting that cannot be used, no runtime.
pub(crate) fn start(
    settings: &PublisherSettings,
    replicas: usize,
    block_size_tokens: u32,
    metrics: &Arc<Metrics>,
) -> Result<(Vec<CacheTap>, Run), KvEventsError> {
    let addresses = (0..replicas).map(|index| {
        Ok(PublisherSettings {
            publish: beside(settings.publish, index)?,
            replay: settings.replay.map(|replay| beside(replay, index)).transpose()?,
            rank: u32::try_from(index).ok(),
            // Told with the first turn.
            epoch: 0,
            ..settings.clone()
        })
    });
    let addresses = addresses.collect::<Result<Vec<_>, KvEventsError>>()?;
    // The caller may be inside another runtime, where none can be waited for.
    let (home, publishers) = std::thread::scope(|scope| {
        let bound = scope.spawn(|| {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
            let home = Home(Some(runtime.map_err(KvEventsError::Runtime)?));
            let bind = |own| home.runtime().block_on(Publisher::bind(own));
            let publishers = addresses.into_iter().map(bind).collect::<Result<Vec<_>, _>>()?;
            Ok((home, publishers))
        });
        bound.join().unwrap_or_else(|_| Err(KvEventsError::Runtime(std::io::Error::other("its thread panicked"))))
    })?;
    let (mut taps, mut tasks) = (Vec::new(), Vec::new());
    for (rank, publisher) in publishers.into_iter().enumerate() {
        tracing::info!(
            rank,
            publish = %publisher.publish_address(),
            replay = publisher.replay_address().map(|address| address.to_string()).as_deref().unwrap_or("none"),
            topic = settings.topic,
            tokens = settings.with_tokens,
            "KV events are published"
        );
        let (sender, receiver) = mpsc::channel(TAPPED_TURNS_MAX);
        let waiting = Arc::new(AtomicUsize::new(0));
        taps.push(CacheTap::open(sender, Arc::clone(&waiting), settings.with_tokens, Arc::clone(metrics)));
        tasks.push(Task {
            publisher,
            receiver,
            waiting,
            block_size_tokens,
            metrics: Arc::clone(metrics),
            epoch: ReplicaEpoch(0),
            counted: PublisherCounts::default(),
        });
    }
    let run = move || {
        let runtime = home.runtime();
        let running: Vec<_> = tasks.into_iter().map(|task| runtime.spawn(task.run())).collect();
        for task in running {
            if let Err(error) = runtime.block_on(task) {
                tracing::error!(%error, "a publisher of KV events ended by a panic: its subscribers hear nothing any more");
            }
        }
    };
    Ok((taps, Box::new(run)))
}

/// The publishers' runtime, which may be dropped anywhere.
struct Home(Option<Runtime>);

impl Home {
    fn runtime(&self) -> &Runtime {
        self.0.as_ref().expect("only the drop takes it")
    }
}

impl Drop for Home {
    fn drop(&mut self) {
        if let Some(runtime) = self.0.take() {
            runtime.shutdown_background();
        }
    }
}

/// The address of the publisher at `index`. Port 0 is any for each.
fn beside(address: SocketAddr, index: usize) -> Result<SocketAddr, KvEventsError> {
    let port = match address.port() {
        0 => Some(0),
        port => u16::try_from(index).ok().and_then(|index| port.checked_add(index)),
    };
    port.map(|port| SocketAddr::new(address.ip(), port)).ok_or_else(|| KvEventsError::Setting {
        key: "kv_events",
        why: format!("the port of {address} and the {index} behind it do not fit: take a lower one"),
    })
}

/// One publisher and what it is fed by.
struct Task {
    publisher: Publisher,
    receiver: mpsc::Receiver<TurnOfChanges>,
    waiting: Arc<AtomicUsize>,
    block_size_tokens: u32,
    metrics: Arc<Metrics>,
    /// The life that subscribers know of.
    epoch: ReplicaEpoch,
    /// What the metrics know of.
    counted: PublisherCounts,
}

impl Task {
    async fn run(mut self) {
        loop {
            match tokio::time::timeout(IDLE, self.receiver.recv()).await {
                Ok(Some(turn)) => self.tell(turn),
                Ok(None) => return,
                Err(_) => {}
            }
            let counts = self.publisher.counts();
            self.metrics.caches().published(&self.counted, &counts);
            self.counted = counts;
            // A full queue of turns must not keep the sockets waiting.
            tokio::task::yield_now().await;
        }
    }

    fn tell(&mut self, turn: TurnOfChanges) {
        let TurnOfChanges { epoch, lost, changes } = turn;
        let count = changes.len();
        let ts = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64();
        self.publisher.lost(lost);
        if epoch != self.epoch {
            self.epoch = epoch;
            self.publisher.renew(ts, epoch.0);
        }
        let mut changes = changes.into_iter();
        loop {
            let part: Vec<Told> = changes.by_ref().take(TOLD_CHANGES_MAX).collect();
            if part.is_empty() {
                break;
            }
            self.publisher.publish(ts, events(part, self.block_size_tokens));
        }
        self.waiting.fetch_sub(count, Ordering::AcqRel);
    }
}

fn hash(key: &BlockKey) -> BlockHash {
    BlockHash::from_bytes(&key.0).expect("a key has between 1 and 32 bytes")
}

/// As vLLM tells it: blocks that hang on one another in one event, and all that went in one.
fn events(changes: Vec<Told>, block_size: u32) -> Vec<KvEvent> {
    let mut events = Vec::new();
    for Told { change, tokens } in changes {
        match (change, events.last_mut()) {
            (CacheChange::Stored { key, parent: Some(parent), .. }, Some(KvEvent::Stored(run)))
                if run.block_hashes.last() == Some(&hash(&parent)) && run.token_ids.is_empty() == tokens.is_empty() =>
            {
                run.block_hashes.push(hash(&key));
                run.token_ids.extend(tokens);
            }
            (CacheChange::Stored { key, parent, .. }, _) => events.push(KvEvent::Stored(Stored {
                block_hashes: vec![hash(&key)],
                parent_block_hash: parent.as_ref().map(hash),
                token_ids: tokens,
                block_size,
                medium: Some(MEDIUM.to_owned()),
                ..Stored::default()
            })),
            (CacheChange::Removed { key }, Some(KvEvent::Removed(run))) => run.block_hashes.push(hash(&key)),
            (CacheChange::Removed { key }, _) => events.push(KvEvent::Removed(Removed {
                block_hashes: vec![hash(&key)],
                medium: Some(MEDIUM.to_owned()),
                ..Removed::default()
            })),
            (CacheChange::Cleared, _) => events.push(KvEvent::Cleared),
        }
    }
    events
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stored(n: u8, parent: Option<u8>, tokens: &[u32]) -> Told {
        let key = |n| BlockKey([n; 16]);
        let change = CacheChange::Stored { key: key(n), parent: parent.map(key), depth_blocks: 1 };
        Told { change, tokens: tokens.to_vec() }
    }

    #[test]
    fn a_chain_is_one_event_and_a_branch_another() {
        let removed = |n| Told { change: CacheChange::Removed { key: BlockKey([n; 16]) }, tokens: Vec::new() };
        let told = vec![
            stored(1, None, &[5, 6]),
            stored(2, Some(1), &[7, 8]),
            stored(3, Some(1), &[9, 9]),
            // Its tokens are not known any more.
            stored(4, Some(3), &[]),
            removed(4),
            removed(3),
            stored(3, Some(1), &[9, 9]),
        ];
        let seen: Vec<_> = events(told, 2)
            .into_iter()
            .map(|event| match event {
                KvEvent::Stored(stored) => {
                    assert_eq!((stored.block_size, stored.medium.as_deref()), (2, Some("GPU")));
                    (stored.block_hashes, stored.parent_block_hash, stored.token_ids)
                }
                KvEvent::Removed(removed) => (removed.block_hashes, None, vec![u32::MAX]),
                KvEvent::Cleared => panic!("nothing was cleared"),
            })
            .collect();
        let h = |n| hash(&BlockKey([n; 16]));
        assert_eq!(
            seen,
            [
                (vec![h(1), h(2)], None, vec![5, 6, 7, 8]),
                (vec![h(3)], Some(h(1)), vec![9, 9]),
                (vec![h(4)], Some(h(3)), vec![]),
                (vec![h(4), h(3)], None, vec![u32::MAX]),
                (vec![h(3)], Some(h(1)), vec![9, 9]),
            ]
        );
    }

    #[test]
    fn ports_follow_one_another_as_far_as_there_are_some() {
        let at = |port, index| beside(SocketAddr::from(([127, 0, 0, 1], port)), index).map(|address| address.port());
        assert_eq!((at(5557, 0).ok(), at(5557, 3).ok(), at(0, 9).ok()), (Some(5557), Some(5560), Some(0)));
        assert!(at(65_535, 1).unwrap_err().to_string().contains("take a lower one"));
    }
}
