//! How does a policy say what it is? Its manifest, from the constants of its code or from a native declaration.

use penstock_policy_api::{
    ActionKind, AdmissionDeclaration, Declarable, Declared, EvictionDeclaration, FactKind, FairnessDeclaration,
    Manifest, OverloadDeclaration, RoutingDeclaration, TableWanted, Terms, Wanted,
};

use crate::document::ParameterError;
use crate::life::Policy;

/// What the export macros need beside a decision's trait.
pub trait Load: Sized {
    /// Which names does it ask for?
    fn manifest() -> Manifest;
    /// A fresh instance with these parameters, a JSON document; the empty text stands for every default.
    fn configure(parameters: &str) -> Result<Self, ParameterError>;
}

pub(crate) fn of<P: Policy>(tables: Vec<TableWanted>) -> Manifest {
    let all = |names: &mut dyn Iterator<Item = &'static str>| {
        names.map(|name| Wanted { name: name.into(), required: true }).collect()
    };
    Manifest {
        name: P::NAME.into(),
        version: P::VERSION.into(),
        tables,
        facts: all(&mut P::FACTS.iter().map(|kind| kind.name())),
        actions: all(&mut P::ACTIONS.iter().map(|kind| kind.name())),
        reasons: P::REASONS.iter().map(|name| (*name).into()).collect(),
        max_rows: P::ROWS_MAX,
        state_schema: P::STATE_SCHEMA,
    }
}

/// Manifests of policies that were written against the host's own traits: the components that hold the native defaults.
pub mod manifest {
    use super::*;

    fn table<S: Declarable>(declared: &Declared<S>) -> TableWanted {
        let names = declared.entries().iter().flatten().map(|signal| signal.entry().name);
        let wanted = names.map(|name| Wanted { name: name.into(), required: true });
        TableWanted { table: S::table().name().into(), names: wanted.collect() }
    }

    fn with(terms: &Terms, tables: Vec<TableWanted>) -> Manifest {
        let required = |name: &str| Wanted { name: name.into(), required: true };
        let facts = FactKind::ALL.iter().filter(|kind| terms.facts.has(**kind));
        let actions = ActionKind::ALL.iter().filter(|kind| terms.actions.has(**kind));
        Manifest {
            name: terms.name.clone(),
            version: terms.version.clone(),
            tables,
            facts: facts.map(|kind| required(kind.name())).collect(),
            actions: actions.map(|kind| required(kind.name())).collect(),
            reasons: terms.reasons.clone(),
            max_rows: terms.max_rows,
            state_schema: terms.state_schema,
        }
    }

    /// Of an admission policy.
    pub fn of_admission(declaration: &AdmissionDeclaration) -> Manifest {
        with(&declaration.terms, vec![table(&declaration.context)])
    }

    /// Of a routing policy.
    pub fn of_routing(declaration: &RoutingDeclaration) -> Manifest {
        with(&declaration.terms, vec![table(&declaration.context), table(&declaration.rows)])
    }

    /// Of a fairness policy.
    pub fn of_fairness(declaration: &FairnessDeclaration) -> Manifest {
        let (order, victims) = (table(&declaration.order), table(&declaration.victims));
        with(&declaration.terms, vec![order, table(&declaration.waiting), victims, table(&declaration.running)])
    }

    /// Of an eviction policy.
    pub fn of_eviction(declaration: &EvictionDeclaration) -> Manifest {
        with(&declaration.terms, vec![table(&declaration.context), table(&declaration.rows)])
    }

    /// Of an overload policy.
    pub fn of_overload(declaration: &OverloadDeclaration) -> Manifest {
        let (classes, replicas) = (table(&declaration.rows.classes), table(&declaration.rows.replicas));
        with(&declaration.terms, vec![table(&declaration.context), classes, replicas])
    }
}
