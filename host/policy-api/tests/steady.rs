//! Once the largest window has been seen, asking allocates nothing.

mod support;

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

use penstock_base::{Generation, Instant};
use penstock_policy_api::native::NativePolicies;
use penstock_policy_api::validate::Standing;
use penstock_policy_api::*;
use support::{Facts, Rows, request};

thread_local! {
    static ALLOCATIONS: Cell<u64> = const { Cell::new(0) };
}

/// Counts what this thread asks the system allocator for.
struct Counting;

// SAFETY: every call goes to the system allocator unchanged; the counter is a plain thread-local number and allocates nothing.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.with(|count| count.set(count.get() + 1));
        // SAFETY: the caller's promises about `layout` are passed on.
        unsafe { System.alloc(layout) }
    }
    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        // SAFETY: `at` came from `System` with this layout.
        unsafe { System.dealloc(at, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

fn allocations(mut run: impl FnMut()) -> u64 {
    let before = ALLOCATIONS.get();
    run();
    ALLOCATIONS.get() - before
}

/// Leaves every question to the default, so that both halves of a seat are used.
struct Silent(Terms, FairnessDeclaration);

impl Policy for Silent {
    fn terms(&self) -> &Terms {
        &self.0
    }
}

impl FairnessPolicy for Silent {
    fn describe(&self) -> &FairnessDeclaration {
        &self.1
    }
    fn order(&mut self, _: &Call, _: Context<'_>, _: &Matrix, _: &mut Vec<u32>) -> Answer<Ranking> {
        Answer::NoOpinion
    }
    fn victims(&mut self, _: &Call, _: Context<'_>, _: &Matrix, _: &mut Vec<Yielder>) -> Answer<()> {
        Answer::NoOpinion
    }
}

#[test]
fn seats_allocate_nothing_at_steady_state() {
    let mut policies = NativePolicies::new(Generation(1), 2_048);
    let declaration = Manifest::default().fairness().expect("nothing asked for");
    let mut silent = Silent(declaration.terms.clone(), declaration);
    let request = request();
    let asked = PlaceAsked { request: &request, phase: RoutingPhase::Whole };
    let now = Instant(1);
    let (waiting, running) = (Rows::all(128, 2), Rows::all(64, 2));
    let (replicas, runs, classes) = (Rows::all(64, 3), Rows::all(64, 4), Rows::all(8, 5));
    let overload = Facts::default();
    let sources = OverloadSources { context: &overload, classes: &classes, replicas: &replicas };
    let mut seats = (AdmissionSeat::new(1), RoutingSeat::new(1), OrderSeat::new(1));
    let mut more = (VictimsSeat::new(1), EvictionSeat::new(1), OverloadSeat::new(1, 2_048));
    let (mut ranked, mut victims, mut priced, mut actions) = (vec![], vec![], vec![], vec![]);
    let mut round = || {
        seats.0.ask(policies.admission(), now, &request, 0, &Facts::default());
        seats.1.ask(policies.routing(), now, asked, &Facts::default(), &replicas);
        seats.1.rank_natively(asked, &Facts::default(), &replicas, &mut ranked);
        seats.2.ask(policies.fairness(), now, &Facts::default(), &waiting, &mut ranked);
        seats.2.ask(&mut silent, now, &Facts::default(), &waiting, &mut ranked);
        more.0.ask(policies.fairness(), now, &Facts::default(), &running, &mut victims);
        more.0.ask(&mut silent, now, &Facts::default(), &running, &mut victims);
        more.1.ask(policies.eviction(), now, &Facts::default(), &runs, &mut priced);
        more.2.ask(policies.overload(), now, &sources, Standing::default(), &mut actions);
    };
    assert!(allocations(&mut round) > 0, "the first round makes room, and shows that the counter counts");
    assert_eq!(allocations(&mut round), 0);
}
