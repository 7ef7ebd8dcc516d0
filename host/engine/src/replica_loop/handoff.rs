//! What does a replica's loop do for hand-offs? It knows requests and tokens; its mover knows bytes; its machine decides.

use std::collections::HashMap;
use std::sync::Arc;

use penstock_base::{BatchId, GatewayEpoch, ReplicaEpoch, SeqId, TransferId};
use penstock_exec::SampledToken;
use penstock_sched::handoff::{Order, Peer};
use penstock_sched::message::ToReplica;
use penstock_sched::replica::{HandoffEffect, HandoffInput, ReplicaInput};

use super::{Placed, ReplicaLoop};
use crate::context::{Placement, RequestContext};
use crate::handoff::{MoverOrder, MoverWake, ORDERS, RESET, WRITES};
use crate::mailbox::PushError;
use crate::outputs::TurnItem;
use crate::remote::Word;
use crate::replica_wake::{self, FreezeCause, ReplicaWake};

/// A hand-off in which this replica takes part, from the order to begin to the order to let go.
struct Part {
    context: Arc<RequestContext>,
    attempt: u16,
    /// What was sampled where the prompt was computed.
    tail: Vec<SampledToken>,
}

/// All of them.
#[derive(Default)]
pub(super) struct Parts(HashMap<TransferId, Part>);

impl Parts {
    pub(super) fn len(&self) -> usize {
        self.0.len()
    }

    /// Those that this gateway led come to nothing.
    pub(super) fn leave(&mut self, gateway: GatewayEpoch) {
        self.0.retain(|transfer, _| transfer.gateway_epoch() != gateway);
    }
}

impl ReplicaLoop {
    fn me(&self) -> Peer {
        Peer { replica: self.config.replica, epoch: self.config.epoch }
    }

    /// Knows a request before the order that begins with it reaches the machine.
    pub(super) fn note_order(&mut self, message: &ToReplica, placement: Option<&Placement>) {
        let begun = match message {
            ToReplica::Prefill(ordered) => match &ordered.order {
                Order::Begin(begin) => Some((ordered.transfer, begin.attempt)),
                _ => None,
            },
            ToReplica::Decode(ordered) => match &ordered.order {
                Order::Begin(begin) => Some((ordered.transfer, begin.attempt)),
                _ => None,
            },
            _ => None,
        };
        if let (Some((transfer, attempt)), Some(placement)) = (begun, placement) {
            let part = || Part { context: Arc::clone(&placement.context), attempt, tail: Vec::new() };
            self.parts.0.entry(transfer).or_insert_with(part);
        }
    }

    /// Forgets a hand-off that was told to let go, once the machine has heard it.
    pub(super) fn forget_closed(&mut self, closed: Option<TransferId>) {
        if let Some(transfer) = closed {
            self.parts.0.remove(&transfer);
        }
    }

    pub(super) fn take_handoff(&mut self, to: Peer, input: HandoffInput) {
        if to != self.me() || !self.serves() {
            return self.wiring.metrics.stale("replica");
        }
        self.step(ReplicaInput::Handoff(input));
    }

    pub(super) fn take_tail(&mut self, to: Peer, transfer: TransferId, tail: Vec<SampledToken>) {
        if let Some(part) = self
            .parts
            .0
            .get_mut(&transfer)
            .filter(|_| to == Peer { replica: self.config.replica, epoch: self.config.epoch })
        {
            part.tail = tail;
        }
    }

    pub(super) fn carry_out_handoff(&mut self, effect: HandoffEffect) {
        match effect {
            HandoffEffect::ToReceiver(message) => self.post(message.to, HandoffInput::OfSender(message)),
            HandoffEffect::ToSender(message) => self.post(message.to, HandoffInput::OfReceiver(message)),
            HandoffEffect::Sending { transfer, seq, grid } => {
                let Some(part) = self.parts.0.get(&transfer) else {
                    self.freeze.get_or_insert(FreezeCause::Broken("hand_off_of_unknown_request"));
                    return;
                };
                let placed = Placed::new(Arc::clone(&part.context), part.attempt);
                self.requests.insert(seq.request, placed);
                self.order_mover(MoverOrder::Send { transfer, grid });
            }
            HandoffEffect::Sources { transfer, blocks } => self.order_mover(MoverOrder::Sources { transfer, blocks }),
            HandoffEffect::Bind { transfer, to, blocks } => self.order_mover(MoverOrder::Bind { transfer, to, blocks }),
            HandoffEffect::Write { transfer, index, stamp } => {
                let order = MoverOrder::Write { transfer, index, stamp };
                let wake = MoverWake::Order { me: self.me(), order };
                if let Some(mailbox) = self.wiring.mover(self.config.replica) {
                    // Without room it is lost: the machine has it written again.
                    let _ = mailbox.try_push(WRITES, wake);
                }
            }
            HandoffEffect::Sampled { transfer, seq, batch, row, tokens } => {
                self.keep_back(transfer, seq, (batch, row), tokens);
            }
            HandoffEffect::StopWrites(transfer) => self.order_mover(MoverOrder::Stop(transfer)),
            HandoffEffect::Grant { transfer, to, grid, blocks } => {
                self.order_mover(MoverOrder::Grant { transfer, to, grid, blocks });
            }
            HandoffEffect::Fence(transfer) => self.order_mover(MoverOrder::Fence(transfer)),
            HandoffEffect::Digest(transfer) => self.order_mover(MoverOrder::Digest(transfer)),
            HandoffEffect::Adopt { transfer, seq, attempt } => {
                let Some(part) = self.parts.0.get_mut(&transfer) else {
                    self.freeze.get_or_insert(FreezeCause::Broken("hand_off_of_unknown_request"));
                    return;
                };
                let mut placed = Placed::new(Arc::clone(&part.context), attempt);
                placed.kept = std::mem::take(&mut part.tail);
                self.requests.insert(seq.request, placed);
            }
            HandoffEffect::Release { seq, tokens } => self.release(seq, tokens),
            HandoffEffect::Leave { seq } => _ = self.requests.remove(&seq.request),
            HandoffEffect::Swept(transfer) => {
                self.parts.0.remove(&transfer);
                self.wiring.metrics.handoff_swept();
            }
            HandoffEffect::Continue { .. } | HandoffEffect::Accepting(_) => {}
        }
    }

