//! The bytes of batches, against what others wrote.

#![allow(clippy::unwrap_used, reason = "a test")]

use std::collections::HashMap;

use penstock_kv_events::limits::{EVENTS_MAX, HASHES_MAX};
use penstock_kv_events::{Batch, BlockHash, KvEvent, Raw, Removed, Stored};
use proptest::prelude::*;

fn unhex(text: &str) -> Vec<u8> {
    (0..text.len()).step_by(2).map(|at| u8::from_str_radix(&text[at..at + 2], 16).unwrap()).collect()
}

/// Lines of a fixture without comments: the last word is hexadecimal.
fn fixture(text: &'static str) -> Vec<(&'static str, Vec<u8>)> {
    let lines = text.lines().filter(|line| !line.starts_with('#'));
    lines.map(|line| line.rsplit_once(' ').unwrap()).map(|(name, hex)| (name, unhex(hex))).collect()
}

fn vllm() -> Vec<(&'static str, Vec<u8>)> {
    fixture(include_str!("fixtures/vllm-0.32.txt"))
}

fn release(name: &str) -> Vec<u8> {
    let all: HashMap<_, _> = fixture(include_str!("fixtures/releases.txt")).into_iter().collect();
    all[name].clone()
}

fn bytes(of: u8) -> BlockHash {
    BlockHash::from_bytes(&[of; 32]).unwrap()
}

/// What the fixture's comments say, in our words.
fn said() -> [Batch; 2] {
    let stored = Stored {
        block_hashes: vec![bytes(0x11), BlockHash::Int(12_345)],
        token_ids: vec![1, 2, 3, 4],
        block_size: 2,
        medium: Some("GPU".into()),
        group_idx: Some(0),
        kv_cache_spec_kind: Some("full_attention".into()),
        ..Stored::default()
    };
    let removed = Removed { block_hashes: vec![BlockHash::Int(7)], medium: Some("GPU".into()), ..Removed::default() };
    [
        Batch { ts: 1.5, events: vec![KvEvent::Stored(stored)], rank: Some(0), unknown: 0 },
        Batch { ts: 2.5, events: vec![KvEvent::Removed(removed), KvEvent::Cleared], rank: Some(0), unknown: 0 },
    ]
}

#[test]
fn vllms_bytes_are_written_and_read() {
    let lines = vllm();
    assert_eq!(lines.len(), 2);
    for ((name, payload), batch) in lines.iter().zip(said()) {
        assert_eq!(batch.encode(), *payload, "{name}");
        assert_eq!(Batch::decode(payload).unwrap(), batch, "{name}");
    }
}

#[test]
fn positional_arrays_are_read() {
    let batch = Batch::decode(&release("arrays")).unwrap();
    let stored = Stored {
        // Minus six, as its bits.
        block_hashes: vec![BlockHash::Int(5), BlockHash::Int(0xffff_ffff_ffff_fffa)],
        parent_block_hash: Some(BlockHash::Int(4)),
        token_ids: vec![9, 10],
        block_size: 16,
        ..Stored::default()
    };
    let removed = Removed { block_hashes: vec![BlockHash::Int(5)], ..Removed::default() };
    let events = vec![KvEvent::Stored(stored), KvEvent::Removed(removed), KvEvent::Cleared];
    assert_eq!(batch, Batch { ts: 1.25, events, rank: None, unknown: 0 });
}

#[test]
fn longer_arrays_are_read() {
    let batch = Batch::decode(&release("arrays-longer")).unwrap();
    let stored = Stored {
        block_hashes: vec![bytes(1), bytes(2)],
        parent_block_hash: Some(bytes(3)),
        block_size: 16,
        lora_id: Some(3),
        medium: Some("CPU".into()),
        lora_name: Some("a".into()),
        group_idx: Some(1),
        kv_cache_spec_kind: Some("sliding".into()),
        kv_cache_spec_sliding_window: Some(128),
        raw: Raw {
            extra_keys: unhex("9292a16b01c0"),
            locality: unhex("a57878787878"),
            ownership: unhex("81a16f01"),
            session_id: unhex("a173"),
        },
        ..Stored::default()
    };
    assert_eq!(batch, Batch { ts: 2.0, events: vec![KvEvent::Stored(stored)], rank: Some(2), unknown: 0 });
    // What is carried along is written again as it came.
    assert_eq!(Batch::decode(&batch.encode()).unwrap(), batch);
}

#[test]
fn maps_at_both_levels_and_unknown_things_are_read() {
    let batch = Batch::decode(&release("maps")).unwrap();
    let removed = Removed { block_hashes: vec![BlockHash::Int(u64::MAX)], ..Removed::default() };
    assert_eq!(batch, Batch { ts: 3.5, events: vec![KvEvent::Removed(removed)], rank: Some(7), unknown: 1 });
}

#[test]
fn every_length_is_written_as_msgpack_writes_it() {
    let payload = release("lengths");
    assert_eq!(Batch::decode(&payload).unwrap().encode(), payload);
}

