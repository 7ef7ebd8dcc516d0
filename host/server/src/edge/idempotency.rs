//! `Idempotency-Key`: a retry gets the first call's answer and is never computed or billed again.
//!
//! A call with the same key and body waits for the first one and gets its bytes; with another body it is a 409. A streamed call cannot be
//! handed out twice while it runs: that is a 409 as well, until it has ended. Failed calls leave no trace, so that they may be retried.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use axum::body::Body;
use axum::http::{HeaderValue, Response, header};
use bytes::Bytes;
use penstock_base::TenantId;
use sha2::{Digest as _, Sha256};
use tokio::sync::watch;

use super::error::ApiError;

const KEPT: Duration = Duration::from_secs(600);
const ENTRIES_MAX: usize = 4_096;
/// Bytes of kept answers, over all entries.
const BYTES_MAX: usize = 32 << 20;

type Key = [u8; 32];

#[derive(Clone)]
enum State {
    Running,
    Answered(Bytes),
}

struct Entry {
    body: [u8; 32],
    since: Instant,
    state: watch::Sender<State>,
}

#[derive(Default)]
struct Table {
    entries: HashMap<Key, Entry>,
    bytes: usize,
}

/// Answers by key. Cheap to clone.
#[derive(Clone, Default)]
pub struct Idempotency {
    table: Arc<Mutex<Table>>,
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
    /// Claims a key for a body, or waits for the one who has it.
    ///
    /// # Errors
    /// 409 for another body under the same key, 429 when too many keys are in use.
    pub async fn claim(&self, tenant: TenantId, key: &str, body: &[u8]) -> Result<Claimed, ApiError> {
        let key: Key = Sha256::new().chain_update(tenant.0.to_le_bytes()).chain_update(key).finalize().into();
        let body: [u8; 32] = Sha256::digest(body).into();
        loop {
            let mut watch = {
                let mut table = self.lock();
                match table.entries.get(&key) {
                    None => {
                        table.make_room()?;
                        let entry = Entry { body, since: Instant::now(), state: watch::Sender::new(State::Running) };
                        table.entries.insert(key, entry);
                        return Ok(Claimed::First(Claim { key, owner: self.clone(), answered: false }));
                    }
                    Some(entry) if entry.body != body => {
                        let message = "this Idempotency-Key was used with another body";
                        return Err(ApiError::idempotency_conflict(message));
                    }
                    Some(entry) => entry.state.subscribe(),
                }
            };
            let state = watch.wait_for(|state| matches!(state, State::Answered(_))).await;
            if let Ok(state) = state
                && let State::Answered(bytes) = &*state
            {
                return Ok(Claimed::Answered(replay(bytes.clone())));
            }
            // The first call failed and its key is free: take it.
        }
    }

    fn lock(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Table {
    /// Drops what is old; refuses when all that is left still runs or is fresh.
    fn make_room(&mut self) -> Result<(), ApiError> {
        if self.entries.len() < ENTRIES_MAX && self.bytes < BYTES_MAX {
            return Ok(());
        }
        let mut bytes = 0;
        self.entries.retain(|_, entry| match &*entry.state.borrow() {
            State::Running => true,
            State::Answered(answer) => {
                let keep = entry.since.elapsed() < KEPT;
                bytes += if keep { answer.len() } else { 0 };
                keep
            }
        });
        self.bytes = bytes;
        if self.entries.len() < ENTRIES_MAX && self.bytes < BYTES_MAX {
            Ok(())
        } else {
            Err(ApiError::edge_full("idempotency keys in use"))
        }
    }
}

impl Claim {
    /// Keeps the answer for retries.
    pub fn answered(mut self, body: &[u8]) {
        let mut table = self.owner.lock();
        if let Some(entry) = table.entries.get(&self.key) {
            entry.state.send_replace(State::Answered(Bytes::copy_from_slice(body)));
            table.bytes += body.len();
        }
        drop(table);
        self.answered = true;
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        if !self.answered {
            self.owner.lock().entries.remove(&self.key);
        }
    }
}

fn replay(body: Bytes) -> Response<Body> {
    let mut response = Response::new(Body::from(body));
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
    headers.insert("x-penstock-idempotent-replay", HeaderValue::from_static("true"));
    response
}
