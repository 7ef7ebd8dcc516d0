//! `Idempotency-Key`: a retry gets the first call's answer and is never computed or billed again.
//!
//! A call with the same key and body waits for the first one and gets its bytes, streamed or not; with another body it is a 409. Failed
//! calls, and streams whose client left, leave no trace, so that they may be retried. Answers are kept for ten minutes, and while there is
//! room: the oldest make way. What was in flight when the process died is known to the next one ([`Interrupted`]): a retry is told so once,
//! and its key is free then.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use axum::body::Body;
use axum::http::{HeaderValue, Response, header};
use bytes::Bytes;
use hmac::{Hmac, KeyInit as _, Mac as _};
use penstock_base::TenantId;
use sha2::Sha256;
use tokio::sync::watch;

use super::app::unix_s;
use super::error::ApiError;
use super::interrupted::{Fingerprint, Interrupted, Key};
use crate::deployment::SECRET_BYTES;

const KEPT_FOR: Duration = Duration::from_secs(600);
const ENTRIES_MAX: usize = 4_096;
const OTHER_BODY: &str = "this Idempotency-Key was used with another body";
/// Bytes of kept answers, over all entries.
const BYTES_MAX: usize = 32 << 20;

#[derive(Clone)]
enum State {
    Running,
    Answered(Kept),
}

/// An answer as it was sent.
#[derive(Clone)]
struct Kept {
    body: Bytes,
    content_type: &'static str,
}

struct Entry {
    body: Fingerprint,
    since: Instant,
    state: watch::Sender<State>,
}

#[derive(Default)]
struct Table {
    entries: HashMap<Key, Entry>,
    bytes: usize,
    /// What is known of earlier lives, and told to later ones; none where nothing is kept.
    interrupted: Option<Interrupted>,
}

/// Answers by key. Cheap to clone.
#[derive(Clone, Default)]
pub struct Idempotency {
    table: Arc<Mutex<Table>>,
    /// Keys and bodies are hashed under it.
    secret: [u8; SECRET_BYTES],
}

/// What a key came to.
pub enum Claimed {
    /// Nobody had it: compute, and say so with the claim.
    First(Claim),
    /// The first call's answer.
    Answered(Response<Body>),
}

/// The right and duty to answer for a key. Dropped without an answer, the key is free again.
pub struct Claim {
    key: Key,
    owner: Idempotency,
    answered: bool,
}

impl Idempotency {
    /// Hashes under this secret; `interrupted` is what is kept over a restart.
    pub fn new(secret: [u8; SECRET_BYTES], interrupted: Option<Interrupted>) -> Self {
        let table = Table { interrupted, ..Table::default() };
        Self { table: Arc::new(Mutex::new(table)), secret }
    }

    fn hash(&self, domain: &str, parts: &[&[u8]]) -> [u8; 32] {
        let mut mac = Hmac::<Sha256>::new_from_slice(&self.secret).expect("HMAC takes keys of any length");
        mac.update(domain.as_bytes());
        for part in parts {
            mac.update(&(part.len() as u64).to_le_bytes());
            mac.update(part);
        }
        mac.finalize().into_bytes().into()
    }

    /// Claims a key for a body, or waits for the one who has it.
    ///
    /// # Errors
    /// 409 for another body under the same key, 429 when too many keys are in use, 503 once for a call that ended with an earlier life.
    pub async fn claim(&self, tenant: TenantId, key: &str, body: &[u8]) -> Result<Claimed, ApiError> {
        let key: Key = self.hash("idempotency-key", &[&tenant.0.to_le_bytes(), key.as_bytes()]);
        let mut fingerprint: Fingerprint = [0; 24];
        fingerprint.copy_from_slice(&self.hash("idempotency-body", &[body])[..24]);
        let body = fingerprint;
        loop {
            let mut watch = {
                let mut table = self.lock();
                table.forget_if_old(&key);
                match table.entries.get(&key) {
                    None => {
                        table.make_room()?;
                        table.tell_interrupted(&key, &body)?;
                        let entry = Entry { body, since: Instant::now(), state: watch::Sender::new(State::Running) };
                        table.entries.insert(key, entry);
                        if let Some(interrupted) = &mut table.interrupted {
                            interrupted.accept(&key, body, unix_s());
                        }
                        return Ok(Claimed::First(Claim { key, owner: self.clone(), answered: false }));
                    }
                    Some(entry) if entry.body != body => return Err(ApiError::idempotency_conflict(OTHER_BODY)),
                    Some(entry) => entry.state.subscribe(),
                }
            };
            let state = watch.wait_for(|state| matches!(state, State::Answered(_))).await;
            if let Ok(state) = state
                && let State::Answered(kept) = &*state
            {
                return Ok(Claimed::Answered(replay(kept.clone())));
            }
            // The first call failed and its key is free: take it.
        }
    }

