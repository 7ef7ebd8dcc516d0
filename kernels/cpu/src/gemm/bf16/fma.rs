//! Fused multiply-adds in f32: for CPUs without a unit for bfloat16, and the oracle of those that have none.

use super::{Group, LINE_BYTES};
use crate::activation::{panel, panel_count};
use crate::gemm::put;
use crate::lanes::{Lanes, scalar};
use crate::tier::Tier;

/// Multiplies a group on the lanes of `tier`. AVX-VNNI has nothing that this needs beyond AVX2.
///
/// # Safety
/// The tier is supported, the group's output is its own and has room for its rows, which are f32 of [`crate::Bf16Unit::Fma`].
pub(super) unsafe fn multiply(tier: Tier, group: &Group<'_>) {
    // SAFETY: the caller vouches for the tier's features and the group.
    unsafe {
        match tier {
            #[cfg(target_arch = "x86_64")]
            Tier::Avx512Vnni | Tier::Amx => avx512(group),
            #[cfg(target_arch = "x86_64")]
            Tier::Avx2 | Tier::AvxVnni => avx2(group),
            #[cfg(target_arch = "aarch64")]
            Tier::Neon => neon(group),
            _ => body::<scalar::Scalar>(group),
        }
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")]
unsafe fn avx512(group: &Group<'_>) {
    // SAFETY: the features that these operations need are enabled here; the contract of the body is passed on.
    unsafe { body::<crate::lanes::avx512::Avx512>(group) }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn avx2(group: &Group<'_>) {
    // SAFETY: the features are enabled here; the contract of the body is passed on.
    unsafe { body::<crate::lanes::avx2::Avx2>(group) }
}

#[cfg(target_arch = "aarch64")]
#[target_feature(enable = "neon")]
unsafe fn neon(group: &Group<'_>) {
    // SAFETY: the features that these operations need are enabled here; the contract of the body is passed on.
    unsafe { body::<crate::lanes::neon::Neon>(group) }
}

#[inline(always)]
unsafe fn body<L: Lanes>(group: &Group<'_>) {
    let rows = group.pass.len();
    for index in 0..panel_count(rows) {
        let panel = panel(rows, index);
        let first = group.pass.start + panel.first;
        // SAFETY: the panel lies inside the group's rows.
        unsafe {
            match panel.rows {
                8 if L::GEMM_ROWS == 8 => tiles::<L, 8, 1>(group, first),
                8 => {
                    tiles::<L, 4, 1>(group, first);
                    tiles::<L, 4, 1>(group, first + 4);
                }
                4 => tiles::<L, 4, 1>(group, first),
                2 => tiles::<L, 2, 2>(group, first),
                _ => tiles::<L, 1, 4>(group, first),
            }
        }
    }
}

/// `R` rows from `first` on by all tiles, up to `C` of them at once.
#[inline(always)]
unsafe fn tiles<L: Lanes, const R: usize, const C: usize>(group: &Group<'_>, first: usize) {
    let mut tile = 0;
    // SAFETY: the contract is passed on.
    unsafe {
        while tile + C <= group.tiles {
            pass::<L, R, C>(group, first, tile);
            tile += C;
        }
        while tile < group.tiles {
            pass::<L, R, 1>(group, first, tile);
            tile += 1;
        }
    }
}

/// `R` rows from `first` on by `C` tiles from `tile` on.
#[inline(always)]
unsafe fn pass<L: Lanes, const R: usize, const C: usize>(group: &Group<'_>, first: usize, tile: usize) {
    let (x, stride) = (group.rows.row(first), group.rows.stride_bytes());
    // SAFETY: a tile has k / 2 lines and a row k values; all of these rows and tiles are the group's.
    unsafe {
        let mut acc = [[L::splat(0.0); C]; R];
        for (lines, ahead) in group.stretches(C) {
            for line in lines {
                let x = x.add(line * 8);
                for c in 0..C {
                    let from = group.tile(tile + c).add(line * LINE_BYTES);
                    if first == 0 {
                        // Only the first rows meet weights that are not in a cache yet.
                        L::prefetch(from.wrapping_add(ahead));
                    }
                    let (even, odd) = L::load_bf16_pairs(from.cast());
                    for r in 0..R {
                        let pair = x.add(r * stride).cast::<f32>();
                        acc[r][c] = L::fma(even, L::splat(pair.read()), acc[r][c]);
                        acc[r][c] = L::fma(odd, L::splat(pair.add(1).read()), acc[r][c]);
                    }
                }
            }
        }
        for r in 0..R {
            for c in 0..C {
                let columns = group.columns_of(tile + c);
                put::<L>(group.output(first + r, tile + c), acc[r][c], columns, group.store);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::trial::{BEFORE, Trial};
    use super::*;
    use crate::Bf16Unit;
    use crate::gemm::Store;

    /// AVX-512 among them, whatever unit its tier uses on this CPU, and against the sum written out.
    #[test]
    fn all_lanes_give_equal_bits() {
        for rows in 1..=21 {
            let trial = Trial::new(Bf16Unit::Fma, rows, 3 * 16 + 5, 96);
            let mut wanted = Vec::new();
            for x in trial.x.chunks(trial.k) {
                for weights in trial.weights.chunks(trial.k) {
                    wanted.push(weights.iter().zip(x).fold(0f32, |sum, (&w, &x)| w.mul_add(x, sum)));
                }
            }
            for tier in Tier::ALL.into_iter().filter(|tier| tier.is_supported()) {
                for at_once in [1, 2, 4] {
                    // SAFETY: the tier is supported and the trial's groups lie inside its outputs.
                    let run = |store| trial.outputs(at_once, store, |group| unsafe { multiply(tier, group) });
                    assert!(run(Store::Replace) == wanted, "{tier} rows {rows}, {at_once} tiles");
                    let added: Vec<f32> = wanted.iter().map(|sum| BEFORE + sum).collect();
                    assert!(run(Store::Add) == added, "{tier} rows {rows}, {at_once} tiles, added");
                }
            }
        }
    }
}
