//! What is not run is refused by name, from both formats, and the refusal says what would run.
#![allow(clippy::unwrap_used)]

mod support;

use std::fs;

use penstock_model::gguf::tiny::TinyLlama;
use penstock_model::gguf::write::MetaValue;
use penstock_model::{Model, OpenOptions};
use serde_json::{Value, json};

fn config() -> Value {
    json!({
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "intermediate_size": 96,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "vocab_size": 264, "tie_word_embeddings": true, "hidden_act": "silu"
    })
}

/// What opening a folder of this config.json says. The folder has nothing else: these refusals come before any weight is looked at.
fn refusal(config: &Value) -> String {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("config.json"), config.to_string()).unwrap();
    Model::open(folder.path(), &OpenOptions::default(), &mut |_, _| {}).expect_err("there are no weights").to_string()
}

#[test]
fn config_json_is_refused_by_name() {
    let weights_are_next = refusal(&config());
    assert!(weights_are_next.contains("has no model.safetensors"), "{weights_are_next}");
    let families = "LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM and Gemma3ForCausalLM";
    let table: [(Value, &str, &str); 33] = [
        (json!({"model_type": "mamba"}), "architecture: mamba", families),
        (json!({"model_type": "phi3"}), "architecture: phi3", families),
        (json!({"architectures": ["LlamaForSequenceClassification"]}), "LlamaForSequenceClassification", families),
        (json!({"model_type": null}), "model_type", "model_type"),
        (json!({"model_type": "mixtral", "num_local_experts": 8}), "mixture of experts: num_local_experts", "dense"),
        (json!({"model_type": "qwen3_moe", "num_experts": 128}), "mixture of experts: num_experts", "dense"),
        (
            json!({"model_type": "deepseek_v3", "n_routed_experts": 256}),
            "mixture of experts: n_routed_experts",
            "dense",
        ),
        (json!({"model_type": "gemma3", "vision_config": {}}), "vision part: vision_config", "text alone"),
        (json!({"model_type": "qwen2_audio", "audio_config": {}}), "audio part: audio_config", "text alone"),
        (json!({"model_type": "t5", "is_encoder_decoder": true}), "encoder and decoder", "text alone"),
        (json!({"model_type": "falcon", "alibi": true}), "position embedding: alibi", "rotary"),
        (json!({"auto_map": {"AutoModel": "modeling_x.X"}}), "custom code: auto_map", "never run"),
        (json!({"mlp_bias": true}), "bias: mlp_bias", "biases of attention"),
        (json!({"attn_logit_softcapping": 50.0}), "soft cap: attn_logit_softcapping", "without soft caps"),
        (json!({"final_logit_softcapping": 30.0}), "soft cap: final_logit_softcapping", "without soft caps"),
        (json!({"use_bidirectional_attention": true}), "attention: use_bidirectional_attention", "causal"),
        (json!({"hidden_act": "gelu"}), "activation: gelu", "silu"),
        (
            json!({"quantization_config": {"quant_method": "awq"}}),
            "(quantization_config): awq",
            "BF16 safetensors, and quantised GGUF",
        ),
        (json!({"quantization_config": {"quant_method": "gptq"}}), "(quantization_config): gptq", "GGUF"),
        (json!({"quantization_config": {"quant_method": "fp8"}}), "(quantization_config): fp8", "GGUF"),
        (json!({"quantization_config": {}}), "(quantization_config): unnamed", "GGUF"),
        (
            json!({"rope_scaling": {"type": "dynamic", "factor": 2.0}}),
            "rope scaling: dynamic",
            "default, linear and llama3",
        ),
        (
            json!({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}),
            "rope scaling: yarn",
            "default, linear and llama3",
        ),
        (json!({"rope_parameters": {"rope_type": "longrope"}}), "rope scaling: longrope", "default, linear and llama3"),
        (json!({"rope_scaling": {"factor": 2.0}}), "rope scaling: without a type", "default, linear and llama3"),
        (
            json!({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}),
            "lacks the number low_freq_factor",
            "config.json",
        ),
        (json!({"rope_scaling": {"rope_type": "linear", "factor": -1.0}}), "Linear(-1.0)", "rope scaling"),
        (json!({"partial_rotary_factor": 0.5}), "partial_rotary_factor", "whole heads"),
        (
            json!({"model_type": "qwen3", "architectures": null, "layer_types": ["full_attention", "linear_attention"]}),
            "linear_attention",
            "sliding_attention",
        ),
        (
            json!({"model_type": "gemma3_text", "architectures": null, "hidden_activation": "gelu"}),
            "activation: gelu",
            "gelu_pytorch_tanh",
        ),
        (json!({"num_key_value_heads": 3}), "3 does not divide", "kv heads"),
        (json!({"num_attention_heads": 0}), "heads", "0"),
        (json!({"hidden_size": 1u64 << 40}), "hidden size", "outside"),
    ];
    for (changes, name, remedy) in table {
        let mut changed = config();
        changes.as_object().unwrap().iter().for_each(|(key, value)| changed[key] = value.clone());
        let message = refusal(&changed);
        assert!(message.contains(name), "{message} should name {name}");
        assert!(message.contains(remedy), "{message} should say {remedy}");
    }
}

