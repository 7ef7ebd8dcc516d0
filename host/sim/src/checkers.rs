//! What must hold between arrival and end? Two books: what a replica does for each request placed there, and what each client sees.
//!
//! Checkers know nothing of faults. They say what is right whatever went wrong.

use std::collections::BTreeMap;

use penstock_base::{BatchId, Instant, Manifest, Outcome, ReplicaEpoch, RequestId, SeqId};
use penstock_sched::gateway::GatewayEffect;
use penstock_sched::message::{Dispatch, FromReplica, Usage};

use crate::executor::{Computed, ensure};
use crate::workload::{Answer, Planned, index_of};

/// Where a request runs.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Placement {
    /// Which replica, by place.
    pub replica: usize,
    /// Its incarnation.
    pub epoch: ReplicaEpoch,
    /// Which attempt.
    pub attempt: u16,
}

/// One request at one replica.
#[derive(Clone, Debug)]
struct Placed {
    attempt: u16,
    cap: u32,
    started: bool,
    prefill_tokens: u32,
    decode_tokens: u32,
    /// For each sequence: tokens delivered, and the end with the tokens that count.
    delivered: Vec<u32>,
    ends: Vec<Option<(Outcome, u32)>>,
    preempted: u32,
    /// Its prompt is computed for another replica: nothing of it is delivered here.
    sending: bool,
    /// A row of it was planned.
    planned: bool,
}

/// What one replica epoch does, request by request.
#[derive(Debug, Default)]
pub struct PlacedBook {
    placed: BTreeMap<RequestId, Placed>,
    reports: u64,
    cache_sequence: BTreeMap<u16, u64>,
}

impl PlacedBook {
    /// A dispatch goes in. One that is refused is taken out again by the refusal.
    ///
    /// # Errors
    /// The request is here already.
    pub fn dispatched(&mut self, dispatch: &Dispatch) -> Result<(), String> {
        let cap = dispatch.max_output_tokens.min(dispatch.manifest.max_output_tokens);
        self.place(&dispatch.manifest, (dispatch.attempt, cap), false)
    }

    /// The prompt of a request is computed here from now on, for another replica.
    ///
    /// # Errors
    /// The request is here already.
    pub fn sending(&mut self, manifest: &Manifest, attempt: u16, cap: u32) -> Result<(), String> {
        self.place(manifest, (attempt, cap.min(manifest.max_output_tokens)), true)
    }

    /// A request whose prompt was computed elsewhere is here from now on.
    ///
    /// # Errors
    /// The request is here already.
    pub fn adopted(&mut self, manifest: &Manifest, attempt: u16, cap: u32) -> Result<(), String> {
        self.place(manifest, (attempt, cap.min(manifest.max_output_tokens)), false)
    }

    fn place(&mut self, manifest: &Manifest, (attempt, cap): (u16, u32), sending: bool) -> Result<(), String> {
        let n = usize::from(manifest.sequences);
        let placed = Placed {
            attempt,
            cap,
            started: false,
            prefill_tokens: 0,
            decode_tokens: 0,
            delivered: vec![0; n],
            ends: vec![None; n],
            preempted: 0,
            sending,
            planned: false,
        };
        let before = self.placed.insert(manifest.request, placed);
        ensure(before.is_none(), || format!("{} is dispatched to where it is", manifest.request))
    }

    /// What was computed here for another replica is this one's own from now on.
    ///
    /// # Errors
    /// It was its own before.
    pub fn kept(&mut self, request: RequestId) -> Result<(), String> {
        let placed = self.get(request)?;
        let before = std::mem::replace(&mut placed.sending, false);
        // Its beginning is told to nobody while it is another one's.
        placed.started |= placed.planned;
        ensure(before, || format!("{request} goes on here, where it was decoded before"))
    }

    /// A request leaves without an end.
    ///
    /// # Errors
    /// It is this replica's own.
    pub fn left(&mut self, request: RequestId) -> Result<(), String> {
        let placed = self.placed.remove(&request).ok_or_else(|| format!("{request} leaves and is not here"))?;
        ensure(placed.sending && placed.delivered.iter().all(|tokens| *tokens == 0), || {
            format!("{request} leaves without an end, {placed:?}")
        })
    }

