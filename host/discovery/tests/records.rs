//! Reading what others wrote about themselves.

#![allow(clippy::unwrap_used, reason = "a test")]

use penstock_discovery::limits::RECORD_BYTES_MAX;
use penstock_discovery::{RecordError, Role, WorkerId, WorkerRecord, WorkerState};
use proptest::prelude::*;

const RECORD: &str = r#"{"v":1,"id":"w-0","epoch":18446744073709551615,"role":"prefill","state":"warming",
    "addresses":{"control":"[fd00::1]:7000"},"model":"m","compatibility":"00",
    "capacity":{"blocks":1,"block_tokens":16,"slots":1,"context_tokens":128}}"#;

fn with(change: impl FnOnce(&mut serde_json::Value)) -> Result<WorkerRecord, RecordError> {
    let mut value: serde_json::Value = serde_json::from_str(RECORD).unwrap();
    change(&mut value);
    WorkerRecord::decode(&serde_json::to_vec(&value).unwrap())
}

#[test]
fn optional_fields_may_be_missing() {
    let record = WorkerRecord::decode(RECORD.as_bytes()).unwrap();
    assert_eq!((record.epoch, record.role, record.state), (u64::MAX, Role::Prefill, WorkerState::Warming));
    assert_eq!(record.addresses.kv_events, None);
    assert_eq!(WorkerRecord::decode(&record.encode().unwrap()), Ok(record));
}

#[test]
fn unknown_fields_are_skipped_at_every_level() {
    let record = with(|value| {
        value["later"] = serde_json::json!({"deep": [1, 2, 3]});
        value["addresses"]["later"] = 1.into();
        value["capacity"]["later"] = "x".into();
    });
    assert_eq!(record, with(|_| {}));
}

#[test]
fn required_fields_must_be_there() {
    for name in ["id", "epoch", "role", "state", "addresses", "model", "compatibility", "capacity", "v"] {
        let why = with(|value| _ = value.as_object_mut().unwrap().remove(name)).unwrap_err().to_string();
        assert!(why.contains(&format!("missing field `{name}`")), "{why}");
    }
    let why = with(|value| value["role"] = "boss".into()).unwrap_err().to_string();
    assert!(why.contains("boss") && why.contains("unified"), "{why}");
}

#[test]
fn later_encodings_are_named() {
    let why = with(|value| value["v"] = 2.into()).unwrap_err().to_string();
    assert_eq!(why, "its encoding has version 2 and this release reads 1; update the older side");
}

#[test]
fn sizes_are_bounded() {
    let fault = |change: fn(&mut serde_json::Value)| with(change).unwrap_err().to_string();
    assert!(fault(|value| value["model"] = "m".repeat(257).into()).contains("model has 257 bytes"));
    assert!(with(|value| value["model"] = "m".repeat(256).into()).is_ok());
    assert!(fault(|value| value["model"] = "".into()).contains("model has 0 bytes"));
    assert!(fault(|value| value["model"] = "a\u{1b}[2J".into()).contains("control character"));
    assert!(fault(|value| value["id"] = "../etc".into()).contains("letters, digits"));
    assert!(fault(|value| value["addresses"]["control"] = "nowhere".into()).contains("not HOST:PORT"));
    assert!(fault(|value| value["addresses"]["control"] = "host:0".into()).contains("not HOST:PORT"));
    assert!(fault(|value| value["addresses"]["kv_transfer"] = vec!["tcp://a:1"; 9].into()).contains("9 entries"));
    assert!(with(|value| value["addresses"]["kv_transfer"] = vec!["tcp://a:1"; 8].into()).is_ok());
    let labels = |count: usize| (0..count).map(|i| (format!("l{i}"), "v".into())).collect::<serde_json::Map<_, _>>();
    assert!(with(|value| value["topology"] = labels(16).into()).is_ok());
    assert!(with(|value| value["topology"] = labels(17).into()).is_err());
    let huge = format!("{RECORD}{}", " ".repeat(RECORD_BYTES_MAX));
    assert!(matches!(WorkerRecord::decode(huge.as_bytes()), Err(RecordError::TooLarge { .. })));
}

/// A record with every list at its limit can still be written.
#[test]
fn the_largest_record_fits() {
    let mut record = WorkerRecord::decode(RECORD.as_bytes()).unwrap();
    record.id = "i".repeat(200).parse().unwrap();
    record.model = "m".repeat(256);
    record.compatibility = "c".repeat(128);
    record.addresses.control = format!("{}:65535", "h".repeat(294));
    record.addresses.kv_transfer = vec!["t".repeat(300); 8];
    record.addresses.kv_events = Some("e".repeat(300));
    record.addresses.kv_replay = Some("r".repeat(300));
    record.topology = (0..16).map(|i| (format!("{i:063}"), "v".repeat(63))).collect();
    assert_eq!(WorkerRecord::decode(&record.encode().unwrap()), Ok(record));
}

proptest! {
    #[test]
    fn any_bytes_are_read_or_refused(bytes in proptest::collection::vec(any::<u8>(), 0..400)) {
        let _ = WorkerRecord::decode(&bytes);
    }

    /// A record with one byte changed is refused, or is a record whose own encoding reads the same.
    #[test]
    fn damaged_records_are_refused_or_whole(place in 0..RECORD.len(), byte in any::<u8>()) {
        let mut bytes = RECORD.as_bytes().to_vec();
        bytes[place] = byte;
        if let Ok(record) = WorkerRecord::decode(&bytes) {
            prop_assert_eq!(WorkerRecord::decode(&record.encode().unwrap()), Ok(record));
        }
    }

    #[test]
    fn ids_are_file_names(text in "\\PC{0,12}") {
        if let Ok(id) = text.parse::<WorkerId>() {
            prop_assert!(!id.as_str().contains(['/', '\\', '\0']) && !id.as_str().starts_with('.'));
        }
    }
}
