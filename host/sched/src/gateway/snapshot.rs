//! The whole machine as bytes and back. A decoded machine goes on exactly like the one that was encoded.

use alloc::sync::Arc;
use alloc::vec::Vec;

use penstock_base::codec::{DecodeError, Reader, Writer};
use penstock_base::limits::FINISHED_REQUESTS_KEPT;
use penstock_base::time::MonotoneNow;
use penstock_base::{
    ClassRank, DispatchNumber, Duration, Generation, Instant, Manifest, Outcome, ReplicaEpoch, ReplicaId, RequestId,
    TransferId,
};

use super::directory::Directory;
use super::estimate::OutputEstimator;
use super::facts::Facts;
use super::flows::Flows;
use super::handoff::Handoffs;
use super::holdings::Inflight;
use super::io::{GatewayConfig, ReplicaFacts};
use super::lead::Lead;
use super::ledger::Ledger;
use super::list::{Links, List};
use super::overload::Overload;
use super::queue::{ClassQueue, Queue};
use super::recent::{PrefixHeat, Sessions};
use super::replicas::{CacheState, Replica, Replicas, Reserved};
use super::request::{Compute, Delivery, Need, Place, Ranked, Request, Run, Wait};
use super::requests::Requests;
use super::seats::Seats;
use super::stance::StanceState;
use super::table::{NONE, Table};
use super::verify::Soundness;
use super::watch::Watch;
use super::{Digest, Gateway, GatewayCounters, State};
use crate::message::{Credit, Load, Report};

/// Grows with every change of the format.
const VERSION: u32 = 4;

impl Gateway {
    /// Writes the state. Configuration is not part of it.
    pub fn encode(&self, out: &mut Writer) {
        out.u32(VERSION);
        self.seats.encode(out);
        self.state.encode(out);
    }

    /// Reads what [`Self::encode`] wrote, under the same configuration. Bytes that do not make a sound machine are refused.
    pub fn decode(config: GatewayConfig, from: &mut Reader<'_>) -> Result<Self, DecodeError> {
        let config = config.within_limits();
        let found = from.u32()?;
        if found != VERSION {
            return Err(DecodeError::Version { found, expected: VERSION });
        }
        let seats = Seats::decode(from, &config)?;
        let state = State::decode(from, config)?;
        if state.soundness.broken.is_none() {
            state.check().map_err(DecodeError::Invalid)?;
        }
        Ok(Self { state, seats })
    }
}

impl State {
    fn encode(&self, out: &mut Writer) {
        self.clock.encode(out);
        out.u64(self.now.0);
        out.u64(self.generation.0);
        out.bool(self.draining);
        self.requests.encode(out);
        self.flows.encode(out);
        self.ledger.encode(out);
        self.share.encode(out);
        self.replicas.table.encode(out, |out, _, replica| encode_replica(replica, out));
        self.directory.encode(out);
        out.u64(self.cache_due.0);
        self.heat.encode(out);
        self.sessions.encode(out);
        self.outputs.encode(out);
        for class in &self.queue.classes {
            class.list.encode(out);
            out.u64(class.tokens);
            out.u64(class.need_blocks);
        }
        out.u32(self.queue.requests);
        out.u64(self.queue.tokens);
        out.u64(self.queue.need_blocks);
        out.u64(self.queue.tickets);
        self.deferred.encode(out);
        out.u64(self.deferred_tokens);
        out.u64(self.early_asked_at.0);
        out.bool(self.capacity_freed);
        out.option(self.handoffs.as_ref(), |w, handoffs| handoffs.encode(w));
        self.held.encode(out);
        out.u32(self.reserved_requests);
        for class in &self.inflight {
            out.u32(class.requests);
            out.u64(class.blocks);
        }
        out.u32(self.running_requests);
        out.u64(self.round);
        out.bool(self.wants_dispatch);
        out.u64(self.kept_since.0);
        out.bool(self.kept_idle);
        out.u64(self.starve_at.0);
        self.overload.encode(out);
        self.stance.encode(out);
        self.watch.encode(out);
        self.soundness.encode(out);
        self.facts.encode(out);
        out.u64(self.digest.0);
        self.counters.encode(out);
    }

