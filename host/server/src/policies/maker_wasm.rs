//! Sets whose seats are WebAssembly components: from documents and bytes to what the engine seats.

use std::any::Any;
use std::sync::Arc;
use std::sync::mpsc::SyncSender;

use penstock_base::{Duration, Generation, Instant};
use penstock_engine::{Machine, Memory, PolicySource, PreparedPolicies, SeatedPolicies, TakenOver};
use penstock_policy_api::validate::Malformed;
use penstock_policy_api::{
    AdmissionPolicy, Decision, EvictionPolicy, FairnessPolicy, FallbackReason, OverloadPolicy, Policies, RoutingPolicy,
};
use penstock_policy_wasm::{
    CacheSecret, Component, Digest, Happening, Library, LogLevel, LogLine, PolicyRef, PolicySet, PolicySink, Prepared,
    Remembered, Retired, Runtime, RuntimeConfig, Speaker, WasmPolicies, Workshop,
};
use serde_json::{Value, json};

use super::report::{Report, Said};
use super::{Fault, MakerSettings};

/// How often what policies say is collected.
const COLLECT_EVERY: Duration = Duration::from_ms(100);

/// Runs components and knows those at hand.
pub struct Maker {
    shop: Arc<Shop>,
}

struct Shop {
    runtime: Runtime,
    library: Library,
    context_window_tokens: u32,
    reports: SyncSender<Report>,
}

/// A set, parsed and digested.
#[derive(Clone)]
pub struct ParsedSet(Arc<PolicySet>);

impl Maker {
    /// Starts the engine for components.
    ///
    /// # Errors
    /// No address space, a cache that cannot be used.
    pub fn start(settings: &MakerSettings, reports: SyncSender<Report>) -> Result<Self, String> {
        let cache = settings.cache_dir.clone().zip(CacheSecret::from_deployment(&settings.secret));
        let defaults = RuntimeConfig::default();
        // Each machine has up to four seats; for a moment there are three of each: the present one, the next one, and its trial.
        let instances_max = defaults.instances_max.max(12 * (settings.replicas + 1));
        let config = RuntimeConfig { cache, instances_max, ..defaults };
        let runtime = Runtime::new(config).map_err(|fault| fault.to_string())?;
        let context_window_tokens = settings.context_tokens_max;
        Ok(Self { shop: Arc::new(Shop { runtime, library: Library::new(), context_window_tokens, reports }) })
    }

    /// Checks, compiles and keeps a component.
    ///
    /// # Errors
    /// What is wrong with it.
    pub fn load(&self, bytes: &[u8]) -> Result<Value, Fault> {
        let component =
            Component::load(&self.shop.runtime, bytes).map_err(|fault| Fault::Refused(fault.to_string()))?;
        let told = told(&component);
        self.shop.library.add(component).map_err(|fault| Fault::Full(fault.to_string()))?;
        Ok(told)
    }

    /// Components at hand.
    pub fn components(&self) -> Vec<Value> {
        self.shop.library.list().iter().map(|component| told(component)).collect()
    }

    /// One component, with everything that it declared.
    pub fn component(&self, digest: &str) -> Option<Value> {
        let component = self.shop.library.get(digest.parse().ok()?)?;
        let manifest = component.manifest();
        let wanted = |names: &[penstock_policy_api::Wanted]| -> Vec<Value> {
            names.iter().map(|name| json!({"name": name.name, "required": name.required})).collect()
        };
        let tables = manifest.tables.iter();
        let mut told = told(&component);
        told["declares"] = json!({
            "signals": tables.map(|t| json!({"table": t.table, "names": wanted(&t.names)})).collect::<Vec<_>>(),
            "facts": wanted(&manifest.facts),
            "actions": wanted(&manifest.actions),
            "reasons": manifest.reasons,
            "max_rows": manifest.max_rows,
            "state_schema": manifest.state_schema,
        });
        Some(told)
    }

    /// Seats' instances alive in the process.
    pub fn instances_alive(&self) -> usize {
        self.shop.runtime.instances_alive()
    }

