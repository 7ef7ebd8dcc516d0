//! What the seats have to say, on its way from the machines' threads to the one that keeps the policies.

use std::sync::Arc;

/// Reports that may wait. What is more is left out: nothing that a policy says may hold a machine up.
pub const REPORTS_MAX: usize = 1_024;

/// Something that a seat said, or that happened to it.
#[derive(Clone, Debug)]
pub struct Report {
    /// Digest of the set in the seats,
    pub set: Arc<str>,
    /// and the generation as which it sat there: a set may be put in force again before a report about its last term is heard.
    pub generation: u64,
    /// Which machine.
    pub machine: penstock_engine::Machine,
    /// Which seat.
    pub decision: &'static str,
    /// The policy's own name.
    pub policy: String,
    /// What.
    pub said: Said,
}

/// See [`Report`].
#[derive(Clone, Debug)]
#[cfg_attr(not(feature = "wasm"), allow(dead_code, reason = "native policies say nothing"))]
pub enum Said {
    /// A line, with its level: 0 error to 3 debug.
    Line(u8, String),
    /// The policy's own counter rose.
    Count(String, u64),
    /// It failed, or its answer was refused: the kind, and the words.
    Struck(&'static str, String),
    /// It lost state, or was made anew.
    Renewed(String),
    /// What became of its state of before the server's start.
    Resumed(String),
    /// It is not asked for a while.
    Quarantined {
        /// For how many calls.
        calls: u64,
    },
    /// So many things of one kind were too many to be told.
    Dropped(&'static str, u64),
}
