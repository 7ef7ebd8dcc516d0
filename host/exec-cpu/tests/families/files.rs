//! The tiny models of `tests/oracle/families.jsonl` as files: weights by the formula that `tests/oracle/families.py` states.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use penstock_model::DType;
use penstock_model::gguf::write::{GgufWriter, MetaValue};
use safetensors::tensor::{Dtype, TensorView};
use serde_json::{Value, json};

/// One model: what it is, and what transformers answered.
pub struct Tiny {
    pub name: String,
    pub config: Value,
    pub tokens: Vec<u32>,
    /// Logits at every position.
    pub logits: Vec<f32>,
    seed: u64,
    /// What a GGUF file stores as the divisors of the rotary frequencies.
    divisors: Option<Vec<f32>>,
}

struct Tensor {
    rows: usize,
    cols: usize,
    values: Vec<f32>,
}

/// All models of the oracle's files.
pub fn read() -> Vec<Tiny> {
    let oracle = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/oracle");
    let lines = fs::read_to_string(oracle.join("families.jsonl")).expect("is part of the repository");
    let bytes = fs::read(oracle.join("families.bin")).expect("is part of the repository");
    let mut logits = bytes.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().expect("four bytes")));
    let parse = |line: &str| {
        let line: Value = serde_json::from_str(line).expect("JSON");
        let numbers = |value: &Value| value.as_array().map(|list| list.iter().filter_map(Value::as_f64).collect());
        let tokens: Vec<f64> = numbers(&line["tokens"]).expect("tokens");
        let vocab = line["config"]["vocab_size"].as_u64().expect("a number") as usize;
        Tiny {
            name: line["name"].as_str().expect("a name").to_owned(),
            config: line["config"].clone(),
            logits: logits.by_ref().take(tokens.len() * vocab).collect(),
            tokens: tokens.into_iter().map(|token| token as u32).collect(),
            seed: line["seed"].as_u64().expect("a number"),
            divisors: numbers(&line["divisors"]).map(|list: Vec<f64>| list.into_iter().map(|d| d as f32).collect()),
        }
    };
    let all: Vec<Tiny> = lines.lines().map(parse).collect();
    assert!(logits.next().is_none(), "the whole file was read");
    all
}

