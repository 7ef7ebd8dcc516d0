//! The gateway machine. Questions answered: who enters, who is next, where does it run, what gives way?
//!
//! One step: time passes (timers, windows, facts), the input is taken, and then whatever it made possible is done: overload is asked,
//! deferred requests are asked about again, and while some replica grants credit and something waits, requests are placed.
//!
//! - Entering: `admit`, `ledger`, `stance`. Waiting: `queue`, `flows`, `window`. Placing: `dispatch`, `place`, `handoff`,
//!   `directory`, `lead`. Replicas: `replicas`, `holdings`, `feedback`. Ending: `finish`.
//! - What policies are told: `signals`, `facts`. What gives way: `overload`, `stance`. Is it sound: `check`,
//!   `verify`, `watch`.

mod admit;
mod check;
mod digest;
mod directory;
mod dispatch;
mod estimate;
mod facts;
mod feedback;
mod finish;
mod flows;
mod handoff;
mod heap;
mod holdings;
mod io;
mod lead;
mod ledger;
mod list;
mod migrate;
mod observe;
mod overload;
mod place;
mod queue;
mod recent;
mod replicas;
mod request;
mod requests;
mod seats;
mod share;
mod signals;
mod snapshot;
mod stance;
mod table;
mod verify;
mod watch;
mod window;

pub use digest::Digest;
pub use io::{
    DeliveryEvent, GatewayConfig, GatewayEffect, GatewayEffects, GatewayEvent, GatewayInput, HandoffConfig, NO_REPLICA,
    RANKED_TOLD, ReplicaFacts, Reserves, RoutingMade, fallback_code,
};
pub use migrate::{MigrationCause, MigrationRefusal};
pub use observe::{GatewayCounters, ReplicaView};
pub use request::{Compute, Delivery};

use penstock_base::time::MonotoneNow;
use penstock_base::{CancelCause, ClassRank, Generation, Instant, Outcome, RequestId};
use penstock_policy_api::Policies;

use crate::message::ToReplica;
use directory::Directory;
use estimate::OutputEstimator;
use facts::Facts;
use finish::End;
use flows::Flows;
use holdings::Inflight;
use ledger::Ledger;
use list::List;
use overload::Overload;
use queue::Queue;
use recent::{PrefixHeat, Sessions};
use replicas::Replicas;
use requests::Requests;
use seats::{Cx, Seats};
use stance::StanceState;
use verify::Soundness;
use watch::{Watch, Watched};

/// The gateway machine. Advances by [`Gateway::step`] alone; holds no clock, thread or socket.
#[derive(Debug)]
pub struct Gateway {
    state: State,
    seats: Seats,
}

/// Everything that decides what the next step does, apart from call numbers, which the seats count.
#[derive(Debug)]
struct State {
    /// How it is set up; never changes.
    config: GatewayConfig,
    /// Makes the driver's time monotone.
    clock: MonotoneNow,
    /// Time of this step.
    now: Instant,
    /// Generation of the policy set in the seats, as the driver said.
    generation: Generation,
    /// Nothing new is admitted.
    draining: bool,
    /// Live requests, by slot.
    requests: Requests,
    /// Flow queues.
    flows: Flows,
    /// Tenants.
    ledger: Ledger,
    /// This gateway's part of their quotas.
    share: share::Share,
    /// Replicas.
    replicas: Replicas,
    /// Prefix index.
    directory: Directory,
    /// No part of it that is believed grows stale before then.
    cache_due: Instant,
    /// Placements by prefix, last minute.
    heat: PrefixHeat,
    /// Last replica by session.
    sessions: Sessions,
    /// Output lengths seen.
    outputs: OutputEstimator,
    /// What waits, by class.
    queue: Queue,
    /// Deferred requests, in order of arrival.
    deferred: List,
    /// Their input tokens.
    deferred_tokens: u64,
    /// When freed capacity let them be asked about last.
    early_asked_at: Instant,
    /// Something was given back since then.
    capacity_freed: bool,
    /// Requests whose prompt and answer are computed at two replicas; none when that is off.
    handoffs: Option<handoff::Handoffs>,
    /// Requests that routing holds.
    held: List,
    /// Requests that wait for the credit of a named replica.
    reserved_requests: u32,
    /// Dispatched requests by class.
    inflight: [Inflight; ClassRank::COUNT],
    /// Dispatched requests, settling ones included.
    running_requests: u32,
    /// Counts rounds of placing.
    round: u64,
    /// Something changed that may let a waiting request be placed.
    wants_dispatch: bool,
    /// Since when `order` keeps requests waiting that an idle replica could take; [`Instant::NEVER`] else.
    kept_since: Instant,
    /// In this round it did.
    kept_idle: bool,
    /// When the next waiting request begins to starve, as of the last step.
    starve_at: Instant,
    /// Counts since the last overload question.
    overload: Overload,
    /// What gives way.
    stance: StanceState,
    /// Does anything move?
    watch: Watch,
    /// What the checks remember, and whether one of them failed.
    soundness: Soundness,
    /// Facts on their way to policies.
    facts: Facts,
    /// Over decisions.
    digest: Digest,
    /// For metrics.
    counters: GatewayCounters,
}

