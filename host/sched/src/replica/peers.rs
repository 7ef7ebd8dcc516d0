//! Which gateways speak to this replica, and what did each last say and hear?

use alloc::vec::Vec;

use penstock_base::codec::{DecodeError, Reader, Writer};
use penstock_base::limits::{GATEWAYS_MAX, STANCE_FRESH};
use penstock_base::{ClassRank, DispatchNumber, Duration, GatewayEpoch, Instant};

use crate::message::{Credit, ReplicaStance};

/// One gateway.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Peer {
    /// Its incarnation.
    pub epoch: GatewayEpoch,
    /// The last dispatch seen from it.
    pub covers: DispatchNumber,
    /// Its newest stance, and when it came.
    pub stance: Option<(ReplicaStance, Instant)>,
    /// What the last report said, to see a change.
    pub told: Option<Told>,
    /// Number of the last cache event sent to it.
    pub cache_sequence: u64,
}

/// The part of a report whose change is worth a message.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Told {
    /// When it was sent.
    pub at: Instant,
    /// What it covered.
    pub covers: DispatchNumber,
    /// What was granted to all gateways together: a gateway's part goes round even when nothing changed.
    pub total: Credit,
    /// Active, cached, free, reserved blocks; ready, running requests; prefill tokens.
    pub load: [u64; 7],
}

/// What an overload stance asks of this replica: blocks from classes up to a rank.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct PreemptOrder {
    pub blocks: u64,
    pub class: ClassRank,
}

/// All gateways, in the order they came up.
#[derive(Clone, Debug)]
pub(super) struct Peers {
    entries: Vec<Peer>,
}

impl Peers {
    pub(super) fn new() -> Self {
        Self { entries: Vec::with_capacity(GATEWAYS_MAX) }
    }

    pub(super) fn as_slice(&self) -> &[Peer] {
        &self.entries
    }

    pub(super) fn as_mut_slice(&mut self) -> &mut [Peer] {
        &mut self.entries
    }

    pub(super) fn get_mut(&mut self, epoch: GatewayEpoch) -> Option<&mut Peer> {
        self.entries.iter_mut().find(|peer| peer.epoch == epoch)
    }

    pub(super) fn knows(&self, epoch: GatewayEpoch) -> bool {
        self.entries.iter().any(|peer| peer.epoch == epoch)
    }

    /// False when it is there already or the table is full.
    pub(super) fn add(&mut self, epoch: GatewayEpoch) -> bool {
        if self.knows(epoch) || self.entries.len() >= GATEWAYS_MAX {
            return false;
        }
        self.entries.push(Peer { epoch, covers: DispatchNumber(0), stance: None, told: None, cache_sequence: 0 });
        true
    }

    /// False when it was not there.
    pub(super) fn remove(&mut self, epoch: GatewayEpoch) -> bool {
        let before = self.entries.len();
        self.entries.retain(|peer| peer.epoch != epoch);
        self.entries.len() < before
    }

    /// Takes a stance over. `Err` for an unknown gateway or an old number; else what has to be preempted, when the stance is new.
    pub(super) fn take_stance(
        &mut self,
        epoch: GatewayEpoch,
        stance: ReplicaStance,
        now: Instant,
    ) -> Result<Option<PreemptOrder>, ()> {
        let peer = self.get_mut(epoch).ok_or(())?;
        let last = peer.stance.map(|(stance, _)| stance.number);
        if last.is_some_and(|last| stance.number < last) {
            return Err(());
        }
        peer.stance = Some((stance, now));
        let is_new = last != Some(stance.number) && stance.preempt_blocks > 0;
        Ok(is_new.then_some(PreemptOrder { blocks: stance.preempt_blocks, class: stance.preempt_class }))
    }

    fn fresh(&self, now: Instant) -> impl Iterator<Item = &ReplicaStance> {
        let stances = self.entries.iter().filter_map(|peer| peer.stance.as_ref());
        stances.filter(move |(_, at)| now.since(*at) < STANCE_FRESH).map(|(stance, _)| stance)
    }

    /// The strictest level that is fresh; none when the native ladder stands in.
    pub(super) fn level(&self, now: Instant) -> Option<u8> {
        self.fresh(now).map(|stance| stance.level).max()
    }

    /// The smallest fresh target for a step with decodes.
    pub(super) fn tpot_target(&self, now: Instant) -> Option<Duration> {
        let targets = self.fresh(now).map(|stance| stance.tpot_target_us).filter(|us| *us != u32::MAX && *us > 0);
        targets.min().map(|us| Duration::from_us(u64::from(us)))
    }

    /// The part of `total` that the gateway at `index` gets. The parts add up to the total; who gets the rest goes round with `turn`,
    /// which is the same for all gateways that are told of one total.
    ///
    /// While nothing is `shared` yet, the gateway in turn is offered the whole: what needs more than an equal part would never start
    /// otherwise. Should another one use its part first, the replica refuses.
    pub(super) fn share(&self, index: usize, turn: u64, total: u64, shared: bool) -> u64 {
        let gateways = self.entries.len().max(1) as u64;
        let place = (index as u64 + turn % gateways) % gateways;
        if !shared && place == 0 {
            return total;
        }
        total / gateways + u64::from(place < total % gateways)
    }

