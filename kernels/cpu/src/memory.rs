//! Large memory: anonymous mappings that ask for huge pages, under a byte budget, with failure as a value.
//!
//! Weights and the KV pool are read end to end on every step, so address translation is a large share of their cost; huge pages take
//! most of it away (about 1.4x on one decode stream in the study that preceded this crate).

use std::fmt;
use std::ops::{Deref, DerefMut};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Why memory could not be had.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum MemoryError {
    /// The budget would be exceeded.
    OverBudget {
        /// Bytes asked for.
        wanted_bytes: usize,
        /// Bytes the budget has left.
        left_bytes: usize,
    },
    /// The size does not fit the address space.
    TooLarge,
    /// The operating system refused.
    Refused {
        /// Bytes asked for.
        wanted_bytes: usize,
        /// The system's error number.
        errno: i32,
    },
}

impl fmt::Display for MemoryError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            MemoryError::OverBudget { wanted_bytes, left_bytes } => {
                write!(f, "memory budget exceeded: wanted {wanted_bytes} bytes, {left_bytes} left")
            }
            MemoryError::TooLarge => f.write_str("memory size overflows the address space"),
            MemoryError::Refused { wanted_bytes, errno } => {
                write!(f, "the system refused {wanted_bytes} bytes (errno {errno})")
            }
        }
    }
}

impl std::error::Error for MemoryError {}

/// A limit on the bytes that a group of buffers may hold together. Clones share the limit.
#[derive(Clone, Debug)]
pub struct MemoryBudget {
    left: Arc<AtomicUsize>,
}

impl MemoryBudget {
    /// A budget of `bytes`.
    pub fn new(bytes: usize) -> Self {
        Self { left: Arc::new(AtomicUsize::new(bytes)) }
    }

    /// Bytes not taken.
    pub fn left_bytes(&self) -> usize {
        self.left.load(Ordering::Relaxed)
    }

    /// Takes `len` zeroed bytes from the budget and the system.
    ///
    /// # Errors
    /// [`MemoryError`] when the budget or the system refuses; nothing is taken then.
    pub fn allocate(&self, len: usize) -> Result<HugeBuffer, MemoryError> {
        self.take(len, Mapping::new)
    }

    /// The same in a memfd, so that other processes of the host can map the bytes, to read: see [`HugeBuffer::memfd`].
    ///
    /// # Errors
    /// As for [`Self::allocate`]; also where the system has no memfd.
    pub fn allocate_shared(&self, len: usize) -> Result<HugeBuffer, MemoryError> {
        self.take(len, Mapping::shared)
    }

    fn take(
        &self,
        len: usize,
        map: impl FnOnce(usize) -> Result<Mapping, MemoryError>,
    ) -> Result<HugeBuffer, MemoryError> {
        let mapped = mapped_bytes(len).ok_or(MemoryError::TooLarge)?;
        self.left
            .try_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(mapped))
            .map_err(|left_bytes| MemoryError::OverBudget { wanted_bytes: mapped, left_bytes })?;
        match map(mapped) {
            Ok(mapping) => Ok(HugeBuffer { mapping, len, budget: self.clone() }),
            Err(error) => {
                self.left.fetch_add(mapped, Ordering::Relaxed);
                Err(error)
            }
        }
    }
}

/// The usual size of a huge page on x86-64 and on arm64 with 4 KiB base pages.
pub const HUGE_PAGE_BYTES: usize = 2 << 20;

/// What a buffer of `len` bytes takes from a budget; `None` when no address space is so large.
pub fn mapped_bytes(len: usize) -> Option<usize> {
    len.max(1).checked_next_multiple_of(HUGE_PAGE_BYTES)
}

/// Mappings that were made before may write, later ones may not.
#[cfg(target_os = "linux")]
const F_SEAL_FUTURE_WRITE: libc::c_int = 0x10;

/// Zeroed bytes, aligned to a huge page. Given back to system and budget on drop.
#[derive(Debug)]
pub struct HugeBuffer {
    mapping: Mapping,
    len: usize,
    budget: MemoryBudget,
}

impl HugeBuffer {
    /// Makes every page resident now, so that no step pays for a first touch and memory use does not creep.
    pub fn prefault(&mut self) {
        // The smallest page that the systems served here have.
        for page in self.chunks_mut(4096) {
            // SAFETY: a plain write of a byte that is zero already; volatile, so that it is not left out.
            unsafe { std::ptr::write_volatile(page.as_mut_ptr(), 0) };
        }
    }

