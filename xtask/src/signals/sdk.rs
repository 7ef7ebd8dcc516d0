//! The registry as the SDK has it: one accessor a signal, and facts by name.

use std::fmt::Write as _;

use super::{Fact, Fill, HEAD, Registry, Shape, Signal, Table, camel, rustdoc, snake};

/// `tables.rs`: markers and views of every table that a question is asked about.
pub fn tables(registry: &Registry) -> String {
    let mut out = format!("{HEAD}\n//! One accessor a signal, table by table.\n\n");
    out.push_str("use crate::view::{context_view, row_view};\n");
    let common = registry.table.iter().find(|table| table.questions.is_empty());
    for table in registry.table.iter().filter(|table| !table.questions.is_empty()) {
        let extra = common.filter(|_| table.shape == Shape::Context);
        out.push_str(&view(table, extra));
    }
    out
}

/// Each view in a module of its own, since it names a constant of its own.
fn view(table: &Table, common: Option<&Table>) -> String {
    let ty = camel(&table.name);
    let module = snake(&table.name);
    let (names, head) = match table.shape {
        Shape::Context => {
            (format!("{ty}, {ty}Context"), format!("context_view! {{\n    /// {}\n    {ty} {ty}Context", table.doc))
        }
        Shape::Rows => (
            format!("{ty}, {ty}Row, {ty}Rows"),
            format!("row_view! {{\n    /// {}\n    {ty} {ty}Rows {ty}Row", table.doc),
        ),
    };
    let mut out =
        format!("\npub use {module}::{{{names}}};\nmod {module} {{\nuse super::*;\n{head} \"{}\" {{\n", table.name);
    let signals = table.signals.iter().chain(common.into_iter().flat_map(|common| &common.signals));
    for (index, signal) in signals.enumerate() {
        let name = snake(&signal.name);
        let _ = writeln!(out, "        /// {}\n        ///\n        /// {}", rustdoc(&signal.doc), footnote(signal));
        let _ = writeln!(out, "        {index} \"{}\" {name} try_{name};", signal.name);
    }
    out.push_str("    }\n}\n}\n");
    out
}

/// Unit, age and fill in a line.
fn footnote(signal: &Signal) -> String {
    let unit = signal.unit().unwrap_or("count");
    let fresh = match signal.fresh.strip_prefix("lag:") {
        Some(age) => format!("as old as `{age}` says"),
        None => match signal.fresh.as_str() {
            "exact" => "exact".into(),
            "static" => "static".into(),
            _ => "an estimate".into(),
        },
    };
    let fill = match &signal.fill {
        Fill::Number(number) => format!("unknown reads as {number}"),
        Fill::Named(name) if name == "required" => "always known".into(),
        Fill::Named(name) if name == "MAX" => "unknown reads as 2^64 - 1".into(),
        Fill::Named(name) => format!("unknown reads as {}", name.replace('-', " ")),
    };
    let only = if signal.routing_only { "; routing only" } else { "" };
    format!("Unit: {unit}; {fresh}; {fill}{only}.")
}

/// `facts.rs`: an enum with one case a kind, its slots by name.
pub fn facts(facts: &[Fact]) -> String {
    let mut out = format!("{HEAD}\nuse penstock_policy_api::{{Fact, FactKind, facts}};\n\n");
    out.push_str("/// A fact, by name.\n///\n/// ```\n/// use penstock_policy_sdk::{Told, facts::FlowIdle};\n");
    out.push_str("/// let fact = FlowIdle { flow_id: 7, tenant_id: 1 }.at(1_000_000);\n");
    out.push_str(
        "/// assert_eq!(Told::from(&fact), Told::FlowIdle(FlowIdle { flow_id: 7, tenant_id: 1 }));\n/// ```\n",
    );
    out.push_str("#[derive(Clone, Copy, PartialEq, Eq, Debug)]\npub enum Told {\n");
    for fact in facts {
        let ty = camel(&fact.name);
        let _ = writeln!(out, "    /// {}\n    {ty}(facts::{ty}),", rustdoc(&fact.doc));
    }
    out.push_str("}\n\nimpl From<&Fact> for Told {\n    fn from(fact: &Fact) -> Self {\n        match fact.kind {\n");
    for fact in facts {
        let ty = camel(&fact.name);
        let slots: Vec<String> =
            fact.slots.iter().enumerate().map(|(at, slot)| format!("{}: fact.slots[{at}]", snake(slot))).collect();
        let _ = writeln!(out, "            FactKind::{ty} => Self::{ty}(facts::{ty} {{ {} }}),", slots.join(", "));
    }
    out.push_str("        }\n    }\n}\n");
    out
}

/// `mod.rs`.
pub fn index() -> String {
    format!("{HEAD}\n//! What the registry gives the SDK.\n\npub mod facts;\npub mod tables;\n")
}
