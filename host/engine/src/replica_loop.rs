//! One replica's loop: drives its machine, its executor, and what becomes of its tokens.
//!
//! When the machine panics or says that an invariant is broken, this replica alone is frozen: the gateway is told that this epoch is
//! gone (behind the ends that it still had to tell), steps in flight are awaited, the executor's slots are dropped, and a new machine
//! starts with the next epoch.
//!
//! ```text
//! Serving ──panic, broken invariant, full mailbox──► Frozen ──steps are back, slots dropped──► Serving (next epoch)
//!    └──executor lost, or frozen too often──► Lost
//! ```

mod cached;
mod handoff;
mod placed;
mod result;
mod standing;

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use penstock_base::plan::{BatchFailure, Plan, PlanOp, RowDone};
use penstock_base::{BatchId, Duration, GatewayEpoch, Generation, Instant, ReplicaEpoch, RequestId, SeqId, Slot};
use penstock_exec::{BatchResult, ExecError, RowResult, SampledToken, SlotOpening, Step};
use penstock_sched::message::{FromReplica, Load, ToReplica, Usage};
use penstock_sched::replica::{Replica, ReplicaConfig, ReplicaEffect, ReplicaEffects, ReplicaEvent, ReplicaInput};

use crate::cache_events::CacheTap;
use crate::context::Placement;
use crate::executor_loop::{STEPS, StepOrder, StepOutcome};
use crate::gateway_loop::{self, GatewayWake};
use crate::latch::Latch;
use crate::limits::{FREEZE_WINDOW, FREEZES_MAX};
use crate::mailbox::Mailbox;
use crate::outputs::{self, OutputWake, Turn, TurnItem};
use crate::panics;
use crate::policies::machine::MachineSeats;
use crate::policies::order::PolicyOrder;
use crate::remote::gateway_of;
use crate::replica_wake::{FEEDBACK, FreezeCause, ReplicaWake};
use crate::status::ReplicaState;
use crate::wiring::Wiring;
use handoff::Parts;
use placed::Placed;
use result::faults;

pub use standing::Role;
pub(crate) use standing::{Standing, facts};

/// What a replica's loop does now.
enum Life {
    /// The machine runs.
    Serving(Box<Replica>),
    /// Steps of the old epoch are awaited.
    Frozen,
    /// Nothing will come back.
    Lost,
}

/// See the module.
pub(crate) struct ReplicaLoop {
    wiring: Arc<Wiring>,
    steps: Arc<Mailbox<StepOrder>>,
    /// The configuration of the running epoch.
    config: ReplicaConfig,
    /// The gateways before this replica.
    gateways: Vec<GatewayEpoch>,
    life: Life,
    seats: MachineSeats,
    effects: ReplicaEffects,
    requests: HashMap<RequestId, Placed>,
    /// Slots open at the executor; ordered, so that a reset is the same every time.
    slots: BTreeSet<Slot>,
    /// Steps at the executor.
    inflight: usize,
    /// The gateway knows that the frozen epoch is over.
    settled: bool,
    /// Nobody reads or writes blocks of the frozen epoch any more.
    unmoved: bool,
    /// What it is among others.
    standing: Standing,
    /// Hand-offs here.
    parts: Parts,
    /// The step at the executor drops what a frozen epoch left behind.
    resetting: bool,
    /// Rows of the batch that is being reported.
    reported: Option<BatchResult>,
    /// For the output loop, at the end of the turn.
    items: Vec<TurnItem>,
    /// For the gateways, at the end of the turn.
    messages: Vec<(GatewayEpoch, FromReplica)>,
    /// It takes no new work.
    draining: bool,
    /// Set by an effect; carried out after the step.
    freeze: Option<FreezeCause>,
    /// When this replica was frozen lately.
    freezes: VecDeque<Instant>,
    /// Told once the first machine runs.
    started: Arc<Latch>,
    /// Where changes of the cache are told beside the gateway.
    tap: CacheTap,
}

