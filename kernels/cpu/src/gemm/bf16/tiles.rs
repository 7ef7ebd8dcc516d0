//! AMX: sixteen rows by sixteen columns by 32 inputs at a time, two by two of them.

use super::{Group, LINE_BYTES};
use crate::activation::TILED_ROWS;
use crate::amx::{self, SIDE, TileShapes, Tiles};
use crate::gemm::{Store, put};
use crate::lanes::{LANES, Lanes, avx512::Avx512};
use crate::weights::BLOCK;

/// Tiles of sums (0 to 3), of activations (4 and 5) and of weights (6 and 7): sixteen rows of 64 bytes, all of them.
const SHAPES: TileShapes = TileShapes::new([(SIDE, 64); 8]);

/// Bytes of weights that one product of tiles takes: a block of sixteen columns.
const BLOCK_BYTES: usize = BLOCK / 2 * LINE_BYTES;

/// Eight tiles and what is done with them here, so that the order of work can be tried where no AMX is.
///
/// # Safety
/// As for the functions of [`crate::amx`], with all tiles of sixteen rows of 64 bytes.
trait TileUnit {
    unsafe fn zero<const T: usize>(&mut self);
    unsafe fn load<const T: usize>(&mut self, from: *const u8, stride: usize);
    unsafe fn store<const T: usize>(&mut self, to: *mut u8, stride: usize);
    /// Adds the products of bfloat16 pairs of `A` and `B` to the f32 of `C`.
    unsafe fn dot<const C: usize, const A: usize, const B: usize>(&mut self);
}

/// This thread's tiles.
pub(super) struct Hardware {
    _tiles: Tiles,
}

impl Hardware {
    pub(super) fn new() -> Self {
        Self { _tiles: Tiles::configure(&SHAPES) }
    }
}

impl TileUnit for Hardware {
    #[inline(always)]
    unsafe fn zero<const T: usize>(&mut self) {
        // SAFETY: the guard is alive; the rest is the caller's promise.
        unsafe { amx::zero::<T>() }
    }
    #[inline(always)]
    unsafe fn load<const T: usize>(&mut self, from: *const u8, stride: usize) {
        // SAFETY: the guard is alive; the rest is the caller's promise.
        unsafe { amx::load::<T>(from, stride) }
    }
    #[inline(always)]
    unsafe fn store<const T: usize>(&mut self, to: *mut u8, stride: usize) {
        // SAFETY: the guard is alive; the rest is the caller's promise.
        unsafe { amx::store::<T>(to, stride) }
    }
    #[inline(always)]
    unsafe fn dot<const C: usize, const A: usize, const B: usize>(&mut self) {
        // SAFETY: the guard is alive; the rest is the caller's promise.
        unsafe { amx::dot_bf16::<C, A, B>() }
    }
}

/// Multiplies a group of one or two tiles.
///
/// # Safety
/// The group's output is its own and has room for its rows, which are bfloat16, filled up to sixteen.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")]
pub(super) unsafe fn multiply(hardware: &mut Hardware, group: &Group<'_>) {
    // SAFETY: tiles are alive, so the CPU is one that AMX's tier supports, which has the features of the AVX-512 tier.
    unsafe { panels::<Hardware, Avx512>(hardware, group) }
}

#[inline(always)]
unsafe fn panels<U: TileUnit, L: Lanes>(unit: &mut U, group: &Group<'_>) {
    for first in group.pass.clone().step_by(2 * TILED_ROWS) {
        let is_pair = group.pass.end - first > TILED_ROWS;
        // SAFETY: the contract is passed on.
        unsafe {
            match (is_pair, group.tiles) {
                (true, 2) => product::<U, L, 2, 2>(unit, group, first),
                (true, _) => product::<U, L, 2, 1>(unit, group, first),
                (false, 2) => product::<U, L, 1, 2>(unit, group, first),
                (false, _) => product::<U, L, 1, 1>(unit, group, first),
            }
        }
    }
}

