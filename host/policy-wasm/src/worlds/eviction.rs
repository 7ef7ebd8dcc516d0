//! What is each cached run worth?

use std::mem;

use penstock_base::Instant;
use penstock_policy_api::native::Lru;
use penstock_policy_api::{
    Answer, Call, Context, Decision, EvictionDeclaration, EvictionPolicy, EvictionSeat, FallbackReason, Matrix,
    Question, Terms, Worth,
};
use wasmtime::Store;
use wasmtime::component::{Instance, InstancePre};

use super::rehearsal::Blank;
use super::{World, row_fuel};
use crate::bindings::eviction as wall;
use crate::component::{Component, Declared};
use crate::fault::GuestCall;
use crate::host::Host;
use crate::instance::Bound;
use crate::living::{Living, packed};
use wall::penstock::types::types;

/// The functions of an eviction policy.
pub(crate) struct Eviction(wall::EvictionPolicy);

impl Bound for Eviction {
    fn bind(pre: &InstancePre<Host>, store: &mut Store<Host>, instance: &Instance) -> wasmtime::Result<Self> {
        wall::EvictionPolicyIndices::new(pre)?.load(store, instance).map(Self)
    }
}

impl World for Eviction {
    type Declaration = EvictionDeclaration;
    type Native = dyn EvictionPolicy + Send;
    const DECISION: Decision = Decision::Eviction;

    fn declaration(component: &Component) -> Option<&EvictionDeclaration> {
        match component.declared() {
            Declared::Eviction(declaration) => Some(declaration),
            _ => None,
        }
    }
    fn terms(declaration: &EvictionDeclaration) -> &Terms {
        &declaration.terms
    }
    fn terms_mut(declaration: &mut EvictionDeclaration) -> &mut Terms {
        &mut declaration.terms
    }
    fn native(name: &str, _context_window_tokens: u32) -> Option<Box<Self::Native>> {
        match name {
            "lru" => Some(Box::new(Lru::new())),
            _ => None,
        }
    }
    fn rehearse(living: &mut Living<Self>, _question: Question) -> Option<FallbackReason> {
        let blank = Blank { rows: 1 };
        EvictionSeat::new(0).ask(living, Instant::ZERO, &blank, &blank, &mut Vec::new()).fallback
    }
}

impl EvictionPolicy for Living<Eviction> {
    fn describe(&self) -> &EvictionDeclaration {
        self.declaration()
    }

    fn decide(&mut self, call: &Call, context: Context<'_>, runs: &Matrix, worths: &mut Vec<Worth>) -> Answer<()> {
        let mut scratch = mem::take(&mut self.cells);
        let rows = runs.rows();
        let cells = types::Matrix { rows: rows as u32, cells: packed(runs, &mut scratch) };
        let asked = wall_call!(call);
        let answer = self.ask(GuestCall::Decide, call, row_fuel(Question::Eviction, rows), |guest, store| {
            guest.0.penstock_eviction_eviction().call_decide(store, asked, context.values, cells)
        });
        self.cells = scratch;
        match answer {
            Err(kind) => Answer::Fault(kind),
            Ok(priced) if priced.is_empty() => Answer::NoOpinion,
            Ok(priced) => {
                worths.extend(priced.iter().take(rows + 1).map(|run| Worth { price: run.price, to: run.to }));
                Answer::Proposal(())
            }
        }
    }
}
