//! What the environment says, by the names that the hub's own tools use.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::error::HubError;

/// Where the hub is when nothing is said.
const ENDPOINT: &str = "https://huggingface.co";

/// Longest silence of a connection. A transfer may take hours; a server that says nothing for so long is gone.
const SILENCE: Duration = Duration::from_secs(30);

/// How the hub is reached and where its files lie.
#[derive(Clone)]
pub struct Settings {
    /// Address without a slash at the end.
    pub endpoint: String,
    /// Token of a user, for private and gated repositories.
    pub token: Option<String>,
    /// Folder of the cache (`hub` below `HF_HOME`).
    pub cache: PathBuf,
    /// Whether the network is left alone.
    pub is_offline: bool,
    /// Longest silence of a connection before it counts as broken.
    pub silence: Duration,
    /// Wait before the first new attempt after a break; each further one without progress waits twice as long.
    pub pause: Duration,
    /// Extra certificates, PEM; without it the ones built in.
    pub certificates: Option<PathBuf>,
}

/// The token stays out of logs.
impl std::fmt::Debug for Settings {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Settings")
            .field("endpoint", &self.endpoint)
            .field("has_token", &self.token.is_some())
            .field("cache", &self.cache)
            .field("is_offline", &self.is_offline)
            .finish_non_exhaustive()
    }
}

impl Settings {
    /// Reads `HF_ENDPOINT`, `HF_TOKEN` (or the file at `HF_TOKEN_PATH`, else `token` below `HF_HOME`), `HF_HUB_CACHE`, `HF_HOME`,
    /// `XDG_CACHE_HOME`, `HOME`, `HF_HUB_OFFLINE`, `HF_HUB_DISABLE_IMPLICIT_TOKEN` and `SSL_CERT_FILE` by `variable`.
    ///
    /// # Errors
    /// [`HubError::NoCache`] when no folder for the cache is known.
    pub fn from_variables(variable: impl Fn(&str) -> Option<OsString>) -> Result<Self, HubError> {
        let set = |name: &str| variable(name).filter(|value| !value.is_empty());
        let text = |name: &str| set(name).and_then(|value| value.into_string().ok());
        let is_true = |name: &str| {
            text(name).is_some_and(|value| matches!(value.to_ascii_lowercase().as_str(), "1" | "true" | "yes" | "on"))
        };
        let home = set("HF_HOME").map(PathBuf::from).or_else(|| {
            let cache = set("XDG_CACHE_HOME").map(PathBuf::from);
            cache.or_else(|| set("HOME").map(|home| Path::new(&home).join(".cache"))).map(|dir| dir.join("huggingface"))
        });
        let cache = set("HF_HUB_CACHE").map(PathBuf::from).or_else(|| home.as_ref().map(|home| home.join("hub")));
        let token_file =
            set("HF_TOKEN_PATH").map(PathBuf::from).or_else(|| home.as_ref().map(|home| home.join("token")));
        let saved = || token_file.and_then(|path| std::fs::read_to_string(path).ok());
        let token = text("HF_TOKEN").or_else(|| if is_true("HF_HUB_DISABLE_IMPLICIT_TOKEN") { None } else { saved() });
        let endpoint = text("HF_ENDPOINT").unwrap_or_else(|| ENDPOINT.to_owned());
        Ok(Self {
            endpoint: endpoint.trim_end_matches('/').to_owned(),
            token: token.map(|token| token.trim().to_owned()).filter(|token| !token.is_empty()),
            cache: cache.ok_or(HubError::NoCache)?,
            is_offline: is_true("HF_HUB_OFFLINE"),
            silence: SILENCE,
            pause: Duration::from_secs(1),
            certificates: set("SSL_CERT_FILE").map(PathBuf::from),
        })
    }
}
