//! What happens when? Events by time, those of one moment in the order in which they were put down; and links that keep order.

use std::cmp::Ordering;
use std::collections::{BTreeMap, BinaryHeap};

use penstock_base::{Duration, Instant};

use crate::rng::Rng;

struct Entry<E> {
    at: Instant,
    order: u64,
    event: E,
}

impl<E> Entry<E> {
    fn key(&self) -> (Instant, u64) {
        (self.at, self.order)
    }
}

impl<E> PartialEq for Entry<E> {
    fn eq(&self, other: &Self) -> bool {
        self.key() == other.key()
    }
}
impl<E> Eq for Entry<E> {}
impl<E> PartialOrd for Entry<E> {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}
impl<E> Ord for Entry<E> {
    /// The earliest is the greatest: the heap gives the greatest first.
    fn cmp(&self, other: &Self) -> Ordering {
        other.key().cmp(&self.key())
    }
}

/// The virtual clock: it stands at the event that was taken last.
pub struct Agenda<E> {
    now: Instant,
    order: u64,
    events: BinaryHeap<Entry<E>>,
}

impl<E> Default for Agenda<E> {
    fn default() -> Self {
        Self { now: Instant::ZERO, order: 0, events: BinaryHeap::new() }
    }
}

impl<E> Agenda<E> {
    /// The present.
    pub fn now(&self) -> Instant {
        self.now
    }

    /// Puts an event down; one in the past happens now.
    pub fn put(&mut self, at: Instant, event: E) {
        self.order += 1;
        self.events.push(Entry { at: at.max(self.now), order: self.order, event });
    }

    /// Moves the clock to the next event.
    pub fn take(&mut self) -> Option<E> {
        let entry = self.events.pop()?;
        self.now = entry.at;
        Some(entry.event)
    }
}

/// Who is at an end of a link.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Node {
    /// A gateway, by place.
    Gateway(usize),
    /// A replica, by place.
    Replica(usize),
    /// What a replica's driver finds in the text of its tokens.
    Text(usize),
}

/// How long messages travel.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Latency {
    /// At least.
    pub base: Duration,
    /// Up to this much longer.
    pub jitter: Duration,
}

/// Links between all pairs; messages of a pair arrive in the order in which they were sent.
pub struct Links {
    last: BTreeMap<(Node, Node), Instant>,
    rng: Rng,
}

impl Links {
    /// Links whose jitter comes from `rng`.
    pub fn new(rng: Rng) -> Self {
        Self { last: BTreeMap::new(), rng }
    }

    /// When a message that is sent now arrives.
    pub fn arrival(&mut self, now: Instant, (from, to): (Node, Node), latency: Latency) -> Instant {
        let at = now + latency.base + Duration(self.rng.below(latency.jitter.0 + 1));
        let last = self.last.entry((from, to)).or_default();
        *last = at.max(*last);
        *last
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_come_by_time_and_then_in_order() {
        let mut agenda = Agenda::default();
        for (at, name) in [(5, "c"), (3, "a"), (5, "d"), (4, "b")] {
            agenda.put(Instant(at), name);
        }
        let order: Vec<_> = std::iter::from_fn(|| agenda.take().map(|name| (agenda.now().0, name))).collect();
        assert_eq!(order, [(3, "a"), (4, "b"), (5, "c"), (5, "d")]);
        agenda.put(Instant(1), "late");
        assert_eq!((agenda.take(), agenda.now()), (Some("late"), Instant(5)));
    }

    #[test]
    fn a_link_keeps_order_and_links_do_not_wait_for_each_other() {
        let mut links = Links::new(Rng::new(1));
        let latency = Latency { base: Duration(10), jitter: Duration(100) };
        let pair = (Node::Gateway(0), Node::Replica(0));
        let arrivals: Vec<_> = (0..50).map(|now| links.arrival(Instant(now), pair, latency)).collect();
        assert!(arrivals.is_sorted());
        let other = (Node::Replica(0), Node::Gateway(0));
        assert!(links.arrival(Instant(0), other, latency) <= Instant(110));
    }
}
