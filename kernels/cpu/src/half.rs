//! Half-width floats: exact widening, and rounding to nearest even on the way down.

/// IEEE binary16 to f32, exactly (subnormals, infinities and NaN included).
#[inline]
pub fn f16_to_f32(bits: u16) -> f32 {
    let sign = u32::from(bits & 0x8000) << 16;
    let exponent = u32::from(bits >> 10) & 0x1f;
    let fraction = u32::from(bits & 0x3ff);
    match (exponent, fraction) {
        // Zero and subnormals: the fraction counts units of 2^-24, which f32 holds exactly.
        (0, fraction) => f32::from_bits(sign | (fraction as f32 * f32::from_bits(0x3380_0000)).to_bits()),
        (31, 0) => f32::from_bits(sign | 0x7f80_0000),
        // The hardware conversion also quiets a signalling NaN.
        (31, fraction) => f32::from_bits(sign | 0x7fc0_0000 | fraction << 13),
        _ => f32::from_bits(sign | (exponent + 112) << 23 | fraction << 13),
    }
}

/// f32 to IEEE binary16, to nearest even; overflow gives infinity, a NaN stays a NaN.
#[inline]
pub fn f32_to_f16(x: f32) -> u16 {
    let bits = x.to_bits();
    let sign = ((bits >> 16) & 0x8000) as u16;
    let magnitude = bits & 0x7fff_ffff;
    if magnitude >= 0x7f80_0000 {
        return sign | if magnitude > 0x7f80_0000 { 0x7e00 } else { 0x7c00 };
    }
    if magnitude < 0x3880_0000 {
        // Below 2^-14: adding 0.5 lets the f32 adder round to the 2^-24 grid of half subnormals.
        let rounded = f32::from_bits(magnitude) + 0.5;
        return sign | (rounded.to_bits() - 0.5f32.to_bits()) as u16;
    }
    let odd = (magnitude >> 13) & 1;
    let half = (magnitude + 0xfff + odd - (112 << 23)) >> 13;
    sign | half.min(0x7c00) as u16
}

/// bfloat16 to f32, exactly.
#[inline(always)]
pub fn bf16_to_f32(bits: u16) -> f32 {
    f32::from_bits(u32::from(bits) << 16)
}

/// f32 to bfloat16, to nearest even; overflow gives infinity, a NaN stays a NaN.
#[inline(always)]
pub fn f32_to_bf16(x: f32) -> u16 {
    let bits = x.to_bits();
    if x.is_nan() {
        return (bits >> 16) as u16 | 0x40;
    }
    ((bits + 0x7fff + ((bits >> 16) & 1)) >> 16) as u16
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn known_halves() {
        // Values from the IEEE 754 binary16 tables.
        let cases: [(u16, f32); 8] = [
            (0x0000, 0.0),
            (0x0001, 5.960_464_5e-8),
            (0x03ff, 6.097_555e-5),
            (0x0400, 6.103_515_6e-5),
            (0x3c00, 1.0),
            (0x3555, 0.333_251_95),
            (0x7bff, 65504.0),
            (0xc000, -2.0),
        ];
        for (bits, value) in cases {
            assert_eq!(f16_to_f32(bits), value);
            assert_eq!(f32_to_f16(value), bits);
        }
        assert_eq!(f16_to_f32(0xfc00), f32::NEG_INFINITY);
        assert!(f16_to_f32(0x7c01).is_nan());
        assert_eq!(f32_to_f16(65520.0), 0x7c00);
        assert_eq!(f32_to_f16(65519.0), 0x7bff);
        assert_eq!(f32_to_f16(f32::INFINITY), 0x7c00);
        // 1 + 2^-11 lies half way between two halves: the even one wins.
        assert_eq!(f32_to_f16(1.0 + 1.0 / 2048.0), 0x3c00);
        assert_eq!(f32_to_f16(1.0 + 3.0 / 2048.0), 0x3c02);
    }

    #[test]
    fn every_finite_half_survives_the_round_trip() {
        for bits in (0..=u16::MAX).filter(|b| b & 0x7c00 != 0x7c00) {
            assert_eq!(f32_to_f16(f16_to_f32(bits)), bits);
        }
    }

    #[test]
    fn bfloat_rounds_to_nearest_even() {
        assert_eq!(f32_to_bf16(1.0), 0x3f80);
        assert_eq!(f32_to_bf16(f32::from_bits(0x3f80_8000)), 0x3f80);
        assert_eq!(f32_to_bf16(f32::from_bits(0x3f81_8000)), 0x3f82);
        assert_eq!(f32_to_bf16(f32::from_bits(0x3f80_8001)), 0x3f81);
        assert_eq!(f32_to_bf16(f32::MAX), 0x7f80);
        assert!(bf16_to_f32(f32_to_bf16(f32::NAN)).is_nan());
        assert_eq!(bf16_to_f32(0xbfc0), -1.5);
    }
}
