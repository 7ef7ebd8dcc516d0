//! Identity of cached content.

use core::fmt;

/// Identity of one full block of KV: first 16 bytes of SHA-256(parent ‖ u32 LE tokens ‖ spans). Computed at the edge; the core compares.
///
/// The root parent hashes the namespace (model, tokenizer, template, adapter, KV dtype, layout) and the trust group.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct BlockKey(pub [u8; 16]);

impl BlockKey {
    /// The first 64 bits, as policies see a hash.
    pub fn short(self) -> u64 {
        let [a, b, c, d, e, f, g, h, ..] = self.0;
        u64::from_le_bytes([a, b, c, d, e, f, g, h])
    }

    /// Reads sixteen bytes.
    pub fn decode(from: &mut crate::codec::Reader<'_>) -> Result<Self, crate::codec::DecodeError> {
        let mut bytes = [0; 16];
        bytes.copy_from_slice(from.raw(16)?);
        Ok(Self(bytes))
    }
}

impl fmt::Debug for BlockKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "BlockKey({:016x})", self.short())
    }
}
