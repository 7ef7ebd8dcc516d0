//! The replica machine. Questions answered: what does the next step compute, who holds which blocks, who gives them back?
//!
//! One file a question, in the order a request meets them: `intake` (is it taken?), `join` (when does it run?), `plan` (what does the next
//! step compute?), `room` (who gives blocks back?), `evict` (what leaves the cache?), `confirm` (what did a step bring?), `finish` (how does
//! it end?), `handoff` (what if prompt and answer are computed at two replicas?), `report` (what do gateways hear?). `sequence` holds the states, `check` the invariants.

mod books;
mod check;
mod codec;
mod confirm;
mod cost;
mod digest;
mod evict;
mod facts;
mod finish;
mod handoff;
mod intake;
mod io;
mod join;
mod meter;
mod peers;
mod plan;
mod report;
mod room;
mod sequence;
mod signals;

pub use books::Books;
pub use io::{
    CacheChange, FinishedTokens, HandoffEffect, HandoffInput, ReplicaConfig, ReplicaEffect, ReplicaEffects,
    ReplicaEvent, ReplicaInput, StepCost, Watermarks,
};
pub use report::Gauges;

use alloc::vec::Vec;

use penstock_base::limits::{
    CACHE_EVENTS_MAX, CACHE_TENANTS_MAX, CONTEXT_TOKENS_MAX, EVICTION_ROWS_MAX, FULL_WALK_STEPS, INFLIGHT_MAX,
    POOL_BLOCKS_MAX, READY_WINDOW_MAX, SLOTS_MAX, STEP_TOKENS_MAX, VICTIM_ROWS_MAX,
};
use penstock_base::map::Map;
use penstock_base::plan::Plan;
use penstock_base::time::MonotoneNow;
use penstock_base::{BatchId, Failure, GatewayEpoch, Generation, Instant, Outcome, RequestId, TransferId};
use penstock_kv::{BlockTable, Kv, KvConfig};
use penstock_policy_api::{EvictionSeat, Policies, VictimsSeat};

use crate::message::FromReplica;
use confirm::Batch;
use cost::CostFit;
use digest::{Digest, Mark};
use peers::{Peers, PreemptOrder};
use report::Meters;
use sequence::{Request, Sequence, Vacancies};

/// One replica: everything that decides what its executor computes. See the module for its parts.
///
/// Pure and total: [`Self::step`] is the only way in, effects the only way out.
#[derive(Debug)]
pub struct Replica {
    /// As given, brought into the limits.
    config: ReplicaConfig,
    /// The driver's clock, made monotone.
    clock: MonotoneNow,
    /// Blocks, promises and cached prefixes. An owner is the entry of a request.
    kv: Kv,
    /// Dispatched and not ended. Entries are reused.
    requests: Vec<Option<Request>>,
    request_entries: Vacancies,
    by_id: Map<RequestId, u32>,
    /// Sequences by slot.
    sequences: Vec<Sequence>,
    sequence_entries: Vacancies,
    /// In the batch, first joined first.
    running: Vec<u32>,
    /// Preempted, first joined first.
    resume: Vec<u32>,
    /// Requests in the ready window, first come first.
    ready: Vec<u32>,
    /// Requests without living sequences whose end is not told yet.
    ended: Vec<u32>,
    /// Requests that the batch being confirmed did something for.
    touched: Vec<u32>,
    /// In flight, oldest first.
    batches: Vec<Batch>,
    /// The next batch's id.
    next_batch: BatchId,
    /// Slots that the executor must forget with the next plan.
    drops: Vec<u32>,
    /// Gateways, their stances and what they were told.
    peers: Peers,
    victims_seat: VictimsSeat,
    eviction_seat: EvictionSeat,
    /// What the policies are going to be told.
    facts: facts::Facts,
    cost: CostFit,
    meters: Meters,
    /// Its part in hand-offs; none when it takes no part in any.
    parties: Option<handoff::Parties>,
    /// Prompts for other replicas that ended here, until the sender is told, in the same step.
    failed_prefills: Vec<TransferId>,
    /// An overload action that is not carried out yet.
    preempt_order: Option<PreemptOrder>,
    /// Level of the native ladder, for when no stance is fresh.
    ladder_level: u8,
    /// Blocks that the next tokens of running sequences need beyond what was promised, as of the last plan: not given to new work.
    growth_blocks: u32,
    /// Steps in a row that computed prompts while no decode could.
    prefill_rounds: u32,
    /// The cheapest runs were priced again in this plan already.
    repriced: bool,
    /// Generation of the policy set in force.
    generation: Generation,
    /// Takes nothing new.
    draining: bool,
    /// Nothing was here at the end of the last step: the full walk was done then.
    quiet: bool,
    /// Why it is frozen, if it is.
    broken: Option<&'static str>,
    /// Counts occupants of entries.
    serial: u64,
    /// Counts sequences that joined.
    joined: u64,
    /// Number of the last report.
    report_number: u64,
    /// Cache events told so far, for the metric.
    cache_events_lost: u64,
    /// Blocks that could not be stored, as far as told.
    unstored_told: u64,
    /// Steps of this machine.
    steps: u64,
    /// Sequences turned away, results and references that named something dead.
    stale_count: u64,
    /// The earliest deadline among what is here.
    next_deadline: Instant,
    digest: Digest,
    /// Buffers that come back: plans, rows of batches, block tables of ready requests.
    plans: Vec<Plan>,
    row_buffers: Vec<Vec<confirm::BatchRow>>,
    tables: Vec<BlockTable>,
    scratch: Scratch,
}

