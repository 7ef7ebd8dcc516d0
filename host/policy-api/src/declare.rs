//! Which signals, facts and actions one policy asked for by name, resolved once at load.

use alloc::string::{String, ToString};
use alloc::vec::Vec;
use core::fmt::{self, Debug};

use penstock_base::limits::SIGNALS_MAX;

use crate::fact::FactSet;
use crate::generated::{
    ActionKind, AdmissionSignal, ClassSignal, CommonSignal, EvictionSignal, FactKind, OrderSignal, OverloadSignal,
    ReplicaSignal, RoutingSignal, RunSignal, RunningSignal, Table, VictimsSignal, WaitingSignal,
};
use crate::question::{Decision, Question};
use crate::signal::{Signal, SignalInfo};

/// A name that a policy asks for.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Wanted {
    /// As the registry spells it.
    pub name: String,
    /// An unknown required name refuses the policy; an unknown optional one reads as unknown.
    pub required: bool,
}

/// The names asked for of one table.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct TableWanted {
    /// The table's name.
    pub table: String,
    /// In the order the values are passed.
    pub names: Vec<Wanted>,
}

/// What a policy says of itself, in words.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Manifest {
    /// Its name.
    pub name: String,
    /// Its version.
    pub version: String,
    /// Signals, by table. A table that is absent passes nothing.
    pub tables: Vec<TableWanted>,
    /// Fact kinds.
    pub facts: Vec<Wanted>,
    /// Overload actions.
    pub actions: Vec<Wanted>,
    /// Names of its own refusal reasons; the first is reason 16.
    pub reasons: Vec<String>,
    /// Most rows it takes; 0 is the host's window.
    pub max_rows: u32,
    /// Version of its saved state.
    pub state_schema: u32,
}

/// A signal of a question's context: its own table, or the common one.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum InContext<S> {
    /// Of table `common`.
    Common(CommonSignal),
    /// Of the question's own table.
    Own(S),
}

/// What can stand in a declaration.
pub trait Declarable: Copy + Eq + Debug + 'static {
    /// The signal of that name, as offered with `question`.
    fn parse(name: &str, question: Question) -> Option<Self>;
    /// Its row of the registry.
    fn entry(self) -> &'static SignalInfo;
    /// Is it the mask of known values, which the host computes?
    fn is_known_mask(self) -> bool;
    /// The table it is declared under.
    fn table() -> Table;
    /// All names offered with `question`.
    fn names(question: Question) -> Vec<&'static str>;
}

fn offered<S: Signal>(signal: S, question: Question) -> bool {
    question == Question::Routing || !signal.info().routing_only
}

impl<S: Signal> Declarable for S {
    fn parse(name: &str, question: Question) -> Option<Self> {
        S::from_name(name).filter(|signal| offered(*signal, question))
    }
    fn entry(self) -> &'static SignalInfo {
        self.info()
    }
    fn is_known_mask(self) -> bool {
        S::KNOWN_MASK == Some(self)
    }
    fn table() -> Table {
        S::TABLE
    }
    fn names(question: Question) -> Vec<&'static str> {
        S::ALL.iter().filter(|signal| offered(**signal, question)).map(|signal| signal.name()).collect()
    }
}

impl<S: Signal> Declarable for InContext<S> {
    fn parse(name: &str, _question: Question) -> Option<Self> {
        S::from_name(name).map(Self::Own).or_else(|| CommonSignal::from_name(name).map(Self::Common))
    }
    fn entry(self) -> &'static SignalInfo {
        match self {
            Self::Common(signal) => signal.info(),
            Self::Own(signal) => signal.info(),
        }
    }
    fn is_known_mask(self) -> bool {
        self == Self::Common(CommonSignal::KnownMask)
    }
    fn table() -> Table {
        S::TABLE
    }
    fn names(question: Question) -> Vec<&'static str> {
        let mut names = <S as Declarable>::names(question);
        names.extend(CommonSignal::ALL.iter().map(|signal| signal.name()));
        names
    }
}

/// A resolved list of names, in the order their values are passed. An entry without a signal is an optional name that this host does
/// not know: it reads 0 and its mask bit is clear.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Declared<S> {
    entries: Vec<Option<S>>,
}

impl<S> Default for Declared<S> {
    fn default() -> Self {
        Self { entries: Vec::new() }
    }
}

impl<S: Declarable> Declared<S> {
    /// Exactly these signals, as the native policies declare them.
    ///
    /// # Panics
    /// With more than [`SIGNALS_MAX`] of them: a fault of the code that lists them.
    pub fn exactly(signals: &[S]) -> Self {
        assert!(signals.len() <= SIGNALS_MAX, "a declaration is bounded");
        Self { entries: signals.iter().copied().map(Some).collect() }
    }

