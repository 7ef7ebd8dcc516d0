//! Scans over logits against plain f64, on every tier.

mod support;

use penstock_kernels_cpu::Tier;
use penstock_kernels_cpu::logits::{
    BLOCK, Kept, MARKS, Penalties, Row, Softmax, argmax, forbid, log_sum_exp, penalise, rescan, scan, weigh,
};
use support::{Noise, bits, fast_tiers, tiers};

/// Lengths around those of lane groups and blocks, and some vocabularies.
const LENGTHS: [usize; 9] = [1, 7, 16, 47, 255, 256, 257, 1003, 5000];

/// Rows of a length: random ones, with equals, of a wide range, with forbidden tokens, all alike, all but one far below.
fn rows(n: usize) -> Vec<Vec<f32>> {
    let mut noise = Noise(n as u64);
    let random: Vec<f32> = noise.values(n).iter().map(|x| x * 12.0).collect();
    let steps = random.iter().map(|x| x.round()).collect();
    let wide = noise.values(n).iter().map(|x| x * 1e30).collect();
    let mut partly = random.clone();
    partly.iter_mut().enumerate().filter(|(i, _)| i % 3 == 1).for_each(|(_, x)| *x = f32::NEG_INFINITY);
    let mut single = vec![-1e5; n];
    single[n / 2] = 3.0;
    vec![random, steps, wide, partly, vec![1.25; n], single]
}

fn is_kept(x: f32, id: usize, kept: Kept) -> bool {
    x > f32::NEG_INFINITY && (x > kept.logit || x == kept.logit && id <= kept.id as usize)
}

/// Borders worth trying on a row: none, one behind each of some tokens, and one that nobody passes.
fn borders(x: &[f32]) -> Vec<Kept> {
    let mut noise = Noise(x.len() as u64 ^ 5);
    let mut all = vec![Kept::ALL, Kept { logit: f32::MAX, id: u32::MAX }];
    let ids = (0..5).map(|_| noise.below(x.len())).chain([0, x.len() - 1, x.len() / 2]);
    all.extend(ids.map(|id| Kept { logit: x[id], id: id as u32 }));
    all.extend([Kept { logit: x[0], id: u32::MAX }, Kept { logit: x[x.len() - 1].next_up(), id: u32::MAX }]);
    all
}

fn softmax(x: &[f32], scale: f32) -> Softmax {
    Softmax { max: x.iter().copied().fold(f32::NEG_INFINITY, f32::max), scale }
}

/// The weight by its definition. The kernel's exponent is a rounded f32, and so is the one here.
fn weight(x: f32, softmax: Softmax) -> f64 {
    let exponent = (x - softmax.max) * softmax.scale;
    if exponent > -87.0 { f64::from(exponent).exp() } else { 0.0 }
}

#[test]
fn argmax_takes_the_lowest_index_and_passes_nan_over() {
    for tier in tiers() {
        let mut x = Noise(1).values(1003);
        x[17] = 5.0;
        x[400] = 5.0;
        x[1002] = 5.0;
        assert_eq!(argmax(tier, &x), Some(17));
        x[17] = f32::NAN;
        assert_eq!(argmax(tier, &x), Some(400));
        x[400] = f32::NEG_INFINITY;
        assert_eq!(argmax(tier, &x), Some(1002));
        assert_eq!(argmax(tier, &[f32::NAN; 40]), None);
        assert_eq!(argmax(tier, &[]), None);
        assert_eq!(argmax(tier, &[f32::NEG_INFINITY; 3]), Some(0));
        let mut late = vec![f32::NAN; 600];
        late[590] = f32::NEG_INFINITY;
        assert_eq!(argmax(tier, &late), Some(590));
    }
}

#[test]
fn a_scan_keeps_the_greatest_of_each_block_and_a_rescan_looks_again() {
    for tier in tiers() {
        for x in LENGTHS.into_iter().flat_map(rows) {
            let mut maxima = vec![7.0; 3];
            let is_finite = scan(tier, &x, &mut maxima);
            assert_eq!(is_finite, x.iter().all(|x| x.is_finite()));
            let greatest =
                |x: &[f32]| x.chunks(BLOCK).map(|x| x.iter().copied().fold(f32::NEG_INFINITY, f32::max)).collect();
            let wanted: Vec<f32> = greatest(&x);
            assert_eq!(maxima, wanted, "{tier} {}", x.len());
            let mut changed = x.clone();
            for id in [0, x.len() - 1] {
                changed[id] = -2e30;
                rescan(tier, &changed, &mut maxima, id as u32);
            }
            assert_eq!(maxima, greatest(&changed), "{tier} {} after a change", x.len());
        }
    }
}

