//! The few calls of the operating system that the standard library does not have.

use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd as _, BorrowedFd, FromRawFd as _, OwnedFd, RawFd};
use std::ptr::{self, NonNull};
use std::time::Duration;

/// Descriptors one message may carry: one a region, and regions are few.
pub(crate) const FDS_MAX: usize = 16;

/// Some bytes of a registered memory, as the vectored calls take them.
pub(crate) type Slice = libc::iovec;

fn checked(result: libc::ssize_t) -> io::Result<usize> {
    usize::try_from(result).map_err(|_| io::Error::last_os_error())
}

/// A memfd of exactly `bytes`, zeroed, sealed so that nobody can change its length.
pub(crate) fn sealed_memfd(bytes: usize) -> io::Result<OwnedFd> {
    // SAFETY: the name is a C string; the result is checked.
    let fd = unsafe { libc::memfd_create(c"penstock-kv".as_ptr(), libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING) };
    checked(fd as libc::ssize_t)?;
    // SAFETY: `memfd_create` has just given us this descriptor.
    let memfd = unsafe { OwnedFd::from_raw_fd(fd) };
    let file = std::fs::File::from(memfd.try_clone()?);
    file.set_len(bytes as u64)?;
    // SAFETY: a valid descriptor and no pointers.
    let sealed =
        unsafe { libc::fcntl(fd, libc::F_ADD_SEALS, libc::F_SEAL_SHRINK | libc::F_SEAL_GROW | libc::F_SEAL_SEAL) };
    checked(sealed as libc::ssize_t)?;
    Ok(memfd)
}

/// Whether `memfd` holds `bytes` and can never hold fewer: only then is a mapping of it safe to touch.
pub(crate) fn is_sealed_at(memfd: BorrowedFd<'_>, bytes: usize) -> io::Result<bool> {
    // SAFETY: a valid descriptor and no pointers.
    let seals = unsafe { libc::fcntl(memfd.as_raw_fd(), libc::F_GET_SEALS) };
    checked(seals as libc::ssize_t)?;
    let length = std::fs::File::from(memfd.try_clone_to_owned()?).metadata()?.len();
    Ok(seals & libc::F_SEAL_SHRINK != 0 && length >= bytes as u64)
}

