//! What does a worker say of itself? The record, its limits, and its encoding.

use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::error::RecordError;
use crate::limits::{
    ADDRESS_BYTES_MAX, COMPATIBILITY_BYTES_MAX, ID_BYTES_MAX, LABEL_BYTES_MAX, LABELS_MAX, MODEL_BYTES_MAX,
    RECORD_BYTES_MAX, TRANSFER_ADDRESSES_MAX,
};

/// The encoding that is written, and the newest that is read. New optional fields do not raise it: a reader skips what it does not know.
pub const ENCODING: u64 = 1;

/// Name of a worker, the same over its restarts: letters, digits, `.`, `_` and `-`, not a dot first.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct WorkerId(String);

impl WorkerId {
    /// As text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for WorkerId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl FromStr for WorkerId {
    type Err = RecordError;

    fn from_str(text: &str) -> Result<Self, RecordError> {
        let is_of_it = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'_' | b'-');
        if text.is_empty() || text.len() > ID_BYTES_MAX || text.starts_with('.') || !text.bytes().all(is_of_it) {
            let why = format!("must have 1 to {ID_BYTES_MAX} letters, digits, '.', '_' or '-', not a dot first");
            return Err(RecordError::Field { field: "id", why });
        }
        Ok(Self(text.to_owned()))
    }
}

impl TryFrom<String> for WorkerId {
    type Error = RecordError;

    fn try_from(text: String) -> Result<Self, RecordError> {
        text.parse()
    }
}

impl From<WorkerId> for String {
    fn from(id: WorkerId) -> Self {
        id.0
    }
}

/// What a worker does for requests.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Role {
    /// Prefill and decode.
    Unified,
    /// Prefill, and hands over.
    Prefill,
    /// Decode of what others have prefilled.
    Decode,
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Unified => "unified",
            Self::Prefill => "prefill",
            Self::Decode => "decode",
        })
    }
}

/// How far a worker is. Only a ready one gets new work.
///
/// ```text
/// downloading -> loading -> warming -> ready -> draining -> terminated
///                                      |  ^
///                                      v  |
///                                   unhealthy
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum WorkerState {
    /// Fetches the model.
    Downloading,
    /// Reads weights, builds the executor, allocates the pool.
    Loading,
    /// Warms up and probes itself.
    Warming,
    /// Takes work.
    Ready,
    /// Finishes what it has, takes nothing new.
    Draining,
    /// Cannot work, and may come back.
    Unhealthy,
    /// Gone for good; its record is about to vanish.
    Terminated,
}

/// Where a worker is reached. Secrets, such as tokens of transport descriptors, are exchanged over the control address and never stand here.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Addresses {
    /// `HOST:PORT` of the control connection.
    pub control: String,
    /// Ways to its KV, the preferred first, each as its transport writes it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub kv_transfer: Vec<String>,
    /// Where its KV events are published, as ZeroMQ writes it (`tcp://HOST:PORT`).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kv_events: Option<String>,
    /// Where missed KV events are asked for again.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kv_replay: Option<String>,
}

/// What a worker can hold. Facts that do not change while it lives; load travels elsewhere.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct Capacity {
    /// KV blocks of its pool.
    pub blocks: u32,
    /// Tokens a block.
    pub block_tokens: u32,
    /// Sequences at once.
    pub slots: u32,
    /// Longest sequence in tokens.
    pub context_tokens: u32,
}

/// One life of one worker.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct WorkerRecord {
    /// Which worker.
    pub id: WorkerId,
    /// Which life; a restarted worker has a larger one.
    pub epoch: u64,
    /// What it does.
    pub role: Role,
    /// How far it is.
    pub state: WorkerState,
    /// Where it is reached.
    pub addresses: Addresses,
    /// Model that it serves.
    pub model: String,
    /// Hash over everything that must be equal on both ends of a hand-off: layout, dtype, block size, versions. Workers with different
    /// ones never exchange KV.
    pub compatibility: String,
    /// What it can hold.
    pub capacity: Capacity,
    /// Where it stands: `zone`, `rack`, `host` and the like.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub topology: BTreeMap<String, String>,
}

/// As it is written: the version first, so that a reader can tell before it reads the rest.
#[derive(Serialize)]
struct Written<'a> {
    v: u64,
    #[serde(flatten)]
    record: &'a WorkerRecord,
}