impl ReplicaLoop {
    pub fn new(
        wiring: Arc<Wiring>,
        steps: Arc<Mailbox<StepOrder>>,
        (config, standing, tap): (ReplicaConfig, Standing, CacheTap),
        gateways: Vec<GatewayEpoch>,
        seats: MachineSeats,
        started: Arc<Latch>,
    ) -> Self {
        Self {
            wiring,
            steps,
            config,
            gateways,
            life: Life::Frozen,
            seats,
            effects: ReplicaEffects::new(),
            requests: HashMap::new(),
            slots: BTreeSet::new(),
            inflight: 0,
            settled: false,
            unmoved: true,
            standing,
            parts: Parts::default(),
            resetting: false,
            reported: None,
            items: Vec::new(),
            messages: Vec::new(),
            draining: false,
            freeze: None,
            freezes: VecDeque::new(),
            started,
            tap,
        }
    }

    /// Runs until shutdown.
    pub fn run(mut self) {
        self.serve();
        self.steps.close();
        if let Some(mover) = self.wiring.mover(self.config.replica) {
            mover.close();
        }
        if let Some(port) = self.wiring.replica(self.config.replica) {
            port.close();
        }
    }

    fn serve(&mut self) {
        let wiring = Arc::clone(&self.wiring);
        let port = wiring.replica(self.config.replica);
        let Some(mailbox) = port.as_ref().and_then(|port| port.local()) else { return };
        self.start();
        self.flush();
        self.started.signal();
        let mut wakes = Vec::new();
        loop {
            let next = self.next_wake();
            mailbox.take_all(&mut wakes, wiring.clock.wake_at(next));
            if wakes.is_empty() && mailbox.is_closed() {
                return;
            }
            for wake in wakes.drain(..) {
                if matches!(wake, ReplicaWake::Shutdown) {
                    return;
                }
                self.handle(wake);
            }
            if self.next_wake() <= wiring.clock.now() {
                self.step(ReplicaInput::Tick);
            }
            self.flush();
            self.between_steps();
        }
    }

    /// The moment for snapshots. A panic in it freezes this replica and nothing else.
    fn between_steps(&mut self) {
        let now = self.wiring.clock.now();
        if self.serves() && catch_unwind(AssertUnwindSafe(|| self.seats.between_steps(now))).is_err() {
            self.freeze_now(FreezeCause::Panic, Some("between two steps"));
        }
    }

    fn next_wake(&self) -> Instant {
        match &self.life {
            Life::Serving(machine) => machine.next_wake(),
            Life::Frozen | Life::Lost => Instant::NEVER,
        }
    }

    /// Starts a machine for the epoch of the configuration.
    fn start(&mut self) {
        let now = self.wiring.clock.now();
        match catch_unwind(AssertUnwindSafe(|| Replica::new(self.config.clone(), now))) {
            Ok(machine) => self.life = Life::Serving(Box::new(machine)),
            Err(_) => return self.freeze_now(FreezeCause::Panic, Some(&panics::last_place())),
        }
        let (replica, epoch) = (self.config.replica, self.config.epoch);
        self.wiring.board.update_replica(replica, |status| {
            status.epoch = epoch;
            status.state = ReplicaState::Ready;
        });
        self.tap.begin(epoch);
        tracing::info!(replica = replica.0, epoch = epoch.0, "replica is ready");
        self.step(ReplicaInput::Policies(self.seats.generation()));
        for gateway in self.gateways.clone() {
            self.come_up(gateway);
        }
        if self.draining {
            self.step(ReplicaInput::Drain);
        }
    }

    /// This epoch begins for a gateway.
    fn come_up(&mut self, gateway: GatewayEpoch) {
        let facts = facts(&self.config, self.standing);
        match &self.wiring.links {
            Some(links) => links.up(gateway, &facts),
            None => _ = self.wiring.gateway.push_waiting(gateway_loop::CONTROL, GatewayWake::ReplicaUp(facts)),
        }
        self.step(ReplicaInput::GatewayUp(gateway));
    }

