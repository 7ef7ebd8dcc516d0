//! Every state of the three hand-off machines meets every event: what it becomes, and what it says. The tables in `handoff/` are the answer,
//! line by line; the diagrams' arrows are written down here once more and hold for every line.

#[path = "support/handoff_parts.rs"]
mod handoff_parts;

use std::fmt::{Debug, Write as _};
use std::path::Path;

use handoff_parts::{Party, caps, config, manifest, peer, pool};
use penstock_base::{Duration, GatewayEpoch, Instant, RequestId, TransferId};
use penstock_kv::{BlockTable, Kv, OwnerId};
use penstock_sched::handoff::{
    Ack, Ask, Between, Coordinator, CoordinatorConfig, CoordinatorEffect, CoordinatorEvent, Failure, Fallback,
    LeaseTerms, Open, Order, Receiver, ReceiverEffect, ReceiverEvent, Refusal, Report, Reserve, Said, Seal, Sender,
    SenderEffect, SenderEvent, SenderWord, Side, Timing, ToReceiver, ToSender, chunk_sum,
};

const GATEWAY: GatewayEpoch = GatewayEpoch(1);
const T0: Instant = Instant(1_000_000_000);

fn transfer() -> TransferId {
    TransferId::new(GATEWAY, 1).expect("small")
}

fn request() -> RequestId {
    RequestId::new(GATEWAY, 1).expect("small")
}

fn later(ms: u64) -> Instant {
    T0 + Duration::from_ms(ms)
}

/// A value's own description up to its first field; ids are the same in all of the table.
fn word(value: &impl Debug) -> String {
    let text = format!("{value:?}");
    let word = text.split([' ', '{']).next().unwrap_or_default();
    word.split("(TransferId").next().unwrap_or_default().split("(Envelope").next().unwrap_or_default().to_owned()
}

/// Compares with the file, or writes it anew when asked to.
fn check_table(name: &str, table: &str) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/handoff").join(name);
    if std::env::var_os("PENSTOCK_BLESS").is_some() {
        std::fs::write(&path, table).expect("write the table");
    }
    let expected = std::fs::read_to_string(&path).expect("the table");
    assert_eq!(table, expected, "{name} differs; look at each line, then PENSTOCK_BLESS=1");
}

/// A move is an arrow of the diagram, or none.
fn check_move(moves: &[(&str, &str)], from: &str, to: &str, event: &str) {
    let bare = |state: &str| state.split('(').next().unwrap_or_default().to_owned();
    let (from, to) = (bare(from), bare(to));
    assert!(from == to || moves.contains(&(from.as_str(), to.as_str())), "{from} became {to} by {event}");
}

// --- Receiver ------------------------------------------------------------------------------------------------------------------

/// Two blocks in two chunks of two layers each, and the tail.
const CHUNKS: u32 = 3;

fn whole_sum() -> u64 {
    (0..CHUNKS).fold(0u64, |sum, index| sum.wrapping_add(chunk_sum(index, u64::from(index))))
}

fn reserve() -> Reserve {
    let source = peer(Party::Sender, 1);
    Reserve { manifest: manifest(request(), 30, 1), attempt: 1, source, caps: caps() }
}

fn open() -> Open {
    let destination = peer(Party::Receiver, 1);
    Open { manifest: manifest(request(), 30, 1), attempt: 1, destination, first_block: 0, caps: caps() }
}

fn from_sender(word: SenderWord) -> ReceiverEvent {
    let body = ToReceiver { stamp: T0, word };
    let (from, to) = (peer(Party::Sender, 1), peer(Party::Receiver, 1));
    ReceiverEvent::Sender(Between { transfer: transfer(), from, to, body })
}

fn receive(order: Order<Reserve>) -> ReceiverEvent {
    ReceiverEvent::Order { transfer: transfer(), to: peer(Party::Receiver, 1), order }
}

/// The hello that a sender of this configuration really sends.
fn hello() -> SenderWord {
    let mut sender = Sender::new(config(Party::Sender, 1, Timing::default()), T0);
    let mut out = Vec::new();
    let event = SenderEvent::Order { transfer: transfer(), to: peer(Party::Sender, 1), order: Order::Begin(open()) };
    sender.step(T0, event, &mut pool(), &mut out);
    let sent = out.into_iter().find_map(|effect| match effect {
        SenderEffect::Send(message) => Some(message.body.word),
        _ => None,
    });
    sent.expect("a hello goes out at once")
}

