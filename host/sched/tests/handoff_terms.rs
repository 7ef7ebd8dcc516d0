//! What two ends must have alike, how a prompt is cut, and what bounds refuse: worked examples of a hand-off's begin.

#[path = "support/handoff_parts.rs"]
mod handoff_parts;

use handoff_parts::{Party, TABLE, caps, config, manifest, peer, pool, terms};
use penstock_base::{
    BlockKey, ClassRank, Duration, GatewayEpoch, Instant, Manifest, RequestId, TenantId, TransferId, TrustGroup,
};
use penstock_kv::{BlockTable, Confirm, Holder, Keys, OwnerId};
use penstock_sched::handoff::{
    Grid, LeaseTerms, Mismatch, Open, Order, Part, PartyConfig, Receiver, ReceiverEffect, ReceiverEvent, Refusal,
    Report, Reserve, Sender, SenderEffect, SenderEvent, Terms, Timing,
};

fn id(counter: u64) -> TransferId {
    TransferId::new(GatewayEpoch(1), counter).expect("small")
}

fn request() -> RequestId {
    RequestId::new(GatewayEpoch(1), 1).expect("small")
}

#[test]
fn every_difference_has_its_name() {
    let ours = terms(LeaseTerms::default());
    assert_eq!(ours.check(&ours), Ok(()));
    let leases = LeaseTerms { grace: Duration::from_ms(1), ..LeaseTerms::default() };
    let others = [
        (Terms { version: 9, ..ours }, Mismatch::Version { theirs: 9 }),
        (Terms { model: [9; 32], ..ours }, Mismatch::Model),
        (Terms { tokenizer: [9; 32], ..ours }, Mismatch::Tokenizer),
        (Terms { dtype_code: 9, ..ours }, Mismatch::Dtype { theirs: 9 }),
        (Terms { block_size_tokens: 32, ..ours }, Mismatch::BlockSize { theirs: 32 }),
        (Terms { layers: 9, ..ours }, Mismatch::Layers { theirs: 9 }),
        (Terms { layout: [9; 32], ..ours }, Mismatch::Layout),
        (Terms { slices: 2, ..ours }, Mismatch::Slices { theirs: 2 }),
        (Terms { transport_code: 9, ..ours }, Mismatch::Transport { theirs: 9 }),
        (Terms { leases, ..ours }, Mismatch::Leases),
    ];
    for (theirs, mismatch) in others {
        assert_eq!(ours.check(&theirs), Err(mismatch));
    }
}

#[test]
fn a_grid_covers_every_block_and_layer_once_in_the_order_of_computing() {
    // Blocks 3..8 in twos, layers 0..5 in threes: (3,4 5), (5,6), (7) by (0-2), (3-4), and the tail.
    let grid = Grid { first_block: 3, blocks: 5, chunk_blocks: 2, layers: 5, chunk_layers: 3 };
    assert!(grid.is_valid());
    assert_eq!(grid.chunks(), 7);
    let mut seen = Vec::new();
    for index in 0..6 {
        let Some(Part::Kv { first_block, blocks, first_layer, layers }) = grid.part(index) else { panic!("kv") };
        for block in first_block..first_block + blocks {
            seen.extend((first_layer..first_layer + layers).map(|layer| (block, layer)));
        }
    }
    assert_eq!((grid.part(6), grid.part(7)), (Some(Part::Tail), None));
    seen.sort_unstable();
    let all: Vec<(u32, u32)> = (3..8).flat_map(|block| (0..5).map(move |layer| (block, layer))).collect();
    assert_eq!(seen, all);
    // Nothing; one layer group of the first chunk; a block that is half a chunk; a whole group; all of KV, never the tail.
    let ready =
        [(0, 0), (3, 2), (3, 3), (4, 3), (5, 0), (5, 4), (7, 5), (8, 0), (99, 99)].map(|(b, l)| grid.ready(b, l));
    assert_eq!(ready, [0, 0, 1, 0, 2, 3, 5, 6, 6]);
}

#[test]
fn a_long_prompt_travels_in_larger_chunks() {
    // 2^20 blocks of 64 layers one by one would be 2^26 chunks; the limit is 4,096 with the tail.
    let grid = Grid { first_block: 0, blocks: 1 << 20, chunk_blocks: 1, layers: 64, chunk_layers: 1 }.fitting();
    assert!(grid.is_valid() && grid.chunks() <= 4_096, "{grid:?}");
    assert_eq!((grid.chunk_layers, grid.chunk_blocks), (1, 1 << 15));
    assert!(!Grid { chunk_blocks: 1, ..grid }.is_valid());
    assert!(!Grid { blocks: 0, ..grid }.is_valid());
}

fn begin(counter: u64, manifest: std::sync::Arc<Manifest>) -> ReceiverEvent {
    let ask = Reserve { manifest, attempt: 1, source: peer(Party::Sender, 1), caps: caps() };
    ReceiverEvent::Order { transfer: id(counter), to: peer(Party::Receiver, 1), order: Order::Begin(ask) }
}

fn answer(out: &[ReceiverEffect]) -> Option<Report> {
    out.iter().find_map(|effect| match effect {
        ReceiverEffect::Say(said) => Some(said.report),
        _ => None,
    })
}

