//! How is the machine written down and read back? What it returns from [`Replica::decode`] goes on exactly as the original would.

use alloc::sync::Arc;
use alloc::vec::Vec;

use penstock_base::codec::{DecodeError, Reader, Writer};
use penstock_base::limits::SEQUENCES_MAX;
use penstock_base::time::MonotoneNow;
use penstock_base::{
    BatchId, BlockKey, ClassRank, DispatchNumber, GatewayEpoch, Generation, Instant, Manifest, Outcome, RequestId,
    SeqId, TransferId,
};
use penstock_kv::{BlockTable, Kv};
use penstock_policy_api::{EvictionSeat, VictimsSeat};

use super::confirm::{Batch, BatchRow};
use super::cost::{CostFit, StepShape};
use super::facts::Facts;
use super::handoff::Parties;
use super::peers::{Peers, PreemptOrder};
use super::report::Meters;
use super::sequence::{Done, Held, NONE, Place, Request, Sending, Sequence, Vacancies};
use super::{Replica, ReplicaConfig};

/// Version of the format.
const VERSION: u32 = 4;

/// What a frozen replica reads back as: the reason is for people, and was told when it happened.
const BROKEN_BEFORE: &str = "it was frozen before it was saved";

impl Replica {
    /// Writes the whole state for a snapshot. Equal states give equal bytes.
    pub fn encode(&self, out: &mut Writer) {
        out.u32(VERSION);
        self.clock.encode(out);
        self.kv.encode(out);
        out.list(self.requests.iter(), |w, request| w.option(request.as_ref(), |w, request| request.encode(w)));
        words(out, self.request_entries.stack());
        out.list(self.sequences.iter(), |w, seq| seq.encode(w));
        words(out, self.sequence_entries.stack());
        for list in [&self.running, &self.resume, &self.ready, &self.drops] {
            words(out, list);
        }
        out.list(self.batches.iter(), |w, batch| batch.encode(w));
        out.u64(self.next_batch.0);
        self.peers.encode(out);
        self.victims_seat.encode(out);
        self.eviction_seat.encode(out);
        self.facts.encode(out);
        self.cost.encode(out);
        self.meters.encode(out);
        out.option(self.parties.as_ref(), |w, parties| parties.encode(w));
        out.option(self.preempt_order, |w, order| {
            w.u64(order.blocks);
            w.u8(order.class.get());
        });
        out.u8(self.ladder_level);
        out.u32(self.growth_blocks);
        out.u32(self.prefill_rounds);
        out.u64(self.generation.0);
        out.bool(self.draining);
        out.bool(self.quiet);
        out.bool(self.broken.is_some());
        for number in [
            self.serial,
            self.joined,
            self.report_number,
            self.cache_events_lost,
            self.unstored_told,
            self.steps,
            self.stale_count,
            self.next_deadline.0,
            self.digest.0,
        ] {
            out.u64(number);
        }
    }

