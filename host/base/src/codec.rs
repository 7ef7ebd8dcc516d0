//! Hand-written little-endian encoding of machine state and journal payloads. No reflection, no schema language: the order of calls is
//! the format, and a version number opens every blob.

use alloc::vec::Vec;
use core::fmt;

/// Why bytes could not be read back.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum DecodeError {
    /// The bytes end before the value does.
    Truncated,
    /// A tag, flag or count has no meaning here; the name says which.
    Invalid(&'static str),
    /// Written by another version of the format.
    Version {
        /// What the bytes say.
        found: u32,
        /// What this build reads.
        expected: u32,
    },
    /// Bytes are left over after the value.
    Trailing,
}

impl fmt::Display for DecodeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Truncated => write!(f, "the bytes end too early"),
            Self::Invalid(what) => write!(f, "no such {what}"),
            Self::Version { found, expected } => write!(f, "format version {found}, this build reads {expected}"),
            Self::Trailing => write!(f, "bytes are left over"),
        }
    }
}

impl core::error::Error for DecodeError {}

/// Appends values to a byte vector.
#[derive(Clone, Debug, Default)]
pub struct Writer {
    bytes: Vec<u8>,
}

impl Writer {
    /// An empty writer.
    pub fn new() -> Self {
        Self::default()
    }
    /// What was written.
    pub fn into_bytes(self) -> Vec<u8> {
        self.bytes
    }
    /// What was written so far.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }
    /// Forgets everything, keeps the room.
    pub fn clear(&mut self) {
        self.bytes.clear();
    }
    /// One byte.
    pub fn u8(&mut self, v: u8) {
        self.bytes.push(v);
    }
    /// A flag, as 0 or 1.
    pub fn bool(&mut self, v: bool) {
        self.u8(u8::from(v));
    }
    /// Two bytes, little endian.
    pub fn u16(&mut self, v: u16) {
        self.bytes.extend_from_slice(&v.to_le_bytes());
    }
    /// Four bytes, little endian.
    pub fn u32(&mut self, v: u32) {
        self.bytes.extend_from_slice(&v.to_le_bytes());
    }
    /// Eight bytes, little endian.
    pub fn u64(&mut self, v: u64) {
        self.bytes.extend_from_slice(&v.to_le_bytes());
    }
    /// A signed number in four bytes.
    pub fn i32(&mut self, v: i32) {
        self.bytes.extend_from_slice(&v.to_le_bytes());
    }
    /// A count or index, as eight bytes.
    pub fn count(&mut self, v: usize) {
        self.u64(v as u64);
    }
    /// Bytes as they are, without a length.
    pub fn raw(&mut self, v: &[u8]) {
        self.bytes.extend_from_slice(v);
    }
    /// A length and the bytes.
    pub fn blob(&mut self, v: &[u8]) {
        self.count(v.len());
        self.raw(v);
    }
    /// A count and each item.
    pub fn list<T>(&mut self, items: impl ExactSizeIterator<Item = T>, mut each: impl FnMut(&mut Self, T)) {
        self.count(items.len());
        for item in items {
            each(self, item);
        }
    }
    /// A flag and, when set, the value.
    pub fn option<T>(&mut self, v: Option<T>, each: impl FnOnce(&mut Self, T)) {
        self.bool(v.is_some());
        if let Some(v) = v {
            each(self, v);
        }
    }
}

/// Reads values in the order they were written.
#[derive(Clone, Debug)]
pub struct Reader<'a> {
    left: &'a [u8],
}

