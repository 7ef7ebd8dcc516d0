//! The replica's side: lives of replicas, their executors, the streams of their tokens.

use std::collections::{BTreeMap, VecDeque};

use penstock_base::plan::{BatchFailure, Plan};
use penstock_base::{BatchId, Duration, GatewayEpoch, Instant, Outcome, ReplicaEpoch, SeqId, TransferId};
use penstock_sched::gateway::{DeliveryEvent, GatewayInput};
use penstock_sched::handoff::Order;
use penstock_sched::message::{FromReplica, ToReplica};
use penstock_sched::replica::{FinishedTokens, Replica, ReplicaEffect, ReplicaEvent, ReplicaInput};

use super::gateways::NO_OPINION;
use super::sessions::Streamed;
use super::{Event, WAKE_AFTER, World};
use crate::agenda::{Latency, Node};
use crate::checkers::{PlacedBook, Placement};
use crate::cluster::Sabotage;
use crate::driven::Driven;
use crate::executor::{Computed, Executor, ensure};
use crate::owners::Who;
use crate::policies::PolicyKind;
use crate::report::Happened;
use crate::scenario::Faults;
use crate::workload::{LeaveWhen, index_of, key_of};

/// A replica place: the incarnation in service, and those that were taken for lost and go on.
#[derive(Default)]
pub(super) struct ReplicaNode {
    pub(super) lives: BTreeMap<ReplicaEpoch, Life>,
    current: Option<ReplicaEpoch>,
    last_epoch: u64,
    /// Steps take this many times longer until then.
    pub(super) slow: (u64, Instant),
}

/// One incarnation.
pub(super) struct Life {
    pub(super) driven: Driven<Replica>,
    pub(super) executor: Executor,
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
    /// Attempt and output cap of the hand-offs that it was told to take part in.
    orders: BTreeMap<TransferId, (u16, u32)>,
    /// First tokens that are kept back here; none inside is the stop token.
    pub(super) tails: BTreeMap<SeqId, Option<u64>>,
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