    /// The first token, which was kept back, counts from now on.
    ///
    /// # Errors
    /// Others came before it, nobody kept one, or it is not the right one.
    pub fn released(&mut self, seq: SeqId, token: Option<u64>, answer: &Answer) -> Result<(), String> {
        let placed = self.get(seq.request)?;
        let first = !placed.sending && placed.ends[0].is_none() && placed.delivered[0] == 0;
        ensure(first, || format!("{seq} releases a first token, {placed:?}"))?;
        ensure(token == answer.tokens.first().copied(), || format!("{seq} releases {token:?} as its first token"))?;
        ensure(answer.stop_at.is_none_or(|stop| stop > 0), || format!("{seq} gets its stop token"))?;
        placed.delivered[0] = 1;
        Ok(())
    }

    /// A row of the request is planned.
    pub fn row_planned(&mut self, request: RequestId) {
        if let Some(placed) = self.placed.get_mut(&request) {
            placed.planned = true;
        }
    }

    /// Output tokens accepted of a sequence that lives here.
    pub fn accepted(&self, seq: SeqId) -> Option<u32> {
        let placed = self.placed.get(&seq.request)?;
        let index = usize::from(seq.index);
        placed.ends.get(index)?.is_none().then(|| placed.delivered[index])
    }

    /// Requests that are here.
    pub fn len(&self) -> usize {
        self.placed.len()
    }

    /// Nothing is here.
    pub fn is_empty(&self) -> bool {
        self.placed.is_empty()
    }

    /// Attempt of a request that is here.
    pub fn attempt(&self, request: RequestId) -> Option<u16> {
        self.placed.get(&request).map(|placed| placed.attempt)
    }

    fn get(&mut self, request: RequestId) -> Result<&mut Placed, String> {
        self.placed.get_mut(&request).ok_or_else(|| format!("{request} is not here"))
    }

    /// A token counts; the one of the step just reported.
    ///
    /// # Errors
    /// It is not the next one, comes after the end, or is not the right one.
    pub fn delivered(
        &mut self,
        (seq, first, tokens): (SeqId, u32, u16),
        (batch, row): (BatchId, u32),
        reported: Option<&Computed>,
        answer: &Answer,
    ) -> Result<(), String> {
        let placed = self.get(seq.request)?;
        let index = usize::from(seq.index);
        ensure(placed.ends[index].is_none(), || format!("{seq} is delivered to after its end"))?;
        ensure(!placed.sending, || format!("{seq} is delivered to where its prompt is computed for another replica"))?;
        ensure(tokens == 1 && placed.delivered[index] == first, || {
            format!("{seq} gets {tokens} tokens at {first}, behind {}", placed.delivered[index])
        })?;
        let computed = reported.filter(|computed| computed.batch == batch);
        let sampled = computed.and_then(|computed| computed.sampled.get(row as usize).copied().flatten());
        let right =
            sampled.is_some_and(|s| s.seq == seq && s.index == first && s.token == answer.tokens[first as usize]);
        ensure(right, || format!("{seq} gets {sampled:?} of row {row} of batch {batch} as token {first}"))?;
        ensure(answer.stop_at.is_none_or(|stop| first < stop), || format!("{seq} gets its stop token"))?;
        placed.delivered[index] += 1;
        Ok(())
    }

    /// A sequence has ended.
    ///
    /// # Errors
    /// It had, or success where the answer is not complete.
    pub fn sequence_ended(
        &mut self,
        seq: SeqId,
        (outcome, tokens): (Outcome, u32),
        answer: &Answer,
    ) -> Result<(), String> {
        let placed = self.get(seq.request)?;
        let index = usize::from(seq.index);
        ensure(tokens <= placed.delivered[index], || format!("{seq} ends with {tokens} tokens, more than it had"))?;
        let right = !outcome.is_success() || answer.may_end(outcome, tokens, placed.cap);
        ensure(right, || {
            let natural = answer.natural_end(placed.cap);
            format!("{seq} ends as {outcome:?} with {tokens} tokens, where {natural:?} is right")
        })?;
        let before = placed.ends[index].replace((outcome, tokens));
        ensure(before.is_none(), || format!("{seq} ends twice"))
    }