    fn decode(from: &mut Reader<'_>, config: GatewayConfig) -> Result<Self, DecodeError> {
        Ok(Self {
            clock: MonotoneNow::decode(from)?,
            now: Instant(from.u64()?),
            generation: Generation(from.u64()?),
            draining: from.bool()?,
            requests: Requests::decode(from, &config)?,
            flows: Flows::decode(from, config.flows_max)?,
            ledger: Ledger::decode(from, config.tenants_max, config.quota_window)?,
            share: super::share::Share::decode(from)?,
            replicas: Replicas::from_table(Table::decode(from, config.replicas_max, |from| {
                let replica = decode_replica(from)?;
                Ok((replica.facts.replica, replica))
            })?),
            directory: Directory::decode(from, config.directory_keys_max, config.replicas_max)?,
            cache_due: Instant(from.u64()?),
            heat: PrefixHeat::decode(from)?,
            sessions: Sessions::decode(from)?,
            outputs: OutputEstimator::decode(from)?,
            queue: decode_queue(from)?,
            deferred: List::decode(from)?,
            deferred_tokens: from.u64()?,
            early_asked_at: Instant(from.u64()?),
            capacity_freed: from.bool()?,
            handoffs: {
                let handoffs = from.option(|from| Handoffs::decode(&config, from))?;
                if handoffs.is_some() != config.handoff.is_some() {
                    return Err(DecodeError::Invalid("hand-offs"));
                }
                handoffs
            },
            held: List::decode(from)?,
            reserved_requests: from.u32()?,
            inflight: {
                let mut inflight = [Inflight::default(); ClassRank::COUNT];
                for class in &mut inflight {
                    *class = Inflight { requests: from.u32()?, blocks: from.u64()? };
                }
                inflight
            },
            running_requests: from.u32()?,
            round: from.u64()?,
            wants_dispatch: from.bool()?,
            kept_since: Instant(from.u64()?),
            kept_idle: from.bool()?,
            starve_at: Instant(from.u64()?),
            overload: Overload::decode(from)?,
            stance: StanceState::decode(from)?,
            watch: Watch::decode(from, config.no_progress)?,
            soundness: Soundness::decode(from)?,
            facts: Facts::decode(from)?,
            digest: Digest(from.u64()?),
            counters: GatewayCounters::decode(from)?,
            config,
        })
    }
}

fn decode_queue(from: &mut Reader<'_>) -> Result<Queue, DecodeError> {
    let mut queue = Queue::default();
    for class in &mut queue.classes {
        *class = ClassQueue { list: List::decode(from)?, tokens: from.u64()?, need_blocks: from.u64()? };
    }
    queue.requests = from.u32()?;
    queue.tokens = from.u64()?;
    queue.need_blocks = from.u64()?;
    queue.tickets = from.u64()?;
    Ok(queue)
}

impl GatewayCounters {
    fn fields(&self) -> [u64; 15] {
        [
            self.arrived,
            self.ended,
            self.dispatched,
            self.refused_dispatches,
            self.returned,
            self.stale,
            self.fallbacks,
            self.stances,
            self.withheld,
            self.keeps_ended,
            self.replicas_beyond_limit,
            self.handed_off,
            self.kept_at_sender,
            self.handed_back,
            self.migrated,
        ]
    }

    fn encode(&self, out: &mut Writer) {
        self.fields().into_iter().for_each(|count| out.u64(count));
    }

    fn decode(from: &mut Reader<'_>) -> Result<Self, DecodeError> {
        Ok(Self {
            arrived: from.u64()?,
            ended: from.u64()?,
            dispatched: from.u64()?,
            refused_dispatches: from.u64()?,
            returned: from.u64()?,
            stale: from.u64()?,
            fallbacks: from.u64()?,
            stances: from.u64()?,
            withheld: from.u64()?,
            keeps_ended: from.u64()?,
            replicas_beyond_limit: from.u64()?,
            handed_off: from.u64()?,
            kept_at_sender: from.u64()?,
            handed_back: from.u64()?,
            migrated: from.u64()?,
        })
    }
}

impl Requests {
    fn encode(&self, out: &mut Writer) {
        self.table.encode(out, |out, _, request| encode_request(request, out));
        self.outer.encode(self.table.slots_end(), out);
        self.inner.encode(self.table.slots_end(), out);
        self.finished.encode(out, |out, id, delivery| {
            out.u64(id.0);
            out.u8(*delivery as u8);
        });
    }

