//! A component from bodies in text: exports in the canonical ABI, everything that is not said otherwise well-behaved.
//!
//! Memory: state (a count of calls) at 64, a flag that it was configured at 80, answers at 1,024, lists at 2,048, the life cycle's results
//! at 3,072, the manifest from 8,192, arguments from 65,536 on, large state from 196,608 on.

use std::path::Path;

use anyhow::{Context as _, Result};
use wit_component::{ComponentEncoder, StringEncoding, embed_component_metadata};
use wit_parser::Resolve;

/// Refuses every parameter document, with empty texts.
pub const REFUSE: &str = "(i32.store8 (i32.const 3072) (i32.const 1)) (i64.store (i32.const 3076) (i64.const 0)) \
                          (i64.store (i32.const 3084) (i64.const 0)) (i32.const 3072)";

/// Body of `save`: the bytes at an address.
pub fn state_of(at: &str, length: &str) -> String {
    format!("(i32.store (i32.const 3072) {at}) (i32.store (i32.const 3076) {length}) (i32.const 3072)")
}

/// Body of `restore`: ok or error, and which case.
pub fn restored(is_error: u32, case: u32) -> String {
    format!(
        "(i32.store8 (i32.const 3072) (i32.const {is_error})) (i32.store8 (i32.const 3073) (i32.const {case})) (i32.const 3072)"
    )
}

/// The context table that a decision is asked with first.
pub fn context_table(decision: &str) -> &str {
    if decision == "fairness" { "order" } else { decision }
}

/// What it says of itself.
#[derive(Clone, Debug)]
pub struct Manifest {
    pub name: String,
    /// The name's first byte begins no character.
    pub is_garbled: bool,
    pub version: String,
    /// Table, then names with whether they are required.
    pub tables: Vec<(String, Vec<(String, bool)>)>,
    pub facts: Vec<String>,
    pub actions: Vec<String>,
    pub reasons: Vec<String>,
}

impl Default for Manifest {
    fn default() -> Self {
        Self {
            name: "hostile".to_owned(),
            is_garbled: false,
            version: "1".to_owned(),
            tables: Vec::new(),
            facts: Vec::new(),
            actions: Vec::new(),
            reasons: Vec::new(),
        }
    }
}

/// A component in the making.
#[derive(Clone, Debug)]
pub struct Guest {
    decision: &'static str,
    pub manifest: Manifest,
    bodies: Vec<(&'static str, String)>,
    also: String,
    pages: u32,
    /// Package and interface of an import that the contract does not have.
    import: Option<(&'static str, &'static str)>,
}

impl Guest {
    pub fn new(decision: &'static str) -> Self {
        let manifest = Manifest::default();
        Self { decision, manifest, bodies: Vec::new(), also: String::new(), pages: 4, import: None }
    }

    /// Replaces one function's body; `cleanup` runs after every answer of a decision, `realloc` before room is given.
    pub fn body(mut self, function: &'static str, body: &str) -> Self {
        self.bodies.push((function, body.to_owned()));
        self
    }

    /// Replaces the decision's body; of fairness `order`'s.
    pub fn deciding(self, body: &str) -> Self {
        self.body("decide", body)
    }

    /// Adds fields to the module.
    pub fn also(mut self, fields: &str) -> Self {
        self.also.push_str(fields);
        self
    }

    /// Memory from the start, in pages of 64 KiB.
    pub fn pages(mut self, pages: u32) -> Self {
        self.pages = pages;
        self
    }

    /// Imports a function `now` of an interface that the contract does not have.
    pub fn importing(mut self, package: &'static str, interface: &'static str) -> Self {
        self.import = Some((package, interface));
        self
    }

    /// Saves `bytes` of state, at most 64 KiB and the count first, and takes as many back.
    pub fn with_state(self, bytes: u32) -> Self {
        let save = format!(
            "(i64.store (i32.const {STATE}) (i64.load (i32.const 64))) {}",
            state_of(&format!("(i32.const {STATE})"), &format!("(i32.const {bytes})"))
        );
        let taken = format!(
            "(memory.copy (i32.const {STATE}) (local.get 5) (local.get 6))
             (i64.store (i32.const 64) (i64.load (i32.const {STATE}))) {}",
            restored(0, 0)
        );
        self.body("save", &save).body("restore", &taken)
    }

