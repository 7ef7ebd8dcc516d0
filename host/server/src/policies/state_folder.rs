//! Where is what decides kept over a restart?
//!
//! ```text
//! DIR/lock               held by the server that uses the folder
//! DIR/policies           the set in force, the good ones before it, those that failed: a checksum and JSON
//! DIR/states             what the policies remember: a checksum and bytes
//! DIR/components/DIGEST  every component at hand
//! ```
//!
//! Files appear whole or not at all. One that is damaged counts as absent, and whoever reads it says so. The folder is its owner's alone.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{self, Write as _};
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::Mutex;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::document::{COMPONENT_BYTES_MAX, bytes, digest_of};

const RECORD: &str = "policies";
const STATES: &str = "states";
const COMPONENTS: &str = "components";
/// Version of the record's form; another one counts as damaged.
const FORM: u32 = 1;
/// Largest record: the sets that may stand in it, each with its largest document.
const RECORD_BYTES_MAX: u64 = 4 << 20;
/// Largest file of states: every seat of the gateway and of 64 replicas, each with the most that one may save by default.
const STATES_BYTES_MAX: u64 = (4 + 2 * 64) * (256 << 10) + (1 << 20);
/// Hexadecimal digits of the checksum, and the end of its line.
const CHECKSUM_BYTES: usize = 65;

/// What decides, and what may again.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Record {
    /// Version of the form; set when it is written.
    pub form: u32,
    /// Digest of the set in force.
    pub active: String,
    /// Who put it there.
    pub by: String,
    /// The set that shipped with the server at the time: while it is in force nobody has chosen another.
    pub shipped: Option<String>,
    /// Good ones before it, the latest last.
    pub good: Vec<String>,
    /// Sets that failed, with the reason.
    pub bad: BTreeMap<String, String>,
    /// The documents of the first two.
    pub sets: BTreeMap<String, Value>,
}

/// A folder in use by this process alone.
#[derive(Debug)]
pub struct StateFolder {
    path: PathBuf,
    /// Held through a change of a file.
    turn: Mutex<()>,
    _lock: File,
}

