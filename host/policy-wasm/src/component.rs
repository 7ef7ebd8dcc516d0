//! Is this file a policy, and what does it ask for? Everything that can be refused is refused here, by name, before any machine sees it.

use std::fmt;
use std::sync::Arc;

use penstock_policy_api::{
    AdmissionDeclaration, Decision, DeclareError, EvictionDeclaration, FairnessDeclaration, Manifest,
    OverloadDeclaration, RoutingDeclaration, TableWanted, Terms, Wanted,
};
use wasmtime::component::InstancePre;
use wasmtime::component::types::ComponentItem;

use crate::bindings::life;
use crate::census;
use crate::digest::Digest;
use crate::fault::{Failure, plain};
use crate::host::Host;
use crate::instance;
use crate::limits::{COMPONENT_BYTES_MAX, COMPONENT_INSTANCES_MAX, FAULT_TEXT_BYTES_MAX, NAME_BYTES_MAX, REASONS_MAX};
use crate::runtime::Runtime;

/// Versions of the contract that this host takes: 0.1 with any patch.
pub const CONTRACT_VERSIONS: &str = ">=0.1.0, <0.2.0";

/// Names that a refusal lists.
const NAMES_SHOWN_MAX: usize = 16;

/// A policy's code, compiled, checked and ready for instances.
pub struct Component {
    digest: Digest,
    bytes: usize,
    origin: Origin,
    contract: String,
    pre: InstancePre<Host>,
    manifest: Manifest,
    declared: Declared,
}

/// Where the compiled code came from.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Origin {
    /// Compiled now.
    Compiled,
    /// Read from the cache, with a tag that holds.
    Cached,
}

/// A manifest, resolved for the decision that the component exports.
#[derive(Clone, Debug)]
pub(crate) enum Declared {
    Admission(AdmissionDeclaration),
    Routing(RoutingDeclaration),
    Fairness(FairnessDeclaration),
    Eviction(EvictionDeclaration),
    Overload(OverloadDeclaration),
}

/// Why a component was refused.
#[derive(Clone, PartialEq, Debug, thiserror::Error)]
pub enum LoadError {
    /// More bytes than a component may have.
    #[error("the component has {bytes} bytes, at most {limit}")]
    TooLarge {
        /// Its size.
        bytes: usize,
        /// The limit.
        limit: usize,
    },
    /// Not a component, or one that uses what this engine does not offer.
    #[error("not a component that this engine runs: {0}")]
    Invalid(String),
    /// It would make more instances than a component may.
    #[error("makes more instances than a component may: {found}, at most {limit}")]
    Instances {
        /// Instances, those of components within it included.
        found: u64,
        /// The limit.
        limit: u64,
    },
    /// It imports something else than the host interface.
    #[error("imports what is not offered: {}; a policy may import penstock:types/host {CONTRACT_VERSIONS} and nothing else", names.join(", "))]
    Import {
        /// What it imports beyond that.
        names: Vec<String>,
    },
    /// It exports no decision, or more than one, or no life cycle.
    #[error(
        "exports {found}; a policy exports penstock:types/policy and exactly one of penstock:admission/admission, penstock:routing/routing, penstock:fairness/fairness, penstock:eviction/eviction, penstock:overload/overload"
    )]
    Exports {
        /// What it exports.
        found: String,
    },
    /// It was built against a contract that this host does not speak.
    #[error("{name} is not of this host's contract, {CONTRACT_VERSIONS}")]
    Version {
        /// The interface with its version.
        name: String,
    },
    /// An export does not have the contract's types.
    #[error("does not fit the contract: {0}")]
    Shape(String),
    /// It failed while it described itself.
    #[error("failed to describe itself: {0}")]
    Describe(Failure),
    /// Its manifest is beyond a limit.
    #[error("its manifest: {0}")]
    Manifest(String),
    /// Its manifest asks for what there is not.
    #[error("its manifest: {0}")]
    Declare(DeclareError),
}

impl Component {
    /// Reads, compiles and checks a component. Takes as long as compiling takes: milliseconds for a compiled policy, seconds for an
    /// interpreter. Never call it on a thread that serves.
    pub fn load(runtime: &Runtime, bytes: &[u8]) -> Result<Arc<Self>, LoadError> {
        if bytes.len() > COMPONENT_BYTES_MAX {
            return Err(LoadError::TooLarge { bytes: bytes.len(), limit: COMPONENT_BYTES_MAX });
        }
        if let Some(found) = census::instances(bytes).filter(|found| *found > COMPONENT_INSTANCES_MAX) {
            return Err(LoadError::Instances { found, limit: COMPONENT_INSTANCES_MAX });
        }
        let digest = Digest::of(bytes);
        let (component, origin) = compiled(runtime, digest, bytes)?;
        check_imports(runtime, &component)?;
        let (decision, contract) = check_exports(runtime, &component)?;
        let pre = runtime.linker().instantiate_pre(&component).map_err(|error| LoadError::Shape(words(&error)))?;
        let manifest = instance::inspect(runtime, &pre, decision)?;
        check_manifest(&manifest)?;
        let declared = Declared::resolve(&manifest, decision).map_err(LoadError::Declare)?;
        Ok(Arc::new(Self { digest, bytes: bytes.len(), origin, contract, pre, manifest, declared }))
    }

