//! Which policies serve? Five seats, their parameters and their fuel, in one document with one digest.
//!
//! ```json
//! { "routing": { "policy": "sha256:9f…", "parameters": { "prefill-scale": 2 }, "fuel-base": 20000, "max-rows": 64 },
//!   "eviction": { "policy": "native:lru" } }
//! ```
//!
//! A seat that is absent is the native default's. The digest is that of the canonical form: every seat spelt out, keys sorted, no blanks.

use std::fmt::{self, Write as _};
use std::sync::Arc;

use penstock_base::limits::ORDER_ROWS_MAX;
use penstock_policy_api::Decision;
use serde_json::{Map, Value};

use crate::digest::Digest;
use crate::limits::{FUEL_BASE_DEFAULT, FUEL_MAX, PARAMETERS_BYTES_MAX, SET_BYTES_MAX};

/// Opens every digested document; the number is the form's version.
const DIGEST_DOMAIN: &[u8] = b"penstock policy set 1";

/// Who sits in a seat.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum PolicyRef {
    /// A policy of the host, by its name.
    Native(&'static str),
    /// A component, by its digest.
    Component(Digest),
}

impl fmt::Display for PolicyRef {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Native(name) => write!(f, "native:{name}"),
            Self::Component(digest) => write!(f, "sha256:{digest}"),
        }
    }
}

/// One seat of a set.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct SeatSpec {
    /// Who sits there.
    pub policy: PolicyRef,
    /// Its parameters, as canonical JSON; empty is every default.
    pub parameters: Arc<str>,
    /// Fuel of a call, beside what its rows add.
    pub fuel_base: u64,
    /// Most rows of a call; 0 leaves it to the policy and the host.
    pub max_rows: u32,
}

/// A document, parsed and digested.
#[derive(Clone, PartialEq, Eq)]
pub struct PolicySet {
    /// In the order of [`Decision::ALL`].
    seats: [SeatSpec; 5],
    canonical: String,
    digest: Digest,
}

/// One thing that is wrong with a document.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct SetFault {
    /// Where, e.g. `routing.fuel-base`; empty is the whole.
    pub path: String,
    /// What.
    pub problem: String,
}

/// Everything that is wrong with a document.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct SetFaults(pub Vec<SetFault>);

impl fmt::Display for SetFaults {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (at, fault) in self.0.iter().enumerate() {
            let (separator, colon) = (if at == 0 { "" } else { "; " }, if fault.path.is_empty() { "" } else { ": " });
            write!(f, "{separator}{}{colon}{}", fault.path, fault.problem)?;
        }
        Ok(())
    }
}

impl std::error::Error for SetFaults {}

/// Names of the native policies of a decision; the default first.
pub const fn native_names(decision: Decision) -> &'static [&'static str] {
    match decision {
        Decision::Admission => &["bounded"],
        Decision::Routing => &["overlap-load", "best-credit"],
        Decision::Fairness => &["class-first"],
        Decision::Eviction => &["lru"],
        Decision::Overload => &["ladder"],
    }
}

impl PolicySet {
    /// The native defaults.
    pub fn native() -> Self {
        Self::of(Decision::ALL.map(native_seat))
    }

    /// These seats, in the order of [`Decision::ALL`].
    fn of(seats: [SeatSpec; 5]) -> Self {
        let mut canonical = String::from("{");
        for (at, decision) in by_name().into_iter().enumerate() {
            let seat = &seats[decision as usize];
            let parameters = if seat.parameters.is_empty() { "{}" } else { &*seat.parameters };
            let separator = if at == 0 { "" } else { "," };
            // Writing to a string does not fail.
            let _written = write!(
                canonical,
                r#"{separator}"{}":{{"fuel-base":{},"max-rows":{},"parameters":{parameters},"policy":"{}"}}"#,
                decision.name(),
                seat.fuel_base,
                seat.max_rows,
                seat.policy,
            );
        }
        canonical.push('}');
        let digest = Digest::of_pieces(&[DIGEST_DOMAIN, canonical.as_bytes()]);
        Self { seats, canonical, digest }
    }

    /// Reads a JSON document.
    pub fn parse(json: &str) -> Result<Self, SetFaults> {
        let whole = |problem: String| SetFaults(vec![SetFault { path: String::new(), problem }]);
        if json.len() > SET_BYTES_MAX {
            return Err(whole(format!("the document has {} bytes, at most {SET_BYTES_MAX}", json.len())));
        }
        let value = serde_json::from_str(json).map_err(|error| whole(format!("not JSON: {error}")))?;
        Self::from_value(&value)
    }

    /// Reads a document that some other notation gave, e.g. TOML.
    pub fn from_value(document: &Value) -> Result<Self, SetFaults> {
        let mut faults = Faults(Vec::new());
        let mut seats = Decision::ALL.map(native_seat);
        match document {
            Value::Object(found) => {
                for (name, seat) in found {
                    match Decision::ALL.into_iter().find(|decision| decision.name() == name) {
                        Some(decision) => seats[decision as usize] = parse_seat(decision, seat, &mut faults),
                        None => {
                            let names = Decision::ALL.map(Decision::name).join(", ");
                            faults.add(name, format!("no such seat; there are {names}"));
                        }
                    }
                }
            }
            _ => faults.add("", "a policy set is an object of seats".to_owned()),
        }
        if faults.0.is_empty() { Ok(Self::of(seats)) } else { Err(SetFaults(faults.0)) }
    }

