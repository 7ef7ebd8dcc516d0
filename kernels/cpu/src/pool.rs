//! The thread pool: one set of workers that several replicas enter in turn.
//!
//! A job is `tasks` calls of one closure with the indices `0..tasks`; threads claim indices from one counter. Which thread runs which
//! index never shows in a result, because every task writes only what its index owns.
//!
//! ```text
//!            enter()                 run(n, f)                  drop
//!  waiting ──────────► session open ───────────► n tasks done ─────► next in line enters
//!   (first come, first served)      ▲                    │
//!                                   └────────────────────┘
//! ```
//!
//! Who waits spins at first (the next job of the same forward pass is microseconds away), then offers its core to others turn by turn, then
//! parks; see [`Patience`]. A worker that the system has not scheduled in time is not waited for: the caller runs the tasks it did not claim.

use std::any::Any;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle, Thread};

use crate::cores;

/// Turns in which a waiting thread keeps its core: the gap between two jobs of one forward pass. A turn is 15 to 60 ns, by what the
/// processor makes of the spin hint.
const SPIN_TURNS: u32 = 1_000;

/// Turns after those in which it gives way to whoever wants the core, before it parks: some hundred microseconds when nobody does, about
/// what lies between two steps.
const YIELD_TURNS: u32 = 256;

/// How a thread waits: spin, then yield, then park, each for a bounded number of turns.
#[derive(Default)]
struct Patience {
    turns: u32,
}

impl Patience {
    /// Waits a turn. False when it is time to park; the count begins again then.
    fn wait(&mut self) -> bool {
        self.turns += 1;
        if self.turns <= SPIN_TURNS {
            std::hint::spin_loop();
        } else if self.turns <= SPIN_TURNS + YIELD_TURNS {
            thread::yield_now();
        } else {
            self.turns = 0;
            return false;
        }
        true
    }
}

/// Values below which a value-by-value job (a few microseconds) stays on its caller.
const PARALLEL_VALUES_MIN: usize = 8 * 1024;

/// Most threads one pool may have; a machine has fewer, a typing error may not.
pub const THREADS_MAX: usize = 512;

/// Most tasks one job may have: the index part of a ticket, minus the closed mark.
pub const TASKS_MAX: usize = INDEX_CLOSED as usize - 1;

const INDEX_BITS: u32 = 24;
const INDEX_CLOSED: u64 = (1 << INDEX_BITS) - 1;

/// Why a pool could not be made.
#[derive(Debug)]
pub enum PoolError {
    /// The thread count is 0 or above [`THREADS_MAX`].
    ThreadCount {
        /// The count asked for.
        wanted: usize,
    },
    /// The system refused a thread.
    Spawn(std::io::Error),
    /// Threads that are to have a core each are more than the cores allowed.
    Cores {
        /// The count asked for.
        wanted: usize,
        /// Cores that this process may use.
        allowed: usize,
    },
    /// The system refused to tell the cores allowed, or to keep a thread to one.
    Pin(std::io::Error),
}

impl fmt::Display for PoolError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            PoolError::ThreadCount { wanted } => write!(f, "thread count {wanted} is outside 1..={THREADS_MAX}"),
            PoolError::Spawn(error) => write!(f, "could not start a worker thread: {error}"),
            PoolError::Cores { wanted, allowed } => write!(
                f,
                "{wanted} threads cannot have a core each: this process may use {allowed}; ask for fewer threads, or pin none"
            ),
            PoolError::Pin(error) => write!(f, "could not keep a thread to a core: {error}"),
        }
    }
}

impl std::error::Error for PoolError {}

/// A task panicked. The job still ran to its end, so that no thread holds a borrow of the caller's data.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TaskPanicked {
    /// The panic's message, or a note that it had none.
    pub message: String,
}

impl fmt::Display for TaskPanicked {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "a task of the thread pool panicked: {}", self.message)
    }
}

impl std::error::Error for TaskPanicked {}

/// Calls the closure behind `context` with a task index.
type Trampoline = unsafe fn(context: *const (), index: usize);

