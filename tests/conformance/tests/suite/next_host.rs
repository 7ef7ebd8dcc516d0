//! A host of another version, made here from this tree's contract by editing its text: the packages under a new number, one more function in
//! the host interface and one more interface beside it; two more signals in front of every table, one more fact, one more action.
//!
//! It shares nothing with `host/policy-wasm` but the engine: it reads the edited WIT and the edited registry, fills columns by itself, and
//! calls exports by name with dynamic values.

use std::collections::BTreeMap;

use penstock_base::codec::Writer;
use penstock_conformance::{Context, Moment, Question, Rows};
use penstock_policy_api::seed::call_seed;
use penstock_policy_api::{CommonSignal, RequestRecord, Signal};
use wasmtime::component::{Component, Instance, Linker, Val};
use wasmtime::{Config, Engine, Store};
use wit_parser::{Resolve, Type};

use crate::shelf::root;

/// Packages of the contract, what others use first.
const PACKAGES: [&str; 6] = ["types", "admission", "routing", "fairness", "eviction", "overload"];
const FUEL: u64 = 20_000_000;

/// The contract under another number, with what a later version may add.
pub fn contract(version: &str) -> Resolve {
    let mut resolve = Resolve::default();
    for package in PACKAGES {
        let path = root().join("wit").join(package).join(format!("{package}.wit"));
        let text = std::fs::read_to_string(path).expect("the contract is there");
        let text = grown(&text.replace("@0.1.0", &format!("@{version}")), version);
        resolve.push_str(format!("{package}.wit"), &text).expect("the grown contract parses");
    }
    resolve
}

/// One more function, one more interface, and one more import that a guest may use.
fn grown(text: &str, version: &str) -> String {
    let count = "count: func(name: string, by: u64);";
    let world = format!("import penstock:types/host@{version};");
    let text = text.replace(count, &format!("{count}\n  /// New.\n  trace: func(level: u8, text: string) -> bool;"));
    let text = text.replace(&world, &format!("{world}\n  import penstock:types/almanac@{version};"));
    if text.starts_with("package penstock:types@") {
        format!("{text}\n/// New.\ninterface almanac {{\n  /// New.\n  moon: func() -> u64;\n}}\n")
    } else {
        text
    }
}

/// What an unknown signal reads as.
enum Fill {
    Number(u64),
    Basis(String),
}

struct Table {
    fills: BTreeMap<String, Fill>,
    /// Named fills, and the signal of a row that stands for each.
    basis: BTreeMap<String, String>,
}

/// The grown registry.
struct Catalogue {
    tables: BTreeMap<String, Table>,
    facts: Vec<String>,
}

impl Catalogue {
    fn grown() -> Self {
        let text = std::fs::read_to_string(root().join("wit/signals.toml")).expect("the registry is there");
        let more = "signals = [\n  { name = \"mood-level\", fill = 7 },\n  { name = \"hope-ppm\", fill = \"MAX\" },\n";
        let text = text.replace("signals = [\n", more)
            + "\n[[fact]]\nname = \"eclipse\"\ncode = 63\n\n[[action]]\nname = \"pray\"\ncode = 63\n";
        let registry: toml::Table = text.parse().expect("the grown registry parses");
        let list = |key: &str| registry[key].as_array().expect("a list of tables").clone();
        let name = |value: &toml::Value| value["name"].as_str().expect("everything has a name").to_owned();
        let tables = list("table").iter().map(|table| (name(table), Table::read(table))).collect();
        Self { tables, facts: list("fact").iter().map(name).collect() }
    }

    /// Values of declared names, in their order. `known` is what the host knows, `of` what a named fill means beside it.
    fn values(
        &self,
        table: &str,
        names: &[String],
        known: &dyn Fn(&str) -> Option<u64>,
        of: &dyn Fn(&str) -> Option<u64>,
    ) -> Vec<u64> {
        let own = &self.tables[table];
        let mut mask = 0;
        let mut values = Vec::new();
        for (bit, name) in names.iter().enumerate() {
            if name == "known-mask" {
                mask |= 1 << bit;
                values.push(0);
                continue;
            }
            let fill = own.fills.get(name).or_else(|| self.tables["common"].fills.get(name));
            let fill = fill.unwrap_or_else(|| panic!("{table} has no {name}"));
            let value = known(name);
            mask |= u64::from(value.is_some()) << bit;
            values.push(value.unwrap_or_else(|| match fill {
                Fill::Number(number) => *number,
                Fill::Basis(basis) => of(basis).or_else(|| own.basis_of(basis, known)).unwrap_or(0),
            }));
        }
        for (value, name) in values.iter_mut().zip(names) {
            if name == "known-mask" {
                *value = mask;
            }
        }
        values
    }
}

