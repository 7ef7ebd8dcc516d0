//! What goes wrong, and when. Each kind draws from a stream of its own: without one of them the others are the same.

use penstock_base::{Duration, GatewayEpoch, Generation, Instant, ReplicaEpoch, ReplicaId};
use penstock_sched::gateway::GatewayInput;
use penstock_sched::replica::ReplicaInput;

use super::{Event, World};
use crate::agenda::Node;
use crate::cluster::Mishap;
use crate::network::Ways;
use crate::rng::{Rng, mix};
use crate::scenario::Faults;

/// How much later than the one before it an incarnation of a gateway is numbered.
const EPOCHS_APART: u16 = 16;
/// Grace of a drain.
const DRAIN_GRACE: Duration = Duration::from_s(2);

/// One thing that goes wrong.
#[derive(Clone, Copy, Debug)]
pub(super) enum Trouble {
    /// A replica becomes slower for a while.
    Slow { replica: usize, factor: u64, lasts: Duration },
    /// A replica is lost, and comes back after a while.
    Lose { replica: usize, down: Duration },
    /// A lost replica comes back.
    Start { replica: usize },
    /// A zombie ends.
    EndZombie { replica: usize, epoch: ReplicaEpoch },
    /// A replica drains, then restarts.
    Drain { replica: usize },
    /// The grace of a drain is over.
    Restart { replica: usize, epoch: ReplicaEpoch },
    /// Its cache is flushed.
    Flush { replica: usize },
    /// Another policy set.
    Swap { gateway: usize, generation: Generation },
    /// A gateway admits nothing more.
    DrainGateway { gateway: usize },
    /// A gateway is gone, and comes back after a while.
    LoseGateway { gateway: usize, down: Duration },
    /// A gateway comes back.
    StartGateway { gateway: usize, epoch: GatewayEpoch },
    /// Two nodes do not reach each other.
    Cut { pair: (Node, Node), ways: Ways, lasts: Duration },
    /// The ports of a replica become slower.
    SlowLink { replica: usize, factor: u64, lasts: Duration },
}

