//! Components that break every rule of the contract, one rule each: what a host has to survive.
//!
//! They are written as WebAssembly text and wrapped by the contract's own WIT, so they need no tool chain for guests and are made in
//! milliseconds. [`list`] gives all of them for one decision, with where each must be caught.

mod answers;
mod component;
mod load;
mod shapes;
mod times;

use anyhow::Result;
use component::Guest;

/// The five decisions, by the names of the contract.
pub const DECISIONS: [&str; 5] = ["admission", "routing", "fairness", "eviction", "overload"];

/// Where a host that keeps the contract notices.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Caught {
    /// It is never seated: the bytes, the imports, the manifest or the parameters are refused, or it fails in `describe` or `configure`.
    Load,
    /// A decision fails: the native default answers, a strike is counted.
    Decide,
    /// A decision is answered with what cannot stand: the native default answers, a strike is counted.
    Malformed,
    /// `observe` fails, before the next decision.
    Observe,
    /// A snapshot fails.
    Save,
    /// State does not come back; the instance starts fresh, or fails.
    Restore,
    /// Nowhere: it is bounded, and its answers stand.
    Nowhere,
}

/// One of them.
#[derive(Clone, Debug)]
pub struct Hostile {
    /// What it does.
    pub name: &'static str,
    /// Where that is noticed.
    pub caught: Caught,
    /// Words that the reason holds, all of them: the kind of fault, and what of it a reader needs to find the place. None where it is
    /// caught nowhere.
    pub says: &'static [&'static str],
    /// Decisions that it answers well before it does so; 0 for none. A trial at the start sees nothing of those that wait.
    pub good_calls: u64,
    /// The component, or what claims to be one.
    pub bytes: Vec<u8>,
}

/// A component that keeps every rule and has no opinion; it counts its calls in its state. What the others are changes of.
pub fn harmless(decision: &'static str) -> Result<Vec<u8>> {
    Guest::new(decision).component()
}

/// The same in another version and with `state_bytes` of state, at most 64 KiB and the count first: what a swap hands over.
pub fn stateful(decision: &'static str, version: &str, state_bytes: u32) -> Result<Vec<u8>> {
    let mut guest = Guest::new(decision);
    guest.manifest.version = version.to_owned();
    guest.with_state(state_bytes).component()
}

/// All that misbehave at once, for `decision`.
pub fn list(decision: &'static str) -> Result<Vec<Hostile>> {
    let mut all = load::list(decision)?;
    all.extend(times::when_asked(decision, 0)?);
    all.extend(times::with_state(decision)?);
    Ok(all)
}

/// Those that answer well at first: what fails in a decision does so after [`Hostile::good_calls`] of them, and `save` and `restore` once
/// there is something to save.
pub fn late(decision: &'static str) -> Result<Vec<Hostile>> {
    let mut all = times::when_asked(decision, times::GOOD_CALLS)?;
    all.retain(|hostile| matches!(hostile.caught, Caught::Decide | Caught::Malformed));
    all.extend(times::late_state(decision)?);
    Ok(all)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn there_are_more_than_thirty_for_each_decision() {
        for decision in DECISIONS {
            let all = list(decision).unwrap();
            let names: BTreeSet<_> = all.iter().map(|hostile| hostile.name).collect();
            assert_eq!(names.len(), all.len(), "{decision}: a name stands twice");
            assert!(all.len() > 60, "{decision}: {}", all.len());
            let late: BTreeSet<_> = late(decision).unwrap().iter().map(|hostile| hostile.name).collect();
            assert!(late.len() > 20, "{decision}: {}", late.len());
        }
    }

    #[test]
    fn they_are_components_but_for_those_that_say_so() {
        for hostile in list("routing").unwrap() {
            // Magic, then the version of a component: 0x0d, layer 1.
            let is_component = hostile.bytes.starts_with(b"\0asm\x0d\0\x01\0");
            // And a fate that can be told from others.
            assert_eq!(hostile.says.is_empty(), hostile.caught == Caught::Nowhere, "{}", hostile.name);
            let claims = !["is-no-wasm", "is-empty", "is-a-core-module"].contains(&hostile.name);
            assert_eq!(is_component, claims, "{}", hostile.name);
        }
    }
}
