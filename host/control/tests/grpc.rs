//! Conversations over real sockets, through a proxy that cuts, stalls and goes away.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use penstock_control::{
    Conversation, DialError, DialSettings, End, Ended, Identity, Limits, Link, ListenSettings, Listening, NotSent,
    Refusal, dial, listen,
};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::AbortHandle;

/// Times short enough for a test, with the relations of the defaults.
fn limits() -> Limits {
    Limits {
        messages_max: 256,
        bytes_max: 1 << 20,
        message_bytes_max: 64 << 10,
        beat: Duration::from_millis(50),
        silence_max: Duration::from_millis(600),
        lease: Duration::from_secs(3),
    }
}

const WORKER: End = End { id: 7, epoch: 70 };
const GATEWAY: End = End { id: 1, epoch: 10 };

fn identity(end: End) -> Identity {
    Identity {
        end,
        compatibility: "model-a/bf16".to_owned(),
        greeting: Bytes::from(format!("this is {}", end.id)),
        token: Some("a-shared-secret".to_owned()),
    }
}

async fn worker() -> Listening {
    worker_as(WORKER, 8, loopback(0)).await
}

async fn worker_as(end: End, sessions_max: usize, at: SocketAddr) -> Listening {
    listen(at, ListenSettings { identity: identity(end), limits: limits(), sessions_max }).await.expect("listens")
}

fn loopback(port: u16) -> SocketAddr {
    SocketAddr::from(([127, 0, 0, 1], port))
}

fn call(address: SocketAddr, as_whom: End) -> DialSettings {
    DialSettings { address: address.to_string(), epoch: None, identity: identity(as_whom), limits: limits() }
}

/// Both ends of a new conversation.
async fn pair(worker: &mut Listening, address: SocketAddr) -> (Conversation, Conversation) {
    let ours = dial(call(address, GATEWAY)).await.expect("is welcome");
    let theirs = worker.accept().await.expect("was begun");
    (ours, theirs)
}

fn numbered(number: u64) -> Bytes {
    let mut body = number.to_le_bytes().to_vec();
    body.resize(8 + (number as usize * 37) % 900, number as u8);
    body.into()
}

/// Hands in `count` numbered messages, waiting where there is no room.
async fn send_all(link: &Link, count: u64) {
    for number in 0..count {
        loop {
            match link.send(numbered(number)) {
                Ok(()) => break,
                Err(NotSent::Full { .. }) => tokio::time::sleep(Duration::from_millis(1)).await,
                Err(other) => panic!("message {number}: {other}, {:?}", link.ended()),
            }
        }
    }
}

async fn expect_all(conversation: &mut Conversation, count: u64) {
    for number in 0..count {
        let got = tokio::time::timeout(Duration::from_secs(60), conversation.receive()).await.expect("comes in time");
        assert_eq!(got.as_ref(), Some(&numbered(number)), "ended {:?}", conversation.link().ended());
    }
}

/// Why the conversation ended, once it has.
async fn end_of(conversation: &mut Conversation) -> Ended {
    let wait = async { while conversation.receive().await.is_some() {} };
    tokio::time::timeout(Duration::from_secs(30), wait).await.expect("ends in time");
    conversation.link().ended().expect("says why")
}

/// Passes bytes between callers and one address, and can be told not to.
struct Proxy {
    address: SocketAddr,
    /// Where new connections go.
    target: Arc<Mutex<SocketAddr>>,
    passes: Arc<AtomicBool>,
    /// Bytes after which each connection is cut; 0 is never.
    cut_after: Arc<AtomicU64>,
    connections: Arc<AtomicU64>,
    task: AbortHandle,
}

