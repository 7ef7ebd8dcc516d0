//! What went wrong inside a component, in one kind and some words?

use std::fmt;

use penstock_policy_api::FaultKind;
use wasmtime::{Trap, WasmBacktrace};

use crate::limits::{FAULT_FRAMES_MAX, FAULT_TEXT_BYTES_MAX, NAME_BYTES_MAX};

/// The functions of the contract, as a fault names them.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum GuestCall {
    /// Making the instance, its start functions included.
    Start,
    /// `describe`.
    Describe,
    /// `configure`.
    Configure,
    /// `observe`.
    Observe,
    /// `save`.
    Save,
    /// `restore`.
    Restore,
    /// `decide` of admission, routing, eviction and overload.
    Decide,
    /// `order` of fairness.
    Order,
    /// `victims` of fairness.
    Victims,
}

impl GuestCall {
    /// The name in records.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Start => "start",
            Self::Describe => "describe",
            Self::Configure => "configure",
            Self::Observe => "observe",
            Self::Save => "save",
            Self::Restore => "restore",
            Self::Decide => "decide",
            Self::Order => "order",
            Self::Victims => "victims",
        }
    }
}

/// A call that came to nothing.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Failure {
    /// Which function.
    pub during: GuestCall,
    /// What kind of fault.
    pub kind: FaultKind,
    /// The cause, and the guest's functions from the innermost outwards. Bounded.
    pub text: String,
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} in {}: {}", self.kind.name(), self.during.name(), self.text)
    }
}

impl std::error::Error for Failure {}

/// The guest asked for more memory or a larger table than it may have.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("asked for {asked} {what}, may have {limit}")]
pub(crate) struct OverCap {
    pub what: &'static str,
    pub asked: usize,
    pub limit: usize,
}

/// The guest called the host too often within one call.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("more than {limit} host calls in one call")]
pub(crate) struct TooManyHostCalls {
    pub limit: u32,
}

impl Failure {
    /// Reads what the engine says about a failed call.
    pub(crate) fn of(during: GuestCall, error: &wasmtime::Error) -> Self {
        let kind = match error.downcast_ref::<Trap>() {
            Some(Trap::OutOfFuel) => FaultKind::Fuel,
            Some(Trap::Interrupt) => FaultKind::Epoch,
            _ if error.downcast_ref::<OverCap>().is_some() => FaultKind::Memory,
            _ => FaultKind::Trap,
        };
        let mut text = error.root_cause().to_string();
        if let Some(backtrace) = error.downcast_ref::<WasmBacktrace>() {
            let frames = backtrace.frames();
            for (at, frame) in frames.iter().take(FAULT_FRAMES_MAX).enumerate() {
                text.push_str(if at == 0 { "; in " } else { " < " });
                match frame.func_name() {
                    Some(name) => text.push_str(&name[..name.floor_char_boundary(NAME_BYTES_MAX)]),
                    None => text.push_str(&format!("function {}", frame.func_index())),
                }
            }
            if frames.len() > FAULT_FRAMES_MAX {
                text.push_str(" < ...");
            }
        }
        Self::new(during, kind, text)
    }

    /// A fault in the host's own words.
    pub(crate) fn new(during: GuestCall, kind: FaultKind, text: String) -> Self {
        Self { during, kind, text: plain(text, FAULT_TEXT_BYTES_MAX) }
    }
}

/// A guest's words as one bounded line: cut at a character's edge, blanks for control characters.
pub(crate) fn plain(mut text: String, bytes_max: usize) -> String {
    text.truncate(text.floor_char_boundary(bytes_max));
    if text.contains(char::is_control) {
        text = text.chars().map(|c| if c.is_control() { ' ' } else { c }).collect();
    }
    text
}
