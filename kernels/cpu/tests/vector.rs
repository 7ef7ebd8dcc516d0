//! Norm, rotation and gated activation.

mod support;

use penstock_kernels_cpu::norm::{rms_norm, rms_norm_heads};
use penstock_kernels_cpu::pointwise::{Gate, gated};
use penstock_kernels_cpu::{RopePairs, RopeRow, Tier, rope::rope};
use support::{Noise, bits, fast_tiers, nmse, tiers};

#[test]
fn rms_norm_matches_f64_and_all_tiers_agree() {
    for n in [16, 96, 576, 1536] {
        let mut noise = Noise(n as u64);
        let (x, weight) = (noise.values(n), noise.values(n));
        let mean = x.iter().map(|&x| f64::from(x).powi(2)).sum::<f64>() / n as f64;
        let scale = 1.0 / (mean + 1e-5).sqrt();
        let wanted: Vec<f64> = x.iter().zip(&weight).map(|(&x, &w)| f64::from(x) * scale * f64::from(w)).collect();
        let mut oracle = vec![0f32; n];
        rms_norm(Tier::Scalar, &x, &weight, 1e-5, &mut oracle);
        assert!(nmse(&oracle, &wanted) < 1e-12);
        for tier in fast_tiers() {
            let mut out = vec![0f32; n];
            rms_norm(tier, &x, &weight, 1e-5, &mut out);
            assert_eq!(bits(&out), bits(&oracle), "{tier} n {n}");
        }
    }
}

#[test]
fn heads_are_normalised_one_by_one_in_place() {
    for (heads, n) in [(1, 16), (3, 64), (4, 256)] {
        let mut noise = Noise(n as u64);
        let (x, weight) = (noise.values(heads * n), noise.values(n));
        let mut wanted = vec![0f32; heads * n];
        for (x, out) in x.chunks(n).zip(wanted.chunks_mut(n)) {
            rms_norm(Tier::Scalar, x, &weight, 1e-6, out);
        }
        for tier in tiers() {
            let mut out = x.clone();
            rms_norm_heads(tier, &mut out, &weight, 1e-6);
            assert_eq!(bits(&out), bits(&wanted), "{tier} {heads} x {n}");
        }
    }
}

/// The gates' textbook forms in f64.
fn gate(kind: Gate, x: f64) -> f64 {
    match kind {
        Gate::Silu => x / (1.0 + (-x).exp()),
        Gate::GeluTanh => 0.5 * x * (1.0 + ((2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x.powi(3))).tanh()),
    }
}

#[test]
fn gated_activations_match_f64_and_all_tiers_agree() {
    let n = 512;
    for (kind, absolute) in [(Gate::Silu, 1e-33), (Gate::GeluTanh, 1e-15)] {
        let mut noise = Noise(20);
        let mut gates: Vec<f32> = noise.values(n).iter().map(|x| x * 20.0).collect();
        gates[..8].copy_from_slice(&[0.0, -0.0, 88.0, -88.0, 1000.0, -1000.0, 1e-30, 3e38]);
        let up = noise.values(n);
        let mut oracle = vec![0f32; n];
        gated(Tier::Scalar, kind, &gates, &up, &mut oracle);
        for (i, (&got, (&g, &u))) in oracle.iter().zip(gates.iter().zip(&up)).enumerate() {
            let wanted = gate(kind, f64::from(g)) * f64::from(u);
            // The exponential is exact to a unit in the last place of its argument, whose error grows with its size.
            let relative = if kind == Gate::Silu { 1e-6 } else { 1e-6 * (1.0 + f64::from(g).abs().powi(3).min(100.0)) };
            let error = (f64::from(got) - wanted).abs();
            assert!(error <= relative * wanted.abs() + absolute, "{kind:?} {i}: {got} for {wanted} at {g}");
        }
        for tier in fast_tiers() {
            let mut out = vec![0f32; n];
            gated(tier, kind, &gates, &up, &mut out);
            assert_eq!(bits(&out), bits(&oracle), "{tier} {kind:?}");
        }
    }
}

#[test]
fn rope_turns_pairs_by_their_angle() {
    let frequencies: Vec<f64> = (0..32).map(|i| 100_000f64.powf(-f64::from(i) / 32.0)).collect();
    for position in [0u64, 1, 77, 8191] {
        for pairs in [RopePairs::Interleaved, RopePairs::Halves] {
            let mut row = RopeRow::default();
            row.set(pairs, &frequencies, position);
            let x = Noise(position).values(3 * 64);
            let mut wanted = vec![0f64; x.len()];
            for head in 0..3 {
                for (i, frequency) in frequencies.iter().enumerate() {
                    let (a, b) = match pairs {
                        RopePairs::Interleaved => (head * 64 + 2 * i, head * 64 + 2 * i + 1),
                        RopePairs::Halves => (head * 64 + i, head * 64 + 32 + i),
                    };
                    let (sin, cos) = (position as f64 * frequency).sin_cos();
                    wanted[a] = f64::from(x[a]) * cos - f64::from(x[b]) * sin;
                    wanted[b] = f64::from(x[b]) * cos + f64::from(x[a]) * sin;
                }
            }
            let mut oracle = x.clone();
            rope(Tier::Scalar, pairs, &row, &mut oracle);
            assert!(nmse(&oracle, &wanted) < 1e-13, "{pairs:?} at {position}");
            for tier in fast_tiers() {
                let mut out = x.clone();
                rope(tier, pairs, &row, &mut out);
                assert_eq!(bits(&out), bits(&oracle), "{tier} {pairs:?} at {position}");
            }
        }
    }
}

#[test]
fn both_rope_layouts_give_a_pair_the_same_bits() {
    let frequencies: Vec<f64> = (0..16).map(|i| 0.7f64.powi(i)).collect();
    let mut row = RopeRow::default();
    let interleaved = Noise(5).values(32);
    let halves: Vec<f32> = (0..32).map(|i| interleaved[if i < 16 { 2 * i } else { 2 * (i - 16) + 1 }]).collect();
    let (mut a, mut b) = (interleaved, halves);
    row.set(RopePairs::Interleaved, &frequencies, 9);
    rope(Tier::detect(), RopePairs::Interleaved, &row, &mut a);
    row.set(RopePairs::Halves, &frequencies, 9);
    rope(Tier::detect(), RopePairs::Halves, &row, &mut b);
    for i in 0..16 {
        assert_eq!((a[2 * i].to_bits(), a[2 * i + 1].to_bits()), (b[i].to_bits(), b[16 + i].to_bits()));
    }
}
