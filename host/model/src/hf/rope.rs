//! Rotary embedding in config.json: `rope_theta` and `rope_scaling` of older files, `rope_parameters` of newer ones, flat or by layer type.

use serde_json::{Map, Value};

use crate::config::{Llama3Rope, RopeScaling};
use crate::error::ModelError;

/// What a file says; `None` where its family's default counts.
pub(super) struct Rope {
    pub theta: Option<f64>,
    pub scaling: RopeScaling,
    /// Base in layers with a window.
    pub window_theta: Option<f64>,
}

/// Reads every spelling in use.
pub(super) fn read(keys: &Map<String, Value>) -> Result<Rope, ModelError> {
    let object = |key: &str| keys.get(key).filter(|value| !value.is_null());
    let by_layer = object("rope_parameters").filter(|value| value.get("full_attention").is_some());
    let local = by_layer.and_then(|value| value.get("sliding_attention"));
    let main = match by_layer {
        Some(value) => value.get("full_attention"),
        None => object("rope_parameters").or_else(|| object("rope_scaling")),
    };
    if let Some(local) = local
        && scaling(local)? != RopeScaling::None
    {
        return Err(unsupported("scaled frequencies in layers with a window".to_owned()));
    }
    let theta_of = |value: Option<&Value>| value?.get("rope_theta")?.as_f64();
    let number = |key: &str| keys.get(key).and_then(Value::as_f64);
    let partial =
        [number("partial_rotary_factor"), main.and_then(|value| value.get("partial_rotary_factor")?.as_f64())];
    if partial.into_iter().flatten().any(|factor| factor != 1.0) {
        return Err(unsupported("rotation of a part of each head (partial_rotary_factor)".to_owned()));
    }
    Ok(Rope {
        theta: theta_of(main).or_else(|| number("rope_theta")),
        scaling: main.map_or(Ok(RopeScaling::None), scaling)?,
        window_theta: theta_of(local).or_else(|| number("rope_local_base_freq")),
    })
}

fn scaling(value: &Value) -> Result<RopeScaling, ModelError> {
    let kind = value.get("rope_type").or_else(|| value.get("type")).and_then(Value::as_str);
    let number = |key: &str| {
        let found = value.get(key).and_then(Value::as_f64);
        found.ok_or_else(|| ModelError::json("config.json", format!("rope scaling lacks the number {key}")))
    };
    match kind {
        Some("default") => Ok(RopeScaling::None),
        Some("linear") => Ok(RopeScaling::Linear(number("factor")? as f32)),
        Some("llama3") => Ok(RopeScaling::Llama3(Llama3Rope {
            factor: number("factor")? as f32,
            low_freq_factor: number("low_freq_factor")? as f32,
            high_freq_factor: number("high_freq_factor")? as f32,
            // Out of range as a whole number is out of range for the check of the configuration, too.
            original_context: number("original_max_position_embeddings")? as usize,
        })),
        // An object of bases alone scales nothing.
        None if value.get("factor").is_none() => Ok(RopeScaling::None),
        other => Err(unsupported(other.unwrap_or("without a type").to_owned())),
    }
}

fn unsupported(name: String) -> ModelError {
    ModelError::Unsupported {
        what: "rope scaling",
        name,
        remedy: "supported are default, linear and llama3 over whole heads; remove it from config.json to serve the original context",
    }
}
