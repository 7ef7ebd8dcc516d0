//! `/v1/chat/completions` and `/v1/completions`: one path from body to answer.

use std::sync::Arc;
use std::time::Duration;

use axum::Extension;
use axum::body::Body;
use axum::extract::State;
use axum::http::{HeaderMap, HeaderValue, Response, header};
use axum::response::IntoResponse as _;
use bytes::Bytes;
use penstock_base::Instant;
use tokio::sync::OwnedSemaphorePermit;

use super::answer::{Answer, Part};
use super::app::{App, unix_s};
use super::caller::Caller;
use super::error::ApiError;
use super::fields::Fields;
use super::idempotency::{Claim, Claimed};
use super::prompt::{self, Prompt};
use super::sampling::Generation;
use super::shape::{Api, Choice, Envelope};
use super::stalled::GivenUp;
use super::{body, outgoing, sse, submit};

/// A parsed call.
struct Call {
    api: Api,
    generation: Generation,
    prompts: Vec<Prompt>,
    caps: Vec<u32>,
    echo: bool,
}

/// What a call holds until its answer is out.
struct Held {
    slot: OwnedSemaphorePermit,
    claim: Option<Claim>,
    given_up: GivenUp,
}

/// `POST /v1/chat/completions`.
pub async fn chat(
    State(app): State<Arc<App>>,
    Extension(given_up): Extension<GivenUp>,
    headers: HeaderMap,
    body: Body,
) -> Result<Response<Body>, ApiError> {
    handle(app, Api::Chat, given_up, headers, body).await
}

/// `POST /v1/completions`.
pub async fn completions(
    State(app): State<Arc<App>>,
    Extension(given_up): Extension<GivenUp>,
    headers: HeaderMap,
    body: Body,
) -> Result<Response<Body>, ApiError> {
    handle(app, Api::Completion, given_up, headers, body).await
}

async fn handle(
    app: Arc<App>,
    api: Api,
    given_up: GivenUp,
    headers: HeaderMap,
    body: Body,
) -> Result<Response<Body>, ApiError> {
    let body::Entered { caller, slot, held } = body::enter(&app, &headers, body).await?;
    let arrived = app.engine.clock().now();
    let claim = match &caller.idempotency_key {
        Some(key) => match claim(&app, &caller, key, &held.bytes).await? {
            Claimed::Answered(response) => return Ok(response),
            Claimed::First(claim) => Some(claim),
        },
        None => None,
    };
    let mut fields = held.fields(&app).await?;
    let call = parse(&app, api, &mut fields).await?;
    drop((fields, held));
    answer(&app, &caller, call, arrived, Held { slot, claim, given_up }).await
}

/// Claims an idempotency key; waits for whoever has it no longer than the request may live.
async fn claim(app: &App, caller: &Caller, key: &str, body: &[u8]) -> Result<Claimed, ApiError> {
    let claimed = app.idempotency.claim(caller.tenant.id, key, body);
    let late = || ApiError::deadline("another call with this Idempotency-Key did not end in time");
    tokio::time::timeout(Duration::from_micros(caller.timeout.as_us()), claimed).await.map_err(|_| late())?
}

async fn parse(app: &App, api: Api, fields: &mut Fields) -> Result<Call, ApiError> {
    check_model(app, fields)?;
    let vocabulary = app.model.tokenizer().vocab_len() as u32;
    let mut generation = Generation::take(fields, vocabulary)?;
    generation.sampling.logprobs = logprobs(api, fields)?;
    let echo = api == Api::Completion && fields.flag("echo")?.unwrap_or(false);
    if echo && generation.sampling.logprobs.is_some() {
        return Err(ApiError::unsupported("echo", "`echo` together with `logprobs` is not supported yet"));
    }
    if api == Api::Chat && generation.max_tokens == Some(0) {
        return Err(ApiError::bad_field("max_tokens", "`max_tokens` must be at least 1"));
    }
    let (prompts, default) = match api {
        Api::Chat => (vec![prompt::chat(app, fields).await?], app.config.generation.chat_output_tokens),
        Api::Completion => (prompt::completion(app, fields).await?, app.config.generation.completion_output_tokens),
    };
    let caps = prompts.iter().map(|prompt| submit::output_cap(app, prompt, generation.max_tokens, default));
    let caps = caps.collect::<Result<Vec<_>, _>>()?;
    Ok(Call { api, generation, prompts, caps, echo })
}

fn check_model(app: &App, fields: &mut Fields) -> Result<(), ApiError> {
    match fields.text("model")? {
        Some(asked) if asked != app.model_name => Err(ApiError::no_model(&asked, &app.model_name)),
        Some(_) => Ok(()),
        None => Err(ApiError::bad_field("model", format!("`model` is required; this server has `{}`", app.model_name))),
    }
}

/// Chat: `logprobs: true` and `top_logprobs`; completions: `logprobs: K`.
fn logprobs(api: Api, fields: &mut Fields) -> Result<Option<u8>, ApiError> {
    match api {
        Api::Completion => Ok(fields.integer("logprobs", 0..=20)?.map(|top| top as u8)),
        Api::Chat => {
            let top = fields.integer("top_logprobs", 0..=20)?;
            match (fields.flag("logprobs")?.unwrap_or(false), top) {
                (false, None) => Ok(None),
                (false, Some(_)) => Err(ApiError::bad_field("top_logprobs", "`top_logprobs` needs `logprobs: true`")),
                (true, top) => Ok(Some(top.unwrap_or(0) as u8)),
            }
        }
    }
}