impl<'a> Reader<'a> {
    /// Reads from the front of `bytes`.
    pub fn new(bytes: &'a [u8]) -> Self {
        Self { left: bytes }
    }
    /// Bytes not read yet.
    pub fn remaining(&self) -> usize {
        self.left.len()
    }
    /// Refuses left-over bytes.
    pub fn finish(self) -> Result<(), DecodeError> {
        if self.left.is_empty() { Ok(()) } else { Err(DecodeError::Trailing) }
    }
    /// `n` bytes as they are.
    pub fn raw(&mut self, n: usize) -> Result<&'a [u8], DecodeError> {
        let (head, tail) = self.left.split_at_checked(n).ok_or(DecodeError::Truncated)?;
        self.left = tail;
        Ok(head)
    }
    fn array<const N: usize>(&mut self) -> Result<[u8; N], DecodeError> {
        let mut out = [0; N];
        out.copy_from_slice(self.raw(N)?);
        Ok(out)
    }
    /// One byte.
    pub fn u8(&mut self) -> Result<u8, DecodeError> {
        Ok(self.array::<1>()?[0])
    }
    /// A flag; anything but 0 and 1 is refused.
    pub fn bool(&mut self) -> Result<bool, DecodeError> {
        match self.u8()? {
            0 => Ok(false),
            1 => Ok(true),
            _ => Err(DecodeError::Invalid("flag")),
        }
    }
    /// Two bytes.
    pub fn u16(&mut self) -> Result<u16, DecodeError> {
        Ok(u16::from_le_bytes(self.array()?))
    }
    /// Four bytes.
    pub fn u32(&mut self) -> Result<u32, DecodeError> {
        Ok(u32::from_le_bytes(self.array()?))
    }
    /// Eight bytes.
    pub fn u64(&mut self) -> Result<u64, DecodeError> {
        Ok(u64::from_le_bytes(self.array()?))
    }
    /// A signed number.
    pub fn i32(&mut self) -> Result<i32, DecodeError> {
        Ok(i32::from_le_bytes(self.array()?))
    }
    /// A count of things of at least one byte each: more than the bytes that are left is refused before anything is allocated.
    pub fn count(&mut self) -> Result<usize, DecodeError> {
        let n = self.u64()?;
        if n > self.left.len() as u64 { Err(DecodeError::Truncated) } else { Ok(n as usize) }
    }
    /// A plain number written by [`Writer::count`] that is not a count of what follows.
    pub fn index(&mut self) -> Result<usize, DecodeError> {
        usize::try_from(self.u64()?).map_err(|_| DecodeError::Invalid("index"))
    }
    /// A length and the bytes.
    pub fn blob(&mut self) -> Result<&'a [u8], DecodeError> {
        let n = self.count()?;
        self.raw(n)
    }
    /// A count and each item.
    pub fn list<T>(
        &mut self,
        mut each: impl FnMut(&mut Self) -> Result<T, DecodeError>,
    ) -> Result<Vec<T>, DecodeError> {
        let n = self.count()?;
        // A count is a claim of whoever wrote it: memory is taken as values come.
        let mut out = Vec::with_capacity(n.min(1_024));
        for _ in 0..n {
            out.push(each(self)?);
        }
        Ok(out)
    }
    /// A flag and, when set, the value.
    pub fn option<T>(
        &mut self,
        each: impl FnOnce(&mut Self) -> Result<T, DecodeError>,
    ) -> Result<Option<T>, DecodeError> {
        if self.bool()? { Ok(Some(each(self)?)) } else { Ok(None) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_little_endian_and_read_back() {
        let mut w = Writer::new();
        w.u32(0x0102_0304);
        w.blob(b"ab");
        w.option(Some(7u64), Writer::u64);
        assert_eq!(&w.bytes()[..4], &[4, 3, 2, 1]);
        let bytes = w.into_bytes();
        let mut r = Reader::new(&bytes);
        assert_eq!((r.u32(), r.blob(), r.option(Reader::u64)), (Ok(0x0102_0304), Ok(&b"ab"[..]), Ok(Some(7))));
        assert_eq!(r.finish(), Ok(()));
    }

    #[test]
    fn a_count_beyond_the_bytes_allocates_nothing() {
        let mut w = Writer::new();
        w.u64(u64::MAX);
        let bytes = w.into_bytes();
        assert_eq!(Reader::new(&bytes).list(Reader::u8), Err(DecodeError::Truncated));
    }
}
