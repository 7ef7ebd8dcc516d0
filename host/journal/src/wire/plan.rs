//! Plans and what comes of them.

use penstock_base::plan::{BatchFailure, Plan, PlanOp, PlanRow, RowDone, Task, TokenSource};

use super::{choice, record};

record! {
    Plan { batch, ops, rows }
    PlanRow { slot, seq, start, tokens, input, drafts, sample, adapter, mask, task }
    RowDone { seq, accepted, stop }
}

choice! { PlanOp, "plan operation" {
    0 => OpenSlot { slot, seq },
    1 => SetBlock { slot, group, index, block },
    2 => CopyBlock { from, to, tokens },
    3 => DropSlot { slot },
} }

choice! { TokenSource, "token source" {
    0 => Known,
    1 => FromBatch { batch, row },
} }

choice! { Task, "task" {
    0 => Generate,
    1 => Pool,
} }

choice! { BatchFailure, "batch failure" {
    0 => Rows,
    1 => Batch,
    2 => Executor,
} }
