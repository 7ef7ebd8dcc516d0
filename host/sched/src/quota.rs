//! Which part of the tenants' quotas may one of several gateways give out, so that all of them together never give out more than there is?
//!
//! Quotas are cut into [`SLOTS`]. Each gateway works out alone which slots are its own, from who it has seen registered: a slot belongs to the
//! one that draws highest for it among all that were seen lately. Nobody has to ask or answer anybody, since a gateway that is there is seen.
//!
//! ```text
//! Waiting ──a view with me in it──► Joining ──lease + lease + hold, without a gap──► Holding
//!    ▲                                 │                                                │
//!    └── no view for a lease, or one without me: nothing is held, and all begins anew ──┘
//! ```
//!
//! Three rules make it safe, for a registry whose views are true at some moment between question and answer:
//! 1. What follows from a view is held for one `lease` from the moment of its question.
//! 2. Who joins holds nothing for two leases and `hold`. By then every other gateway has seen it, or holds nothing itself.
//! 3. Who is not seen any more is reckoned with for two leases and `hold`. By then it has held nothing for `hold`.
//!
//! So of two gateways that hold something each reckons with the other, and a slot is one's own only against all that are reckoned with. `hold`
//! is a quota window: what the last owner let through counts in its window, and the next one begins in another. Clocks are never compared; they
//! may drift by as much as [`Timing::lease`] leaves room for.

use alloc::vec::Vec;

use penstock_base::{Duration, Instant, TenantId};

/// Parts of each quota.
pub const SLOTS: u32 = 1_024;
/// Gateways that are reckoned with; with more, nothing is held.
pub const MEMBERS_MAX: usize = 64;
const WORDS: usize = SLOTS as usize / 64;

/// A set of slots.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct QuotaSlots(pub [u64; WORDS]);

impl QuotaSlots {
    /// None.
    pub const NONE: Self = Self([0; WORDS]);
    /// All: one gateway alone.
    pub const ALL: Self = Self([u64::MAX; WORDS]);

    /// How many.
    pub fn len(&self) -> u32 {
        self.0.iter().map(|word| word.count_ones()).sum()
    }

    /// None?
    pub fn is_empty(&self) -> bool {
        *self == Self::NONE
    }

    /// Is it in it?
    pub fn contains(&self, slot: u32) -> bool {
        self.0.get(slot as usize / 64).is_some_and(|word| word >> (slot % 64) & 1 == 1)
    }

    /// Puts it in.
    pub fn insert(&mut self, slot: u32) {
        if let Some(word) = self.0.get_mut(slot as usize / 64) {
            *word |= 1 << (slot % 64);
        }
    }

    /// Parts per million of all.
    pub fn ppm(&self) -> u64 {
        u64::from(self.len()) * 1_000_000 / u64::from(SLOTS)
    }

    /// What these slots are of a tenant's quota. Over disjoint sets that are all slots together, the parts add up to the quota exactly;
    /// a small quota lies in few slots, other ones for each tenant. [`u64::MAX`] is no quota.
    pub fn allowance(&self, quota: u64, tenant: TenantId) -> u64 {
        if quota == u64::MAX {
            return quota;
        }
        let (each, rest) = (quota / u64::from(SLOTS), (quota % u64::from(SLOTS)) as u32);
        let first = (mixed(tenant.0) % u64::from(SLOTS)) as u32;
        each * u64::from(self.len()) + u64::from(self.among(first, rest))
    }

    /// How many of `count` slots from `first` on, round the end, are in it.
    fn among(&self, first: u32, count: u32) -> u32 {
        let end = first + count;
        let beyond = end.saturating_sub(SLOTS);
        self.below(end.min(SLOTS)) - self.below(first) + self.below(beyond)
    }

    fn below(&self, slot: u32) -> u32 {
        let (whole, bits) = (slot as usize / 64, slot % 64);
        let full: u32 = self.0[..whole].iter().map(|word| word.count_ones()).sum();
        full + self.0.get(whole).map_or(0, |word| (word & ((1 << bits) - 1)).count_ones())
    }
}

/// What a gateway may give out, until when.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct QuotaShare {
    /// Its slots.
    pub slots: QuotaSlots,
    /// Gateways that are reckoned with, itself included.
    pub members: u32,
    /// When the view was asked for that it follows from.
    pub as_of: Instant,
    /// The end of the lease. From then on nothing is held.
    pub until: Instant,
}

/// One life of a gateway.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct Member {
    /// Hash of its name: it draws by it, so that a restart takes back what the last life had.
    pub name: u64,
    /// Which life of it.
    pub life: u64,
}

