//! The hub's cache on disk, laid out as its own tools lay it out:
//!
//! ```text
//! models--OWNER--NAME/
//!   refs/main                       the commit that `main` was when it was last asked for
//!   blobs/ETAG                      contents, by the hub's name for them; ETAG.incomplete while they arrive
//!   snapshots/COMMIT/PATH           links to blobs: the repository as of one commit
//! .locks/models--OWNER--NAME/ETAG.lock
//! ```

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use crate::error::HubError;
use crate::source::{Source, is_commit};

/// One repository's part of the cache.
pub(crate) struct Cache {
    root: PathBuf,
    repository: String,
}

impl Cache {
    pub fn new(root: &Path, source: &Source) -> Self {
        Self { root: root.to_path_buf(), repository: format!("models--{}", source.repository.replace('/', "--")) }
    }

    fn folder(&self) -> PathBuf {
        self.root.join(&self.repository)
    }

    /// The commit a revision stood for when it was last resolved; a commit stands for itself.
    pub fn commit_of(&self, revision: &str) -> Option<String> {
        if is_commit(revision) {
            return Some(revision.to_owned());
        }
        let text = fs::read_to_string(self.folder().join("refs").join(revision)).ok()?;
        Some(text.trim().to_owned()).filter(|commit| is_commit(commit))
    }

    pub fn remember(&self, revision: &str, commit: &str) -> Result<(), HubError> {
        if is_commit(revision) {
            return Ok(());
        }
        let path = self.folder().join("refs").join(revision);
        make_parent(&path)?;
        fs::write(&path, commit).map_err(HubError::io("write", &path))
    }

    pub fn snapshot(&self, commit: &str) -> PathBuf {
        self.folder().join("snapshots").join(commit)
    }

    /// Whether the snapshot has a file, whole: links whose content was removed do not count.
    pub fn has(&self, commit: &str, file: &str) -> bool {
        self.snapshot(commit).join(file).is_file()
    }

    pub fn blob(&self, etag: &str) -> PathBuf {
        self.folder().join("blobs").join(etag)
    }

    /// Where a content grows until it is whole.
    pub fn incomplete(&self, etag: &str) -> PathBuf {
        self.folder().join("blobs").join(format!("{etag}.incomplete"))
    }

    /// Waits for whoever fetches the same content, in this process or another; held until the file is dropped.
    pub fn lock(&self, etag: &str) -> Result<File, HubError> {
        let path = self.root.join(".locks").join(&self.repository).join(format!("{etag}.lock"));
        make_parent(&path)?;
        let file = File::create(&path).map_err(HubError::io("create", &path))?;
        file.lock().map_err(HubError::io("lock", &path))?;
        Ok(file)
    }

    /// Shows a content under its name.
    pub fn link(&self, commit: &str, file: &str, etag: &str) -> Result<(), HubError> {
        let path = self.snapshot(commit).join(file);
        make_parent(&path)?;
        // From the file's folder up to the repository's, and down to the content; a relative link survives a moved cache.
        let up = "../".repeat(2 + file.split('/').count() - 1);
        let target = PathBuf::from(format!("{up}blobs/{etag}"));
        // Made beside and renamed: whoever looks finds the old name or the new one, never none.
        static NUMBER: AtomicU64 = AtomicU64::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let beside = path.with_file_name(format!(".link-{}-{number}", std::process::id()));
        make_link(&target, &self.blob(etag), &beside).map_err(HubError::io("link", &beside))?;
        fs::rename(&beside, &path).map_err(HubError::io("rename", &beside))
    }
}

#[cfg(unix)]
fn make_link(target: &Path, _blob: &Path, path: &Path) -> std::io::Result<()> {
    std::os::unix::fs::symlink(target, path)
}

#[cfg(not(unix))]
fn make_link(_target: &Path, blob: &Path, path: &Path) -> std::io::Result<()> {
    fs::hard_link(blob, path)
}

pub(crate) fn make_parent(path: &Path) -> Result<(), HubError> {
    let parent = path.parent().expect("every path of the cache has a folder");
    fs::create_dir_all(parent).map_err(HubError::io("create", parent))
}
