//! What can go wrong with a discovery service, and what to do about it.

use crate::record::WorkerId;

/// Every failure of this crate.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum DiscoveryError {
    /// The service does not answer, or answers that it cannot.
    #[error("{service} does not answer: {why}; what runs goes on with the workers known last, and it is asked again")]
    Unreachable {
        /// Where it should be.
        service: String,
        /// The last failure.
        why: String,
    },

    /// The service refused, and will refuse again.
    #[error("{service} refused {what}: {why}; {remedy}")]
    Refused {
        /// Where it is.
        service: String,
        /// What was asked.
        what: &'static str,
        /// Its reason.
        why: String,
        /// What to do.
        remedy: &'static str,
    },

    /// The service gave an answer that is none.
    #[error("{service} gave an answer of no use to {what}: {why}; is it the right address?")]
    Answer {
        /// Where it is.
        service: String,
        /// What was asked.
        what: &'static str,
        /// The finding.
        why: String,
    },

    /// A later life of the same worker is registered.
    #[error(
        "worker {id} is registered with epoch {newer}, later than {epoch}: this process is the older one and must end"
    )]
    Superseded {
        /// Which worker.
        id: WorkerId,
        /// The life that asked.
        epoch: u64,
        /// The life that is there.
        newer: u64,
    },

    /// The record cannot be used.
    #[error("worker record: {0}")]
    Record(#[from] RecordError),

    /// A setting cannot be used.
    #[error("{key}: {why}")]
    Setting {
        /// Which.
        key: &'static str,
        /// What is wrong and what to write instead.
        why: String,
    },

    /// The registration has ended before.
    #[error("the registration has ended; register again")]
    Ended,
}

/// Why a record is none.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RecordError {
    /// Not JSON, or a required field is missing or of another type.
    #[error("{why}")]
    Form {
        /// As the reader says it.
        why: String,
    },

    /// Written by a later release, in a way that this one cannot read.
    #[error("its encoding has version {found} and this release reads {known}; update the older side")]
    Version {
        /// In the record.
        found: u64,
        /// The newest that is read here.
        known: u64,
    },

    /// Larger than any record may be.
    #[error("{bytes} bytes, and {max} are allowed")]
    TooLarge {
        /// Found.
        bytes: usize,
        /// Allowed.
        max: usize,
    },

    /// A field has a value that it must not have.
    #[error("{field} {why}")]
    Field {
        /// Which.
        field: &'static str,
        /// What is wrong.
        why: String,
    },

    /// The record names another worker than the place where it was found.
    #[error("it is of worker {found}, and its place belongs to {expected}")]
    Misplaced {
        /// In the record.
        found: WorkerId,
        /// The place's.
        expected: String,
    },
}
