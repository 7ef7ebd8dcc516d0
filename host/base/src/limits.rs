//! Every limit of the core in one place, each with its reason. A queue, table, cache or wait that is not bounded here is a fault.
//!
//! These are ceilings of the code; configuration chooses at or below them.

use crate::Duration;

/// Most answers to one request (n). More is refused at the edge; blocks of the prompt are shared by that many at most.
pub const SEQUENCES_MAX: u16 = 8;
/// Most sequences in one step of a replica. A block table and a slot exist for each.
pub const SLOTS_MAX: usize = 1_024;
/// Most query tokens in one step: bounds activation memory and the length of a step.
pub const STEP_TOKENS_MAX: u32 = 65_536;
/// Most blocks in one replica's pool: 2^24 blocks of 16 tokens are 268 million tokens.
pub const POOL_BLOCKS_MAX: u32 = 1 << 24;
/// Longest sequence that a replica takes: positions and blocks of it are 32-bit numbers with room to round up.
pub const CONTEXT_TOKENS_MAX: u32 = 1 << 30;
/// Changes of a replica's prefix cache that one step tells one by one; of more, gateways get a fresh listing.
pub const CACHE_EVENTS_MAX: u32 = 65_536;
/// Most tenants with content in one replica's prefix cache, and never more than it has blocks: as many as a gateway knows. Blocks of one
/// more are computed and not stored, which is counted.
pub const CACHE_TENANTS_MAX: u32 = TENANTS_MAX as u32;
/// Blocks whose time is up that one step takes out of a prefix cache; the rest follow with the next ones.
pub const EXPIRED_STEP_MAX: u32 = 64;
/// Most steps in flight at one replica.
pub const INFLIGHT_MAX: usize = 2;
/// Requests that a replica holds ready beside its batch. More would be a queue at the replica, and all waiting is at the gateway.
pub const READY_WINDOW_MAX: usize = 2;
/// Most requests queued at one gateway.
pub const QUEUE_REQUESTS_MAX: usize = 65_536;
/// Most input tokens queued at one gateway: their ids alone would be 1 GiB.
pub const QUEUE_TOKENS_MAX: u64 = 1 << 28;
/// Most requests dispatched and unfinished at one gateway.
pub const RUNNING_REQUESTS_MAX: usize = 65_536;
/// Most deferred requests at one gateway.
pub const DEFERRED_REQUESTS_MAX: usize = 8_192;
/// Most flows that a gateway remembers; the longest idle one makes room.
pub const FLOWS_MAX: usize = 65_536;
/// Most tenants in a gateway's ledger; past it, tenants without live work make room, longest idle first.
pub const TENANTS_MAX: usize = 65_536;
/// Most replicas known to one gateway.
pub const REPLICAS_MAX: usize = 1_024;
/// Most gateways that one replica serves; credits are divided among them.
pub const GATEWAYS_MAX: usize = 16;
/// Most entries of a gateway's prefix index; the longest unused key makes room.
pub const DIRECTORY_KEYS_MAX: usize = 1 << 20;
/// Most requests reserved for one replica's next credit.
pub const RESERVED_REQUESTS_MAX: usize = 8;
/// Longest wait for a named replica that routing may ask for.
pub const RESERVE_WAIT_MAX: Duration = Duration::from_s(1);
/// How long holding back may last while a feasible replica idles.
pub const IDLE_HOLD_MAX: Duration = Duration::from_ms(100);
/// How often a deferred request is asked about.
pub const DEFERRALS_MAX: u32 = 8;
/// Of these, the ones that freed capacity may bring on early; the others run their time.
pub const EARLY_ASKS_MAX: u32 = DEFERRALS_MAX / 2;
/// Deferred requests asked about in one step because capacity was freed.
pub const EARLY_ASKS_STEP_MAX: usize = 16;
/// Shortest time between two questions about a deferred request.
pub const DEFER_MIN: Duration = Duration::from_ms(10);
/// Longest deferral that a policy may ask for.
pub const DEFER_MAX: Duration = Duration::from_s(60);
/// How often one sequence may be preempted; then its request fails rather than thrash.
pub const PREEMPTIONS_MAX: u32 = 3;
/// Rounds over a row that does not fit before the host withholds one replica's credit for it.
pub const SKIPS_MAX: u32 = 16;
/// Consecutive steps with prefill and no decode while decodes wait.
pub const PREFILL_ROUNDS_MAX: u32 = 4;
/// Rows of one `order` call.
pub const ORDER_ROWS_MAX: usize = 1_024;
/// Rows of one `order` call unless configured.
pub const ORDER_ROWS_DEFAULT: usize = 128;
/// Starving requests of a class that one round looks at, before the policy's order.
pub const STARVING_ROWS_MAX: usize = 64;
/// Prefix keys looked at for content that several waiting requests share; beyond it sharing is not seen.
pub const PROMISED_KEYS_MAX: usize = 8_192;
/// Rows of one routing call.
pub const ROUTING_ROWS_MAX: usize = 1_024;
/// Rows of one routing call unless configured.
pub const ROUTING_ROWS_DEFAULT: usize = 64;
/// Rows of one `victims` call.
pub const VICTIM_ROWS_MAX: usize = 256;
/// Rows of one `victims` call unless configured.
pub const VICTIM_ROWS_DEFAULT: usize = 64;
/// Most victims of one answer: the next shortage asks again, with what is known then.
pub const VICTIMS_MAX: usize = 4;
/// Rows of one eviction call.
pub const EVICTION_ROWS_MAX: usize = 512;
/// Rows of one eviction call unless configured.
pub const EVICTION_ROWS_DEFAULT: usize = 64;
/// Names that a policy may declare for one table.
pub const SIGNALS_MAX: usize = 48;
/// Replicas that a placement may rank.
pub const RANKED_MAX: usize = 8;
/// Actions of one stance.
pub const ACTIONS_MAX: usize = 16;
/// Facts kept since the last snapshot; older ones become one gap.
pub const FACTS_KEPT_MAX: usize = 4_096;
/// Facts, from the newest, among which a further hit of the same run is looked for, to be told as one.
pub const FACTS_HIT_SEARCH_MAX: usize = 64;
/// Facts that force a delivery.
pub const FACTS_BATCH_MAX: usize = 256;
/// Time between two reports of an idle replica.
pub const REPORT_INTERVAL: Duration = Duration::from_ms(100);
/// A stance older than this no longer binds a replica: its native ladder takes over.
pub const STANCE_FRESH: Duration = Duration::from_s(1);
/// Requests that routing holds back at one gateway (`hold`); past it a request is skipped instead, and stays where it is.
pub const HELD_REQUESTS_MAX: usize = 128;
/// Ended requests whose delivery a gateway still follows; past it the longest ended one is forgotten.
pub const FINISHED_REQUESTS_KEPT: usize = 1_024;
/// Sessions whose last replica a gateway remembers; the longest unused one makes room.
pub const SESSIONS_MAX: usize = 16_384;
/// Prefix keys whose placements of the last minute a gateway counts; the longest unused one makes room.
pub const PREFIX_HEAT_KEYS_MAX: usize = 4_096;
/// Histories of output lengths by tenant, class and prompt length; the longest unused one makes room.
pub const OUTPUT_HISTORIES_MAX: usize = 4_096;
/// Idle time after which a flow is forgotten.
pub const FLOW_GONE_AFTER: Duration = Duration::from_s(600);
/// Longest time that facts wait for a decision to travel with.
pub const FACTS_WAIT_MAX: Duration = Duration::from_ms(100);
/// Shortest time between two overload questions, edges included.
pub const OVERLOAD_INTERVAL_MIN: Duration = Duration::from_ms(10);
/// Longest time between two overload questions.
pub const OVERLOAD_INTERVAL_MAX: Duration = Duration::from_s(10);
/// While everyone is refused as all-busy, one request each interval is let through to see.
pub const BUSY_PROBE_INTERVAL: Duration = Duration::from_ms(250);
/// A stance is repeated to the replicas at least this often, so that it stays fresh there.
pub const STANCE_REPEAT: Duration = Duration::from_ms(400);
/// Most hand-offs at one replica in one role, those included that wait for blocks to come out of quarantine.
pub const HANDOFF_TRANSFERS_MAX: u32 = 1_024;
/// Most hand-offs at one coordinator, those that are being closed included.
pub const HANDOFF_COORDINATED_MAX: u32 = 4_096;
/// Most chunks of one hand-off, its tail included; longer prompts travel in larger chunks.
pub const HANDOFF_CHUNKS_MAX: u32 = 4_096;
/// Most chunks of one hand-off under way: the receiver's word about them is one mask of 64 bits.
pub const HANDOFF_WINDOW_MAX: u32 = 64;
/// How often what is missing is sent again without anything new arriving; then the hand-off is stuck.
pub const HANDOFF_RESENDS_MAX: u32 = 16;
/// Broken chunks of one hand-off that are asked for again; one more ends it.
pub const HANDOFF_CORRUPT_MAX: u32 = 8;
/// Ended hand-offs that a replica remembers in one role, so that late orders for them find their answer.
pub const HANDOFF_RECENT_MAX: usize = 4_096;
/// Steps between two full walks over the invariants in a live server.
pub const FULL_WALK_STEPS: u64 = 4_096;

