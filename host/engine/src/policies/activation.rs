//! Leads a swap: every machine holds the next set before any machine switches, or none does.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::time::Instant as Moment;

use penstock_base::{Duration, Generation};

use super::order::{Answers, Held, PolicyOrder, Said, Verdict};
use super::seats::{Machine, Memory, PolicySource};
use crate::engine::after;
use crate::gateway_loop::{self, GatewayWake};
use crate::mailbox::PushError;
use crate::replica_wake::{self, ReplicaWake};
use crate::wiring::Wiring;

/// Answers that one machine may give to the orders of one activation.
const ANSWERS_PER_MACHINE: usize = 4;

/// An activation that took place.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Activation {
    /// The generation now in force.
    pub generation: Generation,
    /// How long each machine stood still while its seats changed.
    pub pauses: Vec<(Machine, Duration)>,
    /// Replicas that have not switched yet: they start anew, or are busy, and switch before they decide anything else for this gateway.
    pub late: Vec<Machine>,
}

/// Why an activation did not take place. The set in force before stays in force everywhere.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum ActivationError {
    /// The set cannot serve at a machine.
    #[error("refused at the {machine}: {why}")]
    Refused {
        /// Where.
        machine: Machine,
        /// In the words of whoever tried it.
        why: String,
    },
    /// A machine did not answer in time.
    #[error("the {machine} did not {what} in time")]
    TimedOut {
        /// Which.
        machine: Machine,
        /// What it was asked.
        what: &'static str,
    },
    /// Sets that left earlier have not ended yet, and a further one would let them pile up.
    #[error("{0} policy sets that left before have not ended yet")]
    Crowded(usize),
    /// The engine broke or was shut down.
    #[error("the engine does not run")]
    NotRunning,
}

impl ActivationError {
    /// As a metric label.
    pub(crate) fn outcome(&self) -> &'static str {
        match self {
            Self::Refused { .. } => "refused",
            Self::TimedOut { .. } => "timed_out",
            Self::Crowded(_) => "crowded",
            Self::NotRunning => "not_running",
        }
    }
}

/// Activates what `source` makes. Blocks until every machine that serves has switched, or the limit has passed.
pub(crate) fn activate(wiring: &Wiring, source: &PolicySource) -> Result<Activation, ActivationError> {
    let mut last = wiring.policies.activating.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    let done = Session::new(wiring).run(source, &mut last);
    let outcome = done.as_ref().map_or_else(ActivationError::outcome, |_| "activated");
    wiring.metrics.policy_activation(outcome);
    done
}

/// What every machine's seats remember, the gateway's first; none where a machine starts anew.
pub(crate) fn recall(wiring: &Wiring) -> Result<Vec<(Machine, Option<Memory>)>, ActivationError> {
    // No set takes over meanwhile.
    let _turn = wiring.policies.activating.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    Session::new(wiring).recall()
}

/// One activation.
struct Session<'a> {
    wiring: &'a Wiring,
    answers: SyncSender<(Machine, Said)>,
    said: Receiver<(Machine, Said)>,
    /// Machines that take part.
    machines: Vec<Machine>,
    /// Machines that have switched, and how long they stood still.
    pauses: Vec<(Machine, Duration)>,
}

impl<'a> Session<'a> {
    fn new(wiring: &'a Wiring) -> Self {
        let replicas = (0..wiring.replicas.locals().len()).map(|replica| Machine::Replica(replica as u32));
        let machines: Vec<_> = wiring.has_gateway().then_some(Machine::Gateway).into_iter().chain(replicas).collect();
        let (answers, said) = sync_channel(ANSWERS_PER_MACHINE * machines.len());
        Self { wiring, answers, said, machines, pauses: Vec::new() }
    }

    fn run(&mut self, source: &PolicySource, last: &mut Generation) -> Result<Activation, ActivationError> {
        let waiting = self.wiring.policies.reaper.await_all(after(self.wiring.limits.policy_switch));
        if waiting > 0 {
            return Err(ActivationError::Crowded(waiting));
        }
        let memories = self.recall()?;
        let mut sets = Vec::new();
        for (machine, memory) in memories {
            let set = source.prepare(machine, memory.as_ref(), self.wiring.context_tokens_max);
            sets.push((machine, set.map_err(|why| ActivationError::Refused { machine, why })?));
        }
        let generation = Generation(last.0 + 1);
        *last = generation;
        let verdict = Arc::new(Verdict::default());
        let hold = |(machine, set)| {
            let (source, answers) = (source.clone(), self.answers(machine));
            (machine, Held { generation, set, source, verdict: Arc::clone(&verdict), answers })
        };
        let held = sets.into_iter().map(hold).collect();
        let committed = self.prepare(held).and_then(|serving| {
            self.commit(generation, &verdict, source)?;
            Ok(serving)
        });
        match committed {
            Ok(serving) => Ok(self.await_switches(generation, serving)),
            Err(error) => {
                verdict.abort();
                for &machine in &self.machines {
                    // A machine that does not hear of it lets go at the next preparation; the verdict has fallen.
                    let _ = self.send(machine, PolicyOrder::Abort(generation));
                }
                Err(error)
            }
        }
    }