    /// A gateway is gone, and what it wanted with it: nobody hears of the ends.
    fn leave(&mut self, gateway: GatewayEpoch) {
        self.gateways.retain(|known| *known != gateway);
        self.step(ReplicaInput::GatewayDown(gateway));
        self.requests.retain(|request, _| request.gateway_epoch() != gateway);
        // Its next session may have begun: nothing of this one belongs there.
        self.items.retain(|item| gateway_of(item) != Some(gateway));
        self.messages.retain(|(to, _)| *to != gateway);
        self.parts.leave(gateway);
    }

    fn drain(&mut self) {
        if std::mem::replace(&mut self.draining, true) {
            return;
        }
        self.step(ReplicaInput::Drain);
        // What was said before comes before.
        self.flush();
        if let Some(links) = &self.wiring.links {
            links.draining(self.config.epoch);
        }
    }

    fn handle(&mut self, wake: ReplicaWake) {
        match wake {
            ReplicaWake::Gateway { gateway, epoch, message, placement } => {
                if epoch != self.config.epoch || !self.serves() {
                    return self.wiring.metrics.stale("replica");
                }
                self.note_order(&message, placement.as_ref());
                if let (ToReplica::Dispatch(dispatch), Some(placement)) = (&message, placement) {
                    self.admit(placement, dispatch.attempt);
                }
                if let ToReplica::Policies(generation) = message {
                    self.follow(generation);
                }
                let closed = handoff::closed_by(&message);
                self.step(ReplicaInput::Gateway { gateway, message });
                self.forget_closed(closed);
            }
            ReplicaWake::GatewayUp(gateway) => {
                self.gateways.push(gateway);
                if self.serves() {
                    self.come_up(gateway);
                }
            }
            ReplicaWake::GatewayDown(gateway) => self.leave(gateway),
            ReplicaWake::Drain => self.drain(),
            ReplicaWake::Policies(order) => self.obey(order),
            ReplicaWake::Handoff { to, input } => self.take_handoff(to, input),
            ReplicaWake::Tail { to, transfer, tail } => self.take_tail(to, transfer, tail),
            ReplicaWake::MoverQuiet { epoch } => {
                if epoch == self.config.epoch {
                    self.unmoved = true;
                    self.go_on();
                }
            }
            ReplicaWake::Computed(outcome) => self.computed(outcome),
            ReplicaWake::Feedback { epoch, inputs } => {
                if epoch != self.config.epoch {
                    return self.wiring.metrics.stale("replica");
                }
                for mut input in inputs {
                    self.without_resumed(&mut input);
                    // Text runs behind: what it says of a sequence that has ended meanwhile is late, not wrong.
                    if subject(&input).is_none_or(|seq| self.lives(seq)) {
                        self.note_filled(&input);
                        self.step(input);
                    }
                }
            }
            ReplicaWake::Settled { epoch } => {
                if epoch == self.config.epoch {
                    self.settled = true;
                    self.go_on();
                }
            }
            ReplicaWake::Freeze { epoch, cause } => {
                if epoch == self.config.epoch && self.serves() {
                    self.freeze_now(cause, None);
                }
            }
            ReplicaWake::Shutdown => {}
        }
    }

    /// Where an answer ends is told in output tokens of all attempts, and the machine knows those of this one.
    fn without_resumed(&self, input: &mut ReplicaInput) {
        if let ReplicaInput::Finish(end) = input
            && let Some(placed) = self.requests.get(&end.seq.request)
        {
            end.tokens = end.tokens.saturating_sub(placed.resumed);
        }
    }

