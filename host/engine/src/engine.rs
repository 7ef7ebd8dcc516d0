//! The handle: starts the loops, takes submissions, tells its state, drains and ends.

use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration as StdDuration;

use penstock_base::{CancelCause, Duration, GatewayEpoch, Generation, ReplicaEpoch, ReplicaId, RequestId, limits};
use penstock_exec::{Executor, Geometry};
use penstock_model::Namespace;
use penstock_sched::gateway::GatewayConfig;
use penstock_sched::message::Load;
use penstock_sched::replica::ReplicaConfig;

use crate::clock::Clock;
use crate::config::{EngineConfig, ServedModel};
use crate::context::{ContextRules, RequestContext, SubmissionFault, pending_bytes};
use crate::executor_loop::{self, ExecutorLoop};
use crate::gateway_loop::{self, GatewayLoop, GatewayWake};
use crate::handoff::{self, MoverLoop, Movers};
use crate::journal::Journal;
use crate::latch::Latch;
use crate::mailbox::{Mailbox, PushError};
use crate::metrics::Metrics;
use crate::outputs::{self, OutputLoop};
use crate::panics;
use crate::permit::{Bound, Permits};
use crate::policies::activation::{self, Activation, ActivationError};
use crate::policies::inputs::InputsKept;
use crate::policies::log::DecisionRecord;
use crate::policies::machine::{FIRST, MachineSeats, PolicyPlane};
use crate::policies::seats::{Machine, Memory, PolicySource, PreparedPolicies};
use crate::replica_loop::{ReplicaLoop, Role};
use crate::replica_wake;
use crate::request::{Submission, Ticket};
use crate::status::{ReplicaState, ReplicaStatus, Status};
use crate::story::Moment;
use crate::stream::{ClientSide, EventStream, stream};
use crate::wiring::{Board, Wiring};

/// Why an engine did not start.
#[derive(Debug, thiserror::Error)]
pub enum EngineError {
    /// Nothing to compute with.
    #[error("at least one executor is needed, and at most {max} are possible; {0} are given", max = limits::REPLICAS_MAX)]
    Executors(usize),
    /// Executors that cannot serve one queue.
    #[error("executor {replica} differs from the first in {what}")]
    Mixed {
        /// Which.
        replica: usize,
        /// In what.
        what: &'static str,
    },
    /// A value that cannot work.
    #[error("{key} is {value}: {why}")]
    Config {
        /// Which.
        key: &'static str,
        /// What it is.
        value: u64,
        /// What would be right.
        why: &'static str,
    },
    /// The first policy set cannot serve.
    #[error("the policies of the {machine} cannot serve: {why}")]
    Policies {
        /// Where.
        machine: Machine,
        /// In the words of whoever tried them.
        why: String,
    },
    /// The system gave no thread.
    #[error("a thread could not be started: {0}")]
    Thread(#[from] std::io::Error),
}

/// Why a submission was not taken. Nothing was done for it.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum SubmitError {
    /// Too many submissions are in flight, or their prompts keep too many bytes alive. Worth another try.
    #[error("too much is in flight")]
    Busy,
    /// New work is refused until the process ends.
    #[error("the server is draining")]
    Draining,
    /// The engine broke or was shut down.
    #[error("the engine does not run")]
    NotRunning,
    /// The submission makes no sense.
    #[error(transparent)]
    Invalid(#[from] SubmissionFault),
}

/// What a drain came to.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct DrainReport {
    /// Requests that were cancelled since the grace had passed.
    pub cancelled: usize,
    /// Requests whose client had not read the end of its stream when the drain gave up.
    pub left: usize,
}