impl Table {
    fn read(table: &toml::Value) -> Self {
        let fill = |signal: &toml::Value| match &signal["fill"] {
            toml::Value::Integer(number) => Fill::Number(*number as u64),
            toml::Value::String(word) if word == "MAX" => Fill::Number(u64::MAX),
            toml::Value::String(word) if word == "required" => Fill::Number(0),
            toml::Value::String(word) => Fill::Basis(word.clone()),
            other => panic!("no fill: {other}"),
        };
        let text = |value: &toml::Value| value.as_str().expect("a text").to_owned();
        let signals = table["signals"].as_array().expect("a list of signals");
        let basis = table.get("basis").and_then(|basis| basis.as_table()).into_iter().flatten();
        Self {
            fills: signals.iter().map(|signal| (text(&signal["name"]), fill(signal))).collect(),
            basis: basis.map(|(basis, signal)| (basis.clone(), text(signal))).collect(),
        }
    }

    fn basis_of(&self, basis: &str, known: &dyn Fn(&str) -> Option<u64>) -> Option<u64> {
        let signal = self.basis.get(basis)?;
        known(signal).or(match self.fills.get(signal) {
            Some(Fill::Number(number)) => Some(*number),
            _ => None,
        })
    }
}

/// One guest in a host of another version.
pub struct NextHost {
    store: Store<()>,
    instance: Instance,
    /// The version under which this host looks exports up.
    version: String,
    catalogue: Catalogue,
    /// Declared names by table.
    declared: BTreeMap<String, Vec<String>>,
    facts: Vec<String>,
    calls: BTreeMap<u8, u64>,
}

impl NextHost {
    /// Links a component against `offered`, each the host interface of one version, and looks its exports up as those of `version`.
    pub fn new(bytes: &[u8], offered: &[(&str, Resolve)], version: &str) -> wasmtime::Result<Self> {
        let mut config = Config::new();
        config.wasm_component_model(true).consume_fuel(true).concurrency_support(false);
        let engine = Engine::new(&config)?;
        let component = Component::from_binary(&engine, bytes)?;
        let mut linker = Linker::new(&engine);
        for (number, resolve) in offered {
            offer(&mut linker, number, resolve)?;
        }
        let mut store = Store::new(&engine, ());
        store.set_fuel(FUEL)?;
        let instance = linker.instantiate(&mut store, &component)?;
        let (version, catalogue) = (version.to_owned(), Catalogue::grown());
        let (declared, facts, calls) = (BTreeMap::new(), Vec::new(), BTreeMap::new());
        let mut host = Self { store, instance, version, catalogue, declared, facts, calls };
        host.introduce()?;
        Ok(host)
    }

    fn introduce(&mut self) -> wasmtime::Result<()> {
        let manifest = self.life("describe", &[])?.expect("a manifest");
        let names = |list: &Val| -> Vec<String> { items(list).iter().map(|want| text(field(want, "name"))).collect() };
        for table in items(field(&manifest, "tables")) {
            self.declared.insert(text(field(table, "table")), names(field(table, "names")));
        }
        self.facts = names(field(&manifest, "facts"));
        assert!(self.facts.iter().all(|fact| self.catalogue.facts.contains(fact)), "no fact is lost");
        let configured = self.life("configure", &[Val::String(String::new())])?;
        assert_eq!(configured, Some(Val::Result(Ok(None))));
        Ok(())
    }

    fn call(&mut self, interface: &str, function: &str, args: &[Val]) -> wasmtime::Result<Option<Val>> {
        let name = format!("penstock:{interface}@{}", self.version);
        let exports = self.instance.get_export_index(&mut self.store, None, &name);
        let exports = exports.unwrap_or_else(|| panic!("no export answers to {name}"));
        let export = self.instance.get_export_index(&mut self.store, Some(&exports), function);
        let export = export.unwrap_or_else(|| panic!("{name} has no {function}"));
        let called = self.instance.get_func(&mut self.store, export).expect("it is a function");
        let has_result = called.ty(&self.store).results().len() == 1;
        let mut results = vec![Val::Bool(false); usize::from(has_result)];
        self.store.set_fuel(FUEL)?;
        called.call(&mut self.store, args, &mut results)?;
        Ok(results.pop())
    }

    fn life(&mut self, function: &str, args: &[Val]) -> wasmtime::Result<Option<Val>> {
        self.call("types/policy", function, args)
    }

