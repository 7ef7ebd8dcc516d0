//! What lies in the blocks of a cluster's replicas, and the wires between those that hand requests off.
//!
//! A position's content depends on its prompt and place alone. It is written where a plan says, moved by chunks, and looked at through the
//! block table whenever a token is sampled: a wrong copy, a late write or a block that was reused too early fails there.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use penstock_base::plan::{Plan, PlanOp};
use penstock_base::{BlockRef, Duration, Instant, Manifest, ReplicaEpoch, ReplicaId, RequestId, SeqId, TransferId};
use penstock_sched::handoff::{Between, Grid, Part, Peer, Seal, SenderWord, ToReceiver, chunk_sum};
use penstock_sched::replica::{HandoffEffect, HandoffInput, ReplicaInput};

use super::{Cluster, Mail, Node};

/// Tokens of a block, as in the clusters' configuration.
const BLOCK: u32 = 16;

/// One incarnation of one replica.
type Who = (u32, ReplicaEpoch);

/// What goes wrong between replicas.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Links {
    pub seed: u64,
    /// Words and chunks take up to this long, each for itself: they overtake each other.
    pub latency_us: u64,
    /// Of a million words, so many are lost.
    pub loss_ppm: u64,
    /// Of a million chunks, so many arrive broken.
    pub broken_ppm: u64,
    /// Nothing passes between replicas from here on, for so long; the gateway is heard all the while.
    pub cut: Option<(Instant, Duration)>,
}

enum Item {
    Word(Who, HandoffInput),
    Land { from: Who, to: Who, transfer: TransferId, index: u32, stamp: Instant },
}

struct Sent {
    grid: Grid,
    seq: SeqId,
    sources: Vec<BlockRef>,
    bound: Option<(Who, Arc<[BlockRef]>)>,
    tokens: u32,
}

struct Granted {
    from: Who,
    grid: Grid,
    blocks: Arc<[BlockRef]>,
    /// Writes are let in.
    open: bool,
    request: Option<RequestId>,
}

/// See the module.
pub struct Wires {
    links: Links,
    rng: u64,
    agenda: BTreeMap<(Instant, u64), Item>,
    serial: u64,
    /// By replica, block, position in it.
    memory: BTreeMap<u32, Vec<Vec<u64>>>,
    /// Tables that plans have told, by replica and slot.
    tables: BTreeMap<(u32, u32), Vec<u32>>,
    /// Prompt family and keyed tokens of each request.
    prompts: BTreeMap<RequestId, (u64, u32)>,
    sent: BTreeMap<(Who, TransferId), Sent>,
    granted: BTreeMap<(Who, TransferId), Granted>,
    /// Who emits a request's tokens, and how many it has.
    emitted: BTreeMap<SeqId, (Who, u32)>,
    pub chunks: u64,
    pub lost_words: u64,
    pub writes_turned_away: u64,
    pub swept: u64,
    /// Chunks that landed while their prompt was still being computed.
    pub early_chunks: u64,
    sampled: BTreeSet<TransferId>,
}

fn mix(a: u64, b: u64) -> u64 {
    let z = (a ^ b.wrapping_mul(0x9e37_79b9_7f4a_7c15)).wrapping_mul(0xff51_afd7_ed55_8ccd);
    z ^ (z >> 29)
}

impl Wires {
    pub fn new(links: Links) -> Self {
        Self {
            rng: links.seed,
            links,
            agenda: BTreeMap::new(),
            serial: 0,
            memory: BTreeMap::new(),
            tables: BTreeMap::new(),
            prompts: BTreeMap::new(),
            sent: BTreeMap::new(),
            granted: BTreeMap::new(),
            emitted: BTreeMap::new(),
            chunks: 0,
            lost_words: 0,
            writes_turned_away: 0,
            swept: 0,
            early_chunks: 0,
            sampled: BTreeSet::new(),
        }
    }

