//! What happened, in bytes, and does it happen again? One log per machine.
//!
//! A log is a row of segments. A segment opens with a header (which machine, its configuration, a snapshot of machine and policies) and
//! holds two records for every step: what went in, and what came of it in digests. It ends complete or marked as broken. Nothing is
//! ever left out of the middle: a writer that cannot keep up breaks the segment off, and the driver opens the next one with a fresh
//! snapshot.
//!
//! - [`wire`]: how values become bytes, one file a family.
//! - [`frame`]: records with kind, length and chained checksum. [`header`]: how a segment opens.
//! - [`write`]: a segment being written. [`read`]: one being read. [`verify`]: the same inputs, the same decisions?
//! - [`told`]: a digest of what a policy is told. `recorded`: the answers in a log, in the policies' places.
//! - [`machine`]: what both machines have in common.
#![forbid(unsafe_code)]

pub mod error;
pub mod frame;
pub mod header;
pub mod machine;
pub mod read;
mod recorded;
pub mod told;
pub mod verify;
pub mod wire;
pub mod write;

pub use error::{JournalError, VerifyError};
pub use frame::{BreakCause, Ending, Outcome};
pub use header::{MachineId, SegmentHeader};
pub use machine::{Machine, MachineKind, digest_effects};
pub use read::{Record, SegmentReader};
pub use recorded::{AskedAgain, AskedDifference, Remade, Remake};
pub use verify::{Examined, Verified, examine, verify, verify_native};
pub use wire::{SavedSeat, Seated};
pub use write::{Closed, SegmentWriter};
