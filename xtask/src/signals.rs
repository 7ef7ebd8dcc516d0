//! Turns `wit/signals.toml` into the host's enums, the SDK's accessors and the reference page: one source, so that accessors, tables, checks
//! and docs agree.

mod sdk;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, bail, ensure};
use serde::Deserialize;

const REGISTRY: &str = "wit/signals.toml";
const RUST_DIR: &str = "host/policy-api/src/generated";
const SDK_DIR: &str = "sdk/rust/src/generated";
/// Folders that hold generated files and nothing else.
const GENERATED_DIRS: [&str; 2] = [RUST_DIR, SDK_DIR];
const PAGE: &str = "docs/signals.md";

/// Writes the generated files, or with `check` fails when one of them differs from what the registry gives.
pub fn generate(check: bool) -> Result<()> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().context("xtask lies in the repository")?;
    generate_at(root, check)
}

/// [`generate`] for a tree elsewhere.
pub fn generate_at(root: &Path, check: bool) -> Result<()> {
    let text = fs::read_to_string(root.join(REGISTRY)).with_context(|| format!("read {REGISTRY}"))?;
    let registry: Registry = toml::from_str(&text).with_context(|| format!("parse {REGISTRY}"))?;
    registry.verify().with_context(|| format!("{REGISTRY} contradicts itself"))?;
    let files = render(&registry);
    if check { compare(root, &files) } else { write(root, &files) }
}

fn render(registry: &Registry) -> Vec<(PathBuf, String)> {
    let rust = Path::new(RUST_DIR);
    let mut files = vec![(rust.join("mod.rs"), rust_index(registry))];
    for table in &registry.table {
        files.push((rust.join(format!("{}.rs", table.name)), rust_table(table)));
    }
    files.push((rust.join("facts.rs"), rust_facts(&registry.fact)));
    files.push((rust.join("actions.rs"), rust_actions(&registry.action)));
    let guest = Path::new(SDK_DIR);
    files.push((guest.join("mod.rs"), sdk::index()));
    files.push((guest.join("tables.rs"), sdk::tables(registry)));
    files.push((guest.join("facts.rs"), sdk::facts(&registry.fact)));
    files.push((PathBuf::from(PAGE), page(registry)));
    files
}

fn compare(root: &Path, files: &[(PathBuf, String)]) -> Result<()> {
    let mut stale = Vec::new();
    for (path, text) in files {
        if fs::read_to_string(root.join(path)).ok().as_deref() != Some(text) {
            stale.push(path.display().to_string());
        }
    }
    let wanted: BTreeSet<&Path> = files.iter().map(|(path, _)| path.as_path()).collect();
    for dir in GENERATED_DIRS {
        for entry in fs::read_dir(root.join(dir)).with_context(|| format!("list {dir}"))? {
            let path = Path::new(dir).join(entry?.file_name());
            if !wanted.contains(path.as_path()) {
                stale.push(format!("{} (not generated any more)", path.display()));
            }
        }
    }
    ensure!(stale.is_empty(), "not what {REGISTRY} gives; run `cargo xtask signals`: {}", stale.join(", "));
    Ok(())
}