    /// Resolves names. `question` decides which signals of a shared table are offered.
    pub fn resolve(wanted: &[Wanted], question: Question) -> Result<Self, DeclareError> {
        let table = S::table().name();
        if wanted.len() > SIGNALS_MAX {
            return Err(DeclareError::TooMany { table, count: wanted.len() });
        }
        let mut entries = Vec::with_capacity(wanted.len());
        for want in wanted {
            let signal = S::parse(&want.name, question);
            if signal.is_none() && want.required {
                return Err(DeclareError::unknown(table, &want.name, S::names(question)));
            }
            entries.push(signal);
        }
        Ok(Self { entries })
    }

    /// One entry a declared name.
    pub fn entries(&self) -> &[Option<S>] {
        &self.entries
    }

    /// Number of declared names.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Nothing declared?
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Where the values of `signal` are passed.
    pub fn position(&self, signal: S) -> Option<usize> {
        self.entries.iter().position(|entry| *entry == Some(signal))
    }

    /// Is the mask of known values wanted?
    pub fn wants_mask(&self) -> bool {
        self.entries.iter().flatten().any(|signal| signal.is_known_mask())
    }
}

/// The part of a declaration that all decisions share.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Terms {
    /// Name, for people.
    pub name: String,
    /// Version, for people.
    pub version: String,
    /// Facts it wants to be told.
    pub facts: FactSet,
    /// Actions it may name.
    pub actions: ActionSet,
    /// Names of its own refusal reasons; the first is reason 16.
    pub reasons: Vec<String>,
    /// Most rows it takes; 0 is the host's window.
    pub max_rows: u32,
    /// Version of its saved state.
    pub state_schema: u32,
}

impl Terms {
    /// Terms of a native policy: no facts, no reasons, the host's window.
    pub fn native(name: &str) -> Self {
        Self { name: name.to_string(), version: "native".to_string(), ..Self::default() }
    }

    /// The window to offer, given the host's own.
    pub fn window(&self, host_rows: usize) -> usize {
        if self.max_rows == 0 { host_rows } else { host_rows.min(self.max_rows as usize) }
    }

    fn resolve(manifest: &Manifest, decision: Decision) -> Result<Self, DeclareError> {
        let mut facts = FactSet::NONE;
        for want in &manifest.facts {
            match FactKind::from_name(&want.name).filter(|kind| kind.goes_to().contains(&decision)) {
                Some(kind) => facts = facts.with(kind),
                None if want.required => {
                    let kinds = FactKind::ALL.iter().filter(|kind| kind.goes_to().contains(&decision));
                    return Err(DeclareError::unknown("facts", &want.name, kinds.map(|kind| kind.name()).collect()));
                }
                None => {}
            }
        }
        let mut actions = ActionSet::NONE;
        for want in &manifest.actions {
            match ActionKind::from_name(&want.name) {
                Some(kind) => actions = actions.with(kind),
                None if want.required => {
                    let names = ActionKind::ALL.iter().map(|kind| kind.name()).collect();
                    return Err(DeclareError::unknown("actions", &want.name, names));
                }
                None => {}
            }
        }
        Ok(Self {
            name: manifest.name.clone(),
            version: manifest.version.clone(),
            facts,
            actions,
            reasons: manifest.reasons.clone(),
            max_rows: manifest.max_rows,
            state_schema: manifest.state_schema,
        })
    }
}

/// A set of overload actions.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct ActionSet(u64);

impl ActionSet {
    /// No action.
    pub const NONE: Self = Self(0);

    /// Every action there is.
    pub fn all() -> Self {
        ActionKind::ALL.iter().fold(Self::NONE, |set, kind| set.with(*kind))
    }

    /// One action more. Codes are below 64, which the generator checks.
    #[must_use]
    pub const fn with(self, kind: ActionKind) -> Self {
        Self(self.0 | 1 << kind.code())
    }

    /// Is it in the set?
    pub const fn has(self, kind: ActionKind) -> bool {
        self.0 & 1 << kind.code() != 0
    }
}

impl ActionKind {
    /// The number on the wall.
    pub const fn code(self) -> u16 {
        self as u16
    }

    /// The value of [`Self::code`].
    pub fn from_code(code: u16) -> Option<Self> {
        Self::ALL.iter().copied().find(|kind| kind.code() == code)
    }

    /// The action of that name.
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.iter().copied().find(|kind| kind.name() == name)
    }
}

/// What one policy asked for: terms, context names, row names.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Declaration<C, R> {
    /// Identity, facts, limits.
    pub terms: Terms,
    /// Context names.
    pub context: Declared<InContext<C>>,
    /// Row names; `()` where there are no rows.
    pub rows: R,
}

/// Admission has no rows.
pub type AdmissionDeclaration = Declaration<AdmissionSignal, ()>;
/// Routing looks at replicas.
pub type RoutingDeclaration = Declaration<RoutingSignal, Declared<ReplicaSignal>>;
/// Eviction looks at runs.
pub type EvictionDeclaration = Declaration<EvictionSignal, Declared<RunSignal>>;
/// Overload looks at classes and replicas.
pub type OverloadDeclaration = Declaration<OverloadSignal, OverloadRows>;

