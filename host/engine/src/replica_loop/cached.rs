//! Changes of the prefix cache, on their way to whoever listens to KV events.

use std::collections::HashMap;

use penstock_base::{BlockKey, RequestId};
use penstock_sched::replica::{CacheChange, ReplicaEffect, ReplicaInput};

use super::{Placed, ReplicaLoop};
use crate::cache_events::Told;

/// A block that an answer has filled.
pub(super) struct FilledBlock {
    /// Which answer.
    sequence: u16,
    /// Blocks before it.
    index: u32,
    key: BlockKey,
}

impl ReplicaLoop {
    /// Notes what a step changed, before its requests may be forgotten.
    pub(super) fn tap_changes(&mut self, effects: &[ReplicaEffect]) {
        if !self.tap.is_open() {
            return;
        }
        let (wants_tokens, block) = (self.tap.wants_tokens(), self.config.block_size_tokens as usize);
        for effect in effects {
            let ReplicaEffect::Cached(change) = *effect else { continue };
            let tokens = match change {
                CacheChange::Stored { key, depth_blocks, .. } if wants_tokens => {
                    tokens_of(&self.requests, key, depth_blocks as usize - 1, block).unwrap_or_default()
                }
                _ => Vec::new(),
            };
            self.tap.note(Told { change, tokens });
        }
    }

    /// Remembers which blocks an answer has filled, where their tokens are told.
    pub(super) fn note_filled(&mut self, input: &ReplicaInput) {
        let ReplicaInput::BlockKeys { seq, first, keys } = input else { return };
        if !self.tap.wants_tokens() {
            return;
        }
        if let Some(placed) = self.requests.get_mut(&seq.request) {
            let filled = (*first..).zip(keys).map(|(index, key)| FilledBlock { sequence: seq.index, index, key: *key });
            placed.behind.extend(filled);
        }
    }
}

/// Tokens of the block with this key and so many blocks before it, from the request that has it: a prompt's, or an answer's.
fn tokens_of(requests: &HashMap<RequestId, Placed>, key: BlockKey, index: usize, block: usize) -> Option<Vec<u32>> {
    let place = index * block..(index + 1) * block;
    requests.values().find_map(|placed| {
        let prompt = &placed.context.prompt;
        if placed.context.manifest.keys.get(index) == Some(&key) {
            // Output of an earlier attempt stands behind the prompt.
            let output = placed.outputs.first().and_then(Option::as_deref).unwrap_or_default();
            let tokens: Vec<u32> = prompt.iter().chain(output).skip(place.start).take(block).copied().collect();
            return (tokens.len() == block).then_some(tokens);
        }
        let filled = placed.behind.iter().find(|filled| filled.index as usize == index && filled.key == key)?;
        let output = placed.outputs.get(usize::from(filled.sequence))?.as_ref()?;
        let tokens: Vec<u32> = prompt.iter().chain(output).skip(place.start).take(block).copied().collect();
        (tokens.len() == block).then_some(tokens)
    })
}
