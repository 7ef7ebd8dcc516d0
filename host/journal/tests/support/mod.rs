//! Values of every type that is journaled, from one seed. Small ids are likely, so that inputs meet; extremes come too.

use std::sync::Arc;

use penstock_base::plan::{BatchFailure, Plan, PlanOp, PlanRow, RowDone, Task, TokenSource};
use penstock_base::*;
use penstock_sched::gateway::{DeliveryEvent, GatewayConfig, GatewayInput, HandoffConfig, ReplicaFacts, Reserves};
use penstock_sched::message::*;
use penstock_sched::quota::{QuotaShare, QuotaSlots};
use penstock_sched::replica::{FinishedTokens, HandoffInput, ReplicaConfig, ReplicaInput, StepCost, Watermarks};

/// SplitMix64.
pub struct Random(pub u64);

impl Random {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }
    pub fn below(&mut self, n: u64) -> u64 {
        self.next() % n
    }
    /// Mostly small, sometimes anything, sometimes the largest.
    fn number(&mut self, max: u64) -> u64 {
        match self.below(8) {
            0 => self.next() & max,
            1 => max,
            2 => self.below(1_000) & max,
            _ => self.below(5) & max,
        }
    }
}

pub trait Make: Sized {
    fn make(random: &mut Random) -> Self;
}

macro_rules! numbers {
    ($($ty:ident),*) => { $(impl Make for $ty {
        fn make(random: &mut Random) -> Self {
            random.number($ty::MAX as u64) as $ty
        }
    })* };
}
numbers!(u8, u16, u32, u64, usize, i32);

impl Make for bool {
    fn make(random: &mut Random) -> Self {
        random.below(2) == 0
    }
}

macro_rules! wrapped {
    ($($ty:ident),* $(,)?) => { $(impl Make for $ty {
        fn make(random: &mut Random) -> Self {
            Self(Make::make(random))
        }
    })* };
}
wrapped!(
    GatewayEpoch,
    RequestId,
    ReplicaId,
    ReplicaEpoch,
    BatchId,
    DispatchNumber,
    Generation,
    TransferId,
    Slot,
    Instant,
    Duration,
    TenantId,
    FlowId,
    SessionId,
    TrustGroup,
    Priority,
    Traits,
);

impl Make for BlockKey {
    fn make(random: &mut Random) -> Self {
        Self([random.below(4) as u8; 16])
    }
}
impl Make for ClassRank {
    fn make(random: &mut Random) -> Self {
        Self::clamped(random.below(8) as u8)
    }
}
impl<T: Make> Make for Vec<T> {
    fn make(random: &mut Random) -> Self {
        let count = random.below(4);
        (0..count).map(|_| T::make(random)).collect()
    }
}
impl<T: Make, const N: usize> Make for [T; N] {
    fn make(random: &mut Random) -> Self {
        std::array::from_fn(|_| T::make(random))
    }
}
impl Make for QuotaSlots {
    fn make(random: &mut Random) -> Self {
        Self(Make::make(random))
    }
}
impl Make for Arc<Manifest> {
    fn make(random: &mut Random) -> Self {
        Arc::new(Manifest::make(random))
    }
}

macro_rules! records {
    ($($ty:ident { $($field:ident),* $(,)? })*) => { $(impl Make for $ty {
        fn make(random: &mut Random) -> Self {
            Self { $($field: Make::make(random)),* }
        }
    })* };
}
records! {
    SeqId { request, index }
    BlockRef { index, generation }
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
    Plan { batch, ops, rows }
    PlanRow { slot, seq, start, tokens, input, drafts, sample, adapter, mask, task }
    RowDone { seq, accepted, stop }
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
    Reserves { failover_blocks, deploy_blocks, burst_blocks }
    FinishedTokens { seq, tokens, outcome }
    ReplicaConfig {
        replica, epoch, run_seed, blocks, block_size_tokens, slots, step_tokens, chunk_tokens, context_tokens_max,
        inflight_max, ready_window, prefix_cache, watermarks, cost, victim_rows, eviction_rows, handoff, check_every_step,
    }
    Watermarks { low_ppm, high_ppm }
    StepCost { base_ns, prefill_token_ns, decode_row_ns, kv_token_ns }
    TenantTerms {
        weight_ppm, requests_max, window_tokens_max, guaranteed_tokens, borrow_tokens_max, rate_tokens_per_sec,
        burst_tokens, cache_blocks_max,
    }
}