    fn body_of(&self, function: &str, default: &str) -> String {
        let found = self.bodies.iter().find(|(known, _)| *known == function);
        found.map_or_else(|| default.to_owned(), |(_, body)| body.clone())
    }

    fn text(&self) -> String {
        let (data, manifest) = lay_out(&self.manifest);
        let life = "penstock:types/policy@0.1.0#";
        let own = format!("penstock:{0}/{0}@0.1.0#", self.decision);
        let mut out = String::from("(module\n");
        out.push_str("(import \"penstock:types/host@0.1.0\" \"log\" (func $log (param i32 i32 i32)))\n");
        out.push_str("(import \"penstock:types/host@0.1.0\" \"count\" (func $count (param i32 i32 i64)))\n");
        if let Some((package, interface)) = self.import {
            out.push_str(&format!("(import \"{package}/{interface}\" \"now\" (func $now (result i64)))\n"));
        }
        out.push_str(&format!(
            "(memory (export \"memory\") {})\n(global $top (mut i32) (i32.const 65536))\n",
            self.pages
        ));
        let realloc = self.body_of("realloc", "");
        out.push_str(&format!(
            "(func (export \"cabi_realloc\") (param i32 i32 i32 i32) (result i32) (local $at i32) {realloc}
              (local.set $at (i32.and (i32.add (global.get $top) (i32.const 7)) (i32.const -8)))
              (global.set $top (i32.add (local.get $at) (local.get 3)))
              (block $fits
                (br_if $fits (i32.le_u (global.get $top) (i32.mul (memory.size) (i32.const 65536))))
                (drop (memory.grow (i32.add (i32.shr_u (local.get 3) (i32.const 16)) (i32.const 1)))))
              (local.get $at))\n"
        ));
        let freed = "(global.set $top (i32.const 65536))";
        let mut export = |instance: &str, name: &str, signature: &str, body: &str, cleanup: Option<&str>| {
            out.push_str(&format!("(func (export \"{instance}{name}\") {signature} (local $i i32) {body})\n"));
            if let Some(cleanup) = cleanup {
                out.push_str(&format!(
                    "(func (export \"cabi_post_{instance}{name}\") (param i32) {cleanup} {freed})\n"
                ));
            }
        };
        let configured =
            "(i64.store (i32.const 80) (i64.const 1)) (i32.store8 (i32.const 3072) (i32.const 0)) (i32.const 3072)";
        let two = "(param i32 i32)";
        let describe = self.body_of("describe", &format!("(i32.const {manifest})"));
        export(life, "describe", "(result i32)", &describe, Some(""));
        let configure = self.body_of("configure", configured);
        export(life, "configure", &format!("{two} (result i32)"), &configure, Some(""));
        export(life, "observe", two, &self.body_of("observe", freed), None);
        let save = self.body_of("save", &state_of("(i32.const 64)", "(i32.const 8)"));
        export(life, "save", "(result i32)", &save, Some(""));
        let taken = format!(
            "(if (i32.eq (local.get 6) (i32.const 8)) (then (i64.store (i32.const 64) (i64.load (local.get 5))))) {}",
            restored(0, 0)
        );
        let restore = self.body_of("restore", &taken);
        export(life, "restore", "(param i32 i32 i64 i64 i64 i32 i32) (result i32)", &restore, Some(""));
        let counted = format!(
            "(i64.store (i32.const 64) (i64.add (i64.load (i32.const 64)) (i64.const 1))) {}",
            crate::answers::no_opinion(self.decision)
        );
        let decide = self.body_of("decide", &counted);
        let cleanup = self.body_of("cleanup", "");
        // Arguments beyond sixteen flat values come in memory.
        let matrix = "(param i64 i64 i64 i32 i32 i32 i32 i32";
        match self.decision {
            "admission" | "routing" => export(&own, "decide", "(param i32) (result i32)", &decide, Some(&cleanup)),
            "fairness" => {
                let signature = format!("{matrix}) (result i32)");
                export(&own, "order", &signature, &decide, Some(&cleanup));
                export(&own, "victims", &signature, &crate::answers::no_opinion("eviction"), Some(""));
            }
            "eviction" => export(&own, "decide", &format!("{matrix}) (result i32)"), &decide, Some(&cleanup)),
            _ => export(&own, "decide", &format!("{matrix} i32 i32 i32) (result i32)"), &decide, Some(&cleanup)),
        }
        out.push_str(&self.also);
        let hex: String = data.iter().map(|byte| format!("\\{byte:02x}")).collect();
        out.push_str(&format!("(data (i32.const {BASE}) \"{hex}\"))"));
        out
    }