/// Buffers without meaning between two uses.
#[derive(Debug)]
struct Scratch {
    copies: Vec<penstock_kv::CopyOnWrite>,
    adopted: Vec<penstock_kv::Adopted>,
    events: Vec<penstock_kv::KvEvent>,
    runs: Vec<penstock_kv::RunRow>,
    priced: Vec<penstock_policy_api::Priced>,
    victims: Vec<penstock_policy_api::Victim>,
    rows: Vec<signals::RunningRow>,
    promised: Vec<(u32, u32)>,
}

impl Scratch {
    fn with_room(config: &ReplicaConfig) -> Self {
        Self {
            copies: Vec::with_capacity(config.slots as usize),
            adopted: Vec::with_capacity(config.slots as usize),
            events: Vec::with_capacity(config.blocks.min(4_096) as usize + 64),
            runs: Vec::with_capacity(config.eviction_rows),
            priced: Vec::with_capacity(config.eviction_rows),
            victims: Vec::with_capacity(config.victim_rows),
            rows: Vec::with_capacity(config.victim_rows),
            promised: Vec::with_capacity(config.slots as usize),
        }
    }
}

/// A plan with room for a row of every slot and a few operations each; longer block tables make it grow once.
fn roomy_plan(slots: usize) -> Plan {
    Plan { batch: BatchId(0), ops: Vec::with_capacity(8 * slots), rows: Vec::with_capacity(slots) }
}

impl ReplicaConfig {
    /// The nearest configuration that the limits and the machine allow.
    fn clamped(mut self) -> Self {
        self.blocks = self.blocks.clamp(1, POOL_BLOCKS_MAX);
        self.block_size_tokens = self.block_size_tokens.clamp(1, 1 << 16);
        self.step_tokens = self.step_tokens.clamp(1, STEP_TOKENS_MAX);
        self.slots = self.slots.clamp(1, SLOTS_MAX as u32).min(self.step_tokens);
        self.chunk_tokens = self.chunk_tokens.clamp(1, self.step_tokens);
        self.context_tokens_max = self.context_tokens_max.clamp(1, CONTEXT_TOKENS_MAX);
        self.inflight_max = self.inflight_max.clamp(1, INFLIGHT_MAX);
        self.ready_window = self.ready_window.min(READY_WINDOW_MAX);
        self.watermarks.high_ppm = self.watermarks.high_ppm.min(1_000_000);
        self.watermarks.low_ppm = self.watermarks.low_ppm.min(self.watermarks.high_ppm);
        self.victim_rows = self.victim_rows.clamp(1, VICTIM_ROWS_MAX);
        self.eviction_rows = self.eviction_rows.clamp(1, EVICTION_ROWS_MAX);
        self
    }

    /// Most requests here at once: each running one has a slot.
    fn requests_max(&self) -> u32 {
        self.slots + self.ready_window as u32
    }

