//! Components for tests, written as core modules in WAT and wrapped by the contract's own WIT.
//!
//! [`Guest`] writes a well-behaved policy; a test replaces the bodies it is about. Bodies find their results' room at fixed addresses:
//! 1,024 the answer of a decision, 2,048 further on for lists in it, 3,072 for the life cycle, 8,192 for texts, 16,384 for arguments. State
//! is one `u64` at address 64, which `$bump` adds to.
#![allow(dead_code, reason = "each test file uses its part")]

pub mod asking;

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use penstock_base::{Generation, Instant};
use penstock_policy_api::{Call, Decision};
use penstock_policy_wasm::{
    Component, Happening, Library, LogLine, Machine, PolicySet, PolicySink, PrepareFaults, Prepared, Remembered,
    Runtime, RuntimeConfig, Speaker, WasmPolicies, Workshop,
};
use wit_component::{ComponentEncoder, StringEncoding, embed_component_metadata};
use wit_parser::Resolve;

/// Where a body puts the answer of a decision.
pub const ANSWER: u32 = 1_024;
/// Where lists of an answer lie.
pub const LISTS: u32 = 2_048;

/// A policy in the making.
#[derive(Clone)]
pub struct Guest {
    decision: Decision,
    name: String,
    version: String,
    tables: Vec<(String, Vec<(String, bool)>)>,
    facts: Vec<String>,
    max_rows: u32,
    schema: u32,
    bodies: Vec<(&'static str, String)>,
    /// Package, interface, and the interface's whole name.
    extra_import: Option<(String, String, String)>,
    funcs: String,
}

impl Guest {
    /// Has no opinion, counts its calls in its state, saves and restores that.
    pub fn new(decision: Decision) -> Self {
        Self {
            decision,
            name: "tester".to_owned(),
            version: "1".to_owned(),
            tables: Vec::new(),
            facts: Vec::new(),
            max_rows: 0,
            schema: 1,
            bodies: Vec::new(),
            extra_import: None,
            funcs: String::new(),
        }
    }

    pub fn name(mut self, name: &str) -> Self {
        self.name = name.to_owned();
        self
    }

    pub fn version(mut self, version: &str) -> Self {
        self.version = version.to_owned();
        self
    }

    pub fn schema(mut self, schema: u32) -> Self {
        self.schema = schema;
        self
    }

    pub fn max_rows(mut self, rows: u32) -> Self {
        self.max_rows = rows;
        self
    }

    pub fn wants(mut self, table: &str, names: &[&str]) -> Self {
        let names = names.iter().map(|name| ((*name).to_owned(), true)).collect();
        self.tables.push((table.to_owned(), names));
        self
    }

    pub fn wants_optional(mut self, table: &str, name: &str) -> Self {
        self.tables.push((table.to_owned(), vec![(name.to_owned(), false)]));
        self
    }

    pub fn wants_fact(mut self, kind: &str) -> Self {
        self.facts.push(kind.to_owned());
        self
    }

    /// Replaces the body of a function: `describe`, `configure`, `observe`, `save`, `restore`, or one of the decision's.
    pub fn body(mut self, function: &'static str, body: &str) -> Self {
        self.bodies.retain(|(known, _)| *known != function);
        self.bodies.push((function, body.to_owned()));
        self
    }

    /// Further functions, globals or data of the module.
    pub fn with(mut self, funcs: &str) -> Self {
        self.funcs.push_str(funcs);
        self
    }

    /// Imports a function of an interface outside the contract; `full` is the interface's whole name.
    pub fn imports_as(mut self, package: &str, interface: &str, full: &str) -> Self {
        self.extra_import = Some((package.to_owned(), interface.to_owned(), full.to_owned()));
        self
    }

    fn body_of(&self, function: &str, default: &str) -> String {
        let found = self.bodies.iter().find(|(known, _)| *known == function);
        found.map_or(default, |(_, body)| body).to_owned()
    }

