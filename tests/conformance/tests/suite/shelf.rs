//! Which components are there, and which native policies are their twins?

use std::path::{Path, PathBuf};
use std::sync::Arc;

use penstock_conformance::checks::Tested;
use penstock_conformance::{Bench, Seated, Seating, shipped};
use penstock_policy_api::Decision;
use penstock_policy_harness::Subject;
use penstock_policy_sdk::Load;
use penstock_policy_wasm::Component;

/// A component as it was shipped.
pub struct Shipped {
    /// Its file's name, e.g. `routing-load-overlap`.
    pub name: String,
    pub bytes: Vec<u8>,
    pub component: Arc<Component>,
}

impl Shipped {
    /// The rule that it names.
    pub fn rule(&self) -> &str {
        &self.component.manifest().name
    }

    pub fn tested<'a>(&'a self, bench: &'a Bench) -> Tested<'a> {
        Tested { bench, component: &self.component, how: seating(&self.name) }
    }
}

/// How the shipped set seats it. The set's own file has the figures; what is not in the set sits as by default.
fn seating(name: &str) -> Seating<'static> {
    let text = std::fs::read_to_string(root().join("policies/shipped.toml")).unwrap_or_else(|_| NEEDED.to_owned());
    let set: toml::Table = text.parse().expect("the shipped set is well-formed");
    let policy = format!("file:{name}.wasm");
    let seat = set.values().find(|seat| seat.get("policy").and_then(|of| of.as_str()) == Some(&policy));
    let base = seat.and_then(|seat| seat.get("fuel-base")).and_then(|base| base.as_integer());
    base.map_or_else(Seating::default, |base| Seating { fuel_base: base as u64, ..Seating::default() })
}

/// What stands for the set where there is none: counters of 4,096 flows need more than the default to hear 256 facts at once.
const NEEDED: &str = r#"fairness = { policy = "file:fairness-vtc.wasm", fuel-base = 1500000 }"#;

pub fn bench() -> Bench {
    Bench::new().expect("the engine starts")
}

/// Every shipped component, loaded into `bench`; none, said aloud, where there are none.
pub fn components(bench: &Bench) -> Vec<Shipped> {
    let target = Path::new(env!("CARGO_TARGET_TMPDIR")).parent().expect("the folder lies in the target folder");
    let Some(found) = shipped(target) else {
        println!(
            "SKIPPED components: none in {}; `cargo xtask policies` builds them",
            target.join("policies").display()
        );
        return Vec::new();
    };
    let load = |(name, path): (String, PathBuf)| {
        let bytes = std::fs::read(&path).expect("a listed component is there");
        let component = bench.load(&bytes).unwrap_or_else(|error| panic!("{name}: {error}"));
        Shipped { name, bytes, component }
    };
    found.into_iter().map(load).collect()
}

/// The folder of this suite.
pub fn here() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// The root of the tree.
pub fn root() -> PathBuf {
    here().join("../..")
}

/// Rules that have a native twin.
pub const NATIVE: [(Decision, &str); 12] = [
    (Decision::Admission, "bounded"),
    (Decision::Admission, "queue-quota"),
    (Decision::Routing, "best-credit"),
    (Decision::Routing, "load-overlap"),
    (Decision::Routing, "overlap-load"),
    (Decision::Fairness, "class-first"),
    (Decision::Fairness, "round-robin"),
    (Decision::Fairness, "vtc"),
    (Decision::Eviction, "gdsf"),
    (Decision::Eviction, "lru"),
    (Decision::Overload, "degrade-ladder"),
    (Decision::Overload, "ladder"),
];

/// The native policy of that rule.
pub fn native(rule: &str, parameters: &str) -> Result<Subject, String> {
    use penstock_policy_sdk::native as host;
    fn made<P: Load>(parameters: &str) -> Result<Box<P>, String> {
        P::configure(parameters).map(Box::new).map_err(|error| error.to_string())
    }
    Ok(match rule {
        "bounded" => Subject::Admission(made::<host::Bounded>(parameters)?),
        "queue-quota" => Subject::Admission(made::<penstock_admission_queue_quota::Seat>(parameters)?),
        "best-credit" => Subject::Routing(made::<host::BestCredit>(parameters)?),
        "load-overlap" => Subject::Routing(made::<penstock_routing_load_overlap::Seat>(parameters)?),
        "overlap-load" => Subject::Routing(made::<host::OverlapLoad>(parameters)?),
        "class-first" => Subject::Fairness(made::<host::ClassFirst>(parameters)?),
        "round-robin" => Subject::Fairness(made::<penstock_fairness_round_robin::Seat>(parameters)?),
        "vtc" => Subject::Fairness(made::<penstock_fairness_vtc::Seat>(parameters)?),
        "gdsf" => Subject::Eviction(made::<penstock_eviction_gdsf::Seat>(parameters)?),
        "lru" => Subject::Eviction(made::<host::Lru>(parameters)?),
        "degrade-ladder" => Subject::Overload(made::<penstock_overload_degrade_ladder::Seat>(parameters)?),
        "ladder" => Subject::Overload(made::<host::Ladder>(parameters)?),
        other => return Err(format!("no native policy is called {other}")),
    })
}

/// The native policy of that rule, seated with every default; none where it has no twin.
pub fn twin(rule: &str) -> Option<Seated> {
    let is_known = NATIVE.iter().any(|(_, name)| *name == rule);
    is_known.then(|| Seated::native(native(rule, "").expect("a policy takes every default")))
}