    /// A message to the gateway `to`. An end is returned for the client's book.
    ///
    /// # Errors
    /// It contradicts what was done.
    pub fn message(&mut self, to: u16, message: &FromReplica, planned: &[Planned]) -> Result<(), String> {
        match message {
            FromReplica::Report(report) => {
                ensure(report.number > self.reports, || format!("report {} after {}", report.number, self.reports))?;
                self.reports = report.number;
                let load = &report.load;
                let held = load.active_blocks + load.reclaimable_blocks + load.transfer_blocks;
                let sum = held + load.cached_blocks + load.free_blocks;
                ensure(sum == load.total_blocks, || format!("a report of {sum} blocks of {}", load.total_blocks))?;
                ensure(report.credit.blocks <= u64::from(load.free_blocks + load.cached_blocks), || {
                    format!("credit for {} blocks of {load:?}", report.credit.blocks)
                })
            }
            FromReplica::Started { request, attempt, cached_tokens } => {
                let placed = self.attempt_of(*request, *attempt)?;
                let first = !std::mem::replace(&mut placed.started, true);
                let prompt = planned[index_of(*request)].manifest.input_tokens;
                ensure(first && *cached_tokens < prompt, || format!("{request} starts, {cached_tokens} cached"))
            }
            FromReplica::Progress(progress) => {
                let placed = self.attempt_of(progress.request, progress.attempt)?;
                let first = placed.decode_tokens == 0 && progress.decode_tokens > 0;
                let known = placed.started || placed.sending;
                ensure(known && progress.first_token == first, || format!("odd progress {progress:?}"))?;
                placed.prefill_tokens += progress.prefill_tokens;
                placed.decode_tokens += progress.decode_tokens;
                Ok(())
            }
            FromReplica::Preempted { request, attempt, .. } => {
                let placed = self.attempt_of(*request, *attempt)?;
                placed.preempted += 1;
                ensure(placed.started || placed.preempted <= 8, || format!("{request} is preempted before it starts"))
            }
            FromReplica::Resumed { request, attempt, .. } => self.attempt_of(*request, *attempt).map(|_| ()),
            FromReplica::Refuse { request, attempt, .. } => {
                let placed = self.attempt_of(*request, *attempt)?;
                let untouched = !placed.started && placed.ends.iter().all(Option::is_none);
                ensure(untouched, || format!("{request} is refused after it was taken"))?;
                self.placed.remove(request);
                Ok(())
            }
            FromReplica::Ended { request, attempt, outcome, usage } => {
                self.attempt_of(*request, *attempt)?;
                let placed = self.placed.remove(request).ok_or("it was there")?;
                placed.check_end(*request, *outcome, usage, planned[index_of(*request)].manifest.input_tokens)
            }
            FromReplica::Party { .. } => Ok(()),
            FromReplica::Cache { sequence, .. } => {
                let last = self.cache_sequence.entry(to).or_default();
                *last += 1;
                ensure(*sequence == *last, || format!("cache event {sequence} where {last} is next"))
            }
        }
    }

    fn attempt_of(&mut self, request: RequestId, attempt: u16) -> Result<&mut Placed, String> {
        let placed = self.get(request)?;
        let right = placed.attempt == attempt;
        if right { Ok(placed) } else { Err(format!("{request}: attempt {attempt} where {} runs", placed.attempt)) }
    }

    /// A gateway has come: cache events are numbered for it from the beginning.
    pub fn gateway_came(&mut self, epoch: u16) {
        self.cache_sequence.remove(&epoch);
    }

    /// A gateway is gone: nothing more is told of its requests.
    pub fn gateway_gone(&mut self, epoch: u16) {
        self.placed.retain(|request, _| request.gateway_epoch().0 != epoch);
    }

    /// Were the requests of this gateway ended when it went?
    ///
    /// # Errors
    /// A sequence that lives on.
    pub fn all_ended_of(&self, epoch: u16) -> Result<(), String> {
        let its = |request: &RequestId| request.gateway_epoch().0 == epoch;
        let mut living = self.placed.iter().filter(|(request, placed)| its(request) && placed.ends.contains(&None));
        living.next().map_or(Ok(()), |(request, _)| Err(format!("{request} lives on without its gateway")))
    }
}

