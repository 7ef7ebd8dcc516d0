//! Sets whose seats are WebAssembly components: from documents and bytes to what the engine seats.

use std::any::Any;
use std::sync::mpsc::SyncSender;
use std::sync::{Arc, Mutex, PoisonError};

use penstock_base::{Duration, Generation, Instant};
use penstock_engine::{Machine, Memory, PolicySource, PreparedPolicies, SeatedPolicies, TakenOver};
use penstock_policy_api::validate::Malformed;
use penstock_policy_api::{
    AdmissionPolicy, Decision, EvictionPolicy, FairnessPolicy, FallbackReason, OverloadPolicy, Policies, RestoreCause,
    RoutingPolicy,
};
use penstock_policy_wasm::{
    CacheSecret, Component, Digest, FreshReason, Happening, Library, LogLevel, LogLine, PolicyRef, PolicySet,
    PolicySink, Prepared, Remembered, Retired, Runtime, RuntimeConfig, RuntimeError, SeatSwap, Speaker, SwapOutcome,
    WasmPolicies, Workshop,
};
use serde_json::{Value, json};

use super::report::{Report, Said};
pub use super::saved::States;
use super::{Fault, MakerSettings, saved};

/// How often what policies say is collected.
const COLLECT_EVERY: Duration = Duration::from_ms(100);

/// What usually keeps the engine from starting. Each instance has its addresses reserved, so that no access needs a check; no memory is.
const REMEDY: &str =
    "components need some 2 TiB of addresses (not of memory): lift the limit on them (`ulimit -v unlimited`)";

/// Runs components and knows those at hand.
pub struct Maker {
    shop: Arc<Shop>,
}

struct Shop {
    runtime: Runtime,
    library: Library,
    context_window_tokens: u32,
    replicas: u32,
    reports: SyncSender<Report>,
}

/// A set, parsed and digested.
#[derive(Clone)]
pub struct ParsedSet(Arc<PolicySet>);

/// Keeps a set's components at hand, whatever else comes.
pub struct Pinned(#[allow(dead_code, reason = "held, not read")] Vec<Arc<Component>>);

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
        let runtime = Runtime::new(config).map_err(|fault| match fault {
            RuntimeError::Engine(_) => format!("{fault}; {REMEDY}"),
            fault => fault.to_string(),
        })?;
        let context_window_tokens = settings.context_tokens_max;
        let replicas = settings.replicas;
        Ok(Self { shop: Arc::new(Shop { runtime, library: Library::new(), context_window_tokens, replicas, reports }) })
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
        ParsedSet::read(document).map_err(Fault::Refused)
    }

    /// Makes and tries instances of `set`, machine by machine.
    pub fn source(&self, set: &ParsedSet) -> PolicySource {
        self.first_source(set, States::new())
    }

    /// The same at the server's start: each machine's policies get their state back from `states`, once. A machine that starts anew later
    /// begins afresh, as its state may be what broke it.
    pub fn first_source(&self, set: &ParsedSet, states: States) -> PolicySource {
        let (shop, set) = (Arc::clone(&self.shop), Arc::clone(&set.0));
        let digest: Arc<str> = set.digest().to_string().into();
        let states = Mutex::new(states);
        let words = set.canonical().as_bytes().to_vec();
        let source = PolicySource::preparing(move |machine, memory: Option<&Memory>| {
            // No step between two whole states can panic.
            let resumed = states.lock().unwrap_or_else(PoisonError::into_inner).remove(&machine);
            let remembered = memory.and_then(|memory| memory.downcast_ref::<Remembered>()).or(resumed.as_ref());
            let prepared = shop.prepare(&set, machine, remembered).map_err(|faults| faults.to_string())?;
            let voice = Voice { set: Arc::clone(&digest), generation: 0, machine, reports: shop.reports.clone() };
            Ok(Box::new(Ready { prepared, voice, resumed }))
        });
        source.in_words(&words)
    }

    /// Can `set` serve at every machine of this server, all at once, and live with `states`?
    ///
    /// # Errors
    /// What is wrong with it.
    pub fn try_out(&self, set: &ParsedSet, states: &States) -> Result<(), Fault> {
        let machines = std::iter::once(Machine::Gateway).chain((0..self.shop.replicas).map(Machine::Replica));
        let prepare = |machine| {
            let prepared = self.shop.prepare(&set.0, machine, states.get(&machine));
            prepared.map_err(|faults| Fault::Refused(format!("refused at the {machine}: {faults}")))
        };
        machines.map(prepare).collect::<Result<Vec<_>, _>>().map(|_| ())
    }

    /// Keeps the components of `set` at hand.
    pub fn pin(&self, set: &ParsedSet) -> Pinned {
        Pinned(set.0.components().into_iter().filter_map(|digest| self.shop.library.get(digest)).collect())
    }

    /// What machines remember, as far as components do.
    pub fn states(&self, memories: Vec<(Machine, Option<Memory>)>) -> States {
        let remembered = |memory: Option<Memory>| Some(*memory?.downcast::<Remembered>().ok()?);
        memories.into_iter().filter_map(|(machine, memory)| Some((machine, remembered(memory)?))).collect()
    }

    /// States as bytes, at `now` of the machines and `unix_us` of the world. None when there is nothing in them.
    pub fn encode(&self, states: &States, now: Instant, unix_us: u64) -> Option<Vec<u8>> {
        saved::encode(states.iter().map(|(machine, remembered)| (*machine, remembered)), now.as_us(), unix_us)
    }

    /// States from bytes, at `unix_us`.
    ///
    /// # Errors
    /// Bytes that are none.
    pub fn decode(&self, bytes: &[u8], unix_us: u64) -> Result<States, String> {
        saved::decode(bytes, unix_us).map_err(|fault| fault.to_string())
    }
}

