//! What do all records say together? Keys as vLLM's serving benchmark has them; ours are additions.

use std::collections::BTreeMap;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use serde::Serialize;
use serde_json::{Map, Value};

use crate::plan::{Load, Objectives, Plan};
use crate::record::{Outcome, Record};
use crate::statistics::{PERCENTILES, Statistics};

/// A run in numbers. Failed requests stand in `failed` and `errors` and in the denominator of attainment, never in the times.
#[derive(Clone, Debug, Serialize)]
pub struct Summary {
    /// Seconds since 1970 at the end of the run.
    pub ended_unix_s: u64,
    /// Version of the generator.
    pub penstock_version: &'static str,
    /// Where requests went.
    pub base_url: String,
    /// Which API.
    pub endpoint: &'static str,
    /// The model asked for.
    pub model_id: String,
    /// Prompts and arrivals follow from it.
    pub seed: u64,
    /// Requests of the plan.
    pub num_prompts: usize,
    /// Arrivals per second; `inf` in a closed loop.
    pub request_rate: Value,
    /// Requests in flight at most.
    pub max_concurrency: usize,
    /// Was the run ended before its plan?
    pub is_interrupted: bool,
    /// Seconds from the first sending to the last end.
    pub duration: f64,
    /// Whole answers.
    pub completed: usize,
    /// Requests without one.
    pub failed: usize,
    /// Failed requests by how they ended.
    pub errors: BTreeMap<&'static str, usize>,
    /// Prompt tokens of whole answers, as the server counts them.
    pub total_input_tokens: u64,
    /// Of these, found in the server's prefix cache.
    pub total_cached_tokens: u64,
    /// Tokens of whole answers.
    pub total_output_tokens: u64,
    /// Who counted the output tokens: `usage` (the server) or `events` (one token an event).
    pub output_tokens_from: &'static str,
    /// Whole answers per second.
    pub request_throughput: f64,
    /// Whole answers that met all objectives, per second; none without objectives.
    pub request_goodput: Option<f64>,
    /// Requests that met all objectives, over all that were sent; none without objectives.
    pub slo_attainment: Option<f64>,
    /// Tokens answered per second.
    pub output_throughput: f64,
    /// Tokens asked and answered per second.
    pub total_token_throughput: f64,
    /// By how much requests were sent late, 99th percentile. Not small against the TTFT: the client is the bottleneck, or `max_concurrency` binds.
    pub p99_sent_late_ms: f64,
    /// `{mean,median,std,p50,p90,p95,p99}_{ttft,tpot,itl,e2el}_ms`.
    #[serde(flatten)]
    pub times: Times,
}

/// The four times, in milliseconds.
#[derive(Clone, Copy, Debug, Default)]
pub struct Times {
    /// To the first token.
    pub ttft: Statistics,
    /// Per token after the first.
    pub tpot: Statistics,
    /// Between events.
    pub itl: Statistics,
    /// To the end.
    pub e2el: Statistics,
}

impl Serialize for Times {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut keys = Map::new();
        let named = [("ttft", self.ttft), ("tpot", self.tpot), ("itl", self.itl), ("e2el", self.e2el)];
        for (name, seen) in named {
            let mut put = |what: &str, value: f64| keys.insert(format!("{what}_{name}_ms"), value.into());
            put("mean", seen.mean);
            put("median", seen.median);
            put("std", seen.std);
            for (percent, value) in PERCENTILES.iter().zip(seen.percentiles) {
                put(&format!("p{percent}"), value);
            }
        }
        keys.serialize(serializer)
    }
}

impl Summary {
    /// Sums up; `elapsed` is the whole run's.
    #[must_use]
    pub(crate) fn of(plan: &Plan, model: &str, records: &[Record], elapsed: Duration, is_interrupted: bool) -> Self {
        let completed: Vec<&Record> = records.iter().filter(|record| record.outcome == Outcome::Completed).collect();
        let mut errors = BTreeMap::new();
        for record in records.iter().filter(|record| record.outcome != Outcome::Completed) {
            *errors.entry(record.outcome.name()).or_insert(0) += 1;
        }
        let duration = elapsed.as_secs_f64().max(f64::MIN_POSITIVE);
        let sum = |of: fn(&Record) -> u64| completed.iter().map(|record| of(record)).sum::<u64>();
        let total_input_tokens = sum(|record| record.input_tokens.unwrap_or(0));
        let total_output_tokens = sum(|record| record.output_tokens);
        let is_server_count = !completed.is_empty() && completed.iter().all(|record| record.is_server_count);
        let good = completed.iter().filter(|record| is_good(record, plan.objectives)).count() as f64;
        let judged = plan.objectives.is_set();
        let (request_rate, max_concurrency) = match plan.load {
            Load::Closed { streams } => (Value::from("inf"), streams.get()),
            Load::Open { per_second, in_flight_max } => (Value::from(per_second), in_flight_max.get()),
        };
        Self {
            ended_unix_s: SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs()),
            penstock_version: env!("CARGO_PKG_VERSION"),
            base_url: plan.url.clone(),
            endpoint: plan.endpoint.path(),
            model_id: model.to_owned(),
            seed: plan.seed,
            num_prompts: plan.requests,
            request_rate,
            max_concurrency,
            is_interrupted,
            duration,
            completed: completed.len(),
            failed: records.len() - completed.len(),
            errors,
            total_input_tokens,
            total_cached_tokens: sum(|record| record.cached_tokens.unwrap_or(0)),
            total_output_tokens,
            output_tokens_from: if is_server_count { "usage" } else { "events" },
            request_throughput: completed.len() as f64 / duration,
            request_goodput: judged.then_some(good / duration),
            slo_attainment: judged.then_some(good / records.len().max(1) as f64),
            output_throughput: total_output_tokens as f64 / duration,
            total_token_throughput: (total_input_tokens + total_output_tokens) as f64 / duration,
            p99_sent_late_ms: late(records),
            times: times(&completed),
        }
    }
}

fn is_good(record: &Record, objectives: Objectives) -> bool {
    // An answer of one token has no time per token, and so cannot miss it.
    let met = |seen: Option<f64>, most: Option<f64>| most.is_none_or(|most| seen.is_none_or(|seen| seen <= most));
    let has_first = objectives.ttft_ms.is_none() || record.ttft_ms.is_some();
    has_first && met(record.ttft_ms, objectives.ttft_ms) && met(record.tpot_ms, objectives.tpot_ms)
}

fn late(records: &[Record]) -> f64 {
    let late = records.iter().map(|record| (record.sent_ms - record.due_ms).max(0.0)).collect();
    Statistics::of(late).percentiles[3]
}

fn times(completed: &[&Record]) -> Times {
    let of = |pick: fn(&Record) -> Option<f64>| Statistics::of(completed.iter().filter_map(|r| pick(r)).collect());
    Times {
        ttft: of(|record| record.ttft_ms),
        tpot: of(|record| record.tpot_ms),
        itl: Statistics::of(completed.iter().flat_map(|record| record.gaps_ms.iter().copied()).collect()),
        e2el: of(|record| Some(record.e2el_ms)),
    }
}
