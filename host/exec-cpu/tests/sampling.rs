//! Sampling against a naive f64 model of the same rules.

mod support;

use penstock_exec::SamplingParams;
use penstock_exec_cpu::Tier;
use penstock_exec_cpu::sampling::{Request, Sampler, SeenTokens, uniform};
use support::Noise;

fn request(params: &SamplingParams, token_index: u64) -> Request<'_> {
    Request { params, token_index, seen: None, mask: None }
}

fn draw(params: &SamplingParams, logits: &[f32], token_index: u64) -> u32 {
    let mut logits = logits.to_vec();
    Sampler::new(Tier::detect()).sample(&mut logits, request(params, token_index)).expect("a token").id
}

/// The distribution that the parameters describe: everything sorted, everything in f64.
fn model(logits: &[f32], params: &SamplingParams) -> Vec<f64> {
    let scaled: Vec<f64> = logits.iter().map(|&l| f64::from(l) / f64::from(params.temperature)).collect();
    let max = scaled.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let mut order: Vec<usize> = (0..logits.len()).collect();
    order.sort_by(|&a, &b| scaled[b].total_cmp(&scaled[a]).then(a.cmp(&b)));
    order.retain(|&i| (scaled[i] - max).exp() >= f64::from(params.min_p));
    if params.top_k > 0 {
        order.truncate(params.top_k as usize);
    }
    let weight = |i: usize| (scaled[i] - max).exp();
    let total: f64 = order.iter().map(|&i| weight(i)).sum();
    let mut sum = 0.0;
    let mut kept = Vec::new();
    for i in order {
        kept.push(i);
        sum += weight(i);
        if params.top_p < 1.0 && sum >= f64::from(params.top_p) * total {
            break;
        }
    }
    let total: f64 = kept.iter().map(|&i| weight(i)).sum();
    let mut out = vec![0.0; logits.len()];
    for i in kept {
        out[i] = weight(i) / total;
    }
    out
}

fn params(temperature: f32, top_k: u32, top_p: f32, min_p: f32) -> SamplingParams {
    SamplingParams { temperature, top_k, top_p, min_p, seed: 42, ..SamplingParams::default() }
}

#[test]
fn frequencies_follow_the_model() {
    let mut noise = Noise(1);
    let logits: Vec<f32> = (0..60).map(|_| noise.value() * 3.0).collect();
    let draws = 20_000;
    for params in [
        params(1.0, 0, 1.0, 0.0),
        params(0.7, 0, 1.0, 0.0),
        params(1.0, 8, 1.0, 0.0),
        params(1.0, 0, 0.8, 0.0),
        params(1.5, 20, 0.9, 0.0),
        params(1.0, 0, 1.0, 0.2),
        params(0.9, 30, 0.95, 0.05),
    ] {
        let wanted = model(&logits, &params);
        let mut counts = vec![0u32; logits.len()];
        for index in 0..draws {
            counts[draw(&params, &logits, index) as usize] += 1;
        }
        let mut chi_square = 0.0;
        let mut freedom = -1.0;
        for (&count, &p) in counts.iter().zip(&wanted) {
            if p == 0.0 {
                assert_eq!(count, 0, "{params:?}: a token outside the kept set was drawn");
                continue;
            }
            let expected = p * draws as f64;
            chi_square += (f64::from(count) - expected).powi(2) / expected;
            freedom += 1.0;
        }
        // Mean f, deviation sqrt(2 f): five deviations, and the seed is fixed.
        let bound = freedom + 5.0 * (2.0f64 * freedom).sqrt();
        assert!(chi_square < bound, "{params:?}: chi square {chi_square} with {freedom} degrees of freedom");
    }
}