/// How long what is seen counts.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Timing {
    /// For how long something is held after a view was asked for. Views must come more often, and a registration must not end before its
    /// gateway's last view is as old as that.
    pub lease: Duration,
    /// For how long nobody holds a slot that changes hands: a quota window.
    pub hold: Duration,
}

impl Timing {
    /// What rules 2 and 3 wait for.
    pub fn wait(&self) -> Duration {
        self.lease + self.lease + self.hold
    }
}

/// See the module.
#[derive(Clone, Debug)]
pub struct Leases {
    me: Member,
    timing: Timing,
    /// Who was seen, and when last: when that view was answered.
    seen: Vec<(Member, Instant)>,
    /// Since when each view had this gateway in it, without a gap: when the first was answered.
    since: Option<Instant>,
    /// When the newest view was asked for.
    asked: Instant,
    /// When there were more gateways than can be reckoned with.
    crowded: Option<Instant>,
}

impl Leases {
    /// Nothing was seen yet.
    pub fn new(me: Member, timing: Timing) -> Self {
        Self { me, timing, seen: Vec::new(), since: None, asked: Instant::ZERO, crowded: None }
    }

    /// The registry has answered at `now` to a question of `asked` that these are registered. A view that was asked for before the last one
    /// says nothing new.
    pub fn see(&mut self, asked: Instant, now: Instant, members: &[Member]) {
        if self.since.is_some() && asked < self.asked {
            return;
        }
        let is_in = members.contains(&self.me);
        let goes_on = now.since(self.asked) <= self.timing.lease;
        self.since = match self.since {
            Some(since) if is_in && goes_on => Some(since),
            _ => is_in.then_some(now),
        };
        self.asked = asked;
        let wait = self.timing.wait();
        self.seen.retain(|(_, last)| now.since(*last) < wait);
        for member in members {
            match self.seen.iter_mut().find(|(known, _)| known == member) {
                Some((_, last)) => *last = now,
                None => self.seen.push((*member, now)),
            }
        }
        if self.seen.len() > MEMBERS_MAX {
            self.crowded = Some(now);
            self.seen.truncate(MEMBERS_MAX);
        }
    }

    /// What may be given out now; none is nothing.
    pub fn share(&self, now: Instant) -> Option<QuotaShare> {
        let until = self.asked + self.timing.lease;
        let since = self.since?;
        let wait = self.timing.wait();
        // Whom there was no room for may hold something as long as anybody who was seen.
        let is_crowded = self.crowded.is_some_and(|at| now.since(at) < wait);
        if now >= until || now.since(since) < wait || is_crowded {
            return None;
        }
        let rivals = self.seen.iter().filter(|(member, last)| *member != self.me && now.since(*last) < wait);
        let rivals: Vec<Member> = rivals.map(|(member, _)| *member).collect();
        let mut slots = QuotaSlots::NONE;
        for slot in 0..SLOTS {
            let mine = draw(self.me, slot);
            if rivals.iter().all(|rival| draw(*rival, slot) < mine) {
                slots.insert(slot);
            }
        }
        Some(QuotaShare { slots, members: rivals.len() as u32 + 1, as_of: self.asked, until })
    }
}

/// What a gateway draws for a slot. Of two lives with one name the older draws higher.
fn draw(member: Member, slot: u32) -> (u64, u64, u64) {
    let drawn = mixed(member.name ^ u64::from(slot).wrapping_mul(0x9e37_79b9_7f4a_7c15));
    (drawn, member.name, u64::MAX - member.life)
}

