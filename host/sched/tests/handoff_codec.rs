//! Every message of the protocol comes back as it was; damaged bytes are refused, never a panic; and the version stands for the bytes.

#[path = "support/handoff_parts.rs"]
#[allow(dead_code, reason = "each test binary compiles this file and uses a part of it")]
mod handoff_parts;

use std::fmt::Debug;
use std::sync::Arc;

use handoff_parts::{Party, caps, manifest, peer, terms};
use penstock_base::codec::{Reader, Writer};
use penstock_base::{BlockRef, Duration, GatewayEpoch, Instant, RequestId, TransferId};
use penstock_sched::handoff::{
    Ack, Ask, Between, Coded, CoordinatorConfig, End, Envelope, Failure, Fallback, Grid, LeaseTerms, Mismatch, Open,
    Order, PROTOCOL_VERSION, PartyConfig, Refusal, Report, Reserve, Said, Seal, SenderWord, Side, Timing, ToReceiver,
    ToSender,
};

const KNOWN: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/handoff_codec.txt");

fn bytes_of(value: &impl Coded) -> Vec<u8> {
    let mut out = Writer::new();
    value.put(&mut out);
    out.into_bytes()
}

fn read<T: Coded>(bytes: &[u8]) -> Result<T, penstock_base::codec::DecodeError> {
    let mut from = Reader::new(bytes);
    let value = T::take(&mut from)?;
    from.finish().map(|()| value)
}

/// Comes back; no part of it is a whole; with any bit turned it is refused, or another value with bytes of its own.
fn holds<T: Coded + PartialEq + Debug>(all: &mut Vec<u8>, values: &[T]) {
    for value in values {
        let bytes = bytes_of(value);
        assert_eq!(read::<T>(&bytes).as_ref(), Ok(value));
        assert!((0..bytes.len()).all(|cut| read::<T>(&bytes[..cut]).is_err()), "a part of {value:?} is not a whole");
        for bit in 0..bytes.len() * 8 {
            let mut damaged = bytes.clone();
            damaged[bit / 8] ^= 1 << (bit % 8);
            if let Ok(other) = read::<T>(&damaged) {
                assert!(&other != value && bytes_of(&other) == damaged, "two encodings of {value:?}");
            }
        }
        all.extend_from_slice(&bytes);
    }
}

fn refusals() -> Vec<Refusal> {
    let mismatches = [
        Mismatch::Version { theirs: 2 },
        Mismatch::Model,
        Mismatch::Tokenizer,
        Mismatch::Dtype { theirs: 3 },
        Mismatch::BlockSize { theirs: 4 },
        Mismatch::Layers { theirs: 5 },
        Mismatch::Layout,
        Mismatch::Slices { theirs: 6 },
        Mismatch::Transport { theirs: 7 },
        Mismatch::Leases,
    ];
    let others = [
        Refusal::Envelope,
        Refusal::StaleEpoch,
        Refusal::WrongPeer,
        Refusal::Unknown,
        Refusal::NoBlocks { short_blocks: 8 },
        Refusal::NeverFits,
        Refusal::NoSlot,
        Refusal::Congested,
        Refusal::NotReady,
        Refusal::Sequences,
    ];
    mismatches.into_iter().map(Refusal::Terms).chain(others).collect()
}

fn failures() -> Vec<Failure> {
    vec![
        Failure::ReserveTimeout,
        Failure::OpenTimeout,
        Failure::BootstrapTimeout,
        Failure::WaitingTimeout,
        Failure::TransferTimeout,
        Failure::Silent,
        Failure::LeaseExpired,
        Failure::Stalled,
        Failure::Checksum,
        Failure::SealMismatch,
        Failure::PeerRestarted,
        Failure::PeerRefused(Refusal::Congested),
        Failure::PeerFailed,
        Failure::Prefill,
        Failure::GivenUp,
        Failure::GatewayGone,
        Failure::Closed,
        Failure::TableFull,
    ]
}

fn orders<B: Clone>(begin: B) -> Vec<Order<B>> {
    vec![
        Order::Begin(begin),
        Order::Keep { echo: Instant(9) },
        Order::Probe,
        Order::Take,
        Order::Close { end_work: true },
        Order::Close { end_work: false },
    ]
}

