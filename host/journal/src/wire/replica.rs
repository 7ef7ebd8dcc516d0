//! The replica machine's inputs and configuration.

use penstock_sched::replica::{FinishedTokens, HandoffInput, ReplicaConfig, ReplicaInput, StepCost, Watermarks};

use super::{choice, record};

choice! { ReplicaInput, "replica input" {
    0 => Gateway { gateway, message },
    1 => GatewayUp(gateway),
    2 => GatewayDown(gateway),
    3 => BatchDone { batch, rows, took },
    4 => BatchFailed { batch, failure, rows, done },
    5 => Finish(end),
    6 => BlockKeys { seq, first, keys },
    7 => Policies(generation),
    8 => Drain,
    9 => FlushCache,
    10 => Tick,
    11 => Handoff(input),
} }

choice! { HandoffInput, "news of a hand-off" {
    0 => OfSender(message),
    1 => OfReceiver(message),
    2 => Sealed { transfer, seal },
    3 => Quiet(transfer),
    4 => Fenced(transfer),
    5 => Digested { transfer, sum },
} }

record! {
    FinishedTokens { seq, tokens, outcome }
    ReplicaConfig {
        replica, epoch, run_seed, blocks, block_size_tokens, slots, step_tokens, chunk_tokens, context_tokens_max,
        inflight_max, ready_window, prefix_cache, watermarks, cost, victim_rows, eviction_rows, handoff, check_every_step,
    }
    Watermarks { low_ppm, high_ppm }
    StepCost { base_ns, prefill_token_ns, decode_row_ns, kv_token_ns }
}