    /// The core module.
    pub fn wat(&self) -> String {
        let mut data = Data { at: 8_192, text: Vec::new() };
        let manifest = self.manifest(&mut data);
        let life = "penstock:types/policy@0.1.0#";
        let decides = self.decision.name();
        let own = format!("penstock:{decides}/{decides}@0.1.0#");
        let mut out = String::from("(module\n");
        out.push_str("(import \"penstock:types/host@0.1.0\" \"log\" (func $log (param i32 i32 i32)))\n");
        out.push_str("(import \"penstock:types/host@0.1.0\" \"count\" (func $count (param i32 i32 i64)))\n");
        if let Some((_, _, import)) = &self.extra_import {
            out.push_str(&format!("(import \"{import}\" \"f\" (func $extra))\n"));
        }
        out.push_str("(memory (export \"memory\") 2)\n(global $heap (mut i32) (i32.const 16384))\n");
        out.push_str("(func $bump (param $by i64) (i64.store (i32.const 64) (i64.add (i64.load (i32.const 64)) (local.get $by))))\n");
        out.push_str(
            "(func $realloc (export \"cabi_realloc\") (param i32 i32 i32 i32) (result i32) (local $at i32)
              (local.set $at (i32.and (i32.add (global.get $heap) (i32.const 7)) (i32.const -8)))
              (global.set $heap (i32.add (local.get $at) (local.get 3)))
              (block $fits
                (br_if $fits (i32.le_u (global.get $heap) (i32.mul (memory.size) (i32.const 65536))))
                (drop (memory.grow (i32.add (i32.shr_u (local.get 3) (i32.const 16)) (i32.const 1)))))
              (local.get $at))\n",
        );
        out.push_str("(func $reset (global.set $heap (i32.const 16384)))\n");
        let mut function = |own: &str, name: &str, signature: &str, default: &str, has_result: bool| {
            let body = self.body_of(name, default);
            out.push_str(&format!("(func (export \"{own}{name}\") {signature}\n{body})\n"));
            if has_result {
                out.push_str(&format!("(func (export \"cabi_post_{own}{name}\") (param i32) (call $reset))\n"));
            }
        };
        let describe = format!("(i32.const {manifest})");
        function(life, "describe", "(result i32)", &describe, true);
        function(
            life,
            "configure",
            "(param $ptr i32) (param $len i32) (result i32)",
            "(i32.store8 (i32.const 3072) (i32.const 0)) (i32.const 3072)",
            true,
        );
        function(
            life,
            "observe",
            "(param $ptr i32) (param $len i32)",
            "(call $bump (i64.extend_i32_u (i32.shr_u (local.get $len) (i32.const 3)))) (call $reset)",
            false,
        );
        function(
            life,
            "save",
            "(result i32)",
            "(i32.store (i32.const 3072) (i32.const 64)) (i32.store (i32.const 3076) (i32.const 8)) (i32.const 3072)",
            true,
        );
        function(
            life,
            "restore",
            "(param $schema i32) (param $cause i32) (param $saved i64) (param $now i64) (param $elapsed i64) (param $ptr i32) (param $len i32) (result i32)",
            "(i32.store8 (i32.const 3072) (i32.ne (local.get $len) (i32.const 8))) (i32.store8 (i32.const 3073) (i32.const 1))
             (if (i32.eq (local.get $len) (i32.const 8)) (then
               (i32.store8 (i32.const 3073) (i32.const 0))
               (i64.store (i32.const 64) (i64.load (local.get $ptr)))))
             (i32.const 3072)",
            true,
        );
        let silent = "(call $bump (i64.const 1)) (i64.store (i32.const 1024) (i64.const 0)) (i32.const 1024)";
        let flat = "(param $number i64) (param $now i64) (param $seed i64) (param $context i32) (param $context_len i32) \
                    (param $rows i32) (param $cells i32) (param $cells_len i32)";
        match self.decision {
            Decision::Admission | Decision::Routing => {
                function(&own, "decide", "(param $args i32) (result i32)", silent, true);
            }
            Decision::Fairness => {
                let ranking = "(call $bump (i64.const 1)) (i64.store (i32.const 1024) (i64.const 0))
                    (i32.store8 (i32.const 1032) (i32.const 0)) (i32.store (i32.const 1036) (i32.const -1)) (i32.const 1024)";
                function(&own, "order", &format!("{flat} (result i32)"), ranking, true);
                function(&own, "victims", &format!("{flat} (result i32)"), silent, true);
            }
            Decision::Eviction => function(&own, "decide", &format!("{flat} (result i32)"), silent, true),
            Decision::Overload => {
                let more = "(param $rows2 i32) (param $cells2 i32) (param $cells2_len i32) (result i32)";
                function(&own, "decide", &format!("{flat} {more}"), silent, true);
            }
        }
        out.push_str(&self.funcs);
        for (at, bytes) in data.text {
            let hex: String = bytes.iter().map(|byte| format!("\\{byte:02x}")).collect();
            out.push_str(&format!("(data (i32.const {at}) \"{hex}\")\n"));
        }
        out.push(')');
        out
    }

