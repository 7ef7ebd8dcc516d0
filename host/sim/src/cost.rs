//! How long does a step take? A sum of terms, with jitter and a factor for a slow machine.

use penstock_base::Duration;
use penstock_base::plan::Plan;
use penstock_sched::replica::StepCost;

use crate::rng::Rng;

const ONE_PPM: u64 = 1_000_000;

/// Device time of steps.
#[derive(Clone, Debug)]
pub struct CostModel {
    /// The terms.
    pub terms: StepCost,
    /// A step takes up to this much longer than the sum of its terms.
    pub jitter_ppm: u64,
}

impl CostModel {
    /// The sum of the terms for `plan`: a row of one token is a decode and reads its whole context.
    pub fn exact_ns(&self, plan: &Plan) -> u64 {
        let row_ns = |row: &penstock_base::plan::PlanRow| {
            if row.tokens == 1 {
                self.terms.decode_row_ns + self.terms.kv_token_ns * (u64::from(row.start) + 1)
            } else {
                self.terms.prefill_token_ns * u64::from(row.tokens)
            }
        };
        self.terms.base_ns + plan.rows.iter().map(row_ns).sum::<u64>()
    }

    /// Time that a machine takes that is `slow` times slower.
    pub fn time(&self, plan: &Plan, slow: u64, rng: &mut Rng) -> Duration {
        let exact = self.exact_ns(plan);
        let jitter = exact / ONE_PPM * rng.below(self.jitter_ppm + 1);
        Duration((exact + jitter) * slow.max(1))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use penstock_base::plan::{PlanRow, Task, TokenSource};
    use penstock_base::{SeqId, Slot};

    #[test]
    fn terms_add_up() {
        let terms = StepCost { base_ns: 1_000, prefill_token_ns: 100, decode_row_ns: 10, kv_token_ns: 1 };
        let row = |start, tokens| PlanRow {
            slot: Slot(0),
            seq: SeqId::default(),
            start,
            tokens,
            input: TokenSource::Known,
            drafts: 0,
            sample: true,
            adapter: 0,
            mask: 0,
            task: Task::Generate,
        };
        let plan = Plan { rows: vec![row(7, 1), row(0, 5)], ..Plan::default() };
        let model = CostModel { terms, jitter_ppm: 0 };
        // 1,000 + (10 + 8) + 500.
        assert_eq!(model.exact_ns(&plan), 1_518);
        assert_eq!(model.time(&plan, 3, &mut Rng::new(1)), Duration(4_554));
    }
}
