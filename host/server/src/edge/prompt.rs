//! From a body's `messages` or `prompt` to token ids.

use std::sync::Arc;

use penstock_model::{ChatOptions, CivilTime, Specials};
use serde_json::Value;

use super::app::{App, unix_s};
use super::error::ApiError;
use super::fields::Fields;

const ROLES: &[&str] = &["system", "developer", "user", "assistant"];
const MESSAGES_MAX: usize = 4_096;
const TEMPLATE_KWARGS_BYTES_MAX: usize = 16 << 10;

/// One tokenised prompt.
#[derive(Clone, Debug)]
pub struct Prompt {
    /// Token ids, at least one.
    pub ids: Arc<[u32]>,
    /// Its text, for `echo`.
    pub text: String,
}

/// Takes `messages` and renders them once.
///
/// # Errors
/// 400 for bad messages, 422 for content that is not text.
pub async fn chat(app: &App, body: &mut Fields) -> Result<Prompt, ApiError> {
    let messages = match body.take("messages") {
        Some(Value::Array(messages)) if !messages.is_empty() => messages,
        Some(_) => return Err(ApiError::bad_field("messages", "`messages` must be a non-empty list")),
        None => return Err(ApiError::bad_field("messages", "`messages` is required")),
    };
    if messages.len() > MESSAGES_MAX {
        return Err(ApiError::bad_field("messages", format!("`messages` has at most {MESSAGES_MAX} entries")));
    }
    let mut bytes = 0;
    let messages = messages.into_iter().enumerate().map(|(at, message)| {
        let message = message_of(at, message)?;
        bytes += message
            .as_object()
            .into_iter()
            .flatten()
            .filter_map(|(_, value)| value.as_str())
            .map(str::len)
            .sum::<usize>();
        Ok(message)
    });
    let messages = Value::Array(messages.collect::<Result<_, ApiError>>()?);
    let variables = body.object("chat_template_kwargs")?.map(Fields::rest).unwrap_or_default();
    let size = serde_json::to_string(&variables).map_or(usize::MAX, |text| text.len());
    if size > TEMPLATE_KWARGS_BYTES_MAX {
        let message = format!("`chat_template_kwargs` has at most {TEMPLATE_KWARGS_BYTES_MAX} bytes");
        return Err(ApiError::bad_field("chat_template_kwargs", message));
    }
    let options = ChatOptions {
        add_generation_prompt: body.flag("add_generation_prompt")?.unwrap_or(true),
        tools: None,
        variables,
        now: Some(CivilTime::from_unix_seconds(unix_s() as i64)),
    };
    app.tokenise(bytes, move |model| {
        let rendered = model.chat_template()?.render(&messages, &options, model.tokenizer())?;
        let ids = model.tokenizer().encode_chat(&rendered)?;
        prompt(ids, rendered.text)
    })
    .await
}

/// One message with its content as a string.
fn message_of(at: usize, message: Value) -> Result<Value, ApiError> {
    let place = format!("messages[{at}]");
    let Value::Object(mut message) = message else {
        return Err(ApiError::bad_field(&place, format!("`{place}` must be an object")));
    };
    for field in ["tool_calls", "function_call", "tool_call_id", "audio"] {
        let is_set = message.remove(field).is_some_and(|value| !value.is_null());
        if is_set {
            let name = format!("{place}.{field}");
            return Err(ApiError::unsupported(&name, format!("`{name}` is not supported yet")));
        }
    }
    let role_name = format!("{place}.role");
    let role = match message.get("role") {
        Some(Value::String(role)) if ROLES.contains(&role.as_str()) => role.clone(),
        Some(Value::String(role)) if role == "tool" || role == "function" => {
            return Err(ApiError::unsupported(&role_name, "messages of tools are not supported yet"));
        }
        _ => {
            return Err(ApiError::bad_field(&role_name, format!("`{role_name}` must be one of {}", ROLES.join(", "))));
        }
    };
    // Templates know "system"; "developer" is its newer name.
    let role = if role == "developer" { "system".to_owned() } else { role };
    let content = content_of(&format!("{place}.content"), message.remove("content"))?;
    message.insert("role".to_owned(), Value::String(role));
    message.insert("content".to_owned(), Value::String(content));
    Ok(Value::Object(message))
}

fn content_of(place: &str, content: Option<Value>) -> Result<String, ApiError> {
    let what = || ApiError::bad_field(place, format!("`{place}` must be a string or a list of text parts"));
    let parts = match content {
        Some(Value::String(text)) => return Ok(text),
        Some(Value::Array(parts)) => parts,
        _ => return Err(what()),
    };
    let mut text = String::new();
    for part in &parts {
        match (part["type"].as_str(), part["text"].as_str()) {
            (Some("text"), Some(piece)) => text.push_str(piece),
            (Some(kind), _) if kind != "text" => {
                return Err(ApiError::unsupported(place, "this model takes text parts only"));
            }
            _ => return Err(what()),
        }
    }
    Ok(text)
}

/// Takes `prompt`: a string, a list of strings, token ids, or a list of lists of token ids.
///
/// # Errors
/// 400 for anything else, and for an empty prompt: there is no token to continue from.
pub async fn completion(app: &App, body: &mut Fields) -> Result<Vec<Prompt>, ApiError> {
    let most = app.config.limits.prompts_max;
    let bad = |message: String| ApiError::bad_field("prompt", message);
    let shapes = || bad("`prompt` must be a string, a list of strings, or token ids".to_owned());
    let items = match body.take("prompt") {
        Some(Value::Array(items)) if items.first().is_some_and(Value::is_number) => vec![Value::Array(items)],
        Some(Value::Array(items)) => items,
        Some(text @ Value::String(_)) => vec![text],
        Some(_) => return Err(shapes()),
        None => return Err(bad("`prompt` is required".to_owned())),
    };
    if items.is_empty() || items.len() > most {
        return Err(bad(format!("`prompt` must hold 1 to {most} prompts")));
    }
    let mut prompts = Vec::with_capacity(items.len());
    for item in items {
        prompts.push(match item {
            Value::String(text) => {
                app.tokenise(text.len(), move |model| {
                    let ids = model.tokenizer().encode_prompt(&text, Specials::Parsed)?;
                    prompt(ids, text)
                })
                .await?
            }
            Value::Array(ids) => from_ids(app, &ids)?,
            _ => return Err(shapes()),
        });
    }
    Ok(prompts)
}

fn from_ids(app: &App, ids: &[Value]) -> Result<Prompt, ApiError> {
    if ids.len() > app.context_tokens_max as usize {
        let message = format!("{} token ids cannot fit a context of {}", ids.len(), app.context_tokens_max);
        return Err(ApiError::never_fits(message));
    }
    let vocabulary = app.model.tokenizer().vocab_len() as u64;
    let what = || ApiError::bad_field("prompt", format!("token ids are whole numbers below {vocabulary}"));
    let ids = ids.iter().map(|id| id.as_u64().filter(|id| *id < vocabulary).map(|id| id as u32).ok_or_else(what));
    let ids: Vec<u32> = ids.collect::<Result<_, _>>()?;
    let text = app.model.tokenizer().decode_lossy(&ids);
    prompt(ids, text)
}

fn prompt(ids: Vec<u32>, text: String) -> Result<Prompt, ApiError> {
    if ids.is_empty() {
        return Err(ApiError::bad_field("prompt", "the prompt is empty: there is no token to continue from"));
    }
    Ok(Prompt { ids: ids.into(), text })
}
