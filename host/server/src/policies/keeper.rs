//! The thread that looks after the policies: hears what they say, and watches the policy folder.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant, SystemTime};

use anyhow::{Context as _, Result};
use penstock_engine::Engine;

use super::document;
use super::publication::{By, Publication};
use super::report::{REPORTS_MAX, Report};

/// How often the folder is looked at.
const LOOK_EVERY: Duration = Duration::from_secs(1);
/// How soon the thread sees that it is to end.
const PATIENCE: Duration = Duration::from_millis(100);
/// How often what policies remember is written down, where it has changed: what a crash may cost them.
const KEEP_EVERY: Duration = Duration::from_secs(5);
/// Names of the folder's set, the first one there counts.
const DOCUMENTS: [&str; 2] = ["policies.toml", "policies.json"];
/// Files of the folder that are looked at.
const FILES_MAX: usize = 1_024;

/// What the thread looks after.
pub trait Kept: Send + Sync + 'static {
    /// The engine.
    fn engine(&self) -> &Engine;
    /// The sets.
    fn publication(&self) -> &Publication;
}

/// A running thread.
pub struct Keeper {
    stop: SyncSender<()>,
    thread: JoinHandle<()>,
}

/// Where reports go before there is a keeper.
pub struct Inbox(Receiver<Report>);

impl Keeper {
    /// The way from the seats to the keeper.
    pub fn inbox() -> (SyncSender<Report>, Inbox) {
        let (reports, inbox) = sync_channel(REPORTS_MAX);
        (reports, Inbox(inbox))
    }

    /// Starts the thread. `folder` is watched where there is one.
    ///
    /// # Errors
    /// The system gives no thread.
    pub fn start<K: Kept>(kept: Arc<K>, inbox: Inbox, folder: Option<Folder>) -> Result<Self> {
        let (stop, stopped) = sync_channel::<()>(1);
        let thread = std::thread::Builder::new()
            .name("penstock-keep".into())
            .spawn(move || {
                let mut folder = folder;
                let mut look_at = Instant::now();
                let mut keep_at = look_at + KEEP_EVERY;
                while stopped.try_recv() == Err(std::sync::mpsc::TryRecvError::Empty) {
                    match inbox.0.recv_timeout(PATIENCE) {
                        Ok(report) => kept.publication().heard(kept.engine(), report),
                        Err(RecvTimeoutError::Timeout) => {}
                        // No seat is left that could say anything.
                        Err(RecvTimeoutError::Disconnected) => std::thread::sleep(PATIENCE),
                    }
                    if let Some(folder) = folder.as_mut().filter(|_| Instant::now() >= look_at) {
                        folder.look(kept.publication(), kept.engine());
                        look_at = Instant::now() + LOOK_EVERY;
                    }
                    if Instant::now() >= keep_at {
                        kept.publication().keep_states(kept.engine());
                        keep_at = Instant::now() + KEEP_EVERY;
                    }
                }
                // As of the end; the engine still runs.
                kept.publication().keep_states(kept.engine());
            })
            .context("start the keeper of policies")?;
        Ok(Self { stop, thread })
    }

    /// Ends the thread and waits for it.
    pub fn end(self) {
        let _ = self.stop.try_send(());
        if self.thread.join().is_err() {
            tracing::error!("the keeper of policies has panicked");
        }
    }
}

/// A watched folder.
pub struct Folder {
    path: PathBuf,
    /// Names, sizes and times of its files when it was last read.
    seen: Vec<(PathBuf, u64, Option<SystemTime>)>,
}

impl Folder {
    /// As it is now: what changes from here on counts.
    pub fn new(path: PathBuf) -> Self {
        let seen = files(&path);
        Self { path, seen }
    }

    /// Reads the set when anything has changed, and puts it in force when it differs from the one that is.
    fn look(&mut self, publication: &Publication, engine: &Engine) {
        let files = files(&self.path);
        if files == self.seen {
            return;
        }
        self.seen = files;
        let Some(path) = document_of(&self.path) else { return };
        if let Err(why) = publish(publication, engine, &path, By::Folder) {
            // A file that is still being written is read again when it has changed once more.
            tracing::error!(path = %path.display(), why, "the policy folder's set was refused: the present one stays");
        }
    }
}

/// The folder's set.
pub fn document_of(folder: &Path) -> Option<PathBuf> {
    DOCUMENTS.iter().map(|name| folder.join(name)).find(|path| path.is_file())
}

/// Reads, loads and activates the set at `path`, unless it is in force.
///
/// # Errors
/// Why it was refused; also in the history.
fn publish(publication: &Publication, engine: &Engine, path: &Path, by: By) -> Result<(), String> {
    let named = path.display().to_string();
    let refuse = |why: String| {
        publication.refused(&named, &why, by);
        Err(why)
    };
    let document = match document::read(path) {
        Ok(document) => document,
        Err(why) => return refuse(why),
    };
    let digest = match publication.load(&document) {
        Ok(digest) => digest,
        Err(fault) => return refuse(fault.to_string()),
    };
    if digest == publication.in_force() {
        return Ok(());
    }
    publication.activate(engine, &digest, by).map(|_| ()).map_err(|fault| fault.to_string())
}

/// Files of the folder and of those right below it, by name.
fn files(folder: &Path) -> Vec<(PathBuf, u64, Option<SystemTime>)> {
    let mut found = Vec::new();
    let mut folders = vec![(folder.to_owned(), true)];
    while let Some((folder, goes_deeper)) = folders.pop() {
        for entry in std::fs::read_dir(&folder).into_iter().flatten().flatten().take(FILES_MAX) {
            let Ok(about) = std::fs::metadata(entry.path()) else { continue };
            if about.is_dir() && goes_deeper {
                folders.push((entry.path(), false));
            } else if about.is_file() && found.len() < FILES_MAX {
                found.push((entry.path(), about.len(), about.modified().ok()));
            }
        }
    }
    found.sort();
    found
}
