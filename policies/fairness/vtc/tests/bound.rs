//! The bound of the paper, in adversarial runs: weighted service of two backlogged flows never differs by more than
//! `2 max(w_in x longest input, w_out x M)`, and of whoever comes first served by arrival it does.
//!
//! The server here is small and independent of the host's: a batch of at most `SLOTS` requests, one token a step each, prompts computed in the
//! step of their dispatch, facts told one step late.

use std::collections::VecDeque;

use penstock_fairness_vtc::Seat;
use penstock_policy_sdk::api::{Context, FairnessPolicy as _, Policy as _};
use penstock_policy_sdk::facts::{FlowActive, Served, Taken};
use penstock_policy_sdk::{Call, Fact, Load as _, Matrix};

const SLOTS: usize = 8;
const INPUT_WEIGHT: u64 = 1;
const OUTPUT_WEIGHT: u64 = 2;
const INPUT_MAX: u64 = 400;
const OUTPUT_MAX: u64 = 120;
/// Tokens that can be out and not told yet: every slot with its whole output, and one step of lag.
const OUT_MAX: u64 = SLOTS as u64 * OUTPUT_MAX + SLOTS as u64;
const WEIGHT_PPM: u64 = 1_000_000;

#[derive(Clone, Copy, Debug)]
struct Request {
    flow: usize,
    input: u64,
    output_left: u64,
}

struct Draw(u64);

impl Draw {
    /// 1..=most.
    fn upto(&mut self, most: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % most + 1
    }
}

/// Lengths that hurt: one flow of long prompts, one of long outputs, one of short requests, one of anything.
fn next_request(flow: usize, draw: &mut Draw) -> Request {
    let (input, output_left) = match flow {
        0 => (INPUT_MAX, 1),
        1 => (1, OUTPUT_MAX),
        2 => (draw.upto(8), draw.upto(4)),
        _ => (draw.upto(INPUT_MAX), draw.upto(OUTPUT_MAX)),
    };
    Request { flow, input, output_left }
}

const FLOWS: usize = 4;

/// Largest difference of weighted service between two flows that always have something waiting, over all intervals that begin at the start.
fn widest(
    seed: u64,
    steps: u64,
    mut choose: impl FnMut(u64, &[VecDeque<Request>; FLOWS], usize, &[Fact]) -> Vec<usize>,
) -> u64 {
    let mut draw = Draw(seed);
    let mut queues: [VecDeque<Request>; FLOWS] = Default::default();
    let mut batch: Vec<Request> = Vec::new();
    let mut service = [0u64; FLOWS];
    let mut facts: Vec<Fact> = (0..FLOWS)
        .map(|flow| {
            let told =
                FlowActive { flow_id: flow as u64, tenant_id: 1, class_rank: 3, weight_ppm: WEIGHT_PPM, idle_us: 0 };
            told.at(0)
        })
        .collect();
    let mut widest = 0;
    for step in 1..=steps {
        for (flow, queue) in queues.iter_mut().enumerate() {
            while queue.len() < SLOTS {
                queue.push_back(next_request(flow, &mut draw));
            }
        }
        let taken = choose(step, &queues, SLOTS - batch.len(), &facts);
        facts.clear();
        for flow in taken {
            let request = queues[flow].pop_front().expect("every queue was filled");
            let told =
                Taken { request_id: step, flow_id: flow as u64, uncached_tokens: request.input, ..Taken::default() };
            facts.push(told.at(step));
            let served = Served {
                flow_id: flow as u64,
                prefill_tokens: request.input,
                settled_tokens: request.input,
                ..Served::default()
            };
            facts.push(served.at(step));
            service[flow] += INPUT_WEIGHT * request.input;
            batch.push(request);
        }
        for request in &mut batch {
            request.output_left -= 1;
            service[request.flow] += OUTPUT_WEIGHT;
            facts.push(Served { flow_id: request.flow as u64, decode_tokens: 1, ..Served::default() }.at(step));
        }
        batch.retain(|request| request.output_left > 0);
        let (least, most) = (service.iter().min(), service.iter().max());
        widest = widest.max(most.expect("four flows") - least.expect("four flows"));
    }
    widest
}

fn by_policy(
    seat: &mut Seat,
    step: u64,
    queues: &[VecDeque<Request>; FLOWS],
    free: usize,
    facts: &[Fact],
) -> Vec<usize> {
    seat.observe(facts).expect("native policies never fail");
    if free == 0 {
        return Vec::new();
    }
    // Columns as the policy declares them: flow, class, place in the flow, wait, uncached tokens, weight.
    let mut waiting = Matrix::new(6);
    let mut flow_of = Vec::new();
    for (flow, queue) in queues.iter().enumerate() {
        for (place, request) in queue.iter().enumerate() {
            waiting.push_row(&[flow as u64, 3, place as u64, 0, request.input, WEIGHT_PPM]);
            flow_of.push(flow);
        }
    }
    let call = Call { number: step, now_us: step, seed: 0 };
    let mut ranked = Vec::new();
    let _ = seat.order(&call, Context { values: &[free as u64] }, &waiting, &mut ranked);
    ranked.iter().take(free).map(|row| flow_of[*row as usize]).collect()
}

#[test]
fn backlogged_flows_stay_within_the_bound() {
    let bound = 2 * (INPUT_WEIGHT * INPUT_MAX).max(OUTPUT_WEIGHT * OUT_MAX);
    for seed in 0..8 {
        let mut seat = Seat::configure("").expect("every default");
        let widest = widest(seed, 3_000, |step, queues, free, facts| by_policy(&mut seat, step, queues, free, facts));
        assert!(widest <= bound, "seed {seed}: {widest} is more than {bound}");
    }
}

#[test]
fn the_bound_holds_across_a_change_of_instance() {
    use penstock_policy_sdk::api::{RestoreCause, RestoreInfo};
    let bound = 2 * (INPUT_WEIGHT * INPUT_MAX).max(OUTPUT_WEIGHT * OUT_MAX);
    let mut seat = Seat::configure("").expect("every default");
    let widest = widest(7, 5_000, |step, queues, free, facts| {
        if step % 97 == 0 {
            let mut state = penstock_policy_sdk::Writer::new();
            seat.save(&mut state).expect("native policies never fail");
            seat = Seat::configure("").expect("every default");
            let info =
                RestoreInfo { schema: 1, cause: RestoreCause::Swap, saved_now_us: step, now_us: step, elapsed_us: 0 };
            seat.restore(&info, state.bytes()).expect("its own state");
        }
        by_policy(&mut seat, step, queues, free, facts)
    });
    assert!(widest <= bound, "{widest} is more than {bound}");
}

#[test]
fn taking_turns_by_request_breaks_it() {
    // Request round robin, which is also first come first served when arrivals alternate: the difference grows with time.
    let bound = 2 * (INPUT_WEIGHT * INPUT_MAX).max(OUTPUT_WEIGHT * OUT_MAX);
    let mut turn = 0;
    let widest = widest(7, 5_000, |_, _, free, _| {
        let taken = (0..free).map(|ahead| (turn + ahead) % FLOWS).collect();
        turn = (turn + free) % FLOWS;
        taken
    });
    assert!(widest > 10 * bound, "{widest} is not far beyond {bound}");
}