    /// Reads what [`Self::encode`] wrote at the same configuration.
    ///
    /// # Errors
    /// Bytes of another version or configuration, or a state whose invariants do not hold.
    pub fn decode(config: ReplicaConfig, from: &mut Reader<'_>) -> Result<Self, DecodeError> {
        let found = from.u32()?;
        if found != VERSION {
            return Err(DecodeError::Version { found, expected: VERSION });
        }
        let mut to = Self::new(config, Instant::ZERO);
        to.clock = MonotoneNow::decode(from)?;
        to.kv = Kv::decode(to.config.kv(), from)?;
        to.read_requests(from)?;
        to.read_sequences(from)?;
        for which in 0..4 {
            let most = if which == 2 { to.requests.len() } else { to.sequences.len() };
            let read = read_words(from, most as u32)?;
            let list = match which {
                0 => &mut to.running,
                1 => &mut to.resume,
                2 => &mut to.ready,
                _ => &mut to.drops,
            };
            list.extend(read);
        }
        to.read_batches(from)?;
        to.peers = Peers::decode(from)?;
        to.victims_seat = VictimsSeat::decode(from)?;
        to.eviction_seat = EvictionSeat::decode(from)?;
        to.facts = Facts::decode(from)?;
        to.cost = CostFit::decode(from)?;
        to.meters = Meters::decode(from)?;
        let party = to.config.party();
        to.parties = from.option(|r| {
            let party = party.ok_or(DecodeError::Invalid("party of hand-offs"))?;
            Parties::decode(party, r)
        })?;
        if to.parties.is_some() != party.is_some() {
            return Err(DecodeError::Invalid("party of hand-offs"));
        }
        to.preempt_order = from.option(|r| Ok(PreemptOrder { blocks: r.u64()?, class: class(r)? }))?;
        to.ladder_level = from.u8()?;
        to.growth_blocks = from.u32()?;
        to.prefill_rounds = from.u32()?;
        to.generation = Generation(from.u64()?);
        to.draining = from.bool()?;
        to.quiet = from.bool()?;
        to.broken = from.bool()?.then_some(BROKEN_BEFORE);
        for number in [
            &mut to.serial,
            &mut to.joined,
            &mut to.report_number,
            &mut to.cache_events_lost,
            &mut to.unstored_told,
            &mut to.steps,
            &mut to.stale_count,
            &mut to.next_deadline.0,
            &mut to.digest.0,
        ] {
            *number = from.u64()?;
        }
        if to.broken.is_none() {
            to.check().map_err(DecodeError::Invalid)?;
        }
        Ok(to)
    }

    fn read_requests(&mut self, from: &mut Reader<'_>) -> Result<(), DecodeError> {
        let requests = from.list(|r| r.option(Request::decode))?;
        if requests.len() != self.requests.len() {
            return Err(DecodeError::Invalid("request count"));
        }
        for (entry, request) in (0u32..).zip(requests) {
            let Some(request) = request else { continue };
            let places = request.sequences.iter().all(|seq| *seq == NONE || *seq < self.config.slots);
            let table = request.prefix.is_some().then(|| self.tables.pop());
            let sane = places && usize::from(request.leader) < request.sequences.len() && table != Some(None);
            if !sane || self.by_id.insert(request.id(), entry).is_some() {
                return Err(DecodeError::Invalid("request"));
            }
            self.requests[entry as usize] = Some(request);
        }
        self.request_entries = Vacancies::from_stack(read_words(from, self.requests.len() as u32)?);
        Ok(())
    }

    fn read_sequences(&mut self, from: &mut Reader<'_>) -> Result<(), DecodeError> {
        let sequences = from.list(Sequence::decode)?;
        let capacity = self.config.table_blocks_max();
        let sane = sequences.iter().all(|seq| {
            let here = self.requests.get(seq.request as usize).is_some_and(Option::is_some);
            let vacant = seq.place == Place::Vacant;
            let counted = seq.max_output > 0 && u64::from(seq.prompt) + u64::from(seq.max_output) < 1 << 32;
            seq.table.capacity() == capacity
                && seq.index < SEQUENCES_MAX
                && (vacant || (here && counted && seq.prompt > 0))
        });
        if sequences.len() != self.sequences.len() || !sane {
            return Err(DecodeError::Invalid("sequence"));
        }
        self.sequences = sequences;
        self.sequence_entries = Vacancies::from_stack(read_words(from, self.config.slots)?);
        Ok(())
    }

    fn read_batches(&mut self, from: &mut Reader<'_>) -> Result<(), DecodeError> {
        let batches = from.list(Batch::decode)?;
        let (slots, requests) = (self.config.slots, self.requests.len() as u32);
        let known = |row: &BatchRow| row.entry < slots && row.request < requests && row.tokens > 0;
        if !batches.iter().flat_map(|batch| &batch.rows).all(known) {
            return Err(DecodeError::Invalid("row in flight"));
        }
        self.batches.extend(batches);
        self.next_batch = BatchId(from.u64()?);
        Ok(())
    }
}

fn words(out: &mut Writer, list: &[u32]) {
    out.list(list.iter(), |w, word| w.u32(*word));
}

