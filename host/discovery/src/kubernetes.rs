//! Discovery through Kubernetes: a watch of pods by label, and the worker's record in an annotation of its own pod.
//!
//! There is no lease beside the kubelet's: a pod that is not ready or has gone is no worker. A pod that is being deleted is a worker that
//! drains, ready or not. The worker's id is its pod's name.

use std::fs;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use hyper::{Method, StatusCode};
use serde_json::{Value, json};
use tokio::time::{MissedTickBehavior, interval, sleep, sleep_until};

use crate::board::Board;
use crate::error::DiscoveryError;
use crate::http::{Question, Server, TlsFiles, Why};
use crate::limits::WORKERS_MAX;
use crate::record::{Role, WorkerRecord, WorkerState, decode_at};
use crate::registration::{Announcer, Registration};
use crate::{Answer, Discovery, Settings, Watch};

/// The annotation that holds a worker's record.
pub const ANNOTATION: &str = "penstock/worker";
/// The label that names a pod's role, as llm-d has it. It need not be there; when it is, the record must agree.
pub const ROLE_LABEL: &str = "llm-d.ai/role";

/// Pods in one page of a listing.
const PAGE: usize = 250;
/// How often a record is written again because the pod changed in between.
const WRITES_MAX: usize = 5;
/// Longest time that the API server may take for an answer.
const PATIENCE_MAX: Duration = Duration::from_secs(5);
/// How long one watch request lasts. The API server ends it; a connection that died without a word is noticed soon after.
const WATCH_MAX: Duration = Duration::from_secs(240);
/// Where a pod finds its service account.
const ACCOUNT: &str = "/var/run/secrets/kubernetes.io/serviceaccount";

/// Where the API server is and which pods are ours.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KubernetesSettings {
    /// `https://HOST:PORT`.
    pub server: String,
    /// The namespace of the pods.
    pub namespace: String,
    /// Which pods, as a label selector.
    pub selector: String,
    /// The authority of the API server, and an own certificate where that is the way to sign in.
    pub tls: TlsFiles,
    /// File with the token of the service account. Read anew for each question, since it is exchanged from time to time.
    pub token: Option<PathBuf>,
    /// How long one watch request lasts.
    pub watch_max: Duration,
}

impl KubernetesSettings {
    /// What a pod finds in its environment and its file system; `variable` reads the environment.
    ///
    /// # Errors
    /// [`DiscoveryError::Setting`] outside of a cluster.
    pub fn in_cluster(variable: impl Fn(&str) -> Option<String>) -> Result<Self, DiscoveryError> {
        let wrong = |why: String| DiscoveryError::Setting { key: "kubernetes", why };
        let set = |name: &str| {
            variable(name).filter(|value| !value.is_empty()).ok_or_else(|| {
                wrong(format!("{name} is not set: this is not a pod; name the API server, its authority and a token"))
            })
        };
        let (host, port) = (set("KUBERNETES_SERVICE_HOST")?, set("KUBERNETES_SERVICE_PORT")?);
        let host = if host.contains(':') { format!("[{host}]") } else { host };
        let account = PathBuf::from(ACCOUNT);
        let namespace = account.join("namespace");
        let namespace = fs::read_to_string(&namespace)
            .map_err(|why| wrong(format!("cannot read {}: {why}; mount the service account", namespace.display())))?;
        Ok(Self {
            server: format!("https://{host}:{port}"),
            namespace: namespace.trim().to_owned(),
            selector: "llm-d.ai/inferenceServing=true".to_owned(),
            tls: TlsFiles { authorities: Some(account.join("ca.crt")), own: None },
            token: Some(account.join("token")),
            watch_max: WATCH_MAX,
        })
    }
}

/// The API server.
#[derive(Clone)]
pub struct Kubernetes {
    api: Arc<Api>,
    settings: Settings,
}

struct Api {
    server: Server,
    /// Path of the pods, and the query that selects ours.
    pods: String,
    selector: String,
    namespace: String,
    token: Option<PathBuf>,
    watch_max: Duration,
}

impl Kubernetes {
    /// Says where the API server is; nothing is asked yet.
    ///
    /// # Errors
    /// [`DiscoveryError::Setting`] when a setting cannot be used.
    pub fn new(kubernetes: KubernetesSettings, settings: Settings) -> Result<Self, DiscoveryError> {
        settings.check()?;
        let is_label = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
        if kubernetes.namespace.is_empty() || !kubernetes.namespace.chars().all(is_label) {
            let why = format!("{:?} is not the name of a namespace", kubernetes.namespace);
            return Err(DiscoveryError::Setting { key: "kubernetes.namespace", why });
        }
        if kubernetes.selector.is_empty() {
            let why = "must select some pods; every pod of a namespace is never meant".to_owned();
            return Err(DiscoveryError::Setting { key: "kubernetes.selector", why });
        }
        let patience = settings.lease.div_f64(3.0).clamp(Duration::from_millis(500), PATIENCE_MAX);
        let server = Server::new("kubernetes.server", &kubernetes.server, &kubernetes.tls, patience)?;
        let api = Api {
            server,
            pods: format!("/api/v1/namespaces/{}/pods", kubernetes.namespace),
            selector: format!("labelSelector={}", escape(&kubernetes.selector)),
            namespace: kubernetes.namespace,
            token: kubernetes.token,
            watch_max: kubernetes.watch_max,
        };
        Ok(Self { api: Arc::new(api), settings })
    }
}

