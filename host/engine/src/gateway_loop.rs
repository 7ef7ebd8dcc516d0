//! The gateway's loop: everything that happens at the gateway, one thing at a time, on one thread that waits for nobody.

mod resume;

use std::collections::HashMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use penstock_base::{CancelCause, Instant, Manifest, ReplicaEpoch, ReplicaId, RequestId};
use penstock_sched::gateway::{
    DeliveryEvent, Gateway, GatewayConfig, GatewayEffect, GatewayEffects, GatewayEvent, GatewayInput, ReplicaFacts,
};
use penstock_sched::handoff::{End, Order};
use penstock_sched::message::{FromReplica, ToReplica};
use penstock_sched::quota::QuotaShare;

use crate::cache_events::CacheNews;
use crate::context::{Placement, RequestContext};
use crate::limits::{
    CANCELS_PER_REQUEST, CONTROL_PER_REPLICA, CONTROL_WAKES, DELIVERIES_PER_REQUEST, NEWS_WAKES_MAX, TURNS_PER_REPLICA,
};
use crate::mailbox::{Lane, PushError};
use crate::outputs::{self, OutputWake};
use crate::panics;
use crate::policies::machine::MachineSeats;
use crate::policies::order::PolicyOrder;
use crate::policies::seats::{Machine, PreparedPolicies};
use crate::replica_wake::{self, FreezeCause, ReplicaWake};
use crate::status::ReplicaState;
use crate::story::{Happened, Teller};
use crate::stream::StreamWriter;
use crate::wiring::Wiring;

/// New requests: each has a permit.
pub(crate) const REQUESTS: Lane = Lane(0);
/// Cancels: a client's, a slow client's and an operator's for each request at most, while it is in flight or its end is under way.
pub(crate) const CANCELS: Lane = Lane(1);
/// News of the delivery axis; may be left out.
pub(crate) const DELIVERY: Lane = Lane(2);
/// What replicas say, a turn an entry. A replica waits for room here.
pub(crate) const REPLICAS: Lane = Lane(3);
/// Replicas that come and go, drain, shutdown.
pub(crate) const CONTROL: Lane = Lane(4);
/// Orders about policies: of one activation, and what is left of one that was given up.
pub(crate) const POLICIES: Lane = Lane(5);

/// What followers heard of replicas' caches. A follower waits for room here.
pub(crate) const CACHES: Lane = Lane(6);

/// Bounds of the lanes.
pub(crate) fn lanes(requests_max: usize, replicas: usize) -> [usize; 7] {
    [
        requests_max,
        CANCELS_PER_REQUEST * requests_max,
        DELIVERIES_PER_REQUEST * requests_max,
        TURNS_PER_REPLICA * replicas,
        CONTROL_WAKES + CONTROL_PER_REPLICA * replicas,
        8,
        NEWS_WAKES_MAX,
    ]
}

/// Why the gateway loop wakes up.
pub(crate) enum GatewayWake {
    /// A request was handed in.
    Submit { context: Arc<RequestContext>, writer: StreamWriter },
    /// A request is to end early.
    Cancel { request: RequestId, cause: CancelCause },
    /// Something happened on the delivery axis.
    Delivery { request: RequestId, event: DeliveryEvent },
    /// What a replica says, in order.
    Replica { replica: ReplicaId, epoch: ReplicaEpoch, messages: Vec<FromReplica> },
    /// A replica is ready.
    ReplicaUp(ReplicaFacts),
    /// A replica is gone with everything on it; `lost` when it will not come back in this process.
    ReplicaDown { replica: ReplicaId, epoch: ReplicaEpoch, lost: bool },
    /// A replica takes no new work; what it has goes on.
    ReplicaDrain { replica: ReplicaId, epoch: ReplicaEpoch },
    /// What this gateway may give out of the tenants' quotas.
    QuotaShare(QuotaShare),
    /// What a replica's KV events say.
    CacheNews(CacheNews),
    /// Something about policies.
    Policies(PolicyOrder),
    /// Nothing new enters.
    Drain,
    /// Everything ends.
    CancelAll(CancelCause),
    /// Everything ends, then the loops.
    Shutdown,
}

mod followed;

use followed::Followed;

