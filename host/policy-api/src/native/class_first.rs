//! Native fairness: importance first, in both questions.

use alloc::vec::Vec;

use crate::call::Call;
use crate::declare::{Declared, FairnessDeclaration, InContext, Terms};
use crate::matrix::{Context, Matrix};
use crate::policy::{FairnessPolicy, Policy};
use crate::proposal::{Answer, Ranking, Rest, Yielder};

use super::{order, victims};

/// `order`: class, ageing by one class each five seconds, then priority, then arrival. `victims`: the least important and cheapest to
/// compute again.
#[derive(Debug)]
pub struct ClassFirst {
    declaration: FairnessDeclaration,
    order_keys: Vec<order::Key>,
    victim_keys: Vec<victims::Key>,
}

impl Default for ClassFirst {
    fn default() -> Self {
        let victims: Vec<_> = victims::context::ALL.iter().copied().map(InContext::Own).collect();
        let declaration = FairnessDeclaration {
            terms: Terms::native("class-first"),
            order: Declared::default(),
            waiting: Declared::exactly(order::ROWS),
            victims: Declared::exactly(&victims),
            running: Declared::exactly(victims::ROWS),
        };
        Self { declaration, order_keys: Vec::new(), victim_keys: Vec::new() }
    }
}

impl ClassFirst {
    /// The policy; it has no parameters.
    pub fn new() -> Self {
        Self::default()
    }

    /// Ranks every row of `waiting` into `ranked`.
    pub(crate) fn rank(&mut self, waiting: &Matrix, ranked: &mut Vec<u32>) {
        order::rank(waiting, &mut self.order_keys, ranked);
    }
}

impl Policy for ClassFirst {
    fn terms(&self) -> &Terms {
        &self.declaration.terms
    }
}

impl FairnessPolicy for ClassFirst {
    fn describe(&self) -> &FairnessDeclaration {
        &self.declaration
    }

    fn order(
        &mut self,
        _call: &Call,
        _context: Context<'_>,
        waiting: &Matrix,
        ranked: &mut Vec<u32>,
    ) -> Answer<Ranking> {
        self.rank(waiting, ranked);
        if ranked.is_empty() {
            return Answer::NoOpinion;
        }
        Answer::Proposal(Ranking { rest: Rest::Append, tpot_target_us: u32::MAX })
    }

    fn victims(
        &mut self,
        _call: &Call,
        context: Context<'_>,
        running: &Matrix,
        yielders: &mut Vec<Yielder>,
    ) -> Answer<()> {
        victims::choose(context, running, &mut self.victim_keys, yielders);
        if yielders.is_empty() { Answer::NoOpinion } else { Answer::Proposal(()) }
    }
}
