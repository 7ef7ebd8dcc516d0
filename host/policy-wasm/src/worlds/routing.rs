//! Which replica runs this request?

use std::mem;

use penstock_base::Instant;
use penstock_base::limits::RANKED_MAX;
use penstock_policy_api::native::{BestCredit, OverlapLoad};
use penstock_policy_api::{
    Answer, Call, Decision, FallbackReason, PlaceAsked, Placement, Question, RoutingDeclaration, RoutingPhase,
    RoutingPolicy, RoutingQuestion, RoutingSeat, Terms,
};
use wasmtime::Store;
use wasmtime::component::InstancePre;

use super::admission::plain_request;
use super::rehearsal::Blank;
use super::{World, row_fuel};
use crate::bindings::routing as wall;
use crate::component::{Component, Declared};
use crate::fault::GuestCall;
use crate::host::Host;
use crate::instance::Bound;
use crate::living::{Living, packed};
use wall::exports::penstock::routing::routing as answered;
use wall::penstock::types::types;

/// The functions of a routing policy.
pub(crate) struct Routing(wall::RoutingPolicy);

impl Bound for Routing {
    fn bind(
        pre: &InstancePre<Host>,
        store: &mut Store<Host>,
        instance: &wasmtime::component::Instance,
    ) -> wasmtime::Result<Self> {
        wall::RoutingPolicyIndices::new(pre)?.load(store, instance).map(Self)
    }
}

impl World for Routing {
    type Declaration = RoutingDeclaration;
    type Native = dyn RoutingPolicy + Send;
    const DECISION: Decision = Decision::Routing;

    fn declaration(component: &Component) -> Option<&RoutingDeclaration> {
        match component.declared() {
            Declared::Routing(declaration) => Some(declaration),
            _ => None,
        }
    }
    fn terms(declaration: &RoutingDeclaration) -> &Terms {
        &declaration.terms
    }
    fn terms_mut(declaration: &mut RoutingDeclaration) -> &mut Terms {
        &mut declaration.terms
    }
    fn native(name: &str, _context_window_tokens: u32) -> Option<Box<Self::Native>> {
        match name {
            "overlap-load" => Some(Box::new(OverlapLoad::new())),
            "best-credit" => Some(Box::new(BestCredit::new())),
            _ => None,
        }
    }
    fn rehearse(living: &mut Living<Self>, _question: Question) -> Option<FallbackReason> {
        let request = plain_request();
        let asked = PlaceAsked { request: &request, phase: RoutingPhase::Whole };
        let blank = Blank { rows: 1 };
        RoutingSeat::new(0).ask(living, Instant::ZERO, asked, &blank, &blank).fallback
    }
}

impl RoutingPolicy for Living<Routing> {
    fn describe(&self) -> &RoutingDeclaration {
        self.declaration()
    }

    fn decide(&mut self, call: &Call, question: &RoutingQuestion<'_>, ranked: &mut Vec<u32>) -> Answer<Placement> {
        let mut scratch = mem::take(&mut self.cells);
        let rows = question.replicas.rows();
        let replicas = types::Matrix { rows: rows as u32, cells: packed(question.replicas, &mut scratch) };
        let asked = wall_call!(call);
        let request = wall_request!(question.request);
        let (phase, context) = (question.phase as u8, question.context.values);
        let answer = self.ask(GuestCall::Decide, call, row_fuel(Question::Routing, rows), |guest, store| {
            guest.0.penstock_routing_routing().call_decide(store, asked, request, phase, context, replicas)
        });
        self.cells = scratch;
        match answer {
            Err(kind) => Answer::Fault(kind),
            Ok(answered::Placement::NoOpinion) => Answer::NoOpinion,
            Ok(answered::Placement::Hold(for_us)) => Answer::Proposal(Placement::Hold { for_us }),
            Ok(answered::Placement::Place(placing)) => {
                ranked.extend(placing.ranked.iter().take(RANKED_MAX + 1));
                Answer::Proposal(Placement::Place { wait_us: placing.wait_us, colocate: placing.colocate })
            }
        }
    }
}
