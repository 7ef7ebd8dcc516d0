//! Which calls were in flight when the last life of this server ended? A small file beside what else is kept over a restart.
//!
//! ```text
//! "PNSTKEYS" | u32 version | records of 72 bytes:
//! u8 kind (1 accepted, 2 over) | u8 0 | u16 gateway epoch | u64 unix seconds | 32 bytes key | 24 bytes body | u32 CRC-32 of the record
//! ```
//!
//! Keys and bodies stand there as hashes under the deployment's secret. A record is written before its call is computed and is not synced:
//! it outlives the process, and not always the machine. What follows a torn record is not read. The file is written anew at each start and
//! whenever it has grown, with what still counts.

use std::collections::HashMap;
use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{self, Read as _, Write as _};
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

use penstock_base::GatewayEpoch;
use penstock_journal::frame::crc32;

/// Hash of a tenant and its key.
pub type Key = [u8; 32];
/// Hash of a body.
pub type Fingerprint = [u8; 24];

const MAGIC: &[u8; 8] = b"PNSTKEYS";
const VERSION: u32 = 1;
const HEADER_BYTES: usize = 12;
const RECORD_BYTES: usize = 72;
const ACCEPTED: u8 = 1;
const OVER: u8 = 2;
/// Interrupted calls that are remembered; the oldest make way. As many as may be in flight with a key.
pub const KEPT_MAX: usize = 4_096;
/// How long after it was accepted a call is remembered as interrupted, in seconds: longer than it may run, and than a client tries.
pub const KEPT_FOR_S: u64 = 3_600;
/// Records after which the file is written anew: a few times what can still count.
const RECORDS_MAX: usize = 4 * KEPT_MAX;

/// A call that was accepted.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Accepted {
    /// What it asked for.
    pub body: Fingerprint,
    /// The life that accepted it.
    pub epoch: GatewayEpoch,
    /// When, in unix seconds.
    pub at_s: u64,
}

/// The file, and what it says of earlier lives.
#[derive(Debug)]
pub struct Interrupted {
    path: PathBuf,
    file: File,
    records: usize,
    epoch: GatewayEpoch,
    /// Of this life.
    running: HashMap<Key, Accepted>,
    /// Of earlier ones.
    left: HashMap<Key, Accepted>,
    /// A write failed, and the log has said so.
    is_broken: bool,
    _lock: File,
}

impl Interrupted {
    /// Opens `dir/calls`, made where it is absent.
    ///
    /// # Errors
    /// What the system says, or that another server uses it.
    pub fn open(dir: &Path, epoch: GatewayEpoch, now_s: u64) -> Result<Self, String> {
        let told = |fault: io::Error| format!("{}: {fault}", dir.display());
        fs::DirBuilder::new().recursive(true).mode(0o700).create(dir).map_err(told)?;
        let lock = OpenOptions::new().create(true).truncate(false).write(true).mode(0o600).open(dir.join("calls.lock"));
        let lock = lock.map_err(told)?;
        match lock.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => return Err(format!("{}: another server uses it", dir.display())),
            Err(TryLockError::Error(fault)) => return Err(told(fault)),
        }
        let path = dir.join("calls");
        let mut left = match read(&path) {
            Ok(left) => left,
            Err(fault) if fault.kind() == io::ErrorKind::NotFound => HashMap::new(),
            Err(fault) => return Err(told(fault)),
        };
        left.retain(|_, call| counts(call, now_s));
        keep_newest(&mut left);
        let (file, records) = write_anew(&path, left.iter()).map_err(told)?;
        Ok(Self { path, file, records, epoch, running: HashMap::new(), left, is_broken: false, _lock: lock })
    }

    /// Calls of earlier lives that nobody has asked about.
    pub fn left(&self) -> usize {
        self.left.len()
    }

    /// What an earlier life left of this key.
    pub fn find(&self, key: &Key, now_s: u64) -> Option<Accepted> {
        self.left.get(key).copied().filter(|call| counts(call, now_s))
    }

    /// It was said once: the key is free again.
    pub fn forget(&mut self, key: &Key, now_s: u64) {
        if let Some(call) = self.left.remove(key) {
            self.append(OVER, key, &call, now_s);
        }
    }

    /// A call begins.
    pub fn accept(&mut self, key: &Key, body: Fingerprint, now_s: u64) {
        let call = Accepted { body, epoch: self.epoch, at_s: now_s };
        self.running.insert(*key, call);
        self.append(ACCEPTED, key, &call, now_s);
    }

    /// It is over, however it went.
    pub fn over(&mut self, key: &Key, now_s: u64) {
        if let Some(call) = self.running.remove(key) {
            self.append(OVER, key, &call, now_s);
        }
    }

    /// A disk that takes nothing costs what this is for, and no call.
    fn append(&mut self, kind: u8, key: &Key, call: &Accepted, now_s: u64) {
        let done = if self.records >= RECORDS_MAX {
            self.left.retain(|_, call| counts(call, now_s));
            let all = self.running.iter().chain(&self.left);
            write_anew(&self.path, all).map(|(file, records)| (self.file, self.records) = (file, records))
        } else {
            self.records += 1;
            self.file.write_all(&record(kind, key, call))
        };
        match done {
            Ok(()) => self.is_broken = false,
            Err(fault) if !std::mem::replace(&mut self.is_broken, true) => {
                tracing::warn!(%fault, path = %self.path.display(), "idempotency keys in flight are not written down: a restart will not know them");
            }
            Err(_) => {}
        }
    }
}

