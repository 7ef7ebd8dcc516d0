//! A worker serves a gateway: reads what it says, and hands it to the replica's loop.

use std::sync::Arc;

use penstock_base::GatewayEpoch;
use penstock_control::Conversation;
use penstock_sched::message::ToReplica;
use penstock_sched::replica::ReplicaInput;

use super::port::ReplicaPort;
use super::wire::{Endpoint, ToWorker, Word};
use crate::handoff::{self, Landed, MoverWake};
use crate::mailbox::Lane;
use crate::replica_wake::{self, ReplicaWake};
use crate::wiring::Wiring;

/// Reads what one gateway says, until the session is over.
pub(super) struct Server {
    pub wiring: Arc<Wiring>,
    pub port: Arc<ReplicaPort>,
    pub gateway: GatewayEpoch,
    pub conversation: Conversation,
}

impl Server {
    pub fn run(mut self) {
        let (link, gateway) = (self.conversation.link(), self.gateway);
        if let Some(links) = &self.wiring.links {
            links.add(gateway, link.clone());
        }
        tracing::info!(gateway = gateway.0, peer = %self.conversation.peer(), "a gateway has come");
        self.push(replica_wake::CONTROL, ReplicaWake::GatewayUp(gateway));
        while let Some(body) = self.conversation.receive_blocking() {
            let now = self.wiring.clock.now();
            let handled = ToWorker::read(&body, now).map_err(|error| error.to_string());
            if let Err(why) = handled.and_then(|said| self.hear(said)) {
                tracing::error!(gateway = gateway.0, why, "a gateway's message makes no sense: its session ends");
                break;
            }
        }
        link.close();
        let why = link.ended().map(|why| why.to_string());
        tracing::warn!(gateway = gateway.0, why, "a gateway has left: its work here ends");
        if let Some(links) = &self.wiring.links {
            links.remove(gateway);
        }
        self.push(replica_wake::CONTROL, ReplicaWake::GatewayDown(gateway));
    }

    fn hear(&self, said: ToWorker) -> Result<(), String> {
        let gateway = self.gateway;
        match said {
            ToWorker::Message { epoch, message, placement } => {
                let placed = placement.as_ref().map(|placement| placement.context.request().gateway_epoch());
                if placed.into_iter().chain(subject(&message)).any(|of| of != gateway) {
                    return Err("a request of another gateway".to_owned());
                }
                let is_stance = matches!(message, ToReplica::Stance(_));
                let wake = ReplicaWake::Gateway { gateway, epoch, message, placement };
                // The newest stance of each gateway counts; there may be several gateways, so that none takes another's place.
                self.push(if is_stance { replica_wake::STANCES } else { replica_wake::WORK }, wake);
            }
            ToWorker::Feedback { epoch, inputs } => {
                let of = |input: &ReplicaInput| match input {
                    ReplicaInput::Finish(end) => end.seq.request.gateway_epoch() == gateway,
                    ReplicaInput::BlockKeys { seq, .. } => seq.request.gateway_epoch() == gateway,
                    _ => false,
                };
                if !inputs.iter().all(of) {
                    return Err("news of another gateway's request".to_owned());
                }
                self.push(replica_wake::FEEDBACK, ReplicaWake::Feedback { epoch, inputs });
            }
            ToWorker::Word(Word::Handoff { to, input }) => {
                let _ = self.port.try_push(replica_wake::WORDS, ReplicaWake::Handoff { to, input });
            }
            ToWorker::Word(Word::Mover { to, body }) => {
                let landed = Landed::decode(&body).map_err(|error| format!("a mover's word: {error}"))?;
                if landed.to == to {
                    self.tell_mover(handoff::LANDED, MoverWake::Landed(landed));
                }
            }
            ToWorker::Endpoint(Endpoint { replica, life, descriptors }) => {
                self.tell_mover(handoff::PEERS, MoverWake::Peer { replica, life, descriptors });
            }
            ToWorker::EndpointGone { replica, life } => {
                self.tell_mover(handoff::PEERS, MoverWake::PeerGone { replica, life });
            }
        }
        Ok(())
    }

    /// What finds no room is lost: chunks are written again, and other workers are named again by each gateway that comes.
    fn tell_mover(&self, lane: Lane, wake: MoverWake) {
        let local = self.wiring.replicas.locals().first();
        if let Some(mailbox) = local.and_then(|replica| self.wiring.mover(*replica)) {
            let _ = mailbox.try_push(lane, wake);
        }
    }

    /// Waits while the replica is busy: it never waits for this thread.
    fn push(&self, lane: Lane, wake: ReplicaWake) {
        if let Some(mailbox) = self.port.local() {
            let _ = mailbox.push_waiting(lane, wake);
        }
    }
}

/// Whose request or hand-off a message is about.
fn subject(message: &ToReplica) -> Option<GatewayEpoch> {
    match message {
        ToReplica::Cancel { request, .. } => Some(request.gateway_epoch()),
        ToReplica::Prefill(ordered) => Some(ordered.transfer.gateway_epoch()),
        ToReplica::Decode(ordered) => Some(ordered.transfer.gateway_epoch()),
        ToReplica::Dispatch(_) | ToReplica::Stance(_) | ToReplica::Policies(_) | ToReplica::PeerUp(_) => None,
    }
}
