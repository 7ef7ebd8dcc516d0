//! Counters, gauges and histograms: what happened, as typed events, in one place.
//!
//! Loops say *what happened* (a core event, an end, a step); this module knows which metrics that moves. Gauges that mirror a state are
//! set from a [`Status`] when the page is asked for.

mod caches;
mod cluster;
mod labels;
mod table;
mod transfer;

use std::collections::BTreeSet;
use std::sync::{Mutex, PoisonError};

use prometheus::core::Collector;
use prometheus::{
    Encoder, Gauge, Histogram, HistogramOpts, HistogramVec, IntCounter, IntCounterVec, IntGauge, IntGaugeVec, Opts,
    Registry, TextEncoder,
};

use penstock_base::{CancelCause, Duration, Generation, Outcome};
use penstock_policy_api::Decision;
use penstock_sched::{gateway::GatewayEvent, replica::ReplicaEvent};

use crate::policies::seats::Machine;
use crate::status::{ReplicaState, Status};

use caches::CacheMetrics;
pub(crate) use labels::MALFORMED;
pub use labels::outcome_labels;
use labels::{admission_outcome, fallback_label, handoff_labels, migration_cause, migration_refusal};
pub use table::{DEFINITIONS, Definition, Kind, describe, describe_all};

/// The engine's metrics and their registry. Cheap to record from any thread.
#[derive(Debug)]
pub struct Metrics {
    registry: Registry,
    waiting: IntGauge,
    running: IntGauge,
    kv_usage: Gauge,
    cache_config: IntGaugeVec,
    prompt_tokens: IntCounter,
    generation_tokens: IntCounter,
    prefix_queries: IntCounter,
    prefix_hits: IntCounter,
    preemptions: IntCounter,
    ttft: Histogram,
    inter_token: Histogram,
    tpot: Histogram,
    e2e: Histogram,
    queue_time: Histogram,
    prefill_time: Histogram,
    decode_time: Histogram,
    request_success: IntCounterVec,
    admission: IntCounterVec,
    verdicts: IntCounterVec,
    ended: IntCounterVec,
    fallbacks: IntCounterVec,
    policy_calls: HistogramVec,
    policy_swaps: HistogramVec,
    policy_activations: IntCounterVec,
    policy_rollbacks: IntCounterVec,
    policy_strikes: IntCounterVec,
    policy_quarantines: IntCounterVec,
    /// Policies that are a label.
    policy_names: Mutex<BTreeSet<String>>,
    generation: IntGauge,
    overload_level: IntGauge,
    quota_share: Gauge,
    journal_bytes: IntCounter,
    journal_segments: IntCounterVec,
    journal_errors: IntCounter,
    journal_queue: IntGauge,
    journal_snapshots: Histogram,
    memory: IntGaugeVec,
    kv_blocks: IntGaugeVec,
    kv_reserved: IntGauge,
    evicted_blocks: IntCounter,
    unstored_blocks: IntCounter,
    replicas: IntGaugeVec,
    freezes: IntCounterVec,
    in_flight: IntGauge,
    pending_bytes: IntGauge,
    send_buffer: IntGauge,
    submit_refused: IntCounterVec,
    slow_clients: IntCounter,
    cancel_time: Histogram,
    step_executor: Histogram,
    step_outside: Histogram,
    step_outside_share: Gauge,
    step_decodes: Histogram,
    step_prefill: Histogram,
    stale_inputs: IntCounterVec,
    clock_clamped: IntCounterVec,
    caches: CacheMetrics,
    handoffs: IntCounterVec,
    migrations: IntCounterVec,
    handoffs_running: IntGauge,
    handoffs_swept: IntCounter,
    transfer_bytes: IntCounter,
    transfer_chunks: IntCounterVec,
    transfer_time: Histogram,
    transport_peers: IntGaugeVec,
    cluster: cluster::ClusterMetrics,
    held_credit: IntCounter,
    no_progress: IntGauge,
    discarded_tokens: IntCounter,
    repeated_tokens: IntCounter,
    diverged: IntCounter,
}

/// What [`Metrics::memory`] is told.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct MemoryBytes {
    /// Weights.
    pub weights: u64,
    /// KV of all replicas.
    pub kv: u64,
    /// Workspace of all replicas.
    pub workspace: u64,
    /// Kept for everything else.
    pub reserve: u64,
    /// What the process may use.
    pub limit: u64,
}

