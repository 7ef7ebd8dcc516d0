//! Who is next in this call? Classes by importance and how long they were passed over, then the least served flow, then arrival.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use penstock_policy_sdk::Sat;
use penstock_policy_sdk::fairness::OrderAsked;

use super::counters::{CLASSES, Counters, cost};
use super::{Settings, Vtc};

/// Rows that are ranked beyond those that can be taken, for when some do not fit.
const SPARE_ROWS: u64 = 16;
/// Flows that a call gets to know, so that a window full of strangers stays within its fuel. The others are level with the least served until a
/// later call.
const MEETINGS_MAX: u32 = 64;

/// A row, as its flow is served: by place in the flow.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
struct Waiter {
    flow: u64,
    /// Its place in the flow, and behind it its row: small, since sorting moves it about.
    place_and_row: u64,
}

impl Waiter {
    fn row(self) -> u32 {
        self.place_and_row as u32
    }
}

/// The head of a flow: the counter it is ordered by, then its row; and where it stands among the waiters.
type Head = Reverse<(u64, u32, u32)>;

/// The requests of a call, in the order they get their turns.
#[derive(Debug, Default)]
pub(super) struct Turns {
    waiters: Vec<Waiter>,
    /// Flows with something left, by class.
    heads: [BinaryHeap<Head>; CLASSES],
    /// How long each class has been passed over.
    passed_us: [u64; CLASSES],
}

impl Turns {
    /// Sorts the window into flows and classes.
    pub(super) fn gather(&mut self, counters: &mut Counters, asked: &OrderAsked<'_, Vtc>) {
        self.heads.iter_mut().for_each(BinaryHeap::clear);
        self.waiters.clear();
        self.passed_us = [0; CLASSES];
        for row in asked.waiting.iter() {
            let place = row.flow_count().min(u32::MAX.into());
            self.waiters.push(Waiter { flow: row.flow_id(), place_and_row: place << 32 | u64::from(row.index()) });
            let passed = &mut self.passed_us[class_of(row.class_rank())];
            *passed = row.waited_us().max(*passed);
        }
        self.waiters.sort_unstable();
        // A class is passed over since its last turn, but no longer than it has something waiting.
        for (class, passed) in self.passed_us.iter_mut().enumerate() {
            *passed = (Sat(asked.call.now_us) - counters.turn_us(class)).0.min(*passed);
        }
        let (mut last, mut met) = (None, 0);
        for (at, waiter) in self.waiters.iter().enumerate() {
            if last.replace(waiter.flow) == Some(waiter.flow) {
                continue;
            }
            let row = waiter.row();
            let placed = asked.waiting.row(row as usize);
            let class = class_of(placed.class_rank());
            let mut served = counters.of_active(waiter.flow);
            if served.is_none() && met < MEETINGS_MAX {
                met += 1;
                served = counters.meet(waiter.flow, class as u64, placed.flow_weight_ppm());
            }
            let served = served.unwrap_or_else(|| counters.least());
            self.heads[class].push(Reverse((served, row, at as u32)));
        }
    }

    /// Writes rows into `ranked`, next first: as many as can be taken, and some to spare.
    pub(super) fn give(&mut self, settings: &Settings, asked: &OrderAsked<'_, Vtc>, ranked: &mut Vec<u32>) {
        let wanted = (Sat(asked.context.take_requests()) + SPARE_ROWS).0;
        while (ranked.len() as u64) < wanted {
            let Some(class) = self.next_class(settings.age_us) else { break };
            let Some(Reverse((served, row, at))) = self.heads[class].pop() else { break };
            ranked.push(row);
            self.passed_us[class] = 0;
            let at = at as usize;
            let waiter = self.waiters[at];
            if let Some(behind) = self.waiters.get(at + 1).filter(|next| next.flow == waiter.flow) {
                let placed = asked.waiting.row(row as usize);
                let tokens = (Sat(placed.uncached_tokens()) * settings.input_weight).0;
                let served = (Sat(served) + cost(tokens, placed.flow_weight_ppm())).0;
                self.heads[class].push(Reverse((served, behind.row(), at as u32 + 1)));
            }
        }
    }

    /// The class whose turn it is: by rank with one more for each `age_us` it was passed over, at most the highest; then the one that was
    /// passed over for longest.
    fn next_class(&self, age_us: u64) -> Option<usize> {
        let highest = CLASSES as u64 - 1;
        let aged = |class: usize| (class as u64 + self.passed_us[class] / age_us).min(highest);
        let waiting = (0..CLASSES).filter(|class| !self.heads[*class].is_empty());
        waiting.max_by_key(|class| (aged(*class), self.passed_us[*class], *class))
    }
}

fn class_of(rank: u64) -> usize {
    (rank as usize).min(CLASSES - 1)
}
