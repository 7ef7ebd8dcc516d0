//! Which memory may a transport touch, and who keeps it alive?

use std::fmt;
use std::io;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::Arc;

use crate::error::TransportError;
use crate::sys::{self, Source};

/// Bytes at a fixed address that others may write while they are held here.
///
/// # Safety
///
/// `base()..base() + bytes()` must stay mapped, readable and writable, at the same address, until the value is dropped.
/// A `memfd` must be the whole of that memory, from its first byte, and sealed against shrinking.
pub unsafe trait Memory: Send + Sync {
    /// First byte.
    fn base(&self) -> NonNull<u8>;
    /// Length in bytes.
    fn bytes(&self) -> usize;
    /// The descriptor a process on the same host can map to reach the same bytes; none for private memory.
    fn memfd(&self) -> Option<BorrowedFd<'_>> {
        None
    }
}

/// A pool of equal blocks that transfers may name: block `i` is the bytes `i * block_bytes .. (i + 1) * block_bytes`.
///
/// Cloning shares the memory and keeps it alive. A block that takes part in a transfer belongs to the transport until the
/// transfer has settled: its content is unspecified before.
#[derive(Clone)]
pub struct Region {
    memory: Arc<dyn Memory>,
    block_bytes: usize,
    blocks: u32,
}

impl Region {
    /// The memory as blocks of `block_bytes`.
    ///
    /// # Errors
    ///
    /// [`TransportError::Layout`] when the length is not a whole number of blocks between 1 and `u32::MAX`.
    pub fn new(memory: Arc<dyn Memory>, block_bytes: usize) -> Result<Self, TransportError> {
        let bytes = memory.bytes();
        if block_bytes == 0 || bytes == 0 || !bytes.is_multiple_of(block_bytes) {
            return Err(TransportError::Layout { ours: bytes as u64, theirs: block_bytes as u64 });
        }
        let blocks = u32::try_from(bytes / block_bytes)
            .map_err(|_| TransportError::Layout { ours: bytes as u64, theirs: block_bytes as u64 })?;
        Ok(Self { memory, block_bytes, blocks })
    }

    /// Fresh zeroed memory of this process alone: for TCP and transfers inside the process.
    ///
    /// # Errors
    ///
    /// [`TransportError::Layout`] for zero blocks or bytes, [`TransportError::Io`] when there is no memory.
    pub fn private(block_bytes: usize, blocks: u32) -> Result<Self, TransportError> {
        let mapping = Mapping::anonymous(length(block_bytes, blocks)?)?;
        Self::new(Arc::new(mapping), block_bytes)
    }

    /// Fresh zeroed memory in a sealed memfd, which processes on the same host can map: for memfd, and good for all others.
    ///
    /// # Errors
    ///
    /// As [`Region::private`].
    pub fn shared(block_bytes: usize, blocks: u32) -> Result<Self, TransportError> {
        let bytes = length(block_bytes, blocks)?;
        let mapping = Mapping::of_memfd(sys::sealed_memfd(bytes)?, bytes)?;
        Self::new(Arc::new(mapping), block_bytes)
    }

    /// Bytes of one block.
    pub fn block_bytes(&self) -> usize {
        self.block_bytes
    }

    /// Number of blocks.
    pub fn blocks(&self) -> u32 {
        self.blocks
    }

    /// The memory itself.
    pub fn memory(&self) -> &Arc<dyn Memory> {
        &self.memory
    }

    /// Copies a block's bytes out.
    ///
    /// # Errors
    ///
    /// [`TransportError::OutOfRange`] for a block that is not there, [`TransportError::Layout`] for another length.
    pub fn read(&self, block: u32, into: &mut [u8]) -> Result<(), TransportError> {
        let from = self.address(block, into.len())?;
        // SAFETY: `address` checked that the block lies inside the memory, which `self` keeps mapped; `into` is our own.
        unsafe { std::ptr::copy_nonoverlapping(from, into.as_mut_ptr(), into.len()) };
        Ok(())
    }

    /// Copies bytes into a block.
    ///
    /// # Errors
    ///
    /// As [`Region::read`].
    pub fn fill(&self, block: u32, from: &[u8]) -> Result<(), TransportError> {
        let into = self.address(block, from.len())?;
        // SAFETY: as in `read`, in the other direction.
        unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), into, from.len()) };
        Ok(())
    }

    fn address(&self, block: u32, bytes: usize) -> Result<*mut u8, TransportError> {
        if block >= self.blocks {
            return Err(TransportError::OutOfRange { block: u64::from(block), blocks: self.blocks });
        }
        if bytes != self.block_bytes {
            return Err(TransportError::Layout { ours: self.block_bytes as u64, theirs: bytes as u64 });
        }
        // SAFETY: `block < blocks`, and `blocks * block_bytes` is the length of the memory.
        Ok(unsafe { self.memory.base().as_ptr().add(block as usize * self.block_bytes) })
    }
}

