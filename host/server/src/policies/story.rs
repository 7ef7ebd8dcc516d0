//! Decisions in words and numbers, for people who ask why.

use penstock_base::RequestId;
use penstock_engine::{DecisionRecord, Engine, InputsKept, KeptTable, Machine, Moment, Proposal};
use serde_json::{Map, Value, json};

use super::telling;

/// Most decisions of one answer.
pub const DECISIONS_MAX: usize = 1_024;
/// Most rows of one answer about inputs.
const ROWS_MAX: usize = 1_024;

/// Which decisions are asked for.
#[derive(Clone, Debug, Default)]
pub struct Wanted {
    /// The last so many.
    pub count: usize,
    /// Of this question.
    pub question: Option<String>,
    /// Of this seat.
    pub seat: Option<String>,
    /// Of this machine.
    pub machine: Option<String>,
    /// Only those where the policy failed, or where the host refused or changed its answer.
    pub faults: bool,
    /// Only those behind this number, which counts at each machine.
    pub since: Option<u64>,
}

impl Wanted {
    fn fits(&self, record: &DecisionRecord) -> bool {
        let is_fault = record.changed.is_some() || record.fallback.is_some_and(|reason| reason.is_strike());
        self.question.as_ref().is_none_or(|question| record.question.name() == question)
            && self.seat.as_ref().is_none_or(|seat| record.question.decision().name() == seat)
            && self.since.is_none_or(|since| record.sequence > since)
            && (!self.faults || is_fault)
    }
}

/// The last decisions, newest last, over all machines.
pub fn log(engine: &Engine, wanted: &Wanted) -> Value {
    let count = wanted.count.min(DECISIONS_MAX);
    let found = engine.decisions(count, |record| wanted.fits(record));
    let of_machine = |machine: &Machine| wanted.machine.as_ref().is_none_or(|name| names(*machine, name));
    let decisions = sorted(found.into_iter().filter(|(machine, _)| of_machine(machine)).collect());
    let skip = decisions.len().saturating_sub(count);
    let decisions = decisions.iter().skip(skip).map(|(machine, record)| numbers(*machine, record));
    json!({ "decisions": decisions.collect::<Vec<_>>() })
}

/// Everything that a policy was told for one decision.
///
/// # Errors
/// Why there is nothing to show.
pub fn inputs(engine: &Engine, machine: &str, sequence: u64) -> Result<Value, String> {
    let machines = engine.decisions(1, |_| true);
    let Some((machine, last)) = machines.iter().find(|(of, _)| names(*of, machine)) else {
        let all: Vec<_> = machines.iter().map(|(machine, _)| machine.to_string()).collect();
        return Err(format!("machine {machine} (there are {})", all.join(", ")));
    };
    if let Some(kept) = engine.inputs(*machine, sequence) {
        return Ok(told(*machine, &kept));
    }
    let decision = format!("input of decision {sequence} at the {machine}");
    if last.first().is_none_or(|last| last.sequence < sequence) {
        return Err(format!("{decision} (it has not been decided yet)"));
    }
    let record = engine.decisions(1, |record| record.sequence == sequence);
    let record = record.into_iter().find(|(of, _)| of == machine).and_then(|(_, mut found)| found.pop());
    Err(match record.map(|record| record.kept) {
        None => format!("{decision} (it has left the ring of the last decisions)"),
        Some(None) => format!("{decision} (it was not in the sample: decisions.sample_ppm)"),
        Some(Some(_)) => format!("{decision} (it has left the ring of inputs: decisions.inputs_bytes)"),
    })
}

fn told(machine: Machine, kept: &InputsKept) -> Value {
    let context: Map<_, _> = kept.context().map(|(name, value)| (name.to_owned(), value.into())).collect();
    let tables = kept.tables().into_iter().map(|KeptTable { rows_are, columns, rows }| {
        let shown: Vec<_> = rows.iter().take(ROWS_MAX).collect();
        json!({"rows_are": rows_are, "columns": columns, "rows": shown, "rows_total": rows.len()})
    });
    let request = kept.request.as_ref().map(|request| {
        json!({
            "request": request.request_id.0.to_string(),
            "class": request.class_rank.get(),
            "priority": request.priority.0,
            "attempt": request.attempt,
            "sequences": request.sequences,
            "input_tokens": request.input_tokens,
            "max_output_tokens": request.max_output_tokens,
            "deadline_us": (request.deadline_us != u64::MAX).then_some(request.deadline_us),
        })
    });
    json!({
        "machine": machine.to_string(),
        "sequence": kept.sequence,
        "question": kept.question.name(),
        "call": kept.call,
        "seed": format!("{:016x}", kept.seed),
        "kept_for": kept.kept_for.name(),
        "request": request,
        "context": context,
        "tables": tables.collect::<Vec<_>>(),
    })
}

/// What happened to one request and why, as far as it is remembered.
///
/// # Errors
/// Why nothing can be told.
pub fn explain(engine: &Engine, request: RequestId) -> Result<Value, String> {
    let moments = engine.moments(request);
    let about = |record: &DecisionRecord| record.request == Some(request);
    let decisions = sorted(engine.decisions(DECISIONS_MAX, about));
    if moments.is_empty() && decisions.is_empty() {
        return Err(unknown(engine, request));
    }
    let story = telling::Story { engine, moments: &moments, decisions: &decisions };
    Ok(json!({
        "request": request.0.to_string(),
        "story": story.lines(),
        "decisions": decisions.iter().map(|(machine, record)| numbers(*machine, record)).collect::<Vec<_>>(),
    }))
}

