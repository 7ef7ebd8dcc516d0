//! Whose turn is it? The flow behind the one that was served last, in the order of their ids, round and round; inside a flow the request
//! that came first.
//!
//! A request is a turn whatever it costs: a flow of long requests gets more than its share, and the more so the longer it goes on. It is
//! here to be read, and as what `vtc` is measured against.

use penstock_policy_sdk::fairness::{Fairness, NO_TARGET, OrderAsked, VictimsAsked};
use penstock_policy_sdk::{
    DecodeError, Fact, FactKind, Policy, Ranking, Reader, Rest, RestoreInfo, Told, Writer, Yielder, declare,
};

declare! {
    /// What `order` reads of the call: nothing.
    pub OrderReads: Order = [];
    /// What `order` reads of each waiting request.
    pub Sees: Waiting = ["flow-id", "flow-count"];
    /// What `victims` reads of the call: nothing.
    pub VictimsReads: Victims = [];
    /// What `victims` reads of each running sequence: nothing.
    pub Runs: Running = [];
}

/// The policy. The gateway's instance keeps whose turn it was; a replica's keeps nothing.
#[derive(Debug, Default)]
pub struct RoundRobin {
    /// The flow of the request that was dispatched last; none before the first.
    last: Option<u64>,
    /// Of the present call; kept for its room.
    turns: Vec<Turn>,
}

/// A row in the order of turns: the round it falls into, then how far round the ring its flow stands.
type Turn = (u64, u64, u32);

impl Policy for RoundRobin {
    const NAME: &'static str = "round-robin";
    const VERSION: &'static str = env!("CARGO_PKG_VERSION");
    const FACTS: &'static [FactKind] = &[FactKind::Taken];
    const STATE_SCHEMA: u32 = 1;
    type Parameters = ();

    fn new((): &()) -> Self {
        Self::default()
    }

    fn observe(&mut self, fact: &Fact) {
        if let Told::Taken(told) = Told::from(fact) {
            self.last = Some(told.flow_id);
        }
    }

    fn save(&self, out: &mut Writer) {
        out.option(self.last, Writer::u64);
    }

    fn restore(&mut self, _info: &RestoreInfo, from: &mut Reader<'_>) -> Result<(), DecodeError> {
        self.last = from.option(Reader::u64)?;
        Ok(())
    }
}

impl Fairness for RoundRobin {
    type Order = OrderReads;
    type Waiting = Sees;
    type Victims = VictimsReads;
    type Running = Runs;

    fn order(&mut self, asked: &OrderAsked<'_, Self>, ranked: &mut Vec<u32>) -> Option<Ranking> {
        // Ids wrap round: the flow right behind the last one is the nearest, the last one itself the farthest.
        let first = self.last.map_or(0, |last| last.wrapping_add(1));
        self.turns.clear();
        let turn = |flow: u64| flow.wrapping_sub(first);
        self.turns.extend(asked.waiting.iter().map(|row| (row.flow_count(), turn(row.flow_id()), row.index())));
        self.turns.sort_unstable();
        ranked.extend(self.turns.iter().map(|turn| turn.2));
        (!ranked.is_empty()).then_some(Ranking { rest: Rest::Append, tpot_target_us: NO_TARGET })
    }

    /// No opinion: the native default says who yields.
    fn victims(&mut self, _asked: &VictimsAsked<'_, Self>, _yielders: &mut Vec<Yielder>) {}
}

#[cfg(test)]
mod tests {
    use penstock_policy_sdk::Load as _;
    use penstock_policy_sdk::api::{Policy as _, RestoreCause, RestoreInfo};
    use penstock_policy_sdk::facts::Taken;

    use super::*;
    use crate::Seat;

    #[test]
    fn its_manifest_is_one_the_host_takes() {
        let declared = Seat::manifest().fairness().unwrap();
        assert_eq!((declared.waiting.len(), declared.running.len(), declared.terms.state_schema), (2, 0, 1));
    }

    #[test]
    fn whose_turn_it_was_is_all_it_keeps() {
        let mut seat = Seat::configure("").unwrap();
        let mut fresh = Writer::new();
        seat.save(&mut fresh).unwrap();
        seat.observe(&[Taken { flow_id: 7, ..Taken::default() }.at(1)]).unwrap();
        let mut state = Writer::new();
        seat.save(&mut state).unwrap();
        assert_ne!(state.bytes(), fresh.bytes());
        let mut next = Seat::configure("").unwrap();
        let info = RestoreInfo { schema: 1, cause: RestoreCause::Swap, saved_now_us: 1, now_us: 1, elapsed_us: 0 };
        next.restore(&info, state.bytes()).unwrap();
        assert_eq!(next.policy().last, Some(7));
    }
}