    /// Entries of a block table.
    fn table_blocks_max(&self) -> u32 {
        self.context_tokens_max.div_ceil(self.block_size_tokens).min(self.blocks)
    }

    fn kv(&self) -> KvConfig {
        KvConfig {
            blocks: self.blocks,
            block_size_tokens: self.block_size_tokens,
            owners: self.requests_max() + self.handoff.map_or(0, |handoff| handoff.clamped().transfers),
            tenants: CACHE_TENANTS_MAX.min(self.blocks),
            events: CACHE_EVENTS_MAX.min(self.blocks.saturating_mul(2) + 1_024),
            watermarks: penstock_kv::Watermarks {
                low_ppm: self.watermarks.low_ppm as u32,
                high_ppm: self.watermarks.high_ppm as u32,
            },
        }
    }
}

impl Replica {
    /// An empty replica. Sizes outside the limits are brought into them; [`Self::config`] shows the result.
    pub fn new(config: ReplicaConfig, now: Instant) -> Self {
        let config = config.clamped();
        let kv = Kv::new(config.kv()).expect("sizes were brought into the limits");
        let (requests_max, table_max) = (config.requests_max(), config.table_blocks_max());
        let slots = config.slots as usize;
        let in_ready_window = 0..=config.ready_window;
        Self {
            clock: MonotoneNow::starting_at(now),
            kv,
            requests: (0..requests_max).map(|_| None).collect(),
            request_entries: Vacancies::all(requests_max),
            by_id: Map::with_capacity(requests_max as usize * 2),
            sequences: (0..config.slots).map(|_| Sequence::vacant(table_max)).collect(),
            sequence_entries: Vacancies::all(config.slots),
            running: Vec::with_capacity(slots),
            resume: Vec::with_capacity(slots),
            ready: Vec::with_capacity(config.ready_window + 1),
            ended: Vec::with_capacity(requests_max as usize),
            touched: Vec::with_capacity(requests_max as usize),
            batches: Vec::with_capacity(INFLIGHT_MAX),
            next_batch: BatchId(1),
            drops: Vec::with_capacity(slots),
            peers: Peers::new(),
            victims_seat: VictimsSeat::new(config.run_seed),
            eviction_seat: EvictionSeat::new(config.run_seed),
            facts: facts::Facts::default(),
            cost: CostFit::new(config.cost),
            meters: Meters::starting_at(now),
            parties: config.party().map(|party| handoff::Parties::new(party, now)),
            failed_prefills: Vec::new(),
            preempt_order: None,
            ladder_level: 0,
            growth_blocks: 0,
            prefill_rounds: 0,
            repriced: false,
            generation: Generation(0),
            draining: false,
            quiet: true,
            broken: None,
            serial: 0,
            joined: 0,
            report_number: 0,
            cache_events_lost: 0,
            unstored_told: 0,
            steps: 0,
            stale_count: 0,
            next_deadline: Instant::NEVER,
            digest: Digest::default(),
            plans: (0..=INFLIGHT_MAX).map(|_| roomy_plan(slots)).collect(),
            row_buffers: (0..=INFLIGHT_MAX).map(|_| Vec::with_capacity(slots)).collect(),
            tables: in_ready_window.map(|_| BlockTable::with_capacity(table_max)).collect(),
            scratch: Scratch::with_room(&config),
            config,
        }
    }

    /// Advances the machine by one input. Total and deterministic: equal state, `now` and input give equal effects everywhere.
    /// Never blocks, never fails: a bad input is an effect. Allocation-free at steady state, the full walk over the invariants aside.
    pub fn step(
        &mut self,
        now: Instant,
        input: ReplicaInput,
        policies: &mut dyn Policies,
        effects: &mut ReplicaEffects,
    ) {
        let clamped = self.clock.clamped_count();
        let now = self.clock.observe(now);
        if self.clock.clamped_count() > clamped {
            effects.push(ReplicaEffect::Event(ReplicaEvent::ClockClamped));
        }
        self.steps += 1;
        if self.broken.is_some() {
            return self.turn_away(input, effects);
        }
        self.facts.refresh(policies);
        self.take_input(now, input, effects);
        self.end_overdue(now, effects);
        self.keep_handoff_time(now, effects);
        self.tell_failed_prefills(now, effects);
        self.tell_progress(effects);
        while self.broken.is_none() && self.batches.len() < self.config.inflight_max {
            if !self.plan_step(now, policies, effects) {
                break;
            }
        }
        self.tell_failed_prefills(now, effects);
        self.tell_ended(effects);
        self.price_waiting(now, policies, effects);
        self.tell_cache(now, effects);
        self.tell_unstored(effects);
        self.deliver_facts(now, policies, effects);
        self.tell_load(now, effects);
        self.verify(effects);
    }