/// See the module.
pub(crate) struct GatewayLoop {
    wiring: Arc<Wiring>,
    machine: Gateway,
    config: GatewayConfig,
    seats: MachineSeats,
    teller: Teller,
    effects: GatewayEffects,
    /// Messages of the step that is being carried out. Sent last: clients hear of a placement before the replica does, so that no text
    /// can overtake it.
    sends: Vec<(ReplicaId, ReplicaEpoch, ToReplica)>,
    /// Requests that arrived and have not ended.
    requests: HashMap<RequestId, Tracked>,
    /// Cancelled while a replica had them, and not confirmed by it yet: where, and when the cancel came. Bounded like what runs.
    settling: HashMap<RequestId, (ReplicaId, Instant)>,
    /// Set by shutdown: the loop ends when nothing runs any more, and then at the latest.
    stop_at: Option<Instant>,
    /// Replicas that will not come back.
    replicas_lost: usize,
    /// Replicas whose cache is heard of by KV events.
    followed: HashMap<ReplicaId, Followed>,
}

/// What the driver knows of a request beside the machine.
struct Tracked {
    context: Arc<RequestContext>,
    /// Where it is placed.
    placed: Option<ReplicaId>,
}

impl GatewayLoop {
    pub fn new(wiring: Arc<Wiring>, config: GatewayConfig, policies: Box<dyn PreparedPolicies>) -> Self {
        let seats = MachineSeats::new(Arc::clone(&wiring), Machine::Gateway, policies);
        let machine = Gateway::new(config.clone(), wiring.clock.now());
        let share_ppm = if config.gateways <= 1 { 1_000_000 } else { config.quota_floor_ppm };
        wiring.metrics.gateway_event(&GatewayEvent::QuotaShare { share_ppm: share_ppm.into() });
        Self {
            wiring,
            machine,
            config,
            seats,
            teller: Teller::default(),
            effects: GatewayEffects::new(),
            sends: Vec::new(),
            requests: HashMap::new(),
            settling: HashMap::new(),
            stop_at: None,
            replicas_lost: 0,
            followed: HashMap::new(),
        }
    }

    /// Runs until shutdown. A panic ends the engine: every request fails, and liveness says so.
    pub fn run(mut self) {
        if catch_unwind(AssertUnwindSafe(|| self.serve())).is_err() {
            let digest = catch_unwind(AssertUnwindSafe(|| self.machine.decision_digest())).ok();
            tracing::error!(
                at = panics::last_place(),
                ?digest,
                requests = self.requests.len(),
                "the gateway loop panicked: every request fails and the engine is dead"
            );
            self.wiring.die();
            self.seats.frozen();
        }
        self.wiring.gateway.close();
        let mut left = Vec::new();
        self.wiring.gateway.take_all(&mut left, None);
        // Dropping what is left ends the streams of requests that never got in. The other loops end once they have done what waits.
        for port in self.wiring.replicas.all() {
            let _ = port.try_push(replica_wake::CONTROL, ReplicaWake::Shutdown);
        }
        let _ = self.wiring.outputs.try_push(outputs::REQUESTS, OutputWake::Shutdown);
    }

    fn serve(&mut self) {
        let wiring = Arc::clone(&self.wiring);
        let mut wakes = Vec::new();
        // Which set decides is an input like any other, the first one too.
        self.step(GatewayInput::Policies(self.seats.generation()));
        loop {
            let wake_at = self.machine.next_wake().min(self.stop_at.unwrap_or(Instant::NEVER));
            wiring.gateway.take_all(&mut wakes, wiring.clock.wake_at(wake_at));
            if wakes.is_empty() && wiring.gateway.is_closed() {
                return;
            }
            for wake in wakes.drain(..) {
                self.handle(wake);
                if let Some(which) = self.machine.broken() {
                    return self.break_down(which);
                }
            }
            let locals = wiring.replicas.locals().len();
            if locals > 0 && self.replicas_lost == locals {
                tracing::error!("no executor is left: the engine is dead");
                wiring.board.dead.store(true, Ordering::Release);
                return;
            }
            if self.stop_at.is_some_and(|at| self.requests.is_empty() || at <= wiring.clock.now()) {
                return;
            }
            if self.machine.next_wake() <= wiring.clock.now() {
                self.step(GatewayInput::Tick);
                if let Some(which) = self.machine.broken() {
                    return self.break_down(which);
                }
            }
            let now = wiring.clock.now();
            self.seats.between_steps(now);
            wiring.policies.log.moments.take(&mut self.teller.waiting);
            wiring.board.beat_ns.store(now.0, Ordering::Relaxed);
        }
    }