    fn decode(from: &mut Reader<'_>, config: &GatewayConfig) -> Result<Self, DecodeError> {
        let mut requests = Self::new(config);
        requests.table = Table::decode(from, Self::capacity(config), |from| {
            let request = decode_request(from)?;
            Ok((request.manifest.request, request))
        })?;
        let (end, slots) = (requests.table.slots_end(), requests.table.capacity());
        requests.outer = Links::decode(from, end, slots)?;
        requests.inner = Links::decode(from, end, slots)?;
        requests.finished =
            Table::decode(from, FINISHED_REQUESTS_KEPT, |from| Ok((RequestId(from.u64()?), decode_delivery(from)?)))?;
        for slot in 0..end {
            let Some(request) = requests.table.get(slot) else { continue };
            let tpot = request.manifest.slo_tpot.0;
            if matches!(request.place, Place::Running { .. }) {
                requests.tpot.set(slot, tpot, u64::from(slot));
            }
            requests.retime(slot, config);
        }
        Ok(requests)
    }
}

fn decode_delivery(from: &mut Reader<'_>) -> Result<Delivery, DecodeError> {
    Delivery::ALL.get(usize::from(from.u8()?)).copied().ok_or(DecodeError::Invalid("delivery state"))
}

fn encode_request(request: &Request, out: &mut Writer) {
    request.manifest.encode(out);
    out.u8(request.class.get());
    out.u32(request.max_output_tokens);
    out.u32(request.reserve_output_tokens);
    out.u32(request.expected_output_tokens);
    out.u16(request.attempt);
    out.u16(request.migrations);
    out.u32(request.carried_output);
    out.u64(request.first_token_at.0);
    out.u8(request.compute as u8);
    out.u8(request.delivery as u8);
    let (tag, replica) = match request.place {
        Place::Deferred => (0, NONE),
        Place::Queued => (1, NONE),
        Place::Held => (2, NONE),
        Place::Reserved { replica } => (3, replica),
        Place::Running { replica } => (4, replica),
        Place::Settling { replica } => (5, replica),
    };
    out.u8(tag);
    out.u32(replica);
    out.u32(request.tenant);
    out.u32(request.flow);
    out.u64(request.reserved_tokens);
    out.u32(request.deferrals);
    out.u64(request.asked_at.0);
    out.u64(request.until.0);
    out.option(request.outcome, |out, outcome| {
        let (kind, detail) = outcome.code();
        out.u8(kind);
        out.u16(detail);
    });
    encode_wait(&request.wait, out);
    encode_run(&request.run, out);
}

fn decode_request(from: &mut Reader<'_>) -> Result<Request, DecodeError> {
    Ok(Request {
        manifest: Arc::new(Manifest::decode(from)?),
        class: ClassRank::new(from.u8()?).ok_or(DecodeError::Invalid("class"))?,
        max_output_tokens: from.u32()?,
        reserve_output_tokens: from.u32()?,
        expected_output_tokens: from.u32()?,
        attempt: from.u16()?,
        migrations: from.u16()?,
        carried_output: from.u32()?,
        first_token_at: Instant(from.u64()?),
        compute: Compute::ALL.get(usize::from(from.u8()?)).copied().ok_or(DecodeError::Invalid("compute state"))?,
        delivery: decode_delivery(from)?,
        place: match (from.u8()?, from.u32()?) {
            (0, _) => Place::Deferred,
            (1, _) => Place::Queued,
            (2, _) => Place::Held,
            (3, replica) => Place::Reserved { replica },
            (4, replica) => Place::Running { replica },
            (5, replica) => Place::Settling { replica },
            _ => return Err(DecodeError::Invalid("place")),
        },
        tenant: from.u32()?,
        flow: from.u32()?,
        reserved_tokens: from.u64()?,
        deferrals: from.u32()?,
        asked_at: Instant(from.u64()?),
        until: Instant(from.u64()?),
        outcome: from.option(|from| {
            let (kind, detail) = (from.u8()?, from.u16()?);
            Outcome::from_code(kind, detail).ok_or(DecodeError::Invalid("outcome"))
        })?,
        wait: decode_wait(from)?,
        run: decode_run(from)?,
    })
}

fn encode_wait(wait: &Wait, out: &mut Writer) {
    out.u64(wait.ticket);
    out.u64(wait.first.0);
    out.u64(wait.since.0);
    out.u64(wait.before.0);
    out.u32(wait.skips);
    out.u64(wait.skipped_round);
    out.u32(wait.withheld);
    out.bool(wait.whole);
    out.bool(wait.colocate);
    for (replica, epoch) in &wait.ranked.rows {
        out.u32(*replica);
        out.u64(epoch.0);
    }
    out.u8(wait.ranked.len);
    out.u8(wait.ranked.tried);
    out.u64(wait.held.0);
    out.u64(wait.held_since.0);
    out.u64(wait.held_idle.0);
    out.u64(wait.idle_since.0);
}

