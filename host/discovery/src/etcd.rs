//! Discovery through etcd: a key a worker under a lease, and a watch that starts where the listing ended.
//!
//! The wire is etcd's own JSON gateway (`/v3/...`), which every server since 3.4 has on its client port. Numbers of 64 bits are strings
//! there, bytes are base 64, fields with the value zero are left out.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use hyper::{Method, StatusCode};
use serde_json::{Value, json};
use tokio::sync::Mutex;
use tokio::time::{MissedTickBehavior, interval, sleep, sleep_until};

use crate::board::Board;
use crate::error::DiscoveryError;
use crate::http::{Lines, Question, Server, TlsFiles, Why};
use crate::limits::WORKERS_MAX;
use crate::record::{WorkerRecord, decode_at};
use crate::registration::{Announcer, Registration};
use crate::{Answer, Discovery, Settings, Watch};

/// Servers of one cluster: etcd itself advises against more than seven.
const ENDPOINTS_MAX: usize = 9;
/// How often a record is written again because somebody else wrote its key in between.
const WRITES_MAX: usize = 5;
/// Longest time that a server may take: past it the next one is asked.
const PATIENCE_MAX: Duration = Duration::from_secs(3);
/// How long one watch request lasts before it is asked anew. A connection that died without a word is noticed at the latest then.
const WATCH_MAX: Duration = Duration::from_secs(60);

/// Where the cluster is and what is ours in it.
#[derive(Clone, PartialEq, Eq)]
pub struct EtcdSettings {
    /// `http://HOST:PORT` or `https://HOST:PORT`, one for each server.
    pub endpoints: Vec<String>,
    /// Begin of all keys, with a slash at the end. Two deployments on one cluster have two.
    pub prefix: String,
    /// For `https`.
    pub tls: TlsFiles,
    /// Name and password, where the cluster has authentication on.
    pub user: Option<(String, String)>,
    /// How long one watch request lasts before it is asked anew.
    pub watch_max: Duration,
}

impl Default for EtcdSettings {
    fn default() -> Self {
        Self {
            endpoints: vec!["http://127.0.0.1:2379".to_owned()],
            prefix: "/penstock/workers/".to_owned(),
            tls: TlsFiles::default(),
            user: None,
            watch_max: WATCH_MAX,
        }
    }
}

/// The password stays out of logs.
impl std::fmt::Debug for EtcdSettings {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("EtcdSettings")
            .field("endpoints", &self.endpoints)
            .field("prefix", &self.prefix)
            .field("user", &self.user.as_ref().map(|(name, _)| name))
            .finish_non_exhaustive()
    }
}

/// The cluster.
#[derive(Clone)]
pub struct Etcd {
    cluster: Arc<Cluster>,
    settings: Settings,
}

struct Cluster {
    servers: Vec<Server>,
    /// The one that answered last.
    preferred: AtomicUsize,
    prefix: String,
    user: Option<(String, String)>,
    /// What the cluster gave for name and password.
    token: Mutex<Option<String>>,
    watch_max: Duration,
}

impl Etcd {
    /// Says where the cluster is; nothing is asked yet.
    ///
    /// # Errors
    /// [`DiscoveryError::Setting`] when a setting cannot be used.
    pub fn new(etcd: EtcdSettings, settings: Settings) -> Result<Self, DiscoveryError> {
        settings.check()?;
        let wrong = |key, why: &str| Err(DiscoveryError::Setting { key, why: why.to_owned() });
        if etcd.endpoints.is_empty() || etcd.endpoints.len() > ENDPOINTS_MAX {
            return wrong("etcd.endpoints", "must name one to nine servers");
        }
        if etcd.prefix.is_empty() || !etcd.prefix.ends_with('/') || etcd.prefix.len() > 256 {
            return wrong("etcd.prefix", "must end with a slash and have at most 256 bytes");
        }
        let patience = settings.lease.div_f64(3.0).clamp(Duration::from_millis(500), PATIENCE_MAX);
        let servers: Result<Vec<Server>, DiscoveryError> =
            etcd.endpoints.iter().map(|at| Server::new("etcd.endpoints", at, &etcd.tls, patience)).collect();
        let cluster = Cluster {
            servers: servers?,
            preferred: AtomicUsize::new(0),
            prefix: etcd.prefix,
            user: etcd.user,
            token: Mutex::new(None),
            watch_max: etcd.watch_max,
        };
        Ok(Self { cluster: Arc::new(cluster), settings })
    }
}