impl fmt::Debug for Region {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { block_bytes, blocks, .. } = self;
        f.debug_struct("Region").field("block_bytes", block_bytes).field("blocks", blocks).finish_non_exhaustive()
    }
}

fn length(block_bytes: usize, blocks: u32) -> Result<usize, TransportError> {
    let fault = TransportError::Layout { ours: u64::from(blocks), theirs: block_bytes as u64 };
    block_bytes.checked_mul(blocks as usize).filter(|bytes| (1..=isize::MAX as usize).contains(bytes)).ok_or(fault)
}

/// One mapping, with the memfd that it shows, if it shows one.
pub(crate) struct Mapping {
    base: NonNull<u8>,
    bytes: usize,
    memfd: Option<OwnedFd>,
}

impl Mapping {
    fn anonymous(bytes: usize) -> io::Result<Self> {
        Ok(Self { base: sys::map(bytes, Source::Fresh)?, bytes, memfd: None })
    }

    /// Maps the first `bytes` of a memfd, which must be sealed at no less than that length.
    pub(crate) fn of_memfd(memfd: OwnedFd, bytes: usize) -> io::Result<Self> {
        Ok(Self { base: sys::map(bytes, Source::Shared(memfd.as_fd()))?, bytes, memfd: Some(memfd) })
    }

    /// The same, only to read. A region over it must be the source of copies and nothing else.
    pub(crate) fn of_memfd_to_read(memfd: OwnedFd, bytes: usize) -> io::Result<Self> {
        Ok(Self { base: sys::map(bytes, Source::ToRead(memfd.as_fd()))?, bytes, memfd: Some(memfd) })
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: `base` and `bytes` are what `map` returned, and nobody can name the memory once the value is gone.
        unsafe { sys::unmap(self.base, self.bytes) };
    }
}

// SAFETY: the mapping is at `base` for `bytes` until `drop`; `of_memfd` is told to map only sealed memfds from their start.
unsafe impl Memory for Mapping {
    fn base(&self) -> NonNull<u8> {
        self.base
    }

    fn bytes(&self) -> usize {
        self.bytes
    }

    fn memfd(&self) -> Option<BorrowedFd<'_>> {
        self.memfd.as_ref().map(|memfd| memfd.as_fd())
    }
}

// SAFETY: it is an address and a length; every access goes through raw copies whose users are bound by `Region`'s contract.
unsafe impl Send for Mapping {}
// SAFETY: as for `Send`.
unsafe impl Sync for Mapping {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_lie_side_by_side() {
        for region in [Region::private(8, 3).unwrap(), Region::shared(8, 3).unwrap()] {
            region.fill(1, b"abcdefgh").unwrap();
            let mut bytes = [7_u8; 8];
            region.read(0, &mut bytes).unwrap();
            assert_eq!(bytes, [0; 8]);
            region.read(1, &mut bytes).unwrap();
            assert_eq!(&bytes, b"abcdefgh");
            region.read(2, &mut bytes).unwrap();
            assert_eq!(bytes, [0; 8]);
        }
    }

    #[test]
    fn what_is_not_there_is_refused() {
        let region = Region::private(8, 3).unwrap();
        assert!(matches!(region.fill(3, &[0; 8]), Err(TransportError::OutOfRange { block: 3, blocks: 3 })));
        assert!(matches!(region.fill(0, &[0; 7]), Err(TransportError::Layout { ours: 8, theirs: 7 })));
        assert!(matches!(Region::private(0, 3), Err(TransportError::Layout { .. })));
        assert!(matches!(Region::private(8, 0), Err(TransportError::Layout { .. })));
        assert!(matches!(Region::private(usize::MAX, 2), Err(TransportError::Layout { .. })));
        let odd = Arc::clone(region.memory());
        assert!(matches!(Region::new(odd, 7), Err(TransportError::Layout { ours: 24, theirs: 7 })));
    }

    #[test]
    fn a_shared_region_cannot_shrink_below_its_readers() {
        let region = Region::shared(4096, 2).unwrap();
        let memfd = region.memory().memfd().expect("it is shared").try_clone_to_owned().unwrap();
        assert!(std::fs::File::from(memfd).set_len(4096).is_err());
    }
}
