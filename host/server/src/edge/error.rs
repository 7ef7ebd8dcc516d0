//! The one map from what went wrong to an HTTP status and an OpenAI-shaped body.

use axum::body::Body;
use axum::http::{HeaderName, HeaderValue, Response, StatusCode, header};
use axum::response::IntoResponse;
use penstock_base::{Failure, Outcome, Phase, Refusal};
use penstock_model::ModelError;
use serde_json::json;

use crate::tenants::AuthFault;

/// Why a request gets no answer (or no rest of its answer).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ApiError {
    /// HTTP status.
    pub status: StatusCode,
    /// `error.type`.
    pub kind: &'static str,
    /// `error.code`: stable, for programs.
    pub code: &'static str,
    /// `error.param`: the field or header at fault.
    pub param: Option<String>,
    /// For people: what is wrong and what to do.
    pub message: String,
    /// `Retry-After` in seconds.
    pub retry_after_s: Option<u32>,
}

const DROPPED_REASON: HeaderName = HeaderName::from_static("x-llm-d-request-dropped-reason");

impl ApiError {
    fn new(status: StatusCode, kind: &'static str, code: &'static str, message: impl Into<String>) -> Self {
        Self { status, kind, code, param: None, message: message.into(), retry_after_s: None }
    }

    /// 400 about a field.
    pub fn bad_field(param: impl Into<String>, message: impl Into<String>) -> Self {
        let error = Self::new(StatusCode::BAD_REQUEST, "invalid_request_error", "invalid_value", message);
        Self { param: Some(param.into()), ..error }
    }