    /// A word for another replica. It may be lost: then it is said again.
    fn post(&self, to: Peer, input: HandoffInput) {
        if let Some(port) = self.wiring.replica(to.replica) {
            let _ = port.try_push(replica_wake::WORDS, ReplicaWake::Handoff { to, input });
        } else if let (Some(links), Some(transfer)) = (&self.wiring.links, transfer_of(&input)) {
            links.word(transfer.gateway_epoch(), &Word::Handoff { to, input });
        }
    }

    fn order_mover(&mut self, order: MoverOrder) {
        let Some(mailbox) = self.wiring.mover(self.config.replica) else { return };
        let wake = MoverWake::Order { me: self.me(), order };
        if let Err(PushError::Full(_)) = mailbox.try_push(ORDERS, wake) {
            self.freeze.get_or_insert(FreezeCause::MailboxFull);
        }
    }

    /// The first tokens of a sequence that another replica is to have: kept here, and sent as its tail.
    fn keep_back(&mut self, transfer: TransferId, seq: SeqId, (batch, row): (BatchId, u32), tokens: u32) {
        let reported = self.reported.as_mut().filter(|reported| reported.batch == batch);
        let row = reported.and_then(|reported| reported.rows.get_mut(row as usize));
        let (Some(row), Some(placed)) = (row, self.requests.get_mut(&seq.request)) else {
            self.freeze.get_or_insert(FreezeCause::Broken("kept_token_of_unknown_row"));
            return;
        };
        let mut tail = std::mem::take(&mut row.tokens);
        tail.truncate(tokens as usize);
        placed.kept.clone_from(&tail);
        self.order_mover(MoverOrder::Seal { transfer, tail });
    }

    /// What was kept back counts: it is streamed.
    fn release(&mut self, seq: SeqId, tokens: u32) {
        let Some(placed) = self.requests.get_mut(&seq.request) else { return };
        let (kept, attempt) = (std::mem::take(&mut placed.kept), placed.attempt);
        if kept.len() != tokens as usize {
            self.freeze.get_or_insert(FreezeCause::Broken("a_hand_off_lost_its_tail"));
            return;
        }
        let Some(output) = placed.output(seq.index) else { return };
        output.extend(kept.iter().map(|token| token.id));
        if !kept.is_empty() {
            self.items.push(TurnItem::Tokens { seq, attempt, first: 0, tokens: kept });
        }
    }

    /// Nothing of a frozen epoch may be read or written once the next one begins. True when there is nobody to ask.
    pub(super) fn quiet_mover(&mut self, epoch: ReplicaEpoch) -> bool {
        self.parts.0.clear();
        match self.wiring.mover(self.config.replica) {
            None => true,
            // A mailbox that is closed belongs to an engine that ends.
            Some(mailbox) => mailbox.push_latest(RESET, MoverWake::Reset(epoch)).is_err(),
        }
    }
}

/// The hand-off that an order tells to let go.
pub(super) fn closed_by(message: &ToReplica) -> Option<TransferId> {
    match message {
        ToReplica::Prefill(ordered) => matches!(ordered.order, Order::Close { .. }).then_some(ordered.transfer),
        ToReplica::Decode(ordered) => matches!(ordered.order, Order::Close { .. }).then_some(ordered.transfer),
        _ => None,
    }
}

/// The hand-off that another replica hears of.
fn transfer_of(input: &HandoffInput) -> Option<TransferId> {
    match input {
        HandoffInput::OfSender(word) => Some(word.transfer),
        HandoffInput::OfReceiver(word) => Some(word.transfer),
        _ => None,
    }
}
