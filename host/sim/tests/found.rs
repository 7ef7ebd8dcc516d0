//! What seeds have found, reduced to the scenario that shows it, each under the name of what was wrong.

use penstock_base::Duration;
use penstock_sim::{Faults, PolicyKind, Report, Scenario, run};

/// Two gateways before one replica that has room for one long request, and nothing that goes wrong.
fn one_narrow_replica(slots: u32) -> Scenario {
    let mut scenario = Scenario::from_seed(1, 1);
    scenario.requests = 12;
    scenario.gateways = 2;
    scenario.replicas = 1;
    scenario.gateway.gateways = 2;
    scenario.gateway.queue_requests_max = 64;
    scenario.gateway.running_requests_max = 64;
    scenario.gateway.queue_tokens_max = 100_000;
    scenario.gateway.context_tokens_max = 64;
    scenario.gateway.queue_wait_max = Duration::from_s(300);
    scenario.gateway.class_floor_blocks = [0; 8];
    scenario.gateway.class_slo_ttft = [Duration::MAX; 8];
    scenario.gateway.block_size_tokens = 4;
    scenario.replica.block_size_tokens = 4;
    scenario.replica.context_tokens_max = 64;
    scenario.replica.blocks = 16;
    scenario.replica.slots = slots;
    scenario.replica.ready_window = 0;
    scenario.replica.step_tokens = 32;
    scenario.replica.chunk_tokens = 32;
    scenario.traffic.gap = Duration::from_ms(500);
    scenario.traffic.burst_one_in = 0;
    scenario.traffic.quota_one_in = 0;
    scenario.traffic.prompt_tokens_max = 50;
    scenario.traffic.output_tokens_max = 14;
    scenario.traffic.sequences_max = u64::from(slots);
    scenario.faults = Faults::NONE;
    scenario.policies = PolicyKind::Plain;
    scenario
}

/// All that can fit have completed.
fn completes(scenario: &Scenario) -> Report {
    let report = run(scenario).unwrap_or_else(|violation| panic!("{violation}"));
    for (index, request) in report.requests.iter().enumerate() {
        let outcome = request.outcome.expect("no gateway is lost");
        let never_fits = outcome == penstock_base::Outcome::Refused(penstock_base::Refusal::NeverFits);
        assert!(outcome.is_success() || never_fits, "request {index}: {outcome:?}");
    }
    assert!(report.figures.completed >= 8, "{:?}", report.figures);
    report
}

/// The rest of an uneven division went round with the number of each report; with two gateways told in turn that was always the same
/// one's turn, or nobody's, and a replica with one slot granted it to no one.
#[test]
fn one_slot_is_granted_to_two_gateways_in_turn() {
    completes(&one_narrow_replica(1));
}

/// Equal parts of the credit were all that a gateway ever saw: a request that needs more than a part waited for ever beside an idle
/// replica.
#[test]
fn a_request_that_needs_more_than_an_equal_part_runs() {
    let scenario = one_narrow_replica(3);
    let report = completes(&scenario);
    let most = report.requests.iter().map(|request| request.answers.len()).max();
    assert!(most > Some(1), "some request needs more slots than a part has");
}
