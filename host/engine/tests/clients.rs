//! Clients that leave, read slowly, or come in numbers: nobody else notices, and everything comes back.

mod support;

use std::sync::Arc;

use penstock_base::{CancelCause, Duration, Outcome};
use penstock_engine::{EngineConfig, EngineLimits, RequestEvent, SubmissionFault, SubmitError};
use penstock_exec::SamplingParams;
use support::{PATIENCE, Rig, Sizes, VOCABULARY, answer, prompt, read};

#[test]
fn a_client_that_leaves_frees_its_blocks_within_one_step() {
    let rig = Rig::usual();
    let control = &rig.controls[0];
    control.hold();
    let mut stream = rig.submit(rig.submission(&prompt(1, 12), 400));
    control.let_through(3);
    let mut tokens = 0;
    while tokens < 2 {
        if let Some(RequestEvent::Text { tokens: came, .. }) = stream.recv_timeout(PATIENCE).unwrap() {
            tokens += came.len();
        }
    }
    rig.wait_until("a running request", |status| status.sum(|load| u64::from(load.active_blocks)) > 0);
    drop(stream);
    rig.wait_until("the end of its work at the gateway", |status| status.queue.in_flight_requests == 0);
    let before = control.steps();
    control.let_through(1);
    rig.wait_until_empty();
    assert!(control.steps() <= before + 1, "at most the step in flight was computed for nobody");
    rig.wait_until("the replica's word at the gateway", |_| rig.metric("penstock_cancel_seconds_count") == 1.0);
}

#[test]
fn a_client_that_leaves_pays_for_what_it_read() {
    let rig = Rig::usual();
    let control = &rig.controls[0];
    control.hold();
    let mut stream = rig.submit(rig.submission(&prompt(1, 12), 400));
    control.let_through(6);
    rig.wait_until("text", |status| status.queue.send_buffer_bytes > 0);
    let mut read = 0;
    while read == 0 {
        if let Some(RequestEvent::Text { tokens, .. }) = stream.recv_timeout(PATIENCE).unwrap() {
            read = tokens.len();
        }
    }
    let handed = |rig: &Rig| rig.metric("vllm:generation_tokens_total");
    let deadline = std::time::Instant::now() + PATIENCE;
    while handed(&rig) < 6.0 {
        assert!(std::time::Instant::now() < deadline);
        std::thread::yield_now();
    }
    drop(stream);
    rig.wait_until("its end", |status| status.queue.in_flight_requests == 0);
    // One step a token: what was not read by then lay in the stream, or was counted as discarded on its way there.
    assert_eq!(rig.metric("penstock_discarded_tokens_total"), 6.0 - read as f64);
    control.release();
    rig.wait_until_empty();
}

#[test]
fn a_client_that_leaves_the_queue_is_never_placed() {
    let rig = Rig::new(1, Sizes { slots: 1, ..Sizes::default() }, EngineConfig::default());
    let control = &rig.controls[0];
    control.hold();
    let mut busy = rig.submit(rig.submission(&prompt(1, 4), 8));
    let waiting: Vec<_> = (2..12).map(|which| rig.submit(rig.submission(&prompt(which, 4), 8))).collect();
    rig.wait_until("a queue", |status| status.queue.waiting_requests > 0);
    drop(waiting);
    rig.wait_until("an empty queue", |status| status.queue.waiting_requests == 0);
    control.release();
    let got = read(&mut busy);
    assert_eq!(got.tokens, [answer(&prompt(1, 4), &SamplingParams::default(), 8)]);
    drop(busy);
    rig.wait_until_empty();
}