impl Discovery for Etcd {
    fn describe(&self) -> String {
        self.cluster.describe()
    }

    fn register(&self, record: WorkerRecord) -> Answer<'_, Registration> {
        let seat = Seat { cluster: Arc::clone(&self.cluster), lease: None, lease_time: self.settings.lease };
        Box::pin(Registration::start(seat, record, self.settings.lease))
    }

    fn watch(&self) -> Watch {
        let cluster = Arc::clone(&self.cluster);
        let lease = self.settings.lease;
        Watch::start(self.settings.board(lease), move |board| follow(cluster, board, lease))
    }
}

/// What the gateway said instead of an answer.
enum Refusal {
    /// This server does not work now: ask another one, later.
    Unavailable(Why),
    /// The token is too old, or there was none.
    Token,
    /// gRPC's code and the text.
    Told(u64, Why),
}

impl Cluster {
    fn describe(&self) -> String {
        let servers: Vec<&str> = self.servers.iter().map(Server::address).collect();
        format!("etcd at {}", servers.join(", "))
    }

    fn key(&self, id: &str) -> String {
        BASE64.encode(format!("{}{id}", self.prefix))
    }

    /// First and past the last key of ours.
    fn range(&self) -> Value {
        let mut end = self.prefix.clone().into_bytes();
        // A slash is last, and the byte after it is valid too.
        if let Some(last) = end.last_mut() {
            *last += 1;
        }
        json!({ "key": BASE64.encode(&self.prefix), "range_end": BASE64.encode(end) })
    }

    fn question(&self, path: &str, body: &Value, token: Option<String>) -> Question {
        Question {
            method: Method::POST,
            path: path.to_owned(),
            content_type: "application/json",
            authorization: token,
            body: body.to_string().into_bytes(),
        }
    }

    async fn token(&self, server: &Server) -> Result<Option<String>, Refusal> {
        let Some((name, password)) = &self.user else { return Ok(None) };
        let mut token = self.token.lock().await;
        if token.is_none() {
            let body = json!({ "name": name, "password": password });
            let (status, answer) =
                server.ask(self.question("/v3/auth/authenticate", &body, None)).await.map_err(Refusal::Unavailable)?;
            let answer = parse(&answer).map_err(Refusal::Unavailable)?;
            match answer["token"].as_str() {
                Some(new) if status.is_success() => *token = Some(new.to_owned()),
                _ => return Err(refusal(status, &answer)),
            }
        }
        Ok(token.clone())
    }

    /// Asks the servers in turn, the one that answered last first.
    async fn call(&self, what: &'static str, path: &str, body: &Value) -> Result<Value, DiscoveryError> {
        let first = self.preferred.load(Ordering::Relaxed);
        let mut why = String::new();
        for turn in 0..self.servers.len() {
            let at = (first + turn) % self.servers.len();
            let server = &self.servers[at];
            match self.call_at(server, path, body).await {
                Ok(answer) => {
                    self.preferred.store(at, Ordering::Relaxed);
                    return Ok(answer);
                }
                Err(Refusal::Unavailable(new)) => why = format!("{}: {new}", server.address()),
                Err(Refusal::Token) => {
                    let (service, why) = (self.describe(), "authentication is on".to_owned());
                    let remedy = "set name and password of a user who has a role for the prefix";
                    return Err(DiscoveryError::Refused { service, what, why, remedy });
                }
                Err(Refusal::Told(code, why)) => return Err(self.told(what, code, why)),
            }
        }
        Err(DiscoveryError::Unreachable { service: self.describe(), why })
    }

    fn told(&self, what: &'static str, code: u64, why: Why) -> DiscoveryError {
        let service = self.describe();
        match code {
            // PERMISSION_DENIED, UNAUTHENTICATED, and what etcd answers to a wrong password.
            7 | 16 => DiscoveryError::Refused { service, what, why, remedy: "give the user a role for the prefix" },
            3 if why.contains("auth") || why.contains("user name") => {
                let remedy = "check name and password of the etcd user";
                DiscoveryError::Refused { service, what, why, remedy }
            }
            _ => DiscoveryError::Answer { service, what, why: format!("code {code}, {why}") },
        }
    }

