//! Discovery through a folder on a disk that all see: one file a worker.
//!
//! A file is named `ID.json` and holds two lines: `penstock-worker 1 beat N`, then the record. Its owner writes it anew with a larger N,
//! three times a lease, each time under another name that is then moved over the old one, so that a reader sees one or the other, whole.
//! A watcher measures by its own clock how long N stands still; clocks of other hosts decide nothing but how soon a file that it has never
//! seen before counts.

use std::collections::BTreeMap;
use std::fs::{self, File, Metadata};
use std::io::{self, ErrorKind, Read as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use tokio::task::{JoinHandle, spawn_blocking};
use tokio::time::{sleep, timeout};

use crate::board::Board;
use crate::error::{DiscoveryError, RecordError};
use crate::limits::{RECORD_BYTES_MAX, WORKERS_MAX};
use crate::record::{WorkerId, WorkerRecord, decode_at};
use crate::registration::{Announcer, Registration};
use crate::{Answer, Discovery, Settings, Watch};

/// How the first line begins.
const HEADER: &str = "penstock-worker 1 beat ";
const HEADER_BYTES_MAX: usize = 64;
/// Most entries of the folder that one look takes in: every worker's file, one half written, and as many again of others.
const ENTRIES_MAX: usize = 4 * WORKERS_MAX;
/// Leases after which a file that nobody renews is removed, and one that was never finished.
const SWEEP_LEASES: u32 = 2;
const SWEEP_UNFINISHED_LEASES: u32 = 10;

/// The folder.
#[derive(Clone)]
pub struct Folder {
    path: PathBuf,
    settings: Settings,
}

impl Folder {
    /// Uses `path`, which must exist: a folder made here, in place of a disk that is not mounted, would be seen by nobody.
    ///
    /// # Errors
    /// [`DiscoveryError::Setting`] when it is no folder, or a setting breaks its limit.
    pub fn new(path: impl Into<PathBuf>, settings: Settings) -> Result<Self, DiscoveryError> {
        settings.check()?;
        let path = path.into();
        if !path.is_dir() {
            let why = format!("{} is not a folder; make it, or mount the disk that it is on", path.display());
            return Err(DiscoveryError::Setting { key: "folder", why });
        }
        Ok(Self { path, settings })
    }
}

impl Discovery for Folder {
    fn describe(&self) -> String {
        format!("the folder {}", self.path.display())
    }

    fn register(&self, record: WorkerRecord) -> Answer<'_, Registration> {
        let seat = Seat { folder: self.path.clone(), beat: 0, patience: self.settings.lease };
        Box::pin(Registration::start(seat, record, self.settings.lease))
    }

    fn watch(&self) -> Watch {
        let scanner = Scanner { folder: self.path.clone(), lease: self.settings.lease, seen: BTreeMap::new() };
        Watch::start(self.settings.board(self.settings.lease), |board| follow(scanner, board))
    }
}

/// One worker's place in the folder.
struct Seat {
    folder: PathBuf,
    beat: u64,
    /// Longest wait for the disk.
    patience: Duration,
}

impl Seat {
    /// Runs `work` where it may block, and gives up on a disk that does not answer.
    async fn at_disk<T: Send + 'static>(
        &self,
        work: impl FnOnce(&Path) -> Result<T, Failure> + Send + 'static,
    ) -> Result<T, DiscoveryError> {
        let folder = self.folder.clone();
        let work = spawn_blocking(move || work(&folder));
        let service = format!("the folder {}", self.folder.display());
        let why = match timeout(self.patience, work).await {
            Ok(Ok(Ok(answer))) => return Ok(answer),
            Ok(Ok(Err(Failure::Told(why)))) => return Err(why),
            Ok(Ok(Err(Failure::Disk(why)))) => why.to_string(),
            Ok(Err(why)) => why.to_string(),
            Err(_) => format!("no answer within {:?}", self.patience),
        };
        Err(DiscoveryError::Unreachable { service, why })
    }

    async fn write(&mut self, record: &WorkerRecord) -> Result<(), DiscoveryError> {
        self.beat += 1;
        let mut text = format!("{HEADER}{}\n", self.beat).into_bytes();
        text.extend(record.encode()?);
        text.push(b'\n');
        let (id, epoch) = (record.id.clone(), record.epoch);
        self.at_disk(move |folder| {
            not_superseded(folder, &id, epoch)?;
            let unfinished = folder.join(format!(".{id}.{epoch}.tmp"));
            // No fsync: what a power cut tears is a beat that nobody could have sent any more.
            fs::write(&unfinished, &text)?;
            fs::rename(&unfinished, path_of(folder, &id))?;
            Ok(())
        })
        .await
    }
}

enum Failure {
    Disk(io::Error),
    Told(DiscoveryError),
}

impl From<io::Error> for Failure {
    fn from(why: io::Error) -> Self {
        Self::Disk(why)
    }
}

fn path_of(folder: &Path, id: &WorkerId) -> PathBuf {
    folder.join(format!("{id}.json"))
}

