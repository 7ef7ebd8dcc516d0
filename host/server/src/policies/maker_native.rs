//! A build without WebAssembly: the native defaults sit in every seat, and nothing else can.

use std::sync::mpsc::SyncSender;

use penstock_base::Instant;
use penstock_engine::{Machine, Memory, PolicySource};
use serde_json::{Value, json};

use super::report::Report;
use super::{Fault, MakerSettings};

/// Nothing can be made.
pub struct Maker(std::convert::Infallible);

/// The native defaults.
#[derive(Clone)]
pub struct ParsedSet;

/// Nothing needs to be kept at hand.
pub struct Pinned;

/// Native policies remember nothing.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct States;

const WHY: &str = "this build has no WebAssembly (feature `wasm`): only the native defaults serve";

impl Maker {
    /// # Errors
    /// Always.
    pub fn start(_: &MakerSettings, _: SyncSender<Report>) -> Result<Self, String> {
        Err(WHY.to_owned())
    }

    /// # Errors
    /// Never called.
    pub fn load(&self, _: &[u8]) -> Result<Value, Fault> {
        match self.0 {}
    }

    /// Components at hand.
    pub fn components(&self) -> Vec<Value> {
        match self.0 {}
    }

    /// One component.
    pub fn component(&self, _: &str) -> Option<Value> {
        match self.0 {}
    }

    /// Seats' instances alive in the process.
    pub fn instances_alive(&self) -> usize {
        match self.0 {}
    }

    /// # Errors
    /// Never called.
    pub fn parse(&self, _: &Value) -> Result<ParsedSet, Fault> {
        match self.0 {}
    }

    /// Makes instances of `set`.
    pub fn source(&self, _: &ParsedSet) -> PolicySource {
        match self.0 {}
    }

    /// The same at the server's start.
    pub fn first_source(&self, _: &ParsedSet, _: States) -> PolicySource {
        match self.0 {}
    }

    /// # Errors
    /// Never called.
    pub fn try_out(&self, _: &ParsedSet, _: &States) -> Result<(), Fault> {
        match self.0 {}
    }

    /// Keeps nothing.
    pub fn pin(&self, _: &ParsedSet) -> Pinned {
        match self.0 {}
    }

    /// What machines remember.
    pub fn states(&self, _: Vec<(Machine, Option<Memory>)>) -> States {
        match self.0 {}
    }

    /// In bytes.
    pub fn encode(&self, _: &States, _: Instant, _: u64) -> Option<Vec<u8>> {
        match self.0 {}
    }

    /// # Errors
    /// Never called.
    pub fn decode(&self, _: &[u8], _: u64) -> Result<States, String> {
        match self.0 {}
    }
}

impl States {
    /// Always.
    pub fn is_empty(&self) -> bool {
        true
    }
}

impl ParsedSet {
    /// The native defaults.
    pub fn native() -> Self {
        Self
    }

    /// Stands for the native defaults.
    pub fn digest(&self) -> String {
        "native".to_owned()
    }

    /// The document.
    pub fn document(&self) -> Value {
        json!({})
    }

    /// # Errors
    /// Always.
    pub fn read(_: &Value) -> Result<Self, String> {
        Err(WHY.to_owned())
    }

    /// Components that it names.
    pub fn components(&self) -> Vec<String> {
        Vec::new()
    }

    /// Who sits where.
    pub fn seats(&self, _: Option<&Maker>) -> Vec<Value> {
        let natives = [
            ("admission", "bounded"),
            ("routing", "overlap-load"),
            ("fairness", "class-first"),
            ("eviction", "lru"),
            ("overload", "ladder"),
        ];
        natives.map(|(seat, policy)| json!({"seat": seat, "policy": policy, "kind": "native"})).into()
    }
}