impl StateFolder {
    /// Uses `path`, made where it is absent.
    ///
    /// # Errors
    /// What the system says, or that another server uses it.
    pub fn open(path: &Path) -> Result<Self, String> {
        let told = |fault: io::Error| format!("{}: {fault}", path.display());
        fs::DirBuilder::new().recursive(true).mode(0o700).create(path.join(COMPONENTS)).map_err(told)?;
        let lock = OpenOptions::new().create(true).truncate(false).write(true).mode(0o600).open(path.join("lock"));
        let lock = lock.map_err(told)?;
        match lock.try_lock() {
            Ok(()) => Ok(Self { path: path.to_owned(), turn: Mutex::default(), _lock: lock }),
            Err(TryLockError::WouldBlock) => Err(format!("{}: another server uses it", path.display())),
            Err(TryLockError::Error(fault)) => Err(told(fault)),
        }
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The record; none where there is no file.
    ///
    /// # Errors
    /// It cannot be read, or is damaged.
    pub fn record(&self) -> Result<Option<Record>, String> {
        read_record(&self.path)
    }

    /// Replaces the record.
    ///
    /// # Errors
    /// What the system says.
    pub fn keep_record(&self, mut record: Record) -> io::Result<()> {
        record.form = FORM;
        self.write(Path::new(RECORD), &checked(&serde_json::to_vec_pretty(&record).map_err(io::Error::other)?))
    }

    /// What policies remember; none where there is no file.
    ///
    /// # Errors
    /// It cannot be read, or is damaged.
    pub fn states(&self) -> Result<Option<Vec<u8>>, String> {
        read_checked(&self.path.join(STATES), STATES_BYTES_MAX)
    }

    /// Replaces what policies remember.
    ///
    /// # Errors
    /// What the system says.
    pub fn keep_states(&self, states: Option<&[u8]>) -> io::Result<()> {
        match states {
            Some(states) => self.write(Path::new(STATES), &checked(states)),
            None => match fs::remove_file(self.path.join(STATES)) {
                Err(fault) if fault.kind() != io::ErrorKind::NotFound => Err(fault),
                _ => Ok(()),
            },
        }
    }

    /// A component's bytes.
    ///
    /// # Errors
    /// They cannot be read, or are not that component's.
    pub fn component(&self, digest: &str) -> Result<Vec<u8>, String> {
        let path = self.path.join(COMPONENTS).join(digest);
        let bytes = bytes(&path, COMPONENT_BYTES_MAX)?;
        if digest_of(&bytes) == digest { Ok(bytes) } else { Err(format!("{}: damaged", path.display())) }
    }

    /// Keeps a component.
    ///
    /// # Errors
    /// What the system says.
    pub fn keep_component(&self, digest: &str, bytes: &[u8]) -> io::Result<()> {
        if self.component(digest).is_ok() {
            return Ok(());
        }
        self.write(&Path::new(COMPONENTS).join(digest), bytes)
    }

    /// Removes every component but these.
    pub fn sweep(&self, wanted: &BTreeSet<String>) {
        let _turn = self.turn.lock();
        for entry in fs::read_dir(self.path.join(COMPONENTS)).into_iter().flatten().flatten() {
            let name = entry.file_name();
            if name.to_str().is_none_or(|name| !wanted.contains(name)) {
                // What stays costs room, and is tried again.
                let _removed = fs::remove_file(entry.path());
            }
        }
    }

    fn write(&self, name: &Path, bytes: &[u8]) -> io::Result<()> {
        let _turn = self.turn.lock();
        let path = self.path.join(name);
        let unfinished = path.with_extension("unfinished");
        let mut file = OpenOptions::new().create(true).truncate(true).write(true).mode(0o600).open(&unfinished)?;
        file.write_all(bytes)?;
        file.sync_all()?;
        fs::rename(&unfinished, &path)?;
        // The name is on the disk once its folder is.
        File::open(path.parent().unwrap_or(&self.path))?.sync_all()
    }
}

/// The record in a folder that may be in use.
///
/// # Errors
/// It cannot be read, or is damaged.
pub fn read_record(folder: &Path) -> Result<Option<Record>, String> {
    let path = folder.join(RECORD);
    let Some(bytes) = read_checked(&path, RECORD_BYTES_MAX)? else { return Ok(None) };
    let record: Record = serde_json::from_slice(&bytes).map_err(|fault| format!("{}: {fault}", path.display()))?;
    if record.form != FORM {
        return Err(format!("{}: form {}, this build reads {FORM}", path.display(), record.form));
    }
    Ok(Some(record))
}

/// The checksum of `content` on a line of its own, and the content.
fn checked(content: &[u8]) -> Vec<u8> {
    let mut bytes = digest_of(content).into_bytes();
    bytes.push(b'\n');
    bytes.extend_from_slice(content);
    bytes
}

fn read_checked(path: &Path, most: u64) -> Result<Option<Vec<u8>>, String> {
    if !path.exists() {
        return Ok(None);
    }
    let mut bytes = bytes(path, most + CHECKSUM_BYTES as u64)?;
    let damaged = || format!("{}: damaged", path.display());
    let (checksum, content) = bytes.split_at_checked(CHECKSUM_BYTES).ok_or_else(damaged)?;
    if checksum.strip_suffix(b"\n") != Some(digest_of(content).as_bytes()) {
        return Err(damaged());
    }
    bytes.drain(..CHECKSUM_BYTES);
    Ok(Some(bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn folder(name: &str) -> PathBuf {
        let path = std::env::temp_dir().join(format!("penstock-state-{}-{name}", std::process::id()));
        let _absent = fs::remove_dir_all(&path);
        path
    }

    fn record() -> Record {
        let document = serde_json::json!({"routing": {"policy": "native:best-credit"}});
        Record {
            form: FORM,
            active: "a1".into(),
            by: "admin".into(),
            shipped: Some("e5".into()),
            good: vec!["b2".into()],
            bad: BTreeMap::from([("c3".into(), "it trapped".into())]),
            sets: BTreeMap::from([("a1".into(), document)]),
        }
    }

    #[test]
    fn what_was_kept_is_there_again_and_only_for_its_owner() {
        use std::os::unix::fs::PermissionsExt as _;
        let path = folder("again");
        let first = StateFolder::open(&path).unwrap();
        assert_eq!((first.record(), first.states()), (Ok(None), Ok(None)));
        first.keep_record(record()).unwrap();
        first.keep_states(Some(b"remembered")).unwrap();
        // SHA-256 of "abc": FIPS 180-2, appendix B.1.
        let digest = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";
        first.keep_component(digest, b"abc").unwrap();
        assert!(StateFolder::open(&path).unwrap_err().contains("another server"));
        drop(first);
        let second = StateFolder::open(&path).unwrap();
        assert_eq!(second.record(), Ok(Some(record())));
        assert_eq!(second.states(), Ok(Some(b"remembered".to_vec())));
        assert_eq!(second.component(digest), Ok(b"abc".to_vec()));
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o700);
        second.keep_states(None).unwrap();
        second.keep_states(None).unwrap();
        second.sweep(&BTreeSet::new());
        assert_eq!(second.states(), Ok(None));
        assert!(second.component(digest).is_err());
        fs::remove_dir_all(path).unwrap();
    }

    #[test]
    fn one_damaged_byte_anywhere_is_seen() {
        let path = folder("damage");
        let state = StateFolder::open(&path).unwrap();
        state.keep_record(record()).unwrap();
        let whole = fs::read(path.join(RECORD)).unwrap();
        for at in 0..whole.len() {
            let mut bytes = whole.clone();
            bytes[at] ^= 1;
            fs::write(path.join(RECORD), &bytes).unwrap();
            assert!(state.record().unwrap_err().contains("damaged"), "byte {at}");
            fs::write(path.join(RECORD), &whole[..at]).unwrap();
            assert!(state.record().is_err(), "{at} bytes");
        }
        fs::write(path.join(COMPONENTS).join("d4"), b"abc").unwrap();
        assert!(state.component("d4").unwrap_err().contains("damaged"));
        fs::remove_dir_all(path).unwrap();
    }
}
