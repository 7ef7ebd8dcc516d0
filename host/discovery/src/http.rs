//! Questions to a service that speaks HTTP: one connection each, one time limit each, and answers that go on for as long as one listens.
//!
//! This is all of HTTP that etcd's gateway and the API server of Kubernetes need, on the stack that the server is built on anyway.

use std::fs;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use http_body_util::{BodyExt as _, Full};
use hyper::body::{Bytes, Incoming};
use hyper::client::conn::http1;
use hyper::header::{CONTENT_TYPE, HOST, USER_AGENT};
use hyper::{Method, Request, Response, StatusCode, Uri};
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio::task::JoinHandle;
use tokio::time::timeout;
use tokio_rustls::TlsConnector;
use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::pki_types::pem::PemObject as _;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use tokio_rustls::rustls::{ClientConfig, RootCertStore};

use crate::error::DiscoveryError;

/// Largest answer that is read whole: a listing of every worker with the largest record, in base 64.
const ANSWER_BYTES_MAX: usize = 32 << 20;
/// Longest line of an answer that goes on: one message of a watch, which holds as many changes as came in one moment.
const LINE_BYTES_MAX: usize = 32 << 20;

/// Files of the TLS connection to a service.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TlsFiles {
    /// Certificates of the authorities that the service's one is checked against, PEM. Required for `https`.
    pub authorities: Option<PathBuf>,
    /// Own certificate and key, PEM, where the service asks for them.
    pub own: Option<(PathBuf, PathBuf)>,
}

impl TlsFiles {
    fn connector(&self) -> Result<TlsConnector, DiscoveryError> {
        let wrong = |why: String| DiscoveryError::Setting { key: "tls", why };
        let Some(path) = &self.authorities else {
            return Err(wrong(
                "https needs the file of the authorities that signed the service's certificate".to_owned(),
            ));
        };
        let read =
            |path: &PathBuf| fs::read(path).map_err(|why| wrong(format!("cannot read {}: {why}", path.display())));
        let mut roots = RootCertStore::empty();
        for certificate in CertificateDer::pem_slice_iter(&read(path)?) {
            let certificate = certificate.map_err(|why| wrong(format!("{}: {why}", path.display())))?;
            roots.add(certificate).map_err(|why| wrong(format!("{}: {why}", path.display())))?;
        }
        if roots.is_empty() {
            return Err(wrong(format!("{} holds no certificate; it must be PEM", path.display())));
        }
        let config = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
            .with_safe_default_protocol_versions()
            .map_err(|why| wrong(why.to_string()))?
            .with_root_certificates(roots);
        let config = match &self.own {
            None => config.with_no_client_auth(),
            Some((certificate, key)) => {
                let chain: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(&read(certificate)?).collect();
                let chain = chain.map_err(|why| wrong(format!("{}: {why}", certificate.display())))?;
                let own = PrivateKeyDer::from_pem_slice(&read(key)?)
                    .map_err(|why| wrong(format!("{}: {why}", key.display())))?;
                config.with_client_auth_cert(chain, own).map_err(|why| wrong(format!("own certificate: {why}")))?
            }
        };
        Ok(TlsConnector::from(Arc::new(config)))
    }
}

/// One question.
pub(crate) struct Question {
    pub method: Method,
    /// Path and query, with a slash first.
    pub path: String,
    pub content_type: &'static str,
    /// Value of the `authorization` header. Never part of an error.
    pub authorization: Option<String>,
    pub body: Vec<u8>,
}

/// One address of a service.
pub(crate) struct Server {
    address: String,
    host: String,
    port: u16,
    tls: Option<(TlsConnector, ServerName<'static>)>,
    /// Longest wait for a connection and for an answer's head, and for a whole answer.
    patience: Duration,
}

/// The text that goes with a failure; whoever asked knows what for.
pub(crate) type Why = String;

impl Server {
    pub fn new(key: &'static str, address: &str, tls: &TlsFiles, patience: Duration) -> Result<Self, DiscoveryError> {
        let wrong = || {
            let why = format!("{address:?} is not http://HOST:PORT or https://HOST:PORT");
            DiscoveryError::Setting { key, why }
        };
        let uri: Uri = address.parse().map_err(|_| wrong())?;
        let host = uri.host().ok_or_else(wrong)?.trim_matches(['[', ']']).to_owned();
        let has_path = uri.path_and_query().is_some_and(|path| path.as_str() != "/");
        let (tls, port) = match uri.scheme_str() {
            Some("http") => (None, 80),
            Some("https") => {
                let name = ServerName::try_from(host.clone()).map_err(|_| wrong())?;
                (Some((tls.connector()?, name)), 443)
            }
            _ => return Err(wrong()),
        };
        // A password in an address would end up in logs.
        if has_path || uri.authority().is_some_and(|authority| authority.as_str().contains('@')) {
            return Err(wrong());
        }
        let port = uri.port_u16().unwrap_or(port);
        Ok(Self { address: address.trim_end_matches('/').to_owned(), host, port, tls, patience })
    }