/// What is mapped, and what for.
#[derive(Clone, Copy)]
pub(crate) enum Source<'a> {
    /// Fresh and private, to read and write.
    Fresh,
    /// Shared, to read and write.
    Shared(BorrowedFd<'a>),
    /// Shared, to read.
    ToRead(BorrowedFd<'a>),
}

/// Maps `bytes`.
pub(crate) fn map(bytes: usize, source: Source<'_>) -> io::Result<NonNull<u8>> {
    let both = libc::PROT_READ | libc::PROT_WRITE;
    let (protection, flags, fd) = match source {
        Source::Fresh => (both, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, -1),
        Source::Shared(memfd) => (both, libc::MAP_SHARED, memfd.as_raw_fd()),
        Source::ToRead(memfd) => (libc::PROT_READ, libc::MAP_SHARED, memfd.as_raw_fd()),
    };
    // SAFETY: no address is asked for, so no mapping of ours is replaced.
    let base = unsafe { libc::mmap(ptr::null_mut(), bytes, protection, flags, fd, 0) };
    if base == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    NonNull::new(base.cast()).ok_or_else(|| io::Error::other("mapped at address zero"))
}

/// Gives a mapping back.
///
/// # Safety
///
/// `base` and `bytes` must come from one call of [`map`], and nobody may use the memory afterwards.
pub(crate) unsafe fn unmap(base: NonNull<u8>, bytes: usize) {
    // SAFETY: the caller's promise.
    unsafe { libc::munmap(base.as_ptr().cast(), bytes) };
}

/// Room for a control message with [`FDS_MAX`] descriptors, aligned as its header must be.
type Control = [u64; 16];

const CONTROL_BYTES: usize = size_of::<Control>();

fn message(slices: &[Slice], control: &mut Control, control_bytes: usize) -> libc::msghdr {
    // SAFETY: all zeroes is a valid `msghdr`: null pointers with zero lengths.
    let mut message: libc::msghdr = unsafe { MaybeUninit::zeroed().assume_init() };
    message.msg_iov = slices.as_ptr().cast_mut();
    message.msg_iovlen = slices.len() as _;
    if control_bytes > 0 {
        message.msg_control = control.as_mut_ptr().cast();
        message.msg_controllen = control_bytes as _;
    }
    message
}

/// Sends the slices, and with their first byte copies of the descriptors. Returns how many bytes went.
///
/// # Safety
///
/// Every slice must be readable memory for the time of the call.
pub(crate) unsafe fn send(socket: RawFd, slices: &[Slice], fds: &[RawFd]) -> io::Result<usize> {
    let mut control: Control = [0; 16];
    let fds = &fds[..fds.len().min(FDS_MAX)];
    let payload = size_of_val(fds) as libc::c_uint;
    // SAFETY: arithmetic on a length.
    let space = if fds.is_empty() { 0 } else { unsafe { libc::CMSG_SPACE(payload) as usize } };
    let message = message(slices, &mut control, space);
    if !fds.is_empty() {
        // SAFETY: the control buffer is aligned and holds `CMSG_SPACE(payload)` bytes: `FDS_MAX` descriptors fit into it.
        unsafe {
            let header = libc::CMSG_FIRSTHDR(&message);
            (*header).cmsg_level = libc::SOL_SOCKET;
            (*header).cmsg_type = libc::SCM_RIGHTS;
            (*header).cmsg_len = libc::CMSG_LEN(payload) as _;
            ptr::copy_nonoverlapping(fds.as_ptr().cast(), libc::CMSG_DATA(header), payload as usize);
        }
    }
    // SAFETY: the message points to slices that the caller vouches for and to a control buffer of ours.
    checked(unsafe { libc::sendmsg(socket, &message, libc::MSG_NOSIGNAL | libc::MSG_DONTWAIT) })
}

/// Receives into the slices, and takes in the descriptors that came along. Returns how many bytes came; zero is the end.
///
/// # Safety
///
/// Every slice must be writable memory for the time of the call.
pub(crate) unsafe fn receive(socket: RawFd, slices: &[Slice], fds: &mut Vec<OwnedFd>) -> io::Result<usize> {
    let mut control: Control = [0; 16];
    let mut message = message(slices, &mut control, CONTROL_BYTES);
    // SAFETY: the message points to slices that the caller vouches for and to a control buffer of ours.
    let got = checked(unsafe { libc::recvmsg(socket, &mut message, libc::MSG_DONTWAIT | libc::MSG_CMSG_CLOEXEC) })?;
    // SAFETY: the kernel filled the control buffer; each header lies inside it, and its length covers its descriptors,
    // which are ours from now on.
    unsafe {
        let mut header = libc::CMSG_FIRSTHDR(&message);
        while !header.is_null() {
            if (*header).cmsg_level == libc::SOL_SOCKET && (*header).cmsg_type == libc::SCM_RIGHTS {
                let count = ((*header).cmsg_len as usize - libc::CMSG_LEN(0) as usize) / size_of::<RawFd>();
                let data = libc::CMSG_DATA(header).cast::<RawFd>();
                fds.extend((0..count).map(|i| OwnedFd::from_raw_fd(data.add(i).read_unaligned())));
            }
            header = libc::CMSG_NXTHDR(&message, header);
        }
    }
    Ok(got)
}

/// One descriptor of interest.
pub(crate) fn interest(fd: RawFd, reads: bool, writes: bool) -> libc::pollfd {
    let events = if reads { libc::POLLIN } else { 0 } | if writes { libc::POLLOUT } else { 0 };
    libc::pollfd { fd, events, revents: 0 }
}

/// Waits until one of them is ready or the time is over. An interrupted wait is a short one.
pub(crate) fn wait(interests: &mut [libc::pollfd], at_most: Duration) {
    let time = libc::timespec {
        tv_sec: at_most.as_secs().min(3_600) as libc::time_t,
        tv_nsec: libc::c_long::from(at_most.subsec_nanos()),
    };
    // SAFETY: a slice with its length and a time that lives through the call.
    unsafe { libc::ppoll(interests.as_mut_ptr(), interests.len() as libc::nfds_t, &time, ptr::null()) };
}

/// The user that the other end of a Unix socket runs as.
pub(crate) fn peer_user(socket: RawFd) -> io::Result<u32> {
    let mut who = libc::ucred { pid: 0, uid: 0, gid: 0 };
    let mut length = size_of::<libc::ucred>() as libc::socklen_t;
    // SAFETY: the pointers are to locals of the stated length.
    let result = unsafe {
        libc::getsockopt(socket, libc::SOL_SOCKET, libc::SO_PEERCRED, (&raw mut who).cast(), &raw mut length)
    };
    checked(result as libc::ssize_t)?;
    Ok(who.uid)
}

/// The user this process runs as.
pub(crate) fn own_user() -> u32 {
    // SAFETY: it has no preconditions and cannot fail.
    unsafe { libc::geteuid() }
}

/// Bytes that nobody can guess.
pub(crate) fn unguessable() -> io::Result<[u8; 16]> {
    let mut bytes = [0_u8; 16];
    // SAFETY: a buffer with its length.
    let got = checked(unsafe { libc::getrandom(bytes.as_mut_ptr().cast(), bytes.len(), 0) })?;
    if got < bytes.len() { Err(io::Error::other("the system gave too few random bytes")) } else { Ok(bytes) }
}
