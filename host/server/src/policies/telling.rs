//! The story of one request, line by line: what happened at the gateway, and the decisions in between.

use penstock_base::{CancelCause, Duration, Instant, Outcome, Refusal, RefuseReason, ReplicaId};
use penstock_engine::{
    DecisionRecord, Engine, FIRST_ROWS, Happened, InputsKept, KeptTable, Machine, Moment, Proposal, outcome_labels,
};
use penstock_policy_api::Question;
use penstock_sched::gateway::{NO_REPLICA, RoutingMade};
use penstock_sched::message::Usage;

use super::story::words;

/// Everything that is known about a request.
pub struct Story<'a> {
    /// Where inputs and the decisions about many are looked up.
    pub engine: &'a Engine,
    /// What happened to it, oldest first.
    pub moments: &'a [Moment],
    /// The decisions about it, oldest first.
    pub decisions: &'a [(Machine, DecisionRecord)],
}

impl Story<'_> {
    /// In words, oldest first.
    pub fn lines(&self) -> Vec<String> {
        // What the gateway made of an answer is told right behind it, though it is carried out at the end of the step.
        let mut told: Vec<((Instant, u8), Vec<String>)> = Vec::new();
        told.extend(self.moments.iter().map(|moment| (self.place(moment), self.moment(moment))));
        told.extend(self.decisions.iter().map(|(machine, record)| ((record.at, 0), self.decision(*machine, record))));
        told.sort_by_key(|(place, _)| *place);
        let first = told.first().map_or(Instant::ZERO, |((at, _), _)| *at);
        let mut lines = Vec::new();
        for ((at, _), text) in told {
            for (place, line) in text.into_iter().enumerate() {
                let after = milliseconds(at.since(first));
                lines.push(if place == 0 {
                    format!("{:>12}  {line}", format!("+{after}"))
                } else {
                    format!("{:14}  {line}", "")
                });
            }
        }
        lines
    }

    /// When a moment is told, and behind what of the same time.
    fn place(&self, moment: &Moment) -> (Instant, u8) {
        let behind = match moment.what {
            Happened::Verdict { .. } => 1,
            Happened::Queued { .. } => 2,
            _ => return (moment.at, 3),
        };
        let admissions = self.decisions.iter().filter(|(_, record)| record.question == Question::Admission);
        let last = admissions.map(|(_, record)| record.at).filter(|at| *at <= moment.at).max();
        (last.unwrap_or(moment.at), behind)
    }

    fn decision(&self, machine: Machine, record: &DecisionRecord) -> Vec<String> {
        let mut lines = vec![format!("{machine}, decision {}: {}", record.sequence, words(record))];
        match self.engine.inputs(machine, record.sequence) {
            Some(inputs) => lines.extend(told(&inputs, record.proposal)),
            None => lines.push(
                "what it was told is not kept (any more): see decisions.sample_ppm and decisions.inputs_bytes"
                    .to_owned(),
            ),
        }
        lines
    }

    fn moment(&self, moment: &Moment) -> Vec<String> {
        let before = match moment.what {
            Happened::Dispatched { .. } => self.order_before(moment.at),
            Happened::Preempted { replica, .. } => self.victims_before(replica, moment.at),
            _ => None,
        };
        before.into_iter().chain([happened(moment)]).collect()
    }

    /// The order question that let something be placed at this moment: it is about many, and this request was among them.
    fn order_before(&self, at: Instant) -> Option<String> {
        self.last(Machine::Gateway, Question::Order, at)
    }

    fn victims_before(&self, replica: ReplicaId, at: Instant) -> Option<String> {
        self.last(Machine::Replica(replica.0), Question::Victims, at)
    }

    fn last(&self, machine: Machine, question: Question, at: Instant) -> Option<String> {
        let found = self.engine.decisions(1, |record| record.question == question && record.at <= at);
        let record = found.into_iter().find(|(of, _)| *of == machine)?.1.pop()?;
        Some(format!("{machine}, decision {}: {}", record.sequence, words(&record)))
    }
}

/// At the gateway.
fn happened(moment: &Moment) -> String {
    match moment.what {
        Happened::Arrived { input_tokens, max_output_tokens, sequences, class, deadline } => {
            let deadline = match deadline {
                Duration::MAX => "no deadline".to_owned(),
                left => format!("{} to its deadline", milliseconds(left)),
            };
            format!(
                "arrived: {input_tokens} prompt tokens, {sequences} answer(s) of up to {max_output_tokens} tokens, class {}, {deadline}; \
                 the overload stance is at level {}",
                class.get(),
                moment.level
            )
        }
        Happened::Verdict { verdict, reason } => match verdict {
            0 => "let in".to_owned(),
            1 => "deferred: it is asked about again later".to_owned(),
            2 => "let in under a smaller output cap".to_owned(),
            _ => format!("turned away: {}", Refusal::from_code(reason).map_or_else(|| reason.to_string(), refusal)),
        },
        Happened::Queued { max_output_tokens, degraded } => {
            let degraded = if degraded { ", lowered by the policy" } else { "" };
            format!("waits in its queue; output cap {max_output_tokens} tokens{degraded}")
        }
        Happened::Routed { ranked, made, .. } => routed(&ranked, made),
        Happened::Dispatched { replica, attempt, generation } => {
            format!("handed to replica {replica} (attempt {attempt}, generation {})", generation.0)
        }
        Happened::FirstToken => "first token".to_owned(),
        Happened::CancelAsked(cause) => match cause {
            CancelCause::Client => "its client left".to_owned(),
            CancelCause::SlowClient => "its client reads too slowly".to_owned(),
            CancelCause::Drain => "the server is shutting down".to_owned(),
        },
        Happened::Ended { outcome, usage, retry_after_ms } => ended(outcome, &usage, retry_after_ms),
        Happened::Refused { replica, .. }
        | Happened::Started { replica, .. }
        | Happened::Preempted { replica, .. }
        | Happened::Resumed { replica, .. }
        | Happened::Migrated { from: replica }
        | Happened::ReplicaLost { replica } => at_replica(replica, &moment.what),
    }
}