/// Names of policies that become a label; each is a time series of every seat that it sits in.
const POLICY_NAMES_MAX: usize = 64;

/// Makes metrics from definitions and registers them.
struct Maker<'a> {
    registry: &'a Registry,
    model: &'a str,
}

impl Maker<'_> {
    fn opts(&self, definition: &Definition) -> Opts {
        Opts::new(definition.name, definition.help).const_label("model_name", self.model)
    }

    fn add<C: Collector + Clone + 'static>(&self, made: prometheus::Result<C>) -> C {
        let collector = made.expect("the table's names, labels and buckets are well formed: a test makes them all");
        self.registry
            .register(Box::new(collector.clone()))
            .expect("names in the table are unique: a test makes them all");
        collector
    }

    fn counter(&self, definition: &Definition) -> IntCounter {
        self.add(IntCounter::with_opts(self.opts(definition)))
    }

    fn counters(&self, definition: &Definition) -> IntCounterVec {
        self.add(IntCounterVec::new(self.opts(definition), definition.labels))
    }

    fn gauge(&self, definition: &Definition) -> IntGauge {
        self.add(IntGauge::with_opts(self.opts(definition)))
    }

    fn ratio(&self, definition: &Definition) -> Gauge {
        self.add(Gauge::with_opts(self.opts(definition)))
    }

    fn gauges(&self, definition: &Definition) -> IntGaugeVec {
        self.add(IntGaugeVec::new(self.opts(definition), definition.labels))
    }

    fn histogram(&self, definition: &Definition) -> Histogram {
        let opts = HistogramOpts::from(self.opts(definition)).buckets(definition.buckets.to_vec());
        self.add(Histogram::with_opts(opts))
    }

    fn histograms(&self, definition: &Definition) -> HistogramVec {
        let opts = HistogramOpts::from(self.opts(definition)).buckets(definition.buckets.to_vec());
        self.add(HistogramVec::new(opts, definition.labels))
    }
}

