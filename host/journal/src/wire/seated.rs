//! What sits in the seats: what each policy declared, what it remembers, and where it came from.
//!
//! Signals stand by their names, so that a registry that has grown reads them all the same.

use penstock_base::codec::{DecodeError, Reader, Writer};
use penstock_base::{Generation, Instant};
use penstock_policy_api::{
    ActionKind, ActionSet, AdmissionDeclaration, Decision, Declarable, Declaration, Declared, EvictionDeclaration,
    FactKind, FactSet, FairnessDeclaration, FaultKind, OverloadDeclaration, OverloadRows, Policies, Policy, Question,
    RestoreCause, RestoreError, RestoreInfo, RoutingDeclaration, Terms, Wanted,
};

use super::{Decode, Encode, record};

/// A policy's memory.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct SavedSeat {
    /// Schema of the state.
    pub schema: u32,
    /// The state; none when the policy could not say.
    pub state: Option<Vec<u8>>,
}

record! { SavedSeat { schema, state } }

/// The five declarations.
#[derive(Clone, PartialEq, Eq, Debug)]
#[allow(missing_docs, reason = "named after the decisions")]
pub struct Declarations {
    pub admission: AdmissionDeclaration,
    pub routing: RoutingDeclaration,
    pub fairness: FairnessDeclaration,
    pub eviction: EvictionDeclaration,
    pub overload: OverloadDeclaration,
}

/// Everything about the policies of one machine from this point on.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Seated {
    /// Generation of the set.
    pub generation: Generation,
    /// The set, in the words of whoever makes them again; empty where nobody can.
    pub set: Vec<u8>,
    /// What they asked for.
    pub declared: Declarations,
    /// What they remember, in the order of [`Decision::ALL`].
    pub saved: Vec<SavedSeat>,
}

impl Seated {
    /// What sits there now. A policy that cannot save has no memory here.
    pub fn of(policies: &mut dyn Policies, set: &[u8]) -> Self {
        let generation = policies.generation();
        let declared = Declarations {
            admission: policies.admission().describe().clone(),
            routing: policies.routing().describe().clone(),
            fairness: policies.fairness().describe().clone(),
            eviction: policies.eviction().describe().clone(),
            overload: policies.overload().describe().clone(),
        };
        let saved = Decision::ALL.map(|decision| saved(crate::header::seat(policies, decision)));
        Self { generation, set: set.to_vec(), declared, saved: saved.into() }
    }
}

impl Seated {
    /// Gives a fresh policy the memory that it had at `now`.
    ///
    /// # Errors
    /// It does not take it, or could not say what it was.
    pub fn restore(&self, decision: Decision, now: Instant, policies: &mut dyn Policies) -> Result<(), RestoreError> {
        let saved = &self.saved[decision as usize];
        let state = saved.state.as_ref().ok_or(RestoreError::Fault(FaultKind::Rebuilding))?;
        let (schema, now_us) = (saved.schema, now.as_us());
        let cause = RestoreCause::Replay;
        let info = RestoreInfo { schema, cause, saved_now_us: now_us, now_us, elapsed_us: 0 };
        crate::header::seat(policies, decision).restore(&info, state).map(|_| ())
    }
}

fn saved(seat: &mut dyn Policy) -> SavedSeat {
    let mut state = Writer::new();
    let state = seat.save(&mut state).ok().map(|()| state.into_bytes());
    SavedSeat { schema: seat.terms().state_schema, state }
}

impl Encode for Seated {
    fn put(&self, out: &mut Writer) {
        self.generation.put(out);
        out.blob(&self.set);
        let declared = &self.declared;
        declared.admission.terms.put(out);
        names(&declared.admission.context, out);
        declared.routing.terms.put(out);
        names(&declared.routing.context, out);
        names(&declared.routing.rows, out);
        declared.fairness.terms.put(out);
        names(&declared.fairness.order, out);
        names(&declared.fairness.waiting, out);
        names(&declared.fairness.victims, out);
        names(&declared.fairness.running, out);
        declared.eviction.terms.put(out);
        names(&declared.eviction.context, out);
        names(&declared.eviction.rows, out);
        declared.overload.terms.put(out);
        names(&declared.overload.context, out);
        names(&declared.overload.rows.classes, out);
        names(&declared.overload.rows.replicas, out);
        self.saved.put(out);
    }
}