fn chunk(index: u32) -> SenderWord {
    SenderWord::Chunk { index, sent: u64::from(index), arrived: u64::from(index) }
}

fn receiver_events() -> Vec<(&'static str, Instant, ReceiverEvent)> {
    let SenderWord::Hello(envelope) = hello() else { panic!("a hello") };
    let mut other = *envelope;
    other.terms.dtype_code += 1;
    let stranger = |epoch| {
        let body = ToReceiver { stamp: T0, word: hello() };
        let (from, to) = (peer(Party::Sender, epoch), peer(Party::Receiver, 1));
        ReceiverEvent::Sender(Between { transfer: transfer(), from, to, body })
    };
    let broken = SenderWord::Chunk { index: 0, sent: 0, arrived: 1 };
    let elsewhere = ReceiverEvent::Order { transfer: transfer(), to: peer(Party::Receiver, 2), order: Order::Take };
    vec![
        ("begin", T0, receive(Order::Begin(reserve()))),
        ("keep", T0, receive(Order::Keep { echo: T0 })),
        ("probe", T0, receive(Order::Probe)),
        ("take", T0, receive(Order::Take)),
        ("close, work goes on", T0, receive(Order::Close { end_work: false })),
        ("close, work ends", T0, receive(Order::Close { end_work: true })),
        ("order for another epoch", T0, elsewhere),
        ("hello", T0, from_sender(hello())),
        ("hello with another dtype", T0, from_sender(SenderWord::Hello(other.into()))),
        ("hello of another epoch", T0, stranger(2)),
        ("chunk", T0, from_sender(chunk(0))),
        ("chunk, broken", T0, from_sender(broken)),
        ("chunk out of range", T0, from_sender(chunk(CHUNKS))),
        ("seal", T0, from_sender(SenderWord::Seal(Seal { sum: whole_sum(), sampled_tokens: 1 }))),
        ("beat", T0, from_sender(SenderWord::Beat)),
        ("fenced", T0, ReceiverEvent::Fenced(transfer())),
        ("digested", T0, ReceiverEvent::Digested { transfer: transfer(), sum: whole_sum() }),
        ("digested, another sum", T0, ReceiverEvent::Digested { transfer: transfer(), sum: 1 }),
        ("given up here", T0, ReceiverEvent::GiveUp(transfer())),
        ("sender restarted", T0, ReceiverEvent::PeerUp(peer(Party::Sender, 2))),
        ("gateway gone", T0, ReceiverEvent::GatewayDown(GATEWAY)),
        ("window shut", T0, ReceiverEvent::Window(0)),
        ("drain", T0, ReceiverEvent::Drain),
        ("tick", T0, ReceiverEvent::Tick),
        ("tick, lease to write over", later(3_000) - Duration::from_ns(1), ReceiverEvent::Tick),
        ("tick, all leases over", later(6_000), ReceiverEvent::Tick),
    ]
}

/// What leads to each state, from nothing.
fn receiver_states() -> Vec<(&'static str, Vec<ReceiverEvent>)> {
    let keep = || receive(Order::Keep { echo: T0 });
    let reserved = || vec![receive(Order::Begin(reserve())), keep()];
    let landing = || [reserved(), vec![from_sender(hello())]].concat();
    let all = (0..CHUNKS).map(|index| from_sender(chunk(index)));
    let seal = from_sender(SenderWord::Seal(Seal { sum: whole_sum(), sampled_tokens: 1 }));
    let fencing = [landing(), all.collect(), vec![seal]].concat();
    let verifying = [fencing.clone(), vec![ReceiverEvent::Fenced(transfer())]].concat();
    let installed =
        [verifying.clone(), vec![ReceiverEvent::Digested { transfer: transfer(), sum: whole_sum() }]].concat();
    let taken = [installed.clone(), vec![receive(Order::Take)]].concat();
    let quarantine = [landing(), vec![receive(Order::Close { end_work: true })]].concat();
    let over = [taken.clone(), vec![receive(Order::Close { end_work: false })]].concat();
    let failed = [reserved(), vec![receive(Order::Close { end_work: true })]].concat();
    vec![
        ("none", Vec::new()),
        ("Reserved", reserved()),
        ("Landing", landing()),
        ("Fencing", fencing),
        ("Verifying", verifying),
        ("Installed", installed),
        ("Taken", taken),
        ("Quarantine(Closed)", quarantine),
        ("over, taken", over),
        ("over, failed", failed),
    ]
}