    /// A replica begins with empty memory; what an earlier incarnation granted is closed.
    pub fn start(&mut self, replica: u32, epoch: ReplicaEpoch, blocks: u32) {
        self.memory.insert(replica, vec![vec![0; BLOCK as usize]; blocks as usize]);
        self.tables.retain(|(of, _), _| *of != replica);
        self.granted.retain(|((of, at), _), _| *of != replica || *at == epoch);
        self.sent.retain(|((of, at), _), _| *of != replica || *at == epoch);
    }

    pub fn know(&mut self, manifest: &Manifest, family: u64) {
        let keyed = manifest.keys.len() as u32 * BLOCK;
        self.prompts.insert(manifest.request, (family, keyed));
    }

    /// What must lie at a position: shared where prompts share it.
    fn content(&self, request: RequestId, position: u32) -> u64 {
        let (family, keyed) = self.prompts[&request];
        if position < keyed { mix(family + 1, u64::from(position)) } else { mix(request.0 << 8, u64::from(position)) }
    }

    fn word(&mut self) -> u64 {
        self.rng = self.rng.wrapping_add(0x9e37_79b9_7f4a_7c15);
        mix(self.rng, 1)
    }

    fn chance(&mut self, ppm: u64) -> bool {
        ppm > 0 && self.word() % 1_000_000 < ppm
    }

    fn put(&mut self, now: Instant, item: Item) {
        let late = if self.links.latency_us > 0 { self.word() % self.links.latency_us } else { 0 };
        self.serial += 1;
        self.agenda.insert((now + Duration::from_us(10 + late), self.serial), item);
    }

    fn is_cut(&self, now: Instant) -> bool {
        self.links.cut.is_some_and(|(at, lasts)| at <= now && now < at + lasts)
    }

    fn post(&mut self, now: Instant, to: Who, input: HandoffInput) {
        if self.is_cut(now) || self.chance(self.links.loss_ppm) {
            self.lost_words += 1;
            return;
        }
        self.put(now, Item::Word(to, input));
    }

    pub fn next(&self) -> Option<Instant> {
        self.agenda.keys().next().map(|(at, _)| *at)
    }

    /// A step is computed: its rows write their positions, and those that sample look at all before.
    pub fn compute(&mut self, (replica, _): Who, plan: &Plan) {
        for op in &plan.ops {
            match *op {
                PlanOp::OpenSlot { slot, .. } => _ = self.tables.insert((replica, slot.0), Vec::new()),
                PlanOp::DropSlot { slot } => _ = self.tables.remove(&(replica, slot.0)),
                PlanOp::SetBlock { slot, index, block, .. } => {
                    let table = self.tables.get_mut(&(replica, slot.0)).expect("an open slot");
                    table.resize(table.len().max(index as usize + 1), u32::MAX);
                    table[index as usize] = block.index;
                }
                PlanOp::CopyBlock { from, to, .. } => {
                    let memory = self.memory.get_mut(&replica).expect("it runs");
                    memory[to.index as usize] = memory[from.index as usize].clone();
                }
            }
        }
        for row in &plan.rows {
            let request = row.seq.request;
            for position in row.start..row.start + row.tokens {
                let content = self.content(request, position);
                let block = self.tables[&(replica, row.slot.0)][(position / BLOCK) as usize];
                let memory = self.memory.get_mut(&replica).expect("it runs");
                memory[block as usize][(position % BLOCK) as usize] = content;
            }
            for position in (0..row.start).filter(|_| row.sample) {
                let block = self.tables[&(replica, row.slot.0)][(position / BLOCK) as usize];
                let found = self.memory[&replica][block as usize][(position % BLOCK) as usize];
                assert_eq!(found, self.content(request, position), "{} at {position}", row.seq);
            }
        }
    }

    /// Tokens of one attempt come from one replica, in order.
    pub fn emit(&mut self, who: Who, seq: SeqId, first: u32, tokens: u32) {
        let (emitter, count) = self.emitted.entry(seq).or_insert((who, 0));
        if first == 0 && *emitter != who && *count == 0 {
            *emitter = who;
        }
        assert_eq!((*emitter, *count), (who, first), "{seq} has two owners, or loses a token");
        *count += tokens;
    }

