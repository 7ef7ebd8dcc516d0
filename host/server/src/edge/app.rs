//! What every handler shares.

use std::sync::{Arc, PoisonError, RwLock};
use std::time::{SystemTime, UNIX_EPOCH};

use penstock_engine::Engine;
use penstock_model::Model;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::admin_guard::AdminToken;
use super::client_ids::ClientIds;
use super::error::ApiError;
use super::idempotency::Idempotency;
use super::refusals::Refusals;
use crate::cluster::Cluster;
use crate::config::Config;
use crate::policies::{Kept, Publication};
use crate::tenants::{Identity, Tenants};

/// Input shorter than this is parsed and tokenised where it is: moving it would take longer.
const INLINE_BYTES: usize = 8 << 10;

/// The edge's state. Shared by reference; everything that changes is behind its own lock.
pub struct App {
    /// The engine.
    pub engine: Arc<Engine>,
    /// The model served.
    pub model: Arc<Model>,
    /// Its name in the API.
    pub model_name: String,
    /// The effective configuration.
    pub config: Config,
    /// The policy sets.
    pub publication: Publication,
    /// What the admin listener wants to be shown; without it, it answers on this machine alone.
    pub admin_token: Option<AdminToken>,
    /// What this process is among others.
    pub cluster: Cluster,
    /// Hashes names into ids.
    pub identity: Identity,
    /// Longest sequence that a replica can hold, prompt and output together.
    pub context_tokens_max: u32,
    /// Bodies being read and texts being tokenised, in bytes.
    pub pending_bytes: Arc<Semaphore>,
    /// Requests between headers and end of answer.
    pub requests: Arc<Semaphore>,
    /// Answers that may be sent again.
    pub idempotency: Idempotency,
    /// What clients call their requests.
    pub client_ids: ClientIds,
    /// What was refused within the last minute.
    pub refusals: Refusals,
    /// Unix time at start, in seconds.
    pub started_s: u64,
    tenants: RwLock<Arc<Tenants>>,
    /// Turns for work that is too long for a worker.
    aside: Semaphore,
    /// No token stands for more bytes: what is longer than the context times this can never fit.
    token_bytes_max: usize,
}

/// What an [`App`] is made of.
pub struct Parts {
    /// See [`App::engine`].
    pub engine: Arc<Engine>,
    /// See [`App::model`].
    pub model: Arc<Model>,
    /// See [`App::model_name`].
    pub model_name: String,
    /// See [`App::config`].
    pub config: Config,
    /// See [`App::identity`].
    pub identity: Identity,
    /// The tenants at the start.
    pub tenants: Tenants,
    /// See [`App::context_tokens_max`].
    pub context_tokens_max: u32,
    /// See [`App::publication`].
    pub publication: Publication,
    /// See [`App::admin_token`].
    pub admin_token: Option<AdminToken>,
    /// See [`App::idempotency`].
    pub idempotency: Idempotency,
    /// See [`App::cluster`].
    pub cluster: Cluster,
}

impl Kept for App {
    fn engine(&self) -> &Engine {
        &self.engine
    }
    fn publication(&self) -> &Publication {
        &self.publication
    }
}

impl App {
    /// Puts the parts together.
    pub fn new(parts: Parts) -> Self {
        let Parts {
            engine,
            model,
            model_name,
            config,
            identity,
            tenants,
            context_tokens_max,
            publication,
            admin_token,
            idempotency,
            cluster,
        } = parts;
        let tokenizer = model.tokenizer();
        let lengths = (0..tokenizer.vocab_len() as u32).map(|id| tokenizer.token_bytes(id).len());
        Self {
            token_bytes_max: lengths.max().unwrap_or(1).max(1),
            pending_bytes: Arc::new(Semaphore::new(config.http.pending_bytes_max)),
            requests: Arc::new(Semaphore::new(config.http.requests_max)),
            idempotency,
            client_ids: ClientIds::default(),
            refusals: Refusals::default(),
            started_s: unix_s(),
            tenants: RwLock::new(Arc::new(tenants)),
            // One core stays with the model.
            aside: Semaphore::new(2),
            engine,
            model,
            model_name,
            config,
            identity,
            context_tokens_max,
            publication,
            admin_token,
            cluster,
        }
    }

    /// The tenants now.
    pub fn tenants(&self) -> Arc<Tenants> {
        Arc::clone(&self.tenants.read().unwrap_or_else(PoisonError::into_inner))
    }

    /// Puts a newly read key file in place.
    pub fn replace_tenants(&self, tenants: Tenants) {
        *self.tenants.write().unwrap_or_else(PoisonError::into_inner) = Arc::new(tenants);
    }

    /// A place among the requests at once.
    ///
    /// # Errors
    /// 429 when there is none.
    pub fn slot(&self) -> Result<OwnedSemaphorePermit, ApiError> {
        let slot = Arc::clone(&self.requests).try_acquire_owned();
        slot.map_err(|_| ApiError::edge_full("requests at once (http.requests_max)"))
    }

    /// Refuses a text that can never fit, by its length alone.
    ///
    /// # Errors
    /// 400 before any work is done for it.
    pub fn check_length(&self, bytes: usize) -> Result<(), ApiError> {
        let most = (self.context_tokens_max as usize).saturating_mul(self.token_bytes_max);
        if bytes > most {
            return Err(ApiError::never_fits(format!(
                "a prompt of {bytes} bytes cannot fit a context of {} tokens; shorten it",
                self.context_tokens_max
            )));
        }
        Ok(())
    }

    /// Runs tokenising work on `bytes` of text, as [`App::apart`] does.
    ///
    /// # Errors
    /// Those of the work.
    pub async fn tokenise<T: Send + 'static>(
        &self,
        bytes: usize,
        work: impl FnOnce(&Model) -> Result<T, ApiError> + Send + 'static,
    ) -> Result<T, ApiError> {
        self.check_length(bytes)?;
        let model = Arc::clone(&self.model);
        self.apart(bytes, move || work(&model)).await
    }

    /// Runs work on `bytes` of input: at once when short, else on a thread of its own, two at a time.
    ///
    /// # Errors
    /// Those of the work.
    pub async fn apart<T: Send + 'static>(
        &self,
        bytes: usize,
        work: impl FnOnce() -> Result<T, ApiError> + Send + 'static,
    ) -> Result<T, ApiError> {
        if bytes < INLINE_BYTES {
            return work();
        }
        let _turn = self.aside.acquire().await.map_err(|_| ApiError::internal("the server is going away"))?;
        let done = tokio::task::spawn_blocking(work).await;
        done.map_err(|_| ApiError::internal("reading the request failed"))?
    }

    /// Class settings by rank.
    pub fn class(&self, rank: u8) -> Option<&crate::config::ClassConfig> {
        self.config.classes.get(&rank.to_string())
    }
}

/// Unix time in seconds.
pub fn unix_s() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}