    /// Lays the manifest out as the canonical ABI wants it; returns its address.
    fn manifest(&self, data: &mut Data) -> u32 {
        let mut record = Vec::new();
        let name = data.text_list(&self.name);
        let version = data.text_list(&self.version);
        let tables: Vec<u8> = self
            .tables
            .iter()
            .flat_map(|(table, names)| {
                let table = data.text_list(table);
                let names: Vec<u8> = names.iter().flat_map(|(name, required)| data.wanted(name, *required)).collect();
                let names = data.list(&names, 12);
                [table, names].concat()
            })
            .collect();
        let facts: Vec<u8> = self.facts.iter().flat_map(|name| data.wanted(name, true)).collect();
        record.extend(name);
        record.extend(version);
        record.extend(data.list(&tables, 16));
        record.extend(data.list(&facts, 12));
        record.extend([0; 16]);
        record.extend(self.max_rows.to_le_bytes());
        record.extend(self.schema.to_le_bytes());
        data.put(&record)
    }

    /// The component.
    pub fn component(&self) -> Vec<u8> {
        let mut module = wat::parse_str(self.wat()).expect("the module is well-formed");
        let mut resolve = Resolve::default();
        let wit = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../wit");
        let decision = self.decision.name();
        for folder in ["types", decision] {
            resolve.push_path(wit.join(folder)).expect("the contract parses");
        }
        let mut include = String::new();
        if let Some((package, interface, import)) = &self.extra_import {
            let text = format!("package {package}; interface {interface} {{ f: func(); }}");
            resolve.push_str("extra.wit", &text).expect("the extra package parses");
            include = format!("import {import};");
        }
        let world = format!(
            "package test:test; world test {{ include penstock:{decision}/{decision}-policy@0.1.0; {include} }}"
        );
        let package = resolve.push_str("test.wit", &world).expect("the world parses");
        let world = resolve.select_world(&[package], Some("test")).expect("there is one world");
        embed_component_metadata(&mut module, &resolve, world, StringEncoding::UTF8).expect("the world fits");
        let encoder = ComponentEncoder::default().validate(true).module(&module).expect("the module fits its world");
        let mut encoder = encoder;
        encoder.encode().expect("the component is well-formed")
    }
}

struct Data {
    at: u32,
    text: Vec<(u32, Vec<u8>)>,
}

impl Data {
    fn put(&mut self, bytes: &[u8]) -> u32 {
        let at = self.at;
        self.text.push((at, bytes.to_vec()));
        self.at = (at + bytes.len() as u32).next_multiple_of(8);
        at
    }

    fn list(&mut self, bytes: &[u8], stride: usize) -> Vec<u8> {
        let at = self.put(bytes);
        [at.to_le_bytes(), ((bytes.len() / stride) as u32).to_le_bytes()].concat()
    }

    fn text_list(&mut self, text: &str) -> Vec<u8> {
        self.list(text.as_bytes(), 1)
    }

    fn wanted(&mut self, name: &str, required: bool) -> Vec<u8> {
        let mut wanted = self.text_list(name);
        wanted.extend([u8::from(required), 0, 0, 0]);
        wanted
    }
}

