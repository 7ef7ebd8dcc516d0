//! A worker's HTTP: probes from the first moment, metrics once it runs. Whoever wants answers asks a gateway.

use std::sync::{Arc, OnceLock};

use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse as _, Response};
use axum::routing::get;
use axum::{Json, Router};
use penstock_engine::Engine;
use serde_json::json;

use super::duty::Duty;
use crate::edge::ApiError;

/// What the handlers share.
pub struct WorkerEdge {
    /// How far the worker is.
    pub duty: Arc<Duty>,
    /// Once it runs.
    pub engine: OnceLock<Arc<Engine>>,
}

/// The listener of probes and metrics.
pub fn router(edge: Arc<WorkerEdge>) -> Router {
    Router::new()
        .route("/health", get(health))
        .route("/live", get(live))
        .route("/metrics", get(metrics))
        .fallback(async || ApiError::no_path())
        .method_not_allowed_fallback(async || ApiError::wrong_method())
        .with_state(edge)
}

/// `GET /health`: 200 when gateways may send work, else 503 with the reason.
async fn health(State(edge): State<Arc<WorkerEdge>>) -> Response {
    let state = edge.duty.state_name();
    if state == "ready" {
        return (StatusCode::OK, Json(json!({"status": "ok"}))).into_response();
    }
    (StatusCode::SERVICE_UNAVAILABLE, Json(json!({"status": "not ready", "reason": state}))).into_response()
}

/// `GET /live`: 200 while the process can answer and, once it has one, its engine lives.
async fn live(State(edge): State<Arc<WorkerEdge>>) -> StatusCode {
    let is_live = edge.engine.get().is_none_or(|engine| engine.status().live);
    if is_live { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE }
}

/// `GET /metrics`: Prometheus text, 503 before the engine runs.
async fn metrics(State(edge): State<Arc<WorkerEdge>>) -> Response {
    let Some(engine) = edge.engine.get() else {
        let reason = edge.duty.state_name();
        return (StatusCode::SERVICE_UNAVAILABLE, Json(json!({"status": "not ready", "reason": reason})))
            .into_response();
    };
    edge.duty.count();
    ([(header::CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")], engine.metrics_text()).into_response()
}
