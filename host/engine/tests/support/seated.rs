//! Seats with components in them, as a server fills them: sets from documents, instances made and tried for each machine, and what policies
//! say handed to whoever listens.

use std::any::Any;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex};

use penstock_base::{Generation, Instant};
use penstock_engine::{Machine, Memory, PolicySource, PreparedPolicies, SeatedPolicies, TakenOver};
use penstock_policy_api::validate::Malformed;
use penstock_policy_api::{
    AdmissionPolicy, Decision, EvictionPolicy, FairnessPolicy, FallbackReason, OverloadPolicy, Policies, RoutingPolicy,
};
use penstock_policy_wasm::{
    Component, Digest, Happening, Library, LogLine, PolicySet, PolicySink, Prepared, Remembered, Retired, Runtime,
    RuntimeConfig, Speaker, WasmPolicies, Workshop,
};

/// Words that may wait for whoever listens; further ones are lost, as they are in a server.
const WORDS_MAX: usize = 4_096;

/// Something that a policy did.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Word {
    pub machine: Machine,
    pub decision: Decision,
    pub policy: String,
    /// Of the component.
    pub digest: Digest,
    pub said: Said,
}

/// What it did.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Said {
    /// A call failed, or its answer was refused: the words.
    Failed(String),
    Quarantined,
}

/// Makes sets.
#[derive(Clone)]
pub struct Shop(Arc<Inner>);

struct Inner {
    runtime: Runtime,
    library: Library,
    words: SyncSender<Word>,
    /// Components of sets that may come back: a library keeps what is in use.
    pinned: Mutex<Vec<Arc<Component>>>,
    pauses: Arc<Mutex<Vec<Pause>>>,
}

/// One swap at one machine, on its thread.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Pause {
    pub machine: Machine,
    pub ns: u64,
    /// The thread lost its core on the way: what was measured is the test machine's.
    pub is_disturbed: bool,
}

/// How often this thread has had to make room for another.
fn involuntary_switches() -> u64 {
    let status = std::fs::read_to_string("/proc/thread-self/status").unwrap_or_default();
    let line = status.lines().find(|line| line.starts_with("nonvoluntary_ctxt_switches"));
    line.and_then(|line| line.split_whitespace().nth(1)?.parse().ok()).unwrap_or(0)
}

impl Shop {
    /// With a backstop that no test machine is slow enough to meet.
    pub fn open() -> (Self, Receiver<Word>) {
        let config = RuntimeConfig { backstop: std::time::Duration::from_secs(600), ..RuntimeConfig::default() };
        let runtime = Runtime::new(config).expect("the engine starts");
        let (words, heard) = sync_channel(WORDS_MAX);
        (
            Self(Arc::new(Inner {
                runtime,
                library: Library::new(),
                words,
                pinned: Mutex::default(),
                pauses: Arc::default(),
            })),
            heard,
        )
    }

    /// Loads a component, or says why not.
    pub fn load(&self, bytes: &[u8]) -> Result<Digest, String> {
        let component = Component::load(&self.0.runtime, bytes).map_err(|error| error.to_string())?;
        let digest = component.digest();
        self.0.library.add(component).expect("unused ones make room");
        Ok(digest)
    }

    /// As [`Self::load`], of one that must stay.
    pub fn load_good(&self, bytes: &[u8]) -> Digest {
        let component = Component::load(&self.0.runtime, bytes).expect("nothing is wrong with it");
        let digest = component.digest();
        self.0.pinned.lock().expect("nobody panics with it").push(Arc::clone(&component));
        self.0.library.add(component).expect("there is room");
        digest
    }

    /// The swaps since the last time.
    pub fn take_pauses(&self) -> Vec<Pause> {
        std::mem::take(&mut *self.0.pauses.lock().expect("nobody panics with it"))
    }

    pub fn instances_alive(&self) -> usize {
        self.0.runtime.instances_alive()
    }