/// A running engine: one gateway, N replicas, their executors and the output side, each on a thread of its own.
///
/// Shared by reference; every method may be called from any thread.
pub struct Engine {
    wiring: Arc<Wiring>,
    model: ServedModel,
    gateway_epoch: GatewayEpoch,
    geometry: Geometry,
    prefix_cache: bool,
    /// Counter of the last request; held while a request is handed in, so that ids arrive in order.
    last: Mutex<u64>,
    threads: Mutex<Vec<(&'static str, JoinHandle<()>)>>,
    ended: Arc<Latch>,
}

impl Engine {
    /// Starts an engine with one replica for each executor.
    ///
    /// # Errors
    /// Executors that do not fit together, values that cannot work, no threads.
    pub fn start(
        config: EngineConfig,
        model: ServedModel,
        executors: Vec<Box<dyn Executor>>,
    ) -> Result<Self, EngineError> {
        panics::keep_words_to_ourselves();
        let geometry = common_geometry(&executors)?;
        let (mut gateway, mut replicas) = machine_configs(&config, &executors)?;
        let movers = match &config.handoff {
            None => Vec::new(),
            Some(setup) => handoff::prepare(setup, &model.namespace, &mut gateway, &mut replicas, &executors)
                .map_err(|(key, value, why)| EngineError::Config { key, value, why })?,
        };
        let prefill = config.handoff.map_or(0, |setup| setup.prefill);
        let context_tokens_max = geometry.context_tokens_max.min(config.replica.context_tokens_max);
        let mut first = first_policies(&config.policies, replicas.len(), context_tokens_max)?;
        let clock = Clock::starting_now();
        let permits = Permits::new(config.limits.requests_max, config.limits.pending_bytes_max);
        let statuses = replicas.iter().map(first_status).collect();
        let count = replicas.len();
        let requests_max = config.limits.requests_max;
        let metrics = Arc::new(Metrics::new(&model.name));
        let journal = config
            .journal
            .as_ref()
            .map(|journal| Journal::start(journal, (count, context_tokens_max), &metrics))
            .transpose()?;
        let wiring = Arc::new(Wiring {
            clock,
            metrics,
            board: Board::new(permits, statuses),
            limits: config.limits,
            policies: PolicyPlane::new(config.policies.clone(), count, config.decisions)?,
            journal,
            context_tokens_max,
            gateway: Mailbox::new(&gateway_loop::lanes(requests_max, count)),
            replicas: replicas.iter().map(|replica| Mailbox::new(&replica_wake::lanes(replica, count))).collect(),
            movers: Movers { mailboxes: movers.iter().map(|_| Mailbox::new(&handoff::lanes())).collect() },
            outputs: Mailbox::new(&outputs::lanes(requests_max, count)),
        });
        let engine = Self {
            wiring,
            model,
            gateway_epoch: gateway.epoch,
            geometry,
            prefix_cache: config.replica.prefix_cache,
            last: Mutex::new(0),
            threads: Mutex::default(),
            ended: Arc::default(),
        };
        let gateway_policies = first.remove(0);
        let replicas = replicas.into_iter().zip(first).collect();
        for (replica, prepared) in (0..).map(ReplicaId).zip(movers) {
            let mover = MoverLoop::new(Arc::clone(&engine.wiring), replica, prepared);
            engine.spawn("mover", format!("penstock-move-{replica}"), move || mover.run())?;
        }
        engine.start_loops((gateway, gateway_policies), replicas, (executors, prefill))?;
        Ok(engine)
    }