#[test]
fn messages_come_back_and_the_version_grows_with_their_bytes() {
    let (transfer, stamp) = (TransferId(0x0001_0000_0000_0002), Instant(3_000_000));
    let (from, to) = (peer(Party::Sender, 4), peer(Party::Receiver, 5));
    let asked = manifest(RequestId(6), 70, 1);
    let ack = Ack { base: 7, mask: 0b1010, window: 8, sealed: true };
    let seal = Seal { sum: u64::MAX - 1, sampled_tokens: 1 };
    let grid = Grid { first_block: 1, blocks: 4, chunk_blocks: 2, layers: 4, chunk_layers: 3 };
    let envelope = Envelope {
        terms: terms(LeaseTerms::default()),
        transfer,
        request: RequestId(6),
        attempt: 2,
        source: from,
        destination: to,
        input_tokens: 70,
        grid,
    };
    let mut all = Vec::new();
    let reserve = Reserve { manifest: asked.clone(), attempt: 2, source: from, caps: caps() };
    holds(&mut all, &orders(reserve));
    holds(
        &mut all,
        &orders(Open { manifest: asked.clone(), attempt: 2, destination: to, first_block: 1, caps: caps() }),
    );
    let reports = [
        Report::Ready { first_block: 1 },
        Report::Delivered,
        Report::Installed,
        Report::Stuck(Failure::Stalled),
        Report::Taken,
        Report::Unknown,
        Report::Closed,
    ];
    let reports = reports.into_iter().chain(refusals().into_iter().map(Report::Refused));
    let reports = reports.chain(failures().into_iter().map(Report::Failed));
    let said = |(index, report)| Said { transfer, from, stamp: (index % 2 == 0).then_some(stamp), report };
    holds(&mut all, &reports.enumerate().map(said).collect::<Vec<_>>());
    let words = [
        SenderWord::Hello(Arc::new(envelope)),
        SenderWord::Chunk { index: 3, sent: 4, arrived: 5 },
        SenderWord::Seal(seal),
        SenderWord::Beat,
    ];
    holds(&mut all, &words.map(|word| Between { transfer, from, to, body: ToReceiver { stamp, word } }));
    let blocks: Arc<[BlockRef]> =
        vec![BlockRef { index: 1, generation: 2 }, BlockRef { index: 3, generation: 4 }].into();
    let mut answers = vec![
        ToSender::Welcome { blocks, echo: stamp, ack },
        ToSender::Ack { echo: Some(stamp), ack },
        ToSender::Ack { echo: None, ack },
    ];
    answers.extend(refusals().into_iter().map(ToSender::Refuse));
    answers.extend(failures().into_iter().map(ToSender::Failed));
    let between = |body| Between { transfer, from: to, to: from, body };
    holds(&mut all, &answers.into_iter().map(between).collect::<Vec<_>>());
    let fallbacks = [Fallback::AtSender, Fallback::Anew, Fallback::Never];
    holds(
        &mut all,
        &fallbacks.map(|fallback| Ask {
            manifest: asked.clone(),
            attempt: 1,
            sender: from,
            receiver: to,
            caps: caps(),
            fallback,
        }),
    );
    holds(&mut all, &[Side::Sender, Side::Receiver]);
    let ends = [
        End::HandedOff(to),
        End::AtSender(from, Failure::Stalled),
        End::Anew(Failure::TableFull),
        End::Failed(Failure::Silent),
        End::Cancelled,
    ];
    holds(&mut all, &ends);
    holds(&mut all, &[PartyConfig::new(from, terms(LeaseTerms::default()))]);
    let (epoch, timing) = (GatewayEpoch(1), Timing { repeat: Duration::from_ms(5), ..Timing::default() });
    holds(&mut all, &[CoordinatorConfig { epoch, timing, leases: LeaseTerms::default(), transfers: 16 }]);

    // FNV-1a, written out: the file holds one number for all bytes.
    let sum = all
        .iter()
        .fold(0xcbf2_9ce4_8422_2325_u64, |sum, byte| (sum ^ u64::from(*byte)).wrapping_mul(0x0000_0100_0000_01b3));
    let now = format!("{PROTOCOL_VERSION} {sum:016x}\n");
    if std::env::var_os("PENSTOCK_BLESS").is_some() {
        std::fs::write(KNOWN, &now).expect("the tree can be written to");
    }
    let known = std::fs::read_to_string(KNOWN).expect("it is in the tree");
    assert_eq!(known, now, "what is said has changed: raise PROTOCOL_VERSION in src/handoff/terms.rs, then bless");
}

#[test]
fn the_bytes_are_the_ones_that_were_written_down() {
    let said = Said {
        transfer: TransferId(0x0102),
        from: peer(Party::Receiver, 3),
        stamp: Some(Instant(7)),
        report: Report::Ready { first_block: 5 },
    };
    // Transfer in eight bytes, replica 2 in four, epoch in eight, a flag and the stamp in eight, report 0 and its block in four.
    let expected =
        [2, 1, 0, 0, 0, 0, 0, 0, 2, 0, 0, 0, 3, 0, 0, 0, 0, 0, 0, 0, 1, 7, 0, 0, 0, 0, 0, 0, 0, 0, 5, 0, 0, 0];
    assert_eq!(bytes_of(&said), expected);
}
