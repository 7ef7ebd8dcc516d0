//! The hand-off protocol alone, in virtual time: one coordinator, one prefill and one decode replica, links between them, and a transport
//! that writes into the receiver's blocks without asking it.
//!
//! The world keeps what the machines cannot see: which content lies in which physical block, which writes are still under way, and who
//! would emit now. Its checks are made from that, not from the machines' own states.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use penstock_base::{BlockRef, Duration, GatewayEpoch, Instant, Manifest, RequestId, TransferId};
use penstock_kv::{BlockState, BlockTable, Kv, OwnerId};
use penstock_sched::handoff::{
    Ask, Between, Coordinator, CoordinatorConfig, CoordinatorEffect, CoordinatorEvent, End, Fallback, Grid, LeaseTerms,
    Part, Peer, Receiver, ReceiverEffect, ReceiverEvent, Seal, Sender, SenderEffect, SenderEvent, SenderWord, Side,
    Started, Timing, ToReceiver, chunk_sum,
};

use crate::handoff_parts::{BLOCK_TOKENS, LAYERS, POOL, Party, TABLE, caps, config, manifest, peer, pool};

#[path = "handoff_executors.rs"]
mod executors;

#[path = "handoff_lives.rs"]
mod lives;

/// The owner of prompts that the sender computes: promises are not what is tested there.
const PREFILL_OWNER: OwnerId = OwnerId(60);

pub const PARTIES: [Party; 3] = [Party::Coordinator, Party::Sender, Party::Receiver];

/// What goes wrong after a given number of steps.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Trouble {
    /// It loses everything and comes back as the next incarnation.
    Crash(Party, Duration),
    /// Nothing passes between the two.
    Partition(Party, Party, Duration),
    /// The receiver takes so many chunks at once from now on.
    Window(u32),
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Job {
    pub at: Instant,
    pub blocks: u32,
    pub fallback: Fallback,
    /// Its client leaves.
    pub cancel_at: Option<Instant>,
}

/// One run.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Spec {
    pub seed: u64,
    pub jobs: Vec<Job>,
    /// After so many steps of machines.
    pub troubles: Vec<(u64, Trouble)>,
    /// Of a million messages, so many are lost.
    pub loss_ppm: u64,
    /// Of a million messages and writes, so many come twice.
    pub twice_ppm: u64,
    /// Of a million chunks, so many arrive broken.
    pub broken_ppm: u64,
    /// Messages and writes take up to this long.
    pub latency_us: u64,
    /// Of a million writes, so many take nearly as long as the grace allows.
    pub late_ppm: u64,
    /// The transport confirms fences and quiet.
    pub transport_confirms: bool,
    /// Parties are told of each other's restarts.
    pub discovery: bool,
    /// After each of its steps a machine is written down, and the one that is read back goes on.
    pub copied: bool,
    pub timing: Timing,
}

impl Default for Spec {
    fn default() -> Self {
        Self {
            seed: 1,
            jobs: Vec::new(),
            troubles: Vec::new(),
            loss_ppm: 0,
            twice_ppm: 0,
            broken_ppm: 0,
            latency_us: 2_000,
            late_ppm: 0,
            transport_confirms: true,
            discovery: true,
            copied: false,
            timing: Timing { transfer: Duration::from_s(30), ..Timing::default() },
        }
    }
}

/// What a run came to.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Outcome {
    pub steps: u64,
    pub ends: BTreeMap<u64, End>,
    /// Requests whose coordinator crashed before their end.
    pub lost_with_coordinator: u32,
    /// Requests that the receiver started.
    pub started: u32,
    pub swept: u32,
    pub quarantined_most: u32,
    pub writes_into_quarantine: u32,
    pub stopped: u32,
    pub throttled: u32,
    /// Virtual time at which nothing was left.
    pub quiet_at: Instant,
}

