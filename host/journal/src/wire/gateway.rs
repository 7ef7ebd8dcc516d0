//! The gateway machine's inputs and configuration.

use penstock_base::codec::{DecodeError, Reader, Writer};
use penstock_sched::gateway::{DeliveryEvent, GatewayConfig, GatewayInput, HandoffConfig, ReplicaFacts, Reserves};

use penstock_sched::quota::{QuotaShare, QuotaSlots};

use super::{Decode, Encode, choice, record};

choice! { GatewayInput, "gateway input" {
    0 => Arrive(manifest),
    1 => Cancel { request, cause },
    2 => Delivery { request, event },
    3 => Replica { replica, epoch, message },
    4 => ReplicaUp(facts),
    5 => ReplicaDrain { replica, epoch },
    6 => ReplicaDown { replica, epoch },
    7 => Policies(generation),
    8 => Drain,
    9 => Tick,
    10 => QuotaShare(share),
} }

impl Encode for QuotaSlots {
    fn put(&self, out: &mut Writer) {
        self.0.put(out);
    }
}

impl Decode for QuotaSlots {
    fn take(from: &mut Reader<'_>) -> Result<Self, DecodeError> {
        Decode::take(from).map(Self)
    }
}

choice! { DeliveryEvent, "delivery event" {
    0 => Streaming,
    1 => Disconnected,
    2 => Acknowledged,
} }

record! {
    ReplicaFacts {
        replica, epoch, role_code, total_blocks, slots, round_tokens, context_tokens_max, speed_ppm, zone_rank,
        domain,
    }
    GatewayConfig {
        epoch, run_seed, block_size_tokens, kv_token_bytes, gateways, quota_floor_ppm, queue_requests_max, queue_tokens_max,
        running_requests_max, deferred_requests_max, flows_max, tenants_max, replicas_max, context_tokens_max,
        queue_wait_max, starve, stale_load, stale_cache, overload_tick, no_progress, quota_window, order_rows,
        routing_rows, directory_keys_max, attempts_max, migrations_max, class_floor_blocks, class_slo_ttft, class_sheddable, reserves,
        handoff, check_every_step,
    }
    QuotaShare { slots, members, as_of, until }
    HandoffConfig { timing, leases, transfers, prefill_tokens_min, topology, fallback }
    Reserves { failover_blocks, deploy_blocks, burst_blocks }
}
