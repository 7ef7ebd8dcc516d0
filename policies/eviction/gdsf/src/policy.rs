//! What is a cached run worth? What it would cost to compute again, as often as it is wanted, for each block it takes; and an inflation that
//! lets the past fade.
//!
//! Greedy-dual-size-frequency (Cherkasova, HP Laboratories 1998): the price of a run is `L + hits x cost / size`, set when the run is stored or
//! hit; `L` is the price of the run that left last, so what is not wanted any more is overtaken by what comes now.

use penstock_policy_sdk::eviction::{Asked, DRAM, DROP, Eviction};
use penstock_policy_sdk::{
    DecodeError, Document, ParameterError, Parameters, Policy, Reader, RestoreInfo, Sat, Worth, Writer, declare,
};

declare! {
    /// What it reads of the call.
    pub Reads: Eviction = ["left-price", "dram-free-blocks"];
    /// What it reads of each run.
    pub Sees: Run = [
        "known-mask",
        "run-blocks",
        "idle-us",
        "hit-count",
        "recompute-tokens",
        "est-recompute-us",
        "est-load-us",
        "retention-rank",
    ];
}

/// Parts of a price, so that cheap runs of many blocks still differ.
const PRICE_SCALE: u64 = 16;
/// The retention that changes nothing.
const RETENTION_NEUTRAL: u64 = 50;
/// Inflations that are remembered.
const MARKS_MAX: usize = 64;

/// What can be set without a new build.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Settings {
    /// A token's recompute while no cost model says better, in microseconds.
    pub token_us: u64,
    /// Shortest time between two remembered inflations, in microseconds: 64 of them reach back so far.
    pub mark_us: u64,
}

impl Parameters for Settings {
    fn read(document: &mut Document) -> Result<Self, ParameterError> {
        Ok(Self {
            token_us: document.u64("token-us", 100, 1..=1_000_000)?,
            mark_us: document.u64("mark-us", 1_000_000, 1_000..=3_600_000_000)?,
        })
    }
}

/// The policy.
///
/// A run is priced again when it is about to leave, long after it was last used. Its price then must carry the inflation of that day and
/// not today's, or nothing would ever be overtaken; so the policy remembers a short history of `L`.
#[derive(Debug)]
pub struct Gdsf {
    settings: Settings,
    /// Inflation from a time on, oldest first; changed by calls in which it differs from the last one.
    marks: Vec<Mark>,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Mark {
    from_us: u64,
    price: u64,
}

impl Policy for Gdsf {
    const NAME: &'static str = "gdsf";
    const VERSION: &'static str = env!("CARGO_PKG_VERSION");
    const STATE_SCHEMA: u32 = 1;
    type Parameters = Settings;

    fn new(settings: &Settings) -> Self {
        Self { settings: *settings, marks: Vec::new() }
    }

    fn save(&self, out: &mut Writer) {
        out.list(self.marks.iter(), |out, mark| {
            out.u64(mark.from_us);
            out.u64(mark.price);
        });
    }

    fn restore(&mut self, info: &RestoreInfo, from: &mut Reader<'_>) -> Result<(), DecodeError> {
        let count = from.u64()?;
        if count > MARKS_MAX as u64 {
            return Err(DecodeError::Invalid("count of marks"));
        }
        for _ in 0..count {
            self.marks.push(Mark { from_us: info.moved(from.u64()?), price: from.u64()? });
        }
        Ok(())
    }
}

impl Eviction for Gdsf {
    type Context = Reads;
    type Runs = Sees;

    fn decide(&mut self, asked: &Asked<'_, Self>, worths: &mut Vec<Worth>) {
        let (now_us, context) = (asked.call.now_us, asked.context);
        self.mark(now_us, context.left_price());
        let has_room = context.dram_free_blocks() > 0;
        worths.extend(asked.runs.iter().map(|run| {
            let recompute_us =
                run.try_est_recompute_us().unwrap_or((Sat(run.recompute_tokens()) * self.settings.token_us).0);
            let used_us = now_us.saturating_sub(run.idle_us());
            let wanted = Sat(run.hit_count()) + 1;
            let cost = wanted * recompute_us * PRICE_SCALE;
            let worth = cost.0 / run.run_blocks().max(1);
            let kept = Sat(worth).times_over(run.retention_rank(), RETENTION_NEUTRAL).unwrap_or(worth);
            let to_dram = has_room && run.est_load_us() < recompute_us;
            Worth { price: (Sat(self.inflation(used_us)) + kept).0, to: if to_dram { DRAM } else { DROP } }
        }));
    }
}

impl Gdsf {
    /// Remembers the inflation of now. Within `mark_us` the last mark is moved, not followed by another one.
    fn mark(&mut self, now_us: u64, price: u64) {
        match self.marks.last().copied() {
            Some(last) if last.price == price => {}
            Some(last) if now_us < last.from_us.saturating_add(self.settings.mark_us) => {
                if let Some(last) = self.marks.last_mut() {
                    last.price = price;
                }
            }
            _ => {
                if self.marks.len() == MARKS_MAX {
                    self.marks.remove(0);
                }
                self.marks.push(Mark { from_us: now_us, price });
            }
        }
    }

    /// The inflation that stood at `at_us`; before all marks the oldest one.
    fn inflation(&self, at_us: u64) -> u64 {
        let after = self.marks.partition_point(|mark| mark.from_us <= at_us);
        self.marks.get(after.saturating_sub(1)).map_or(0, |mark| mark.price)
    }
}

#[cfg(test)]
mod tests {
    use penstock_policy_sdk::Load as _;

    use super::*;
    use crate::Seat;

    #[test]
    fn the_history_is_bounded_and_in_order() {
        let mut gdsf = Gdsf::new(&Settings { token_us: 1, mark_us: 1_000 });
        for step in 0..1_000_u64 {
            gdsf.mark(step * 500, step);
        }
        assert_eq!(gdsf.marks.len(), MARKS_MAX);
        assert!(gdsf.marks.is_sorted_by_key(|mark| mark.from_us));
        // Marks stand every millisecond; the last half of each is of the step in between.
        assert_eq!(gdsf.inflation(499_000), 999);
        assert_eq!(gdsf.inflation(498_999), 997);
        assert_eq!(gdsf.inflation(0), gdsf.marks[0].price, "before all marks the oldest one");
    }

    #[test]
    fn its_manifest_is_one_the_host_takes() {
        let declared = Seat::manifest().eviction().unwrap();
        assert_eq!((declared.context.len(), declared.rows.len()), (2, 8));
        assert_eq!(Seat::configure(r#"{"token-us": 0}"#).map(|_| ()).unwrap_err().field, "token-us");
    }
}
