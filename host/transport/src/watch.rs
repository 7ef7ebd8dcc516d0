//! How does one thread wait for several endpoints, and for something of its own?

use std::os::fd::{AsRawFd as _, BorrowedFd, RawFd};
use std::time::Duration;

use crate::sys;

/// What is waited for. Endpoints add what they have ([`Transport::watch`](crate::Transport::watch)), the caller adds its own.
pub struct Watch {
    interests: Vec<libc::pollfd>,
    at_most: Duration,
}

impl Watch {
    /// Waits for nothing yet, and no longer than this.
    pub fn new(at_most: Duration) -> Self {
        Self { interests: Vec::new(), at_most }
    }

    /// Wait no longer than this.
    pub fn at_most(&mut self, time: Duration) {
        self.at_most = self.at_most.min(time);
    }

    /// Wake up when there is something to read here.
    pub fn add(&mut self, descriptor: BorrowedFd<'_>) {
        self.interest(descriptor.as_raw_fd(), true, false);
    }

    pub(crate) fn interest(&mut self, fd: RawFd, reads: bool, writes: bool) {
        self.interests.push(sys::interest(fd, reads, writes));
    }

    /// Waits. Whatever was added must still be open.
    pub fn wait(mut self) {
        sys::wait(&mut self.interests, self.at_most);
    }
}