impl Discovery for Kubernetes {
    fn describe(&self) -> String {
        self.api.describe()
    }

    fn register(&self, record: WorkerRecord) -> Answer<'_, Registration> {
        Box::pin(Registration::start(Seat { api: Arc::clone(&self.api) }, record, self.settings.lease))
    }

    fn watch(&self) -> Watch {
        let api = Arc::clone(&self.api);
        let pace = (self.settings.lease / 4).clamp(Duration::from_millis(100), Duration::from_secs(5));
        // Pods stay written down during an outage, so whoever is missing afterwards has really gone.
        Watch::start(self.settings.board(Duration::ZERO), move |board| follow(api, board, pace))
    }
}

/// As it must be in a query.
fn escape(text: &str) -> String {
    let mut escaped = String::new();
    for byte in text.bytes() {
        match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'.' | b'_' | b'~' => escaped.push(char::from(byte)),
            _ => escaped.push_str(&format!("%{byte:02X}")),
        }
    }
    escaped
}

impl Api {
    fn describe(&self) -> String {
        format!("Kubernetes at {}, namespace {}", self.server.address(), self.namespace)
    }

    fn question(&self, method: Method, path: String, body: Option<&Value>) -> Result<Question, Why> {
        let authorization = match &self.token {
            None => None,
            Some(path) => {
                let token = fs::read_to_string(path).map_err(|why| format!("cannot read {}: {why}", path.display()))?;
                Some(format!("Bearer {}", token.trim()))
            }
        };
        let content_type = if method == Method::PATCH { "application/merge-patch+json" } else { "application/json" };
        let body = body.map(|body| body.to_string().into_bytes()).unwrap_or_default();
        Ok(Question { method, path, content_type, authorization, body })
    }

    async fn ask(
        &self,
        method: Method,
        path: String,
        body: Option<&Value>,
    ) -> Result<(StatusCode, Value), DiscoveryError> {
        let asked = async {
            let (status, answer) = self.server.ask(self.question(method, path, body)?).await?;
            let answer = serde_json::from_slice(&answer);
            answer.map(|answer| (status, answer)).map_err(|_| format!("status {status} and no JSON"))
        };
        asked.await.map_err(|why: Why| DiscoveryError::Unreachable { service: self.describe(), why })
    }

    /// What a status that is no success means.
    fn refusal(&self, what: &'static str, status: StatusCode, answer: &Value) -> DiscoveryError {
        let service = self.describe();
        let why = format!("{} (status {status})", answer["message"].as_str().unwrap_or("no reason given"));
        let remedy = match status {
            StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN => {
                "give the service account a role with get, list, watch and patch on pods"
            }
            StatusCode::NOT_FOUND => "a worker's id must be the name of its pod, and the namespace the pod's",
            status if status.is_server_error() || status == StatusCode::TOO_MANY_REQUESTS => {
                return DiscoveryError::Unreachable { service, why };
            }
            _ => return DiscoveryError::Answer { service, what, why },
        };
        DiscoveryError::Refused { service, what, why, remedy }
    }

    async fn pod(&self, id: &str) -> Result<Value, DiscoveryError> {
        let (status, pod) = self.ask(Method::GET, format!("{}/{id}", self.pods), None).await?;
        if status.is_success() { Ok(pod) } else { Err(self.refusal("a pod", status, &pod)) }
    }
}

/// The record that a pod carries.
fn annotation(pod: &Value) -> Option<&str> {
    pod["metadata"]["annotations"][ANNOTATION].as_str()
}

fn recorded(pod: &Value, id: &str) -> Option<WorkerRecord> {
    decode_at(id, annotation(pod)?.as_bytes()).ok()
}

/// The worker's own pod.
struct Seat {
    api: Arc<Api>,
}