/// Row names of an overload policy.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct OverloadRows {
    /// Of the class matrix.
    pub classes: Declared<ClassSignal>,
    /// Of the replica matrix.
    pub replicas: Declared<ReplicaSignal>,
}

/// What a fairness policy asked for, of both its questions.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct FairnessDeclaration {
    /// Identity, facts, limits.
    pub terms: Terms,
    /// Context names of `order`.
    pub order: Declared<InContext<OrderSignal>>,
    /// Row names of `order`.
    pub waiting: Declared<WaitingSignal>,
    /// Context names of `victims`.
    pub victims: Declared<InContext<VictimsSignal>>,
    /// Row names of `victims`.
    pub running: Declared<RunningSignal>,
}

impl Manifest {
    fn of<S: Declarable>(&self, question: Question) -> Result<Declared<S>, DeclareError> {
        let table = self.tables.iter().find(|table| table.table == S::table().name());
        Declared::resolve(table.map_or(&[][..], |table| &table.names), question)
    }

    fn only(&self, tables: &[Table]) -> Result<(), DeclareError> {
        for (at, wanted) in self.tables.iter().enumerate() {
            let known = tables.iter().any(|table| table.name() == wanted.table);
            if !known {
                return Err(DeclareError::unknown(
                    "tables",
                    &wanted.table,
                    tables.iter().map(|table| table.name()).collect(),
                ));
            }
            if self.tables.iter().take(at).any(|other| other.table == wanted.table) {
                return Err(DeclareError::TableTwice { table: wanted.table.clone() });
            }
        }
        Ok(())
    }

    /// As an admission policy's.
    pub fn admission(&self) -> Result<AdmissionDeclaration, DeclareError> {
        self.only(&[Table::Admission])?;
        let terms = Terms::resolve(self, Decision::Admission)?;
        Ok(Declaration { terms, context: self.of(Question::Admission)?, rows: () })
    }

    /// As a routing policy's.
    pub fn routing(&self) -> Result<RoutingDeclaration, DeclareError> {
        self.only(&[Table::Routing, Table::Replica])?;
        let terms = Terms::resolve(self, Decision::Routing)?;
        Ok(Declaration { terms, context: self.of(Question::Routing)?, rows: self.of(Question::Routing)? })
    }

    /// As a fairness policy's.
    pub fn fairness(&self) -> Result<FairnessDeclaration, DeclareError> {
        self.only(&[Table::Order, Table::Waiting, Table::Victims, Table::Running])?;
        Ok(FairnessDeclaration {
            terms: Terms::resolve(self, Decision::Fairness)?,
            order: self.of(Question::Order)?,
            waiting: self.of(Question::Order)?,
            victims: self.of(Question::Victims)?,
            running: self.of(Question::Victims)?,
        })
    }

    /// As an eviction policy's.
    pub fn eviction(&self) -> Result<EvictionDeclaration, DeclareError> {
        self.only(&[Table::Eviction, Table::Run])?;
        let terms = Terms::resolve(self, Decision::Eviction)?;
        Ok(Declaration { terms, context: self.of(Question::Eviction)?, rows: self.of(Question::Eviction)? })
    }

    /// As an overload policy's.
    pub fn overload(&self) -> Result<OverloadDeclaration, DeclareError> {
        self.only(&[Table::Overload, Table::Class, Table::Replica])?;
        let terms = Terms::resolve(self, Decision::Overload)?;
        let rows = OverloadRows { classes: self.of(Question::Overload)?, replicas: self.of(Question::Overload)? };
        Ok(Declaration { terms, context: self.of(Question::Overload)?, rows })
    }
}

/// Why a manifest was refused.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum DeclareError {
    /// A required name that the table does not have.
    Unknown {
        /// The table, or `facts`, `actions`, `tables`.
        table: &'static str,
        /// The name asked for.
        name: String,
        /// The names there are.
        valid: Vec<&'static str>,
    },
    /// More names than one side of a call carries.
    TooMany {
        /// The table.
        table: &'static str,
        /// How many were asked for.
        count: usize,
    },
    /// One table listed twice.
    TableTwice {
        /// The table.
        table: String,
    },
}

impl DeclareError {
    fn unknown(table: &'static str, name: &str, valid: Vec<&'static str>) -> Self {
        Self::Unknown { table, name: name.to_string(), valid }
    }
}

impl fmt::Display for DeclareError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unknown { table, name, valid } => write!(f, "{table} has no {name}; it has {}", valid.join(", ")),
            Self::TooMany { table, count } => write!(f, "{table}: {count} names, at most {SIGNALS_MAX}"),
            Self::TableTwice { table } => write!(f, "table {table} is listed twice"),
        }
    }
}

impl core::error::Error for DeclareError {}