fn receiver_says(effect: &ReceiverEffect) -> String {
    match effect {
        ReceiverEffect::Say(said) => format!("say {}", word(&said.report)),
        ReceiverEffect::Send(message) => format!("send {}", word(&message.body)),
        other => word(other),
    }
}

#[test]
fn every_event_in_every_state_of_a_receiver() {
    // The arrows of the diagram in receiver.rs; "over" is "none" to the machine.
    let moves = [
        ("none", "Reserved"),
        ("Reserved", "Landing"),
        ("Reserved", "none"),
        ("Landing", "Fencing"),
        ("Landing", "Quarantine"),
        ("Landing", "none"),
        ("Fencing", "Verifying"),
        ("Fencing", "Quarantine"),
        ("Fencing", "none"),
        ("Verifying", "Installed"),
        ("Verifying", "none"),
        ("Installed", "Taken"),
        ("Installed", "none"),
        ("Taken", "none"),
        ("Quarantine", "none"),
    ];
    let mut table = String::new();
    for (state, path) in receiver_states() {
        let mut kv = pool();
        let mut receiver = Receiver::new(config(Party::Receiver, 1, Timing::default()), T0);
        let mut tables = Vec::new();
        for event in path {
            let mut out = Vec::new();
            receiver.step(T0, event, &mut kv, &mut out);
            tables.extend(out.into_iter().filter_map(|effect| match effect {
                ReceiverEffect::Start(started) => Some(started.table),
                _ => None,
            }));
        }
        let at =
            |receiver: &Receiver| receiver.state(transfer()).map_or("none".to_owned(), |state| format!("{state:?}"));
        let is_over = state.starts_with("over");
        assert_eq!(at(&receiver), if is_over { "none" } else { state }, "the way to the state");
        for (name, now, event) in receiver_events() {
            let (mut kv, mut receiver, mut out) = (kv.clone(), receiver.clone(), Vec::new());
            receiver.step(now, event, &mut kv, &mut out);
            let next = at(&receiver);
            check_move(
                &moves,
                if is_over { "over" } else { state },
                if is_over && next == "none" { "over" } else { &next },
                name,
            );
            receiver.check(&kv).expect(name);
            let started = out.iter().filter_map(|effect| match effect {
                ReceiverEffect::Start(started) => Some(&started.table),
                _ => None,
            });
            let held: Vec<&BlockTable> = receiver.tables().chain(started).chain(&tables).collect();
            kv.check_with_tables(held).expect(name);
            let said: Vec<String> = out.iter().map(receiver_says).collect();
            let line = format!("{state:<18} | {name:<26} | {next:<30} | {}", said.join(", "));
            writeln!(table, "{}", line.trim_end()).expect("a string");
        }
    }
    check_table("receiver.txt", &table);
}

// --- Sender --------------------------------------------------------------------------------------------------------------------

fn send(order: Order<Open>) -> SenderEvent {
    SenderEvent::Order { transfer: transfer(), to: peer(Party::Sender, 1), order }
}

fn from_receiver(epoch: u64, body: ToSender) -> SenderEvent {
    let (from, to) = (peer(Party::Receiver, epoch), peer(Party::Sender, 1));
    SenderEvent::Receiver(Between { transfer: transfer(), from, to, body })
}

/// The welcome that a receiver of this configuration really sends.
fn welcome() -> SenderEvent {
    let mut receiver = Receiver::new(config(Party::Receiver, 1, Timing::default()), T0);
    let (mut kv, mut out) = (pool(), Vec::new());
    receiver.step(T0, receive(Order::Begin(reserve())), &mut kv, &mut out);
    receiver.step(T0, from_sender(hello()), &mut kv, &mut out);
    let sent = out.into_iter().find_map(|effect| match effect {
        ReceiverEffect::Send(message) => Some(message.body),
        _ => None,
    });
    from_receiver(1, sent.expect("a welcome goes out at once"))
}