impl World<'_> {
    /// Puts the troubles of a run down that lasts until about `last`.
    pub(super) fn plan_trouble(&mut self, last: Instant) {
        let span = last.0 + 500_000_000;
        let (replicas, gateways) = (self.replicas.len() as u64, self.gateways.len() as u64);
        for (at, number) in self.scenario.switches.iter().zip(1..) {
            for gateway in 0..self.gateways.len() {
                let swap = Trouble::Swap { gateway, generation: Generation(number) };
                self.agenda.put(*at, Event::Trouble(swap));
            }
        }
        for (number, (_, kind)) in (0..).zip(Faults::KINDS) {
            if !self.scenario.faults.has(*kind) {
                continue;
            }
            let rng = &mut Rng::stream(mix(self.scenario.seed, 20), number);
            for time in 0..rng.between(1, 3) {
                let at = Instant(rng.below(span));
                let replica = rng.below(replicas) as usize;
                let gateway = rng.below(gateways) as usize;
                let lasts = Duration::from_ms(rng.between(50, 3_000));
                let trouble = match *kind {
                    Faults::SLOW_REPLICAS => Trouble::Slow { replica, factor: rng.between(2, 20), lasts },
                    Faults::LOST_REPLICAS | Faults::ZOMBIES => Trouble::Lose { replica, down: lasts },
                    Faults::DRAINS => Trouble::Drain { replica },
                    Faults::FLUSHES => Trouble::Flush { replica },
                    Faults::SWAPS => Trouble::Swap { gateway, generation: Generation(time + 1) },
                    Faults::GATEWAY_DRAIN if time == 0 => {
                        let at = Instant(last.0 - last.0 / 5 + rng.below(last.0 / 5 + 1));
                        self.agenda.put(at, Event::Trouble(Trouble::DrainGateway { gateway }));
                        continue;
                    }
                    Faults::GATEWAY_LOSS if time == 0 => Trouble::LoseGateway { gateway, down: lasts },
                    Faults::CUT_CONTROL | Faults::CUT_DATA => {
                        let ways = rng.pick(&[Ways::Both, Ways::Both, Ways::There, Ways::Back]);
                        let lasts = Duration::from_ms(rng.pick(&[100, 1_500, 6_000, 20_000]) + rng.below(500));
                        let other = (replica + 1 + rng.below(replicas.max(2) - 1) as usize) % replicas as usize;
                        let from =
                            if *kind == Faults::CUT_DATA { Node::Replica(other) } else { Node::Gateway(gateway) };
                        Trouble::Cut { pair: (from, Node::Replica(replica)), ways, lasts }
                    }
                    Faults::SLOW_LINKS => Trouble::SlowLink { replica, factor: rng.between(2, 50), lasts },
                    _ => continue,
                };
                self.agenda.put(at, Event::Trouble(trouble));
            }
        }
    }

    /// A step of a machine that had to do with a hand-off is over: what was to go wrong right after it does.
    pub(super) fn protocol_step(&mut self) -> Result<(), String> {
        self.figures.protocol_steps += 1;
        let step = self.figures.protocol_steps;
        let due = self.scenario.mishaps.iter().filter(|(at, _)| *at == step);
        for (_, mishap) in due {
            let trouble = match *mishap {
                Mishap::LoseReplica { replica, down } => Trouble::Lose { replica, down },
                Mishap::LoseGateway { gateway, down } => Trouble::LoseGateway { gateway, down },
                Mishap::Cut { pair, ways, lasts } => Trouble::Cut { pair, ways, lasts },
            };
            // As the next thing that happens: effects of the step may still be carried out.
            self.agenda.put(self.agenda.now(), Event::Trouble(trouble));
        }
        Ok(())
    }

    pub(super) fn cause(&mut self, trouble: Trouble) -> Result<(), String> {
        self.faulty_until = self.faulty_until.max(self.agenda.now());
        match trouble {
            Trouble::Slow { replica, factor, lasts } => {
                let until = self.agenda.now() + lasts;
                self.replicas[replica].slow = (factor, until);
                self.faulty_until = self.faulty_until.max(until);
                Ok(())
            }
            Trouble::Lose { replica, down } => self.lose(replica, down),
            Trouble::Start { replica } => self.start_replica(replica),
            Trouble::EndZombie { replica, epoch } => self.end_life(replica, epoch),
            Trouble::Drain { replica } => self.drain(replica),
            Trouble::Restart { replica, epoch } => {
                if self.current_life(replica) == Some(epoch) {
                    self.lose(replica, DRAIN_GRACE)
                } else {
                    Ok(())
                }
            }
            Trouble::Flush { replica } => self.tell_current(replica, ReplicaInput::FlushCache),
            Trouble::Swap { gateway, generation } => self.step_gateway(gateway, GatewayInput::Policies(generation)),
            Trouble::DrainGateway { gateway } => self.step_gateway(gateway, GatewayInput::Drain),
            Trouble::LoseGateway { gateway, down } => self.lose_gateway(gateway, down),
            Trouble::Cut { pair, ways, lasts } => {
                self.cut(pair, ways, lasts);
                Ok(())
            }
            Trouble::SlowLink { replica, factor, lasts } => {
                let until = self.agenda.now() + lasts;
                self.network.slow_down(replica, factor, until);
                self.faulty_until = self.faulty_until.max(until);
                Ok(())
            }
            Trouble::StartGateway { gateway, epoch } => {
                self.start_gateway(gateway, epoch)?;
                if !self.is_cluster() {
                    self.introduce(gateway);
                    return Ok(());
                }
                (0..self.replicas.len()).try_for_each(|replica| self.connect(gateway, replica))
            }
        }
    }

    fn tell_current(&mut self, replica: usize, input: ReplicaInput) -> Result<(), String> {
        match self.current_life(replica) {
            Some(epoch) => self.tell_replica(replica, epoch, input),
            None => Ok(()),
        }
    }

    fn lose(&mut self, replica: usize, down: Duration) -> Result<(), String> {
        let faults = self.scenario.faults;
        let zombie = faults.has(Faults::ZOMBIES);
        let Some(epoch) = self.lose_replica(replica, zombie)? else { return Ok(()) };
        let now = self.agenda.now();
        if zombie {
            let at = now + Duration(down.0 * 2);
            self.agenda.put(at, Event::Trouble(Trouble::EndZombie { replica, epoch }));
        }
        if self.is_cluster() {
            self.worker_vanished(replica, !faults.has(Faults::SILENT_LOSS));
        } else if !faults.has(Faults::SILENT_LOSS) {
            self.tell_down(replica, epoch);
        }
        self.agenda.put(now + down, Event::Trouble(Trouble::Start { replica }));
        Ok(())
    }

    fn tell_down(&mut self, replica: usize, epoch: ReplicaEpoch) {
        for (place, _) in self.gateway_epochs() {
            self.news(replica, place, GatewayInput::ReplicaDown { replica: ReplicaId(replica as u32), epoch });
        }
    }

    /// A replica that froze is replaced by a new incarnation.
    pub(super) fn replace(&mut self, replica: usize, epoch: ReplicaEpoch) -> Result<(), String> {
        if self.current_life(replica) != Some(epoch) {
            return self.end_life(replica, epoch);
        }
        self.lose_replica(replica, false)?;
        if self.is_cluster() {
            self.worker_vanished(replica, true);
        } else {
            self.tell_down(replica, epoch);
        }
        let at = self.agenda.now() + Duration::from_ms(50);
        self.agenda.put(at, Event::Trouble(Trouble::Start { replica }));
        Ok(())
    }

    fn drain(&mut self, replica: usize) -> Result<(), String> {
        let Some(epoch) = self.current_life(replica) else { return Ok(()) };
        let input = GatewayInput::ReplicaDrain { replica: ReplicaId(replica as u32), epoch };
        for (place, _) in self.gateway_epochs() {
            self.news(replica, place, input.clone());
        }
        let at = self.agenda.now() + DRAIN_GRACE;
        self.agenda.put(at, Event::Trouble(Trouble::Restart { replica, epoch }));
        self.tell_replica(replica, epoch, ReplicaInput::Drain)
    }

    fn lose_gateway(&mut self, place: usize, down: Duration) -> Result<(), String> {
        let Some(mut driven) = self.gateways[place].machine.take() else { return Ok(()) };
        self.figures.gateways_lost += 1;
        let counters = driven.machine().counters();
        self.figures.dispatched += counters.dispatched;
        self.figures.sent_back += counters.refused_dispatches;
        self.figures.stale += counters.stale;
        self.keep(driven.digest());
        self.journals.extend(driven.end_log(true)?);
        let epoch = self.gateways[place].epoch;
        self.owners.gateway_gone(epoch);
        for (request, index) in &self.arrived {
            let client = &mut self.clients.clients[*index];
            client.orphaned |= request.gateway_epoch() == epoch && client.ended.is_none();
        }
        if self.is_cluster() {
            self.gateway_vanished(place);
        }
        for replica in (0..self.replicas.len()).filter(|_| !self.is_cluster()).collect::<Vec<_>>() {
            for life in self.lives_of(replica) {
                let at = self.arrival(Node::Gateway(place), Node::Replica(replica));
                self.agenda.put(at, Event::Tell { replica, epoch: life, input: ReplicaInput::GatewayDown(epoch) });
            }
        }
        let next = GatewayEpoch(epoch.0 + EPOCHS_APART);
        let at = self.agenda.now() + down;
        self.agenda.put(at, Event::Trouble(Trouble::StartGateway { gateway: place, epoch: next }));
        Ok(())
    }
}
