//! How is each other mover reached? Chooses a transport, connects, and after a loss connects again, or by the next kind.
//!
//! ```text
//!  introduced ──► dialling ──► up ──lost──► resting ──time──► dialling
//!                    │ failed: the next kind at once; after the last one, resting, and then all kinds again
//! ```

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use penstock_base::ReplicaId;
use penstock_transport::{Choice, Descriptor, Gone, Kind, NoWay, PeerId, Transport, choose, choose_in};

use super::ways::{Way, Ways};

/// Between two attempts: at first, and at most.
const REST_MIN: Duration = Duration::from_millis(50);
const REST_MAX: Duration = Duration::from_secs(5);
/// After a loss, operations that may still be under way at the other end count as over after this long without a new connection: longer
/// than a lease to write and its grace.
const ABANDON_AFTER: Duration = Duration::from_secs(5);
/// Movers known at once.
const PEERS_MAX: usize = 1_024;

/// The endpoints of one mover.
pub(super) type Ends = [Box<dyn Transport>];

enum State {
    Dialling { end: usize, kind: Kind, why: String },
    Up { end: usize },
    Resting { until: Instant },
}

struct Row {
    /// The life of its process.
    life: u64,
    identity: PeerId,
    theirs: Vec<Descriptor>,
    /// Kinds that were tried since the last connection, and did not come to one.
    failed: Vec<Kind>,
    state: State,
    rest: Duration,
    /// Which way was told last, so that each is told once.
    told: String,
    /// When what is left of a lost connection is given up.
    abandon: Option<Instant>,
    /// Somebody has lost sight of it. Its connection says whether it is there: it is forgotten with that.
    is_out_of_sight: bool,
}

/// See the module.
pub(super) struct Peers {
    me: ReplicaId,
    ours: Vec<Descriptor>,
    order: Box<[Kind]>,
    rows: BTreeMap<ReplicaId, Row>,
    ways: Ways,
}

impl Peers {
    /// `order` as in the settings.
    pub fn new(me: ReplicaId, ends: &Ends, order: Box<[Kind]>, ways: Ways) -> Self {
        let ours = ends.iter().map(|end| end.descriptor()).collect();
        Self { me, ours, order, rows: BTreeMap::new(), ways }
    }

    /// Another mover is there, or has begun a new life. One that is known by this life stays as it is.
    pub fn introduce(&mut self, (replica, life): (ReplicaId, u64), descriptors: &[Vec<u8>], ends: &mut Ends) {
        if replica == self.me {
            return;
        }
        if let Some(row) = self.rows.get_mut(&replica) {
            if row.life >= life {
                row.is_out_of_sight &= row.life > life;
                return;
            }
            self.forget(replica, ends);
        }
        if self.rows.len() >= PEERS_MAX {
            tracing::error!(replica = self.me.0, peer = replica.0, limit = PEERS_MAX, "no more movers are taken");
            return;
        }
        let identity = PeerId { endpoint: u64::from(replica.0), epoch: life };
        let mut theirs = Vec::new();
        for bytes in descriptors {
            match Descriptor::decode(bytes) {
                Ok(descriptor) if descriptor.identity == identity => theirs.push(descriptor),
                Ok(descriptor) => {
                    tracing::warn!(peer = replica.0, life, described = %descriptor.identity, "a descriptor of somebody else");
                }
                Err(error) => tracing::warn!(peer = replica.0, %error, "a descriptor that cannot be used"),
            }
        }
        let state = State::Resting { until: Instant::now() };
        let (failed, told) = (Vec::new(), String::new());
        let row =
            Row { life, identity, theirs, failed, state, rest: REST_MIN, told, abandon: None, is_out_of_sight: false };
        self.rows.insert(replica, row);
        self.turn(Instant::now(), ends);
    }

    /// A gateway has lost this life of a mover. Other gateways may still have it, so that one that is connected stays until that is lost.
    pub fn lose_sight(&mut self, (replica, life): (ReplicaId, u64), ends: &mut Ends) {
        let Some(row) = self.rows.get_mut(&replica).filter(|row| row.life <= life) else { return };
        row.is_out_of_sight = true;
        if !matches!(row.state, State::Up { .. }) {
            self.forget(replica, ends);
        }
    }

    /// Nothing more of it comes, and what is under way with it is done with.
    fn forget(&mut self, replica: ReplicaId, ends: &mut Ends) {
        let Some(row) = self.rows.remove(&replica) else { return };
        self.ways.remove(self.me, replica);
        ends.iter_mut().for_each(|end| end.abandon(row.identity));
    }

    /// What another mover is called by the transports.
    pub fn identity(&self, replica: ReplicaId) -> Option<PeerId> {
        self.rows.get(&replica).map(|row| row.identity)
    }