    /// Reads a set.
    ///
    /// # Errors
    /// Everything that is wrong with it.
    pub fn parse(&self, document: &Value) -> Result<ParsedSet, Fault> {
        let set = PolicySet::from_value(document).map_err(|faults| Fault::Refused(faults.to_string()))?;
        Ok(ParsedSet(Arc::new(set)))
    }

    /// Makes and tries instances of `set`, machine by machine.
    pub fn source(&self, set: &ParsedSet) -> PolicySource {
        let (shop, set) = (Arc::clone(&self.shop), Arc::clone(&set.0));
        let digest: Arc<str> = set.digest().to_string().into();
        PolicySource::preparing(move |machine, memory: Option<&Memory>| {
            let workshop = Workshop {
                runtime: &shop.runtime,
                library: &shop.library,
                context_window_tokens: shop.context_window_tokens,
            };
            let remembered = memory.and_then(|memory| memory.downcast_ref::<Remembered>()).cloned().unwrap_or_default();
            let kind = match machine {
                Machine::Gateway => penstock_policy_wasm::Machine::Gateway,
                Machine::Replica(_) => penstock_policy_wasm::Machine::Replica,
            };
            let prepared = Prepared::new(&workshop, &set, kind, &remembered).map_err(|faults| faults.to_string())?;
            let voice = Voice { set: Arc::clone(&digest), machine, reports: shop.reports.clone() };
            Ok(Box::new(Ready { prepared, voice }))
        })
    }
}

fn told(component: &Component) -> Value {
    json!({
        "digest": component.digest().to_string(),
        "decision": component.decision().name(),
        "name": component.manifest().name,
        "version": component.manifest().version,
        "bytes": component.bytes(),
        "contract": component.contract(),
    })
}

impl ParsedSet {
    /// The native defaults.
    pub fn native() -> Self {
        Self(Arc::new(PolicySet::native()))
    }

    /// Of its canonical form.
    pub fn digest(&self) -> String {
        self.0.digest().to_string()
    }

    /// The document, every seat spelt out.
    pub fn document(&self) -> Value {
        serde_json::from_str(self.0.canonical()).unwrap_or_default()
    }

    /// Who sits where.
    pub fn seats(&self, maker: Option<&Maker>) -> Vec<Value> {
        let seat = |decision: Decision| {
            let spec = self.0.seat(decision);
            let common = json!({"seat": decision.name(), "fuel_base": spec.fuel_base, "max_rows": spec.max_rows});
            let (kind, policy, component) = match spec.policy {
                PolicyRef::Native(name) => ("native", name.to_owned(), None),
                PolicyRef::Component(digest) => ("wasm", name_of(maker, digest), Some(digest.to_string())),
            };
            let mut seat = common;
            seat["kind"] = kind.into();
            seat["policy"] = policy.into();
            if let Some(component) = component {
                seat["component"] = component.into();
                seat["parameters"] = serde_json::from_str(&spec.parameters).unwrap_or_else(|_| json!({}));
            }
            seat
        };
        Decision::ALL.map(seat).into()
    }
}

fn name_of(maker: Option<&Maker>, digest: Digest) -> String {
    let component = maker.and_then(|maker| maker.shop.library.get(digest));
    component.map_or_else(|| "not loaded".to_owned(), |component| component.manifest().name.clone())
}

/// Carries what the policies of one machine say to whoever keeps them. Never waits.
#[derive(Clone)]
struct Voice {
    set: Arc<str>,
    machine: Machine,
    reports: SyncSender<Report>,
}

impl Voice {
    fn say(&self, from: Speaker<'_>, said: Said) {
        // Left out when too much waits, or when the keeper has ended.
        let _ = self.reports.try_send(Report {
            set: Arc::clone(&self.set),
            machine: self.machine,
            decision: from.decision.name(),
            policy: from.policy.to_owned(),
            said,
        });
    }
}