#[test]
fn one_value_that_is_not_finite_is_found() {
    for tier in tiers() {
        for n in [67, 256, 1000] {
            for at in [0, 17, 63, 64, 66, n - 1] {
                for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
                    let mut x = Noise(2).values(n);
                    assert!(scan(tier, &x, &mut Vec::new()));
                    x[at] = bad;
                    assert!(!scan(tier, &x, &mut Vec::new()), "{tier} {bad} at {at} of {n}");
                }
            }
        }
    }
}

#[test]
fn weights_match_f64_and_all_tiers_agree() {
    for x in LENGTHS.into_iter().flat_map(rows) {
        for scale in [1.0, 0.01, 30.0, 1e5] {
            let softmax = softmax(&x, scale);
            let mut oracle = vec![9f32; x.len()];
            weigh(Tier::Scalar, &x, softmax, &mut oracle);
            for (&x, &e) in x.iter().zip(&oracle) {
                let wanted = weight(x, softmax);
                assert!((f64::from(e) - wanted).abs() <= 2.5e-7 * wanted, "{x} at {softmax:?}: {e} for {wanted}");
            }
            for tier in fast_tiers() {
                let mut out = vec![9f32; x.len()];
                weigh(tier, &x, softmax, &mut out);
                assert_eq!(bits(&out), bits(&oracle), "{tier} {}", x.len());
            }
        }
    }
}

#[test]
fn log_sum_exp_matches_f64_and_all_tiers_agree() {
    for n in LENGTHS {
        let x: Vec<f32> = Noise(n as u64).values(n).iter().map(|x| x * 30.0).collect();
        let max = x.iter().fold(f64::NEG_INFINITY, |m, &x| m.max(f64::from(x)));
        let wanted = max + x.iter().map(|&x| (f64::from(x) - max).exp()).sum::<f64>().ln();
        let value = log_sum_exp(Tier::Scalar, &x);
        assert!((value - wanted).abs() < 1e-6, "{n}: {value} for {wanted}");
        for tier in fast_tiers() {
            assert_eq!(log_sum_exp(tier, &x).to_bits(), value.to_bits(), "{tier} {n}");
        }
    }
}

#[test]
fn sums_of_what_is_kept_match_f64_and_all_tiers_agree() {
    for x in LENGTHS.into_iter().flat_map(rows) {
        let mut maxima = Vec::new();
        scan(Tier::Scalar, &x, &mut maxima);
        let softmax = softmax(&x, 0.7);
        for kept in borders(&x) {
            let oracle = Row::new(Tier::Scalar, &x, &maxima);
            let mut wanted = Vec::new();
            oracle.sums(softmax, kept, &mut wanted);
            assert_eq!(wanted.len(), x.len().div_ceil(BLOCK));
            for (block, &sum) in wanted.iter().enumerate() {
                let start = block * BLOCK;
                let ids = start..x.len().min(start + BLOCK);
                let terms = ids.filter(|&id| is_kept(x[id], id, kept)).map(|id| weight(x[id], softmax));
                let exact: f64 = terms.sum();
                assert!((f64::from(sum) - exact).abs() <= 2e-6 * exact, "{kept:?} block {block}: {sum} for {exact}");
                let mut weights = [9f32; BLOCK];
                let tokens = oracle.weights(block, softmax, kept, &mut weights);
                assert_eq!(tokens, BLOCK.min(x.len() - start));
                for (i, &of) in weights[..tokens].iter().enumerate() {
                    let is_heavy = is_kept(x[start + i], start + i, kept) && weight(x[start + i], softmax) > 0.0;
                    assert_eq!(of > 0.0, is_heavy, "{kept:?} token {}", start + i);
                }
            }
            for tier in fast_tiers() {
                let mut sums = Vec::new();
                let row = Row::new(tier, &x, &maxima);
                row.sums(softmax, kept, &mut sums);
                assert_eq!(bits(&sums), bits(&wanted), "{tier} {} {kept:?}", x.len());
                for block in [0, wanted.len() - 1] {
                    let (mut ours, mut theirs) = ([9f32; BLOCK], [8f32; BLOCK]);
                    row.weights(block, softmax, kept, &mut ours);
                    oracle.weights(block, softmax, kept, &mut theirs);
                    assert_eq!(bits(&ours), bits(&theirs), "{tier} {} {kept:?}", x.len());
                }
            }
        }
    }
}