#[test]
fn two_hundred_clients_that_vanish_leave_every_count_where_it_was() {
    let rig = Rig::new(2, Sizes { blocks: 128, ..Sizes::default() }, EngineConfig::default());
    let mut round = 0;
    let mut all = Vec::new();
    for which in 0..200u32 {
        let mut submission = rig.submission(&prompt(which, 1 + which % 40), 1 + which % 60);
        submission.sequences = 1 + (which % 3) as u16;
        let mut stream = rig.submit(submission);
        // Points of leaving that differ: at once, queued, after some text, after the end.
        match which % 5 {
            0 => drop(stream),
            1 => all.push(stream),
            2 => {
                let _ = stream.recv_timeout(PATIENCE).unwrap();
                drop(stream);
            }
            3 => {
                while let Some(event) = stream.recv_timeout(PATIENCE).unwrap() {
                    if matches!(event, RequestEvent::Text { .. }) {
                        break;
                    }
                }
                drop(stream);
            }
            _ => drop(read(&mut stream)),
        }
        round += 1;
        if round % 50 == 0 {
            all.clear();
        }
    }
    drop(all);
    rig.wait_until_empty();
    let ended = rig.metric("penstock_requests_ended_total");
    assert_eq!(ended, 200.0, "each ends once");
    // The engine still works.
    let got = read(&mut rig.submit(rig.submission(&prompt(7, 9), 9)));
    assert_eq!(got.tokens, [answer(&prompt(7, 9), &SamplingParams::default(), 9)]);
    assert_eq!(rig.metric("penstock_replica_freezes_total"), 0.0);
}

#[test]
fn a_slow_client_is_cancelled_at_the_bound_and_others_do_not_wait_for_it() {
    let limits = EngineLimits { stream_bytes_max: 4_000, ..EngineLimits::default() };
    let rig = Rig::new(1, Sizes::default(), EngineConfig { limits, ..EngineConfig::default() });
    let slow_prompt = prompt(1, 4);
    let mut slow = rig.submit(rig.submission(&slow_prompt, 1_500));
    for which in 2..6 {
        let got = read(&mut rig.submit(rig.submission(&prompt(which, 6), 40)));
        assert_eq!(got.outcome(), Outcome::Length);
    }
    rig.wait_until("the end of the slow one's work", |status| status.sum(|load| u64::from(load.active_blocks)) == 0);
    let got = read(&mut slow);
    assert_eq!(got.outcome(), Outcome::Cancelled(CancelCause::SlowClient));
    assert_eq!(got.choices, [Some((Outcome::Cancelled(CancelCause::SlowClient), got.tokens[0].len() as u32))]);
    let expected = answer(&slow_prompt, &SamplingParams::default(), 1_500);
    assert!(expected.starts_with(&got.tokens[0]) && got.tokens[0].len() > 10, "what came is a beginning without a gap");
    assert_eq!(got.usage().output_tokens as usize, got.tokens[0].len(), "billed is what was delivered");
    assert_eq!(rig.metric("penstock_slow_clients_total"), 1.0);
    drop(slow);
    rig.wait_until_empty();
}

#[test]
fn a_client_that_leaves_text_lying_beyond_the_send_timeout_is_slow() {
    let limits = EngineLimits { send_timeout: Duration::from_ms(50), ..EngineLimits::default() };
    let rig = Rig::new(1, Sizes::default(), EngineConfig { limits, ..EngineConfig::default() });
    let control = &rig.controls[0];
    control.hold();
    control.let_through(2);
    let mut stream = rig.submit(rig.submission(&prompt(1, 4), 1_000));
    rig.wait_until("unread text", |status| status.queue.send_buffer_bytes > 0);
    std::thread::sleep(std::time::Duration::from_millis(60));
    control.release();
    rig.wait_until("its end", |status| status.queue.placed_requests == 0);
    assert_eq!(read(&mut stream).outcome(), Outcome::Cancelled(CancelCause::SlowClient));
}

#[test]
fn bounds_refuse_before_any_work_and_room_comes_back() {
    let limits = EngineLimits { requests_max: 3, pending_bytes_max: 4 * 100, ..EngineLimits::default() };
    let rig = Rig::new(1, Sizes::default(), EngineConfig { limits, ..EngineConfig::default() });
    rig.controls[0].hold();
    let kept: Vec<_> = (0..3).map(|which| rig.submit(rig.submission(&prompt(which, 4), 4))).collect();
    let refused = rig.engine.submit(rig.submission(&prompt(9, 4), 4));
    assert_eq!(refused.unwrap_err(), SubmitError::Busy);
    drop(kept);
    rig.controls[0].release();
    rig.wait_until_empty();
    let refused = rig.engine.submit(rig.submission(&prompt(9, 101), 4));
    assert_eq!(refused.unwrap_err(), SubmitError::Busy, "its bytes are beyond the bound");
    drop(rig.submit(rig.submission(&prompt(9, 100), 4)));
    assert_eq!(rig.metric("penstock_submissions_refused_total"), 2.0);
}

