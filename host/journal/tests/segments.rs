//! Segments of machines that are fed anything: they verify, and damage is an error or a mismatch, never a panic.

#![allow(clippy::unwrap_used, reason = "a test")]

mod support;

use penstock_base::codec::Writer;
use penstock_base::{Duration, Generation, Instant};
use penstock_journal::frame::{self, crc32};
use penstock_journal::{
    BreakCause, Closed, Ending, JournalError, Machine, Outcome, SegmentHeader, SegmentReader, SegmentWriter,
    VerifyError, digest_effects, verify_native,
};
use penstock_policy_api::native::NativePolicies;
use penstock_sched::gateway::{Gateway, GatewayConfig};
use penstock_sched::replica::{Replica, ReplicaConfig};
use support::{Make, Random};

const BUFFER: usize = 1 << 20;

struct Run<M: Machine> {
    machine: M,
    config: M::Config,
    policies: NativePolicies,
    now: Instant,
    random: Random,
}

impl Run<Gateway> {
    fn gateway(seed: u64) -> Self {
        let config = GatewayConfig { queue_requests_max: 8, context_tokens_max: 4_096, ..GatewayConfig::default() };
        Self::new(Gateway::new(config.clone(), Instant::ZERO), config, seed)
    }
}

impl Run<Replica> {
    fn replica(seed: u64) -> Self {
        let config = ReplicaConfig { blocks: 32, slots: 4, step_tokens: 64, ..ReplicaConfig::default() };
        Self::new(Replica::new(config.clone(), Instant::ZERO), config, seed)
    }
}

impl<M: Machine<Input: Make>> Run<M> {
    fn new(machine: M, config: M::Config, seed: u64) -> Self {
        let policies = NativePolicies::new(Generation(0), M::context_tokens_max(&config));
        Self { machine, config, policies, now: Instant::ZERO, random: Random(seed) }
    }

    fn header(&mut self) -> SegmentHeader {
        SegmentHeader::of(&self.machine, &self.config, &mut self.policies, (0, self.now))
    }

    fn open(&mut self, buffer: usize) -> SegmentWriter<M, Vec<u8>> {
        let header = self.header();
        SegmentWriter::open(Vec::new(), &header, buffer).unwrap()
    }

    fn step(&mut self, log: &mut SegmentWriter<M, Vec<u8>>) -> Result<(), Closed> {
        self.now = self.now + Duration::from_us(self.random.below(50_000));
        let input = M::Input::make(&mut self.random);
        let logged = log.input(self.now, &input);
        let mut effects = Vec::new();
        self.machine.advance(self.now, input, &mut self.policies, &mut effects);
        let effects = digest_effects(&effects, &mut Writer::new());
        logged?;
        log.outcome(&Outcome { generation: self.machine.generation(), effects, decisions: self.machine.decisions() })
    }

    /// A segment from the middle of a run.
    fn segment(&mut self, steps: u64) -> Vec<u8> {
        let mut before = self.open(BUFFER);
        for _ in 0..steps {
            self.step(&mut before).unwrap();
        }
        let mut log = self.open(BUFFER);
        for _ in 0..steps {
            self.step(&mut log).unwrap();
        }
        log.complete().unwrap()
    }
}

#[test]
fn a_segment_verifies_from_the_middle_of_a_run() {
    for seed in 0..20 {
        for segment in [Run::gateway(seed).segment(60), Run::replica(seed).segment(60)] {
            let verified = verify_native(&segment[..]).unwrap_or_else(|error| panic!("seed {seed}: {error}"));
            assert_eq!((verified.steps, verified.records, verified.ending), (60, 121, Ending::Complete), "seed {seed}");
        }
    }
}

#[test]
fn a_flipped_bit_is_an_error() {
    let random = &mut Random(7);
    for mut segment in [Run::gateway(1).segment(12), Run::replica(1).segment(12)] {
        for _ in 0..400 {
            let (at, bit) = (random.below(segment.len() as u64) as usize, 1 << random.below(8));
            segment[at] ^= bit;
            assert!(verify_native(&segment[..]).is_err(), "bit {bit} of byte {at}");
            segment[at] ^= bit;
        }
        assert!(verify_native(&segment[..]).is_ok());
    }
}

/// Damage that a forger has covered with right checksums is found by the digests, or refused by what it means.
#[test]
fn a_forged_record_is_an_error_or_a_mismatch_or_changes_nothing() {
    let random = &mut Random(8);
    let mut mismatches = 0;
    for segment in [Run::gateway(2).segment(20), Run::replica(2).segment(20)] {
        let header = header_bytes(&segment);
        for _ in 0..200 {
            let mut forged = segment.clone();
            let at = header + random.below((segment.len() - header) as u64) as usize;
            forged[at] ^= 1 << random.below(8);
            if !cover(&mut forged, header) {
                continue;
            }
            if let Err(VerifyError::Mismatch { .. }) = verify_native(&forged[..]) {
                mismatches += 1;
            }
        }
    }
    assert!(mismatches > 50, "{mismatches} mismatches: the digests see too little");
}

fn header_bytes(segment: &[u8]) -> usize {
    16 + u32::from_le_bytes(segment[12..16].try_into().unwrap()) as usize + 4
}

