//! The admin listener's paths about policies: what decides, what is known, and how it changes.

use std::sync::Arc;

use axum::Json;
use axum::body::Bytes;
use axum::extract::{Path, RawQuery, State};
use axum::http::StatusCode;
use penstock_base::RequestId;
use penstock_policy_api::{Decision, Question};
use serde_json::{Value, json};

use super::app::App;
use super::error::ApiError;
use crate::policies::{By, Fault, document, story};

/// Largest body: a component.
pub const BODY_BYTES_MAX: usize = document::COMPONENT_BYTES_MAX as usize;

type Answer = Result<Json<Value>, ApiError>;

/// `GET /policies`: what decides, by seat; known sets and components; what happened lately.
pub async fn list(State(app): State<Arc<App>>) -> Answer {
    aside(app, |app| Ok(app.publication.list(&app.engine))).await
}

/// `GET /policies/{digest}`: a set or a component. The beginning of a digest will do where it is the only one.
pub async fn inspect(State(app): State<Arc<App>>, Path(digest): Path<String>) -> Answer {
    aside(app, move |app| app.publication.inspect(&whole(app, &digest))).await
}

/// `PUT /policies/components/{digest}`: keeps a component under its SHA-256.
pub async fn put_component(State(app): State<Arc<App>>, Path(digest): Path<String>, body: Bytes) -> Answer {
    aside(app, move |app| {
        let found = document::digest_of(&body);
        if digest.strip_prefix("sha256:").unwrap_or(&digest) != found {
            return Err(Fault::Refused(format!("the body's digest is {found}, not {digest}")));
        }
        app.publication.load_component(&body)
    })
    .await
}

/// `POST /policies`: keeps a set, written as JSON.
pub async fn put_set(State(app): State<Arc<App>>, body: Bytes) -> Answer {
    aside(app, move |app| {
        let text = std::str::from_utf8(&body).map_err(|_| Fault::Refused("the body is not UTF-8".to_owned()))?;
        let set = document::parse(text, true).map_err(Fault::Refused)?;
        Ok(json!({"digest": app.publication.load_set(&set)?}))
    })
    .await
}

/// `POST /policies/{digest}/activate`: puts a known set in force on every machine, or nowhere.
pub async fn activate(State(app): State<Arc<App>>, Path(digest): Path<String>) -> Answer {
    aside(app, move |app| {
        let digest = whole(app, &digest);
        let generation = app.publication.activate(&app.engine, &digest, By::Admin)?;
        Ok(json!({"generation": generation, "digest": digest}))
    })
    .await
}

/// `POST /policies/rollback`: returns to the set that was in force before.
pub async fn roll_back(State(app): State<Arc<App>>) -> Answer {
    aside(app, |app| {
        let (digest, generation) = app.publication.roll_back(&app.engine, By::Admin)?;
        Ok(json!({"generation": generation, "digest": digest}))
    })
    .await
}

/// `GET /policies/log?n=20&question=routing&seat=routing&machine=gateway&faults=true&since=17`: the last decisions of all machines.
pub async fn log(State(app): State<Arc<App>>, RawQuery(query): RawQuery) -> Answer {
    let mut wanted = story::Wanted { count: 20, ..story::Wanted::default() };
    for (key, value) in query.iter().flat_map(|query| query.split('&')).filter_map(|pair| pair.split_once('=')) {
        let known = |name: &str, names: &[&str]| match names.contains(&value) {
            true => Ok(Some(value.to_owned())),
            false => Err(ApiError::bad_field(name, format!("{name} is one of {}", names.join(", ")))),
        };
        match key {
            "n" => wanted.count = value.parse().map_err(|_| ApiError::bad_field("n", "n is a number of decisions"))?,
            "question" => wanted.question = known("question", &Question::ALL.map(Question::name))?,
            "seat" => wanted.seat = known("seat", &Decision::ALL.map(Decision::name))?,
            "machine" => wanted.machine = Some(value.replace("%20", " ")),
            "faults" => wanted.faults = value == "true",
            "since" => {
                let since = value.parse().map_err(|_| ApiError::bad_field("since", "since is a decision's number"))?;
                wanted.since = Some(since);
            }
            _ => return Err(ApiError::bad_field(key, "the log takes n, question, seat, machine, faults and since")),
        }
    }
    aside(app, move |app| Ok(story::log(&app.engine, &wanted))).await
}

/// `GET /policies/log/{machine}/{sequence}`: everything that the policy was told for one decision.
pub async fn inputs(State(app): State<Arc<App>>, Path((machine, sequence)): Path<(String, u64)>) -> Answer {
    aside(app, move |app| story::inputs(&app.engine, &machine, sequence).map_err(Fault::Unknown)).await
}

/// `GET /policies/explain/{request}`: the story of one request, by our id or by the client's `x-request-id`.
pub async fn explain(State(app): State<Arc<App>>, Path(request): Path<String>) -> Answer {
    aside(app, move |app| {
        let named = app.client_ids.named(&request);
        let Some(number) = named.first().copied().or_else(|| own_id(&request)) else {
            return Err(Fault::Unknown(format!(
                "request {request:?} (name it by the `x-request-id` that its client gave (the last 8,192 are known), by the id of \
                 the answer (chatcmpl-…), or by its number)"
            )));
        };
        let mut told = story::explain(&app.engine, number).map_err(Fault::Unknown)?;
        if named.len() > 1 {
            let others: Vec<_> = named.iter().skip(1).take(16).map(|other| other.0.to_string()).collect();
            told["others"] = json!(others);
        }
        Ok(told)
    })
    .await
}

/// Our id, as the log and the answers write it.
fn own_id(text: &str) -> Option<RequestId> {
    let hexadecimal = text.strip_prefix("chatcmpl-").or_else(|| text.strip_prefix("cmpl-"));
    match hexadecimal {
        Some(digits) => u64::from_str_radix(digits, 16).ok().map(RequestId),
        None => text.parse().ok().map(RequestId),
    }
}

/// Off the runtime's workers: compiling takes its time, and so does waiting for machines.
async fn aside(app: Arc<App>, work: impl FnOnce(&App) -> Result<Value, Fault> + Send + 'static) -> Answer {
    let done = tokio::task::spawn_blocking(move || work(&app)).await;
    match done {
        Ok(done) => done.map(Json).map_err(|fault| error_of(&fault)),
        Err(_) => Err(ApiError::internal("the policy plane failed")),
    }
}

fn whole(app: &App, digest: &str) -> String {
    app.publication.whole_digest(digest).unwrap_or_else(|| digest.strip_prefix("sha256:").unwrap_or(digest).to_owned())
}

fn error_of(fault: &Fault) -> ApiError {
    let (status, code) = match fault {
        Fault::Refused(_) => (StatusCode::UNPROCESSABLE_ENTITY, "policy_refused"),
        Fault::Unknown(_) => (StatusCode::NOT_FOUND, "policy_not_found"),
        Fault::Full(_) => (StatusCode::INSUFFICIENT_STORAGE, "policies_full"),
        Fault::NothingBefore => (StatusCode::CONFLICT, "nothing_before"),
        Fault::NativeOnly(_) => (StatusCode::NOT_IMPLEMENTED, "native_only"),
    };
    let kind = if status.is_server_error() { "server_error" } else { "invalid_request_error" };
    ApiError { status, kind, code, param: None, message: fault.to_string(), retry_after_s: None }
}