fn write(root: &Path, files: &[(PathBuf, String)]) -> Result<()> {
    for name in GENERATED_DIRS {
        let dir = root.join(name);
        if dir.exists() {
            fs::remove_dir_all(&dir).with_context(|| format!("clear {name}"))?;
        }
        fs::create_dir_all(&dir).with_context(|| format!("make {name}"))?;
    }
    for (path, text) in files {
        fs::write(root.join(path), text).with_context(|| format!("write {}", path.display()))?;
    }
    Ok(())
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Registry {
    table: Vec<Table>,
    fact: Vec<Fact>,
    action: Vec<Action>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Table {
    name: String,
    shape: Shape,
    questions: Vec<String>,
    doc: String,
    #[serde(default)]
    basis: BTreeMap<String, String>,
    signals: Vec<Signal>,
}

#[derive(Deserialize, Clone, Copy, PartialEq, Eq)]
#[serde(rename_all = "kebab-case")]
enum Shape {
    Context,
    Rows,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Signal {
    name: String,
    kind: String,
    owner: String,
    fresh: String,
    fill: Fill,
    #[serde(default)]
    first_wave: bool,
    #[serde(default)]
    routing_only: bool,
    doc: String,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Fill {
    Number(u64),
    Named(String),
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Fact {
    name: String,
    code: u16,
    to: Vec<String>,
    slots: Vec<String>,
    doc: String,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Action {
    name: String,
    code: u16,
    amount: String,
    doc: String,
}

const KINDS: [&str; 10] = ["int", "age", "bool", "rank", "enum", "id", "hash", "ppm", "price", "mask"];
const OWNERS: [&str; 11] =
    ["host", "gateway", "engine", "kv", "directory", "ledger", "registry", "model", "config", "request", "transfer"];
const BASES: [&str; 5] = ["max-output", "input", "total-blocks", "computed", "max-left"];
const DECISIONS: [&str; 5] = ["admission", "routing", "fairness", "eviction", "overload"];
const QUESTIONS: [&str; 6] = ["admission", "routing", "order", "victims", "eviction", "overload"];
/// The closed set of unit suffixes, the longer ones first where one ends another.
const UNITS: [&str; 21] = [
    "tokens-per-sec",
    "bytes-per-sec",
    "blocks-per-sec",
    "us",
    "tokens",
    "blocks",
    "bytes",
    "requests",
    "sequences",
    "replicas",
    "flows",
    "count",
    "price",
    "ppm",
    "rank",
    "level",
    "code",
    "flag",
    "id",
    "hash",
    "epoch",
];

impl Registry {
    fn verify(&self) -> Result<()> {
        let mut tables = BTreeSet::new();
        for table in &self.table {
            ensure!(tables.insert(&table.name), "table {} stands twice", table.name);
            table.verify(self).with_context(|| format!("table {}", table.name))?;
        }
        let mut codes = BTreeSet::new();
        for fact in &self.fact {
            ensure!(codes.insert(fact.code), "fact code {} stands twice", fact.code);
            ensure!((1..64).contains(&fact.code), "fact {}: a code is 1..64, sets of kinds are 64 bits", fact.name);
            ensure!(fact.slots.len() <= 6, "fact {} has more than six slots", fact.name);
            for decision in &fact.to {
                ensure!(DECISIONS.contains(&decision.as_str()), "fact {}: no decision {decision}", fact.name);
            }
        }
        let mut codes = BTreeSet::new();
        for action in &self.action {
            ensure!(codes.insert(action.code), "action code {} stands twice", action.code);
            ensure!((1..64).contains(&action.code), "action {}: a code is 1..64", action.name);
        }
        Ok(())
    }

    /// Contexts that `table` is offered with: those of its questions, and the common one.
    fn contexts_of<'a>(&'a self, table: &'a Table) -> impl Iterator<Item = &'a Table> {
        self.table.iter().filter(move |other| {
            let shared = other.questions.is_empty() || other.questions.iter().any(|q| table.questions.contains(q));
            other.shape == Shape::Context && shared
        })
    }
}

impl Table {
    fn verify(&self, registry: &Registry) -> Result<()> {
        let mut names = BTreeSet::new();
        for question in &self.questions {
            ensure!(QUESTIONS.contains(&question.as_str()), "no question {question}");
        }
        for signal in &self.signals {
            let name = &signal.name;
            ensure!(names.insert(name), "{name} stands twice");
            ensure!(KINDS.contains(&signal.kind.as_str()), "{name}: no kind {}", signal.kind);
            ensure!(OWNERS.contains(&signal.owner.as_str()), "{name}: no owner {}", signal.owner);
            signal.unit().with_context(|| format!("{name}: its last word is no unit"))?;
            if let Some(age) = signal.fresh.strip_prefix("lag:") {
                let here = std::iter::once(self).chain(registry.contexts_of(self));
                let known = here.flat_map(|t| &t.signals).any(|s| s.name == age && s.kind == "age");
                ensure!(known, "{name}: no age signal {age} in this table or its context");
            } else if !["exact", "static", "est"].contains(&signal.fresh.as_str()) {
                bail!("{name}: no freshness {}", signal.fresh);
            }
            match &signal.fill {
                Fill::Named(fill) if fill == "required" || fill == "MAX" || BASES.contains(&fill.as_str()) => {}
                Fill::Named(fill) => bail!("{name}: no fill {fill}"),
                Fill::Number(_) => {}
            }
        }
        for (basis, signal) in &self.basis {
            ensure!(BASES.contains(&basis.as_str()), "no basis {basis}");
            ensure!(names.contains(signal), "basis {basis}: no signal {signal}");
        }
        Ok(())
    }

    fn type_name(&self) -> String {
        format!("{}Signal", camel(&self.name))
    }
}

impl Signal {
    fn unit(&self) -> Option<&'static str> {
        if self.name.ends_with("-mask") {
            return Some("mask");
        }
        if self.name.ends_with("-biased") {
            return Some("biased");
        }
        UNITS.iter().find(|unit| self.name.strip_suffix(**unit).is_some_and(|head| head.ends_with('-'))).copied()
    }
}

fn camel(name: &str) -> String {
    name.split('-').map(|word| word[..1].to_uppercase() + &word[1..]).collect()
}

fn snake(name: &str) -> String {
    name.replace('-', "_")
}

const HEAD: &str = "// Generated by `cargo xtask signals` from wit/signals.toml. Edit the registry, not this file.\n";

fn rust_index(registry: &Registry) -> String {
    let mut out =
        format!("{HEAD}\n//! The registry as Rust: one enum a table, the fact kinds and the overload actions.\n\n");
    let mut modules: Vec<(String, String)> =
        registry.table.iter().map(|table| (table.name.clone(), table.type_name())).collect();
    modules.push(("actions".into(), "ActionKind".into()));
    modules.push(("facts".into(), "FactKind".into()));
    modules.sort();
    for (module, _) in &modules {
        let public = if module == "facts" { "pub " } else { "" };
        let _ = writeln!(out, "{public}mod {module};");
    }
    out.push('\n');
    for (module, ty) in &modules {
        let _ = writeln!(out, "pub use {module}::{ty};");
    }
    out.push_str(
        "\n/// A table of the registry.\n#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]\npub enum Table {\n",
    );
    for table in &registry.table {
        let _ = writeln!(out, "    /// {}\n    {},", table.doc, camel(&table.name));
    }
    out.push_str(
        "}\n\nimpl Table {\n    /// All tables, in the registry's order.\n    pub const ALL: &'static [Self] = &[\n",
    );
    for table in &registry.table {
        let _ = writeln!(out, "        Self::{},", camel(&table.name));
    }
    out.push_str("    ];\n\n    /// The name that manifests use.\n    pub const fn name(self) -> &'static str {\n        match self {\n");
    for table in &registry.table {
        let _ = writeln!(out, "            Self::{} => \"{}\",", camel(&table.name), table.name);
    }
    out.push_str("        }\n    }\n}\n");
    out
}

fn rust_table(table: &Table) -> String {
    let ty = table.type_name();
    let mut out = format!(
        "{HEAD}\nuse crate::signal::{{Fill, FillBasis, Freshness, Kind, Owner, Signal, SignalInfo, Unit}};\n\n"
    );
    out.push_str("use super::Table;\n\n");
    let _ = writeln!(out, "/// {}", table.doc);
    out.push_str("#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]\n#[repr(u8)]\n");
    let _ = writeln!(out, "pub enum {ty} {{");
    for signal in &table.signals {
        let _ = writeln!(out, "    /// {}\n    {},", rustdoc(&signal.doc), camel(&signal.name));
    }
    out.push_str("}\n\n");
    let _ = writeln!(out, "static INFO: [SignalInfo; {}] = [", table.signals.len());
    for signal in &table.signals {
        out.push_str("    SignalInfo {\n");
        let _ = writeln!(out, "        name: \"{}\",", signal.name);
        let _ = writeln!(out, "        kind: Kind::{},", camel(&signal.kind));
        let _ = writeln!(out, "        unit: Unit::{},", camel(signal.unit().unwrap_or("count")));
        let _ = writeln!(out, "        owner: Owner::{},", camel(&signal.owner));
        let _ = writeln!(out, "        freshness: {},", rust_freshness(&signal.fresh));
        let _ = writeln!(out, "        fill: {},", rust_fill(&signal.fill));
        let _ = writeln!(out, "        first_wave: {},", signal.first_wave);
        let _ = writeln!(out, "        routing_only: {},", signal.routing_only);
        let _ = writeln!(out, "        meaning: \"{}\",", signal.doc.escape_default());
        out.push_str("    },\n");
    }
    out.push_str("];\n\n");
    let _ = writeln!(out, "impl Signal for {ty} {{");
    let _ = writeln!(out, "    const TABLE: Table = Table::{};", camel(&table.name));
    out.push_str("    const ALL: &'static [Self] = &[\n");
    for signal in &table.signals {
        let _ = writeln!(out, "        Self::{},", camel(&signal.name));
    }
    out.push_str("    ];\n");
    let mask = if table.signals.iter().any(|s| s.name == "known-mask") { "Some(Self::KnownMask)" } else { "None" };
    let _ = writeln!(out, "    const KNOWN_MASK: Option<Self> = {mask};\n");
    out.push_str("    fn index(self) -> usize {\n        self as usize\n    }\n\n");
    out.push_str("    fn info(self) -> &'static SignalInfo {\n        &INFO[self as usize]\n    }\n");
    out.push_str(&rust_basis(&table.basis));
    out.push_str("}\n");
    out
}

fn rust_basis(basis: &BTreeMap<String, String>) -> String {
    if basis.is_empty() {
        return "\n    fn basis_signal(_basis: FillBasis) -> Option<Self> {\n        None\n    }\n".into();
    }
    let mut out = String::from("\n    fn basis_signal(basis: FillBasis) -> Option<Self> {\n        match basis {\n");
    for (basis, signal) in basis {
        let _ = writeln!(out, "            FillBasis::{} => Some(Self::{}),", camel(basis), camel(signal));
    }
    out.push_str("            _ => None,\n        }\n    }\n");
    out
}

fn rust_freshness(fresh: &str) -> String {
    match fresh.strip_prefix("lag:") {
        Some(age) => format!("Freshness::Lag(\"{age}\")"),
        None => format!("Freshness::{}", camel(fresh)),
    }
}

fn rust_fill(fill: &Fill) -> String {
    match fill {
        Fill::Number(n) => format!("Fill::Number({n})"),
        Fill::Named(name) if name == "MAX" => "Fill::Number(u64::MAX)".into(),
        Fill::Named(name) if name == "required" => "Fill::Required".into(),
        Fill::Named(name) => format!("Fill::Basis(FillBasis::{})", camel(name)),
    }
}

fn rust_facts(facts: &[Fact]) -> String {
    let mut out = format!(
        "{HEAD}\n//! The fact kinds, and one struct a kind with its slots by name.\n\nuse crate::fact::Fact;\nuse crate::question::Decision;\n\n"
    );
    out.push_str("/// What a fact reports. The number is its code on the wall.\n");
    out.push_str(
        "#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]\n#[repr(u16)]\npub enum FactKind {\n",
    );
    for fact in facts {
        let _ = writeln!(out, "    /// {}\n    {} = {},", fact.doc, camel(&fact.name), fact.code);
    }
    out.push_str("}\n\nimpl FactKind {\n    /// All kinds, by code.\n    pub const ALL: &'static [Self] = &[\n");
    for fact in facts {
        let _ = writeln!(out, "        Self::{},", camel(&fact.name));
    }
    out.push_str("    ];\n\n    /// The name that manifests use.\n    pub const fn name(self) -> &'static str {\n        match self {\n");
    for fact in facts {
        let _ = writeln!(out, "            Self::{} => \"{}\",", camel(&fact.name), fact.name);
    }
    out.push_str("        }\n    }\n\n    /// Names of the slots in use, first slot first.\n    pub const fn slots(self) -> &'static [&'static str] {\n        match self {\n");
    for fact in facts {
        let slots = fact.slots.iter().map(|slot| format!("\"{slot}\"")).collect::<Vec<_>>().join(", ");
        let _ = writeln!(out, "            Self::{} => &[{slots}],", camel(&fact.name));
    }
    out.push_str("        }\n    }\n\n    /// Decisions whose instances may ask for it.\n    pub const fn goes_to(self) -> &'static [Decision] {\n        match self {\n");
    for fact in facts {
        let to = fact.to.iter().map(|to| format!("Decision::{}", camel(to))).collect::<Vec<_>>().join(", ");
        let _ = writeln!(out, "            Self::{} => &[{to}],", camel(&fact.name));
    }
    out.push_str("        }\n    }\n}\n");
    for fact in facts {
        let ty = camel(&fact.name);
        let _ = writeln!(
            out,
            "\n/// {}\n#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]\npub struct {ty} {{",
            fact.doc
        );
        for slot in &fact.slots {
            let _ = writeln!(out, "    /// `{slot}`.\n    pub {}: u64,", snake(slot));
        }
        let _ = writeln!(out, "}}\n\nimpl {ty} {{\n    /// The fact, as of `at_us`.");
        out.push_str("    pub const fn at(self, at_us: u64) -> Fact {\n");
        let mut slots: Vec<String> = fact.slots.iter().map(|slot| format!("self.{}", snake(slot))).collect();
        slots.resize(6, "0".into());
        let _ =
            writeln!(out, "        Fact {{ kind: FactKind::{ty}, at_us, slots: [{}] }}\n    }}\n}}", slots.join(", "));
    }
    out
}

fn rust_actions(actions: &[Action]) -> String {
    let mut out = format!("{HEAD}\n/// What an overload stance can ask for. The number is its code on the wall.\n");
    out.push_str(
        "#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]\n#[repr(u16)]\npub enum ActionKind {\n",
    );
    for action in actions {
        let _ = writeln!(out, "    /// {}\n    {} = {},", action.doc, camel(&action.name), action.code);
    }
    out.push_str("}\n\nimpl ActionKind {\n    /// All actions, by code.\n    pub const ALL: &'static [Self] = &[\n");
    for action in actions {
        let _ = writeln!(out, "        Self::{},", camel(&action.name));
    }
    out.push_str("    ];\n\n    /// The name that manifests use.\n    pub const fn name(self) -> &'static str {\n        match self {\n");
    for action in actions {
        let _ = writeln!(out, "            Self::{} => \"{}\",", camel(&action.name), action.name);
    }
    out.push_str("        }\n    }\n\n    /// Unit of the amount; empty when it is not read.\n    pub const fn amount_unit(self) -> &'static str {\n        match self {\n");
    for action in actions {
        let _ = writeln!(out, "            Self::{} => \"{}\",", camel(&action.name), action.amount);
    }
    out.push_str("        }\n    }\n}\n");
    out
}

/// Brackets would be read as links by rustdoc.
fn rustdoc(text: &str) -> String {
    text.replace('[', "\\[").replace(']', "\\]")
}

fn page(registry: &Registry) -> String {
    let mut out = String::from(
        "<!-- Generated by `cargo xtask signals` from wit/signals.toml. Edit the registry, not this file. -->\n",
    );
    out.push_str(PAGE_HEAD);
    for table in &registry.table {
        let shape = if table.shape == Shape::Context { "context" } else { "rows" };
        let asked = if table.questions.is_empty() { "every question".into() } else { table.questions.join(", ") };
        let _ = writeln!(out, "\n## `{}`\n\n{} Shape: {shape}. Asked with: {asked}.\n", table.name, table.doc);
        out.push_str("| name | kind | owner | fresh | fill | wave | meaning |\n|---|---|---|---|---|---|---|\n");
        for s in &table.signals {
            let fill = match &s.fill {
                Fill::Number(n) => n.to_string(),
                Fill::Named(name) if name == "required" => "-".into(),
                Fill::Named(name) => name.clone(),
            };
            let wave = if s.first_wave { "1" } else { "" };
            let only = if s.routing_only { " Routing only." } else { "" };
            let _ = writeln!(
                out,
                "| `{}` | {} | {} | {} | {fill} | {wave} | {}{only} |",
                s.name, s.kind, s.owner, s.fresh, s.doc
            );
        }
    }
    out.push_str("\n## Facts\n\n`observe` gets them in the order they happened, eight numbers each: code, time in microseconds, six slots.\n\n");
    out.push_str("| kind | code | goes to | slots | meaning |\n|---|---|---|---|---|\n");
    for f in &registry.fact {
        let _ =
            writeln!(out, "| `{}` | {} | {} | {} | {} |", f.name, f.code, f.to.join(", "), f.slots.join(", "), f.doc);
    }
    out.push_str(
        "\n## Overload actions\n\nEvery action reaches downward: classes up to and including the rank it names.\n\n",
    );
    out.push_str("| action | code | amount | meaning |\n|---|---|---|---|\n");
    for a in &registry.action {
        let amount = if a.amount.is_empty() { "-" } else { &a.amount };
        let _ = writeln!(out, "| `{}` | {} | {amount} | {} |", a.name, a.code, a.doc);
    }
    out
}

const PAGE_HEAD: &str = "
# Signals

Everything a policy can ask for by name. A signal is one `u64`; the last word of its name is its unit. A name is declared `required` or
`optional`, at most 48 a table side; an unknown required name refuses the policy, an unknown optional one reads as unknown.

- **fresh**: `exact` in the same step of the same machine; `static` until configuration or epoch changes; `est` from the host's cost
  model; `lag:NAME` as old as the age signal `NAME` says.
- **fill**: what an unknown value reads as. `-`: the host always knows it. `max-output`, `input`, `total-blocks`, `computed`,
  `max-left`: that quantity of the request or row. `MAX` is 2^64 - 1.
- **wave** 1: what the shipped policies need.
- Unknown is not zero: `known-mask` has bit *k* set when the *k*-th declared signal is known.
";

#[cfg(test)]
mod tests {
    use super::*;

    fn verdict(row: &str) -> String {
        let text = format!(
            "fact = []\naction = []\n[[table]]\nname = \"t\"\nshape = \"rows\"\nquestions = [\"order\"]\ndoc = \"D.\"\nsignals = [{row}]\n"
        );
        let registry: Registry = toml::from_str(&text).expect("the rows of this test are well-formed");
        registry.verify().err().map_or("ok".into(), |error| format!("{:#}", error.root_cause()))
    }

    fn row(name: &str, kind: &str, fresh: &str, fill: &str) -> String {
        format!(r#"{{ name = "{name}", kind = "{kind}", owner = "kv", fresh = "{fresh}", fill = {fill}, doc = "D." }}"#)
    }

    #[test]
    fn a_row_states_a_known_unit_freshness_and_fill() {
        assert_eq!(verdict(&row("held-blocks", "int", "exact", "0")), "ok");
        assert_eq!(verdict(&row("held-pages", "int", "exact", "0")), "held-pages: its last word is no unit");
        assert_eq!(verdict(&row("held-blocks", "float", "exact", "0")), "held-blocks: no kind float");
        assert_eq!(verdict(&row("held-blocks", "int", "fresh", "0")), "held-blocks: no freshness fresh");
        assert_eq!(verdict(&row("held-blocks", "int", "exact", "\"many\"")), "held-blocks: no fill many");
    }

    #[test]
    fn a_lag_names_an_age_in_reach() {
        let lagging = row("held-blocks", "int", "lag:held-age-us", "0");
        assert_eq!(verdict(&lagging), "held-blocks: no age signal held-age-us in this table or its context");
        let with_age = format!("{lagging}, {}", row("held-age-us", "age", "exact", "\"MAX\""));
        assert_eq!(verdict(&with_age), "ok");
    }

    #[test]
    fn names_turn_into_rust() {
        assert_eq!((camel("est-credit-us"), snake("est-credit-us")), ("EstCreditUs".into(), "est_credit_us".into()));
    }

    #[test]
    fn the_tree_is_what_the_registry_gives() {
        generate(true).expect("run `cargo xtask signals`");
    }
}
