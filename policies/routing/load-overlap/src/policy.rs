//! Which replica runs it? The one that would emit the first token soonest, everything that waits there counted, and everything that is
//! cached there counted as done.
//!
//! A hit is worth exactly the prefill it saves, and it is paid for with the longer wait it may cost: both are times, so no weight joins
//! them. Where the host's cost model knows no times yet, work in blocks takes their place.

use penstock_policy_sdk::routing::{Asked, RANKED_MAX, Routing};
use penstock_policy_sdk::tables::ReplicaRow;
use penstock_policy_sdk::{Document, ParameterError, Parameters, Placement, Policy, Sat, declare};

declare! {
    /// What it reads of the call.
    pub Reads: Routing = ["need-blocks", "block-size-tokens", "stale-load-us", "stale-cache-us"];
    /// What it reads of each replica.
    pub Sees: Replica = [
        "known-mask",
        "replica-id",
        "overlap-blocks",
        "overlap-dram-blocks",
        "overlap-ssd-blocks",
        "cache-age-us",
        "load-age-us",
        "total-blocks",
        "active-blocks",
        "prefill-tokens",
        "unreported-prefill-tokens",
        "unreported-blocks",
        "credit-requests",
        "credit-tokens",
        "credit-blocks",
        "inflight-requests",
        "est-prefill-us",
        "est-credit-us",
        "est-load-us",
    ];
}

type Question<'a> = Asked<'a, LoadOverlap>;
type Row<'a> = ReplicaRow<'a, Sees>;

const ONE_PPM: u64 = 1_000_000;

/// What can be set without a new build.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Settings {
    /// Longest wait for a replica without credit, in microseconds; 0 never waits. The host bounds it at a second.
    pub wait_max_us: u32,
    /// Times closer than this are equal, in microseconds: then the emptier pool wins.
    pub tie_us: u64,
}

impl Parameters for Settings {
    fn read(document: &mut Document) -> Result<Self, ParameterError> {
        Ok(Self {
            wait_max_us: document.u32("wait-max-us", 1_000_000, 0..=1_000_000)?,
            tie_us: document.u64("tie-us", 1_000, 1..=1_000_000)?,
        })
    }
}

/// The policy. Without state: what was placed and not reported yet is a signal.
#[derive(Debug)]
pub struct LoadOverlap {
    settings: Settings,
    /// The best rows of the present call, best first; kept for its room.
    best: Vec<Rank>,
}

/// Smaller is better; the row makes it total.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
struct Rank {
    /// Time or work, in steps of a tie, with [`STALE`] and [`UNCOVERED`] above it.
    cost: u64,
    /// Share of its pool in use with this request, so that ties spread decode load.
    used_ppm: u64,
    inflight_requests: u64,
    replica_id: u64,
    row: u32,
}

/// Its load is unknown or old: whatever it claims comes last.
const STALE: u64 = 1 << 63;
/// No times are known, and its credit does not cover the request.
const UNCOVERED: u64 = 1 << 62;

impl Policy for LoadOverlap {
    const NAME: &'static str = "load-overlap";
    const VERSION: &'static str = env!("CARGO_PKG_VERSION");
    type Parameters = Settings;

    fn new(settings: &Settings) -> Self {
        Self { settings: *settings, best: Vec::with_capacity(RANKED_MAX + 1) }
    }
}

impl Routing for LoadOverlap {
    type Context = Reads;
    type Replicas = Sees;

    fn decide(&mut self, asked: &Question<'_>, ranked: &mut Vec<u32>) -> Option<Placement> {
        let pace = Pace::of(asked);
        self.best.clear();
        // The best row that could begin now; what a wait for another one is measured against.
        let mut ready: Option<Rank> = None;
        for row in asked.replicas.iter() {
            let rank = self.settings.rank(asked, &pace, row);
            if has_credit(row) && rank.cost & STALE == 0 && ready.is_none_or(|best| rank < best) {
                ready = Some(rank);
            }
            self.keep(rank);
        }
        ranked.extend(self.best.iter().map(|rank| rank.row));
        let first = asked.replicas.row(self.best.first()?.row as usize);
        let ready = ready.map(|rank| asked.replicas.row(rank.row as usize));
        let wait_us = if pace.is_known { self.settings.wait_us(asked, &pace, first, ready) } else { 0 };
        Some(Placement::Place { wait_us, colocate: false })
    }
}

impl LoadOverlap {
    /// Puts `rank` in its place among the best.
    fn keep(&mut self, rank: Rank) {
        let is_full = self.best.len() == RANKED_MAX;
        if is_full && self.best.last().is_some_and(|worst| *worst < rank) {
            return;
        }
        if is_full {
            self.best.pop();
        }
        let at = self.best.partition_point(|better| *better < rank);
        self.best.insert(at, rank);
    }
}

impl Settings {
    fn rank(&self, asked: &Question<'_>, pace: &Pace, row: Row<'_>) -> Rank {
        let context = asked.context;
        let is_reported = row.try_active_blocks().is_some() && row.try_prefill_tokens().is_some();
        let held = Sat(row.active_blocks()) + row.unreported_blocks() + context.need_blocks();
        let cost = if pace.is_known {
            first_token_us(asked, pace, row) / self.tie_us
        } else {
            work_blocks(asked, row, held.0)
        };
        let is_stale = !is_reported || row.load_age_us() >= context.stale_load_us();
        let is_uncovered = !pace.is_known && !is_covered(asked, row);
        let flags = if is_stale { STALE } else { 0 } | if is_uncovered { UNCOVERED } else { 0 };
        Rank {
            cost: cost.min(UNCOVERED - 1) | flags,
            used_ppm: held.times_over(ONE_PPM, row.total_blocks()).unwrap_or(u64::MAX),
            inflight_requests: row.inflight_requests(),
            replica_id: row.replica_id(),
            row: row.index(),
        }
    }

