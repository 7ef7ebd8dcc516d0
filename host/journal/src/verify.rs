//! Does it happen again? The snapshot is taken, every input goes in once more, and every step must come out as recorded.

use std::any::Any;
use std::io::Read;
use std::panic::{AssertUnwindSafe, catch_unwind};

use penstock_base::codec::Writer;
use penstock_policy_api::Policies;
use penstock_policy_api::native::NativePolicies;
use penstock_sched::gateway::Gateway;
use penstock_sched::replica::Replica;

use crate::error::VerifyError;
use crate::frame::{Ending, Outcome};
use crate::header::{MachineId, SegmentHeader};
use crate::machine::{Machine, MachineKind, digest_effects};
use crate::read::{Record, SegmentReader};

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
    Ok(NativePolicies::new(header.generation, M::context_tokens_max(&header.config::<M>()?)))
}

fn replay<M: Machine>(
    mut reader: SegmentReader<impl Read>,
    policies: &mut dyn Policies,
) -> Result<Verified, VerifyError> {
    let header = reader.header();
    header.restore_policies(policies)?;
    let id = header.machine;
    let mut machine: M = guarded(0, || header.machine())??;
    let (mut effects, mut scratch) = (Vec::new(), Writer::new());
    let (mut steps, mut unknown) = (0, 0);
    let mut came: Option<Outcome> = None;
    while let Some(record) = reader.next_record::<M>()? {
        let at = reader.records();
        match record {
            Record::Input { now, input } => {
                if came.is_some() {
                    return Err(VerifyError::Order { record: at });
                }
                effects.clear();
                guarded(steps + 1, || machine.advance(now, input, policies, &mut effects))?;
                came = Some(Outcome {
                    generation: machine.generation(),
                    effects: digest_effects(&effects, &mut scratch),
                    decisions: machine.decisions(),
                });
            }
            Record::Outcome(recorded) => {
                let came = came.take().ok_or(VerifyError::Order { record: at })?;
                steps += 1;
                if let Some(what) = difference(&recorded, &came) {
                    return Err(VerifyError::Mismatch { record: at, step: steps, what });
                }
            }
            Record::Unknown { .. } => unknown += 1,
        }
    }
    let ending = reader.ending().unwrap_or(Ending::CutOff);
    let unfinished = came.is_some();
    if unfinished && ending == Ending::Complete {
        return Err(VerifyError::Order { record: reader.records() });
    }
    let records = reader.records();
    Ok(Verified { machine: id, records, steps, unknown, decisions: machine.decisions(), ending, unfinished })
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
