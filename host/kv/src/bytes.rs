//! How many bytes is a token of KV, and how many blocks does a device hold?

use penstock_base::limits::POOL_BLOCKS_MAX;

/// What determines the size of grouped-query KV. Sliding windows, latent attention and hybrids need their own formula.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct KvShape {
    /// Attention layers that keep KV.
    pub layers: u32,
    /// KV heads, which may be fewer than query heads.
    pub kv_heads: u32,
    /// Elements of one head.
    pub head_dim: u32,
    /// Bytes of one element.
    pub dtype_bytes: u32,
}

impl KvShape {
    /// Bytes of one token: keys and values, all layers.
    pub fn token_bytes(&self) -> u64 {
        u64::from(self.layers) * self.layer_page_bytes(1)
    }

    /// Bytes of one block in one layer.
    pub fn layer_page_bytes(&self, block_size_tokens: u32) -> u64 {
        2 * u64::from(block_size_tokens)
            * u64::from(self.kv_heads)
            * u64::from(self.head_dim)
            * u64::from(self.dtype_bytes)
    }

    /// Bytes of one block, all layers.
    pub fn block_bytes(&self, block_size_tokens: u32) -> u64 {
        u64::from(self.layers) * self.layer_page_bytes(block_size_tokens)
    }

    /// Whole blocks that fit into `bytes`, at most [`POOL_BLOCKS_MAX`]; none for a shape without size.
    pub fn pool_blocks(&self, bytes: u64, block_size_tokens: u32) -> u32 {
        let fit = bytes.checked_div(self.block_bytes(block_size_tokens)).unwrap_or(0);
        fit.min(u64::from(POOL_BLOCKS_MAX)) as u32
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const QWEN3_8B: KvShape = KvShape { layers: 36, kv_heads: 8, head_dim: 128, dtype_bytes: 2 };

    #[test]
    fn a_token_of_qwen3_8b_is_147456_bytes() {
        assert_eq!(QWEN3_8B.token_bytes(), 147_456);
        let with_query_heads = KvShape { kv_heads: 32, ..QWEN3_8B };
        assert_eq!(with_query_heads.token_bytes(), 589_824, "query heads instead of KV heads is the classic mistake");
    }

    #[test]
    fn a_context_of_8192_tokens_is_an_eighth_more_than_a_gibibyte() {
        assert_eq!(8_192 * QWEN3_8B.token_bytes(), 1_207_959_552);
        assert_eq!(1_207_959_552u64 * 1_000, 1_125 << 30, "1.125 GiB");
        assert_eq!(512 * QWEN3_8B.block_bytes(16), 1_207_959_552);
    }

    #[test]
    fn a_page_of_one_layer_and_the_pool_round_down() {
        assert_eq!(QWEN3_8B.layer_page_bytes(16), 2 * 16 * 8 * 128 * 2);
        let block = QWEN3_8B.block_bytes(16);
        assert_eq!(QWEN3_8B.pool_blocks(block * 5 - 1, 16), 4);
        assert_eq!(QWEN3_8B.pool_blocks(u64::MAX, 1), POOL_BLOCKS_MAX);
        assert_eq!(KvShape { layers: 0, ..QWEN3_8B }.pool_blocks(1 << 40, 16), 0);
    }
}
