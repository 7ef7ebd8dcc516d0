//! What can go wrong between a name and its files, and what to do about it.

use std::path::{Path, PathBuf};

/// Every failure of this crate.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum HubError {
    /// The name is not one.
    #[error("{name}: {what}; write hf:OWNER/NAME, hf:OWNER/NAME@REVISION or hf:OWNER/NAME:FILE.gguf")]
    Name {
        /// As given.
        name: String,
        /// The finding.
        what: &'static str,
    },

    /// No folder for the cache.
    #[error("no folder for models of the hub: set HF_HOME, or HOME")]
    NoCache,

    /// The hub does not know the repository, or does not show it.
    #[error(
        "the hub has no repository {repository}, or shows it to nobody but its members; check the name, and set HF_TOKEN when it is private"
    )]
    NoRepository {
        /// `OWNER/NAME`.
        repository: String,
    },

    /// The repository has no such revision.
    #[error("{repository} has no revision {revision}; name a branch, a tag or a commit that its page lists")]
    NoRevision {
        /// `OWNER/NAME`.
        repository: String,
        /// As asked.
        revision: String,
    },

    /// The revision has no such file.
    #[error("{repository} has no file {file}; {hint}")]
    NoFile {
        /// `OWNER/NAME`.
        repository: String,
        /// The file.
        file: String,
        /// What there is instead.
        hint: String,
    },

    /// The repository's owner wants terms to be accepted.
    #[error(
        "{repository} is gated: accept its terms on its page at the hub, and set HF_TOKEN to a token of the account that did ({endpoint}/{repository})"
    )]
    Gated {
        /// `OWNER/NAME`.
        repository: String,
        /// Where the page is.
        endpoint: String,
    },

    /// The token was not accepted.
    #[error(
        "the hub refused the token for {repository} (status {status}): make a new one, or unset HF_TOKEN for a public repository"
    )]
    Token {
        /// `OWNER/NAME`.
        repository: String,
        /// HTTP status.
        status: u16,
    },

    /// Something is not in the cache, and the network is off.
    #[error("{what} is not in the cache {cache}, and HF_HUB_OFFLINE is set; fetch it once without", cache = cache.display())]
    Offline {
        /// What is not there.
        what: String,
        /// The cache.
        cache: PathBuf,
    },

    /// The hub cannot be reached, or breaks off again and again.
    #[error("cannot fetch {what}: {why}; what has arrived is kept, start again to go on from there")]
    Transport {
        /// Path below the endpoint.
        what: String,
        /// The last failure.
        why: String,
    },

    /// An answer that is none.
    #[error("the answer for {what} is of no use: {why}; is HF_ENDPOINT the address of a hub?")]
    Answer {
        /// Path below the endpoint.
        what: String,
        /// The finding.
        why: String,
    },

    /// The content is not what the hub announced.
    #[error(
        "{file} has SHA-256 {found} where the hub announced {announced}: what arrived was thrown away; try again, and suspect a proxy if it stays so"
    )]
    Checksum {
        /// The file.
        file: String,
        /// Hash of what arrived.
        found: String,
        /// Hash announced.
        announced: String,
    },

    /// The disk is full.
    #[error("no space left for {file} ({bytes} bytes) in {folder}: free some, or set HF_HOME to a folder with room; what has arrived is kept", folder = folder.display())]
    NoSpace {
        /// The file.
        file: String,
        /// Its size.
        bytes: u64,
        /// Folder of the cache.
        folder: PathBuf,
    },

    /// The operating system refused a file operation.
    #[error("cannot {action} {path}: {source}", path = path.display())]
    Io {
        /// What was tried, as a verb.
        action: &'static str,
        /// The file.
        path: PathBuf,
        /// The system's reason.
        source: std::io::Error,
    },
}

impl HubError {
    pub(crate) fn io(action: &'static str, path: &Path) -> impl FnOnce(std::io::Error) -> Self {
        let path = path.to_path_buf();
        move |source| Self::Io { action, path, source }
    }
}
