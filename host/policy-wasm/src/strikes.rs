//! When has a policy failed too often, and for how long is it not asked? Counted in calls, so that a replay counts the same.

use crate::limits::{BACK_OFF_CALLS_MAX, BACK_OFF_CALLS_MIN, FORGIVEN_AFTER_CALLS, STRIKE_WINDOW_CALLS, STRIKES_MAX};

/// Strikes of one seat.
///
/// ```text
/// asked ──3 strikes within 1,000 calls──► in quarantine (64 calls, then twice as long each time, at most 65,536)
///   ▲                                          │
///   └──────────────── its calls are over ──────┘
/// ```
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Strikes {
    /// Calls of this seat so far, those in quarantine included.
    calls: u64,
    /// Calls that went to the policy.
    asked: u64,
    /// At which of those the last strikes fell; the oldest makes room, a quarantine clears them.
    recent: [Option<u64>; STRIKES_MAX],
    /// At which of those the last strike of all fell.
    last: u64,
    /// All strikes of its life.
    total: u64,
    /// Calls left in quarantine.
    left: u64,
    /// How long the next quarantine lasts.
    back_off: u64,
    /// How often it was put there.
    quarantines: u64,
}

/// Whether a call goes to the policy.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Turn {
    /// It does.
    Asked,
    /// It does not.
    Quarantined,
}

impl Strikes {
    pub fn new() -> Self {
        Self {
            calls: 0,
            asked: 0,
            recent: [None; STRIKES_MAX],
            last: 0,
            total: 0,
            left: 0,
            back_off: BACK_OFF_CALLS_MIN,
            quarantines: 0,
        }
    }

    /// One more call.
    pub fn turn(&mut self) -> Turn {
        self.calls = self.calls.saturating_add(1);
        match self.left.checked_sub(1) {
            Some(left) => {
                self.left = left;
                Turn::Quarantined
            }
            None => {
                self.asked = self.asked.saturating_add(1);
                Turn::Asked
            }
        }
    }

    /// The policy failed in the present call. True when that puts it into quarantine.
    pub fn strike(&mut self) -> bool {
        if self.is_quarantined() {
            return false;
        }
        if self.asked - self.last >= FORGIVEN_AFTER_CALLS {
            self.back_off = BACK_OFF_CALLS_MIN;
        }
        self.last = self.asked;
        self.total = self.total.saturating_add(1);
        self.recent.rotate_left(1);
        self.recent[STRIKES_MAX - 1] = Some(self.asked);
        let is_out = self.recent[0].is_some_and(|oldest| self.asked - oldest < STRIKE_WINDOW_CALLS);
        if is_out {
            self.quarantine();
        }
        is_out
    }

    /// Into quarantine, whatever was counted: it cannot be made anew.
    pub fn quarantine(&mut self) {
        self.left = self.back_off;
        self.back_off = (self.back_off * 2).min(BACK_OFF_CALLS_MAX);
        self.quarantines = self.quarantines.saturating_add(1);
        self.recent = [None; STRIKES_MAX];
    }

    pub fn is_quarantined(&self) -> bool {
        self.left > 0
    }

    pub fn calls(&self) -> u64 {
        self.calls
    }

    pub fn total(&self) -> u64 {
        self.total
    }

    pub fn left(&self) -> u64 {
        self.left
    }

    pub fn quarantines(&self) -> u64 {
        self.quarantines
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Calls until one is asked.
    fn sit_out(strikes: &mut Strikes) -> u64 {
        let mut calls = 0;
        while strikes.turn() == Turn::Quarantined {
            calls += 1;
        }
        calls
    }

    #[test]
    fn a_quarantine_doubles_up_to_its_end_and_a_long_good_time_makes_it_short_again() {
        let mut strikes = Strikes::new();
        let mut expected = BACK_OFF_CALLS_MIN;
        strikes.turn();
        for _ in 0..14 {
            assert_eq!((strikes.strike(), strikes.strike(), strikes.strike()), (false, false, true));
            assert_eq!(sit_out(&mut strikes), expected);
            expected = (expected * 2).min(BACK_OFF_CALLS_MAX);
        }
        assert_eq!(expected, BACK_OFF_CALLS_MAX);
        for _ in 0..FORGIVEN_AFTER_CALLS {
            assert_eq!(strikes.turn(), Turn::Asked);
        }
        for _ in 0..3 {
            strikes.strike();
        }
        assert_eq!(sit_out(&mut strikes), BACK_OFF_CALLS_MIN);
    }

    #[test]
    fn three_strikes_count_within_the_window_only() {
        for (gap, is_out) in [(STRIKE_WINDOW_CALLS / 2 - 1, true), (STRIKE_WINDOW_CALLS / 2, false)] {
            let mut strikes = Strikes::new();
            let mut last = false;
            for _ in 0..3 {
                for _ in 0..gap {
                    strikes.turn();
                }
                last = strikes.strike();
            }
            assert_eq!(last, is_out, "{gap} calls between two strikes");
        }
    }
}