impl Shop {
    fn prepare(
        &self,
        set: &Arc<PolicySet>,
        machine: Machine,
        remembered: Option<&Remembered>,
    ) -> Result<Prepared, penstock_policy_wasm::PrepareFaults> {
        let workshop = Workshop {
            runtime: &self.runtime,
            library: &self.library,
            context_window_tokens: self.context_window_tokens,
        };
        let kind = match machine {
            Machine::Gateway => penstock_policy_wasm::Machine::Gateway,
            Machine::Replica(_) => penstock_policy_wasm::Machine::Replica,
        };
        Prepared::new(&workshop, set, kind, remembered.unwrap_or(&Remembered::default()))
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

    /// Reads a document without any component.
    ///
    /// # Errors
    /// Everything that is wrong with it.
    pub fn read(document: &Value) -> Result<Self, String> {
        PolicySet::from_value(document).map(|set| Self(Arc::new(set))).map_err(|faults| faults.to_string())
    }

    /// Digests of the components that it names.
    pub fn components(&self) -> Vec<String> {
        self.0.components().iter().map(Digest::to_string).collect()
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
    let Some(maker) = maker else { return "component".to_owned() };
    let component = maker.shop.library.get(digest);
    component.map_or_else(|| "not loaded".to_owned(), |component| component.manifest().name.clone())
}

/// Carries what the policies of one machine say to whoever keeps them. Never waits.
#[derive(Clone)]
struct Voice {
    set: Arc<str>,
    /// As which it sits; 0 until it does.
    generation: u64,
    machine: Machine,
    reports: SyncSender<Report>,
}

impl Voice {
    fn say(&self, from: Speaker<'_>, said: Said) {
        self.tell(from.decision, from.policy, said);
    }

    fn tell(&self, decision: Decision, policy: &str, said: Said) {
        // Left out when too much waits, or when the keeper has ended.
        let _ = self.reports.try_send(Report {
            set: Arc::clone(&self.set),
            generation: self.generation,
            machine: self.machine,
            decision: decision.name(),
            policy: policy.to_owned(),
            said,
        });
    }

    /// What became of a saved state.
    fn resumed(&self, seat: SeatSwap, remembered: &Remembered) {
        let Some(saved) = remembered.seat(seat.decision) else { return };
        let (bytes, age_ms) = (saved.snapshot.bytes.len(), saved.snapshot.elapsed_us / 1_000);
        let outcome = match seat.outcome {
            SwapOutcome::Carried(_) => "given back",
            SwapOutcome::Fresh(FreshReason::OtherPolicy) => "left, since another policy has the seat",
            SwapOutcome::Fresh(_) | SwapOutcome::Unchanged => "not taken: it starts fresh",
        };
        let words = format!("state of {bytes} bytes, {age_ms} ms old, {outcome}");
        self.tell(seat.decision, &saved.policy, Said::Resumed(words));
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
    /// What its policies remember of the process before this one.
    resumed: Option<Remembered>,
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
        let Self { prepared, mut voice, resumed } = *self;
        voice.generation = generation.0;
        let mut policies = WasmPolicies::new(prepared, generation);
        if let Some(remembered) = resumed {
            // The machine's clock begins now.
            for seat in policies.resume(&remembered, RestoreCause::Restart, Instant::ZERO) {
                voice.resumed(seat, &remembered);
            }
        }
        Box::new(Seated { policies, voice, collected: Instant::ZERO })
    }

    fn take_over(self: Box<Self>, old: Box<dyn SeatedPolicies>, generation: Generation, now: Instant) -> TakenOver {
        if !(old.as_ref() as &dyn Any).is::<Seated>() {
            return TakenOver { seated: self.seat(generation), retired: Box::new(old) };
        }
        let old: Box<dyn Any> = old;
        let mut seated = old.downcast::<Seated>().expect("its type was looked at");
        let Self { prepared, mut voice, .. } = *self;
        voice.generation = generation.0;
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
    fn lives(&self, decision: Decision) -> u64 {
        self.policies.rebuilds(decision)
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