const _: () = {
    assert!(ORDER_ROWS_DEFAULT <= ORDER_ROWS_MAX);
    assert!(ROUTING_ROWS_DEFAULT <= ROUTING_ROWS_MAX);
    assert!(VICTIM_ROWS_DEFAULT <= VICTIM_ROWS_MAX);
    assert!(EVICTION_ROWS_DEFAULT <= EVICTION_ROWS_MAX);
    assert!(REPLICAS_MAX >= ROUTING_ROWS_MAX, "the window is a part of the replicas");
    assert!(SLOTS_MAX >= SEQUENCES_MAX as usize, "one request must fit a batch");
    assert!(FACTS_BATCH_MAX <= FACTS_KEPT_MAX);
    assert!(FACTS_HIT_SEARCH_MAX <= FACTS_KEPT_MAX);
    assert!(EARLY_ASKS_MAX < DEFERRALS_MAX, "some of its deferrals run their time");
    assert!(VICTIMS_MAX <= VICTIM_ROWS_DEFAULT);
    assert!(IDLE_HOLD_MAX.0 <= RESERVE_WAIT_MAX.0);
    assert!(OVERLOAD_INTERVAL_MIN.0 <= OVERLOAD_INTERVAL_MAX.0);
    assert!(STANCE_REPEAT.0 * 2 < STANCE_FRESH.0, "one repetition may be late");
    assert!(HANDOFF_WINDOW_MAX == u64::BITS, "one bit a chunk");
    assert!(HANDOFF_RECENT_MAX >= HANDOFF_TRANSFERS_MAX as usize, "all that end at once are remembered");
};