fn read_words(from: &mut Reader<'_>, below: u32) -> Result<Vec<u32>, DecodeError> {
    let list = from.list(Reader::u32)?;
    if list.len() > below as usize || list.iter().any(|word| *word >= below) {
        return Err(DecodeError::Invalid("entry"));
    }
    // The capacity of a list that never outgrows its bound.
    let mut roomy = Vec::with_capacity(below as usize);
    roomy.extend(list);
    Ok(roomy)
}

fn class(from: &mut Reader<'_>) -> Result<ClassRank, DecodeError> {
    ClassRank::new(from.u8()?).ok_or(DecodeError::Invalid("class"))
}

fn put_outcome(out: &mut Writer, outcome: Outcome) {
    let (kind, detail) = outcome.code();
    out.u8(kind);
    out.u16(detail);
}

fn outcome(from: &mut Reader<'_>) -> Result<Outcome, DecodeError> {
    Outcome::from_code(from.u8()?, from.u16()?).ok_or(DecodeError::Invalid("outcome"))
}

fn put_batch(out: &mut Writer, batch: Option<BatchId>) {
    out.option(batch, |w, batch| w.u64(batch.0));
}

fn batch(from: &mut Reader<'_>) -> Result<Option<BatchId>, DecodeError> {
    Ok(from.option(Reader::u64)?.map(BatchId))
}

impl Request {
    fn encode(&self, out: &mut Writer) {
        self.manifest.encode(out);
        out.u64(self.serial);
        out.u16(self.gateway.0);
        out.u16(self.attempt);
        out.u64(self.number.0);
        out.u8(self.class.get());
        for number in [self.max_output, self.reserve_output, self.expected_output] {
            out.u32(number);
        }
        out.u32(self.shared_blocks);
        out.u32(self.own_blocks);
        out.bool(self.ready);
        out.option(self.prefix.as_ref(), |w, table| table.encode(w));
        self.sequences.iter().for_each(|entry| out.u32(*entry));
        out.u16(self.live);
        out.u16(self.leader);
        out.bool(self.waiting);
        out.bool(self.started);
        for number in [self.cached_tokens, self.charged, self.output_tokens, self.preemptions] {
            out.u32(number);
        }
        out.bool(self.first_token);
        out.u64(self.first_token_at.0);
        out.option(self.failure, put_outcome);
        out.option(self.first, put_outcome);
        out.option(self.sending, |w, sending| {
            w.u64(sending.transfer.0);
            w.u32(sending.first_block);
            w.u32(sending.placed);
        });
        out.option(self.adopted, |w, transfer| w.u64(transfer.0));
        out.bool(self.silent);
    }

    fn decode(from: &mut Reader<'_>) -> Result<Self, DecodeError> {
        Ok(Self {
            manifest: Arc::new(Manifest::decode(from)?),
            serial: from.u64()?,
            gateway: GatewayEpoch(from.u16()?),
            attempt: from.u16()?,
            number: DispatchNumber(from.u64()?),
            class: class(from)?,
            max_output: from.u32()?,
            reserve_output: from.u32()?,
            expected_output: from.u32()?,
            shared_blocks: from.u32()?,
            own_blocks: from.u32()?,
            ready: from.bool()?,
            prefix: from.option(BlockTable::decode)?,
            sequences: {
                let mut sequences = [NONE; SEQUENCES_MAX as usize];
                for entry in &mut sequences {
                    *entry = from.u32()?;
                }
                sequences
            },
            live: from.u16()?,
            leader: from.u16()?,
            waiting: from.bool()?,
            started: from.bool()?,
            cached_tokens: from.u32()?,
            charged: from.u32()?,
            output_tokens: from.u32()?,
            preemptions: from.u32()?,
            first_token: from.bool()?,
            first_token_at: Instant(from.u64()?),
            failure: from.option(outcome)?,
            first: from.option(outcome)?,
            sending: from
                .option(|r| Ok(Sending { transfer: TransferId(r.u64()?), first_block: r.u32()?, placed: r.u32()? }))?,
            adopted: from.option(Reader::u64)?.map(TransferId),
            silent: from.bool()?,
            done: Done::default(),
        })
    }
}