impl Metrics {
    /// All metrics, at zero. `model` is the `model_name` label.
    pub fn new(model: &str) -> Self {
        use table as t;
        let registry = Registry::new();
        let make = Maker { registry: &registry, model };
        Self {
            waiting: make.gauge(&t::REQUESTS_WAITING),
            running: make.gauge(&t::REQUESTS_RUNNING),
            kv_usage: make.ratio(&t::KV_USAGE),
            cache_config: make.gauges(&t::CACHE_CONFIG),
            prompt_tokens: make.counter(&t::PROMPT_TOKENS),
            generation_tokens: make.counter(&t::GENERATION_TOKENS),
            prefix_queries: make.counter(&t::PREFIX_QUERIES),
            prefix_hits: make.counter(&t::PREFIX_HITS),
            preemptions: make.counter(&t::PREEMPTIONS),
            ttft: make.histogram(&t::TTFT),
            inter_token: make.histogram(&t::INTER_TOKEN),
            tpot: make.histogram(&t::TPOT),
            e2e: make.histogram(&t::E2E),
            queue_time: make.histogram(&t::QUEUE_TIME),
            prefill_time: make.histogram(&t::PREFILL_TIME),
            decode_time: make.histogram(&t::DECODE_TIME),
            request_success: make.counters(&t::REQUEST_SUCCESS),
            admission: make.counters(&t::ADMISSION),
            verdicts: make.counters(&t::VERDICTS),
            ended: make.counters(&t::ENDED),
            fallbacks: make.counters(&t::FALLBACKS),
            policy_calls: make.histograms(&t::POLICY_CALLS),
            policy_swaps: make.histograms(&t::POLICY_SWAPS),
            policy_activations: make.counters(&t::POLICY_ACTIVATIONS),
            policy_rollbacks: make.counters(&t::POLICY_ROLLBACKS),
            policy_strikes: make.counters(&t::POLICY_STRIKES),
            policy_quarantines: make.counters(&t::POLICY_QUARANTINES),
            policy_names: Mutex::default(),
            generation: make.gauge(&t::GENERATION),
            overload_level: make.gauge(&t::OVERLOAD_LEVEL),
            quota_share: make.ratio(&t::QUOTA_SHARE),
            journal_bytes: make.counter(&t::JOURNAL_BYTES),
            journal_segments: make.counters(&t::JOURNAL_SEGMENTS),
            journal_errors: make.counter(&t::JOURNAL_ERRORS),
            journal_queue: make.gauge(&t::JOURNAL_QUEUE),
            journal_snapshots: make.histogram(&t::JOURNAL_SNAPSHOT),
            memory: make.gauges(&t::MEMORY),
            kv_blocks: make.gauges(&t::KV_BLOCKS),
            kv_reserved: make.gauge(&t::KV_RESERVED),
            evicted_blocks: make.counter(&t::EVICTED_BLOCKS),
            unstored_blocks: make.counter(&t::UNSTORED_BLOCKS),
            replicas: make.gauges(&t::REPLICAS),
            freezes: make.counters(&t::FREEZES),
            in_flight: make.gauge(&t::IN_FLIGHT),
            pending_bytes: make.gauge(&t::PENDING_BYTES),
            send_buffer: make.gauge(&t::SEND_BUFFER),
            submit_refused: make.counters(&t::SUBMIT_REFUSED),
            slow_clients: make.counter(&t::SLOW_CLIENTS),
            cancel_time: make.histogram(&t::CANCEL_TIME),
            step_executor: make.histogram(&t::STEP_EXECUTOR),
            step_outside: make.histogram(&t::STEP_OUTSIDE),
            step_outside_share: make.ratio(&t::STEP_OUTSIDE_SHARE),
            step_decodes: make.histogram(&t::STEP_DECODES),
            step_prefill: make.histogram(&t::STEP_PREFILL),
            stale_inputs: make.counters(&t::STALE_INPUTS),
            clock_clamped: make.counters(&t::CLOCK_CLAMPED),
            caches: CacheMetrics::new(&make),
            handoffs: make.counters(&t::HANDOFFS),
            migrations: make.counters(&t::MIGRATIONS),
            handoffs_running: make.gauge(&t::HANDOFFS_RUNNING),
            handoffs_swept: make.counter(&t::HANDOFFS_SWEPT),
            transfer_bytes: make.counter(&t::TRANSFER_BYTES),
            transfer_chunks: make.counters(&t::TRANSFER_CHUNKS),
            transport_peers: make.gauges(&t::TRANSPORT_PEERS),
            transfer_time: make.histogram(&t::TRANSFER_TIME),
            cluster: cluster::ClusterMetrics::new(&make),
            held_credit: make.counter(&t::HELD_CREDIT),
            no_progress: make.gauge(&t::NO_PROGRESS),
            discarded_tokens: make.counter(&t::DISCARDED_TOKENS),
            repeated_tokens: make.counter(&t::REPEATED_TOKENS),
            diverged: make.counter(&t::DIVERGED),
            registry,
        }
    }

    /// Where others (the HTTP edge) register theirs, so that one page shows all.
    pub fn registry(&self) -> &Registry {
        &self.registry
    }

    /// The page in Prometheus text format, with state gauges as `status` says.
    pub fn render(&self, status: &Status) -> String {
        self.mirror(status);
        let mut page = Vec::new();
        // Encoding into memory fails only for a metric without a name, and the table has none.
        if let Err(error) = TextEncoder::new().encode(&self.registry.gather(), &mut page) {
            tracing::error!(%error, "metrics cannot be encoded");
        }
        String::from_utf8(page).unwrap_or_default()
    }

    /// What the process's memory is for, as settled at its start.
    pub fn memory(&self, bytes: MemoryBytes) {
        for (name, bytes) in [
            ("weights", bytes.weights),
            ("kv", bytes.kv),
            ("workspace", bytes.workspace),
            ("reserve", bytes.reserve),
            ("limit", bytes.limit),
        ] {
            self.memory.with_label_values(&[name]).set(signed(bytes));
        }
    }

