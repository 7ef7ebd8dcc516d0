//! Who reaches whom, and how long do bytes take? Cuts between nodes, one way or both, and the ports that KV goes through.
//!
//! A replica has one port out and one port in; what goes through a port goes one after the other. A transfer takes its bytes divided by the
//! bandwidth in force, behind whatever either port still has to do, and the latency on top.

use std::collections::BTreeMap;

use penstock_base::{Duration, Instant};

use crate::agenda::{Latency, Node};
use crate::rng::Rng;

/// Which ways a cut stops.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Ways {
    /// Both.
    Both,
    /// From the first to the second node of the pair alone.
    There,
    /// From the second to the first alone.
    Back,
}

/// Two nodes that do not reach each other for a while.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Cut {
    /// Between whom.
    pub pair: (Node, Node),
    /// Which ways.
    pub ways: Ways,
    /// From here on.
    pub from: Instant,
    /// Up to here.
    pub until: Instant,
}

impl Cut {
    fn stops(&self, from: Node, to: Node) -> bool {
        let there = self.pair == (from, to) && self.ways != Ways::Back;
        let back = self.pair == (to, from) && self.ways != Ways::There;
        there || back
    }

    /// Is it between these two?
    pub fn is_between(&self, one: Node, two: Node) -> bool {
        self.pair == (one, two) || self.pair == (two, one)
    }
}

/// The links that KV travels by.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct DataLink {
    /// Of each port of each replica.
    pub bytes_per_sec: u64,
    /// From the last byte out to the last byte in.
    pub latency: Latency,
}

/// Cuts and ports.
pub struct Network {
    link: DataLink,
    cuts: Vec<Cut>,
    /// When the port of a replica is free, out and in.
    free_out: BTreeMap<usize, Instant>,
    free_in: BTreeMap<usize, Instant>,
    /// The ports of a replica are so many times slower until then.
    slow: BTreeMap<usize, (u64, Instant)>,
    rng: Rng,
}

impl Network {
    /// Nothing is cut.
    pub fn new(link: DataLink, rng: Rng) -> Self {
        let free_in = BTreeMap::new();
        Self { link, cuts: Vec::new(), free_out: BTreeMap::new(), free_in, slow: BTreeMap::new(), rng }
    }

    /// Cuts a link.
    pub fn cut(&mut self, now: Instant, cut: Cut) {
        self.cuts.retain(|cut| cut.until > now);
        self.cuts.push(cut);
    }

    /// The replica's ports are `factor` times slower until then.
    pub fn slow_down(&mut self, replica: usize, factor: u64, until: Instant) {
        self.slow.insert(replica, (factor.max(1), until));
    }

    /// Until when nothing passes this way, when that is so at `at`.
    pub fn blocked(&self, at: Instant, from: Node, to: Node) -> Option<Instant> {
        let stops = |cut: &&Cut| cut.stops(from, to) && cut.from <= at && at < cut.until;
        self.cuts.iter().filter(stops).map(|cut| cut.until).max()
    }

    /// Until when the two do not hear each other both ways, when that is so at `at`.
    pub fn apart(&self, at: Instant, one: Node, two: Node) -> Option<Instant> {
        self.blocked(at, one, two).max(self.blocked(at, two, one))
    }

    /// When bytes that are posted now begin to move, and when they have arrived.
    pub fn arrival(&mut self, now: Instant, (from, to): (usize, usize), bytes: u64) -> (Instant, Instant) {
        let factor =
            |replica: usize| self.slow.get(&replica).filter(|(_, until)| now < *until).map_or(1, |(factor, _)| *factor);
        let factor = factor(from).max(factor(to));
        let took = time_of(bytes, self.link.bytes_per_sec / factor);
        let free = |ports: &BTreeMap<usize, Instant>, replica| ports.get(&replica).copied().unwrap_or_default();
        let begins = now.max(free(&self.free_out, from)).max(free(&self.free_in, to));
        let end = begins + took;
        self.free_out.insert(from, end);
        self.free_in.insert(to, end);
        (begins, end + self.link.latency.base + Duration(self.rng.below(self.link.latency.jitter.0 + 1)))
    }
}

/// Bytes divided by bandwidth.
pub fn time_of(bytes: u64, bytes_per_sec: u64) -> Duration {
    let ns = u128::from(bytes) * 1_000_000_000 / u128::from(bytes_per_sec.max(1));
    Duration(u64::try_from(ns).unwrap_or(u64::MAX / 4))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn network() -> Network {
        let latency = Latency { base: Duration::from_us(10), jitter: Duration(0) };
        Network::new(DataLink { bytes_per_sec: 1_000_000_000, latency }, Rng::new(1))
    }

    #[test]
    fn bytes_wait_for_both_ports() {
        let mut network = network();
        let ms = |ms: u64| Instant(ms * 1_000_000);
        let late = Duration::from_us(10);
        // 1 MB at 1 GB/s is 1 ms.
        assert_eq!(network.arrival(ms(0), (0, 1), 1_000_000).1, ms(1) + late);
        assert_eq!(network.arrival(ms(0), (0, 2), 1_000_000).1, ms(2) + late, "behind what leaves before");
        assert_eq!(network.arrival(ms(0), (3, 1), 1_000_000).1, ms(2) + late, "behind what comes in before");
        assert_eq!(network.arrival(ms(5), (4, 5), 2_000_000).1, ms(7) + late, "ports of others are nobody's business");
        network.slow_down(5, 10, ms(100));
        assert_eq!(network.arrival(ms(10), (4, 5), 1_000_000).1, ms(20) + late);
        assert_eq!(network.arrival(ms(100), (4, 5), 1_000_000).1, ms(101) + late);
    }

    #[test]
    fn a_cut_stops_its_ways_for_its_time() {
        let mut network = network();
        let (one, two, three) = (Node::Gateway(0), Node::Replica(1), Node::Replica(2));
        network.cut(Instant(0), Cut { pair: (one, two), ways: Ways::There, from: Instant(5), until: Instant(9) });
        assert_eq!(network.blocked(Instant(5), one, two), Some(Instant(9)));
        assert_eq!(network.blocked(Instant(8), two, one), None, "the other way is open");
        assert_eq!(network.apart(Instant(8), two, one), Some(Instant(9)));
        assert_eq!(network.blocked(Instant(4), one, two), None);
        assert_eq!(network.blocked(Instant(9), one, two), None);
        assert_eq!(network.apart(Instant(6), one, three), None);
        network.cut(Instant(6), Cut { pair: (two, one), ways: Ways::Back, from: Instant(6), until: Instant(20) });
        assert_eq!(network.blocked(Instant(8), one, two), Some(Instant(20)), "the longest counts");
    }
}