    pub fn address(&self) -> &str {
        &self.address
    }

    /// The whole answer.
    pub async fn ask(&self, question: Question) -> Result<(StatusCode, Vec<u8>), Why> {
        self.in_time(async {
            let (response, _connection) = self.send(question).await?;
            let status = response.status();
            let mut body = Lines::new(response, _connection);
            let mut whole = Vec::new();
            while let Some(piece) = body.piece().await? {
                whole.extend_from_slice(&piece);
                if whole.len() > ANSWER_BYTES_MAX {
                    return Err(format!("the answer has more than {ANSWER_BYTES_MAX} bytes"));
                }
            }
            Ok((status, whole))
        })
        .await
    }

    /// An answer that is read line by line, without an end.
    pub async fn listen(&self, question: Question) -> Result<(StatusCode, Lines), Why> {
        self.in_time(async {
            let (response, connection) = self.send(question).await?;
            Ok((response.status(), Lines::new(response, connection)))
        })
        .await
    }

    async fn in_time<T>(&self, work: impl Future<Output = Result<T, Why>>) -> Result<T, Why> {
        timeout(self.patience, work).await.map_err(|_| format!("no answer within {:?}", self.patience))?
    }

    async fn send(&self, question: Question) -> Result<(Response<Incoming>, Connection), Why> {
        let stream = TcpStream::connect((self.host.as_str(), self.port)).await.map_err(|why| why.to_string())?;
        // Questions are small and waited for.
        stream.set_nodelay(true).map_err(|why| why.to_string())?;
        match &self.tls {
            None => self.send_over(stream, question).await,
            Some((tls, name)) => {
                let stream = tls.connect(name.clone(), stream).await.map_err(|why| why.to_string())?;
                self.send_over(stream, question).await
            }
        }
    }

    async fn send_over(
        &self,
        stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
        question: Question,
    ) -> Result<(Response<Incoming>, Connection), Why> {
        let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await.map_err(|why| why.to_string())?;
        // Its errors come out of the request as well.
        let connection = Connection(tokio::spawn(async move { _ = connection.await }));
        let host = if self.host.contains(':') { format!("[{}]", self.host) } else { self.host.clone() };
        let mut request = Request::builder()
            .method(question.method)
            .uri(question.path)
            .header(HOST, format!("{host}:{}", self.port))
            .header(USER_AGENT, concat!("penstock/", env!("CARGO_PKG_VERSION")))
            .header(CONTENT_TYPE, question.content_type);
        if let Some(value) = question.authorization {
            request = request.header("authorization", value);
        }
        let request = request.body(Full::new(Bytes::from(question.body))).map_err(|why| why.to_string())?;
        let response = sender.send_request(request).await.map_err(|why| chain(&why))?;
        Ok((response, connection))
    }
}

/// The connection's task ends with whoever reads from it.
struct Connection(JoinHandle<()>);

impl Drop for Connection {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// An answer's body, in lines.
pub(crate) struct Lines {
    body: Incoming,
    held: Vec<u8>,
    /// How much of `held` is known to have no line end.
    searched: usize,
    _connection: Connection,
}

impl Lines {
    fn new(response: Response<Incoming>, connection: Connection) -> Self {
        Self { body: response.into_body(), held: Vec::new(), searched: 0, _connection: connection }
    }

    async fn piece(&mut self) -> Result<Option<Bytes>, Why> {
        loop {
            match self.body.frame().await {
                None => return Ok(None),
                Some(Err(why)) => return Err(chain(&why)),
                Some(Ok(frame)) => {
                    if let Ok(data) = frame.into_data() {
                        return Ok(Some(data));
                    }
                }
            }
        }
    }

    /// The next line without its end; none at the end of the answer. May be dropped half way: nothing is lost.
    pub async fn next(&mut self) -> Result<Option<Vec<u8>>, Why> {
        loop {
            if let Some(at) = self.held[self.searched..].iter().position(|byte| *byte == b'\n') {
                let rest = self.held.split_off(self.searched + at + 1);
                let mut line = std::mem::replace(&mut self.held, rest);
                self.searched = 0;
                line.pop();
                return Ok(Some(line));
            }
            self.searched = self.held.len();
            match self.piece().await? {
                Some(piece) => self.held.extend_from_slice(&piece),
                None if self.held.is_empty() => return Ok(None),
                None => {
                    self.searched = 0;
                    return Ok(Some(std::mem::take(&mut self.held)));
                }
            }
            if self.held.len() > LINE_BYTES_MAX {
                return Err(format!("a line of the answer has more than {LINE_BYTES_MAX} bytes"));
            }
        }
    }
}

/// An error with what caused it: hyper's own text leaves that out.
fn chain(why: &dyn std::error::Error) -> String {
    let mut text = why.to_string();
    let mut cause = why.source();
    while let Some(why) = cause {
        text = format!("{text}: {why}");
        cause = why.source();
    }
    text
}