    /// Blocks that may be written to are not in any table of their replica.
    pub fn check(&self, nodes: &BTreeMap<u32, Node>) {
        for ((who, transfer), granted) in self.granted.iter().filter(|(_, granted)| granted.open) {
            let Some(node) = nodes.get(&who.0).filter(|node| node.epoch == who.1) else { continue };
            for block in granted.blocks.iter() {
                let state = node.machine.kv().pool().state(*block);
                let fine =
                    matches!(state, Some(penstock_kv::BlockState::Landing | penstock_kv::BlockState::Quarantined));
                assert!(fine, "transfer {transfer} may write to a block that is {state:?}");
            }
        }
    }

    fn chunk_digest(&self, replica: u32, part: Part, first: u32, blocks: &[BlockRef], seq: SeqId) -> u64 {
        match part {
            Part::Tail => mix(seq.request.0, 77),
            Part::Kv { first_block, blocks: count, first_layer, layers } => {
                let held = (first_block..first_block + count).map(|block| blocks[(block - first) as usize].index);
                let words = held.flat_map(|block| self.memory[&replica][block as usize].iter().copied());
                words.fold(mix(u64::from(first_layer), u64::from(layers)), mix)
            }
        }
    }

    fn sum(&self, replica: u32, grid: &Grid, blocks: &[BlockRef], seq: SeqId) -> u64 {
        let parts = (0..grid.chunks()).filter_map(|index| grid.part(index).map(|part| (index, part)));
        parts.fold(0u64, |sum, (index, part)| {
            sum.wrapping_add(chunk_sum(index, self.chunk_digest(replica, part, grid.first_block, blocks, seq)))
        })
    }
}

impl Cluster {
    fn tell(&mut self, (replica, epoch): Who, input: HandoffInput) {
        self.mail.push_back(Mail::ToReplica(replica, epoch, ReplicaInput::Handoff(input)));
    }

    /// Carries out what a replica wants of its driver.
    pub fn hand_off(&mut self, who: Who, effect: HandoffEffect) {
        let now = self.now;
        let of = |peer: Peer| (peer.replica.0, peer.epoch);
        match effect {
            HandoffEffect::ToReceiver(message) => self.wires.post(now, of(message.to), HandoffInput::OfSender(message)),
            HandoffEffect::ToSender(message) => self.wires.post(now, of(message.to), HandoffInput::OfReceiver(message)),
            HandoffEffect::Sending { transfer, seq, grid } => {
                let sent = Sent { grid, seq, sources: Vec::new(), bound: None, tokens: 0 };
                assert!(self.wires.sent.insert((who, transfer), sent).is_none(), "sent twice");
            }
            HandoffEffect::Sources { transfer, blocks } => {
                self.wires.sent.get_mut(&(who, transfer)).expect("it is sent").sources.extend(blocks);
            }
            HandoffEffect::Bind { transfer, to, blocks } => {
                let seq = self.wires.sent[&(who, transfer)].seq;
                self.wires.sent.get_mut(&(who, transfer)).expect("it is sent").bound = Some((of(to), blocks));
                if let Some(granted) = self.wires.granted.get_mut(&(of(to), transfer)) {
                    granted.request = Some(seq.request);
                }
            }
            HandoffEffect::Write { transfer, index, stamp } => {
                let to = self.wires.sent[&(who, transfer)].bound.as_ref().expect("a write goes somewhere").0;
                self.wires.put(now, Item::Land { from: who, to, transfer, index, stamp });
            }
            HandoffEffect::Sampled { transfer, tokens, .. } => {
                self.wires.sampled.insert(transfer);
                let sent = self.wires.sent.get_mut(&(who, transfer)).expect("it is sent");
                sent.tokens = tokens;
                let sent = &self.wires.sent[&(who, transfer)];
                let sum = self.wires.sum(who.0, &sent.grid, &sent.sources, sent.seq);
                self.tell(who, HandoffInput::Sealed { transfer, seal: Seal { sum, sampled_tokens: tokens } });
            }
            HandoffEffect::StopWrites(transfer) => {
                self.wires.agenda.retain(
                    |_, item| !matches!(item, Item::Land { from, transfer: of, .. } if (*from, *of) == (who, transfer)),
                );
                self.wires.sent.remove(&(who, transfer));
                self.tell(who, HandoffInput::Quiet(transfer));
            }
            HandoffEffect::Grant { transfer, to, grid, blocks } => {
                let granted = Granted { from: of(to), grid, blocks, open: true, request: None };
                assert!(self.wires.granted.insert((who, transfer), granted).is_none(), "granted twice");
            }
            HandoffEffect::Fence(transfer) => {
                if let Some(granted) = self.wires.granted.get_mut(&(who, transfer)) {
                    granted.open = false;
                }
                self.tell(who, HandoffInput::Fenced(transfer));
            }
            HandoffEffect::Digest(transfer) => {
                let granted = &self.wires.granted[&(who, transfer)];
                let seq = SeqId { request: granted.request.expect("chunks came"), index: 0 };
                let sum = self.wires.sum(who.0, &granted.grid, &granted.blocks, seq);
                self.tell(who, HandoffInput::Digested { transfer, sum });
            }
            HandoffEffect::Release { seq, tokens } => self.wires.emit(who, seq, 0, tokens),
            HandoffEffect::Swept(_) => self.wires.swept += 1,
            HandoffEffect::Continue { .. }
            | HandoffEffect::Leave { .. }
            | HandoffEffect::Adopt { .. }
            | HandoffEffect::Accepting(_) => {}
        }
    }