impl Placed {
    fn check_end(&self, request: RequestId, outcome: Outcome, usage: &Usage, prompt: u32) -> Result<(), String> {
        let counted = self.ends.iter().map(|end| end.map(|(_, tokens)| tokens)).collect::<Option<Vec<_>>>();
        let counted: u32 = counted.ok_or_else(|| format!("{request} ends before its sequences"))?.iter().sum();
        ensure(usage.output_tokens == counted, || format!("{request} is billed {usage:?}, {counted} tokens count"))?;
        let used = if self.started { prompt } else { 0 };
        ensure(usage.prompt_tokens == used && (usage.cached_tokens < used || used == 0), || {
            format!("{request}: {usage:?}")
        })?;
        ensure(self.decode_tokens >= counted, || format!("{request}: progress told of {}", self.decode_tokens))?;
        ensure(self.prefill_tokens + usage.cached_tokens <= prompt, || {
            format!("{request}: {} prompt tokens charged, {usage:?}", self.prefill_tokens)
        })?;
        let failed = self.ends.iter().flatten().any(|(outcome, _)| !outcome.is_success());
        ensure(failed != outcome.is_success(), || format!("{request} ends as {outcome:?} with {:?}", self.ends))
    }
}

/// What one client sees.
#[derive(Clone, Debug)]
pub struct Client {
    /// Its request has arrived.
    pub arrived: bool,
    /// Its gateway is gone; nothing is promised any more.
    pub orphaned: bool,
    /// Output cap in force.
    pub cap: u32,
    /// Where it runs.
    pub placement: Option<Placement>,
    /// Which replica computes its prompt for the one where it is placed, and may keep it.
    pub sender: Option<usize>,
    /// The same for the placement that is about to be told.
    pub next_sender: Option<usize>,
    /// Attempts so far.
    pub attempts: u16,
    /// Tokens of each sequence that the client has.
    pub tokens: Vec<u32>,
    /// Ends of the sequences in the current placement.
    pub ends: Vec<Option<(Outcome, u32)>>,
    /// When it had its first token.
    pub first_token_at: Instant,
    /// What the replica said at its end.
    pub at_replica: Option<(Outcome, Usage)>,
    /// How it ended, what is billed, when.
    pub ended: Option<(Outcome, Usage, Instant)>,
}

/// What all clients see.
#[derive(Debug)]
pub struct ClientBook {
    /// In order of arrival.
    pub clients: Vec<Client>,
}

impl ClientBook {
    /// Nobody has arrived.
    pub fn new(planned: &[Planned]) -> Self {
        let client = |planned: &Planned| Client {
            arrived: false,
            orphaned: false,
            cap: planned.manifest.max_output_tokens,
            placement: None,
            sender: None,
            next_sender: None,
            attempts: 0,
            tokens: vec![0; planned.answers.len()],
            ends: vec![None; planned.answers.len()],
            first_token_at: Instant::NEVER,
            at_replica: None,
            ended: None,
        };
        Self { clients: planned.iter().map(client).collect() }
    }

    fn of(&mut self, request: RequestId) -> Result<&mut Client, String> {
        let client = self.clients.get_mut(index_of(request)).filter(|client| client.arrived);
        client.ok_or_else(|| format!("{request} never arrived"))
    }

    /// An effect of the gateway.
    ///
    /// # Errors
    /// Something after the end, or an end that contradicts what the client has.
    pub fn effect(&mut self, effect: &GatewayEffect, now: Instant, replicas: usize) -> Result<(), String> {
        match effect {
            GatewayEffect::Queued { request, max_output_tokens, degraded } => {
                let client = self.of(*request)?;
                ensure(client.ended.is_none(), || format!("{request} is queued after its end"))?;
                ensure(*max_output_tokens <= client.cap && *max_output_tokens > 0, || {
                    format!("{request}: cap {max_output_tokens} above {}", client.cap)
                })?;
                ensure(!degraded || *max_output_tokens <= client.cap, || format!("{request} is degraded upwards"))?;
                client.cap = *max_output_tokens;
                client.placement = None;
                Ok(())
            }
            GatewayEffect::Dispatched { request, replica, epoch, attempt, .. } => {
                let client = self.of(*request)?;
                ensure(client.ended.is_none(), || format!("{request} is dispatched after its end"))?;
                ensure(*attempt >= client.attempts, || {
                    format!("{request}: attempt {attempt} after {}", client.attempts)
                })?;
                let place = replica.0 as usize;
                ensure(place < replicas, || format!("no replica {replica}"))?;
                client.attempts = *attempt;
                client.placement = Some(Placement { replica: place, epoch: *epoch, attempt: *attempt });
                client.sender = client.next_sender.take();
                client.ends.fill(None);
                client.at_replica = None;
                Ok(())
            }
            GatewayEffect::Ended { request, outcome, usage, .. } => {
                let client = self.of(*request)?;
                let before = client.ended.replace((*outcome, *usage, now));
                ensure(before.is_none(), || format!("{request} ends twice: {before:?}, then {outcome:?}"))?;
                client.check_end(*request, *outcome, usage)
            }
            GatewayEffect::Send { .. } | GatewayEffect::Event(_) => Ok(()),
        }
    }

