//! Arithmetic of signals: below 0 is 0, above MAX is MAX, a division by nothing is stated. The same rule holds in every SDK.

/// `a + b`, at most MAX.
pub const fn add(a: u64, b: u64) -> u64 {
    a.saturating_add(b)
}

/// `a - b`, at least 0.
pub const fn sub(a: u64, b: u64) -> u64 {
    a.saturating_sub(b)
}

/// `a * b`, at most MAX.
pub const fn mul(a: u64, b: u64) -> u64 {
    a.saturating_mul(b)
}

/// `a * b / c` with the product in 128 bits, at most MAX; `None` when `c` is 0.
pub const fn mul_div(a: u64, b: u64, c: u64) -> Option<u64> {
    if c == 0 {
        return None;
    }
    let wide = (a as u128 * b as u128) / c as u128;
    Some(if wide > u64::MAX as u128 { u64::MAX } else { wide as u64 })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_ends_hold() {
        assert_eq!(add(u64::MAX, 1), u64::MAX);
        assert_eq!(sub(1, 2), 0);
        assert_eq!(mul(u64::MAX, 2), u64::MAX);
        assert_eq!(mul_div(u64::MAX, 1_000_000, u64::MAX), Some(1_000_000));
        assert_eq!(mul_div(u64::MAX, 3, 2), Some(u64::MAX));
        assert_eq!(mul_div(7, 3, 0), None);
    }
}