fn decode_wait(from: &mut Reader<'_>) -> Result<Wait, DecodeError> {
    Ok(Wait {
        ticket: from.u64()?,
        first: Instant(from.u64()?),
        since: Instant(from.u64()?),
        before: Duration(from.u64()?),
        skips: from.u32()?,
        skipped_round: from.u64()?,
        withheld: from.u32()?,
        whole: from.bool()?,
        colocate: from.bool()?,
        ranked: {
            let mut ranked = Ranked::default();
            for row in &mut ranked.rows {
                *row = (from.u32()?, ReplicaEpoch(from.u64()?));
            }
            (ranked.len, ranked.tried) = (from.u8()?, from.u8()?);
            if usize::from(ranked.len) > ranked.rows.len() || ranked.tried > ranked.len {
                return Err(DecodeError::Invalid("ranking"));
            }
            ranked
        },
        lead: Lead::default(),
        held: Duration(from.u64()?),
        held_since: Instant(from.u64()?),
        held_idle: Duration(from.u64()?),
        idle_since: Instant(from.u64()?),
    })
}

fn encode_run(run: &Run, out: &mut Writer) {
    out.u64(run.number.0);
    encode_need(&run.need, out);
    out.u32(run.predicted_cached_tokens);
    out.u32(run.cached_tokens);
    out.u64(run.dispatched_at.0);
    out.u64(run.first_token_at.0);
    out.bool(run.started);
    out.u64(run.prefill_tokens);
    out.u64(run.output_tokens);
    out.u64(run.expected_left);
    out.u64(run.unsettled_tokens);
    out.bool(run.emitted);
    out.u32(run.preemptions);
    out.option(run.transfer, |w, transfer| w.u64(transfer.0));
    out.u8(run.rank_taken);
}

fn decode_run(from: &mut Reader<'_>) -> Result<Run, DecodeError> {
    Ok(Run {
        number: DispatchNumber(from.u64()?),
        need: decode_need(from)?,
        predicted_cached_tokens: from.u32()?,
        cached_tokens: from.u32()?,
        dispatched_at: Instant(from.u64()?),
        first_token_at: Instant(from.u64()?),
        started: from.bool()?,
        prefill_tokens: from.u64()?,
        output_tokens: from.u64()?,
        expected_left: decode_holding(from)?,
        unsettled_tokens: from.u64()?,
        emitted: from.bool()?,
        preemptions: from.u32()?,
        transfer: from.option(Reader::u64)?.map(TransferId),
        rank_taken: from.u8()?,
    })
}

fn encode_need(need: &Need, out: &mut Writer) {
    out.u32(need.slots);
    out.u64(need.prefill_tokens);
    out.u64(need.blocks);
}

/// Larger than any number of tokens or blocks of one request, small enough that sums over all of them cannot overflow.
const HOLDING_MAX: u64 = 1 << 40;

fn decode_holding(from: &mut Reader<'_>) -> Result<u64, DecodeError> {
    let value = from.u64()?;
    if value > HOLDING_MAX { Err(DecodeError::Invalid("holding")) } else { Ok(value) }
}

fn decode_need(from: &mut Reader<'_>) -> Result<Need, DecodeError> {
    let slots = from.u32()?;
    if slots > u32::from(u16::MAX) {
        return Err(DecodeError::Invalid("number of slots"));
    }
    Ok(Need { slots, prefill_tokens: decode_holding(from)?, blocks: decode_holding(from)? })
}

fn encode_replica(replica: &Replica, out: &mut Writer) {
    let facts = &replica.facts;
    out.u32(facts.replica.0);
    out.u64(facts.epoch.0);
    out.u8(facts.role_code);
    out.u32(facts.total_blocks);
    out.u32(facts.slots);
    out.u32(facts.round_tokens);
    out.u32(facts.context_tokens_max);
    out.u64(facts.speed_ppm);
    out.u8(facts.zone_rank);
    out.u32(facts.domain);
    out.bool(replica.draining);
    out.u64(replica.since.0);
    out.option(replica.report.as_ref(), |out, report| encode_report(report, out));
    out.u64(replica.dispatched.0);
    replica.requests.encode(out);
    out.u32(replica.first_uncovered);
    encode_need(&replica.inflight, out);
    out.u64(replica.inflight_prefill_tokens);
    encode_need(&replica.uncovered, out);
    encode_need(&replica.lent, out);
    out.u32(replica.uncovered_requests);
    out.u64(replica.expected_left);
    out.option(replica.refused, |out, number| out.u64(number.0));
    out.list(replica.reserved.as_slice().iter(), |out, slot| out.u32(*slot));
    out.u32(replica.withheld_for);
    out.u64(replica.cache.sequence);
    out.bool(replica.cache.complete);
    out.u64(replica.cache.as_of.0);
    out.bool(replica.cache.believed);
}

