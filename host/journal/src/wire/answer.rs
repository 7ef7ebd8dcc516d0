//! Answers of policies, as they came: a replay puts them in again, and asks the policies again where it has them.

use penstock_base::codec::{DecodeError, Reader, Writer};
use penstock_policy_api::{
    Action, Answer, Decision, FaultKind, Placement, Question, Ranking, Rest, Stance, Verdict, Worth, Yielder,
};

use super::{Decode, Encode, choice, record};

/// An answer before the host's checks, with the list beside it where it lies.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Given<'a> {
    /// The native default decides.
    NoOpinion,
    /// The policy failed.
    Fault(FaultKind),
    /// Admission.
    Verdict(Verdict),
    /// Routing, with the ranked rows.
    Placement(Placement, &'a [u32]),
    /// Order, with the ranked rows.
    Ranking(Ranking, &'a [u32]),
    /// Victims.
    Yielders(&'a [Yielder]),
    /// Eviction.
    Worths(&'a [Worth]),
    /// Overload, with its actions.
    Stance(Stance, &'a [Action]),
}

impl<'a> Given<'a> {
    /// What came of a call; `proposed` adds the list.
    pub fn of<T>(answer: Answer<T>, proposed: impl FnOnce(T) -> Given<'a>) -> Self {
        match answer {
            Answer::NoOpinion => Self::NoOpinion,
            Answer::Fault(kind) => Self::Fault(kind),
            Answer::Proposal(proposal) => proposed(proposal),
        }
    }

    /// The same, kept.
    pub fn to_kept(self) -> KeptAnswer {
        match self {
            Self::NoOpinion => KeptAnswer::NoOpinion,
            Self::Fault(kind) => KeptAnswer::Fault(kind),
            Self::Verdict(verdict) => KeptAnswer::Verdict(verdict),
            Self::Placement(placement, rows) => KeptAnswer::Placement(placement, rows.to_vec()),
            Self::Ranking(ranking, rows) => KeptAnswer::Ranking(ranking, rows.to_vec()),
            Self::Yielders(rows) => KeptAnswer::Yielders(rows.to_vec()),
            Self::Worths(rows) => KeptAnswer::Worths(rows.to_vec()),
            Self::Stance(stance, actions) => KeptAnswer::Stance(stance, actions.to_vec()),
        }
    }
}

/// An answer read back.
#[derive(Clone, PartialEq, Eq, Debug)]
#[allow(missing_docs, reason = "as in `Given`")]
pub enum KeptAnswer {
    NoOpinion,
    Fault(FaultKind),
    Verdict(Verdict),
    Placement(Placement, Vec<u32>),
    Ranking(Ranking, Vec<u32>),
    Yielders(Vec<Yielder>),
    Worths(Vec<Worth>),
    Stance(Stance, Vec<Action>),
}

impl KeptAnswer {
    /// Is it one that this question can have?
    fn fits(&self, question: Question) -> bool {
        match self {
            Self::NoOpinion | Self::Fault(_) => true,
            Self::Verdict(_) => question == Question::Admission,
            Self::Placement(..) => question == Question::Routing,
            Self::Ranking(..) => question == Question::Order,
            Self::Yielders(_) => question == Question::Victims,
            Self::Worths(_) => question == Question::Eviction,
            Self::Stance(..) => question == Question::Overload,
        }
    }
}

/// What stands beside an answer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct AnswerHead {
    /// Counts the machine's questions, of all kinds, as the decision log does.
    pub sequence: u64,
    /// What was asked.
    pub question: Question,
    /// Number of the question among those of its kind.
    pub call: u64,
    /// See [`Told`](crate::told::Told).
    pub inputs: u64,
    /// Fuel that the policy used; 0 where none is metered.
    pub fuel: u64,
    /// Time inside the policy. Of the recorded run only: a replay takes its own time.
    pub took_ns: u64,
}

record! { AnswerHead { sequence, question, call, inputs, fuel, took_ns } }

/// One answered question.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct AnswerRecord {
    /// About it.
    pub head: AnswerHead,
    /// The answer.
    pub answer: KeptAnswer,
}

impl Decode for AnswerRecord {
    fn take(from: &mut Reader<'_>) -> Result<Self, DecodeError> {
        let record = Self { head: AnswerHead::take(from)?, answer: KeptAnswer::take(from)? };
        if record.answer.fits(record.head.question) { Ok(record) } else { Err(DecodeError::Invalid("answer")) }
    }
}

/// A policy that failed on facts which it was told.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ObserveFault {
    /// Whose.
    pub decision: Decision,
    /// Which telling of this step to this policy, from 0.
    pub telling: u32,
    /// How.
    pub kind: FaultKind,
}

record! { ObserveFault { decision, telling, kind } }

choice! { Question, "question" { 0 => Admission, 1 => Routing, 2 => Order, 3 => Victims, 4 => Eviction, 5 => Overload } }
choice! { Decision, "decision" { 0 => Admission, 1 => Routing, 2 => Fairness, 3 => Eviction, 4 => Overload } }
choice! { FaultKind, "fault" { 0 => Trap, 1 => Fuel, 2 => Epoch, 3 => Memory, 4 => Rebuilding } }
choice! { Rest, "rest" { 0 => Append, 1 => Keep } }
choice! { Verdict, "verdict" {
    0 => Admit { reserve_output_tokens, class_rank },
    1 => Defer { for_us },
    2 => Degrade { max_output_tokens, reserve_output_tokens, class_rank },
    3 => Reject { reason, retry_after_ms },
} }
choice! { Placement, "placement" { 0 => Place { wait_us, colocate }, 1 => Hold { for_us } } }
record! {
    Ranking { rest, tpot_target_us }
    Yielder { row, how }
    Worth { price, to }
    Stance { level, hold_us }
    Action { what, class_rank, amount }
}

impl Encode for Given<'_> {
    fn put(&self, out: &mut Writer) {
        fn list<T: Encode>(out: &mut Writer, all: &[T]) {
            out.list(all.iter(), |out, each| each.put(out));
        }
        match *self {
            Self::NoOpinion => out.u8(0),
            Self::Fault(kind) => {
                out.u8(1);
                kind.put(out);
            }
            Self::Verdict(verdict) => {
                out.u8(2);
                verdict.put(out);
            }
            Self::Placement(placement, rows) => {
                out.u8(3);
                placement.put(out);
                list(out, rows);
            }
            Self::Ranking(ranking, rows) => {
                out.u8(4);
                ranking.put(out);
                list(out, rows);
            }
            Self::Yielders(rows) => {
                out.u8(5);
                list(out, rows);
            }
            Self::Worths(rows) => {
                out.u8(6);
                list(out, rows);
            }
            Self::Stance(stance, actions) => {
                out.u8(7);
                stance.put(out);
                list(out, actions);
            }
        }
    }
}

impl Decode for KeptAnswer {
    fn take(from: &mut Reader<'_>) -> Result<Self, DecodeError> {
        Ok(match from.u8()? {
            0 => Self::NoOpinion,
            1 => Self::Fault(FaultKind::take(from)?),
            2 => Self::Verdict(Verdict::take(from)?),
            3 => Self::Placement(Placement::take(from)?, Vec::take(from)?),
            4 => Self::Ranking(Ranking::take(from)?, Vec::take(from)?),
            5 => Self::Yielders(Vec::take(from)?),
            6 => Self::Worths(Vec::take(from)?),
            7 => Self::Stance(Stance::take(from)?, Vec::take(from)?),
            _ => return Err(DecodeError::Invalid("answer")),
        })
    }
}
