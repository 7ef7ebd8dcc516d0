//! The HTTP edge: OpenAI-style API, probes, metrics, and a separate admin listener.

mod admin;
mod answer;
mod app;
mod body;
mod caller;
mod connections;
mod error;
mod fields;
mod generate;
mod idempotency;
mod outgoing;
mod probes;
mod prompt;
mod refusals;
mod request_id;
mod sampling;
mod shape;
mod sse;
mod stalled;
mod submit;
mod tokens;

pub use app::App;
pub use connections::{Listener, Timeouts, serve};

use std::sync::Arc;

use axum::Router;
use axum::routing::{get, post};

use error::ApiError;

/// The public API.
pub fn api(app: Arc<App>) -> Router {
    Router::new()
        .route("/v1/chat/completions", post(generate::chat))
        .route("/v1/completions", post(generate::completions))
        .route("/v1/models", get(tokens::models))
        .route("/v1/models/{*model}", get(tokens::model))
        .route("/tokenize", post(tokens::tokenize))
        .route("/detokenize", post(tokens::detokenize))
        .route("/v1/loads", get(probes::loads))
        .route("/health", get(probes::health))
        .route("/live", get(probes::live))
        .route("/metrics", get(probes::metrics))
        .fallback(async || ApiError::no_path())
        .method_not_allowed_fallback(async || ApiError::wrong_method())
        .layer(axum::middleware::from_fn(request_id::attach))
        .with_state(app)
}

/// What operators may see and do. Served on a listener of its own.
pub fn admin(app: Arc<App>) -> Router {
    Router::new()
        .route("/config", get(admin::config))
        .route("/replicas", get(admin::replicas))
        .route("/policies", get(admin::policies))
        .route("/health", get(probes::health))
        .route("/metrics", get(probes::metrics))
        .fallback(async || ApiError::no_path())
        .method_not_allowed_fallback(async || ApiError::wrong_method())
        .with_state(app)
}
