//! Native routing by time: the replica that would have the prompt computed first, waiting for its credit when that is worth it.

use alloc::vec::Vec;

use penstock_base::limits::RANKED_MAX;

use crate::call::Call;
use crate::declare::{Declaration, Declared, RoutingDeclaration, Terms};
use crate::matrix::Matrix;
use crate::policy::{Policy, RoutingPolicy, RoutingQuestion};
use crate::proposal::{Answer, Placement};
use crate::sat;

use super::positions;

positions! { at: ReplicaSignal {
    ID = ReplicaId,
    EST_CREDIT = EstCreditUs,
    EST_PREFILL = EstPrefillUs,
    INFLIGHT = InflightRequests,
} }

/// Ranks by time until credit plus time to compute the uncached prompt; waits as long as the best row's credit takes.
#[derive(Debug)]
pub struct BestCredit {
    declaration: RoutingDeclaration,
    keys: Vec<Key>,
}

/// Smaller is better; the row makes it total.
type Key = (u64, u64, u64, u32);

impl Default for BestCredit {
    fn default() -> Self {
        let terms = Terms::native("best-credit");
        let declaration = Declaration { terms, context: Declared::default(), rows: Declared::exactly(at::ALL) };
        Self { declaration, keys: Vec::new() }
    }
}

impl BestCredit {
    /// The policy; it has no parameters.
    pub fn new() -> Self {
        Self::default()
    }
}

/// Time until the prompt would be computed in `row`.
fn ready_us(replicas: &Matrix, row: usize) -> u64 {
    sat::add(replicas.get(row, at::EST_CREDIT), replicas.get(row, at::EST_PREFILL))
}

impl Policy for BestCredit {
    fn terms(&self) -> &Terms {
        &self.declaration.terms
    }
}

impl RoutingPolicy for BestCredit {
    fn describe(&self) -> &RoutingDeclaration {
        &self.declaration
    }

    fn decide(&mut self, _call: &Call, asked: &RoutingQuestion<'_>, ranked: &mut Vec<u32>) -> Answer<Placement> {
        let replicas = asked.replicas;
        self.keys.clear();
        self.keys.extend((0..replicas.rows()).map(|row| {
            (ready_us(replicas, row), replicas.get(row, at::INFLIGHT), replicas.get(row, at::ID), row as u32)
        }));
        self.keys.sort_unstable();
        ranked.extend(self.keys.iter().take(RANKED_MAX).map(|key| key.3));
        // An unknown time is no reason to wait.
        let wait = match ranked.first().map(|best| replicas.get(*best as usize, at::EST_CREDIT)) {
            None | Some(u64::MAX) => 0,
            Some(known) => u32::try_from(known).unwrap_or(u32::MAX),
        };
        Answer::Proposal(Placement::Place { wait_us: wait, colocate: false })
    }
}