impl Seat {
    /// Writes or removes the annotation, unless the pod carries a later life's.
    async fn write(&mut self, record: &WorkerRecord, is_withdrawn: bool) -> Result<(), DiscoveryError> {
        let id = record.id.as_str();
        let text = String::from_utf8(record.encode()?).map_err(|why| DiscoveryError::Answer {
            service: self.api.describe(),
            what: "a record",
            why: why.to_string(),
        })?;
        for _ in 0..WRITES_MAX {
            let pod = self.api.pod(id).await?;
            let there = recorded(&pod, id).map(|there| there.epoch);
            if is_withdrawn && there != Some(record.epoch) {
                return Ok(());
            }
            not_superseded(record, there)?;
            let value = if is_withdrawn { Value::Null } else { Value::from(text.as_str()) };
            // With the version that was read: a write in between is a conflict, and is looked at.
            let version = &pod["metadata"]["resourceVersion"];
            let patch = json!({ "metadata": { "resourceVersion": version, "annotations": { ANNOTATION: value } } });
            let (status, answer) = self.api.ask(Method::PATCH, format!("{}/{id}", self.api.pods), Some(&patch)).await?;
            match status {
                StatusCode::CONFLICT => {}
                status if status.is_success() => return Ok(()),
                status => return Err(self.api.refusal("a worker's annotation", status, &answer)),
            }
        }
        let why = format!("pod {id} changed {WRITES_MAX} times between reading and writing");
        Err(DiscoveryError::Unreachable { service: self.api.describe(), why })
    }
}

fn not_superseded(record: &WorkerRecord, there: Option<u64>) -> Result<(), DiscoveryError> {
    match there {
        Some(newer) if newer > record.epoch => {
            Err(DiscoveryError::Superseded { id: record.id.clone(), epoch: record.epoch, newer })
        }
        _ => Ok(()),
    }
}

impl Announcer for Seat {
    fn announce<'a>(&'a mut self, record: &'a WorkerRecord) -> Answer<'a, ()> {
        Box::pin(self.write(record, false))
    }

    /// Nothing has to be renewed; it is seen whether somebody has taken the record out or a later life has come.
    fn renew<'a>(&'a mut self, record: &'a WorkerRecord) -> Answer<'a, bool> {
        Box::pin(async move {
            let pod = self.api.pod(record.id.as_str()).await?;
            let there = recorded(&pod, record.id.as_str());
            not_superseded(record, there.as_ref().map(|there| there.epoch))?;
            Ok(there.as_ref() == Some(record))
        })
    }

    fn withdraw<'a>(&'a mut self, record: &'a WorkerRecord) -> Answer<'a, ()> {
        Box::pin(self.write(record, true))
    }
}

/// What a pod is to a watcher.
enum Seen {
    Worker(Vec<u8>),
    /// Not registered, not ready, or over.
    Nobody,
    Fault(Why),
}

fn look(pod: &Value) -> (String, Seen) {
    let name = pod["metadata"]["name"].as_str().unwrap_or_default().to_owned();
    let Some(text) = annotation(pod) else { return (name, Seen::Nobody) };
    let is_over = matches!(pod["status"]["phase"].as_str(), Some("Succeeded" | "Failed"));
    let is_leaving = !pod["metadata"]["deletionTimestamp"].is_null();
    let conditions = pod["status"]["conditions"].as_array().into_iter().flatten();
    let is_ready =
        conditions.into_iter().any(|condition| condition["type"] == "Ready" && condition["status"] == "True");
    if is_over || (!is_ready && !is_leaving) {
        return (name, Seen::Nobody);
    }
    let Ok(mut record) = decode_at(&name, text.as_bytes()) else {
        // The board says what is wrong with it.
        return (name, Seen::Worker(text.as_bytes().to_vec()));
    };
    let label = pod["metadata"]["labels"][ROLE_LABEL].as_str();
    let labelled = match label {
        None => Some(record.role),
        Some("prefill") => Some(Role::Prefill),
        Some("decode") => Some(Role::Decode),
        Some("both" | "prefill-decode" | "unified") => Some(Role::Unified),
        Some(_) => None,
    };
    if labelled != Some(record.role) {
        let label = label.unwrap_or_default();
        let why = format!("its label {ROLE_LABEL} says {label:?} and its record {}; make them agree", record.role);
        return (name, Seen::Fault(why));
    }
    if is_leaving && record.state != WorkerState::Terminated {
        record.state = WorkerState::Draining;
    }
    let seen = record.encode().map_or_else(|why| Seen::Fault(why.to_string()), Seen::Worker);
    (name, seen)
}

/// How a watch goes on.
enum Turn {
    From(String),
    List,
}

