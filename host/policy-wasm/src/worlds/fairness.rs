//! Whose request is placed next, and who gives KV back?

use std::mem;

use penstock_base::Instant;
use penstock_policy_api::native::ClassFirst;
use penstock_policy_api::{
    Answer, Call, Context, Decision, FairnessDeclaration, FairnessPolicy, FallbackReason, Matrix, OrderSeat, Question,
    Ranking, Rest, Terms, VictimsSeat, Yielder,
};
use wasmtime::Store;
use wasmtime::component::{Instance, InstancePre};

use super::rehearsal::Blank;
use super::{World, row_fuel};
use crate::bindings::fairness as wall;
use crate::component::{Component, Declared};
use crate::fault::GuestCall;
use crate::host::Host;
use crate::instance::Bound;
use crate::living::{Living, packed};
use wall::exports::penstock::fairness::fairness as answered;
use wall::penstock::types::types;

/// The functions of a fairness policy.
pub(crate) struct Fairness(wall::FairnessPolicy);

impl Bound for Fairness {
    fn bind(pre: &InstancePre<Host>, store: &mut Store<Host>, instance: &Instance) -> wasmtime::Result<Self> {
        wall::FairnessPolicyIndices::new(pre)?.load(store, instance).map(Self)
    }
}

impl World for Fairness {
    type Declaration = FairnessDeclaration;
    type Native = dyn FairnessPolicy + Send;
    const DECISION: Decision = Decision::Fairness;

    fn declaration(component: &Component) -> Option<&FairnessDeclaration> {
        match component.declared() {
            Declared::Fairness(declaration) => Some(declaration),
            _ => None,
        }
    }
    fn terms(declaration: &FairnessDeclaration) -> &Terms {
        &declaration.terms
    }
    fn terms_mut(declaration: &mut FairnessDeclaration) -> &mut Terms {
        &mut declaration.terms
    }
    fn native(name: &str, _context_window_tokens: u32) -> Option<Box<Self::Native>> {
        match name {
            "class-first" => Some(Box::new(ClassFirst::new())),
            _ => None,
        }
    }
    fn rehearse(living: &mut Living<Self>, question: Question) -> Option<FallbackReason> {
        let blank = Blank { rows: 1 };
        if question == Question::Victims {
            VictimsSeat::new(0).ask(living, Instant::ZERO, &blank, &blank, &mut Vec::new()).fallback
        } else {
            OrderSeat::new(0).ask(living, Instant::ZERO, &blank, &blank, &mut Vec::new()).fallback
        }
    }
}

impl FairnessPolicy for Living<Fairness> {
    fn describe(&self) -> &FairnessDeclaration {
        self.declaration()
    }

    fn order(&mut self, call: &Call, context: Context<'_>, waiting: &Matrix, ranked: &mut Vec<u32>) -> Answer<Ranking> {
        let mut scratch = mem::take(&mut self.cells);
        let rows = waiting.rows();
        let cells = types::Matrix { rows: rows as u32, cells: packed(waiting, &mut scratch) };
        let asked = wall_call!(call);
        let answer = self.ask(GuestCall::Order, call, row_fuel(Question::Order, rows), |guest, store| {
            guest.0.penstock_fairness_fairness().call_order(store, asked, context.values, cells)
        });
        self.cells = scratch;
        match answer {
            Err(kind) => Answer::Fault(kind),
            Ok(ranking) => {
                ranked.extend(ranking.ranked.iter().take(rows + 1));
                let rest = match ranking.rest {
                    answered::Rest::Append => Rest::Append,
                    answered::Rest::Keep => Rest::Keep,
                };
                Answer::Proposal(Ranking { rest, tpot_target_us: ranking.tpot_target_us })
            }
        }
    }

    fn victims(
        &mut self,
        call: &Call,
        context: Context<'_>,
        running: &Matrix,
        yielders: &mut Vec<Yielder>,
    ) -> Answer<()> {
        let mut scratch = mem::take(&mut self.cells);
        let rows = running.rows();
        let cells = types::Matrix { rows: rows as u32, cells: packed(running, &mut scratch) };
        let asked = wall_call!(call);
        let answer = self.ask(GuestCall::Victims, call, row_fuel(Question::Victims, rows), |guest, store| {
            guest.0.penstock_fairness_fairness().call_victims(store, asked, context.values, cells)
        });
        self.cells = scratch;
        match answer {
            Err(kind) => Answer::Fault(kind),
            Ok(named) if named.is_empty() => Answer::NoOpinion,
            Ok(named) => {
                yielders.extend(named.iter().take(rows + 1).map(|named| Yielder { row: named.row, how: named.how }));
                Answer::Proposal(())
            }
        }
    }
}
