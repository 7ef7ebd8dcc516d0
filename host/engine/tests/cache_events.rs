//! What a replica caches, told by one engine and heard by others: as events on a wire, and in where another engine's gateway sends requests.

#[path = "../../kv-events/tests/sockets/by_hand.rs"]
#[allow(
    dead_code,
    clippy::unwrap_used,
    reason = "this test asks for what is kept and nothing else; a panic is its failure"
)]
mod by_hand;
mod support;

use std::collections::{BTreeMap, BTreeSet};
use std::io::Write;
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use penstock_engine::{ConsumerSettings, EngineConfig, PublisherSettings, ReplicaState, Trust};
use penstock_exec::SamplingParams;
use penstock_kv_events::{Batch, BlockHash, Consumer, KvEvent};
use penstock_model::{BlockKeyChain, Namespace, root_key};
use penstock_sched::replica::ReplicaConfig;
use support::{Fault, PATIENCE, Rig, Sizes, answer, prompt, read};

/// By key: the key of the block before it, and its tokens.
type Blocks = BTreeMap<[u8; 16], (Option<[u8; 16]>, Vec<u32>)>;

/// Tokens in a block of the fakes.
fn block(rig: &Rig) -> usize {
    rig.engine.geometry().block_size_tokens as usize
}

/// Two free ports of this machine, for a moment.
fn addresses() -> (SocketAddr, SocketAddr) {
    let free = || std::net::TcpListener::bind("127.0.0.1:0").expect("a port").local_addr().expect("it is bound");
    let (one, other) = (free(), free());
    assert_ne!(one, other);
    (one, other)
}

fn publishing(replicas: usize, with_tokens: bool) -> (Rig, SocketAddr, SocketAddr) {
    // A port that somebody else takes meanwhile is another try.
    for _ in 0..20 {
        let (publish, replay) = addresses();
        let settings = PublisherSettings {
            publish,
            replay: Some(replay),
            topic: "kv@test".into(),
            with_tokens,
            ..PublisherSettings::default()
        };
        let config = EngineConfig { kv_events: Some(settings), replica: checked(), ..EngineConfig::default() };
        match Rig::start(replicas, Sizes::default(), config) {
            Ok(rig) => return (rig, publish, replay),
            Err(error) => eprintln!("once more: {error}"),
        }
    }
    panic!("no free ports");
}

fn checked() -> ReplicaConfig {
    ReplicaConfig { check_every_step: true, ..ReplicaConfig::default() }
}

fn listen(publish: SocketAddr, replay: SocketAddr) -> ConsumerSettings {
    ConsumerSettings::new(format!("tcp://{publish}"), Some(replay.to_string()))
}