async fn follow(api: Arc<Api>, board: Arc<Board>, pace: Duration) {
    let mut turn = Turn::List;
    loop {
        let from = match turn {
            Turn::From(version) => Ok(version),
            Turn::List => list(&api, &board).await.map_err(|why| why.to_string()),
        };
        let began = Instant::now();
        let watched = match from {
            Ok(version) => watch(&api, &board, version, pace).await,
            Err(why) => Err(why),
        };
        let failed = watched.is_err();
        turn = watched.unwrap_or_else(|why| {
            board.lost(&why);
            Turn::List
        });
        // A server that ends each watch at once is not asked more often than others.
        if failed || began.elapsed() < pace {
            sleep(pace).await;
        }
    }
}

fn version_of(object: &Value) -> Option<&str> {
    object["metadata"]["resourceVersion"].as_str()
}

/// Reads the whole set, page by page. The answer is the version to watch from.
async fn list(api: &Api, board: &Board) -> Result<String, DiscoveryError> {
    let mut entries = Vec::new();
    let mut faults = Vec::new();
    let mut next = String::new();
    let version = loop {
        let path = format!("{}?{}&limit={PAGE}{next}", api.pods, api.selector);
        let (status, page) = api.ask(Method::GET, path, None).await?;
        if !status.is_success() {
            return Err(api.refusal("the pods", status, &page));
        }
        for pod in page["items"].as_array().into_iter().flatten() {
            match look(pod) {
                (name, Seen::Worker(bytes)) => entries.push((name, bytes)),
                (name, Seen::Fault(why)) => faults.push((name, why)),
                (_, Seen::Nobody) => {}
            }
        }
        let version = version_of(&page).unwrap_or_default().to_owned();
        match page["metadata"]["continue"].as_str() {
            // One more than can be taken, so that the board says so.
            Some(token) if !token.is_empty() && entries.len() <= WORKERS_MAX => {
                next = format!("&continue={}", escape(token));
            }
            _ => break version,
        }
    };
    board.list(Instant::now(), &entries);
    faults.iter().for_each(|(place, why)| board.fault(place, why));
    Ok(version)
}

async fn watch(api: &Api, board: &Board, mut version: String, pace: Duration) -> Result<Turn, Why> {
    let seconds = api.watch_max.as_secs().max(1);
    let path = format!(
        "{}?{}&watch=1&allowWatchBookmarks=true&timeoutSeconds={seconds}&resourceVersion={}",
        api.pods,
        api.selector,
        escape(&version)
    );
    let (status, mut lines) = api.server.listen(api.question(Method::GET, path, None)?).await?;
    match status {
        StatusCode::GONE => return Ok(Turn::List),
        status if !status.is_success() => return Err(format!("the watch was answered with status {status}")),
        _ => {}
    }
    let mut tick = interval(pace);
    tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let end = tokio::time::Instant::now() + api.watch_max + Duration::from_secs(10);
    loop {
        tokio::select! {
            line = lines.next() => match line? {
                None => return Ok(Turn::From(version)),
                Some(line) => {
                    let event: Value = serde_json::from_slice(&line).map_err(|why| format!("the watch sent no JSON: {why}"))?;
                    if take(board, &event, &mut version)? {
                        return Ok(Turn::List);
                    }
                }
            },
            _ = tick.tick() => {
                // From the server's cache: it costs next to nothing and says that the server is there.
                let path = format!("{}?{}&limit=1&resourceVersion=0", api.pods, api.selector);
                let (status, answer) = api.ask(Method::GET, path, None).await.map_err(|why| why.to_string())?;
                if !status.is_success() {
                    return Err(api.refusal("the pods", status, &answer).to_string());
                }
                board.heard(Instant::now());
            }
            () = sleep_until(end) => return Err("a watch did not end when its time was over".to_owned()),
            () = board.resync.notified() => return Ok(Turn::List),
        }
    }
}

/// One event. True: what came next is gone from the server's history, so everything must be read again.
fn take(board: &Board, event: &Value, version: &mut String) -> Result<bool, Why> {
    let object = &event["object"];
    let now = Instant::now();
    match event["type"].as_str() {
        Some("ADDED" | "MODIFIED") => match look(object) {
            (name, Seen::Worker(bytes)) => board.put(now, &name, &bytes),
            (name, Seen::Nobody) => board.remove(now, &name),
            (name, Seen::Fault(why)) => {
                board.remove(now, &name);
                board.fault(&name, &why);
            }
        },
        Some("DELETED") => board.remove(now, object["metadata"]["name"].as_str().unwrap_or_default()),
        Some("BOOKMARK") => board.heard(now),
        Some("ERROR") if object["code"] == 410 => return Ok(true),
        Some("ERROR") => {
            let why = object["message"].as_str().unwrap_or("no reason given");
            return Err(format!("the watch ended: {}", why.chars().take(200).collect::<String>()));
        }
        // A kind of event that this release does not know changes nothing here.
        _ => return Ok(false),
    }
    if let Some(new) = version_of(object) {
        version.clear();
        version.push_str(new);
    }
    Ok(false)
}
