//! A complete Llama model of a few kilobytes: seeded weights, byte-level tokenizer, ChatML template. For tests of loaders and executors.

use super::quantise::quantise;
use super::write::{GgufWriter, MetaValue};
use crate::dtype::DType;

/// Shape of a generated model.
#[derive(Clone, Copy, Debug)]
pub struct TinyLlama {
    /// Layers.
    pub layers: usize,
    /// Query heads.
    pub heads: usize,
    /// Key and value heads.
    pub kv_heads: usize,
    /// Elements of a head; a multiple of 32 over all heads for quantised types.
    pub head_dim: usize,
    /// Width of the feed-forward block.
    pub feed_forward: usize,
    /// Context length.
    pub context_length: usize,
    /// Storage of matrices; norms are F32.
    pub dtype: DType,
    /// Whether the output projection is the embedding.
    pub tied_head: bool,
    /// Seed of the weights.
    pub seed: u64,
}

impl Default for TinyLlama {
    fn default() -> Self {
        Self {
            layers: 2,
            heads: 4,
            kv_heads: 2,
            head_dim: 16,
            feed_forward: 96,
            context_length: 256,
            dtype: DType::Q4_1,
            tied_head: true,
            seed: 1,
        }
    }
}

/// Control tokens of the generated vocabulary, ids 0, 1 and 2; the 256 bytes follow, then a few merged tokens.
pub const TINY_SPECIALS: [&str; 3] = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"];

/// Merges of the generated vocabulary, in rank order.
const MERGES: [&str; 5] = ["h e", "l l", "he ll", "hell o", "Ġ w"];

/// The ChatML template, as most small models carry it.
pub const TINY_TEMPLATE: &str = "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}";

impl TinyLlama {
    /// Width of the residual stream.
    pub const fn hidden(&self) -> usize {
        self.heads * self.head_dim
    }

    /// Tokens of the vocabulary.
    pub const fn vocab(&self) -> usize {
        TINY_SPECIALS.len() + 256 + MERGES.len()
    }

    /// The model as a GGUF file.
    pub fn file(&self) -> Vec<u8> {
        let mut writer = self.writer();
        self.tensors(&mut writer);
        writer.finish()
    }

    /// The metadata alone; a test may change it before adding tensors.
    pub fn writer(&self) -> GgufWriter {
        let mut writer = GgufWriter::new();
        writer
            .meta("general.architecture", "llama")
            .meta("general.name", "tiny")
            .meta("llama.block_count", self.layers as u32)
            .meta("llama.context_length", self.context_length as u32)
            .meta("llama.embedding_length", self.hidden() as u32)
            .meta("llama.feed_forward_length", self.feed_forward as u32)
            .meta("llama.attention.head_count", self.heads as u32)
            .meta("llama.attention.head_count_kv", self.kv_heads as u32)
            .meta("llama.attention.key_length", self.head_dim as u32)
            .meta("llama.attention.value_length", self.head_dim as u32)
            .meta("llama.attention.layer_norm_rms_epsilon", 1e-5f32)
            .meta("llama.rope.dimension_count", self.head_dim as u32)
            .meta("llama.rope.freq_base", 10_000f32)
            .meta("llama.vocab_size", self.vocab() as u32)
            .meta("tokenizer.ggml.model", "gpt2")
            .meta("tokenizer.ggml.pre", "smollm")
            .meta("tokenizer.ggml.tokens", MetaValue::Strings(vocabulary()))
            .meta(
                "tokenizer.ggml.token_type",
                MetaValue::I32s((0..self.vocab()).map(|id| if id < 3 { 3 } else { 1 }).collect()),
            )
            .meta("tokenizer.ggml.merges", MetaValue::Strings(MERGES.map(str::to_owned).to_vec()))
            .meta("tokenizer.ggml.bos_token_id", 1u32)
            .meta("tokenizer.ggml.eos_token_id", 2u32)
            .meta("tokenizer.ggml.add_bos_token", false)
            .meta("tokenizer.chat_template", TINY_TEMPLATE);
        writer
    }

    /// Adds all tensors.
    pub fn tensors(&self, writer: &mut GgufWriter) {
        let mut random = Random(self.seed);
        let (hidden, ff) = (self.hidden(), self.feed_forward);
        let kv = self.kv_heads * self.head_dim;
        let mut matrix = |writer: &mut GgufWriter, name: &str, rows: usize, cols: usize| {
            let scale = (3.0 / cols as f32).sqrt();
            let values: Vec<f32> = (0..rows * cols).map(|_| random.symmetric() * scale).collect();
            writer.tensor(name, rows, cols, self.dtype, quantise(self.dtype, &values));
        };
        let norm = |writer: &mut GgufWriter, name: &str| {
            let values: Vec<f32> = (0..hidden).map(|at| 0.75 + (at % 8) as f32 / 16.0).collect();
            writer.tensor(name, 0, hidden, DType::F32, quantise(DType::F32, &values));
        };
        matrix(writer, "token_embd.weight", self.vocab(), hidden);
        for layer in 0..self.layers {
            norm(writer, &format!("blk.{layer}.attn_norm.weight"));
            norm(writer, &format!("blk.{layer}.ffn_norm.weight"));
            for (part, rows, cols) in [
                ("attn_q", hidden, hidden),
                ("attn_k", kv, hidden),
                ("attn_v", kv, hidden),
                ("attn_output", hidden, hidden),
                ("ffn_gate", ff, hidden),
                ("ffn_up", ff, hidden),
                ("ffn_down", hidden, ff),
            ] {
                matrix(writer, &format!("blk.{layer}.{part}.weight"), rows, cols);
            }
        }
        norm(writer, "output_norm.weight");
        if !self.tied_head {
            matrix(writer, "output.weight", self.vocab(), hidden);
        }
    }
}

fn vocabulary() -> Vec<String> {
    // GPT-2's byte alphabet: printable bytes are themselves, the others follow from U+0100 in order.
    let mut next = 0x100;
    let alphabet = (0..=255u8).map(|byte| {
        let code = if matches!(byte, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff) {
            u32::from(byte)
        } else {
            next += 1;
            next - 1
        };
        char::from_u32(code).map(String::from).unwrap_or_default()
    });
    let merged = MERGES.iter().map(|merge| merge.replace(' ', ""));
    TINY_SPECIALS.iter().map(|text| (*text).to_owned()).chain(alphabet).chain(merged).collect()
}

/// SplitMix64: a fixed sequence for a seed, on every machine.
#[derive(Clone, Debug)]
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// In -1..1.
    fn symmetric(&mut self) -> f32 {
        (self.next() >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    }
}
