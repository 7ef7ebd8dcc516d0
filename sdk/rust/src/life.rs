//! How does a policy live? Its name, its parameters, the facts it hears and the state it keeps.

use core::fmt::Debug;

use penstock_base::codec::{DecodeError, Reader, Writer};
use penstock_policy_api::{ActionKind, Fact, FactKind, FaultKind, Kept, RestoreError, RestoreInfo, Terms};

use crate::document::{Document, ParameterError};
use crate::state;

/// What can be set without a new build.
pub trait Parameters: Clone + Debug + Sized {
    /// Reads them from a document; absent ones have defaults.
    fn read(document: &mut Document) -> Result<Self, ParameterError>;

    /// Reads a whole document and refuses what nobody asked for.
    fn parse(text: &str) -> Result<Self, ParameterError> {
        let mut document = Document::parse(text)?;
        let parameters = Self::read(&mut document)?;
        document.finish()?;
        Ok(parameters)
    }
}

/// A policy without parameters.
impl Parameters for () {
    fn read(_document: &mut Document) -> Result<Self, ParameterError> {
        Ok(())
    }
}

/// A policy, whatever it decides. Deterministic: the same calls before and the same arguments give the same result and the same bytes.
pub trait Policy: Debug + Sized {
    /// Name, for people.
    const NAME: &'static str;
    /// Version, for people: usually `env!("CARGO_PKG_VERSION")`.
    const VERSION: &'static str;
    /// Facts it hears.
    const FACTS: &'static [FactKind] = &[];
    /// Actions it may answer; overload only.
    const ACTIONS: &'static [ActionKind] = &[];
    /// Names of its own refusal reasons; the first is reason 16. Admission only.
    const REASONS: &'static [&'static str] = &[];
    /// Most rows it takes in a call; 0 is the host's window.
    const ROWS_MAX: u32 = 0;
    /// Version of its saved state, 1..=255; 0 is a policy without state.
    const STATE_SCHEMA: u32 = 0;
    /// What can be set without a new build.
    type Parameters: Parameters;

    /// A fresh instance.
    fn new(parameters: &Self::Parameters) -> Self;

    /// Hears one fact of the kinds in [`Self::FACTS`], in the order they happened.
    fn observe(&mut self, fact: &Fact) {
        let _ = fact;
    }

    /// Writes its state; the header is written already.
    fn save(&self, out: &mut Writer) {
        let _ = out;
    }

    /// Reads what [`Self::save`] wrote. Times are moved by [`RestoreInfo::moved`]. After an error a fresh instance takes its place.
    fn restore(&mut self, info: &RestoreInfo, from: &mut Reader<'_>) -> Result<(), DecodeError> {
        let _ = (info, from);
        Ok(())
    }
}

/// A policy and the parameters it was made with.
#[derive(Debug)]
pub(crate) struct Instance<P: Policy> {
    pub(crate) policy: P,
    parameters: P::Parameters,
}

impl<P: Policy> Instance<P> {
    pub(crate) fn new(parameters: P::Parameters) -> Self {
        Self { policy: P::new(&parameters), parameters }
    }

    pub(crate) fn observe(&mut self, facts: &[Fact]) -> Result<(), FaultKind> {
        facts.iter().for_each(|fact| self.policy.observe(fact));
        Ok(())
    }

    pub(crate) fn save(&self, out: &mut Writer) {
        if P::STATE_SCHEMA > 0 {
            state::open(out, P::STATE_SCHEMA, P::NAME);
            self.policy.save(out);
        }
    }

    pub(crate) fn restore(&mut self, info: &RestoreInfo, bytes: &[u8]) -> Result<Kept, RestoreError> {
        let restored = self.take(info, bytes);
        if restored.is_err() {
            self.policy = P::new(&self.parameters);
        }
        restored
    }

    fn take(&mut self, info: &RestoreInfo, bytes: &[u8]) -> Result<Kept, RestoreError> {
        if info.schema != P::STATE_SCHEMA {
            return Err(RestoreError::UnknownSchema);
        }
        if P::STATE_SCHEMA == 0 {
            return if bytes.is_empty() { Ok(Kept::Kept) } else { Err(RestoreError::Damaged) };
        }
        let mut from = Reader::new(bytes);
        let is_own = state::opened(&mut from, P::STATE_SCHEMA, P::NAME).map_err(|_| RestoreError::Damaged)?;
        if !is_own {
            return Err(RestoreError::UnknownSchema);
        }
        self.policy = P::new(&self.parameters);
        let read = self.policy.restore(info, &mut from).and_then(|()| from.finish());
        read.map(|()| Kept::Kept).map_err(|_| RestoreError::Damaged)
    }
}

/// The part of a native declaration that all decisions share.
pub(crate) fn terms<P: Policy>() -> Terms {
    Terms {
        name: P::NAME.into(),
        version: P::VERSION.into(),
        facts: penstock_policy_api::FactSet::of(P::FACTS),
        actions: P::ACTIONS.iter().fold(penstock_policy_api::ActionSet::NONE, |set, kind| set.with(*kind)),
        reasons: P::REASONS.iter().map(|name| (*name).into()).collect(),
        max_rows: P::ROWS_MAX,
        state_schema: P::STATE_SCHEMA,
    }
}