#[test]
fn a_receiver_promises_what_it_has_and_refuses_the_rest_by_name() {
    let (mut kv, now) = (pool(), Instant(1));
    let mut receiver = Receiver::new(config(Party::Receiver, 1, Timing::default()), now);
    let mut ask = |receiver: &mut Receiver, counter, tokens, sequences| {
        let mut out = Vec::new();
        receiver.step(now, begin(counter, manifest(request(), tokens, sequences)), &mut kv, &mut out);
        (answer(&out).expect("an answer"), kv.reservations().total())
    };
    // 100 tokens and 16 of output are 116: eight blocks of sixteen. The pool has forty.
    assert_eq!(ask(&mut receiver, 1, 100, 1), (Report::Ready { first_block: 0 }, 8));
    assert_eq!(ask(&mut receiver, 1, 100, 1), (Report::Ready { first_block: 0 }, 8), "once, however often it is asked");
    assert_eq!(ask(&mut receiver, 2, 100, 2), (Report::Refused(Refusal::Sequences), 8));
    let longest = TABLE * 16 - 16;
    assert_eq!(ask(&mut receiver, 3, longest + 1, 1), (Report::Refused(Refusal::NeverFits), 8));
    assert_eq!(ask(&mut receiver, 4, longest, 1), (Report::Ready { first_block: 0 }, 32));
    assert_eq!(ask(&mut receiver, 5, 129, 1), (Report::Refused(Refusal::NoBlocks { short_blocks: 2 }), 32));
    assert_eq!(ask(&mut receiver, 6, 16, 1), (Report::Ready { first_block: 0 }, 34));
    assert_eq!(ask(&mut receiver, 7, 16, 1).0, Report::Ready { first_block: 0 });
    assert_eq!(ask(&mut receiver, 8, 16, 1).0, Report::Ready { first_block: 0 });
    assert_eq!(ask(&mut receiver, 9, 1, 1), (Report::Ready { first_block: 0 }, 40), "the last two blocks");
    // Transfers 1, 4, 6, 7, 8 and 9 are the six that the configuration allows at once.
    assert_eq!(ask(&mut receiver, 10, 1, 1), (Report::Refused(Refusal::NoSlot), 40));
}

#[test]
fn blocks_that_the_receiver_has_cached_do_not_travel() {
    let (mut kv, now) = (pool(), Instant(1));
    let keys: Vec<BlockKey> = (0..4).map(|index| BlockKey([index; 16])).collect();
    // Somebody else has computed the first two blocks of this prompt before.
    let mut table = BlockTable::with_capacity(4);
    kv.append(now, OwnerId(60), &mut table, 2).expect("room");
    let holder = Holder {
        tenant: TenantId(0),
        trust: TrustGroup(0),
        class: ClassRank::default(),
        retention: 50,
        quota_blocks: u64::MAX,
        expires: Instant::NEVER,
        no_store: false,
    };
    let confirm = Confirm { keys: Keys::prompt(&keys[..2]), upto: 2, holder, fence: None };
    assert_eq!(kv.confirm(now, &mut table, confirm, &mut Vec::new()).stored, 2);
    kv.release(now, &mut table, None);
    assert_eq!(kv.counts().cached, 2);
    let asked = Manifest { keys: keys.into(), ..(*manifest(request(), 70, 1)).clone() };
    let mut receiver = Receiver::new(config(Party::Receiver, 1, Timing::default()), now);
    let mut out = Vec::new();
    receiver.step(now, begin(1, asked.into()), &mut kv, &mut out);
    assert_eq!(answer(&out), Some(Report::Ready { first_block: 2 }));
    // 70 + 16 tokens are six blocks, two of them found.
    assert_eq!((kv.reservations().total(), kv.counts().active, kv.counts().cached), (4, 2, 0));
    kv.check_with_tables(receiver.tables()).expect("the books");
}

#[test]
fn a_sender_that_holds_too_much_says_so_and_takes_no_more() {
    let (mut kv, now) = (pool(), Instant(1));
    let small = PartyConfig { held_blocks: 8, transfers: 3, ..config(Party::Sender, 1, Timing::default()) };
    let mut sender = Sender::new(small, now);
    let mut open = |sender: &mut Sender, counter, tokens| {
        let ask = Open {
            manifest: manifest(request(), tokens, 1),
            attempt: 1,
            destination: peer(Party::Receiver, 1),
            first_block: 0,
            caps: caps(),
        };
        let (mut out, to) = (Vec::new(), peer(Party::Sender, 1));
        let event = SenderEvent::Order { transfer: id(counter), to, order: Order::Begin(ask) };
        sender.step(now, event, &mut kv, &mut out);
        let report = out.iter().find_map(|effect| match effect {
            SenderEffect::Say(said) => Some(said.report),
            _ => None,
        });
        let pressure = out.iter().find_map(|effect| match effect {
            SenderEffect::Accepting(accepting) => Some(*accepting),
            _ => None,
        });
        (report.expect("an answer"), pressure)
    };
    // Five blocks; four more would be nine.
    assert_eq!(open(&mut sender, 1, 80), (Report::Ready { first_block: 0 }, None));
    assert_eq!(open(&mut sender, 2, 64), (Report::Refused(Refusal::Congested), None));
    assert_eq!(open(&mut sender, 3, 48), (Report::Ready { first_block: 0 }, Some(false)), "full, and said so");
    assert_eq!(open(&mut sender, 4, 1), (Report::Refused(Refusal::Congested), None));
    let mut out = Vec::new();
    let close = Order::Close { end_work: true };
    sender.step(
        now,
        SenderEvent::Order { transfer: id(1), to: peer(Party::Sender, 1), order: close },
        &mut kv,
        &mut out,
    );
    sender.step(now, SenderEvent::Quiet(id(1)), &mut kv, &mut out);
    assert!(out.contains(&SenderEffect::Accepting(true)), "room again, and said so");
    assert_eq!(sender.held_blocks(), 3);
}