impl Sequence {
    fn encode(&self, out: &mut Writer) {
        out.u8(self.place as u8);
        out.u64(self.serial);
        out.u32(self.request);
        out.u16(self.index);
        self.table.encode(out);
        out.list(self.keys.iter(), |w, key| w.raw(&key.0));
        for number in [
            self.prompt,
            self.max_output,
            self.scheduled,
            self.computed,
            self.confirmed,
            self.generated,
            self.delivered,
            self.sampled,
            self.inflight,
            self.told,
            self.preemptions,
        ] {
            out.u32(number);
        }
        out.option(self.source, |w, (batch, row)| {
            w.u64(batch.0);
            w.u32(row);
        });
        put_batch(out, self.last_batch);
        put_batch(out, self.shares);
        out.bool(self.opened);
        out.bool(self.resuming);
        for number in [self.resume_batch.0, self.resume_at.0, self.joined, self.joined_at.0] {
            out.u64(number);
        }
        out.u8(self.held as u8);
    }

    fn decode(from: &mut Reader<'_>) -> Result<Self, DecodeError> {
        let place = match from.u8()? {
            0 => Place::Vacant,
            1 => Place::Waiting,
            2 => Place::Running,
            3 => Place::Preempted,
            _ => return Err(DecodeError::Invalid("place")),
        };
        let (serial, request, index) = (from.u64()?, from.u32()?, from.u16()?);
        let (table, keys) = (BlockTable::decode(from)?, from.list(BlockKey::decode)?);
        let mut seq = Self { place, serial, request, index, table, keys, ..Self::vacant(0) };
        for number in [
            &mut seq.prompt,
            &mut seq.max_output,
            &mut seq.scheduled,
            &mut seq.computed,
            &mut seq.confirmed,
            &mut seq.generated,
            &mut seq.delivered,
            &mut seq.sampled,
            &mut seq.inflight,
            &mut seq.told,
            &mut seq.preemptions,
        ] {
            *number = from.u32()?;
        }
        seq.source = from.option(|r| Ok((BatchId(r.u64()?), r.u32()?)))?;
        seq.last_batch = batch(from)?;
        seq.shares = batch(from)?;
        seq.opened = from.bool()?;
        seq.resuming = from.bool()?;
        for number in [&mut seq.resume_batch.0, &mut seq.resume_at.0, &mut seq.joined, &mut seq.joined_at.0] {
            *number = from.u64()?;
        }
        seq.held = match from.u8()? {
            0 => Held::Free,
            1 => Held::Prompt,
            2 => Held::Token,
            3 => Held::Stop,
            _ => return Err(DecodeError::Invalid("kept token")),
        };
        Ok(seq)
    }
}

impl Batch {
    fn encode(&self, out: &mut Writer) {
        out.u64(self.id.0);
        out.u32(self.shape.prefill_tokens);
        out.u32(self.shape.decode_rows);
        out.u64(self.shape.kv_tokens);
        out.list(self.rows.iter(), |w, row| {
            for number in [row.entry, row.request, row.start, row.tokens] {
                w.u32(number);
            }
            for number in [row.serial, row.request_serial, row.seq.request.0] {
                w.u64(number);
            }
            w.u16(row.seq.index);
            w.bool(row.sample);
            w.bool(row.opens);
        });
    }

    fn decode(from: &mut Reader<'_>) -> Result<Self, DecodeError> {
        let id = BatchId(from.u64()?);
        let shape = StepShape { prefill_tokens: from.u32()?, decode_rows: from.u32()?, kv_tokens: from.u64()? };
        let rows = from.list(|r| {
            let (entry, request, start, tokens) = (r.u32()?, r.u32()?, r.u32()?, r.u32()?);
            let (serial, request_serial, id) = (r.u64()?, r.u64()?, RequestId(r.u64()?));
            let (index, sample, opens) = (r.u16()?, r.bool()?, r.bool()?);
            let seq = SeqId { request: id, index };
            Ok(BatchRow { entry, serial, request, request_serial, seq, start, tokens, sample, opens })
        })?;
        let query_tokens = rows.iter().map(|row| u64::from(row.tokens)).sum();
        Ok(Self { id, rows, shape, query_tokens })
    }
}