impl Decode for Seated {
    fn take(from: &mut Reader<'_>) -> Result<Self, DecodeError> {
        let generation = Generation::take(from)?;
        let set = from.blob()?.to_vec();
        let declared = Declarations {
            admission: Declaration {
                terms: Terms::take(from)?,
                context: declared(from, Question::Admission)?,
                rows: (),
            },
            routing: Declaration {
                terms: Terms::take(from)?,
                context: declared(from, Question::Routing)?,
                rows: declared(from, Question::Routing)?,
            },
            fairness: FairnessDeclaration {
                terms: Terms::take(from)?,
                order: declared(from, Question::Order)?,
                waiting: declared(from, Question::Order)?,
                victims: declared(from, Question::Victims)?,
                running: declared(from, Question::Victims)?,
            },
            eviction: Declaration {
                terms: Terms::take(from)?,
                context: declared(from, Question::Eviction)?,
                rows: declared(from, Question::Eviction)?,
            },
            overload: Declaration {
                terms: Terms::take(from)?,
                context: declared(from, Question::Overload)?,
                rows: OverloadRows {
                    classes: declared(from, Question::Overload)?,
                    replicas: declared(from, Question::Overload)?,
                },
            },
        };
        let saved: Vec<SavedSeat> = Vec::take(from)?;
        if saved.len() == Decision::ALL.len() {
            Ok(Self { generation, set, declared, saved })
        } else {
            Err(DecodeError::Invalid("seats"))
        }
    }
}

/// Names in order; an entry that the host did not know is an empty one.
fn names<S: Declarable>(declared: &Declared<S>, out: &mut Writer) {
    let name = |entry: &Option<S>| entry.map_or("", |signal| signal.entry().name);
    out.list(declared.entries().iter(), |out, entry| name(entry).put(out));
}

fn declared<S: Declarable>(from: &mut Reader<'_>, question: Question) -> Result<Declared<S>, DecodeError> {
    let names: Vec<String> = Vec::take(from)?;
    // A name of a registry that has lost it cannot be filled as it was.
    let wanted: Vec<_> = names.into_iter().map(|name| Wanted { required: !name.is_empty(), name }).collect();
    Declared::resolve(&wanted, question).map_err(|_| DecodeError::Invalid("signal"))
}

impl Encode for Terms {
    fn put(&self, out: &mut Writer) {
        self.name.as_str().put(out);
        self.version.as_str().put(out);
        let facts: Vec<u16> =
            FactKind::ALL.iter().filter(|kind| self.facts.has(**kind)).map(|kind| kind.code()).collect();
        facts.put(out);
        let actions = ActionKind::ALL.iter().filter(|kind| self.actions.has(**kind));
        actions.map(|kind| kind.code()).collect::<Vec<u16>>().put(out);
        out.list(self.reasons.iter(), |out, reason| reason.as_str().put(out));
        out.u32(self.max_rows);
        out.u32(self.state_schema);
    }
}

impl Decode for Terms {
    fn take(from: &mut Reader<'_>) -> Result<Self, DecodeError> {
        let (name, version) = (String::take(from)?, String::take(from)?);
        let mut facts = FactSet::NONE;
        for code in Vec::<u16>::take(from)? {
            facts = facts.with(FactKind::from_code(code).ok_or(DecodeError::Invalid("fact"))?);
        }
        let mut actions = ActionSet::NONE;
        for code in Vec::<u16>::take(from)? {
            actions = actions.with(ActionKind::from_code(code).ok_or(DecodeError::Invalid("action"))?);
        }
        let (reasons, max_rows, state_schema) = (Vec::take(from)?, from.u32()?, from.u32()?);
        Ok(Self { name, version, facts, actions, reasons, max_rows, state_schema })
    }
}