    /// Start of the buffer, for whoever shares it by address: every access that may meet a write goes through this, never through a slice.
    pub fn base(&self) -> std::ptr::NonNull<u8> {
        std::ptr::NonNull::new(self.mapping.start).unwrap_or(std::ptr::NonNull::dangling())
    }

    /// What another process can map to reach the same bytes, from the first one on; none for memory of this process alone. It cannot
    /// shrink or grow, and where the kernel can see to it (Linux 5.1) nobody but this mapping writes it.
    #[cfg(target_os = "linux")]
    pub fn memfd(&self) -> Option<std::os::fd::BorrowedFd<'_>> {
        self.mapping.memfd.as_ref().map(std::os::fd::AsFd::as_fd)
    }

    /// Bytes from [`Self::base`] on.
    pub fn bytes(&self) -> usize {
        self.len
    }

    /// Start of the buffer, for kernels that share it between threads.
    pub(crate) fn as_ptr(&self) -> *const u8 {
        self.mapping.start
    }
}

impl Deref for HugeBuffer {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: the mapping is readable, zero-initialised, at least `len` bytes long, and lives as long as self.
        unsafe { std::slice::from_raw_parts(self.mapping.start, self.len) }
    }
}

impl DerefMut for HugeBuffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `deref`; the mapping is writable and `&mut self` makes the access unique.
        unsafe { std::slice::from_raw_parts_mut(self.mapping.start, self.len) }
    }
}

impl Drop for HugeBuffer {
    fn drop(&mut self) {
        self.budget.left.fetch_add(self.mapping.used, Ordering::Relaxed);
    }
}

/// One mapping, anonymous and private or of a memfd, with an aligned range inside it.
#[derive(Debug)]
struct Mapping {
    #[cfg(target_os = "linux")]
    memfd: Option<std::os::fd::OwnedFd>,
    base: *mut u8,
    base_len: usize,
    /// First huge-page border inside the mapping.
    start: *mut u8,
    /// Bytes from `start` that belong to the buffer; a multiple of the huge page.
    used: usize,
}

// SAFETY: the mapping is plain memory owned by this value; access goes through the borrow rules of `HugeBuffer`.
unsafe impl Send for Mapping {}
// SAFETY: as above; a shared reference only reads.
unsafe impl Sync for Mapping {}

/// The system's word for why not.
fn refused(wanted_bytes: usize) -> MemoryError {
    MemoryError::Refused { wanted_bytes, errno: std::io::Error::last_os_error().raw_os_error().unwrap_or(0) }
}

impl Mapping {
    #[cfg(not(target_os = "linux"))]
    fn shared(used: usize) -> Result<Self, MemoryError> {
        Err(MemoryError::Refused { wanted_bytes: used, errno: libc::ENOSYS })
    }

    /// Puts a memfd in the place of the aligned range.
    #[cfg(target_os = "linux")]
    fn shared(used: usize) -> Result<Self, MemoryError> {
        use std::os::fd::{AsRawFd as _, FromRawFd as _, OwnedFd};
        let mut mapping = Self::new(used)?;
        let length = libc::off_t::try_from(used).map_err(|_| MemoryError::TooLarge)?;
        // SAFETY: the name is a C string; the result is checked.
        let fd = unsafe { libc::memfd_create(c"penstock-kv".as_ptr(), libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING) };
        if fd < 0 {
            return Err(refused(used));
        }
        // SAFETY: `memfd_create` has just given us this descriptor.
        let memfd = unsafe { OwnedFd::from_raw_fd(fd) };
        // SAFETY: a valid descriptor and no pointers.
        if unsafe { libc::ftruncate(memfd.as_raw_fd(), length) } != 0 {
            return Err(refused(used));
        }
        let both = libc::PROT_READ | libc::PROT_WRITE;
        let flags = libc::MAP_SHARED | libc::MAP_FIXED;
        // SAFETY: the range lies inside a mapping of ours that nobody has seen yet.
        let mapped = unsafe { libc::mmap(mapping.start.cast(), used, both, flags, memfd.as_raw_fd(), 0) };
        if mapped == libc::MAP_FAILED {
            return Err(refused(used));
        }
        // SAFETY: as in `new`.
        unsafe { libc::madvise(mapping.start.cast(), used, libc::MADV_HUGEPAGE) };
        let fixed = libc::F_SEAL_SHRINK | libc::F_SEAL_GROW | libc::F_SEAL_SEAL;
        // SAFETY: a valid descriptor and no pointers. An old kernel does not know the seal against later writers: then the others do.
        let is_sealed = unsafe {
            libc::fcntl(memfd.as_raw_fd(), libc::F_ADD_SEALS, fixed | F_SEAL_FUTURE_WRITE) == 0
                || libc::fcntl(memfd.as_raw_fd(), libc::F_ADD_SEALS, fixed) == 0
        };
        if !is_sealed {
            return Err(refused(used));
        }
        mapping.memfd = Some(memfd);
        Ok(mapping)
    }

