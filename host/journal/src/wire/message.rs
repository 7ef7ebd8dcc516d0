//! What gateway and replica tell each other.

use penstock_sched::handoff::{Open, Reserve};
use penstock_sched::message::{
    CacheEvent, Credit, Dispatch, FromReplica, Load, Ordered, Progress, ReplicaStance, Report, ToReplica, Usage,
};

use super::{choice, record};

choice! { ToReplica, "message to a replica" {
    0 => Dispatch(dispatch),
    1 => Cancel { request, attempt, outcome },
    2 => Stance(stance),
    3 => Policies(generation),
    4 => Prefill(ordered),
    5 => Decode(ordered),
    6 => PeerUp(peer),
} }

choice! { FromReplica, "message of a replica" {
    0 => Report(report),
    1 => Started { request, attempt, cached_tokens },
    2 => Progress(progress),
    3 => Preempted { request, attempt, computed_tokens, freed_blocks, cause_code },
    4 => Resumed { request, attempt, recomputed_tokens },
    5 => Refuse { request, attempt, number, reason },
    6 => Ended { request, attempt, outcome, usage },
    7 => Cache { sequence, event },
    8 => Party { side, said },
} }

choice! { CacheEvent, "cache event" {
    0 => Stored { key, depth },
    1 => Removed { key },
    2 => Cleared,
} }

record! {
    Ordered<Open> { number, transfer, to, order }
    Ordered<Reserve> { number, transfer, to, order }
    Dispatch {
        number, manifest, attempt, class, max_output_tokens, reserve_output_tokens, expected_output_tokens,
    }
    ReplicaStance { number, level, preempt_blocks, preempt_class, tpot_target_us }
    Progress { request, attempt, prefill_tokens, decode_tokens, first_token, device_us }
    Usage { prompt_tokens, cached_tokens, output_tokens, preemptions }
    Report { number, as_of, covers, credit, load, cache_sequence }
    Credit { requests, prefill_tokens, blocks }
    Load {
        total_blocks, active_blocks, cached_blocks, free_blocks, reclaimable_blocks, transfer_blocks, reserved_blocks,
        growth_blocks, ready_requests, ready_blocks, running_requests, prefill_tokens, step, busy, hit_blocks_per_sec, preempted_requests,
        prefill_tokens_per_sec, decode_tokens_per_sec, class_active_blocks, prefill_token_ns,
    }
}