    /// 400 about the whole.
    pub fn malformed(message: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, "invalid_request_error", "malformed_request", message)
    }

    /// 422: known, but not built yet.
    pub fn unsupported(param: impl Into<String>, message: impl Into<String>) -> Self {
        let error = Self::new(StatusCode::UNPROCESSABLE_ENTITY, "invalid_request_error", "unsupported_value", message);
        Self { param: Some(param.into()), ..error }
    }

    /// 400: input and output can never fit.
    pub fn never_fits(message: impl Into<String>) -> Self {
        let error = Self::new(StatusCode::BAD_REQUEST, "invalid_request_error", "context_length_exceeded", message);
        Self { param: Some("max_tokens".to_owned()), ..error }
    }

    /// 404 for a model.
    pub fn no_model(asked: &str, served: &str) -> Self {
        let shown: String = asked.chars().take(128).collect();
        let message = format!("the model `{shown}` is not served here; this server has `{served}`");
        let error = Self::new(StatusCode::NOT_FOUND, "invalid_request_error", "model_not_found", message);
        Self { param: Some("model".to_owned()), ..error }
    }

    /// 404 for a path.
    pub fn no_path() -> Self {
        let message = "no such path; see /v1/models, /v1/chat/completions, /v1/completions";
        Self::new(StatusCode::NOT_FOUND, "invalid_request_error", "not_found", message)
    }

    /// 405.
    pub fn wrong_method() -> Self {
        let message = "this path does not take that method";
        Self::new(StatusCode::METHOD_NOT_ALLOWED, "invalid_request_error", "method_not_allowed", message)
    }

    /// 413.
    pub fn too_large(bytes_max: usize) -> Self {
        let message = format!("the body is larger than {bytes_max} bytes (http.body_bytes_max)");
        Self::new(StatusCode::PAYLOAD_TOO_LARGE, "invalid_request_error", "body_too_large", message)
    }

    /// 408.
    pub fn slow_upload() -> Self {
        let message = "the body did not arrive in time (http.body_timeout_ms)";
        Self::new(StatusCode::REQUEST_TIMEOUT, "timeout_error", "upload_timeout", message)
    }

    /// 504 of the edge itself.
    pub fn deadline(message: &str) -> Self {
        Self::new(StatusCode::GATEWAY_TIMEOUT, "timeout_error", "deadline_exceeded", message)
    }

    /// 409.
    pub fn idempotency_conflict(message: &str) -> Self {
        let error = Self::new(StatusCode::CONFLICT, "invalid_request_error", "idempotency_conflict", message);
        Self { param: Some("Idempotency-Key".to_owned()), ..error }
    }

    /// 503: an earlier life of the server had begun with this call and ended before it.
    pub fn interrupted() -> Self {
        let message = "the server ended while it answered the call with this Idempotency-Key, and nothing of that answer is left; \
            it was said now, and the key is free: send the call again to have it computed anew";
        let error = Self::new(StatusCode::SERVICE_UNAVAILABLE, "server_error", "request_interrupted", message);
        Self { param: Some("Idempotency-Key".to_owned()), retry_after_s: Some(1), ..error }
    }

    /// 429 of the edge itself: too much is being read, tokenised or answered.
    pub fn edge_full(what: &str) -> Self {
        let message = format!("the server is at its bound of {what}; try again shortly");
        let error = Self::new(StatusCode::TOO_MANY_REQUESTS, "rate_limit_error", "queue_full", message);
        Self { retry_after_s: Some(1), ..error }
    }

    /// 503 while draining or before a replica is ready.
    pub fn not_ready(code: &'static str, message: &str) -> Self {
        let error = Self::new(StatusCode::SERVICE_UNAVAILABLE, "server_error", code, message);
        Self { retry_after_s: Some(1), ..error }
    }

    /// 500 with nothing that a client could change.
    pub fn internal(message: &str) -> Self {
        Self::new(StatusCode::INTERNAL_SERVER_ERROR, "server_error", "internal_error", message)
    }

    /// From the outcome of a request that gave no complete answer. None for a success.
    pub fn of_outcome(outcome: Outcome, retry_after_ms: u32) -> Option<Self> {
        let error = match outcome {
            Outcome::Stop | Outcome::Length => return None,
            Outcome::Refused(refusal) => of_refusal(refusal),
            Outcome::TimedOut(phase) => {
                let (code, message) = match phase {
                    Phase::Queue => {
                        ("queue_timeout", "the request waited longer than its deadline or the queue's limit")
                    }
                    Phase::Prefill => ("prefill_timeout", "the deadline passed while the prompt was computed"),
                    Phase::Decode => ("decode_timeout", "the deadline passed while tokens were produced"),
                };
                Self::new(StatusCode::GATEWAY_TIMEOUT, "timeout_error", code, message)
            }
            Outcome::Cancelled(cause) => match cause {
                penstock_base::CancelCause::Client => {
                    Self::new(StatusCode::BAD_REQUEST, "invalid_request_error", "cancelled", "the client cancelled")
                }
                penstock_base::CancelCause::SlowClient => Self::new(
                    StatusCode::REQUEST_TIMEOUT,
                    "timeout_error",
                    "send_timeout",
                    "the client read too slowly; the answer was cut off",
                ),
                penstock_base::CancelCause::Drain => {
                    Self::not_ready("draining", "the server is shutting down; send the request again elsewhere")
                }
            },
            Outcome::Failed(failure) => of_failure(failure),
        };
        let is_backoff = matches!(error.status, StatusCode::TOO_MANY_REQUESTS | StatusCode::SERVICE_UNAVAILABLE);
        let seconds = retry_after_ms.div_ceil(1_000).clamp(1, 60);
        Some(Self { retry_after_s: is_backoff.then_some(seconds), ..error })
    }

    /// The body: `{"error": {...}}`.
    pub fn body(&self) -> serde_json::Value {
        json!({"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}})
    }

    /// Was the request dropped for capacity, quota or readiness?
    fn is_drop(&self) -> bool {
        matches!(self.status, StatusCode::TOO_MANY_REQUESTS | StatusCode::SERVICE_UNAVAILABLE)
    }
}

fn of_refusal(refusal: Refusal) -> ApiError {
    let limited = |code, message: &str| ApiError::new(StatusCode::TOO_MANY_REQUESTS, "rate_limit_error", code, message);
    let message = "input and output tokens together can never fit; shorten the prompt or lower max_tokens";
    match refusal {
        Refusal::NeverFits => ApiError::never_fits(message),
        Refusal::Quota => limited("rate_limit_exceeded", "the tenant's quota is used up for now"),
        Refusal::QueueFull => limited("queue_full", "the queue is full; try again later"),
        Refusal::Capacity => limited("capacity", "there is no capacity for this request now; try again later"),
        Refusal::Deadline => ApiError::new(
            StatusCode::GATEWAY_TIMEOUT,
            "timeout_error",
            "deadline_exceeded",
            "the deadline cannot be met or has passed",
        ),
        Refusal::RetryStorm => limited("retry_storm", "this was refused moments ago; wait for Retry-After"),
        Refusal::TooLong => limited("too_long", "long prompts are refused under the present load; try again later"),
        Refusal::Shed => limited("shed", "work of this class is shed under the present load; try again later"),
        Refusal::Policy(_) => limited("policy", "the admission policy refused this request"),
        Refusal::AllBusy => ApiError::not_ready("all_busy", "every replica is busy; try again later"),
        Refusal::NoReplica => ApiError::not_ready("no_replica", "no replica is ready"),
        Refusal::Draining => ApiError::not_ready("draining", "the server is shutting down"),
    }
}

fn of_failure(failure: Failure) -> ApiError {
    let code = match failure {
        Failure::ReplicaLost => "replica_lost",
        Failure::Executor => "executor_failed",
        Failure::PreemptedTooOften => "preempted_too_often",
        Failure::NoProgress => "no_progress",
        Failure::Internal => "internal_error",
    };
    if failure.is_retryable() {
        ApiError::not_ready(code, "the request was lost on the server's side; it may be sent again")
    } else {
        let message = "the model's computation failed for this request; sending it again will fail as well";
        ApiError::new(StatusCode::INTERNAL_SERVER_ERROR, "server_error", code, message)
    }
}

impl From<AuthFault> for ApiError {
    fn from(fault: AuthFault) -> Self {
        let (status, code, message) = match fault {
            AuthFault::Missing => (StatusCode::UNAUTHORIZED, "missing_api_key", "send `Authorization: Bearer KEY`"),
            AuthFault::Unknown => (StatusCode::UNAUTHORIZED, "invalid_api_key", "the API key is not known here"),
            AuthFault::Disabled => (StatusCode::FORBIDDEN, "tenant_disabled", "this tenant is switched off"),
        };
        Self::new(status, "authentication_error", code, message)
    }
}

impl From<ModelError> for ApiError {
    /// Faults of templates and tokenising: the request's content is at fault, or the model cannot do what it asks.
    fn from(fault: ModelError) -> Self {
        match fault {
            ModelError::TemplateMissing => Self::unsupported("messages", fault.to_string()),
            _ => Self::bad_field("messages", fault.to_string()),
        }
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response<Body> {
        let mut response = (self.status, axum::Json(self.body())).into_response();
        let headers = response.headers_mut();
        if let Some(seconds) = self.retry_after_s {
            headers.insert(header::RETRY_AFTER, HeaderValue::from(seconds));
        }
        if self.is_drop() {
            headers.insert(DROPPED_REASON, HeaderValue::from_static(self.code));
        }
        if matches!(self.status, StatusCode::PAYLOAD_TOO_LARGE | StatusCode::REQUEST_TIMEOUT) {
            // The rest of the body will not be read.
            headers.insert(header::CONNECTION, HeaderValue::from_static("close"));
        }
        if self.status == StatusCode::UNAUTHORIZED {
            headers.insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        response
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn outcomes_have_the_documented_statuses() {
        let status = |outcome| ApiError::of_outcome(outcome, 0).map(|error| error.status.as_u16());
        assert_eq!(status(Outcome::Stop), None);
        assert_eq!(status(Outcome::Refused(Refusal::NeverFits)), Some(400));
        assert_eq!(status(Outcome::Refused(Refusal::Deadline)), Some(504));
        assert_eq!(status(Outcome::TimedOut(Phase::Queue)), Some(504));
        for limited in [Refusal::Quota, Refusal::QueueFull, Refusal::Shed, Refusal::TooLong, Refusal::Policy(20)] {
            assert_eq!(status(Outcome::Refused(limited)), Some(429));
        }
        for absent in [Refusal::AllBusy, Refusal::NoReplica, Refusal::Draining] {
            assert_eq!(status(Outcome::Refused(absent)), Some(503));
        }
        assert_eq!(status(Outcome::Failed(Failure::ReplicaLost)), Some(503));
        assert_eq!(status(Outcome::Failed(Failure::Executor)), Some(500));
    }

    #[test]
    fn back_off_stands_with_429_and_503_only_and_stays_in_range() {
        let after = |outcome, ms| ApiError::of_outcome(outcome, ms).and_then(|error| error.retry_after_s);
        assert_eq!(after(Outcome::Refused(Refusal::Capacity), 1_001), Some(2));
        assert_eq!(after(Outcome::Refused(Refusal::Capacity), 0), Some(1));
        assert_eq!(after(Outcome::Refused(Refusal::AllBusy), 900_000), Some(60));
        assert_eq!(after(Outcome::Refused(Refusal::NeverFits), 5_000), None);
    }
}