    fn obey(&mut self, order: PolicyOrder) {
        match (&self.life, order) {
            (Life::Lost, order) => self.seats.leave(order),
            // One that starts anew sits the set down that is in force then.
            (Life::Frozen, PolicyOrder::Switch(_)) => {}
            (Life::Serving(_), PolicyOrder::Switch(generation)) => {
                if self.follow(generation) {
                    self.step(ReplicaInput::Policies(generation));
                }
            }
            (life, order) => {
                let serves = matches!(life, Life::Serving(_));
                self.seats.obey(order, serves);
            }
        }
    }

    /// Lets the gateway's set take over here. A panic in it freezes this replica and nothing else.
    fn follow(&mut self, generation: Generation) -> bool {
        match catch_unwind(AssertUnwindSafe(|| self.seats.follow(generation))) {
            Ok(changed) => changed,
            Err(_) => {
                self.freeze_now(FreezeCause::Panic, Some(&panics::last_place()));
                false
            }
        }
    }

    fn serves(&self) -> bool {
        matches!(self.life, Life::Serving(_))
    }

    /// Knows a request before its dispatch reaches the machine.
    fn admit(&mut self, placement: Placement, attempt: u16) {
        self.requests.insert(placement.context.request(), Placed::resumed(placement, attempt));
    }

    /// Is this sequence here, and has it not ended?
    fn lives(&mut self, seq: SeqId) -> bool {
        self.requests.get_mut(&seq.request).is_some_and(|placed| placed.output(seq.index).is_some())
    }

    /// Advances the machine. A panic in it, or in carrying out its effects, freezes this replica and nothing else.
    fn step(&mut self, input: ReplicaInput) {
        let now = self.wiring.clock.now();
        let done = catch_unwind(AssertUnwindSafe(|| {
            let Life::Serving(machine) = &mut self.life else { return };
            let mut effects = std::mem::take(&mut self.effects);
            self.seats.begin_step(machine.as_ref(), &self.config, now, &input);
            machine.step(now, input, self.seats.policies(), &mut effects);
            self.seats.end_step(machine.as_ref(), &effects);
            self.tap_changes(&effects);
            for effect in effects.drain(..) {
                self.carry_out(effect);
            }
            self.effects = effects;
        }));
        match done {
            Err(_) => self.freeze_now(FreezeCause::Panic, Some(&panics::last_place())),
            Ok(()) => {
                if let Some(cause) = self.freeze.take() {
                    self.freeze_now(cause, None);
                }
            }
        }
    }

    fn carry_out(&mut self, effect: ReplicaEffect) {
        match effect {
            ReplicaEffect::Submit(plan) => self.submit(plan),
            ReplicaEffect::Send { gateway, message } => self.send(gateway, message),
            ReplicaEffect::Deliver { seq, batch, row, tokens, first } => self.deliver(seq, batch, row, tokens, first),
            ReplicaEffect::SequenceEnded { seq, outcome, tokens } => {
                let Some(placed) = self.requests.get_mut(&seq.request) else { return };
                if let Some(output) = placed.outputs.get_mut(usize::from(seq.index)) {
                    *output = None;
                }
                let (attempt, tokens) = (placed.attempt, tokens + placed.resumed);
                self.items.push(TurnItem::SequenceEnded { seq, attempt, outcome, tokens });
            }
            ReplicaEffect::Handoff(effect) => self.carry_out_handoff(effect),
            // Tapped before: what it was computed for may be gone by now.
            ReplicaEffect::Cached(_) => {}
            ReplicaEffect::Event(event) => {
                self.wiring.metrics.replica_event(&event);
                match event {
                    ReplicaEvent::Broken(which) => _ = self.freeze.get_or_insert(FreezeCause::Broken(which)),
                    ReplicaEvent::Fallback { decision, call, reason } => self.seats.fell_back(decision, call, reason),
                    ReplicaEvent::Changed { decision, call, change } => self.seats.changed(decision, call, change),
                    _ => {}
                }
            }
        }
    }

