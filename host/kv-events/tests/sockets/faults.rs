//! Peers that withhold, go back, send garbage, do not read, or come in crowds.

use std::collections::BTreeSet;
use std::io::Write as _;
use std::net::TcpStream;
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use penstock_kv_events::limits::SUBSCRIBERS_MAX;
use penstock_kv_events::{Batch, Consumer, ConsumerSettings, Doubt, Publisher, PublisherSettings, Trust};

use super::by_hand::{Peer, greet, message, receive};
use super::{PATIENCE, has, listen_to, settings, stored, until};

const TOPIC: &[u8] = b"kv@10.0.0.1@model";
const END: [u8; 8] = [0xff; 8];

/// Number and payload of each batch that a replay brings.
type Kept = Arc<Mutex<Vec<(u64, Vec<u8>)>>>;

fn payload(block: u64) -> Vec<u8> {
    Batch { ts: 1.0, events: vec![stored([block])], rank: Some(0), unknown: 0 }.encode()
}

fn listen(peer: &Peer) -> ConsumerSettings {
    let (publish, replay) = peer.addresses();
    let settings = ConsumerSettings::new(publish.to_string(), Some(replay.to_string()));
    ConsumerSettings { topic: "kv@".into(), probe: Duration::from_millis(200), ..settings }
}

/// vLLM's replay: whatever is kept from the number on, then -1. `is_old` leaves out the topic, as releases before 0.32 do.
fn replay_of(kept: &[(u64, Vec<u8>)], from: u64, is_old: bool) -> Vec<Vec<u8>> {
    let topic: &[&[u8]] = if is_old { &[] } else { &[TOPIC] };
    let later = kept.iter().filter(|(seq, _)| *seq >= from);
    let mut wires: Vec<Vec<u8>> =
        later.map(|(seq, payload)| message(&[&[&b""[..]], topic, &[&seq.to_be_bytes(), payload]].concat())).collect();
    let end: &[&[u8]] = if is_old { &[b"", &END, b""] } else { &[b"", b"", &END, b""] };
    wires.push(message(end));
    wires
}