    /// Its state.
    pub fn save(&mut self) -> Vec<u8> {
        let state = self.life("save", &[]).expect("it saves").expect("a list of bytes");
        items(&state).iter().map(|byte| number(byte) as u8).collect()
    }

    /// Tells and asks what `moment` says; the proposal, in the bytes that a course has, and the fuel it took.
    pub fn ask(&mut self, moment: &Moment, run_seed: u64) -> (Vec<u8>, u64) {
        let facts = moment.facts.iter().filter(|fact| self.facts.iter().any(|name| name == fact.kind.name()));
        let flat: Vec<u64> = facts.flat_map(|fact| fact.flat()).collect();
        if !flat.is_empty() {
            self.life("observe", &[list(&flat)]).expect("it takes facts");
        }
        let which = moment.question.which();
        let count = self.calls.entry(which.code()).or_default();
        *count += 1;
        let call = record(&[
            ("number", Val::U64(*count)),
            ("now-us", Val::U64(moment.now_us)),
            ("seed", Val::U64(call_seed(run_seed, which, *count))),
        ]);
        let (interface, function, mut args) = self.arguments(&moment.question);
        args.insert(0, call);
        let answer = self.call(interface, function, &args).expect("it answers").expect("a proposal");
        let left = self.store.get_fuel().expect("fuel is metered");
        (proposal(&moment.question, &answer), FUEL - left)
    }

    fn arguments(&self, question: &Question) -> (&'static str, &'static str, Vec<Val>) {
        match question {
            Question::Admission { request, context, .. } => {
                let values = self.context("admission", context, Some(request));
                ("admission/admission", "decide", vec![wall_request(request), values])
            }
            Question::Routing { request, phase, context, replicas } => {
                let values = self.context("routing", context, Some(request));
                let phase = Val::U8(*phase as u8);
                let args = vec![wall_request(request), phase, values, self.rows("replica", replicas)];
                ("routing/routing", "decide", args)
            }
            Question::Order { context, waiting } => {
                let args = vec![self.context("order", context, None), self.rows("waiting", waiting)];
                ("fairness/fairness", "order", args)
            }
            Question::Victims { context, running } => {
                let args = vec![self.context("victims", context, None), self.rows("running", running)];
                ("fairness/fairness", "victims", args)
            }
            Question::Eviction { context, runs } => {
                let args = vec![self.context("eviction", context, None), self.rows("run", runs)];
                ("eviction/eviction", "decide", args)
            }
            Question::Overload { context, classes, replicas, .. } => {
                let (classes, replicas) = (self.rows("class", classes), self.rows("replica", replicas));
                ("overload/overload", "decide", vec![self.context("overload", context, None), classes, replicas])
            }
        }
    }

    fn names(&self, table: &str) -> &[String] {
        self.declared.get(table).map_or(&[], Vec::as_slice)
    }

    fn context<S: Signal>(&self, table: &str, context: &Context<S>, request: Option<&RequestRecord>) -> Val {
        let known = |name: &str| match S::from_name(name) {
            Some(signal) => context.own[signal.index()],
            None => CommonSignal::from_name(name).map_or(Some(99), |signal| context.common[signal.index()]),
        };
        let of = |basis: &str| match basis {
            "input" => request.map(|request| u64::from(request.input_tokens)),
            "max-output" => request.map(|request| u64::from(request.max_output_tokens)),
            _ => None,
        };
        list(&self.catalogue.values(table, self.names(table), &known, &of))
    }

    fn rows<S: Signal>(&self, table: &str, rows: &Rows<S>) -> Val {
        let names = self.names(table);
        let line = |row: &Vec<Option<u64>>| {
            let known = |name: &str| S::from_name(name).map_or(Some(99), |signal| row[signal.index()]);
            self.catalogue.values(table, names, &known, &|_| None)
        };
        let lines: Vec<Vec<u64>> = rows.rows.iter().map(line).collect();
        let cells: Vec<u64> = (0..names.len()).flat_map(|column| lines.iter().map(move |line| line[column])).collect();
        record(&[("rows", Val::U32(lines.len() as u32)), ("cells", list(&cells))])
    }
}

