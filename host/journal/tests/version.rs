//! The version stands for the bytes: whoever changes what is written must raise it.

#![allow(clippy::unwrap_used, reason = "a test")]

mod support;

use penstock_base::codec::Writer;
use penstock_base::{Generation, Instant};
use penstock_journal::header::VERSION;
use penstock_journal::machine::digest_bytes;
use penstock_journal::wire::{AnswerHead, Encode, Given, ObserveFault, Seated};
use penstock_policy_api::native::NativePolicies;
use penstock_policy_api::{
    Action, Decision, FaultKind, Placement, Question, Ranking, Rest, Stance, Verdict, Worth, Yielder,
};
use penstock_sched::gateway::{GatewayConfig, GatewayInput};
use penstock_sched::replica::{ReplicaConfig, ReplicaInput};
use support::{Make, Random};

const KNOWN: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/version.txt");

/// Everything that a segment holds beside snapshots and effects, whose bytes follow from behaviour: an outcome's digest sees those.
fn written() -> Vec<u8> {
    let mut out = Writer::new();
    let random = &mut Random(20);
    for _ in 0..500 {
        GatewayInput::make(random).put(&mut out);
        ReplicaInput::make(random).put(&mut out);
    }
    GatewayConfig { epoch: penstock_base::GatewayEpoch(2), check_every_step: true, ..GatewayConfig::default() }
        .put(&mut out);
    ReplicaConfig { run_seed: 3, check_every_step: true, ..ReplicaConfig::default() }.put(&mut out);
    let answers = [
        Given::NoOpinion,
        Given::Fault(FaultKind::Epoch),
        Given::Verdict(Verdict::Degrade { max_output_tokens: 1, reserve_output_tokens: 2, class_rank: 3 }),
        Given::Placement(Placement::Place { wait_us: 4, colocate: true }, &[5, 6]),
        Given::Ranking(Ranking { rest: Rest::Keep, tpot_target_us: 7 }, &[8]),
        Given::Yielders(&[Yielder { row: 9, how: 1 }]),
        Given::Worths(&[Worth { price: 10, to: 2 }]),
        Given::Stance(Stance { level: 3, hold_us: 11 }, &[Action { what: 12, class_rank: 4, amount: 13 }]),
    ];
    for (sequence, answer) in answers.into_iter().enumerate() {
        let question = Question::ALL[sequence % Question::ALL.len()];
        AnswerHead { sequence: sequence as u64, question, call: 1, inputs: 2, fuel: 3, took_ns: 4 }.put(&mut out);
        answer.put(&mut out);
    }
    ObserveFault { decision: Decision::Eviction, telling: 2, kind: FaultKind::Memory }.put(&mut out);
    Seated::of(&mut NativePolicies::new(Generation(7), 4_096), b"words").put(&mut out);
    Instant(8).put(&mut out);
    out.into_bytes()
}

#[test]
fn the_version_grows_with_the_bytes() {
    let now = format!("{VERSION} {:016x}\n", digest_bytes(&written()));
    if std::env::var_os("PENSTOCK_BLESS").is_some() {
        std::fs::write(KNOWN, &now).unwrap();
    }
    let known = std::fs::read_to_string(KNOWN).unwrap();
    let (version, _) = known.split_once(' ').unwrap();
    assert!(
        known == now || version.parse::<u32>().unwrap() < VERSION,
        "what is written has changed: raise VERSION in src/header.rs, say there what changed, then bless (known {known:?}, now {now:?})"
    );
    assert_eq!(known, now, "a new version: bless it");
}
