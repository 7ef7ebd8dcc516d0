//! Does it happen again? The snapshot is taken, every input goes in once more, and every step must come out as recorded.

use std::any::Any;
use std::io::Read;
use std::panic::{AssertUnwindSafe, catch_unwind};

use penstock_base::Instant;
use penstock_base::codec::Writer;
use penstock_policy_api::Policies;
use penstock_policy_api::native::NativePolicies;
use penstock_sched::gateway::Gateway;
use penstock_sched::replica::Replica;

use crate::error::{JournalError, VerifyError};
use crate::frame::{Ending, Outcome};
use crate::header::{MachineId, SegmentHeader};
use crate::machine::{Machine, MachineKind, digest_effects};
use crate::read::{Record, SegmentReader};
use crate::recorded::{AskedAgain, Recorded, Remake};
use crate::wire::Seated;

/// What was verified.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Verified {
    /// Whose segment.
    pub machine: MachineId,
    /// Records read, the one that ends it included.
    pub records: u64,
    /// Steps that came out as recorded.
    pub steps: u64,
    /// Records of kinds that this build does not know.
    pub unknown: u64,
    /// Digest of the machine's decisions at the end.
    pub decisions: u64,
    /// How the segment ends.
    pub ending: Ending,
    /// The last input has no outcome: the run ended inside that step.
    pub unfinished: bool,
}

/// Verifies a segment of machine `M`. `policies` are fresh ones of the kind that was recorded; they are given the saved state.
///
/// # Errors
/// The first thing that is not as recorded.
pub fn verify<M: Machine>(source: impl Read, policies: &mut dyn Policies) -> Result<Verified, VerifyError> {
    replay::<M>(SegmentReader::open(source)?, policies)
}

/// Verifies a segment of either machine that ran on the native defaults, made with the context window of the machine's configuration.
///
/// # Errors
/// As [`verify`].
pub fn verify_native(source: impl Read) -> Result<Verified, VerifyError> {
    let reader = SegmentReader::open(source)?;
    match reader.header().machine.kind {
        MachineKind::Gateway => {
            let mut policies = native::<Gateway>(reader.header())?;
            replay::<Gateway>(reader, &mut policies)
        }
        MachineKind::Replica => {
            let mut policies = native::<Replica>(reader.header())?;
            replay::<Replica>(reader, &mut policies)
        }
    }
}

fn native<M: Machine>(header: &SegmentHeader) -> Result<NativePolicies, VerifyError> {
    Ok(NativePolicies::new(header.seated.generation, M::context_tokens_max(&header.config::<M>()?)))
}

/// What was found in a segment, whether or not it holds.
#[derive(Debug)]
pub struct Examined {
    /// How far it held: steps, records, digest and end as read so far.
    pub verified: Verified,
    /// The program that wrote it.
    pub build: String,
    /// When its first and its last step were, in the machine's time.
    pub span: (Instant, Instant),
    /// The policies, asked again; nothing where the log has no answers.
    pub asked: AskedAgain,
    /// The first thing that does not hold. Bytes that end inside a record are damage here: a writer that was killed leaves such an end.
    pub fault: Option<VerifyError>,
}

/// Examines a segment of either machine. One with answers needs no policies; `remake` makes them to be asked again.
///
/// # Errors
/// Its header cannot be read: nothing is known of it.
pub fn examine(source: impl Read, remake: Option<&mut dyn Remake>) -> Result<Examined, JournalError> {
    let reader = SegmentReader::open(source)?;
    Ok(match reader.header().machine.kind {
        MachineKind::Gateway => examine_as::<Gateway>(reader, remake),
        MachineKind::Replica => examine_as::<Replica>(reader, remake),
    })
}

fn examine_as<M: Machine>(reader: SegmentReader<impl Read>, remake: Option<&mut dyn Remake>) -> Examined {
    let header = reader.header().clone();
    let mut replay = Replay::new(reader, &header);
    let fault = if header.has_answers {
        replay.recorded::<M>(&header, remake).err()
    } else {
        native::<M>(&header).and_then(|mut policies| replay.directly::<M>(&header, &mut policies)).err()
    };
    let span = (header.now, replay.now);
    let (verified, asked) = (replay.verified(), std::mem::take(&mut replay.asked));
    Examined { verified, build: header.build, span, asked, fault }
}

fn replay<M: Machine>(reader: SegmentReader<impl Read>, policies: &mut dyn Policies) -> Result<Verified, VerifyError> {
    let header = reader.header().clone();
    let mut replay = Replay::new(reader, &header);
    replay.directly::<M>(&header, policies)?;
    Ok(replay.verified())
}

/// A segment being replayed.
struct Replay<R> {
    reader: SegmentReader<R>,
    machine: MachineId,
    steps: u64,
    unknown: u64,
    decisions: u64,
    unfinished: bool,
    now: Instant,
    asked: AskedAgain,
    scratch: Writer,
}

impl<R: Read> Replay<R> {
    fn new(reader: SegmentReader<R>, header: &SegmentHeader) -> Self {
        Self {
            reader,
            machine: header.machine,
            steps: 0,
            unknown: 0,
            decisions: 0,
            unfinished: false,
            now: header.now,
            asked: AskedAgain::default(),
            scratch: Writer::new(),
        }
    }

    fn verified(&self) -> Verified {
        Verified {
            machine: self.machine,
            records: self.reader.records(),
            steps: self.steps,
            unknown: self.unknown,
            decisions: self.decisions,
            ending: self.reader.ending().unwrap_or(Ending::CutOff),
            unfinished: self.unfinished,
        }
    }

