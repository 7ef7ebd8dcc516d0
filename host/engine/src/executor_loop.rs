//! The executor's thread: steps in, results out, in order. It knows nothing of requests.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use penstock_base::limits::INFLIGHT_MAX;
use penstock_base::plan::BatchFailure;
use penstock_base::{Duration, Instant, ReplicaId};
use penstock_exec::{BatchResult, ExecError, Executor, Masks, Step};

use crate::mailbox::{Lane, Mailbox};
use crate::panics;
use crate::replica_wake::{RESULTS, ReplicaWake};
use crate::wiring::Wiring;

/// Steps in flight, and one that resets the executor after a freeze.
pub(crate) const STEPS: Lane = Lane(0);

/// Bounds of the lanes.
pub(crate) fn lanes() -> [usize; 1] {
    [INFLIGHT_MAX + 1]
}

/// One step to compute.
pub(crate) struct StepOrder {
    pub step: Step,
    /// It follows from the step before: time between the two is the host's doing, not idleness.
    pub follows: bool,
}

/// What became of a step.
pub(crate) struct StepOutcome {
    pub step: Step,
    /// The plan's operations took effect; a step that fails in `forward` changes nothing.
    pub applied: bool,
    pub result: Result<BatchResult, ExecError>,
    /// Time inside the executor.
    pub took: Duration,
    /// Time that the executor waited for this step although it followed from the last.
    pub outside: Option<Duration>,
}

/// See the module.
pub(crate) struct ExecutorLoop {
    pub wiring: Arc<Wiring>,
    pub replica: ReplicaId,
    pub executor: Box<dyn Executor>,
    pub steps: Arc<Mailbox<StepOrder>>,
}

impl ExecutorLoop {
    /// Runs until the mailbox is closed.
    pub fn run(mut self) {
        let clock = self.wiring.clock;
        let mut orders = Vec::new();
        let mut finished: Option<Instant> = None;
        let mut lost = false;
        loop {
            self.steps.take_all(&mut orders, None);
            if orders.is_empty() {
                return;
            }
            for StepOrder { step, follows } in orders.drain(..) {
                let started = clock.now();
                let (applied, result) = if lost { (false, Err(gone())) } else { self.compute(&step) };
                lost |= matches!(&result, Err(error) if error.failure == BatchFailure::Executor);
                let ended = clock.now();
                let outside = finished.filter(|_| follows).map(|finished| started.since(finished));
                finished = Some(ended);
                let outcome = StepOutcome { step, applied, result, took: ended.since(started), outside };
                let Some(mailbox) = self.wiring.replica(self.replica) else { return };
                if mailbox.try_push(RESULTS, ReplicaWake::Computed(outcome)).is_err() {
                    // Room for every step in flight is kept: only an ended loop refuses.
                    return;
                }
            }
        }
    }

    /// Whether the plan's operations took effect, and the tokens. A panic counts as the loss of the executor: what it left behind is
    /// not to be trusted.
    fn compute(&mut self, step: &Step) -> (bool, Result<BatchResult, ExecError>) {
        let executor = self.executor.as_mut();
        let mut applied = false;
        let computed = catch_unwind(AssertUnwindSafe(|| {
            executor.forward(step)?;
            applied = true;
            let mut result = BatchResult { batch: step.plan.batch, rows: Vec::with_capacity(step.plan.rows.len()) };
            executor.sample(&Masks::default(), &mut result)?;
            Ok(result)
        }));
        let result = computed.unwrap_or_else(|_| {
            let message = format!("the executor panicked at {}", panics::last_place());
            Err(ExecError { failure: BatchFailure::Executor, message })
        });
        (applied, result)
    }
}

fn gone() -> ExecError {
    ExecError { failure: BatchFailure::Executor, message: "the executor was lost in an earlier step".into() }
}

impl std::fmt::Debug for StepOutcome {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("StepOutcome")
            .field("batch", &self.step.plan.batch)
            .field("took", &self.took)
            .finish_non_exhaustive()
    }
}
