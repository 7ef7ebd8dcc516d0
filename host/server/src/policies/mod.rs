//! Which policies decide, and how do they change while the server runs?
//!
//! [`publication`] knows the sets: which is in force, which were good before, which were refused and why. [`keeper`] is the thread that
//! looks after them: it hears what policies say, returns to the last good set when one fails too often, and watches the policy folder.
//! [`state_folder`] has what outlives the process; `saved` the policies' states in bytes. [`document`] reads sets, `maker` makes them: with
//! WebAssembly (`maker_wasm`), or natively alone (`maker_native`). [`story`] tells decisions in numbers, `telling` one request in words;
//! `penstock policy` ([`command`]) asks over the admin listener.

pub mod command;
pub mod document;
mod keeper;
#[cfg_attr(feature = "wasm", path = "maker_wasm.rs")]
#[cfg_attr(not(feature = "wasm"), path = "maker_native.rs")]
mod maker;
mod publication;
mod report;
#[cfg(feature = "wasm")]
mod saved;
mod state_folder;
pub mod story;
mod telling;

use std::path::PathBuf;

pub use keeper::{Folder, Inbox, Keeper, Kept};
pub use publication::{By, Publication, Wanted, foreseen, shipped_beside_the_binary};

/// What making sets depends on.
#[derive(Clone)]
#[cfg_attr(not(feature = "wasm"), allow(dead_code, reason = "without components nothing is made"))]
pub struct MakerSettings {
    /// Where compiled components are kept between starts.
    pub cache_dir: Option<PathBuf>,
    /// Where what decides is kept over a restart.
    pub state_dir: Option<PathBuf>,
    /// The deployment's secret: vouches for what is kept there.
    pub secret: Vec<u8>,
    /// Replicas in this process.
    pub replicas: u32,
    /// Longest sequence.
    pub context_tokens_max: u32,
}

/// Why something about policies was not done. Nothing has changed.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Fault {
    /// The component or the set cannot serve, by name.
    Refused(String),
    /// There is no such thing: a set, a component, a decision.
    Unknown(String),
    /// There is no room for another one.
    Full(String),
    /// There is nothing to go back to.
    NothingBefore,
    /// This server runs native policies alone.
    NativeOnly(String),
}

impl std::fmt::Display for Fault {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Refused(why) | Self::Full(why) | Self::NativeOnly(why) => f.write_str(why),
            Self::Unknown(what) => write!(f, "no {what} is known here"),
            Self::NothingBefore => f.write_str("no other set was in force before, and the native defaults are"),
        }
    }
}

impl std::error::Error for Fault {}