/// The `index + 1`-th number of SplitMix64 from `seed`.
fn splitmix64(seed: u64, index: u64) -> u64 {
    let mut z = seed.wrapping_add((index + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

fn fnv1a64(text: &str) -> u64 {
    text.bytes()
        .fold(0xcbf2_9ce4_8422_2325, |state, byte| (state ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3))
}

/// A value as bfloat16, which must hold it.
fn upper_half(value: f32) -> u16 {
    assert_eq!(value.to_bits() & 0xffff, 0, "bfloat16 does not hold {value}");
    (value.to_bits() >> 16) as u16
}

impl Tiny {
    pub fn vocab(&self) -> usize {
        self.number("vocab_size")
    }

    fn number(&self, key: &str) -> usize {
        self.config[key].as_u64().unwrap_or_else(|| panic!("{key} of {}", self.name)) as usize
    }

    fn kind(&self) -> &str {
        self.config["model_type"].as_str().expect("a name")
    }

    fn is_gemma(&self) -> bool {
        self.kind() == "gemma3_text"
    }

    fn tensor(&self, name: &str, rows: usize, cols: usize) -> Tensor {
        let seed = fnv1a64(name) ^ self.seed;
        let is_wide = name == "model.embed_tokens.weight" && !self.is_gemma();
        let value = |index: usize| {
            let z = splitmix64(seed, index as u64);
            let fraction = (z >> 40) as f32 / (1u64 << 24) as f32;
            if rows > 1 {
                let quant = ((z >> 56) as i32 - 128).max(-127);
                let quant = if index.is_multiple_of(32) { if quant < 0 { -127 } else { 127 } } else { quant };
                quant as f32 / if is_wide { 128.0 } else { 512.0 }
            } else if name.ends_with(".bias") || self.is_gemma() {
                fraction - 0.5
            } else {
                fraction + 0.5
            }
        };
        Tensor { rows, cols, values: (0..rows * cols).map(value).collect() }
    }

    /// Every tensor of the model, by its Hugging Face name.
    fn tensors(&self) -> BTreeMap<String, Tensor> {
        let (hidden, ff, dim) = (self.number("hidden_size"), self.number("intermediate_size"), self.number("head_dim"));
        let (q, kv) = (self.number("num_attention_heads") * dim, self.number("num_key_value_heads") * dim);
        let has_bias = self.config["attention_bias"] == json!(true);
        let mut shapes = vec![("model.embed_tokens.weight".to_owned(), self.vocab(), hidden)];
        shapes.push(("model.norm.weight".to_owned(), 1, hidden));
        if self.config["tie_word_embeddings"] != json!(true) {
            shapes.push(("lm_head.weight".to_owned(), self.vocab(), hidden));
        }
        for layer in 0..self.number("num_hidden_layers") {
            let mut add = |part: &str, rows, cols| shapes.push((format!("model.layers.{layer}.{part}"), rows, cols));
            add("input_layernorm.weight", 1, hidden);
            add("post_attention_layernorm.weight", 1, hidden);
            for (part, rows, cols) in [("q", q, hidden), ("k", kv, hidden), ("v", kv, hidden), ("o", hidden, q)] {
                add(&format!("self_attn.{part}_proj.weight"), rows, cols);
                if has_bias || (self.kind() == "qwen2" && part != "o") {
                    add(&format!("self_attn.{part}_proj.bias"), 1, rows);
                }
            }
            for (part, rows, cols) in [("gate", ff, hidden), ("up", ff, hidden), ("down", hidden, ff)] {
                add(&format!("mlp.{part}_proj.weight"), rows, cols);
            }
            if self.kind() == "qwen3" || self.is_gemma() {
                add("self_attn.q_norm.weight", 1, dim);
                add("self_attn.k_norm.weight", 1, dim);
            }
            if self.is_gemma() {
                add("pre_feedforward_layernorm.weight", 1, hidden);
                add("post_feedforward_layernorm.weight", 1, hidden);
            }
        }
        shapes.into_iter().map(|(name, rows, cols)| (name.clone(), self.tensor(&name, rows, cols))).collect()
    }

    /// A Hugging Face folder with that config.json.
    pub fn folder(&self, config: &Value) -> tempfile::TempDir {
        self.folder_of(config, Dtype::F32)
    }

    /// The same with matrices in bfloat16, which holds the formula's weights exactly; vectors stay f32, which it would not.
    pub fn folder_in_bf16(&self) -> tempfile::TempDir {
        self.folder_of(&self.config, Dtype::BF16)
    }

    fn folder_of(&self, config: &Value, matrices: Dtype) -> tempfile::TempDir {
        let folder = tempfile::tempdir().expect("a folder");
        let write =
            |name: &str, value: &Value| fs::write(folder.path().join(name), value.to_string()).expect("written");
        write("config.json", config);
        // Any tokenizer will do: nothing here reads text.
        write(
            "tokenizer.json",
            &json!({"version": "1.0", "added_tokens": [], "decoder": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true},
                "model": {"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": []}}),
        );
        let bytes: BTreeMap<String, (Dtype, Vec<usize>, Vec<u8>)> = self
            .tensors()
            .into_iter()
            .map(|(name, tensor)| {
                let shape = if tensor.rows == 1 { vec![tensor.cols] } else { vec![tensor.rows, tensor.cols] };
                let dtype = if tensor.rows == 1 { Dtype::F32 } else { matrices };
                let values = tensor.values.iter();
                let bytes = match dtype {
                    Dtype::BF16 => values.flat_map(|v| upper_half(*v).to_le_bytes()).collect(),
                    _ => values.flat_map(|v| v.to_le_bytes()).collect(),
                };
                (name, (dtype, shape, bytes))
            })
            .collect();
        let views = bytes.iter().map(|(name, (dtype, shape, bytes))| {
            (name.as_str(), TensorView::new(*dtype, shape.clone(), bytes).expect("whole values"))
        });
        let file = safetensors::serialize(views, None).expect("serialises");
        fs::write(folder.path().join("model.safetensors"), file).expect("written");
        folder
    }

    /// The model as converters write it to GGUF; `None` where the format cannot hold it.
    pub fn gguf(&self) -> Option<Vec<u8>> {
        let architecture = match self.kind() {
            "llama" | "mistral" => "llama",
            "gemma3_text" => "gemma3",
            _ if self.config["use_sliding_window"] == json!(true) => return None,
            other => other,
        };
        let mut writer = GgufWriter::new();
        self.metadata(&mut writer, architecture);
        for (name, mut tensor) in self.tensors() {
            let of_pairs = name.contains(".q_proj.") || name.contains(".k_proj.");
            if architecture == "llama" && of_pairs {
                self.interleave(&mut tensor);
            }
            if self.is_gemma() && tensor.rows == 1 {
                tensor.values.iter_mut().for_each(|value| *value += 1.0);
            }
            let rows = if tensor.rows == 1 { 0 } else { tensor.rows };
            let bytes = tensor.values.iter().flat_map(|v| v.to_le_bytes()).collect();
            writer.tensor(&self.gguf_name(&name), rows, tensor.cols, DType::F32, bytes);
        }
        if let Some(divisors) = &self.divisors {
            let bytes = divisors.iter().flat_map(|v| v.to_le_bytes()).collect();
            writer.tensor("rope_freqs.weight", 0, divisors.len(), DType::F32, bytes);
        }
        Some(writer.finish())
    }

    /// The rows of each head from halves to pairs: i and i + half become 2i and 2i + 1.
    fn interleave(&self, tensor: &mut Tensor) {
        let dim = self.number("head_dim");
        // A bias has a value where a matrix has a row.
        let width = if tensor.rows == 1 { 1 } else { tensor.cols };
        let old = tensor.values.clone();
        for (row, values) in tensor.values.chunks_mut(width).enumerate() {
            let (head, at) = (row / dim * dim, row % dim);
            let from = head + at / 2 + at % 2 * (dim / 2);
            values.copy_from_slice(&old[from * width..][..width]);
        }
    }

    fn metadata(&self, writer: &mut GgufWriter, architecture: &str) {
        let key = |key: &str| format!("{architecture}.{key}");
        let number = |name: &str| self.number(name) as u32;
        let rope = &self.config["rope_parameters"];
        let rope = rope.get("full_attention").unwrap_or(rope);
        let float = |value: &Value| value.as_f64().expect("a number") as f32;
        let spellings: Vec<String> = (0..self.vocab() as u8).map(|at| char::from(b'!' + at).to_string()).collect();
        writer
            .meta("general.architecture", architecture)
            .meta(&key("block_count"), number("num_hidden_layers"))
            .meta(&key("context_length"), number("max_position_embeddings"))
            .meta(&key("embedding_length"), number("hidden_size"))
            .meta(&key("feed_forward_length"), number("intermediate_size"))
            .meta(&key("attention.head_count"), number("num_attention_heads"))
            .meta(&key("attention.head_count_kv"), number("num_key_value_heads"))
            .meta(&key("attention.key_length"), number("head_dim"))
            .meta(&key("attention.value_length"), number("head_dim"))
            .meta(&key("attention.layer_norm_rms_epsilon"), float(&self.config["rms_norm_eps"]))
            .meta(&key("rope.freq_base"), float(&rope["rope_theta"]))
            .meta("tokenizer.ggml.model", "gpt2")
            .meta("tokenizer.ggml.pre", "qwen2")
            .meta("tokenizer.ggml.tokens", MetaValue::Strings(spellings))
            .meta("tokenizer.ggml.merges", MetaValue::Strings(Vec::new()));
        if rope["rope_type"] == json!("linear") {
            writer.meta(&key("rope.scaling.type"), "linear").meta(&key("rope.scaling.factor"), float(&rope["factor"]));
        }
        if self.config["sliding_window"].is_u64() {
            writer.meta(&key("attention.sliding_window"), number("sliding_window"));
        }
        if self.is_gemma() {
            let scale = 1.0 / float(&self.config["query_pre_attn_scalar"]).sqrt();
            writer.meta(&key("attention.scale"), scale).meta(&key("attention.sliding_window_pattern"), 3u32);
        }
    }

    fn gguf_name(&self, name: &str) -> String {
        let part = |part: &str| match part {
            "input_layernorm.weight" => "attn_norm.weight".to_owned(),
            "post_attention_layernorm.weight" if self.is_gemma() => "post_attention_norm.weight".to_owned(),
            "post_attention_layernorm.weight" | "pre_feedforward_layernorm.weight" => "ffn_norm.weight".to_owned(),
            "post_feedforward_layernorm.weight" => "post_ffw_norm.weight".to_owned(),
            other => other
                .replace("self_attn.o_proj", "attn_output")
                .replace("self_attn.", "attn_")
                .replace("mlp.", "ffn_")
                .replace("_proj", ""),
        };
        match (name, name.strip_prefix("model.layers.").and_then(|rest| rest.split_once('.'))) {
            ("model.embed_tokens.weight", _) => "token_embd.weight".to_owned(),
            ("model.norm.weight", _) => "output_norm.weight".to_owned(),
            ("lm_head.weight", _) => "output.weight".to_owned(),
            (_, Some((layer, rest))) => format!("blk.{layer}.{}", part(rest)),
            (other, None) => panic!("{other} has no name in GGUF"),
        }
    }
}
