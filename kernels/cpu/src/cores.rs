//! Which cores this thread may use, and keeping a thread to one of them.

use std::io;
use std::os::unix::thread::JoinHandleExt as _;
use std::thread::JoinHandle;

/// The cores that the calling thread may run on, ascending: what its affinity mask allows, and so what the control group's set of cores does.
///
/// # Errors
/// The system tells no mask: it has more cores than a mask of the usual size holds (1,024).
pub fn allowed() -> io::Result<Vec<usize>> {
    // SAFETY: a set of cores is plain bits, of which none is set at first.
    let mut set: libc::cpu_set_t = unsafe { std::mem::zeroed() };
    // SAFETY: the set is valid for writing and its size is given.
    if unsafe { libc::sched_getaffinity(0, size_of::<libc::cpu_set_t>(), &raw mut set) } != 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the index is below the size of the set.
    Ok((0..libc::CPU_SETSIZE as usize).filter(|&core| unsafe { libc::CPU_ISSET(core, &set) }).collect())
}

/// Keeps a running thread to `core`, which is one of [`allowed`].
pub(crate) fn pin<T>(thread: &JoinHandle<T>, core: usize) -> io::Result<()> {
    // SAFETY: as above.
    let mut set: libc::cpu_set_t = unsafe { std::mem::zeroed() };
    // SAFETY: `allowed` gives numbers below the size of the set.
    unsafe { libc::CPU_SET(core, &mut set) };
    // SAFETY: the handle has not been joined, so it names a thread; the set is valid and its size is given.
    match unsafe { libc::pthread_setaffinity_np(thread.as_pthread_t(), size_of::<libc::cpu_set_t>(), &raw const set) } {
        0 => Ok(()),
        errno => Err(io::Error::from_raw_os_error(errno)),
    }
}