    fn start_loops(
        &self,
        (gateway, gateway_policies): (GatewayConfig, Box<dyn PreparedPolicies>),
        replicas: Vec<(ReplicaConfig, Box<dyn PreparedPolicies>)>,
        (executors, prefill): (Vec<Box<dyn Executor>>, u32),
    ) -> Result<(), EngineError> {
        let epoch = gateway.epoch;
        let block_size_tokens = self.geometry.block_size_tokens;
        let output = OutputLoop::new(Arc::clone(&self.wiring), Arc::clone(&self.model.vocabulary), block_size_tokens);
        self.spawn("outputs", "penstock-out".into(), move || output.run())?;
        let wiring = Arc::clone(&self.wiring);
        self.spawn("gateway", "penstock-gate".into(), move || {
            GatewayLoop::new(wiring, gateway, gateway_policies).run();
        })?;
        let started = Arc::new(Latch::default());
        let count = replicas.len();
        for ((config, policies), executor) in replicas.into_iter().zip(executors) {
            let steps = Arc::new(Mailbox::new(&executor_loop::lanes()));
            let replica = config.replica;
            let executor =
                ExecutorLoop { wiring: Arc::clone(&self.wiring), replica, executor, steps: Arc::clone(&steps) };
            self.spawn("executor", format!("penstock-exec-{replica}"), move || executor.run())?;
            let role = match prefill {
                0 => Role::Whole,
                first if replica.0 < first => Role::Prefill,
                _ => Role::Decode,
            };
            let (wiring, started) = (Arc::clone(&self.wiring), Arc::clone(&started));
            self.spawn("replica", format!("penstock-rep-{replica}"), move || {
                let seats = MachineSeats::new(Arc::clone(&wiring), Machine::Replica(replica.0), policies);
                ReplicaLoop::new(wiring, steps, (config, role), epoch, seats, started).run();
            })?;
        }
        // A submission must not overtake the news that there are replicas.
        if !started.wait(count, after(self.wiring.limits.join)) {
            tracing::error!("a replica's machine has not started in time");
        }
        Ok(())
    }

    fn spawn(&self, what: &'static str, name: String, run: impl FnOnce() + Send + 'static) -> Result<(), EngineError> {
        let ended = Arc::clone(&self.ended);
        let handle = std::thread::Builder::new().name(name).spawn(move || {
            run();
            ended.signal();
        })?;
        self.threads.lock().unwrap_or_else(PoisonError::into_inner).push((what, handle));
        Ok(())
    }

    /// Hands in one request. Never waits.
    ///
    /// # Errors
    /// See [`SubmitError`]; nothing was done for the request.
    pub fn submit(&self, submission: Submission) -> Result<(Ticket, EventStream), SubmitError> {
        let refuse = |reason, error| {
            self.wiring.metrics.submit_refused(reason);
            Err(error)
        };
        let board = &self.wiring.board;
        if board.dead.load(Ordering::Acquire) {
            return refuse("not_running", SubmitError::NotRunning);
        }
        if board.draining.load(Ordering::Acquire) {
            return refuse("draining", SubmitError::Draining);
        }
        let permit = match board.permits.take(pending_bytes(&submission)) {
            Ok(permit) => permit,
            Err(Bound::Requests) => return refuse("requests", SubmitError::Busy),
            Err(Bound::Bytes) => return refuse("bytes", SubmitError::Busy),
        };
        let mut context = match RequestContext::new(&submission, self.rules()) {
            Ok(context) => context,
            Err(fault) => return refuse("invalid", SubmitError::Invalid(fault)),
        };
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(request) = RequestId::new(self.gateway_epoch, *last + 1) else {
            return refuse("not_running", SubmitError::NotRunning);
        };
        context.name(request);
        let client = Arc::clone(&self.wiring) as Arc<dyn ClientSide>;
        let total = Arc::clone(&board.send_buffer_bytes);
        let (writer, reader) = stream(request, permit, &self.wiring.limits, self.wiring.clock, total, client);
        let wake = GatewayWake::Submit { context: Arc::new(context), writer };
        match self.wiring.gateway.try_push(gateway_loop::REQUESTS, wake) {
            Ok(()) => {
                *last += 1;
                Ok((Ticket { request }, reader))
            }
            Err(error) => {
                drop(last);
                let full = matches!(error, PushError::Full(_));
                drop(error);
                if full {
                    refuse("requests", SubmitError::Busy)
                } else {
                    refuse("not_running", SubmitError::NotRunning)
                }
            }
        }
    }

    fn rules(&self) -> ContextRules<'_> {
        ContextRules {
            namespace: self.namespace(),
            block_size_tokens: self.geometry.block_size_tokens,
            vocabulary: self.geometry.vocabulary,
            prefix_cache: self.prefix_cache,
        }
    }

