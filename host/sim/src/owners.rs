//! Whose is a request while it is handed off? One book over all machines: it sees what each of them does and cannot see of the others.
//!
//! Like all checkers it knows nothing of faults; what it is told is who is still heard.

use std::collections::BTreeMap;

use penstock_base::{GatewayEpoch, ReplicaEpoch, RequestId, TransferId};
use penstock_sched::handoff::End;

use crate::executor::ensure;

/// One incarnation of a replica, by place.
pub type Who = (usize, ReplicaEpoch);

/// One hand-off that has begun.
#[derive(Clone, Copy, Debug)]
struct Begun {
    request: RequestId,
    sender: usize,
    receiver: usize,
    end: Option<End>,
}

/// See the module.
#[derive(Debug, Default)]
pub struct OwnerBook {
    begun: BTreeMap<TransferId, Begun>,
    /// Who has taken an attempt and not let go of it.
    owners: BTreeMap<(RequestId, u16), Vec<Who>>,
    /// Whose tokens of an attempt reached the edge.
    emitters: BTreeMap<(RequestId, u16), Who>,
}

impl OwnerBook {
    /// A gateway has begun a hand-off.
    ///
    /// # Errors
    /// Its id is known, or another one of the request has not ended.
    pub fn begun(
        &mut self,
        transfer: TransferId,
        request: RequestId,
        (sender, receiver): (usize, usize),
    ) -> Result<(), String> {
        let mut open = self.begun.values().filter(|begun| begun.request == request && begun.end.is_none());
        ensure(open.next().is_none(), || format!("{request} is handed off twice at a time"))?;
        ensure(!self.begun.contains_key(&transfer), || format!("hand-off {transfer} begins twice"))?;
        self.begun.insert(transfer, Begun { request, sender, receiver, end: None });
        Ok(())
    }

    /// A gateway says how a hand-off ended.
    ///
    /// # Errors
    /// It had ended, was never begun, or ends at a replica that is not its own.
    pub fn ended(&mut self, transfer: TransferId, request: RequestId, end: End) -> Result<(), String> {
        let begun = self.begun.get_mut(&transfer).ok_or_else(|| format!("hand-off {transfer} ends and never began"))?;
        let before = begun.end.replace(end);
        ensure(before.is_none(), || format!("hand-off {transfer} ends twice: {before:?}, then {end:?}"))?;
        ensure(begun.request == request, || format!("hand-off {transfer} was of {}", begun.request))?;
        let right = match end {
            End::HandedOff(peer) => peer.replica.0 as usize == begun.receiver,
            End::AtSender(peer, _) => peer.replica.0 as usize == begun.sender,
            End::Anew(_) | End::Failed(_) | End::Cancelled => true,
        };
        ensure(right, || format!("hand-off {transfer} of {begun:?} ends at another replica: {end:?}"))
    }

    /// A replica takes an attempt. `is_heard` says of another one whether its gateway still listens to it.
    ///
    /// # Errors
    /// Somebody else has it, and is heard.
    pub fn took(
        &mut self,
        (request, attempt): (RequestId, u16),
        who: Who,
        is_heard: impl Fn(Who) -> bool,
    ) -> Result<(), String> {
        let owners = self.owners.entry((request, attempt)).or_default();
        owners.retain(|other| is_heard(*other));
        ensure(owners.is_empty(), || format!("attempt {attempt} of {request} has two owners: {owners:?} and {who:?}"))?;
        owners.push(who);
        Ok(())
    }

    /// The request has ended at that replica, or has left it.
    pub fn let_go(&mut self, request: RequestId, attempt: u16, who: Who) {
        if let Some(owners) = self.owners.get_mut(&(request, attempt)) {
            owners.retain(|other| *other != who);
        }
    }

