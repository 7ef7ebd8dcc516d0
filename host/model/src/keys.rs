//! Identity of cached KV blocks: are these tokens, under this model and this trust group, the ones already computed?
//!
//! `key = first 16 bytes of SHA-256(parent ‖ tokens ‖ spans)`: the parent's 16 bytes, each token as u32 little endian, and each embedding
//! span that touches the block as `start ‖ length ‖ skipped` (u32 LE each: place of its part in the block, tokens of that part, tokens of the
//! span before it) and its content hash (32 bytes). The root parent is [`root_key`]. Blocks have one size per pool, so the encoding is unambiguous. The same vectors are computed
//! independently in `tests/block_keys.py`.

use penstock_base::BlockKey;
use sha2::{Digest as _, Sha256};

use crate::manifest::Namespace;

/// Domain of the root hash; a change of the encoding above changes it.
const ROOT_DOMAIN: &[u8] = b"penstock-block-root-1\0";

/// An embedding span (image, audio) inside a prompt: its tokens are placeholders, so its content must enter the key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SpanKey {
    /// First token of the span, from the start of the prompt.
    pub start: u32,
    /// Tokens it covers.
    pub length: u32,
    /// SHA-256 of the content.
    pub content: [u8; 32],
}

/// The parent of every first block: namespace and trust group. Equal prompts of two trust groups share no key.
pub fn root_key(namespace: &Namespace, trust_group: &[u8]) -> BlockKey {
    let mut hash = Sha256::new();
    hash.update(ROOT_DOMAIN);
    hash.update(namespace.bytes());
    hash.update((trust_group.len() as u64).to_le_bytes());
    hash.update(trust_group);
    first_16(hash)
}

/// Keys of all full blocks of `tokens`. `block_size` is in tokens; 0 gives no keys. `spans` are sorted by start.
pub fn block_keys(root: BlockKey, block_size: usize, tokens: &[u32], spans: &[SpanKey]) -> Vec<BlockKey> {
    let mut chain = BlockKeyChain::new(root, block_size);
    chain.extend(tokens, spans)
}

/// Extends a key chain token by token: the prompt at once, then what is generated. A partly filled block has no key.
#[derive(Clone, Debug)]
pub struct BlockKeyChain {
    /// Key of the last full block, or the root.
    parent: BlockKey,
    block_size: usize,
    /// Tokens seen in all, for the place of spans.
    seen: u64,
    /// Tokens of the open block.
    open: Vec<u32>,
}

impl BlockKeyChain {
    /// A chain with no tokens yet.
    pub fn new(root: BlockKey, block_size: usize) -> Self {
        Self { parent: root, block_size, seen: 0, open: Vec::with_capacity(block_size) }
    }

    /// Adds a prompt and returns the keys of the blocks it fills. `spans` are placed from the start of the chain, sorted by start.
    pub fn extend(&mut self, tokens: &[u32], spans: &[SpanKey]) -> Vec<BlockKey> {
        let full = (self.open.len() + tokens.len()).checked_div(self.block_size).unwrap_or(0);
        let mut keys = Vec::with_capacity(full);
        keys.extend(tokens.iter().filter_map(|&token| self.push_with(token, spans)));
        keys
    }

    /// Adds one generated token; returns the key of the block it fills, if it fills one.
    pub fn push(&mut self, token: u32) -> Option<BlockKey> {
        self.push_with(token, &[])
    }

    /// Key of the last full block, or the root.
    pub fn parent(&self) -> BlockKey {
        self.parent
    }

    /// Tokens added so far.
    pub fn tokens(&self) -> u64 {
        self.seen
    }

    fn push_with(&mut self, token: u32, spans: &[SpanKey]) -> Option<BlockKey> {
        self.seen += 1;
        if self.block_size == 0 {
            return None;
        }
        self.open.push(token);
        if self.open.len() < self.block_size {
            return None;
        }
        let mut hash = Sha256::new();
        hash.update(self.parent.0);
        for token in &self.open {
            hash.update(token.to_le_bytes());
        }
        let (first, end) = (self.seen - self.block_size as u64, self.seen);
        for span in spans {
            let (start, stop) = (u64::from(span.start), u64::from(span.start) + u64::from(span.length));
            if start < end && stop > first {
                // The part inside this block, and where in the content it begins: halves of one image differ.
                let inside = start.max(first);
                hash.update(((inside - first) as u32).to_le_bytes());
                hash.update(((stop.min(end) - inside) as u32).to_le_bytes());
                hash.update(((inside - start) as u32).to_le_bytes());
                hash.update(span.content);
            }
        }
        self.open.clear();
        self.parent = first_16(hash);
        Some(self.parent)
    }
}

fn first_16(hash: Sha256) -> BlockKey {
    let digest = hash.finalize();
    let mut key = [0; 16];
    key.copy_from_slice(&digest[..16]);
    BlockKey(key)
}