/// What the threads of one pool share.
struct Shared {
    /// Epoch of the job (high bits) and next unclaimed index (low bits). Claiming is a compare-and-swap of the whole word, so a claim
    /// proves that the job fields read before it belong to the same, still running job.
    ticket: AtomicU64,
    /// The running job's closure; meaningful only under a successful claim.
    context: AtomicPtr<()>,
    /// The running job's trampoline, as a pointer.
    call: AtomicPtr<()>,
    /// The running job's task count.
    tasks: AtomicUsize,
    /// Tasks of the running job that are not finished.
    unfinished: AtomicUsize,
    /// Set by the caller before it parks on `unfinished`.
    caller_parked: AtomicBool,
    /// The caller to wake; set before a job is published.
    caller: Mutex<Option<Thread>>,
    /// First panic of the running job.
    panic: Mutex<Option<String>>,
    /// Set once, on drop of the pool.
    closing: AtomicBool,
    /// One flag a worker: it is parked, or about to.
    parked: Vec<AtomicBool>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // No code of ours can panic while it holds one of these locks, and the data are plain values: poisoning carries no meaning here.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Shared {
    /// Runs tasks of the current job until none is unclaimed. Returns whether there was any.
    fn work(&self) -> bool {
        let mut worked = false;
        let mut ticket = self.ticket.load(Ordering::SeqCst);
        loop {
            let index = ticket & INDEX_CLOSED;
            let tasks = self.tasks.load(Ordering::Acquire);
            let context = self.context.load(Ordering::Acquire);
            let call = self.call.load(Ordering::Acquire);
            if index == INDEX_CLOSED || index as usize >= tasks {
                return worked;
            }
            if let Err(now) = self.ticket.compare_exchange(ticket, ticket + 1, Ordering::SeqCst, Ordering::SeqCst) {
                ticket = now;
                continue;
            }
            worked = true;
            // SAFETY: `call` was stored from a `Trampoline` by `run`. The fields were read between two moments at which the ticket had
            // the same value, and `run` closes the ticket before it changes them, so they belong to this epoch's job.
            let call: Trampoline = unsafe { std::mem::transmute(call) };
            // SAFETY: `run` does not return before `unfinished` is 0, which needs this task's end: the closure outlives the call.
            let outcome = catch_unwind(AssertUnwindSafe(|| unsafe { call(context, index as usize) }));
            if let Err(payload) = outcome {
                lock(&self.panic).get_or_insert_with(|| panic_message(payload.as_ref()));
            }
            if self.unfinished.fetch_sub(1, Ordering::SeqCst) == 1
                && self.caller_parked.load(Ordering::SeqCst)
                && let Some(caller) = lock(&self.caller).as_ref()
            {
                caller.unpark();
            }
            ticket = self.ticket.load(Ordering::SeqCst);
        }
    }

    fn worker(&self, number: usize) {
        let mut patience = Patience::default();
        while !self.closing.load(Ordering::SeqCst) {
            if self.work() {
                patience = Patience::default();
                continue;
            }
            if patience.wait() {
                continue;
            }
            // Announce, look once more, then sleep: `run` publishes the ticket before it reads the flag.
            self.parked[number].store(true, Ordering::SeqCst);
            if !self.has_unclaimed() && !self.closing.load(Ordering::SeqCst) {
                thread::park();
            }
            self.parked[number].store(false, Ordering::SeqCst);
        }
    }

    fn has_unclaimed(&self) -> bool {
        let index = self.ticket.load(Ordering::SeqCst) & INDEX_CLOSED;
        index != INDEX_CLOSED && (index as usize) < self.tasks.load(Ordering::Acquire)
    }
}

fn panic_message(payload: &(dyn Any + Send)) -> String {
    if let Some(text) = payload.downcast_ref::<&str>() {
        (*text).to_owned()
    } else if let Some(text) = payload.downcast_ref::<String>() {
        text.clone()
    } else {
        "no message".to_owned()
    }
}

/// A first-come-first-served gate: the standard mutex makes no promise of fairness.
struct Gate {
    state: Mutex<GateState>,
    moved: Condvar,
}

struct GateState {
    /// Number handed to the next that comes.
    next: u64,
    /// Number that may be inside.
    serving: u64,
}

impl Gate {
    fn enter(&self) {
        let mut state = lock(&self.state);
        let mine = state.next;
        state.next += 1;
        while state.serving != mine {
            state = self.moved.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn leave(&self) {
        lock(&self.state).serving += 1;
        self.moved.notify_all();
    }
}

/// A persistent pool of threads. Dropping it joins the workers.
pub struct ThreadPool {
    shared: Arc<Shared>,
    gate: Gate,
    workers: Vec<JoinHandle<()>>,
}

impl fmt::Debug for ThreadPool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ThreadPool").field("threads", &self.threads()).finish_non_exhaustive()
    }
}

impl ThreadPool {
    /// A pool in which `threads` threads work on a job, the caller of [`Session::run`] among them.
    ///
    /// # Errors
    /// [`PoolError`] when the count is out of range or the system refuses a thread.
    pub fn new(threads: usize) -> Result<Self, PoolError> {
        Self::on_cores(threads, None)
    }