/// The finaliser of SplitMix64.
fn mixed(mut z: u64) -> u64 {
    z = z.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use alloc::collections::BTreeMap;
    use alloc::vec;

    use super::*;

    const LEASE: Duration = Duration::from_s(5);
    const HOLD: Duration = Duration::from_s(10);
    const SEEDS: u64 = 30;
    const STEPS: u64 = 800;

    fn draws(seed: u64) -> impl FnMut(u64) -> u64 {
        let mut state = seed;
        move |below| {
            state = mixed(state);
            state % below
        }
    }

    #[test]
    fn parts_of_a_quota_add_up_to_it() {
        let mut draw = draws(1);
        for quota in [0, 1, 2, 3, 1_000, 1_023, 1_024, 1_025, 99_999, u64::MAX - 1] {
            for tenant in [0, 1, 7, u64::MAX] {
                let mut parts = [QuotaSlots::NONE; 3];
                (0..SLOTS).for_each(|slot| parts[draw(3) as usize].insert(slot));
                let sum: u64 = parts.iter().map(|part| part.allowance(quota, TenantId(tenant))).sum();
                assert_eq!(sum, quota, "tenant {tenant}");
                assert_eq!(QuotaSlots::ALL.allowance(quota, TenantId(tenant)), quota);
                assert_eq!(QuotaSlots::NONE.allowance(quota, TenantId(tenant)), 0);
                assert_eq!(parts.iter().map(|part| part.len()).sum::<u32>(), SLOTS);
            }
        }
        assert_eq!(QuotaSlots::NONE.allowance(u64::MAX, TenantId(3)), u64::MAX, "no quota is nobody's part");
        let mut half = QuotaSlots::NONE;
        (0..SLOTS / 2).for_each(|slot| half.insert(slot));
        let lucky = (0..1_000).filter(|tenant| half.allowance(1, TenantId(*tenant)) == 1).count();
        assert!(
            (400..600).contains(&lucky),
            "one request at once is at one gateway, at another one for each tenant: {lucky}"
        );
        assert_eq!(half.ppm(), 500_000);
    }

    /// A registry, gateways that ask it with delays, crash, come back under their name, and are cut off. At every moment no two hold one
    /// slot, and a slot that changes hands was nobody's for `HOLD`.
    struct World {
        now: Instant,
        /// Registered lives and when their registration ends.
        registered: BTreeMap<Member, Instant>,
        gateways: Vec<Gateway>,
        /// Who held a slot last, and when.
        last: Vec<Option<(Member, Instant)>>,
        timing: Timing,
        lives: u64,
    }

    struct Gateway {
        leases: Leases,
        is_cut: bool,
        /// A question under way: when it was asked, what was true meanwhile, when it is answered.
        asks: Option<(Instant, Vec<Member>, Instant)>,
        next: Instant,
        /// Where its clock began.
        origin: u64,
    }

    impl World {
        fn new(timing: Timing) -> Self {
            Self {
                now: Instant(1_000_000_000_000),
                registered: BTreeMap::new(),
                gateways: Vec::new(),
                last: vec![None; SLOTS as usize],
                timing,
                lives: 0,
            }
        }

        fn join(&mut self, name: u64) {
            self.lives += 1;
            let me = Member { name, life: self.lives };
            let leases = Leases::new(me, self.timing);
            let origin = self.lives * 977_000_000;
            self.gateways.push(Gateway { leases, is_cut: false, asks: None, next: self.now, origin });
        }

        /// The moment on a gateway's own clock.
        fn own(origin: u64, at: Instant) -> Instant {
            Instant(at.0 - origin)
        }

        fn step(&mut self, draw: &mut impl FnMut(u64) -> u64) -> Result<u64, &'static str> {
            let mut held = 0;
            self.now = self.now + Duration::from_ms(50 + draw(300));
            let now = self.now;
            self.registered.retain(|_, ends| *ends > now);
            for gateway in &mut self.gateways {
                if gateway.is_cut {
                    gateway.asks = None;
                    continue;
                }
                // A registration outlives what follows from its gateway's last view by nothing: the hardest that is allowed.
                if gateway.asks.is_none() && gateway.next <= now {
                    self.registered.insert(gateway.leases.me, now + LEASE);
                    let view = self.registered.keys().copied().collect();
                    gateway.asks = Some((now, view, now + Duration::from_ms(draw(900))));
                }
                if let Some((asked, view, answered)) = gateway.asks.take() {
                    if answered > now {
                        gateway.asks = Some((asked, view, answered));
                        continue;
                    }
                    let own = |at| Self::own(gateway.origin, at);
                    gateway.leases.see(own(asked), own(now), &view);
                    gateway.next = now + Duration::from_ms(draw(1_500));
                }
            }
            for gateway in &self.gateways {
                let Some(share) = gateway.leases.share(Self::own(gateway.origin, now)) else { continue };
                held += u64::from(share.slots.len());
                for slot in (0..SLOTS).filter(|slot| share.slots.contains(*slot)) {
                    let me = gateway.leases.me;
                    let last = &mut self.last[slot as usize];
                    match *last {
                        Some((other, at)) if other != me && at == now => return Err("two hold one slot"),
                        Some((other, at)) if other != me && now.since(at) < HOLD => return Err("handed over too soon"),
                        _ => *last = Some((me, now)),
                    }
                }
            }
            Ok(held)
        }

        fn run(seed: u64, timing: Timing) -> Result<u64, &'static str> {
            let mut draw = draws(seed);
            let mut world = Self::new(timing);
            (0..1 + draw(3)).for_each(|name| world.join(name));
            let mut held = 0;
            for _ in 0..STEPS {
                match draw(60) {
                    0 if world.gateways.len() < 6 => {
                        // A name that is there already is a misconfiguration, and must not cost more than fairness.
                        let name = draw(5);
                        world.join(name);
                    }
                    1 if world.gateways.len() > 1 => {
                        let at = draw(world.gateways.len() as u64) as usize;
                        let gone = world.gateways.remove(at);
                        if draw(2) == 0 {
                            world.registered.remove(&gone.leases.me);
                        }
                    }
                    2 | 3 => {
                        let at = draw(world.gateways.len() as u64) as usize;
                        world.gateways[at].is_cut ^= true;
                    }
                    _ => {}
                }
                held += world.step(&mut draw)?;
            }
            Ok(held)
        }
    }

    #[test]
    fn no_two_gateways_hold_one_slot_whatever_happens() {
        let mut held = 0;
        for seed in 0..SEEDS {
            held += World::run(seed, Timing { lease: LEASE, hold: HOLD })
                .unwrap_or_else(|why| panic!("seed {seed}: {why}"));
        }
        assert!(held > SEEDS * STEPS * u64::from(SLOTS) / 20, "something is held most of the time: {held}");
    }

    #[test]
    fn the_waits_are_what_makes_it_safe() {
        let hasty = Timing { lease: LEASE, hold: Duration::ZERO };
        assert!((0..SEEDS).any(|seed| World::run(seed, hasty) == Err("handed over too soon")));
    }

    #[test]
    fn when_nothing_changes_everything_is_held_and_shares_are_like_one_another() {
        let mut draw = draws(5);
        let mut world = World::new(Timing { lease: LEASE, hold: HOLD });
        (0..4).for_each(|name| world.join(name));
        for _ in 0..400 {
            _ = world.step(&mut draw).expect("nobody leaves");
        }
        let now = world.now;
        let shares: Vec<_> =
            world.gateways.iter().map(|one| one.leases.share(World::own(one.origin, now)).expect("it holds")).collect();
        assert_eq!(shares.iter().map(|share| share.slots.len()).sum::<u32>(), SLOTS);
        assert!(shares.iter().all(|share| (180..330).contains(&share.slots.len()) && share.members == 4), "{shares:?}");
        // One goes: what it had goes to the others, and nothing else moves.
        let gone = world.gateways.remove(1);
        world.registered.remove(&gone.leases.me);
        for _ in 0..400 {
            _ = world.step(&mut draw).expect("one has left");
        }
        let now = world.now;
        let after_leaving: Vec<_> =
            world.gateways.iter().map(|one| one.leases.share(World::own(one.origin, now)).expect("it holds")).collect();
        assert_eq!(after_leaving.iter().map(|share| share.slots.len()).sum::<u32>(), SLOTS);
        for (before, after) in [(0, 0), (2, 1), (3, 2)] {
            let (before, after) = (shares[before].slots, after_leaving[after].slots);
            assert!((0..SLOTS).all(|slot| !before.contains(slot) || after.contains(slot)));
        }
    }

    #[test]
    fn a_lease_ends_by_itself_and_a_gap_begins_anew() {
        let timing = Timing { lease: LEASE, hold: HOLD };
        let me = Member { name: 1, life: 1 };
        let mut leases = Leases::new(me, timing);
        let at = |ms: u64| Instant(ms * 1_000_000);
        for ms in (1_000..=22_000).step_by(1_000) {
            leases.see(at(ms - 10), at(ms), &[me]);
            assert_eq!(leases.share(at(ms)).is_some(), ms >= 21_000, "{ms}: twenty seconds after the first view");
        }
        let share = leases.share(at(22_000)).expect("it holds all");
        assert_eq!((share.slots, share.until), (QuotaSlots::ALL, at(26_990)));
        assert!(leases.share(at(26_989)).is_some() && leases.share(at(26_990)).is_none());
        leases.see(at(28_000), at(28_000), &[me]);
        assert_eq!(leases.share(at(28_000)), None, "nobody knows what happened meanwhile");
        leases.see(at(29_000), at(29_000), &[]);
        assert_eq!(leases.share(at(60_000)), None);
        let many: Vec<Member> = (0..=MEMBERS_MAX as u64).map(|name| Member { name, life: 1 }).collect();
        (0..40).for_each(|n| leases.see(at(100_000 + n * 1_000), at(100_000 + n * 1_000), &many));
        assert_eq!(leases.share(at(139_500)), None, "who cannot be reckoned with could hold anything");
    }
}
