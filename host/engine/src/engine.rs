//! The handle: starts the loops, takes submissions, tells its state, drains and ends.

use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration as StdDuration;

use penstock_base::{CancelCause, Duration, GatewayEpoch, Generation, ReplicaId, RequestId, limits};
use penstock_control::Conversation;
use penstock_exec::{Executor, Geometry};
use penstock_model::Namespace;
use penstock_sched::gateway::{GatewayConfig, ReplicaFacts};
use penstock_sched::message::Load;
use penstock_sched::quota::QuotaShare;
use penstock_sched::replica::ReplicaConfig;

use crate::cache_events::{self, CacheTap};
use crate::clock::Clock;
use crate::config::{EngineConfig, ServedModel};
use crate::context::{ContextRules, RequestContext, SubmissionFault, pending_bytes};
use crate::executor_loop::{self, ExecutorLoop};
use crate::gateway_loop::{self, GatewayLoop, GatewayWake};
use crate::handoff::{self, MoverLoop, Movers, PartyError, Way, Wired, WorkerParty};
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
use crate::policies::machine::{MachineSeats, PolicyPlane};
use crate::policies::seats::{Machine, Memory, PolicySource, PreparedPolicies};
use crate::remote::{self, GatewayLinks, JoinError, Joined, Joins, Replicas, WorkerIdentity};
use crate::replica_loop::{self, ReplicaLoop, Role, Standing};
use crate::replica_wake::{self, ReplicaWake};
use crate::request::{Submission, Ticket};
use crate::settle;
use crate::status::Status;
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
    /// KV events cannot be published as they should be.
    #[error(transparent)]
    KvEvents(#[from] penstock_kv_events::KvEventsError),
    /// A worker that is to hand off, or to take over, cannot.
    #[error("this worker can take no part in hand-offs: {0}")]
    Party(#[from] PartyError),
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

/// How long a draining worker must have been idle.
const DRAIN_IDLE: StdDuration = StdDuration::from_millis(200);

/// What an engine is made of.
struct Parts {
    /// None at a worker.
    gateway: Option<GatewayConfig>,
    replicas: Vec<(ReplicaConfig, Standing)>,
    executors: Vec<Box<dyn Executor>>,
    movers: Vec<handoff::Prepared>,
    /// At a gateway whose replicas are workers.
    joins: Option<Joins>,
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
    /// Entries of the gateway's prefix index.
    cached_keys_max: usize,
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
        let geometry = settle::common_geometry(&executors)?;
        let (mut gateway, mut replicas) = settle::machine_configs(&config, &executors)?;
        let movers = match &config.handoff {
            None => Vec::new(),
            Some(setup) => handoff::prepare(setup, &model.namespace, &mut gateway, &mut replicas, &executors)
                .map_err(|(key, value, why)| EngineError::Config { key, value, why })?,
        };
        let prefill = config.handoff.map_or(0, |setup| setup.prefill);
        let role = |index: u32| match prefill {
            0 => Role::Unified,
            first if index < first => Role::Prefill,
            _ => Role::Decode,
        };
        let standing = |index: u32| Standing { index, role: role(index), domain: 0 };
        let replicas = (0..).zip(replicas).map(|(index, replica)| (replica, standing(index))).collect();
        let parts = Parts { gateway: Some(gateway), replicas, executors, movers, joins: None };
        Self::assemble(config, model, geometry, parts)
    }

    /// Starts a gateway without a replica of its own: workers come by [`Self::join`], at most `workers_max`. `sizes` is what the model needs;
    /// of it count block size, KV bytes of a token, vocabulary and the longest sequence.
    ///
    /// # Errors
    /// Values that cannot work, no threads.
    pub fn start_gateway(
        config: EngineConfig,
        model: ServedModel,
        sizes: Geometry,
        workers_max: usize,
    ) -> Result<Self, EngineError> {
        let mut gateway = settle::gateway_config(&config, &sizes)?;
        if workers_max == 0 || workers_max > limits::REPLICAS_MAX {
            let why = "1 to the limit of replicas";
            return Err(EngineError::Config { key: "workers_max", value: workers_max as u64, why });
        }
        gateway.replicas_max = gateway.replicas_max.max(workers_max);
        gateway.handoff = config.handoff.map(|setup| setup.gateway);
        let joins = Some(Joins::new(sizes.clone(), workers_max));
        let (replicas, executors, movers) = (Vec::new(), Vec::new(), Vec::new());
        let parts = Parts { gateway: Some(gateway), replicas, executors, movers, joins };
        Self::assemble(config, model, sizes, parts)
    }

    /// Starts the replica of a worker, without a gateway. What gateways must know of it, and how its memory is reached.
    pub(crate) fn start_worker(
        config: EngineConfig,
        model: ServedModel,
        identity: WorkerIdentity,
        executor: Box<dyn Executor>,
    ) -> Result<(Self, ReplicaFacts, Vec<Vec<u8>>), EngineError> {
        let executors = vec![executor];
        let geometry = settle::common_geometry(&executors)?;
        let (_, mut replicas) = settle::machine_configs(&config, &executors)?;
        let mut replica = replicas.remove(0);
        (replica.replica, replica.epoch) = (identity.replica, identity.epoch);
        let standing = Standing { index: 0, role: identity.role, domain: identity.domain };
        let movers = match &config.handoff {
            Some(setup) if identity.role != Role::Unified => {
                let party = WorkerParty {
                    transfer: &config.transfer,
                    handoff: &setup.gateway,
                    namespace: &model.namespace,
                    life: identity.epoch.0,
                    decodes: identity.role == Role::Decode,
                };
                vec![handoff::prepare_worker(&party, &mut replica, executors[0].as_ref())?]
            }
            _ => Vec::new(),
        };
        let descriptors = movers.iter().flat_map(handoff::Prepared::descriptors).collect();
        let facts = replica_loop::facts(&replica, standing);
        let parts = Parts { gateway: None, replicas: vec![(replica, standing)], executors, movers, joins: None };
        Ok((Self::assemble(config, model, geometry, parts)?, facts, descriptors))
    }

    fn assemble(
        config: EngineConfig,
        model: ServedModel,
        geometry: Geometry,
        parts: Parts,
    ) -> Result<Self, EngineError> {
        panics::keep_words_to_ourselves();
        let Parts { gateway, replicas, executors, movers, joins } = parts;
        let context_tokens_max = geometry.context_tokens_max.min(config.replica.context_tokens_max);
        let count = replicas.len();
        let machines = gateway.is_some().then_some(Machine::Gateway).into_iter();
        let machines = machines.chain((0..count).map(|index| Machine::Replica(index as u32)));
        let mut first = settle::first_policies(&config.policies, machines, context_tokens_max)?;
        let permits = Permits::new(config.limits.requests_max, config.limits.pending_bytes_max);
        let statuses = replicas.iter().map(|(replica, _)| settle::first_status(replica)).collect();
        let requests_max = config.limits.requests_max;
        let metrics = Arc::new(Metrics::new(&model.name));
        let journal = config
            .journal
            .as_ref()
            .map(|journal| Journal::start(journal, (count, context_tokens_max), &metrics))
            .transpose()?;
        let (taps, publish) = match &config.kv_events {
            None => (replicas.iter().map(|_| CacheTap::closed()).collect(), None),
            Some(settings) => {
                let (taps, run) = cache_events::start(settings, count, geometry.block_size_tokens, &metrics)?;
                (taps, Some(run))
            }
        };
        // Senders that the gateway's mailboxes must have room for.
        let senders = joins.as_ref().map_or(count, Joins::workers_max);
        let mailbox = |replica: &ReplicaConfig| Mailbox::new(&replica_wake::lanes(replica, count));
        let wiring = Arc::new(Wiring {
            clock: Clock::starting_now(),
            metrics,
            board: Board::new(permits, statuses, gateway.is_some()),
            limits: config.limits,
            policies: PolicyPlane::new(config.policies.clone(), count, config.decisions)?,
            journal,
            keeps_output: gateway.as_ref().is_some_and(|gateway| gateway.migrations_max > 0),
            context_tokens_max,
            gateway: Mailbox::new(&gateway_loop::lanes(requests_max, senders)),
            replicas: Replicas::new(replicas.iter().map(|(replica, _)| (replica.replica, mailbox(replica)))),
            links: gateway.is_none().then(GatewayLinks::default),
            joins,
            movers: Movers::new(movers.len()),
            outputs: Mailbox::new(&outputs::lanes(requests_max, senders)),
        });
        let engine = Self {
            wiring,
            model,
            gateway_epoch: gateway.as_ref().map_or(GatewayEpoch(0), |gateway| gateway.epoch),
            geometry,
            prefix_cache: config.replica.prefix_cache,
            cached_keys_max: config.gateway.directory_keys_max,
            last: Mutex::new(0),
            threads: Mutex::default(),
            ended: Arc::default(),
        };
        if let Some(run) = publish {
            engine.spawn("publisher of KV events", "penstock-events".into(), run)?;
        }
        for ((replica, _), prepared) in replicas.iter().zip(movers) {
            let replica = replica.replica;
            let wiring = Arc::clone(&engine.wiring);
            engine.spawn("mover", format!("penstock-move-{replica}"), move || {
                let outside = Wired { wiring: Arc::clone(&wiring), replica };
                let ways = wiring.movers.ways.clone();
                if let Some(mailbox) = wiring.mover(replica) {
                    MoverLoop::new(outside, replica, prepared, ways).run(mailbox);
                }
            })?;
        }
        match gateway {
            Some(gateway) => engine.start_gateway_loops(gateway, first.remove(0))?,
            None => {
                engine.wiring.gateway.close();
                engine.wiring.outputs.close();
            }
        }
        let replicas = replicas.into_iter().zip(taps).zip(first);
        let replicas = replicas.map(|(((config, standing), tap), first)| (config, standing, tap, first));
        engine.start_replica_loops(replicas.collect(), executors)?;
        Ok(engine)
    }

    fn start_gateway_loops(&self, gateway: GatewayConfig, first: Box<dyn PreparedPolicies>) -> Result<(), EngineError> {
        let block_size_tokens = self.geometry.block_size_tokens;
        let output = OutputLoop::new(Arc::clone(&self.wiring), Arc::clone(&self.model.vocabulary), block_size_tokens);
        self.spawn("outputs", "penstock-out".into(), move || output.run())?;
        let wiring = Arc::clone(&self.wiring);
        self.spawn("gateway", "penstock-gate".into(), move || GatewayLoop::new(wiring, gateway, first).run())
    }

    fn start_replica_loops(
        &self,
        replicas: Vec<(ReplicaConfig, Standing, CacheTap, Box<dyn PreparedPolicies>)>,
        executors: Vec<Box<dyn Executor>>,
    ) -> Result<(), EngineError> {
        let started = Arc::new(Latch::default());
        let count = replicas.len();
        // Those of other processes come later, and say so.
        let gateways: Vec<_> = self.wiring.has_gateway().then_some(self.gateway_epoch).into_iter().collect();
        for ((config, standing, tap, policies), executor) in replicas.into_iter().zip(executors) {
            let steps = Arc::new(Mailbox::new(&executor_loop::lanes()));
            let replica = config.replica;
            let executor =
                ExecutorLoop { wiring: Arc::clone(&self.wiring), replica, executor, steps: Arc::clone(&steps) };
            self.spawn("executor", format!("penstock-exec-{replica}"), move || executor.run())?;
            let (wiring, started, gateways) = (Arc::clone(&self.wiring), Arc::clone(&started), gateways.clone());
            self.spawn("replica", format!("penstock-rep-{replica}"), move || {
                let seats = MachineSeats::new(Arc::clone(&wiring), Machine::Replica(standing.index), policies);
                ReplicaLoop::new(wiring, steps, (config, standing, tap), gateways, seats, started).run();
            })?;
        }
        // A submission must not overtake the news that there are replicas.
        if !started.wait(count, after(self.wiring.limits.join)) {
            tracing::error!("a replica's machine has not started in time");
        }
        Ok(())
    }

    /// Takes a worker in: its replica gets work once it says that it is ready, until its session is over.
    ///
    /// # Errors
    /// See [`JoinError`]; the session is closed.
    pub fn join(&self, worker: Conversation) -> Result<Joined, JoinError> {
        remote::join(&self.wiring, worker)
    }

    /// What this gateway may give out of the tenants' quotas from now on, in moments of [`Self::clock`]: for one of several, whenever a view of
    /// the others was read, and before the last lease is over. Not taken when the gateway is far behind; then the next one counts.
    pub fn take_quota_share(&self, share: QuotaShare) {
        let _ = self.wiring.gateway.try_push(gateway_loop::CONTROL, GatewayWake::QuotaShare(share));
    }

    /// Gives a worker's replica no new work from now on; what it has goes on. For one that is about to end. It takes work again when it has joined
    /// anew. False where the gateway does not know it yet, or has no room to hear it now: try again.
    pub fn hold(&self, replica: ReplicaId) -> bool {
        let known = self.status().replicas.into_iter().find(|known| known.replica == replica);
        known.is_some_and(|known| {
            let wake = GatewayWake::ReplicaDrain { replica, epoch: known.epoch };
            self.wiring.gateway.try_push(gateway_loop::CONTROL, wake).is_ok()
        })
    }

    pub(crate) fn wiring(&self) -> &Arc<Wiring> {
        &self.wiring
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
        if board.dead.load(Ordering::Acquire) || !self.wiring.has_gateway() {
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

    pub(crate) fn cached_keys_max(&self) -> usize {
        self.cached_keys_max
    }

    /// The incarnation that minted this engine's request ids.
    pub fn gateway_epoch(&self) -> GatewayEpoch {
        self.gateway_epoch
    }

    /// Readiness, liveness, load.
    pub fn status(&self) -> Status {
        self.wiring.board.status(self.wiring.clock.now())
    }

    /// How the KV of the replicas here gets to others, and why so.
    pub fn ways(&self) -> Vec<Way> {
        self.wiring.movers.ways.all()
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
        self.wiring.metrics.transport_peers(&self.ways());
        self.wiring.metrics.render(&self.status())
    }

    /// Refuses new work from now on: readiness fails, what is queued and running goes on.
    pub fn begin_drain(&self) {
        if !self.wiring.board.draining.swap(true, Ordering::AcqRel) {
            tracing::info!("draining: no new work");
            if self.wiring.has_gateway() {
                let _ = self.wiring.gateway.try_push(gateway_loop::CONTROL, GatewayWake::Drain);
            } else {
                self.tell_replicas(|| ReplicaWake::Drain);
            }
        }
    }

    /// Refuses new work, waits until every stream has been read to its end or `grace` has passed, then cancels the rest with the drain
    /// cause and gives clients a moment to read their ends. Blocks the thread; call it off the async runtime's workers.
    pub fn drain(&self, grace: Duration) -> DrainReport {
        self.begin_drain();
        if !self.wiring.has_gateway() {
            return self.drain_worker(grace);
        }
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
        if let Some(links) = &self.wiring.links {
            links.close();
            self.tell_replicas(|| ReplicaWake::Shutdown);
        }
        // The gateway loop ends the others once its requests are over.
        let _ = self.wiring.gateway.try_push(gateway_loop::CONTROL, GatewayWake::Shutdown);
        self.await_threads()
    }

    fn tell_replicas(&self, wake: impl Fn() -> ReplicaWake) {
        for replica in self.wiring.replicas.locals() {
            if let Some(port) = self.wiring.replica(*replica) {
                let _ = port.try_push(replica_wake::CONTROL, wake());
            }
        }
    }

    /// Waits until the replica has nothing of any gateway, KV that others are to fetch included, or `grace` has passed: then what is left is lost
    /// with the sessions, and its gateways end or repeat it.
    fn drain_worker(&self, grace: Duration) -> DrainReport {
        let deadline = after(grace);
        let placed = || self.wiring.board.placed_requests.load(Ordering::Relaxed);
        // A dispatch may be under way to a replica that has just heard of the drain, and is refused there: idle counts when it lasts.
        let mut idle_since = None;
        loop {
            let now = std::time::Instant::now();
            match placed() {
                0 if idle_since.is_some_and(|since| now - since >= DRAIN_IDLE) => break,
                0 => _ = idle_since.get_or_insert(now),
                _ => idle_since = None,
            }
            if now >= deadline {
                break;
            }
            std::thread::sleep(StdDuration::from_millis(10));
        }
        let left = placed();
        if left > 0 {
            tracing::warn!(requests = left, "the drain's grace has passed: what runs is lost here");
        }
        DrainReport { cancelled: left, left: 0 }
    }

    fn await_threads(&self) -> bool {
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

pub(crate) fn after(duration: Duration) -> std::time::Instant {
    let now = std::time::Instant::now();
    now.checked_add(StdDuration::from_nanos(duration.0)).unwrap_or(now + StdDuration::from_secs(u64::from(u32::MAX)))
}