    fn lock(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Table {
    /// Whether an earlier life of the server was answering this call when it ended; said once.
    fn tell_interrupted(&mut self, key: &Key, body: &Fingerprint) -> Result<(), ApiError> {
        let Some(interrupted) = &mut self.interrupted else { return Ok(()) };
        let now_s = unix_s();
        let Some(call) = interrupted.find(key, now_s) else { return Ok(()) };
        if call.body != *body {
            return Err(ApiError::idempotency_conflict(OTHER_BODY));
        }
        interrupted.forget(key, now_s);
        tracing::info!(epoch = call.epoch.0, "a retry of a call that was interrupted by the server's end");
        Err(ApiError::interrupted())
    }

    /// A call is over, whatever came of it.
    fn over(&mut self, key: &Key) {
        if let Some(interrupted) = &mut self.interrupted {
            interrupted.over(key, unix_s());
        }
    }

    /// Drops this answer when its time is over.
    fn forget_if_old(&mut self, key: &Key) {
        if self.entries.get(key).is_some_and(|entry| entry.kept_bytes().is_some() && entry.since.elapsed() >= KEPT_FOR)
        {
            self.forget(key);
        }
    }

    /// The oldest answers make way; refuses when all keys belong to calls that run.
    fn make_room(&mut self) -> Result<(), ApiError> {
        if self.has_room() {
            return Ok(());
        }
        let answered = self.entries.iter().filter(|(_, entry)| entry.kept_bytes().is_some());
        let mut by_age: Vec<(Instant, Key)> = answered.map(|(key, entry)| (entry.since, *key)).collect();
        by_age.sort_unstable_by_key(|(since, _)| *since);
        // A quarter at once, so that a full table is not sorted for each call.
        for (at, (_, key)) in by_age.iter().enumerate() {
            if at > by_age.len() / 4 && self.has_room() {
                break;
            }
            self.forget(key);
        }
        if self.has_room() { Ok(()) } else { Err(ApiError::edge_full("idempotency keys in use")) }
    }

    fn has_room(&self) -> bool {
        self.entries.len() < ENTRIES_MAX && self.bytes < BYTES_MAX
    }

    fn forget(&mut self, key: &Key) {
        let bytes = self.entries.remove(key).and_then(|entry| entry.kept_bytes());
        self.bytes -= bytes.unwrap_or(0);
    }
}

impl Entry {
    /// Size of the answer, once there is one.
    fn kept_bytes(&self) -> Option<usize> {
        match &*self.state.borrow() {
            State::Running => None,
            State::Answered(kept) => Some(kept.body.len()),
        }
    }
}

impl Claim {
    /// Keeps a whole answer for retries.
    pub fn answered(self, body: &[u8]) {
        self.keep(body, "application/json");
    }

    /// Keeps all events of a stream for retries.
    pub fn streamed(self, events: &[u8]) {
        self.keep(events, super::sse::CONTENT_TYPE);
    }

    fn keep(mut self, body: &[u8], content_type: &'static str) {
        let mut table = self.owner.lock();
        if let Some(entry) = table.entries.get(&self.key) {
            entry.state.send_replace(State::Answered(Kept { body: Bytes::copy_from_slice(body), content_type }));
            table.bytes += body.len();
        }
        table.over(&self.key);
        drop(table);
        self.answered = true;
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        if !self.answered {
            let mut table = self.owner.lock();
            table.entries.remove(&self.key);
            table.over(&self.key);
        }
    }
}

fn replay(kept: Kept) -> Response<Body> {
    let mut response = Response::new(Body::from(kept.body));
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static(kept.content_type));
    headers.insert("x-penstock-idempotent-replay", HeaderValue::from_static("true"));
    response
}

#[cfg(test)]
mod tests {
    use super::*;

