//! What is in a batch of KV events, and how is it written? vLLM's words and vLLM's bytes.
//!
//! Written: `[ts, [event, ..], rank]` with maps for events, `type` first, as vLLM 0.32 does. Read: arrays and maps at both levels, hashes
//! as integers or bytes, fields in any order, unknown fields and events skipped, as vLLM wrote and writes them from one release to another.

use std::fmt;

use crate::limits::{EVENTS_MAX, HASH_BYTES_MAX, PAYLOAD_BYTES_MAX, TEXT_BYTES_MAX};
use crate::msgpack::{Malformed, Reader, Value, Writer};

/// Name of a block's content, as its publisher computes it. Hashes of two publishers are comparable only where both compute alike.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum BlockHash {
    /// Of 64 bits. Older releases write negative ones; they are the same bits.
    Int(u64),
    /// Up to 32 bytes; what is beyond the length is zero.
    Bytes {
        /// How many.
        len: u8,
        /// Which.
        bytes: [u8; HASH_BYTES_MAX],
    },
}

impl BlockHash {
    /// From bytes; none when there are none or too many.
    #[must_use]
    pub fn from_bytes(from: &[u8]) -> Option<Self> {
        let len = u8::try_from(from.len()).ok().filter(|len| (1..=HASH_BYTES_MAX).contains(&usize::from(*len)))?;
        let mut bytes = [0; HASH_BYTES_MAX];
        bytes[..from.len()].copy_from_slice(from);
        Some(Self::Bytes { len, bytes })
    }
}

impl fmt::Debug for BlockHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Int(value) => write!(f, "{value:#x}"),
            Self::Bytes { len, bytes } => {
                bytes[..usize::from(*len)].iter().try_for_each(|byte| write!(f, "{byte:02x}"))
            }
        }
    }
}

/// Blocks that are in a cache now.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Stored {
    /// Their names, first to last.
    pub block_hashes: Vec<BlockHash>,
    /// The block before the first.
    pub parent_block_hash: Option<BlockHash>,
    /// Their tokens; empty unless the publisher is told to tell.
    pub token_ids: Vec<u32>,
    /// Tokens a block.
    pub block_size: u32,
    /// Number of the adapter.
    pub lora_id: Option<i64>,
    /// `GPU`, `CPU`, `STORAGE`.
    pub medium: Option<String>,
    /// Name of the adapter.
    pub lora_name: Option<String>,
    /// Which group of layers, where a model has several.
    pub group_idx: Option<u32>,
    /// What kind of cache the group has.
    pub kv_cache_spec_kind: Option<String>,
    /// Its window in tokens.
    pub kv_cache_spec_sliding_window: Option<u32>,
    /// What else vLLM may say: kept as it was written.
    pub raw: Raw,
}

/// Fields that are carried and not looked into: each the bytes of one MessagePack value, or nothing.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Raw {
    /// What went into the hashes beside tokens.
    pub extra_keys: Vec<u8>,
    /// As written.
    pub locality: Vec<u8>,
    /// As written.
    pub ownership: Vec<u8>,
    /// As written.
    pub session_id: Vec<u8>,
}

/// Blocks that are in a cache no more.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Removed {
    /// Their names.
    pub block_hashes: Vec<BlockHash>,
    /// From where; from everywhere when not said.
    pub medium: Option<String>,
    /// Which group of layers.
    pub group_idx: Option<u32>,
    /// Fields that are not looked into.
    pub raw: Raw,
}

/// One event.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum KvEvent {
    /// Blocks came.
    Stored(Stored),
    /// Blocks went.
    Removed(Removed),
    /// All went.
    Cleared,
}

/// What one message carries.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Batch {
    /// Seconds since 1970 at the publisher.
    pub ts: f64,
    /// In order.
    pub events: Vec<KvEvent>,
    /// Which data-parallel rank of the publisher.
    pub rank: Option<u32>,
    /// Events of kinds that are not known here; they are skipped.
    pub unknown: u32,
}

