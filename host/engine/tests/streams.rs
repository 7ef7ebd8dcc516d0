//! What clients get: the right text, in order, once, however it was computed.

mod support;

use std::sync::Arc;

use penstock_base::{Duration, Outcome};
use penstock_engine::{EngineConfig, PolicySource, RequestEvent};
use penstock_exec::SamplingParams;
use penstock_sched::replica::ReplicaConfig;
use support::{Got, OptimisticPolicies, PATIENCE, Rig, STOP_TOKEN, Sizes, answer, prompt, read, text_of};

#[test]
fn one_request_streams_what_the_model_says() {
    let rig = Rig::usual();
    let prompt = prompt(1, 10);
    let mut stream = rig.submit(rig.submission(&prompt, 20));
    let got = read(&mut stream);
    let expected = answer(&prompt, &SamplingParams::default(), 20);
    assert_eq!(got.texts, [text_of(&expected)]);
    assert_eq!(got.tokens, [expected]);
    assert_eq!(got.choices, [Some((Outcome::Length, 20))]);
    assert_eq!(got.outcome(), Outcome::Length);
    let usage = got.usage();
    assert_eq!((usage.prompt_tokens, usage.output_tokens), (10, 20));
    drop(stream);
    rig.wait_until_empty();
    assert!(rig.engine.shutdown());
}

#[test]
fn a_stop_token_ends_the_answer_and_is_not_seen() {
    let rig = Rig::usual();
    let params = SamplingParams { stop_tokens: (50..=STOP_TOKEN).collect(), ..SamplingParams::default() };
    for which in 0..8 {
        let prompt = prompt(which, 6);
        let expected = answer(&prompt, &params, 200);
        assert!(expected.len() < 200, "one of 14 in 64 tokens comes up");
        let mut submission = rig.submission(&prompt, 200);
        submission.sampling = Arc::new(params.clone());
        let got = read(&mut rig.submit(submission));
        assert_eq!(got.tokens.first().cloned().unwrap_or_default(), expected);
        assert_eq!(got.choices, [Some((Outcome::Stop, expected.len() as u32))]);
    }
    rig.wait_until_empty();
}

/// The 40 requests of the equality test: prompts that share beginnings, greedy and seeded, short and long.
fn forty(rig: &Rig) -> Vec<(Vec<u32>, SamplingParams, u32)> {
    let _ = rig;
    (0..40)
        .map(|which: u32| {
            let mut tokens = prompt(which % 4, 24);
            tokens.extend(prompt(which, 1 + which % 13));
            let sampled = which.is_multiple_of(2);
            let params = SamplingParams {
                temperature: if sampled { 0.8 } else { 0.0 },
                seed: u64::from(which),
                stop_tokens: vec![STOP_TOKEN],
                ..SamplingParams::default()
            };
            (tokens, params, 5 + which * 2)
        })
        .collect()
}

fn run_forty(replicas: usize, sizes: Sizes, replica: ReplicaConfig) -> (Vec<Got>, Rig) {
    let rig = Rig::new(replicas, sizes, EngineConfig { replica, ..EngineConfig::default() });
    let mut streams: Vec<_> = forty(&rig)
        .into_iter()
        .map(|(prompt, params, max)| {
            let mut submission = rig.submission(&prompt, max);
            submission.sampling = Arc::new(params);
            rig.submit(submission)
        })
        .collect();
    let got = streams.iter_mut().map(read).collect();
    drop(streams);
    rig.wait_until_empty();
    (got, rig)
}

