//! Sessions between the gateways and workers of a cluster (docs/control.md): ordered conversations that outlive short cuts of their link.
//!
//! A cut that is longer than the lease ends a session at both ends, each by its own clock: the gateway's replica is down, the worker's
//! gateway is down. Once the link is whole the two begin anew. What was under way in a session that is over is lost.

use penstock_base::{Duration, GatewayEpoch, Instant, ReplicaEpoch, ReplicaId, SeqId};
use penstock_sched::gateway::{GatewayInput, ReplicaFacts};
use penstock_sched::message::FromReplica;
use penstock_sched::replica::{ReplicaConfig, ReplicaInput};

use super::{Event, World};
use crate::agenda::Node;
use crate::checkers::Placement;
use crate::network::{Cut, Ways};
use crate::owners::Who;

/// Clocks of two ends differ by up to this, when a lease runs out.
const CLOCKS_APART: u64 = 300_000_000;

/// Two ends that remember each other.
#[derive(Clone, Copy, Debug)]
pub(super) struct Session {
    /// Counts all sessions of the world.
    number: u64,
    gateway: GatewayEpoch,
    replica: ReplicaEpoch,
    /// The gateway's end lives.
    at_gateway: bool,
    /// The worker's end lives.
    at_worker: bool,
}

/// What a worker streams past the gateway's machine.
#[derive(Clone, Copy, Debug)]
pub(super) enum Streamed {
    Token { seq: SeqId, from: Placement, first: u32 },
    SequenceEnded { seq: SeqId, from: Placement, end: (penstock_base::Outcome, u32) },
}

