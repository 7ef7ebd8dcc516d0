//! Gateways, replicas, links and clients of one scenario, on one agenda.
//!
//! [`gateways`] and [`replicas`] carry out what the machines say, [`trouble`] is what goes wrong; of a cluster, [`sessions`] and [`movers`]
//! are what lies between them. Every rule that is broken ends the run as a [`Violation`].

mod gateways;
mod movers;
mod replicas;
mod sessions;
mod trouble;

use std::any::Any;
use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};

use penstock_base::{BatchId, CancelCause, Duration, GatewayEpoch, Instant, ReplicaEpoch, RequestId};
use penstock_journal::MachineId;
use penstock_sched::gateway::{DeliveryEvent, Gateway, GatewayInput};
use penstock_sched::message::{FromReplica, ToReplica};
use penstock_sched::replica::ReplicaInput;

use crate::agenda::{Agenda, Latency, Links, Node};
use crate::checkers::ClientBook;
use crate::driven::Driven;
use crate::executor::ensure;
use crate::network::{DataLink, Network};
use crate::owners::OwnerBook;
use crate::report::{Figures, Happened, Report, RequestReport, Violation};
use crate::rng::{Rng, mix};
use crate::scenario::{Faults, Scenario};
use crate::seats::{Cast, Natives};
use crate::workload::{self, LeaveWhen, Planned};
use movers::{Movers, Word, Writing};
use replicas::ReplicaNode;
use sessions::{Session, Streamed};
use trouble::Trouble;

/// Everything must have ended this long after the last arrival.
const PATIENCE: Duration = Duration::from_s(600);
/// And within so many steps of all machines: time that stands still is found too.
const STEPS_MAX: u64 = 3_000_000;
/// Time until a machine that wants to be woken at once is: no time passes between two inputs otherwise.
const WAKE_AFTER: Duration = Duration::from_us(1);

/// What happens next.
enum Event {
    /// A request arrives.
    Arrive(usize),
    /// Its client leaves.
    Leave(usize, CancelCause),
    /// Something on the delivery axis.
    Delivery(RequestId, DeliveryEvent),
    /// A message for one incarnation of a replica.
    ToReplica { replica: usize, epoch: ReplicaEpoch, gateway: GatewayEpoch, session: u64, message: ToReplica },
    /// A message for one incarnation of a gateway.
    ToGateway { gateway: GatewayEpoch, replica: usize, epoch: ReplicaEpoch, session: u64, message: FromReplica },
    /// What a worker streams past the gateway's machine.
    ToEdge { gateway: GatewayEpoch, session: u64, streamed: Streamed },
    /// News about a replica, for one incarnation of a gateway.
    News { gateway: GatewayEpoch, replica: usize, session: u64, input: GatewayInput },
    /// A replica's word for another one, at the gateway.
    Relay { gateway: GatewayEpoch, session: u64, from: usize, word: Box<Word> },
    /// The same at the other one.
    Word { gateway: usize, replica: usize, session: u64, word: Box<Word> },
    /// A chunk of KV that waited for its port begins to move, to arrive then.
    Begin { writing: Box<Writing>, at: Instant },
    /// A chunk of KV arrives.
    Land(Box<Writing>),
    /// A gateway dials a worker.
    Connect { gateway: usize, replica: usize },
    /// The lease of one end of a session is over.
    SessionOver { key: (usize, usize), number: u64, at_gateway: bool },
    /// News about gateways, and what was found in text, for one incarnation of a replica.
    Tell { replica: usize, epoch: ReplicaEpoch, input: ReplicaInput },
    /// A step is computed.
    Computed { replica: usize, epoch: ReplicaEpoch, batch: BatchId },
    /// A gateway wanted to be woken.
    GatewayTick { gateway: usize, epoch: GatewayEpoch },
    /// A replica wanted to be woken.
    ReplicaTick { replica: usize, epoch: ReplicaEpoch },
    /// Something goes wrong.
    Trouble(Trouble),
}

/// A gateway place: its incarnation, if one runs.
struct GatewayNode {
    epoch: GatewayEpoch,
    machine: Option<Driven<Gateway>>,
}

