//! What of a row of logits has to be looked at value by value, for whoever chooses a token from it.
//!
//! A row is read in **blocks** of 256 values. A first pass keeps the greatest value of each block; whatever comes after passes over the
//! blocks in which it can find nothing. Sums of weights are those of blocks, each of sixteen lanes in ascending order and the fixed tree, and
//! blocks are added in f64 in ascending order: the bits depend on the row alone.
//!
//! - [`scan`]: greatest values, and whether all are finite. - [`change`]: what changes logits before a choice.
//! - [`row`]: a scanned row, its softmax weights, and which of its tokens lie above a border.

mod change;
mod row;
mod scan;

pub use change::{Penalties, forbid, penalise};
pub use row::{Kept, MARKS, Row, Softmax, Token, weigh};
pub use scan::{argmax, rescan, scan};

use crate::tier::Tier;

/// Values of a block.
pub const BLOCK: usize = 256;

/// Natural logarithm of the sum of e^x over the row.
///
/// # Panics
/// When the tier is not supported.
pub fn log_sum_exp(tier: Tier, x: &[f32]) -> f64 {
    let mut maxima = Vec::new();
    scan(tier, x, &mut maxima);
    Row::new(tier, x, &maxima).log_sum_exp()
}
