//! How do a case's values reach a policy? As a seat would pass them: in declared order, unknown ones as their fill, with the mask.

use penstock_policy_api::{
    CommonSignal, Declarable, Declared, Fill, FillBasis, InContext, Matrix, RequestRecord, Signal,
};

use crate::case::Values;

/// One value a declared name.
pub(crate) fn context<S: Signal>(
    declared: &Declared<InContext<S>>,
    given: &Values,
    request: &RequestRecord,
) -> Vec<u64> {
    let value = |signal: InContext<S>| {
        let known = given.get(signal.entry().name).copied().flatten();
        (known, filled(signal.entry().fill, |basis| request.basis(basis)))
    };
    line(declared.entries(), value)
}

/// One column a declared name.
pub(crate) fn rows<S: Signal>(declared: &Declared<S>, given: &[Values]) -> Matrix {
    let mut cells = vec![0; declared.len() * given.len()];
    for (row, values) in given.iter().enumerate() {
        let named = |signal: S| values.get(signal.name()).copied().flatten();
        let basis = |which: FillBasis| S::basis_signal(which).and_then(named).unwrap_or(0);
        let value = |signal: S| (named(signal), filled(signal.info().fill, basis));
        for (column, cell) in line(declared.entries(), value).into_iter().enumerate() {
            cells[column * given.len() + row] = cell;
        }
    }
    Matrix::from_packed(given.len(), cells)
}

/// Names that a case gives and no table has; a misspelt name must not read as unknown.
pub(crate) fn stranger<S: Signal>(given: &Values, with_common: bool) -> Option<&str> {
    let is_own = |name: &str| S::from_name(name).is_some();
    let is_common = |name: &str| with_common && CommonSignal::from_name(name).is_some();
    given.keys().map(String::as_str).find(|name| !is_own(name) && !is_common(name))
}

fn line<D: Declarable>(entries: &[Option<D>], value: impl Fn(D) -> (Option<u64>, u64)) -> Vec<u64> {
    let mut mask = 0u64;
    let mut out: Vec<u64> = Vec::with_capacity(entries.len());
    for (bit, entry) in entries.iter().enumerate() {
        let (known, fill) = match entry {
            Some(signal) if signal.is_known_mask() => (Some(0), 0),
            Some(signal) => value(*signal),
            None => (None, 0),
        };
        mask |= u64::from(known.is_some()) << bit;
        out.push(known.unwrap_or(fill));
    }
    for (value, entry) in out.iter_mut().zip(entries) {
        if entry.is_some_and(|signal| signal.is_known_mask()) {
            *value = mask;
        }
    }
    out
}

fn filled(fill: Fill, basis: impl Fn(FillBasis) -> u64) -> u64 {
    match fill {
        Fill::Number(number) => number,
        Fill::Required => 0,
        Fill::Basis(which) => basis(which),
    }
}
