//! AVX-512 BF16: two products a lane and instruction.

use std::arch::x86_64::*;

use super::{Group, LINE_BYTES};
use crate::activation::{PANEL_ROWS, panel, panel_count};
use crate::gemm::put;
use crate::lanes::{LANES, avx512::Avx512};

/// Multiplies a group.
///
/// # Safety
/// The CPU has AVX-512 F, BW, VL, DQ and BF16; the group's output is its own and has room for its rows, which are bfloat16.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16")]
pub(super) unsafe fn multiply(group: &Group<'_>) {
    let rows = group.pass.len();
    let panels = panel_count(rows);
    for index in 0..panels {
        let panel = panel(rows, index);
        let first = group.pass.start + panel.first;
        // Only the first pass meets weights that are not in a cache yet.
        let ask = match (group.pass.start, rows) {
            (0, PANEL_ROWS..) => Ask::Share { index, panels },
            (0, _) if index == 0 => Ask::Ahead,
            _ => Ask::Nothing,
        };
        // SAFETY: the panel lies inside the group's rows; the features are enabled here.
        unsafe {
            match panel.rows {
                8 => tiles::<8, 2>(group, first, ask),
                4 => tiles::<4, 4>(group, first, ask),
                2 => tiles::<2, 4>(group, first, ask),
                _ => tiles::<1, 4>(group, first, ask),
            }
        }
    }
}

/// Which weights a panel asks for before they are used.
#[derive(Clone, Copy)]
enum Ask {
    /// None.
    Nothing,
    /// Those a little further on: few rows, which wait for memory whatever is done.
    Ahead,
    /// Its share of the next group's, so that they come while all panels of this one are multiplied.
    Share { index: usize, panels: usize },
}

/// `R` rows from `first` on by all tiles, up to `C` of them at once.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16")]
unsafe fn tiles<const R: usize, const C: usize>(group: &Group<'_>, first: usize, ask: Ask) {
    let mut tile = 0;
    // SAFETY: the contract is passed on.
    unsafe {
        while tile + C <= group.tiles {
            pass::<R, C>(group, first, tile, ask);
            tile += C;
        }
        while tile + 2 <= group.tiles {
            pass::<R, 2>(group, first, tile, ask);
            tile += 2;
        }
        if tile < group.tiles {
            pass::<R, 1>(group, first, tile, ask);
        }
    }
}

/// Sixteen pairs.
#[inline(always)]
fn bfloats(bits: __m512i) -> __m512bh {
    // SAFETY: both are 512 bits without a meaning of their own.
    unsafe { std::mem::transmute::<__m512i, __m512bh>(bits) }
}

/// `R` rows from `first` on by `C` tiles from `tile` on.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16")]
unsafe fn pass<const R: usize, const C: usize>(group: &Group<'_>, first: usize, tile: usize, ask: Ask) {
    let (x, stride) = (group.rows.row(first), group.rows.stride_bytes());
    let weights = group.tile(tile);
    // SAFETY: a tile has k / 2 lines and a row k values; all of these rows and tiles are the group's.
    unsafe {
        let mut acc = [[_mm512_setzero_ps(); C]; R];
        for (lines, ahead) in group.stretches(C) {
            let (mut due, step, ahead) = match ask {
                Ask::Nothing => (usize::MAX, 0, 0),
                Ask::Ahead => (lines.start, 1, ahead),
                Ask::Share { index, panels } => (lines.start + index, panels, group.tiles * group.tile_bytes),
            };
            for line in lines {
                let is_due = line == due;
                if is_due {
                    due += step;
                }
                let x = x.add(line * 4);
                let mut weights_of = [bfloats(_mm512_setzero_si512()); C];
                for c in 0..C {
                    let from = weights.add(c * group.tile_bytes + line * LINE_BYTES);
                    if is_due {
                        _mm_prefetch::<_MM_HINT_T0>(from.wrapping_add(ahead).cast());
                    }
                    weights_of[c] = bfloats(_mm512_loadu_si512(from.cast()));
                }
                for r in 0..R {
                    let pair = bfloats(_mm512_set1_epi32(x.add(r * stride).cast::<i32>().read_unaligned()));
                    for c in 0..C {
                        acc[r][c] = _mm512_dpbf16_ps(acc[r][c], weights_of[c], pair);
                    }
                }
            }
        }
        // Through memory: sums that the loop below indexes would leave their registers in the one above.
        let mut sums = [[[0f32; LANES]; C]; R];
        for r in 0..R {
            for c in 0..C {
                _mm512_storeu_ps(sums[r][c].as_mut_ptr(), acc[r][c]);
            }
        }
        for (r, sums) in sums.iter().enumerate() {
            for (c, sums) in sums.iter().enumerate() {
                let columns = group.columns_of(tile + c);
                let sums = _mm512_loadu_ps(sums.as_ptr());
                put::<Avx512>(group.output(first + r, tile + c), sums, columns, group.store);
            }
        }
    }
}
