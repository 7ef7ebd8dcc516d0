//! The movers: what carries KV between replicas of a cluster, and the words that two of them have for each other.
//!
//! A chunk goes directly from replica to replica and takes its bytes' time. What is written is what lay in the sender's blocks when it was
//! posted, and it lies in the receiver's blocks when it has arrived. Words go by the gateway that leads the hand-off. All may be lost.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use penstock_base::{BlockRef, Duration, GatewayEpoch, Instant, ReplicaEpoch, SeqId, TransferId};
use penstock_kv::BlockState;
use penstock_sched::handoff::{Between, Grid, Part, Peer, Seal, SenderWord, ToReceiver, chunk_sum};
use penstock_sched::replica::{HandoffEffect, HandoffInput, ReplicaInput};

use super::{Event, World};
use crate::agenda::Node;
use crate::cluster::Sabotage;
use crate::executor::ensure;
use crate::owners::Who;
use crate::rng::{Rng, mix};
use crate::scenario::Faults;
use crate::workload::index_of;

/// A mover's own work: reading a book, closing a grant, summing up.
const CHORE: Duration = Duration::from_us(50);
/// How far words and chunks overtake each other where they do.
const OVERTAKING: u64 = 400_000_000;

/// What a mover reads for a prompt that is computed here.
struct Sent {
    seq: SeqId,
    grid: Grid,
    sources: Vec<BlockRef>,
    bound: Option<(Peer, Arc<[BlockRef]>)>,
    /// The first token, once it is sampled; none inside is the stop token.
    tail: Option<Option<u64>>,
    /// Chunks that wait for the port or are under way.
    queued: BTreeSet<u32>,
    /// Writes that read, or will.
    writes: u32,
    /// No write begins any more.
    stopped: bool,
}

/// What a mover lets another one write.
struct Granted {
    from: Peer,
    grid: Grid,
    blocks: Arc<[BlockRef]>,
    open: bool,
    tail: Option<Option<u64>>,
    /// What was said to be written, by chunk.
    said: BTreeMap<u32, u64>,
    /// Writes that were posted and have not arrived.
    writes: u32,
    /// A fence waits for them.
    fencing: bool,
}

/// What all movers hold.
pub(super) struct Movers {
    sent: BTreeMap<(Who, TransferId), Sent>,
    granted: BTreeMap<(Who, TransferId), Granted>,
    rng: Rng,
}

/// What one replica has for another.
#[derive(Clone, Debug)]
pub(super) enum Word {
    /// A machine's word.
    Machine { to: Peer, input: HandoffInput },
    /// A mover's: this chunk was written.
    Landed(Landed),
}

/// A chunk that was written, and the tail itself.
#[derive(Clone, Debug)]
pub(super) struct Landed {
    transfer: TransferId,
    from: Peer,
    to: Peer,
    stamp: Instant,
    index: u32,
    sent: u64,
    tail: Option<u64>,
}

impl Word {
    pub(super) fn to(&self) -> Peer {
        match self {
            Self::Machine { to, .. } => *to,
            Self::Landed(landed) => landed.to,
        }
    }
}

/// A chunk on its way.
#[derive(Clone, Debug)]
pub(super) struct Writing {
    notice: Landed,
    /// Place of the first block in the sequence.
    first_block: u32,
    blocks: Vec<BlockRef>,
    content: Vec<u64>,
    bytes: u64,
    /// A second copy of what was written before.
    again: bool,
}

fn who(peer: Peer) -> Who {
    (peer.replica.0 as usize, peer.epoch)
}

fn tail_digest(tail: Option<u64>) -> u64 {
    mix(tail.unwrap_or(0), 77)
}

fn digest(content: &[u64]) -> u64 {
    content.iter().fold(content.len() as u64, |sum, word| mix(sum, *word))
}

impl Movers {
    pub(super) fn new(rng: Rng) -> Self {
        Self { sent: BTreeMap::new(), granted: BTreeMap::new(), rng }
    }

