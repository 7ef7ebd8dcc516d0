//! Decisions in words and numbers, for people who ask why.

use penstock_base::RequestId;
use penstock_engine::{DecisionRecord, Engine, Machine, Proposal};
use serde_json::{Value, json};

/// Most decisions of one answer.
pub const DECISIONS_MAX: usize = 1_024;

/// The last decisions, newest last, over all machines.
pub fn log(engine: &Engine, count: usize, question: Option<&str>) -> Value {
    let fits = |record: &DecisionRecord| question.is_none_or(|question| record.question.name() == question);
    let decisions = sorted(engine.decisions(count.min(DECISIONS_MAX), fits));
    let skip = decisions.len().saturating_sub(count.min(DECISIONS_MAX));
    let decisions = decisions.iter().skip(skip).map(|(machine, record)| numbers(*machine, record));
    json!({ "decisions": decisions.collect::<Vec<_>>() })
}

/// What was decided about one request, as far as the rings remember.
pub fn explain(engine: &Engine, request: RequestId) -> Option<Value> {
    let about = |record: &DecisionRecord| record.request == Some(request);
    let decisions = sorted(engine.decisions(DECISIONS_MAX, about));
    let first = decisions.first()?.1.at;
    let line = |(machine, record): &(Machine, DecisionRecord)| {
        let after_us = record.at.since(first).as_us();
        format!("+{after_us} µs, {machine}: {}", words(record))
    };
    Some(json!({
        "request": request.0.to_string(),
        "story": decisions.iter().map(line).collect::<Vec<_>>(),
        "decisions": decisions.iter().map(|(machine, record)| numbers(*machine, record)).collect::<Vec<_>>(),
    }))
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
        "rows": record.rows,
        "proposal": proposal(record.proposal),
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
        "{} ({}, generation {}) was {asked} and proposed {}",
        record.policy,
        record.question.name(),
        record.generation.0,
        proposal(record.proposal)
    );
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
