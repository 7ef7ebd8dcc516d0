//! The first pass over a row: the greatest value of each block, and whether all are finite.

use super::BLOCK;
use crate::lanes::{LANES, Lanes, kernel};
use crate::tier::Tier;

kernel!(
    /// Writes the greatest value of each of `blocks` blocks (negative infinity where all are NaN) and says whether all values are finite.
    fn scan_of(x: *const f32, blocks: usize, maxima: *mut f32) -> bool = scan_body
);

#[inline(always)]
unsafe fn scan_body<L: Lanes>(x: *const f32, blocks: usize, maxima: *mut f32) -> bool {
    // SAFETY: the caller vouches for the values and the tier.
    unsafe {
        let zero = L::splat(0.0);
        // Two of each, so that one operation need not wait for the one before. Zero times a value that is not finite is NaN.
        let mut poison = [zero; 2];
        for block in 0..blocks {
            let mut max = [L::splat(f32::NEG_INFINITY); 2];
            for group in 0..BLOCK / LANES {
                let value = L::load(x.add(block * BLOCK + group * LANES));
                max[group % 2] = L::max(value, max[group % 2]);
                poison[group % 2] = L::fma(value, zero, poison[group % 2]);
            }
            *maxima.add(block) = L::reduce_max(L::max(max[0], max[1]));
        }
        L::reduce_sum(L::add(poison[0], poison[1])) == 0.0
    }
}

/// Writes the greatest value of each block to `maxima`, which gets one entry a block. False when a value is infinite or NaN.
///
/// NaN is passed over; a block of nothing else has negative infinity.
///
/// # Panics
/// When the tier is not supported.
pub fn scan(tier: Tier, x: &[f32], maxima: &mut Vec<f32>) -> bool {
    assert!(tier.is_supported(), "tier {tier} is not supported here");
    maxima.clear();
    maxima.resize(x.len().div_ceil(BLOCK), f32::NEG_INFINITY);
    scan_blocks(tier, x, maxima)
}

/// Looks once more at the block of token `id`, after a logit in it was changed.
///
/// # Panics
/// When the tier is not supported, the row has no such token, or `maxima` is not one entry a block.
pub fn rescan(tier: Tier, x: &[f32], maxima: &mut [f32], id: u32) {
    assert!(tier.is_supported(), "tier {tier} is not supported here");
    let block = id as usize / BLOCK;
    let values = &x[block * BLOCK..x.len().min((block + 1) * BLOCK)];
    scan_blocks(tier, values, &mut maxima[block..=block]);
}

fn scan_blocks(tier: Tier, x: &[f32], maxima: &mut [f32]) -> bool {
    let blocks = x.len() / BLOCK;
    assert_eq!(maxima.len(), x.len().div_ceil(BLOCK), "one entry a block");
    // SAFETY: the callers checked the tier; whole blocks lie inside the slices.
    let mut finite = unsafe { scan_of(tier, x.as_ptr(), blocks, maxima.as_mut_ptr()) };
    if let Some(last) = x[blocks * BLOCK..].first() {
        // A value of the block itself fills what it lacks: neither answer changes.
        let mut values = [*last; BLOCK];
        values[..x.len() - blocks * BLOCK].copy_from_slice(&x[blocks * BLOCK..]);
        // SAFETY: as above, for one block.
        finite &= unsafe { scan_of(tier, values.as_ptr(), 1, maxima[blocks..].as_mut_ptr()) };
    }
    finite
}

/// Index of the greatest value, the lowest one among equals; `None` when there is no value but NaN.
///
/// # Panics
/// When the tier is not supported.
pub fn argmax(tier: Tier, x: &[f32]) -> Option<usize> {
    let mut maxima = Vec::new();
    scan(tier, x, &mut maxima);
    first_max(x, &maxima)
}

/// Index of the first of the greatest values of a scanned row.
pub(super) fn first_max(x: &[f32], maxima: &[f32]) -> Option<usize> {
    let max = greatest(maxima);
    // A block of NaN alone has negative infinity too, so a block that promises the value may lack it.
    let mut blocks = maxima.iter().enumerate().filter(|&(_, &of)| of == max).map(|(block, _)| block * BLOCK);
    blocks.find_map(|start| x[start..].iter().take(BLOCK).position(|&x| x == max).map(|i| start + i))
}

/// The greatest of the greatest; negative infinity of none.
pub(super) fn greatest(maxima: &[f32]) -> f32 {
    maxima.iter().fold(f32::NEG_INFINITY, |max, &x| if x > max { x } else { max })
}