/// Counts that the bytes cannot hold, depth without end, more than is allowed: each is refused before memory is spent on it.
#[test]
fn sizes_are_bounded() {
    let fault = |bytes: &[u8]| Batch::decode(bytes).unwrap_err().to_string();
    let claims_many = [&[0x92][..], &[0xcb, 0, 0, 0, 0, 0, 0, 0, 0], &[0xdd, 0xff, 0xff, 0xff, 0xff]].concat();
    assert!(fault(&claims_many).contains("breaks off"));
    let deep = [&[0x93, 0x00, 0x90][..], &vec![0x91; 1_000_000], &[0xc0]].concat();
    // Skipped without recursion: it is only refused because an array is no rank.
    assert!(fault(&deep).contains("not a number"));
    let deep = [&[0x94, 0x00, 0x90, 0xc0][..], &vec![0x91; 1_000_000], &[0xc0]].concat();
    assert_eq!(Batch::decode(&deep).unwrap().events.len(), 0);
    let hashes = |count: usize| {
        let removed = Removed { block_hashes: vec![BlockHash::Int(1); count], ..Removed::default() };
        Batch { events: vec![KvEvent::Removed(removed)], ..Batch::default() }.encode()
    };
    assert!(Batch::decode(&hashes(HASHES_MAX)).is_ok());
    assert!(fault(&hashes(HASHES_MAX + 1)).contains("too many blocks"));
    let events = |count: usize| Batch { events: vec![KvEvent::Cleared; count], ..Batch::default() }.encode();
    assert!(Batch::decode(&events(EVENTS_MAX)).is_ok());
    assert!(fault(&events(EVENTS_MAX + 1)).contains("too many events"));
    assert!(fault(&vec![0; 9 << 20]).contains("too long"));
    assert!(fault(&[]).contains("breaks off"));
    let batch = said()[1].encode();
    assert!(fault(&[&batch[..], &[0]].concat()).contains("after the batch"));
}

fn any_hash() -> impl Strategy<Value = BlockHash> {
    prop_oneof![
        any::<u64>().prop_map(BlockHash::Int),
        proptest::collection::vec(any::<u8>(), 1..=32).prop_map(|bytes| BlockHash::from_bytes(&bytes).unwrap()),
    ]
}

fn any_event() -> impl Strategy<Value = KvEvent> {
    let hashes = || proptest::collection::vec(any_hash(), 0..20);
    let medium = || proptest::option::of("[A-Z]{0,40}");
    let stored = (
        (hashes(), proptest::option::of(any_hash()), proptest::collection::vec(any::<u32>(), 0..40), any::<u32>()),
        (proptest::option::of(any::<i64>()), medium(), proptest::option::of("\\PC{0,30}")),
        (proptest::option::of(any::<u32>()), medium(), proptest::option::of(any::<u32>())),
    );
    let stored = stored.prop_map(|((block_hashes, parent_block_hash, token_ids, block_size), lora, group)| {
        KvEvent::Stored(Stored {
            block_hashes,
            parent_block_hash,
            token_ids,
            block_size,
            lora_id: lora.0,
            medium: lora.1,
            lora_name: lora.2,
            group_idx: group.0,
            kv_cache_spec_kind: group.1,
            kv_cache_spec_sliding_window: group.2,
            raw: Raw::default(),
        })
    });
    let removed =
        (hashes(), medium(), proptest::option::of(any::<u32>())).prop_map(|(block_hashes, medium, group_idx)| {
            KvEvent::Removed(Removed { block_hashes, medium, group_idx, raw: Raw::default() })
        });
    prop_oneof![stored, removed, Just(KvEvent::Cleared)]
}

proptest! {
    #[test]
    fn batches_come_back(
        ts in any::<f64>().prop_filter("equal to itself", |ts| !ts.is_nan()),
        events in proptest::collection::vec(any_event(), 0..20),
        rank in proptest::option::of(any::<u32>()),
    ) {
        let batch = Batch { ts, events, rank, unknown: 0 };
        prop_assert_eq!(Batch::decode(&batch.encode()).unwrap(), batch);
    }

    #[test]
    fn any_bytes_are_read_or_refused(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
        _ = Batch::decode(&bytes);
    }

    /// A batch with some bytes changed is refused or read, and what was read can be written and read again.
    #[test]
    fn damaged_batches_are_refused_or_whole(
        which in 0..6_usize,
        changes in proptest::collection::vec((any::<proptest::sample::Index>(), any::<u8>()), 1..4),
        cut in proptest::option::of(any::<proptest::sample::Index>()),
    ) {
        let mut all: Vec<Vec<u8>> = vllm().into_iter().map(|(_, payload)| payload).collect();
        all.extend(["arrays", "arrays-longer", "maps", "lengths"].map(release));
        let mut payload = all.swap_remove(which);
        for (place, byte) in changes {
            let place = place.index(payload.len());
            payload[place] = byte;
        }
        payload.truncate(cut.map_or(payload.len(), |cut| cut.index(payload.len())));
        if let Ok(mut batch) = Batch::decode(&payload) {
            batch.unknown = 0;
            if !batch.ts.is_nan() {
                prop_assert_eq!(Batch::decode(&batch.encode()).unwrap(), batch);
            }
        }
    }
}
