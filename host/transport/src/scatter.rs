//! Where does byte `n` of a scatter list lie?

use crate::TransportError;
use crate::memory::Region;
use crate::sys::Slice;

/// Blocks `first..first + blocks` of a region.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Run {
    pub(crate) first: u32,
    pub(crate) blocks: u32,
}

/// One side of a transfer: a region and the runs of it that are moved, in order, as one row of bytes.
#[derive(Clone, Debug)]
pub(crate) struct Scatter {
    region: Region,
    runs: Vec<Run>,
    /// Where each run ends in the row of bytes.
    ends: Vec<u64>,
}

impl Scatter {
    /// Checks every run against the region. Neighbours become one run.
    ///
    /// # Errors
    ///
    /// [`TransportError::Empty`] and [`TransportError::OutOfRange`].
    pub(crate) fn new(region: Region, runs: impl IntoIterator<Item = Run>) -> Result<Self, TransportError> {
        let mut joined: Vec<Run> = Vec::new();
        for run in runs {
            check(run, region.blocks())?;
            match joined.last_mut() {
                Some(last) if last.first + last.blocks == run.first => last.blocks += run.blocks,
                _ => joined.push(run),
            }
        }
        if joined.is_empty() {
            return Err(TransportError::Empty);
        }
        let block_bytes = region.block_bytes() as u64;
        let ends = joined.iter().scan(0, |end, run| {
            *end += u64::from(run.blocks) * block_bytes;
            Some(*end)
        });
        Ok(Self { ends: ends.collect(), runs: joined, region })
    }

    /// Where it lies.
    pub(crate) fn region(&self) -> &Region {
        &self.region
    }

    /// Its runs, in order.
    pub(crate) fn runs(&self) -> &[Run] {
        &self.runs
    }

    /// Length of the row.
    pub(crate) fn bytes(&self) -> u64 {
        self.ends.last().copied().unwrap_or(0)
    }

    /// Appends the pieces of memory that hold bytes `at..at + bytes` of the row, at most `pieces_max` of them, and returns how
    /// many bytes they hold. Past the end of the row there is nothing.
    pub(crate) fn slices(&self, at: u64, bytes: usize, pieces_max: usize, into: &mut Vec<Slice>) -> usize {
        let mut at = at;
        let mut left = bytes;
        let mut piece = self.ends.partition_point(|end| *end <= at);
        let pieces_end = piece.saturating_add(pieces_max).min(self.runs.len());
        while left > 0 && piece < pieces_end {
            let start = if piece == 0 { 0 } else { self.ends[piece - 1] };
            let length = left.min(usize::try_from(self.ends[piece] - at).unwrap_or(usize::MAX));
            let offset = self.runs[piece].first as usize * self.region.block_bytes() + (at - start) as usize;
            // SAFETY: `new` checked that the run lies inside the region, and `at` lies inside the run.
            let address = unsafe { self.region.memory().base().as_ptr().add(offset) };
            into.push(Slice { iov_base: address.cast(), iov_len: length });
            at += length as u64;
            left -= length;
            piece += 1;
        }
        bytes - left
    }
}

/// Whether a run is there in a region of so many blocks.
pub(crate) fn check(run: Run, blocks: u32) -> Result<(), TransportError> {
    if run.blocks == 0 {
        return Err(TransportError::Empty);
    }
    if u64::from(run.first) + u64::from(run.blocks) > u64::from(blocks) {
        let block = u64::from(run.first).max(u64::from(blocks));
        return Err(TransportError::OutOfRange { block, blocks });
    }
    Ok(())
}

/// A block that two of the runs hold, if there is one.
pub(crate) fn overlap(runs: impl Iterator<Item = Run>) -> Option<u32> {
    let mut sorted: Vec<Run> = runs.collect();
    sorted.sort_unstable_by_key(|run| run.first);
    let meets = |pair: &&[Run]| u64::from(pair[0].first) + u64::from(pair[0].blocks) > u64::from(pair[1].first);
    sorted.windows(2).find(meets).map(|pair| pair[1].first)
}

/// Copies up to `budget` bytes of the row from one side to the other, starting at `at`. Returns how many.
pub(crate) fn copy(from: &Scatter, to: &Scatter, at: u64, budget: usize) -> usize {
    let (mut sources, mut targets) = (Vec::new(), Vec::new());
    let mut done = 0;
    while done < budget {
        sources.clear();
        targets.clear();
        let here = at + done as u64;
        let bytes = from.slices(here, budget - done, 1, &mut sources);
        let bytes = to.slices(here, bytes, 1, &mut targets);
        let (Some(source), Some(target)) = (sources.first(), targets.first()) else { break };
        // SAFETY: both pieces lie inside memory that the scatter lists keep mapped. They may overlap when both lists name
        // one region, hence `copy`. Others may write the source meanwhile: then the blocks' content is unspecified, as
        // `Region` says.
        unsafe { std::ptr::copy(source.iov_base.cast::<u8>(), target.iov_base.cast::<u8>(), bytes) };
        done += bytes;
    }
    done
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(first: u32, blocks: u32) -> Run {
        Run { first, blocks }
    }

    #[test]
    fn a_row_is_cut_where_its_runs_are() {
        let region = Region::private(10, 8).unwrap();
        let base = region.memory().base().as_ptr() as usize;
        let scatter = Scatter::new(region, [run(6, 1), run(0, 1), run(1, 1), run(4, 1)]).unwrap();
        assert_eq!(scatter.bytes(), 40);
        let pieces = |at, bytes, most| {
            let mut slices = Vec::new();
            let got = scatter.slices(at, bytes, most, &mut slices);
            let placed = slices.iter().map(|slice| (slice.iov_base as usize - base, slice.iov_len));
            (got, placed.collect::<Vec<_>>())
        };
        assert_eq!(pieces(0, 40, 9), (40, vec![(60, 10), (0, 20), (40, 10)]));
        assert_eq!(pieces(3, 12, 9), (12, vec![(63, 7), (0, 5)]));
        assert_eq!(pieces(3, 12, 1), (7, vec![(63, 7)]));
        assert_eq!(pieces(30, 99, 9), (10, vec![(40, 10)]));
        assert_eq!(pieces(40, 1, 9), (0, vec![]));
    }

    #[test]
    fn runs_outside_the_region_are_refused() {
        let region = Region::private(10, 8).unwrap();
        let of = |runs: Vec<Run>| Scatter::new(region.clone(), runs).unwrap_err();
        assert!(matches!(of(vec![]), TransportError::Empty));
        assert!(matches!(of(vec![run(0, 0)]), TransportError::Empty));
        assert!(matches!(of(vec![run(7, 2)]), TransportError::OutOfRange { block: 8, blocks: 8 }));
        assert!(matches!(of(vec![run(u32::MAX, u32::MAX)]), TransportError::OutOfRange { .. }));
    }

    #[test]
    fn a_block_in_two_runs_is_found() {
        assert_eq!(overlap([run(5, 2), run(0, 5)].into_iter()), None);
        assert_eq!(overlap([run(5, 2), run(0, 6)].into_iter()), Some(5));
        assert_eq!(overlap([run(3, 1), run(3, 1)].into_iter()), Some(3));
    }
}
