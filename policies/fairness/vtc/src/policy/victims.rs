//! Who yields? Whoever loses least for each block it frees: the least important, then those whose reader has seen nothing yet, then the
//! cheapest to bring back, then the last that joined.

use penstock_policy_sdk::fairness::{OFFLOAD, RECOMPUTE, VictimsAsked};
use penstock_policy_sdk::{Sat, Yielder};

use super::{Settings, Vtc};

/// A token's recompute while no cost model says better, in microseconds. Only the order matters, and it is the same for every row.
const TOKEN_US: u64 = 100;

/// What it costs if the row yields; smaller yields first.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(super) struct Loss {
    class_rank: u64,
    has_emitted: bool,
    /// Nanoseconds of device time for each block that becomes free.
    work_ns_per_block: u64,
    joined_before: u64,
    row: u32,
}

/// Names rows until the shortage is covered. Nobody yields to a less important sequence.
pub(super) fn choose(
    settings: &Settings,
    asked: &VictimsAsked<'_, Vtc>,
    losses: &mut Vec<Loss>,
    yielders: &mut Vec<Yielder>,
) {
    let (context, running) = (asked.context, asked.running);
    let recompute_us = |row: u32| {
        let row = running.row(row as usize);
        row.try_est_recompute_us().unwrap_or((Sat(row.recompute_tokens()) * TOKEN_US).0)
    };
    let offloads = |row: u32, room: u64| {
        let fits = running.row(row as usize).freed_blocks() <= room && room > 0;
        fits && running.row(row as usize).est_offload_us() < recompute_us(row)
    };
    losses.clear();
    let useful = running.iter().filter(|row| row.freed_blocks() > 0 && row.class_rank() <= context.needy_class_rank());
    losses.extend(useful.map(|row| {
        let is_offloaded = offloads(row.index(), context.dram_free_blocks());
        let work_us = if is_offloaded { row.est_offload_us() } else { recompute_us(row.index()) };
        Loss {
            class_rank: row.class_rank(),
            has_emitted: settings.protect_emitted && row.emitted_tokens() > 0,
            work_ns_per_block: (Sat(work_us) * 1_000).0 / row.freed_blocks(),
            joined_before: u64::MAX - row.admit_count(),
            row: row.index(),
        }
    }));
    losses.sort_unstable();
    let (mut freed, mut room) = (Sat(0), context.dram_free_blocks());
    for loss in losses.iter() {
        if freed.0 >= context.short_blocks() || yielders.len() as u64 >= context.take_sequences() {
            break;
        }
        let blocks = running.row(loss.row as usize).freed_blocks();
        let is_offloaded = offloads(loss.row, room);
        if is_offloaded {
            room -= blocks;
        }
        yielders.push(Yielder { row: loss.row, how: if is_offloaded { OFFLOAD } else { RECOMPUTE } });
        freed += blocks;
    }
}
