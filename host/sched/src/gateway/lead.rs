//! Who holds the longest lead of a waiting request's prompt? Remembered with the request until a block of that lead changes hands, so that a
//! window of requests is not looked up key by key at every question.

use penstock_base::BlockKey;

use super::directory::{Directory, Overlaps};

/// Holders that are remembered: a long lead is held by few, and of a short one that everybody holds the first tells as much.
const HOLDERS_MAX: usize = 4;
/// Keys whose counts are remembered by place; a longer lead is stamped from the prompt itself.
const PLACES_MAX: usize = 16;

/// What the index said of one prompt. Derived: a restored machine looks again.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) struct Lead {
    /// Stamp of the keys that were looked at; none before the first look.
    stamp: Option<u64>,
    /// Keys that were looked at, the one that nobody holds included.
    looked: u32,
    /// Where the index counts changes of these keys, as long as there are no more than have room.
    places: [u16; PLACES_MAX],
    /// Replica slots and the leading blocks they hold, the most first, then by slot.
    holders: [(u32, u32); HOLDERS_MAX],
    /// How many of them there are.
    len: u8,
    /// There are more, which hold no more than the last.
    more: bool,
}

/// The most leading blocks among replicas that may take the request now, and among the others.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) struct Best {
    /// With credit.
    pub credited: u32,
    /// Without. When it is less than `credited` it may be said as any number that is.
    pub uncredited: u32,
}

impl Lead {
    /// Is it still what the index would say?
    pub fn is_current(&self, keys: &[BlockKey], directory: &Directory) -> bool {
        let Some(stamp) = self.stamp else { return false };
        let now = match self.places.get(..self.looked as usize) {
            Some(places) => Some(directory.stamp(places.iter().copied())),
            None => keys
                .get(..self.looked as usize)
                .map(|keys| directory.stamp(keys.iter().map(|key| directory.place_of(key)))),
        };
        now == Some(stamp)
    }

    /// Looks, with `overlaps` as scratch; `replicas` are the slots in use.
    pub fn look(
        keys: &[BlockKey],
        directory: &Directory,
        replicas: impl Iterator<Item = u32>,
        overlaps: &mut Overlaps,
    ) -> Self {
        let looked = directory.overlaps(keys, overlaps);
        let places = || keys[..looked].iter().map(|key| directory.place_of(key));
        let mut lead = Self { stamp: Some(directory.stamp(places())), looked: looked as u32, ..Self::default() };
        lead.places.iter_mut().zip(places()).for_each(|(kept, place)| *kept = place);
        for replica in replicas {
            lead.add((replica, overlaps.blocks(replica)));
        }
        lead
    }

    fn add(&mut self, (replica, blocks): (u32, u32)) {
        if blocks == 0 {
            return;
        }
        let len = usize::from(self.len);
        let order = |holder: &(u32, u32)| (core::cmp::Reverse(holder.1), holder.0);
        let at = self.holders[..len].partition_point(|holder| order(holder) < order(&(replica, blocks)));
        if len == HOLDERS_MAX {
            self.more = true;
        } else {
            self.len += 1;
        }
        if at < HOLDERS_MAX {
            let end = usize::from(self.len);
            self.holders[at..end].rotate_right(1);
            self.holders[at] = (replica, blocks);
        }
    }

    /// The best of both kinds, where what is remembered says. `has_credit` is none for a replica that takes no new work.
    pub fn best(&self, has_credit: impl Fn(u32) -> Option<bool>) -> Option<Best> {
        let mut best = [None, None];
        for (replica, blocks) in &self.holders[..usize::from(self.len)] {
            if let Some(credit) = has_credit(*replica) {
                best[usize::from(credit)].get_or_insert(*blocks);
            }
        }
        match best {
            [uncredited, Some(credited)] => Some(Best { credited, uncredited: uncredited.unwrap_or(0) }),
            [uncredited, None] if !self.more => Some(Best { credited: 0, uncredited: uncredited.unwrap_or(0) }),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use alloc::vec::Vec;

    use super::*;

    const REPLICAS: u32 = 12;

    fn draws(seed: u64) -> impl FnMut(u64) -> u64 {
        let mut state = seed;
        move |below| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 33) % below
        }
    }

    fn key(n: u64) -> BlockKey {
        let mut bytes = [7; 16];
        bytes[..8].copy_from_slice(&n.to_le_bytes());
        BlockKey(bytes)
    }

    #[test]
    fn what_is_remembered_is_what_a_walk_finds() {
        let mut draw = draws(3);
        let mut directory = Directory::new(24, REPLICAS as usize);
        let mut overlaps = Overlaps::with_capacity(REPLICAS as usize);
        // Eight prompts of six keys each, the first three shared by all of a half.
        let prompts: Vec<Vec<BlockKey>> = (0..8)
            .map(|prompt| {
                (0..6).map(|at| key(if at < 3 { prompt % 2 * 10 + at } else { 100 + prompt * 10 + at })).collect()
            })
            .collect();
        let mut leads = [Lead::default(); 8];
        let (mut kept, mut answered) = (0, 0);
        for _ in 0..20_000 {
            let prompt = &prompts[draw(8) as usize];
            let (replica, at) = (draw(u64::from(REPLICAS)) as u32, draw(6) as usize);
            match draw(200) {
                0 => directory.drop_replica(replica),
                1..=12 => prompt[..=at].iter().for_each(|key| directory.store(replica, *key)),
                13..=24 => directory.remove(replica, prompt[at]),
                _ => {}
            }
            let which = draw(8) as usize;
            let keys = &prompts[which];
            if leads[which].is_current(keys, &directory) {
                kept += 1;
            } else {
                leads[which] = Lead::look(keys, &directory, 0..REPLICAS, &mut overlaps);
            }
            let turn = draw(1 << 24);
            let has_credit = |replica: u32| match turn >> (2 * replica) & 3 {
                0 => None,
                1 => Some(true),
                _ => Some(false),
            };
            directory.overlaps(keys, &mut overlaps);
            let most = |credit| {
                let such = (0..REPLICAS).filter(|replica| has_credit(*replica) == Some(credit));
                such.map(|replica| overlaps.blocks(replica)).max().unwrap_or(0)
            };
            let (credited, uncredited) = (most(true), most(false));
            if let Some(best) = leads[which].best(has_credit) {
                answered += 1;
                assert_eq!(best.credited, credited);
                assert_eq!(best.uncredited <= best.credited, uncredited <= credited);
            }
        }
        assert!(kept > 10_000 && answered > 10_000, "the rule is at work: {kept} kept, {answered} answered");
    }
}
