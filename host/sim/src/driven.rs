//! One machine with its policies, its log and its next wake-up.

use penstock_base::codec::Writer;
use penstock_base::{Generation, Instant};
use penstock_journal::{BreakCause, Machine, MachineId, Outcome, SegmentHeader, SegmentWriter, digest_effects};
use penstock_sched::gateway::{Gateway, GatewayInput};
use penstock_sched::message::ToReplica;
use penstock_sched::replica::{Replica, ReplicaInput};

use crate::policies::{PolicyKind, WhimSeats};
use crate::scenario::Scenario;
use crate::seats::{Cast, Seats};

/// Bytes of a log between two times that it is written out; the simulator writes out at every step.
const LOG_BUFFER_BYTES: usize = 1 << 22;

/// Steps of a segment: short, so that machines are read back from the middle of their lives.
const SEGMENT_STEPS: u64 = 200;

/// A machine that a simulation can drive.
pub trait Drives: Machine {
    /// The generation that takes over with this input, if it says so.
    fn switches_to(input: &Self::Input) -> Option<Generation>;
}

impl Drives for Gateway {
    fn switches_to(input: &GatewayInput) -> Option<Generation> {
        if let GatewayInput::Policies(generation) = input { Some(*generation) } else { None }
    }
}

impl Drives for Replica {
    fn switches_to(input: &ReplicaInput) -> Option<Generation> {
        match input {
            ReplicaInput::Policies(generation)
            | ReplicaInput::Gateway { message: ToReplica::Policies(generation), .. } => Some(*generation),
            _ => None,
        }
    }
}

/// A machine and what belongs to it.
pub struct Driven<M: Drives> {
    machine: M,
    policies: Box<dyn Seats>,
    config: M::Config,
    /// Effects of the last step, until the driver has carried them out.
    effects: Vec<M::Effect>,
    scratch: Writer,
    log: Option<SegmentWriter<M, Vec<u8>>>,
    /// Segments that are complete.
    segments: Vec<Vec<u8>>,
    /// Over the effects of all steps.
    digest: u64,
    steps: u64,
    check_every: u64,
    /// When a tick is on the agenda; [`Instant::NEVER`] when none is.
    pub tick_at: Instant,
}

fn open_segment<M: Machine>(
    machine: &M,
    config: &M::Config,
    policies: &mut dyn Seats,
    at: (u64, Instant),
) -> Result<SegmentWriter<M, Vec<u8>>, String> {
    let header = SegmentHeader::of(machine, config, policies, at);
    SegmentWriter::open(Vec::new(), &header, LOG_BUFFER_BYTES).map_err(|error| error.to_string())
}

/// Fresh policies for a machine with this configuration.
///
/// # Errors
/// The cast has none.
pub fn seats<M: Machine>(kind: PolicyKind, cast: &dyn Cast, config: &M::Config) -> Result<Box<dyn Seats>, String> {
    let plain = cast.seats(M::KIND, M::context_tokens_max(config))?;
    Ok(match kind {
        PolicyKind::Plain => plain,
        PolicyKind::Whims => Box::new(WhimSeats::new(plain)),
    })
}

impl<M: Drives> Driven<M> {
    /// A fresh machine, logged when asked.
    ///
    /// # Errors
    /// There are no policies for it, or the log does not open.
    pub fn new(
        machine: M,
        config: M::Config,
        now: Instant,
        (scenario, cast): (&Scenario, &dyn Cast),
    ) -> Result<Self, String> {
        let mut policies = seats::<M>(scenario.policies, cast, &config)?;
        let log =
            if scenario.journal { Some(open_segment(&machine, &config, policies.as_mut(), (0, now))?) } else { None };
        Ok(Self {
            machine,
            policies,
            config,
            effects: Vec::new(),
            scratch: Writer::new(),
            log,
            segments: Vec::new(),
            digest: 0,
            steps: 0,
            check_every: scenario.check_every.max(1),
            tick_at: Instant::NEVER,
        })
    }

    /// Advances the machine and walks its invariants. What came of it; give it back with [`Self::recycle`].
    ///
    /// # Errors
    /// An invariant that does not hold, a policy that does not take its place, or a log that does not take the step.
    pub fn step(&mut self, now: Instant, input: M::Input) -> Result<Vec<M::Effect>, String> {
        if let Some(log) = &mut self.log {
            log.input(now, &input).map_err(|closed| closed.to_string())?;
        }
        if let Some(generation) = M::switches_to(&input) {
            self.policies.switch(generation, now).map_err(|why| format!("switch to {generation:?}: {why}"))?;
        }
        let mut effects = std::mem::take(&mut self.effects);
        self.machine.advance(now, input, self.policies.as_mut(), &mut effects);
        self.policies.between_steps(now)?;
        self.steps += 1;
        let digest = digest_effects(&effects, &mut self.scratch);
        self.digest = crate::rng::mix(self.digest, digest);
        if let Some(log) = &mut self.log {
            let (generation, decisions) = (self.machine.generation(), self.machine.decisions());
            log.outcome(&Outcome { generation, effects: digest, decisions }).map_err(|closed| closed.to_string())?;
            log.write_out().map_err(|error| error.to_string())?;
        }
        if self.steps.is_multiple_of(SEGMENT_STEPS)
            && let Some(log) = self.log.take()
        {
            self.segments.push(log.complete().map_err(|error| error.to_string())?);
            let number = self.segments.len() as u64;
            self.log = Some(open_segment(&self.machine, &self.config, self.policies.as_mut(), (number, now))?);
        }
        if self.steps.is_multiple_of(self.check_every) {
            self.machine.sound().map_err(|what| format!("invariant: {what}"))?;
        }
        Ok(effects)
    }

    /// Takes the buffer of effects back.
    pub fn recycle(&mut self, mut effects: Vec<M::Effect>) {
        effects.clear();
        self.effects = effects;
    }

    /// The machine.
    pub fn machine(&self) -> &M {
        &self.machine
    }

    /// The machine, for what a driver may do beside steps.
    pub fn machine_mut(&mut self) -> &mut M {
        &mut self.machine
    }

    /// Digest of the effects of all steps and of all decisions.
    pub fn digest(&self) -> u64 {
        crate::rng::mix(self.digest, self.machine.decisions())
    }

    /// Ends the log and gives its segments. `broken` when the machine did not come to a good end.
    ///
    /// # Errors
    /// The log does not take its end.
    pub fn end_log(&mut self, broken: bool) -> Result<Vec<(MachineId, Vec<u8>)>, String> {
        let Some(log) = self.log.take() else { return Ok(Vec::new()) };
        let ended = if broken { log.break_off(BreakCause::Frozen) } else { log.complete() };
        self.segments.push(ended.map_err(|error| error.to_string())?);
        let id = M::id(&self.config);
        Ok(std::mem::take(&mut self.segments).into_iter().map(|segment| (id, segment)).collect())
    }
}