    /// As [`ThreadPool::new`], each worker kept to a core of its own among those that the calling thread may use. The first of them is left
    /// to the callers, which stay free to move.
    ///
    /// # Errors
    /// As for [`ThreadPool::new`], or [`PoolError::Cores`] when there are fewer cores than threads.
    pub fn pinned(threads: usize) -> Result<Self, PoolError> {
        let cores = cores::allowed().map_err(PoolError::Pin)?;
        if cores.len() < threads {
            return Err(PoolError::Cores { wanted: threads, allowed: cores.len() });
        }
        Self::on_cores(threads, Some(&cores))
    }

    fn on_cores(threads: usize, cores: Option<&[usize]>) -> Result<Self, PoolError> {
        if threads == 0 || threads > THREADS_MAX {
            return Err(PoolError::ThreadCount { wanted: threads });
        }
        let shared = Arc::new(Shared {
            ticket: AtomicU64::new(INDEX_CLOSED),
            context: AtomicPtr::new(std::ptr::null_mut()),
            call: AtomicPtr::new(std::ptr::null_mut()),
            tasks: AtomicUsize::new(0),
            unfinished: AtomicUsize::new(0),
            caller_parked: AtomicBool::new(false),
            caller: Mutex::new(None),
            panic: Mutex::new(None),
            closing: AtomicBool::new(false),
            parked: (1..threads).map(|_| AtomicBool::new(false)).collect(),
        });
        let mut pool = Self {
            shared,
            gate: Gate { state: Mutex::new(GateState { next: 0, serving: 0 }), moved: Condvar::new() },
            workers: Vec::with_capacity(threads - 1),
        };
        for number in 0..threads - 1 {
            let shared = Arc::clone(&pool.shared);
            let worker = thread::Builder::new()
                .name(format!("penstock-cpu-{number}"))
                .spawn(move || shared.worker(number))
                .map_err(PoolError::Spawn)?;
            pool.workers.push(worker);
            if let (Some(cores), Some(worker)) = (cores, pool.workers.last()) {
                cores::pin(worker, cores[number + 1]).map_err(PoolError::Pin)?;
            }
        }
        Ok(pool)
    }

    /// Threads that work on a job, the caller among them.
    pub fn threads(&self) -> usize {
        self.shared.parked.len() + 1
    }

    /// Waits for its turn and enters; the pool belongs to the session until it is dropped. Turns come in order of arrival.
    ///
    /// Entering twice from one thread without dropping the first session waits for ever.
    pub fn enter(&self) -> Session<'_> {
        self.gate.enter();
        Session { pool: self }
    }
}

impl Drop for ThreadPool {
    fn drop(&mut self) {
        self.shared.closing.store(true, Ordering::SeqCst);
        for worker in self.workers.drain(..) {
            worker.thread().unpark();
            // A worker catches the panics of its tasks, so a failed join has nothing to tell.
            let _ = worker.join();
        }
    }
}

/// The right to run jobs on a pool.
#[derive(Debug)]
pub struct Session<'p> {
    pool: &'p ThreadPool,
}

