//! Which signals does a policy read? Names, resolved to positions while it is compiled.

use penstock_policy_api::{TableWanted, Wanted};

/// Names of one side of a call, at most; as the host's limit.
const WANTED_MAX: usize = 48;
/// Names of a table, with the common ones, at most.
const NAMES_MAX: usize = 128;
/// Stands for a name that is not declared.
const ABSENT: u8 = u8::MAX;

/// A table of the registry, as offered to a declaration.
pub trait Table {
    /// Its name in manifests.
    const NAME: &'static str;
    /// Every name it offers; a context table offers the common ones too, behind its own.
    const NAMES: &'static [&'static str];
}

/// A list of signals of table `T`. Made by [`crate::declare!`].
pub trait Declares<T: Table> {
    /// Names that the host must know, or the policy is refused.
    const REQUIRED: &'static [&'static str];
    /// Names that read as unknown where the host does not know them. Passed behind the required ones.
    const OPTIONAL: &'static [&'static str];

    /// Where each name of the table is passed. A name that the table does not have, or has twice, does not compile.
    #[doc(hidden)]
    const POSITIONS: Positions = Positions::resolve(T::NAMES, Self::REQUIRED, Self::OPTIONAL);

    /// As a manifest lists them.
    fn wanted() -> TableWanted {
        let all = |names: &'static [&'static str], required| {
            names.iter().map(move |name| Wanted { name: (*name).into(), required })
        };
        let names = all(Self::REQUIRED, true).chain(all(Self::OPTIONAL, false)).collect();
        TableWanted { table: T::NAME.into(), names }
    }
}

/// Where the names of a table are passed.
#[doc(hidden)]
#[derive(Clone, Copy, Debug)]
pub struct Positions {
    of: [u8; NAMES_MAX],
    /// Declared names.
    count: usize,
}

impl Positions {
    const fn resolve(names: &[&str], required: &[&str], optional: &[&str]) -> Self {
        assert!(names.len() <= NAMES_MAX, "the table outgrew the SDK");
        assert!(required.len() + optional.len() <= WANTED_MAX, "a call carries at most 48 names a side");
        let mut of = [ABSENT; NAMES_MAX];
        let mut position = 0;
        while position < required.len() + optional.len() {
            let name = if position < required.len() { required[position] } else { optional[position - required.len()] };
            let at = index_of(names, name);
            assert!(of[at] == ABSENT, "a signal is declared twice");
            of[at] = position as u8;
            position += 1;
        }
        Self { of, count: position }
    }

    /// Position of the table's `index`-th name.
    ///
    /// # Panics
    /// While compiling, when it is not declared.
    pub const fn of(&self, index: usize) -> usize {
        assert!(self.of[index] != ABSENT, "this signal is read but not declared");
        self.of[index] as usize
    }

    /// As [`Self::of`], for the mask.
    pub const fn mask(&self, index: usize) -> usize {
        assert!(self.of[index] != ABSENT, "try_ accessors need known-mask among the declared names");
        self.of[index] as usize
    }

    /// Number of declared names.
    pub const fn count(&self) -> usize {
        self.count
    }
}

const fn index_of(names: &[&str], name: &str) -> usize {
    let mut at = 0;
    while at < names.len() {
        if is_equal(names[at].as_bytes(), name.as_bytes()) {
            return at;
        }
        at += 1;
    }
    panic!("the table has no signal of that name");
}

const fn is_equal(a: &[u8], b: &[u8]) -> bool {
    if a.len() != b.len() {
        return false;
    }
    let mut at = 0;
    while at < a.len() {
        if a[at] != b[at] {
            return false;
        }
        at += 1;
    }
    true
}

/// Declares what a policy reads: one type a table side.
///
/// ```
/// use penstock_policy_sdk::declare;
/// declare! {
///     /// What it reads of the call.
///     pub Asked: Routing = ["need-blocks", "stale-cache-us"];
///     /// What it reads of each replica. The last name may be unknown to an older host.
///     pub Seen: Replica = ["known-mask", "overlap-blocks", "cache-age-us"], optional ["speed-ppm"];
/// }
/// ```
///
/// A misspelt name does not compile, nor does reading a name that is not listed:
///
/// ```compile_fail
/// use penstock_policy_sdk::{declare, Declares, tables::Replica};
/// declare! { pub Seen: Replica = ["overlap-pages"]; }
/// let _ = <Seen as Declares<Replica>>::POSITIONS;
/// ```
#[macro_export]
macro_rules! declare {
    ($($(#[$doc:meta])* $vis:vis $name:ident: $table:ident = [$($required:literal),* $(,)?] $(, optional [$($optional:literal),* $(,)?])?;)+) => {$(
        $(#[$doc])*
        #[derive(Clone, Copy, Debug)]
        $vis enum $name {}
        impl $crate::Declares<$crate::tables::$table> for $name {
            const REQUIRED: &'static [&'static str] = &[$($required),*];
            const OPTIONAL: &'static [&'static str] = &[$($($optional),*)?];
        }
    )+};
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tables::{Replica, Routing};

    crate::declare! {
        Seen: Replica = ["overlap-blocks", "replica-id"], optional ["zone-rank"];
        Asked: Routing = ["stale-cache-us", "need-blocks"];
    }

    fn index<T: Table>(name: &str) -> usize {
        T::NAMES.iter().position(|known| *known == name).unwrap()
    }

    #[test]
    fn values_are_passed_in_the_order_of_the_declaration() {
        let seen = <Seen as Declares<Replica>>::POSITIONS;
        assert_eq!(seen.of(index::<Replica>("overlap-blocks")), 0);
        assert_eq!(seen.of(index::<Replica>("replica-id")), 1);
        assert_eq!(seen.of(index::<Replica>("zone-rank")), 2);
        assert_eq!(seen.count(), 3);
        let asked = <Asked as Declares<Routing>>::POSITIONS;
        assert_eq!(asked.of(index::<Routing>("stale-cache-us")), 0);
        assert_eq!(asked.of(index::<Routing>("need-blocks")), 1);
    }

    #[test]
    fn a_manifest_lists_required_names_first() {
        let wanted = <Seen as Declares<Replica>>::wanted();
        assert_eq!(wanted.table, "replica");
        let names: Vec<_> = wanted.names.iter().map(|want| (want.name.as_str(), want.required)).collect();
        assert_eq!(names, [("overlap-blocks", true), ("replica-id", true), ("zone-rank", false)]);
    }
}
