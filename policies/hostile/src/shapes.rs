//! Components whose very shape is wrong: written as whole components, since the contract's own tools would not make them.

use anyhow::{Context as _, Result};

/// Levels of [`nested`]; each holds two of the one below.
const LEVELS: u32 = 30;

/// The names that a policy exports, on functions of other types.
fn exports(decision: &str, version: &str) -> String {
    format!(
        "(export \"penstock:types/policy@{version}\" (instance $own))
         (export \"penstock:{decision}/{decision}@{version}\" (instance $own))"
    )
}

const OWN: &str = "(core module $m (func (export \"f\")))
    (core instance $i (instantiate $m))
    (func $f (canon lift (core func $i \"f\")))
    (instance $own (export \"decide\" (func $f)))";

/// What is in one, and what a host must say of it.
pub struct Shape {
    pub name: &'static str,
    pub says: &'static [&'static str],
    pub text: String,
}

/// All of them, for `decision`.
pub fn list(decision: &str) -> Vec<Shape> {
    let shape = |name, says, text: String| Shape { name, says, text: format!("(component {text})") };
    vec![
        shape("exports-nothing", &["exports nothing", "exactly one of"], String::new()),
        shape(
            "exports-a-decision-alone",
            &["exports penstock:"],
            format!("{OWN} (export \"penstock:{decision}/{decision}@0.1.0\" (instance $own))"),
        ),
        shape(
            "exports-two-decisions",
            &["exports penstock:", "exactly one of"],
            format!(
                "{OWN} {} (export \"penstock:{other}/{other}@0.1.0\" (instance $own))",
                exports(decision, "0.1.0"),
                other = if decision == "eviction" { "overload" } else { "eviction" }
            ),
        ),
        shape("exports-other-types", &["does not fit the contract"], format!("{OWN} {}", exports(decision, "0.1.0"))),
        shape(
            "is-of-a-later-contract",
            &["@0.2.0 is not of this host's contract"],
            format!("{OWN} {}", exports(decision, "0.2.0")),
        ),
        shape(
            "imports-what-the-host-interface-lacks",
            &["does not fit the contract", "now"],
            format!(
                "(import \"penstock:types/host@0.1.0\" (instance (export \"now\" (func (result u64))))) {OWN} {}",
                exports(decision, "0.1.0")
            ),
        ),
        shape(
            "imports-a-function-of-its-own",
            &["imports what is not offered: getrandom"],
            format!("(import \"getrandom\" (func)) {OWN} {}", exports(decision, "0.1.0")),
        ),
        shape(
            "imports-by-names-of-a-page",
            &["imports what is not offered: aaaaaaaa"],
            format!(
                "(import \"{long}a\" (func)) (import \"{long}b\" (func)) {OWN} {}",
                exports(decision, "0.1.0"),
                long = "a".repeat(40_000)
            ),
        ),
        shape("shares-its-memory", &["not a component that this engine runs"], module("(memory 1 1 shared)")),
        shape("has-a-memory-of-64-bits", &["not a component that this engine runs"], module("(memory i64 1)")),
        shape(
            "has-forty-memories",
            &["not a component that this engine runs", "memories"],
            module(&"(memory 1)".repeat(40)),
        ),
        shape(
            "has-forty-tables",
            &["not a component that this engine runs", "tables"],
            module(&"(table 1 funcref)".repeat(40)),
        ),
        shape(
            "has-a-table-of-a-million",
            &["not a component that this engine runs", "table"],
            module("(table 1000000 funcref)"),
        ),
        shape(
            "has-a-thousand-core-instances",
            &["instances"],
            format!("(core module $m) {}", "(core instance (instantiate $m))".repeat(1_000)),
        ),
        shape("nests-a-billion-instances", &["instances"], nested()),
    ]
}

/// A core module in an instance of its own.
fn module(fields: &str) -> String {
    format!("(core module $m {fields}) (core instance (instantiate $m))")
}

/// Components within one another, two of the one before in each: some hundred bytes that say a billion instances.
fn nested() -> String {
    let mut out = String::from("(component $c0 (core module $m) (core instance (instantiate $m)))");
    for level in 1..=LEVELS {
        let below = level - 1;
        out.push_str(&format!(
            "(component $c{level} (alias outer 1 $c{below} (component $c))
               (instance (instantiate $c)) (instance (instantiate $c)))"
        ));
    }
    out.push_str(&format!("(instance (instantiate $c{LEVELS}))"));
    out
}

impl Shape {
    pub fn bytes(&self) -> Result<Vec<u8>> {
        wat::parse_str(&self.text).with_context(|| format!("the text of {}", self.name))
    }
}