/// Every fifth batch is not sent live, the last one among them.
async fn withheld_batches(is_old: bool) {
    let peer = Peer::open();
    let consumer = Consumer::start(listen(&peer)).unwrap();
    let kept = Kept::default();
    let Peer { publish, replay } = peer;
    let answering = Arc::clone(&kept);
    thread::spawn(move || Peer::serve(&replay, |from| Some(replay_of(&answering.lock().unwrap(), from, is_old))));
    let sending = thread::spawn(move || {
        let other = Peer { publish, replay: std::net::TcpListener::bind("127.0.0.1:0").unwrap() };
        let mut stream = other.subscriber();
        for seq in 0..=100_u64 {
            let payload = payload(seq);
            kept.lock().unwrap().push((seq, payload.clone()));
            if seq % 5 != 0 {
                stream.write_all(&message(&[TOPIC, &seq.to_be_bytes(), &payload])).unwrap();
            }
        }
        stream
    });
    let truth: BTreeSet<u64> = (0..=100).collect();
    until(|| consumer.trust() == Trust::Whole && has(&consumer, &truth), "all 101 blocks").await;
    assert_eq!(consumer.counts().restarts, 0);
    assert!(consumer.counts().replayed >= 21, "21 batches never came live: {:?}", consumer.counts());
    drop(sending.join().unwrap());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn withheld_batches_are_recovered() {
    withheld_batches(false).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn withheld_batches_are_recovered_from_older_releases() {
    withheld_batches(true).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_count_that_goes_back_begins_anew() {
    let peer = Peer::open();
    let consumer = Consumer::start(listen(&peer)).unwrap();
    let kept = Kept::default();
    let (answering, forget) = (Arc::clone(&kept), Arc::clone(&kept));
    let Peer { publish, replay } = peer;
    thread::spawn(move || Peer::serve(&replay, |from| Some(replay_of(&answering.lock().unwrap(), from, false))));
    let other = Peer { publish, replay: std::net::TcpListener::bind("127.0.0.1:0").unwrap() };
    let mut stream = tokio::task::spawn_blocking(move || other.subscriber()).await.unwrap();
    let mut send = |seq: u64, block: u64| {
        let payload = payload(block);
        kept.lock().unwrap().push((seq, payload.clone()));
        stream.write_all(&message(&[TOPIC, &seq.to_be_bytes(), &payload])).unwrap();
    };
    for seq in 0..10 {
        send(seq, seq);
    }
    until(|| consumer.trust() == Trust::Whole && has(&consumer, &(0..10).collect()), "the old life").await;
    assert_eq!(consumer.counts().restarts, 0);
    // Nothing of the old life is kept.
    forget.lock().unwrap().clear();
    send(0, 77);
    until(|| consumer.trust() == Trust::Whole && has(&consumer, &[77].into()), "the new life").await;
    assert_eq!(consumer.counts().restarts, 1);
}

/// A subscriber that never reads: the engine's thread is not held up, the others get everything, and what waits is bounded.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_slow_subscriber_costs_itself_alone() {
    let settings = PublisherSettings { queue_batches: 64, with_tokens: true, ..settings() };
    let publisher = Arc::new(Publisher::bind(settings).await.unwrap());
    let address = publisher.publish_address();
    let slow = tokio::task::spawn_blocking(move || {
        let mut stream = TcpStream::connect(address).unwrap();
        greet(&mut stream, "SUB");
        stream.write_all(&message(&[b"\x01"])).unwrap();
        stream
    });
    let slow = slow.await.unwrap();
    until(|| publisher.counts().subscribers == 1, "the slow one").await;
    let consumer = Consumer::start(listen_to(&publisher)).unwrap();
    until(|| publisher.counts().subscribers == 2, "the quick one").await;
    let batches = 2_000_u64;
    let engine = Arc::clone(&publisher);
    // A thread without a runtime, as the engine's. Each batch has 32 KiB and more, far beyond what the sockets hold.
    let engine = thread::spawn(move || {
        for batch in 0..batches {
            engine.publish(
                1.0,
                vec![stored(batch * 2_000..batch * 2_000 + 1_000), super::removed(batch * 2_000..batch * 2_000 + 999)],
            );
        }
    });
    tokio::task::spawn_blocking(move || engine.join().unwrap()).await.unwrap();
    let counts = publisher.counts();
    assert_eq!((counts.published, counts.subscribers), (batches, 2));
    assert!(counts.dropped > batches / 2, "the slow one misses most: {counts:?}");
    let truth: BTreeSet<u64> = (0..batches).map(|batch| batch * 2_000 + 999).collect();
    until(|| consumer.trust() == Trust::Whole && has(&consumer, &truth), "everything at the quick one").await;
    drop(slow);
    until(|| publisher.counts().subscribers == 1, "the slow one's end").await;
}

/// One that never greets, one that greets wrongly, one that sends lengths and flags from nowhere: each is left, and the next try finds the
/// publisher that has come in its place.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn garbage_is_survived() {
    let peer = Peer::open();
    let consumer = Consumer::start(listen(&peer)).unwrap();
    let Peer { publish, replay } = peer;
    thread::spawn(move || {
        Peer::serve(&replay, |from| Some(replay_of(&[(0, payload(5))], from, false)));
    });
    let rude = thread::spawn(move || {
        let (mut stream, _) = publish.accept().unwrap();
        stream.write_all(b"HTTP/1.1 400 Bad Request\r\n\r\n").unwrap();
        drop(stream);
        let other = Peer { publish, replay: std::net::TcpListener::bind("127.0.0.1:0").unwrap() };
        for garbage in [
            vec![0xf8; 40],
            // A frame of 2^62 bytes.
            [&[2][..], &(1_u64 << 62).to_be_bytes(), b"some"].concat(),
            // More frames than a message has.
            [1, 0].repeat(100),
            vec![4, 200],
        ] {
            let mut stream = other.subscriber();
            stream.write_all(&garbage).unwrap();
        }
        let mut stream = other.subscriber();
        for frames in
            [&[&b""[..]][..], &[TOPIC, b"short", b""], &[b"wrong topic", &[0; 8], b""], &[TOPIC, &[0; 8], b"", b""]]
        {
            stream.write_all(&message(frames)).unwrap();
        }
        stream.write_all(&message(&[TOPIC, &1_u64.to_be_bytes(), &payload(6)])).unwrap();
        (stream, other)
    });
    let rude = tokio::task::spawn_blocking(move || rude.join().unwrap()).await.unwrap();
    until(|| consumer.trust() == Trust::Whole && has(&consumer, &[5, 6].into()), "the truth at last").await;
    assert_eq!(consumer.counts().garbage, 4);
    drop(rude);
    until(|| consumer.trust() == Trust::Degraded(Doubt::Unreachable), "the loss").await;
    assert!(consumer.fault().is_some());
}

/// Subscribers are let in up to the limit; one that leaves makes room.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn crowds_are_turned_away() {
    let publisher = Publisher::bind(settings()).await.unwrap();
    let address = publisher.publish_address();
    let join = move || {
        let mut stream = TcpStream::connect(address).unwrap();
        greet(&mut stream, "SUB");
        stream
    };
    let mut crowd =
        tokio::task::spawn_blocking(move || (0..SUBSCRIBERS_MAX).map(|_| join()).collect::<Vec<_>>()).await.unwrap();
    until(|| publisher.counts().subscribers == SUBSCRIBERS_MAX, "a full house").await;
    let mut late = TcpStream::connect(address).unwrap();
    late.set_read_timeout(Some(PATIENCE)).unwrap();
    assert!(receive(&mut late).is_err(), "closed at once");
    assert_eq!(publisher.counts().turned_away, 1);
    crowd.pop();
    until(|| publisher.counts().subscribers == SUBSCRIBERS_MAX - 1, "room").await;
    tokio::task::spawn_blocking(join).await.unwrap();
}

/// Tokens are the prompts: they are told only where that is wanted. Read off the wire by hand.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tokens_are_told_only_when_configured() {
    for with_tokens in [false, true] {
        let publisher = Publisher::bind(PublisherSettings { with_tokens, ..settings() }).await.unwrap();
        let address = publisher.publish_address();
        let subscriber = tokio::task::spawn_blocking(move || {
            let mut stream = TcpStream::connect(address).unwrap();
            greet(&mut stream, "SUB");
            stream.write_all(&message(&[b"\x01kv@"])).unwrap();
            receive(&mut stream).unwrap()
        });
        until(|| publisher.counts().subscribers == 1, "a subscriber").await;
        let heard = until(
            || {
                publisher.publish(1.0, vec![stored([1])]);
                subscriber.is_finished()
            },
            "a message",
        );
        heard.await;
        let frames = subscriber.await.unwrap();
        assert_eq!((frames.len(), &frames[0][..]), (3, &b"kv@worker-0@model"[..]));
        // "token_ids" and an array of none, or of sixteen sevens.
        let told =
            if with_tokens { [&b"token_ids\xdc\0\x10"[..], &[7; 16]].concat() } else { b"token_ids\x90".to_vec() };
        assert!(frames[2].windows(told.len()).any(|window| window == told), "{:?}", frames[2]);
    }
}
