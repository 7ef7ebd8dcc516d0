//! What changed in the prefix cache, for directories elsewhere and for policies?

use alloc::vec::Vec;

use penstock_base::codec::{DecodeError, Reader, Writer};
use penstock_base::{BlockKey, ClassRank, Duration, TenantId};

/// One change. Sequence numbers rise by one; a gap means that events were lost and the receiver needs a fresh listing.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct KvEvent {
    /// Number of this event in the replica's epoch.
    pub sequence: u64,
    /// What happened.
    pub change: KvChange,
}

/// See [`KvEvent`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum KvChange {
    /// The content can be found under `key` from now on.
    Stored {
        /// Identity of the block.
        key: BlockKey,
        /// Identity of the block before it; none for the first of a prompt.
        parent: Option<BlockKey>,
        /// Blocks from the root of the prompt to this one.
        depth_blocks: u32,
        /// Who stored it.
        tenant: TenantId,
        /// Class of the request that stored it.
        class: ClassRank,
        /// Time since the same content was evicted, if the ghost ring remembers.
        evicted_before: Option<Duration>,
    },
    /// The content cannot be found any more.
    Removed {
        /// Identity of the block.
        key: BlockKey,
        /// Who had stored it.
        tenant: TenantId,
        /// Why.
        cause: RemoveCause,
        /// Time since its last use.
        idle: Duration,
        /// Reuses since it was stored.
        hit_count: u32,
    },
    /// Nothing can be found any more.
    Cleared,
}

/// Why content left the prefix cache.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[repr(u8)]
pub enum RemoveCause {
    /// Room was needed.
    Pressure,
    /// Its tenant held more than its hard quota.
    Quota,
    /// Its time was up.
    Expired,
    /// A secure clean-up.
    Flushed,
    /// The request that stored it took it back.
    Forgotten,
}

impl RemoveCause {
    /// Number of causes.
    pub const COUNT: usize = 5;
    /// All causes, in the order of their indices.
    pub const ALL: [Self; Self::COUNT] = [Self::Pressure, Self::Quota, Self::Expired, Self::Flushed, Self::Forgotten];

    /// Did it leave for want of room? Then its return is a regret.
    pub fn is_eviction(self) -> bool {
        matches!(self, Self::Pressure | Self::Quota)
    }
}

/// Events since the caller last took them. Full: further ones are lost, which their missing numbers show.
#[derive(Clone, Debug)]
pub(crate) struct EventLog {
    waiting: Vec<KvEvent>,
    capacity: usize,
    next: u64,
    lost: u64,
}

impl EventLog {
    pub(crate) fn new(capacity: u32) -> Self {
        Self { waiting: Vec::with_capacity(capacity as usize), capacity: capacity as usize, next: 0, lost: 0 }
    }

    pub(crate) fn reserved_bytes(&self) -> usize {
        self.waiting.capacity() * size_of::<KvEvent>()
    }

    pub(crate) fn push(&mut self, change: KvChange) {
        let sequence = self.next;
        self.next += 1;
        if self.waiting.len() < self.capacity {
            self.waiting.push(KvEvent { sequence, change });
        } else {
            self.lost += 1;
        }
    }

    pub(crate) fn drain_into(&mut self, into: &mut Vec<KvEvent>) {
        into.append(&mut self.waiting);
    }

    pub(crate) fn next_sequence(&self) -> u64 {
        self.next
    }

    pub(crate) fn lost(&self) -> u64 {
        self.lost
    }

    pub(crate) fn encode(&self, out: &mut Writer) {
        out.u64(self.next);
        out.u64(self.lost);
        out.list(self.waiting.iter(), |w, event| event.encode(w));
    }

    pub(crate) fn decode(capacity: u32, from: &mut Reader<'_>) -> Result<Self, DecodeError> {
        let mut log = Self::new(capacity);
        log.next = from.u64()?;
        log.lost = from.u64()?;
        let waiting = from.list(KvEvent::decode)?;
        if waiting.len() > log.capacity {
            return Err(DecodeError::Invalid("event count"));
        }
        log.waiting.extend_from_slice(&waiting);
        Ok(log)
    }
}

pub(crate) fn encode_key(out: &mut Writer, key: BlockKey) {
    out.raw(&key.0);
}

pub(crate) fn decode_key(from: &mut Reader<'_>) -> Result<BlockKey, DecodeError> {
    let mut key = [0; 16];
    key.copy_from_slice(from.raw(16)?);
    Ok(BlockKey(key))
}

pub(crate) fn decode_class(from: &mut Reader<'_>) -> Result<ClassRank, DecodeError> {
    ClassRank::new(from.u8()?).ok_or(DecodeError::Invalid("class"))
}

impl KvEvent {
    /// Writes the event.
    pub fn encode(&self, out: &mut Writer) {
        out.u64(self.sequence);
        match self.change {
            KvChange::Stored { key, parent, depth_blocks, tenant, class, evicted_before } => {
                out.u8(0);
                encode_key(out, key);
                out.option(parent, encode_key);
                out.u32(depth_blocks);
                out.u64(tenant.0);
                out.u8(class.get());
                out.option(evicted_before, |w, age| w.u64(age.0));
            }
            KvChange::Removed { key, tenant, cause, idle, hit_count } => {
                out.u8(1);
                encode_key(out, key);
                out.u64(tenant.0);
                out.u8(cause as u8);
                out.u64(idle.0);
                out.u32(hit_count);
            }
            KvChange::Cleared => out.u8(2),
        }
    }

    /// Reads what [`Self::encode`] wrote.
    pub fn decode(from: &mut Reader<'_>) -> Result<Self, DecodeError> {
        let sequence = from.u64()?;
        let change = match from.u8()? {
            0 => KvChange::Stored {
                key: decode_key(from)?,
                parent: from.option(decode_key)?,
                depth_blocks: from.u32()?,
                tenant: TenantId(from.u64()?),
                class: decode_class(from)?,
                evicted_before: from.option(Reader::u64)?.map(Duration),
            },
            1 => KvChange::Removed {
                key: decode_key(from)?,
                tenant: TenantId(from.u64()?),
                cause: {
                    let code = usize::from(from.u8()?);
                    *RemoveCause::ALL.get(code).ok_or(DecodeError::Invalid("remove cause"))?
                },
                idle: Duration(from.u64()?),
                hit_count: from.u32()?,
            },
            2 => KvChange::Cleared,
            _ => return Err(DecodeError::Invalid("kv event")),
        };
        Ok(Self { sequence, change })
    }
}