/// A runtime without a cache, for tests.
pub fn runtime() -> Runtime {
    Runtime::new(RuntimeConfig { instances_max: 32, ..RuntimeConfig::default() }).expect("the engine starts")
}

/// Runtime, library, and the sets that use them.
pub struct Bench {
    pub runtime: Runtime,
    pub library: Library,
}

impl Bench {
    pub fn new() -> Self {
        Self { runtime: runtime(), library: Library::new() }
    }

    /// With a backstop in time that no test machine is slow enough to meet: whatever ends here ends by what was counted.
    pub fn unhurried() -> Self {
        let config =
            RuntimeConfig { instances_max: 32, backstop: Duration::from_secs(600), ..RuntimeConfig::default() };
        Self { runtime: Runtime::new(config).expect("the engine starts"), library: Library::new() }
    }

    /// Loads a component; returns its name in a set.
    pub fn load(&self, guest: &Guest) -> String {
        let component = Component::load(&self.runtime, &guest.component()).expect("the component loads");
        let name = format!("sha256:{}", component.digest());
        self.library.add(component).expect("there is room");
        name
    }

    /// A set with one seat from here, the others native.
    pub fn set(&self, decision: Decision, policy: &str, more: &str) -> Arc<PolicySet> {
        let text = format!(r#"{{ "{}": {{ "policy": "{policy}"{more} }} }}"#, decision.name());
        Arc::new(PolicySet::parse(&text).expect("the set is well-formed"))
    }

    pub fn try_prepare(
        &self,
        set: &Arc<PolicySet>,
        machine: Machine,
        remembered: &Remembered,
    ) -> Result<Prepared, PrepareFaults> {
        let from = Workshop { runtime: &self.runtime, library: &self.library, context_window_tokens: 8_192 };
        Prepared::new(&from, set, machine, remembered)
    }

    pub fn prepare(&self, set: &Arc<PolicySet>, machine: Machine) -> Prepared {
        self.try_prepare(set, machine, &Remembered::default()).expect("the set can serve")
    }

    /// One component in its seat.
    pub fn seat(&self, guest: &Guest) -> WasmPolicies {
        let name = self.load(guest);
        let set = self.set(guest.decision, &name, "");
        WasmPolicies::new(self.prepare(&set, machine_of(guest.decision)), Generation(1))
    }
}

/// A machine that asks this decision.
pub fn machine_of(decision: Decision) -> Machine {
    if decision == Decision::Eviction { Machine::Replica } else { Machine::Gateway }
}

/// The n-th call, a millisecond after the one before.
pub fn call(number: u64) -> Call {
    Call { number, now_us: number * 1_000, seed: number.wrapping_mul(0x9e37_79b9_7f4a_7c15) }
}

/// The time of that call.
pub fn time_of(number: u64) -> Instant {
    Instant(number * 1_000_000)
}

/// Remembers everything that it is told.
#[derive(Debug, Default)]
pub struct Told {
    pub lines: Vec<LogLine>,
    pub lines_dropped: u64,
    pub counts: Vec<(String, u64)>,
    pub counts_dropped: u64,
    pub happenings: Vec<Happening>,
    pub happenings_dropped: u64,
}

impl PolicySink for Told {
    fn log(&mut self, _from: Speaker<'_>, line: LogLine) {
        self.lines.push(line);
    }
    fn lines_dropped(&mut self, _from: Speaker<'_>, lines: u64) {
        self.lines_dropped += lines;
    }
    fn count(&mut self, _from: Speaker<'_>, name: &str, by: u64) {
        self.counts.push((name.to_owned(), by));
    }
    fn counts_dropped(&mut self, _from: Speaker<'_>, counts: u64) {
        self.counts_dropped += counts;
    }
    fn happened(&mut self, _from: Speaker<'_>, happening: Happening) {
        self.happenings.push(happening);
    }
    fn happenings_dropped(&mut self, _from: Speaker<'_>, happenings: u64) {
        self.happenings_dropped += happenings;
    }
}

/// What the policies said since the last time.
pub fn drained(policies: &mut WasmPolicies) -> Told {
    let mut told = Told::default();
    policies.drain(&mut told);
    told
}
