//! Pods behind an API server of the test's own: the part of Kubernetes that a watcher and a worker talk to, over real connections.
//!
//! What it does is taken from the API's documentation: versions that only grow, pages, a watch from a version with bookmarks, 410 for a
//! version that is no longer known, 409 for a write against an older version, merge patches.

use std::collections::{BTreeMap, VecDeque};
use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use http_body_util::combinators::BoxBody;
use http_body_util::{BodyExt as _, Full, StreamBody};
use hyper::body::{Bytes, Frame, Incoming};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::TokioIo;
use serde_json::{Value, json};
use tokio::net::{TcpListener, TcpSocket};
use tokio::sync::watch;
use tokio::task::JoinHandle;

/// Changes that it remembers for watches.
const HISTORY: usize = 1_000;

pub struct ApiServer {
    pub store: Arc<Store>,
    address: SocketAddr,
    serving: Option<JoinHandle<()>>,
}

pub struct Store {
    cluster: Mutex<Cluster>,
    changed: watch::Sender<u64>,
    /// Connections end when this changes.
    cut: watch::Sender<u64>,
    /// Watches end, and connections do not, when this changes.
    ends: watch::Sender<u64>,
    token: &'static str,
}

#[derive(Default)]
struct Cluster {
    version: u64,
    pods: BTreeMap<String, Value>,
    /// Version, kind, pod.
    history: VecDeque<(u64, &'static str, Value)>,
    /// Versions up to this one are forgotten.
    forgotten: u64,
    bookmark: bool,
    /// The version of the last bookmark, and watches that began there.
    bookmarked: u64,
    from_bookmark: usize,
    lists: usize,
}

impl Drop for ApiServer {
    fn drop(&mut self) {
        self.stop();
    }
}

impl ApiServer {
    pub async fn start(token: &'static str) -> Self {
        let store = Store {
            cluster: Mutex::new(Cluster { version: 100, ..Cluster::default() }),
            changed: watch::Sender::new(0),
            cut: watch::Sender::new(0),
            ends: watch::Sender::new(0),
            token,
        };
        let mut server = Self { store: Arc::new(store), address: ([127, 0, 0, 1], 0).into(), serving: None };
        server.serve().await;
        server
    }

    pub fn address(&self) -> String {
        format!("http://{}", self.address)
    }

    pub async fn serve(&mut self) {
        let socket = TcpSocket::new_v4().unwrap();
        socket.set_reuseaddr(true).unwrap();
        socket.bind(self.address).unwrap();
        let listener = socket.listen(64).unwrap();
        self.address = listener.local_addr().unwrap();
        self.serving = Some(tokio::spawn(accept(listener, Arc::clone(&self.store))));
    }

    /// Nobody answers any more, and open connections end.
    pub fn stop(&mut self) {
        if let Some(serving) = self.serving.take() {
            serving.abort();
        }
        self.store.cut.send_modify(|cuts| *cuts += 1);
    }
}

impl Store {
    /// Changes a pod, or makes one. `None` from `change` deletes it.
    pub fn edit(&self, name: &str, change: impl FnOnce(Option<Value>) -> Option<Value>) {
        let mut cluster = self.cluster.lock().unwrap();
        cluster.version += 1;
        let version = cluster.version;
        let old = cluster.pods.remove(name);
        let kind = if old.is_some() { "MODIFIED" } else { "ADDED" };
        let (kind, pod) = match (change(old.clone()), old) {
            (Some(mut pod), _) => {
                pod["metadata"]["resourceVersion"] = version.to_string().into();
                cluster.pods.insert(name.to_owned(), pod.clone());
                (kind, pod)
            }
            (None, Some(mut pod)) => {
                pod["metadata"]["resourceVersion"] = version.to_string().into();
                ("DELETED", pod)
            }
            (None, None) => return,
        };
        cluster.history.push_back((version, kind, pod));
        if cluster.history.len() > HISTORY {
            cluster.forgotten = cluster.history.pop_front().unwrap().0;
        }
        drop(cluster);
        self.changed.send_modify(|changes| *changes += 1);
    }

    /// Drops its history, as etcd under a real one does every five minutes.
    pub fn forget(&self) {
        let mut cluster = self.cluster.lock().unwrap();
        cluster.version += 10;
        cluster.forgotten = cluster.version;
        cluster.history.clear();
    }

