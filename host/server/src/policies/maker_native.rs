//! A build without WebAssembly: the native defaults sit in every seat, and nothing else can.

use std::sync::mpsc::SyncSender;

use penstock_engine::PolicySource;
use serde_json::{Value, json};

use super::report::Report;
use super::{Fault, MakerSettings};

/// Nothing can be made.
pub struct Maker(std::convert::Infallible);

/// The native defaults.
#[derive(Clone)]
pub struct ParsedSet;

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