    /// An invariant of the machine does not hold. Like a panic, but the machine could still end its requests itself: the output loop
    /// has their ends, and handles them before it ends.
    fn break_down(&mut self, which: &'static str) {
        tracing::error!(
            invariant = which,
            digest = self.machine.decision_digest(),
            "an invariant of the gateway does not hold: every request has failed and the engine is dead"
        );
        self.wiring.die();
        self.seats.frozen();
    }

    fn handle(&mut self, wake: GatewayWake) {
        match wake {
            GatewayWake::Submit { context, writer } => self.submit(context, writer),
            GatewayWake::Cancel { request, cause } => self.cancel(request, cause),
            GatewayWake::Delivery { request, event } => self.step(GatewayInput::Delivery { request, event }),
            GatewayWake::CacheNews(news) => self.take_cache_news(news),
            GatewayWake::Replica { replica, epoch, messages } => {
                for mut message in messages {
                    if let Some(followed) = self.followed.get(&replica)
                        && !followed.lets_pass(&mut message)
                    {
                        continue;
                    }
                    if let FromReplica::Refuse { request, .. } = message
                        && self.requests.get(&request).is_some_and(|tracked| tracked.placed == Some(replica))
                    {
                        self.unplaced(request);
                    }
                    let over = match message {
                        FromReplica::Refuse { request, .. } | FromReplica::Ended { request, .. } => Some(request),
                        _ => None,
                    };
                    self.step(GatewayInput::Replica { replica, epoch, message });
                    if let Some(request) = over {
                        self.settled(request, replica);
                    }
                }
            }
            GatewayWake::ReplicaUp(facts) => {
                self.followed.remove(&facts.replica);
                self.step(GatewayInput::ReplicaUp(facts));
                // It may have come up with the set before this one: word of the swap went to the epoch before.
                if let Some(mailbox) = self.wiring.replica(facts.replica) {
                    let order = PolicyOrder::Switch(self.seats.generation());
                    let _ = mailbox.push_latest(replica_wake::GENERATION, ReplicaWake::Policies(order));
                }
            }
            GatewayWake::Policies(PolicyOrder::Switch(generation)) => {
                if self.seats.commit(generation) {
                    tracing::info!(generation = generation.0, "another policy set is in force");
                    self.step(GatewayInput::Policies(generation));
                }
            }
            GatewayWake::Policies(order) => self.seats.obey(order, true),
            GatewayWake::ReplicaDown { replica, epoch, lost } => {
                self.replicas_lost += usize::from(lost);
                self.followed.remove(&replica);
                let placed_there =
                    |(&request, tracked): (&RequestId, &Tracked)| (tracked.placed == Some(replica)).then_some(request);
                for request in self.requests.iter().filter_map(placed_there).collect::<Vec<_>>() {
                    self.unplaced(request);
                    self.teller.tell(self.wiring.clock.now(), request, Happened::ReplicaLost { replica });
                }
                self.step(GatewayInput::ReplicaDown { replica, epoch });
                self.count_doubted();
                let its =
                    |(&request, &(at, _)): (&RequestId, &(ReplicaId, Instant))| (at == replica).then_some(request);
                for request in self.settling.iter().filter_map(its).collect::<Vec<_>>() {
                    self.settled(request, replica);
                }
            }
            GatewayWake::ReplicaDrain { replica, epoch } => {
                self.wiring.board.update_replica(replica, |status| {
                    if status.epoch == epoch && status.state == ReplicaState::Ready {
                        status.state = ReplicaState::Draining;
                    }
                });
                self.step(GatewayInput::ReplicaDrain { replica, epoch });
            }
            GatewayWake::QuotaShare(share) => self.step(GatewayInput::QuotaShare(share)),
            GatewayWake::Drain => self.step(GatewayInput::Drain),
            GatewayWake::CancelAll(cause) => self.cancel_all(cause),
            GatewayWake::Shutdown => {
                self.step(GatewayInput::Drain);
                self.cancel_all(CancelCause::Drain);
                let patience = self.wiring.limits.drain_flush;
                self.stop_at.get_or_insert(self.wiring.clock.now() + patience);
            }
        }
    }

    fn cancel_all(&mut self, cause: CancelCause) {
        let mut all: Vec<_> = self.requests.keys().copied().collect();
        all.sort_unstable();
        for request in all {
            self.cancel(request, cause);
        }
    }