/// `P` panels of sixteen rows from `first` on by `C` tiles of columns.
#[inline(always)]
unsafe fn product<U: TileUnit, L: Lanes, const P: usize, const C: usize>(
    unit: &mut U,
    group: &Group<'_>,
    first: usize,
) {
    let stride = group.rows.stride_bytes();
    let x = [group.rows.row(first), group.rows.row(first + (P - 1) * TILED_ROWS)];
    // SAFETY: a tile of columns has k / 32 blocks of sixteen lines, and a row k values; rows are filled up to sixteen.
    unsafe {
        unit.zero::<0>();
        unit.zero::<1>();
        unit.zero::<2>();
        unit.zero::<3>();
        for (lines, ahead) in group.stretches(C) {
            for block in lines.start / SIDE..lines.end / SIDE {
                let weights = [0, C - 1].map(|tile| group.tile(tile).wrapping_add(block * BLOCK_BYTES));
                if first == 0 {
                    // Only the first rows meet weights that are not in a cache yet.
                    for line in 0..SIDE {
                        L::prefetch(weights[0].wrapping_add(ahead + line * LINE_BYTES));
                        if C == 2 {
                            L::prefetch(weights[1].wrapping_add(ahead + line * LINE_BYTES));
                        }
                    }
                }
                unit.load::<4>(x[0].add(block * BLOCK * 2), stride);
                unit.load::<6>(weights[0], LINE_BYTES);
                unit.dot::<0, 4, 6>();
                if C == 2 {
                    unit.load::<7>(weights[1], LINE_BYTES);
                    unit.dot::<1, 4, 7>();
                }
                if P == 2 {
                    unit.load::<5>(x[1].add(block * BLOCK * 2), stride);
                    unit.dot::<2, 5, 6>();
                    if C == 2 {
                        unit.dot::<3, 5, 7>();
                    }
                }
            }
        }
        take_out::<U, L, 0>(unit, group, first, 0);
        if C == 2 {
            take_out::<U, L, 1>(unit, group, first, 1);
        }
        if P == 2 {
            take_out::<U, L, 2>(unit, group, first + TILED_ROWS, 0);
            if C == 2 {
                take_out::<U, L, 3>(unit, group, first + TILED_ROWS, 1);
            }
        }
    }
}