    fn new(used: usize) -> Result<Self, MemoryError> {
        let base_len = used.checked_add(HUGE_PAGE_BYTES).ok_or(MemoryError::TooLarge)?;
        // SAFETY: an anonymous mapping at an address of the system's choice touches no memory of ours.
        let base = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                base_len,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
                -1,
                0,
            )
        };
        if base == libc::MAP_FAILED {
            return Err(refused(used));
        }
        let base = base.cast::<u8>();
        let start = base.wrapping_add(base.align_offset(HUGE_PAGE_BYTES));
        #[cfg(target_os = "linux")]
        // SAFETY: the range lies inside the mapping just made. The advice may be refused (no huge pages here): only speed is lost.
        unsafe {
            libc::madvise(start.cast(), used, libc::MADV_HUGEPAGE);
        }
        Ok(Self {
            #[cfg(target_os = "linux")]
            memfd: None,
            base,
            base_len,
            start,
            used,
        })
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the mapping was made by `new` with this address and length, and nothing borrows it any more.
        unsafe {
            libc::munmap(self.base.cast(), self.base_len);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_budget_is_a_limit_and_gets_its_bytes_back() {
        let budget = MemoryBudget::new(4 << 20);
        let first = budget.allocate(1).expect("fits");
        assert_eq!(budget.left_bytes(), 2 << 20);
        assert_eq!(
            budget.allocate((2 << 20) + 1).err(),
            Some(MemoryError::OverBudget { wanted_bytes: 4 << 20, left_bytes: 2 << 20 })
        );
        drop(first);
        let mut whole = budget.allocate(4 << 20).expect("fits again");
        assert!(whole.iter().step_by(4096).all(|&b| b == 0));
        whole[(4 << 20) - 1] = 7;
        assert_eq!(whole.as_ptr().align_offset(HUGE_PAGE_BYTES), 0);
        assert_eq!(budget.allocate(usize::MAX).err(), Some(MemoryError::TooLarge));
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn shared_bytes_are_seen_by_others_who_cannot_write_or_shrink_them() {
        use std::io::{Read as _, Seek as _, Write as _};
        let budget = MemoryBudget::new(4 << 20);
        let mut buffer = budget.allocate_shared((2 << 20) + 5).expect("fits");
        assert_eq!(budget.left_bytes(), 0);
        assert_eq!(buffer.as_ptr().align_offset(HUGE_PAGE_BYTES), 0);
        buffer.prefault();
        buffer[(2 << 20) + 4] = 9;
        let memfd = buffer.memfd().expect("it is shared").try_clone_to_owned().expect("a descriptor");
        let mut other = std::fs::File::from(memfd);
        let mut bytes = vec![1; (2 << 20) + 5];
        other.read_exact(&mut bytes).expect("all of it is there");
        assert!(bytes[..(2 << 20) + 4].iter().all(|byte| *byte == 0));
        assert_eq!(bytes[(2 << 20) + 4], 9);
        assert!(other.set_len(2 << 20).is_err());
        other.rewind().expect("a file");
        assert!(other.write(&[7]).is_err(), "this kernel seals it against later writers");
        // SAFETY: a shared mapping to read, of a file that cannot shrink; its owner writes it only before and after it is looked at.
        let seen = unsafe { memmap2::Mmap::map(&other) }.expect("it can be mapped to read");
        assert_eq!((seen.len(), seen[(2 << 20) + 4]), (4 << 20, 9));
        drop(seen);
        // SAFETY: it is not made.
        assert!(unsafe { memmap2::MmapMut::map_mut(&other) }.is_err(), "and not to write");
        buffer[0] = 5;
        assert_eq!(buffer[0], 5, "its owner writes");
        assert!(budget.allocate_shared(1).is_err());
        drop(buffer);
        assert_eq!(budget.left_bytes(), 4 << 20);
        assert!(budget.allocate(1).expect("fits").memfd().is_none());
    }

    #[test]
    fn a_refusal_of_the_system_is_an_error_and_takes_nothing() {
        let budget = MemoryBudget::new(usize::MAX);
        assert!(matches!(budget.allocate(1 << 60), Err(MemoryError::Refused { .. })));
        assert_eq!(budget.left_bytes(), usize::MAX);
    }
}
