//! What is the sum over bytes that travel? Tells what was sent from what arrived; defends against nobody.

use penstock_base::BlockRef;
use penstock_exec::SampledToken;
use penstock_sched::handoff::Part;
use penstock_transport::{Region, TransportError};

const LANES: usize = 8;
const SEEDS: [u64; LANES] = [
    0x9e37_79b9_7f4a_7c15,
    0xbf58_476d_1ce4_e5b9,
    0x94d0_49bb_1331_11eb,
    0xd6e8_feb8_6659_fd93,
    0xa076_1d64_78bd_642f,
    0xe703_7ed1_a0b4_28db,
    0x8ebc_6af0_9c88_c6e3,
    0x5899_65cc_7537_4cc3,
];

fn mixed(lane: u64, word: u64) -> u64 {
    (lane ^ word).wrapping_mul(0xff51_afd7_ed55_8ccd).rotate_left(29)
}

/// Eight lanes, since one would wait for its own multiplication at each word.
struct Sum([u64; LANES]);

impl Sum {
    fn bytes(&mut self, bytes: &[u8]) {
        let mut rows = bytes.chunks_exact(8 * LANES);
        for row in &mut rows {
            for (lane, word) in self.0.iter_mut().zip(row.chunks_exact(8)) {
                *lane = mixed(*lane, u64::from_le_bytes(word.try_into().unwrap_or_default()));
            }
        }
        rows.remainder().iter().for_each(|byte| self.word(u64::from(*byte)));
    }

    fn word(&mut self, word: u64) {
        self.0[0] = mixed(self.0[0], word);
    }

    fn end(self) -> u64 {
        self.0.into_iter().fold(0, mixed)
    }
}

/// Of some layers of some blocks, `held` being all of the sequence's from block `first` on. `scratch` is only room.
pub(super) fn of_part(
    region: &Region,
    (first, held): (u32, &[BlockRef]),
    layers: u32,
    part: Part,
    scratch: &mut Vec<u8>,
) -> Result<u64, TransportError> {
    let Part::Kv { first_block, blocks, first_layer, layers: count } = part else { return Ok(0) };
    let mut sum = Sum(SEEDS);
    scratch.resize(region.block_bytes(), 0);
    for block in held.iter().skip((first_block - first) as usize).take(blocks as usize) {
        for layer in first_layer..first_layer + count {
            region.read(block.index * layers + layer, scratch)?;
            sum.bytes(scratch);
        }
    }
    Ok(sum.end())
}

/// Of the tail: the tokens that were sampled and not sent.
pub(super) fn of_tail(tail: &[SampledToken]) -> u64 {
    let mut sum = Sum(SEEDS);
    sum.word(tail.len() as u64);
    for token in tail {
        sum.word(u64::from(token.id));
        sum.word(u64::from(token.logprob.to_bits()));
        for other in &token.top {
            sum.word(u64::from(other.id));
            sum.word(u64::from(other.logprob.to_bits()));
        }
    }
    sum.end()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_bit_and_its_place_count() {
        let region = Region::private(200, 6).expect("memory");
        let bytes: Vec<u8> = (0..200).map(|at| at as u8).collect();
        (0..6).for_each(|block| region.fill(block, &bytes).expect("there"));
        let held = [BlockRef { index: 1, generation: 9 }, BlockRef { index: 0, generation: 9 }];
        let part = Part::Kv { first_block: 3, blocks: 2, first_layer: 1, layers: 2 };
        let of = |region: &Region| of_part(region, (3, &held), 3, part, &mut Vec::new()).expect("there");
        let whole = of(&region);
        // Layers 1 and 2 of block 1 are 4 and 5 in the region; of block 0, 1 and 2.
        for (block, counts) in [(0, false), (1, true), (2, true), (3, false), (4, true), (5, true)] {
            for at in [0, 63, 64, 199] {
                let mut changed = bytes.clone();
                changed[at] ^= 1;
                region.fill(block, &changed).expect("there");
                assert_eq!(of(&region) != whole, counts, "byte {at} of {block}");
                region.fill(block, &bytes).expect("there");
            }
        }
        let token = |id| SampledToken { id, logprob: -0.5, top: Vec::new() };
        assert_ne!(of_tail(&[token(1)]), of_tail(&[token(2)]));
        assert_ne!(of_tail(&[]), of_tail(&[token(0)]));
    }
}
