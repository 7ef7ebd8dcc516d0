//! Python's pyzmq and msgpack on the other end, as vLLM and its consumers use them.

use std::env;
use std::io::{BufRead as _, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::Duration;

use penstock_kv_events::{BlockHash, Consumer, ConsumerSettings, Publisher, PublisherSettings, Trust};

use super::{removed, settings, stored, until};

/// `PENSTOCK_PYTHON`, or the environment of the end-to-end tests, when it has what is needed.
fn python() -> Option<PathBuf> {
    let made = Path::new(env!("CARGO_TARGET_TMPDIR")).with_file_name("python").join("bin/python");
    let candidates = env::var_os("PENSTOCK_PYTHON").map(PathBuf::from).into_iter().chain([made]);
    let has_all = |python: &PathBuf| {
        let mut check = Command::new(python);
        check.args(["-c", "import zmq, msgpack"]).stdout(Stdio::null()).stderr(Stdio::null());
        check.status().is_ok_and(|status| status.success())
    };
    let found = candidates.into_iter().find(has_all);
    if found.is_none() {
        println!(
            "SKIPPED pyzmq: no Python with zmq and msgpack in target/python; `cargo xtask test` makes it, or set PENSTOCK_PYTHON"
        );
    }
    found
}

struct Script {
    child: Child,
    output: BufReader<ChildStdout>,
}

impl Drop for Script {
    fn drop(&mut self) {
        // It may have ended by itself.
        _ = self.child.kill();
        _ = self.child.wait();
    }
}

impl Script {
    fn run(name: &str, arguments: &[String]) -> Option<Self> {
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name);
        let mut command = Command::new(python()?);
        command.arg(script).args(arguments).stdout(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let output = BufReader::new(child.stdout.take().unwrap());
        Some(Self { child, output })
    }

    fn line(&mut self) -> String {
        let mut line = String::new();
        self.output.read_line(&mut line).unwrap();
        line.trim_end().to_owned()
    }
}

/// A publisher as vLLM's is written, which withholds every fifth batch; it keeps all for replay and has no snapshots.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_python_publisher_is_followed() {
    let Some(mut script) = Script::run("publisher.py", &[]) else { return };
    let ports = script.line();
    let (publish, replay) = ports.split_once(' ').unwrap();
    let at = |port: &str| format!("tcp://127.0.0.1:{port}");
    let listen = ConsumerSettings::new(at(publish), Some(at(replay)));
    let consumer = Consumer::start(ConsumerSettings { probe: Duration::from_millis(200), ..listen }).unwrap();
    let truth: Vec<BlockHash> = (0..200).map(|block| BlockHash::Int(block * 1_000_003)).collect();
    until(|| consumer.prefix(&truth) == Some(200), "200 blocks").await;
    assert_eq!(consumer.trust(), Trust::Whole);
    assert_eq!(consumer.counts().restarts, 0);
    assert!(consumer.counts().replayed >= 40, "{:?}", consumer.counts());
    assert_eq!(consumer.epoch(), None, "it has no snapshots");
}

/// A subscriber and a DEALER of Python at our publisher: it prints what it decodes.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_python_subscriber_follows_us() {
    let publisher = Publisher::bind(PublisherSettings { rank: Some(3), ..settings() }).await.unwrap();
    // Before anybody listens: to be had by replay only.
    publisher.publish(1.5, vec![stored([1])]);
    let ports = [publisher.publish_address().port(), publisher.replay_address().unwrap().port()];
    let Some(mut script) = Script::run("subscriber.py", &ports.map(|port| port.to_string())) else { return };
    until(|| publisher.counts().subscribers == 1, "the subscriber").await;
    let (live, replayed) = tokio::task::spawn_blocking({
        // The subscription follows the connection, so one batch may be too early.
        let publisher = std::sync::Arc::new(publisher);
        let speaking = std::sync::Arc::clone(&publisher);
        let speak = tokio::spawn(async move {
            loop {
                speaking.publish(2.5, vec![removed([1])]);
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        });
        move || {
            let lines = (script.line(), script.line());
            speak.abort();
            lines
        }
    })
    .await
    .unwrap();
    let hash = "0000000000000001000000000000abcd";
    assert_eq!(
        live,
        format!(
            "live kv@worker-0@model [2.5, [{{'type': 'BlockRemoved', 'block_hashes': ['{hash}'], 'medium': 'CPU'}}], 3]"
        )
    );
    assert_eq!(
        replayed,
        format!(
            "replayed kv@worker-0@model 0 [1.5, [{{'type': 'BlockStored', 'block_hashes': ['{hash}'], 'parent_block_hash': None, \
             'token_ids': [], 'block_size': 16, 'lora_id': None, 'medium': 'CPU', 'lora_name': None}}], 3]"
        )
    );
}
