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
    if surely_fits(a, b) { a.wrapping_mul(b) } else { a.saturating_mul(b) }
}

/// Does `a * b` fit 64 bits? Some that do are told they may not. On a machine without wide multiplication (wasm32) this costs a tenth of
/// asking the product.
const fn surely_fits(a: u64, b: u64) -> bool {
    a.leading_zeros() + b.leading_zeros() >= u64::BITS
}

/// `a * b / c` with the product in 128 bits, at most MAX; `None` when `c` is 0.
pub const fn mul_div(a: u64, b: u64, c: u64) -> Option<u64> {
    if c == 0 {
        return None;
    }
    if surely_fits(a, b) {
        return Some(a.wrapping_mul(b) / c);
    }
    let wide = a as u128 * b as u128;
    // What does not fit is told by the upper half, without the division: without a wide one (wasm32) that costs a thousand instructions.
    if (wide >> u64::BITS) as u64 >= c { Some(u64::MAX) } else { Some((wide / c as u128) as u64) }
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

    #[test]
    fn the_short_way_and_the_wide_one_agree() {
        let around = |bits: u32| [(1u64 << bits) - 1, 1 << bits, (1 << bits) + 1];
        for a in (0..64).flat_map(around) {
            for b in (0..64).flat_map(around) {
                let wide = u128::from(a) * u128::from(b);
                assert_eq!(u128::from(mul(a, b)), wide.min(u64::MAX.into()), "{a} * {b}");
                for c in [1, 7, 1 << 32, a.max(1), b.max(1), u64::MAX] {
                    let by_c = (wide / u128::from(c)).min(u64::MAX.into());
                    assert_eq!(mul_div(a, b, c).map(u128::from), Some(by_c), "{a} * {b} / {c}");
                }
            }
        }
    }
}