    /// Of the component's bytes.
    pub fn digest(&self) -> Digest {
        self.digest
    }

    /// Size of the component as it was loaded.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Where its compiled code came from.
    pub fn origin(&self) -> Origin {
        self.origin
    }

    /// What it decides.
    pub fn decision(&self) -> Decision {
        self.declared.decision()
    }

    /// Version of the contract that it was built against.
    pub fn contract(&self) -> &str {
        &self.contract
    }

    /// What it says of itself.
    pub fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    /// The resolved part that all decisions share.
    pub fn terms(&self) -> &Terms {
        match &self.declared {
            Declared::Admission(declaration) => &declaration.terms,
            Declared::Routing(declaration) => &declaration.terms,
            Declared::Fairness(declaration) => &declaration.terms,
            Declared::Eviction(declaration) => &declaration.terms,
            Declared::Overload(declaration) => &declaration.terms,
        }
    }

    pub(crate) fn declared(&self) -> &Declared {
        &self.declared
    }

    pub(crate) fn pre(&self) -> &InstancePre<Host> {
        &self.pre
    }
}

impl fmt::Debug for Component {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Component")
            .field("digest", &self.digest)
            .field("decision", &self.decision())
            .field("name", &self.manifest.name)
            .finish_non_exhaustive()
    }
}

impl Declared {
    fn resolve(manifest: &Manifest, decision: Decision) -> Result<Self, DeclareError> {
        Ok(match decision {
            Decision::Admission => Self::Admission(manifest.admission()?),
            Decision::Routing => Self::Routing(manifest.routing()?),
            Decision::Fairness => Self::Fairness(manifest.fairness()?),
            Decision::Eviction => Self::Eviction(manifest.eviction()?),
            Decision::Overload => Self::Overload(manifest.overload()?),
        })
    }

    fn decision(&self) -> Decision {
        match self {
            Self::Admission(_) => Decision::Admission,
            Self::Routing(_) => Decision::Routing,
            Self::Fairness(_) => Decision::Fairness,
            Self::Eviction(_) => Decision::Eviction,
            Self::Overload(_) => Decision::Overload,
        }
    }
}

/// The compiled code, from the cache where its tag holds.
fn compiled(
    runtime: &Runtime,
    digest: Digest,
    bytes: &[u8],
) -> Result<(wasmtime::component::Component, Origin), LoadError> {
    let kept = runtime.cache().and_then(|cache| cache.get(runtime.config_digest(), digest));
    if let Some(code) = kept {
        // SAFETY: the tag in front of `code` was made with this deployment's secret over exactly these bytes, this component's digest and
        // this engine's version and settings, so they are what `serialize` of such an engine gave. The bytes were read once, before the
        // check, and are not shared.
        let component = unsafe { wasmtime::component::Component::deserialize(runtime.engine(), &code) };
        if let Ok(component) = component {
            return Ok((component, Origin::Cached));
        }
    }
    let component = wasmtime::component::Component::from_binary(runtime.engine(), bytes)
        .map_err(|error| LoadError::Invalid(words(&error)))?;
    if let Some(cache) = runtime.cache() {
        // A cache that cannot be written costs the next start its time and nothing else.
        let _kept = component.serialize().map(|code| cache.put(runtime.config_digest(), digest, &code));
    }
    Ok((component, Origin::Compiled))
}

/// A guest's name in a reason: a line of bounded length.
fn shown(name: &str) -> String {
    plain(name.to_owned(), NAME_BYTES_MAX)
}

/// The engine's words, which quote the guest's names.
fn words(error: &wasmtime::Error) -> String {
    plain(format!("{error:#}"), FAULT_TEXT_BYTES_MAX)
}

/// `name` without its version, and the version.
fn split_version(name: &str) -> (&str, Option<&str>) {
    match name.split_once('@') {
        Some((interface, version)) => (interface, Some(version)),
        None => (name, None),
    }
}

/// 0.1 with any patch, without a pre-release.
fn is_offered(version: Option<&str>) -> bool {
    let patch = version.and_then(|version| version.strip_prefix("0.1."));
    patch.is_some_and(|patch| !patch.is_empty() && patch.bytes().all(|byte| byte.is_ascii_digit()))
}

