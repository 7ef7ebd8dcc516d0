//! Every metric of the engine: name, kind, meaning, labels, buckets. `docs/metrics.md` is generated from this table.
//!
//! Names and meanings that vLLM and the Gateway API Inference Extension define are kept letter for letter. Labels are closed enums or
//! capped sets; a tenant, a request id or free text is never one.

use std::fmt::Write as _;

/// What a metric is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kind {
    /// Only grows.
    Counter,
    /// Goes up and down.
    Gauge,
    /// Distribution.
    Histogram,
}

/// One metric.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Definition {
    /// Name as exported.
    pub name: &'static str,
    /// What it is.
    pub kind: Kind,
    /// One sentence: what is measured, in which unit, when.
    pub help: &'static str,
    /// Label names, beside `model_name`, which every metric carries.
    pub labels: &'static [&'static str],
    /// Upper bounds of a histogram's buckets, in the metric's unit.
    pub buckets: &'static [f64],
}

impl Definition {
    /// A counter.
    pub const fn counter(name: &'static str, help: &'static str, labels: &'static [&'static str]) -> Self {
        Self { name, kind: Kind::Counter, help, labels, buckets: &[] }
    }
    /// A gauge.
    pub const fn gauge(name: &'static str, help: &'static str, labels: &'static [&'static str]) -> Self {
        Self { name, kind: Kind::Gauge, help, labels, buckets: &[] }
    }
    /// A histogram.
    pub const fn histogram(name: &'static str, help: &'static str, buckets: &'static [f64]) -> Self {
        Self { name, kind: Kind::Histogram, help, labels: &[], buckets }
    }
    /// A histogram for each of some labels.
    pub const fn histograms(
        name: &'static str,
        help: &'static str,
        labels: &'static [&'static str],
        buckets: &'static [f64],
    ) -> Self {
        Self { name, kind: Kind::Histogram, help, labels, buckets }
    }
}

/// First-token times: vLLM's buckets.
const TTFT_S: &[f64] =
    &[0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0];
/// Times between tokens: vLLM's buckets.
const TOKEN_S: &[f64] =
    &[0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0];
/// Times of whole requests and their parts: vLLM's buckets, with a finer start.
const REQUEST_S: &[f64] = &[
    0.01, 0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0,
    480.0,
];
/// Parts of one step.
const STEP_S: &[f64] = &[
    0.000_01, 0.000_02, 0.000_05, 0.000_1, 0.000_2, 0.000_5, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0,
    2.0, 5.0,
];
/// One call of a policy, and one swap.
const CALL_S: &[f64] = &[
    0.000_000_2,
    0.000_000_5,
    0.000_001,
    0.000_002,
    0.000_005,
    0.000_01,
    0.000_02,
    0.000_05,
    0.000_1,
    0.000_2,
    0.000_5,
    0.001,
    0.002,
    0.005,
    0.01,
    0.1,
];
/// Powers of two up to the largest step.
const COUNTS: &[f64] = &[
    1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1_024.0, 2_048.0, 4_096.0, 8_192.0, 16_384.0, 32_768.0,
    65_536.0,
];