/// Brings the sums of tile `T`, of sixteen rows from `first` on, to where they belong.
#[inline(always)]
unsafe fn take_out<U: TileUnit, L: Lanes, const T: usize>(unit: &mut U, group: &Group<'_>, first: usize, tile: usize) {
    let (rows, columns) = ((group.pass.end - first).min(SIDE), group.columns_of(tile));
    // SAFETY: the caller vouches for the rows and columns that exist; a tile is sixteen rows of 64 bytes.
    unsafe {
        if group.store == Store::Replace && rows == SIDE && columns == LANES {
            unit.store::<T>(group.output(first, tile).cast(), group.stride * size_of::<f32>());
            return;
        }
        let mut sums = [[0f32; LANES]; SIDE];
        unit.store::<T>(sums.as_mut_ptr().cast(), LINE_BYTES);
        for (row, sums) in sums.iter().enumerate().take(rows) {
            put::<L>(group.output(first + row, tile), L::load(sums.as_ptr()), columns, group.store);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::trial::{BEFORE, Trial};
    use super::*;
    use crate::Bf16Unit;
    use crate::half::bf16_to_f32;
    use crate::lanes::scalar::Scalar;

    /// Eight tiles in software, by the definition of the instructions. Whether the hardware is like it only a CPU with AMX can tell.
    struct Software([[u8; 1024]; 8]);

    impl Software {
        fn bf16(&self, tile: usize, row: usize, at: usize) -> f32 {
            let at = row * 64 + at * 2;
            bf16_to_f32(u16::from_le_bytes([self.0[tile][at], self.0[tile][at + 1]]))
        }
    }

    impl TileUnit for Software {
        unsafe fn zero<const T: usize>(&mut self) {
            self.0[T].fill(0);
        }
        unsafe fn load<const T: usize>(&mut self, from: *const u8, stride: usize) {
            for (row, to) in self.0[T].chunks_exact_mut(64).enumerate() {
                // SAFETY: the caller vouches for sixteen rows of 64 bytes.
                to.copy_from_slice(unsafe { std::slice::from_raw_parts(from.add(row * stride), 64) });
            }
        }
        unsafe fn store<const T: usize>(&mut self, to: *mut u8, stride: usize) {
            for (row, from) in self.0[T].chunks_exact(64).enumerate() {
                // SAFETY: the caller vouches for sixteen rows of 64 bytes.
                unsafe { std::slice::from_raw_parts_mut(to.add(row * stride), 64) }.copy_from_slice(from);
            }
        }
        unsafe fn dot<const C: usize, const A: usize, const B: usize>(&mut self) {
            for row in 0..16 {
                for column in 0..16 {
                    let mut sums = [0f32; 2];
                    for pair in 0..16 {
                        for (parity, sum) in sums.iter_mut().enumerate() {
                            *sum += self.bf16(A, row, 2 * pair + parity) * self.bf16(B, pair, 2 * column + parity);
                        }
                    }
                    let to = &mut self.0[C][row * 64 + column * 4..][..4];
                    let before = f32::from_le_bytes(to.try_into().expect("four bytes"));
                    to.copy_from_slice(&(before + (sums[0] + sums[1])).to_le_bytes());
                }
            }
        }
    }

    /// One output in the order that the product promises, from its row and column alone.
    fn wanted(x: &[f32], weights: &[f32]) -> f32 {
        x.chunks(32).zip(weights.chunks(32)).fold(0f32, |sum, (x, weights)| {
            let of = |parity: usize| (parity..32).step_by(2).fold(0f32, |sum, i| sum + x[i] * weights[i]);
            sum + (of(0) + of(1))
        })
    }

    /// Whole and broken panels, one and two of them, full and cut columns.
    #[test]
    fn tiles_are_taken_where_they_belong() {
        for rows in [1, 2, 15, 16, 17, 31, 32, 33, 48, 50] {
            for (n, k) in [(16, 32), (35, 96), (64, 160)] {
                let trial = Trial::new(Bf16Unit::Amx, rows, n, k);
                let right: Vec<f32> = trial
                    .x
                    .chunks(k)
                    .flat_map(|x| trial.weights.chunks(k).map(move |weights| wanted(x, weights)))
                    .collect();
                for at_once in [1, 2] {
                    let run = |store| {
                        trial.outputs(at_once, store, |group| {
                            let mut unit = Software([[0xff; 1024]; 8]);
                            // SAFETY: the trial's groups lie inside its outputs, and its rows are filled up to sixteen.
                            unsafe { panels::<Software, Scalar>(&mut unit, group) }
                        })
                    };
                    assert!(run(Store::Replace) == right, "{rows} rows, {n} x {k}, {at_once} tiles");
                    let added: Vec<f32> = right.iter().map(|sum| BEFORE + sum).collect();
                    assert!(run(Store::Add) == added, "{rows} rows, {n} x {k}, {at_once} tiles, added");
                }
            }
        }
    }

    /// The hardware, where there is any, against its definition: both are within 96 roundings of a sum of magnitudes below 96.
    #[test]
    fn the_hardware_adds_up_what_the_software_does() {
        if !crate::Tier::Amx.is_supported() {
            eprintln!("SKIPPED bfloat16 products on AMX: this CPU or system lacks {}", crate::Tier::Amx);
            return;
        }
        for rows in [1, 16, 17, 33, 64] {
            let trial = Trial::new(Bf16Unit::Amx, rows, 53, 96);
            let soft = trial.outputs(2, Store::Replace, |group| {
                let mut unit = Software([[0; 1024]; 8]);
                // SAFETY: the trial's groups lie inside its outputs, and its rows are filled up to sixteen.
                unsafe { panels::<Software, Scalar>(&mut unit, group) }
            });
            let mut hardware = Hardware::new();
            let hard = trial.outputs(2, Store::Replace, |group| {
                // SAFETY: as above, and tiles are alive.
                unsafe { multiply(&mut hardware, group) }
            });
            let most = 2.0 * 96.0 * 96.0 * f32::EPSILON / 2.0;
            assert!(soft.iter().zip(&hard).all(|(soft, hard)| (soft - hard).abs() <= most), "{rows} rows");
            println!("{rows} rows: the hardware's bits are those of its definition: {}", soft == hard);
        }
    }
}