impl Make for Manifest {
    fn make(random: &mut Random) -> Self {
        let keys: Vec<BlockKey> = Make::make(random);
        Self {
            request: Make::make(random),
            tenant: Make::make(random),
            flow: Make::make(random),
            session: Make::make(random),
            trust: Make::make(random),
            class: Make::make(random),
            priority: Make::make(random),
            sequences: 1 + random.below(8) as u16,
            input_tokens: u32::make(random).max(1),
            max_output_tokens: u32::make(random).max(1),
            arrived: Make::make(random),
            deadline: Make::make(random),
            slo_ttft: Make::make(random),
            slo_tpot: Make::make(random),
            traits: Make::make(random),
            keys: keys.into_boxed_slice(),
            prefix_key: Make::make(random),
            retention: random.below(101) as u8,
            retry: Make::make(random),
            terms: Make::make(random),
        }
    }
}

/// How many variants a choice has, and how one of a given number is made.
pub trait Variants: Sized {
    const COUNT: u64;
    fn variant(which: u64, random: &mut Random) -> Self;
}

macro_rules! choices {
    ($($ty:ident { $($make:pat => $value:expr),* $(,)? } with $random:ident;)*) => { $(
        impl Variants for $ty {
            const COUNT: u64 = [$(stringify!($make)),*].len() as u64;
            fn variant(which: u64, $random: &mut Random) -> Self {
                match which { $($make => $value,)* _ => unreachable!() }
            }
        }
        impl Make for $ty {
            fn make(random: &mut Random) -> Self {
                let which = random.below(Self::COUNT);
                Self::variant(which, random)
            }
        }
    )* };
}

/// Makes the value of a field.
fn m<T: Make>(random: &mut Random) -> T {
    T::make(random)
}