/// The epoch in a worker's file, when there is one that can be read.
fn epoch_there(folder: &Path, id: &WorkerId) -> io::Result<Option<u64>> {
    match read(&path_of(folder, id)) {
        Ok(text) => Ok(parse(id.as_str(), &text).ok().map(|(_, record)| record.epoch)),
        Err(why) if why.kind() == ErrorKind::NotFound => Ok(None),
        Err(why) => Err(why),
    }
}

fn not_superseded(folder: &Path, id: &WorkerId, epoch: u64) -> Result<(), Failure> {
    match epoch_there(folder, id)? {
        Some(newer) if newer > epoch => Err(Failure::Told(DiscoveryError::Superseded { id: id.clone(), epoch, newer })),
        _ => Ok(()),
    }
}

impl Announcer for Seat {
    fn announce<'a>(&'a mut self, record: &'a WorkerRecord) -> Answer<'a, ()> {
        Box::pin(self.write(record))
    }

    /// To renew is to write again, and so a file that was swept is back at once.
    fn renew<'a>(&'a mut self, record: &'a WorkerRecord) -> Answer<'a, bool> {
        Box::pin(async move { self.write(record).await.map(|()| true) })
    }

    fn withdraw<'a>(&'a mut self, record: &'a WorkerRecord) -> Answer<'a, ()> {
        let (id, epoch) = (record.id.clone(), record.epoch);
        Box::pin(async move {
            self.at_disk(move |folder| {
                if epoch_there(folder, &id)? == Some(epoch) {
                    fs::remove_file(path_of(folder, &id))?;
                }
                Ok(())
            })
            .await
        })
    }
}

/// Reads a file that should be a worker's, never more of it than a record may have.
fn read(path: &Path) -> io::Result<Vec<u8>> {
    let mut text = Vec::new();
    let bytes_max = HEADER_BYTES_MAX + RECORD_BYTES_MAX + 2;
    File::open(path)?.take(bytes_max as u64).read_to_end(&mut text)?;
    Ok(text)
}

fn parse(place: &str, text: &[u8]) -> Result<(u64, WorkerRecord), RecordError> {
    let form = |why: &str| RecordError::Form { why: why.to_owned() };
    if text.is_empty() {
        return Err(form("it is empty"));
    }
    let head = &text[..text.len().min(HEADER_BYTES_MAX)];
    let Some(end) = head.iter().position(|byte| *byte == b'\n') else {
        return Err(form("it does not begin as a worker's file does"));
    };
    let beat = std::str::from_utf8(&head[..end]).ok().and_then(|line| line.strip_prefix(HEADER)?.parse().ok());
    let beat = beat.ok_or_else(|| form("it does not begin as a worker's file does"))?;
    let record = text[end + 1..].strip_suffix(b"\n").ok_or_else(|| form("it breaks off or is too long"))?;
    decode_at(place, record).map(|record| (beat, record))
}

/// What a watcher remembers of the folder.
struct Scanner {
    folder: PathBuf,
    lease: Duration,
    /// By file name.
    seen: BTreeMap<String, Seen>,
}

/// One file, as it was read last.
struct Seen {
    stamp: Stamp,
    /// Epoch and beat; none when it is no worker's file.
    beat: Option<(u64, u64)>,
    /// When the beat was last seen to differ, by this watcher's clock.
    advanced_at: Instant,
    /// Counts as a worker's: young when it was first seen, or seen to advance.
    is_proven: bool,
    /// The record, encoded; empty when it cannot be used, then the reason says why.
    bytes: Vec<u8>,
    fault: Option<String>,
}

/// Tells whether a file must be read again. Every beat is a new file.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Stamp {
    modified: SystemTime,
    len: u64,
    file: u64,
}

impl Stamp {
    fn of(metadata: &Metadata) -> Self {
        #[cfg(unix)]
        let file = std::os::unix::fs::MetadataExt::ino(metadata);
        #[cfg(not(unix))]
        let file = 0;
        Self { modified: metadata.modified().unwrap_or(SystemTime::UNIX_EPOCH), len: metadata.len(), file }
    }
}

#[derive(Default)]
struct Scan {
    entries: Vec<(String, Vec<u8>)>,
    faults: Vec<(String, String)>,
}

impl Scanner {
    fn scan(&mut self) -> io::Result<Scan> {
        let now = Instant::now();
        let mut names = Vec::new();
        let mut scan = Scan::default();
        for entry in fs::read_dir(&self.folder)? {
            if names.len() >= ENTRIES_MAX {
                let why = format!("has more than {ENTRIES_MAX} entries; the rest is not looked at");
                scan.faults.push((self.folder.display().to_string(), why));
                break;
            }
            names.push(entry?.file_name().to_string_lossy().into_owned());
        }
        names.sort_unstable();
        self.seen.retain(|name, _| names.binary_search(name).is_ok());
        for name in names {
            self.look(&name, now, &mut scan);
        }
        Ok(scan)
    }