    /// Moves the version on without a change of ours, and says so to whoever watches.
    pub fn bookmark(&self) {
        let mut cluster = self.cluster.lock().unwrap();
        cluster.version += 50;
        cluster.bookmark = true;
        cluster.bookmarked = cluster.version;
        drop(cluster);
        self.changed.send_modify(|changes| *changes += 1);
    }

    /// Ends open watches as if their time were over.
    pub fn end_watches(&self) {
        self.ends.send_modify(|ends| *ends += 1);
    }

    /// Listings that began, without those of one pod by which a watcher sees whether anybody is there.
    pub fn lists(&self) -> usize {
        self.cluster.lock().unwrap().lists
    }

    pub fn watches_from_bookmark(&self) -> usize {
        self.cluster.lock().unwrap().from_bookmark
    }

    fn answer(&self, method: &Method, path: &str, query: &BTreeMap<String, String>, body: &[u8]) -> (u16, Value) {
        let Some(name) = path.strip_prefix("/api/v1/namespaces/llm/pods") else { return status(404, "no such path") };
        let mut cluster = self.cluster.lock().unwrap();
        match (method, name.strip_prefix('/')) {
            (&Method::GET, None) => {
                cluster.lists += usize::from(query.get("limit").is_none_or(|limit| limit != "1"));
                cluster.page(query)
            }
            (&Method::GET, Some(name)) => {
                cluster.pods.get(name).map_or_else(|| status(404, "pods not found"), |pod| (200, pod.clone()))
            }
            (&Method::PATCH, Some(name)) => {
                let patch: Value = serde_json::from_slice(body).unwrap();
                let Some(pod) = cluster.pods.get(name) else { return status(404, "pods not found") };
                let expected = &patch["metadata"]["resourceVersion"];
                if !expected.is_null() && *expected != pod["metadata"]["resourceVersion"] {
                    return status(409, "the object has been modified");
                }
                let mut pod = pod.clone();
                merge(&mut pod, &patch);
                drop(cluster);
                self.edit(name, |_| Some(pod.clone()));
                (200, pod)
            }
            _ => status(405, "no such verb"),
        }
    }