    async fn call_at(&self, server: &Server, path: &str, body: &Value) -> Result<Value, Refusal> {
        for is_last in [false, true] {
            let token = self.token(server).await?;
            let (status, answer) = server.ask(self.question(path, body, token)).await.map_err(Refusal::Unavailable)?;
            let answer = parse(&answer).map_err(Refusal::Unavailable)?;
            if status.is_success() && answer.get("error").is_none() {
                return Ok(answer);
            }
            match refusal(status, &answer) {
                Refusal::Token if !is_last && self.user.is_some() => *self.token.lock().await = None,
                refusal => return Err(refusal),
            }
        }
        Err(Refusal::Token)
    }

    /// The worker's key: what it holds, and the revision and lease that it has.
    async fn holder(&self, id: &str) -> Result<Option<Holder>, DiscoveryError> {
        let answer = self.call("read a worker's key", "/v3/kv/range", &json!({ "key": self.key(id) })).await?;
        let Some(row) = answer["kvs"].get(0) else { return Ok(None) };
        let epoch = bytes(&row["value"]).and_then(|bytes| decode_at(id, &bytes).ok()).map(|record| record.epoch);
        Ok(Some(Holder { epoch, revision: number(&row["mod_revision"]), lease: number(&row["lease"]) }))
    }
}

/// Who has a worker's key.
struct Holder {
    /// None when it holds something that is no record.
    epoch: Option<u64>,
    revision: i64,
    lease: i64,
}

fn parse(answer: &[u8]) -> Result<Value, Why> {
    serde_json::from_slice(answer).map_err(|_| format!("not JSON, but {:?}", text_of(answer)))
}

/// The begin of what a service said, for an error.
fn text_of(bytes: &[u8]) -> String {
    String::from_utf8_lossy(&bytes[..bytes.len().min(120)]).into_owned()
}

fn refusal(status: StatusCode, answer: &Value) -> Refusal {
    // Of a stream the error is an object; else its text and code stand side by side.
    let error = &answer["error"];
    let text = error.as_str().or_else(|| error["message"].as_str()).or_else(|| answer["message"].as_str());
    let text = text.unwrap_or("no reason given");
    let code = answer["code"].as_u64().or_else(|| error["grpc_code"].as_u64()).or_else(|| error["code"].as_u64());
    match code {
        _ if text.contains("invalid auth token") || text.contains("user name is empty") => Refusal::Token,
        // DEADLINE_EXCEEDED, RESOURCE_EXHAUSTED, UNAVAILABLE, and UNKNOWN, which is what an election in progress looks like.
        Some(2 | 4 | 8 | 14) | None => Refusal::Unavailable(format!("{text} (status {status})")),
        Some(code) => Refusal::Told(code, text.to_owned()),
    }
}

fn number(value: &Value) -> i64 {
    value.as_str().and_then(|text| text.parse().ok()).or_else(|| value.as_i64()).unwrap_or(0)
}

fn bytes(value: &Value) -> Option<Vec<u8>> {
    BASE64.decode(value.as_str()?).ok()
}

/// One worker's key.
struct Seat {
    cluster: Arc<Cluster>,
    /// The lease that the key hangs on.
    lease: Option<i64>,
    lease_time: Duration,
}

impl Seat {
    async fn grant(&mut self) -> Result<i64, DiscoveryError> {
        if let Some(lease) = self.lease {
            return Ok(lease);
        }
        let seconds = self.lease_time.as_millis().div_ceil(1_000);
        let answer = self.cluster.call("a lease", "/v3/lease/grant", &json!({ "TTL": seconds.to_string() })).await?;
        let lease = number(&answer["ID"]);
        self.lease = Some(lease);
        Ok(lease)
    }