impl Batch {
    /// As vLLM 0.32 writes it.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let mut writer = Writer::default();
        writer.array(if self.rank.is_some() { 3 } else { 2 });
        writer.float(self.ts);
        writer.array(self.events.len());
        for event in &self.events {
            match event {
                KvEvent::Stored(stored) => write_stored(&mut writer, stored),
                KvEvent::Removed(removed) => write_removed(&mut writer, removed),
                KvEvent::Cleared => {
                    writer.map(1);
                    writer.text("type");
                    writer.text("AllBlocksCleared");
                }
            }
        }
        if let Some(rank) = self.rank {
            writer.uint(u64::from(rank));
        }
        writer.bytes
    }

    /// Reads what any release of vLLM wrote.
    ///
    /// # Errors
    /// [`Malformed`] when it is none.
    pub fn decode(payload: &[u8]) -> Result<Self, Malformed> {
        let mut reader = Reader::new(payload);
        if payload.len() > PAYLOAD_BYTES_MAX {
            return Err(reader.fault("the payload is too long"));
        }
        let mut batch = Self::default();
        let mut has_events = false;
        match reader.next()? {
            Value::Array(count) if count >= 2 => {
                batch.ts = read_ts(&mut reader)?;
                read_events(&mut reader, &mut batch)?;
                has_events = true;
                for place in 2..count {
                    if place == 2 {
                        batch.rank = read_small(&mut reader)?;
                    } else {
                        reader.skip()?;
                    }
                }
            }
            Value::Map(count) => {
                for _ in 0..count {
                    match reader.next()? {
                        Value::Text("ts") => batch.ts = read_ts(&mut reader)?,
                        Value::Text("events") => {
                            read_events(&mut reader, &mut batch)?;
                            has_events = true;
                        }
                        Value::Text("data_parallel_rank") => batch.rank = read_small(&mut reader)?,
                        Value::Text(_) => _ = reader.skip()?,
                        _ => return Err(reader.fault("a batch's field has no name")),
                    }
                }
            }
            _ => return Err(reader.fault("a batch is an array of two or more, or a map")),
        }
        if !has_events {
            return Err(reader.fault("a batch without events"));
        }
        if !reader.is_at_end() {
            return Err(reader.fault("bytes after the batch"));
        }
        Ok(batch)
    }
}

fn write_hash(writer: &mut Writer, hash: &BlockHash) {
    match hash {
        BlockHash::Int(value) => writer.uint(*value),
        BlockHash::Bytes { len, bytes } => writer.binary(&bytes[..usize::from(*len)]),
    }
}

fn write_hashes(writer: &mut Writer, hashes: &[BlockHash]) {
    writer.text("block_hashes");
    writer.array(hashes.len());
    hashes.iter().for_each(|hash| write_hash(writer, hash));
}

fn write_text(writer: &mut Writer, name: &str, text: Option<&String>) {
    writer.text(name);
    match text {
        Some(text) => writer.text(text),
        None => writer.nil(),
    }
}

/// Fields that are left out when they are nothing. Counts when there is no writer.
struct Optional<'a> {
    writer: Option<&'a mut Writer>,
    count: usize,
}

impl Optional<'_> {
    fn field(&mut self, name: &str, is_there: bool, write: impl FnOnce(&mut Writer)) {
        self.count += usize::from(is_there);
        if let Some(writer) = self.writer.as_deref_mut().filter(|_| is_there) {
            writer.text(name);
            write(writer);
        }
    }

    fn raw(&mut self, name: &str, bytes: &[u8]) {
        self.field(name, !bytes.is_empty(), |writer| writer.bytes.extend_from_slice(bytes));
    }

    fn number(&mut self, name: &str, number: Option<u32>) {
        self.field(name, number.is_some(), |writer| writer.uint(u64::from(number.unwrap_or(0))));
    }

    fn text(&mut self, name: &str, text: Option<&String>) {
        self.field(name, text.is_some(), |writer| writer.text(text.map_or("", String::as_str)));
    }

    fn of_stored(&mut self, stored: &Stored) {
        self.raw("extra_keys", &stored.raw.extra_keys);
        self.number("group_idx", stored.group_idx);
        self.text("kv_cache_spec_kind", stored.kv_cache_spec_kind.as_ref());
        self.number("kv_cache_spec_sliding_window", stored.kv_cache_spec_sliding_window);
        self.raw("locality", &stored.raw.locality);
        self.raw("ownership", &stored.raw.ownership);
        self.raw("session_id", &stored.raw.session_id);
    }

    fn of_removed(&mut self, removed: &Removed) {
        self.number("group_idx", removed.group_idx);
        self.raw("locality", &removed.raw.locality);
        self.raw("ownership", &removed.raw.ownership);
    }
}