    /// The endpoint that is connected to it.
    pub fn way(&self, replica: ReplicaId) -> Option<(usize, PeerId)> {
        match self.rows.get(&replica)? {
            Row { state: State::Up { end }, identity, .. } => Some((*end, *identity)),
            _ => None,
        }
    }

    /// An endpoint is connected.
    pub fn connected(&mut self, end: usize, peer: PeerId) {
        let Some((replica, row)) = find(&mut self.rows, peer) else { return };
        let (kind, why) = match &row.state {
            State::Up { .. } => return,
            State::Dialling { end: dialled, kind, why } if *dialled == end => (*kind, why.clone()),
            // It was dialled, and a late word of the connection before was taken for its end.
            _ => {
                let kind = self.ours[end].address.kind();
                (kind, kind.to_string())
            }
        };
        if row.told != why {
            tracing::info!(replica = self.me.0, peer = replica.0, way = %why, "KV goes to this replica");
            row.told.clone_from(&why);
        }
        row.failed.clear();
        row.rest = REST_MIN;
        row.abandon = None;
        row.state = State::Up { end };
        self.ways.set(Way { from: self.me, to: replica, kind: Some(kind), why });
    }

    /// A connection is lost, or did not come about.
    pub fn lost(&mut self, end: usize, peer: PeerId, why: &Gone, ends: &mut Ends) {
        let now = Instant::now();
        let Some((replica, row)) = find(&mut self.rows, peer) else { return };
        match &row.state {
            State::Up { end: up } if *up == end => {
                tracing::info!(replica = self.me.0, peer = replica.0, %why, "the way for KV is lost: it is made again");
                row.abandon = Some(now + ABANDON_AFTER);
                row.state = State::Resting { until: now + row.rest };
            }
            State::Dialling { end: dialled, kind, .. } if *dialled == end => {
                tracing::debug!(replica = self.me.0, peer = replica.0, %kind, %why, "a way for KV does not come about");
                row.failed.push(*kind);
                row.state = State::Resting { until: now };
            }
            _ => return,
        }
        if row.is_out_of_sight {
            return self.forget(replica, ends);
        }
        let text = format!("lost: {why}");
        self.ways.set(Way { from: self.me, to: replica, kind: None, why: text });
        self.turn(now, ends);
    }

    /// Connects to whom it is time to connect to, and gives up what was lost for too long.
    pub fn turn(&mut self, now: Instant, ends: &mut Ends) {
        for (replica, row) in &mut self.rows {
            if row.abandon.is_some_and(|at| at <= now) && !matches!(row.state, State::Up { .. }) {
                row.abandon = None;
                ends.iter_mut().for_each(|end| end.abandon(row.identity));
                // What was dialling is begun anew, after the word that it is over.
                row.state = State::Resting { until: now + REST_MIN };
            }
            while let State::Resting { until } = row.state
                && until <= now
            {
                let choice = if self.order.is_empty() {
                    choose(&self.ours, &row.theirs, &row.failed)
                } else {
                    choose_in(&self.order, &self.ours, &row.theirs, &row.failed)
                };
                match choice {
                    Ok(choice) => row.dial(&choice, ends),
                    Err(none) => {
                        row.give_up(*replica, self.me, &none, now);
                        self.ways.set(Way { from: self.me, to: *replica, kind: None, why: none.to_string() });
                    }
                }
            }
        }
    }

    /// When `turn` has something to do next.
    pub fn next_turn(&self) -> Option<Instant> {
        let due = |row: &Row| match row.state {
            State::Resting { until } => Some(row.abandon.map_or(until, |at| at.min(until))),
            _ => row.abandon,
        };
        self.rows.values().filter_map(due).min()
    }
}

impl Row {
    fn dial(&mut self, choice: &Choice, ends: &mut Ends) {
        let Choice { kind, ours, theirs, .. } = *choice;
        let descriptor = self.theirs[theirs].encode();
        match ends[ours].connect(&descriptor) {
            Ok(_) => self.state = State::Dialling { end: ours, kind, why: choice.to_string() },
            Err(error) => {
                tracing::debug!(%kind, %error, "a way for KV cannot be begun");
                self.failed.push(kind);
            }
        }
    }

    fn give_up(&mut self, replica: ReplicaId, me: ReplicaId, none: &NoWay, now: Instant) {
        let why = none.to_string();
        if self.told != why {
            tracing::warn!(replica = me.0, peer = replica.0, %why, "no KV can go to this replica for now");
            self.told = why;
        }
        self.failed.clear();
        self.state = State::Resting { until: now + self.rest };
        self.rest = (self.rest * 2).min(REST_MAX);
    }
}

fn find(rows: &mut BTreeMap<ReplicaId, Row>, peer: PeerId) -> Option<(ReplicaId, &mut Row)> {
    let replica = ReplicaId(u32::try_from(peer.endpoint).ok()?);
    rows.get_mut(&replica).filter(|row| row.identity == peer).map(|row| (replica, row))
}
