//! A server of the test's own: says what it is told to say, and remembers what it was asked.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use futures_util::stream;
use http_body_util::{BodyExt as _, Full, StreamBody, combinators::UnsyncBoxBody};
use hyper::body::{Frame, Incoming};
use hyper::service::service_fn;
use hyper::{Request, Response};
use hyper_util::rt::TokioIo;
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio::sync::watch;

type Body = UnsyncBoxBody<Bytes, std::io::Error>;

/// One request as it came in.
#[derive(Clone, Debug)]
pub struct Seen {
    pub body: Value,
    headers: HashMap<String, String>,
}

impl Seen {
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.get(name).map(String::as_str)
    }
}

/// What to say.
#[derive(Clone, Debug)]
pub struct Answer {
    status: u16,
    pieces: Vec<String>,
    is_cut: bool,
    is_silent: bool,
    after: Duration,
}

impl Answer {
    /// One event a text, then the count.
    pub fn tokens(texts: &[&str], tokens: u64) -> Self {
        let mut answer = Self::events(texts);
        let usage = json!({ "choices": [], "usage": { "prompt_tokens": 7, "completion_tokens": tokens, "prompt_tokens_details": { "cached_tokens": 2 } } });
        let before_done = answer.pieces.len() - 1;
        answer.pieces.insert(before_done, format!("data: {usage}\n\n"));
        answer
    }

    /// One event a text, and no count.
    pub fn events(texts: &[&str]) -> Self {
        Self::stream(texts.iter().map(|text| json!({ "choices": [{ "text": text }] })))
    }

    /// As a chat stream has it: first the role.
    pub fn chat(texts: &[&str]) -> Self {
        let role = json!({ "choices": [{ "delta": { "role": "assistant", "content": "" } }] });
        let texts = texts.iter().map(|text| json!({ "choices": [{ "delta": { "content": text } }] }));
        Self::stream(std::iter::once(role).chain(texts))
    }

    /// Some text, then a fault, then the end.
    pub fn failing(message: &str) -> Self {
        Self::stream([json!({ "choices": [{ "text": "a" }] }), json!({ "error": { "message": message } })].into_iter())
    }

    pub fn status(status: u16, body: &str) -> Self {
        Self { status, pieces: vec![body.to_owned()], is_cut: false, is_silent: false, after: Duration::ZERO }
    }

    /// Without its end.
    pub fn cut(mut self) -> Self {
        self.pieces.pop();
        self.is_cut = true;
        self
    }

    /// The connection ends without a byte of an answer.
    pub fn silent() -> Self {
        Self { is_silent: true, ..Self::status(200, "") }
    }

    /// Waits first.
    pub fn after(mut self, after: Duration) -> Self {
        self.after = after;
        self
    }

    fn stream(events: impl Iterator<Item = Value>) -> Self {
        let mut pieces: Vec<_> = events.map(|event| format!("data: {event}\n\n")).collect();
        pieces.push("data: [DONE]\n\n".into());
        Self { status: 200, pieces, is_cut: false, is_silent: false, after: Duration::ZERO }
    }

    fn into_response(self) -> Response<Body> {
        let mut frames: Vec<Result<Frame<Bytes>, std::io::Error>> =
            self.pieces.into_iter().map(|piece| Ok(Frame::data(Bytes::from(piece)))).collect();
        if self.is_cut {
            frames.push(Err(std::io::Error::other("cut")));
        }
        // A pause between pieces keeps the client from reading them as one.
        let paced = stream::unfold(frames.into_iter(), |mut rest| async {
            let next = rest.next()?;
            tokio::time::sleep(Duration::from_millis(2)).await;
            Some((next, rest))
        });
        let response = Response::builder().status(self.status);
        response.body(StreamBody::new(Box::pin(paced)).boxed_unsync()).expect("a response")
    }
}

#[derive(Debug, Default)]
struct Book {
    seen: Vec<Seen>,
    at_once: usize,
    most_at_once: usize,
}

/// A listening server; it ends when dropped.
pub struct Server {
    address: std::net::SocketAddr,
    book: Arc<Mutex<Book>>,
    asked: watch::Receiver<usize>,
    accepting: tokio::task::JoinHandle<()>,
}

impl Server {
    /// `answer` says what the n-th request hears, by order of arrival from 0.
    pub async fn start(answer: fn(usize) -> Answer) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let address = listener.local_addr().expect("bound");
        let book = Arc::new(Mutex::new(Book::default()));
        let (tell, asked) = watch::channel(0);
        let tell = Arc::new(tell);
        let shared = Arc::clone(&book);
        let accepting = tokio::spawn(async move {
            while let Ok((socket, _)) = listener.accept().await {
                let (book, tell) = (Arc::clone(&shared), Arc::clone(&tell));
                let service = service_fn(move |request| reply(request, Arc::clone(&book), Arc::clone(&tell), answer));
                tokio::spawn(
                    hyper::server::conn::http1::Builder::new().serve_connection(TokioIo::new(socket), service),
                );
            }
        });
        Self { address, book, asked, accepting }
    }

    pub fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    pub fn seen(&self) -> Vec<Seen> {
        self.book.lock().expect("whole").seen.clone()
    }

    pub fn most_at_once(&self) -> usize {
        self.book.lock().expect("whole").most_at_once
    }

    /// Resolves when so many requests have come in.
    pub fn asked(&self, count: usize) -> impl Future<Output = ()> + use<> {
        let mut asked = self.asked.clone();
        async move {
            let _ = asked.wait_for(|seen| *seen >= count).await;
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.accepting.abort();
    }
}

async fn reply(
    request: Request<Incoming>,
    book: Arc<Mutex<Book>>,
    tell: Arc<watch::Sender<usize>>,
    answer: fn(usize) -> Answer,
) -> Result<Response<Body>, &'static str> {
    if request.uri().path() == "/v1/models" {
        let models = json!({ "data": [{ "id": "first-model" }, { "id": "second" }] }).to_string();
        return Ok(Response::new(Full::from(models).map_err(|never| match never {}).boxed_unsync()));
    }
    let headers = request.headers().iter();
    let headers = headers.map(|(name, value)| (name.to_string(), value.to_str().expect("text").to_owned())).collect();
    let body = request.into_body().collect().await.expect("a body").to_bytes();
    let body = serde_json::from_slice(&body).expect("JSON");
    let index = {
        let mut book = book.lock().expect("whole");
        book.seen.push(Seen { body, headers });
        book.at_once += 1;
        book.most_at_once = book.most_at_once.max(book.at_once);
        book.seen.len() - 1
    };
    tell.send_replace(index + 1);
    let answer = answer(index);
    tokio::time::sleep(answer.after).await;
    book.lock().expect("whole").at_once -= 1;
    if answer.is_silent { Err("hangs up") } else { Ok(answer.into_response()) }
}