    /// A token reaches the edge. False when the placement that sent it is over: the edge drops it.
    ///
    /// # Errors
    /// A gap.
    pub fn token(&mut self, seq: SeqId, from: Placement, first: u32, now: Instant) -> Result<bool, String> {
        let client = self.of(seq.request)?;
        client.follow(from);
        if client.orphaned || client.ended.is_some() || client.placement != Some(from) {
            return Ok(false);
        }
        let tokens = &mut client.tokens[usize::from(seq.index)];
        ensure(first <= *tokens, || format!("{seq}: the client gets token {first} behind {tokens}"))?;
        // A later attempt gives the same tokens again; the client has them.
        *tokens = (*tokens).max(first + 1);
        client.first_token_at = client.first_token_at.min(now);
        Ok(true)
    }

    /// A sequence ended at its replica.
    pub fn sequence_ended(&mut self, seq: SeqId, from: Placement, end: (Outcome, u32)) {
        let Ok(client) = self.of(seq.request) else { return };
        client.follow(from);
        if client.placement == Some(from) && client.ended.is_none() {
            client.ends[usize::from(seq.index)] = Some(end);
        }
    }

    /// The prompt is computed at another replica than the one where the request is about to be placed.
    ///
    /// # Errors
    /// It never arrived, or has ended.
    pub fn handed_off(&mut self, request: RequestId, sender: usize) -> Result<(), String> {
        let client = self.of(request)?;
        client.next_sender = Some(sender);
        ensure(client.ended.is_none(), || format!("{request} is handed off after its end"))
    }

    /// The request ended at its replica.
    pub fn ended_at_replica(&mut self, request: RequestId, from: Placement, end: (Outcome, Usage)) {
        let Ok(client) = self.of(request) else { return };
        client.follow(from);
        if client.placement == Some(from) {
            client.at_replica = Some(end);
        }
    }

    /// Everybody who arrived was told an end.
    pub fn all_ended(&self) -> bool {
        self.clients.iter().all(|client| client.ended.is_some() || client.orphaned)
    }
}

impl Client {
    /// The replica that computed the prompt has kept the request: it speaks for it, once. Whether it may is [`crate::owners`]' business.
    fn follow(&mut self, from: Placement) {
        let its = self.placement.is_some_and(|placement| placement.attempt == from.attempt);
        if its && self.sender == Some(from.replica) {
            self.placement = Some(from);
            self.sender = None;
        }
    }

    fn check_end(&self, request: RequestId, outcome: Outcome, usage: &Usage) -> Result<(), String> {
        let has: u32 = self.tokens.iter().sum();
        if !outcome.is_success() {
            return ensure(usage.output_tokens <= has, || {
                format!("{request} is billed {usage:?} and has {has} tokens")
            });
        }
        let right = self.at_replica == Some((outcome, *usage));
        ensure(right, || format!("{request} ends as {outcome:?}, {usage:?}; its replica said {:?}", self.at_replica))?;
        let counted = |(end, tokens): (&Option<(Outcome, u32)>, &u32)| {
            end.filter(|(outcome, counted)| outcome.is_success() && counted <= tokens).map(|(_, counted)| counted)
        };
        let counted: Option<u32> = self.ends.iter().zip(&self.tokens).map(counted).sum();
        ensure(counted == Some(usage.output_tokens), || {
            format!("{request} is billed {usage:?} for {:?} of {:?}", self.ends, self.tokens)
        })
    }
}