async fn answer(
    app: &Arc<App>,
    caller: &Caller,
    call: Call,
    arrived: Instant,
    held: Held,
) -> Result<Response<Body>, ApiError> {
    let n = call.generation.n;
    let per_prompt = |prompt: &Prompt| {
        let echo = if call.echo { prompt.text.clone() } else { String::new() };
        std::iter::repeat_n(echo, usize::from(n)).collect::<Vec<_>>()
    };
    let echoes: Vec<String> = call.prompts.iter().flat_map(per_prompt).collect();
    let is_nothing = call.generation.max_tokens == Some(0);
    let mut streams = Vec::with_capacity(call.prompts.len());
    for (prompt, cap) in call.prompts.iter().zip(&call.caps).filter(|_| !is_nothing) {
        streams.push(submit::submit(app, caller, &call.generation, prompt, *cap, arrived)?);
    }
    let envelope = envelope(app, &call, streams.first());
    if is_nothing {
        return Ok(nothing(envelope, &call, echoes));
    }
    let mut answer = Answer::new(envelope, streams, n, echoes);
    let first = if call.generation.stream { Some(answer.next().await) } else { None };
    let response = match first {
        Some(first) => match answer.fault().cloned() {
            Some(fault) => Err(fault),
            None => Ok(stream(app, answer, first, &call, held)),
        },
        None => whole(answer, held).await,
    };
    if let Err(fault) = &response
        && matches!(fault.status.as_u16(), 429 | 503)
    {
        call.prompts.iter().for_each(|prompt| app.refusals.remember(caller.tenant.id, &prompt.ids));
    }
    response
}

fn envelope(app: &App, call: &Call, first: Option<&penstock_engine::EventStream>) -> Envelope {
    let number = first.map_or_else(crate::tenants::entropy, |stream| stream.request().0);
    let prefix = match call.api {
        Api::Chat => "chatcmpl",
        Api::Completion => "cmpl",
    };
    Envelope {
        api: call.api,
        id: format!("{prefix}-{number:016x}"),
        created: unix_s(),
        model: app.model_name.clone(),
        fingerprint: app.engine.namespace().fingerprint(),
        logprobs: call.generation.sampling.logprobs.is_some(),
    }
}

/// `max_tokens: 0`: nothing is computed; with `echo` the prompt comes back.
fn nothing(envelope: Envelope, call: &Call, echoes: Vec<String>) -> Response<Body> {
    let outcome = Some(penstock_base::Outcome::Length);
    let choices = echoes.into_iter().map(|text| Choice { text, tokens: Vec::new(), outcome }).collect::<Vec<_>>();
    let prompt_tokens = call.prompts.iter().map(|prompt| prompt.ids.len() as u32).sum();
    let usage = penstock_sched::message::Usage { prompt_tokens, ..Default::default() };
    if call.generation.stream {
        let usage = call.generation.include_usage.then_some(&usage);
        return event_stream(sse::at_once(&envelope, &choices, usage));
    }
    axum::Json(envelope.whole(&choices, &[], &usage)).into_response()
}

async fn whole(mut answer: Answer, held: Held) -> Result<Response<Body>, ApiError> {
    let echoes: Vec<usize> = answer.echoes.iter().map(|echo| echo.chars().count()).collect();
    let choices = answer.collect().await?;
    let body = answer.envelope.whole(&choices, &echoes, answer.usage()).to_string();
    if let Some(claim) = held.claim {
        claim.answered(body.as_bytes());
    }
    let mut head = Response::new(());
    decorate(&mut head, &answer);
    let headers = head.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
    headers.insert(header::CONTENT_LENGTH, HeaderValue::from(body.len()));
    let body = outgoing::body(Bytes::from(body), answer, held.slot);
    Ok(head.map(|()| body))
}

fn stream(app: &App, answer: Answer, first: Part, call: &Call, held: Held) -> Response<Body> {
    let mut head = Response::new(());
    decorate(&mut head, &answer);
    let options = sse::Options {
        include_usage: call.generation.include_usage,
        heartbeat: Duration::from_millis(app.config.http.heartbeat_ms),
        given_up: held.given_up,
        claim: held.claim,
        held: Box::new(held.slot),
    };
    let mut response = event_stream(sse::body(answer, first, options));
    response.headers_mut().extend(std::mem::take(head.headers_mut()));
    response
}

fn event_stream(body: Body) -> Response<Body> {
    let mut response = Response::new(body);
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static(sse::CONTENT_TYPE));
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    response
}

/// What the client may want to know of how it was served.
fn decorate<T>(response: &mut Response<T>, answer: &Answer) {
    let headers = response.headers_mut();
    if let Some(generation) = answer.generation() {
        headers.insert("x-penstock-policy-generation", HeaderValue::from(generation.0));
    }
    if answer.degraded() {
        headers.insert("x-penstock-degraded", HeaderValue::from_static("max_tokens"));
    }
    if let Ok(id) = HeaderValue::from_str(&answer.envelope.id) {
        headers.insert(super::request_id::REQUEST_ID, id);
    }
}