/// Writes right checksums into every record; false when the records' lengths no longer add up.
fn cover(segment: &mut [u8], header: usize) -> bool {
    let mut chain = crc32(0, &segment[..header]);
    let mut at = header;
    while at < segment.len() {
        let Some(head) = segment.get(at..at + 5) else { return false };
        let bytes = u32::from_le_bytes(head[1..].try_into().unwrap()) as usize;
        let Some(payload) = segment.get(at + 5..at + 5 + bytes) else { return false };
        chain = frame::checksum(chain, segment[at], payload);
        let Some(sum) = segment.get_mut(at + 5 + bytes..at + 9 + bytes) else { return false };
        sum.copy_from_slice(&chain.to_le_bytes());
        at += 9 + bytes;
    }
    true
}

#[test]
fn records_cannot_be_left_out_doubled_or_moved() {
    let segment = Run::gateway(3).segment(6);
    let mut records = Vec::new();
    let header = header_bytes(&segment);
    let mut at = header;
    while at < segment.len() {
        let end = at + 9 + u32::from_le_bytes(segment[at + 1..at + 5].try_into().unwrap()) as usize;
        records.push(&segment[at..end]);
        at = end;
    }
    let join = |records: &[&[u8]]| [&segment[..header], &records.concat()].concat();
    assert_eq!(join(&records), segment);
    let checksum = |records: &[&[u8]]| match verify_native(&join(records)[..]) {
        Err(VerifyError::Journal(JournalError::Checksum { record })) => record,
        other => panic!("{other:?}"),
    };
    assert_eq!(checksum(&[&records[..2], &records[4..]].concat()), 3, "left out");
    assert_eq!(checksum(&[&records[..4], &records[2..]].concat()), 5, "doubled");
    assert_eq!(checksum(&[&records[..2], &records[4..6], &records[2..4], &records[6..]].concat()), 3, "moved");
}

#[test]
fn bytes_that_stop_are_cut_off_or_truncated() {
    let segment = Run::gateway(4).segment(5);
    let header = header_bytes(&segment);
    for cut in 0..segment.len() {
        match verify_native(&segment[..cut]) {
            Ok(verified) => {
                assert!(cut >= header && verified.ending == Ending::CutOff);
                assert_eq!(verified.unfinished, verified.records % 2 == 1, "an input without an outcome");
            }
            Err(VerifyError::Journal(JournalError::Truncated { record })) => assert_eq!(record == 0, cut < header),
            Err(other) => panic!("cut at {cut}: {other}"),
        }
    }
    let more = [&segment[..], &[0]].concat();
    assert!(matches!(verify_native(&more[..]), Err(VerifyError::Journal(JournalError::Trailing))));
}

#[test]
fn a_writer_that_falls_behind_breaks_the_segment_off() {
    let mut run = Run::replica(5);
    let mut log = run.open(2_000);
    let mut steps = 0;
    let broken = loop {
        match run.step(&mut log) {
            Ok(()) => steps += 1,
            Err(broken) => break broken,
        }
    };
    assert_eq!(broken, Closed(BreakCause::Overload));
    assert!(log.waiting_bytes() <= 2_000);
    assert_eq!(run.step(&mut log), Err(broken), "nothing is recorded behind a gap");
    let segment = log.complete().unwrap();
    let verified = verify_native(&segment[..]).unwrap();
    assert_eq!((verified.steps, verified.ending), (steps, Ending::Broken(BreakCause::Overload)));
    // With the buffer written out in time, the same run is complete.
    let mut run = Run::replica(5);
    let mut log = run.open(2_000);
    for _ in 0..steps + 10 {
        run.step(&mut log).unwrap();
        log.write_out().unwrap();
    }
    assert_eq!(verify_native(&log.complete().unwrap()[..]).unwrap().ending, Ending::Complete);
}

#[test]
fn a_step_that_never_returned_is_on_record() {
    let mut run = Run::gateway(6);
    let mut log = run.open(BUFFER);
    run.step(&mut log).unwrap();
    log.input(run.now, &penstock_sched::gateway::GatewayInput::Tick).unwrap();
    let segment = log.break_off(BreakCause::Frozen).unwrap();
    let verified = verify_native(&segment[..]).unwrap();
    assert!(verified.unfinished);
    assert_eq!((verified.steps, verified.ending), (1, Ending::Broken(BreakCause::Frozen)));
}

#[test]
fn records_of_a_later_format_are_skipped() {
    let mut run = Run::gateway(7);
    let header = run.header();
    let mut bytes = header.to_segment();
    let chain = crc32(0, &bytes);
    let chain = frame::append(&mut bytes, chain, 77, b"something new");
    frame::append(&mut bytes, chain, frame::KIND_BROKEN, &[BreakCause::Stopped as u8, 1, 0, 0, 0, 0, 0, 0, 0]);
    let verified = verify_native(&bytes[..]).unwrap();
    assert_eq!((verified.unknown, verified.records, verified.ending), (1, 2, Ending::Broken(BreakCause::Stopped)));
}

#[test]
fn headers_are_read_with_care() {
    let mut run = Run::gateway(8);
    let bytes = run.header().to_segment();
    let open = |bytes: &[u8]| SegmentReader::open(bytes).map(|reader| reader.header().clone());
    assert_eq!(open(&bytes).unwrap(), run.header());
    assert!(matches!(open(b"PNSTKLOX...."), Err(JournalError::NotASegment)));
    let mut later = bytes.clone();
    later[8] = 9;
    assert!(matches!(open(&later), Err(JournalError::Version { found: 9, expected: 6 })));
    let mut long = bytes.clone();
    long[12..16].fill(0xff);
    assert!(matches!(open(&long), Err(JournalError::TooLong { record: 0, .. })));
    let mut reader = SegmentReader::open(&bytes[..]).unwrap();
    assert!(matches!(reader.next_record::<Replica>(), Err(JournalError::OtherMachine)));
}
