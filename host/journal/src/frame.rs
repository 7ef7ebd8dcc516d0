//! Records: kind, length, payload, checksum. The kinds, and what the host's own ones hold.
//!
//! ```text
//! u8 kind | u32 payload length | payload | u32 CRC-32 over all checksums before, kind, length and payload
//! ```
//!
//! Because each checksum covers the ones before, a record that is missing, doubled or moved shows like one that was changed. A kind that
//! a reader does not know is skipped by its length.

use penstock_base::codec::{DecodeError, Reader, Writer};
use penstock_base::{Generation, Instant};

use crate::wire::{Decode, Encode, record};

/// Longest payload of a record: a manifest of a million tokens in blocks of one.
pub const PAYLOAD_BYTES_MAX: u32 = 1 << 25;
/// Bytes of a record beside its payload.
pub const FRAME_BYTES: usize = 9;

/// What went into the machine: `now`, then the input.
pub const KIND_INPUT: u8 = 1;
/// What came of the input before: an [`Outcome`].
pub const KIND_OUTCOME: u8 = 2;
/// What a policy answered in the step that has begun: an [`AnswerRecord`](crate::wire::AnswerRecord).
pub const KIND_ANSWER: u8 = 3;
/// A policy failed on facts in that step: an [`ObserveFault`](crate::wire::ObserveFault).
pub const KIND_OBSERVED: u8 = 4;
/// What sits in the seats from here on: a [`Seated`](crate::wire::Seated).
pub const KIND_SEATED: u8 = 5;
/// The segment is complete: an [`End`].
pub const KIND_END: u8 = 0xfe;
/// The segment was broken off: a [`Broken`].
pub const KIND_BROKEN: u8 = 0xff;

/// What came of a step, small enough to write for every one.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Outcome {
    /// Generation of the policy set in force after the step.
    pub generation: Generation,
    /// Over the effects of this step.
    pub effects: u64,
    /// Over all decisions of the machine so far.
    pub decisions: u64,
}

record! { Outcome { generation, effects, decisions } }

/// The last record of a complete segment.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct End {
    /// Steps in the segment.
    pub steps: u64,
    /// When the last one was.
    pub now: Instant,
}

record! { End { steps, now } }

/// Why a segment was broken off.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum BreakCause {
    /// Records came faster than they could be written.
    Overload,
    /// A record was longer than [`PAYLOAD_BYTES_MAX`].
    TooLong,
    /// The machine panicked or found an invariant broken: the last input has no outcome, or is the last one before the freeze.
    Frozen,
    /// The process was told to stop at once.
    Stopped,
    /// The disk took no more.
    Disk,
}

impl BreakCause {
    const ALL: [Self; 5] = [Self::Overload, Self::TooLong, Self::Frozen, Self::Stopped, Self::Disk];

    /// In words.
    pub const fn words(self) -> &'static str {
        match self {
            Self::Overload => "records came faster than they could be written",
            Self::TooLong => "a record was too long",
            Self::Frozen => "the machine was taken out of service",
            Self::Stopped => "the process was told to stop at once",
            Self::Disk => "the disk took no more",
        }
    }
}

impl Encode for BreakCause {
    fn put(&self, out: &mut Writer) {
        out.u8(*self as u8);
    }
}

impl Decode for BreakCause {
    fn take(from: &mut Reader<'_>) -> Result<Self, DecodeError> {
        Self::ALL.get(usize::from(from.u8()?)).copied().ok_or(DecodeError::Invalid("break cause"))
    }
}

/// The last record of a segment that was broken off.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Broken {
    /// Why.
    pub cause: BreakCause,
    /// Records before this one.
    pub records: u64,
}

record! { Broken { cause, records } }

/// How a segment ends.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Ending {
    /// As its writer meant it to.
    Complete,
    /// Broken off, and the writer could still say so.
    Broken(BreakCause),
    /// The bytes stop behind a record, without an end: its writer was gone.
    CutOff,
}

const CRC_TABLE: [u32; 256] = {
    let mut table = [0; 256];
    let mut byte = 0;
    while byte < 256 {
        let mut crc = byte as u32;
        let mut bit = 0;
        while bit < 8 {
            crc = if crc & 1 == 1 { (crc >> 1) ^ 0xedb8_8320 } else { crc >> 1 };
            bit += 1;
        }
        table[byte] = crc;
        byte += 1;
    }
    table
};

/// CRC-32 (IEEE 802.3) of everything so far, `crc`, and then `bytes`; 0 is nothing so far.
pub fn crc32(crc: u32, bytes: &[u8]) -> u32 {
    let step = |crc: u32, byte: &u8| (crc >> 8) ^ CRC_TABLE[(crc as u8 ^ byte) as usize];
    !bytes.iter().fold(!crc, step)
}

/// The checksum of a record behind those with checksum `before`.
pub fn checksum(before: u32, kind: u8, payload: &[u8]) -> u32 {
    let crc = crc32(0, &before.to_le_bytes());
    let crc = crc32(crc, &[kind]);
    let crc = crc32(crc, &(payload.len() as u32).to_le_bytes());
    crc32(crc, payload)
}

/// Appends a record; its checksum.
pub fn append(out: &mut Vec<u8>, before: u32, kind: u8, payload: &[u8]) -> u32 {
    let sum = checksum(before, kind, payload);
    out.push(kind);
    out.extend_from_slice(&(payload.len() as u32).to_le_bytes());
    out.extend_from_slice(payload);
    out.extend_from_slice(&sum.to_le_bytes());
    sum
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_the_crc_of_the_standard() {
        // The check value of CRC-32/ISO-HDLC in the catalogue of parametrised CRC algorithms.
        assert_eq!(crc32(0, b"123456789"), 0xcbf4_3926);
        assert_eq!(crc32(crc32(0, b"1234"), b"56789"), 0xcbf4_3926);
    }
}