#[derive(Clone, Debug)]
enum Item {
    Submit(usize),
    Cancel(usize),
    Coordinator(CoordinatorEvent),
    Sender(SenderEvent),
    Receiver(ReceiverEvent),
    /// A write lands, and what the receiver's driver then says about it.
    Land {
        write: Write,
        notice: bool,
    },
    /// The sender's prefill goes on.
    Prefill {
        transfer: TransferId,
        epoch: u64,
    },
    /// A sequence has emitted all that it had to.
    Decoded {
        party: Party,
        transfer: TransferId,
        epoch: u64,
    },
    Fenced {
        transfer: TransferId,
        epoch: u64,
    },
    Digested {
        transfer: TransferId,
        epoch: u64,
    },
    Quiet {
        transfer: TransferId,
        epoch: u64,
    },
    Restart(Party),
    Wake(Party),
}

#[derive(Clone, Debug)]
struct Write {
    transfer: TransferId,
    index: u32,
    stamp: Instant,
    from: Peer,
    to: Peer,
    /// Where the content is read and where it goes, one pair a block; empty for the tail.
    blocks: Vec<(BlockRef, BlockRef)>,
    layers: (u32, u32),
    content: Vec<u64>,
    broken: bool,
}

/// How a transfer is cut, where it lands, and of which request it is.
type Target = (Grid, Arc<[BlockRef]>, RequestId);

/// A sequence at the sender.
#[derive(Debug)]
struct Prompt {
    manifest: Arc<Manifest>,
    grid: Grid,
    table: BlockTable,
    blocks: u32,
    computed: u32,
    layers: u32,
    done: bool,
    /// Where it is written to.
    bound: Option<(Peer, Arc<[BlockRef]>)>,
    local: bool,
}

/// A sequence at the receiver.
#[derive(Debug)]
struct Running {
    request: RequestId,
    table: BlockTable,
    blocks: u32,
    /// What it wrote itself, behind the prompt.
    own: Vec<(u32, u64)>,
}

pub struct World {
    spec: Spec,
    rng: u64,
    now: Instant,
    agenda: BTreeMap<(Instant, u64), Item>,
    serial: u64,
    coordinator: Coordinator,
    sender: Sender,
    receiver: Receiver,
    epochs: [u64; 3],
    down: [bool; 3],
    /// Pairs between which nothing passes, until when.
    cut: Vec<(Party, Party, Instant)>,
    sender_kv: Kv,
    receiver_kv: Kv,
    /// Content by block and layer.
    sender_memory: Vec<[u64; LAYERS as usize]>,
    receiver_memory: Vec<[u64; LAYERS as usize]>,
    prompts: BTreeMap<TransferId, Prompt>,
    running: BTreeMap<TransferId, Running>,
    /// Writes under way, by transfer and incarnation of the sender.
    reading: BTreeMap<(TransferId, u64), u32>,
    quiet_wanted: BTreeSet<(TransferId, u64)>,
    fenced: BTreeSet<(TransferId, u64)>,
    /// What a transfer writes where, by incarnation of the receiver.
    landing: BTreeMap<(TransferId, u64), Target>,
    /// Peers as the coordinator's driver knows them.
    known: [Peer; 2],
    by_request: BTreeMap<u64, (usize, TransferId, u64)>,
    wakes: [Instant; 3],
    spin: (Instant, u32),
    /// When the last trouble is over, or the last request came.
    calm: Instant,
    outcome: Outcome,
}

