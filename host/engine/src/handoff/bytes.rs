//! An executor's pool as a region of the transport: one block of the region is one layer of one KV block.

use std::os::fd::BorrowedFd;
use std::ptr::NonNull;
use std::sync::Arc;

use penstock_exec::{KvBytes, KvMemory};
use penstock_transport::{Memory, Region, TransportError};

struct Pool(Arc<dyn KvBytes>);

// SAFETY: `KvBytes` promises the same of its memory, and the value that promises it is kept here.
unsafe impl Memory for Pool {
    fn base(&self) -> NonNull<u8> {
        self.0.base()
    }

    fn bytes(&self) -> usize {
        self.0.bytes()
    }

    fn memfd(&self) -> Option<BorrowedFd<'_>> {
        self.0.memfd()
    }
}

/// The region, for a pool of `blocks` blocks.
pub(super) fn region(kv: &KvMemory, blocks: u32) -> Result<Region, TransportError> {
    let layers = blocks as usize * kv.layers.max(1) as usize;
    let bytes = kv.memory.bytes();
    Region::new(Arc::new(Pool(Arc::clone(&kv.memory))), bytes.checked_div(layers).unwrap_or(0))
}