fn decode_replica(from: &mut Reader<'_>) -> Result<Replica, DecodeError> {
    Ok(Replica {
        facts: ReplicaFacts {
            replica: ReplicaId(from.u32()?),
            epoch: ReplicaEpoch(from.u64()?),
            role_code: from.u8()?,
            total_blocks: from.u32()?,
            slots: from.u32()?,
            round_tokens: from.u32()?,
            context_tokens_max: from.u32()?,
            speed_ppm: from.u64()?,
            zone_rank: from.u8()?,
            domain: from.u32()?,
        },
        draining: from.bool()?,
        since: Instant(from.u64()?),
        report: from.option(decode_report)?,
        dispatched: DispatchNumber(from.u64()?),
        requests: List::decode(from)?,
        first_uncovered: from.u32()?,
        inflight: decode_need(from)?,
        inflight_prefill_tokens: from.u64()?,
        uncovered: decode_need(from)?,
        lent: decode_need(from)?,
        uncovered_requests: from.u32()?,
        expected_left: from.u64()?,
        refused: from.option(|from| Ok(DispatchNumber(from.u64()?)))?,
        reserved: {
            let slots: Vec<u32> = from.list(Reader::u32)?;
            let mut reserved = Reserved::default();
            if !slots.iter().all(|slot| reserved.push(*slot)) {
                return Err(DecodeError::Invalid("number of reserved requests"));
            }
            reserved
        },
        withheld_for: from.u32()?,
        cache: CacheState {
            sequence: from.u64()?,
            complete: from.bool()?,
            as_of: Instant(from.u64()?),
            believed: from.bool()?,
        },
    })
}

fn encode_report(report: &Report, out: &mut Writer) {
    out.u64(report.number);
    out.u64(report.as_of.0);
    out.u64(report.covers.0);
    out.u32(report.credit.requests);
    out.u64(report.credit.prefill_tokens);
    out.u64(report.credit.blocks);
    let load = &report.load;
    for number in [
        load.total_blocks,
        load.active_blocks,
        load.cached_blocks,
        load.free_blocks,
        load.reclaimable_blocks,
        load.transfer_blocks,
        load.reserved_blocks,
        load.ready_requests,
        load.ready_blocks,
        load.running_requests,
        load.preempted_requests,
    ] {
        out.u32(number);
    }
    for number in [
        load.growth_blocks,
        load.prefill_tokens,
        load.step.0,
        load.busy.0,
        load.hit_blocks_per_sec,
        load.prefill_tokens_per_sec,
        load.decode_tokens_per_sec,
        load.prefill_token_ns,
        report.cache_sequence,
    ] {
        out.u64(number);
    }
    load.class_active_blocks.iter().for_each(|blocks| out.u32(*blocks));
}

fn decode_report(from: &mut Reader<'_>) -> Result<Report, DecodeError> {
    let mut report = Report {
        number: from.u64()?,
        as_of: Instant(from.u64()?),
        covers: DispatchNumber(from.u64()?),
        credit: Credit { requests: from.u32()?, prefill_tokens: from.u64()?, blocks: from.u64()? },
        load: Load::default(),
        cache_sequence: 0,
    };
    let load = &mut report.load;
    load.total_blocks = from.u32()?;
    load.active_blocks = from.u32()?;
    load.cached_blocks = from.u32()?;
    load.free_blocks = from.u32()?;
    load.reclaimable_blocks = from.u32()?;
    load.transfer_blocks = from.u32()?;
    load.reserved_blocks = from.u32()?;
    load.ready_requests = from.u32()?;
    load.ready_blocks = from.u32()?;
    load.running_requests = from.u32()?;
    load.preempted_requests = from.u32()?;
    load.growth_blocks = from.u64()?;
    load.prefill_tokens = from.u64()?;
    load.step = Duration(from.u64()?);
    load.busy = Duration(from.u64()?);
    load.hit_blocks_per_sec = from.u64()?;
    load.prefill_tokens_per_sec = from.u64()?;
    load.decode_tokens_per_sec = from.u64()?;
    load.prefill_token_ns = from.u64()?;
    report.cache_sequence = from.u64()?;
    for blocks in &mut report.load.class_active_blocks {
        *blocks = from.u32()?;
    }
    Ok(report)
}
