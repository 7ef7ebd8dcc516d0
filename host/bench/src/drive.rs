//! Who sends when: the closed and the open loop.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use futures_util::FutureExt as _;
use tokio::sync::Semaphore;
use tokio::task::JoinSet;

use crate::arrivals;
use crate::client::Caller;
use crate::error::BenchError;
use crate::limits::PROGRESS_EVERY;
use crate::plan::{Load, Plan};
use crate::prompts::Source;
use crate::record::{Outcome, Record};
use crate::summary::Summary;
use crate::target;

/// How far a run is.
#[derive(Clone, Copy, Debug)]
pub struct Progress {
    /// Since the run began.
    pub elapsed: Duration,
    /// Requests that have ended.
    pub ended: usize,
    /// Of these, without a whole answer.
    pub failed: usize,
    /// Requests on their way.
    pub in_flight: usize,
    /// Requests of the whole run.
    pub requests: usize,
    /// Tokens answered so far.
    pub output_tokens: u64,
}

/// Runs a plan to its end, or until `stop` resolves; what was measured until then is given either way, records by index.
///
/// # Errors
/// What keeps a run from beginning; a request that fails is part of the result.
pub async fn run(
    plan: &Plan,
    stop: impl Future<Output = ()>,
    tell: impl FnMut(Progress),
) -> Result<(Summary, Vec<Record>), BenchError> {
    plan.check()?;
    let root = target::root(&plan.url)?;
    let source = Source::new(&plan.prompts, plan.seed, plan.endpoint)?;
    let connections = target::connections();
    let model = target::model(&connections, &root, plan).await?;
    let caller = Caller { connections, root, model, plan: plan.clone(), start: Instant::now() };
    let mut stop = Box::pin(stop.fuse());
    for index in 0..plan.warmup_requests {
        // Prompts behind the measured ones: a warm-up that fills the cache with what is measured would be a lie.
        let prompt = source.prompt(plan.requests + index);
        tokio::select! {
            _ = caller.call(plan.requests + index, Instant::now(), prompt) => {}
            () = &mut stop => break,
        }
    }
    let caller = Arc::new(Caller { start: Instant::now(), ..caller });
    let mut run = Run { in_flight: Arc::default(), tasks: JoinSet::new(), records: Vec::new(), tell };
    let is_whole = match plan.load {
        Load::Closed { streams } => run.closed(&caller, &Arc::new(source), streams.get(), stop).await,
        Load::Open { per_second, in_flight_max } => {
            let due = arrivals::poisson(plan.seed, per_second, plan.requests);
            run.open(&caller, &source, &due, in_flight_max.get(), stop).await
        }
    };
    let mut records = run.records;
    records.sort_by_key(|record| record.index);
    let summary = Summary::of(plan, &caller.model, &records, caller.start.elapsed(), !is_whole);
    Ok((summary, records))
}

struct Run<T> {
    in_flight: Arc<AtomicUsize>,
    tasks: JoinSet<Vec<Record>>,
    records: Vec<Record>,
    tell: T,
}

impl<T: FnMut(Progress)> Run<T> {
    /// Every stream takes the next index when its last request has ended. True when nothing was left out.
    async fn closed(
        &mut self,
        caller: &Arc<Caller>,
        source: &Arc<Source>,
        streams: usize,
        mut stop: impl Future<Output = ()> + Unpin,
    ) -> bool {
        let next = Arc::new(AtomicUsize::new(0));
        let (send, mut ended) = tokio::sync::mpsc::channel(streams);
        for _ in 0..streams.min(caller.plan.requests) {
            let (caller, source, next) = (Arc::clone(caller), Arc::clone(source), Arc::clone(&next));
            let (send, in_flight) = (send.clone(), Arc::clone(&self.in_flight));
            self.tasks.spawn(async move {
                loop {
                    let index = next.fetch_add(1, Ordering::Relaxed);
                    if index >= caller.plan.requests {
                        return Vec::new();
                    }
                    let flight = Flight::begin(&in_flight);
                    let record = caller.call(index, Instant::now(), source.prompt(index)).await;
                    drop(flight);
                    if send.send(record).await.is_err() {
                        return Vec::new();
                    }
                }
            });
        }
        drop(send);
        let mut clock = tokio::time::interval(PROGRESS_EVERY);
        loop {
            tokio::select! {
                record = ended.recv() => match record {
                    Some(record) => self.records.push(record),
                    None => return true,
                },
                _ = clock.tick() => self.tell(caller),
                () = &mut stop => {
                    self.tasks.shutdown().await;
                    return self.records.len() == caller.plan.requests;
                }
            }
        }
    }

    /// Each request is sent when it is due, or as soon after as there is room. True when nothing was left out.
    async fn open(
        &mut self,
        caller: &Arc<Caller>,
        source: &Source,
        arrivals: &[Duration],
        in_flight_max: usize,
        mut stop: impl Future<Output = ()> + Unpin,
    ) -> bool {
        let room = Arc::new(Semaphore::new(in_flight_max));
        let mut clock = tokio::time::interval(PROGRESS_EVERY);
        let mut waiting = arrivals.iter().enumerate();
        let mut next = waiting.next();
        while next.is_some() || !self.tasks.is_empty() {
            let sending = async {
                let Some((index, after)) = next else { return std::future::pending().await };
                let due = caller.start + *after;
                tokio::time::sleep_until(due.into()).await;
                let permit = Arc::clone(&room).acquire_owned().await.expect("the semaphore is never closed");
                (index, due, permit)
            };
            tokio::select! {
                (index, due, permit) = sending => {
                    let (caller, prompt) = (Arc::clone(caller), source.prompt(index));
                    let flight = Flight::begin(&self.in_flight);
                    self.tasks.spawn(async move {
                        let record = caller.call(index, due, prompt).await;
                        drop((flight, permit));
                        vec![record]
                    });
                    next = waiting.next();
                }
                Some(done) = self.tasks.join_next() => {
                    self.records.extend(done.expect("a request's task neither panics nor is cancelled"));
                }
                _ = clock.tick() => self.tell(caller),
                () = &mut stop => {
                    self.tasks.shutdown().await;
                    return self.records.len() == caller.plan.requests;
                }
            }
        }
        true
    }

    fn tell(&mut self, caller: &Caller) {
        let completed = |record: &&Record| record.outcome == Outcome::Completed;
        let done = self.records.iter().filter(completed).count();
        (self.tell)(Progress {
            elapsed: caller.start.elapsed(),
            ended: self.records.len(),
            failed: self.records.len() - done,
            in_flight: self.in_flight.load(Ordering::Relaxed),
            requests: caller.plan.requests,
            output_tokens: self.records.iter().map(|record| record.output_tokens).sum(),
        });
    }
}

/// One request on its way; gone when dropped, however it ends.
struct Flight(Arc<AtomicUsize>);

impl Flight {
    fn begin(count: &Arc<AtomicUsize>) -> Self {
        count.fetch_add(1, Ordering::Relaxed);
        Self(Arc::clone(count))
    }
}

impl Drop for Flight {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}