#[test]
fn the_kept_set_is_exact_on_a_large_vocabulary() {
    let mut noise = Noise(2);
    for round in 0..6 {
        let spread = [0.1, 1.0, 4.0, 15.0, 60.0, 3.0][round];
        let mut logits: Vec<f32> = (0..5000).map(|_| noise.value() * spread).collect();
        if round == 5 {
            logits.iter_mut().for_each(|l| *l = (*l * 2.0).round());
        }
        for params in [
            params(1.0, 0, 0.5, 0.0),
            params(1.0, 0, 0.99, 0.0),
            params(0.3, 50, 1.0, 0.0),
            params(2.0, 4999, 0.9999, 0.0),
            params(1.0, 0, 0.9, 0.01),
            params(1.0, 0, 1.0, 1.0),
        ] {
            let wanted = model(&logits, &params);
            for index in 0..40 {
                let id = draw(&params, &logits, index) as usize;
                assert!(wanted[id] > 0.0, "round {round} {params:?}: token {id} is not in the kept set");
            }
            // Which token a number picks: the running sum over the kept set passes it.
            let support = wanted.iter().filter(|&&p| p > 0.0).count();
            if support == 1 {
                assert_eq!(wanted[draw(&params, &logits, 7) as usize], 1.0);
            }
        }
    }
}

#[test]
fn a_draw_depends_on_seed_and_index_alone() {
    let mut noise = Noise(3);
    let logits: Vec<f32> = (0..1000).map(|_| noise.value()).collect();
    let params = params(1.0, 0, 1.0, 0.0);
    let forward: Vec<u32> = (0..50).map(|i| draw(&params, &logits, i)).collect();
    let mut sampler = Sampler::new(Tier::detect());
    let backward: Vec<u32> =
        (0..50).rev().map(|i| sampler.sample(&mut logits.clone(), request(&params, i)).expect("a token").id).collect();
    assert!(forward.iter().eq(backward.iter().rev()));
    let other = SamplingParams { seed: 43, ..params };
    assert!((0..50).any(|i| draw(&other, &logits, i) != forward[i as usize]));
    for tier in Tier::ALL.into_iter().filter(|tier| tier.is_supported()) {
        let mut sampler = Sampler::new(tier);
        for (i, &id) in forward.iter().enumerate() {
            assert_eq!(
                sampler.sample(&mut logits.clone(), request(&other_seed(&other, 42), i as u64)).expect("a token").id,
                id
            );
        }
    }
}

fn other_seed(params: &SamplingParams, seed: u64) -> SamplingParams {
    SamplingParams { seed, ..params.clone() }
}

#[test]
fn uniform_numbers_are_uniform_and_fixed_for_ever() {
    let mut buckets = [0u32; 64];
    for seed in 0..40 {
        for index in 0..1000 {
            let u = uniform(seed, index);
            assert!((0.0..1.0).contains(&u));
            buckets[(u * 64.0) as usize] += 1;
        }
    }
    let expected = 40_000.0 / 64.0;
    let chi_square: f64 = buckets.iter().map(|&n| (f64::from(n) - expected).powi(2) / expected).sum();
    assert!(chi_square < 63.0 + 5.0 * 126f64.sqrt(), "{chi_square}");
}

#[test]
fn greedy_takes_the_lowest_of_equals_and_ignores_the_rest() {
    let mut logits = vec![0.0; 100];
    logits[30] = 5.0;
    logits[60] = 5.0;
    for temperature in [0.0, 1e-6, -1.0, f32::NAN] {
        assert_eq!(draw(&SamplingParams { temperature, top_k: 5, ..SamplingParams::default() }, &logits, 3), 30);
    }
    // A temperature just above the threshold still works without overflow.
    assert!([30, 60].contains(&draw(&params(1.1e-5, 0, 1.0, 0.0), &logits, 0)));
}

#[test]
fn penalties_follow_their_formulas() {
    // Worked by hand: token 0 in prompt and twice in the output, 1 in the prompt alone, 2 once in the output.
    let params = SamplingParams {
        repetition_penalty: 2.0,
        presence_penalty: 0.5,
        frequency_penalty: 0.25,
        ..SamplingParams::default()
    };
    let seen = SeenTokens::from_history(&[0, 1], &[0, 2, 0]);
    // 4/2 - 2*0.25 - 0.5 = 1.0;  3/2 = 1.5;  -1*2 - 0.25 - 0.5 = -2.75;  1.25 stays.
    let logits = [4.0, 3.0, -1.0, 1.25];
    let wanted = [1.0, 1.5, -2.75, 1.25];
    let mut used = logits;
    let request = Request { params: &params, token_index: 3, seen: Some(&seen), mask: None };
    let token = Sampler::new(Tier::detect()).sample(&mut used, request).expect("a token");
    assert_eq!(used, wanted);
    assert_eq!(token.id, 1);
    assert!(SeenTokens::needed(&params) && !SeenTokens::needed(&SamplingParams::default()));
}

