//! How many output tokens will it be? Histories of finished requests by tenant, class and prompt length, all in integers.

use penstock_base::codec::{DecodeError, Reader, Writer};
use penstock_base::limits::OUTPUT_HISTORIES_MAX;
use penstock_base::{ClassRank, TenantId};

use super::table::Table;

/// Steps of the length scale: four an octave, so an answer is at most a quarter too high.
const STEPS: usize = 96;
/// Requests that a history needs before it is believed.
const BELIEVED_FROM: u32 = 8;
/// At this many, all counts are halved: the recent past counts most.
const HALVED_AT: u32 = 256;

/// Lengths seen, on a logarithmic scale.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Lengths {
    counts: [u16; STEPS],
    total: u32,
}

/// Whose requests a history is of.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
struct Key {
    tenant: TenantId,
    class: ClassRank,
    /// Bits of the prompt length.
    bucket: u8,
}

/// Histories, the longest unused one making room.
#[derive(Clone, Debug)]
pub(super) struct OutputEstimator {
    histories: Table<Key, Lengths>,
}

/// The step of a length: exact up to 4, then four steps an octave.
fn step_of(tokens: u64) -> usize {
    if tokens <= 4 {
        return (tokens.max(1) - 1) as usize;
    }
    // Lengths 2^k+1 ..= 2^(k+1) have the steps of octave k; the last length of each quarter is the step's value.
    let octave = (tokens - 1).ilog2();
    let quarter = (tokens - 1 - (1 << octave)) >> (octave - 2);
    ((octave as usize - 2) * 4 + 4 + quarter as usize).min(STEPS - 1)
}

/// The largest length of a step.
fn length_of(step: usize) -> u64 {
    if step < 4 {
        return step as u64 + 1;
    }
    let (octave, quarter) = ((step - 4) / 4 + 2, (step - 4) % 4);
    (1 << octave) + ((quarter as u64 + 1) << (octave - 2))
}

impl Default for Lengths {
    fn default() -> Self {
        Self { counts: [0; STEPS], total: 0 }
    }
}

impl Lengths {
    fn add(&mut self, tokens: u64) {
        if self.total >= HALVED_AT {
            self.total = 0;
            for count in &mut self.counts {
                *count /= 2;
                self.total += u32::from(*count);
            }
        }
        self.counts[step_of(tokens)] += 1;
        self.total += 1;
    }

    /// The smallest step's length that covers `ppm` of what was seen.
    fn quantile(&self, ppm: u64) -> Option<u64> {
        if self.total < BELIEVED_FROM {
            return None;
        }
        let wanted = (u64::from(self.total) * ppm).div_ceil(1_000_000).max(1);
        let mut seen = 0;
        for (step, count) in self.counts.iter().enumerate() {
            seen += u64::from(*count);
            if seen >= wanted {
                return Some(length_of(step));
            }
        }
        None
    }
}

impl Key {
    fn of(tenant: TenantId, class: ClassRank, input_tokens: u32) -> Self {
        Self { tenant, class, bucket: (u32::BITS - input_tokens.leading_zeros()) as u8 }
    }
}

impl OutputEstimator {
    /// No history.
    pub fn new() -> Self {
        Self { histories: Table::with_capacity(OUTPUT_HISTORIES_MAX) }
    }

    /// A request of that kind ended by itself with `output_tokens` a sequence.
    pub fn learn(&mut self, tenant: TenantId, class: ClassRank, input_tokens: u32, output_tokens: u64) {
        let key = Key::of(tenant, class, input_tokens);
        let slot = match self.histories.find(&key) {
            Some(slot) => slot,
            None => {
                let Some(inserted) = self.histories.insert(key, Lengths::default()) else { return };
                self.histories.unpin(inserted.slot);
                inserted.slot
            }
        };
        self.histories.touch(slot);
        self.histories[slot].add(output_tokens);
    }

    /// Output that `ppm` of such requests did not exceed; unknown until enough were seen.
    pub fn quantile(&self, tenant: TenantId, class: ClassRank, input_tokens: u32, ppm: u64) -> Option<u64> {
        let slot = self.histories.find(&Key::of(tenant, class, input_tokens))?;
        self.histories[slot].quantile(ppm)
    }

    /// Bounded and sound.
    pub fn check(&self) -> Result<(), &'static str> {
        self.histories.check()
    }

    /// Writes the state.
    pub fn encode(&self, out: &mut Writer) {
        self.histories.encode(out, |out, key, lengths| {
            out.u64(key.tenant.0);
            out.u8(key.class.get());
            out.u8(key.bucket);
            out.u32(lengths.total);
            for count in &lengths.counts {
                out.u16(*count);
            }
        });
    }

    /// Reads what [`Self::encode`] wrote.
    pub fn decode(from: &mut Reader<'_>) -> Result<Self, DecodeError> {
        let histories = Table::decode(from, OUTPUT_HISTORIES_MAX, |from| {
            let tenant = TenantId(from.u64()?);
            let class = ClassRank::new(from.u8()?).ok_or(DecodeError::Invalid("class"))?;
            let bucket = from.u8()?;
            let mut lengths = Lengths { total: from.u32()?, ..Lengths::default() };
            for count in &mut lengths.counts {
                *count = from.u16()?;
            }
            Ok((Key { tenant, class, bucket }, lengths))
        })?;
        Ok(Self { histories })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::vec::Vec;

    #[test]
    fn steps_cover_their_lengths_and_grow() {
        for tokens in 1..100_000u64 {
            let (step, length) = (step_of(tokens), length_of(step_of(tokens)));
            assert!(length >= tokens && length <= tokens + tokens.div_ceil(4), "{tokens}: {length}");
            assert!(step == 0 || length_of(step - 1) < tokens);
        }
    }

    #[test]
    fn quantiles_are_those_of_a_sorted_list_within_a_step() {
        let mut estimator = OutputEstimator::new();
        let class = ClassRank::default();
        let mut sorted: Vec<u64> = (0..200).map(|i| (i * i * 7919) % 900 + 1).collect();
        for tokens in &sorted {
            estimator.learn(TenantId(1), class, 100, *tokens);
        }
        sorted.sort_unstable();
        for (ppm, index) in [(500_000, 99), (900_000, 179)] {
            let exact = sorted[index];
            let got = estimator.quantile(TenantId(1), class, 127, ppm).expect("enough were seen");
            assert!(got >= exact && got <= exact + exact.div_ceil(4), "{got} for {exact}");
        }
        assert_eq!(estimator.quantile(TenantId(1), class, 128, 500_000), None, "another length of prompt");
        assert_eq!(estimator.quantile(TenantId(2), class, 100, 500_000), None, "another tenant");
    }

    #[test]
    fn the_table_of_histories_is_bounded() {
        let mut estimator = OutputEstimator::new();
        for tenant in 0..OUTPUT_HISTORIES_MAX as u64 + 10 {
            estimator.learn(TenantId(tenant), ClassRank::default(), 1, 5);
        }
        assert_eq!(estimator.histories.len(), OUTPUT_HISTORIES_MAX);
        estimator.check().expect("sound");
    }
}