    /// Wraps the module by the contract's WIT.
    pub fn component(&self) -> Result<Vec<u8>> {
        let mut module = wat::parse_str(self.text()).context("the text of a guest")?;
        let mut resolve = Resolve::default();
        let wit = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../wit");
        resolve.push_path(wit.join("types"))?;
        let (mut package, _) = resolve.push_path(wit.join(self.decision))?;
        let mut world = format!("{}-policy", self.decision);
        if let Some((name, interface)) = self.import {
            resolve
                .push_str("import.wit", &format!("package {name}; interface {interface} {{ now: func() -> u64; }}"))?;
            let including = format!(
                "package test:clocked; world clocked {{ include penstock:{0}/{0}-policy@0.1.0; import {name}/{interface}; }}",
                self.decision
            );
            package = resolve.push_str("clocked.wit", &including)?;
            world = "clocked".to_owned();
        }
        let world = resolve.select_world(&[package], Some(&world))?;
        embed_component_metadata(&mut module, &resolve, world, StringEncoding::UTF8)?;
        ComponentEncoder::default().validate(true).module(&module)?.encode()
    }
}

/// Where large state lies: the last of the four pages.
const STATE: u32 = 3 << 16;

/// Where the manifest's data lies.
const BASE: u32 = 8_192;

/// The manifest in the canonical ABI: the data, and where in memory the record stands.
fn lay_out(manifest: &Manifest) -> (Vec<u8>, u32) {
    let mut data = Data(Vec::new());
    let mut name = manifest.name.clone().into_bytes();
    if manifest.is_garbled {
        name[0] = 0xff;
    }
    let (name, version) = (data.list(&name, 1), data.text(&manifest.version));
    let tables: Vec<u8> = manifest
        .tables
        .iter()
        .flat_map(|(table, names)| {
            let named: Vec<u8> = names.iter().flat_map(|(name, required)| data.wanted(name, *required)).collect();
            [data.text(table), data.list(&named, 12)].concat()
        })
        .collect();
    let facts: Vec<u8> = manifest.facts.iter().flat_map(|name| data.wanted(name, true)).collect();
    let actions: Vec<u8> = manifest.actions.iter().flat_map(|name| data.wanted(name, true)).collect();
    let reasons: Vec<u8> = manifest.reasons.iter().flat_map(|reason| data.text(reason)).collect();
    let named = data.list(&reasons, 8);
    let lists = [data.list(&tables, 16), data.list(&facts, 12), data.list(&actions, 12), named].concat();
    // No limit on rows; the first schema.
    let record = [name, version, lists, 0_u32.to_le_bytes().to_vec(), 1_u32.to_le_bytes().to_vec()].concat();
    let at = data.put(&record);
    (data.0, at)
}

struct Data(Vec<u8>);

impl Data {
    fn put(&mut self, bytes: &[u8]) -> u32 {
        self.0.resize(self.0.len().next_multiple_of(8), 0);
        let at = BASE + self.0.len() as u32;
        self.0.extend(bytes);
        at
    }

    /// Address and count of a list.
    fn list(&mut self, items: &[u8], size: usize) -> Vec<u8> {
        let at = self.put(items);
        [at.to_le_bytes(), ((items.len() / size) as u32).to_le_bytes()].concat()
    }

    fn text(&mut self, text: &str) -> Vec<u8> {
        self.list(text.as_bytes(), 1)
    }

    fn wanted(&mut self, name: &str, is_required: bool) -> Vec<u8> {
        [self.text(name), vec![u8::from(is_required), 0, 0, 0]].concat()
    }
}