    /// A token of an attempt reaches the edge.
    ///
    /// # Errors
    /// Tokens of that attempt came from somebody else.
    pub fn at_edge(&mut self, (request, attempt): (RequestId, u16), who: Who) -> Result<(), String> {
        let emitter = *self.emitters.entry((request, attempt)).or_insert(who);
        ensure(emitter == who, || format!("attempt {attempt} of {request} is emitted by {emitter:?} and by {who:?}"))
    }

    /// A gateway is gone with everything it led.
    pub fn gateway_gone(&mut self, epoch: GatewayEpoch) {
        self.begun.retain(|transfer, _| transfer.gateway_epoch() != epoch);
        self.owners.retain(|(request, _), _| request.gateway_epoch() != epoch);
    }

    /// At rest every hand-off has ended.
    ///
    /// # Errors
    /// The first that has not.
    pub fn all_ended(&self) -> Result<(), String> {
        let open = self.begun.iter().find(|(_, begun)| begun.end.is_none());
        open.map_or(Ok(()), |(transfer, begun)| Err(format!("hand-off {transfer} never ended: {begun:?}")))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use penstock_base::ReplicaId;
    use penstock_sched::handoff::{Failure, Peer};

    const REQUEST: RequestId = RequestId(1 << 48 | 5);

    fn who(place: usize) -> Who {
        (place, ReplicaEpoch(1))
    }

    fn transfer(counter: u64) -> TransferId {
        TransferId::new(GatewayEpoch(1), counter).expect("small")
    }

    fn peer(replica: u32) -> Peer {
        Peer { replica: ReplicaId(replica), epoch: ReplicaEpoch(1) }
    }

    #[test]
    fn one_hand_off_of_a_request_at_a_time_each_with_one_end_at_one_of_its_two() {
        let mut book = OwnerBook::default();
        assert!(book.begun(transfer(1), REQUEST, (0, 1)).is_ok());
        assert!(book.all_ended().is_err());
        assert!(book.begun(transfer(2), REQUEST, (0, 1)).is_err(), "two at a time");
        let mut book = OwnerBook::default();
        assert!(book.begun(transfer(1), REQUEST, (0, 1)).is_ok());
        assert!(book.ended(transfer(1), REQUEST, End::HandedOff(peer(1))).is_ok() && book.all_ended().is_ok());
        assert!(book.ended(transfer(1), REQUEST, End::Cancelled).is_err(), "two ends");
        assert!(book.begun(transfer(1), REQUEST, (0, 1)).is_err(), "the same id");
        assert!(book.begun(transfer(2), REQUEST, (0, 1)).is_ok());
        assert!(
            book.ended(transfer(2), REQUEST, End::AtSender(peer(1), Failure::Stalled)).is_err(),
            "that is the other one"
        );
        assert!(book.ended(transfer(3), REQUEST, End::Cancelled).is_err(), "never begun");
    }

    #[test]
    fn one_owner_at_a_time_as_long_as_it_is_heard() {
        let mut book = OwnerBook::default();
        let attempt = (REQUEST, 1);
        assert!(book.took(attempt, who(0), |_| true).is_ok());
        assert!(book.took(attempt, who(1), |_| true).is_err());
        assert!(book.took(attempt, who(1), |other| other != who(0)).is_ok(), "nobody hears the first one any more");
        book.let_go(REQUEST, 1, who(1));
        assert!(book.took(attempt, who(2), |_| true).is_ok());
        assert!(book.took((REQUEST, 2), who(0), |_| true).is_ok(), "another attempt");
    }

    #[test]
    fn tokens_of_an_attempt_come_from_one() {
        let mut book = OwnerBook::default();
        assert!(book.at_edge((REQUEST, 1), who(0)).is_ok() && book.at_edge((REQUEST, 1), who(0)).is_ok());
        assert!(book.at_edge((REQUEST, 1), who(1)).is_err());
        assert!(book.at_edge((REQUEST, 1), (0, ReplicaEpoch(2))).is_err(), "another incarnation is another one");
        assert!(book.at_edge((REQUEST, 2), who(1)).is_ok());
    }
}