    /// Ends a request early; its stream still gets its typed end. Idempotent, and harmless when it is over.
    ///
    /// False when the gateway is so far behind that it could not be told: worth another try.
    pub fn cancel(&self, request: RequestId, cause: CancelCause) -> bool {
        self.wiring.cancel(request, cause)
    }

    /// Puts another policy set in force while requests run: made and tried for every machine first, then switched at each machine's step
    /// boundary. Blocks until it is done; call it off the async runtime's workers. One at a time: a second caller waits.
    ///
    /// # Errors
    /// A refusal by any machine, or no answer in time; then the set in force stays in force everywhere.
    pub fn activate(&self, source: &PolicySource) -> Result<Activation, ActivationError> {
        activation::activate(&self.wiring, source)
    }

    /// What the policies of every machine remember as of their last snapshots, for whoever keeps it over a restart. Asks no policy; blocks
    /// until the machines have answered between two steps.
    ///
    /// # Errors
    /// No answer in time, or the engine does not run.
    pub fn policy_memories(&self) -> Result<Vec<(Machine, Option<Memory>)>, ActivationError> {
        activation::recall(&self.wiring)
    }

    /// The policy generation in force at the gateway.
    pub fn policy_generation(&self) -> Generation {
        self.wiring.policies.current().0
    }

    /// Policy sets that have left and are still to be ended.
    pub fn policies_leaving(&self) -> usize {
        self.wiring.policies.reaper.waiting()
    }

    /// The last request that was handed in.
    pub fn last_request(&self) -> Option<RequestId> {
        let last = *self.last.lock().unwrap_or_else(PoisonError::into_inner);
        RequestId::new(self.gateway_epoch, last).filter(|_| last > 0)
    }

    /// What a decision's policy was told, where it was kept and has not left since.
    pub fn inputs(&self, machine: Machine, sequence: u64) -> Option<InputsKept> {
        self.wiring.policies.log.of(machine)?.inputs.last(1, |kept| kept.sequence == sequence).pop()
    }

    /// What happened to a request at the gateway, oldest first, as far as it is remembered.
    pub fn moments(&self, request: RequestId) -> Vec<Moment> {
        self.wiring.policies.log.moments.last(usize::MAX, |moment| moment.request == request)
    }

    /// The oldest moment that is remembered: what happened before it has been forgotten.
    pub fn oldest_moment(&self) -> Option<Moment> {
        self.wiring.policies.log.moments.oldest()
    }

    /// The last `count` decisions of each machine that `fits`, oldest first, by machine.
    pub fn decisions(
        &self,
        count: usize,
        fits: impl Fn(&DecisionRecord) -> bool,
    ) -> Vec<(Machine, Vec<DecisionRecord>)> {
        let rings = self.wiring.policies.log.rings.iter();
        rings.map(|(machine, rings)| (*machine, rings.decisions.last(count, &fits))).collect()
    }

    /// The clock that [`Submission::arrived`] and [`Submission::deadline`] are read from.
    pub fn clock(&self) -> Clock {
        self.wiring.clock
    }

    /// Sizes that every replica has at least.
    pub fn geometry(&self) -> &Geometry {
        &self.geometry
    }

    /// Namespace of cached blocks.
    pub fn namespace(&self) -> &Namespace {
        &self.model.namespace
    }

    /// The incarnation that minted this engine's request ids.
    pub fn gateway_epoch(&self) -> GatewayEpoch {
        self.gateway_epoch
    }

    /// Readiness, liveness, load.
    pub fn status(&self) -> Status {
        self.wiring.board.status(self.wiring.clock.now())
    }

    /// Each replica's last report, by id; a replica that does not serve has a load of zeros.
    pub fn loads(&self) -> Vec<(ReplicaId, Load)> {
        self.status().replicas.iter().map(|replica| (replica.replica, replica.load)).collect()
    }

    /// The metrics, for the edge to add its own.
    pub fn metrics(&self) -> Arc<Metrics> {
        Arc::clone(&self.wiring.metrics)
    }

