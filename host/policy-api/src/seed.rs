//! Where a call's randomness comes from: a keyed mix of the run's seed, the question and the call's number.

use crate::question::Question;

/// One step of SplitMix64 (Steele, Lea, Flood: "Fast splittable pseudorandom number generators", OOPSLA 2014).
const fn split_mix(state: u64) -> u64 {
    let z = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// The seed of call `number` of `question` in a run seeded with `run_seed`.
///
/// Pure; each argument goes through the whole mix, so neighbours share nothing. Not secret: a guest can invert it.
pub const fn call_seed(run_seed: u64, question: Question, number: u64) -> u64 {
    split_mix(split_mix(split_mix(run_seed) ^ question.code() as u64) ^ number)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_mix_is_split_mix_64() {
        // First outputs of the published generator seeded with 1234567.
        assert_eq!(split_mix(1_234_567), 6_457_827_717_110_365_317);
        assert_eq!(split_mix(1_234_567_u64.wrapping_add(0x9e37_79b9_7f4a_7c15)), 3_203_168_211_198_807_973);
    }

    #[test]
    fn questions_and_calls_have_seeds_of_their_own() {
        let mut seen = alloc::collections::BTreeSet::new();
        for question in Question::ALL {
            for number in 0..1_000 {
                assert!(seen.insert(call_seed(7, question, number)));
            }
        }
        assert_ne!(call_seed(7, Question::Order, 1), call_seed(8, Question::Order, 1));
    }
}