    fn submit(&mut self, context: Arc<RequestContext>, writer: StreamWriter) {
        let manifest = Arc::clone(&context.manifest);
        let open = OutputWake::Open { context: Arc::clone(&context), writer };
        if self.wiring.outputs.try_push(outputs::REQUESTS, open).is_err() {
            // The loop has ended; the writer's drop has ended the stream.
            return;
        }
        self.requests.insert(manifest.request, Tracked { context, placed: None });
        self.wiring.board.waiting(1, i64::from(manifest.input_tokens));
        self.step(GatewayInput::Arrive(manifest));
    }

    fn cancel(&mut self, request: RequestId, cause: CancelCause) {
        let placed = self.requests.get(&request).and_then(|tracked| tracked.placed);
        let at = self.wiring.clock.now();
        self.step(GatewayInput::Cancel { request, cause });
        if let Some(replica) = placed
            && !self.requests.contains_key(&request)
            // One that was being handed off holds nothing that would have to be confirmed.
            && self.machine.request_state(request).is_some_and(|(compute, _)| compute.is_terminal())
        {
            self.settling.insert(request, (replica, at));
        }
    }

    /// A replica says, or shows by being gone, that it does nothing more for a request.
    fn settled(&mut self, request: RequestId, replica: ReplicaId) {
        if self.settling.get(&request).is_some_and(|(at, _)| *at == replica)
            && let Some((_, at)) = self.settling.remove(&request)
        {
            self.wiring.metrics.cancelled_after(self.wiring.clock.now().since(at));
        }
    }

    fn step(&mut self, input: GatewayInput) {
        let mut effects = std::mem::take(&mut self.effects);
        let now = self.wiring.clock.now();
        self.teller.of_input(now, &input);
        self.seats.begin_step(&self.machine, &self.config, now, &input);
        self.machine.step(now, input, self.seats.policies(), &mut effects);
        self.seats.end_step(&self.machine, &effects);
        for effect in effects.drain(..) {
            self.carry_out(effect);
        }
        self.effects = effects;
        let mut sends = std::mem::take(&mut self.sends);
        for (replica, epoch, message) in sends.drain(..) {
            self.send(replica, epoch, message);
        }
        self.sends = sends;
    }

    fn carry_out(&mut self, effect: GatewayEffect) {
        self.teller.of_effect(self.wiring.clock.now(), &effect);
        match effect {
            GatewayEffect::Send { replica, epoch, message } => self.sends.push((replica, epoch, message)),
            GatewayEffect::Queued { request, max_output_tokens, degraded } => {
                self.unplaced(request);
                self.tell(OutputWake::Queued { request, max_output_tokens, degraded });
            }
            GatewayEffect::Dispatched { request, replica, generation, .. } => {
                self.placed(request, replica);
                let at = self.wiring.clock.now();
                let news = OutputWake::Dispatched { request, generation, at };
                // News only; left out when text is far behind.
                let _ = self.wiring.outputs.try_push(outputs::NEWS, news);
            }
            GatewayEffect::Ended { request, outcome, usage, retry_after_ms } => {
                self.ended(request);
                self.tell(OutputWake::Ended { request, outcome, usage, retry_after_ms });
            }
            GatewayEffect::Event(event) => self.event(event),
        }
    }

    fn send(&mut self, replica: ReplicaId, epoch: ReplicaEpoch, mut message: ToReplica) {
        let wiring = Arc::clone(&self.wiring);
        let Some(mailbox) = wiring.replica(replica) else {
            return tracing::error!(replica = replica.0, "the gateway named a replica that does not exist");
        };
        let (lane, placement) = match &mut message {
            ToReplica::Dispatch(dispatch) => match self.requests.get(&dispatch.manifest.request) {
                Some(tracked) => (replica_wake::WORK, Some(resume::placement(&tracked.context, dispatch))),
                None => {
                    return tracing::error!(request = dispatch.manifest.request.0, "dispatch of an unknown request");
                }
            },
            ToReplica::Cancel { .. } | ToReplica::Policies(_) | ToReplica::PeerUp(_) => (replica_wake::WORK, None),
            ToReplica::Prefill(ordered) => (replica_wake::WORK, self.begun_by(&ordered.order, |begin| &begin.manifest)),
            ToReplica::Decode(ordered) => (replica_wake::WORK, self.begun_by(&ordered.order, |begin| &begin.manifest)),
            ToReplica::Stance(_) => (replica_wake::STANCE, None),
        };
        let wake = ReplicaWake::Gateway { gateway: self.config.epoch, epoch, message, placement };
        let pushed =
            if lane == replica_wake::STANCE { mailbox.push_latest(lane, wake) } else { mailbox.try_push(lane, wake) };
        if let Err(PushError::Full(_)) = pushed {
            // Credit bounds what can be under way to a replica, so that one of the two sides is wrong: the replica starts anew.
            tracing::error!(replica = replica.0, "a replica's mailbox is full");
            let _ = mailbox
                .push_latest(replica_wake::FREEZE, ReplicaWake::Freeze { epoch, cause: FreezeCause::MailboxFull });
        }
    }

