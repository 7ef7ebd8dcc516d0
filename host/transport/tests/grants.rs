//! A guarded endpoint: blocks are there for whoever was granted them, for that grant, and for as long as it lasts.

#![allow(clippy::single_range_in_vec_init, reason = "a grant is a list of runs, and often of one")]

use std::time::{Duration, Instant};

use penstock_transport::{
    ByReference, Direction, Event, Failure, GrantId, Limits, OpId, PeerId, Refusal, Region, Setup, Span, Transfer,
    Transport, TransportError,
};

const A: PeerId = PeerId { endpoint: 1, epoch: 1 };
const B: PeerId = PeerId { endpoint: 2, epoch: 1 };
const BYTES: usize = 64;

struct Pair {
    a: ByReference,
    b: ByReference,
    to: Region,
    next: u64,
}

impl Pair {
    fn new() -> Self {
        let region = || Region::private(BYTES, 16).expect("memory");
        let (from, to) = (region(), region());
        (0..16).for_each(|block| from.fill(block, &[block as u8 + 1; BYTES]).expect("there"));
        let setup =
            |identity, region: &Region| Setup { identity, regions: vec![region.clone()], limits: Limits::default() };
        let mut a = ByReference::new(setup(A, &from)).expect("a setup");
        let b = ByReference::guarded(setup(B, &to)).expect("a setup");
        a.connect(&b.descriptor().encode()).expect("a descriptor");
        Self { a, b, to, next: 0 }
    }

    /// Writes blocks `span` under a grant, or under none; how it ended.
    fn write(&mut self, grant: Option<u64>, spans: &[(u32, u32)]) -> Result<(), Failure> {
        self.next += 1;
        let op = OpId(self.next);
        let spans = spans.iter().map(|(first, blocks)| Span { local: *first, remote: *first, blocks: *blocks });
        let transfer = Transfer {
            op,
            peer: B,
            direction: Direction::Write,
            local: 0,
            remote: 0,
            spans: spans.collect(),
            deadline: Instant::now() + Duration::from_secs(60),
        };
        match grant {
            Some(grant) => self.a.start_under(GrantId(grant), transfer),
            None => self.a.start(transfer),
        }
        .expect("it begins");
        let mut events = Vec::new();
        loop {
            self.a.poll(Duration::from_millis(1), &mut events);
            let ended = events.iter().find_map(|event| match event {
                Event::Ended { op: ended, outcome, settled } if *ended == op => Some((outcome.clone(), *settled)),
                _ => None,
            });
            if let Some((outcome, settled)) = ended {
                assert!(settled, "nothing is ever in quarantine inside a process");
                return outcome;
            }
        }
    }

    fn landed(&self) -> Vec<u32> {
        let mut bytes = [0; BYTES];
        let has = |block: &u32| {
            self.to.read(*block, &mut bytes).expect("there");
            bytes[0] != 0
        };
        (0..16).filter(has).collect()
    }
}

#[test]
fn only_what_is_granted_is_written() {
    let refused = Err(Failure::Refused(Refusal::NotGranted));
    let mut pair = Pair::new();
    assert_eq!(pair.write(None, &[(3, 1)]), refused, "without a grant");
    pair.b.grant(A, GrantId(7), 0, [2..5, 5..6, 9..10]).expect("blocks that are there");
    assert_eq!(pair.write(Some(8), &[(3, 1)]), refused, "under another one");
    assert_eq!(pair.write(Some(7), &[(1, 2)]), refused, "one block too early");
    assert_eq!(pair.write(Some(7), &[(5, 2)]), refused, "one block too late");
    assert_eq!(pair.write(Some(7), &[(2, 1), (10, 1)]), refused, "one of two");
    assert_eq!(pair.landed(), [] as [u32; 0], "nothing of it has landed");
    assert_eq!(pair.write(Some(7), &[(2, 4), (9, 1)]), Ok(()), "all that is granted, across neighbours");
    assert_eq!(pair.landed(), [2, 3, 4, 5, 9]);
    pair.b.withdraw(A, GrantId(7));
    assert_eq!(pair.write(Some(7), &[(2, 1)]), refused, "after it was taken back");
    pair.b.grant(PeerId { endpoint: 3, epoch: 1 }, GrantId(9), 0, [6..7]).expect("a block");
    assert_eq!(pair.write(Some(9), &[(6, 1)]), refused, "somebody else's");
    pair.b.grant(A, GrantId(10), 0, [6..7]).expect("a block");
    pair.b.withdraw_all();
    assert_eq!(pair.write(Some(10), &[(6, 1)]), refused, "after all were taken back");
    assert_eq!(pair.landed(), [2, 3, 4, 5, 9]);
}

#[test]
fn a_grant_names_what_is_there_once() {
    let mut pair = Pair::new();
    assert!(matches!(pair.b.grant(A, GrantId(1), 1, [0..1]), Err(TransportError::UnknownRegion(1))));
    assert!(matches!(pair.b.grant(A, GrantId(1), 0, [15..17]), Err(TransportError::OutOfRange { .. })));
    pair.b.grant(A, GrantId(1), 0, [0..1]).expect("a block");
    assert!(matches!(pair.b.grant(A, GrantId(1), 0, [1..2]), Err(TransportError::Duplicate(_))));
}
