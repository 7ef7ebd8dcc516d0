//! Hugging Face folders: the same model as a GGUF file gives, and refusals by name.
#![allow(clippy::unwrap_used)]

mod support;

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use penstock_model::gguf::tiny::TinyLlama;
use penstock_model::{
    DType, LayerPart, Model, ModelError, OpenOptions, RopeLayout, Specials, TensorRole, Tokenizer, Weights,
};
use safetensors::tensor::{Dtype, TensorView};
use serde_json::{Value, json};

fn open(folder: &Path) -> Result<Model, ModelError> {
    Model::open(folder, &OpenOptions::default(), &mut |_, _| {})
}

fn config() -> Value {
    json!({
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "intermediate_size": 96,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "rope_scaling": null, "vocab_size": 264,
        "tie_word_embeddings": true, "hidden_act": "silu", "eos_token_id": [2, 0], "some_new_key": {"x": 1}
    })
}

/// tokenizer.json for the tiny vocabulary, built from what the GGUF tokenizer spells.
fn tokenizer_json(tokenizer: &Tokenizer) -> Value {
    let printable = |b: u8| matches!(b, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff);
    let hidden: Vec<u8> = (0..=255).filter(|b| !printable(*b)).collect();
    let spell = |b: &u8| match hidden.iter().position(|h| h == b) {
        Some(at) => char::from_u32(0x100 + at as u32).unwrap(),
        None => char::from(*b),
    };
    let vocab: BTreeMap<String, u32> = (3..tokenizer.vocab_len() as u32)
        .map(|id| (tokenizer.token_bytes(id).iter().map(spell).collect(), id))
        .collect();
    let added = |id: u32, text: &str| json!({"id": id, "content": text, "single_word": false, "lstrip": false, "rstrip": false, "normalized": false, "special": true});
    let mut vocab = json!(vocab);
    let specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"];
    for (id, text) in specials.iter().enumerate() {
        vocab[*text] = json!(id);
    }
    json!({
        "version": "1.0", "truncation": {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0},
        "padding": null, "normalizer": null, "post_processor": null,
        "added_tokens": specials.iter().enumerate().map(|(id, text)| added(id as u32, text)).collect::<Vec<_>>(),
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [
            {"type": "Digits", "individual_digits": true},
            {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true}]},
        "decoder": {"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true},
        "model": {"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "vocab": vocab,
            "merges": ["h e", "l l", "he ll", "hell o", "Ġ w"]}
    })
}

fn hf_name(layer: usize, part: LayerPart) -> Option<String> {
    let part = match part {
        LayerPart::AttnNorm => "input_layernorm",
        LayerPart::AttnQ => "self_attn.q_proj",
        LayerPart::AttnK => "self_attn.k_proj",
        LayerPart::AttnV => "self_attn.v_proj",
        LayerPart::AttnOutput => "self_attn.o_proj",
        LayerPart::FfnNorm => "post_attention_layernorm",
        LayerPart::FfnGate => "mlp.gate_proj",
        LayerPart::FfnUp => "mlp.up_proj",
        LayerPart::FfnDown => "mlp.down_proj",
        _ => return None,
    };
    Some(format!("model.layers.{layer}.{part}.weight"))
}

/// All tensors of a model under their Hugging Face names, as F32.
fn tensors(weights: &Weights) -> BTreeMap<String, (Vec<usize>, Vec<u8>)> {
    let mut out = BTreeMap::new();
    let mut put = |name: String, role: TensorRole| {
        let view = weights.tensor(role).unwrap();
        let shape = if view.rows == 1 { vec![view.cols] } else { vec![view.rows, view.cols] };
        out.insert(name, (shape, view.to_f32().iter().flat_map(|v| v.to_le_bytes()).collect()));
    };
    put("model.embed_tokens.weight".to_owned(), TensorRole::TokenEmbedding);
    put("model.norm.weight".to_owned(), TensorRole::OutputNorm);
    for layer in 0..weights.layers() {
        for part in LayerPart::ALL {
            if let Some(name) = hf_name(layer, part) {
                put(name, TensorRole::layer(layer, part));
            }
        }
    }
    out
}

fn save(path: &Path, dtype: Dtype, tensors: &BTreeMap<String, (Vec<usize>, Vec<u8>)>) {
    let views = tensors
        .iter()
        .map(|(name, (shape, bytes))| (name.as_str(), TensorView::new(dtype, shape.clone(), bytes).unwrap()));
    fs::write(path, safetensors::serialize(views, None).unwrap()).unwrap();
}

