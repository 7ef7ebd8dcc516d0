//! What may a policy do to the outside? Write a log line, and count.
//!
//! In a component these go to the host, which has limits of its own for both. Natively they go nowhere, so that tests stay quiet.

use std::sync::OnceLock;

/// How loud a log line is.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Level {
    /// Something is wrong.
    Error = 0,
    /// Something may be wrong.
    Warning = 1,
    /// Something happened.
    Information = 2,
    /// For whoever writes the policy.
    Debug = 3,
}

/// Where log lines and counts go. The export macros set it.
#[doc(hidden)]
#[derive(Clone, Copy, Debug)]
pub struct Outside {
    /// The host's `log`.
    pub log: fn(u8, &str),
    /// The host's `count`.
    pub count: fn(&str, u64),
}

static OUTSIDE: OnceLock<Outside> = OnceLock::new();

/// Connects the functions below, and sends the message of a panic to the log before the component traps.
#[doc(hidden)]
pub fn connect(outside: Outside) {
    if OUTSIDE.set(outside).is_ok() {
        std::panic::set_hook(Box::new(|info| log(Level::Error, &info.to_string())));
    }
}

/// Writes a line to the host's log. Long texts are cut, floods are dropped and counted.
pub fn log(level: Level, text: &str) {
    if let Some(outside) = OUTSIDE.get() {
        (outside.log)(level as u8, text);
    }
}

/// Adds to the policy's counter of that name.
pub fn count(name: &str, by: u64) {
    if let Some(outside) = OUTSIDE.get() {
        (outside.count)(name, by);
    }
}