#[test]
fn forty_requests_get_equal_tokens_however_they_are_computed() {
    let usual = ReplicaConfig { check_every_step: true, ..ReplicaConfig::default() };
    let cases = [
        ("one replica", 1, Sizes::default(), usual.clone()),
        ("overlap", 1, Sizes::default(), ReplicaConfig { inflight_max: 2, ..usual.clone() }),
        ("three replicas", 3, Sizes::default(), usual.clone()),
        ("three replicas, overlap", 3, Sizes::default(), ReplicaConfig { inflight_max: 2, ..usual.clone() }),
        ("one at a time", 1, Sizes { slots: 1, ..Sizes::default() }, usual.clone()),
        (
            "small chunks",
            1,
            Sizes { step_tokens: 16, ..Sizes::default() },
            ReplicaConfig { chunk_tokens: 3, ..usual.clone() },
        ),
        ("no cache", 1, Sizes::default(), ReplicaConfig { prefix_cache: false, ..usual.clone() }),
        (
            "a small pool",
            1,
            Sizes { blocks: 48, ..Sizes::default() },
            ReplicaConfig { inflight_max: 2, ..usual.clone() },
        ),
    ];
    let expected: Vec<_> =
        forty(&Rig::usual()).iter().map(|(prompt, params, max)| answer(prompt, params, *max)).collect();
    for (name, replicas, sizes, config) in cases {
        let (got, rig) = run_forty(replicas, sizes, config);
        for (which, (got, expected)) in got.iter().zip(&expected).enumerate() {
            assert_eq!(got.tokens.first().cloned().unwrap_or_default(), *expected, "{name}: request {which}");
            assert_eq!(got.texts.first().cloned().unwrap_or_default(), text_of(expected), "{name}: request {which}");
            assert_eq!(got.usage().output_tokens as usize, expected.len(), "{name}: request {which}");
        }
        let delivered: usize = expected.iter().map(Vec::len).sum();
        assert_eq!(rig.metric("vllm:generation_tokens_total") as usize, delivered, "{name}");
        if replicas == 1 && sizes.slots > 1 {
            assert!(rig.controls[0].most_rows() > 1, "{name}: requests share steps");
        }
        if name == "no cache" {
            assert_eq!(rig.metric("vllm:prefix_cache_hits_total"), 0.0);
        } else if replicas == 1 {
            assert!(rig.metric("vllm:prefix_cache_hits_total") > 0.0, "{name}: prompts share beginnings");
        }
    }
}

#[test]
fn a_preempted_answer_goes_on_where_it_was() {
    let policies = PolicySource::new(|_| Box::new(OptimisticPolicies::new()));
    for inflight_max in [1, 2] {
        let replica = ReplicaConfig { inflight_max, check_every_step: true, ..ReplicaConfig::default() };
        let config = EngineConfig { replica, policies: policies.clone(), ..EngineConfig::default() };
        let rig = Rig::new(1, Sizes { blocks: 60, ..Sizes::default() }, config);
        let params = SamplingParams { temperature: 1.0, seed: 5, ..SamplingParams::default() };
        let prompts: Vec<_> = (0..4).map(|which| prompt(which, 10)).collect();
        let ask = |prompt: &Vec<u32>| {
            let mut submission = rig.submission(prompt, 80);
            submission.sampling = Arc::new(params.clone());
            rig.submit(submission)
        };
        let mut streams: Vec<_> = prompts.iter().map(ask).collect();
        let got: Vec<_> = streams.iter_mut().map(read).collect();
        let preempted: u32 = got.iter().map(|got| got.usage().preemptions).sum();
        assert!(preempted > 0, "four times 90 tokens do not fit 240");
        for (got, prompt) in got.iter().zip(&prompts) {
            let expected = answer(prompt, &params, 80);
            assert_eq!(got.tokens, [expected]);
        }
        assert_eq!(rig.metric("vllm:num_preemptions_total"), f64::from(preempted));
        drop(streams);
        rig.wait_until_empty();
    }
}

#[test]
fn stop_strings_end_the_text_where_they_begin_and_are_counted_as_seen() {
    for inflight_max in [1, 2] {
        let replica = ReplicaConfig { inflight_max, ..ReplicaConfig::default() };
        let rig = Rig::new(1, Sizes::default(), EngineConfig { replica, ..EngineConfig::default() });
        for which in 0..10 {
            let prompt = prompt(which, 9);
            let tokens = answer(&prompt, &SamplingParams::default(), 40);
            let text = text_of(&tokens);
            // From the second letter of a token to the first letter of the one after the next.
            let place = 2 * (8 + which as usize) + 1;
            let stop = &text[place..place + 4];
            let begins = text.find(stop).expect("it is a part of the text");
            let mut submission = rig.submission(&prompt, 40);
            submission.stop_strings = vec!["never there".to_owned(), stop.to_owned()].into();
            let got = read(&mut rig.submit(submission));
            let counted = begins.div_ceil(2);
            assert_eq!(got.texts, [text[..begins].to_owned()]);
            assert_eq!(got.tokens, [tokens[..counted].to_vec()]);
            assert_eq!(got.choices, [Some((Outcome::Stop, counted as u32))]);
            assert_eq!((got.outcome(), got.usage().output_tokens), (Outcome::Stop, counted as u32));
        }
        rig.wait_until_empty();
    }
}

#[test]
fn a_stop_string_in_the_last_token_wins_over_the_length() {
    let rig = Rig::usual();
    for max in [1, 2, 3, 7, 16] {
        let prompt = prompt(max, 5);
        let tokens = answer(&prompt, &SamplingParams::default(), max);
        let text = text_of(&tokens);
        let stop = &text[text.len() - 2..];
        let begins = text.find(stop).expect("it ends the text");
        let mut submission = rig.submission(&prompt, max);
        submission.stop_strings = vec![stop.to_owned()].into();
        let got = read(&mut rig.submit(submission));
        assert_eq!(got.texts.concat(), text[..begins]);
        assert_eq!((got.outcome(), got.usage().output_tokens as usize), (Outcome::Stop, begins.div_ceil(2)));
    }
}