    fn take_input(&mut self, now: Instant, input: ReplicaInput, effects: &mut ReplicaEffects) {
        match input {
            ReplicaInput::Gateway { gateway, message } => self.take_message(now, gateway, message, effects),
            ReplicaInput::GatewayUp(gateway) => self.gateway_up(now, gateway, effects),
            ReplicaInput::GatewayDown(gateway) => self.gateway_down(now, gateway, effects),
            ReplicaInput::BatchDone { batch, rows, took } => self.batch_done(now, batch, &rows, took, effects),
            ReplicaInput::BatchFailed { batch, failure, rows, done } => {
                self.batch_failed(now, batch, failure, (&rows, &done), effects);
            }
            ReplicaInput::Finish(end) => self.finish(now, end, effects),
            ReplicaInput::BlockKeys { seq, first, keys } => self.take_keys(now, seq, first, &keys, effects),
            ReplicaInput::Policies(generation) => self.take_policies(generation),
            ReplicaInput::Handoff(input) => self.take_handoff(now, input, effects),
            ReplicaInput::Drain => {
                self.draining = true;
                self.tell_parties(now, handoff::Told::Drain, effects);
            }
            ReplicaInput::FlushCache => {
                self.kv.flush(now, penstock_kv::Flush::All);
            }
            ReplicaInput::Tick => {}
        }
    }

    fn take_policies(&mut self, generation: Generation) {
        self.generation = generation;
        self.digest.mix(Mark::Policies, generation.0, 0);
    }

    /// Gives a plan's buffers back, so that the next plan allocates nothing.
    pub fn recycle(&mut self, mut plan: Plan) {
        if self.plans.len() <= INFLIGHT_MAX {
            plan.clear();
            self.plans.push(plan);
        }
    }

    /// When to step with [`ReplicaInput::Tick`] if nothing else happens before; [`Instant::NEVER`] is not needed.
    pub fn next_wake(&self) -> Instant {
        if self.broken.is_some() {
            return Instant::NEVER;
        }
        let paused = self.resume.iter().map(|entry| self.sequences[*entry as usize].resume_at);
        let paused = paused.filter(|at| *at > self.clock.last()).min().unwrap_or(Instant::NEVER);
        self.next_deadline.min(paused).min(self.next_handoff_wake()).min(self.next_report()).min(self.facts.next_due())
    }

    /// Freezes the replica: what is here ends as retryable, nothing is taken any more. The driver starts a new epoch.
    fn freeze(&mut self, why: &'static str, failure: Failure, effects: &mut ReplicaEffects) {
        self.broken = Some(why);
        effects.push(ReplicaEffect::Event(ReplicaEvent::Broken(why)));
        let now = self.clock.last();
        for entry in 0..self.requests.len() as u32 {
            if self.requests[entry as usize].is_some() {
                self.end_request(now, entry, Outcome::Failed(failure), effects);
            }
        }
        self.tell_progress(effects);
        self.tell_ended(effects);
    }

    /// The cheap checks at every step, the full walk when it is due.
    fn verify(&mut self, effects: &mut ReplicaEffects) {
        if self.broken.is_some() {
            return;
        }
        let quiet = self.is_idle();
        let was_quiet = core::mem::replace(&mut self.quiet, quiet);
        let became_quiet = self.quiet && !was_quiet;
        let due = self.config.check_every_step || became_quiet || self.steps.is_multiple_of(FULL_WALK_STEPS);
        let checked = self.check_counts().and_then(|()| if due { self.check() } else { Ok(()) });
        if let Err(why) = checked {
            self.freeze(why, Failure::Internal, effects);
        }
    }

