//! Who may use the admin listener? Whoever has the token; without one, whoever is on this machine and means to.

use std::path::Path;
use std::sync::Arc;

use anyhow::{Context as _, Result, ensure};
use axum::extract::{Request, State};
use axum::http::{StatusCode, header};
use axum::middleware::Next;
use axum::response::{IntoResponse as _, Response};
use sha2::{Digest as _, Sha256};

use super::app::App;
use super::error::ApiError;

/// Shortest token that is taken: 128 bits in hexadecimal have 32.
const TOKEN_BYTES_MIN: usize = 16;

/// The token of the admin listener, as its hash.
pub struct AdminToken([u8; 32]);

impl AdminToken {
    /// Reads it from a file; blanks around it do not count.
    ///
    /// # Errors
    /// A file that cannot be read, a token that is too short.
    pub fn read(path: &Path) -> Result<Self> {
        let text = std::fs::read_to_string(path).with_context(|| format!("read the admin token {}", path.display()))?;
        let token = text.trim();
        ensure!(
            token.len() >= TOKEN_BYTES_MIN,
            "the admin token in {} has {} bytes, at least {TOKEN_BYTES_MIN} are needed: openssl rand -hex 32 > FILE",
            path.display(),
            token.len()
        );
        Ok(Self::of(token))
    }

    fn of(token: &str) -> Self {
        Self(Sha256::digest(token).into())
    }

    /// Compares hashes in a time that does not depend on where they differ.
    fn fits(&self, token: &str) -> bool {
        let other: [u8; 32] = Sha256::digest(token).into();
        let differing = self.0.iter().zip(other).fold(0, |differing, (one, other)| differing | (one ^ other));
        std::hint::black_box(differing) == 0
    }
}

/// Lets a request in. Probes need no token.
pub async fn guard(State(app): State<Arc<App>>, request: Request, next: Next) -> Response {
    match refusal(app.admin_token.as_ref(), &request) {
        None => next.run(request).await,
        Some(error) => error.into_response(),
    }
}

fn refusal(token: Option<&AdminToken>, request: &Request) -> Option<ApiError> {
    let text = |name| request.headers().get(name).and_then(|value: &header::HeaderValue| value.to_str().ok());
    match token {
        _ if request.uri().path() == "/health" => None,
        Some(token) => {
            let given = text(header::AUTHORIZATION).and_then(|value| value.strip_prefix("Bearer "));
            (!given.is_some_and(|given| token.fits(given.trim()))).then(no_token)
        }
        // A page in a browser on this machine can send requests here under a name of its own, and names itself as their origin.
        None => (text(header::ORIGIN).is_some() || !text(header::HOST).is_some_and(is_loopback)).then(foreign),
    }
}

fn is_loopback(host: &str) -> bool {
    let name = match host.rsplit_once(':') {
        Some((name, port)) if port.bytes().all(|byte| byte.is_ascii_digit()) => name,
        _ => host,
    };
    let bare = name.trim_start_matches('[').trim_end_matches(']');
    name == "localhost" || bare.parse::<std::net::IpAddr>().is_ok_and(|address| address.is_loopback())
}

fn no_token() -> ApiError {
    ApiError {
        status: StatusCode::UNAUTHORIZED,
        kind: "invalid_request_error",
        code: "invalid_admin_token",
        param: Some("Authorization".to_owned()),
        message: "the admin listener wants its bearer token (server.admin_token_file)".to_owned(),
        retry_after_s: None,
    }
}

fn foreign() -> ApiError {
    ApiError {
        status: StatusCode::FORBIDDEN,
        kind: "invalid_request_error",
        code: "not_loopback",
        param: Some("Host".to_owned()),
        message: "without a token the admin listener answers to 127.0.0.1 and localhost alone, and to no web page"
            .to_owned(),
        retry_after_s: None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_whole_token_fits() {
        let token = AdminToken::of("correct horse battery staple");
        assert!(token.fits("correct horse battery staple"));
        for other in
            ["", "correct horse battery stapl", "correct horse battery staple ", "Correct horse battery staple"]
        {
            assert!(!token.fits(other), "{other:?}");
        }
    }

    #[test]
    fn loopback_has_few_names() {
        for host in ["localhost", "localhost:8001", "127.0.0.1:8001", "127.0.0.1", "[::1]:8001", "[::1]"] {
            assert!(is_loopback(host), "{host}");
        }
        for host in ["penstock.example", "penstock.example:8001", "10.0.0.1:8001", "localhost.example:1", ""] {
            assert!(!is_loopback(host), "{host}");
        }
    }
}
