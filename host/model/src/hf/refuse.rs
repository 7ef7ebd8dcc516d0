//! What config.json may say that this version does not compute. Everything is refused by name, before a byte of weights is read.

use serde_json::{Map, Value};

use super::config::{FAMILIES, Family};
use crate::config::SUPPORTED_FAMILIES;
use crate::error::ModelError;

/// When a key's value means that the feature is used.
#[derive(Clone, Copy)]
enum Used {
    /// Present and not null.
    Present,
    /// True.
    True,
    /// A number above 0.
    Positive,
}

impl Used {
    fn by(self, value: &Value) -> bool {
        match self {
            Used::Present => !value.is_null(),
            Used::True => value.as_bool() == Some(true),
            Used::Positive => value.as_f64().is_some_and(|number| number > 0.0),
        }
    }
}

/// A key that says the model needs what is not there.
struct Refusal {
    key: &'static str,
    used: Used,
    what: &'static str,
    remedy: &'static str,
}

const fn refusal(key: &'static str, used: Used, what: &'static str, remedy: &'static str) -> Refusal {
    Refusal { key, used, what, remedy }
}

/// What is asked before the family: it tells more than a name that is not known.
const PARTS: [Refusal; 7] = [
    refusal("vision_config", Used::Present, "vision part", TEXT_ONLY),
    refusal("audio_config", Used::Present, "audio part", TEXT_ONLY),
    refusal("is_encoder_decoder", Used::True, "encoder and decoder", TEXT_ONLY),
    refusal("num_local_experts", Used::Positive, "mixture of experts", DENSE),
    refusal("num_experts", Used::Positive, "mixture of experts", DENSE),
    refusal("n_routed_experts", Used::Positive, "mixture of experts", DENSE),
    refusal("alibi", Used::True, "position embedding", "supported is the rotary one"),
];

const DETAILS: [Refusal; 5] = [
    refusal(
        "auto_map",
        Used::Present,
        "custom code",
        "code of a model is never run; when its class is the stock one, remove auto_map from config.json",
    ),
    refusal("mlp_bias", Used::True, "bias", "supported are biases of attention"),
    refusal("attn_logit_softcapping", Used::Present, "soft cap", "supported are models without soft caps"),
    refusal("final_logit_softcapping", Used::Present, "soft cap", "supported are models without soft caps"),
    refusal("use_bidirectional_attention", Used::True, "attention", "supported is causal attention"),
];

const TEXT_ONLY: &str = "supported are decoders of text alone: Llama, Mistral, Qwen2, Qwen3, Gemma 3 (text)";
const DENSE: &str = "supported are dense models: Llama, Mistral, Qwen2, Qwen3, Gemma 3 (text)";

/// The family of a configuration, or what of it is not supported.
pub(super) fn family(keys: &Map<String, Value>) -> Result<&'static Family, ModelError> {
    refuse_any(keys, &PARTS)?;
    let unknown = |name: &str| ModelError::Unsupported {
        what: "model architecture",
        name: name.to_owned(),
        remedy: SUPPORTED_FAMILIES,
    };
    let model_type = keys.get("model_type").and_then(Value::as_str);
    let model_type = model_type.ok_or_else(|| ModelError::json("config.json", "missing field `model_type`"))?;
    let family = FAMILIES.iter().find(|family| family.model_type == model_type).ok_or_else(|| unknown(model_type))?;
    let classes = keys.get("architectures").and_then(Value::as_array).into_iter().flatten();
    if let Some(other) = classes.filter_map(Value::as_str).find(|class| *class != family.class) {
        return Err(unknown(other));
    }
    refuse_any(keys, &DETAILS)?;
    refuse_activation(keys, family)?;
    refuse_quantisation(keys)?;
    Ok(family)
}

fn refuse_any(keys: &Map<String, Value>, table: &[Refusal]) -> Result<(), ModelError> {
    match table.iter().find(|refusal| keys.get(refusal.key).is_some_and(|value| refusal.used.by(value))) {
        None => Ok(()),
        Some(found) => {
            Err(ModelError::Unsupported { what: found.what, name: found.key.to_owned(), remedy: found.remedy })
        }
    }
}

fn refuse_activation(keys: &Map<String, Value>, family: &Family) -> Result<(), ModelError> {
    let (key, wanted, remedy) = match family.model_type {
        "gemma3_text" => ("hidden_activation", "gelu_pytorch_tanh", "supported for Gemma 3 is gelu_pytorch_tanh"),
        _ => ("hidden_act", "silu", "supported is silu"),
    };
    match keys.get(key).and_then(Value::as_str).filter(|act| *act != wanted) {
        None => Ok(()),
        Some(other) => Err(ModelError::Unsupported { what: "activation", name: other.to_owned(), remedy }),
    }
}

fn refuse_quantisation(keys: &Map<String, Value>) -> Result<(), ModelError> {
    match keys.get("quantization_config").filter(|value| !value.is_null()) {
        None => Ok(()),
        Some(value) => Err(ModelError::Unsupported {
            what: "quantisation (quantization_config)",
            name: value.get("quant_method").and_then(Value::as_str).unwrap_or("unnamed").to_owned(),
            remedy: "supported are F32, F16 and BF16 safetensors, and quantised GGUF files",
        }),
    }
}