    /// The metrics page in Prometheus text format, gauges as of now.
    pub fn metrics_text(&self) -> String {
        if let Some(journal) = &self.wiring.journal {
            self.wiring.metrics.journal_waiting(journal.waiting_bytes());
        }
        self.wiring.metrics.render(&self.status())
    }

    /// Refuses new work from now on: readiness fails, what is queued and running goes on.
    pub fn begin_drain(&self) {
        if !self.wiring.board.draining.swap(true, Ordering::AcqRel) {
            tracing::info!("draining: no new work");
            let _ = self.wiring.gateway.try_push(gateway_loop::CONTROL, GatewayWake::Drain);
        }
    }

    /// Refuses new work, waits until every stream has been read to its end or `grace` has passed, then cancels the rest with the drain
    /// cause and gives clients a moment to read their ends. Blocks the thread; call it off the async runtime's workers.
    pub fn drain(&self, grace: Duration) -> DrainReport {
        self.begin_drain();
        let permits = &self.wiring.board.permits;
        let mut report = DrainReport { cancelled: 0, left: 0 };
        if !permits.wait_until_idle(after(grace)) {
            report.cancelled = permits.held().requests;
            tracing::warn!(requests = report.cancelled, "the drain's grace has passed: what runs is cancelled");
            let _ = self.wiring.gateway.try_push(gateway_loop::CONTROL, GatewayWake::CancelAll(CancelCause::Drain));
            permits.wait_until_idle(after(self.wiring.limits.drain_flush));
            report.left = permits.held().requests;
        }
        report
    }

    /// Cancels what runs with the drain cause, ends all loops and joins their threads. Streams that are still open end typed; where an
    /// executor does not come back, as an internal failure. True when every thread has ended in time. Idempotent.
    pub fn shutdown(&self) -> bool {
        self.wiring.board.draining.store(true, Ordering::Release);
        // The gateway loop ends the others once its requests are over.
        let _ = self.wiring.gateway.try_push(gateway_loop::CONTROL, GatewayWake::Shutdown);
        self.join()
    }

    fn join(&self) -> bool {
        let threads = std::mem::take(&mut *self.threads.lock().unwrap_or_else(PoisonError::into_inner));
        let in_time = self.ended.wait(threads.len(), after(self.wiring.limits.join));
        for (what, handle) in threads {
            if in_time || handle.is_finished() {
                let _ = handle.join();
            } else {
                tracing::error!(what, "a thread did not end in time and is left behind");
            }
        }
        if let Some(journal) = &self.wiring.journal {
            journal.close();
        }
        in_time
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        self.shutdown();
    }
}

impl std::fmt::Debug for Engine {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Engine").field("model", &self.model).field("geometry", &self.geometry).finish_non_exhaustive()
    }
}

/// Sizes that hold for every executor; block size, KV bytes and vocabulary must be equal.
fn common_geometry(executors: &[Box<dyn Executor>]) -> Result<Geometry, EngineError> {
    if executors.is_empty() || executors.len() > limits::REPLICAS_MAX {
        return Err(EngineError::Executors(executors.len()));
    }
    let mut common = executors[0].geometry().clone();
    for (replica, executor) in executors.iter().enumerate() {
        let geometry = executor.geometry();
        let differs = |what| Err(EngineError::Mixed { replica, what });
        if geometry.block_size_tokens != common.block_size_tokens {
            return differs("block size");
        }
        if geometry.kv_token_bytes != common.kv_token_bytes {
            return differs("KV bytes of a token");
        }
        if geometry.vocabulary != common.vocabulary {
            return differs("vocabulary");
        }
        common.blocks = common.blocks.min(geometry.blocks);
        common.slots = common.slots.min(geometry.slots);
        common.step_tokens_max = common.step_tokens_max.min(geometry.step_tokens_max);
        common.context_tokens_max = common.context_tokens_max.min(geometry.context_tokens_max);
    }
    Ok(common)
}