/// A folder with the tiny model, and the GGUF model it was made from.
fn folder() -> (tempfile::TempDir, Model) {
    let gguf = support::open_bytes(&TinyLlama { dtype: DType::F32, ..TinyLlama::default() }.file()).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let write = |name: &str, value: Value| fs::write(folder.path().join(name), value.to_string()).unwrap();
    write("config.json", config());
    write("tokenizer.json", tokenizer_json(gguf.tokenizer()));
    write(
        "tokenizer_config.json",
        json!({
            "bos_token": {"content": "<|im_start|>"}, "eos_token": "<|im_end|>",
            "chat_template": [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "{{ messages[0].content }}"}]
        }),
    );
    save(&folder.path().join("model.safetensors"), Dtype::F32, &tensors(gguf.weights()));
    (folder, gguf)
}

#[test]
fn a_folder_gives_the_model_that_the_file_gives() {
    let (folder, gguf) = folder();
    let model = open(folder.path()).unwrap();
    let same = penstock_model::ModelConfig { rope_layout: RopeLayout::Halves, ..gguf.config().clone() };
    assert_eq!(model.config(), &same);
    for layer in 0..2 {
        for part in LayerPart::ALL {
            let role = TensorRole::layer(layer, part);
            let values = |m: &Model| m.weights().get(role).map(|view| view.to_f32());
            assert_eq!(values(&model), values(&gguf), "{role:?}");
        }
    }
    let (ours, theirs) = (model.tokenizer(), gguf.tokenizer());
    for text in ["hello w12", "<|im_start|>é\n<|im_end|>", "  \u{7f}\u{ad} a longer text than the file's truncation"] {
        for specials in [Specials::Parsed, Specials::AsText] {
            assert_eq!(ours.encode(text, specials).unwrap(), theirs.encode(text, specials).unwrap(), "{text}");
        }
    }
    assert!((0..264).all(|id| ours.token_bytes(id) == theirs.token_bytes(id) && ours.kind(id) == theirs.kind(id)));
    assert_eq!((ours.bos(), ours.eos(), ours.ends(), ours.add_bos()), (Some(1), Some(2), &[0u32, 2][..], false));
    let messages = json!([{"role": "user", "content": "hi"}]);
    let chat = model.chat_template().unwrap().render(&messages, &Default::default(), ours).unwrap();
    assert_eq!(chat.text, "hi");
    // A template file wins over the settings.
    fs::write(folder.path().join("chat_template.jinja"), "file").unwrap();
    let model = open(folder.path()).unwrap();
    assert_eq!(model.chat_template().unwrap().render(&messages, &Default::default(), ours).unwrap().text, "file");
}

/// What can be wrong between an index and its shards, each fault by its name.
fn check_shards(folder: &Path, map: &BTreeMap<String, &str>, weights: &Weights) {
    let index = folder.join("model.safetensors.index.json");
    let write = |map: &BTreeMap<String, &str>| fs::write(&index, json!({"weight_map": map}).to_string()).unwrap();
    let message = || open(folder).unwrap_err().to_string();
    let says = |parts: &[&str]| {
        let message = message();
        assert!(parts.iter().all(|part| message.contains(part)), "{message} should say {parts:?}");
    };
    let (first, second) = (folder.join("a.safetensors"), folder.join("b.safetensors"));
    let (kept_first, kept_second) = (fs::read(&first).unwrap(), fs::read(&second).unwrap());
    let name = "model.layers.0.mlp.up_proj.weight";
    let (holder, other) = if map[name] == "a.safetensors" { ("a", "b") } else { ("b", "a") };

    fs::remove_file(&second).unwrap();
    says(&["shard b.safetensors is missing", "model.safetensors.index.json"]);
    fs::write(&second, &kept_second).unwrap();

    let mut wrong = map.clone();
    wrong.insert(name.to_owned(), if other == "a" { "a.safetensors" } else { "b.safetensors" });
    write(&wrong);
    says(&[&format!("shard {other}.safetensors lacks the tensor {name}"), &format!("{holder}.safetensors has it")]);

    let mut wrong = map.clone();
    wrong.insert("model.layers.9.mlp.up_proj.weight".to_owned(), "a.safetensors");
    write(&wrong);
    says(&["shard a.safetensors lacks the tensor model.layers.9.mlp.up_proj.weight", "no other shard has it"]);

    // Both shards hold the tensors of the first.
    write(map);
    fs::write(&second, &kept_first).unwrap();
    says(&["shard b.safetensors holds the tensor", "which a.safetensors holds as well"]);

    // A tensor that neither index nor model knows, and one of another shape.
    let all = tensors(weights);
    let part = |shard: &str| -> BTreeMap<String, (Vec<usize>, Vec<u8>)> {
        all.iter().filter(|(name, _)| map[*name] == shard).map(|(name, entry)| (name.clone(), entry.clone())).collect()
    };
    let mut more = part("b.safetensors");
    more.insert("model.layers.0.self_attn.sinks".to_owned(), (vec![4], vec![0; 16]));
    save(&second, Dtype::F32, &more);
    says(&["tensor model.layers.0.self_attn.sinks has no place in a llama model"]);
    let mut bent = part("b.safetensors");
    let (bent_name, entry) = bent.iter_mut().find(|(_, (shape, _))| shape.len() == 2).unwrap();
    let bent_name = bent_name.clone();
    entry.0.reverse();
    entry.0[0] *= 2;
    entry.0[1] /= 2;
    save(&second, Dtype::F32, &bent);
    says(&[&format!("tensor {bent_name} has shape"), "where the configuration implies"]);

    fs::write(&second, &kept_second).unwrap();
    assert!(open(folder).is_ok());
}

