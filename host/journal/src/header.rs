//! How does a segment open? With everything that a replay starts from.
//!
//! ```text
//! "PNSTKLOG" | u32 version | u32 payload length | payload | u32 CRC-32 of all before
//! ```

use penstock_base::Instant;
use penstock_base::codec::{DecodeError, Reader, Writer};
use penstock_policy_api::{Decision, Policies, Policy};

use crate::error::{JournalError, VerifyError};
use crate::frame::crc32;
use crate::machine::{Machine, MachineKind, digest_bytes};
use crate::wire::{Decode, Encode, Seated, choice, from_bytes, record, to_bytes};

/// The first bytes of every segment.
pub const MAGIC: [u8; 8] = *b"PNSTKLOG";
/// Grows with every change of the format: of a record, a header, an input, an effect. A test holds the bytes against it.
///
/// 1: inputs and outcomes. 2: answers, what sits in the seats, the build; how many records a broken segment has. 3: hand-offs. 4: belief
/// in caches, changes of caches. 5: requests that go on at another replica. 6: parts of quotas.
pub const VERSION: u32 = 6;
/// Longest header: a snapshot of a gateway with every table full.
pub const HEADER_BYTES_MAX: u32 = 1 << 30;

/// Whose log it is.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct MachineId {
    /// Gateway or replica.
    pub kind: MachineKind,
    /// The replica's id; 0 for a gateway, which its epoch identifies.
    pub number: u32,
    /// Incarnation.
    pub epoch: u64,
}

choice! { MachineKind, "machine" { 0 => Gateway, 1 => Replica } }
record! { MachineId { kind, number, epoch } }

/// What a segment opens with. `config` is the machine's configuration as bytes; its digest is written beside it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct SegmentHeader {
    /// Whose log.
    pub machine: MachineId,
    /// Counts the segments of one machine, from 0.
    pub segment: u64,
    /// When it opens.
    pub now: Instant,
    /// The program that wrote it, for people: another build may decide otherwise.
    pub build: String,
    /// The context window that the policies were made with.
    pub context_tokens_max: u32,
    /// Every answer of a policy is in the segment: a replay needs no policies.
    pub has_answers: bool,
    /// Configuration of the machine.
    pub config: Vec<u8>,
    /// State of the machine.
    pub snapshot: Vec<u8>,
    /// The policies.
    pub seated: Seated,
}

impl Encode for SegmentHeader {
    fn put(&self, out: &mut Writer) {
        self.machine.put(out);
        out.u64(digest_bytes(&self.config));
        self.segment.put(out);
        self.now.put(out);
        self.build.as_str().put(out);
        out.u32(self.context_tokens_max);
        out.bool(self.has_answers);
        out.blob(&self.config);
        out.blob(&self.snapshot);
        self.seated.put(out);
    }
}

impl SegmentHeader {
    /// The header of a segment that opens now, without answers: a replay asks the policies again.
    pub fn of<M: Machine>(
        machine: &M,
        config: &M::Config,
        policies: &mut dyn Policies,
        (segment, now): (u64, Instant),
    ) -> Self {
        let mut snapshot = Writer::new();
        machine.save(&mut snapshot);
        Self {
            machine: M::id(config),
            segment,
            now,
            build: String::new(),
            context_tokens_max: M::context_tokens_max(config),
            has_answers: false,
            config: to_bytes(config),
            snapshot: snapshot.into_bytes(),
            seated: Seated::of(policies, &[]),
        }
    }

    /// Digest of the configuration.
    pub fn config_digest(&self) -> u64 {
        digest_bytes(&self.config)
    }

    /// The configuration.
    ///
    /// # Errors
    /// The log of the other kind of machine, or bytes that are no configuration.
    pub fn config<M: Machine>(&self) -> Result<M::Config, JournalError> {
        if self.machine.kind != M::KIND {
            return Err(JournalError::OtherMachine);
        }
        from_bytes(&self.config).map_err(|source| JournalError::Malformed { record: 0, source })
    }

    /// The machine as it was.
    ///
    /// # Errors
    /// As [`Self::config`], or a snapshot that does not make a machine.
    pub fn machine<M: Machine>(&self) -> Result<M, VerifyError> {
        M::restore(self.config::<M>()?, &self.snapshot).map_err(VerifyError::Snapshot)
    }

    /// Gives fresh policies the state that they had.
    ///
    /// # Errors
    /// The first policy that does not take it.
    pub fn restore_policies(&self, policies: &mut dyn Policies) -> Result<(), VerifyError> {
        for decision in Decision::ALL {
            let restored = self.seated.restore(decision, self.now, policies);
            restored.map_err(|source| VerifyError::Policy { seat: decision.name(), source })?;
        }
        Ok(())
    }

    /// As the first bytes of a segment.
    pub fn to_segment(&self) -> Vec<u8> {
        let payload = to_bytes(self);
        let mut bytes = MAGIC.to_vec();
        bytes.extend_from_slice(&VERSION.to_le_bytes());
        bytes.extend_from_slice(&(payload.len() as u32).to_le_bytes());
        bytes.extend_from_slice(&payload);
        let sum = crc32(0, &bytes);
        bytes.extend_from_slice(&sum.to_le_bytes());
        bytes
    }

    /// Reads the payload; the digest must be the configuration's.
    pub(crate) fn from_payload(payload: &[u8]) -> Result<Self, JournalError> {
        let malformed = |source: DecodeError| JournalError::Malformed { record: 0, source };
        let mut from = Reader::new(payload);
        let (header, digest) = Self::read(&mut from).map_err(malformed)?;
        from.finish().map_err(malformed)?;
        if header.config_digest() != digest {
            return Err(JournalError::ConfigDigest);
        }
        Ok(header)
    }

    fn read(from: &mut Reader<'_>) -> Result<(Self, u64), DecodeError> {
        let machine = MachineId::take(from)?;
        let digest = from.u64()?;
        let header = Self {
            machine,
            segment: from.u64()?,
            now: Instant::take(from)?,
            build: String::take(from)?,
            context_tokens_max: from.u32()?,
            has_answers: from.bool()?,
            config: from.blob()?.to_vec(),
            snapshot: from.blob()?.to_vec(),
            seated: Seated::take(from)?,
        };
        Ok((header, digest))
    }
}

/// One of the five.
pub(crate) fn seat(policies: &mut dyn Policies, decision: Decision) -> &mut dyn Policy {
    match decision {
        Decision::Admission => policies.admission(),
        Decision::Routing => policies.routing(),
        Decision::Fairness => policies.fairness(),
        Decision::Eviction => policies.eviction(),
        Decision::Overload => policies.overload(),
    }
}
