//! Every bound of this crate, with its reason. A model file is input from a stranger; so is every message that is rendered.

/// Most metadata entries of a GGUF file. Real files have 20 to 60; the bound keeps the index small whatever the file says.
pub const GGUF_METADATA_MAX: u64 = 1 << 16;

/// Most tensors of a GGUF file or of a safetensors folder. The largest published models have a few thousand.
pub const TENSORS_MAX: u64 = 1 << 17;

/// Longest metadata key or tensor name in bytes (the GGUF specification's own bound for keys).
pub const GGUF_NAME_BYTES_MAX: u64 = 65_535;

/// Most dimensions of a tensor (the format's bound).
pub const GGUF_DIMENSIONS_MAX: u32 = 4;

/// Deepest nesting of metadata arrays. Nothing real nests; two levels leave room for the specification's wording.
pub const GGUF_ARRAY_DEPTH_MAX: u32 = 2;

/// Largest tensor alignment. Files use 32; a page of 64 KiB is the most a loader could want.
pub const GGUF_ALIGNMENT_MAX: u32 = 1 << 16;

/// Most tokens of a vocabulary. Gemma has 262,144; ids are u32 and tables are sized by this.
pub const VOCABULARY_MAX: usize = 1 << 21;

/// Characters of a token at which it is split to find merges; SentencePiece trains tokens of at most 16 unless told otherwise, and none in
/// use is longer than 128. It bounds the merges that a forged vocabulary of long tokens could ask for.
pub const TOKEN_CHARS_MAX: usize = 256;

/// Most layers: a loader loops and allocates by this number before it has seen a tensor.
pub const LAYERS_MAX: usize = 1_024;

/// Largest width, head count or context length accepted in a configuration, so that products of two fit an i64 with room to spare.
pub const EXTENT_MAX: u64 = 1 << 28;

/// Largest JSON file of a model folder (config, tokenizer, index): the largest tokenizer.json in use is about 35 MB.
pub const JSON_BYTES_MAX: u64 = 128 << 20;

/// Largest chat template. The longest in use (tool calling, many languages) is about 25 kB.
pub const TEMPLATE_BYTES_MAX: usize = 256 << 10;

/// Instructions a chat template may execute for one conversation. About 30 a message is usual; ten thousand messages still fit.
pub const TEMPLATE_FUEL: u64 = 2_000_000;

/// Nesting of one template run, in the engine's units (a loop or condition costs 1, a macro call about 10). Deeper templates do not exist;
/// a stack overflow must not.
pub const TEMPLATE_RECURSION_MAX: usize = 200;

/// Longest rendered conversation in bytes. Longer than the largest context, so that "too long" is said in tokens by admission.
pub const RENDERED_BYTES_MAX: usize = 16 << 20;

/// Most stop strings of one request (OpenAI allows 4; vLLM has no bound). Matching cost is linear in their sum.
pub const STOP_STRINGS_MAX: usize = 16;

/// Longest stop string in bytes; it bounds the text held back.
pub const STOP_BYTES_MAX: usize = 1_024;

/// Longest text encoded at once, in bytes. Far above any context length: a request is bounded by the edge, this guards other callers.
pub const ENCODE_BYTES_MAX: usize = 32 << 20;

/// Most tensors files (shards) of a Hugging Face folder.
pub const SHARDS_MAX: usize = 1_024;

/// Longest header of a safetensors file in bytes (the format's own bound).
pub const SAFETENSORS_HEADER_MAX: u64 = 100_000_000;

const _: () = assert!(STOP_STRINGS_MAX * STOP_BYTES_MAX <= 1 << 20, "the search window of stop strings stays small");
const _: () = assert!(RENDERED_BYTES_MAX <= ENCODE_BYTES_MAX, "what a template may render may be encoded");