#[test]
fn masses_above_marks_match_f64_and_all_tiers_agree() {
    for x in LENGTHS.into_iter().flat_map(rows) {
        let mut maxima = Vec::new();
        scan(Tier::Scalar, &x, &mut maxima);
        let softmax = softmax(&x, 1.3);
        for kept in borders(&x).into_iter().filter(|kept| kept.logit <= softmax.max) {
            let floor = kept.logit.max(softmax.max - 90.0);
            let marks: [f32; MARKS] = std::array::from_fn(|i| {
                if i == 0 {
                    softmax.max.next_down().max(floor)
                } else {
                    softmax.max + (floor - softmax.max) * i as f32 / 6.5
                }
                .max(floor)
            });
            for measure in [None, Some(softmax)] {
                let wanted = Row::new(Tier::Scalar, &x, &maxima).masses(measure, kept, marks);
                let ids = || (0..x.len()).filter(|&id| is_kept(x[id], id, kept));
                let mass = |id: usize| measure.map_or(1.0, |softmax| weight(x[id], softmax));
                for (i, mark) in marks.iter().enumerate() {
                    let exact: f64 = ids().filter(|&id| x[id] > *mark).map(mass).sum();
                    assert!((wanted[i] - exact).abs() <= 2e-6 * exact, "{kept:?} {i}: {} for {exact}", wanted[i]);
                }
                let all: f64 = ids().map(mass).sum();
                assert!((wanted[MARKS] - all).abs() <= 2e-6 * all, "{kept:?}: {} for {all}", wanted[MARKS]);
                for tier in fast_tiers() {
                    let masses = Row::new(tier, &x, &maxima).masses(measure, kept, marks);
                    assert_eq!(masses.map(f64::to_bits), wanted.map(f64::to_bits), "{tier} {} {kept:?}", x.len());
                }
            }
        }
    }
}

#[test]
fn tokens_between_two_logits_are_found_in_order_and_no_more_than_asked_for() {
    for tier in tiers() {
        for x in LENGTHS.into_iter().flat_map(rows) {
            let mut maxima = Vec::new();
            scan(tier, &x, &mut maxima);
            let row = Row::new(tier, &x, &maxima);
            for kept in borders(&x) {
                for (low, high) in [(f32::NEG_INFINITY, f32::INFINITY), (-3.0, 4.0), (1.0, 1.25), (4.0, 4.0)] {
                    let is_between = |id: &usize| is_kept(x[*id], *id, kept) && x[*id] > low && x[*id] <= high;
                    let wanted: Vec<u32> = (0..x.len()).filter(is_between).map(|id| id as u32).collect();
                    for most in [usize::MAX, wanted.len(), wanted.len() / 2] {
                        let mut found = Vec::new();
                        let is_whole = row.between(low, high, kept, most, &mut found);
                        assert_eq!(is_whole, wanted.len() <= most, "{tier} {kept:?} {low}..{high}");
                        let ids: Vec<u32> = found.iter().map(|token| token.id).collect();
                        assert_eq!(ids, wanted[..most.min(wanted.len())], "{tier} {kept:?} {low}..{high}");
                        assert!(found.iter().all(|token| token.logit == x[token.id as usize]));
                    }
                }
            }
        }
    }
}

#[test]
fn a_mask_forbids_what_its_bits_leave_out() {
    for tier in tiers() {
        for n in [1, 7, 63, 64, 65, 1003] {
            let x = Noise(3).values(n);
            for words in [0, 1, n / 64, n.div_ceil(64), n.div_ceil(64) + 2] {
                let mut noise = Noise(words as u64);
                let mask: Vec<u64> = (0..words).map(|_| noise.bits()).collect();
                let mut out = x.clone();
                forbid(tier, &mut out, &mask);
                for (id, (&out, &x)) in out.iter().zip(&x).enumerate() {
                    let is_allowed = id / 64 < words && mask[id / 64] & (1 << (id % 64)) != 0;
                    assert_eq!(out, if is_allowed { x } else { f32::NEG_INFINITY }, "{tier} {n} {words} {id}");
                }
            }
        }
    }
}

#[test]
fn penalties_match_their_formula_to_the_bit() {
    let penalties = Penalties { repetition: 1.3, frequency: 0.37, presence: 0.21 };
    for tier in tiers() {
        for n in [0, 1, 15, 16, 17, 500] {
            let mut noise = Noise(4);
            let mut x: Vec<f32> = noise.values(n).iter().map(|x| x * 9.0).collect();
            let counts: Vec<f32> = (0..n).map(|_| noise.below(4) as f32).collect();
            x.iter_mut().take(1).for_each(|x| *x = f32::NEG_INFINITY);
            let wanted: Vec<f32> = (x.iter().zip(&counts))
                .map(|(&x, &count)| {
                    let x = if x > 0.0 { x / 1.3 } else { x * 1.3 };
                    x - count * 0.37 - if count > 0.0 { 0.21 } else { 0.0 }
                })
                .collect();
            penalise(tier, &mut x, &counts, penalties);
            assert_eq!(bits(&x), bits(&wanted), "{tier} {n}");
        }
    }
}
