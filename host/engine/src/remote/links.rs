//! A worker's links to the gateways before it. Nothing here waits: a gateway that does not confirm what it is told loses this worker.

use std::sync::{PoisonError, RwLock};

use bytes::Bytes;
use penstock_base::{GatewayEpoch, Instant, ReplicaEpoch};
use penstock_control::{Link, NotSent};
use penstock_sched::gateway::ReplicaFacts;
use penstock_sched::message::FromReplica;

use super::wire::{self, Word};
use crate::outputs::TurnItem;

/// Messages of the machine in one of the link: well below its limit in bytes.
const MESSAGES_MAX: usize = 4_096;

/// See the module. Few, so that a list will do.
#[derive(Debug, Default)]
pub(crate) struct GatewayLinks {
    links: RwLock<Vec<(GatewayEpoch, Link)>>,
}

impl GatewayLinks {
    pub fn add(&self, gateway: GatewayEpoch, link: Link) {
        let mut links = self.links.write().unwrap_or_else(PoisonError::into_inner);
        links.retain(|(epoch, _)| *epoch != gateway);
        links.push((gateway, link));
    }

    pub fn remove(&self, gateway: GatewayEpoch) {
        self.links.write().unwrap_or_else(PoisonError::into_inner).retain(|(epoch, _)| *epoch != gateway);
    }

    fn each(&self) -> impl Iterator<Item = (GatewayEpoch, Link)> {
        self.links.read().unwrap_or_else(PoisonError::into_inner).clone().into_iter()
    }

    /// An epoch begins: to one gateway.
    pub fn up(&self, gateway: GatewayEpoch, facts: &ReplicaFacts) {
        if let Some((_, link)) = self.each().find(|(epoch, _)| *epoch == gateway) {
            must_arrive(gateway, &link, wire::up(facts));
        }
    }

    /// What one turn of the loop brought: to each gateway its own part, messages first.
    pub fn flush(
        &self,
        now: Instant,
        epoch: ReplicaEpoch,
        messages: &[(GatewayEpoch, FromReplica)],
        items: &[TurnItem],
    ) {
        for (gateway, link) in self.each() {
            let its = messages.iter().filter(|(to, _)| *to == gateway).map(|(_, message)| message);
            // In pieces: the whole of a large cache is told at once.
            let its: Vec<_> = its.collect();
            for piece in its.chunks(MESSAGES_MAX) {
                must_arrive(gateway, &link, wire::said(now, epoch, piece.iter().copied()));
            }
            let its = items.iter().filter(|item| wire::gateway_of(item) == Some(gateway));
            if its.clone().next().is_some() {
                must_arrive(gateway, &link, wire::turn(epoch, its));
            }
            for item in items {
                if let TurnItem::Down { lost } = item {
                    must_arrive(gateway, &link, wire::down(epoch, *lost));
                }
            }
        }
    }

    /// No new work any more.
    pub fn draining(&self, epoch: ReplicaEpoch) {
        for (gateway, link) in self.each() {
            must_arrive(gateway, &link, wire::draining(epoch));
        }
    }

    /// A word for another worker, by way of the gateway that leads the hand-off. Lost where there is no room.
    pub fn word(&self, gateway: GatewayEpoch, word: &Word) {
        if let Some((_, link)) = self.each().find(|(epoch, _)| *epoch == gateway) {
            let _ = link.send(wire::word(word));
        }
    }

    /// Says goodbye to all.
    pub fn close(&self) {
        self.each().for_each(|(_, link)| link.close());
    }
}

fn must_arrive(gateway: GatewayEpoch, link: &Link, body: Bytes) {
    match link.send(body) {
        // What is said into a session that is over ends with it.
        Ok(()) | Err(NotSent::Over) => {}
        Err(why) => {
            tracing::error!(gateway = gateway.0, %why, "a gateway does not confirm what it is told: its session ends");
            link.close();
        }
    }
}
