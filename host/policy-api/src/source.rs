//! How a machine supplies facts: one method a shape, one arm a signal. A new signal is a new arm and nothing else.

use crate::generated::CommonSignal;
use crate::signal::{FillBasis, Signal};

/// The context of one question.
///
/// `None` is unknown, which is neither zero nor idle: the value becomes the registry's fill and its mask bit is clear. The mask itself
/// is never asked for. Called once a declared signal, so arms may compute.
pub trait ContextSource<S: Signal> {
    /// A signal of the table `common`.
    fn common(&self, which: CommonSignal) -> Option<u64>;
    /// A signal of the question's own table.
    fn value(&self, which: S) -> Option<u64>;
}

/// The candidates of one question, in host order.
///
/// Same rules as [`ContextSource`].
pub trait RowSource<S: Signal> {
    /// Number of candidates.
    fn rows(&self) -> usize;
    /// One signal of one candidate, `row < self.rows()`.
    fn cell(&self, which: S, row: usize) -> Option<u64>;

    /// Hands every wanted signal of every candidate to `give`, with its position among `wanted` and its row. As supplied it asks column by
    /// column; a source that reaches a candidate by several steps goes row by row instead, and takes them once.
    fn visit(&self, wanted: &[Option<S>], mut give: impl FnMut(usize, usize, Option<u64>)) {
        for (at, signal) in wanted.iter().enumerate() {
            let Some(signal) = *signal else { continue };
            for row in 0..self.rows() {
                give(at, row, self.cell(signal, row));
            }
        }
    }

    /// What a named fill means in this row. As supplied it reads the signal that the registry names for it; rows whose table has none
    /// (`max-left` of running sequences) say it themselves.
    fn basis(&self, basis: FillBasis, row: usize) -> Option<u64> {
        S::basis_signal(basis).and_then(|signal| self.cell(signal, row))
    }
}

impl<S: Signal, T: ContextSource<S> + ?Sized> ContextSource<S> for &T {
    fn common(&self, which: CommonSignal) -> Option<u64> {
        (**self).common(which)
    }
    fn value(&self, which: S) -> Option<u64> {
        (**self).value(which)
    }
}

impl<S: Signal, T: RowSource<S>> RowSource<S> for &T {
    fn rows(&self) -> usize {
        (**self).rows()
    }
    fn cell(&self, which: S, row: usize) -> Option<u64> {
        (**self).cell(which, row)
    }
    fn visit(&self, wanted: &[Option<S>], give: impl FnMut(usize, usize, Option<u64>)) {
        (**self).visit(wanted, give);
    }
    fn basis(&self, basis: FillBasis, row: usize) -> Option<u64> {
        (**self).basis(basis, row)
    }
}
