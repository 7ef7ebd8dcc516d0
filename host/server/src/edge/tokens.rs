//! `/v1/models`, `/tokenize` and `/detokenize`.

use std::sync::Arc;

use axum::Json;
use axum::body::Body;
use axum::extract::{Path, State};
use axum::http::HeaderMap;
use penstock_model::Specials;
use serde_json::{Value, json};

use super::app::App;
use super::caller::Caller;
use super::error::ApiError;
use super::{body, prompt};

fn card(app: &App) -> Value {
    json!({
        "id": app.model_name,
        "object": "model",
        "created": app.started_s,
        "owned_by": "penstock",
        "max_model_len": app.context_tokens_max,
    })
}

/// `GET /v1/models`.
pub async fn models(State(app): State<Arc<App>>, headers: HeaderMap) -> Result<Json<Value>, ApiError> {
    Caller::of(&app, &headers)?;
    Ok(Json(json!({"object": "list", "data": [card(&app)]})))
}

/// `GET /v1/models/{model}`.
pub async fn model(
    State(app): State<Arc<App>>,
    Path(asked): Path<String>,
    headers: HeaderMap,
) -> Result<Json<Value>, ApiError> {
    Caller::of(&app, &headers)?;
    if asked == app.model_name { Ok(Json(card(&app))) } else { Err(ApiError::no_model(&asked, &app.model_name)) }
}

/// `POST /tokenize`: `{"prompt": ".."}` or `{"messages": [..]}` to ids.
pub async fn tokenize(State(app): State<Arc<App>>, headers: HeaderMap, body: Body) -> Result<Json<Value>, ApiError> {
    let entered = body::enter(&app, &headers, body).await?;
    let mut fields = entered.held.fields(&app).await?;
    let specials = fields.flag("add_special_tokens")?.unwrap_or(true);
    let ids: Vec<u32> = match fields.text("prompt")? {
        Some(text) => {
            app.tokenise(text.len(), move |model| {
                let tokenizer = model.tokenizer();
                let ids = if specials {
                    tokenizer.encode_prompt(&text, Specials::Parsed)
                } else {
                    tokenizer.encode(&text, Specials::Parsed)
                };
                Ok(ids?)
            })
            .await?
        }
        None => prompt::chat(&app, &mut fields).await?.ids.to_vec(),
    };
    Ok(Json(json!({"count": ids.len(), "max_model_len": app.context_tokens_max, "tokens": ids})))
}

/// `POST /detokenize`: `{"tokens": [..]}` to text.
pub async fn detokenize(State(app): State<Arc<App>>, headers: HeaderMap, body: Body) -> Result<Json<Value>, ApiError> {
    let entered = body::enter(&app, &headers, body).await?;
    let mut fields = entered.held.fields(&app).await?;
    let tokenizer = app.model.tokenizer();
    let vocabulary = tokenizer.vocab_len() as u64;
    let bad = || ApiError::bad_field("tokens", format!("`tokens` must be a list of token ids below {vocabulary}"));
    let Some(Value::Array(ids)) = fields.take("tokens") else { return Err(bad()) };
    let ids = ids.iter().map(|id| id.as_u64().filter(|id| *id < vocabulary).map(|id| id as u32).ok_or_else(bad));
    let ids = ids.collect::<Result<Vec<_>, _>>()?;
    let text = app.tokenise(ids.len(), move |model| Ok(model.tokenizer().decode_lossy(&ids))).await?;
    Ok(Json(json!({"prompt": text})))
}