    /// What every machine's seats remember. Machines that have left take no part from here on.
    fn recall(&mut self) -> Result<Vec<(Machine, Option<Memory>)>, ActivationError> {
        for &machine in &self.machines {
            self.send(machine, PolicyOrder::Recall(self.answers(machine)))?;
        }
        let mut memories = Vec::new();
        let silent = self.collect(self.machines.clone(), |machine, said| {
            if let Said::Recalled(memory) = said {
                memories.push((machine, memory));
            }
            true
        });
        if let Some(&machine) = silent.first() {
            return Err(ActivationError::TimedOut { machine, what: "say what its policies remember" });
        }
        memories.sort_by_key(|(machine, _)| *machine);
        self.machines = memories.iter().map(|(machine, _)| *machine).collect();
        let leads = if self.wiring.has_gateway() { Machine::Gateway } else { Machine::Replica(0) };
        if self.machines.first() == Some(&leads) { Ok(memories) } else { Err(ActivationError::NotRunning) }
    }

    /// Every machine holds its set. The replicas that serve now.
    fn prepare(&mut self, held: Vec<(Machine, Held)>) -> Result<Vec<Machine>, ActivationError> {
        for (machine, held) in held {
            self.send(machine, PolicyOrder::Prepare(held))?;
        }
        let mut serving = Vec::new();
        let silent = self.collect(self.machines.clone(), |machine, said| {
            if matches!(said, Said::Holds { serves: true }) && machine != Machine::Gateway {
                serving.push(machine);
            }
            true
        });
        match silent.first() {
            Some(&machine) => Err(ActivationError::TimedOut { machine, what: "take the set" }),
            None => Ok(serving),
        }
    }

    /// The gateway switches at its step boundary, and with it the activation takes place.
    fn commit(
        &mut self,
        generation: Generation,
        verdict: &Verdict,
        source: &PolicySource,
    ) -> Result<(), ActivationError> {
        if !self.wiring.has_gateway() {
            // A worker has no machine that leads: it takes place when every replica is told.
            verdict.commit();
            self.wiring.policies.set_current(generation, source.clone());
            return self
                .machines
                .clone()
                .into_iter()
                .try_for_each(|machine| self.send(machine, PolicyOrder::Switch(generation)));
        }
        let machine = Machine::Gateway;
        self.send(machine, PolicyOrder::Switch(generation))?;
        let silent = self.collect(vec![machine], |_, said| matches!(said, Said::Switched { .. }));
        // Without an answer in time it is given up, unless it takes place at this very moment.
        if silent.is_empty() || !verdict.abort() {
            return Ok(());
        }
        Err(ActivationError::TimedOut { machine, what: "switch" })
    }

    fn await_switches(&mut self, generation: Generation, serving: Vec<Machine>) -> Activation {
        let has_switched = |session: &Self, machine: &Machine| session.pauses.iter().any(|(of, _)| of == machine);
        let waiting = serving.into_iter().filter(|machine| !has_switched(self, machine)).collect();
        let mut gone = Vec::new();
        self.collect(waiting, |machine, said| {
            if matches!(said, Said::Gone) {
                gone.push(machine);
            }
            true
        });
        let is_late = |machine: &Machine| !gone.contains(machine) && !has_switched(self, machine);
        let late = self.machines.iter().copied().filter(is_late).collect();
        let mut pauses = std::mem::take(&mut self.pauses);
        pauses.sort_by_key(|(machine, _)| *machine);
        Activation { generation, pauses, late }
    }

    /// Takes answers until every machine of `waiting` has given one that counts. Those that have not in time.
    fn collect(&mut self, mut waiting: Vec<Machine>, mut counts: impl FnMut(Machine, Said) -> bool) -> Vec<Machine> {
        let deadline = after(self.wiring.limits.policy_switch);
        while !waiting.is_empty() {
            let left = deadline.saturating_duration_since(Moment::now());
            let Ok((machine, said)) = self.said.recv_timeout(left) else { break };
            if let Said::Switched { pause } = said {
                self.pauses.push((machine, pause));
            }
            if counts(machine, said) {
                waiting.retain(|of| *of != machine);
            }
        }
        waiting
    }

    fn answers(&self, machine: Machine) -> Answers {
        Answers { machine, to: self.answers.clone() }
    }

    fn send(&self, machine: Machine, order: PolicyOrder) -> Result<(), ActivationError> {
        let sent = match machine {
            Machine::Gateway => {
                let wake = GatewayWake::Policies(order);
                self.wiring.gateway.try_push(gateway_loop::POLICIES, wake).map_err(|error| is_full(&error))
            }
            Machine::Replica(index) => match self.wiring.replicas.local(index) {
                Some(port) => {
                    port.try_push(replica_wake::POLICIES, ReplicaWake::Policies(order)).map_err(|error| is_full(&error))
                }
                None => Err(false),
            },
        };
        sent.map_err(|full| match full {
            true => ActivationError::TimedOut { machine, what: "do what it was asked before" },
            false => ActivationError::NotRunning,
        })
    }
}

fn is_full<T>(error: &PushError<T>) -> bool {
    matches!(error, PushError::Full(_))
}