struct World<'a> {
    scenario: &'a Scenario,
    cast: &'a dyn Cast,
    planned: Vec<Planned>,
    agenda: Agenda<Event>,
    links: Links,
    gateways: Vec<GatewayNode>,
    replicas: Vec<ReplicaNode>,
    clients: ClientBook,
    owners: OwnerBook,
    /// Of a cluster: what lies between its nodes.
    network: Network,
    sessions: BTreeMap<(usize, usize), Session>,
    sessions_begun: u64,
    movers: Movers,
    link_rng: Rng,
    /// Nothing goes wrong any more from here on.
    faulty_until: Instant,
    /// When the last request ended so far.
    last_end: Instant,
    /// Requests as they arrived: their id names the incarnation of the gateway.
    arrived: BTreeMap<RequestId, usize>,
    /// Requests still to arrive.
    to_come: usize,
    figures: Figures,
    /// For device times and failing steps.
    device: Rng,
    clock: Rng,
    journals: Vec<(MachineId, Vec<u8>)>,
    /// What happened to whom, when the scenario wants to know.
    trace: Vec<(Instant, Happened)>,
    /// Prompt positions of each request that were computed, recomputed ones once.
    prefilled: Vec<u32>,
    /// Over machines that are gone.
    digest: u64,
    steps: u64,
    closing: bool,
}

/// Runs a scenario to its end, on its own traffic and the native defaults.
///
/// # Errors
/// The first rule that does not hold; a panic of a machine is one.
pub fn run(scenario: &Scenario) -> Result<Report, Violation> {
    run_with(scenario, workload::requests(scenario), &Natives)
}

/// The same with these requests and these policies.
///
/// # Errors
/// As [`run`].
pub fn run_with(scenario: &Scenario, planned: Vec<Planned>, cast: &dyn Cast) -> Result<Report, Violation> {
    let mut at = Instant::ZERO;
    let result = catch_unwind(AssertUnwindSafe(|| {
        let mut world = World::new(scenario, planned, cast);
        let result = world.run();
        at = world.agenda.now();
        result.map(|()| world.report())
    }));
    let violation = |what| Violation { at, what };
    match result {
        Ok(Ok(report)) => report.map_err(violation),
        Ok(Err(what)) => Err(violation(what)),
        Err(panic) => Err(violation(format!("panic: {}", text_of(panic.as_ref())))),
    }
}

fn text_of(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<String>().map(String::as_str).or_else(|| panic.downcast_ref::<&str>().copied());
    text.unwrap_or("no message").to_owned()
}

/// The scenario's links between replicas; any where there is no cluster.
fn data_link(scenario: &Scenario) -> DataLink {
    let none = DataLink { bytes_per_sec: 1, latency: Latency { base: Duration::ZERO, jitter: Duration::ZERO } };
    scenario.cluster.as_ref().map_or(none, |cluster| cluster.data)
}

impl<'a> World<'a> {
    fn new(scenario: &'a Scenario, planned: Vec<Planned>, cast: &'a dyn Cast) -> Self {
        let seed = scenario.seed;
        Self {
            clients: ClientBook::new(&planned),
            owners: OwnerBook::default(),
            network: Network::new(data_link(scenario), Rng::stream(seed, 13)),
            sessions: BTreeMap::new(),
            sessions_begun: 0,
            movers: Movers::new(Rng::stream(seed, 14)),
            link_rng: Rng::stream(seed, 15),
            faulty_until: Instant::ZERO,
            last_end: Instant::ZERO,
            to_come: planned.len(),
            agenda: Agenda::default(),
            links: Links::new(Rng::stream(seed, 10)),
            gateways: Vec::new(),
            replicas: (0..scenario.replicas).map(|_| ReplicaNode::default()).collect(),
            arrived: BTreeMap::new(),
            figures: Figures::default(),
            device: Rng::stream(seed, 11),
            clock: Rng::stream(seed, 12),
            journals: Vec::new(),
            trace: Vec::new(),
            prefilled: vec![0; planned.len()],
            digest: 0,
            steps: 0,
            closing: false,
            planned,
            scenario,
            cast,
        }
    }