fn everything() -> ToSender {
    ToSender::Ack { echo: None, ack: Ack { base: CHUNKS, mask: 0, window: 4, sealed: true } }
}

fn seal() -> SenderEvent {
    SenderEvent::Prefilled { transfer: transfer(), seal: Seal { sum: whole_sum(), sampled_tokens: 1 } }
}

fn sender_events(table: &BlockTable) -> Vec<(&'static str, Instant, SenderEvent)> {
    let elsewhere = SenderEvent::Order { transfer: transfer(), to: peer(Party::Sender, 2), order: Order::Take };
    vec![
        ("begin", T0, send(Order::Begin(open()))),
        ("keep", T0, send(Order::Keep { echo: T0 })),
        ("probe", T0, send(Order::Probe)),
        ("take", T0, send(Order::Take)),
        ("close, work goes on", T0, send(Order::Close { end_work: false })),
        ("close, work ends", T0, send(Order::Close { end_work: true })),
        ("order for another epoch", T0, elsewhere),
        ("welcome", T0, welcome()),
        ("ack of everything", T0, from_receiver(1, everything())),
        ("refused", T0, from_receiver(1, ToSender::Refuse(Refusal::Unknown))),
        ("receiver gave up", T0, from_receiver(1, ToSender::Failed(Failure::WaitingTimeout))),
        ("word of another epoch", T0, from_receiver(2, ToSender::Refuse(Refusal::StaleEpoch))),
        ("placed", T0, SenderEvent::Placed { transfer: transfer(), blocks: table.blocks().to_vec() }),
        ("computed", T0, SenderEvent::Computed { transfer: transfer(), blocks: 2, layers: 0 }),
        ("prefilled", T0, seal()),
        ("prefill failed", T0, SenderEvent::PrefillFailed(transfer())),
        ("quiet", T0, SenderEvent::Quiet(transfer())),
        ("receiver restarted", T0, SenderEvent::PeerUp(peer(Party::Receiver, 2))),
        ("gateway gone", T0, SenderEvent::GatewayDown(GATEWAY)),
        ("drain", T0, SenderEvent::Drain),
        ("tick", T0, SenderEvent::Tick),
        ("tick, grace over", later(2_000), SenderEvent::Tick),
        ("tick, all leases over", later(6_000), SenderEvent::Tick),
    ]
}

fn sender_states(table: &BlockTable) -> Vec<(&'static str, Vec<SenderEvent>)> {
    let opening = || vec![send(Order::Begin(open())), send(Order::Keep { echo: T0 })];
    let placed = SenderEvent::Placed { transfer: transfer(), blocks: table.blocks().to_vec() };
    let moving = [opening(), vec![placed, welcome()]].concat();
    let delivered = [moving.clone(), vec![seal(), from_receiver(1, everything())]].concat();
    let stuck = [moving.clone(), vec![from_receiver(1, ToSender::Failed(Failure::WaitingTimeout))]].concat();
    let local = [delivered.clone(), vec![send(Order::Take)]].concat();
    let draining = [delivered.clone(), vec![send(Order::Close { end_work: true })]].concat();
    let quiet = || vec![SenderEvent::Quiet(transfer())];
    let over = [local.clone(), vec![send(Order::Close { end_work: false })], quiet()].concat();
    let failed = [draining.clone(), quiet()].concat();
    vec![
        ("none", Vec::new()),
        ("Opening", opening()),
        ("Moving", moving),
        ("Delivered", delivered),
        ("Stuck(PeerFailed)", stuck),
        ("Local", local),
        ("Draining(Closed)", draining),
        ("over, taken", over),
        ("over, failed", failed),
    ]
}

fn sender_says(effect: &SenderEffect) -> String {
    match effect {
        SenderEffect::Say(said) => format!("say {}", word(&said.report)),
        SenderEffect::Send(message) => format!("send {}", word(&message.body.word)),
        other => word(other),
    }
}