    /// What keeps it from being quiet.
    pub(super) fn what_is_left(&self) -> String {
        let machine = self.driven.machine();
        format!(
            "{} steps in flight, {} hand-offs, {:?}, {} requests in the book",
            self.flights.len(),
            machine.handoffs(),
            machine.kv().counts(),
            self.book.len()
        )
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
        let config = self.replica_config(replica, epoch);
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
            orders: BTreeMap::new(),
            tails: BTreeMap::new(),
        };
        let node = &mut self.replicas[replica];
        node.lives.insert(epoch, life);
        node.current = Some(epoch);
        let facts = self.facts_of(&config);
        for (place, gateway) in self.gateway_epochs() {
            if self.is_cluster() {
                self.connect(place, replica)?;
                continue;
            }
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
            let facts = self.facts_of(life.driven.machine().config());
            self.news(replica, place, GatewayInput::ReplicaUp(facts));
            let at = self.arrival(Node::Gateway(place), Node::Replica(replica));
            self.agenda.put(at, Event::Tell { replica, epoch, input: ReplicaInput::GatewayUp(gateway) });
        }
    }

    /// Tells one gateway something about a replica, in order with what the replica itself says.
    pub(super) fn news(&mut self, replica: usize, place: usize, input: GatewayInput) {
        let (gateway, current) = (self.gateways[place].epoch, self.current_life(replica));
        let from = (replica, current.unwrap_or_default());
        if let Some((at, session)) = self.when_at_gateway(from, gateway) {
            self.agenda.put(at, Event::News { gateway, replica, session, input });
        }
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
        self.movers.forget(replica, epoch);
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
            ensure(machine.handoffs() == 0, || at(format!("{} hand-offs are left", machine.handoffs())))?;
            let held = self.movers.held((replica, epoch));
            ensure(held == 0, || at(format!("its mover holds {held} transfers")))?;
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
        if let ReplicaInput::Gateway { message, .. } = &input {
            life.note_order(message).map_err(context)?;
        }
        if let ReplicaInput::GatewayUp(gateway) = &input {
            life.book.gateway_came(gateway.0);
        }
        let is_protocol = is_protocol(&input);
        let gone = if let ReplicaInput::GatewayDown(gateway) = &input { Some(gateway.0) } else { None };
        let effects = life.driven.step(now, input).map_err(context)?;
        self.steps += 1;
        for effect in &effects {
            self.carry_out_replica(replica, epoch, effect).map_err(context)?;
        }
        let now = self.agenda.now();
        let is_protocol = is_protocol || effects.iter().any(|effect| matches!(effect, ReplicaEffect::Handoff(_)));
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
            Some(why) if !life.executor_lost => return Err(context(format!("broken: {why}"))),
            Some(_) => self.replace(replica, epoch)?,
            None => {}
        }
        if is_protocol { self.protocol_step() } else { Ok(()) }
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
                if let FromReplica::Ended { request, outcome, usage, attempt } = message {
                    if !self.is_cluster() {
                        self.clients.ended_at_replica(*request, from, (*outcome, *usage));
                    }
                    self.owners.let_go(*request, *attempt, (replica, epoch));
                }
                let Some((mut at, session)) = self.when_at_gateway((replica, epoch), *gateway) else { return Ok(()) };
                if matches!(message, FromReplica::Cache { .. }) && self.scenario.faults.has(Faults::LOST_EVENTS) {
                    match self.link_rng.below(20) {
                        0 => return Ok(()),
                        1 => at = at + Duration(self.link_rng.below(3_000_000_000)),
                        _ => {}
                    }
                }
                let message = message.clone();
                self.agenda.put(at, Event::ToGateway { gateway: *gateway, replica, epoch, session, message });
                Ok(())
            }
            ReplicaEffect::Deliver { seq, batch, row, tokens, first } => {
                self.deliver(replica, epoch, (*seq, *first, *tokens), (*batch, *row))
            }
            ReplicaEffect::SequenceEnded { seq, outcome, tokens } => {
                self.sequence_ended(replica, epoch, *seq, (*outcome, *tokens))
            }
            ReplicaEffect::Handoff(effect) => self.carry_out_handoff((replica, epoch), effect),
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
        plan.rows.iter().for_each(|row| book.row_planned(row.seq.request));
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
        let Some(life) = self.replicas[replica].lives.get_mut(&epoch) else { return Ok(()) };
        let answer = &self.planned[index_of(seq.request)].answers[usize::from(seq.index)];
        life.book.delivered((seq, first, tokens), row, life.reported.as_ref(), answer)?;
        self.emit((replica, epoch), seq, first)
    }

    /// The first token of a request that was handed off, or was to be: it was kept back until somebody owned it.
    pub(super) fn release(&mut self, of: Who, seq: SeqId, tokens: u32) -> Result<(), String> {
        let Some(life) = self.replicas[of.0].lives.get_mut(&of.1) else { return Ok(()) };
        let tail = life.tails.remove(&seq).ok_or_else(|| format!("{seq} releases a token that nobody kept"))?;
        ensure(tail.is_some() == (tokens == 1) && tokens <= 1, || format!("{seq} releases {tokens} tokens, {tail:?}"))?;
        if tokens == 0 {
            return Ok(());
        }
        let answer = &self.planned[index_of(seq.request)].answers[usize::from(seq.index)];
        life.book.released(seq, tail, answer)?;
        self.emit(of, seq, 0)
    }

    /// One token counts: what is found in its text, and the way to its client.
    fn emit(&mut self, (replica, epoch): Who, seq: SeqId, first: u32) -> Result<(), String> {
        let now = self.agenda.now();
        let index = index_of(seq.request);
        let Some(life) = self.replicas[replica].lives.get_mut(&epoch) else { return Ok(()) };
        let planned = &self.planned[index];
        let answer = &planned.answers[usize::from(seq.index)];
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
        let from = Placement { replica, epoch, attempt };
        if !self.is_cluster() {
            return self.stream(seq, from, first);
        }
        if self.scenario.sabotage == Some(Sabotage::LoseToken) && first == 2 {
            return Ok(());
        }
        self.send_to_edge(seq.request.gateway_epoch(), Streamed::Token { seq, from, first });
        Ok(())
    }

    fn send_to_edge(&mut self, gateway: GatewayEpoch, streamed: Streamed) {
        let (Streamed::Token { from, .. } | Streamed::SequenceEnded { from, .. }) = streamed;
        if let Some((at, session)) = self.when_at_gateway((from.replica, from.epoch), gateway) {
            self.agenda.put(at, Event::ToEdge { gateway, session, streamed });
        }
    }

    /// The token goes to the client, if it is still that placement's.
    pub(super) fn stream(&mut self, seq: SeqId, from: Placement, first: u32) -> Result<(), String> {
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
        life.tails.remove(&seq);
        let attempt = life.book.attempt(seq.request).unwrap_or_default();
        let from = Placement { replica, epoch, attempt };
        if self.is_cluster() {
            self.owners.let_go(seq.request, attempt, (replica, epoch));
            self.send_to_edge(seq.request.gateway_epoch(), Streamed::SequenceEnded { seq, from, end });
        } else {
            self.clients.sequence_ended(seq, from, end);
        }
        Ok(())
    }

    // --- What hand-offs need of a life -------------------------------------------------------------------------------------------

    pub(super) fn life(&self, of: Who) -> Option<&Life> {
        self.replicas.get(of.0)?.lives.get(&of.1)
    }

    pub(super) fn book(&mut self, of: Who) -> Result<&mut PlacedBook, String> {
        let life = self.replicas[of.0].lives.get_mut(&of.1);
        life.map(|life| &mut life.book).ok_or_else(|| "a hand-off without its replica".to_owned())
    }

    pub(super) fn attempt_here(&self, of: Who, seq: SeqId) -> Option<u16> {
        self.life(of)?.book.attempt(seq.request)
    }

    /// Attempt and output cap of a hand-off that a replica was told to take part in.
    pub(super) fn ordered(&self, of: Who, transfer: TransferId) -> Result<(u16, u32), String> {
        let known = self.life(of).and_then(|life| life.orders.get(&transfer).copied());
        known.ok_or_else(|| format!("{transfer} is under way here, and nobody ordered it"))
    }

    /// The token of a row of the step that is being reported; it is kept back.
    pub(super) fn sampled_token(&mut self, of: Who, seq: SeqId, (batch, row): (BatchId, u32)) -> Result<u64, String> {
        let life = self.replicas[of.0].lives.get_mut(&of.1).ok_or("a hand-off without its replica")?;
        let computed = life.reported.as_ref().filter(|computed| computed.batch == batch);
        let sampled = computed.and_then(|computed| computed.sampled.get(row as usize).copied().flatten());
        let sampled = sampled.filter(|sampled| sampled.seq == seq && sampled.index == 0);
        sampled.map(|sampled| sampled.token).ok_or_else(|| format!("{seq} was not sampled in row {row} of {batch}"))
    }

    /// A prompt that was computed for another replica is gone from here.
    pub(super) fn leave_replica(&mut self, of: Who, seq: SeqId) -> Result<(), String> {
        let attempt = self.attempt_here(of, seq).unwrap_or_default();
        self.book(of)?.left(seq.request)?;
        if self.scenario.sabotage == Some(Sabotage::EmitTwice) {
            let from = Placement { replica: of.0, epoch: of.1, attempt };
            self.send_to_edge(seq.request.gateway_epoch(), Streamed::Token { seq, from, first: 0 });
        }
        if let Some(life) = self.replicas[of.0].lives.get_mut(&of.1) {
            life.tails.remove(&seq);
            life.keys_told.remove(&seq);
        }
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

impl Life {
    /// What a gateway's message asks of this replica, for the book.
    fn note_order(&mut self, message: &ToReplica) -> Result<(), String> {
        let (transfer, attempt, cap) = match message {
            ToReplica::Dispatch(dispatch) => return self.book.dispatched(dispatch),
            ToReplica::Prefill(ordered) => match &ordered.order {
                Order::Begin(open) => (ordered.transfer, open.attempt, open.caps.max_output_tokens),
                _ => return Ok(()),
            },
            ToReplica::Decode(ordered) => match &ordered.order {
                Order::Begin(reserve) => (ordered.transfer, reserve.attempt, reserve.caps.max_output_tokens),
                _ => return Ok(()),
            },
            _ => return Ok(()),
        };
        self.orders.insert(transfer, (attempt, cap));
        Ok(())
    }
}

/// Has this input to do with a hand-off?
fn is_protocol(input: &ReplicaInput) -> bool {
    let ordered = |message: &ToReplica| matches!(message, ToReplica::Prefill(_) | ToReplica::Decode(_));
    match input {
        ReplicaInput::Handoff(_) => true,
        ReplicaInput::Gateway { message, .. } => ordered(message),
        _ => false,
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
