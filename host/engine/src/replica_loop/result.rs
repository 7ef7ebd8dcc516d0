//! Is a computed batch what was asked for?

use penstock_base::plan::Plan;
use penstock_exec::BatchResult;

/// Does the result answer what was asked? The first thing that does not fit.
pub(super) fn faults(plan: &Plan, result: &BatchResult) -> Option<&'static str> {
    if result.batch != plan.batch {
        return Some("another batch");
    }
    if result.rows.len() != plan.rows.len() {
        return Some("another number of rows");
    }
    plan.rows.iter().zip(&result.rows).find_map(|(asked, got)| {
        if (asked.slot, asked.seq) != (got.slot, got.seq) {
            Some("a row of another sequence")
        } else if got.tokens.len() > usize::from(asked.sample) + usize::from(asked.drafts) {
            Some("more tokens than asked for")
        } else if asked.sample && got.tokens.is_empty() && !got.failed {
            Some("no token where one was asked for")
        } else {
            None
        }
    })
}