#[test]
fn three_answers_share_a_prompt_and_differ_by_their_seeds() {
    let rig = Rig::usual();
    let prompt = prompt(3, 11);
    let params = SamplingParams { temperature: 1.0, seed: 42, ..SamplingParams::default() };
    let ask = |sequences| {
        let mut submission = rig.submission(&prompt, 15);
        submission.sequences = sequences;
        submission.sampling = Arc::new(params.clone());
        read(&mut rig.submit(submission))
    };
    let (one, three, again) = (ask(1), ask(3), ask(3));
    assert_eq!(one.tokens[0], answer(&prompt, &params, 15));
    assert_eq!(three.tokens[0], one.tokens[0], "the first answer is that of n = 1");
    assert_eq!(three.tokens, again.tokens);
    assert_ne!(three.tokens[0], three.tokens[1]);
    assert_ne!(three.tokens[1], three.tokens[2]);
    assert_eq!(three.choices, [Some((Outcome::Length, 15)); 3]);
    assert_eq!((three.usage().prompt_tokens, three.usage().output_tokens), (11, 45), "the prompt counts once");
    rig.wait_until_empty();
}

#[test]
fn each_answer_of_a_request_has_its_own_stop() {
    let rig = Rig::usual();
    let prompt = prompt(5, 7);
    let params = SamplingParams { temperature: 1.0, seed: 7, ..SamplingParams::default() };
    let mut plain = rig.submission(&prompt, 24);
    plain.sequences = 3;
    plain.sampling = Arc::new(params.clone());
    let whole = read(&mut rig.submit(plain.clone()));
    let stop = whole.texts[1][20..24].to_owned();
    plain.stop_strings = vec![stop.clone()].into();
    let got = read(&mut rig.submit(plain));
    for choice in 0..3 {
        let expected =
            whole.texts[choice].find(&stop).map_or(whole.texts[choice].as_str(), |at| &whole.texts[choice][..at]);
        assert_eq!(got.texts[choice], expected);
    }
    let counted: u32 = got.choices.iter().map(|choice| choice.unwrap().1).sum();
    assert_eq!(got.usage().output_tokens, counted);
    rig.wait_until_empty();
}

#[test]
fn events_come_in_the_order_that_clients_rely_on() {
    let rig = Rig::usual();
    let mut stream = rig.submit(rig.submission(&prompt(1, 4), 3));
    let mut seen = Vec::new();
    while let Some(event) = stream.recv_timeout(PATIENCE).unwrap() {
        seen.push(match event {
            RequestEvent::Queued { .. } => "queued",
            RequestEvent::Dispatched { .. } => "dispatched",
            RequestEvent::Text { .. } => "text",
            RequestEvent::ChoiceEnded { .. } => "choice",
            RequestEvent::Ended { .. } => "ended",
        });
    }
    seen.dedup();
    assert_eq!(seen, ["queued", "dispatched", "text", "choice", "ended"]);
}

#[test]
fn a_stream_is_read_by_an_async_task_as_well() {
    let rig = Rig::usual();
    let prompt = prompt(2, 8);
    let mut stream = rig.submit(rig.submission(&prompt, 12));
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    let got = runtime.block_on(async move {
        let mut got = Got::default();
        while let Some(event) = stream.recv().await {
            got.take(event);
        }
        got
    });
    assert_eq!(got.tokens, [answer(&prompt, &SamplingParams::default(), 12)]);
}

#[test]
fn a_deadline_ends_a_request_with_what_it_has() {
    let rig = Rig::usual();
    rig.controls[0].hold();
    rig.controls[0].let_through(6);
    let mut submission = rig.submission(&prompt(1, 4), 100);
    submission.deadline = rig.engine.clock().now() + Duration::from_ms(200);
    let mut stream = rig.submit(submission);
    let got = read(&mut stream);
    assert!(matches!(got.outcome(), Outcome::TimedOut(_)), "{:?}", got.end);
    let expected = answer(&prompt(1, 4), &SamplingParams::default(), 100);
    assert!(expected.starts_with(got.tokens.first().map_or(&[][..], Vec::as_slice)));
    assert_eq!(got.usage().output_tokens as usize, got.tokens.concat().len());
    rig.controls[0].release();
    drop(stream);
    rig.wait_until_empty();
}