impl PolicySink for Voice {
    fn log(&mut self, from: Speaker<'_>, line: LogLine) {
        let level = match line.level {
            LogLevel::Error => 0,
            LogLevel::Warning => 1,
            LogLevel::Information => 2,
            LogLevel::Debug => 3,
        };
        self.say(from, Said::Line(level, line.text));
    }
    fn lines_dropped(&mut self, from: Speaker<'_>, lines: u64) {
        self.say(from, Said::Dropped("lines", lines));
    }
    fn count(&mut self, from: Speaker<'_>, name: &str, by: u64) {
        self.say(from, Said::Count(name.to_owned(), by));
    }
    fn counts_dropped(&mut self, from: Speaker<'_>, counts: u64) {
        self.say(from, Said::Dropped("counts", counts));
    }
    fn happened(&mut self, from: Speaker<'_>, happening: Happening) {
        let said = match happening {
            Happening::Fault { failure, .. } => Said::Struck(failure.kind.name(), failure.to_string()),
            Happening::Malformed(why) => Said::Struck(why.name(), format!("its answer was refused: {}", why.name())),
            Happening::Rebuilt { facts } => Said::Renewed(format!("made anew with its snapshot and {facts} facts")),
            Happening::Reset(reason) => Said::Renewed(format!("made anew without its memory: {}", reason.name())),
            Happening::Quarantined { calls, .. } => Said::Quarantined { calls },
        };
        self.say(from, said);
    }
    fn happenings_dropped(&mut self, from: Speaker<'_>, happenings: u64) {
        self.say(from, Said::Dropped("happenings", happenings));
    }
}

/// A set for one machine, made and tried.
struct Ready {
    prepared: Prepared,
    voice: Voice,
}

/// A set in the seats of one machine.
struct Seated {
    policies: WasmPolicies,
    voice: Voice,
    collected: Instant,
}

/// What a swap leaves behind: heard a last time when it ends.
struct Leaving {
    retired: Retired,
    voice: Voice,
}

impl Drop for Leaving {
    fn drop(&mut self) {
        self.retired.drain(&mut self.voice);
    }
}

impl PreparedPolicies for Ready {
    fn seat(self: Box<Self>, generation: Generation) -> Box<dyn SeatedPolicies> {
        let Self { prepared, voice } = *self;
        Box::new(Seated { policies: WasmPolicies::new(prepared, generation), voice, collected: Instant(0) })
    }

    fn take_over(self: Box<Self>, old: Box<dyn SeatedPolicies>, generation: Generation, now: Instant) -> TakenOver {
        if !(old.as_ref() as &dyn Any).is::<Seated>() {
            return TakenOver { seated: self.seat(generation), retired: Box::new(old) };
        }
        let old: Box<dyn Any> = old;
        let mut seated = old.downcast::<Seated>().expect("its type was looked at");
        let Self { prepared, voice } = *self;
        let report = seated.policies.swap(prepared, generation, now);
        let former = std::mem::replace(&mut seated.voice, voice);
        TakenOver { seated, retired: Box::new(Leaving { retired: report.retired, voice: former }) }
    }
}

impl SeatedPolicies for Seated {
    fn between_steps(&mut self, now: Instant) {
        self.policies.between_steps(now);
        if now.since(self.collected) >= COLLECT_EVERY {
            self.collected = now;
            self.policies.drain(&mut self.voice);
        }
    }
    fn refused(&mut self, decision: Decision, why: Malformed) {
        self.policies.strike(decision, FallbackReason::Malformed(why));
    }
    fn last_fuel(&self, decision: Decision) -> u64 {
        self.policies.last_fuel(decision)
    }
    fn memory(&mut self) -> Memory {
        Box::new(self.policies.remembered())
    }
}

impl Policies for Seated {
    fn generation(&self) -> Generation {
        self.policies.generation()
    }
    fn admission(&mut self) -> &mut dyn AdmissionPolicy {
        self.policies.admission()
    }
    fn routing(&mut self) -> &mut dyn RoutingPolicy {
        self.policies.routing()
    }
    fn fairness(&mut self) -> &mut dyn FairnessPolicy {
        self.policies.fairness()
    }
    fn eviction(&mut self) -> &mut dyn EvictionPolicy {
        self.policies.eviction()
    }
    fn overload(&mut self) -> &mut dyn OverloadPolicy {
        self.policies.overload()
    }
}
