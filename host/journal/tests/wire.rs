//! Every message and every input comes back as it was; damaged bytes are refused, never a panic.

mod support;

use std::fmt::Debug;
use std::sync::Arc;

use penstock_base::plan::Plan;
use penstock_base::{GatewayEpoch, Instant, Outcome, Phase, RequestId};
use penstock_journal::wire::{Decode, Encode, from_bytes, to_bytes};
use penstock_sched::gateway::{GatewayConfig, GatewayInput};
use penstock_sched::message::{FromReplica, ToReplica};
use penstock_sched::replica::{HandoffInput, ReplicaConfig, ReplicaInput};
use proptest::prelude::*;
use support::{Make, Random, Variants};

fn comes_back<T: Encode + Decode + PartialEq + Debug>(value: &T) -> Vec<u8> {
    let bytes = to_bytes(value);
    assert_eq!(from_bytes::<T>(&bytes).as_ref(), Ok(value));
    bytes
}

/// Whatever the bytes, reading ends; and what is read is written as the same bytes.
fn survives<T: Encode + Decode>(bytes: &[u8]) {
    if let Ok(value) = from_bytes::<T>(bytes) {
        assert_eq!(to_bytes(&value), bytes, "two encodings of one value");
    }
}

fn all_of<T: Variants + Encode + Decode + PartialEq + Debug>(seed: u64) {
    let random = &mut Random(seed);
    for which in 0..T::COUNT {
        let mut bytes = comes_back(&T::variant(which, random));
        assert_eq!(u64::from(bytes[0]), which, "the order of the declaration is the format");
        for cut in 0..bytes.len() {
            assert!(from_bytes::<T>(&bytes[..cut]).is_err(), "a part is not a whole");
        }
        for _ in 0..32 {
            let at = random.below(bytes.len() as u64) as usize;
            let flip = 1 << random.below(8);
            bytes[at] ^= flip;
            survives::<T>(&bytes);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn messages_and_inputs_come_back(seed in any::<u64>()) {
        all_of::<ToReplica>(seed);
        all_of::<FromReplica>(seed);
        all_of::<GatewayInput>(seed);
        all_of::<ReplicaInput>(seed);
        all_of::<HandoffInput>(seed);
        let random = &mut Random(seed);
        comes_back(&Plan::make(random));
        comes_back(&GatewayConfig::make(random));
        comes_back(&ReplicaConfig::make(random));
    }

    #[test]
    fn any_bytes_are_read_or_refused(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
        survives::<GatewayInput>(&bytes);
        survives::<ReplicaInput>(&bytes);
    }
}

#[test]
fn the_format_is_the_one_that_was_written_down() {
    let cancel =
        ToReplica::Cancel { request: RequestId(0x0102), attempt: 3, outcome: Outcome::TimedOut(Phase::Decode) };
    let input = ReplicaInput::Gateway { gateway: GatewayEpoch(5), message: cancel };
    // input 0, gateway 5 in two bytes, message 1, request in eight, attempt in two, outcome kind 4 and detail 2 in two.
    assert_eq!(to_bytes(&input), [0, 5, 0, 1, 2, 1, 0, 0, 0, 0, 0, 0, 3, 0, 4, 2, 0]);
    assert_eq!(to_bytes(&Instant(7)), [7, 0, 0, 0, 0, 0, 0, 0]);
}

#[test]
fn an_arrival_keeps_its_manifest() {
    let manifest = Arc::make(&mut Random(1));
    let GatewayInput::Arrive(read) = from_bytes(&comes_back(&GatewayInput::Arrive(Arc::clone(&manifest)))).unwrap()
    else {
        panic!("an arrival was written");
    };
    assert_eq!(read, manifest);
}