choices! {
    Outcome {
        0 => Self::Stop,
        1 => Self::Length,
        2 => Self::Cancelled(m(r)),
        3 => Self::Refused(m(r)),
        4 => Self::TimedOut(m(r)),
        5 => Self::Failed(m(r)),
    } with r;
    CancelCause { 0 => Self::Client, 1 => Self::SlowClient, 2 => Self::Drain } with _r;
    Phase { 0 => Self::Queue, 1 => Self::Prefill, 2 => Self::Decode } with _r;
    Failure {
        0 => Self::ReplicaLost,
        1 => Self::Executor,
        2 => Self::PreemptedTooOften,
        3 => Self::NoProgress,
        4 => Self::Internal,
    } with _r;
    Refusal {
        0 => Self::NeverFits,
        1 => Self::Quota,
        2 => Self::QueueFull,
        3 => Self::Capacity,
        4 => Self::Deadline,
        5 => Self::RetryStorm,
        6 => Self::TooLong,
        7 => Self::Shed,
        8 => Self::AllBusy,
        9 => Self::NoReplica,
        10 => Self::Draining,
        11 => Self::Policy(16 + r.below(4) as u16),
    } with r;
    RefuseReason { 0 => Self::NoSlot, 1 => Self::NoBlocks, 2 => Self::NotReady, 3 => Self::OldEpoch } with _r;
    ToReplica {
        0 => Self::Dispatch(m(r)),
        1 => Self::Cancel { request: m(r), attempt: m(r), outcome: m(r) },
        2 => Self::Stance(m(r)),
        3 => Self::Policies(m(r)),
        4 => Self::Prefill(m(r)),
        5 => Self::Decode(m(r)),
        6 => Self::PeerUp(m(r)),
    } with r;
    FromReplica {
        0 => Self::Report(m(r)),
        1 => Self::Started { request: m(r), attempt: m(r), cached_tokens: m(r) },
        2 => Self::Progress(m(r)),
        3 => Self::Preempted {
            request: m(r), attempt: m(r), computed_tokens: m(r), freed_blocks: m(r), cause_code: m(r),
        },
        4 => Self::Resumed { request: m(r), attempt: m(r), recomputed_tokens: m(r) },
        5 => Self::Refuse { request: m(r), attempt: m(r), number: m(r), reason: m(r) },
        6 => Self::Ended { request: m(r), attempt: m(r), outcome: m(r), usage: m(r) },
        7 => Self::Cache { sequence: m(r), event: m(r) },
        8 => Self::Party { side: m(r), said: m(r) },
    } with r;
    CacheEvent {
        0 => Self::Stored { key: m(r), depth: m(r) },
        1 => Self::Removed { key: m(r) },
        2 => Self::Cleared,
    } with r;
    PlanOp {
        0 => Self::OpenSlot { slot: m(r), seq: m(r) },
        1 => Self::SetBlock { slot: m(r), group: m(r), index: m(r), block: m(r) },
        2 => Self::CopyBlock { from: m(r), to: m(r), tokens: m(r) },
        3 => Self::DropSlot { slot: m(r) },
    } with r;
    TokenSource { 0 => Self::Known, 1 => Self::FromBatch { batch: m(r), row: m(r) } } with r;
    Task { 0 => Self::Generate, 1 => Self::Pool } with _r;
    BatchFailure { 0 => Self::Rows, 1 => Self::Batch, 2 => Self::Executor } with _r;
    DeliveryEvent { 0 => Self::Streaming, 1 => Self::Disconnected, 2 => Self::Acknowledged } with _r;
    GatewayInput {
        0 => Self::Arrive(m(r)),
        1 => Self::Cancel { request: m(r), cause: m(r) },
        2 => Self::Delivery { request: m(r), event: m(r) },
        3 => Self::Replica { replica: m(r), epoch: m(r), message: m(r) },
        4 => Self::ReplicaUp(m(r)),
        5 => Self::ReplicaDrain { replica: m(r), epoch: m(r) },
        6 => Self::ReplicaDown { replica: m(r), epoch: m(r) },
        7 => Self::Policies(m(r)),
        8 => Self::Drain,
        9 => Self::Tick,
        10 => Self::QuotaShare(m(r)),
    } with r;
    ReplicaInput {
        0 => Self::Gateway { gateway: m(r), message: m(r) },
        1 => Self::GatewayUp(m(r)),
        2 => Self::GatewayDown(m(r)),
        3 => Self::BatchDone { batch: m(r), rows: m(r), took: m(r) },
        4 => Self::BatchFailed { batch: m(r), failure: m(r), rows: m(r), done: m(r) },
        5 => Self::Finish(m(r)),
        6 => Self::BlockKeys { seq: m(r), first: m(r), keys: m(r) },
        7 => Self::Policies(m(r)),
        8 => Self::Drain,
        9 => Self::FlushCache,
        10 => Self::Tick,
        11 => Self::Handoff(m(r)),
    } with r;
    HandoffInput {
        0 => Self::OfSender(m(r)),
        1 => Self::OfReceiver(m(r)),
        2 => Self::Sealed { transfer: m(r), seal: m(r) },
        3 => Self::Quiet(m(r)),
        4 => Self::Fenced(m(r)),
        5 => Self::Digested { transfer: m(r), sum: m(r) },
    } with r;
}

impl<T: Make> Make for Option<T> {
    fn make(random: &mut Random) -> Self {
        bool::make(random).then(|| T::make(random))
    }
}

