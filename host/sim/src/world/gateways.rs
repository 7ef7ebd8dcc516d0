//! The gateway's side: requests arrive and leave, the machine advances, its effects are carried out.

use std::sync::Arc;

use penstock_base::{CancelCause, Duration, GatewayEpoch, Instant, Manifest, Outcome, RequestId};
use penstock_sched::gateway::{DeliveryEvent, Gateway, GatewayConfig, GatewayEffect, GatewayEvent, GatewayInput};
use penstock_sched::handoff::End;
use penstock_sched::message::{FromReplica, ToReplica};

use super::{Event, WAKE_AFTER, World};
use crate::cluster::Sabotage;
use crate::driven::Driven;
use crate::executor::ensure;
use crate::policies::PolicyKind;
use crate::report::Happened;
use crate::scenario::Faults;
use crate::workload;

/// Code of a fallback that is none of the policy's fault. Every other one says that it failed or that its answer was refused.
pub(super) const NO_OPINION: u8 = 0;
/// Faults under which nothing may move for a while although work waits.
const STANDSTILLS: [Faults; 7] = [
    Faults::SLOW_REPLICAS,
    Faults::LOST_REPLICAS,
    Faults::DRAINS,
    Faults::LOST_EXECUTORS,
    Faults::CUT_CONTROL,
    Faults::CUT_DATA,
    Faults::SLOW_LINKS,
];