#[derive(Deserialize)]
struct VersionOnly {
    v: u64,
}

impl WorkerRecord {
    /// The record as JSON.
    ///
    /// # Errors
    /// [`RecordError`] when a field breaks its limit.
    pub fn encode(&self) -> Result<Vec<u8>, RecordError> {
        self.check()?;
        let bytes = serde_json::to_vec(&Written { v: ENCODING, record: self });
        let bytes = bytes.map_err(|why| RecordError::Form { why: why.to_string() })?;
        within(&bytes)?;
        Ok(bytes)
    }

    /// Reads a record that anybody may have written. Unknown fields are skipped, required ones must be there, sizes are bounded before
    /// anything is read.
    ///
    /// # Errors
    /// [`RecordError`] with the first finding.
    pub fn decode(bytes: &[u8]) -> Result<Self, RecordError> {
        within(bytes)?;
        let form = |why: serde_json::Error| RecordError::Form { why: why.to_string() };
        let found = serde_json::from_slice::<VersionOnly>(bytes).map_err(form)?.v;
        if found == 0 || found > ENCODING {
            return Err(RecordError::Version { found, known: ENCODING });
        }
        let record: Self = serde_json::from_slice(bytes).map_err(form)?;
        record.check()?;
        Ok(record)
    }

    fn check(&self) -> Result<(), RecordError> {
        let Addresses { control, kv_transfer, kv_events, kv_replay } = &self.addresses;
        check_text("addresses.control", control, ADDRESS_BYTES_MAX)?;
        let is_endpoint = control.rsplit_once(':').is_some_and(|(host, port)| {
            !host.is_empty() && !host.contains('/') && port.parse::<u16>().is_ok_and(|port| port > 0)
        });
        if !is_endpoint {
            return Err(field("addresses.control", format!("is {control:?}, which is not HOST:PORT")));
        }
        check_count("addresses.kv_transfer", kv_transfer.len(), TRANSFER_ADDRESSES_MAX)?;
        for address in kv_transfer {
            check_text("addresses.kv_transfer", address, ADDRESS_BYTES_MAX)?;
        }
        for (name, address) in [("addresses.kv_events", kv_events), ("addresses.kv_replay", kv_replay)] {
            if let Some(address) = address {
                check_text(name, address, ADDRESS_BYTES_MAX)?;
            }
        }
        check_text("model", &self.model, MODEL_BYTES_MAX)?;
        check_text("compatibility", &self.compatibility, COMPATIBILITY_BYTES_MAX)?;
        check_count("topology", self.topology.len(), LABELS_MAX)?;
        for (label, value) in &self.topology {
            check_text("topology", label, LABEL_BYTES_MAX)?;
            check_text("topology", value, LABEL_BYTES_MAX)?;
        }
        Ok(())
    }
}

/// Reads a record from a place that belongs to one worker: its own.
pub(crate) fn decode_at(place: &str, bytes: &[u8]) -> Result<WorkerRecord, RecordError> {
    let record = WorkerRecord::decode(bytes)?;
    if record.id.as_str() != place {
        return Err(RecordError::Misplaced { found: record.id, expected: place.to_owned() });
    }
    Ok(record)
}

fn field(field: &'static str, why: String) -> RecordError {
    RecordError::Field { field, why }
}

fn within(bytes: &[u8]) -> Result<(), RecordError> {
    if bytes.len() > RECORD_BYTES_MAX {
        return Err(RecordError::TooLarge { bytes: bytes.len(), max: RECORD_BYTES_MAX });
    }
    Ok(())
}

fn check_count(name: &'static str, count: usize, max: usize) -> Result<(), RecordError> {
    if count > max {
        return Err(field(name, format!("has {count} entries, and {max} are allowed")));
    }
    Ok(())
}

fn check_text(name: &'static str, text: &str, bytes_max: usize) -> Result<(), RecordError> {
    if text.is_empty() || text.len() > bytes_max {
        return Err(field(name, format!("has {} bytes, and 1 to {bytes_max} are allowed", text.len())));
    }
    // Text of others ends up in logs and on terminals.
    if text.chars().any(|c| c.is_control() || c == '"' || c == '\\') {
        return Err(field(name, "holds a control character, a quote or a backslash".to_owned()));
    }
    Ok(())
}