fn mix(a: u64, b: u64) -> u64 {
    let z = a.rotate_left(23).wrapping_add(b).wrapping_add(0x9e37_79b9_7f4a_7c15);
    let z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

impl World {
    pub fn new(spec: Spec) -> Self {
        let mut world = Self {
            rng: spec.seed,
            now: Instant(1_000_000),
            agenda: BTreeMap::new(),
            serial: 0,
            coordinator: lives::coordinator(1, spec.timing),
            sender: Sender::new(config(Party::Sender, 1, spec.timing), Instant::ZERO),
            receiver: Receiver::new(config(Party::Receiver, 1, spec.timing), Instant::ZERO),
            epochs: [1; 3],
            down: [false; 3],
            cut: Vec::new(),
            sender_kv: pool(),
            receiver_kv: pool(),
            sender_memory: vec![[0; LAYERS as usize]; POOL as usize],
            receiver_memory: vec![[0; LAYERS as usize]; POOL as usize],
            prompts: BTreeMap::new(),
            running: BTreeMap::new(),
            reading: BTreeMap::new(),
            quiet_wanted: BTreeSet::new(),
            fenced: BTreeSet::new(),
            landing: BTreeMap::new(),
            known: [peer(Party::Sender, 1), peer(Party::Receiver, 1)],
            by_request: BTreeMap::new(),
            wakes: [Instant::NEVER; 3],
            spin: (Instant::ZERO, 0),
            calm: Instant(1_000_000),
            outcome: Outcome::default(),
            spec,
        };
        for (index, job) in world.spec.jobs.clone().into_iter().enumerate() {
            world.put(job.at, Item::Submit(index));
            world.calm = world.calm.max(job.at);
            if let Some(at) = job.cancel_at {
                world.put(at, Item::Cancel(index));
            }
        }
        world
    }

    /// Longest time from the last trouble to the moment when nothing is held any more: the longest chain of waits that one hand-off can
    /// go through, and what fencing and closing add.
    pub fn bound(&self) -> Duration {
        let (t, l) = (self.spec.timing, LeaseTerms::default());
        t.reserve + t.open + t.transfer + t.settle + t.settle + l.hold + l.hold + l.grace + l.grace + t.settle + l.hold
    }

    fn word(&mut self) -> u64 {
        self.rng = self.rng.wrapping_add(0x9e37_79b9_7f4a_7c15);
        mix(self.rng, 0)
    }

    fn chance(&mut self, ppm: u64) -> bool {
        ppm > 0 && self.word() % 1_000_000 < ppm
    }

    fn latency(&mut self) -> Duration {
        Duration::from_us(50 + self.word() % self.spec.latency_us.max(1))
    }

    fn put(&mut self, at: Instant, item: Item) {
        self.serial += 1;
        self.agenda.insert((at.max(self.now), self.serial), item);
    }

    fn fail(&self, why: impl std::fmt::Display) -> ! {
        panic!("at {} after {} steps: {why}\n{:?}", self.now.as_us(), self.outcome.steps, self.spec)
    }

    fn is_cut(&self, a: Party, b: Party) -> bool {
        self.cut.iter().any(|(x, y, until)| self.now < *until && ((*x, *y) == (a, b) || (*x, *y) == (b, a)))
    }

    /// A message from one party to another: lost, late, or twice.
    fn post(&mut self, from: Party, to: Party, item: Item) {
        if self.is_cut(from, to) {
            return;
        }
        let times = if self.chance(self.spec.loss_ppm) { 0 } else { 1 + u32::from(self.chance(self.spec.twice_ppm)) };
        for time in 0..times {
            let late = if time > 0 { Duration::from_ms(self.word() % 800) } else { Duration::ZERO };
            let at = self.now + self.latency() + late;
            self.put(at, item.clone());
        }
    }

    /// Runs until nothing is left to do. Panics with the spec when anything does not hold.
    pub fn run(mut self) -> Outcome {
        while let Some(((at, _), item)) = self.agenda.pop_first() {
            self.now = self.now.max(at);
            self.perform(item);
            self.check();
            if self.now > self.calm + self.bound() && self.is_busy() {
                let (free, left) = (self.receiver_kv.counts(), self.sender_kv.counts());
                let held = (self.coordinator.transfers(), self.sender.transfers(), self.receiver.transfers());
                self.fail(format!("not everything is given back within the bound: {held:?} {left:?} {free:?}"));
            }
        }
        self.check_end();
        self.outcome.quiet_at = self.now;
        self.outcome
    }

    fn is_busy(&self) -> bool {
        let held = self.coordinator.transfers() + self.sender.transfers() + self.receiver.transfers();
        held > 0 || self.sender_kv.counts().free != POOL || self.receiver_kv.counts().free != POOL
    }

    fn check_end(&self) {
        if self.is_busy() {
            self.fail("something is held with nothing to do");
        }
        if self.sender_kv.reservations().total() + self.receiver_kv.reservations().total() > 0 {
            self.fail("blocks are promised to nobody");
        }
        let missing = self.by_request.keys().filter(|request| !self.outcome.ends.contains_key(request)).count();
        if missing as u32 != self.outcome.lost_with_coordinator {
            self.fail("a request has no end");
        }
    }

    fn check(&self) {
        let broken = self.coordinator.check().and(self.sender.check(&self.sender_kv));
        if let Err(why) = broken.and(self.receiver.check(&self.receiver_kv)) {
            self.fail(why);
        }
        let tables = self.receiver.tables().chain(self.running.values().map(|running| &running.table));
        if let Err(why) = self.receiver_kv.check_with_tables(tables) {
            self.fail(why);
        }
        if let Err(why) = self.sender_kv.check_with_tables(self.prompts.values().map(|prompt| &prompt.table)) {
            self.fail(why);
        }
        for (transfer, prompt) in &self.prompts {
            if prompt.local && self.running.contains_key(transfer) {
                self.fail(format!("transfer {transfer} has two owners"));
            }
        }
    }

    fn perform(&mut self, item: Item) {
        match item {
            Item::Submit(index) => self.submit(index),
            Item::Cancel(index) => {
                let found = self.by_request.values().find(|(job, ..)| *job == index).copied();
                if let Some((_, transfer, epoch)) = found.filter(|(_, _, epoch)| *epoch == self.epochs[0]) {
                    let _ = epoch;
                    self.coordinate(CoordinatorEvent::Cancel(transfer));
                }
            }
            Item::Coordinator(event) => self.coordinate(event),
            Item::Sender(event) => self.step_sender(event),
            Item::Receiver(event) => self.step_receiver(event),
            Item::Land { write, notice } => self.land(&write, notice),
            Item::Prefill { transfer, epoch } => {
                if epoch == self.epochs[1] {
                    self.prefill(transfer);
                }
            }
            Item::Decoded { party, transfer, epoch } => {
                if epoch == self.epochs[party as usize] {
                    self.decoded(party, transfer);
                }
            }
            Item::Fenced { transfer, epoch } => {
                if epoch == self.epochs[2] {
                    self.fenced.insert((transfer, epoch));
                    self.step_receiver(ReceiverEvent::Fenced(transfer));
                }
            }
            Item::Digested { transfer, epoch } => {
                if epoch == self.epochs[2] && !self.down[2] {
                    let sum = self.digest_of(transfer);
                    self.step_receiver(ReceiverEvent::Digested { transfer, sum });
                }
            }
            Item::Quiet { transfer, epoch } => {
                if epoch == self.epochs[1] {
                    self.step_sender(SenderEvent::Quiet(transfer));
                }
            }
            Item::Restart(party) => self.restart(party),
            Item::Wake(party) => {
                self.wakes[party as usize] = Instant::NEVER;
                match party {
                    Party::Coordinator => self.coordinate(CoordinatorEvent::Tick),
                    Party::Sender => self.step_sender(SenderEvent::Tick),
                    Party::Receiver => self.step_receiver(ReceiverEvent::Tick),
                }
            }
        }
    }

    fn submit(&mut self, index: usize) {
        let job = self.spec.jobs[index];
        let request = RequestId::new(GatewayEpoch(self.epochs[0] as u16), index as u64 + 1).expect("small");
        if self.down[0] {
            return;
        }
        let input_tokens = job.blocks * BLOCK_TOKENS - 3;
        let ask = Ask {
            manifest: manifest(request, input_tokens, 1),
            attempt: 1,
            sender: self.known[0],
            receiver: self.known[1],
            caps: caps(),
            fallback: job.fallback,
        };
        self.by_request.insert(request.0, (index, TransferId(0), self.epochs[0]));
        self.coordinate(CoordinatorEvent::Begin(ask));
    }

    // --- Steps of the machines -------------------------------------------------------------------------------------------------

    /// Counts a step and lets happen what is due after it.
    fn stepped(&mut self, party: Party) {
        self.outcome.steps += 1;
        if self.spec.copied {
            self.copy(party);
        }
        self.spin = if self.spin.0 == self.now { (self.now, self.spin.1 + 1) } else { (self.now, 0) };
        if self.spin.1 > 5_000 {
            self.fail("the machines spin");
        }
        let wake = match party {
            Party::Coordinator => self.coordinator.next_wake(),
            Party::Sender => self.sender.next_wake(),
            Party::Receiver => self.receiver.next_wake(),
        };
        if wake != Instant::NEVER && wake < self.wakes[party as usize] {
            self.wakes[party as usize] = wake;
            self.put(wake, Item::Wake(party));
        }
        let due: Vec<Trouble> = self
            .spec
            .troubles
            .iter()
            .filter(|(step, _)| *step == self.outcome.steps)
            .map(|(_, trouble)| *trouble)
            .collect();
        for trouble in due {
            self.trouble(trouble);
        }
    }

    fn trouble(&mut self, trouble: Trouble) {
        match trouble {
            Trouble::Crash(party, down) => {
                if !self.down[party as usize] {
                    self.crash(party, down);
                }
            }
            Trouble::Partition(a, b, lasts) => {
                self.cut.push((a, b, self.now + lasts));
                self.calm = self.calm.max(self.now + lasts);
            }
            Trouble::Window(window) => self.put(self.now, Item::Receiver(ReceiverEvent::Window(window))),
        }
    }

    fn learn(&mut self, up: Peer) {
        for known in &mut self.known {
            if known.is_before(up) {
                *known = up;
            }
        }
    }

    fn coordinate(&mut self, event: CoordinatorEvent) {
        if self.down[0] {
            return;
        }
        match &event {
            CoordinatorEvent::PeerUp(up) => self.learn(*up),
            CoordinatorEvent::Said { said, .. } => self.learn(said.from),
            _ => {}
        }
        let mut out = Vec::new();
        self.coordinator.step(self.now, event, &mut out);
        for effect in out {
            match effect {
                CoordinatorEffect::Begun { transfer, request } => {
                    if let Some(of) = self.by_request.get_mut(&request.0) {
                        of.1 = transfer;
                    }
                }
                CoordinatorEffect::ToSender { transfer, to, order } => {
                    let event = SenderEvent::Order { transfer, to, order };
                    self.post(Party::Coordinator, Party::Sender, Item::Sender(event));
                }
                CoordinatorEffect::ToReceiver { transfer, to, order } => {
                    let event = ReceiverEvent::Order { transfer, to, order };
                    self.post(Party::Coordinator, Party::Receiver, Item::Receiver(event));
                }
                CoordinatorEffect::Ended { request, end, .. } => {
                    if self.outcome.ends.insert(request.0, end).is_some() {
                        self.fail("a request ended twice");
                    }
                }
                CoordinatorEffect::Stale => {}
            }
        }
        self.stepped(Party::Coordinator);
    }

    fn step_sender(&mut self, event: SenderEvent) {
        if self.down[1] {
            return;
        }
        let mut out = Vec::new();
        self.sender.step(self.now, event, &mut self.sender_kv, &mut out);
        let (me, epoch) = (Party::Sender, self.epochs[1]);
        for effect in out {
            match effect {
                SenderEffect::Say(said) => {
                    let event = CoordinatorEvent::Said { side: Side::Sender, said };
                    self.post(me, Party::Coordinator, Item::Coordinator(event));
                }
                SenderEffect::Send(message) => {
                    self.post(me, Party::Receiver, Item::Receiver(ReceiverEvent::Sender(message)));
                }
                SenderEffect::Prefill { transfer, manifest, grid, .. } => {
                    let prompt = Prompt {
                        blocks: manifest.input_tokens.div_ceil(BLOCK_TOKENS),
                        manifest,
                        grid,
                        table: BlockTable::with_capacity(TABLE),
                        computed: 0,
                        layers: 0,
                        done: false,
                        bound: None,
                        local: false,
                    };
                    if self.prompts.insert(transfer, prompt).is_some() {
                        self.fail("a prompt is computed twice at once");
                    }
                    self.put(self.now + Duration::from_us(700), Item::Prefill { transfer, epoch });
                }
                SenderEffect::Bind { transfer, to, blocks } => {
                    if let Some(prompt) = self.prompts.get_mut(&transfer) {
                        let landing = (prompt.grid, blocks.clone(), prompt.manifest.request);
                        self.landing.insert((transfer, to.epoch.0), landing);
                        prompt.bound = Some((to, blocks));
                    }
                }
                SenderEffect::Write { transfer, index, stamp } => self.write(transfer, index, stamp),
                SenderEffect::StopWrites(transfer) => {
                    if self.spec.transport_confirms {
                        self.quiet_wanted.insert((transfer, epoch));
                        self.tell_quiet(transfer, epoch);
                    }
                }
                SenderEffect::Continue(transfer) => {
                    let Some(prompt) = self.prompts.get_mut(&transfer) else {
                        self.fail("nothing is here that could be continued")
                    };
                    prompt.local = true;
                    if prompt.done {
                        self.put(self.now + Duration::from_ms(20), Item::Decoded { party: me, transfer, epoch });
                    }
                }
                SenderEffect::Drop(transfer) => {
                    if let Some(mut prompt) = self.prompts.remove(&transfer) {
                        self.sender_kv.release(self.now, &mut prompt.table, None);
                    }
                }
                SenderEffect::Swept(_) => self.outcome.swept += 1,
                SenderEffect::Accepting(accepting) => self.outcome.throttled += u32::from(!accepting),
                SenderEffect::Stale => {}
            }
        }
        self.stepped(me);
    }

    fn step_receiver(&mut self, event: ReceiverEvent) {
        if self.down[2] {
            return;
        }
        let mut out = Vec::new();
        self.receiver.step(self.now, event, &mut self.receiver_kv, &mut out);
        let (me, epoch) = (Party::Receiver, self.epochs[2]);
        for effect in out {
            match effect {
                ReceiverEffect::Say(said) => {
                    let event = CoordinatorEvent::Said { side: Side::Receiver, said };
                    self.post(me, Party::Coordinator, Item::Coordinator(event));
                }
                ReceiverEffect::Send(message) => {
                    self.post(me, Party::Sender, Item::Sender(SenderEvent::Receiver(message)));
                }
                ReceiverEffect::Fence(transfer) => {
                    if self.spec.transport_confirms {
                        let at = self.now + self.latency();
                        self.put(at, Item::Fenced { transfer, epoch });
                    }
                }
                ReceiverEffect::Digest(transfer) => {
                    let at = self.now + self.latency();
                    self.put(at, Item::Digested { transfer, epoch });
                }
                ReceiverEffect::Start(started) => self.start(started, epoch),
                ReceiverEffect::Stop(transfer) => {
                    self.outcome.stopped += 1;
                    self.finish_running(transfer);
                }
                ReceiverEffect::Grant { .. } => {}
                ReceiverEffect::Swept(_) => self.outcome.swept += 1,
                ReceiverEffect::Stale => {}
            }
        }
        self.outcome.quarantined_most = self.outcome.quarantined_most.max(self.receiver_kv.counts().quarantined);
        self.stepped(me);
    }
}
