//! Many clients of every kind at once, with replicas that break under them: whatever comes, each stream ends once with a beginning of the
//! right text, and nothing is left over.

mod support;

use std::sync::Arc;

use penstock_base::{CancelCause, Duration, Outcome};
use penstock_engine::{EngineConfig, EngineLimits, EventStream, PolicySource, RequestEvent, SubmitError};
use penstock_exec::SamplingParams;
use penstock_sched::replica::ReplicaConfig;
use support::{Fault, Got, OptimisticPolicies, PATIENCE, Rig, Sizes, answer, prompt, text_of};

/// SplitMix64: a seed replays a storm's choices (not the threads' interleaving).
struct Dice(u64);

impl Dice {
    fn roll(&mut self, sides: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)) % sides
    }
}

/// One client: what it asks for and how it behaves.
fn client(rig: &Rig, dice: &mut Dice) {
    let prompt = prompt(dice.roll(12) as u32, 1 + dice.roll(30) as u32);
    let max = 1 + dice.roll(50) as u32;
    let params = SamplingParams {
        temperature: dice.roll(2) as f32,
        seed: dice.roll(1_000),
        stop_tokens: if dice.roll(2) == 0 { vec![7, 9] } else { Vec::new() },
        ..SamplingParams::default()
    };
    let expected = answer(&prompt, &params, max);
    let text = text_of(&expected);
    let mut submission = rig.submission(&prompt, max);
    submission.sequences = 1 + dice.roll(3) as u16;
    submission.sampling = Arc::new(params);
    let stop = (dice.roll(3) == 0 && text.len() > 12).then(|| text[5..9].to_owned());
    submission.stop_strings = stop.iter().cloned().collect();
    if dice.roll(10) == 0 {
        submission.deadline = rig.engine.clock().now() + Duration::from_ms(dice.roll(40));
    }
    let mut stream = match rig.engine.submit(submission) {
        Ok((_, stream)) => stream,
        Err(error) => return assert_eq!(error, SubmitError::Busy),
    };
    let leaves_after = if dice.roll(3) == 0 { dice.roll(6) } else { u64::MAX };
    if dice.roll(12) == 0 {
        stream.cancel(CancelCause::Drain);
    }
    let Some(got) = read_some(&mut stream, leaves_after) else { return };
    let first = got.texts.first().map_or("", String::as_str);
    let whole = stop.as_ref().and_then(|stop| text.find(stop.as_str())).map_or(text.as_str(), |at| &text[..at]);
    match got.outcome() {
        Outcome::Stop | Outcome::Length => assert_eq!(first, whole),
        // What was held back for a stop string that did not come any more is text like any other.
        _ => {
            assert!(text.starts_with(first), "{first} is no beginning of {text}");
            assert!(stop.is_none_or(|stop| !first.contains(&stop)));
        }
    }
    let counted: u32 = got.choices.iter().flatten().map(|(_, tokens)| tokens).sum();
    assert_eq!(got.usage().output_tokens, counted);
}

fn read_some(stream: &mut EventStream, events: u64) -> Option<Got> {
    let mut got = Got::default();
    for _ in 0..events {
        let Some(event) = stream.recv_timeout(PATIENCE).expect("the stream goes on") else {
            stream.acknowledge();
            return Some(got);
        };
        if let RequestEvent::Text { text, tokens, .. } = &event {
            assert!(!text.is_empty() || !tokens.is_empty());
        }
        got.take(event);
    }
    None
}

fn storm(seed: u64, inflight_max: usize, breaks: bool) {
    let config = EngineConfig {
        replica: ReplicaConfig { inflight_max, check_every_step: true, ..ReplicaConfig::default() },
        limits: EngineLimits { requests_max: 40, stream_bytes_max: 16 << 10, ..EngineLimits::default() },
        policies: PolicySource::new(|_| Box::new(OptimisticPolicies::new())),
        ..EngineConfig::default()
    };
    let rig = Rig::new(3, Sizes { blocks: 96, slots: 6, ..Sizes::default() }, config);
    if breaks {
        rig.controls[0].fault_at(40, Fault::WrongRows);
        rig.controls[0].fault_at(90, Fault::Batch);
        rig.controls[1].fault_at(60, Fault::Sampling);
        rig.controls[1].fault_at(120, Fault::Panic);
        rig.controls[2].fault_at(200, Fault::WrongRows);
    }
    std::thread::scope(|scope| {
        for thread in 0..6 {
            let rig = &rig;
            scope.spawn(move || {
                let mut dice = Dice(seed * 100 + thread);
                (0..40).for_each(|_| client(rig, &mut dice));
            });
        }
    });
    rig.wait_until_empty();
    let status = rig.engine.status();
    assert!(status.ready && status.live);
    let freezes = rig.metric("penstock_replica_freezes_total");
    assert_eq!(freezes == 0.0, !breaks, "seed {seed}: {freezes} freezes");
    assert_eq!(rig.metric("penstock_diverged_sequences_total"), 0.0);
    assert!(rig.engine.shutdown());
}

#[test]
fn clients_of_every_kind_at_once() {
    for seed in 1..=3 {
        storm(seed, 1, false);
        storm(seed, 2, false);
    }
}

#[test]
fn clients_of_every_kind_while_replicas_break() {
    for seed in 1..=3 {
        storm(seed, 1, true);
        storm(seed, 2, true);
    }
}
