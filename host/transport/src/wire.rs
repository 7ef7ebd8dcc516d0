//! How are numbers laid out in bytes that leave the process? Little end first, one after the other.

use crate::TransportError;

/// Reads one field after the other.
pub(crate) struct Reader<'a> {
    left: &'a [u8],
}

impl<'a> Reader<'a> {
    pub(crate) fn new(bytes: &'a [u8]) -> Self {
        Self { left: bytes }
    }

    pub(crate) fn array<const N: usize>(&mut self) -> Result<[u8; N], TransportError> {
        let (field, left) = self.left.split_first_chunk().ok_or(TransportError::Descriptor("it ends too early"))?;
        self.left = left;
        Ok(*field)
    }

    pub(crate) fn u8(&mut self) -> Result<u8, TransportError> {
        self.array().map(u8::from_le_bytes)
    }

    pub(crate) fn u16(&mut self) -> Result<u16, TransportError> {
        self.array().map(u16::from_le_bytes)
    }

    pub(crate) fn u32(&mut self) -> Result<u32, TransportError> {
        self.array().map(u32::from_le_bytes)
    }

    pub(crate) fn u64(&mut self) -> Result<u64, TransportError> {
        self.array().map(u64::from_le_bytes)
    }

    /// A length in 32 bits, then as many bytes.
    pub(crate) fn bytes(&mut self, most: usize) -> Result<&'a [u8], TransportError> {
        let length = self.u32()? as usize;
        if length > most {
            return Err(TransportError::Descriptor("a field is longer than it may be"));
        }
        let (field, left) =
            self.left.split_at_checked(length).ok_or(TransportError::Descriptor("it ends too early"))?;
        self.left = left;
        Ok(field)
    }

    pub(crate) fn end(self) -> Result<(), TransportError> {
        if self.left.is_empty() { Ok(()) } else { Err(TransportError::Descriptor("bytes are left over")) }
    }
}

/// Appends a length in 32 bits, then the bytes.
pub(crate) fn put_bytes(into: &mut Vec<u8>, bytes: &[u8]) {
    into.extend_from_slice(&(bytes.len() as u32).to_le_bytes());
    into.extend_from_slice(bytes);
}
