//! Facts: what happened, told to stateful policies in the order it happened.

use alloc::vec::Vec;

use crate::generated::FactKind;
use crate::question::Decision;

/// One thing that happened. Made by the structs of [`crate::generated::facts`], e.g. `Taken { .. }.at(now_us)`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Fact {
    /// What.
    pub kind: FactKind,
    /// When, in the machine's time.
    pub at_us: u64,
    /// Its numbers, in the registry's order; unused ones are 0.
    pub slots: [u64; 6],
}

impl Fact {
    /// Numbers a fact takes on the wall.
    pub const STRIDE: usize = 8;

    /// As the wall carries it: code, time, six slots.
    pub fn flat(&self) -> [u64; Self::STRIDE] {
        let [a, b, c, d, e, f] = self.slots;
        [u64::from(self.kind.code()), self.at_us, a, b, c, d, e, f]
    }

    /// Reads [`Self::flat`]; `None` for a code of another registry.
    pub fn from_flat(flat: [u64; Self::STRIDE]) -> Option<Self> {
        let [code, at_us, a, b, c, d, e, f] = flat;
        let kind = FactKind::from_code(u16::try_from(code).ok()?)?;
        Some(Self { kind, at_us, slots: [a, b, c, d, e, f] })
    }

    /// Appends all of `facts` in their flat form.
    pub fn flatten_into(facts: &[Self], out: &mut Vec<u64>) {
        for fact in facts {
            out.extend_from_slice(&fact.flat());
        }
    }
}

impl FactKind {
    /// The number on the wall.
    pub const fn code(self) -> u16 {
        self as u16
    }

    /// The value of [`Self::code`].
    pub fn from_code(code: u16) -> Option<Self> {
        // Codes have no gaps so far; where one comes to have, the search finds what stands elsewhere.
        let near = Self::ALL.get(usize::from(code).wrapping_sub(1)).copied().filter(|kind| kind.code() == code);
        near.or_else(|| Self::ALL.iter().copied().find(|kind| kind.code() == code))
    }

    /// The kind of that name.
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.iter().copied().find(|kind| kind.name() == name)
    }
}

/// A set of fact kinds.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct FactSet(u64);

impl FactSet {
    /// No kind.
    pub const NONE: Self = Self(0);

    /// The kinds given.
    pub fn of(kinds: &[FactKind]) -> Self {
        kinds.iter().fold(Self::NONE, |set, kind| set.with(*kind))
    }

    /// Every kind that goes to `decision`.
    pub fn all_for(decision: Decision) -> Self {
        let kinds = FactKind::ALL.iter().copied().filter(|kind| kind.goes_to().contains(&decision));
        kinds.fold(Self::NONE, Self::with)
    }

    /// One kind more. Codes are below 64, which the generator checks.
    #[must_use]
    pub const fn with(self, kind: FactKind) -> Self {
        Self(self.0 | 1 << kind.code())
    }

    /// Is it in the set?
    pub const fn has(self, kind: FactKind) -> bool {
        self.0 & 1 << kind.code() != 0
    }

    /// No kind at all?
    pub const fn is_empty(self) -> bool {
        self.0 == 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::generated::facts::{Skipped, Taken};

    #[test]
    fn a_fact_is_eight_numbers_in_the_registrys_order() {
        let taken = Taken { request_id: 1, flow_id: 2, uncached_tokens: 3, blocks: 4, by_policy_flag: 1, wait_us: 6 };
        assert_eq!(taken.at(99).flat(), [22, 99, 1, 2, 3, 4, 1, 6]);
        let skipped = Skipped { request_id: 1, taken_flag: 1, ..Skipped::default() };
        assert_eq!(Fact::from_flat(skipped.at(5).flat()), Some(skipped.at(5)));
        assert_eq!(Fact::from_flat([24, 0, 0, 0, 0, 0, 0, 0]), None);
        let mut out = Vec::new();
        Fact::flatten_into(&[taken.at(1), skipped.at(2)], &mut out);
        assert_eq!((out.len(), out[8], out[9]), (16, 23, 2));
    }

    #[test]
    fn facts_go_where_the_contract_says() {
        let routing = FactSet::all_for(Decision::Routing);
        assert!(routing.has(FactKind::Placed) && routing.has(FactKind::Evicted) && routing.has(FactKind::Gap));
        assert!(!routing.has(FactKind::Taken) && !routing.has(FactKind::Served));
        assert!(FactSet::NONE.is_empty() && !routing.is_empty());
    }
}