    fn run(&mut self) -> Result<(), String> {
        for place in 0..self.scenario.gateways {
            let epoch = GatewayEpoch(place as u16 + 1);
            self.gateways.push(GatewayNode { epoch, machine: None });
            self.start_gateway(place, epoch)?;
        }
        for replica in 0..self.scenario.replicas {
            self.start_replica(replica)?;
        }
        let mut last = Instant::ZERO;
        for index in 0..self.planned.len() {
            let planned = &self.planned[index];
            last = last.max(planned.at);
            self.agenda.put(planned.at, Event::Arrive(index));
            if let Some(leave) = planned.leaves
                && let LeaveWhen::At(at) = leave.when
            {
                self.agenda.put(at, Event::Leave(index, leave.cause));
            }
        }
        self.plan_trouble(last);
        while !self.is_done() {
            let Some(event) = self.agenda.take() else { return Err("nothing happens any more".to_owned()) };
            self.happen(event)?;
            let late = self.agenda.now() > last + PATIENCE || self.steps > STEPS_MAX;
            ensure(!late, || format!("no end after {} steps: {}", self.steps, self.open_requests()))?;
            self.must_be_at_rest()?;
        }
        self.close()
    }

    fn happen(&mut self, event: Event) -> Result<(), String> {
        match event {
            Event::Arrive(index) => self.arrive(index),
            Event::Leave(index, cause) => self.leave(index, cause),
            Event::Delivery(request, event) => {
                self.tell_gateway(request.gateway_epoch(), GatewayInput::Delivery { request, event })
            }
            Event::ToReplica { replica, epoch, gateway, session, message } => {
                let place = self.gateways.iter().position(|node| node.epoch == gateway);
                let hears = |place| self.worker_hears((place, replica), session) == Some(epoch);
                if self.is_cluster() && !place.is_some_and(hears) {
                    return Ok(());
                }
                self.tell_replica(replica, epoch, ReplicaInput::Gateway { gateway, message })
            }
            Event::ToGateway { gateway, replica, epoch, session, message } => {
                self.hear_replica(gateway, (replica, epoch), session, message)
            }
            Event::ToEdge { gateway, session, streamed } => self.at_edge(gateway, session, streamed),
            Event::News { gateway, replica, session, input } => {
                let place = self.gateway_at(gateway);
                let hears = place.is_some_and(|place| self.gateway_hears((place, replica), session));
                if hears { self.tell_gateway(gateway, input) } else { Ok(()) }
            }
            Event::Relay { gateway, session, from, word } => {
                self.relay(gateway, session, from, *word);
                Ok(())
            }
            Event::Word { gateway, replica, session, word } => self.hear_word((gateway, replica), session, *word),
            Event::Begin { writing, at } => self.begin_write(*writing, at),
            Event::Land(writing) => self.land(*writing),
            Event::Connect { gateway, replica } => self.connect(gateway, replica),
            Event::SessionOver { key, number, at_gateway: true } => self.end_at_gateway(key, number),
            Event::SessionOver { key, number, at_gateway: false } => self.end_at_worker(key, number),
            Event::Tell { replica, epoch, input } => self.tell_replica(replica, epoch, input),
            Event::Computed { replica, epoch, batch } => self.computed(replica, epoch, batch),
            Event::GatewayTick { gateway, epoch } => self.gateway_tick(gateway, epoch),
            Event::ReplicaTick { replica, epoch } => self.replica_tick(replica, epoch),
            Event::Trouble(trouble) => self.cause(trouble),
        }
    }

    /// The driver's clock; now and then it has run backwards.
    fn clock(&mut self) -> Instant {
        let now = self.agenda.now();
        if !self.scenario.faults.has(Faults::CLOCK_STEPS) || !self.clock.one_in(40) {
            return now;
        }
        Instant(now.0.saturating_sub(self.clock.below(5_000_000)))
    }

    /// When something that is sent from one to another arrives.
    fn arrival(&mut self, from: Node, to: Node) -> Instant {
        self.links.arrival(self.agenda.now(), (from, to), self.scenario.latency)
    }

    fn open_requests(&self) -> String {
        let open = self
            .clients
            .clients
            .iter()
            .enumerate()
            .filter(|(_, client)| client.arrived && client.ended.is_none() && !client.orphaned);
        let open: Vec<_> = open.take(5).map(|(index, client)| (index, client.placement)).collect();
        let live: Vec<_> =
            self.gateways.iter().flat_map(|node| &node.machine).map(|m| m.machine().live_requests()).collect();
        format!("{} still to come, first open requests {open:?}, live at gateways {live:?}", self.to_come)
    }