fn unknown(engine: &Engine, request: RequestId) -> String {
    let oldest = engine.oldest_moment();
    let remembered = |oldest: &Moment| format!(" (the log goes back to request {})", oldest.request.0);
    match (engine.last_request(), oldest) {
        (None, _) => "request at all (none has arrived yet)".to_owned(),
        (Some(last), oldest) if request.gateway_epoch() == last.gateway_epoch() && request <= last => {
            let since = oldest.as_ref().map(remembered).unwrap_or_default();
            format!("trace of request {} any more{since}", request.0)
        }
        (Some(last), _) => {
            format!("request {} (the last one of this server is {}, or chatcmpl-{:016x})", request.0, last.0, last.0)
        }
    }
}

fn names(machine: Machine, name: &str) -> bool {
    machine.to_string() == name || machine.to_string().replace(' ', "") == name
}

fn sorted(found: Vec<(Machine, Vec<DecisionRecord>)>) -> Vec<(Machine, DecisionRecord)> {
    let mut all: Vec<_> = found
        .into_iter()
        .flat_map(|(machine, records)| records.into_iter().map(move |record| (machine, record)))
        .collect();
    all.sort_by_key(|(machine, record)| (record.at, *machine, record.sequence));
    all
}

fn numbers(machine: Machine, record: &DecisionRecord) -> Value {
    json!({
        "machine": machine.to_string(),
        "sequence": record.sequence,
        "generation": record.generation.0,
        "question": record.question.name(),
        "policy": &*record.policy,
        "call": record.call,
        "at_us": record.at.as_us(),
        // Beyond what a number of JSON holds.
        "request": record.request.map(|request| request.0.to_string()),
        "inputs": format!("{:016x}", record.inputs),
        "inputs_kept_for": record.kept.map(|kept| kept.name()),
        "rows": record.rows,
        "proposal": proposal(record.proposal),
        "changed": record.changed.map(|change| change.name()),
        "fallback": record.fallback.map(|reason| reason.name()),
        "took_ns": record.took_ns,
        "fuel": record.fuel,
    })
}

/// One decision as a sentence.
pub fn words(record: &DecisionRecord) -> String {
    let asked = match record.question.decision().name() {
        "admission" => "asked whether it may enter".to_owned(),
        "routing" => format!("asked which of {} replicas runs it", record.rows),
        _ => format!("asked about {} rows", record.rows),
    };
    let mut text = format!(
        "{} ({}, generation {}, call {}) was {asked} and proposed {}",
        record.policy,
        record.question.name(),
        record.generation.0,
        record.call,
        proposal(record.proposal)
    );
    if let Some(change) = record.changed {
        text.push_str(&format!("; the host changed that: {}", change.name()));
    }
    if let Some(reason) = record.fallback {
        text.push_str(&format!("; the native default answered instead: {}", reason.name()));
    }
    text.push_str(&format!(" [{} ns", record.took_ns));
    if record.fuel > 0 {
        text.push_str(&format!(", {} fuel", record.fuel));
    }
    text.push(']');
    text
}

fn proposal(proposal: Proposal) -> String {
    let rows = |first: &[u32], named: u32| {
        let mut rows: Vec<_> = first.iter().filter(|row| **row != u32::MAX).map(|row| row.to_string()).collect();
        if named as usize > rows.len() {
            rows.push(format!("and {} more", named as usize - rows.len()));
        }
        rows.join(", ")
    };
    match proposal {
        Proposal::None => "nothing".to_owned(),
        Proposal::Admit { reserve_output_tokens, class_rank } => {
            format!("to admit it in class {class_rank}, reserving {reserve_output_tokens} output tokens")
        }
        Proposal::Defer { for_us } => format!("to ask again in {for_us} µs"),
        Proposal::Degrade { max_output_tokens, reserve_output_tokens, class_rank } => format!(
            "to admit it in class {class_rank} with at most {max_output_tokens} output tokens, reserving {reserve_output_tokens}"
        ),
        Proposal::Reject { reason, retry_after_ms } => {
            format!("to refuse it, reason {reason}, retry after {retry_after_ms} ms")
        }
        Proposal::Place { ranked, named, wait_us } => {
            let wait =
                if wait_us > 0 { format!(", worth a wait of {wait_us} µs for the first") } else { String::new() };
            format!("rows {}{wait}", rows(&ranked, named))
        }
        Proposal::Hold { for_us } => format!("to hold it for {for_us} µs"),
        Proposal::Rank { ranked, named, keep, .. } => {
            let rest = if keep { ", the rest waits" } else { "" };
            format!("rows {}{rest}", rows(&ranked, named))
        }
        Proposal::Yield { rows: first, named } => format!("that rows {} give way", rows(&first, named)),
        Proposal::Prices { priced, lowest, highest } => format!("{priced} prices from {lowest} to {highest}"),
        Proposal::Stance { level, hold_us, actions } => {
            format!("level {level} with {actions} actions for {hold_us} µs")
        }
    }
}