    /// One seat.
    pub fn seat(&self, decision: Decision) -> &SeatSpec {
        &self.seats[decision as usize]
    }

    /// The components that it names, each once.
    pub fn components(&self) -> Vec<Digest> {
        let mut digests: Vec<Digest> = self
            .seats
            .iter()
            .filter_map(|seat| match seat.policy {
                PolicyRef::Component(digest) => Some(digest),
                PolicyRef::Native(_) => None,
            })
            .collect();
        digests.sort_unstable();
        digests.dedup();
        digests
    }

    /// The document in canonical form: JSON that [`Self::parse`] reads back to the same set.
    pub fn canonical(&self) -> &str {
        &self.canonical
    }

    /// Of the canonical form.
    pub fn digest(&self) -> Digest {
        self.digest
    }
}

impl fmt::Debug for PolicySet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PolicySet").field("digest", &self.digest).field("canonical", &self.canonical).finish()
    }
}

struct Faults(Vec<SetFault>);

impl Faults {
    fn add(&mut self, path: &str, problem: String) {
        self.0.push(SetFault { path: path.to_owned(), problem });
    }
}

/// The decisions in the order of their names.
fn by_name() -> [Decision; 5] {
    let mut all = Decision::ALL;
    all.sort_unstable_by_key(|decision| decision.name());
    all
}

fn native_seat(decision: Decision) -> SeatSpec {
    SeatSpec {
        policy: PolicyRef::Native(native_names(decision)[0]),
        parameters: "".into(),
        fuel_base: FUEL_BASE_DEFAULT,
        max_rows: 0,
    }
}

fn parse_seat(decision: Decision, document: &Value, faults: &mut Faults) -> SeatSpec {
    let mut seat = native_seat(decision);
    let seat_name = decision.name();
    let Value::Object(fields) = document else {
        faults.add(seat_name, "a seat is an object with `policy`".to_owned());
        return seat;
    };
    for name in fields.keys() {
        if !["policy", "parameters", "fuel-base", "max-rows"].contains(&name.as_str()) {
            let path = format!("{seat_name}.{name}");
            faults.add(&path, "no such field; there are policy, parameters, fuel-base, max-rows".to_owned());
        }
    }
    match fields.get("policy") {
        Some(Value::String(name)) => match parse_policy(decision, name) {
            Ok(policy) => seat.policy = policy,
            Err(problem) => faults.add(&format!("{seat_name}.policy"), problem),
        },
        _ => faults.add(&format!("{seat_name}.policy"), "a text, `native:NAME` or `sha256:DIGEST`".to_owned()),
    }
    let mut number = |name: &str, least: u64, most: u64, otherwise: u64| match fields.get(name) {
        None => otherwise,
        Some(value) => match value.as_u64().filter(|number| (least..=most).contains(number)) {
            Some(number) => number,
            None => {
                faults.add(&format!("{seat_name}.{name}"), format!("a whole number, {least} to {most}"));
                otherwise
            }
        },
    };
    seat.fuel_base = number("fuel-base", 1, FUEL_MAX, FUEL_BASE_DEFAULT);
    seat.max_rows = number("max-rows", 0, ORDER_ROWS_MAX as u64, 0) as u32;
    let path = format!("{seat_name}.parameters");
    match fields.get("parameters") {
        None => {}
        Some(Value::Object(parameters)) if parameters.is_empty() => {}
        Some(Value::Object(parameters)) => {
            let mut text = String::new();
            write_object(parameters, &mut text);
            if text.len() > PARAMETERS_BYTES_MAX {
                faults.add(&path, format!("{} bytes, at most {PARAMETERS_BYTES_MAX}", text.len()));
            } else if matches!(seat.policy, PolicyRef::Native(_)) {
                faults.add(&path, "a native policy takes no parameters".to_owned());
            }
            seat.parameters = text.into();
        }
        Some(_) => faults.add(&path, "an object".to_owned()),
    }
    seat
}

fn parse_policy(decision: Decision, name: &str) -> Result<PolicyRef, String> {
    if let Some(native) = name.strip_prefix("native:") {
        let names = native_names(decision);
        let known = names.iter().copied().find(|known| *known == native);
        return known
            .map(PolicyRef::Native)
            .ok_or_else(|| format!("no native policy {native}; there are {}", names.join(", ")));
    }
    match name.strip_prefix("sha256:") {
        Some(digits) => digits.parse().map(PolicyRef::Component).map_err(|error| error.to_string()),
        None => Err("`native:NAME` or `sha256:DIGEST`".to_owned()),
    }
}

/// JSON with sorted keys and no blanks, whatever order the parser kept.
fn write_value(value: &Value, out: &mut String) {
    match value {
        Value::Object(fields) => write_object(fields, out),
        Value::Array(items) => {
            out.push('[');
            for (at, item) in items.iter().enumerate() {
                if at > 0 {
                    out.push(',');
                }
                write_value(item, out);
            }
            out.push(']');
        }
        plain => out.push_str(&plain.to_string()),
    }
}

fn write_object(fields: &Map<String, Value>, out: &mut String) {
    let mut sorted: Vec<_> = fields.iter().collect();
    sorted.sort_unstable_by_key(|(name, _)| *name);
    out.push('{');
    for (at, (name, value)) in sorted.into_iter().enumerate() {
        if at > 0 {
            out.push(',');
        }
        out.push_str(&Value::String(name.clone()).to_string());
        out.push(':');
        write_value(value, out);
    }
    out.push('}');
}
