//! Who may still act, judged without a common clock?
//!
//! A lease is asked for by its holder, with a stamp of the holder's own clock, and the answer brings the stamp back. The holder counts
//! from the stamp, which lies before the answer; the granter counts from the moment it answered, which lies behind the stamp. So the
//! granter never thinks a lease over that its holder thinks valid, however long either message took. Only the lengths must agree, and
//! clocks must not drift further within one lease than the grace.

use penstock_base::{Duration, Instant};

/// The holder's side.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Lease {
    /// It began to wait here: no stamp is older.
    since: Instant,
    /// Over from here on.
    until: Instant,
    length: Duration,
    /// A stamp came back. Before that it holds memory by its own patience and nothing else.
    firm: bool,
    /// When to ask next.
    next_ask: Instant,
}

impl Lease {
    /// Held on its own account from `now`.
    pub(super) fn starting(now: Instant, length: Duration) -> Self {
        Self { since: now, until: now + length, length, firm: false, next_ask: now }
    }

    /// A stamp came back. One from before the start, or from the future, is nobody's.
    pub(super) fn renew(&mut self, now: Instant, echo: Instant) -> bool {
        let own = self.since <= echo && echo <= now;
        if own {
            self.until = self.until.max(echo + self.length);
            self.firm = true;
        }
        own
    }

    pub(super) fn is_over(&self, now: Instant) -> bool {
        now >= self.until
    }

    /// Valid, and granted by the other side rather than assumed.
    pub(super) fn is_firm(&self, now: Instant) -> bool {
        self.firm && !self.is_over(now)
    }

    /// True once an interval: ask now.
    pub(super) fn is_ask_due(&mut self, now: Instant, every: Duration) -> bool {
        let due = now >= self.next_ask;
        if due {
            self.next_ask = now + every;
        }
        due
    }

    /// Ask at the next step.
    pub(super) fn ask_soon(&mut self, now: Instant) {
        self.next_ask = self.next_ask.min(now);
    }

    pub(super) fn until(&self) -> Instant {
        self.until
    }

    pub(super) fn next_ask(&self) -> Instant {
        self.next_ask
    }

    /// A third of the length: two questions may be lost.
    pub(super) fn interval(&self) -> Duration {
        Duration(self.length.0 / 3)
    }
}

super::codec::record! {
    Lease { since, until, length, firm, next_ask }
    Granted { until }
}

/// The granter's side: what it has let another one believe.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) struct Granted {
    until: Instant,
}

impl Granted {
    /// A question that came in at `now` is answered.
    pub(super) fn extend(&mut self, now: Instant, length: Duration) {
        self.until = self.until.max(now + length);
    }

    /// From here on the holder does not act any more, and what it did before has arrived.
    pub(super) fn over_at(&self, grace: Duration) -> Instant {
        if self.until == Instant::ZERO { Instant::ZERO } else { self.until + grace }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_granter_never_thinks_a_lease_over_that_its_holder_thinks_valid() {
        let length = Duration(100);
        // Stamp at 10, question arrives at 40, answer at 90: whatever the delays, 10 + 100 <= 40 + 100.
        for (stamp, asked, answered) in [(10, 10, 10), (10, 40, 90), (10, 109, 109)] {
            let mut lease = Lease::starting(Instant(0), length);
            let mut granted = Granted::default();
            granted.extend(Instant(asked), length);
            assert!(lease.renew(Instant(answered), Instant(stamp)));
            assert_eq!(lease.until(), Instant(110));
            assert!(granted.over_at(Duration::ZERO) >= lease.until());
        }
    }

    #[test]
    fn a_stamp_that_is_not_its_own_renews_nothing() {
        let mut lease = Lease::starting(Instant(50), Duration(100));
        assert!(!lease.renew(Instant(60), Instant(49)), "from before it began");
        assert!(!lease.renew(Instant(60), Instant(61)), "from the future");
        assert!(!lease.is_firm(Instant(60)) && !lease.is_over(Instant(149)) && lease.is_over(Instant(150)));
    }
}