    /// Events past `from`, and the version to go on from.
    fn events(&self, from: u64, kind: &mut Vec<Value>) -> Result<u64, ()> {
        let mut cluster = self.cluster.lock().unwrap();
        if from < cluster.forgotten {
            return Err(());
        }
        for (version, name, pod) in &cluster.history {
            if *version > from && is_selected(pod) {
                kind.push(json!({ "type": name, "object": pod }));
            }
        }
        let version = cluster.version;
        if std::mem::take(&mut cluster.bookmark) {
            // As in the documentation.
            let mark: Value = serde_json::from_str(include_str!("../fixtures/bookmark.json")).unwrap();
            let mut mark = mark;
            mark["object"]["metadata"]["resourceVersion"] = version.to_string().into();
            kind.push(mark);
        }
        Ok(version)
    }
}

fn is_selected(pod: &Value) -> bool {
    pod["metadata"]["labels"]["llm-d.ai/inferenceServing"] == "true"
}

impl Cluster {
    fn page(&self, query: &BTreeMap<String, String>) -> (u16, Value) {
        if query["labelSelector"] != "llm-d.ai/inferenceServing=true" {
            return status(400, "unable to parse the selector");
        }
        // Small pages, so that even few pods take several.
        let limit = query.get("limit").map_or(2, |limit| limit.parse::<usize>().unwrap().min(2));
        let from = query.get("continue").map_or("", |token| token.strip_prefix("from/").unwrap());
        let mut rest = self.pods.iter().filter(|(name, pod)| name.as_str() > from && is_selected(pod));
        let items: Vec<(&String, &Value)> = rest.by_ref().take(limit).collect();
        let token = rest.next().and(items.last()).map(|(name, _)| format!("from/{name}"));
        let items: Vec<&Value> = items.iter().map(|(_, pod)| *pod).collect();
        let metadata = json!({ "resourceVersion": self.version.to_string(), "continue": token.unwrap_or_default() });
        (200, json!({ "kind": "PodList", "apiVersion": "v1", "metadata": metadata, "items": items }))
    }
}

fn status(code: u16, message: &str) -> (u16, Value) {
    (code, json!({ "kind": "Status", "apiVersion": "v1", "status": "Failure", "message": message, "code": code }))
}

/// RFC 7386.
fn merge(target: &mut Value, patch: &Value) {
    let Value::Object(patch) = patch else {
        *target = patch.clone();
        return;
    };
    if !target.is_object() {
        *target = json!({});
    }
    for (key, value) in patch {
        if value.is_null() {
            target.as_object_mut().unwrap().remove(key);
        } else {
            merge(&mut target[key], value);
        }
    }
}

async fn accept(listener: TcpListener, store: Arc<Store>) {
    loop {
        let Ok((stream, _)) = listener.accept().await else { continue };
        let store = Arc::clone(&store);
        tokio::spawn(async move {
            let mut cut = store.cut.subscribe();
            let service = service_fn(move |request| respond(Arc::clone(&store), request));
            let serve = http1::Builder::new().serve_connection(TokioIo::new(stream), service);
            tokio::select! {
                _ = serve => {}
                _ = cut.changed() => {}
            }
        });
    }
}

fn unescape(text: &str) -> String {
    let mut bytes = Vec::new();
    let mut rest = text.as_bytes();
    while let [first, tail @ ..] = rest {
        if *first == b'%' {
            bytes.push(u8::from_str_radix(std::str::from_utf8(&tail[..2]).unwrap(), 16).unwrap());
            rest = &tail[2..];
        } else {
            bytes.push(*first);
            rest = tail;
        }
    }
    String::from_utf8(bytes).unwrap()
}

type Body = BoxBody<Bytes, Infallible>;

fn whole(code: u16, value: &Value) -> Response<Body> {
    let body = Full::new(Bytes::from(value.to_string())).boxed();
    Response::builder().status(StatusCode::from_u16(code).unwrap()).body(body).unwrap()
}

async fn respond(store: Arc<Store>, request: Request<Incoming>) -> Result<Response<Body>, Infallible> {
    let (head, body) = request.into_parts();
    let authorization = head.headers.get("authorization").map(|value| value.to_str().unwrap().to_owned());
    if authorization.as_deref() != Some(&format!("Bearer {}", store.token)) {
        let (code, answer) = status(401, "Unauthorized");
        return Ok(whole(code, &answer));
    }
    let body = body.collect().await.unwrap().to_bytes();
    let query: BTreeMap<String, String> = head
        .uri
        .query()
        .unwrap_or_default()
        .split('&')
        .filter_map(|pair| pair.split_once('='))
        .map(|(key, value)| (key.to_owned(), unescape(value)))
        .collect();
    if query.get("watch").is_none_or(|watch| watch != "1") {
        let (code, answer) = store.answer(&head.method, head.uri.path(), &query, &body);
        return Ok(whole(code, &answer));
    }
    let from = query["resourceVersion"].parse().unwrap();
    let mut cluster = store.cluster.lock().unwrap();
    cluster.from_bookmark += usize::from(cluster.bookmarked > 0 && cluster.bookmarked == from);
    drop(cluster);
    let seconds: u64 = query["timeoutSeconds"].parse().unwrap();
    Ok(Response::new(StreamBody::new(events(store, from, Duration::from_secs(seconds))).boxed()))
}

fn events(
    store: Arc<Store>,
    from: u64,
    time: Duration,
) -> impl futures_util::Stream<Item = Result<Frame<Bytes>, Infallible>> {
    let changed = store.changed.subscribe();
    let ends = store.ends.subscribe();
    let end = tokio::time::Instant::now() + time;
    futures_util::stream::unfold(Some((store, changed, ends, from)), move |turn| async move {
        let (store, mut changed, mut ends, from) = turn?;
        loop {
            let mut found = Vec::new();
            let Ok(version) = store.events(from, &mut found) else {
                // The first chunk of the answer: an ERROR event that carries the status.
                let (_, gone) = status(410, "too old resource version");
                let line = format!("{}\n", json!({ "type": "ERROR", "object": gone }));
                return Some((Ok(Frame::data(Bytes::from(line))), None));
            };
            if !found.is_empty() {
                let lines: String = found.iter().map(|event| format!("{event}\n")).collect();
                return Some((Ok(Frame::data(Bytes::from(lines))), Some((store, changed, ends, version))));
            }
            tokio::select! {
                _ = changed.changed() => {}
                _ = ends.changed() => return None,
                () = tokio::time::sleep_until(end) => return None,
            }
        }
    })
}
