//! Whose memory packed weights lie in: huge pages of this process, or a file that is mapped.

use std::fmt;
use std::ops::{Deref, Range};
use std::sync::Arc;

use memmap2::Mmap;

use crate::memory::HugeBuffer;

/// Memory that the matrices of a model share.
#[derive(Debug)]
pub enum WeightMemory {
    /// Memory of this process, in huge pages where the system gives them.
    Huge(HugeBuffer),
    /// A file, mapped to be read: its pages belong to the page cache, which processes share.
    ///
    /// The file must not be cut while it is mapped: reading behind its end kills the process. Files that are only ever replaced by
    /// renaming hold to that.
    Mapped(Mmap),
}

impl Deref for WeightMemory {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match self {
            WeightMemory::Huge(buffer) => buffer,
            WeightMemory::Mapped(map) => map,
        }
    }
}

/// The bytes do not fit: a range outside its memory, or not as many as a matrix needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StorageError {
    /// Bytes needed.
    pub wanted: usize,
    /// Bytes there are.
    pub given: usize,
}

impl fmt::Display for StorageError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} bytes of packed weights where {} are needed", self.given, self.wanted)
    }
}

impl std::error::Error for StorageError {}

/// The bytes of one matrix.
#[derive(Clone, Debug)]
pub struct WeightBytes {
    memory: Arc<WeightMemory>,
    range: Range<usize>,
}

impl WeightBytes {
    /// A range of `memory`.
    ///
    /// # Errors
    /// [`StorageError`] when it leaves the memory or ends before it begins.
    pub fn new(memory: Arc<WeightMemory>, range: Range<usize>) -> Result<Self, StorageError> {
        if memory.get(range.clone()).is_none() {
            return Err(StorageError { wanted: range.end, given: memory.len() });
        }
        Ok(Self { memory, range })
    }
}

impl Deref for WeightBytes {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.memory[self.range.clone()]
    }
}