fn check_imports(runtime: &Runtime, component: &wasmtime::component::Component) -> Result<(), LoadError> {
    let engine = runtime.engine();
    let mut refused = Vec::new();
    for (name, import) in component.component_type().imports(engine) {
        let (interface, version) = split_version(name);
        let is_allowed = match &import.ty {
            ComponentItem::ComponentInstance(instance) => {
                let types_only = instance.exports(engine).all(|(_, item)| matches!(item.ty, ComponentItem::Type(_)));
                interface == "penstock:types/host" || (interface == "penstock:types/types" && types_only)
            }
            _ => false,
        };
        if !is_allowed {
            if refused.len() < NAMES_SHOWN_MAX {
                refused.push(shown(name));
            }
        } else if !is_offered(version) {
            return Err(LoadError::Version { name: shown(name) });
        }
    }
    if refused.is_empty() { Ok(()) } else { Err(LoadError::Import { names: refused }) }
}

fn check_exports(
    runtime: &Runtime,
    component: &wasmtime::component::Component,
) -> Result<(Decision, String), LoadError> {
    let ty = component.component_type();
    let mut decisions = Vec::new();
    let mut has_life = false;
    let mut found = Vec::new();
    for (name, _) in ty.exports(runtime.engine()) {
        let (interface, version) = split_version(name);
        let decision = Decision::ALL.into_iter().find(|decision| {
            interface.strip_prefix("penstock:").and_then(|rest| rest.split_once('/'))
                == Some((decision.name(), decision.name()))
        });
        if decision.is_some() || interface == "penstock:types/policy" {
            if !is_offered(version) {
                return Err(LoadError::Version { name: shown(name) });
            }
            has_life |= decision.is_none();
            decisions.extend(decision.map(|decision| (decision, version.unwrap_or_default().to_owned())));
        }
        if found.len() < NAMES_SHOWN_MAX {
            found.push(shown(name));
        }
    }
    match (decisions.pop(), decisions.pop(), has_life) {
        (Some(only), None, true) => Ok(only),
        _ => {
            let found = if found.is_empty() { "nothing".to_owned() } else { found.join(", ") };
            Err(LoadError::Exports { found })
        }
    }
}

/// Names are limited before they are looked up: a refusal quotes them.
fn check_manifest(manifest: &Manifest) -> Result<(), LoadError> {
    let refuse = |problem: String| Err(LoadError::Manifest(problem));
    for (what, text) in [("name", &manifest.name), ("version", &manifest.version)] {
        if text.is_empty() || text.len() > NAME_BYTES_MAX || text.contains(char::is_control) {
            return refuse(format!("the {what} is 1 to {NAME_BYTES_MAX} bytes without control characters"));
        }
    }
    let tables = manifest
        .tables
        .iter()
        .flat_map(|table| [&table.table].into_iter().chain(table.names.iter().map(|want| &want.name)));
    let others = manifest.facts.iter().chain(&manifest.actions).map(|want| &want.name);
    if tables.chain(others).any(|name| name.len() > NAME_BYTES_MAX || name.contains(char::is_control)) {
        return refuse(format!("a name that it asks for is at most {NAME_BYTES_MAX} bytes without control characters"));
    }
    if manifest.reasons.len() > REASONS_MAX {
        return refuse(format!("{} reasons, at most {REASONS_MAX}", manifest.reasons.len()));
    }
    let is_odd = |reason: &&String| reason.len() > NAME_BYTES_MAX || reason.contains(char::is_control);
    if manifest.reasons.iter().any(|reason| is_odd(&reason)) {
        return refuse(format!("a reason is at most {NAME_BYTES_MAX} bytes without control characters"));
    }
    Ok(())
}

/// Into the contract's words.
pub(crate) fn manifest_of(said: life::types::Manifest) -> Manifest {
    let wanted = |names: Vec<life::types::Wanted>| -> Vec<Wanted> {
        names.into_iter().map(|want| Wanted { name: want.name, required: want.required }).collect()
    };
    let tables = said.tables.into_iter().map(|table| TableWanted { table: table.table, names: wanted(table.names) });
    Manifest {
        name: said.name,
        version: said.version,
        tables: tables.collect(),
        facts: wanted(said.facts),
        actions: wanted(said.actions),
        reasons: said.reasons,
        max_rows: said.max_rows,
        state_schema: said.state_schema,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_patch_of_the_contracts_minor_is_offered() {
        for (version, offered) in [
            ("0.1.0", true),
            ("0.1.7", true),
            ("0.1.12", true),
            ("0.2.0", false),
            ("1.1.0", false),
            ("0.1.", false),
            ("0.1.0-rc.1", false),
            ("0.10.0", false),
        ] {
            assert_eq!(is_offered(Some(version)), offered, "{version}");
        }
        assert!(!is_offered(None));
    }
}
