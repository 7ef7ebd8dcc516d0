//! Draws against a plain f64 model that sorts everything, on rows that are easy to get wrong and on whole vocabularies.

mod support;

use penstock_exec::SamplingParams;
use penstock_exec_cpu::Tier;
use penstock_exec_cpu::sampling::{Request, Sampler, SeenTokens, uniform};
use support::Noise;

/// What rounding may do to a weight, a sum of them, or a border between kept and cut, relative to itself. A logit of 90 below the greatest
/// is rounded by a few millionths in f32.
const ROUNDING: f64 = 2e-5;

/// A row and its name.
type Row = (&'static str, Vec<f32>);

/// Close to a normal distribution of deviation 1.
fn bell(noise: &mut Noise) -> f32 {
    (0..3).map(|_| noise.value()).sum()
}

fn rows(n: usize) -> Vec<Row> {
    let mut noise = Noise(n as u64);
    let random: Vec<f32> = (0..n).map(|_| bell(&mut noise) * 3.0).collect();
    let mut peaked = random.clone();
    peaked[n / 3] = 14.0;
    let mut one = vec![-200.0; n];
    one[n - 1] = 1.0;
    let mut wide: Vec<f32> = (0..n).map(|_| bell(&mut noise) * 1e30).collect();
    wide.iter_mut().step_by(5).for_each(|x| *x = 3.2e38 + bell(&mut noise) * 1e32);
    let ascending = (0..n).map(|i| i as f32 / n as f32 * 9.0).collect();
    vec![
        ("nearly flat", random.iter().map(|x| x * 0.02).collect()),
        ("tied", random.iter().map(|x| x.round()).collect()),
        ("signs of zero", (0..n).map(|i| if i % 2 == 0 { 0.0 } else { -0.0 }).collect()),
        ("random", random),
        ("peaked", peaked),
        ("flat", vec![-2.5; n]),
        ("one alone", one),
        ("wide", wide),
        ("ascending", ascending),
    ]
}

fn params(temperature: f32, top_k: u32, top_p: f32, min_p: f32) -> SamplingParams {
    SamplingParams { temperature, top_k, top_p, min_p, seed: 11, ..SamplingParams::default() }
}

fn every_kind(n: usize) -> Vec<SamplingParams> {
    let k = |k: usize| k.min(n) as u32;
    vec![
        params(0.0, 0, 1.0, 0.0),
        params(1.0, 0, 1.0, 0.0),
        params(0.3, 0, 1.0, 0.0),
        params(1.0, 1, 1.0, 0.0),
        params(1.0, k(40), 1.0, 0.0),
        params(1.5, k(1500), 1.0, 0.0),
        params(1.0, k(n - 1), 1.0, 0.0),
        params(1.0, 0, 0.05, 0.0),
        params(0.8, 0, 0.9, 0.0),
        params(2.0, 0, 0.999, 0.0),
        params(1.0, 0, 1.0, 0.05),
        params(1.0, 0, 1.0, 1.0),
        params(1.0, k(40), 0.9, 0.0),
        params(1.0, k(5000), 0.5, 0.001),
        params(0.7, k(300), 0.95, 0.02),
    ]
}

/// Exponents of a row at a temperature, tokens in order of likelihood, and running weights in that order.
struct Model {
    order: Vec<usize>,
    weights: Vec<f64>,
    params: SamplingParams,
}

impl Model {
    fn new(logits: &[f32], params: &SamplingParams) -> Self {
        let mut order: Vec<usize> = (0..logits.len()).filter(|&i| logits[i] > f32::NEG_INFINITY).collect();
        order.sort_by(|&a, &b| logits[b].partial_cmp(&logits[a]).expect("numbers").then(a.cmp(&b)));
        let max = f64::from(logits[order[0]]);
        let weight = |&logit: &f32| ((f64::from(logit) - max) / f64::from(params.temperature)).exp();
        Self { order, weights: logits.iter().map(weight).collect(), params: params.clone() }
    }

    /// How many tokens are kept, with `min_p` and then the share of `top_p` taken a little differently.
    fn kept(&self, min_p: f64, share: f64) -> usize {
        let min_p = f64::from(self.params.min_p) * min_p;
        let mut kept = self.order.partition_point(|&i| self.weights[i] >= min_p).max(1);
        if self.params.top_k > 0 {
            kept = kept.min(self.params.top_k as usize);
        }
        if self.params.top_p < 1.0 {
            let total: f64 = self.order[..kept].iter().map(|&i| self.weights[i]).sum();
            let mut left = f64::from(self.params.top_p) * share * total;
            let reached = self.order[..kept].iter().position(|&i| {
                left -= self.weights[i];
                left <= 0.0
            });
            kept = reached.map_or(kept, |last| last + 1);
        }
        kept
    }

    /// The token that number `u` picks in exact arithmetic, and the ids between which rounding may carry it. All of them are kept.
    fn pick(&self, u: f64) -> (usize, std::ops::RangeInclusive<usize>) {
        let near = [1.0, 1.0 - ROUNDING, 1.0 + ROUNDING];
        let mut kept: Vec<usize> = near.iter().flat_map(|&min_p| near.map(|share| self.kept(min_p, share))).collect();
        kept.dedup();
        let (mut exact, mut low, mut high) = (None, usize::MAX, 0);
        for kept in kept {
            let mut ids = self.order[..kept].to_vec();
            ids.sort_unstable();
            let total: f64 = ids.iter().map(|&i| self.weights[i]).sum();
            for shift in [0.0, -ROUNDING, ROUNDING] {
                let mut sum = 0.0;
                let reached = ids.iter().find(|&&i| {
                    sum += self.weights[i];
                    sum > (u + shift) * total
                });
                let last = ids.iter().rfind(|&&i| self.weights[i] > 0.0);
                let picked = *reached.or(last).expect("the likeliest has weight");
                exact.get_or_insert(picked);
                (low, high) = (low.min(picked), high.max(picked));
            }
        }
        (exact.expect("one at least"), low..=high)
    }

    /// Whether a token is kept, with borders as wide as rounding may make them.
    fn may_keep(&self, token: usize) -> bool {
        let kept = self.kept(1.0 - ROUNDING, 1.0 + ROUNDING).max(self.kept(1.0, 1.0 + ROUNDING));
        self.order[..kept].contains(&token)
    }

    /// Asserts that `token` is what `u` picks, but for rounding. True when it is that of exact arithmetic.
    fn check(&self, name: &str, u: f64, token: usize) -> bool {
        let (exact, between) = self.pick(u);
        let params = &self.params;
        assert!(between.contains(&token), "{name} of {}: {token}, not in {between:?}, {params:?}", self.weights.len());
        assert!(self.may_keep(token), "{name} of {}: {token} is not kept, {params:?}", self.weights.len());
        token == exact
    }
}

/// Draws with every kind of parameters, on `tiers`, and compares each. Returns how many were those of exact arithmetic, and how many there were.
fn check(
    name: &str,
    logits: &[f32],
    kinds: &[SamplingParams],
    indices: std::ops::Range<u64>,
    tiers: &[Tier],
) -> (u32, u32) {
    let (mut exact, mut all) = (0, 0);
    let mut samplers: Vec<Sampler> = tiers.iter().map(|&tier| Sampler::new(tier)).collect();
    for params in kinds {
        let model = Model::new(logits, params);
        for index in indices.clone() {
            let mut draw = |sampler: &mut Sampler| {
                let request = Request { params, token_index: index, seen: None, mask: None };
                sampler.sample(&mut logits.to_vec(), request).expect("a token").id as usize
            };
            let tokens: Vec<usize> = samplers.iter_mut().map(&mut draw).collect();
            assert!(
                tokens.iter().all(|&token| token == tokens[0]),
                "{name}: {tiers:?} draw {tokens:?} with {params:?}"
            );
            exact += u32::from(if params.temperature == 0.0 {
                assert_eq!(tokens[0], model.order[0], "{name} of {}", logits.len());
                true
            } else {
                model.check(name, uniform(params.seed, index), tokens[0])
            });
            all += 1;
        }
    }
    (exact, all)
}

fn supported() -> Vec<Tier> {
    Tier::ALL.into_iter().filter(|tier| tier.is_supported()).collect()
}

#[test]
fn draws_are_those_of_the_model_on_every_row() {
    let (mut exact, mut all) = (0, 0);
    for (n, indices) in [(1, 0..2), (7, 0..40), (300, 0..40), (2049, 0..8)] {
        for (name, logits) in rows(n) {
            let (e, a) = check(name, &logits, &every_kind(n), indices.clone(), &supported());
            (exact, all) = (exact + e, all + a);
        }
    }
    println!("{exact} of {all} draws are those of exact arithmetic");
    assert!(all - exact <= all / 500, "{exact} of {all}");
}

#[test]
fn draws_are_those_of_the_model_on_whole_vocabularies() {
    let (mut exact, mut all) = (0, 0);
    for (n, indices) in [(49_152, 0..3), (262_144, 3..4)] {
        for (name, logits) in rows(n) {
            let (e, a) = check(name, &logits, &every_kind(n), indices.clone(), &[Tier::detect()]);
            (exact, all) = (exact + e, all + a);
        }
    }
    println!("{exact} of {all} draws are those of exact arithmetic");
    assert!(all - exact <= all / 20, "{exact} of {all}");
}

#[test]
fn any_row_with_any_parameters_draws_what_the_model_draws() {
    let (mut exact, mut all) = (0, 0);
    for seed in 0..400 {
        let mut noise = Noise(seed);
        let n = 1 + noise.below(3000);
        let spread = 10f32.powf(noise.value() * 3.0);
        let step = [0.0, 0.25, 1.0][noise.below(3)];
        let logits: Vec<f32> = (0..n)
            .map(|_| bell(&mut noise) * spread)
            .map(|x| if step > 0.0 { (x / step).round() * step } else { x })
            .collect();
        let params = SamplingParams {
            temperature: 0.05 + (noise.value() + 1.0) * 2.0,
            top_k: [0, noise.below(n + 10), noise.below(60)][noise.below(3)] as u32,
            top_p: [1.0, (noise.value() + 1.001) / 2.001, 0.95][noise.below(3)],
            min_p: [0.0, 0.0, (noise.value() + 1.0) / 4.0][noise.below(3)],
            seed,
            ..SamplingParams::default()
        };
        let (e, a) = check("seeded", &logits, &[params], 0..4, &supported());
        (exact, all) = (exact + e, all + a);
    }
    println!("{exact} of {all} draws are those of exact arithmetic");
    assert!(all - exact <= all / 100, "{exact} of {all}");
}

#[test]
fn forbidden_tokens_are_as_if_they_were_not_there() {
    for n in [7, 300, 49_152] {
        for (name, logits) in rows(n).into_iter().filter(|(name, _)| *name != "one alone") {
            let mut noise = Noise(n as u64);
            let mask: Vec<u64> = (0..n.div_ceil(64)).map(|_| noise.bits() & noise.bits() | 1).collect();
            let allowed = |id: usize| mask[id / 64] >> (id % 64) & 1 == 1;
            let masked: Vec<f32> =
                (logits.iter().enumerate()).map(|(id, &x)| if allowed(id) { x } else { f32::NEG_INFINITY }).collect();
            for params in every_kind(n).into_iter().filter(|params| params.temperature > 0.0) {
                let model = Model::new(&masked, &params);
                let request = Request { params: &params, token_index: 5, seen: None, mask: Some(&mask) };
                let token = Sampler::new(Tier::detect()).sample(&mut logits.clone(), request).expect("a token").id;
                model.check(name, uniform(params.seed, 5), token as usize);
            }
        }
    }
}

#[test]
fn penalties_and_biases_on_a_whole_vocabulary_change_what_they_name() {
    let n = 49_152;
    let mut noise = Noise(8);
    for (name, logits) in rows(n).into_iter().filter(|(name, _)| *name != "wide") {
        let prompt: Vec<u32> = (0..3000).map(|_| noise.below(n) as u32).collect();
        let output: Vec<u32> = (0..500).map(|_| noise.below(300) as u32).collect();
        let bias: Vec<(u32, f32)> = (0..40).map(|_| (noise.below(n + 50) as u32, noise.value() * 5.0)).collect();
        let params = SamplingParams {
            repetition_penalty: 1.2,
            presence_penalty: 0.4,
            frequency_penalty: 0.1,
            logit_bias: bias.clone(),
            min_tokens: 10,
            stop_tokens: vec![7, n as u32 - 1],
            ..params(0.9, 0, 0.9, 0.0)
        };
        let mut wanted = logits.clone();
        [7, n - 1].iter().for_each(|&id| wanted[id] = f32::NEG_INFINITY);
        bias.iter().filter(|(id, _)| (*id as usize) < n).for_each(|&(id, by)| wanted[id as usize] += by);
        for id in 0..n as u32 {
            let times = output.iter().filter(|&&of| of == id).count();
            if times > 0 || prompt.contains(&id) {
                let x = &mut wanted[id as usize];
                *x = if *x > 0.0 { *x / 1.2 } else { *x * 1.2 };
                *x = *x - times as f32 * 0.1 - if times > 0 { 0.4 } else { 0.0 };
            }
        }
        let seen = SeenTokens::from_history(&prompt, &output);
        let model = Model::new(&wanted, &params);
        for index in 0..4 {
            let mut used = logits.clone();
            let request = Request { params: &params, token_index: index, seen: Some(&seen), mask: None };
            let token = Sampler::new(Tier::detect()).sample(&mut used, request).expect("a token").id;
            assert_eq!(used, wanted, "{name}");
            model.check(name, uniform(params.seed, index), token as usize);
        }
    }
}

#[test]
fn counts_of_a_history_are_those_of_its_tokens_one_by_one() {
    let mut noise = Noise(9);
    let prompt: Vec<u32> = (0..200).map(|_| noise.below(90) as u32).collect();
    let output: Vec<u32> = (0..200).map(|_| noise.below(120) as u32).collect();
    let mut one_by_one = SeenTokens::from_history(&prompt, &[]);
    output.iter().for_each(|&token| one_by_one.generated(token));
    assert_eq!(one_by_one, SeenTokens::from_history(&prompt, &output));
    assert_ne!(one_by_one, SeenTokens::from_history(&prompt, &output[1..]));
}

#[test]
fn top_log_probabilities_are_the_largest_in_order_on_every_row() {
    for n in [1, 7, 300, 49_152, 262_144] {
        for (name, logits) in rows(n).into_iter().filter(|(name, _)| *name != "wide") {
            let params = SamplingParams { logprobs: Some(20), ..SamplingParams::default() };
            let model = Model::new(&logits, &SamplingParams { temperature: 1.0, ..SamplingParams::default() });
            let total = model.weights.iter().sum::<f64>().ln() + f64::from(logits[model.order[0]]);
            for tier in supported() {
                if tier == Tier::Scalar && n > 50_000 {
                    continue;
                }
                let request = Request { params: &params, token_index: 0, seen: None, mask: None };
                let token = Sampler::new(tier).sample(&mut logits.clone(), request).expect("a token");
                let ids: Vec<usize> = token.top.iter().map(|top| top.id as usize).collect();
                assert_eq!(ids, model.order[..20.min(n)], "{name} of {n} on {tier}");
                for top in &token.top {
                    let wanted = f64::from(logits[top.id as usize]) - total;
                    let close = 2e-6 * (1.0 + wanted.abs());
                    assert!(
                        (f64::from(top.logprob) - wanted).abs() < close,
                        "{name} of {n}: {} for {wanted}",
                        top.logprob
                    );
                }
                assert_eq!(token.id, token.top[0].id);
                assert_eq!(token.logprob, token.top[0].logprob);
            }
        }
    }
}