    fn submit(&mut self, plan: Plan) {
        let mut openings = Vec::new();
        for op in &plan.ops {
            let PlanOp::OpenSlot { slot, seq } = *op else { continue };
            let placed = self.requests.get_mut(&seq.request);
            let Some((placed, generated)) = placed.and_then(|placed| {
                let generated = placed.output(seq.index)?.clone();
                Some((placed, generated))
            }) else {
                self.freeze.get_or_insert(FreezeCause::Broken("slot_of_unknown_sequence"));
                return;
            };
            let prompt = Arc::clone(&placed.context.prompt);
            let params = Arc::clone(&placed.context.sampling[usize::from(seq.index)]);
            openings.push(SlotOpening { slot, seq, prompt, generated, params });
        }
        let follows = self.inflight > 0 || self.reported.is_some();
        self.order(StepOrder { step: Step { plan, openings }, follows });
    }

    fn order(&mut self, order: StepOrder) {
        self.inflight += 1;
        if self.steps.try_push(STEPS, order).is_err() {
            self.inflight -= 1;
            self.freeze.get_or_insert(FreezeCause::Broken("more_steps_than_allowed"));
        }
    }

    /// Follows what the executor holds open.
    fn note_slots(&mut self, plan: &Plan) {
        for op in &plan.ops {
            match *op {
                PlanOp::OpenSlot { slot, .. } => _ = self.slots.insert(slot),
                PlanOp::DropSlot { slot } => _ = self.slots.remove(&slot),
                PlanOp::SetBlock { .. } | PlanOp::CopyBlock { .. } => {}
            }
        }
    }

    fn send(&mut self, gateway: GatewayEpoch, message: FromReplica) {
        match message {
            FromReplica::Ended { request, attempt, outcome, usage } => {
                if let Some(placed) = self.requests.remove(&request) {
                    let prompt_tokens = usage.prompt_tokens.saturating_sub(placed.resumed);
                    let cached_tokens = usage.cached_tokens.min(prompt_tokens);
                    let usage = Usage { prompt_tokens, cached_tokens, ..usage };
                    let settled = Some(placed.context.settled());
                    self.items.push(TurnItem::Ended { request, settled, attempt, outcome, usage });
                    return;
                }
            }
            FromReplica::Refuse { request, .. } => _ = self.requests.remove(&request),
            FromReplica::Report(report) => {
                self.wiring.board.update_replica(self.config.replica, |status| status.load = report.load);
            }
            _ => {}
        }
        self.messages.push((gateway, message));
    }

    fn deliver(&mut self, seq: SeqId, batch: BatchId, row: u32, tokens: u16, first: u32) {
        let row = self
            .reported
            .as_mut()
            .filter(|reported| reported.batch == batch)
            .and_then(|r| r.rows.get_mut(row as usize));
        let placed = self.requests.get_mut(&seq.request);
        let (attempt, resumed) = placed.as_ref().map_or((0, 0), |placed| (placed.attempt, placed.resumed));
        let first = first + resumed;
        let (Some(row), Some(output)) = (row, placed.and_then(|placed| placed.output(seq.index))) else {
            self.freeze.get_or_insert(FreezeCause::Broken("delivery_of_unknown_row"));
            return;
        };
        let mut delivered: Vec<SampledToken> = std::mem::take(&mut row.tokens);
        delivered.truncate(usize::from(tokens));
        output.truncate(first as usize);
        output.extend(delivered.iter().map(|token| token.id));
        self.items.push(TurnItem::Tokens { seq, attempt, first, tokens: delivered });
    }