fn counts(call: &Accepted, now_s: u64) -> bool {
    // A clock that was set back must not make a record eternal.
    call.at_s.abs_diff(now_s) < KEPT_FOR_S
}

fn keep_newest(left: &mut HashMap<Key, Accepted>) {
    if left.len() > KEPT_MAX {
        let mut by_age: Vec<(u64, Key)> = left.iter().map(|(key, call)| (call.at_s, *key)).collect();
        by_age.sort_unstable();
        let beyond = by_age.len() - KEPT_MAX;
        by_age[..beyond].iter().for_each(|(_, key)| _ = left.remove(key));
    }
}

fn record(kind: u8, key: &Key, call: &Accepted) -> [u8; RECORD_BYTES] {
    let mut bytes = [0; RECORD_BYTES];
    bytes[0] = kind;
    bytes[2..4].copy_from_slice(&call.epoch.0.to_le_bytes());
    bytes[4..12].copy_from_slice(&call.at_s.to_le_bytes());
    bytes[12..44].copy_from_slice(key);
    bytes[44..68].copy_from_slice(&call.body);
    let sum = crc32(0, &bytes[..68]);
    bytes[68..].copy_from_slice(&sum.to_le_bytes());
    bytes
}

/// Writes a file with these calls aside and puts it in place; what to append to, and how many records it has.
fn write_anew<'a>(path: &Path, calls: impl Iterator<Item = (&'a Key, &'a Accepted)>) -> io::Result<(File, usize)> {
    let aside = path.with_extension("new");
    let mut bytes = MAGIC.to_vec();
    bytes.extend(VERSION.to_le_bytes());
    let mut records = 0;
    for (key, call) in calls {
        bytes.extend(record(ACCEPTED, key, call));
        records += 1;
    }
    let mut options = OpenOptions::new();
    let mut file = options.create(true).write(true).truncate(true).mode(0o600).open(&aside)?;
    file.write_all(&bytes)?;
    fs::rename(&aside, path)?;
    Ok((file, records))
}