impl Proxy {
    async fn before(target: SocketAddr) -> Self {
        let target = Arc::new(Mutex::new(target));
        let to = Arc::clone(&target);
        let listener = TcpListener::bind(loopback(0)).await.expect("loopback");
        let address = listener.local_addr().expect("loopback");
        let (passes, cut_after) = (Arc::new(AtomicBool::new(true)), Arc::new(AtomicU64::new(0)));
        let connections = Arc::new(AtomicU64::new(0));
        let (p, c, n) = (Arc::clone(&passes), Arc::clone(&cut_after), Arc::clone(&connections));
        let task = tokio::spawn(async move {
            loop {
                let Ok((near, _)) = listener.accept().await else { return };
                n.fetch_add(1, Ordering::Relaxed);
                let target = *to.lock().expect("loopback");
                let Ok(far) = TcpStream::connect(target).await else { continue };
                let (p, c) = (Arc::clone(&p), Arc::clone(&c));
                tokio::spawn(async move {
                    let (near_in, near_out) = near.into_split();
                    let (far_in, far_out) = far.into_split();
                    let one = carry(near_in, far_out, Arc::clone(&p), Arc::clone(&c));
                    let other = carry(far_in, near_out, p, c);
                    tokio::select! { () = one => {}, () = other => {} }
                });
            }
        });
        Self { address, target, passes, cut_after, connections, task: task.abort_handle() }
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn carry(
    mut from: tokio::net::tcp::OwnedReadHalf,
    mut to: tokio::net::tcp::OwnedWriteHalf,
    passes: Arc<AtomicBool>,
    cut_after: Arc<AtomicU64>,
) {
    let mut buffer = [0; 4096];
    let mut carried = 0;
    loop {
        let Ok(count @ 1..) = from.read(&mut buffer).await else { return };
        while !passes.load(Ordering::Relaxed) {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        carried += count as u64;
        let most = cut_after.load(Ordering::Relaxed);
        if most > 0 && carried > most {
            return;
        }
        if to.write_all(&buffer[..count]).await.is_err() {
            return;
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn messages_go_both_ways_in_order() {
    let mut listening = worker().await;
    let address = listening.address();
    let (mut ours, mut theirs) = pair(&mut listening, address).await;
    assert_eq!((ours.peer(), theirs.peer()), (WORKER, GATEWAY));
    assert_eq!((ours.greeting().as_ref(), theirs.greeting().as_ref()), (&b"this is 7"[..], &b"this is 1"[..]));
    let (near, far) = (ours.link(), theirs.link());
    tokio::join!(
        send_all(&near, 2_000),
        send_all(&far, 2_000),
        expect_all(&mut ours, 2_000),
        expect_all(&mut theirs, 2_000)
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn connections_that_are_cut_again_and_again_cost_no_message() {
    let mut listening = worker().await;
    let proxy = Proxy::before(listening.address()).await;
    let (mut ours, mut theirs) = pair(&mut listening, proxy.address).await;
    proxy.cut_after.store(60_000, Ordering::Relaxed);
    let (near, far) = (ours.link(), theirs.link());
    tokio::join!(
        send_all(&near, 2_000),
        send_all(&far, 2_000),
        expect_all(&mut ours, 2_000),
        expect_all(&mut theirs, 2_000)
    );
    let connections = proxy.connections.load(Ordering::Relaxed);
    assert!(connections > 10, "only {connections} connections: nothing was cut");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stall_longer_than_the_silence_that_is_allowed_costs_a_connection_and_no_message() {
    let mut listening = worker().await;
    let proxy = Proxy::before(listening.address()).await;
    let (ours, mut theirs) = pair(&mut listening, proxy.address).await;
    proxy.passes.store(false, Ordering::Relaxed);
    send_all(&ours.link(), 50).await;
    tokio::time::sleep(Duration::from_millis(1_500)).await;
    assert_eq!(ours.link().ended(), None);
    proxy.passes.store(true, Ordering::Relaxed);
    expect_all(&mut theirs, 50).await;
    assert!(proxy.connections.load(Ordering::Relaxed) > 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_a_connection_for_the_lease_both_ends_say_so() {
    let mut listening = worker().await;
    let proxy = Proxy::before(listening.address()).await;
    let (mut ours, mut theirs) = pair(&mut listening, proxy.address).await;
    proxy.passes.store(false, Ordering::Relaxed);
    assert_eq!(tokio::join!(end_of(&mut ours), end_of(&mut theirs)), (Ended::Lease, Ended::Lease));
    assert_eq!(ours.link().send(Bytes::new()), Err(NotSent::Over));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_reader_that_is_slow_is_back_pressure_and_not_a_lost_connection() {
    let mut listening = worker().await;
    let proxy = Proxy::before(listening.address()).await;
    let (ours, mut theirs) = pair(&mut listening, proxy.address).await;
    let link = ours.link();
    let mut sent = 0;
    let mut refused = 0;
    // Far longer than silence is allowed.
    for _ in 0..400 {
        while link.send(numbered(sent)).is_ok() {
            sent += 1;
        }
        refused += 1;
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    assert!(refused > 100 && sent >= 256, "{sent} sent");
    assert!(sent <= 3 * 256, "{sent} sent: the bound does not hold");
    assert_eq!(proxy.connections.load(Ordering::Relaxed), 1);
    expect_all(&mut theirs, sent).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn who_may_not_come_in_is_told_why() {
    let mut listening = worker().await;
    let address = listening.address();
    let mut stranger = call(address, GATEWAY);
    stranger.identity.token = Some("another".to_owned());
    assert_eq!(dial(stranger.clone()).await.unwrap_err(), DialError::Denied { address: address.to_string() });
    stranger.identity.token = None;
    assert_eq!(dial(stranger).await.unwrap_err(), DialError::Denied { address: address.to_string() });

    let mut other = call(address, GATEWAY);
    other.identity.compatibility = "model-b/int8".to_owned();
    let error = dial(other).await.unwrap_err().to_string();
    assert!(error.contains("model-a/bf16 here, model-b/int8 there"), "{error}");

    let mut late = call(address, GATEWAY);
    late.epoch = Some(69);
    let error = dial(late).await.unwrap_err();
    assert!(matches!(error, DialError::Refused { refusal: Refusal::Epoch, .. }), "{error}");

    let (_ours, mut before) = pair(&mut listening, address).await;
    let mut older = call(address, End { epoch: 9, ..GATEWAY });
    older.limits.lease = Duration::from_millis(300);
    let error = dial(older).await.unwrap_err();
    assert!(matches!(error, DialError::Refused { refusal: Refusal::Outdated, .. }), "{error}");
    // A later life takes the place of the earlier one, which is told.
    let _later = dial(call(address, End { epoch: 11, ..GATEWAY })).await.expect("is welcome");
    assert_eq!(end_of(&mut before).await, Ended::Replaced);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn there_is_a_limit_to_callers_and_a_draining_end_takes_no_new_one() {
    let mut listening = worker_as(WORKER, 1, loopback(0)).await;
    let address = listening.address();
    let (ours, mut theirs) = pair(&mut listening, address).await;
    let mut second = call(address, End { id: 2, epoch: 1 });
    second.limits.lease = Duration::from_millis(300);
    let error = dial(second.clone()).await.unwrap_err();
    assert!(matches!(error, DialError::Refused { refusal: Refusal::Full, .. }), "{error}");
    listening.drain();
    send_all(&ours.link(), 10).await;
    expect_all(&mut theirs, 10).await;
    ours.link().close();
    assert_eq!(end_of(&mut theirs).await, Ended::Bye);
    let error = dial(second).await.unwrap_err();
    assert!(matches!(error, DialError::Refused { refusal: Refusal::Draining, .. }), "{error}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_end_that_has_started_anew_does_not_go_on_where_the_old_one_was() {
    let mut listening = worker().await;
    let proxy = Proxy::before(listening.address()).await;
    let (mut ours, _theirs) = pair(&mut listening, proxy.address).await;
    let anew = worker_as(End { epoch: 71, ..WORKER }, 8, loopback(0)).await;
    *proxy.target.lock().unwrap() = anew.address();
    proxy.cut_after.store(1, Ordering::Relaxed);
    // The next frame cuts the old connection; new ones may carry a hello.
    tokio::time::sleep(Duration::from_millis(200)).await;
    proxy.cut_after.store(0, Ordering::Relaxed);
    assert_eq!(end_of(&mut ours).await, Ended::Refused(Refusal::Epoch));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nobody_at_the_address_is_said_after_the_lease() {
    let nobody = TcpListener::bind(loopback(0)).await.unwrap().local_addr().unwrap();
    let mut settings = call(nobody, GATEWAY);
    settings.limits.lease = Duration::from_millis(300);
    let error = dial(settings).await.unwrap_err();
    assert!(matches!(&error, DialError::Unreachable { why, .. } if why.contains("refused")), "{error}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_listener_that_goes_ends_what_came_in_by_it() {
    let mut listening = worker().await;
    let address = listening.address();
    let (mut ours, mut theirs) = pair(&mut listening, address).await;
    drop(listening);
    assert_eq!(end_of(&mut theirs).await, Ended::Closed);
    assert_eq!(end_of(&mut ours).await, Ended::Bye);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_port_that_speaks_something_else_is_named_so() {
    let listener = TcpListener::bind(loopback(0)).await.unwrap();
    let address = listener.local_addr().unwrap();
    let server = tokio::spawn(async move {
        while let Ok((mut connection, _)) = listener.accept().await {
            let _ = connection.write_all(b"HTTP/1.1 400 Bad Request\r\n\r\n").await;
        }
    });
    let mut settings = call(address, GATEWAY);
    settings.limits.lease = Duration::from_millis(300);
    let error = dial(settings).await.unwrap_err();
    assert!(matches!(error, DialError::Unreachable { .. } | DialError::Protocol { .. }), "{error}");
    server.abort();
}

#[tokio::test]
async fn a_greeting_that_the_other_end_would_not_take_is_refused_at_home() {
    let mut talkative = identity(WORKER);
    talkative.greeting = Bytes::from(vec![b'x'; (64 << 10) + 1]);
    let settings = ListenSettings { identity: talkative.clone(), limits: limits(), sessions_max: 1 };
    let error = listen(loopback(0), settings).await.unwrap_err();
    assert_eq!(error.kind(), std::io::ErrorKind::InvalidInput);
    let settings = DialSettings { identity: talkative, ..call(loopback(1), WORKER) };
    assert!(matches!(dial(settings).await.unwrap_err(), DialError::Settings { what: "the greeting", .. }));
}
