//! What can be wrong with a log, and with a replay.

use penstock_base::codec::DecodeError;

/// Why a segment could not be read.
#[derive(Debug, thiserror::Error)]
pub enum JournalError {
    /// The source failed.
    #[error("the source cannot be read: {0}")]
    Io(#[from] std::io::Error),
    /// The first bytes are not those of a segment.
    #[error("this is no journal segment")]
    NotASegment,
    /// Written in another version of the format.
    #[error("journal format version {found}, this build reads {expected}")]
    Version {
        /// What the segment says.
        found: u32,
        /// What this build reads.
        expected: u32,
    },
    /// The bytes end inside the header or inside a record.
    #[error("the bytes end inside record {record}")]
    Truncated {
        /// Which record; 0 is the header.
        record: u64,
    },
    /// The checksum of a record does not hold: it was changed, moved or follows a gap.
    #[error("the checksum of record {record} does not hold")]
    Checksum {
        /// Which record; 0 is the header.
        record: u64,
    },
    /// A record is longer than any that is written.
    #[error("record {record} claims {bytes} bytes")]
    TooLong {
        /// Which record; 0 is the header.
        record: u64,
        /// What it claims.
        bytes: u64,
    },
    /// The bytes of a record mean nothing.
    #[error("record {record}: {source}")]
    Malformed {
        /// Which record; 0 is the header.
        record: u64,
        /// What is wrong.
        source: DecodeError,
    },
    /// The configuration in the header is not the one that its digest names.
    #[error("the configuration is not the one that its digest names")]
    ConfigDigest,
    /// The segment belongs to the other kind of machine.
    #[error("the segment belongs to the other kind of machine")]
    OtherMachine,
    /// Bytes follow the end of the segment.
    #[error("bytes follow the end of the segment")]
    Trailing,
}

/// Why a replay is not the recorded run.
#[derive(Debug, thiserror::Error)]
pub enum VerifyError {
    /// The segment cannot be read.
    #[error(transparent)]
    Journal(#[from] JournalError),
    /// The snapshot does not make a machine.
    #[error("the snapshot cannot be taken: {0}")]
    Snapshot(DecodeError),
    /// A policy did not take its saved state.
    #[error("the {seat} policy did not take its state: {source}")]
    Policy {
        /// Which.
        seat: &'static str,
        /// What it said.
        source: penstock_policy_api::RestoreError,
    },
    /// Records in an order that no writer writes.
    #[error("record {record} stands where none of its kind can")]
    Order {
        /// Which.
        record: u64,
    },
    /// The machine decided something else.
    #[error("step {step} (record {record}) came out differently: {what}")]
    Mismatch {
        /// Which record.
        record: u64,
        /// Which step of the segment, from 1.
        step: u64,
        /// What differs.
        what: &'static str,
    },
    /// A policy is asked something else than it was.
    #[error("step {step} (before record {record}): {what}")]
    Asked {
        /// Of the step's outcome.
        record: u64,
        /// Which step of the segment, from 1.
        step: u64,
        /// What differs.
        what: String,
    },
    /// The machine panicked in the replay.
    #[error("step {step} panicked: {text}")]
    Panicked {
        /// Which step of the segment, from 1.
        step: u64,
        /// The panic's message.
        text: String,
    },
}