#[test]
fn a_stream_that_is_held_unread_counts_as_in_flight() {
    let limits = EngineLimits { requests_max: 1, ..EngineLimits::default() };
    let rig = Rig::new(1, Sizes::default(), EngineConfig { limits, ..EngineConfig::default() });
    let mut stream = rig.submit(rig.submission(&prompt(1, 4), 4));
    rig.wait_until("the end of its work", |status| status.queue.placed_requests + status.queue.waiting_requests == 0);
    assert_eq!(rig.engine.submit(rig.submission(&prompt(2, 4), 4)).unwrap_err(), SubmitError::Busy);
    read(&mut stream);
    drop(stream);
    rig.wait_until_empty();
    read(&mut rig.submit(rig.submission(&prompt(2, 4), 4)));
}

#[test]
fn what_makes_no_sense_is_refused_by_name() {
    let rig = Rig::usual();
    let good = rig.submission(&prompt(1, 4), 4);
    let refused = |change: &dyn Fn(&mut penstock_engine::Submission)| {
        let mut submission = good.clone();
        change(&mut submission);
        match rig.engine.submit(submission) {
            Err(SubmitError::Invalid(fault)) => fault,
            other => panic!("{other:?}"),
        }
    };
    assert_eq!(refused(&|s| s.prompt = Vec::new().into()), SubmissionFault::EmptyPrompt);
    assert_eq!(refused(&|s| s.prompt = vec![VOCABULARY].into()), SubmissionFault::UnknownToken(VOCABULARY));
    assert_eq!(refused(&|s| s.sequences = 0), SubmissionFault::Sequences(0));
    assert_eq!(refused(&|s| s.sequences = 9), SubmissionFault::Sequences(9));
    assert_eq!(refused(&|s| s.max_output_tokens = 0), SubmissionFault::NoOutput);
    let sampling = |params: SamplingParams| refused(&|s| s.sampling = Arc::new(params.clone()));
    let usual = SamplingParams::default;
    assert_eq!(sampling(SamplingParams { temperature: -0.1, ..usual() }), SubmissionFault::Sampling("temperature"));
    assert_eq!(sampling(SamplingParams { temperature: f32::NAN, ..usual() }), SubmissionFault::Sampling("temperature"));
    assert_eq!(sampling(SamplingParams { top_p: 0.0, ..usual() }), SubmissionFault::Sampling("top_p"));
    assert_eq!(sampling(SamplingParams { min_p: 1.5, ..usual() }), SubmissionFault::Sampling("min_p"));
    assert_eq!(
        sampling(SamplingParams { frequency_penalty: f32::INFINITY, ..usual() }),
        SubmissionFault::Sampling("frequency_penalty")
    );
    assert_eq!(sampling(SamplingParams { logprobs: Some(21), ..usual() }), SubmissionFault::Logprobs(21));
    assert!(matches!(refused(&|s| s.stop_strings = vec![String::new()].into()), SubmissionFault::StopStrings(_)));
    drop(rig.submit(good));
    rig.wait_until_empty();
}

#[test]
fn a_request_that_can_never_fit_is_refused_typed_and_holds_nothing() {
    let rig = Rig::new(1, Sizes { blocks: 8, ..Sizes::default() }, EngineConfig::default());
    let mut stream = rig.submit(rig.submission(&prompt(1, 20), 100));
    let got = read(&mut stream);
    assert_eq!(got.outcome(), Outcome::Refused(penstock_base::Refusal::NeverFits));
    assert!(got.choices.is_empty(), "no answer has begun");
    drop(stream);
    rig.wait_until_empty();
    let got = read(&mut rig.submit(rig.submission(&prompt(1, 20), 12)));
    assert_eq!(got.outcome(), Outcome::Length, "what fits runs behind it");
}