    pub(super) fn encode(&self, out: &mut Writer) {
        out.list(self.entries.iter(), |w, peer| {
            w.u16(peer.epoch.0);
            w.u64(peer.covers.0);
            w.option(peer.stance, |w, (stance, at)| {
                w.u64(stance.number);
                w.u8(stance.level);
                w.u64(stance.preempt_blocks);
                w.u8(stance.preempt_class.get());
                w.u32(stance.tpot_target_us);
                w.u64(at.0);
            });
            w.option(peer.told, |w, told| {
                w.u64(told.at.0);
                w.u64(told.covers.0);
                w.u32(told.total.requests);
                w.u64(told.total.prefill_tokens);
                w.u64(told.total.blocks);
                for value in told.load {
                    w.u64(value);
                }
            });
            w.u64(peer.cache_sequence);
        });
    }

    pub(super) fn decode(from: &mut Reader<'_>) -> Result<Self, DecodeError> {
        let mut peers = Self::new();
        let entries = from.list(|r| {
            let (epoch, covers) = (GatewayEpoch(r.u16()?), DispatchNumber(r.u64()?));
            let stance = r.option(|r| {
                let stance = ReplicaStance {
                    number: r.u64()?,
                    level: r.u8()?,
                    preempt_blocks: r.u64()?,
                    preempt_class: ClassRank::new(r.u8()?).ok_or(DecodeError::Invalid("class"))?,
                    tpot_target_us: r.u32()?,
                };
                Ok((stance, Instant(r.u64()?)))
            })?;
            let told = r.option(|r| {
                let (at, covers) = (Instant(r.u64()?), DispatchNumber(r.u64()?));
                let total = Credit { requests: r.u32()?, prefill_tokens: r.u64()?, blocks: r.u64()? };
                let mut load = [0; 7];
                for value in &mut load {
                    *value = r.u64()?;
                }
                Ok(Told { at, covers, total, load })
            })?;
            Ok(Peer { epoch, covers, stance, told, cache_sequence: r.u64()? })
        })?;
        if entries.len() > GATEWAYS_MAX {
            return Err(DecodeError::Invalid("gateway count"));
        }
        peers.entries.extend(entries);
        Ok(peers)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn ms(ms: u64) -> Instant {
        Instant(ms * 1_000_000)
    }

    fn stance(number: u64, level: u8, tpot_target_us: u32) -> ReplicaStance {
        ReplicaStance { number, level, tpot_target_us, ..ReplicaStance::default() }
    }

    #[test]
    fn the_strictest_fresh_stance_holds_and_lapses_after_a_second() {
        let mut peers = Peers::new();
        assert!(peers.add(GatewayEpoch(1)) && peers.add(GatewayEpoch(2)) && !peers.add(GatewayEpoch(2)));
        assert_eq!(peers.take_stance(GatewayEpoch(1), stance(4, 1, 20_000), ms(0)), Ok(None));
        assert_eq!(peers.take_stance(GatewayEpoch(2), stance(9, 3, 50_000), ms(500)), Ok(None));
        assert_eq!((peers.level(ms(900)), peers.tpot_target(ms(900))), (Some(3), Some(Duration::from_ms(20))));
        assert_eq!((peers.level(ms(1_000)), peers.tpot_target(ms(1_000))), (Some(3), Some(Duration::from_ms(50))));
        assert_eq!((peers.level(ms(1_500)), peers.tpot_target(ms(1_500))), (None, None));
        assert_eq!(
            peers.take_stance(GatewayEpoch(1), stance(3, 0, 1), ms(600)),
            Err(()),
            "only the newest number counts"
        );
        assert_eq!(peers.take_stance(GatewayEpoch(7), stance(1, 0, 1), ms(600)), Err(()));
    }

    #[test]
    fn a_preempt_order_is_carried_out_once() {
        let mut peers = Peers::new();
        peers.add(GatewayEpoch(1));
        let order = ReplicaStance { preempt_blocks: 5, preempt_class: ClassRank::clamped(2), ..stance(1, 2, u32::MAX) };
        let due = PreemptOrder { blocks: 5, class: ClassRank::clamped(2) };
        assert_eq!(peers.take_stance(GatewayEpoch(1), order, ms(0)), Ok(Some(due)));
        assert_eq!(peers.take_stance(GatewayEpoch(1), order, ms(1)), Ok(None), "a repetition only keeps it fresh");
    }

    #[test]
    fn shares_add_up_and_the_rest_goes_round() {
        let mut peers = Peers::new();
        for epoch in 0..3 {
            peers.add(GatewayEpoch(epoch));
        }
        for turn in 0..6 {
            assert_eq!((0..3).map(|i| peers.share(i, turn, 7, true)).sum::<u64>(), 7);
        }
        let single: Vec<u64> = (0..3).map(|turn| peers.share(0, turn, 1, true)).collect();
        assert_eq!(single.iter().sum::<u64>(), 1, "one slot comes to each gateway once in three reports");
        assert_eq!(Peers::new().share(0, 5, 9, true), 9);
        let whole: Vec<u64> = (0..3).map(|turn| peers.share(1, turn, 9, false)).collect();
        assert_eq!(whole, [3, 3, 9], "of an idle replica each is offered all in its turn");
    }
}
