//! What the machines did, on disk: one log a machine, from which it can be done again.
//!
//! Each machine's thread fills a buffer of its own (a [`Tap`]) and hands it over now and then; a queue bounded in bytes leads to one
//! writer thread, which has the disk. Nobody waits for it: when the queue is full, the machine's segment ends there, marked as broken,
//! and another one opens with a fresh snapshot once there is room. A record is never left out of the middle.
//!
//! ```text
//! tap (machine's thread) ──bytes, bounded──► queue ──► writer thread ──► disk: segments, sizes, oldest removed
//! ```
//!
//! No prompt, no token, no tenant's name is in it: the machines do not know them.

mod disk;
mod queue;
mod tap;

use std::path::PathBuf;
use std::sync::Arc;
use std::thread::JoinHandle;

use crate::metrics::Metrics;
use crate::policies::seats::Machine;

use disk::Disk;
use queue::Queue;
pub(crate) use tap::Tap;

/// Where the journal goes, and how much of it there may be.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct JournalConfig {
    /// The folder. Made when it is missing.
    pub dir: PathBuf,
    /// A segment whose records take more ends, and the next one opens.
    pub segment_bytes: u64,
    /// Most bytes of all segments in the folder, those of earlier runs included; the oldest that are not open leave.
    pub total_bytes: u64,
    /// Most bytes that wait for the writer, of all machines together.
    pub queue_bytes: usize,
    /// The program, in words: stands in every segment.
    pub build: String,
}

/// What holds for every segment.
#[derive(Clone, Debug)]
pub(crate) struct SegmentTerms {
    bytes: u64,
    build: String,
    context_tokens_max: u32,
}

/// The running journal.
#[derive(Debug)]
pub(crate) struct Journal {
    queue: Arc<Queue>,
    metrics: Arc<Metrics>,
    segment: SegmentTerms,
    writer: std::sync::Mutex<Option<JoinHandle<()>>>,
}

impl Journal {
    /// Starts the writer for a gateway and `replicas`.
    ///
    /// # Errors
    /// The system gives no thread. A folder that cannot be written is no error: it is said aloud, and tried again.
    pub fn start(
        config: &JournalConfig,
        (replicas, context_tokens_max): (usize, u32),
        metrics: &Arc<Metrics>,
    ) -> std::io::Result<Self> {
        let queue = Arc::new(Queue::new(config.queue_bytes, 1 + replicas));
        let mut disk = Disk::new(config, 1 + replicas, Arc::clone(metrics));
        let writers = Arc::clone(&queue);
        let writer = std::thread::Builder::new().name("penstock-jrnl".into()).spawn(move || {
            while let Some(order) = writers.next() {
                disk.carry_out(order, &writers);
            }
        })?;
        Ok(Self {
            queue,
            metrics: Arc::clone(metrics),
            segment: SegmentTerms { bytes: config.segment_bytes, build: config.build.clone(), context_tokens_max },
            writer: std::sync::Mutex::new(Some(writer)),
        })
    }

    /// For one machine's thread.
    pub fn tap(&self, machine: Machine) -> Tap {
        let log = match machine {
            Machine::Gateway => 0,
            Machine::Replica(replica) => 1 + replica as usize,
        };
        Tap::new(Arc::clone(&self.queue), Arc::clone(&self.metrics), log, self.segment.clone())
    }

    /// Bytes that wait for the writer.
    pub fn waiting_bytes(&self) -> usize {
        self.queue.waiting_bytes()
    }

    /// Lets the writer finish what waits, and end. Call it when the machines have ended.
    pub fn close(&self) {
        self.queue.close();
        let writer = self.writer.lock().unwrap_or_else(std::sync::PoisonError::into_inner).take();
        if let Some(writer) = writer
            && writer.join().is_err()
        {
            tracing::error!("the journal's writer has panicked");
        }
    }
}
