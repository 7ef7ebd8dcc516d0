//! What is said between whoever activates a set and the machines.

use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::mpsc::SyncSender;

use penstock_base::{Duration, Generation};

use super::seats::{Machine, Memory, PolicySource, PreparedPolicies};

/// To a machine.
pub(crate) enum PolicyOrder {
    /// Say what the seats remember.
    Recall(Answers),
    /// Hold this ready.
    Prepare(Held),
    /// Let go of what was held for this generation.
    Abort(Generation),
    /// To the gateway: this generation takes over now. To a replica: the gateway is at this generation.
    Switch(Generation),
}

/// A set that a machine holds ready.
pub(crate) struct Held {
    pub generation: Generation,
    pub set: Box<dyn PreparedPolicies>,
    /// Builds it again for a replica that starts anew.
    pub source: PolicySource,
    pub verdict: Arc<Verdict>,
    pub answers: Answers,
}

/// Whether an activation takes place: decided once, by the gateway at its step boundary or by whoever gave up on it.
#[derive(Debug, Default)]
pub(crate) struct Verdict(AtomicU8);

const OPEN: u8 = 0;
const COMMITTED: u8 = 1;
const ABORTED: u8 = 2;

impl Verdict {
    /// It takes place, unless it was given up.
    pub fn commit(&self) -> bool {
        self.0.compare_exchange(OPEN, COMMITTED, Ordering::AcqRel, Ordering::Acquire).is_ok()
    }

    /// It is given up, unless it took place.
    pub fn abort(&self) -> bool {
        self.0.compare_exchange(OPEN, ABORTED, Ordering::AcqRel, Ordering::Acquire).is_ok()
    }
}

/// Where a machine answers. Never waits: there is room for every answer to every order.
#[derive(Clone, Debug)]
pub(crate) struct Answers {
    pub machine: Machine,
    pub to: SyncSender<(Machine, Said)>,
}

impl Answers {
    pub fn say(&self, said: Said) {
        // Nobody listens any more once the activation was given up.
        let _ = self.to.try_send((self.machine, said));
    }
}

/// What a machine answers.
pub(crate) enum Said {
    /// To `Recall`. None where there is nothing to remember: the machine starts anew.
    Recalled(Option<Memory>),
    /// To `Prepare`: it holds the set. A machine that does not serve now takes it when it starts anew.
    Holds { serves: bool },
    /// The set is in its seats; how long the machine stood still for it.
    Switched { pause: Duration },
    /// It will not serve any more.
    Gone,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_verdict_falls_once() {
        let verdict = Verdict::default();
        assert!(verdict.commit());
        assert!(!verdict.abort() && !verdict.commit());
        let verdict = Verdict::default();
        assert!(verdict.abort());
        assert!(!verdict.commit());
    }
}
