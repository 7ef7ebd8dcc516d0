//! Our publisher and our consumer.

use std::collections::BTreeSet;

use penstock_kv_events::{
    Change, Consumer, ConsumerSettings, Doubt, KvEvent, KvEventsError, Publisher, PublisherSettings, Trust,
};

use super::{has, hash, listen_to, removed, settings, stored, until};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_said_arrives() {
    let publisher = Publisher::bind(settings()).await.unwrap();
    let consumer = Consumer::start(listen_to(&publisher)).unwrap();
    until(|| consumer.trust() == Trust::Whole, "trust").await;
    assert_eq!(consumer.epoch(), Some(1));
    let mut truth = BTreeSet::new();
    for block in 0..500 {
        assert_eq!(publisher.publish(1.0, vec![stored([block, block + 1_000])]), 2 * block);
        publisher.publish(1.0, vec![removed([block])]);
        truth.insert(block + 1_000);
    }
    until(|| has(&consumer, &truth), "all blocks").await;
    assert_eq!(consumer.prefix(&[hash(1_000), hash(1_001), hash(3)]), Some(2));
    publisher.publish(2.0, vec![KvEvent::Cleared]);
    until(|| consumer.look(|index| index.is_empty()), "an empty cache").await;
    assert_eq!(publisher.counts().dropped, 0);
}

/// The first 996 batches are not kept any more, and nobody has heard them.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn who_joins_late_gets_a_snapshot() {
    let publisher = Publisher::bind(PublisherSettings { buffer_batches: 4, ..settings() }).await.unwrap();
    let mut truth = BTreeSet::new();
    // More than one message of a snapshot can hold.
    for batch in 0..1_000 {
        let blocks = 20 * batch..20 * (batch + 1);
        truth.extend(blocks.clone());
        publisher.publish(1.0, vec![stored(blocks)]);
    }
    let consumer = Consumer::start(listen_to(&publisher)).unwrap();
    until(|| !matches!(consumer.trust(), Trust::Degraded(Doubt::Unreachable | Doubt::Resyncing)), "an answer").await;
    assert_eq!(consumer.trust(), Trust::Whole);
    assert!(has(&consumer, &truth));
    assert_eq!((consumer.counts().resyncs, consumer.counts().replayed), (1, 0));
    publisher.publish(2.0, vec![removed([5])]);
    truth.remove(&5);
    until(|| has(&consumer, &truth), "what came after").await;
}

/// Another life at the same address, with other blocks, and further in its count than the old one was.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_restart_drops_what_the_old_life_said() {
    let publisher = Publisher::bind(settings()).await.unwrap();
    let (publish, replay) = (publisher.publish_address(), publisher.replay_address());
    let consumer = Consumer::start(listen_to(&publisher)).unwrap();
    publisher.publish(1.0, vec![stored(0..100)]);
    until(|| has(&consumer, &(0..100).collect()), "the old blocks").await;
    drop(publisher);
    until(|| consumer.trust() == Trust::Degraded(Doubt::Unreachable), "the loss").await;
    assert_eq!(consumer.prefix(&[hash(0)]), None);
    let again = PublisherSettings { publish, replay, epoch: 2, ..settings() };
    let mut bound = Publisher::bind(again.clone()).await;
    while bound.is_err() {
        tokio::time::sleep(std::time::Duration::from_millis(50)).await;
        bound = Publisher::bind(again.clone()).await;
    }
    let publisher = bound.unwrap();
    for block in 200..300 {
        publisher.publish(1.0, vec![stored([block])]);
    }
    until(|| consumer.trust() == Trust::Whole && has(&consumer, &(200..300).collect()), "the new blocks").await;
    assert_eq!(consumer.epoch(), Some(2));
    assert_eq!(consumer.counts().restarts, 1);
    // Discovery may know of another life first.
    consumer.reset();
    assert_eq!(consumer.prefix(&[hash(200)]), None);
    until(|| consumer.trust() == Trust::Whole && has(&consumer, &(200..300).collect()), "the blocks anew").await;
}

