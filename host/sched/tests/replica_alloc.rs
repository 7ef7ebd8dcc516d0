//! At steady state a step allocates nothing: every buffer has its room from the start or from the first rounds. (The full walk over the
//! invariants, every 4,096 steps, may; the steps counted here lie before it.)

#[path = "support/content.rs"]
mod content;

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::sync::Arc;

use content::{block_keys, mix};
use penstock_base::plan::{Plan, RowDone};
use penstock_base::{
    ClassRank, DispatchNumber, Duration, FlowId, GatewayEpoch, Generation, Instant, Manifest, Priority, RequestId,
    SessionId, TenantId, TenantTerms, Traits, TrustGroup,
};
use penstock_policy_api::native::NativePolicies;
use penstock_sched::message::{Dispatch, ToReplica};
use penstock_sched::replica::{Replica, ReplicaConfig, ReplicaEffect, ReplicaEvent, ReplicaInput, Watermarks};

thread_local! {
    static COUNTED: Cell<Option<u64>> = const { Cell::new(None) };
}

struct Counting;

// SAFETY: every call is passed on to the system allocator unchanged; counting touches a thread-local cell without allocating.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        COUNTED.with(|counted| counted.set(counted.get().map(|count| count + 1)));
        // SAFETY: the caller's contract is the same.
        unsafe { System.alloc(layout) }
    }
    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        // SAFETY: the caller's contract is the same.
        unsafe { System.dealloc(at, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

fn counted(run: impl FnOnce()) -> u64 {
    COUNTED.with(|counted| counted.set(Some(0)));
    run();
    COUNTED.with(|counted| counted.take()).unwrap_or(0)
}

fn manifest(number: u64) -> Arc<Manifest> {
    let family = number % 5;
    let prompt: Vec<u32> = (0..20 + family * 3).map(|at| (mix(family, at) % 23) as u32).collect();
    Arc::new(Manifest {
        request: RequestId(number),
        tenant: TenantId(family),
        flow: FlowId(family),
        session: SessionId(0),
        trust: TrustGroup(0),
        class: ClassRank::clamped((number % 8) as u8),
        priority: Priority(0),
        sequences: 1 + (number % 3) as u16,
        input_tokens: prompt.len() as u32,
        max_output_tokens: 24,
        arrived: Instant::ZERO,
        deadline: Instant::NEVER,
        slo_ttft: Duration::MAX,
        slo_tpot: Duration::MAX,
        traits: Traits::default(),
        keys: block_keys(1, &prompt, 4).into_boxed_slice(),
        prefix_key: 0,
        retention: 50,
        retry: false,
        terms: TenantTerms::default(),
    })
}

#[test]
fn a_step_allocates_nothing_at_steady_state() {
    for inflight_max in 1..=2 {
        let config = ReplicaConfig {
            blocks: 48,
            block_size_tokens: 4,
            slots: 8,
            step_tokens: 32,
            chunk_tokens: 16,
            context_tokens_max: 64,
            inflight_max,
            check_every_step: false,
            eviction_rows: 2,
            victim_rows: 2,
            watermarks: Watermarks { low_ppm: 50_000, high_ppm: 100_000 },
            ..ReplicaConfig::default()
        };
        let mut policies = NativePolicies::new(Generation(1), 64);
        let mut replica = Replica::new(config, Instant::ZERO);
        let mut effects = Vec::with_capacity(4_096);
        let mut flights: Vec<Plan> = Vec::with_capacity(4);
        let gateway = GatewayEpoch(0);
        let (mut preempted, mut evicted, mut steps, mut allocations) = (0, 0, 0, 0);
        let mut feed = |replica: &mut Replica, now, input, flights: &mut Vec<Plan>, counts: bool| {
            let count = counted(|| replica.step(now, input, &mut policies, &mut effects));
            for effect in effects.drain(..) {
                match effect {
                    ReplicaEffect::Submit(plan) => flights.push(plan),
                    ReplicaEffect::Event(ReplicaEvent::Preempted { .. }) if counts => preempted += 1,
                    ReplicaEffect::Event(ReplicaEvent::Evicted { .. }) if counts => evicted += 1,
                    ReplicaEffect::Event(ReplicaEvent::Broken(why)) => panic!("broken: {why}"),
                    _ => {}
                }
            }
            if counts {
                allocations += count;
                steps += 1;
            }
        };
        feed(&mut replica, Instant::ZERO, ReplicaInput::GatewayUp(gateway), &mut flights, false);
        for round in 1..2_000u64 {
            let (now, counts) = (Instant(round * 1_000_000), round > 1_000);
            let dispatch = Dispatch {
                number: DispatchNumber(round),
                manifest: manifest(round),
                attempt: 1,
                class: ClassRank::clamped((round % 8) as u8),
                max_output_tokens: 24,
                reserve_output_tokens: 1 + (round % 4) as u32,
                expected_output_tokens: 8,
            };
            let input = ReplicaInput::Gateway { gateway, message: ToReplica::Dispatch(dispatch) };
            feed(&mut replica, now, input, &mut flights, counts);
            if flights.is_empty() {
                continue;
            }
            let plan = flights.remove(0);
            let done = plan.rows.iter().map(|row| RowDone {
                seq: row.seq,
                accepted: u16::from(row.sample),
                stop: row.sample && mix(row.seq.request.0, u64::from(row.start)).is_multiple_of(16),
            });
            let rows: Vec<RowDone> = done.collect();
            let batch = plan.batch;
            assert_eq!(counted(|| replica.recycle(plan)), 0);
            let input = ReplicaInput::BatchDone { batch, rows, took: Duration::from_ms(1) };
            feed(&mut replica, now, input, &mut flights, counts);
        }
        assert!(preempted > 20 && evicted > 50 && steps > 1_900, "{preempted} {evicted} {steps}");
        assert_eq!(allocations, 0, "over {steps} steps at depth {inflight_max}");
    }
}