#[test]
fn every_event_in_every_state_of_a_sender() {
    let moves = [
        ("none", "Opening"),
        ("Opening", "Moving"),
        ("Moving", "Delivered"),
        ("Opening", "Stuck"),
        ("Moving", "Stuck"),
        ("Delivered", "Stuck"),
        ("Opening", "Local"),
        ("Moving", "Local"),
        ("Delivered", "Local"),
        ("Stuck", "Local"),
        ("Opening", "Draining"),
        ("Moving", "Draining"),
        ("Delivered", "Draining"),
        ("Stuck", "Draining"),
        ("Local", "Draining"),
        // At once when nothing reads its blocks any more.
        ("Stuck", "none"),
        ("Local", "none"),
        ("Draining", "none"),
    ];
    let mut kv = pool();
    let mut prompt = BlockTable::with_capacity(8);
    kv.append(T0, OwnerId(60), &mut prompt, 2).expect("room");
    let mut table = String::new();
    for (state, path) in sender_states(&prompt) {
        let mut kv: Kv = kv.clone();
        let mut sender = Sender::new(config(Party::Sender, 1, Timing::default()), T0);
        for event in path {
            sender.step(T0, event, &mut kv, &mut Vec::new());
        }
        let at = |sender: &Sender| sender.state(transfer()).map_or("none".to_owned(), |state| format!("{state:?}"));
        let is_over = state.starts_with("over");
        assert_eq!(at(&sender), if is_over { "none" } else { state }, "the way to the state");
        for (name, now, event) in sender_events(&prompt) {
            let (mut kv, mut sender, mut out) = (kv.clone(), sender.clone(), Vec::new());
            sender.step(now, event, &mut kv, &mut out);
            let next = at(&sender);
            check_move(
                &moves,
                if is_over { "over" } else { state },
                if is_over && next == "none" { "over" } else { &next },
                name,
            );
            sender.check(&kv).expect(name);
            kv.check_with_tables([&prompt]).expect(name);
            let said: Vec<String> = out.iter().map(sender_says).collect();
            let line = format!("{state:<18} | {name:<26} | {next:<30} | {}", said.join(", "));
            writeln!(table, "{}", line.trim_end()).expect("a string");
        }
    }
    check_table("sender.txt", &table);
}

// --- Coordinator ---------------------------------------------------------------------------------------------------------------

fn ask() -> Ask {
    Ask {
        manifest: manifest(request(), 30, 1),
        attempt: 1,
        sender: peer(Party::Sender, 1),
        receiver: peer(Party::Receiver, 1),
        caps: caps(),
        fallback: Fallback::AtSender,
    }
}

fn said(side: Side, epoch: u64, report: Report) -> CoordinatorEvent {
    let party = if side == Side::Sender { Party::Sender } else { Party::Receiver };
    let over = matches!(report, Report::Refused(_) | Report::Failed(_) | Report::Unknown | Report::Closed);
    let stamp = (!over).then_some(T0);
    CoordinatorEvent::Said { side, said: Said { transfer: transfer(), from: peer(party, epoch), stamp, report } }
}

fn reports() -> [Report; 9] {
    [
        Report::Ready { first_block: 0 },
        Report::Delivered,
        Report::Installed,
        Report::Stuck(Failure::Stalled),
        Report::Taken,
        Report::Refused(Refusal::NoSlot),
        Report::Failed(Failure::LeaseExpired),
        Report::Unknown,
        Report::Closed,
    ]
}

fn coordinator_events() -> Vec<(String, Instant, CoordinatorEvent)> {
    let mut events = vec![
        ("cancel".to_owned(), T0, CoordinatorEvent::Cancel(transfer())),
        ("sender restarted".to_owned(), T0, CoordinatorEvent::PeerUp(peer(Party::Sender, 2))),
        ("receiver restarted".to_owned(), T0, CoordinatorEvent::PeerUp(peer(Party::Receiver, 2))),
        ("word of a later epoch".to_owned(), T0, said(Side::Receiver, 2, Report::Refused(Refusal::StaleEpoch))),
        ("word of an earlier epoch".to_owned(), T0, said(Side::Receiver, 0, Report::Installed)),
        ("tick".to_owned(), T0, CoordinatorEvent::Tick),
        ("tick, the wait is over".to_owned(), later(90_000), CoordinatorEvent::Tick),
    ];
    for side in [Side::Sender, Side::Receiver] {
        events.extend(reports().map(|report| (format!("{side:?} says {}", word(&report)), T0, said(side, 1, report))));
    }
    events
}

