//! Which of many counters is the least? A tournament over places: every change and every question costs its depth, whatever came before,
//! so that no order of facts makes one of them dear.

/// A counter with its flow's id, which parts equals.
pub(super) type Key = (u64, u64);

/// What stands where nobody stands: no counter is greater.
const NOBODY: Key = (u64::MAX, u64::MAX);

/// The winners of a tournament, root at 1; its leaves are the places.
#[derive(Clone, Debug, Default)]
pub(super) struct Lowest {
    winners: Vec<Key>,
}

impl Lowest {
    fn leaves(&self) -> usize {
        self.winners.len() / 2
    }

    /// Puts `key` into a place, or nobody.
    pub(super) fn set(&mut self, place: u32, key: Option<Key>) {
        let place = place as usize;
        if place >= self.leaves() {
            if key.is_none() {
                return;
            }
            self.grow(place + 1);
        }
        let mut at = self.leaves() + place;
        self.winners[at] = key.unwrap_or(NOBODY);
        while at > 1 {
            let winner = self.winners[at].min(self.winners[at ^ 1]);
            at /= 2;
            if self.winners[at] == winner {
                break;
            }
            self.winners[at] = winner;
        }
    }

    /// The least of all.
    pub(super) fn least(&self) -> Option<Key> {
        self.winners.get(1).copied().filter(|key| *key != NOBODY)
    }

    /// The least of all places but one.
    pub(super) fn least_but(&self, place: u32) -> Option<Key> {
        let mut at = self.leaves() + place as usize;
        if at >= self.winners.len() {
            return self.least();
        }
        let mut least = NOBODY;
        while at > 1 {
            least = least.min(self.winners[at ^ 1]);
            at /= 2;
        }
        (least != NOBODY).then_some(least)
    }

    /// The places in their order.
    pub(super) fn of(keys: impl ExactSizeIterator<Item = Option<Key>>) -> Self {
        let leaves = leaves_for(keys.len());
        let mut winners = vec![NOBODY; 2 * leaves];
        for (leaf, key) in winners[leaves..].iter_mut().zip(keys) {
            *leaf = key.unwrap_or(NOBODY);
        }
        Self::played(winners)
    }

    /// Makes room for `places`, twice as much as before at least: over a life it costs as much as it has places.
    fn grow(&mut self, places: usize) {
        let (leaves, before) = (leaves_for(places), self.leaves());
        let mut winners = vec![NOBODY; 2 * leaves];
        winners[leaves..leaves + before].copy_from_slice(&self.winners[before..]);
        *self = Self::played(winners);
    }

    fn played(mut winners: Vec<Key>) -> Self {
        for at in (1..winners.len() / 2).rev() {
            winners[at] = winners[2 * at].min(winners[2 * at + 1]);
        }
        Self { winners }
    }
}

fn leaves_for(places: usize) -> usize {
    places.next_power_of_two().max(16)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_least_is_the_least_whatever_came_before() {
        // A walk over places; the scan is the slow twin.
        let (mut lowest, mut places) = (Lowest::default(), vec![None; 100]);
        let mut seed = 7_u64;
        let mut draw = |below: u64| {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (seed >> 33) % below
        };
        for _ in 0..5_000 {
            let place = draw(100);
            let key = (draw(3) > 0).then(|| (draw(20), place));
            places[place as usize] = key;
            lowest.set(place as u32, key);
            assert_eq!(Lowest::of(places.iter().copied()).least(), lowest.least());
            assert_eq!(lowest.least(), places.iter().flatten().min().copied());
            let but = draw(120);
            let others = places.iter().enumerate().filter(|(at, _)| *at as u64 != but);
            assert_eq!(lowest.least_but(but as u32), others.filter_map(|(_, key)| *key).min());
        }
    }

    #[test]
    fn nobody_is_the_least_of_none() {
        let mut lowest = Lowest::default();
        lowest.set(3, None);
        assert_eq!((lowest.least(), lowest.least_but(0)), (None, None));
        lowest.set(0, Some((5, 1)));
        assert_eq!((lowest.least(), lowest.least_but(0)), (Some((5, 1)), None));
    }
}
