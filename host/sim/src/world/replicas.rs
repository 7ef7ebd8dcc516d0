//! The replica's side: lives of replicas, their executors, the streams of their tokens.

use std::collections::{BTreeMap, VecDeque};

use penstock_base::plan::{BatchFailure, Plan};
use penstock_base::{BatchId, Duration, Instant, Outcome, ReplicaEpoch, ReplicaId, SeqId};
use penstock_sched::gateway::{DeliveryEvent, GatewayInput, ReplicaFacts};
use penstock_sched::message::{FromReplica, ToReplica};
use penstock_sched::replica::{FinishedTokens, Replica, ReplicaConfig, ReplicaEffect, ReplicaEvent, ReplicaInput};

use super::gateways::NO_OPINION;
use super::{Event, WAKE_AFTER, World};
use crate::agenda::{Latency, Node};
use crate::checkers::{PlacedBook, Placement};
use crate::driven::Driven;
use crate::executor::{Computed, Executor, ensure};
use crate::policies::PolicyKind;
use crate::report::Happened;
use crate::scenario::Faults;
use crate::workload::{LeaveWhen, index_of, key_of};

/// A replica place: the incarnation in service, and those that were taken for lost and go on.
#[derive(Default)]
pub(super) struct ReplicaNode {
    lives: BTreeMap<ReplicaEpoch, Life>,
    current: Option<ReplicaEpoch>,
    last_epoch: u64,
    /// Steps take this many times longer until then.
    pub(super) slow: (u64, Instant),
}

/// One incarnation.
pub(super) struct Life {
    driven: Driven<Replica>,
    executor: Executor,
    flights: VecDeque<Flight>,
    book: PlacedBook,
    /// When the device has done everything that it was given.
    free_at: Instant,
    /// The step that is being reported.
    reported: Option<Computed>,
    /// Keys of filled blocks told so far, for each sequence.
    keys_told: BTreeMap<SeqId, u32>,
    /// The executor's state was lost on purpose.
    executor_lost: bool,
}

struct Flight {
    plan: Plan,
    computed: Computed,
    took: Duration,
}

impl ReplicaNode {
    pub(super) fn current(&self) -> Option<&Life> {
        self.lives.get(&self.current?)
    }
}

impl Life {
    /// Nothing is here and nothing is under way.
    pub(super) fn is_quiet(&self) -> bool {
        self.flights.is_empty() && self.driven.machine().is_idle()
    }
}

