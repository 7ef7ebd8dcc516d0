//! Questions to the hub: requests with the right headers, and what its refusals mean.

use std::io::Read as _;

use ureq::http::{Method, Request, Response, StatusCode};
use ureq::tls::{Certificate, PemItem, RootCerts, TlsConfig};
use ureq::{Agent, Body};

use crate::error::HubError;
use crate::settings::Settings;
use crate::source::Source;

/// Largest answer about a repository, in bytes: names of some ten thousand files.
const ANSWER_BYTES_MAX: u64 = 16 << 20;

/// Most redirects inside the hub (renamed repositories) for one question.
const REDIRECTS_MAX: usize = 5;

/// The hub, for one source.
pub(crate) struct Hub<'a> {
    agent: Agent,
    settings: &'a Settings,
    pub source: &'a Source,
}

/// What the hub says of a file before it is fetched.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Announced {
    /// Name of the content: its SHA-256 for large files, a git hash for small ones.
    pub etag: String,
    pub bytes: u64,
}

impl<'a> Hub<'a> {
    pub fn new(settings: &'a Settings, source: &'a Source) -> Result<Self, HubError> {
        let mut config = Agent::config_builder()
            .http_status_as_error(false)
            .timeout_connect(Some(settings.silence))
            .timeout_recv_response(Some(settings.silence))
            .timeout_per_read(Some(settings.silence))
            .user_agent(concat!("penstock/", env!("CARGO_PKG_VERSION")))
            // Sizes must be those of the file.
            .accept_encoding("identity");
        if let Some(path) = &settings.certificates {
            let pem = std::fs::read(path).map_err(HubError::io("read the certificates", path))?;
            let roots: Vec<Certificate<'static>> = ureq::tls::parse_pem(&pem)
                .filter_map(|item| match item {
                    Ok(PemItem::Certificate(certificate)) => Some(certificate),
                    _ => None,
                })
                .collect();
            let roots = RootCerts::Specific(std::sync::Arc::new(roots));
            config = config.tls_config(TlsConfig::builder().root_certs(roots).build());
        }
        Ok(Self { agent: config.build().into(), settings, source })
    }

    /// `range`: first byte wanted. `follow`: whether redirects are followed, to any host; the token goes to the hub alone.
    fn ask(&self, method: Method, url: &str, range: u64, follow: bool) -> Result<Response<Body>, ureq::Error> {
        let mut request = Request::builder().method(method).uri(url);
        if let Some(token) = &self.settings.token {
            request = request.header("authorization", format!("Bearer {token}"));
        }
        if range > 0 {
            request = request.header("range", format!("bytes={range}-"));
        }
        let request = self.agent.configure_request(request.body(())?);
        let redirects = if follow { 10 } else { 0 };
        self.agent.run(request.max_redirects(redirects).max_redirects_will_error(follow).build())
    }

    fn url(&self, path: &str) -> String {
        format!("{}/{path}", self.settings.endpoint)
    }

    fn resolve_path(&self, commit: &str, file: &str) -> String {
        format!("{}/resolve/{commit}/{file}", self.source.repository)
    }

    /// What the hub knows of the revision, as JSON.
    pub fn revision(&self) -> Result<Vec<u8>, HubError> {
        // A slash of a revision's name is part of one path element here.
        let revision = self.source.revision.replace('/', "%2F");
        let path = format!("api/models/{}/revision/{revision}", self.source.repository);
        let response = self.ask(Method::GET, &self.url(&path), 0, true);
        let mut response = response.map_err(|why| transport(&path, &why))?;
        self.refusal(&response, &path, None)?;
        let mut bytes = Vec::new();
        let mut body = response.body_mut().as_reader().take(ANSWER_BYTES_MAX + 1);
        body.read_to_end(&mut bytes).map_err(|why| HubError::Transport { what: path.clone(), why: why.to_string() })?;
        if bytes.len() as u64 > ANSWER_BYTES_MAX {
            return Err(HubError::Answer { what: path, why: format!("it is larger than {ANSWER_BYTES_MAX} bytes") });
        }
        Ok(bytes)
    }

