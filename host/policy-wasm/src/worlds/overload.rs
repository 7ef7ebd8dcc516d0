//! What gives way at this saturation?

use std::mem;

use penstock_base::limits::ACTIONS_MAX;
use penstock_base::{ClassRank, Instant};
use penstock_policy_api::native::Ladder;
use penstock_policy_api::validate::Standing;
use penstock_policy_api::{
    Action, Answer, Call, Decision, FallbackReason, OverloadDeclaration, OverloadPolicy, OverloadQuestion,
    OverloadSeat, OverloadSources, Question, Stance, Terms,
};
use wasmtime::Store;
use wasmtime::component::{Instance, InstancePre};

use super::rehearsal::Blank;
use super::{World, row_fuel};
use crate::bindings::overload as wall;
use crate::component::{Component, Declared};
use crate::fault::GuestCall;
use crate::host::Host;
use crate::instance::Bound;
use crate::living::{Living, packed};
use wall::penstock::types::types;

/// The functions of an overload policy.
pub(crate) struct Overload(wall::OverloadPolicy);

impl Bound for Overload {
    fn bind(pre: &InstancePre<Host>, store: &mut Store<Host>, instance: &Instance) -> wasmtime::Result<Self> {
        wall::OverloadPolicyIndices::new(pre)?.load(store, instance).map(Self)
    }
}

impl World for Overload {
    type Declaration = OverloadDeclaration;
    type Native = dyn OverloadPolicy + Send;
    const DECISION: Decision = Decision::Overload;

    fn declaration(component: &Component) -> Option<&OverloadDeclaration> {
        match component.declared() {
            Declared::Overload(declaration) => Some(declaration),
            _ => None,
        }
    }
    fn terms(declaration: &OverloadDeclaration) -> &Terms {
        &declaration.terms
    }
    fn terms_mut(declaration: &mut OverloadDeclaration) -> &mut Terms {
        &mut declaration.terms
    }
    fn native(name: &str, context_window_tokens: u32) -> Option<Box<Self::Native>> {
        match name {
            "ladder" => Some(Box::new(Ladder::new(context_window_tokens))),
            _ => None,
        }
    }
    fn rehearse(living: &mut Living<Self>, _question: Question) -> Option<FallbackReason> {
        let blank = Blank { rows: 1 };
        let classes = Blank { rows: ClassRank::COUNT };
        let sources = OverloadSources { context: &blank, classes: &classes, replicas: &blank };
        let mut actions = Vec::new();
        let standing = Standing::default();
        OverloadSeat::new(0, 0).ask(living, Instant::ZERO, &sources, standing, &mut actions).fallback
    }
}

impl OverloadPolicy for Living<Overload> {
    fn describe(&self) -> &OverloadDeclaration {
        self.declaration()
    }

    fn decide(&mut self, call: &Call, question: &OverloadQuestion<'_>, actions: &mut Vec<Action>) -> Answer<Stance> {
        let mut scratch = mem::take(&mut self.cells);
        let mut class_scratch = Vec::new();
        let (class_rows, replica_rows) = (question.classes.rows(), question.replicas.rows());
        let classes = types::Matrix { rows: class_rows as u32, cells: packed(question.classes, &mut class_scratch) };
        let replicas = types::Matrix { rows: replica_rows as u32, cells: packed(question.replicas, &mut scratch) };
        let asked = wall_call!(call);
        let fuel = row_fuel(Question::Overload, class_rows + replica_rows);
        let context = question.context.values;
        let answer = self.ask(GuestCall::Decide, call, fuel, |guest, store| {
            guest.0.penstock_overload_overload().call_decide(store, asked, context, classes, replicas)
        });
        self.cells = scratch;
        match answer {
            Err(kind) => Answer::Fault(kind),
            Ok(None) => Answer::NoOpinion,
            Ok(Some(stance)) => {
                let named = stance.actions.iter().take(ACTIONS_MAX + 1);
                actions.extend(named.map(|action| Action {
                    what: action.what,
                    class_rank: action.class_rank,
                    amount: action.amount,
                }));
                Answer::Proposal(Stance { level: stance.level, hold_us: stance.hold_us })
            }
        }
    }
}