    /// The next thing on a wire arrives.
    pub fn arrive_by_wire(&mut self) {
        let Some((_, item)) = self.wires.agenda.pop_first() else { return };
        match item {
            Item::Word(to, input) => self.tell(to, input),
            Item::Land { from, to, transfer, index, stamp } => self.land(from, to, transfer, index, stamp),
        }
    }

    fn land(&mut self, from: Who, to: Who, transfer: TransferId, index: u32, stamp: Instant) {
        let broken = self.wires.chance(self.wires.links.broken_ppm);
        let wires = &mut self.wires;
        if wires.is_cut(self.now) {
            return;
        }
        let Some(sent) = wires.sent.get(&(from, transfer)) else { return };
        let lives = |who: Who| self.nodes.get(&who.0).is_some_and(|node| node.epoch == who.1);
        let granted = wires.granted.get(&(to, transfer)).filter(|granted| granted.open && granted.from == from);
        let Some(granted) = granted.filter(|_| lives(from) && lives(to)) else {
            wires.writes_turned_away += 1;
            return;
        };
        let part = sent.grid.part(index).expect("a chunk of the grid");
        let digest = wires.chunk_digest(from.0, part, sent.grid.first_block, &sent.sources, sent.seq);
        wires.chunks += 1;
        wires.early_chunks += u64::from(!wires.sampled.contains(&transfer));
        if let Part::Kv { first_block, blocks, .. } = part {
            for block in first_block..first_block + blocks {
                let at = (block - sent.grid.first_block) as usize;
                let (source, target) = (sent.sources[at], granted.blocks[at]);
                let state = self.nodes[&from.0].machine.kv().pool().state(source);
                let kept = matches!(state, Some(penstock_kv::BlockState::Active | penstock_kv::BlockState::Leased));
                assert!(kept, "transfer {transfer} reads a block that is {state:?}");
                let mut words = wires.memory[&from.0][source.index as usize].clone();
                if broken {
                    words[3] = !words[3];
                }
                wires.memory.get_mut(&to.0).expect("it runs")[target.index as usize] = words;
            }
        }
        let arrived = if broken { !digest } else { digest };
        let body = ToReceiver { stamp, word: SenderWord::Chunk { index, sent: digest, arrived } };
        let peer = |who: Who| Peer { replica: ReplicaId(who.0), epoch: who.1 };
        let message = Between { transfer, from: peer(from), to: peer(to), body };
        wires.post(self.now, to, HandoffInput::OfSender(message));
    }
}