    /// How long the first row's credit is worth waiting for: until the best row that has credit now would have been as good.
    fn wait_us(&self, asked: &Question<'_>, pace: &Pace, first: Row<'_>, ready: Option<Row<'_>>) -> u32 {
        let is_wait_known = first.try_est_credit_us().is_some_and(|wait| wait > 0 && wait < u64::MAX);
        if !is_wait_known {
            return 0;
        }
        let worth = match ready {
            Some(other) => Sat(first_token_us(asked, pace, other)) - prefill_us(asked, pace, first),
            // Nobody else could take it: twice the estimate, since estimates err.
            None => Sat(first.est_credit_us()) * 2,
        };
        worth.to_u32().min(self.wait_max_us)
    }
}

fn has_credit(row: Row<'_>) -> bool {
    row.try_est_credit_us() == Some(0)
}

/// What the replicas' own estimates say about the time of a token, for rows whose own estimate cannot be used.
#[derive(Clone, Copy, Debug)]
struct Pace {
    /// Every row whose load is known has times.
    is_known: bool,
    /// The longest estimate of a row for this prompt.
    longest_us: u64,
    /// And the tokens it is for.
    longest_tokens: u64,
}

impl Pace {
    fn of(asked: &Question<'_>) -> Self {
        let mut pace = Self { is_known: true, longest_us: 0, longest_tokens: 1 };
        for row in asked.replicas.iter() {
            match (row.try_est_prefill_us(), row.try_est_credit_us()) {
                (Some(time), Some(_)) if time >= pace.longest_us => {
                    pace.longest_us = time;
                    pace.longest_tokens = uncached_tokens(asked, row).max(1);
                }
                (Some(_), Some(_)) => {}
                _ => pace.is_known &= row.try_active_blocks().is_none(),
            }
        }
        pace
    }

    fn us(&self, tokens: u64) -> u64 {
        Sat(tokens).times_over(self.longest_us, self.longest_tokens).unwrap_or(0)
    }
}

fn is_fresh(asked: &Question<'_>, row: Row<'_>) -> bool {
    row.cache_age_us() < asked.context.stale_cache_us()
}

/// Prompt tokens that are not in the device's memory, by the directory.
fn uncached_tokens(asked: &Question<'_>, row: Row<'_>) -> u64 {
    let cached = Sat(row.overlap_blocks()) * asked.context.block_size_tokens();
    (Sat(asked.request.input_tokens.into()) - cached).0
}

/// Time until the first token if it went there: the later of its credit and the prefill ahead of it, then its own prefill.
fn first_token_us(asked: &Question<'_>, pace: &Pace, row: Row<'_>) -> u64 {
    let ahead = (Sat(row.prefill_tokens()) + row.unreported_prefill_tokens()).0;
    (Sat(row.est_credit_us().max(pace.us(ahead))) + prefill_us(asked, pace, row)).0
}

/// Time of its own prefill there, with what is cached taken off.
fn prefill_us(asked: &Question<'_>, pace: &Pace, row: Row<'_>) -> u64 {
    let input = u64::from(asked.request.input_tokens);
    if !is_fresh(asked, row) {
        // The estimate takes an old directory at its word. A hit that may be gone is no hit.
        return row.est_prefill_us().max(pace.us(input));
    }
    let compute = row.est_prefill_us();
    let below = (Sat(row.overlap_dram_blocks()) + row.overlap_ssd_blocks()) * asked.context.block_size_tokens();
    let uncached = uncached_tokens(asked, row);
    let saved = Sat(compute).times_over(below.0.min(uncached), uncached).unwrap_or(0);
    // A lower tier counts where bringing it up is faster than computing it again.
    if row.est_load_us() < saved { (Sat(compute) - saved + row.est_load_us()).0 } else { compute }
}

/// Uncached prompt work in blocks plus blocks in use: what stands in for time while no time is known.
fn work_blocks(asked: &Question<'_>, row: Row<'_>, held_blocks: u64) -> u64 {
    let own = if is_fresh(asked, row) { uncached_tokens(asked, row) } else { asked.request.input_tokens.into() };
    let tokens = Sat(row.prefill_tokens()) + row.unreported_prefill_tokens() + own;
    (Sat(tokens.0 / asked.context.block_size_tokens().max(1)) + held_blocks).0
}

/// As the gateway debits: any prefill credit covers one prompt of whatever length.
fn is_covered(asked: &Question<'_>, row: Row<'_>) -> bool {
    row.credit_requests() >= u64::from(asked.request.sequences.max(1))
        && row.credit_tokens() > 0
        && row.credit_blocks() >= asked.context.need_blocks()
}

#[cfg(test)]
mod tests {
    use penstock_policy_sdk::Load as _;

    use crate::Seat;

    #[test]
    fn parameters_have_ranges() {
        assert!(Seat::configure(r#"{"wait-max-us": 0, "tie-us": 1}"#).is_ok());
        assert_eq!(Seat::configure(r#"{"tie-us": 0}"#).map(|_| ()).unwrap_err().field, "tie-us");
    }

    #[test]
    fn its_manifest_is_one_the_host_takes() {
        let declared = Seat::manifest().routing().unwrap();
        assert_eq!((declared.context.len(), declared.rows.len()), (4, 19));
    }
}
