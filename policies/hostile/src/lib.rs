//! Components that break every rule of the contract, one rule each: what a host has to survive.
//!
//! They are written as WebAssembly text and wrapped by the contract's own WIT, so they need no tool chain for guests and are made in
//! milliseconds. [`list`] gives all of them for one decision, with where each must be caught.

mod answers;
mod component;

use anyhow::Result;
use component::{Guest, Manifest};

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
    /// The component, or what claims to be one.
    pub bytes: Vec<u8>,
}

/// A component that keeps every rule and has no opinion; it counts its calls in its state. What the others are changes of.
pub fn harmless(decision: &'static str) -> Result<Vec<u8>> {
    Guest::new(decision).component()
}

const LOOP: &str = "(loop $on (br $on)) (unreachable)";
const TRAP: &str = "(unreachable)";

/// All of them, for `decision`.
pub fn list(decision: &'static str) -> Result<Vec<Hostile>> {
    let mut all = at_load(decision)?;
    all.extend(when_asked(decision)?);
    all.extend(with_state(decision)?);
    Ok(all)
}

fn at_load(decision: &'static str) -> Result<Vec<Hostile>> {
    let good = harmless(decision)?;
    let other = if decision == "eviction" { "overload" } else { "eviction" };
    let manifest = |change: &dyn Fn(&mut Manifest)| {
        let mut guest = Guest::new(decision);
        change(&mut guest.manifest);
        guest.component()
    };
    let context = component::context_table(decision);
    let names = |count: usize, name: &str| vec![(name.to_owned(), true); count];
    let load = |name, bytes| Hostile { name, caught: Caught::Load, bytes };
    Ok(vec![
        load("is-no-wasm", b"no wasm at all".to_vec()),
        load("is-empty", Vec::new()),
        load("is-cut-short", good[..good.len() / 2].to_vec()),
        load("is-a-core-module", wat::parse_str("(module)")?),
        load("imports-a-clock", Guest::new(decision).importing("wasi:clocks", "monotonic-clock").component()?),
        load("answers-another-decision", harmless(other)?),
        load("has-a-gibibyte", Guest::new(decision).pages(16_384).component()?),
        load("traps-at-start", Guest::new(decision).also("(func $start (unreachable)) (start $start)").component()?),
        load("traps-in-describe", Guest::new(decision).body("describe", TRAP).component()?),
        load("loops-in-describe", Guest::new(decision).body("describe", LOOP).component()?),
        load("traps-in-configure", Guest::new(decision).body("configure", TRAP).component()?),
        load("loops-in-configure", Guest::new(decision).body("configure", LOOP).component()?),
        load("refuses-its-defaults", Guest::new(decision).body("configure", component::REFUSE).component()?),
        load("wants-a-table-that-is-not", manifest(&|m| m.tables.push(("weather".into(), names(1, "wind-us"))))?),
        load("wants-a-signal-that-is-not", manifest(&|m| m.tables.push((context.into(), names(1, "wind-us"))))?),
        load("wants-too-many-signals", manifest(&|m| m.tables.push((context.into(), names(49, "stage-code"))))?),
        load("wants-a-table-twice", manifest(&|m| m.tables.extend(vec![(context.into(), names(1, "stage-code")); 2]))?),
        load("wants-a-fact-that-is-not", manifest(&|m| m.facts.push("wind-turned".into()))?),
        load("wants-an-action-that-is-not", manifest(&|m| m.actions.push("reboot".into()))?),
    ])
}