    /// What a party of a hand-off must know of the request that it begins with.
    fn begun_by<B>(&self, order: &Order<B>, manifest: impl Fn(&B) -> &Arc<Manifest>) -> Option<Placement> {
        let Order::Begin(begin) = order else { return None };
        let tracked = self.requests.get(&manifest(begin).request)?;
        Some(Placement { context: Arc::clone(&tracked.context), resumed: Box::default() })
    }

    /// Tells the output loop; its lane has room for all of this.
    fn tell(&self, wake: OutputWake) {
        if let Err(PushError::Full(_)) = self.wiring.outputs.try_push(outputs::REQUESTS, wake) {
            // Unreachable while permits bound the requests; without this event a client would hang, so the engine ends instead.
            tracing::error!("the output loop's mailbox is full");
            self.wiring.die();
        }
    }

    fn event(&mut self, event: GatewayEvent) {
        self.wiring.metrics.gateway_event(&event);
        match event {
            GatewayEvent::NoProgress => {
                self.wiring.board.stuck.store(true, Ordering::Relaxed);
                tracing::error!(waiting = self.wiring.board.waiting_requests.load(Ordering::Relaxed), "nothing moves");
            }
            GatewayEvent::ProgressResumed => {
                self.wiring.board.stuck.store(false, Ordering::Relaxed);
                tracing::info!("progress resumed");
            }
            GatewayEvent::Stance { level } => tracing::info!(level, "overload stance changed"),
            GatewayEvent::Fallback { decision, call, reason } => self.seats.fell_back(decision, call, reason),
            GatewayEvent::Changed { decision, call, change } => self.seats.changed(decision, call, change),
            GatewayEvent::HandoffEnded { request, end, .. } => match end {
                // Nobody has it: it waits again, unless it ends.
                End::Anew(_) => self.unplaced(request),
                End::AtSender(peer, _) => {
                    if let Some(tracked) = self.requests.get_mut(&request).filter(|tracked| tracked.placed.is_some()) {
                        tracked.placed = Some(peer.replica);
                    }
                }
                End::HandedOff(_) | End::Failed(_) | End::Cancelled => {}
            },
            GatewayEvent::Migrated { request, .. } => self.unplaced(request),
            GatewayEvent::QuotaShare { share_ppm: 0 } => {
                tracing::warn!("no part of the tenants' quotas is this gateway's now: who has a quota is refused");
            }
            GatewayEvent::QuotaShare { share_ppm } => {
                tracing::info!(share_ppm, "another part of the tenants' quotas is this gateway's");
            }
            GatewayEvent::CacheGap { replica } => tracing::warn!(replica = replica.0, "gap in cache events"),
            GatewayEvent::CacheBelief { replica, believed: true } => {
                tracing::info!(replica = replica.0, "what a replica caches is known again and counts in routing");
                self.count_doubted();
            }
            GatewayEvent::CacheBelief { replica, believed: false } => {
                tracing::warn!(
                    replica = replica.0,
                    "what a replica caches is not known well enough: requests go to it by load alone"
                );
                self.count_doubted();
            }
            _ => {}
        }
    }

    fn placed(&mut self, request: RequestId, replica: ReplicaId) {
        if let Some(tracked) = self.requests.get_mut(&request)
            && tracked.placed.replace(replica).is_none()
        {
            self.wiring.board.waiting(-1, -i64::from(tracked.context.manifest.input_tokens));
            self.wiring.board.placed_requests.fetch_add(1, Ordering::Relaxed);
        }
    }