impl Gateway {
    /// An idle gateway at `now`. All memory is taken here.
    pub fn new(config: GatewayConfig, now: Instant) -> Self {
        let config = config.within_limits();
        let seats = Seats::new(&config);
        let state = State {
            clock: MonotoneNow::starting_at(now),
            now,
            generation: Generation(0),
            draining: false,
            requests: Requests::new(&config),
            flows: Flows::new(config.flows_max),
            ledger: Ledger::new(config.tenants_max, config.quota_window, now),
            share: share::Share::new(&config),
            replicas: Replicas::new(config.replicas_max),
            directory: Directory::new(config.directory_keys_max, config.replicas_max),
            cache_due: Instant::NEVER,
            heat: PrefixHeat::new(),
            sessions: Sessions::new(),
            outputs: OutputEstimator::new(),
            queue: Queue::default(),
            deferred: List::default(),
            deferred_tokens: 0,
            early_asked_at: now,
            capacity_freed: false,
            handoffs: handoff::Handoffs::new(&config, now),
            held: List::default(),
            reserved_requests: 0,
            inflight: [Inflight::default(); ClassRank::COUNT],
            running_requests: 0,
            round: 0,
            wants_dispatch: false,
            kept_since: Instant::NEVER,
            kept_idle: false,
            starve_at: Instant::NEVER,
            overload: Overload::new(now),
            stance: StanceState::new(now),
            watch: Watch::new(config.no_progress, now),
            soundness: Soundness::new(),
            facts: Facts::new(),
            digest: Digest::default(),
            counters: GatewayCounters::default(),
            config,
        };
        Self { state, seats }
    }

    /// Advances by one input. Total and deterministic: equal state, `now` and input give equal effects everywhere. A bad input is an
    /// effect. Effects are appended, in the order in which the driver must carry them out.
    pub fn step(
        &mut self,
        now: Instant,
        input: GatewayInput,
        policies: &mut dyn Policies,
        effects: &mut GatewayEffects,
    ) {
        let Self { state, seats } = self;
        let cx = &mut Cx { policies, effects, seats };
        if state.soundness.broken.is_some() {
            return state.answer_broken(input, cx);
        }
        state.time_passes(now, cx);
        match input {
            GatewayInput::Arrive(manifest) => state.arrive(manifest, cx),
            GatewayInput::Cancel { request, cause } => state.cancel(request, cause, cx),
            GatewayInput::Delivery { request, event } => state.delivery(request, event, cx),
            GatewayInput::Replica { replica, epoch, message } => state.hear(replica, epoch, message, cx),
            GatewayInput::ReplicaUp(facts) => state.replica_up(facts, cx),
            GatewayInput::ReplicaDrain { replica, epoch } => state.replica_drain(replica, epoch, cx),
            GatewayInput::ReplicaDown { replica, epoch } => state.replica_down(replica, epoch, cx),
            GatewayInput::Policies(generation) => state.switch(generation, cx),
            GatewayInput::QuotaShare(share) => state.take_share(share, cx),
            GatewayInput::Drain => state.draining = true,
            GatewayInput::Tick => {}
        }
        state.do_what_is_possible(cx);
        state.verify(cx);
    }

    /// When [`GatewayInput::Tick`] is due if nothing else comes. [`Instant::NEVER`] when nothing is waited for.
    pub fn next_wake(&self) -> Instant {
        self.state.next_wake()
    }

    /// The full walk over the invariants. Costs time in the size of the state, changes nothing.
    pub fn check(&self) -> Result<(), &'static str> {
        self.state.check()
    }
}

