//! Effects of both machines. Written only: what a replay does again is compared by digest.

use penstock_base::BlockKey;
use penstock_base::codec::Writer;
use penstock_sched::gateway::{GatewayEffect, GatewayEvent, MigrationCause, MigrationRefusal, RoutingMade};
use penstock_sched::replica::{CacheChange, HandoffEffect, ReplicaEffect, ReplicaEvent};

use super::{Encode, choice};

impl Encode for &'static str {
    fn put(&self, out: &mut Writer) {
        (**self).put(out);
    }
}

choice! { write only GatewayEffect {
    0 => Send { replica, epoch, message },
    1 => Queued { request, max_output_tokens, degraded },
    2 => Dispatched { request, replica, epoch, attempt, generation },
    3 => Ended { request, outcome, usage, retry_after_ms },
    4 => Event(event),
} }

choice! { write only GatewayEvent {
    0 => Admission { request, verdict, reason },
    1 => Fallback { decision, call, reason },
    2 => Stance { level },
    3 => HeldCredit { replica },
    4 => NoProgress,
    5 => ProgressResumed,
    6 => Stale,
    7 => ClockClamped,
    8 => CacheGap { replica },
    9 => Broken(why),
    10 => Changed { decision, call, change },
    11 => Routed { request, call, ranked, made },
    12 => HandoffBegun { request, transfer, sender, receiver },
    13 => HandoffEnded { request, transfer, end },
    14 => CacheBelief { replica, believed },
    15 => Migrated { request, from, cause },
    16 => MigrationRefused { request, cause, why },
    17 => QuotaShare { share_ppm },
} }

choice! { write only MigrationCause {
    0 => Lost,
    1 => Drain,
} }

choice! { write only MigrationRefusal {
    0 => Limit,
    1 => Sequences,
    2 => Nowhere,
} }

choice! { write only RoutingMade {
    0 => Dispatched,
    1 => Reserved,
    2 => Held,
    3 => NotHeld,
    4 => NoCredit,
} }

choice! { write only ReplicaEffect {
    0 => Submit(plan),
    1 => Send { gateway, message },
    2 => Deliver { seq, batch, row, tokens, first },
    3 => SequenceEnded { seq, outcome, tokens },
    4 => Event(event),
    5 => Handoff(effect),
    6 => Cached(change),
} }

impl Encode for Option<BlockKey> {
    fn put(&self, out: &mut Writer) {
        out.option(self.as_ref(), |out, key| key.put(out));
    }
}

choice! { write only CacheChange {
    0 => Stored { key, parent, depth_blocks },
    1 => Removed { key },
    2 => Cleared,
} }

choice! { write only HandoffEffect {
    0 => ToReceiver(message),
    1 => ToSender(message),
    2 => Sending { transfer, seq, grid },
    3 => Sources { transfer, blocks },
    4 => Bind { transfer, to, blocks },
    5 => Write { transfer, index, stamp },
    6 => Sampled { transfer, seq, batch, row, tokens },
    7 => StopWrites(transfer),
    8 => Continue { transfer, seq },
    9 => Leave { seq },
    10 => Grant { transfer, to, grid, blocks },
    11 => Fence(transfer),
    12 => Digest(transfer),
    13 => Adopt { transfer, seq, attempt },
    14 => Release { seq, tokens },
    15 => Swept(transfer),
    16 => Accepting(accepting),
} }

choice! { write only ReplicaEvent {
    0 => Step { decodes, prefill_tokens },
    1 => PrefixLookup { queried_tokens, hit_tokens },
    2 => Evicted { blocks },
    3 => Preempted { seq },
    4 => Fallback { decision, call, reason },
    5 => Stale,
    6 => ClockClamped,
    7 => Broken(why),
    8 => Unstored { blocks },
    9 => Changed { decision, call, change },
} }