    /// One step of the machine. What came of it.
    fn step<M: Machine>(
        &mut self,
        machine: &mut M,
        (now, input): (Instant, M::Input),
        policies: &mut dyn Policies,
        effects: &mut Vec<M::Effect>,
    ) -> Result<Outcome, VerifyError> {
        effects.clear();
        self.now = self.now.max(now);
        guarded(self.steps + 1, || machine.advance(now, input, policies, effects))?;
        self.decisions = machine.decisions();
        let effects = digest_effects(effects, &mut self.scratch);
        Ok(Outcome { generation: machine.generation(), effects, decisions: self.decisions })
    }

    /// Every policy is asked, as the machine asks it.
    fn directly<M: Machine>(&mut self, header: &SegmentHeader, policies: &mut dyn Policies) -> Result<(), VerifyError> {
        header.restore_policies(policies)?;
        let mut machine: M = guarded(0, || header.machine())??;
        let mut effects = Vec::new();
        let mut came: Option<Outcome> = None;
        while let Some(record) = self.reader.next_record::<M>()? {
            let at = self.reader.records();
            match record {
                Record::Input { .. } if came.is_some() => return Err(VerifyError::Order { record: at }),
                Record::Input { now, input } => {
                    came = Some(self.step(&mut machine, (now, input), policies, &mut effects)?);
                }
                Record::Outcome(recorded) => {
                    let came = came.take().ok_or(VerifyError::Order { record: at })?;
                    self.compare(&recorded, &came)?;
                }
                Record::Answer(_) | Record::Observed(_) | Record::Seated(_) => {
                    return Err(VerifyError::Order { record: at });
                }
                Record::Unknown { .. } => self.unknown += 1,
            }
        }
        self.end(came.is_some())
    }

    /// The answers in the log stand for the policies.
    fn recorded<M: Machine>(
        &mut self,
        header: &SegmentHeader,
        mut remake: Option<&mut dyn Remake>,
    ) -> Result<(), VerifyError> {
        let mut machine: M = guarded(0, || header.machine())??;
        let mut policies = Recorded::new(&header.seated);
        let mut sit = |policies: &mut Recorded, seated: &Seated, now: Instant| {
            policies.sit(seated);
            if let Some(remake) = &mut remake {
                let remade = remake.remake(header.machine, header.context_tokens_max, &seated.set);
                policies.compare_with(remade, seated, now);
            }
        };
        sit(&mut policies, &header.seated, header.now);
        let mut effects = Vec::new();
        let mut begun: Option<(Instant, M::Input)> = None;
        let read = loop {
            let record = match self.reader.next_record::<M>() {
                Ok(Some(record)) => record,
                Ok(None) => break Ok(()),
                Err(error) => break Err(VerifyError::from(error)),
            };
            let at = self.reader.records();
            match record {
                Record::Input { now, input } if begun.is_none() => {
                    policies.begin_step();
                    begun = Some((now, input));
                }
                Record::Answer(answer) if begun.is_some() => policies.answer(answer),
                Record::Observed(fault) if begun.is_some() => policies.observed(fault),
                Record::Seated(seated) if begun.is_none() => sit(&mut policies, &seated, self.now),
                Record::Unknown { .. } => self.unknown += 1,
                Record::Outcome(recorded) => {
                    let Some(begun) = begun.take() else { break Err(VerifyError::Order { record: at }) };
                    let came = self.step(&mut machine, begun, &mut policies, &mut effects);
                    let (record, step) = (at, self.steps + 1);
                    if let Some(what) = policies.difference() {
                        break Err(VerifyError::Asked { record, step, what });
                    }
                    if let Err(error) = came.and_then(|came| self.compare(&recorded, &came)) {
                        break Err(error);
                    }
                }
                _ => break Err(VerifyError::Order { record: at }),
            }
        };
        self.asked = policies.found();
        read?;
        self.end(begun.is_some())
    }

    fn compare(&mut self, recorded: &Outcome, came: &Outcome) -> Result<(), VerifyError> {
        self.steps += 1;
        match difference(recorded, came) {
            Some(what) => Err(VerifyError::Mismatch { record: self.reader.records(), step: self.steps, what }),
            None => Ok(()),
        }
    }

    fn end(&mut self, unfinished: bool) -> Result<(), VerifyError> {
        self.unfinished = unfinished;
        if unfinished && self.reader.ending() == Some(Ending::Complete) {
            return Err(VerifyError::Order { record: self.reader.records() });
        }
        Ok(())
    }
}

fn difference(recorded: &Outcome, came: &Outcome) -> Option<&'static str> {
    if recorded.effects != came.effects {
        Some("effects")
    } else if recorded.decisions != came.decisions {
        Some("decision digest")
    } else if recorded.generation != came.generation {
        Some("policy generation")
    } else {
        None
    }
}

/// A log may lead a machine into the panic that it recorded, or into one of its own when it was forged: both are findings.
fn guarded<T>(step: u64, run: impl FnOnce() -> T) -> Result<T, VerifyError> {
    catch_unwind(AssertUnwindSafe(run)).map_err(|panic| VerifyError::Panicked { step, text: text_of(panic.as_ref()) })
}

fn text_of(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<String>().map(String::as_str).or_else(|| panic.downcast_ref::<&str>().copied());
    text.unwrap_or("no message").to_owned()
}