/// Every function of every interface of package `types` that a guest may import, by the contract's text.
fn offer(linker: &mut Linker<()>, version: &str, resolve: &Resolve) -> wasmtime::Result<()> {
    for (_, interface) in resolve.interfaces.iter() {
        let name = interface.name.as_deref().unwrap_or_default();
        let is_of_types = interface.package.is_some_and(|package| resolve.packages[package].name.name == "types");
        if !is_of_types || !["host", "almanac"].contains(&name) {
            continue;
        }
        let mut instance = linker.instance(&format!("penstock:types/{name}@{version}"))?;
        for (function, signature) in &interface.functions {
            let answer = match signature.result {
                None => None,
                Some(Type::Bool) => Some(Val::Bool(true)),
                Some(Type::U64) => Some(Val::U64(1)),
                Some(other) => panic!("{function} answers {other:?}"),
            };
            instance.func_new(function, move |_, _, _, results| {
                if let (Some(slot), Some(answer)) = (results.first_mut(), &answer) {
                    *slot = answer.clone();
                }
                Ok(())
            })?;
        }
    }
    Ok(())
}

fn wall_request(request: &RequestRecord) -> Val {
    record(&[
        ("request-id", Val::U64(request.request_id.0)),
        ("tenant-id", Val::U64(request.tenant_id)),
        ("flow-id", Val::U64(request.flow_id)),
        ("session-id", Val::U64(request.session_id)),
        ("class-rank", Val::U8(request.class_rank.get())),
        ("attempt", Val::U8(request.attempt)),
        ("sequences", Val::U16(request.sequences)),
        ("priority", Val::S32(request.priority.0)),
        ("input-tokens", Val::U32(request.input_tokens)),
        ("max-output-tokens", Val::U32(request.max_output_tokens)),
        ("deadline-us", Val::U64(request.deadline_us)),
        ("traits", Val::U32(request.traits.0)),
    ])
}

/// A proposal as the bytes that a course writes: 0 for none, 1 and the fields in the contract's order.
fn proposal(question: &Question, answer: &Val) -> Vec<u8> {
    let mut out = Writer::new();
    let is_silent = match (question, answer) {
        (Question::Order { .. }, ranking) => {
            items(field(ranking, "ranked")).is_empty()
                && *field(ranking, "rest") == Val::Enum("append".to_owned())
                && number(field(ranking, "tpot-target-us")) == u64::from(u32::MAX)
        }
        (_, Val::List(named)) => named.is_empty(),
        (_, Val::Variant(case, Some(placing))) if case == "place" => items(field(placing, "ranked")).is_empty(),
        (_, Val::Variant(case, _)) => case == "no-opinion",
        (_, Val::Option(stance)) => stance.is_none(),
        _ => false,
    };
    if is_silent {
        out.u8(0);
        return out.into_bytes();
    }
    out.u8(1);
    match answer {
        Val::Variant(case, Some(fields)) => {
            let cases: &[&str] = match question {
                Question::Routing { .. } => &["place", "hold"],
                _ => &["admit", "defer", "degrade", "reject"],
            };
            out.u8(cases.iter().position(|known| known == case).expect("a case of the contract") as u8);
            write(&mut out, fields);
        }
        Val::Option(Some(stance)) => write(&mut out, stance),
        other => write(&mut out, other),
    }
    out.into_bytes()
}

fn write(out: &mut Writer, value: &Val) {
    match value {
        Val::U8(number) => out.u8(*number),
        Val::U16(number) => out.u16(*number),
        Val::U32(number) => out.u32(*number),
        Val::U64(number) => out.u64(*number),
        Val::Bool(flag) => out.bool(*flag),
        Val::Enum(case) => out.bool(case == "keep"),
        Val::List(list) => out.list(list.iter(), write),
        Val::Record(fields) => fields.iter().for_each(|(_, value)| write(out, value)),
        other => panic!("no proposal holds {other:?}"),
    }
}

fn field<'a>(value: &'a Val, name: &str) -> &'a Val {
    let Val::Record(fields) = value else { panic!("no record: {value:?}") };
    &fields.iter().find(|(known, _)| known == name).unwrap_or_else(|| panic!("no field {name}")).1
}

fn items(value: &Val) -> &[Val] {
    let Val::List(list) = value else { panic!("no list: {value:?}") };
    list
}

fn text(value: &Val) -> String {
    let Val::String(text) = value else { panic!("no text: {value:?}") };
    text.clone()
}

fn number(value: &Val) -> u64 {
    match value {
        Val::U8(number) => (*number).into(),
        Val::U32(number) => (*number).into(),
        other => panic!("no number: {other:?}"),
    }
}

fn list(values: &[u64]) -> Val {
    Val::List(values.iter().copied().map(Val::U64).collect())
}

fn record(fields: &[(&str, Val)]) -> Val {
    Val::Record(fields.iter().map(|(name, value)| ((*name).to_owned(), value.clone())).collect())
}
