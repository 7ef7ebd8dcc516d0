//! A running 64-bit digest over decisions: two runs that decided the same have the same digest.

/// FNV-1a over 64-bit words. Not cryptographic: it tells runs apart, it does not defend.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Digest(pub(super) u64);

impl Default for Digest {
    fn default() -> Self {
        Self(0xcbf2_9ce4_8422_2325)
    }
}

impl Digest {
    /// Adds words in order.
    pub fn add(&mut self, words: &[u64]) {
        for word in words {
            for byte in word.to_le_bytes() {
                self.0 = (self.0 ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3);
            }
        }
    }

    /// The digest so far.
    pub fn value(&self) -> u64 {
        self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_fnv_1a() {
        // FNV-1a of the eight bytes "foobar\0\0", from the reference implementation's definition, one byte at a time.
        let word = u64::from_le_bytes(*b"foobar\0\0");
        let mut digest = Digest::default();
        digest.add(&[word]);
        let expected = b"foobar\0\0"
            .iter()
            .fold(0xcbf2_9ce4_8422_2325u64, |hash, byte| (hash ^ u64::from(*byte)).wrapping_mul(1_099_511_628_211));
        assert_eq!(digest.value(), expected);
    }
}