    fn computed(&mut self, outcome: StepOutcome) {
        self.inflight -= 1;
        let StepOutcome { step, applied, result, took, outside } = outcome;
        if applied {
            self.note_slots(&step.plan);
        }
        if !self.serves() {
            return self.came_back(result.err());
        }
        if !step.plan.rows.is_empty() {
            self.wiring.metrics.step_took(took, outside);
        }
        match result {
            Err(ExecError { failure: BatchFailure::Executor, message }) => {
                tracing::error!(replica = self.config.replica.0, message, "the executor is lost");
                self.freeze_now(FreezeCause::ExecutorLost, None);
            }
            Err(ExecError { failure, message }) => {
                tracing::error!(replica = self.config.replica.0, batch = step.plan.batch.0, message, "a step failed");
                let (rows, done) = (Vec::new(), Vec::new());
                self.step(ReplicaInput::BatchFailed { batch: step.plan.batch, failure, rows, done });
            }
            Ok(result) => match faults(&step.plan, &result) {
                Some(fault) => self.freeze_now(FreezeCause::Executor(fault), None),
                None => self.report(result, took),
            },
        }
        if let Life::Serving(machine) = &mut self.life {
            machine.recycle(step.plan);
        }
    }

    /// Tells the machine of a batch whose rows are as asked for.
    fn report(&mut self, result: BatchResult, took: Duration) {
        let batch = result.batch;
        let row_done = |row: &RowResult| RowDone {
            seq: row.seq,
            accepted: if row.failed { 0 } else { row.tokens.len() as u16 },
            stop: row.stop && !row.failed,
        };
        let done = result.rows.iter().map(row_done).collect();
        let failed = |(index, row): (usize, &RowResult)| row.failed.then_some(index as u32);
        let rows: Vec<u32> = result.rows.iter().enumerate().filter_map(failed).collect();
        let offered: usize = result.rows.iter().map(|row| row.tokens.len()).sum();
        self.reported = Some(result);
        let before = self.items.len();
        self.step(if rows.is_empty() {
            ReplicaInput::BatchDone { batch, rows: done, took }
        } else {
            ReplicaInput::BatchFailed { batch, failure: BatchFailure::Rows, rows, done }
        });
        self.reported = None;
        let delivered = |item: &TurnItem| if let TurnItem::Tokens { tokens, .. } = item { tokens.len() } else { 0 };
        let delivered: usize = self.items.iter().skip(before).map(delivered).sum();
        self.wiring.metrics.discarded(offered.saturating_sub(delivered));
    }

    /// Hands over what this turn brought. Waits when the receivers are far behind.
    ///
    /// The gateway first: the ends among the items reach it by way of the output loop, and must not overtake the progress before them.
    fn flush(&mut self) {
        let (replica, epoch) = (self.config.replica, self.config.epoch);
        let machine = if let Life::Serving(machine) = &self.life { Some(machine) } else { None };
        self.tap.flush(|| machine.map(|machine| machine.listed()).unwrap_or_default());
        if let Some(links) = &self.wiring.links {
            self.wiring.board.placed_requests.store(self.requests.len() + self.parts.len(), Ordering::Relaxed);
            if let Some(machine) = machine.filter(|_| self.gateways.is_empty()) {
                // It reports to nobody, and its load would stand as the last gateway heard it.
                let load = machine.present_load(self.wiring.clock.now());
                self.wiring.board.update_replica(replica, |status| status.load = load);
            }
            links.flush(self.wiring.clock.now(), epoch, &self.messages, &self.items);
            let is_over = self.items.iter().any(|item| matches!(item, TurnItem::Down { .. }));
            self.messages.clear();
            self.items.clear();
            if is_over && let Some(port) = self.wiring.replica(replica) {
                // What is said behind it arrives behind it: nobody has to confirm.
                let _ = port.try_push(FEEDBACK, ReplicaWake::Settled { epoch });
            }
            return;
        }
        if !self.messages.is_empty() {
            let messages = std::mem::take(&mut self.messages).into_iter().map(|(_, message)| message).collect();
            let wake = GatewayWake::Replica { replica, epoch, messages };
            let _ = self.wiring.gateway.push_waiting(gateway_loop::REPLICAS, wake);
        }
        if !self.items.is_empty() {
            let turn = Turn { replica, epoch, items: std::mem::take(&mut self.items) };
            // Both fail only when the receiving loop has ended.
            let _ = self.wiring.outputs.push_waiting(outputs::TURNS, OutputWake::Turn(turn));
        }
    }