/// At a replica.
fn at_replica(replica: ReplicaId, what: &Happened) -> String {
    match *what {
        Happened::Refused { reason, .. } => {
            let why = match reason {
                RefuseReason::NoSlot => "no slot is free",
                RefuseReason::NoBlocks => "its pool cannot reserve the blocks",
                RefuseReason::NotReady => "it is not ready",
                RefuseReason::OldEpoch => "it has started anew since",
            };
            format!("replica {replica} sent it back: {why}")
        }
        Happened::Started { cached_tokens, .. } => {
            format!("replica {replica} began with it; {cached_tokens} prompt tokens were cached there")
        }
        Happened::Preempted { freed_blocks, computed_tokens, cause_code, .. } => {
            let cause = match cause_code {
                0 => "blocks were short",
                1 => "an action of the overload stance",
                _ => "a drain",
            };
            format!(
                "gave way at replica {replica} ({cause}): {freed_blocks} blocks with {computed_tokens} computed tokens"
            )
        }
        Happened::Resumed { recomputed_tokens, .. } => {
            format!("goes on at replica {replica}; {recomputed_tokens} tokens are computed again")
        }
        Happened::Migrated { .. } => {
            format!("leaves replica {replica} with output behind it, and goes on elsewhere")
        }
        _ => format!("replica {replica} was lost"),
    }
}

fn ended(outcome: Outcome, usage: &Usage, retry_after_ms: u32) -> String {
    let (outcome, detail) = outcome_labels(outcome);
    let detail = if detail.is_empty() { String::new() } else { format!(" ({detail})") };
    let retry = match retry_after_ms {
        0 => String::new(),
        after => format!("; another try makes sense after {after} ms"),
    };
    format!(
        "ended: {outcome}{detail}; billed {} prompt tokens ({} of them cached) and {} output tokens, {} preemption(s){retry}",
        usage.prompt_tokens, usage.cached_tokens, usage.output_tokens, usage.preemptions
    )
}

fn routed(ranked: &[ReplicaId], made: RoutingMade) -> String {
    let ranked: Vec<_> = ranked.iter().filter(|replica| **replica != NO_REPLICA).map(ReplicaId::to_string).collect();
    let order = match ranked.len() {
        0 => String::new(),
        1 => format!("replica {} comes first; ", ranked[0]),
        _ => format!("replicas in this order: {}; ", ranked.join(", ")),
    };
    let what = match made {
        RoutingMade::Dispatched => "one of those with credit takes it",
        RoutingMade::Reserved => "it waits for the first one's next credit",
        RoutingMade::Held => "it is held back",
        RoutingMade::NotHeld => "a hold is not granted to it, and nobody has credit for it now: it waits",
        RoutingMade::NoCredit => "nobody has credit for it now: it waits in its place",
    };
    format!("{order}{what}")
}

/// What a policy was told: its context, and the rows that it named.
fn told(inputs: &InputsKept, proposal: Proposal) -> Vec<String> {
    let named: Vec<usize> = match proposal {
        Proposal::Place { ranked, .. } | Proposal::Rank { ranked, .. } | Proposal::Yield { rows: ranked, .. } => {
            ranked.iter().filter(|row| **row != u32::MAX).map(|row| *row as usize).collect()
        }
        // It named none: the first ones show what it was about.
        _ if inputs.question == Question::Routing => (0..FIRST_ROWS).collect(),
        _ => Vec::new(),
    };
    let mut lines = Vec::new();
    let context: Vec<_> = inputs.context().map(|(name, value)| format!("{name} {}", number(value))).collect();
    if !context.is_empty() {
        lines.push(format!("it was told: {}", context.join(", ")));
    }
    for KeptTable { rows_are, columns, rows } in inputs.tables() {
        for row in &named {
            let Some(cells) = rows.get(*row) else { continue };
            let cells: Vec<_> =
                columns.iter().zip(cells).map(|(name, value)| format!("{name} {}", number(*value))).collect();
            lines.push(format!("row {row} of {} {rows_are}: {}", rows.len(), cells.join(", ")));
        }
    }
    lines
}

/// The largest number stands for "none" or "never" in every signal.
fn number(value: u64) -> String {
    if value == u64::MAX { "none".to_owned() } else { value.to_string() }
}

fn refusal(refusal: Refusal) -> String {
    let (_, detail) = outcome_labels(Outcome::Refused(refusal));
    detail.replace('_', " ")
}

fn milliseconds(time: Duration) -> String {
    format!("{}.{:03} ms", time.as_us() / 1_000, time.as_us() % 1_000)
}