impl State {
    /// What is due before the input is looked at.
    fn time_passes(&mut self, now: Instant, cx: &mut Cx<'_>) {
        let (clamped, before) = (self.clock.clamped_count(), self.now);
        self.now = self.clock.observe(now);
        if self.clock.clamped_count() != clamped {
            cx.effects.push(GatewayEffect::Event(GatewayEvent::ClockClamped));
        }
        self.facts.refresh(cx.policies);
        self.ledger.roll(self.now);
        self.judge_caches(cx);
        if !self.share.is_held(self.now) {
            self.tell_share(cx);
        }
        self.run_timers(cx);
        self.keep_handoff_time(cx);
        let came = |due: Instant| before < due && due <= self.now;
        if came(self.starve_at) || came(self.keep_due()) {
            self.wants_dispatch = true;
        }
    }

    /// What the input made possible.
    fn do_what_is_possible(&mut self, cx: &mut Cx<'_>) {
        self.run_overload(cx);
        self.ask_deferred_early(cx);
        self.run_dispatch(cx);
        self.note_idle(cx);
        self.forget_idle_flows(cx);
        self.deliver_due_facts(cx);
        let starve_at = self.starve_due();
        self.starve_at = starve_at;
        let has_work = self.queue.requests + self.running_requests > 0;
        let watched = self.watch.look(self.now, has_work, self.replicas.ready() > 0);
        match watched {
            Some(Watched::Stuck) => cx.effects.push(GatewayEffect::Event(GatewayEvent::NoProgress)),
            Some(Watched::Resumed) => cx.effects.push(GatewayEffect::Event(GatewayEvent::ProgressResumed)),
            None => {}
        }
    }

    fn next_wake(&self) -> Instant {
        if self.soundness.broken.is_some() {
            return Instant::NEVER;
        }
        let flow_gone = self
            .flows
            .longest_idle()
            .map_or(Instant::NEVER, |(_, since)| since + penstock_base::limits::FLOW_GONE_AFTER);
        let times = [
            self.requests.next_due(),
            self.facts.next_due(),
            self.overload_due(),
            self.watch.next_due(),
            self.early_ask_due(),
            self.starve_at,
            self.handoffs.as_ref().map_or(Instant::NEVER, handoff::Handoffs::next_wake),
            Some(self.keep_due()).filter(|due| *due > self.now).unwrap_or(Instant::NEVER),
            flow_gone,
            self.share.due(self.now),
        ];
        times.into_iter().min().unwrap_or(Instant::NEVER).max(self.now)
    }

    /// Ends a request for a cause outside. One that is over, or was never here, is counted and stays as it is.
    fn cancel(&mut self, request: RequestId, cause: CancelCause, cx: &mut Cx<'_>) {
        let live = self.requests.table.find(&request);
        let live = live.filter(|slot| !self.requests.table[*slot].compute.is_terminal());
        let Some(slot) = live else { return self.stale(cx) };
        self.end_early(slot, End::unused(Outcome::Cancelled(cause)), cx);
    }

    /// Moves the delivery axis, of a live request or of one that has ended and is still being delivered.
    fn delivery(&mut self, request: RequestId, event: DeliveryEvent, cx: &mut Cx<'_>) {
        if let Some(slot) = self.requests.table.find(&request) {
            let live = &mut self.requests.table[slot];
            match live.delivery.after(event) {
                Some(next) => live.delivery = next,
                None => self.stale(cx),
            }
            return;
        }
        let Some(slot) = self.requests.finished.find(&request) else { return self.stale(cx) };
        match self.requests.finished[slot].after(event) {
            Some(next) if next.is_terminal() => {
                self.requests.finished.remove(slot);
            }
            Some(next) => self.requests.finished[slot] = next,
            None => self.stale(cx),
        }
    }

    /// Another policy set is in the seats from this step on; the replicas hear of it.
    fn switch(&mut self, generation: Generation, cx: &mut Cx<'_>) {
        self.generation = generation;
        self.digest.add(&[7, generation.0]);
        for (_, replica) in self.replicas.iter() {
            cx.effects.push(GatewayEffect::Send {
                replica: replica.facts.replica,
                epoch: replica.facts.epoch,
                message: ToReplica::Policies(generation),
            });
        }
        self.wants_dispatch = true;
    }
}