/// Calls that were accepted and did not end, up to the first record that is not whole.
fn read(path: &Path) -> io::Result<HashMap<Key, Accepted>> {
    let mut bytes = Vec::new();
    // Twice what it may grow to: more is not ours.
    let most = (HEADER_BYTES + 2 * RECORD_BYTES * (RECORDS_MAX + KEPT_MAX)) as u64;
    File::open(path)?.take(most).read_to_end(&mut bytes)?;
    let mut calls = HashMap::new();
    let is_ours = bytes.get(..8) == Some(MAGIC) && bytes.get(8..HEADER_BYTES) == Some(&VERSION.to_le_bytes()[..]);
    if !is_ours {
        tracing::warn!(path = %path.display(), "calls of the last life cannot be read: the file is damaged, or of another version");
        return Ok(calls);
    }
    for record in bytes[HEADER_BYTES..].chunks(RECORD_BYTES) {
        let Ok(record) = <&[u8; RECORD_BYTES]>::try_from(record) else { break };
        let (content, sum) = record.split_at(68);
        if crc32(0, content).to_le_bytes() != *sum {
            break;
        }
        let mut key = [0; 32];
        key.copy_from_slice(&content[12..44]);
        match content[0] {
            ACCEPTED => {
                let mut call = Accepted { body: [0; 24], epoch: GatewayEpoch(0), at_s: 0 };
                call.body.copy_from_slice(&content[44..68]);
                call.epoch = GatewayEpoch(u16::from_le_bytes([content[2], content[3]]));
                call.at_s = content[4..12].iter().rev().fold(0, |at, byte| at << 8 | u64::from(*byte));
                calls.insert(key, call);
            }
            OVER => _ = calls.remove(&key),
            _ => break,
        }
    }
    Ok(calls)
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Dir(PathBuf);

    impl Drop for Dir {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    fn dir(name: &str) -> Dir {
        Dir(std::env::temp_dir().join(format!("penstock-calls-{name}-{}", std::process::id())))
    }

    fn key(n: u64) -> Key {
        let mut key = [7; 32];
        key[..8].copy_from_slice(&n.to_le_bytes());
        key
    }

    fn open(dir: &Dir, epoch: u16, now_s: u64) -> Interrupted {
        Interrupted::open(&dir.0, GatewayEpoch(epoch), now_s).unwrap()
    }

    #[test]
    fn what_was_in_flight_is_known_once_and_what_was_over_is_not() {
        let dir = dir("once");
        let mut first = open(&dir, 3, 1_000);
        (0..4).for_each(|n| first.accept(&key(n), [n as u8; 24], 1_000 + n));
        first.over(&key(1), 1_010);
        drop(first);
        let mut second = open(&dir, 4, 1_020);
        assert_eq!(second.left(), 3);
        assert_eq!(second.find(&key(1), 1_020), None);
        let found = second.find(&key(2), 1_020);
        assert_eq!(found, Some(Accepted { body: [2; 24], epoch: GatewayEpoch(3), at_s: 1_002 }));
        second.forget(&key(2), 1_020);
        assert_eq!(second.find(&key(2), 1_020), None);
        // Its key is used anew, and that call is interrupted as well.
        second.accept(&key(2), [9; 24], 1_030);
        drop(second);
        let third = open(&dir, 5, 1_040);
        assert_eq!(third.find(&key(2), 1_040).map(|call| (call.body, call.epoch)), Some(([9; 24], GatewayEpoch(4))));
        assert!(third.find(&key(0), 1_040).is_some() && third.find(&key(0), 1_000 + KEPT_FOR_S).is_none());
        drop(third);
        assert_eq!(open(&dir, 6, 1_040 + KEPT_FOR_S).left(), 0);
    }

    #[test]
    fn a_torn_end_costs_what_was_torn() {
        let dir = dir("torn");
        let mut calls = open(&dir, 1, 50);
        (0..3).for_each(|n| calls.accept(&key(n), [0; 24], 50));
        drop(calls);
        let path = dir.0.join("calls");
        let whole = fs::read(&path).unwrap();
        assert_eq!(whole.len(), HEADER_BYTES + 3 * RECORD_BYTES);
        for cut in 0..whole.len() {
            fs::write(&path, &whole[..cut]).unwrap();
            let records = cut.saturating_sub(HEADER_BYTES) / RECORD_BYTES;
            assert_eq!(open(&dir, 2, 60).left(), records, "{cut} bytes");
        }
        for at in 0..whole.len() {
            let mut bytes = whole.clone();
            bytes[at] ^= 0x10;
            fs::write(&path, &bytes).unwrap();
            let records = if at < HEADER_BYTES { 0 } else { (at - HEADER_BYTES) / RECORD_BYTES };
            assert_eq!(open(&dir, 2, 60).left(), records, "bit at {at}");
        }
        fs::write(&path, [&whole[..], b"garbage that nobody wrote"].concat()).unwrap();
        let mut calls = open(&dir, 2, 60);
        calls.accept(&key(9), [0; 24], 61);
        drop(calls);
        assert_eq!(open(&dir, 3, 62).left(), 4, "what is written behind garbage is read");
    }

    #[test]
    fn the_file_stays_small_and_one_server_has_it() {
        let dir = dir("small");
        let mut calls = open(&dir, 1, 10);
        calls.accept(&key(u64::MAX), [1; 24], 10);
        for n in 0..RECORDS_MAX as u64 * 2 {
            calls.accept(&key(n), [2; 24], 11);
            calls.over(&key(n), 11);
        }
        let bytes = fs::metadata(dir.0.join("calls")).unwrap().len();
        assert!(bytes <= (HEADER_BYTES + RECORD_BYTES * (RECORDS_MAX + 1)) as u64, "{bytes}");
        assert!(Interrupted::open(&dir.0, GatewayEpoch(2), 12).unwrap_err().contains("another server uses it"));
        drop(calls);
        let again = open(&dir, 2, 12);
        assert_eq!(again.left(), 1);
        assert!(again.find(&key(u64::MAX), 12).is_some());
        drop(again);
        let mut many = open(&dir, 2, 12);
        (0..KEPT_MAX as u64 + 10).for_each(|n| many.accept(&key(n), [0; 24], 13 + n / 1_000));
        drop(many);
        let kept = open(&dir, 3, 20);
        assert_eq!(kept.left(), KEPT_MAX);
        assert!(kept.find(&key(KEPT_MAX as u64), 20).is_some(), "the newest stay");
    }
}
