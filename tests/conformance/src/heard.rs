//! What did a policy answer, before anybody checked it? Stands between a seat and its policy and writes every proposal down as bytes.

use penstock_base::codec::Writer;
use penstock_policy_api::{
    Action, AdmissionDeclaration, AdmissionPolicy, Answer, Call, Context, EvictionDeclaration, EvictionPolicy, Fact,
    FairnessDeclaration, FairnessPolicy, FaultKind, Kept, Matrix, OverloadDeclaration, OverloadPolicy,
    OverloadQuestion, Placement, Policy, Ranking, Rest, RestoreError, RestoreInfo, RoutingDeclaration, RoutingPolicy,
    RoutingQuestion, Stance, Terms, Verdict, Worth, Yielder,
};

/// A policy that is overheard.
pub(crate) struct Heard<'a, P: ?Sized> {
    pub policy: &'a mut P,
    pub out: &'a mut Writer,
}

/// Writes how it was answered; a proposal's fields follow. An empty proposal and none are the same to the contract, not to a reader of
/// bytes, so `is_silent` makes them the same here.
fn heard<T: Copy>(out: &mut Writer, answer: &Answer<T>, is_silent: bool, fields: impl FnOnce(&mut Writer, T)) {
    match answer {
        Answer::Proposal(_) if is_silent => out.u8(0),
        Answer::NoOpinion => out.u8(0),
        Answer::Proposal(proposal) => {
            out.u8(1);
            fields(out, *proposal);
        }
        Answer::Fault(kind) => out.u8(2 + *kind as u8),
    }
}

impl<P: Policy + ?Sized> Policy for Heard<'_, P> {
    fn terms(&self) -> &Terms {
        self.policy.terms()
    }
    fn observe(&mut self, facts: &[Fact]) -> Result<(), FaultKind> {
        self.policy.observe(facts)
    }
    fn save(&mut self, out: &mut Writer) -> Result<(), FaultKind> {
        self.policy.save(out)
    }
    fn restore(&mut self, info: &RestoreInfo, state: &[u8]) -> Result<Kept, RestoreError> {
        self.policy.restore(info, state)
    }
}

impl<P: AdmissionPolicy + ?Sized> AdmissionPolicy for Heard<'_, P> {
    fn describe(&self) -> &AdmissionDeclaration {
        self.policy.describe()
    }
    fn decide(
        &mut self,
        call: &Call,
        request: &penstock_policy_api::RequestRecord,
        context: Context<'_>,
    ) -> Answer<Verdict> {
        let answer = self.policy.decide(call, request, context);
        heard(self.out, &answer, false, |out, verdict| match verdict {
            Verdict::Admit { reserve_output_tokens, class_rank } => {
                out.u8(0);
                out.u32(reserve_output_tokens);
                out.u8(class_rank);
            }
            Verdict::Defer { for_us } => {
                out.u8(1);
                out.u32(for_us);
            }
            Verdict::Degrade { max_output_tokens, reserve_output_tokens, class_rank } => {
                out.u8(2);
                out.u32(max_output_tokens);
                out.u32(reserve_output_tokens);
                out.u8(class_rank);
            }
            Verdict::Reject { reason, retry_after_ms } => {
                out.u8(3);
                out.u16(reason);
                out.u32(retry_after_ms);
            }
        });
        answer
    }
}

impl<P: RoutingPolicy + ?Sized> RoutingPolicy for Heard<'_, P> {
    fn describe(&self) -> &RoutingDeclaration {
        self.policy.describe()
    }
    fn decide(&mut self, call: &Call, asked: &RoutingQuestion<'_>, ranked: &mut Vec<u32>) -> Answer<Placement> {
        let answer = self.policy.decide(call, asked, ranked);
        let is_silent = matches!(answer, Answer::Proposal(Placement::Place { .. })) && ranked.is_empty();
        heard(self.out, &answer, is_silent, |out, placement| match placement {
            Placement::Place { wait_us, colocate } => {
                out.u8(0);
                out.list(ranked.iter(), |out, row| out.u32(*row));
                out.u32(wait_us);
                out.bool(colocate);
            }
            Placement::Hold { for_us } => {
                out.u8(1);
                out.u32(for_us);
            }
        });
        answer
    }
}

impl<P: FairnessPolicy + ?Sized> FairnessPolicy for Heard<'_, P> {
    fn describe(&self) -> &FairnessDeclaration {
        self.policy.describe()
    }
    fn order(&mut self, call: &Call, context: Context<'_>, waiting: &Matrix, ranked: &mut Vec<u32>) -> Answer<Ranking> {
        let answer = self.policy.order(call, context, waiting, ranked);
        let is_silent = matches!(answer, Answer::Proposal(ranking)
            if penstock_policy_api::validate::is_silent(ranking, ranked));
        heard(self.out, &answer, is_silent, |out, ranking| {
            out.list(ranked.iter(), |out, row| out.u32(*row));
            out.bool(ranking.rest == Rest::Keep);
            out.u32(ranking.tpot_target_us);
        });
        answer
    }
    fn victims(
        &mut self,
        call: &Call,
        context: Context<'_>,
        running: &Matrix,
        yielders: &mut Vec<Yielder>,
    ) -> Answer<()> {
        let answer = self.policy.victims(call, context, running, yielders);
        heard(self.out, &answer, yielders.is_empty(), |out, ()| {
            out.list(yielders.iter(), |out, yielder| {
                out.u32(yielder.row);
                out.u8(yielder.how);
            });
        });
        answer
    }
}

impl<P: EvictionPolicy + ?Sized> EvictionPolicy for Heard<'_, P> {
    fn describe(&self) -> &EvictionDeclaration {
        self.policy.describe()
    }
    fn decide(&mut self, call: &Call, context: Context<'_>, runs: &Matrix, worths: &mut Vec<Worth>) -> Answer<()> {
        let answer = self.policy.decide(call, context, runs, worths);
        heard(self.out, &answer, worths.is_empty(), |out, ()| {
            out.list(worths.iter(), |out, worth| {
                out.u64(worth.price);
                out.u8(worth.to);
            });
        });
        answer
    }
}

impl<P: OverloadPolicy + ?Sized> OverloadPolicy for Heard<'_, P> {
    fn describe(&self) -> &OverloadDeclaration {
        self.policy.describe()
    }
    fn decide(&mut self, call: &Call, asked: &OverloadQuestion<'_>, actions: &mut Vec<Action>) -> Answer<Stance> {
        let answer = self.policy.decide(call, asked, actions);
        heard(self.out, &answer, false, |out, stance| {
            out.u8(stance.level);
            out.u32(stance.hold_us);
            out.list(actions.iter(), |out, action| {
                out.u16(action.what);
                out.u8(action.class_rank);
                out.u64(action.amount);
            });
        });
        answer
    }
}
