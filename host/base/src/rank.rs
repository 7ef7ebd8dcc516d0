//! Importance. Larger is more important, in both scales.

/// Class 0..=7 of a request: 0 background, 3 the default, larger is more important.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct ClassRank(u8);

impl ClassRank {
    /// Number of classes.
    pub const COUNT: usize = 8;
    /// The most important class.
    pub const MAX: Self = Self(7);
    /// The least important class.
    pub const MIN: Self = Self(0);

    /// Takes 0..=7; anything above is the highest class.
    pub const fn clamped(rank: u8) -> Self {
        Self(if rank > 7 { 7 } else { rank })
    }

    /// Takes 0..=7 and refuses the rest.
    pub fn new(rank: u8) -> Option<Self> {
        (rank <= 7).then_some(Self(rank))
    }

    /// As a number.
    pub const fn get(self) -> u8 {
        self.0
    }

    /// As an index into a table of [`Self::COUNT`] entries.
    pub const fn index(self) -> usize {
        self.0 as usize
    }

    /// All classes, least important first.
    pub fn all() -> impl DoubleEndedIterator<Item = Self> {
        (0..=7).map(Self)
    }
}

impl Default for ClassRank {
    fn default() -> Self {
        Self(3)
    }
}

/// Order inside a class; larger is more important, 0 is neutral.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub struct Priority(pub i32);

impl Priority {
    /// Shifted by 2^31, so that it orders as an unsigned number in a column.
    pub fn biased(self) -> u64 {
        (i64::from(self.0) + (1 << 31)) as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn biased_priorities_order_as_the_signed_ones() {
        assert_eq!(Priority(i32::MIN).biased(), 0);
        assert_eq!(Priority(0).biased(), 2_147_483_648);
        assert_eq!(Priority(i32::MAX).biased(), 4_294_967_295);
    }
}