    /// The set with these components in their seats.
    pub fn source(&self, seats: &[(Decision, Digest)]) -> PolicySource {
        let seats =
            seats.iter().map(|(seat, digest)| format!(r#""{}": {{ "policy": "sha256:{digest}" }}"#, seat.name()));
        let text = format!("{{ {} }}", seats.collect::<Vec<_>>().join(", "));
        let set = Arc::new(PolicySet::parse(&text).expect("the document is well-formed"));
        let shop = self.clone();
        PolicySource::preparing(move |machine, memory: Option<&Memory>| {
            let from = Workshop { runtime: &shop.0.runtime, library: &shop.0.library, context_window_tokens: 4_096 };
            let remembered = memory.and_then(|memory| memory.downcast_ref::<Remembered>()).cloned().unwrap_or_default();
            let kind = match machine {
                Machine::Gateway => penstock_policy_wasm::Machine::Gateway,
                Machine::Replica(_) => penstock_policy_wasm::Machine::Replica,
            };
            let prepared = Prepared::new(&from, &set, kind, &remembered).map_err(|faults| faults.to_string())?;
            let voice = Voice { machine, words: shop.0.words.clone() };
            Ok(Box::new(Ready { prepared, voice, pauses: Arc::clone(&shop.0.pauses) }))
        })
    }
}

#[derive(Clone)]
struct Voice {
    machine: Machine,
    words: SyncSender<Word>,
}

impl PolicySink for Voice {
    fn log(&mut self, _: Speaker<'_>, _: LogLine) {}
    fn lines_dropped(&mut self, _: Speaker<'_>, _: u64) {}
    fn count(&mut self, _: Speaker<'_>, _: &str, _: u64) {}
    fn counts_dropped(&mut self, _: Speaker<'_>, _: u64) {}
    fn happened(&mut self, from: Speaker<'_>, happening: Happening) {
        let said = match happening {
            Happening::Fault { failure, .. } => Said::Failed(failure.to_string()),
            Happening::Malformed(why) => Said::Failed(why.name().to_owned()),
            Happening::Quarantined { .. } => Said::Quarantined,
            Happening::Rebuilt { .. } | Happening::Reset(_) => return,
        };
        let (decision, policy, digest) = (from.decision, from.policy.to_owned(), from.component);
        // Full when nobody listens.
        let _ = self.words.try_send(Word { machine: self.machine, decision, policy, digest, said });
    }
    fn happenings_dropped(&mut self, _: Speaker<'_>, _: u64) {}
}

struct Ready {
    prepared: Prepared,
    voice: Voice,
    pauses: Arc<Mutex<Vec<Pause>>>,
}

struct Seated {
    policies: WasmPolicies,
    voice: Voice,
}

/// Heard a last time when it ends.
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
        let Self { prepared, voice, .. } = *self;
        Box::new(Seated { policies: WasmPolicies::new(prepared, generation), voice })
    }

    fn take_over(self: Box<Self>, old: Box<dyn SeatedPolicies>, generation: Generation, now: Instant) -> TakenOver {
        let old: Box<dyn Any> = old;
        let Ok(mut seated) = old.downcast::<Seated>() else { panic!("every set here is of this kind") };
        let Self { prepared, voice, pauses } = *self;
        let (switches, from) = (involuntary_switches(), std::time::Instant::now());
        let report = seated.policies.swap(prepared, generation, now);
        let ns = from.elapsed().as_nanos() as u64;
        let is_disturbed = involuntary_switches() != switches;
        pauses.lock().expect("nobody panics with it").push(Pause { machine: voice.machine, ns, is_disturbed });
        let former = std::mem::replace(&mut seated.voice, voice);
        TakenOver { seated, retired: Box::new(Leaving { retired: report.retired, voice: former }) }
    }
}

impl SeatedPolicies for Seated {
    fn between_steps(&mut self, now: Instant) {
        self.policies.between_steps(now);
        self.policies.drain(&mut self.voice);
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