#[test]
fn bias_min_tokens_and_mask_rule_tokens_in_and_out() {
    let mut sampler = Sampler::new(Tier::detect());
    let logits = [1.0f32, 2.0, 3.0, 4.0];
    let biased = SamplingParams { logit_bias: vec![(3, -100.0), (0, 2.5), (900, 1.0)], ..SamplingParams::default() };
    assert_eq!(draw(&biased, &logits, 0), 0);
    let stopping = SamplingParams { stop_tokens: vec![3, 2], min_tokens: 5, ..SamplingParams::default() };
    assert_eq!(draw(&stopping, &logits, 4), 1);
    assert_eq!(draw(&stopping, &logits, 5), 3);
    let hot = SamplingParams { temperature: 50.0, ..stopping };
    assert!((0..300).all(|i| {
        ![2, 3].contains(
            &sampler
                .sample(&mut logits.clone(), Request { params: &hot, token_index: i % 5, seen: None, mask: None })
                .expect("a token")
                .id,
        )
    }));
    let greedy = SamplingParams::default();
    let mut masked = |bits: &[u64]| {
        let request = Request { params: &greedy, token_index: 0, seen: None, mask: Some(bits) };
        sampler.sample(&mut logits.clone(), request).map(|token| token.id)
    };
    assert_eq!(masked(&[0b0110]), Some(2));
    assert_eq!(masked(&[0]), None);
    assert_eq!(masked(&[]), None);
}

#[test]
fn logprobs_are_those_of_the_raw_logits() {
    let mut noise = Noise(4);
    let logits: Vec<f32> = (0..3000).map(|_| (noise.value() * 8.0 * 64.0).round() / 64.0).collect();
    let total = logits.iter().map(|&l| f64::from(l).exp()).sum::<f64>().ln();
    let mut order: Vec<usize> = (0..logits.len()).collect();
    order.sort_by(|&a, &b| logits[b].total_cmp(&logits[a]).then(a.cmp(&b)));
    for count in [0u8, 1, 5, 20] {
        let params = SamplingParams {
            temperature: 3.0,
            top_k: 40,
            logprobs: Some(count),
            logit_bias: vec![(order[0] as u32, 2.0), (order[1] as u32, -1.0)],
            repetition_penalty: 1.3,
            seed: 9,
            ..SamplingParams::default()
        };
        let seen = SeenTokens::from_history(&[order[0] as u32, order[2] as u32], &[]);
        for index in 0..20 {
            let request = Request { params: &params, token_index: index, seen: Some(&seen), mask: None };
            let token = Sampler::new(Tier::detect()).sample(&mut logits.clone(), request).expect("a token");
            let wanted = f64::from(logits[token.id as usize]) - total;
            assert!((f64::from(token.logprob) - wanted).abs() < 1e-5);
            assert_eq!(token.top.len(), usize::from(count));
            for (top, &id) in token.top.iter().zip(&order) {
                assert_eq!(top.id as usize, id);
                assert!((f64::from(top.logprob) - (f64::from(logits[id]) - total)).abs() < 1e-5);
            }
        }
    }
    let token = Sampler::new(Tier::detect())
        .sample(&mut logits.clone(), request(&SamplingParams::default(), 0))
        .expect("a token");
    assert_eq!((token.logprob, token.top.len()), (0.0, 0));
}

#[test]
fn what_is_not_finite_has_no_token() {
    for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        let mut logits = vec![1.0; 40];
        logits[39] = bad;
        assert!(Sampler::new(Tier::detect()).sample(&mut logits, request(&SamplingParams::default(), 0)).is_none());
    }
    let bias = SamplingParams { logit_bias: vec![(0, f32::INFINITY)], ..SamplingParams::default() };
    assert!(Sampler::new(Tier::detect()).sample(&mut [1.0; 40], request(&bias, 0)).is_none());
}