macro_rules! table {
    ($($(#[$doc:meta])* $name:ident = $definition:expr;)*) => {
        $($(#[$doc])* #[doc = "See [`DEFINITIONS`]."] pub const $name: Definition = $definition;)*

        /// All metrics of the engine, in the order of the documentation.
        pub const DEFINITIONS: &[Definition] = &[$($name),*];
    };
}

table! {
    REQUESTS_WAITING = Definition::gauge(
        "vllm:num_requests_waiting",
        "Requests that wait: in the gateway's queues and in the replicas' ready windows.",
        &[],
    );
    REQUESTS_RUNNING = Definition::gauge("vllm:num_requests_running", "Requests in the replicas' batches.", &[]);
    KV_USAGE = Definition::gauge(
        "vllm:kv_cache_usage_perc",
        "Referenced KV blocks over all blocks, 0 to 1. Blocks that are only cached do not count.",
        &[],
    );
    CACHE_CONFIG = Definition::gauge(
        "vllm:cache_config_info",
        "Always 1; the labels tell the tokens of a block and the blocks of all replicas.",
        &["block_size", "num_gpu_blocks"],
    );
    PROMPT_TOKENS = Definition::counter("vllm:prompt_tokens_total", "Prompt tokens of requests that ended after they ran.", &[]);
    GENERATION_TOKENS = Definition::counter("vllm:generation_tokens_total", "Output tokens handed to clients' streams, those that a client which left had not read included.", &[]);
    PREFIX_QUERIES = Definition::counter("vllm:prefix_cache_queries_total", "Prompt tokens looked up in the prefix cache.", &[]);
    PREFIX_HITS = Definition::counter("vllm:prefix_cache_hits_total", "Prompt tokens found in the prefix cache.", &[]);
    PREEMPTIONS = Definition::counter("vllm:num_preemptions_total", "Sequences that gave their blocks back before their end.", &[]);
    TTFT = Definition::histogram(
        "vllm:time_to_first_token_seconds",
        "From the complete request received to its first token handed to the client's stream.",
        TTFT_S,
    );
    INTER_TOKEN = Definition::histogram(
        "vllm:inter_token_latency_seconds",
        "Between two tokens of one answer; tokens that come together share the time since the last ones.",
        TOKEN_S,
    );
    TPOT = Definition::histogram(
        "vllm:request_time_per_output_token_seconds",
        "Of one answer: (last token - first token) / (tokens - 1); none for answers of one token.",
        TOKEN_S,
    );
    E2E = Definition::histogram("vllm:e2e_request_latency_seconds", "From the complete request received to its end.", REQUEST_S);
    QUEUE_TIME = Definition::histogram(
        "vllm:request_queue_time_seconds",
        "From the complete request received to its last placement, for requests that were placed.",
        REQUEST_S,
    );
    PREFILL_TIME = Definition::histogram("vllm:request_prefill_time_seconds", "From the last placement to the first token.", REQUEST_S);
    DECODE_TIME = Definition::histogram("vllm:request_decode_time_seconds", "From the first token to the end.", REQUEST_S);
    REQUEST_SUCCESS = Definition::counter(
        "vllm:request_success_total",
        "Requests by how they ended: stop, length, abort (ended early by anyone) or error.",
        &["finished_reason"],
    );
    ADMISSION = Definition::counter(
        "penstock_admission_total",
        "Requests by what became of them at the gateway, in the words of the Gateway API Inference Extension, and why.",
        &["outcome", "reason"],
    );
    VERDICTS = Definition::counter("penstock_admission_verdicts_total", "Verdicts of the admission policy.", &["verdict"]);
    ENDED = Definition::counter("penstock_requests_ended_total", "Requests by their exact end.", &["outcome", "detail"]);
    FALLBACKS = Definition::counter(
        "penstock_policy_fallbacks_total",
        "Questions that the native default answered because the policy's answer was not usable.",
        &["decision", "reason"],
    );
    POLICY_CALLS = Definition::histograms(
        "penstock_policy_call_duration_seconds",
        "Time inside a policy for one question.",
        &["decision", "policy"],
        CALL_S,
    );
    POLICY_SWAPS = Definition::histograms(
        "penstock_policy_swap_duration_seconds",
        "Time for which a machine stood still while the next policy set took over.",
        &["machine"],
        CALL_S,
    );
    POLICY_ACTIVATIONS = Definition::counter(
        "penstock_policy_activations_total",
        "Attempts to put a policy set in force: activated, refused, timed_out, crowded (sets that left have not ended), not_running; and native_in_place where a replica that \
         started anew could not make its set again.",
        &["outcome"],
    );
    POLICY_ROLLBACKS = Definition::counter(
        "penstock_policy_rollbacks_total",
        "Returns to a set that was in force before: asked, or quarantine where a policy failed too often.",
        &["cause"],
    );
    POLICY_STRIKES = Definition::counter(
        "penstock_policy_strikes_total",
        "Failures of policies and answers that the host refused, as reported by what runs the policies.",
        &["decision", "reason"],
    );
    POLICY_QUARANTINES = Definition::counter(
        "penstock_policy_quarantines_total",
        "Times a policy failed so often that it was not asked for a while.",
        &["decision"],
    );
    GENERATION = Definition::gauge("penstock_policy_generation", "Generation of the policy set in force at the gateway.", &[]);
    OVERLOAD_LEVEL = Definition::gauge("penstock_overload_level", "Level of the overload stance in force, 0 to 4.", &[]);
    QUOTA_SHARE = Definition::gauge(
        "penstock_quota_share_ratio",
        "Part of the tenants' quotas that this gateway may give out now, 0 to 1. 1 where it is alone; with several gateways what its lease says, and the floor without one.",
        &[],
    );
    JOURNAL_BYTES = Definition::counter("penstock_journal_bytes_total", "Bytes written to the journal.", &[]);
    JOURNAL_SEGMENTS = Definition::counter(
        "penstock_journal_segments_total",
        "Journal segments that have ended: complete, or broken off, by cause.",
        &["ending"],
    );
    JOURNAL_ERRORS = Definition::counter("penstock_journal_errors_total", "Times the disk did not take the journal.", &[]);
    JOURNAL_QUEUE = Definition::gauge("penstock_journal_queue_bytes", "Bytes that wait for the journal's writer.", &[]);
    JOURNAL_SNAPSHOT = Definition::histogram(
        "penstock_journal_snapshot_seconds",
        "How long a machine stood still to say what it knows, at the opening of a journal segment.",
        CALL_S,
    );
    MEMORY = Definition::gauge(
        "penstock_memory_bytes",
        "Where the memory goes, as settled at the start: weights, kv of all replicas, workspace, reserve for everything else, and the limit that they keep to.",
        &["use"],
    );
    KV_BLOCKS = Definition::gauge("penstock_kv_blocks", "KV blocks of all replicas by state.", &["state"]);
    KV_RESERVED = Definition::gauge(
        "penstock_kv_reserved_blocks",
        "Blocks promised to running requests and not allocated yet; they are among the free and the cached ones.",
        &[],
    );
    EVICTED_BLOCKS = Definition::counter("penstock_evicted_blocks_total", "Blocks that left the prefix cache to make room.", &[]);
    UNSTORED_BLOCKS = Definition::counter(
        "penstock_unstored_blocks_total",
        "Computed blocks that the prefix cache did not take: too many tenants have content there, or what precedes them is gone.",
        &[],
    );
    REPLICAS = Definition::gauge("penstock_replicas", "Replicas by state: warming (its machine has not started), ready, draining, unhealthy (it broke and starts anew), terminated (its executor is lost). Only ready ones get work.", &["state"]);
    FREEZES = Definition::counter("penstock_replica_freezes_total", "Replicas taken out of service, by cause.", &["cause"]);
    IN_FLIGHT = Definition::gauge("penstock_requests_in_flight", "Submissions whose work or whose stream is not over.", &[]);
    PENDING_BYTES = Definition::gauge("penstock_pending_bytes", "Bytes of prompts that these keep alive.", &[]);
    SEND_BUFFER = Definition::gauge("penstock_send_buffer_bytes", "Bytes in clients' streams that wait to be read.", &[]);
    SUBMIT_REFUSED = Definition::counter(
        "penstock_submissions_refused_total",
        "Submissions refused by the driver's own bounds, before the gateway saw them.",
        &["reason"],
    );
    SLOW_CLIENTS = Definition::counter("penstock_slow_clients_total", "Requests cancelled because their client read too slowly.", &[]);
    CANCEL_TIME = Definition::histogram(
        "penstock_cancel_seconds",
        "From a cancel's arrival to the word of the replica that it does nothing more for the request; requests that no replica had do not count.",
        STEP_S,
    );
    STEP_EXECUTOR = Definition::histogram("penstock_step_executor_seconds", "Time of one step inside the executor.", STEP_S);
    STEP_OUTSIDE = Definition::histogram(
        "penstock_step_outside_seconds",
        "Time between two steps in which the executor had nothing to do although the next step followed from the last.",
        STEP_S,
    );
    STEP_OUTSIDE_SHARE = Definition::gauge(
        "penstock_step_outside_ratio",
        "Share of busy step time outside the executor since the start, 0 to 1.",
        &[],
    );
    STEP_DECODES = Definition::histogram("penstock_step_decode_rows", "Decode rows of one step.", COUNTS);
    STEP_PREFILL = Definition::histogram("penstock_step_prefill_tokens", "Prefill tokens of one step.", COUNTS);
    STALE_INPUTS = Definition::counter(
        "penstock_stale_inputs_total",
        "Inputs of an old epoch, or about a request or sequence that is over: counted, without effect.",
        &["machine"],
    );
    CLOCK_CLAMPED = Definition::counter("penstock_clock_clamped_total", "Times the clock seemed to run backwards.", &["machine"]);
    CACHE_GAPS = Definition::counter("penstock_cache_event_gaps_total", "Gaps seen in replicas' cache events.", &[]);
    CACHE_DOUBTS = Definition::counter(
        "penstock_cache_doubts_total",
        "Times that what is known of a replica's cache was not believed any more: events are missing, or nothing was heard for longer than policy.stale_cache_ms.",
        &[],
    );
    CACHES_DOUBTED = Definition::gauge(
        "penstock_replicas_routed_by_load",
        "Replicas whose cache is not known well enough to count: requests go to them by load alone.",
        &[],
    );
    KV_EVENT_BATCHES = Definition::counter("penstock_kv_event_batches_total", "Batches of KV events published.", &[]);
    KV_EVENT_DROPS = Definition::counter(
        "penstock_kv_event_drops_total",
        "Batches of KV events that were not told: at the queue to the publisher (nobody got them, and all is told anew), or at a subscriber that reads too slowly.",
        &["at"],
    );
    KV_EVENT_SUBSCRIBERS = Definition::gauge("penstock_kv_event_subscribers", "Subscribers of KV events now.", &[]);
    HANDOFFS = Definition::counter(
        "penstock_handoffs_total",
        "Hand-offs of a request between the replica that computes its prompt and the one that decodes, by how they ended and why.",
        &["end", "reason"],
    );
    MIGRATIONS = Definition::counter(
        "penstock_migrations_total",
        "Requests with output behind them whose replica was lost or drains: moved to another one, or why not.",
        &["cause", "outcome"],
    );
    HANDOFFS_RUNNING = Definition::gauge("penstock_handoffs_running", "Hand-offs whose request nobody decodes yet.", &[]);
    HANDOFFS_SWEPT = Definition::counter("penstock_handoffs_swept_total", "Hand-offs that a replica ended since nobody kept them.", &[]);
    TRANSFER_BYTES = Definition::counter("penstock_kv_transfer_bytes_total", "Bytes of KV copied from replica to replica.", &[]);
    TRANSFER_CHUNKS = Definition::counter(
        "penstock_kv_transfer_chunks_total",
        "Chunks of KV for another replica, by outcome: written or failed.",
        &["outcome"],
    );
    TRANSFER_TIME = Definition::histogram("penstock_kv_transfer_chunk_seconds", "Time to copy one chunk of KV.", STEP_S);
    TRANSPORT_PEERS = Definition::gauge(
        "penstock_kv_transport_peers",
        "Replicas that a replica here can write KV to now, by transport: reference, memfd, nixl or tcp.",
        &["kind"],
    );
    WORKERS = Definition::gauge(
        "penstock_workers",
        "Workers of this gateway by how they stand: known, of these connected, failed (called and not reached), held (they get nothing new), refused (never called, since they are incompatible or too many).",
        &["standing"],
    );
    WORKER_CALLS_FAILED = Definition::counter(
        "penstock_worker_calls_failed_total",
        "Calls of this gateway to workers that came to nothing, by reason: unreachable, denied (the token), refused (by the worker), protocol, settings, join (by this gateway).",
        &["reason"],
    );
    WORKER_SESSIONS_ENDED = Definition::counter(
        "penstock_worker_sessions_ended_total",
        "Sessions of this gateway with workers that are over, by reason: lease (not reached for too long), replaced (the worker started anew), bye (it left), closed (by this gateway), refused, protocol.",
        &["reason"],
    );
    DISCOVERY_AGE = Definition::gauge(
        "penstock_discovery_age_seconds",
        "How long ago this gateway heard the discovery service last, while it does not answer; else 0.",
        &[],
    );
    WORKER_STATE = Definition::gauge("penstock_worker_state", "1 for the state that this worker is in.", &["state"]);
    GATEWAYS = Definition::gauge("penstock_gateways", "Gateways that this worker serves now.", &[]);
    HELD_CREDIT = Definition::counter("penstock_held_credit_total", "Times a replica's credit was kept for a request that did not fit.", &[]);
    NO_PROGRESS = Definition::gauge("penstock_no_progress", "1 while work waits, a replica is ready and nothing moves.", &[]);
    DISCARDED_TOKENS = Definition::counter(
        "penstock_discarded_tokens_total",
        "Tokens computed and not billed: behind a stop string, for a client that left, or left unread by it.",
        &[],
    );
    REPEATED_TOKENS = Definition::counter(
        "penstock_repeated_tokens_total",
        "Tokens computed again after a replica was lost; the client has them already.",
        &[],
    );
    DIVERGED = Definition::counter(
        "penstock_diverged_sequences_total",
        "Sequences whose repeated tokens differ from the first ones: the executor is not row-invariant.",
        &[],
    );
}

/// The table as a Markdown document.
pub fn describe_all() -> String {
    describe(DEFINITIONS)
}

/// Some definitions as Markdown table rows below one heading line.
pub fn describe(definitions: &[Definition]) -> String {
    let mut out = String::from("| metric | kind | labels | meaning |\n|---|---|---|---|\n");
    for definition in definitions {
        let kind = match definition.kind {
            Kind::Counter => "counter",
            Kind::Gauge => "gauge",
            Kind::Histogram => "histogram",
        };
        let labels = definition.labels.iter().map(|label| format!("`{label}`")).collect::<Vec<_>>().join(", ");
        writeln!(out, "| `{}` | {kind} | {labels} | {} |", definition.name, definition.help).expect("a string grows");
    }
    out
}