    fn mirror(&self, status: &Status) {
        let ready: u64 = status.sum(|load| u64::from(load.ready_requests));
        let total = status.sum(|load| u64::from(load.total_blocks));
        let active = status.sum(|load| u64::from(load.active_blocks));
        self.waiting.set(signed(status.queue.waiting_requests as u64 + ready));
        self.running.set(signed(status.sum(|load| u64::from(load.running_requests))));
        self.kv_usage.set(if total == 0 { 0.0 } else { active as f64 / total as f64 });
        let block_size = status.replicas.first().map_or(0, |replica| replica.block_size_tokens);
        self.cache_config.reset();
        self.cache_config.with_label_values(&[&block_size.to_string(), &total.to_string()]).set(1);
        let cached = status.sum(|load| u64::from(load.cached_blocks));
        let free = status.sum(|load| u64::from(load.free_blocks));
        self.kv_reserved.set(signed(status.sum(|load| u64::from(load.reserved_blocks))));
        let reclaimable = status.sum(|load| u64::from(load.reclaimable_blocks));
        let in_transfer = status.sum(|load| u64::from(load.transfer_blocks));
        for (state, blocks) in [
            ("active", active),
            ("cached", cached),
            ("free", free),
            ("reclaimable", reclaimable),
            ("in_transfer", in_transfer),
        ] {
            self.kv_blocks.with_label_values(&[state]).set(signed(blocks));
        }
        for state in ReplicaState::ALL {
            let count = status.replicas.iter().filter(|replica| replica.state == state).count();
            self.replicas.with_label_values(&[state.name()]).set(signed(count as u64));
        }
        self.in_flight.set(signed(status.queue.in_flight_requests as u64));
        self.pending_bytes.set(signed(status.queue.pending_bytes as u64));
        self.send_buffer.set(signed(status.queue.send_buffer_bytes as u64));
        self.no_progress.set(i64::from(status.stuck));
        let (inside, outside) = (self.step_executor.get_sample_sum(), self.step_outside.get_sample_sum());
        self.step_outside_share.set(if outside > 0.0 { outside / (inside + outside) } else { 0.0 });
    }

    /// What is told and believed of caches.
    pub(crate) fn caches(&self) -> &CacheMetrics {
        &self.caches
    }

    pub(crate) fn gateway_event(&self, event: &GatewayEvent) {
        match *event {
            GatewayEvent::Admission { verdict, .. } => {
                let verdict = ["admit", "defer", "degrade", "reject"].get(usize::from(verdict)).copied();
                self.verdicts.with_label_values(&[verdict.unwrap_or("other")]).inc();
            }
            GatewayEvent::Fallback { decision, reason, .. } => self.fallback(decision, reason),
            GatewayEvent::Stance { level } => self.overload_level.set(i64::from(level)),
            GatewayEvent::QuotaShare { share_ppm } => self.quota_share.set(share_ppm as f64 / 1e6),
            GatewayEvent::HeldCredit { .. } => self.held_credit.inc(),
            GatewayEvent::NoProgress => self.no_progress.set(1),
            GatewayEvent::ProgressResumed => self.no_progress.set(0),
            GatewayEvent::Stale => self.stale("gateway"),
            GatewayEvent::ClockClamped => self.clock_clamped.with_label_values(&["gateway"]).inc(),
            GatewayEvent::CacheGap { .. } => self.caches.gap(),
            GatewayEvent::CacheBelief { believed, .. } => self.caches.belief(believed),
            GatewayEvent::Changed { .. } | GatewayEvent::Routed { .. } | GatewayEvent::Broken(_) => {}
            GatewayEvent::Migrated { cause, .. } => {
                self.migrations.with_label_values(&[migration_cause(cause), "moved"]).inc();
            }
            GatewayEvent::MigrationRefused { cause, why, .. } => {
                self.migrations.with_label_values(&[migration_cause(cause), migration_refusal(why)]).inc();
            }
            GatewayEvent::HandoffBegun { .. } => self.handoffs_running.inc(),
            GatewayEvent::HandoffEnded { end, .. } => {
                self.handoffs_running.dec();
                let (end, why) = handoff_labels(end);
                self.handoffs.with_label_values(&[end, why]).inc();
            }
        }
    }

    pub(crate) fn replica_event(&self, event: &ReplicaEvent) {
        match *event {
            ReplicaEvent::Step { decodes, prefill_tokens } => {
                self.step_decodes.observe(f64::from(decodes));
                self.step_prefill.observe(f64::from(prefill_tokens));
            }
            ReplicaEvent::PrefixLookup { queried_tokens, hit_tokens } => {
                self.prefix_queries.inc_by(u64::from(queried_tokens));
                self.prefix_hits.inc_by(u64::from(hit_tokens));
            }
            ReplicaEvent::Unstored { blocks } => self.unstored_blocks.inc_by(blocks),
            ReplicaEvent::Evicted { blocks } => self.evicted_blocks.inc_by(u64::from(blocks)),
            ReplicaEvent::Preempted { .. } => self.preemptions.inc(),
            ReplicaEvent::Fallback { decision, reason, .. } => self.fallback(decision, reason),
            ReplicaEvent::Stale => self.stale("replica"),
            ReplicaEvent::ClockClamped => self.clock_clamped.with_label_values(&["replica"]).inc(),
            ReplicaEvent::Changed { .. } | ReplicaEvent::Broken(_) => {}
        }
    }

