//! How long will a step take? A sum of four terms, fitted to the steps that were measured.
//!
//! The fit is a normalised multiplicative descent: the relative error of a prediction is spread over the terms by their share in it, a
//! quarter of it at a time. Terms stay positive, one absurd measurement moves them by a fixed part at most, and everything is integer.

use penstock_base::Duration;
use penstock_base::codec::{DecodeError, Reader, Writer};

use super::StepCost;

/// Binary places kept below one nanosecond.
const SCALE_BITS: u32 = 10;
/// A relative error counts as at most this much, in millionths: a stall of the machine is not a property of the work.
const ERROR_MAX_PPM: i128 = 1_000_000;
/// A step faster than predicted counts as at most this much.
const ERROR_MIN_PPM: i128 = -500_000;
/// One over the learning rate.
const DAMPING: i128 = 4;
/// Steps with prefill before the price of a prompt token counts as known.
const KNOWN_SAMPLES: u32 = 8;

/// What one step computes, as far as its cost goes.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) struct StepShape {
    /// Query tokens of prefill rows.
    pub prefill_tokens: u32,
    /// Rows with one query token behind the prompt.
    pub decode_rows: u32,
    /// KV positions that those read.
    pub kv_tokens: u64,
}

/// The fitted model of one replica.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct CostFit {
    /// Base, prefill token, decode row, KV token: nanoseconds, scaled, at least 1.
    terms: [u64; 4],
    /// Steps that had prefill tokens.
    prefill_samples: u32,
    /// Average duration of a step, an eighth of each new one.
    step: Duration,
}

impl CostFit {
    pub(super) fn new(prior: StepCost) -> Self {
        let terms = [prior.base_ns, prior.prefill_token_ns, prior.decode_row_ns, prior.kv_token_ns];
        Self {
            terms: terms.map(|ns| ns.clamp(1, u64::MAX >> SCALE_BITS) << SCALE_BITS),
            prefill_samples: 0,
            step: Duration::ZERO,
        }
    }

    fn parts(&self, shape: StepShape) -> [u128; 4] {
        let [base, prefill, decode, kv] = self.terms.map(u128::from);
        [
            base,
            prefill * u128::from(shape.prefill_tokens),
            decode * u128::from(shape.decode_rows),
            kv * u128::from(shape.kv_tokens),
        ]
    }

    /// Expected device time of a step.
    pub(super) fn predict(&self, shape: StepShape) -> Duration {
        let sum: u128 = self.parts(shape).iter().sum();
        Duration(u64::try_from(sum >> SCALE_BITS).unwrap_or(u64::MAX))
    }

    /// Learns from a finished step.
    pub(super) fn observe(&mut self, shape: StepShape, took: Duration) {
        self.step =
            if self.step == Duration::ZERO { took } else { Duration(self.step.0 - self.step.0 / 8 + took.0 / 8) };
        if shape.prefill_tokens > 0 {
            self.prefill_samples = self.prefill_samples.saturating_add(1);
        }
        let parts = self.parts(shape);
        let expected = parts.iter().sum::<u128>().max(1) as i128;
        let measured = i128::from(took.0) << SCALE_BITS;
        let error_ppm =
            ((measured - expected).saturating_mul(1_000_000) / expected).clamp(ERROR_MIN_PPM, ERROR_MAX_PPM);
        for (term, part) in self.terms.iter_mut().zip(parts) {
            let share_ppm = (part as i128).saturating_mul(1_000_000) / expected;
            let change = i128::from(*term) * error_ppm / 1_000_000 * share_ppm / 1_000_000 / DAMPING;
            let moved = (i128::from(*term) + change).clamp(1, i128::from(u64::MAX));
            *term = moved as u64;
        }
    }

    /// Prefill tokens that fit beside the decodes of `shape` within `target`.
    pub(super) fn prefill_within(&self, shape: StepShape, target: Duration) -> u32 {
        let without = self.predict(StepShape { prefill_tokens: 0, ..shape });
        let left = u128::from(target.0.saturating_sub(without.0)) << SCALE_BITS;
        u32::try_from(left / u128::from(self.terms[1])).unwrap_or(u32::MAX)
    }

    /// Device time to compute `tokens` prompt tokens, steps not counted.
    pub(super) fn prefill(&self, tokens: u64) -> Duration {
        let sum = u128::from(self.terms[1]) * u128::from(tokens);
        Duration(u64::try_from(sum >> SCALE_BITS).unwrap_or(u64::MAX))
    }