    /// Takes this epoch out of service. What it has said before still counts.
    fn freeze_now(&mut self, cause: FreezeCause, panicked_at: Option<&str>) {
        let replica = self.config.replica;
        self.freeze = None;
        self.seats.frozen();
        self.effects.clear();
        self.reported = None;
        let now = self.wiring.clock.now();
        self.freezes.push_back(now);
        self.freezes.retain(|&at| now.since(at) <= FREEZE_WINDOW);
        let lost = cause == FreezeCause::ExecutorLost || self.freezes.len() > FREEZES_MAX;
        self.dump(cause, panicked_at, lost);
        self.wiring.metrics.frozen(cause.name());
        self.life = if lost { Life::Lost } else { Life::Frozen };
        if lost {
            self.seats.depart();
        }
        self.requests.clear();
        let state = if lost { ReplicaState::Lost } else { ReplicaState::Frozen };
        self.wiring.board.update_replica(replica, |status| {
            status.state = state;
            status.load = Load::default();
        });
        self.settled = false;
        self.unmoved = self.quiet_mover(self.config.epoch);
        self.items.push(TurnItem::Down { lost });
        self.flush();
    }

    /// Everything that helps to find the cause, and nothing that a client wrote.
    fn dump(&self, cause: FreezeCause, panicked_at: Option<&str>, lost: bool) {
        let digest = match &self.life {
            Life::Serving(machine) => catch_unwind(AssertUnwindSafe(|| machine.decision_digest())).ok(),
            Life::Frozen | Life::Lost => None,
        };
        tracing::error!(
            replica = self.config.replica.0,
            epoch = self.config.epoch.0,
            ?cause,
            panicked_at,
            lost,
            digest = ?digest,
            requests = self.requests.len(),
            slots = self.slots.len(),
            inflight = self.inflight,
            "a replica is frozen"
        );
    }

    /// A step of a frozen epoch is back.
    fn came_back(&mut self, error: Option<ExecError>) {
        if !matches!(self.life, Life::Frozen) {
            return;
        }
        if let Some(error) = error.filter(|error| error.failure == BatchFailure::Executor || self.resetting) {
            let replica = self.config.replica;
            tracing::error!(replica = replica.0, message = error.message, "the executor is lost");
            self.wiring.metrics.frozen(FreezeCause::ExecutorLost.name());
            self.wiring.board.update_replica(replica, |status| status.state = ReplicaState::Lost);
            self.life = Life::Lost;
            self.seats.depart();
            self.items.push(TurnItem::Down { lost: true });
        } else {
            self.go_on();
        }
    }

    /// Begins the next epoch once nothing of the old one is under way: no step at the executor, no copy at the mover, no end on its way to
    /// the gateway.
    fn go_on(&mut self) {
        if matches!(self.life, Life::Frozen) && self.inflight == 0 && self.settled && self.unmoved {
            self.reset();
        }
    }

    /// Drops the executor's slots, then starts the next epoch.
    fn reset(&mut self) {
        if self.slots.is_empty() {
            self.resetting = false;
            self.config.epoch = ReplicaEpoch(self.config.epoch.0 + 1);
            self.seats.restart();
            return self.start();
        }
        self.resetting = true;
        let ops = self.slots.iter().map(|&slot| PlanOp::DropSlot { slot }).collect();
        let plan = Plan { batch: BatchId(0), ops, rows: Vec::new() };
        self.order(StepOrder { step: Step { plan, openings: Vec::new() }, follows: false });
    }
}

/// The sequence that feedback is about.
fn subject(input: &ReplicaInput) -> Option<SeqId> {
    match input {
        ReplicaInput::Finish(end) => Some(end.seq),
        ReplicaInput::BlockKeys { seq, .. } => Some(*seq),
        _ => None,
    }
}