#[test]
fn shards_are_joined_and_stay_in_their_folder() {
    let (folder, gguf) = folder();
    let whole = open(folder.path()).unwrap().manifest().clone();
    let all = tensors(gguf.weights());
    fs::remove_file(folder.path().join("model.safetensors")).unwrap();
    let mut map: BTreeMap<String, &str> = BTreeMap::new();
    let (first, second): (Vec<_>, Vec<_>) = all.into_iter().enumerate().partition(|(at, _)| at % 2 == 0);
    for (name, part) in [("a.safetensors", first), ("b.safetensors", second)] {
        let part: BTreeMap<_, _> = part.into_iter().map(|(_, entry)| entry).collect();
        map.extend(part.keys().map(|key| (key.clone(), name)));
        save(&folder.path().join(name), Dtype::F32, &part);
    }
    let index = folder.path().join("model.safetensors.index.json");
    fs::write(&index, json!({"weight_map": map}).to_string()).unwrap();
    let sharded = open(folder.path()).unwrap();
    let role = TensorRole::layer(1, LayerPart::FfnDown);
    assert_eq!(sharded.weights().tensor(role).unwrap().to_f32(), gguf.weights().tensor(role).unwrap().to_f32());
    assert_ne!(sharded.manifest().weights, whole.weights);
    assert_eq!(sharded.manifest().tokenizer, whole.tokenizer);

    check_shards(folder.path(), &map, gguf.weights());

    for bad in ["../a.safetensors", "/etc/passwd", "..", ""] {
        fs::write(&index, json!({"weight_map": {"x": bad}}).to_string()).unwrap();
        let message = open(folder.path()).unwrap_err().to_string();
        assert!(message.contains("not a plain file name"), "{message}");
    }
}

#[test]
fn damaged_folders_are_refused() {
    let (folder, gguf) = folder();
    let weights = folder.path().join("model.safetensors");
    let good = fs::read(&weights).unwrap();
    for bad in [&b""[..], &[0xff; 8], &[0xff; 64], &good[..good.len() - 1], &good[..100]] {
        fs::write(&weights, bad).unwrap();
        assert!(open(folder.path()).is_err());
    }
    let mut random = support::Random(5);
    for _ in 0..300 {
        let mut file = good.clone();
        let at = random.below(2_000);
        file[at] = random.next() as u8;
        fs::write(&weights, &file).unwrap();
        let _ = open(folder.path());
    }
    save(&weights, Dtype::I32, &tensors(gguf.weights()));
    let message = open(folder.path()).unwrap_err().to_string();
    assert!(message.contains("stored as I32"), "{message}");
    fs::write(&weights, &good).unwrap();
    assert!(open(folder.path()).is_ok());

    for (name, text) in [("tokenizer.json", "{}"), ("config.json", "{"), ("tokenizer_config.json", "[")] {
        let path = folder.path().join(name);
        let kept = fs::read(&path).unwrap();
        fs::write(&path, text).unwrap();
        let message = open(folder.path()).unwrap_err().to_string();
        assert!(message.contains(name), "{message}");
        fs::remove_file(&path).unwrap();
        if name != "tokenizer_config.json" {
            assert!(matches!(open(folder.path()), Err(ModelError::NotAModel { .. })), "{name}");
        }
        fs::write(&path, kept).unwrap();
    }
    assert!(matches!(open(&folder.path().join("none")), Err(ModelError::Io { .. })));
}

/// A tokenizer of another model has ids that this model has no rows for.
#[test]
fn a_wrong_tokenizer_is_refused() {
    let (folder, gguf) = folder();
    let mut json = tokenizer_json(gguf.tokenizer());
    json["model"]["vocab"]["ĠĠĠĠ"] = json!(264);
    fs::write(folder.path().join("tokenizer.json"), json.to_string()).unwrap();
    let message = open(folder.path()).unwrap_err().to_string();
    assert!(message.contains("belongs to another model"), "{message}");
}

#[test]
fn pinned_weights_must_match() {
    let (folder, _) = folder();
    let digest = open(folder.path()).unwrap().manifest().weights;
    let options = OpenOptions { expect_weights: Some(digest), ..OpenOptions::default() };
    assert!(Model::open(folder.path(), &options, &mut |_, _| {}).is_ok());
    let options = OpenOptions { expect_weights: Some(penstock_model::Digest([7; 32])), ..options };
    let refused = Model::open(folder.path(), &options, &mut |_, _| {});
    assert!(matches!(refused, Err(ModelError::HashMismatch { artefact: "weights", .. })));
}