    /// Fitted price of a prompt token; 0 until it is known.
    pub(super) fn prefill_token_ns(&self) -> u64 {
        if self.prefill_samples < KNOWN_SAMPLES { 0 } else { (self.terms[1] >> SCALE_BITS).max(1) }
    }

    /// Average duration of a step.
    pub(super) fn step(&self) -> Duration {
        self.step
    }

    pub(super) fn encode(&self, out: &mut Writer) {
        for term in self.terms {
            out.u64(term);
        }
        out.u32(self.prefill_samples);
        out.u64(self.step.0);
    }

    pub(super) fn decode(from: &mut Reader<'_>) -> Result<Self, DecodeError> {
        let mut terms = [0; 4];
        for term in &mut terms {
            *term = from.u64()?;
            if *term == 0 {
                return Err(DecodeError::Invalid("cost term"));
            }
        }
        Ok(Self { terms, prefill_samples: from.u32()?, step: Duration(from.u64()?) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A machine that costs 2 ms a step, 40 us a prompt token, 300 us a decode row and 50 ns a KV token.
    fn truth(shape: StepShape) -> Duration {
        let prefill = 40_000 * u64::from(shape.prefill_tokens);
        Duration(2_000_000 + prefill + 300_000 * u64::from(shape.decode_rows) + 50 * shape.kv_tokens)
    }

    fn shapes() -> impl Iterator<Item = StepShape> {
        let mut seed = 11u64;
        core::iter::from_fn(move || {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let decode_rows = (seed >> 33) as u32 % 33;
            let prefill_tokens = if seed >> 62 == 0 { 0 } else { (seed >> 40) as u32 % 512 };
            Some(StepShape { prefill_tokens, decode_rows, kv_tokens: u64::from(decode_rows) * ((seed >> 20) % 2_000) })
        })
    }

    fn prior() -> StepCost {
        StepCost { base_ns: 1_000_000, prefill_token_ns: 1_000_000, decode_row_ns: 2_000_000, kv_token_ns: 500 }
    }

    #[test]
    fn learns_a_machine_twenty_times_faster_than_assumed() {
        let mut fit = CostFit::new(prior());
        for shape in shapes().take(4_000) {
            fit.observe(shape, truth(shape));
        }
        for shape in shapes().skip(4_000).take(200) {
            let (is, should) = (fit.predict(shape).0 as i128, truth(shape).0 as i128);
            assert!((is - should).abs() * 10 < should, "{shape:?}: {is} for {should}");
        }
        assert!((32_000..48_000).contains(&fit.prefill_token_ns()), "{}", fit.prefill_token_ns());
    }

    #[test]
    fn one_stall_moves_nothing_by_more_than_a_quarter() {
        let mut fit = CostFit::new(prior());
        let shape = StepShape { prefill_tokens: 100, ..StepShape::default() };
        let before = fit.predict(shape).0;
        fit.observe(shape, Duration::from_s(3_600));
        assert!(fit.predict(shape).0 <= before + before / 4);
        fit.observe(shape, Duration::MAX);
        fit.observe(shape, Duration::ZERO);
        assert!(fit.predict(shape).0 > 0);
    }

    #[test]
    fn the_price_of_a_prompt_token_is_unknown_until_it_was_measured() {
        let mut fit = CostFit::new(prior());
        let decodes = StepShape { decode_rows: 1, ..StepShape::default() };
        for _ in 0..100 {
            fit.observe(decodes, Duration::from_ms(3));
        }
        assert_eq!(fit.prefill_token_ns(), 0);
        for _ in 0..8 {
            fit.observe(StepShape { prefill_tokens: 1, ..decodes }, Duration::from_ms(4));
        }
        assert!(fit.prefill_token_ns() > 0);
    }

    #[test]
    fn a_target_buys_the_tokens_that_are_left_beside_the_decodes() {
        // 1 ms base + 2 decodes at 2 ms + 1,000 KV tokens at 500 ns = 5.5 ms; 10 ms leave 4.5 ms: 4 tokens at 1 ms.
        let fit = CostFit::new(prior());
        let shape = StepShape { prefill_tokens: 0, decode_rows: 2, kv_tokens: 1_000 };
        assert_eq!(fit.predict(shape), Duration::from_us(5_500));
        assert_eq!(fit.prefill_within(shape, Duration::from_ms(10)), 4);
        assert_eq!(fit.prefill_within(shape, Duration::from_ms(1)), 0);
    }
}
