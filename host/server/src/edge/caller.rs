//! Who calls, for whom, and by when: everything that is read from headers.

use axum::http::{HeaderMap, HeaderName};
use penstock_base::{ClassRank, Duration, FlowId, Instant, SessionId, Traits};

use super::app::App;
use super::error::ApiError;
use crate::tenants::Tenant;

const FAIRNESS_ID: &str = "x-llm-d-inference-fairness-id";
const OBJECTIVE: &str = "x-llm-d-inference-objective";
const SESSION: &str = "x-penstock-session";
const SLO_TTFT: &str = "x-slo-ttft-ms";
const SLO_TPOT: &str = "x-slo-tpot-ms";
const TIMEOUT: &str = "x-request-timeout-ms";
const REQUEST_ID: &str = "x-request-id";
const IDEMPOTENCY_KEY: &str = "idempotency-key";
/// Longest header value that names something.
const NAME_BYTES_MAX: usize = 256;

/// An authenticated caller and what its headers ask for, clamped to what it may have.
#[derive(Clone, Debug)]
pub struct Caller {
    /// Who pays.
    pub tenant: Tenant,
    /// Class after clamping.
    pub class: ClassRank,
    /// Unit of fairness.
    pub flow: FlowId,
    /// Conversation.
    pub session: SessionId,
    /// Target for the first token.
    pub slo_ttft: Duration,
    /// Target per token.
    pub slo_tpot: Duration,
    /// Longest life of the request.
    pub timeout: Duration,
    /// From objective and tenant.
    pub traits: Traits,
    /// What the client calls the request; for people who ask later.
    pub request_id: Option<String>,
    /// The client's key for retries.
    pub idempotency_key: Option<String>,
}

impl Caller {
    /// Authenticates and reads the headers.
    ///
    /// # Errors
    /// 401 and 403 for keys, 400 for a header with a bad value.
    pub fn of(app: &App, headers: &HeaderMap) -> Result<Self, ApiError> {
        let tenants = app.tenants();
        let tenant = tenants.authenticate(bearer(headers)?)?.clone();
        let objective = objective(app, headers)?;
        let mut traits = Traits::default();
        let mut class = tenant.class_default;
        if let Some(objective) = objective {
            class = ClassRank::clamped(objective.class);
            let bits = [(objective.sheddable, Traits::SHEDDABLE), (objective.batch, Traits::BATCH)];
            traits = bits.into_iter().filter(|(set, _)| *set).fold(traits, |all, (_, bit)| all.with(bit));
        }
        let class = class.min(tenant.class_ceiling);
        if tenant.no_store {
            traits = traits.with(Traits::NO_STORE);
        }
        // Echoed by another layer; a bad one is named here.
        let request_id = name(headers, REQUEST_ID)?.map(str::to_owned);
        let session = name(headers, SESSION)?;
        let slo_ttft = milliseconds(headers, SLO_TTFT)?;
        let class_slo = app.class(class.get()).and_then(|class| class.slo_ttft_ms).map(Duration::from_ms);
        let most = Duration::from_ms(app.config.limits.request_timeout_ms);
        Ok(Self {
            flow: app.identity.flow(tenant.id, class, name(headers, FAIRNESS_ID)?),
            session: session.map_or(SessionId(0), |key| app.identity.session(tenant.id, key)),
            slo_ttft: slo_ttft.or(class_slo).unwrap_or(Duration::MAX),
            slo_tpot: milliseconds(headers, SLO_TPOT)?.unwrap_or(Duration::MAX),
            timeout: milliseconds(headers, TIMEOUT)?.map_or(most, |asked| asked.min(most)),
            idempotency_key: name(headers, IDEMPOTENCY_KEY)?.map(str::to_owned),
            request_id,
            tenant,
            class,
            traits,
        })
    }

    /// When its time is up.
    pub fn deadline(&self, arrived: Instant) -> Instant {
        arrived + self.timeout
    }
}

fn bearer(headers: &HeaderMap) -> Result<Option<&str>, ApiError> {
    let Some(value) = headers.get(axum::http::header::AUTHORIZATION) else { return Ok(None) };
    let text = value.to_str().ok().and_then(|text| text.split_once(' '));
    match text {
        Some((scheme, key)) if scheme.eq_ignore_ascii_case("bearer") => Ok(Some(key.trim())),
        _ => Err(crate::tenants::AuthFault::Missing.into()),
    }
}

fn objective<'a>(app: &'a App, headers: &HeaderMap) -> Result<Option<&'a crate::config::ObjectiveConfig>, ApiError> {
    let Some(asked) = name(headers, OBJECTIVE)? else { return Ok(None) };
    let found = app.config.objectives.get(asked);
    let names = || app.config.objectives.keys().map(String::as_str).collect::<Vec<_>>().join(", ");
    found.map(Some).ok_or_else(|| {
        let known = if app.config.objectives.is_empty() { "none".to_owned() } else { names() };
        ApiError::bad_field(OBJECTIVE, format!("no such objective; configured are: {known}"))
    })
}

fn name<'a>(headers: &'a HeaderMap, header: &'static str) -> Result<Option<&'a str>, ApiError> {
    let Some(value) = headers.get(HeaderName::from_static(header)) else { return Ok(None) };
    let text = value.to_str().ok().filter(|text| !text.is_empty() && text.len() <= NAME_BYTES_MAX);
    let message = format!("`{header}` must be 1 to {NAME_BYTES_MAX} visible ASCII characters");
    text.map(Some).ok_or_else(|| ApiError::bad_field(header, message))
}

fn milliseconds(headers: &HeaderMap, header: &'static str) -> Result<Option<Duration>, ApiError> {
    let Some(text) = name(headers, header)? else { return Ok(None) };
    let number = text.parse::<u64>().ok().filter(|ms| (1..=86_400_000).contains(ms));
    let message = format!("`{header}` must be whole milliseconds from 1 to 86400000");
    number.map(|ms| Some(Duration::from_ms(ms))).ok_or_else(|| ApiError::bad_field(header, message))
}