    fn stale(&mut self, effects: &mut ReplicaEffects) {
        self.stale_count += 1;
        effects.push(ReplicaEffect::Event(ReplicaEvent::Stale));
    }

    fn send(&self, gateway: GatewayEpoch, message: FromReplica, effects: &mut ReplicaEffects) {
        if self.peers.knows(gateway) {
            effects.push(ReplicaEffect::Send { gateway, message });
        }
    }

    /// A request that is here.
    fn request(&self, entry: u32) -> &Request {
        self.requests[entry as usize].as_ref().expect("entries are handed out for requests that are here")
    }

    fn request_mut(&mut self, entry: u32) -> &mut Request {
        self.requests[entry as usize].as_mut().expect("entries are handed out for requests that are here")
    }

    fn sequence(&self, entry: u32) -> &Sequence {
        &self.sequences[entry as usize]
    }

    fn sequence_mut(&mut self, entry: u32) -> &mut Sequence {
        &mut self.sequences[entry as usize]
    }

    /// Puts a sequence into a list that is ordered by joining.
    fn insert_by_joining(sequences: &[Sequence], list: &mut Vec<u32>, entry: u32) {
        let joined = sequences[entry as usize].joined;
        let at = list.partition_point(|other| sequences[*other as usize].joined < joined);
        list.insert(at, entry);
    }

    // --- What observers may see ----------------------------------------------------------------------------------------------

    /// The configuration in force.
    pub fn config(&self) -> &ReplicaConfig {
        &self.config
    }

    /// Block pool, promises and prefix cache.
    pub fn kv(&self) -> &Kv {
        &self.kv
    }

    /// Digest of everything decided so far: plans, refusals, preemptions, ends, evictions.
    pub fn decision_digest(&self) -> u64 {
        self.digest.0
    }

    /// Generation of the policy set in force.
    pub fn generation(&self) -> Generation {
        self.generation
    }

    /// Why it is frozen, if it is.
    pub fn broken(&self) -> Option<&'static str> {
        self.broken
    }

    /// Takes no new work.
    pub fn is_draining(&self) -> bool {
        self.draining
    }

    /// Nothing is here and nothing is in flight.
    pub fn is_idle(&self) -> bool {
        self.by_id.is_empty() && self.batches.is_empty() && self.handoffs() == 0
    }

    /// Inputs and results that named something dead.
    pub fn stale_count(&self) -> u64 {
        self.stale_count
    }

    /// The values of the last question about victims, as passed: context, then rows.
    pub fn victims_seat(&self) -> &VictimsSeat {
        &self.victims_seat
    }

    /// The values of the last question about prices, as passed: context, then rows.
    pub fn eviction_seat(&self) -> &EvictionSeat {
        &self.eviction_seat
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use penstock_policy_api::native::NativePolicies;

    #[test]
    fn a_pool_has_at_most_as_many_blocks_as_the_limit_and_one_at_least() {
        let blocks = |blocks| ReplicaConfig { blocks, ..ReplicaConfig::default() }.clamped().blocks;
        let most = 16_777_216;
        assert_eq!([0, 1, most, most + 1, u32::MAX].map(blocks), [1, 1, most, most, most]);
    }

    #[test]
    fn the_full_walk_comes_once_in_so_many_steps_of_a_live_replica() {
        let config = ReplicaConfig { check_every_step: false, blocks: 16, slots: 2, ..ReplicaConfig::default() };
        let mut replica = Replica::new(config, Instant::ZERO);
        let mut policies = NativePolicies::new(Generation(1), 1_024);
        let mut effects = ReplicaEffects::new();
        // Something that only the walk sees: the entry of nobody counts as opened at the executor.
        replica.sequences[1].opened = true;
        assert!(replica.check_counts().is_ok() && replica.check().is_err());
        for step in 1..=FULL_WALK_STEPS {
            assert!(replica.broken().is_none(), "found before step {step}");
            replica.step(Instant::ZERO, ReplicaInput::Tick, &mut policies, &mut effects);
        }
        assert!(replica.broken().is_some());
        assert!(matches!(effects[..], [.., ReplicaEffect::Event(ReplicaEvent::Broken(_))]));
    }
}