fn when_asked(decision: &'static str) -> Result<Vec<Hostile>> {
    let decides = |name, body: &str| -> Result<Hostile> {
        let bytes = Guest::new(decision).deciding(body).component()?;
        Ok(Hostile { name, caught: Caught::Decide, bytes })
    };
    let quiet = answers::no_opinion(decision);
    let bounded = |name, body: &str| -> Result<Hostile> {
        let bytes = Guest::new(decision).deciding(&format!("{body} {quiet}")).component()?;
        Ok(Hostile { name, caught: Caught::Nowhere, bytes })
    };
    let mut all = vec![
        decides("traps", TRAP)?,
        decides("loops", LOOP)?,
        decides("divides-by-nothing", "(i64.div_u (i64.const 1) (i64.load (i32.const 72))) (unreachable)")?,
        decides("reads-outside", "(i32.load (i32.const -8))")?,
        decides("answers-from-outside", "(i32.const -8)")?,
        decides("answers-misaligned", "(i32.const 1025)")?,
        decides("grows-for-ever", "(loop $on (drop (memory.grow (i32.const 16))) (br $on)) (unreachable)")?,
        decides("lists-from-outside", &answers::list_at(decision, 0x7fff_fff0, 4))?,
        decides("lists-a-billion", &answers::list_at(decision, 4_096, 0x3fff_ffff))?,
        Hostile {
            name: "recurses-for-ever",
            caught: Caught::Decide,
            bytes: Guest::new(decision)
                .also("(func $down (param i64) (call $down (i64.add (local.get 0) (i64.const 1))) (drop (i64.load (i32.const 0))))")
                .deciding("(call $down (i64.const 0)) (unreachable)")
                .component()?,
        },
        Hostile {
            name: "traps-after-answering",
            caught: Caught::Decide,
            bytes: Guest::new(decision).body("cleanup", TRAP).component()?,
        },
        Hostile {
            name: "traps-when-given-room",
            caught: Caught::Decide,
            // Only once it has been configured: loading asks for room as well.
            bytes: Guest::new(decision).body("realloc", "(if (i32.load (i32.const 80)) (then (unreachable)))").component()?,
        },
        bounded("floods-the-log", &repeat("(call $log (i32.const 0) (i32.const 4096) (i32.const 4000))", 100))?,
        bounded("counts-a-thousand-names", &repeat("(call $count (local.get $i) (i32.const 4) (i64.const -1))", 100))?,
    ];
    for (name, body) in answers::malformed(decision) {
        all.push(Hostile { caught: Caught::Malformed, ..decides(name, &body)? });
    }
    if let Some(body) = answers::unknown_case(decision) {
        all.push(decides("answers-a-case-that-is-not", &body)?);
    }
    Ok(all)
}

fn with_state(decision: &'static str) -> Result<Vec<Hostile>> {
    let one = |name, caught, function: &'static str, body: &str| -> Result<Hostile> {
        let mut guest = Guest::new(decision).body(function, body);
        if caught == Caught::Observe {
            guest.manifest.facts.push("finished".into());
        }
        Ok(Hostile { name, caught, bytes: guest.component()? })
    };
    let saves = |at: &str, length: &str| component::state_of(at, length);
    Ok(vec![
        one("traps-in-observe", Caught::Observe, "observe", TRAP)?,
        one("loops-in-observe", Caught::Observe, "observe", "(loop $on (br $on))")?,
        one("traps-in-save", Caught::Save, "save", TRAP)?,
        one("loops-in-save", Caught::Save, "save", LOOP)?,
        one("saves-from-outside", Caught::Save, "save", &saves("(i32.const -64)", "(i32.const 32)"))?,
        one(
            "saves-sixteen-mebibytes",
            Caught::Save,
            "save",
            &format!("(drop (memory.grow (i32.const 256))) {}", saves("(i32.const 0)", "(i32.const 16777216)")),
        )?,
        one("traps-in-restore", Caught::Restore, "restore", TRAP)?,
        one("loops-in-restore", Caught::Restore, "restore", LOOP)?,
        one("finds-its-state-damaged", Caught::Restore, "restore", &component::restored(1, 1))?,
        one("restores-to-a-case-that-is-not", Caught::Restore, "restore", &component::restored(0, 9))?,
    ])
}

/// `body` so many times, with `$i` counting down.
fn repeat(body: &str, times: u32) -> String {
    format!(
        "(local.set $i (i32.const {times})) (loop $on {body} (local.set $i (i32.sub (local.get $i) (i32.const 1))) (br_if $on (local.get $i)))"
    )
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
            assert!(all.len() > 30, "{decision}: {}", all.len());
        }
    }

    #[test]
    fn they_are_components_but_for_those_that_say_so() {
        for hostile in list("routing").unwrap() {
            // Magic, then the version of a component: 0x0d, layer 1.
            let is_component = hostile.bytes.starts_with(b"\0asm\x0d\0\x01\0");
            let claims = !["is-no-wasm", "is-empty", "is-a-core-module"].contains(&hostile.name);
            assert_eq!(is_component, claims, "{}", hostile.name);
        }
    }
}
