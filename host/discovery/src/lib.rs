//! Which workers are there, where, and since when is that known?
//!
//! One trait, [`Discovery`], and one way to fill it for each place: [`Memory`] inside a process, [`Folder`] on a disk that all see,
//! [`Etcd`] and [`Kubernetes`] across hosts. A worker registers a [`WorkerRecord`] under a lease; a watcher gets a snapshot, then changes. When the service is lost the last known set
//! stays, marked with its age. What each needs and promises is in `docs/discovery.md`; `tests/conformance` holds all of them to one suite.

mod board;
mod error;
mod etcd;
mod folder;
mod http;
mod kubernetes;
pub mod limits;
mod memory;
mod record;
mod registration;

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::task::JoinHandle;

use board::{Board, BoardLimits};
pub use board::{Event, View};
pub use error::{DiscoveryError, RecordError};
pub use etcd::{Etcd, EtcdSettings};
pub use folder::Folder;
pub use http::TlsFiles;
pub use kubernetes::{ANNOTATION, Kubernetes, KubernetesSettings, ROLE_LABEL};
pub use memory::Memory;
pub use record::{Addresses, Capacity, ENCODING, Role, WorkerId, WorkerRecord, WorkerState};
pub use registration::{Registration, Standing};

/// An answer that comes later.
pub type Answer<'a, T> = Pin<Box<dyn Future<Output = Result<T, DiscoveryError>> + Send + 'a>>;

/// How long things last and how much there may be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Settings {
    /// How long a worker stays known without a renewal. Workers renew three times as often. At least 300 ms; etcd counts in whole seconds
    /// and grants no less than two or so.
    pub lease: Duration,
    /// Most workers that a watcher takes, at most [`limits::WORKERS_MAX`].
    pub workers_max: usize,
    /// Changes that wait for a watcher, at most [`limits::QUEUE_MAX`].
    pub queue_max: usize,
}

impl Default for Settings {
    fn default() -> Self {
        Self { lease: Duration::from_secs(10), workers_max: limits::WORKERS_MAX, queue_max: limits::QUEUE_MAX }
    }
}

impl Settings {
    /// Checks the values against their limits.
    ///
    /// # Errors
    /// [`DiscoveryError::Setting`] with the first finding.
    pub fn check(&self) -> Result<(), DiscoveryError> {
        let wrong = |key, why: String| Err(DiscoveryError::Setting { key, why });
        if self.lease < Duration::from_millis(300) || self.lease > Duration::from_secs(3_600) {
            return wrong("lease", format!("{:?} is not between 300 ms and one hour", self.lease));
        }
        if self.workers_max == 0 || self.workers_max > limits::WORKERS_MAX {
            return wrong("workers_max", format!("{} is not between 1 and {}", self.workers_max, limits::WORKERS_MAX));
        }
        if self.queue_max == 0 || self.queue_max > limits::QUEUE_MAX {
            return wrong("queue_max", format!("{} is not between 1 and {}", self.queue_max, limits::QUEUE_MAX));
        }
        Ok(())
    }

    fn board(&self, grace: Duration) -> BoardLimits {
        BoardLimits { workers_max: self.workers_max, queue_max: self.queue_max, grace }
    }
}

/// A service that knows which workers there are. All calls need a running Tokio runtime.
pub trait Discovery: Send + Sync {
    /// Where it is, to be shown.
    fn describe(&self) -> String;

    /// Makes a worker known, and keeps it known as long as the registration lives and the lease is renewed.
    ///
    /// # Errors
    /// [`DiscoveryError`]; [`DiscoveryError::Superseded`] when a later life of the worker is known.
    fn register(&self, record: WorkerRecord) -> Answer<'_, Registration>;

    /// Begins to watch. Never fails: a service that does not answer is an event.
    fn watch(&self) -> Watch;
}

/// One watcher. It may be asked from one task at a time; dropping it ends it.
pub struct Watch {
    board: Arc<Board>,
    task: JoinHandle<()>,
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Watch {
    fn start<F: Future<Output = ()> + Send + 'static>(
        limits: BoardLimits,
        watcher: impl FnOnce(Arc<Board>) -> F,
    ) -> Self {
        let board = Arc::new(Board::new(limits));
        let task = tokio::spawn(watcher(Arc::clone(&board)));
        Self { board, task }
    }

    /// The next event. The first is a snapshot, or [`Event::Stale`] when the service cannot be reached from the start.
    pub async fn next(&mut self) -> Event {
        self.board.next().await
    }

    /// The next event, if there is one now.
    pub fn try_next(&mut self) -> Option<Event> {
        self.board.take()
    }

    /// The set as it is known now, whatever events still wait.
    #[must_use]
    pub fn view(&self) -> View {
        self.board.view(Instant::now())
    }

    /// Has the whole set read again, for a caller that doubts what it holds. Differences come as events.
    pub fn resync(&self) {
        self.board.resync.notify_one();
    }
}