mod handoffs {
    //! Hand-offs have few shapes of their own: the protocol's own test writes all of them.
    use super::*;
    use penstock_sched::handoff::{
        Ack, Between, Caps, Envelope, Failure, Fallback, Grid, LeaseTerms, Open, Order, PartyConfig, Peer, Refusal,
        Report, Reserve, Said, Seal, SenderWord, Side, Terms, Timing, ToReceiver, ToSender, Topology,
    };

    impl<T: Make> Make for Arc<[T]> {
        fn make(random: &mut Random) -> Self {
            Vec::make(random).into()
        }
    }
    impl Make for Arc<Envelope> {
        fn make(random: &mut Random) -> Self {
            Arc::new(Envelope::make(random))
        }
    }
    impl<B: Make> Make for Order<B> {
        fn make(random: &mut Random) -> Self {
            match random.below(5) {
                0 => Self::Begin(m(random)),
                1 => Self::Keep { echo: m(random) },
                2 => Self::Probe,
                3 => Self::Take,
                _ => Self::Close { end_work: m(random) },
            }
        }
    }
    impl<B: Make> Make for Ordered<B> {
        fn make(random: &mut Random) -> Self {
            Self { number: m(random), transfer: m(random), to: m(random), order: m(random) }
        }
    }
    impl<M: Make> Make for Between<M> {
        fn make(random: &mut Random) -> Self {
            Self { transfer: m(random), from: m(random), to: m(random), body: m(random) }
        }
    }
    records! {
        Peer { replica, epoch }
        Caps { class, max_output_tokens, reserve_output_tokens, expected_output_tokens }
        Open { manifest, attempt, destination, first_block, caps }
        Reserve { manifest, attempt, source, caps }
        Said { transfer, from, stamp, report }
        ToReceiver { stamp, word }
        Ack { base, mask, window, sealed }
        Seal { sum, sampled_tokens }
        Grid { first_block, blocks, chunk_blocks, layers, chunk_layers }
        LeaseTerms { hold, write, grace }
        Terms {
            version, model, tokenizer, dtype_code, block_size_tokens, layers, layout, slices, transport_code, leases,
        }
        Envelope { terms, transfer, request, attempt, source, destination, input_tokens, grid }
        Timing { repeat, reserve, open, bootstrap, waiting, transfer, settle }
        PartyConfig {
            me, terms, timing, transfers, window, inflight_chunks, held_blocks, chunk_blocks, chunk_layers, first_owner,
            table_blocks,
        }
        HandoffConfig { timing, leases, transfers, prefill_tokens_min, topology, fallback }
    }
    choices! {
        Topology { 0 => Self::Any, 1 => Self::Preferred, 2 => Self::Required } with _r;
        Fallback { 0 => Self::AtSender, 1 => Self::Anew, 2 => Self::Never } with _r;
        Side { 0 => Self::Sender, 1 => Self::Receiver } with _r;
        Report {
            0 => Self::Ready { first_block: m(r) },
            1 => Self::Stuck(m(r)),
            2 => Self::Taken,
            3 => Self::Refused(m(r)),
        } with r;
        Refusal { 0 => Self::Congested, 1 => Self::NoBlocks { short_blocks: m(r) } } with r;
        Failure { 0 => Self::Stalled, 1 => Self::PeerRefused(m(r)) } with r;
        SenderWord {
            0 => Self::Hello(m(r)),
            1 => Self::Chunk { index: m(r), sent: m(r), arrived: m(r) },
            2 => Self::Seal(m(r)),
            3 => Self::Beat,
        } with r;
        ToSender {
            0 => Self::Welcome { blocks: m(r), echo: m(r), ack: m(r) },
            1 => Self::Ack { echo: m(r), ack: m(r) },
            2 => Self::Refuse(m(r)),
            3 => Self::Failed(m(r)),
        } with r;
    }
}
