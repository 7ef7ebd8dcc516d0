//! Probes, load and metrics: for balancers, operators and other routers.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::IntoResponse;
use serde_json::{Value, json};

use super::app::{App, unix_s};

/// `GET /health`: 200 when this process may get traffic, else 503 with the reason.
pub async fn health(State(app): State<Arc<App>>) -> impl IntoResponse {
    let status = app.engine.status();
    let reason = match &status {
        status if status.ready => None,
        status if !status.live => Some("the engine does not run"),
        status if status.draining => Some("draining"),
        status if status.stuck => Some("work waits and nothing moves"),
        _ => Some("no replica is ready"),
    };
    match reason {
        None => (StatusCode::OK, Json(json!({"status": "ok"}))),
        Some(reason) => (StatusCode::SERVICE_UNAVAILABLE, Json(json!({"status": "not ready", "reason": reason}))),
    }
}

/// `GET /live`: 200 while the process can answer and its engine lives.
pub async fn live(State(app): State<Arc<App>>) -> impl IntoResponse {
    if app.engine.status().live { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE }
}

/// `GET /metrics`: Prometheus text.
pub async fn metrics(State(app): State<Arc<App>>) -> impl IntoResponse {
    ([(header::CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")], app.engine.metrics_text())
}

/// `GET /v1/loads`: one entry a replica, in the shape SGLang's routers read.
pub async fn loads(State(app): State<Arc<App>>) -> Json<Value> {
    let status = app.engine.status();
    let mut running_sum = 0;
    let replicas = status.replicas.iter().map(|replica| {
        let load = &replica.load;
        let block = u64::from(replica.block_size_tokens);
        running_sum += load.running_requests;
        json!({
            "dp_rank": replica.replica.0,
            "state": replica.state.name(),
            "num_running_reqs": load.running_requests,
            "num_waiting_reqs": load.ready_requests,
            "num_used_tokens": u64::from(load.active_blocks) * block,
            "max_total_num_tokens": u64::from(load.total_blocks) * block,
            "token_usage": f64::from(load.active_blocks) / f64::from(load.total_blocks.max(1)),
            "gen_throughput": load.decode_tokens_per_sec,
            "max_running_requests": replica.slots,
        })
    });
    let replicas: Vec<Value> = replicas.collect();
    let total_blocks = status.sum(|load| u64::from(load.total_blocks)).max(1);
    Json(json!({
        "timestamp": unix_s(),
        "dp_rank_count": replicas.len(),
        "loads": replicas,
        "aggregate": {
            "total_running_reqs": running_sum,
            "total_waiting_reqs": status.queue.waiting_requests as u64 + status.sum(|load| u64::from(load.ready_requests)),
            "avg_token_usage": status.sum(|load| u64::from(load.active_blocks)) as f64 / total_blocks as f64,
            "gen_throughput": status.sum(|load| load.decode_tokens_per_sec),
        },
    }))
}