fn coordinator_states() -> Vec<(&'static str, Vec<(Instant, CoordinatorEvent)>)> {
    let begin = || vec![(T0, CoordinatorEvent::Begin(ask()))];
    let ready = |side| vec![(T0, said(side, 1, Report::Ready { first_block: 0 }))];
    let opening = [begin(), ready(Side::Receiver)].concat();
    let moving = [opening.clone(), ready(Side::Sender)].concat();
    let to_receiver = [moving.clone(), vec![(T0, said(Side::Receiver, 1, Report::Installed))]].concat();
    let to_sender = [moving.clone(), vec![(T0, said(Side::Sender, 1, Report::Stuck(Failure::Stalled)))]].concat();
    let silence = || vec![(later(2_000), CoordinatorEvent::Tick)];
    let closing = [to_receiver.clone(), vec![(T0, said(Side::Receiver, 1, Report::Taken))]].concat();
    vec![
        ("none", Vec::new()),
        ("Reserving", begin()),
        ("Opening", opening),
        ("Moving", moving),
        ("Settling(Receiver)", to_receiver.clone()),
        ("Settling(Sender)", to_sender.clone()),
        ("Fencing(Receiver)", [to_receiver, silence()].concat()),
        ("Fencing(Sender)", [to_sender, silence()].concat()),
        ("Closing", closing),
    ]
}

fn coordinator_says(effect: &CoordinatorEffect) -> String {
    match effect {
        CoordinatorEffect::ToSender { order, .. } => format!("sender {}", word(order)),
        CoordinatorEffect::ToReceiver { order, .. } => format!("receiver {}", word(order)),
        CoordinatorEffect::Ended { end, .. } => format!("ENDED {}", word(end)),
        other => word(other),
    }
}

#[test]
fn every_event_in_every_state_of_a_coordinator() {
    let moves = [
        ("Reserving", "Opening"),
        ("Reserving", "Closing"),
        ("Reserving", "none"),
        ("Opening", "Moving"),
        ("Opening", "Settling"),
        ("Opening", "Closing"),
        ("Moving", "Settling"),
        ("Moving", "Closing"),
        ("Settling", "Fencing"),
        ("Settling", "Closing"),
        ("Fencing", "Settling"),
        ("Fencing", "Closing"),
        ("Closing", "none"),
    ];
    let timing = Timing::default();
    let config = CoordinatorConfig { epoch: GATEWAY, timing, leases: LeaseTerms::default(), transfers: 4 };
    let mut table = String::new();
    for (state, path) in coordinator_states() {
        let mut coordinator = Coordinator::new(config, T0);
        let mut ended = 0;
        for (now, event) in path {
            let mut out = Vec::new();
            coordinator.step(now, event, &mut out);
            ended += out.iter().filter(|effect| matches!(effect, CoordinatorEffect::Ended { .. })).count();
        }
        let at = |it: &Coordinator| it.state(transfer()).map_or("none".to_owned(), |state| format!("{state:?}"));
        assert_eq!(at(&coordinator), state, "the way to the state");
        for (name, now, event) in coordinator_events() {
            let (mut coordinator, mut out) = (coordinator.clone(), Vec::new());
            coordinator.step(now, event, &mut out);
            let next = at(&coordinator);
            check_move(&moves, state, &next, &name);
            coordinator.check().expect(&name);
            let here = out.iter().filter(|effect| matches!(effect, CoordinatorEffect::Ended { .. })).count();
            let over = matches!(next.as_str(), "Closing" | "none") && state != "none";
            assert_eq!(ended + here, usize::from(over), "one end, on the way into closing: {state}, {name}");
            let said: Vec<String> = out.iter().map(coordinator_says).collect();
            let line = format!("{state:<18} | {name:<31} | {next:<18} | {}", said.join(", "));
            writeln!(table, "{}", line.trim_end()).expect("a string");
        }
    }
    check_table("coordinator.txt", &table);
}