    async fn write(&mut self, record: &WorkerRecord) -> Result<(), DiscoveryError> {
        let id = record.id.as_str();
        let key = self.cluster.key(id);
        let value = BASE64.encode(record.encode()?);
        let mut why = String::new();
        for _ in 0..WRITES_MAX {
            let lease = self.grant().await?;
            let holder = self.cluster.holder(id).await?;
            not_superseded(record, holder.as_ref())?;
            let revision = holder.map_or(0, |holder| holder.revision);
            let write = json!({
                "compare": [{ "key": key, "target": "MOD", "result": "EQUAL", "mod_revision": revision.to_string() }],
                "success": [{ "request_put": { "key": key, "value": value, "lease": lease.to_string() } }],
            });
            match self.cluster.call("write a worker's key", "/v3/kv/txn", &write).await {
                Ok(answer) if answer["succeeded"] == true => return Ok(()),
                Ok(_) => why = "somebody else keeps writing the worker's key".to_owned(),
                // The lease ran out meanwhile: another one.
                Err(DiscoveryError::Answer { why: told, .. }) if told.contains("lease not found") => {
                    self.lease = None;
                    why = told;
                }
                Err(why) => return Err(why),
            }
        }
        Err(DiscoveryError::Unreachable { service: self.cluster.describe(), why })
    }

    async fn extend(&mut self, record: &WorkerRecord) -> Result<bool, DiscoveryError> {
        let Some(lease) = self.lease else { return Ok(false) };
        let answer =
            self.cluster.call("a lease's renewal", "/v3/lease/keepalive", &json!({ "ID": lease.to_string() })).await?;
        if number(&answer["result"]["TTL"]) <= 0 {
            self.lease = None;
            return Ok(false);
        }
        let holder = self.cluster.holder(record.id.as_str()).await?;
        not_superseded(record, holder.as_ref())?;
        Ok(holder.is_some_and(|holder| holder.lease == lease))
    }
}

fn not_superseded(record: &WorkerRecord, holder: Option<&Holder>) -> Result<(), DiscoveryError> {
    match holder.and_then(|holder| holder.epoch) {
        Some(newer) if newer > record.epoch => {
            Err(DiscoveryError::Superseded { id: record.id.clone(), epoch: record.epoch, newer })
        }
        _ => Ok(()),
    }
}

impl Announcer for Seat {
    fn announce<'a>(&'a mut self, record: &'a WorkerRecord) -> Answer<'a, ()> {
        Box::pin(self.write(record))
    }

    fn renew<'a>(&'a mut self, record: &'a WorkerRecord) -> Answer<'a, bool> {
        Box::pin(self.extend(record))
    }

    /// The key goes with its lease; a later life's key hangs on another one.
    fn withdraw<'a>(&'a mut self, _record: &'a WorkerRecord) -> Answer<'a, ()> {
        Box::pin(async move {
            let Some(lease) = self.lease.take() else { return Ok(()) };
            let body = json!({ "ID": lease.to_string() });
            match self.cluster.call("a lease's end", "/v3/lease/revoke", &body).await {
                // It has run out by itself.
                Err(DiscoveryError::Answer { why, .. }) if why.contains("lease not found") => Ok(()),
                answer => answer.map(|_| ()),
            }
        })
    }
}

/// Why a watch ended without a fault.
enum Turn {
    /// Go on from this revision.
    From(i64),
    /// Read everything again.
    List,
}

async fn follow(cluster: Arc<Cluster>, board: Arc<Board>, lease: Duration) {
    let pace = (lease / 4).clamp(Duration::from_millis(100), Duration::from_secs(2));
    let mut turn = Turn::List;
    loop {
        let from = match turn {
            Turn::From(revision) => Ok(revision),
            Turn::List => list(&cluster, &board).await.map_err(|why| why.to_string()),
        };
        let watched = match from {
            Ok(revision) => watch(&cluster, &board, revision, pace).await,
            Err(why) => Err(why),
        };
        turn = match watched {
            Ok(turn) => turn,
            Err(why) => {
                board.lost(&why);
                // Another server, if there is one, and everything from the start: what was missed is not known.
                cluster.preferred.fetch_add(1, Ordering::Relaxed);
                sleep(pace).await;
                Turn::List
            }
        };
    }
}