    /// A mover ends with its replica.
    pub(super) fn forget(&mut self, replica: usize, epoch: ReplicaEpoch) {
        self.sent.retain(|(of, _), _| *of != (replica, epoch));
        self.granted.retain(|(of, _), _| *of != (replica, epoch));
    }

    /// What a mover still holds for hand-offs.
    pub(super) fn held(&self, of: Who) -> usize {
        let open = self.granted.iter().filter(|((by, _), granted)| *by == of && granted.open);
        self.sent.keys().filter(|(by, _)| *by == of).count() + open.count()
    }
}

impl World<'_> {
    fn peer_of(&self, (replica, epoch): Who) -> Peer {
        Peer { replica: penstock_base::ReplicaId(replica as u32), epoch }
    }

    fn chore(&mut self, (replica, epoch): Who, input: HandoffInput) {
        let at = self.agenda.now() + CHORE;
        self.agenda.put(at, Event::Tell { replica, epoch, input: ReplicaInput::Handoff(input) });
    }

    fn draw(&mut self, fault: Faults, one_in: u64) -> bool {
        self.scenario.faults.has(fault) && self.movers.rng.one_in(one_in)
    }

    /// Carries out what a replica wants of its driver.
    pub(super) fn carry_out_handoff(&mut self, of: Who, effect: &HandoffEffect) -> Result<(), String> {
        ensure(self.scenario.cluster.is_some(), || "a hand-off where none is configured".to_owned())?;
        match effect {
            HandoffEffect::ToReceiver(message) => {
                self.post(of, message.transfer, machine(message.to, HandoffInput::OfSender(message.clone())));
            }
            HandoffEffect::ToSender(message) => {
                self.post(of, message.transfer, machine(message.to, HandoffInput::OfReceiver(message.clone())));
            }
            HandoffEffect::Sending { transfer, seq, grid } => self.begin_sending(of, *transfer, *seq, *grid)?,
            HandoffEffect::Sources { transfer, blocks } => self.take_sources(of, *transfer, blocks)?,
            HandoffEffect::Bind { transfer, to, blocks } => {
                let sent = self.movers.sent.get_mut(&(of, *transfer));
                sent.ok_or_else(|| format!("{transfer} is bound and not sent"))?.bound = Some((*to, blocks.clone()));
            }
            HandoffEffect::Write { transfer, index, stamp } => self.write(of, *transfer, *index, *stamp)?,
            HandoffEffect::Sampled { transfer, seq, batch, row, tokens } => {
                let token = self.sampled_token(of, *seq, (*batch, *row))?;
                let tail = (*tokens > 0).then_some(token);
                if let Some(life) = self.replicas[of.0].lives.get_mut(&of.1) {
                    life.tails.insert(*seq, tail);
                }
                self.seal(of, *transfer, tail)?;
            }
            HandoffEffect::StopWrites(transfer) => self.stop_writes(of, *transfer),
            HandoffEffect::Continue { seq, .. } => {
                let attempt = self.attempt_here(of, *seq).unwrap_or_default();
                self.take_over(of, *seq, attempt)?;
                self.book(of)?.kept(seq.request)?;
            }
            HandoffEffect::Leave { seq } => self.leave_replica(of, *seq)?,
            HandoffEffect::Grant { transfer, to, grid, blocks } => {
                let granted = Granted {
                    from: *to,
                    grid: *grid,
                    blocks: blocks.clone(),
                    open: true,
                    tail: None,
                    said: BTreeMap::new(),
                    writes: 0,
                    fencing: false,
                };
                let before = self.movers.granted.insert((of, *transfer), granted);
                ensure(before.is_none(), || format!("{transfer} is granted twice"))?;
            }
            HandoffEffect::Fence(transfer) => self.fence(of, *transfer),
            HandoffEffect::Digest(transfer) => self.sum_up(of, *transfer)?,
            HandoffEffect::Adopt { transfer, seq, attempt } => self.adopt(of, *transfer, *seq, *attempt)?,
            HandoffEffect::Release { seq, tokens } => self.release(of, *seq, *tokens)?,
            HandoffEffect::Swept(_) => self.figures.swept += 1,
            HandoffEffect::Accepting(_) => {}
        }
        Ok(())
    }

    // --- Sending ---------------------------------------------------------------------------------------------------------------

    fn begin_sending(&mut self, of: Who, transfer: TransferId, seq: SeqId, grid: Grid) -> Result<(), String> {
        let (attempt, cap) = self.ordered(of, transfer)?;
        let manifest = Arc::clone(&self.planned[index_of(seq.request)].manifest);
        self.book(of)?.sending(&manifest, attempt, cap)?;
        let sent = Sent {
            seq,
            grid,
            sources: Vec::new(),
            bound: None,
            tail: None,
            queued: BTreeSet::new(),
            writes: 0,
            stopped: false,
        };
        let before = self.movers.sent.insert((of, transfer), sent);
        ensure(before.is_none(), || format!("{transfer} is sent twice"))
    }

    /// The blocks must hold what they are said to, from the moment that they may be read.
    fn take_sources(&mut self, of: Who, transfer: TransferId, blocks: &[BlockRef]) -> Result<(), String> {
        // A prompt goes on being computed after its writes were stopped: it may be decoded here.
        let Some(sent) = self.movers.sent.get_mut(&(of, transfer)) else { return Ok(()) };
        let first = sent.grid.first_block + sent.sources.len() as u32;
        sent.sources.extend(blocks);
        let seq = sent.seq;
        self.read(of, seq, first, blocks).map(|_| ())
    }

    /// What lies in the blocks of a prompt.
    fn read(&self, of: Who, seq: SeqId, first: u32, blocks: &[BlockRef]) -> Result<Vec<u64>, String> {
        let planned = &self.planned[index_of(seq.request)];
        let prompt = &planned.answers[usize::from(seq.index)].content[..planned.manifest.input_tokens as usize];
        let life = self.life(of).ok_or("a mover without its replica")?;
        life.executor.read(blocks, first, prompt)
    }

    fn kv_bytes(&self, tokens: u64) -> u64 {
        self.scenario.cluster.as_ref().map_or(0, |cluster| cluster.kv_token_bytes) * tokens
    }

    fn write(&mut self, of: Who, transfer: TransferId, index: u32, stamp: Instant) -> Result<(), String> {
        let now = self.agenda.now();
        let Some(sent) = self.movers.sent.get(&(of, transfer)) else {
            return Err(format!("a write of {transfer}, which is not sent"));
        };
        ensure(!sent.stopped, || format!("a write of {transfer} after its writes were stopped"))?;
        let Some((to, targets)) = sent.bound.clone() else { return Err(format!("a write of {transfer} to nowhere")) };
        let part = sent.grid.part(index).ok_or_else(|| format!("chunk {index} of {transfer}"))?;
        let mut notice = Landed { transfer, from: self.peer_of(of), to, stamp, index, sent: 0, tail: None };
        let Part::Kv { first_block, blocks, .. } = part else {
            notice.tail = sent.tail.ok_or_else(|| format!("the tail of {transfer} before its token"))?;
            notice.sent = tail_digest(notice.tail);
            self.post(of, transfer, Word::Landed(notice));
            return Ok(());
        };
        if sent.queued.contains(&index) {
            // Said again while it waits or travels: once is enough.
            return Ok(());
        }
        let first = (first_block - sent.grid.first_block) as usize;
        let into = targets[first..first + blocks as usize].to_vec();
        ensure(sent.sources.len() >= first + into.len(), || format!("chunk {index} of {transfer} is not computed"))?;
        let bytes = self.kv_bytes(into.len() as u64 * u64::from(self.scenario.replica.block_size_tokens));
        let (begins, at) = self.network.arrival(now, (of.0, who(to).0), bytes);
        let Some(cluster) = &self.scenario.cluster else { return Ok(()) };
        // Nothing may be under way for longer than all have agreed upon; where no fence stops it, waiting for the port counts as well.
        let posted = if cluster.one_sided { now } else { begins };
        if at > posted + cluster.handoff.leases.grace {
            self.figures.lost_words += 1;
            return Ok(());
        }
        if let Some(sent) = self.movers.sent.get_mut(&(of, transfer)) {
            sent.queued.insert(index);
        }
        let writing = Writing { notice, first_block, blocks: into, content: Vec::new(), bytes, again: false };
        self.agenda.put(begins, Event::Begin { writing: Box::new(writing), at });
        Ok(())
    }

    /// A write that waited for its port begins: what lies in the blocks now is what travels.
    pub(super) fn begin_write(&mut self, mut writing: Writing, at: Instant) -> Result<(), String> {
        let now = self.agenda.now();
        let (transfer, of, to) = (writing.notice.transfer, who(writing.notice.from), who(writing.notice.to));
        let Some(sent) = self.movers.sent.get(&(of, transfer)).filter(|sent| !sent.stopped) else { return Ok(()) };
        let seq = sent.seq;
        let wrong = self.scenario.sabotage == Some(Sabotage::WrongBlock);
        let mut place = (writing.first_block - sent.grid.first_block) as usize;
        if wrong && place + writing.blocks.len() < sent.sources.len() {
            place += 1;
        }
        let from = sent.sources[place..place + writing.blocks.len()].to_vec();
        let life = self.life(of).ok_or("a mover without its replica")?;
        for block in &from {
            let state = life.driven.machine().kv().pool().state(*block);
            let kept = matches!(state, Some(BlockState::Active | BlockState::Leased));
            ensure(kept, || format!("{transfer} reads {block:?}, which is {state:?}"))?;
        }
        writing.content = self.read(of, seq, writing.first_block, &from)?;
        writing.notice.sent = digest(&writing.content);
        let lost = self.network.apart(now, Node::Replica(of.0), Node::Replica(to.0)).is_some();
        // A fence takes the right to write away before anything is posted by it.
        let open = self.movers.granted.get(&(to, transfer)).is_some_and(|granted| granted.open);
        if lost || !open {
            if let Some(sent) = self.movers.sent.get_mut(&(of, transfer)) {
                sent.queued.remove(&writing.notice.index);
            }
            self.figures.lost_words += u64::from(lost);
            self.figures.writes_turned_away += u64::from(!open);
            return Ok(());
        }
        self.put_on_wire(of, to, writing, at);
        Ok(())
    }

    fn put_on_wire(&mut self, of: Who, to: Who, mut writing: Writing, at: Instant) {
        let (now, transfer) = (self.agenda.now(), writing.notice.transfer);
        let cluster = self.scenario.cluster.as_ref();
        let grace = cluster.map_or(Duration::ZERO, |cluster| cluster.handoff.leases.grace);
        // One-sided writes have used a part of the grace already, waiting for their port.
        let latest = if cluster.is_some_and(|cluster| cluster.one_sided) { at } else { now + grace };
        let latest = latest.max(at);
        let far = self.draw(Faults::OVERTAKING, 4);
        let late = |rng: &mut Rng| Duration(rng.below((latest.0 - at.0).min(OVERTAKING) + 1));
        let arrives = if far { at + late(&mut self.movers.rng) } else { at };
        if self.draw(Faults::BROKEN_CHUNKS, 6) {
            let place = self.movers.rng.below(writing.content.len() as u64) as usize;
            writing.content[place] ^= 1;
        }
        let sabotaged = self.scenario.sabotage == Some(Sabotage::SkipFence);
        let mut copies = vec![(arrives, writing.clone())];
        if self.draw(Faults::REPEATS, 5) {
            let again = at + late(&mut self.movers.rng);
            copies.push((again, Writing { again: true, ..writing.clone() }));
        }
        if sabotaged {
            writing.content[0] ^= 1;
            copies.push((at + Duration::from_ms(20), Writing { again: true, ..writing }));
        }
        for (at, writing) in copies {
            if let Some(sent) = self.movers.sent.get_mut(&(of, transfer)) {
                sent.writes += 1;
            }
            if let Some(granted) = self.movers.granted.get_mut(&(to, transfer)) {
                granted.writes += 1;
            }
            self.agenda.put(at, Event::Land(Box::new(writing)));
        }
    }

    /// All of the prompt is computed and its first token sampled.
    fn seal(&mut self, of: Who, transfer: TransferId, tail: Option<u64>) -> Result<(), String> {
        let Some(sent) = self.movers.sent.get_mut(&(of, transfer)) else { return Ok(()) };
        sent.tail = Some(tail);
        let (seq, grid, sources) = (sent.seq, sent.grid, sent.sources.clone());
        let mut sum = 0u64;
        for index in 0..grid.chunks() {
            let digest = match grid.part(index) {
                Some(Part::Kv { first_block, blocks, .. }) => {
                    let at = (first_block - grid.first_block) as usize;
                    let held = sources.get(at..at + blocks as usize);
                    digest(&self.read(
                        of,
                        seq,
                        first_block,
                        held.ok_or("a prompt is sampled before it is computed")?,
                    )?)
                }
                _ => tail_digest(tail),
            };
            sum = sum.wrapping_add(chunk_sum(index, digest));
        }
        let seal = Seal { sum, sampled_tokens: u32::from(tail.is_some()) };
        self.chore(of, HandoffInput::Sealed { transfer, seal });
        Ok(())
    }

    fn stop_writes(&mut self, of: Who, transfer: TransferId) {
        if self.scenario.sabotage == Some(Sabotage::KeepLeases) {
            return;
        }
        if let Some(sent) = self.movers.sent.get_mut(&(of, transfer)) {
            sent.stopped = true;
        }
        self.quiet(of, transfer);
    }

    /// Says that nothing reads any more, once that is so.
    fn quiet(&mut self, of: Who, transfer: TransferId) {
        let still = self.movers.sent.get(&(of, transfer)).is_some_and(|sent| !sent.stopped || sent.writes > 0);
        if !still {
            self.movers.sent.remove(&(of, transfer));
            self.chore(of, HandoffInput::Quiet(transfer));
        }
    }

    // --- Receiving -------------------------------------------------------------------------------------------------------------

    /// A chunk arrives.
    pub(super) fn land(&mut self, writing: Writing) -> Result<(), String> {
        let now = self.agenda.now();
        let Writing { notice, blocks, content, bytes, again, .. } = writing;
        let (transfer, index, from, to) = (notice.transfer, notice.index, who(notice.from), who(notice.to));
        let is_cut = self.network.apart(now, Node::Replica(from.0), Node::Replica(to.0)).is_some();
        let one_sided = self.scenario.cluster.as_ref().is_some_and(|cluster| cluster.one_sided);
        let granted = self.movers.granted.get(&(to, transfer));
        let open = granted.is_some_and(|granted| granted.open && granted.from == notice.from);
        let lands = self.life(to).is_some() && granted.is_some() && (open || one_sided) && !is_cut;
        if lands {
            self.write_blocks(to, transfer, &blocks, &content).map_err(|what| format!("replica {}: {what}", to.0))?;
            self.figures.chunks += 1;
            let computing = |sent: &Sent| sent.tail.is_none();
            self.figures.early_chunks += u64::from(self.movers.sent.get(&(from, transfer)).is_some_and(computing));
            self.figures.kv_bytes += bytes;
            if !again && self.life(from).is_some() {
                self.post(from, transfer, Word::Landed(notice));
            }
        } else {
            self.figures.lost_words += u64::from(is_cut);
            self.figures.writes_turned_away += u64::from(!is_cut);
        }
        if let Some(sent) = self.movers.sent.get_mut(&(from, transfer)) {
            sent.writes = sent.writes.saturating_sub(1);
            sent.queued.remove(&index);
            if sent.stopped {
                self.quiet(from, transfer);
            }
        }
        if let Some(granted) = self.movers.granted.get_mut(&(to, transfer)) {
            granted.writes = granted.writes.saturating_sub(1);
            if granted.fencing && granted.writes == 0 {
                granted.fencing = false;
                self.chore(to, HandoffInput::Fenced(transfer));
            }
        }
        Ok(())
    }

    fn write_blocks(
        &mut self,
        to: Who,
        transfer: TransferId,
        blocks: &[BlockRef],
        content: &[u64],
    ) -> Result<(), String> {
        let size = self.scenario.replica.block_size_tokens as usize;
        let Some(life) = self.replicas[to.0].lives.get_mut(&to.1) else { return Ok(()) };
        for (block, content) in blocks.iter().zip(content.chunks_exact(size)) {
            let state = life.driven.machine().kv().pool().state(*block);
            let fine = matches!(state, Some(BlockState::Landing | BlockState::Quarantined));
            ensure(fine, || format!("{transfer} writes to {block:?}, which is {state:?}"))?;
            self.figures.late_writes += u64::from(state == Some(BlockState::Quarantined));
            life.executor.land(*block, content)?;
        }
        Ok(())
    }

    /// The receiver's mover hears that a chunk was written, and looks.
    fn landed(&mut self, of: Who, landed: Landed) -> Result<(), String> {
        let Landed { transfer, from, to, stamp, index, sent, tail } = landed;
        let Some(granted) = self.movers.granted.get_mut(&(of, transfer)) else { return Ok(()) };
        if granted.from != from || !granted.open || to != (Peer { epoch: of.1, ..to }) {
            return Ok(());
        }
        granted.said.insert(index, sent);
        let arrived = match granted.grid.part(index) {
            Some(Part::Kv { first_block, blocks, .. }) => {
                let at = (first_block - granted.grid.first_block) as usize;
                let held = granted.blocks[at..at + blocks as usize].to_vec();
                digest(&self.life(of).map_or_else(Vec::new, |life| life.executor.lies_in(&held)))
            }
            _ => {
                granted.tail = Some(tail);
                tail_digest(tail)
            }
        };
        let arrived = if self.scenario.sabotage == Some(Sabotage::BlindSums) { sent } else { arrived };
        let body = ToReceiver { stamp, word: SenderWord::Chunk { index, sent, arrived } };
        let input = HandoffInput::OfSender(Between { transfer, from, to, body });
        self.tell_replica(of.0, of.1, ReplicaInput::Handoff(input))
    }

    fn fence(&mut self, of: Who, transfer: TransferId) {
        let one_sided = self.scenario.cluster.as_ref().is_some_and(|cluster| cluster.one_sided);
        let skip = self.scenario.sabotage == Some(Sabotage::SkipFence);
        if let Some(granted) = self.movers.granted.get_mut(&(of, transfer)) {
            granted.open &= skip;
            granted.fencing = one_sided && granted.writes > 0 && !skip;
            if granted.fencing {
                return;
            }
        }
        self.chore(of, HandoffInput::Fenced(transfer));
    }

    fn sum_up(&mut self, of: Who, transfer: TransferId) -> Result<(), String> {
        let Some(granted) = self.movers.granted.get(&(of, transfer)) else {
            return Err(format!("{transfer} is summed up and was not granted"));
        };
        let skip = self.scenario.sabotage == Some(Sabotage::SkipFence);
        ensure(!granted.open || skip, || format!("{transfer} is summed up while it may be written"))?;
        let life = self.life(of).ok_or("a mover without its replica")?;
        let blind = self.scenario.sabotage == Some(Sabotage::BlindSums);
        let mut sum = 0u64;
        for index in 0..granted.grid.chunks() {
            let digest = match granted.grid.part(index) {
                _ if blind => granted.said.get(&index).copied().unwrap_or_default(),
                Some(Part::Kv { first_block, blocks, .. }) => {
                    let at = (first_block - granted.grid.first_block) as usize;
                    digest(&life.executor.lies_in(&granted.blocks[at..at + blocks as usize]))
                }
                _ => tail_digest(granted.tail.flatten()),
            };
            sum = sum.wrapping_add(chunk_sum(index, digest));
        }
        self.chore(of, HandoffInput::Digested { transfer, sum });
        Ok(())
    }

    /// A request whose prompt was computed elsewhere is this replica's own.
    fn adopt(&mut self, of: Who, transfer: TransferId, seq: SeqId, attempt: u16) -> Result<(), String> {
        let (_, cap) = self.ordered(of, transfer)?;
        let manifest = Arc::clone(&self.planned[index_of(seq.request)].manifest);
        self.book(of)?.adopted(&manifest, attempt, cap)?;
        let tail = self.movers.granted.get(&(of, transfer)).and_then(|granted| granted.tail);
        let tail = tail.ok_or_else(|| format!("{seq} is adopted without its tail"))?;
        let swapped = self.scenario.sabotage == Some(Sabotage::SwapTail);
        let Some(life) = self.replicas[of.0].lives.get_mut(&of.1) else { return Ok(()) };
        life.tails.insert(seq, tail.map(|token| token ^ u64::from(swapped)));
        if self.scenario.sabotage != Some(Sabotage::SkipFence) {
            self.movers.granted.remove(&(of, transfer));
        }
        self.take_over(of, seq, attempt)
    }

    fn take_over(&mut self, of: Who, seq: SeqId, attempt: u16) -> Result<(), String> {
        let gateway = seq.request.gateway_epoch();
        let lives = self.replicas.iter().enumerate();
        let lives = lives.flat_map(|(replica, node)| node.lives.keys().map(move |epoch| (replica, *epoch)));
        let heard: Vec<Who> = lives.filter(|who| self.is_heard(*who, gateway)).collect();
        self.owners.took((seq.request, attempt), of, |who| heard.contains(&who))
    }

    // --- Words -----------------------------------------------------------------------------------------------------------------

    /// Sends a word on its way to the gateway that leads the hand-off.
    fn post(&mut self, of: Who, transfer: TransferId, word: Word) {
        let gateway = transfer.gateway_epoch();
        if self.draw(Faults::LOST_WORDS, 8) {
            self.figures.lost_words += 1;
            return;
        }
        let copies = if self.draw(Faults::REPEATS, 8) { 2 } else { 1 };
        for _ in 0..copies {
            let Some((at, session)) = self.when_at_gateway(of, gateway) else { return };
            let far = self.draw(Faults::OVERTAKING, 4);
            let late = Duration(if far { self.movers.rng.below(OVERTAKING) } else { 0 });
            let event = Event::Relay { gateway, session, from: of.0, word: Box::new(word.clone()) };
            self.agenda.put(at + late, event);
        }
    }

    /// A word reaches the gateway, which passes it on.
    pub(super) fn relay(&mut self, gateway: GatewayEpoch, session: u64, from: usize, word: Word) {
        let Some(place) = self.gateway_at(gateway) else { return };
        if !self.gateway_hears((place, from), session) {
            return;
        }
        let to = word.to().replica.0 as usize;
        if let Some((at, session)) = self.when_at_worker(place, to) {
            self.agenda.put(at, Event::Word { gateway: place, replica: to, session, word: Box::new(word) });
        }
    }

    /// A word reaches its replica.
    pub(super) fn hear_word(
        &mut self,
        (place, replica): (usize, usize),
        session: u64,
        word: Word,
    ) -> Result<(), String> {
        let Some(epoch) = self.worker_hears((place, replica), session) else { return Ok(()) };
        match word {
            Word::Machine { input, .. } => self.tell_replica(replica, epoch, ReplicaInput::Handoff(input)),
            Word::Landed(landed) => self.landed((replica, epoch), landed),
        }
    }
}

fn machine(to: Peer, input: HandoffInput) -> Word {
    Word::Machine { to, input }
}