impl World<'_> {
    /// A new incarnation: gateways are introduced and hear that it is ready.
    pub(super) fn start_replica(&mut self, replica: usize) -> Result<(), String> {
        let (now, node) = (self.agenda.now(), &mut self.replicas[replica]);
        if node.current.is_some() {
            return Ok(());
        }
        node.last_epoch += 1;
        let epoch = ReplicaEpoch(node.last_epoch);
        let config = ReplicaConfig { replica: ReplicaId(replica as u32), epoch, ..self.scenario.replica.clone() };
        let machine = Replica::new(config.clone(), now);
        let life = Life {
            executor: Executor::new(config.blocks, config.block_size_tokens, config.slots, config.step_tokens),
            driven: Driven::new(machine, config.clone(), now, (self.scenario, self.cast))?,
            flights: VecDeque::new(),
            book: PlacedBook::default(),
            free_at: now,
            reported: None,
            keys_told: BTreeMap::new(),
            executor_lost: false,
        };
        node.lives.insert(epoch, life);
        node.current = Some(epoch);
        let facts = ReplicaFacts {
            replica: config.replica,
            epoch,
            role_code: 3,
            total_blocks: config.blocks,
            slots: config.slots,
            round_tokens: config.step_tokens,
            context_tokens_max: config.context_tokens_max,
            speed_ppm: 1_000_000,
            zone_rank: 0,
            domain: 0,
        };
        for (place, gateway) in self.gateway_epochs() {
            self.news(replica, place, GatewayInput::ReplicaUp(facts));
            self.tell_replica(replica, epoch, ReplicaInput::GatewayUp(gateway))?;
        }
        Ok(())
    }

    /// Facts of the incarnation in service, for a gateway that comes up.
    pub(super) fn introduce(&mut self, place: usize) {
        let gateway = self.gateways[place].epoch;
        for replica in 0..self.replicas.len() {
            let Some(epoch) = self.replicas[replica].current else { continue };
            let Some(life) = self.replicas[replica].lives.get(&epoch) else { continue };
            let config = life.driven.machine().config();
            let facts = ReplicaFacts {
                replica: config.replica,
                epoch,
                role_code: 3,
                total_blocks: config.blocks,
                slots: config.slots,
                round_tokens: config.step_tokens,
                context_tokens_max: config.context_tokens_max,
                speed_ppm: 1_000_000,
                zone_rank: 0,
                domain: 0,
            };
            self.news(replica, place, GatewayInput::ReplicaUp(facts));
            let at = self.arrival(Node::Gateway(place), Node::Replica(replica));
            self.agenda.put(at, Event::Tell { replica, epoch, input: ReplicaInput::GatewayUp(gateway) });
        }
    }

    /// Tells one gateway something about a replica, in order with what the replica itself says.
    pub(super) fn news(&mut self, replica: usize, place: usize, input: GatewayInput) {
        let at = self.arrival(Node::Replica(replica), Node::Gateway(place));
        let gateway = self.gateways[place].epoch;
        self.agenda.put(at, Event::News { gateway, input });
    }

    /// Takes the incarnation out of service. As a zombie it goes on, and nobody listens.
    pub(super) fn lose_replica(&mut self, replica: usize, zombie: bool) -> Result<Option<ReplicaEpoch>, String> {
        let Some(epoch) = self.replicas[replica].current.take() else { return Ok(None) };
        self.figures.epochs_lost += 1;
        if !zombie {
            self.end_life(replica, epoch)?;
        }
        Ok(Some(epoch))
    }

    /// An incarnation stops where it is.
    pub(super) fn end_life(&mut self, replica: usize, epoch: ReplicaEpoch) -> Result<(), String> {
        let Some(mut life) = self.replicas[replica].lives.remove(&epoch) else { return Ok(()) };
        self.count_life(&life);
        self.keep(life.driven.digest());
        self.journals.extend(life.driven.end_log(true)?);
        Ok(())
    }

    fn count_life(&mut self, life: &Life) {
        let counts = life.executor.counts();
        self.figures.copies += counts.copies;
        self.figures.chained_rows += counts.chained_rows;
        self.figures.stale += life.driven.machine().stale_count();
    }

    /// At rest everything is back.
    pub(super) fn close_replica(&mut self, replica: usize) -> Result<(), String> {
        let current = self.replicas[replica].current;
        let epochs: Vec<_> = self.replicas[replica].lives.keys().copied().collect();
        for epoch in epochs {
            if Some(epoch) != current {
                self.end_life(replica, epoch)?;
                continue;
            }
            let Some(mut life) = self.replicas[replica].lives.remove(&epoch) else { continue };
            let machine = life.driven.machine();
            let at = |what: String| format!("replica {replica} at rest: {what}");
            machine.check().map_err(|what| at(what.to_owned()))?;
            let counts = machine.kv().counts();
            let held = (counts.active, counts.reclaimable, counts.in_transfer());
            ensure(held == (0, 0, 0), || at(format!("{counts:?}")))?;
            ensure(counts.free + counts.cached == machine.config().blocks, || at(format!("{counts:?}")))?;
            let promised = machine.kv().reservations().total();
            ensure(promised == 0, || at(format!("{promised} blocks are promised")))?;
            ensure(life.book.is_empty(), || at(format!("{} requests were not ended", life.book.len())))?;
            self.count_life(&life);
            self.keep(life.driven.digest());
            self.journals.extend(life.driven.end_log(false)?);
        }
        Ok(())
    }

    /// Incarnations that run, zombies as well.
    pub(super) fn lives_of(&self, replica: usize) -> Vec<ReplicaEpoch> {
        self.replicas[replica].lives.keys().copied().collect()
    }

    /// The incarnation in service.
    pub(super) fn current_life(&self, replica: usize) -> Option<ReplicaEpoch> {
        self.replicas[replica].current
    }

    pub(super) fn replica_tick(&mut self, replica: usize, epoch: ReplicaEpoch) -> Result<(), String> {
        let now = self.agenda.now();
        let life = self.replicas[replica].lives.get_mut(&epoch);
        let Some(life) = life.filter(|life| life.driven.tick_at == now) else { return Ok(()) };
        life.driven.tick_at = Instant::NEVER;
        self.tell_replica(replica, epoch, ReplicaInput::Tick)
    }

    /// For an incarnation that is gone it is lost.
    pub(super) fn tell_replica(
        &mut self,
        replica: usize,
        epoch: ReplicaEpoch,
        input: ReplicaInput,
    ) -> Result<(), String> {
        let now = self.clock();
        let context = |what: String| format!("replica {replica} epoch {epoch}: {what}");
        let Some(life) = self.replicas[replica].lives.get_mut(&epoch) else { return Ok(()) };
        if let ReplicaInput::Gateway { message: ToReplica::Dispatch(dispatch), .. } = &input {
            life.book.dispatched(dispatch).map_err(context)?;
        }
        let gone = if let ReplicaInput::GatewayDown(gateway) = &input { Some(gateway.0) } else { None };
        let effects = life.driven.step(now, input).map_err(context)?;
        self.steps += 1;
        for effect in &effects {
            self.carry_out_replica(replica, epoch, effect).map_err(context)?;
        }
        let now = self.agenda.now();
        let Some(life) = self.replicas[replica].lives.get_mut(&epoch) else { return Ok(()) };
        life.driven.recycle(effects);
        life.reported = None;
        if let Some(gateway) = gone {
            life.book.all_ended_of(gateway).map_err(context)?;
            life.book.gateway_gone(gateway);
        }
        let config = life.driven.machine().config();
        let most = config.slots as usize + config.ready_window;
        let here = life.book.len();
        ensure(here <= most, || context(format!("{here} requests where {most} may be")))?;
        let wake = life.driven.machine().next_wake();
        if wake < life.driven.tick_at && wake != Instant::NEVER {
            life.driven.tick_at = wake.max(now + WAKE_AFTER);
            let at = life.driven.tick_at;
            self.agenda.put(at, Event::ReplicaTick { replica, epoch });
        }
        let broken = life.driven.machine().broken();
        match broken {
            Some(why) if !life.executor_lost => Err(context(format!("broken: {why}"))),
            Some(_) => self.replace(replica, epoch),
            None => Ok(()),
        }
    }

    /// The oldest step in flight is computed.
    pub(super) fn computed(&mut self, replica: usize, epoch: ReplicaEpoch, batch: BatchId) -> Result<(), String> {
        let faults = self.scenario.faults;
        let Some(life) = self.replicas[replica].lives.get_mut(&epoch) else { return Ok(()) };
        let Some(flight) = life.flights.pop_front() else { return Err(format!("batch {batch} was not in flight")) };
        ensure(flight.computed.batch == batch, || format!("batch {batch} is done before {}", flight.computed.batch))?;
        self.figures.batches += 1;
        let Flight { plan, computed, took } = flight;
        let rng = &mut self.device;
        let (rows_fail, batch_fails, executor_fails) = (rng.one_in(30), rng.one_in(60), rng.one_in(150));
        let victim = rng.below(plan.rows.len() as u64) as u32;
        let mut done = computed.done.clone();
        let input = if faults.has(Faults::LOST_EXECUTORS) && executor_fails {
            life.executor_lost = true;
            let failure = BatchFailure::Executor;
            ReplicaInput::BatchFailed { batch, failure, rows: Vec::new(), done: Vec::new() }
        } else if faults.has(Faults::FAILED_BATCHES) && batch_fails {
            life.executor.forget(batch);
            ReplicaInput::BatchFailed { batch, failure: BatchFailure::Batch, rows: Vec::new(), done: Vec::new() }
        } else if faults.has(Faults::FAILED_ROWS) && rows_fail {
            done[victim as usize].accepted = 0;
            ReplicaInput::BatchFailed { batch, failure: BatchFailure::Rows, rows: vec![victim], done }
        } else {
            ReplicaInput::BatchDone { batch, rows: done, took }
        };
        let is_done = matches!(input, ReplicaInput::BatchDone { .. });
        life.executor.finish(batch);
        life.reported = Some(computed);
        if is_done && self.scenario.trace {
            self.trace_prefill(&plan);
        }
        if let Some(life) = self.replicas[replica].lives.get_mut(&epoch) {
            life.driven.machine_mut().recycle(plan);
        }
        self.tell_replica(replica, epoch, input)
    }

    /// Prompt tokens that a step computed for the first time.
    fn trace_prefill(&mut self, plan: &Plan) {
        for row in &plan.rows {
            let index = index_of(row.seq.request);
            let end = (row.start + row.tokens).min(self.planned[index].manifest.input_tokens);
            let begun = row.start.max(self.prefilled[index]);
            if begun < end {
                self.prefilled[index] = end;
                self.trace(Happened::Prefilled(index, end - begun));
            }
        }
    }

    fn carry_out_replica(&mut self, replica: usize, epoch: ReplicaEpoch, effect: &ReplicaEffect) -> Result<(), String> {
        match effect {
            ReplicaEffect::Submit(plan) => self.submit(replica, epoch, plan),
            ReplicaEffect::Send { gateway, message } => {
                let attempt = attempt_of(message).map_or(0, |(_, attempt)| attempt);
                let from = Placement { replica, epoch, attempt };
                let Some(life) = self.replicas[replica].lives.get_mut(&epoch) else { return Ok(()) };
                life.book.message(gateway.0, message, &self.planned)?;
                if let FromReplica::Ended { request, outcome, usage, .. } = message {
                    self.clients.ended_at_replica(*request, from, (*outcome, *usage));
                }
                let Some(place) = self.gateway_at(*gateway) else { return Ok(()) };
                let at = self.arrival(Node::Replica(replica), Node::Gateway(place));
                let message = message.clone();
                self.agenda.put(at, Event::ToGateway { gateway: *gateway, replica, epoch, message });
                Ok(())
            }
            ReplicaEffect::Deliver { seq, batch, row, tokens, first } => {
                self.deliver(replica, epoch, (*seq, *first, *tokens), (*batch, *row))
            }
            ReplicaEffect::SequenceEnded { seq, outcome, tokens } => {
                self.sequence_ended(replica, epoch, *seq, (*outcome, *tokens))
            }
            ReplicaEffect::Handoff(_) => Err("a hand-off where none is configured".to_owned()),
            ReplicaEffect::Event(event) => self.note_replica(*event),
            ReplicaEffect::Cached(_) => Ok(()),
        }
    }

    fn submit(&mut self, replica: usize, epoch: ReplicaEpoch, plan: &Plan) -> Result<(), String> {
        let now = self.agenda.now();
        let (factor, until) = self.replicas[replica].slow;
        let slow = if now < until { factor } else { 1 };
        let took = self.scenario.cost.time(plan, slow, &mut self.device);
        let Some(life) = self.replicas[replica].lives.get_mut(&epoch) else { return Ok(()) };
        let Life { executor, book, flights, free_at, driven, .. } = life;
        let computed = executor.submit(plan, &self.planned, |seq| book.accepted(seq))?;
        flights.push_back(Flight { plan: plan.clone(), computed, took });
        let most = driven.machine().config().inflight_max;
        ensure(flights.len() <= most, || format!("{} steps in flight where {most} may be", flights.len()))?;
        *free_at = now.max(*free_at) + took;
        self.agenda.put(*free_at, Event::Computed { replica, epoch, batch: plan.batch });
        Ok(())
    }

    fn deliver(
        &mut self,
        replica: usize,
        epoch: ReplicaEpoch,
        (seq, first, tokens): (SeqId, u32, u16),
        row: (BatchId, u32),
    ) -> Result<(), String> {
        let now = self.agenda.now();
        let index = index_of(seq.request);
        let Some(life) = self.replicas[replica].lives.get_mut(&epoch) else { return Ok(()) };
        let planned = &self.planned[index];
        let answer = &planned.answers[usize::from(seq.index)];
        life.book.delivered((seq, first, tokens), row, life.reported.as_ref(), answer)?;
        let attempt = life.book.attempt(seq.request).unwrap_or_default();
        self.figures.tokens += 1;
        if self.scenario.trace {
            self.trace.push((now, Happened::Decoded(index)));
        }
        // What the driver finds in the text: the end of a stop string, and the key of a block that is full now.
        let size = self.scenario.replica.block_size_tokens;
        let mut found = Vec::new();
        if answer.stop_string_at == Some(first) {
            let end = FinishedTokens { seq, tokens: first, outcome: Outcome::Stop };
            found.push(ReplicaInput::Finish(end));
        }
        let told = life.keys_told.entry(seq).or_insert(planned.manifest.keys.len() as u32);
        let filled = (planned.manifest.input_tokens + first + 1) / size;
        while *told < filled {
            let last = ((*told + 1) * size - 1) as usize;
            found.push(ReplicaInput::BlockKeys { seq, first: *told, keys: vec![key_of(answer.content[last])] });
            *told += 1;
        }
        let late = self.scenario.faults.has(Faults::LATE_TEXT);
        let jitter = if late { Duration::from_ms(200) } else { Duration::from_us(500) };
        for input in found {
            let latency = Latency { base: Duration::from_us(100), jitter };
            let at = self.links.arrival(now, (Node::Text(replica), Node::Replica(replica)), latency);
            self.agenda.put(at, Event::Tell { replica, epoch, input });
        }
        self.stream(seq, Placement { replica, epoch, attempt }, first)
    }

    /// The token goes to the client, if it is still that placement's.
    fn stream(&mut self, seq: SeqId, from: Placement, first: u32) -> Result<(), String> {
        let now = self.agenda.now();
        let index = index_of(seq.request);
        let is_first = self.clients.clients[index].first_token_at == Instant::NEVER;
        if !self.clients.token(seq, from, first, now)? {
            self.figures.late_tokens += 1;
            return Ok(());
        }
        if is_first {
            self.agenda.put(now, Event::Delivery(seq.request, DeliveryEvent::Streaming));
        }
        let has: u32 = self.clients.clients[index].tokens.iter().sum();
        if let Some(leave) = self.planned[index].leaves
            && leave.when == LeaveWhen::AfterTokens(has)
        {
            self.agenda.put(now + Duration::from_us(200), Event::Leave(index, leave.cause));
        }
        Ok(())
    }

    fn sequence_ended(
        &mut self,
        replica: usize,
        epoch: ReplicaEpoch,
        seq: SeqId,
        end: (Outcome, u32),
    ) -> Result<(), String> {
        let Some(life) = self.replicas[replica].lives.get_mut(&epoch) else { return Ok(()) };
        let answer = &self.planned[index_of(seq.request)].answers[usize::from(seq.index)];
        let had = life.book.accepted(seq).unwrap_or_default();
        life.book.sequence_ended(seq, end, answer)?;
        life.keys_told.remove(&seq);
        self.figures.cut_outputs += u64::from(end.0.is_success() && end.1 < had);
        let attempt = life.book.attempt(seq.request).unwrap_or_default();
        self.clients.sequence_ended(seq, Placement { replica, epoch, attempt }, end);
        Ok(())
    }

    fn note_replica(&mut self, event: ReplicaEvent) -> Result<(), String> {
        match event {
            ReplicaEvent::PrefixLookup { hit_tokens, .. } => self.figures.hit_tokens += u64::from(hit_tokens),
            ReplicaEvent::Evicted { blocks } => self.figures.evicted_blocks += u64::from(blocks),
            ReplicaEvent::Preempted { .. } => self.figures.preempted += 1,
            ReplicaEvent::Fallback { decision, reason, .. } => {
                let whims = self.scenario.policies == PolicyKind::Whims;
                return ensure(reason == NO_OPINION || whims, || {
                    format!("a policy failed or its answer was refused: decision {decision}, reason {reason}")
                });
            }
            _ => {}
        }
        Ok(())
    }
}

/// Which attempt of which request a message is about.
fn attempt_of(message: &FromReplica) -> Option<(penstock_base::RequestId, u16)> {
    match message {
        FromReplica::Started { request, attempt, .. }
        | FromReplica::Preempted { request, attempt, .. }
        | FromReplica::Resumed { request, attempt, .. }
        | FromReplica::Refuse { request, attempt, .. }
        | FromReplica::Ended { request, attempt, .. } => Some((*request, *attempt)),
        FromReplica::Progress(progress) => Some((progress.request, progress.attempt)),
        FromReplica::Report(_) | FromReplica::Cache { .. } | FromReplica::Party { .. } => None,
    }
}