    fn look(&mut self, name: &str, now: Instant, scan: &mut Scan) {
        let path = self.folder.join(name);
        // A file that vanishes between listing and reading was replaced or removed: the next look sees what came of it.
        let Ok(metadata) = fs::symlink_metadata(&path) else { return };
        let is_unfinished = name.starts_with('.') && name.ends_with(".tmp");
        let stem = name.strip_suffix(".json").filter(|stem| stem.parse::<WorkerId>().is_ok());
        if !metadata.is_file() || (stem.is_none() && !is_unfinished) {
            scan.faults.push((name.to_owned(), "it is not a worker's file; keep other things elsewhere".to_owned()));
            return;
        }
        let stamp = Stamp::of(&metadata);
        if self.seen.get(name).is_none_or(|seen| seen.stamp != stamp) {
            let parsed = match stem {
                Some(stem) => match read(&path) {
                    Ok(text) => Some(parse(stem, &text)),
                    Err(why) if why.kind() == ErrorKind::NotFound => return,
                    Err(why) => Some(Err(RecordError::Form { why: why.to_string() })),
                },
                None => None,
            };
            self.remember(name, stamp, parsed, now);
        }
        let Some(seen) = self.seen.get(name) else { return };
        let idle = now.saturating_duration_since(seen.advanced_at);
        let sweep_after = if is_unfinished { SWEEP_UNFINISHED_LEASES } else { SWEEP_LEASES } * self.lease;
        let is_ours = is_unfinished || seen.beat.is_some();
        if is_ours && idle > sweep_after {
            let is_unchanged = fs::symlink_metadata(&path).is_ok_and(|metadata| Stamp::of(&metadata) == stamp);
            if is_unchanged {
                // Another watcher may have been faster; a folder that may only be read stays as it is.
                let _ = fs::remove_file(&path);
            }
        }
        let Some(stem) = stem else { return };
        let is_alive = seen.is_proven && idle <= self.lease;
        if is_alive && !seen.bytes.is_empty() {
            scan.entries.push((stem.to_owned(), seen.bytes.clone()));
        }
        if let Some(why) = &seen.fault {
            scan.faults.push((name.to_owned(), why.clone()));
        }
    }

    fn remember(
        &mut self,
        name: &str,
        stamp: Stamp,
        parsed: Option<Result<(u64, WorkerRecord), RecordError>>,
        now: Instant,
    ) {
        let age = SystemTime::now().duration_since(stamp.modified);
        let is_young = age.is_ok_and(|age| age < self.lease);
        let old = self.seen.remove(name);
        let seen = match (parsed, old) {
            (Some(Ok((beat, record))), old) => {
                let beat = Some((record.epoch, beat));
                let (is_proven, advanced_at) = match &old {
                    Some(old) if old.beat == beat => (old.is_proven, old.advanced_at),
                    Some(old) if old.beat.is_some() => (true, now),
                    _ => (is_young, now),
                };
                // Decoded before, so it encodes.
                let bytes = record.encode().unwrap_or_default();
                Seen { stamp, beat, advanced_at, is_proven, bytes, fault: None }
            }
            // A torn file says nothing: what stood there before lasts until its lease is over.
            (Some(Err(why)), Some(old)) => Seen { stamp, fault: Some(why.to_string()), ..old },
            (Some(Err(why)), None) => Seen {
                stamp,
                beat: None,
                advanced_at: now,
                is_proven: false,
                bytes: Vec::new(),
                fault: Some(why.to_string()),
            },
            (None, _) => Seen { stamp, beat: None, advanced_at: now, is_proven: false, bytes: Vec::new(), fault: None },
        };
        self.seen.insert(name.to_owned(), seen);
    }

    /// After an outage nobody could renew: measure from now on.
    fn forgive(&mut self) {
        let now = Instant::now();
        self.seen.values_mut().for_each(|seen| seen.advanced_at = now);
    }
}

async fn follow(mut scanner: Scanner, board: Arc<Board>) {
    let lease = scanner.lease;
    let mut was_lost = false;
    loop {
        if was_lost {
            scanner.forgive();
        }
        let mut look: JoinHandle<(Scanner, io::Result<Scan>)> = spawn_blocking(move || {
            let scan = scanner.scan();
            (scanner, scan)
        });
        // A disk that hangs is lost; the look that hangs is waited for, since a second one would hang as well.
        let mut has_hung = false;
        let looked = loop {
            match timeout(lease, &mut look).await {
                Ok(looked) => break looked,
                Err(_) => {
                    board.lost("the disk does not answer");
                    has_hung = true;
                }
            }
        };
        // It panics only when it is cancelled with the runtime.
        let Ok((back, scan)) = looked else { return };
        scanner = back;
        if has_hung {
            scanner.forgive();
        }
        match scan {
            Ok(scan) => {
                let now = Instant::now();
                board.list(now, &scan.entries);
                scan.faults.iter().for_each(|(place, why)| board.fault(place, why));
                board.heard(now);
                was_lost = false;
            }
            Err(why) => {
                board.lost(&why.to_string());
                was_lost = true;
            }
        }
        tokio::select! {
            () = board.resync.notified() => {}
            () = sleep(lease / 6) => {}
        }
    }
}
