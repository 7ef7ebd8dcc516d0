//! Two ends of a session and a network that loses connections: each message arrives once and in order, or the session is over and says so.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use bytes::Bytes;
use penstock_control::{ConnectionId, Effect, Ended, Frame, Limits, NotSent, Session};
use proptest::prelude::*;

const SMALL: Limits = Limits {
    messages_max: 8,
    bytes_max: 64,
    message_bytes_max: 16,
    beat: Duration::from_millis(250),
    silence_max: Duration::from_secs(3),
    lease: Duration::from_secs(10),
};

/// One end with what it sent and got.
struct Side {
    session: Session,
    sent: Vec<u8>,
    got: Vec<u8>,
    ended: Vec<Ended>,
    /// Frames on their way to the other side, with their connection.
    out: VecDeque<(ConnectionId, Frame)>,
}

impl Side {
    fn new(now: Instant) -> Self {
        let session = Session::new(SMALL, now);
        Self { session, sent: Vec::new(), got: Vec::new(), ended: Vec::new(), out: VecDeque::new() }
    }

    fn carry_out(&mut self, effects: Vec<Effect>) {
        for effect in effects {
            match effect {
                Effect::Write(connection, frame) => self.out.push_back((connection, frame)),
                Effect::Deliver(body) => self.got.push(body[0]),
                Effect::Close(_) => {}
                Effect::Ended(why) => self.ended.push(why),
            }
        }
    }
}

/// Both ends, the clock, and the connection that is up.
struct World {
    now: Instant,
    sides: [Side; 2],
    connection: u64,
    up: bool,
}

impl World {
    fn new() -> Self {
        let now = Instant::now();
        Self { now, sides: [Side::new(now), Side::new(now)], connection: 0, up: false }
    }

    fn send(&mut self, from: usize) -> Result<(), NotSent> {
        let side = &mut self.sides[from];
        let body = side.sent.len() as u8;
        let mut effects = Vec::new();
        side.session.send(self.now, Bytes::copy_from_slice(&[body; 4]), &mut effects)?;
        side.sent.push(body);
        side.carry_out(effects);
        Ok(())
    }

    /// Carries the oldest frame that is under way from one side to the other.
    fn carry(&mut self, from: usize) -> bool {
        let Some((connection, frame)) = self.sides[from].out.pop_front() else { return false };
        let mut effects = Vec::new();
        if self.up && connection.0 == self.connection {
            let to = &mut self.sides[1 - from];
            to.session.frame(self.now, connection, frame, &mut effects);
            to.carry_out(effects);
        }
        true
    }

    fn connect(&mut self) {
        self.cut();
        self.connection += 1;
        self.up = true;
        let received = [self.sides[0].session.received(), self.sides[1].session.received()];
        for at in [0, 1] {
            let mut effects = Vec::new();
            let connection = ConnectionId(self.connection);
            self.sides[at].session.attach(self.now, connection, received[1 - at], &mut effects);
            self.sides[at].carry_out(effects);
        }
    }

    /// The connection breaks; what is under way on it is lost.
    fn cut(&mut self) {
        self.up = false;
        for side in &mut self.sides {
            side.out.clear();
            side.session.detach(self.now, ConnectionId(self.connection));
        }
    }

    fn pass(&mut self, time: Duration) {
        self.now += time;
        for side in &mut self.sides {
            let mut effects = Vec::new();
            side.session.tick(self.now, &mut effects);
            side.carry_out(effects);
        }
    }

    fn settle(&mut self) {
        for _ in 0..10_000 {
            if !(self.carry(0) | self.carry(1)) {
                return;
            }
        }
        panic!("frames beget frames without end");
    }

    /// What one side got is the beginning of what the other sent.
    fn check(&self) {
        for at in [0, 1] {
            let (sent, got) = (&self.sides[1 - at].sent, &self.sides[at].got);
            assert_eq!(got, &sent[..got.len()], "side {at}");
            assert!(self.sides[at].session.unconfirmed() <= SMALL.messages_max);
        }
    }
}

#[derive(Clone, Copy, Debug)]
enum Move {
    Send(usize),
    Carry(usize),
    Cut,
    Connect,
    Pass(u64),
}

fn moves() -> impl Strategy<Value = Vec<Move>> {
    let one = prop_oneof![
        8 => (0..2_usize).prop_map(Move::Send),
        10 => (0..2_usize).prop_map(Move::Carry),
        1 => Just(Move::Cut),
        2 => Just(Move::Connect),
        2 => (1..2_000_u64).prop_map(Move::Pass),
    ];
    prop::collection::vec(one, 0..200)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2_000, ..ProptestConfig::default() })]

    #[test]
    fn each_message_arrives_once_and_in_order_or_the_session_says_that_it_is_over(moves in moves()) {
        let mut world = World::new();
        world.connect();
        for step in moves {
            match step {
                Move::Send(from) => match world.send(from) {
                    Ok(()) | Err(NotSent::Full { .. } | NotSent::Over) => {}
                    Err(other) => panic!("{other}"),
                },
                Move::Carry(from) => _ = world.carry(from),
                Move::Cut => world.cut(),
                Move::Connect => world.connect(),
                Move::Pass(milliseconds) => world.pass(Duration::from_millis(milliseconds)),
            }
            world.check();
        }
        let alive = world.sides.iter().all(|side| !side.session.is_over());
        world.connect();
        world.settle();
        world.check();
        for side in &world.sides {
            prop_assert!(side.ended.len() <= 1, "ended {:?}", side.ended);
            prop_assert_eq!(side.ended.len() == 1, side.session.is_over());
        }
        if alive {
            for at in [0, 1] {
                prop_assert_eq!(&world.sides[at].got, &world.sides[1 - at].sent, "all of it arrived");
            }
        }
    }
}