async fn until(what: &str, mut holds: impl FnMut() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !holds() {
        assert!(Instant::now() < deadline, "{what} did not come");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// Keys of the full blocks of some tokens, by the model crate's chain, and the tokens of each.
fn chain(tokens: &[u32], block: usize) -> Vec<([u8; 16], Vec<u32>)> {
    let root = root_key(&Namespace([3; 32]), &1_u64.to_le_bytes());
    let keys = BlockKeyChain::new(root, block).extend(tokens, &[]);
    keys.iter().zip(tokens.chunks_exact(block)).map(|(key, tokens)| (key.0, tokens.to_vec())).collect()
}

fn hash(key: &[u8; 16]) -> BlockHash {
    BlockHash::from_bytes(key).expect("sixteen bytes")
}

/// Every batch that the publisher has kept, asked for by hand.
fn kept(replay: SocketAddr) -> Vec<Batch> {
    let mut stream = TcpStream::connect(replay).expect("it listens");
    by_hand::greet(&mut stream, "DEALER");
    stream.write_all(&by_hand::message(&[b"", &0_u64.to_be_bytes()])).expect("it reads");
    let mut batches = Vec::new();
    loop {
        let frames = by_hand::receive(&mut stream).expect("an answer");
        let [_, topic, seq, payload] = &frames[..] else { panic!("{frames:?}") };
        if seq[..] == [0xff; 8] {
            return batches;
        }
        assert_eq!((&topic[..], &seq[..]), (&b"kv@test"[..], &(batches.len() as u64).to_be_bytes()[..]));
        batches.push(Batch::decode(payload).expect("a batch"));
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn blocks_are_told_with_their_parents_and_tokens_only_when_that_was_asked_for() {
    for with_tokens in [false, true] {
        let (rig, _, replay) = publishing(1, with_tokens);
        let mut expected = Blocks::new();
        let mut surely = BTreeSet::new();
        for (which, length, output) in [(1, 40, 30), (2, 33, 1), (1, 40, 30), (3, 7, 60)] {
            let prompt = prompt(which, length);
            let got = read(&mut rig.submit(rig.submission(&prompt, output)));
            let all = [prompt.clone(), answer(&prompt, &SamplingParams::default(), output)].concat();
            assert_eq!(got.tokens, [all[prompt.len()..].to_vec()]);
            let mut parent = None;
            // The last token of an answer is not computed, so that a block that ends with it is not cached.
            for (at, (key, tokens)) in chain(&all[..all.len() - 1], block(&rig)).into_iter().enumerate() {
                expected.insert(key, (parent, tokens));
                if at < prompt.len() / block(&rig) {
                    surely.insert(key);
                }
                parent = Some(key);
            }
        }
        rig.wait_until_empty();
        let mut told = BTreeMap::new();
        until("all blocks", || rig.metric("penstock_kv_event_batches_total") >= 4.0).await;
        let deadline = Instant::now() + PATIENCE;
        // Keys of an answer's blocks come behind it, and those that come after its end are too late: that many blocks are not cached.
        while !surely.iter().all(|key| told.contains_key(key)) {
            assert!(Instant::now() < deadline, "missing {:?}", surely.difference(&told.keys().copied().collect()));
            told.clear();
            for batch in tokio::task::block_in_place(|| kept(replay)) {
                assert_eq!(batch.rank, Some(0));
                for event in batch.events {
                    let stored = match event {
                        KvEvent::Stored(stored) => stored,
                        KvEvent::Cleared => continue,
                        KvEvent::Removed(removed) => panic!("nothing had to leave: {removed:?}"),
                    };
                    assert_eq!(stored.block_size as usize, block(&rig));
                    let size = block(&rig);
                    assert_eq!(stored.token_ids.len(), if with_tokens { stored.block_hashes.len() * size } else { 0 });
                    let mut parent = stored.parent_block_hash;
                    for (at, name) in stored.block_hashes.iter().enumerate() {
                        let BlockHash::Bytes { len: 16, bytes } = name else { panic!("{name:?}") };
                        let key = *bytes.first_chunk::<16>().expect("32 bytes");
                        let tokens = stored.token_ids.get(at * size..(at + 1) * size).unwrap_or_default().to_vec();
                        let BlockParent(known) = parent_key(parent);
                        told.insert(key, (known, tokens));
                        parent = Some(*name);
                    }
                }
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        for (key, (parent, tokens)) in &told {
            let known = expected.get(key).unwrap_or_else(|| panic!("nobody computed {key:?}"));
            assert_eq!(*parent, known.0);
            if with_tokens {
                assert_eq!(*tokens, known.1);
            }
        }
        assert!(told.len() > surely.len(), "blocks of answers as well");
        assert!(rig.engine.shutdown());
    }
}

/// A parent's key.
struct BlockParent(Option<[u8; 16]>);

fn parent_key(parent: Option<BlockHash>) -> BlockParent {
    BlockParent(parent.map(|hash| match hash {
        BlockHash::Bytes { len: 16, bytes } => *bytes.first_chunk::<16>().expect("32 bytes"),
        other => panic!("{other:?}"),
    }))
}

/// Far more than the pool holds is computed, and a replica breaks in the middle: an index of the events is what the replica says of itself.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_index_follows_evictions_and_another_life() {
    let (rig, publish, replay) = publishing(1, false);
    let consumer = Consumer::start(listen(publish, replay)).expect("sound settings");
    until("trust", || consumer.trust() == Trust::Whole).await;
    assert_eq!(consumer.epoch(), Some(rig.engine.status().replicas[0].epoch.0));
    let cached = || rig.engine.status().replicas[0].load.cached_blocks as usize;
    let many = || {
        for which in 0..60 {
            read(&mut rig.submit(rig.submission(&prompt(which, 100 + which % 50), 20)));
        }
        rig.wait_until_empty();
    };
    tokio::task::block_in_place(many);
    assert!(rig.metric("penstock_evicted_blocks_total") > 0.0, "the pool was too small for all");
    until("what is cached", || consumer.look(|index| index.len()) == cached() && cached() > 0).await;
    rig.controls[0].fault_at(rig.controls[0].steps() + 3, Fault::WrongRows);
    tokio::task::block_in_place(|| {
        read(&mut rig.submit(rig.submission(&prompt(200, 40), 20)));
        rig.wait_until("another life", |status| {
            status.replicas[0].state == ReplicaState::Ready && status.replicas[0].epoch.0 > 1
        });
    });
    until("an empty cache", || consumer.look(|index| index.is_empty())).await;
    let last = prompt(300, 40);
    tokio::task::block_in_place(|| {
        read(&mut rig.submit(rig.submission(&last, 1)));
    });
    let hashes: Vec<_> = chain(&last, block(&rig)).iter().map(|(key, _)| hash(key)).collect();
    until("the blocks of the new life", || consumer.prefix(&hashes) == Some(hashes.len())).await;
    assert_eq!(consumer.trust(), Trust::Whole);
    let late = Consumer::start(listen(publish, replay)).expect("sound settings");
    until("a late one", || late.trust() == Trust::Whole && late.prefix(&hashes) == Some(hashes.len())).await;
    assert_eq!(late.epoch(), Some(rig.engine.status().replicas[0].epoch.0));
    assert!(rig.engine.shutdown());
}

/// Which replicas computed something for some requests with one prompt.
fn placed(rig: &Rig, prompt: &[u32], times: usize) -> BTreeSet<u32> {
    let steps = || rig.controls.iter().map(|control| control.steps()).collect::<Vec<_>>();
    let before = steps();
    for _ in 0..times {
        read(&mut rig.submit(rig.submission(prompt, 2)));
        rig.wait_until_empty();
    }
    (0..).zip(before.iter().zip(steps())).filter(|(_, (before, after))| **before < *after).map(|(at, _)| at).collect()
}

/// Another engine's events, taken for those of a replica here: its gateway sends the prompts there that are said to be cached, the replica
/// looks for itself, and the answers are the same. When the events stop, load alone decides.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_gateway_routes_by_what_it_follows_and_by_load_when_that_is_stale() {
    let (told, publish, replay) = publishing(1, false);
    let config = EngineConfig { replica: ReplicaConfig { prefix_cache: true, ..checked() }, ..EngineConfig::default() };
    let rig = Rig::new(2, Sizes::default(), config);
    rig.wait_until("both replicas", |status| status.replicas.iter().all(|r| r.state == ReplicaState::Ready));
    let known = prompt(5, 60);
    tokio::task::block_in_place(|| read(&mut told.submit(told.submission(&known, 2))));
    let second = rig.engine.status().replicas[1].replica;
    let follower = rig.engine.follow_cache(second, listen(publish, replay)).expect("sound settings");
    until("trust", || follower.trust() == Trust::Whole && follower.counts().resyncs > 0).await;
    // Without a word of a cache, the first of two idle replicas is as good and comes first.
    let unknown = prompt(6, 60);
    tokio::task::block_in_place(|| {
        let deadline = Instant::now() + PATIENCE;
        while placed(&rig, &known, 1) != BTreeSet::from([second.0]) {
            assert!(Instant::now() < deadline, "the events do not reach the gateway");
        }
        assert_eq!(placed(&rig, &known, 3), BTreeSet::from([second.0]));
        assert_eq!(placed(&rig, &unknown, 1), BTreeSet::from([0]));
        let got = read(&mut rig.submit(rig.submission(&known, 8)));
        assert_eq!(got.tokens, [answer(&known, &SamplingParams::default(), 8)]);
    });
    assert_eq!(rig.metric("penstock_replicas_routed_by_load"), 0.0);
    assert!(told.engine.shutdown());
    drop(told);
    until("the loss", || follower.trust() != Trust::Whole).await;
    until("doubt", || rig.metric("penstock_replicas_routed_by_load") == 1.0).await;
    assert!(rig.metric("penstock_cache_doubts_total") >= 1.0);
    tokio::task::block_in_place(|| {
        assert_eq!(placed(&rig, &known, 1), BTreeSet::from([0]));
        let got = read(&mut rig.submit(rig.submission(&known, 8)));
        assert_eq!(got.tokens, [answer(&known, &SamplingParams::default(), 8)]);
    });
    drop(follower);
    assert!(rig.engine.shutdown());
}

#[test]
fn an_address_that_cannot_be_used_is_a_start_that_fails() {
    let settings =
        PublisherSettings { publish: "0.0.0.0:0".parse().expect("an address"), ..PublisherSettings::default() };
    let config = EngineConfig { kv_events: Some(settings), ..EngineConfig::default() };
    let model = penstock_engine::ServedModel {
        name: "fake".into(),
        namespace: Namespace([3; 32]),
        vocabulary: std::sync::Arc::new(support::Letters),
    };
    let fake = support::FakeExecutor::new(Sizes::default(), support::Control::open());
    let error = penstock_engine::Engine::start(config, model, vec![Box::new(fake)]).expect_err("it is open to all");
    assert!(error.to_string().contains("bind to loopback, or set expose"), "{error}");
}
