//! The five decisions on the other side of the wall: how each question is put to a guest, and how its answer is read.
//!
//! Lists in an answer are cut one past the longest that can be valid, so that nonsense stays nonsense and costs no room.

/// The record of a call in a world's own types.
macro_rules! wall_call {
    ($call:expr) => {
        types::Call { number: $call.number, now_us: $call.now_us, seed: $call.seed }
    };
}

/// The record of a request in a world's own types.
macro_rules! wall_request {
    ($request:expr) => {
        types::Request {
            request_id: $request.request_id.0,
            tenant_id: $request.tenant_id,
            flow_id: $request.flow_id,
            session_id: $request.session_id,
            class_rank: $request.class_rank.get(),
            attempt: $request.attempt,
            sequences: $request.sequences,
            priority: $request.priority.0,
            input_tokens: $request.input_tokens,
            max_output_tokens: $request.max_output_tokens,
            deadline_us: $request.deadline_us,
            traits: $request.traits.0,
        }
    };
}

mod admission;
mod eviction;
mod fairness;
mod overload;
mod rehearsal;
mod routing;

use std::fmt::Debug;

use penstock_policy_api::{Decision, FallbackReason, Policy, Question, Terms};
use wasmtime::Store;
use wasmtime::component::{Instance, InstancePre};

use crate::component::Component;
use crate::host::Host;
use crate::instance::Bound;
use crate::limits::fuel_per_row;
use crate::living::Living;

pub(crate) use admission::Admission;
pub(crate) use eviction::Eviction;
pub(crate) use fairness::Fairness;
pub(crate) use overload::Overload;
pub(crate) use routing::Routing;

/// One decision: its functions, its declaration, and what sits in its seat natively.
pub(crate) trait World: Bound + Send + 'static {
    /// What a policy of this decision asked for.
    type Declaration: Clone + Debug + Send + Sync + 'static;
    /// A native policy of this decision.
    type Native: Policy + ?Sized + Send;
    const DECISION: Decision;

    /// The component's declaration, where it is of this decision.
    fn declaration(component: &Component) -> Option<&Self::Declaration>;
    fn terms(declaration: &Self::Declaration) -> &Terms;
    fn terms_mut(declaration: &mut Self::Declaration) -> &mut Terms;
    /// The host's own policy of that name, as [`crate::native_names`] lists them.
    fn native(name: &str, context_window_tokens: u32) -> Option<Box<Self::Native>>;
    /// Puts `question` once, with candidates of which nothing is known that may be unknown.
    fn rehearse(living: &mut Living<Self>, question: Question) -> Option<FallbackReason>;
}

/// Do the functions of `decision` have the contract's types?
pub(crate) fn check(
    pre: &InstancePre<Host>,
    store: &mut Store<Host>,
    instance: &Instance,
    decision: Decision,
) -> wasmtime::Result<()> {
    match decision {
        Decision::Admission => Admission::bind(pre, store, instance).map(drop),
        Decision::Routing => Routing::bind(pre, store, instance).map(drop),
        Decision::Fairness => Fairness::bind(pre, store, instance).map(drop),
        Decision::Eviction => Eviction::bind(pre, store, instance).map(drop),
        Decision::Overload => Overload::bind(pre, store, instance).map(drop),
    }
}

/// Fuel that the rows of a call add.
fn row_fuel(question: Question, rows: usize) -> u64 {
    fuel_per_row(question).saturating_mul(rows as u64)
}