#[test]
fn what_was_under_way_when_the_connection_broke_is_sent_again() {
    let mut world = World::new();
    world.connect();
    for _ in 0..3 {
        world.send(0).unwrap();
    }
    assert!(world.carry(0));
    world.cut();
    world.send(0).unwrap();
    assert_eq!(world.sides[1].got, [0]);
    world.connect();
    world.settle();
    assert_eq!(world.sides[1].got, [0, 1, 2, 3]);
}

#[test]
fn a_peer_that_confirms_nothing_is_back_pressure_at_the_limit() {
    let mut world = World::new();
    world.connect();
    for _ in 0..8 {
        world.send(0).unwrap();
    }
    assert_eq!(world.send(0), Err(NotSent::Full { what: "messages", limit: 8 }));
    world.settle();
    world.send(0).unwrap();
    // Eight messages of four bytes stay below the 64 bytes; larger ones reach these first.
    let mut effects = Vec::new();
    let mut session = Session::new(SMALL, world.now);
    for _ in 0..4 {
        session.send(world.now, Bytes::from_static(&[0; 16]), &mut effects).unwrap();
    }
    let one_more = session.send(world.now, Bytes::from_static(&[0; 1]), &mut effects);
    assert_eq!(one_more, Err(NotSent::Full { what: "bytes", limit: 64 }));
    let large = session.send(world.now, Bytes::from_static(&[0; 17]), &mut effects);
    assert_eq!(large, Err(NotSent::TooLarge { bytes: 17, limit: 16 }));
}

#[test]
fn silence_costs_the_connection_and_only_the_lease_costs_the_session() {
    let mut world = World::new();
    world.connect();
    // A network that swallows everything: both ends beat, and neither hears.
    world.pass(Duration::from_millis(2_999));
    assert!(world.sides.iter().all(|side| side.session.is_attached()));
    assert!(world.sides.iter().all(|side| matches!(side.out.back(), Some((_, Frame::Beat { .. })))), "it beats");
    world.pass(Duration::from_millis(1));
    assert!(world.sides.iter().all(|side| !side.session.is_attached()));
    world.pass(Duration::from_millis(9_999));
    assert!(world.sides.iter().all(|side| side.ended.is_empty()));
    world.pass(Duration::from_millis(1));
    assert!(world.sides.iter().all(|side| side.ended == [Ended::Lease]));
    assert_eq!(world.send(0), Err(NotSent::Over));
}

#[test]
fn an_older_connection_cannot_take_the_place_of_a_newer_one() {
    let now = Instant::now();
    let mut session = Session::new(SMALL, now);
    let mut effects = Vec::new();
    session.attach(now, ConnectionId(5), 0, &mut effects);
    session.attach(now, ConnectionId(4), 0, &mut effects);
    assert_eq!(effects, [Effect::Close(ConnectionId(4))]);
    effects.clear();
    session.attach(now, ConnectionId(6), 0, &mut effects);
    assert_eq!(effects, [Effect::Close(ConnectionId(5))]);
    // What still comes in on the old one counts for nothing.
    effects.clear();
    let late = Frame::Message { number: 1, received: 0, body: Bytes::from_static(b"late") };
    session.frame(now, ConnectionId(5), late, &mut effects);
    assert_eq!((session.received(), effects.len()), (0, 0));
}

#[test]
fn a_peer_that_breaks_the_protocol_ends_the_session() {
    let now = Instant::now();
    let connection = ConnectionId(1);
    let fault = |frame: Frame, why: &'static str| {
        let mut session = Session::new(SMALL, now);
        let mut effects = Vec::new();
        session.attach(now, connection, 0, &mut effects);
        session.frame(now, connection, frame, &mut effects);
        let ended = Effect::Ended(Ended::Protocol(why));
        assert_eq!(effects, [Effect::Close(connection), ended]);
    };
    fault(Frame::Message { number: 2, received: 0, body: Bytes::new() }, "a message is missing");
    fault(Frame::Message { number: 1, received: 1, body: Bytes::new() }, "it confirms what was never sent");
    fault(Frame::Beat { received: u64::MAX }, "it confirms what was never sent");
}

#[test]
fn a_goodbye_reaches_the_other_end() {
    let mut world = World::new();
    world.connect();
    let mut effects = Vec::new();
    world.sides[0].session.close(Ended::Closed, &mut effects);
    world.sides[0].carry_out(effects);
    assert_eq!(world.sides[0].ended, [Ended::Closed]);
    world.settle();
    assert_eq!(world.sides[1].ended, [Ended::Bye]);
}