    /// An input that the driver itself dropped, or that a machine called stale.
    pub(crate) fn stale(&self, machine: &'static str) {
        self.stale_inputs.with_label_values(&[machine]).inc();
    }

    fn fallback(&self, decision: u8, reason: u8) {
        let decision = ["admission", "routing", "fairness", "eviction", "overload"].get(usize::from(decision)).copied();
        self.fallbacks.with_label_values(&[decision.unwrap_or("other"), fallback_label(reason)]).inc();
    }

    /// Another policy set is in force at the gateway.
    pub(crate) fn policy_generation(&self, generation: Generation) {
        self.generation.set(signed(generation.0));
    }

    /// A machine stood still for `pause` while the next policy set took over.
    pub(crate) fn policy_swapped(&self, machine: Machine, pause: Duration) {
        let machine = match machine {
            Machine::Gateway => "gateway",
            Machine::Replica(_) => "replica",
        };
        self.policy_swaps.with_label_values(&[machine]).observe(seconds(pause));
    }

    /// What became of an attempt to put another policy set in force.
    pub(crate) fn policy_activation(&self, outcome: &'static str) {
        self.policy_activations.with_label_values(&[outcome]).inc();
    }

    /// A set that was in force before is in force again; `automatic` when a policy's quarantine was the cause.
    pub fn policy_rolled_back(&self, automatic: bool) {
        self.policy_rollbacks.with_label_values(&[if automatic { "quarantine" } else { "asked" }]).inc();
    }

    /// A policy failed, or its answer was refused. Both names are of closed sets.
    pub fn policy_struck(&self, decision: &'static str, reason: &'static str) {
        self.policy_strikes.with_label_values(&[decision, reason]).inc();
    }

    /// A policy is not asked for a while.
    pub fn policy_quarantined(&self, decision: &'static str) {
        self.policy_quarantines.with_label_values(&[decision]).inc();
    }

    /// Times of one policy's answers. Policies name themselves, so that only so many names become a label.
    pub(crate) fn policy_calls(&self, decision: Decision, policy: &str) -> Histogram {
        let mut names = self.policy_names.lock().unwrap_or_else(PoisonError::into_inner);
        let is_shown = names.contains(policy) || names.len() < POLICY_NAMES_MAX && names.insert(policy.to_owned());
        let policy = if is_shown { policy } else { "other" };
        self.policy_calls.with_label_values(&[decision.name(), policy])
    }

    pub(crate) fn journal_wrote(&self, bytes: u64) {
        self.journal_bytes.inc_by(bytes);
    }

    /// A segment has ended; `ending` is of a closed set.
    pub(crate) fn journal_segment(&self, ending: &'static str) {
        self.journal_segments.with_label_values(&[ending]).inc();
    }

    pub(crate) fn journal_error(&self) {
        self.journal_errors.inc();
    }

    pub(crate) fn journal_waiting(&self, bytes: usize) {
        self.journal_queue.set(signed(bytes as u64));
    }

    pub(crate) fn journal_snapshot(&self, took: Duration) {
        self.journal_snapshots.observe(seconds(took));
    }

    pub(crate) fn frozen(&self, cause: &'static str) {
        self.freezes.with_label_values(&[cause]).inc();
    }

    pub(crate) fn submit_refused(&self, reason: &'static str) {
        self.submit_refused.with_label_values(&[reason]).inc();
    }

    pub(crate) fn cancelled_after(&self, took: Duration) {
        self.cancel_time.observe(seconds(took));
    }

    pub(crate) fn step_took(&self, inside: Duration, outside: Option<Duration>) {
        self.step_executor.observe(seconds(inside));
        if let Some(outside) = outside {
            self.step_outside.observe(seconds(outside));
        }
    }

    pub(crate) fn first_token(&self, since_arrival: Duration, since_placed: Duration) {
        self.ttft.observe(seconds(since_arrival));
        self.prefill_time.observe(seconds(since_placed));
    }

    pub(crate) fn next_tokens(&self, tokens: usize, since_last: Duration) {
        let each = seconds(since_last) / tokens.max(1) as f64;
        for _ in 0..tokens {
            self.inter_token.observe(each);
        }
    }

