//! What the simulator's machines were told and decided, verified from their logs; and copies of such logs, damaged.

use penstock_journal::frame::Ending;
use penstock_journal::{Machine, MachineKind, SegmentReader, Verified, VerifyError, verify};
use penstock_sched::gateway::Gateway;
use penstock_sched::replica::Replica;
use penstock_sim::driven::seats;
use penstock_sim::rng::Rng;
use penstock_sim::{Natives, Scenario, run};

const SEEDS: u64 = 12;

fn replayed(scenario: &Scenario, segment: &[u8]) -> Result<Verified, VerifyError> {
    let reader = SegmentReader::open(segment)?;
    match reader.header().machine.kind {
        MachineKind::Gateway => replayed_as::<Gateway>(scenario, segment, &reader),
        MachineKind::Replica => replayed_as::<Replica>(scenario, segment, &reader),
    }
}

fn replayed_as<M: Machine>(
    scenario: &Scenario,
    segment: &[u8],
    reader: &SegmentReader<&[u8]>,
) -> Result<Verified, VerifyError> {
    let config = reader.header().config::<M>()?;
    let mut policies = seats::<M>(scenario.policies, &Natives, &config).expect("the native defaults are always there");
    verify::<M>(segment, policies.as_mut())
}

fn journaled(seed: u64, depth: usize) -> Scenario {
    let scenario = Scenario::from_seed(seed, depth);
    Scenario { journal: true, requests: scenario.requests.min(40), ..scenario }
}

#[test]
fn logs_of_every_machine_verify() {
    let (mut steps, mut gateways, mut replicas, mut cut) = (0, 0, 0, 0);
    for seed in 0..SEEDS {
        let scenario = journaled(seed, 1 + seed as usize % 2);
        let plain = Scenario { journal: false, ..scenario.clone() };
        let report = run(&scenario).unwrap_or_else(|violation| panic!("seed {seed}: {violation}"));
        assert_eq!(run(&plain).map(|plain| plain.digest), Ok(report.digest), "a log changes nothing");
        let mut logged = 0;
        for (machine, segment) in &report.journals {
            let verified =
                replayed(&scenario, segment).unwrap_or_else(|error| panic!("seed {seed}, {machine:?}: {error}"));
            assert_eq!(verified.machine, *machine);
            assert!(!verified.unfinished);
            logged += verified.steps;
            gateways += u64::from(machine.kind == MachineKind::Gateway);
            replicas += u64::from(machine.kind == MachineKind::Replica);
            cut += u64::from(verified.ending != Ending::Complete);
        }
        assert_eq!(logged, report.steps, "every step is in one log");
        steps += logged;
    }
    assert!(
        gateways > SEEDS && replicas > SEEDS && cut > 0,
        "{gateways} gateway segments, {replicas} replica segments, {cut} lost"
    );
    println!("figure: {steps} steps verified from {} logs", gateways + replicas);
}

#[test]
fn a_flipped_bit_in_a_log_is_found() {
    let rng = &mut Rng::new(1);
    for seed in 0..3 {
        let scenario = Scenario { requests: 6, ..journaled(seed, 2) };
        let report = run(&scenario).unwrap_or_else(|violation| panic!("seed {seed}: {violation}"));
        for (machine, mut segment) in report.journals {
            for _ in 0..60 {
                let (at, bit) = (rng.below(segment.len() as u64) as usize, 1 << rng.below(8));
                segment[at] ^= bit;
                assert!(replayed(&scenario, &segment).is_err(), "seed {seed}, {machine:?}: bit {bit} of byte {at}");
                segment[at] ^= bit;
            }
        }
    }
}

#[test]
fn other_policies_decide_otherwise_and_that_is_seen() {
    let mut mismatches = 0;
    for seed in 0..SEEDS {
        let scenario = journaled(seed, 1);
        let report = run(&scenario).unwrap_or_else(|violation| panic!("seed {seed}: {violation}"));
        let other = match scenario.policies {
            penstock_sim::PolicyKind::Plain => penstock_sim::PolicyKind::Whims,
            penstock_sim::PolicyKind::Whims => penstock_sim::PolicyKind::Plain,
        };
        let other = Scenario { policies: other, ..scenario };
        let differs = |segment: &[u8]| matches!(replayed(&other, segment), Err(VerifyError::Mismatch { .. }));
        mismatches += report.journals.iter().filter(|(_, segment)| differs(segment)).count();
    }
    assert!(mismatches > 0);
}
