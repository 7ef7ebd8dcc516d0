//! A number that stops at its ends.

use core::ops::{Add, AddAssign, Mul, Sub, SubAssign};

use penstock_policy_api::sat;

/// A `u64` whose arithmetic saturates: below 0 is 0, above MAX is MAX. The rule of the contract, as operators.
///
/// ```
/// use penstock_policy_sdk::Sat;
/// let (queued, input) = (u64::MAX, 100);
/// assert_eq!((Sat(queued) + input).0, u64::MAX);
/// assert_eq!((Sat(input) - 200).0, 0);
/// assert_eq!(Sat(7).times_over(3, 2), Some(10));
/// ```
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub struct Sat(pub u64);

impl Sat {
    /// `self * by / over` with the product in 128 bits; none when `over` is 0.
    pub const fn times_over(self, by: u64, over: u64) -> Option<u64> {
        sat::mul_div(self.0, by, over)
    }

    /// As many as fit 32 bits.
    pub const fn to_u32(self) -> u32 {
        if self.0 > u32::MAX as u64 { u32::MAX } else { self.0 as u32 }
    }
}

impl From<Sat> for u64 {
    fn from(value: Sat) -> Self {
        value.0
    }
}

impl From<u64> for Sat {
    fn from(value: u64) -> Self {
        Self(value)
    }
}

impl<T: Into<Self>> Add<T> for Sat {
    type Output = Self;
    fn add(self, other: T) -> Self {
        Self(sat::add(self.0, other.into().0))
    }
}

impl<T: Into<Self>> Sub<T> for Sat {
    type Output = Self;
    fn sub(self, other: T) -> Self {
        Self(sat::sub(self.0, other.into().0))
    }
}

impl<T: Into<Self>> Mul<T> for Sat {
    type Output = Self;
    fn mul(self, other: T) -> Self {
        Self(sat::mul(self.0, other.into().0))
    }
}

impl<T: Into<Self>> AddAssign<T> for Sat {
    fn add_assign(&mut self, other: T) {
        *self = *self + other;
    }
}

impl<T: Into<Self>> SubAssign<T> for Sat {
    fn sub_assign(&mut self, other: T) {
        *self = *self - other;
    }
}