    pub(crate) fn delivered(&self, tokens: usize) {
        self.generation_tokens.inc_by(tokens as u64);
    }

    pub(crate) fn discarded(&self, tokens: usize) {
        self.discarded_tokens.inc_by(tokens as u64);
    }

    pub(crate) fn repeated(&self, tokens: usize) {
        self.repeated_tokens.inc_by(tokens as u64);
    }

    pub(crate) fn diverged(&self) {
        self.diverged.inc();
    }

    /// One answer of `tokens` tokens whose first and last lie `span` apart is complete.
    pub(crate) fn answer_ended(&self, tokens: u32, span: Duration) {
        if tokens > 1 {
            self.tpot.observe(seconds(span) / f64::from(tokens - 1));
        }
    }

    pub(crate) fn request_ended(&self, end: &RequestEnd) {
        self.e2e.observe(seconds(end.since_arrival));
        let (outcome, detail) = outcome_labels(end.outcome);
        self.ended.with_label_values(&[outcome, detail]).inc();
        if matches!(end.outcome, Outcome::Cancelled(CancelCause::SlowClient)) {
            self.slow_clients.inc();
        }
        let finished = match end.outcome {
            Outcome::Stop => "stop",
            Outcome::Length => "length",
            Outcome::Cancelled(_) | Outcome::TimedOut(_) => "abort",
            Outcome::Refused(_) | Outcome::Failed(_) => "error",
        };
        self.request_success.with_label_values(&[finished]).inc();
        self.admission.with_label_values(&[admission_outcome(end.outcome, end.placed_after.is_some()), detail]).inc();
        if let Some(queued) = end.placed_after {
            self.queue_time.observe(seconds(queued));
            self.prompt_tokens.inc_by(u64::from(end.prompt_tokens));
        }
        if let Some(decode) = end.decode {
            self.decode_time.observe(seconds(decode));
        }
    }
}

/// What is measured of one request when it is over.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RequestEnd {
    pub outcome: Outcome,
    pub since_arrival: Duration,
    /// From arrival to the last placement; none when it was never placed.
    pub placed_after: Option<Duration>,
    /// From the first token to the end.
    pub decode: Option<Duration>,
    pub prompt_tokens: u32,
}

fn seconds(duration: Duration) -> f64 {
    duration.0 as f64 / 1e9
}