impl World<'_> {
    /// A new incarnation of a gateway, which knows no replica yet.
    pub(super) fn start_gateway(&mut self, place: usize, epoch: GatewayEpoch) -> Result<(), String> {
        let now = self.agenda.now();
        let config = GatewayConfig { epoch, ..self.scenario.gateway.clone() };
        let machine = Gateway::new(config.clone(), now);
        let driven = Driven::new(machine, config, now, (self.scenario, self.cast))?;
        self.gateways[place].epoch = epoch;
        self.gateways[place].machine = Some(driven);
        self.step_gateway(place, GatewayInput::Tick)
    }

    pub(super) fn gateway_at(&self, epoch: GatewayEpoch) -> Option<usize> {
        self.gateways.iter().position(|node| node.epoch == epoch && node.machine.is_some())
    }

    /// Incarnations that run.
    pub(super) fn gateway_epochs(&self) -> Vec<(usize, GatewayEpoch)> {
        let runs = self.gateways.iter().enumerate().filter(|(_, node)| node.machine.is_some());
        runs.map(|(place, node)| (place, node.epoch)).collect()
    }

    /// For an incarnation that is gone it is lost.
    pub(super) fn tell_gateway(&mut self, epoch: GatewayEpoch, input: GatewayInput) -> Result<(), String> {
        match self.gateway_at(epoch) {
            Some(place) => self.step_gateway(place, input),
            None => Ok(()),
        }
    }

    pub(super) fn arrive(&mut self, index: usize) -> Result<(), String> {
        self.to_come -= 1;
        let planned = &self.planned[index];
        let place = planned.gateway;
        self.clients.clients[index].arrived = true;
        let epoch = self.gateways[place].epoch;
        if self.gateways[place].machine.is_none() {
            // Nobody listens.
            self.clients.clients[index].orphaned = true;
            return Ok(());
        }
        let request = workload::id(epoch, index as u32);
        if planned.manifest.request != request {
            let manifest = Manifest { request, ..Manifest::clone(&planned.manifest) };
            self.planned[index].manifest = Arc::new(manifest);
        }
        self.arrived.insert(request, index);
        let manifest = Arc::clone(&self.planned[index].manifest);
        self.step_gateway(place, GatewayInput::Arrive(manifest))
    }

    pub(super) fn leave(&mut self, index: usize, cause: CancelCause) -> Result<(), String> {
        let client = &self.clients.clients[index];
        if !client.arrived || client.orphaned {
            return Ok(());
        }
        let request = self.planned[index].manifest.request;
        // A client that leaves again, or after the end, changes nothing: the machine counts it.
        self.tell_gateway(request.gateway_epoch(), GatewayInput::Cancel { request, cause })?;
        self.agenda.put(self.agenda.now(), Event::Delivery(request, DeliveryEvent::Disconnected));
        Ok(())
    }

    pub(super) fn gateway_tick(&mut self, place: usize, epoch: GatewayEpoch) -> Result<(), String> {
        let now = self.agenda.now();
        let node = &mut self.gateways[place];
        let Some(driven) = node.machine.as_mut().filter(|driven| node.epoch == epoch && driven.tick_at == now) else {
            return Ok(());
        };
        driven.tick_at = Instant::NEVER;
        self.step_gateway(place, GatewayInput::Tick)
    }

    pub(super) fn step_gateway(&mut self, place: usize, input: GatewayInput) -> Result<(), String> {
        let now = self.clock();
        if let GatewayInput::Replica { message: FromReplica::Refuse { request, .. }, .. } = &input {
            // Back to its place in the queue, unless it is placed again or ends in this step.
            self.trace(Happened::Waits(workload::index_of(*request)));
        }
        let Some(driven) = &mut self.gateways[place].machine else { return Ok(()) };
        self.steps += 1;
        let mut is_protocol = matches!(&input, GatewayInput::Replica { message: FromReplica::Party { .. }, .. });
        let effects = driven.step(now, input).map_err(|what| format!("gateway {place}: {what}"))?;
        self.check_bounds(place)?;
        for effect in &effects {
            self.carry_out_gateway(place, effect).map_err(|what| format!("gateway {place}: {what}"))?;
            is_protocol |= matches!(
                effect,
                GatewayEffect::Send { message: ToReplica::Prefill(_) | ToReplica::Decode(_), .. }
                    | GatewayEffect::Event(GatewayEvent::HandoffBegun { .. } | GatewayEvent::HandoffEnded { .. })
            );
        }
        let now = self.agenda.now();
        let epoch = self.gateways[place].epoch;
        let Some(driven) = &mut self.gateways[place].machine else { return Ok(()) };
        driven.recycle(effects);
        let wake = driven.machine().next_wake();
        if wake < driven.tick_at && wake != Instant::NEVER {
            driven.tick_at = wake.max(now + WAKE_AFTER);
            self.agenda.put(driven.tick_at, Event::GatewayTick { gateway: place, epoch });
        }
        if is_protocol { self.protocol_step() } else { Ok(()) }
    }

    fn check_bounds(&self, place: usize) -> Result<(), String> {
        let Some(driven) = &self.gateways[place].machine else { return Ok(()) };
        let (machine, config) = (driven.machine(), &self.scenario.gateway);
        // What comes back from a replica takes a place that it had before: the two bounds hold together.
        let live = machine.queued_requests() + machine.running_requests();
        let returnable = u64::from(config.running_requests_max) * u64::from(config.context_tokens_max);
        let within = live <= config.queue_requests_max + config.running_requests_max
            && machine.queued_tokens() <= config.queue_tokens_max + returnable
            && machine.deferred_requests() <= config.deferred_requests_max
            && machine.running_requests() <= config.running_requests_max
            && machine.flows() <= config.flows_max
            && machine.directory_keys() <= config.directory_keys_max;
        ensure(within, || {
            format!(
                "gateway {place} is over a bound: {} queued ({} tokens), {} deferred, {} running, {} flows, {} keys of {config:?}",
                machine.queued_requests(),
                machine.queued_tokens(),
                machine.deferred_requests(),
                machine.running_requests(),
                machine.flows(),
                machine.directory_keys(),
            )
        })
    }

    fn carry_out_gateway(&mut self, place: usize, effect: &GatewayEffect) -> Result<(), String> {
        let now = self.agenda.now();
        self.clients.effect(effect, now, self.replicas.len())?;
        match effect {
            GatewayEffect::Send { replica, epoch, message } => {
                let to = replica.0 as usize;
                let gateway = self.gateways[place].epoch;
                let Some((at, session)) = self.when_at_worker(place, to) else { return Ok(()) };
                let message = message.clone();
                self.agenda.put(at, Event::ToReplica { replica: to, epoch: *epoch, gateway, session, message });
            }
            GatewayEffect::Queued { request, degraded, .. } => {
                self.figures.degraded += u64::from(*degraded);
                self.trace(Happened::Waits(workload::index_of(*request)));
            }
            GatewayEffect::Dispatched { request, .. } => {
                self.trace(Happened::WaitsNoMore(workload::index_of(*request)));
            }
            GatewayEffect::Ended { request, outcome, .. } => {
                self.trace(Happened::WaitsNoMore(workload::index_of(*request)));
                self.last_end = now;
                if self.scenario.sabotage == Some(Sabotage::EndTwice) {
                    self.clients.effect(effect, now, self.replicas.len())?;
                }
                self.acknowledge(*request, *outcome);
            }
            GatewayEffect::Event(event) => self.note_gateway(*event)?,
        }
        Ok(())
    }

    /// The edge writes the last event to those that still listen.
    fn acknowledge(&mut self, request: RequestId, outcome: Outcome) {
        let left = matches!(outcome, Outcome::Cancelled(CancelCause::Client | CancelCause::SlowClient));
        if !left {
            let at = self.agenda.now() + Duration::from_us(300);
            self.agenda.put(at, Event::Delivery(request, DeliveryEvent::Acknowledged));
        }
    }

    fn note_gateway(&mut self, event: GatewayEvent) -> Result<(), String> {
        let whims = self.scenario.policies == PolicyKind::Whims;
        match event {
            GatewayEvent::Fallback { decision, reason, .. } => ensure(reason == NO_OPINION || whims, || {
                format!("a policy failed or its answer was refused: decision {decision}, reason {reason}")
            }),
            GatewayEvent::NoProgress => {
                self.figures.stuck += 1;
                let staged = !self.scenario.mishaps.is_empty();
                let excused = whims || staged || STANDSTILLS.into_iter().any(|kind| self.scenario.faults.has(kind));
                ensure(excused, || format!("nothing moves: {}", self.open_requests()))
            }
            GatewayEvent::Stance { level } => {
                self.trace(Happened::Stance(level));
                Ok(())
            }
            GatewayEvent::Broken(why) => Err(format!("a gateway is broken: {why}")),
            GatewayEvent::HandoffBegun { request, transfer, sender, receiver } => {
                self.figures.handoffs += 1;
                self.clients.handed_off(request, sender.0 as usize)?;
                self.owners.begun(transfer, request, (sender.0 as usize, receiver.0 as usize))
            }
            GatewayEvent::HandoffEnded { request, transfer, end } => {
                *match end {
                    End::HandedOff(_) => &mut self.figures.handed_off,
                    End::AtSender(..) => &mut self.figures.kept_at_sender,
                    End::Anew(_) => &mut self.figures.handed_back,
                    End::Failed(_) | End::Cancelled => &mut self.figures.handoffs_ended,
                } += 1;
                self.owners.ended(transfer, request, end)
            }
            _ => Ok(()),
        }
    }
}