/// Reads the whole set. The answer is the revision to watch from.
async fn list(cluster: &Cluster, board: &Board) -> Result<i64, DiscoveryError> {
    let mut question = cluster.range();
    // One more than can be taken, so that the board says so.
    question["limit"] = (WORKERS_MAX + 1).to_string().into();
    let answer = cluster.call("the workers", "/v3/kv/range", &question).await?;
    let mut entries = Vec::new();
    for row in answer["kvs"].as_array().into_iter().flatten() {
        let Some((place, value)) = bytes(&row["key"]).zip(bytes(&row["value"])) else { continue };
        entries.push((place_of(cluster, &place), value));
    }
    board.list(Instant::now(), &entries);
    Ok(number(&answer["header"]["revision"]) + 1)
}

fn place_of(cluster: &Cluster, key: &[u8]) -> String {
    let key = String::from_utf8_lossy(key);
    key.strip_prefix(cluster.prefix.as_str()).unwrap_or(&key).to_owned()
}

/// Listens from `revision` on until something ends it; meanwhile asks the same server, again and again, whether it is there.
async fn watch(cluster: &Cluster, board: &Board, mut revision: i64, pace: Duration) -> Result<Turn, Why> {
    let server = &cluster.servers[cluster.preferred.load(Ordering::Relaxed) % cluster.servers.len()];
    let mut lines = open(cluster, server, revision).await?;
    let mut tick = interval(pace);
    tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let end = tokio::time::Instant::now() + cluster.watch_max;
    loop {
        tokio::select! {
            line = lines.next() => {
                let line = line?.ok_or("the watch was closed")?;
                match take(cluster, board, &parse(&line)?, &mut revision)? {
                    Some(turn) => return Ok(turn),
                    None => continue,
                }
            }
            _ = tick.tick() => {
                let mut question = cluster.range();
                question["count_only"] = true.into();
                let answer = cluster.call_at(server, "/v3/kv/range", &question).await.map_err(|refusal| match refusal {
                    Refusal::Unavailable(why) | Refusal::Told(_, why) => why,
                    Refusal::Token => "the token is not taken".to_owned(),
                })?;
                board.heard(Instant::now());
                // A cluster that was set up anew counts from one again: a watch from the old count would never hear anything.
                if number(&answer["header"]["revision"]) + 1 < revision {
                    return Err("its revisions have gone back: it holds other data than before".to_owned());
                }
            }
            () = sleep_until(end) => return Ok(Turn::From(revision)),
            () = board.resync.notified() => return Ok(Turn::List),
        }
    }
}

async fn open(cluster: &Cluster, server: &Server, revision: i64) -> Result<Lines, Why> {
    let mut create = cluster.range();
    create["start_revision"] = revision.to_string().into();
    create["progress_notify"] = true.into();
    let token = cluster.token(server).await.map_err(|_| "no token for the watch")?;
    let question = cluster.question("/v3/watch", &json!({ "create_request": create }), token);
    let (status, lines) = server.listen(question).await?;
    if !status.is_success() {
        return Err(format!("the watch was answered with status {status}"));
    }
    Ok(lines)
}

/// One message of a watch.
fn take(cluster: &Cluster, board: &Board, message: &Value, revision: &mut i64) -> Result<Option<Turn>, Why> {
    let Some(result) = message.get("result") else {
        return Err(format!("the watch ended: {}", text_of(message["error"].to_string().as_bytes())));
    };
    if result["canceled"] == true {
        // What lies between is gone from its history. Read everything.
        if number(&result["compact_revision"]) > 0 {
            return Ok(Some(Turn::List));
        }
        return Err(format!(
            "the watch was cancelled: {}",
            result["cancel_reason"].as_str().unwrap_or("no reason given")
        ));
    }
    let now = Instant::now();
    for event in result["events"].as_array().into_iter().flatten() {
        let Some(key) = bytes(&event["kv"]["key"]) else { continue };
        let place = place_of(cluster, &key);
        match (event["type"].as_str(), bytes(&event["kv"]["value"])) {
            (Some("DELETE"), _) => board.remove(now, &place),
            (_, value) => board.put(now, &place, &value.unwrap_or_default()),
        }
    }
    // A message that says only that the watch exists has the store's present revision, which may be past what is still to come.
    if result["created"] != true {
        *revision = (*revision).max(number(&result["header"]["revision"]) + 1);
    }
    Ok(None)
}