fn count(fill: impl FnOnce(&mut Optional<'_>)) -> usize {
    let mut optional = Optional { writer: None, count: 0 };
    fill(&mut optional);
    optional.count
}

fn write_stored(writer: &mut Writer, stored: &Stored) {
    writer.map(8 + count(|optional| optional.of_stored(stored)));
    writer.text("type");
    writer.text("BlockStored");
    write_hashes(writer, &stored.block_hashes);
    writer.text("parent_block_hash");
    match &stored.parent_block_hash {
        Some(hash) => write_hash(writer, hash),
        None => writer.nil(),
    }
    writer.text("token_ids");
    writer.array(stored.token_ids.len());
    stored.token_ids.iter().for_each(|token| writer.uint(u64::from(*token)));
    writer.text("block_size");
    writer.uint(u64::from(stored.block_size));
    writer.text("lora_id");
    match stored.lora_id {
        Some(id) => writer.int(id),
        None => writer.nil(),
    }
    write_text(writer, "medium", stored.medium.as_ref());
    write_text(writer, "lora_name", stored.lora_name.as_ref());
    Optional { writer: Some(writer), count: 0 }.of_stored(stored);
}

fn write_removed(writer: &mut Writer, removed: &Removed) {
    writer.map(3 + count(|optional| optional.of_removed(removed)));
    writer.text("type");
    writer.text("BlockRemoved");
    write_hashes(writer, &removed.block_hashes);
    write_text(writer, "medium", removed.medium.as_ref());
    Optional { writer: Some(writer), count: 0 }.of_removed(removed);
}

fn read_ts(reader: &mut Reader<'_>) -> Result<f64, Malformed> {
    match reader.next()? {
        Value::Float(value) => Ok(value),
        Value::Uint(value) => Ok(value as f64),
        _ => Err(reader.fault("the time is not a number")),
    }
}

fn read_small(reader: &mut Reader<'_>) -> Result<Option<u32>, Malformed> {
    match reader.next()? {
        Value::Nil => Ok(None),
        Value::Uint(value) => u32::try_from(value).map(Some).map_err(|_| reader.fault("a number is too large")),
        _ => Err(reader.fault("not a number")),
    }
}

fn read_text(reader: &mut Reader<'_>) -> Result<Option<String>, Malformed> {
    match reader.next()? {
        Value::Nil => Ok(None),
        Value::Text(text) if text.len() <= TEXT_BYTES_MAX => Ok(Some(text.to_owned())),
        _ => Err(reader.fault("not a text, or too long a one")),
    }
}

fn read_hash(reader: &Reader<'_>, value: Value<'_>) -> Result<BlockHash, Malformed> {
    let hash = match value {
        Value::Uint(value) => Some(BlockHash::Int(value)),
        Value::Int(value) => Some(BlockHash::Int(value as u64)),
        Value::Binary(bytes) => BlockHash::from_bytes(bytes),
        _ => None,
    };
    hash.ok_or_else(|| reader.fault("a block hash is an integer, or 1 to 32 bytes"))
}

fn read_hashes(reader: &mut Reader<'_>) -> Result<Vec<BlockHash>, Malformed> {
    let Value::Array(count) = reader.next()? else { return Err(reader.fault("block hashes are an array")) };
    // A hash takes one byte of the payload at least, and forty of memory.
    reader.hashes_left = reader.hashes_left.checked_sub(count).ok_or_else(|| reader.fault("too many blocks"))?;
    let mut hashes = Vec::with_capacity(count);
    for _ in 0..count {
        let value = reader.next()?;
        hashes.push(read_hash(reader, value)?);
    }
    Ok(hashes)
}

fn read_tokens(reader: &mut Reader<'_>) -> Result<Vec<u32>, Malformed> {
    let Value::Array(count) = reader.next()? else { return Err(reader.fault("token ids are an array")) };
    let mut tokens = Vec::with_capacity(count);
    for _ in 0..count {
        tokens.push(read_small(reader)?.ok_or_else(|| reader.fault("a token id is a number"))?);
    }
    Ok(tokens)
}

fn read_raw(reader: &mut Reader<'_>) -> Result<Vec<u8>, Malformed> {
    let bytes = reader.skip()?;
    Ok(if bytes == [0xc0] { Vec::new() } else { bytes.to_vec() })
}

fn read_events(reader: &mut Reader<'_>, batch: &mut Batch) -> Result<(), Malformed> {
    let Value::Array(count) = reader.next()? else { return Err(reader.fault("events are an array")) };
    if count > EVENTS_MAX {
        return Err(reader.fault("too many events"));
    }
    for _ in 0..count {
        match read_event(reader)? {
            Some(event) => batch.events.push(event),
            None => batch.unknown += 1,
        }
    }
    Ok(())
}

/// Events that are known.
const KINDS: &[&str] = &["BlockStored", "BlockRemoved", "AllBlocksCleared"];
/// Fields of an event in the order of the array form, after its type.
const STORED: &[&str] = &[
    "block_hashes",
    "parent_block_hash",
    "token_ids",
    "block_size",
    "lora_id",
    "medium",
    "lora_name",
    "extra_keys",
    "group_idx",
    "kv_cache_spec_kind",
    "kv_cache_spec_sliding_window",
    "locality",
    "ownership",
    "session_id",
];
const REMOVED: &[&str] = &["block_hashes", "medium", "group_idx", "locality", "ownership"];

/// All fields that any event has.
#[derive(Default)]
struct Fields {
    hashes: Option<Vec<BlockHash>>,
    stored: Stored,
}

impl Fields {
    fn read(&mut self, name: &str, reader: &mut Reader<'_>) -> Result<(), Malformed> {
        let stored = &mut self.stored;
        match name {
            "block_hashes" => self.hashes = Some(read_hashes(reader)?),
            "parent_block_hash" => {
                stored.parent_block_hash = match reader.next()? {
                    Value::Nil => None,
                    value => Some(read_hash(reader, value)?),
                };
            }
            "token_ids" => stored.token_ids = read_tokens(reader)?,
            "block_size" => {
                stored.block_size = read_small(reader)?.ok_or_else(|| reader.fault("a block size is a number"))?;
            }
            "lora_id" => {
                stored.lora_id = match reader.next()? {
                    Value::Nil => None,
                    Value::Int(value) => Some(value),
                    Value::Uint(value) => i64::try_from(value).ok(),
                    _ => return Err(reader.fault("an adapter's number is a number")),
                };
            }
            "medium" => stored.medium = read_text(reader)?,
            "lora_name" => stored.lora_name = read_text(reader)?,
            "group_idx" => stored.group_idx = read_small(reader)?,
            "kv_cache_spec_kind" => stored.kv_cache_spec_kind = read_text(reader)?,
            "kv_cache_spec_sliding_window" => stored.kv_cache_spec_sliding_window = read_small(reader)?,
            "extra_keys" => stored.raw.extra_keys = read_raw(reader)?,
            "locality" => stored.raw.locality = read_raw(reader)?,
            "ownership" => stored.raw.ownership = read_raw(reader)?,
            "session_id" => stored.raw.session_id = read_raw(reader)?,
            _ => _ = reader.skip()?,
        }
        Ok(())
    }

    fn event(self, kind: &str, reader: &Reader<'_>) -> Result<Option<KvEvent>, Malformed> {
        let hashes = self.hashes.ok_or_else(|| reader.fault("an event without block hashes"));
        let stored = self.stored;
        Ok(match kind {
            "BlockStored" => Some(KvEvent::Stored(Stored { block_hashes: hashes?, ..stored })),
            "BlockRemoved" => {
                let Stored { medium, group_idx, raw, .. } = stored;
                Some(KvEvent::Removed(Removed { block_hashes: hashes?, medium, group_idx, raw }))
            }
            "AllBlocksCleared" => Some(KvEvent::Cleared),
            _ => None,
        })
    }
}

/// One event, or none of a kind that is known.
fn read_event(reader: &mut Reader<'_>) -> Result<Option<KvEvent>, Malformed> {
    let mut fields = Fields::default();
    match reader.next()? {
        Value::Array(count) if count > 0 => {
            let Value::Text(kind) = reader.next()? else { return Err(reader.fault("an event begins with its type")) };
            let names = match kind {
                "BlockStored" => STORED,
                "BlockRemoved" => REMOVED,
                _ => &[],
            };
            for place in 0..count - 1 {
                fields.read(names.get(place).copied().unwrap_or_default(), reader)?;
            }
            fields.event(kind, reader)
        }
        Value::Map(count) => {
            let mut kind = None;
            for _ in 0..count {
                match reader.next()? {
                    Value::Text("type") => match reader.next()? {
                        Value::Text(text) => kind = Some(text),
                        _ => return Err(reader.fault("an event's type is a text")),
                    },
                    Value::Text(_) if kind.is_some_and(|kind| !KINDS.contains(&kind)) => _ = reader.skip()?,
                    Value::Text(name) => fields.read(name, reader)?,
                    _ => return Err(reader.fault("an event's field has no name")),
                }
            }
            let kind = kind.ok_or_else(|| reader.fault("an event without a type"))?;
            fields.event(kind, reader)
        }
        _ => Err(reader.fault("an event is an array or a map")),
    }
}
