//! Turns what a source knows into the values that a policy declared, with fills for what is unknown.

use alloc::vec::Vec;

use crate::declare::{Declarable, Declared, InContext};
use crate::matrix::Matrix;
use crate::signal::{Fill, FillBasis, Signal};
use crate::source::{ContextSource, RowSource};

fn filled(fill: Fill, basis: impl FnOnce(FillBasis) -> u64) -> u64 {
    match fill {
        Fill::Number(number) => number,
        Fill::Required => 0,
        Fill::Basis(which) => basis(which),
    }
}

/// A value as the host itself reads it: the fill where it is unknown. For signals whose fill is a number.
pub(super) fn or_fill<S: Signal>(signal: S, known: Option<u64>) -> u64 {
    known.unwrap_or_else(|| filled(signal.info().fill, |_| 0))
}

/// Writes one value a declared name.
pub(super) fn context<S: Signal>(
    declared: &Declared<InContext<S>>,
    source: &impl ContextSource<S>,
    basis: impl Fn(FillBasis) -> u64,
    out: &mut Vec<u64>,
) {
    out.clear();
    let mut mask = 0u64;
    for (bit, entry) in declared.entries().iter().enumerate() {
        let Some(signal) = *entry else {
            out.push(0);
            continue;
        };
        let known = match signal {
            own_mask if own_mask.is_known_mask() => Some(0),
            InContext::Common(which) => source.common(which),
            InContext::Own(which) => source.value(which),
        };
        if known.is_some() {
            mask |= 1 << bit;
        }
        out.push(known.unwrap_or_else(|| filled(signal.entry().fill, &basis)));
    }
    for (value, entry) in out.iter_mut().zip(declared.entries()) {
        if entry.is_some_and(|signal| signal.is_known_mask()) {
            *value = mask;
        }
    }
}

/// Writes one column a declared name. `masks` is scratch.
pub(super) fn rows<S: Signal>(
    declared: &Declared<S>,
    source: &impl RowSource<S>,
    out: &mut Matrix,
    masks: &mut Vec<u64>,
) {
    let rows = source.rows();
    out.reset(declared.len(), rows);
    let own_mask = declared.entries().iter().position(|entry| entry.is_some_and(|signal| signal.is_known_mask()));
    masks.clear();
    masks.resize(rows, own_mask.map_or(0, |bit| 1 << bit));
    let (cells, entries) = (out.packed_mut(), declared.entries());
    source.visit(entries, |at, row, known| {
        let value = match known {
            Some(known) => {
                masks[row] |= 1 << at;
                known
            }
            None => {
                let fill = entries[at].map_or(Fill::Number(0), |signal| signal.info().fill);
                filled(fill, |which| row_basis(source, which, row))
            }
        };
        cells[at * rows + row] = value;
    });
    if let Some(at) = own_mask {
        out.column_mut(at).copy_from_slice(masks);
    }
}

/// A named fill whose own quantity is unknown reads as that signal's number, where it has one.
fn row_basis<S: Signal>(source: &impl RowSource<S>, which: FillBasis, row: usize) -> u64 {
    source.basis(which, row).unwrap_or_else(|| match S::basis_signal(which).map(|signal| signal.info().fill) {
        Some(Fill::Number(number)) => number,
        _ => 0,
    })
}