fn signed(value: u64) -> i64 {
    i64::try_from(value).unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::status::{QueueStatus, ReplicaStatus};
    use penstock_base::Refusal;
    use penstock_base::{ReplicaEpoch, ReplicaId};
    use penstock_sched::message::Load;

    fn quiet() -> Status {
        Status {
            ready: true,
            live: true,
            draining: false,
            stuck: false,
            replicas: Vec::new(),
            queue: QueueStatus::default(),
        }
    }

    #[test]
    fn every_definition_is_made_and_nothing_else() {
        let metrics = Metrics::new("demo");
        // Labelled families show once they have a child.
        for (family, labels) in [
            (&metrics.request_success, &["stop"][..]),
            (&metrics.admission, &["Dispatched", ""][..]),
            (&metrics.verdicts, &["admit"][..]),
            (&metrics.ended, &["stop", ""][..]),
            (&metrics.fallbacks, &["routing", "0"][..]),
            (&metrics.policy_activations, &["activated"][..]),
            (&metrics.freezes, &["panic"][..]),
            (&metrics.submit_refused, &["requests"][..]),
            (&metrics.stale_inputs, &["gateway"][..]),
            (&metrics.clock_clamped, &["gateway"][..]),
            (&metrics.handoffs, &["handed_off", ""][..]),
            (&metrics.migrations, &["lost", "moved"][..]),
            (&metrics.transfer_chunks, &["written"][..]),
        ] {
            family.with_label_values(labels).inc();
        }
        metrics.caches().turn_dropped();
        metrics.policy_calls(Decision::Routing, "best");
        metrics.policy_rolled_back(true);
        metrics.policy_struck("routing", "trap");
        metrics.journal_segment("complete");
        metrics.policy_quarantined("routing");
        metrics.transport_peers(&[]);
        metrics.memory(MemoryBytes::default());
        cluster::show(&metrics);
        metrics.policy_swapped(Machine::Gateway, Duration(1));
        let page = metrics.render(&quiet());
        let made: BTreeSet<_> =
            page.lines().filter_map(|line| line.strip_prefix("# TYPE ")?.split(' ').next()).collect();
        let defined: BTreeSet<_> = DEFINITIONS.iter().map(|definition| definition.name).collect();
        assert_eq!(made, defined);
    }

    #[test]
    fn the_document_has_one_row_a_metric_and_labels_are_bounded() {
        let document = describe_all();
        assert_eq!(document.lines().count(), DEFINITIONS.len() + 2);
        for definition in DEFINITIONS {
            assert!(!definition.labels.iter().any(|label| ["tenant", "request", "user"].contains(label)));
            assert!(definition.buckets.is_sorted());
            assert_eq!(definition.kind == Kind::Histogram, !definition.buckets.is_empty());
        }
    }

    #[test]
    fn only_so_many_policies_are_a_label() {
        let metrics = Metrics::new("demo");
        for which in 0..POLICY_NAMES_MAX + 5 {
            metrics.policy_calls(Decision::Routing, &format!("policy-{which}")).observe(0.1);
        }
        let page = metrics.render(&quiet());
        let counts = "penstock_policy_call_duration_seconds_count{decision=\"routing\",model_name=\"demo\",policy=";
        assert_eq!(page.lines().filter(|line| line.starts_with(counts)).count(), POLICY_NAMES_MAX + 1);
        assert!(page.contains(&format!("{counts}\"other\"}} 5")), "{page}");
    }

    #[test]
    fn the_states_of_blocks_sum_up_to_the_pool() {
        let load = Load {
            total_blocks: 100,
            active_blocks: 30,
            cached_blocks: 20,
            free_blocks: 45,
            reclaimable_blocks: 4,
            transfer_blocks: 1,
            ..Load::default()
        };
        let replica = ReplicaStatus {
            replica: ReplicaId(0),
            epoch: ReplicaEpoch(1),
            state: ReplicaState::Ready,
            load: Load { reserved_blocks: 12, ..load },
            generation: Generation(1),
            slots: 8,
            block_size_tokens: 16,
            context_tokens_max: 100,
        };
        let page = Metrics::new("demo").render(&Status { replicas: vec![replica], ..quiet() });
        let value = |name: &str| {
            let line = page.lines().find(|line| line.starts_with(name)).unwrap();
            line.rsplit(' ').next().unwrap().parse::<f64>().unwrap()
        };
        let states = ["active", "cached", "free", "reclaimable", "in_transfer"];
        let blocks = states.map(|state| value(&format!("penstock_kv_blocks{{model_name=\"demo\",state=\"{state}\"}}")));
        assert_eq!(blocks, [30.0, 20.0, 45.0, 4.0, 1.0]);
        assert_eq!(value("penstock_kv_reserved_blocks"), 12.0);
        assert_eq!(value("vllm:kv_cache_usage_perc"), 0.3);
        assert_eq!(value("vllm:cache_config_info{block_size=\"16\",model_name=\"demo\",num_gpu_blocks=\"100\"}"), 1.0);
    }

    #[test]
    fn an_end_moves_the_families_that_vllm_and_gie_users_look_at() {
        let metrics = Metrics::new("demo");
        metrics.request_ended(&RequestEnd {
            outcome: Outcome::Refused(Refusal::QueueFull),
            since_arrival: Duration::from_ms(1),
            placed_after: None,
            decode: None,
            prompt_tokens: 3,
        });
        metrics.request_ended(&RequestEnd {
            outcome: Outcome::Length,
            since_arrival: Duration::from_ms(20),
            placed_after: Some(Duration::from_ms(2)),
            decode: Some(Duration::from_ms(10)),
            prompt_tokens: 3,
        });
        let page = metrics.render(&quiet());
        for line in [
            "vllm:request_success_total{finished_reason=\"error\",model_name=\"demo\"} 1",
            "vllm:request_success_total{finished_reason=\"length\",model_name=\"demo\"} 1",
            "penstock_admission_total{model_name=\"demo\",outcome=\"RejectedCapacity\",reason=\"queue_full\"} 1",
            "penstock_admission_total{model_name=\"demo\",outcome=\"Dispatched\",reason=\"\"} 1",
            "vllm:prompt_tokens_total{model_name=\"demo\"} 3",
            "vllm:request_queue_time_seconds_count{model_name=\"demo\"} 1",
        ] {
            assert!(page.contains(line), "{line} is missing in\n{page}");
        }
    }
}