/// A copy that is kept by the changes alone, over batches, a loss at the publisher's own door, another life and a copy that was lost.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_copy_kept_by_changes_is_the_truth() {
    let publisher = Publisher::bind(settings()).await.unwrap();
    let consumer = Consumer::start(ConsumerSettings { with_changes: true, ..listen_to(&publisher) }).unwrap();
    let mut copy = BTreeSet::new();
    let mut catch_up = || {
        let mut changes = Vec::new();
        let trust = consumer.take_changes(&mut changes);
        for change in changes {
            match change {
                Change::Cleared => copy.clear(),
                Change::Stored(hash) => assert!(copy.insert(hash), "came twice"),
                Change::Removed(hash) => assert!(copy.remove(&hash), "went and was not there"),
            }
        }
        (trust, copy.clone())
    };
    let is = |blocks: &BTreeSet<u64>| blocks.iter().map(|block| hash(*block)).collect::<BTreeSet<_>>();
    let mut truth = BTreeSet::new();
    for block in 0..200 {
        publisher.publish(1.0, vec![stored([block, block + 1_000]), removed([block])]);
        truth.insert(block + 1_000);
    }
    until(|| catch_up() == (Trust::Whole, is(&truth)), "the copy").await;
    // Two batches never got here: what they said is told anew, and nobody believes the old copy meanwhile.
    publisher.lost(2);
    publisher.publish(2.0, vec![removed([1_000])]);
    until(|| catch_up().0 != Trust::Whole, "doubt").await;
    publisher.publish(2.0, vec![KvEvent::Cleared, stored(7..9)]);
    truth = (7..9).collect();
    until(|| catch_up() == (Trust::Whole, is(&truth)), "the copy behind the loss").await;
    assert_eq!(consumer.epoch(), Some(1));
    publisher.renew(3.0, 9);
    publisher.publish(3.0, vec![stored([3])]);
    truth = [3].into();
    until(|| catch_up() == (Trust::Whole, is(&truth)), "the copy of the new life").await;
    consumer.tell_anew();
    let mut changes = Vec::new();
    consumer.take_changes(&mut changes);
    assert_eq!(changes, [Change::Cleared, Change::Stored(hash(3))]);
    // Who comes now is told of the new life.
    let late = Consumer::start(listen_to(&publisher)).unwrap();
    until(|| late.trust() == Trust::Whole && has(&late, &truth), "a late one").await;
    assert_eq!(late.epoch(), Some(9));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_a_replay_address_late_joiners_are_not_believed() {
    let publisher = Publisher::bind(PublisherSettings { replay: None, ..settings() }).await.unwrap();
    publisher.publish(1.0, vec![stored([1])]);
    let consumer = Consumer::start(listen_to(&publisher)).unwrap();
    until(|| publisher.counts().subscribers == 1, "a subscriber").await;
    until(
        || {
            publisher.publish(1.0, vec![stored([2])]);
            consumer.look(|index| index.contains(&hash(2)))
        },
        "a live batch",
    )
    .await;
    assert_eq!(consumer.trust(), Trust::Degraded(Doubt::Incomplete));
    assert_eq!(consumer.prefix(&[hash(2)]), None);
    publisher.publish(1.0, vec![KvEvent::Cleared, stored([3])]);
    until(|| consumer.trust() == Trust::Whole, "trust").await;
    assert_eq!(consumer.prefix(&[hash(3), hash(2)]), Some(1));
}

#[tokio::test]
async fn nothing_listens_beyond_loopback_unless_told() {
    for address in ["0.0.0.0:0", "[::]:0", "192.0.2.1:5557"] {
        let address = address.parse().unwrap();
        let publish = PublisherSettings { publish: address, ..settings() };
        let replay = PublisherSettings { replay: Some(address), ..settings() };
        for settings in [publish, replay] {
            let why = Publisher::bind(settings).await.err().unwrap();
            assert!(matches!(why, KvEventsError::Exposed { .. }));
            assert!(why.to_string().contains("bind to loopback, or set expose"), "{why}");
        }
    }
    let told = PublisherSettings { publish: "0.0.0.0:0".parse().unwrap(), expose: true, ..settings() };
    assert!(Publisher::bind(told).await.is_ok());
    assert!(PublisherSettings::default().publish.ip().is_loopback());
}

#[tokio::test]
async fn wrong_settings_are_named() {
    let wrong = async |settings: PublisherSettings| Publisher::bind(settings).await.err().unwrap().to_string();
    assert!(wrong(PublisherSettings { buffer_batches: 0, ..settings() }).await.contains("buffer_batches: 0 is not"));
    assert!(wrong(PublisherSettings { queue_batches: 5_000, ..settings() }).await.contains("queue_batches: 5000 is"));
    assert!(wrong(PublisherSettings { topic: "t".repeat(513), ..settings() }).await.contains("topic: has 513 bytes"));
    assert!(wrong(PublisherSettings { topic: "penstock-snapshot-1".into(), ..settings() }).await.contains("topic: is"));
    let wrong = |publish: &str| {
        let settings = penstock_kv_events::ConsumerSettings::new(publish, None);
        Consumer::start(settings).err().unwrap().to_string()
    };
    assert!(wrong("tcp://*").contains("is not tcp://HOST:PORT"));
    assert!(wrong("tcp://host:0").contains("is not tcp://HOST:PORT"));
}