    fn unplaced(&mut self, request: RequestId) {
        if let Some(tracked) = self.requests.get_mut(&request)
            && tracked.placed.take().is_some()
        {
            self.wiring.board.waiting(1, i64::from(tracked.context.manifest.input_tokens));
            self.wiring.board.placed_requests.fetch_sub(1, Ordering::Relaxed);
        }
    }

    fn ended(&mut self, request: RequestId) {
        self.unplaced(request);
        if let Some(tracked) = self.requests.remove(&request) {
            self.wiring.board.waiting(-1, -i64::from(tracked.context.manifest.input_tokens));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policies::seats::PolicySource;
    use crate::rig;
    use penstock_base::{DispatchNumber, Outcome};
    use penstock_sched::message::{Credit, Report, Usage};

    const REPLICA: ReplicaId = ReplicaId(0);
    const EPOCH: ReplicaEpoch = ReplicaEpoch(1);

    fn hear(gateway: &mut GatewayLoop, message: FromReplica) {
        gateway.handle(GatewayWake::Replica { replica: REPLICA, epoch: EPOCH, messages: vec![message] });
    }

    /// A gateway with a replica that takes one request.
    fn gateway(wiring: &Arc<Wiring>) -> GatewayLoop {
        let policies = PolicySource::native().prepare(Machine::Gateway, None, 1_024).expect("native policies");
        let mut gateway = GatewayLoop::new(Arc::clone(wiring), GatewayConfig::default(), policies);
        gateway.handle(GatewayWake::ReplicaUp(ReplicaFacts {
            replica: REPLICA,
            epoch: EPOCH,
            role_code: 3,
            total_blocks: 64,
            slots: 4,
            round_tokens: 64,
            context_tokens_max: 1_024,
            speed_ppm: 1_000_000,
            zone_rank: 0,
            domain: 0,
        }));
        let report = Report {
            number: 1,
            as_of: wiring.clock.now(),
            covers: DispatchNumber(0),
            credit: Credit { requests: 1, prefill_tokens: 64, blocks: 64 },
            load: Default::default(),
            cache_sequence: 0,
        };
        hear(&mut gateway, FromReplica::Report(report));
        gateway
    }

    #[test]
    fn a_cancel_lasts_until_the_replica_has_confirmed_it() {
        let wiring = rig::wiring(8);
        let mut gateway = gateway(&wiring);
        let mut readers = Vec::new();
        let mut submit = |gateway: &mut GatewayLoop, number| {
            let (context, writer, reader) = rig::request(&wiring, number);
            readers.push(reader);
            let request = context.request();
            gateway.handle(GatewayWake::Submit { context, writer });
            request
        };
        let (placed, queued) = (submit(&mut gateway, 1), submit(&mut gateway, 2));
        assert_eq!(gateway.machine.running_requests(), 1, "the credit is for one");
        let cancels = || rig::metric(&wiring, "penstock_cancel_seconds_count");
        for request in [queued, placed] {
            gateway.handle(GatewayWake::Cancel { request, cause: CancelCause::Client });
            assert!(!gateway.requests.contains_key(&request), "its client is told at once");
        }
        assert_eq!(cancels(), 0.0, "one had no work, the other's is not known to be over");
        let outcome = Outcome::Cancelled(CancelCause::Client);
        hear(&mut gateway, FromReplica::Ended { request: placed, attempt: 1, outcome, usage: Usage::default() });
        assert_eq!(cancels(), 1.0);
        hear(&mut gateway, FromReplica::Ended { request: placed, attempt: 1, outcome, usage: Usage::default() });
        assert_eq!(cancels(), 1.0, "once");
    }

    #[test]
    fn a_replica_that_is_lost_has_stopped_working_on_what_was_cancelled() {
        let wiring = rig::wiring(8);
        let mut gateway = gateway(&wiring);
        let (context, writer, _reader) = rig::request(&wiring, 1);
        let request = context.request();
        gateway.handle(GatewayWake::Submit { context, writer });
        gateway.handle(GatewayWake::Cancel { request, cause: CancelCause::Drain });
        assert_eq!(rig::metric(&wiring, "penstock_cancel_seconds_count"), 0.0);
        gateway.handle(GatewayWake::ReplicaDown { replica: REPLICA, epoch: EPOCH, lost: false });
        assert_eq!(rig::metric(&wiring, "penstock_cancel_seconds_count"), 1.0);
        assert!(gateway.settling.is_empty());
    }
}
