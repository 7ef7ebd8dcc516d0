//! What becomes of a write by NIXL whose connection is cut while its bytes go another way?

#![allow(clippy::unwrap_used, reason = "test code outside test functions")]

mod world;

use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use penstock_transport::{Address, Descriptor, Event, Failure, Kind, Limits, NixlAddress, OpId, PeerId};
use world::*;

/// Passes bytes on until it is cut.
struct Relay {
    address: SocketAddr,
    streams: Arc<Mutex<Vec<TcpStream>>>,
}

impl Relay {
    fn new(target: SocketAddr) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let streams: Arc<Mutex<Vec<TcpStream>>> = Arc::default();
        let kept = Arc::clone(&streams);
        std::thread::spawn(move || {
            for client in listener.incoming().map_while(Result::ok) {
                let Ok(server) = TcpStream::connect(target) else { return };
                for (from, to) in [(&client, &server), (&server, &client)] {
                    let (mut from, mut to) = (from.try_clone().unwrap(), to.try_clone().unwrap());
                    std::thread::spawn(move || std::io::copy(&mut from, &mut to));
                }
                kept.lock().unwrap().extend([client, server]);
            }
        });
        Self { address, streams }
    }

    fn cut(&self) {
        for stream in self.streams.lock().unwrap().drain(..) {
            let _ = stream.shutdown(Shutdown::Both);
        }
    }
}

#[test]
fn by_nixl_nothing_lands_after_the_writer_is_said_to_have_left_though_it_lives() {
    if !nixl::is_there() {
        return;
    }
    let start = Instant::now();
    let a = end(Kind::Nixl, A, 1 << 20, 64, Limits::default());
    println!("figure: nixl, first endpoint of a process: {:.1} ms", start.elapsed().as_secs_f64() * 1e3);
    let start = Instant::now();
    let b = end(Kind::Nixl, B, 1 << 20, 64, Limits::default());
    println!("figure: nixl, a further endpoint: {:.1} ms", start.elapsed().as_secs_f64() * 1e3);
    let mut pair = Pair { a, b };
    let target = pair.b.transport.descriptor();
    let Address::Nixl(address) = target.address else { panic!("it is NIXL's") };
    let relay = Relay::new(address.control);
    let disguised = NixlAddress { control: relay.address, ..address };
    let disguised = Descriptor { address: Address::Nixl(disguised), ..target }.encode();
    pair.a.transport.connect(&disguised).unwrap();
    pair.until(|a, _| a.contains(&Event::Connected { peer: B }));
    fill(&pair.a.region, &mut Random(13));
    pair.a.transport.start(write(1, vec![span(0, 0, 64)])).unwrap();
    let mut first = vec![0; 1 << 20];
    let has_begun = |pair: &mut Pair, first: &mut Vec<u8>| {
        pair.b.region.read(0, first).unwrap();
        first.iter().any(|byte| *byte != 0)
    };
    while !has_begun(&mut pair, &mut first) {
        pair.a.turn();
        pair.b.turn();
    }
    relay.cut();
    // The receiver alone goes on: its word must not depend on what the writer does.
    let mut took = Duration::ZERO;
    while !pair.b.events.contains(&Event::Left { peer: A }) {
        let start = Instant::now();
        pair.b.turn();
        took = start.elapsed();
    }
    println!("figure: nixl, the turn with the fence: {:.1} ms", took.as_secs_f64() * 1e3);
    let own = fill(&pair.b.region, &mut Random(17));
    // Another peer, so that the receiver has somebody to serve: with the first it would serve this one's late bytes, too.
    let third = end(Kind::Nixl, PeerId { endpoint: 3, epoch: 1 }, 1 << 20, 64, Limits::default());
    let writer = std::mem::replace(&mut pair.a, third);
    pair.connect();
    let _third = std::mem::replace(&mut pair.a, writer);
    for _ in 0..300 {
        pair.a.transport.poll(Duration::from_millis(1), &mut pair.a.events);
        pair.b.transport.poll(Duration::from_millis(1), &mut pair.b.events);
    }
    assert_same("a write after its writer had left", &content(&pair.b.region), &own);
    assert!(!pair.b.events.iter().any(|event| matches!(event, Event::Landed { .. })));
    // The writer learns of it, and both meet again.
    pair.until(|a, _| ended(a, OpId(1)).is_some());
    assert_eq!(ended(&pair.a.events, OpId(1)).unwrap().0, Err(Failure::PeerGone));
    pair.a.events.clear();
    pair.a.transport.connect(&disguised).unwrap();
    pair.until(|a, _| a.contains(&Event::Connected { peer: B }));
    let sent = content(&pair.a.region);
    assert_eq!(pair.run(write(2, vec![span(0, 0, 64)])), Ok(()));
    assert_same("the next write", &content(&pair.b.region), &sent);
}