    async fn first(owner: &Idempotency, key: &str) -> Claim {
        match owner.claim(TenantId(1), key, b"body").await {
            Ok(Claimed::First(claim)) => claim,
            Ok(Claimed::Answered(_)) => panic!("{key} is taken"),
            Err(fault) => panic!("{key}: {}", fault.message),
        }
    }

    #[tokio::test]
    async fn a_retry_gets_the_answer_another_body_a_conflict_and_a_failure_frees_the_key() {
        let owner = Idempotency::default();
        drop(first(&owner, "k").await);
        first(&owner, "k").await.streamed(b"data: 1");
        let Ok(Claimed::Answered(answer)) = owner.claim(TenantId(1), "k", b"body").await else { panic!("not kept") };
        assert_eq!(answer.headers()[header::CONTENT_TYPE], super::super::sse::CONTENT_TYPE);
        assert_eq!(owner.claim(TenantId(1), "k", b"other").await.err().map(|fault| fault.status.as_u16()), Some(409));
        assert!(matches!(owner.claim(TenantId(2), "k", b"other").await, Ok(Claimed::First(_))), "another tenant's key");
    }

    #[tokio::test]
    async fn a_call_that_a_life_did_not_end_is_told_once_in_the_next() {
        let dir = std::env::temp_dir().join(format!("penstock-retries-{}", std::process::id()));
        let life = |epoch| {
            let kept = Interrupted::open(&dir, penstock_base::GatewayEpoch(epoch), unix_s()).expect("a folder");
            Idempotency::new([5; SECRET_BYTES], Some(kept))
        };
        let owner = life(1);
        first(&owner, "answered").await.answered(b"{}");
        drop(first(&owner, "failed").await);
        // As a process that is killed: nothing of it is said any more.
        std::mem::forget(first(&owner, "cut").await);
        let table = Arc::clone(&owner.table);
        table.lock().unwrap().interrupted = None;
        let owner = life(2);
        for key in ["answered", "failed"] {
            drop(first(&owner, key).await);
        }
        let claim = async |tenant, body: &[u8]| owner.claim(TenantId(tenant), "cut", body).await.err();
        assert!(claim(2, b"body").await.is_none(), "another tenant's key");
        assert_eq!(claim(1, b"other").await.map(|fault| fault.code), Some("idempotency_conflict"));
        let told = claim(1, b"body").await.expect("it was interrupted");
        assert_eq!((told.status.as_u16(), told.code, told.retry_after_s), (503, "request_interrupted", Some(1)));
        first(&owner, "cut").await.answered(b"{}");
        drop(owner);
        assert_eq!(Interrupted::open(&dir, penstock_base::GatewayEpoch(3), unix_s()).expect("a folder").left(), 0);
        std::fs::remove_dir_all(&dir).expect("it is there");
    }

    #[tokio::test]
    async fn a_full_table_forgets_the_oldest_answers_and_counts_its_bytes() {
        let owner = Idempotency::default();
        for key in 0..=ENTRIES_MAX {
            first(&owner, &key.to_string()).await.answered(&[7; 10]);
        }
        {
            let table = owner.lock();
            assert!(table.entries.len() <= ENTRIES_MAX);
            assert_eq!(table.bytes, table.entries.len() * 10);
        }
        first(&owner, "0").await;
        assert!(matches!(owner.claim(TenantId(1), &ENTRIES_MAX.to_string(), b"body").await, Ok(Claimed::Answered(_))));
    }

    #[tokio::test]
    async fn keys_of_running_calls_are_never_forgotten() {
        let owner = Idempotency::default();
        let mut running = Vec::new();
        for key in 0..ENTRIES_MAX {
            running.push(first(&owner, &key.to_string()).await);
        }
        let refused = owner.claim(TenantId(1), "one more", b"body").await;
        assert_eq!(refused.err().map(|fault| fault.status.as_u16()), Some(429));
        drop(running);
        first(&owner, "one more").await;
    }
}
