//! Where do keys and values lie, for whoever moves them between executors?

use std::fmt;
use std::os::fd::BorrowedFd;
use std::ptr::NonNull;
use std::sync::Arc;

/// The bytes of a pool of KV blocks. Others read and write blocks that are in no step at that time.
///
/// # Safety
/// `base()..base() + bytes()` must stay mapped, readable and writable, at the same address, until the value is dropped, and the executor
/// must access it by address alone, block by block: never through a reference to more than the blocks of a step. A memfd must hold the
/// whole of that memory, from its first byte, and be sealed against shrinking.
pub unsafe trait KvBytes: Send + Sync {
    /// First byte.
    fn base(&self) -> NonNull<u8>;
    /// Length in bytes: a whole number of blocks.
    fn bytes(&self) -> usize;
    /// What another process of the host can map to reach the same bytes; none for memory of this process alone.
    fn memfd(&self) -> Option<BorrowedFd<'_>> {
        None
    }
}

/// A pool's memory and what lies in it. Two that are equal in all but the memory hold the same bytes for the same tokens.
#[derive(Clone)]
pub struct KvMemory {
    /// Blocks side by side; in each, layer after layer, all of one size.
    pub memory: Arc<dyn KvBytes>,
    /// Layers of a block.
    pub layers: u32,
    /// Element type, by the executor's code.
    pub dtype_code: u16,
}

impl fmt::Debug for KvMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { memory, layers, dtype_code } = self;
        f.debug_struct("KvMemory")
            .field("bytes", &memory.bytes())
            .field("layers", layers)
            .field("dtype_code", dtype_code)
            .finish()
    }
}
