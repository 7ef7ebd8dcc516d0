//! The admin listener: effective configuration and replicas.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use axum::http::header;
use axum::response::IntoResponse;
use serde_json::{Value, json};

use super::app::App;
use super::error::ApiError;

/// `GET /config`: every key as it is in force, in the form of the file.
pub async fn config(State(app): State<Arc<App>>) -> Result<impl IntoResponse, ApiError> {
    let text = toml::to_string(&app.config).map_err(|_| ApiError::internal("the configuration cannot be shown"))?;
    // Not a key: the set may change while everything else stays.
    let text = app.publication.comments(&app.engine) + &text;
    Ok(([(header::CONTENT_TYPE, "application/toml; charset=utf-8")], text))
}

/// `GET /replicas`: state and blocks of each, and what is known of other processes.
pub async fn replicas(State(app): State<Arc<App>>) -> Json<Value> {
    let status = app.engine.status();
    let replicas = status.replicas.iter().map(|replica| {
        let load = &replica.load;
        json!({
            "replica": replica.replica.0,
            "epoch": replica.epoch.0,
            "state": replica.state.name(),
            "running_requests": load.running_requests,
            "ready_requests": load.ready_requests,
            "blocks": {
                "total": load.total_blocks, "active": load.active_blocks, "cached": load.cached_blocks,
                "free": load.free_blocks, "reclaimable": load.reclaimable_blocks, "in_transfer": load.transfer_blocks,
                "reserved": load.reserved_blocks,
            },
            "step_us": load.step.as_us(),
        })
    });
    // How KV gets from the replicas here to others, and why so.
    let transfers = app.engine.ways().into_iter().map(|way| {
        let kind = way.kind.map(|kind| kind.to_string());
        json!({"from": way.from.0, "to": way.to.0, "transport": kind, "why": way.why})
    });
    let transfers: Vec<Value> = transfers.collect();
    let mut shown = json!({
        "replicas": replicas.collect::<Vec<_>>(),
        "waiting_requests": status.queue.waiting_requests,
        "placed_requests": status.queue.placed_requests,
        "tenants": app.tenants().len(),
        "transfers": transfers,
    });
    if let Some((name, of_others)) = app.cluster.shown() {
        shown[name] = of_others;
    }
    Json(shown)
}