impl Session<'_> {
    /// Threads that work on a job, the caller among them.
    pub fn threads(&self) -> usize {
        self.pool.threads()
    }

    /// Calls `task` once with each index of `0..tasks`, on the pool's threads, and returns when all calls have ended.
    ///
    /// # Errors
    /// [`TaskPanicked`] with the first message when a task panicked; the other tasks ran all the same.
    ///
    /// # Panics
    /// When `tasks` exceeds [`TASKS_MAX`].
    pub fn run<F: Fn(usize) + Sync>(&mut self, tasks: usize, task: F) -> Result<(), TaskPanicked> {
        assert!(tasks <= TASKS_MAX, "a job has at most {TASKS_MAX} tasks");
        if tasks <= 1 || self.threads() == 1 {
            return run_alone(tasks, &task);
        }
        /// Restores the closure's type.
        ///
        /// # Safety
        /// `context` must point to a live `F`.
        unsafe fn trampoline<F: Fn(usize)>(context: *const (), index: usize) {
            // SAFETY: `run` stored a pointer to its `F`, which outlives the job.
            let task = unsafe { &*context.cast::<F>() };
            task(index);
        }
        let shared = &*self.pool.shared;
        let call: Trampoline = trampoline::<F>;
        let epoch = (shared.ticket.load(Ordering::SeqCst) >> INDEX_BITS).wrapping_add(1) << INDEX_BITS;
        // Close the old ticket first: from here on no claim can succeed until the new one is published.
        shared.ticket.store(epoch | INDEX_CLOSED, Ordering::SeqCst);
        shared.context.store((&raw const task).cast_mut().cast(), Ordering::Release);
        shared.call.store(call as *mut (), Ordering::Release);
        shared.tasks.store(tasks, Ordering::Release);
        shared.unfinished.store(tasks, Ordering::SeqCst);
        shared.caller_parked.store(false, Ordering::SeqCst);
        *lock(&shared.caller) = Some(thread::current());
        shared.ticket.store(epoch, Ordering::SeqCst);
        for (flag, worker) in shared.parked.iter().zip(&self.pool.workers).take(tasks - 1) {
            if flag.load(Ordering::SeqCst) {
                worker.thread().unpark();
            }
        }
        shared.work();
        let mut patience = Patience::default();
        while shared.unfinished.load(Ordering::SeqCst) > 0 {
            if patience.wait() {
                continue;
            }
            shared.caller_parked.store(true, Ordering::SeqCst);
            if shared.unfinished.load(Ordering::SeqCst) > 0 {
                thread::park();
            }
        }
        match lock(&shared.panic).take() {
            Some(message) => Err(TaskPanicked { message }),
            None => Ok(()),
        }
    }

    /// As [`Session::run`], but on this thread alone when the job touches so few values that waking others costs more than it saves.
    pub(crate) fn run_if_large<F: Fn(usize) + Sync>(
        &mut self,
        tasks: usize,
        values: usize,
        task: F,
    ) -> Result<(), TaskPanicked> {
        if values < PARALLEL_VALUES_MIN { run_alone(tasks, &task) } else { self.run(tasks, task) }
    }

    /// Calls `task(i, row)` for each row of `stride` values in `data`. Rows are disjoint, so each task owns its own. Few values are worked
    /// on by the caller alone.
    ///
    /// # Errors
    /// [`TaskPanicked`] when a task panicked.
    ///
    /// # Panics
    /// When `stride` is 0 or does not divide the length of `data`.
    pub fn rows<T: Send, F: Fn(usize, &mut [T]) + Sync>(
        &mut self,
        data: &mut [T],
        stride: usize,
        task: F,
    ) -> Result<(), TaskPanicked> {
        assert!(stride > 0 && data.len().is_multiple_of(stride), "data must be whole rows");
        let rows = data.len() / stride;
        let start = SharedMut(data.as_mut_ptr());
        self.run_if_large(rows, data.len(), |row| {
            // SAFETY: rows do not overlap, each index is run once, and `data` is borrowed mutably for the whole job.
            let row_data = unsafe { std::slice::from_raw_parts_mut(start.get().add(row * stride), stride) };
            task(row, row_data);
        })
    }

    /// Calls `task(i, item)` for each item: few items with much work each.
    ///
    /// # Errors
    /// [`TaskPanicked`] when a task panicked.
    pub fn each<T: Send, F: Fn(usize, &mut T) + Sync>(&mut self, items: &mut [T], task: F) -> Result<(), TaskPanicked> {
        let start = SharedMut(items.as_mut_ptr());
        self.run(items.len(), |index| {
            // SAFETY: each index is run once, below the length, and `items` is borrowed mutably for the whole job.
            task(index, unsafe { &mut *start.get().add(index) });
        })
    }
}

impl Drop for Session<'_> {
    fn drop(&mut self) {
        // A job's closure may sit in the frame below: no worker may find it after the next one enters.
        self.pool.gate.leave();
    }
}

fn run_alone(tasks: usize, task: &impl Fn(usize)) -> Result<(), TaskPanicked> {
    let mut first = None;
    for index in 0..tasks {
        if let Err(payload) = catch_unwind(AssertUnwindSafe(|| task(index))) {
            first.get_or_insert_with(|| panic_message(payload.as_ref()));
        }
    }
    first.map_or(Ok(()), |message| Err(TaskPanicked { message }))
}

/// A pointer that tasks of one job may share, each for its own part.
pub(crate) struct SharedMut<T>(pub(crate) *mut T);

// SAFETY: the user of the pointer guarantees disjoint access by the tasks of a job, and T may be sent to their threads.
unsafe impl<T: Send> Sync for SharedMut<T> {}
// SAFETY: as above.
unsafe impl<T: Send> Send for SharedMut<T> {}

impl<T> SharedMut<T> {
    /// The pointer. A method, so that closures capture the wrapper and not the raw field.
    #[inline(always)]
    pub(crate) fn get(&self) -> *mut T {
        self.0
    }
}