impl World<'_> {
    pub(super) fn is_cluster(&self) -> bool {
        self.scenario.cluster.is_some()
    }

    /// How the replica at a place is set up, for one of its epochs.
    pub(super) fn replica_config(&self, replica: usize, epoch: ReplicaEpoch) -> ReplicaConfig {
        let config = ReplicaConfig { replica: ReplicaId(replica as u32), epoch, ..self.scenario.replica.clone() };
        let Some(cluster) = &self.scenario.cluster else { return config };
        match cluster.role(replica) {
            // Slots alone are granted where a request may come that was computed elsewhere: none stands ready beside the batch.
            2 => ReplicaConfig { handoff: Some(cluster.party), ready_window: 0, ..config },
            1 => ReplicaConfig { handoff: Some(cluster.party), ..config },
            _ => config,
        }
    }

    /// What gateways are told of a replica.
    pub(super) fn facts_of(&self, config: &ReplicaConfig) -> ReplicaFacts {
        let place = config.replica.0 as usize;
        let cluster = self.scenario.cluster.as_ref();
        ReplicaFacts {
            replica: config.replica,
            epoch: config.epoch,
            role_code: cluster.map_or(3, |cluster| cluster.role(place)),
            total_blocks: config.blocks,
            slots: config.slots,
            round_tokens: config.step_tokens,
            context_tokens_max: config.context_tokens_max,
            speed_ppm: 1_000_000,
            zone_rank: 0,
            domain: cluster.map_or(0, |cluster| cluster.domain(place)),
        }
    }

    fn lease(&self) -> Duration {
        self.scenario.cluster.as_ref().map_or(Duration::ZERO, |cluster| cluster.session_lease)
    }

    fn reconnect(&self) -> Duration {
        self.scenario.cluster.as_ref().map_or(Duration::ZERO, |cluster| cluster.reconnect)
    }

    // --- Beginning and end -----------------------------------------------------------------------------------------------------

    /// A gateway dials a worker. What either end still has of an earlier session is over.
    pub(super) fn connect(&mut self, place: usize, replica: usize) -> Result<(), String> {
        let now = self.agenda.now();
        let gateway = self.gateways[place].epoch;
        let Some(epoch) = self.current_life(replica).filter(|_| self.gateways[place].machine.is_some()) else {
            return Ok(());
        };
        if let Some(until) = self.network.apart(now, Node::Gateway(place), Node::Replica(replica)) {
            let again = until + self.reconnect();
            self.agenda.put(again, Event::Connect { gateway: place, replica });
            return Ok(());
        }
        if let Some(session) = self.sessions.get(&(place, replica)).copied() {
            let same = (session.gateway, session.replica) == (gateway, epoch);
            if same && session.at_gateway && session.at_worker {
                return Ok(());
            }
            self.end_at_gateway((place, replica), session.number)?;
            self.end_at_worker((place, replica), session.number)?;
            if self.current_life(replica) != Some(epoch) {
                // Somebody replaced it meanwhile; its next life connects by itself.
                return Ok(());
            }
        }
        self.sessions_begun += 1;
        let number = self.sessions_begun;
        let session = Session { number, gateway, replica: epoch, at_gateway: true, at_worker: true };
        self.sessions.insert((place, replica), session);
        let config = self.replica_config(replica, epoch);
        let facts = self.facts_of(&config);
        self.news(replica, place, GatewayInput::ReplicaUp(facts));
        self.tell_replica(replica, epoch, ReplicaInput::GatewayUp(gateway))
    }

    /// The gateway's end of a session is over.
    pub(super) fn end_at_gateway(&mut self, key: (usize, usize), number: u64) -> Result<(), String> {
        let Some(session) = self.sessions.get_mut(&key).filter(|session| session.number == number) else {
            return Ok(());
        };
        if !std::mem::replace(&mut session.at_gateway, false) {
            return Ok(());
        }
        let (gateway, epoch) = (session.gateway, session.replica);
        self.figures.sessions_lost += 1;
        self.tell_gateway(gateway, GatewayInput::ReplicaDown { replica: ReplicaId(key.1 as u32), epoch })
    }

    /// The worker's end of a session is over.
    pub(super) fn end_at_worker(&mut self, key: (usize, usize), number: u64) -> Result<(), String> {
        let Some(session) = self.sessions.get_mut(&key).filter(|session| session.number == number) else {
            return Ok(());
        };
        if !std::mem::replace(&mut session.at_worker, false) {
            return Ok(());
        }
        let (gateway, epoch) = (session.gateway, session.replica);
        self.tell_replica(key.1, epoch, ReplicaInput::GatewayDown(gateway))
    }

    /// A link is cut. Sessions whose lease runs out before it is whole again are over.
    pub(super) fn cut(&mut self, pair: (Node, Node), ways: Ways, lasts: Duration) {
        let now = self.agenda.now();
        let until = now + lasts;
        self.network.cut(now, Cut { pair, ways, from: now, until });
        self.faulty_until = self.faulty_until.max(until);
        let (Node::Gateway(place), Node::Replica(replica)) = pair else { return };
        let lease = self.lease();
        if let Some(number) = self.sessions.get(&(place, replica)).map(|session| session.number) {
            for at_gateway in [true, false] {
                let at = now + lease + Duration(self.link_rng.below(CLOCKS_APART));
                if at < until {
                    self.agenda.put(at, Event::SessionOver { key: (place, replica), number, at_gateway });
                }
            }
        }
        let again = until + self.reconnect();
        self.agenda.put(again, Event::Connect { gateway: place, replica });
    }

    /// A gateway is gone: its workers notice when their lease is over, or when its next epoch dials.
    pub(super) fn gateway_vanished(&mut self, place: usize) {
        let at = self.agenda.now() + self.lease();
        for ((gateway, replica), session) in &self.sessions {
            if *gateway == place && session.at_worker {
                let over = Event::SessionOver { key: (place, *replica), number: session.number, at_gateway: false };
                self.agenda.put(at, over);
            }
        }
        self.faulty_until = self.faulty_until.max(at);
    }

    /// A worker is gone: its gateways notice when they are told, when their lease is over, or when its next epoch is there.
    pub(super) fn worker_vanished(&mut self, replica: usize, told: bool) {
        let now = self.agenda.now();
        for place in 0..self.gateways.len() {
            let Some(number) = self.sessions.get(&(place, replica)).map(|session| session.number) else { continue };
            let at = if told { self.arrival(Node::Replica(replica), Node::Gateway(place)) } else { now + self.lease() };
            self.faulty_until = self.faulty_until.max(at);
            self.agenda.put(at, Event::SessionOver { key: (place, replica), number, at_gateway: true });
        }
    }

    // --- What is said ----------------------------------------------------------------------------------------------------------

    /// When something that is sent now arrives, in order behind what was sent before: what a cut stops comes once it is over.
    fn ordered_arrival(&mut self, from: Node, to: Node) -> Instant {
        let now = self.agenda.now();
        // One connection carries both ways: without the answers of the other end nothing goes on.
        let begins = self.network.apart(now, from, to).map_or(now, |until| until + self.reconnect());
        self.links.arrival(begins, (from, to), self.scenario.latency)
    }

    /// When and in which session a word of a worker reaches that gateway; none when there is no session.
    pub(super) fn when_at_gateway(&mut self, of: Who, gateway: GatewayEpoch) -> Option<(Instant, u64)> {
        let place = self.gateway_place(gateway)?;
        if !self.is_cluster() {
            return Some((self.arrival(Node::Replica(of.0), Node::Gateway(place)), 0));
        }
        let session = self.sessions.get(&(place, of.0)).copied()?;
        let its = session.gateway == gateway && session.replica == of.1 && session.at_worker;
        its.then(|| (self.ordered_arrival(Node::Replica(of.0), Node::Gateway(place)), session.number))
    }

    /// The same the other way, whatever incarnation is there.
    pub(super) fn when_at_worker(&mut self, place: usize, replica: usize) -> Option<(Instant, u64)> {
        if !self.is_cluster() {
            return Some((self.arrival(Node::Gateway(place), Node::Replica(replica)), 0));
        }
        let session = self.sessions.get(&(place, replica)).copied()?;
        let its = session.gateway == self.gateways[place].epoch && session.at_gateway;
        its.then(|| (self.ordered_arrival(Node::Gateway(place), Node::Replica(replica)), session.number))
    }

    /// Does the gateway still listen in this session?
    pub(super) fn gateway_hears(&self, key: (usize, usize), number: u64) -> bool {
        !self.is_cluster()
            || self.sessions.get(&key).is_some_and(|session| session.number == number && session.at_gateway)
    }

    /// The incarnation that still listens in this session.
    pub(super) fn worker_hears(&self, key: (usize, usize), number: u64) -> Option<ReplicaEpoch> {
        let session = self.sessions.get(&key)?;
        (session.number == number && session.at_worker).then_some(session.replica)
    }

    /// Is this incarnation heard by the gateway?
    pub(super) fn is_heard(&self, who: Who, gateway: GatewayEpoch) -> bool {
        let Some(place) = self.gateway_at(gateway) else { return false };
        let its = |session: &Session| session.gateway == gateway && session.replica == who.1 && session.at_gateway;
        self.life(who).is_some() && self.sessions.get(&(place, who.0)).is_some_and(its)
    }

    fn gateway_place(&self, epoch: GatewayEpoch) -> Option<usize> {
        if self.is_cluster() {
            // Whoever sent it does not know yet that the gateway is gone.
            return self.gateways.iter().position(|node| node.epoch == epoch);
        }
        self.gateway_at(epoch)
    }

    /// A message of a replica reaches its gateway.
    pub(super) fn hear_replica(
        &mut self,
        gateway: GatewayEpoch,
        (replica, epoch): Who,
        session: u64,
        message: FromReplica,
    ) -> Result<(), String> {
        if self.is_cluster() {
            let Some(place) = self.gateway_at(gateway) else { return Ok(()) };
            if !self.gateway_hears((place, replica), session) {
                return Ok(());
            }
            if let FromReplica::Ended { request, attempt, outcome, usage } = &message {
                let from = Placement { replica, epoch, attempt: *attempt };
                self.clients.ended_at_replica(*request, from, (*outcome, *usage));
            }
        }
        let replica = ReplicaId(replica as u32);
        self.tell_gateway(gateway, GatewayInput::Replica { replica, epoch, message })
    }

    /// What was streamed reaches the edge.
    pub(super) fn at_edge(&mut self, gateway: GatewayEpoch, session: u64, streamed: Streamed) -> Result<(), String> {
        let (Streamed::Token { from, .. } | Streamed::SequenceEnded { from, .. }) = streamed;
        let Some(place) = self.gateway_at(gateway) else { return Ok(()) };
        if !self.gateway_hears((place, from.replica), session) {
            return Ok(());
        }
        match streamed {
            Streamed::Token { seq, from, first } => {
                self.owners.at_edge((seq.request, from.attempt), (from.replica, from.epoch))?;
                self.stream(seq, from, first)
            }
            Streamed::SequenceEnded { seq, from, end } => {
                self.clients.sequence_ended(seq, from, end);
                Ok(())
            }
        }
    }
}