    /// Size and name of a file's content. Redirects inside the hub are followed, those to where large files lie are not: their answers
    /// speak of themselves.
    pub fn announced(&self, commit: &str, file: &str) -> Result<Announced, HubError> {
        let mut path = self.resolve_path(commit, file);
        for _ in 0..=REDIRECTS_MAX {
            let response = self.ask(Method::HEAD, &self.url(&path), 0, false).map_err(|why| transport(&path, &why))?;
            let header = |name: &str| response.headers().get(name).and_then(|value| value.to_str().ok());
            let inside = header("location").and_then(|to| {
                to.strip_prefix(&self.settings.endpoint).or(Some(to)).and_then(|to| to.strip_prefix('/'))
            });
            if response.status().is_redirection() && header("x-linked-etag").is_none() {
                match inside.filter(|to| !to.starts_with('/')) {
                    Some(to) => {
                        path = to.to_owned();
                        continue;
                    }
                    None => {
                        return Err(HubError::Answer {
                            what: path,
                            why: "it leads elsewhere without a checksum".into(),
                        });
                    }
                }
            }
            if !response.status().is_redirection() {
                self.refusal(&response, &path, Some(file))?;
            }
            let etag = header("x-linked-etag")
                .or_else(|| header("etag"))
                .map(|etag| etag.trim_start_matches("W/").trim_matches('"'));
            let bytes = header("x-linked-size").or_else(|| header("content-length")).and_then(|size| size.parse().ok());
            let is_name = |etag: &&str| {
                (1..=128).contains(&etag.len()) && etag.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-')
            };
            return match (etag.filter(is_name), bytes) {
                (Some(etag), Some(bytes)) => Ok(Announced { etag: etag.to_owned(), bytes }),
                _ => Err(HubError::Answer { what: path, why: "it gives no etag or no size".into() }),
            };
        }
        Err(HubError::Answer { what: path, why: format!("it leads elsewhere more than {REDIRECTS_MAX} times") })
    }

    /// The content from byte `from` on, wherever it lies.
    pub fn content(&self, commit: &str, file: &str, from: u64) -> Result<Response<Body>, ureq::Error> {
        self.ask(Method::GET, &self.url(&self.resolve_path(commit, file)), from, true)
    }

    /// What a status that is no success means.
    pub fn refusal(&self, response: &Response<Body>, path: &str, file: Option<&str>) -> Result<(), HubError> {
        let status = response.status();
        if status.is_success() {
            return Ok(());
        }
        let repository = self.source.repository.clone();
        let code = response.headers().get("x-error-code").and_then(|value| value.to_str().ok()).unwrap_or("");
        Err(match (status, code, file) {
            (_, "GatedRepo", _) | (StatusCode::FORBIDDEN, _, _) => {
                HubError::Gated { repository, endpoint: self.settings.endpoint.clone() }
            }
            (_, "RevisionNotFound", _) => HubError::NoRevision { repository, revision: self.source.revision.clone() },
            (_, "EntryNotFound", Some(file)) | (StatusCode::NOT_FOUND, "", Some(file)) => {
                HubError::NoFile { repository, file: file.to_owned(), hint: "look at its list of files".to_owned() }
            }
            // The hub answers a stranger's question for what is not there with a 401, so that names of private ones do not leak.
            (StatusCode::UNAUTHORIZED, "RepoNotFound" | "", _) if self.settings.token.is_none() => {
                HubError::NoRepository { repository }
            }
            (_, "RepoNotFound", _) | (StatusCode::NOT_FOUND, _, _) => HubError::NoRepository { repository },
            (StatusCode::UNAUTHORIZED, _, _) => HubError::Token { repository, status: status.as_u16() },
            _ => HubError::Transport { what: path.to_owned(), why: format!("the hub answered with status {status}") },
        })
    }
}

pub(crate) fn transport(what: &str, why: &ureq::Error) -> HubError {
    HubError::Transport { what: what.to_owned(), why: why.to_string() }
}
