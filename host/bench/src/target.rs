//! Where does the server listen, and what does it serve?

use http_body_util::{BodyExt as _, Full, Limited};
use hyper::body::Bytes;
use hyper::{Request, Uri, header};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use serde_json::Value;

use crate::error::BenchError;
use crate::limits::{ERROR_BODY_BYTES_MAX, MODELS_TIMEOUT};
use crate::plan::Plan;

/// The connections of a run; idle ones are used again.
pub type Connections = Client<HttpConnector, Full<Bytes>>;

/// Connections as a browser or client library would hold them.
pub fn connections() -> Connections {
    let mut connector = HttpConnector::new();
    connector.set_nodelay(true);
    Client::builder(TokioExecutor::new()).build(connector)
}

/// The root without a trailing slash and without `/v1`.
pub fn root(url: &str) -> Result<String, BenchError> {
    let fault = |problem: String| BenchError::Plan { flag: "--url", problem };
    let parsed: Uri = url.parse().map_err(|cause| fault(format!("{url} is no URL ({cause})")))?;
    match parsed.scheme_str() {
        Some("http") => {}
        Some("https") => {
            return Err(fault(format!(
                "{url} is https, which this generator does not speak: its clocks would show the TLS library; measure behind the proxy that ends TLS"
            )));
        }
        _ => return Err(fault(format!("{url} does not begin with http://"))),
    }
    let trimmed = url.trim_end_matches('/');
    Ok(trimmed.strip_suffix("/v1").unwrap_or(trimmed).to_owned())
}

/// The model to ask for: the plan's, else the first that the server names.
pub async fn model(connections: &Connections, root: &str, plan: &Plan) -> Result<String, BenchError> {
    if let Some(model) = &plan.model {
        return Ok(model.clone());
    }
    let url = format!("{root}/v1/models");
    let mut request = Request::get(&url);
    if let Some(key) = &plan.api_key {
        request = request.header(header::AUTHORIZATION, format!("Bearer {key}"));
    }
    let request = request.body(Full::default()).map_err(|cause| BenchError::Plan {
        flag: "--api-key",
        problem: format!("cannot be sent in a header ({cause})"),
    })?;
    let unreachable = |cause: String| BenchError::Unreachable { url: root.to_owned(), cause };
    let silent = |cause: String| BenchError::Models { url: url.clone(), cause };
    let answer = async {
        let answer = connections.request(request).await.map_err(|fault| unreachable(reason(&fault)))?;
        let status = answer.status();
        if !status.is_success() {
            return Err(silent(format!("status {}", status.as_u16())));
        }
        let body = Limited::new(answer.into_body(), ERROR_BODY_BYTES_MAX * 16).collect().await;
        body.map(|body| body.to_bytes()).map_err(|fault| silent(fault.to_string()))
    };
    let bytes = match tokio::time::timeout(MODELS_TIMEOUT, answer).await {
        Ok(answer) => answer?,
        Err(_) => return Err(unreachable(format!("no answer within {} s", MODELS_TIMEOUT.as_secs()))),
    };
    let models: Value = serde_json::from_slice(&bytes).map_err(|fault| silent(fault.to_string()))?;
    let first = models.pointer("/data/0/id").and_then(Value::as_str);
    first.map(str::to_owned).ok_or_else(|| silent("no `data[0].id`".into()))
}

/// The innermost cause, which is what a reader can act on.
pub fn reason(fault: &dyn std::error::Error) -> String {
    let mut fault = fault;
    while let Some(cause) = fault.source() {
        fault = cause;
    }
    fault.to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_root_is_taken_with_and_without_the_version() {
        for url in
            ["http://127.0.0.1:8000", "http://127.0.0.1:8000/", "http://127.0.0.1:8000/v1", "http://127.0.0.1:8000/v1/"]
        {
            assert_eq!(root(url).expect("a URL"), "http://127.0.0.1:8000");
        }
        for url in ["https://example.org", "127.0.0.1:8000", "ftp://x", "http://"] {
            assert!(matches!(root(url), Err(BenchError::Plan { flag: "--url", .. })), "{url}");
        }
    }
}
