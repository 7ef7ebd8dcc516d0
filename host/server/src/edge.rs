//! The HTTP edge: OpenAI-style API, probes, metrics, and a separate admin listener.

mod admin;
mod admin_guard;
mod admin_policies;
mod answer;
mod app;
mod body;
mod caller;
mod client_ids;
mod connections;
mod error;
mod fields;
mod generate;
mod idempotency;
mod interrupted;
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

pub use admin_guard::AdminToken;
pub use app::{App, Parts, unix_s};
pub use connections::{Listener, Timeouts, serve};
pub use idempotency::Idempotency;
pub use interrupted::Interrupted;

use std::sync::Arc;

use axum::Router;
use axum::extract::DefaultBodyLimit;
use axum::routing::{get, post, put};

pub use error::ApiError;

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
        .route("/policies", get(admin_policies::list).post(admin_policies::put_set))
        .route("/policies/components/{digest}", put(admin_policies::put_component))
        .route("/policies/rollback", post(admin_policies::roll_back))
        .route("/policies/log", get(admin_policies::log))
        .route("/policies/log/{machine}/{sequence}", get(admin_policies::inputs))
        .route("/policies/explain/{request}", get(admin_policies::explain))
        .route("/policies/{digest}", get(admin_policies::inspect))
        .route("/policies/{digest}/activate", post(admin_policies::activate))
        .route("/health", get(probes::health))
        .route("/metrics", get(probes::metrics))
        .fallback(async || ApiError::no_path())
        .method_not_allowed_fallback(async || ApiError::wrong_method())
        .layer(DefaultBodyLimit::max(admin_policies::BODY_BYTES_MAX))
        .layer(axum::middleware::from_fn_with_state(Arc::clone(&app), admin_guard::guard))
        .with_state(app)
}