#[test]
fn pickled_weights_are_refused_with_a_reason() {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("config.json"), config().to_string()).unwrap();
    fs::write(folder.path().join("pytorch_model.bin"), "PK").unwrap();
    let message = Model::open(folder.path(), &OpenOptions::default(), &mut |_, _| {}).unwrap_err().to_string();
    assert!(message.contains("pickled weights are not read"), "{message}");
}

#[test]
fn gguf_metadata_is_refused_by_name() {
    let table: [(&str, MetaValue, &str, &str); 15] = [
        ("general.architecture", "mamba".into(), "architecture: mamba", "llama, qwen2, qwen3 and gemma3"),
        ("general.architecture", "gemma2".into(), "architecture: gemma2", "llama, qwen2, qwen3 and gemma3"),
        ("llama.expert_count", 8u32.into(), "mixture of experts: llama.expert_count", "dense"),
        ("llama.attn_logit_softcapping", 50f32.into(), "soft cap: llama.attn_logit_softcapping", "without soft caps"),
        ("llama.final_logit_softcapping", 30f32.into(), "soft cap: llama.final_logit_softcapping", "without soft caps"),
        ("llama.attention.max_alibi_bias", 8f32.into(), "position embedding: llama.attention.max_alibi_bias", "rotary"),
        ("llama.attention.clamp_kqv", 8f32.into(), "llama.attention.clamp_kqv", "without clamped values"),
        ("llama.logit_scale", 0.5f32.into(), "llama.logit_scale", "without one"),
        ("llama.residual_scale", 0.2f32.into(), "llama.residual_scale", "without one"),
        ("llama.attention.causal", false.into(), "llama.attention.causal = false", "causal attention"),
        ("llama.rope.scaling.type", "yarn".into(), "rope scaling: yarn", "none, linear and frequency divisors"),
        ("llama.rope.scaling.type", "longrope".into(), "rope scaling: longrope", "none, linear and frequency divisors"),
        ("split.count", 3u32.into(), "one part of 3", "gguf-split --merge"),
        ("llama.attention.value_length", 8u32.into(), "value heads of another size", "equal head sizes"),
        ("tokenizer.ggml.model", "t5".into(), "tokenizer (tokenizer.ggml.model): t5", "gpt2"),
    ];
    let tiny = TinyLlama::default();
    for (key, value, name, remedy) in table {
        let mut writer = tiny.writer();
        writer.replace(key, value);
        tiny.tensors(&mut writer);
        let message = support::open_bytes(&writer.finish()).expect_err(key).to_string();
        assert!(message.contains(name), "{message} should name {name}");
        assert!(message.contains(remedy), "{message} should say {remedy}");
    }
}

#[test]
fn a_tensor_without_a_place_is_refused() {
    let tiny = TinyLlama::default();
    let mut writer = tiny.writer();
    tiny.tensors(&mut writer);
    writer.tensor("blk.1.attn_sinks.weight", 0, 4, penstock_model::DType::F32, vec![0; 16]);
    let message = support::open_bytes(&writer.finish()).unwrap_err().to_string();
    assert!(message.contains("tensor blk.1.attn_sinks.weight has no place in a llama model"), "{message}");
}