    fn is_done(&self) -> bool {
        self.to_come == 0
            && self.clients.all_ended()
            && self.gateways.iter().flat_map(|node| &node.machine).all(|m| m.machine().live_requests() == 0)
            && self.replicas.iter().flat_map(ReplicaNode::current).all(|life| life.is_quiet())
    }

    /// In a cluster, everything is back within a known time after the last fault and the last end.
    fn must_be_at_rest(&self) -> Result<(), String> {
        let Some(cluster) = &self.scenario.cluster else { return Ok(()) };
        let since = self.faulty_until.max(self.last_end);
        if self.to_come > 0 || !self.clients.all_ended() || self.agenda.now() <= since + cluster.bound() {
            return Ok(());
        }
        let held = self.replicas.iter().enumerate().filter_map(|(place, node)| {
            let life = node.current().filter(|life| !life.is_quiet())?;
            Some(format!("replica {place}: {}", life.what_is_left()))
        });
        Err(format!(
            "not at rest {} ms after the last end and fault: {}",
            cluster.bound().0 / 1_000_000,
            held.collect::<Vec<_>>().join("; ")
        ))
    }

    /// Everything has ended: everything must be back.
    fn close(&mut self) -> Result<(), String> {
        self.closing = true;
        self.owners.all_ended()?;
        for place in 0..self.gateways.len() {
            let Some(mut driven) = self.gateways[place].machine.take() else { continue };
            let machine = driven.machine();
            machine.check().map_err(|what| format!("gateway {place} at rest: {what}"))?;
            let counters = machine.counters();
            ensure(counters.arrived == counters.ended, || format!("gateway {place} at rest: {counters:?}"))?;
            let left = (machine.queued_requests(), machine.deferred_requests(), machine.running_requests());
            ensure(left == (0, 0, 0), || format!("gateway {place} at rest: {left:?} queued, deferred, running"))?;
            self.figures.stale += counters.stale;
            self.figures.dispatched += counters.dispatched;
            self.figures.sent_back += counters.refused_dispatches;
            self.keep(driven.digest());
            self.journals.extend(driven.end_log(false)?);
        }
        for replica in 0..self.replicas.len() {
            self.close_replica(replica)?;
        }
        Ok(())
    }

    fn keep(&mut self, digest: u64) {
        self.digest = mix(self.digest, digest);
    }

    fn trace(&mut self, happened: Happened) {
        if self.scenario.trace {
            self.trace.push((self.agenda.now(), happened));
        }
    }

    fn report(self) -> Result<Report, String> {
        let mut figures = self.figures;
        let mut requests = Vec::new();
        for (planned, client) in self.planned.iter().zip(&self.clients.clients) {
            use penstock_base::Outcome;
            let outcome = client.ended.map(|(outcome, _, _)| outcome);
            match outcome {
                Some(Outcome::Stop | Outcome::Length) => figures.completed += 1,
                Some(Outcome::Refused(_)) => figures.refused += 1,
                Some(Outcome::Cancelled(_)) => figures.cancelled += 1,
                Some(Outcome::TimedOut(_)) => figures.timed_out += 1,
                Some(Outcome::Failed(_)) => figures.failed += 1,
                None => {}
            }
            figures.retried += u64::from(client.attempts.saturating_sub(1));
            let counted = |index: usize| {
                let tokens = client.ends[index].map_or(client.tokens[index], |(_, tokens)| tokens) as usize;
                planned.answers[index].tokens[..tokens].iter().fold(tokens as u64, |hash, token| mix(hash, *token))
            };
            let ended = client.ended.unwrap_or((Outcome::Length, Default::default(), Instant::NEVER));
            requests.push(RequestReport {
                tenant: planned.manifest.tenant,
                class: planned.manifest.class,
                arrived: planned.at,
                first_token_at: client.first_token_at,
                ended_at: ended.2,
                outcome,
                usage: ended.1,
                cap: client.cap,
                answers: (0..planned.answers.len()).map(counted).collect(),
            });
        }
        Ok(Report {
            digest: self.digest,
            steps: self.steps,
            ended_at: self.agenda.now(),
            requests,
            figures,
            journals: self.journals,
            trace: self.trace,
        })
    }
}