/// The first set of each machine, the gateway's first.
fn first_policies(
    source: &PolicySource,
    replicas: usize,
    context_tokens_max: u32,
) -> Result<Vec<Box<dyn PreparedPolicies>>, EngineError> {
    let replicas = (0..replicas).map(|replica| Machine::Replica(replica as u32));
    let make = |machine| {
        let made = source.prepare(machine, None, context_tokens_max);
        made.map_err(|why| EngineError::Policies { machine, why })
    };
    std::iter::once(Machine::Gateway).chain(replicas).map(make).collect()
}

/// The machines' configurations, with what only the executors know.
fn machine_configs(
    config: &EngineConfig,
    executors: &[Box<dyn Executor>],
) -> Result<(GatewayConfig, Vec<ReplicaConfig>), EngineError> {
    let gateway = GatewayConfig {
        block_size_tokens: executors[0].geometry().block_size_tokens,
        kv_token_bytes: executors[0].geometry().kv_token_bytes,
        ..config.gateway.clone()
    };
    let replica = |(index, executor): (usize, &dyn Executor)| {
        let geometry = executor.geometry();
        let step_tokens = config.replica.step_tokens.min(geometry.step_tokens_max);
        ReplicaConfig {
            replica: ReplicaId(index as u32),
            epoch: ReplicaEpoch(config.replica.epoch.0.max(1)),
            blocks: geometry.blocks,
            block_size_tokens: geometry.block_size_tokens,
            slots: config.replica.slots.min(geometry.slots),
            step_tokens,
            chunk_tokens: config.replica.chunk_tokens.min(step_tokens),
            context_tokens_max: config.replica.context_tokens_max.min(geometry.context_tokens_max),
            ..config.replica.clone()
        }
    };
    let replicas: Vec<_> = executors.iter().map(Box::as_ref).enumerate().map(replica).collect();
    for replica in &replicas {
        check(replica)?;
    }
    if config.limits.requests_max == 0 {
        return Err(EngineError::Config { key: "requests_max", value: 0, why: "at least 1" });
    }
    Ok((gateway, replicas))
}

fn check(config: &ReplicaConfig) -> Result<(), EngineError> {
    let rules: [(&'static str, u64, u64, u64, &'static str); 7] = [
        ("blocks", config.blocks.into(), 1, limits::POOL_BLOCKS_MAX.into(), "1 to the pool's limit"),
        ("block_size_tokens", config.block_size_tokens.into(), 1, u32::MAX.into(), "at least 1"),
        ("slots", config.slots.into(), 1, limits::SLOTS_MAX as u64, "1 to the limit of slots"),
        ("step_tokens", config.step_tokens.into(), 1, limits::STEP_TOKENS_MAX.into(), "1 to the limit of a step"),
        ("inflight_max", config.inflight_max as u64, 1, limits::INFLIGHT_MAX as u64, "1 or 2"),
        ("ready_window", config.ready_window as u64, 0, limits::READY_WINDOW_MAX as u64, "0 to 2"),
        ("context_tokens_max", config.context_tokens_max.into(), 2, u32::MAX.into(), "at least 2"),
    ];
    for (key, value, least, most, why) in rules {
        if !(least..=most).contains(&value) {
            return Err(EngineError::Config { key, value, why });
        }
    }
    Ok(())
}

fn first_status(config: &ReplicaConfig) -> ReplicaStatus {
    ReplicaStatus {
        replica: config.replica,
        epoch: config.epoch,
        state: ReplicaState::Frozen,
        load: Load::default(),
        generation: FIRST,
        slots: config.slots,
        block_size_tokens: config.block_size_tokens,
        context_tokens_max: config.context_tokens_max,
    }
}

pub(crate) fn after(duration: Duration) -> std::time::Instant {
    let now = std::time::Instant::now();
    now.checked_add(StdDuration::from_nanos(duration.0)).unwrap_or(now + StdDuration::from_secs(u64::from(u32::MAX)))
}
