/// Sizes of one executor, fixed when it is built.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Geometry {
    /// Tokens in a KV block.
    pub block_size_tokens: u32,
    /// Blocks in the pool.
    pub blocks: u32,
    /// KV bytes of one token over all layers.
    pub kv_token_bytes: u64,
    /// Most sequences at once.
    pub slots: u32,
    /// Most query tokens in a step.
    pub step_tokens_max: u32,
    /// Longest sequence, prompt and output together.
    pub context_tokens_max: u32,
    /// Token ids are below this.
    pub vocabulary: u32,
}
