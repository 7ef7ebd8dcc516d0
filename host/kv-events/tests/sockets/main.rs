//! Publishers and consumers over TCP, with each other, with peers written by hand from the specification, and with Python's.

#![allow(clippy::unwrap_used, reason = "a test")]

mod by_hand;
mod exchange;
mod faults;
mod python;

use std::collections::BTreeSet;
use std::time::Duration;

use penstock_kv_events::{
    BlockHash, Consumer, ConsumerSettings, KvEvent, Publisher, PublisherSettings, Removed, Stored,
};
use tokio::time::{sleep, timeout};

/// Bounds a wait that should be short, so that a fault ends the test instead of hanging it.
const PATIENCE: Duration = Duration::from_secs(60);

fn hash(block: u64) -> BlockHash {
    // Sixteen bytes, as our own keys.
    BlockHash::from_bytes(&(u128::from(block) << 64 | 0xabcd).to_be_bytes()).unwrap()
}

fn stored(blocks: impl IntoIterator<Item = u64>) -> KvEvent {
    let block_hashes: Vec<BlockHash> = blocks.into_iter().map(hash).collect();
    let token_ids = vec![7; 16 * block_hashes.len()];
    KvEvent::Stored(Stored { block_hashes, token_ids, block_size: 16, medium: Some("CPU".into()), ..Stored::default() })
}

fn removed(blocks: impl IntoIterator<Item = u64>) -> KvEvent {
    let block_hashes = blocks.into_iter().map(hash).collect();
    KvEvent::Removed(Removed { block_hashes, medium: Some("CPU".into()), ..Removed::default() })
}

/// On loopback, any port, with replay.
fn settings() -> PublisherSettings {
    let any = "127.0.0.1:0".parse().unwrap();
    PublisherSettings {
        publish: any,
        replay: Some(any),
        topic: "kv@worker-0@model".into(),
        epoch: 1,
        ..Default::default()
    }
}

fn listen_to(publisher: &Publisher) -> ConsumerSettings {
    let replay = publisher.replay_address().map(|address| format!("tcp://{address}"));
    let publish = format!("tcp://{}", publisher.publish_address());
    ConsumerSettings {
        topic: "kv@".into(),
        probe: Duration::from_millis(200),
        ..ConsumerSettings::new(publish, replay)
    }
}

async fn until(mut holds: impl FnMut() -> bool, what: &str) {
    let wait = async {
        while !holds() {
            sleep(Duration::from_millis(10)).await;
        }
    };
    timeout(PATIENCE, wait).await.unwrap_or_else(|_| panic!("never came: {what}"));
}

/// Whether the consumer has exactly these blocks.
fn has(consumer: &Consumer, blocks: &BTreeSet<u64>) -> bool {
    consumer.look(|index| index.len() == blocks.len() && blocks.iter().all(|block| index.contains(&hash(*block))))
}
