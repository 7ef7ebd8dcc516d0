//! What exactly was loaded: hashes of every artefact, and the namespace that cached blocks live in.

use std::fmt;
use std::fs;
use std::io::Write as _;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use sha2::{Digest as _, Sha256};

use crate::error::ModelError;

/// A SHA-256 digest, shown in hexadecimal.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Digest(pub [u8; 32]);

impl Digest {
    /// The digest of some bytes.
    pub fn of(bytes: &[u8]) -> Self {
        Self(Sha256::digest(bytes).into())
    }

    /// Reads 64 hexadecimal digits.
    pub fn from_hex(text: &str) -> Option<Self> {
        if text.len() != 64 || !text.is_ascii() {
            return None;
        }
        let mut out = [0; 32];
        for (byte, at) in out.iter_mut().zip((0..64).step_by(2)) {
            *byte = u8::from_str_radix(&text[at..at + 2], 16).ok()?;
        }
        Some(Self(out))
    }
}

impl fmt::Display for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Digest({self})")
    }
}

/// When the weights' hash may be taken from the record of an earlier start.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum HashPolicy {
    /// Trust the sidecar `.<file>.sha256` while the file's size, inode, modification and change time are those that it was written for; else
    /// read the file and write the sidecar.
    #[default]
    Cached,
    /// Read the whole file every time.
    Always,
}

/// Everything that pins a model's behaviour. Equal manifests mean equal tokens for equal input on one executor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ModelManifest {
    /// The model's own name for itself, or the file's.
    pub name: String,
    /// Where it was fetched from, pinned to a commit; `None` for files of this machine. Part of no hash: equal bytes are equal models.
    pub origin: Option<String>,
    /// Architecture name.
    pub architecture: &'static str,
    /// Hash of the weights: of the file, or over the hashes of all shards in name order.
    pub weights: Digest,
    /// Size of the weight files in bytes.
    pub weights_bytes: u64,
    /// Hash of everything that decides token ids.
    pub tokenizer: Digest,
    /// Hash of the chat template's text, where there is one.
    pub chat_template: Option<Digest>,
    /// Hash of the configuration as this crate understood it.
    pub config: Digest,
    /// Storage types in use, comma separated.
    pub dtypes: String,
}

impl ModelManifest {
    /// The namespace of cached blocks for one adapter, KV type and block layout. `adapter` is its content hash, `kv_dtype` and `layout`
    /// are the executor's names for what it stores.
    pub fn namespace(&self, adapter: Option<Digest>, kv_dtype: &str, layout: &str) -> Namespace {
        let mut hash = Sha256::new();
        hash.update(b"penstock-namespace-1\0");
        let mut field = |bytes: &[u8]| {
            hash.update((bytes.len() as u64).to_le_bytes());
            hash.update(bytes);
        };
        field(&self.weights.0);
        field(&self.config.0);
        field(&self.tokenizer.0);
        field(self.chat_template.as_ref().map_or(&[][..], |digest| &digest.0));
        field(adapter.as_ref().map_or(&[][..], |digest| &digest.0));
        field(kv_dtype.as_bytes());
        field(layout.as_bytes());
        Namespace(hash.finalize().into())
    }
}

/// Namespace of cached blocks: whatever differs in it shares nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Namespace(pub [u8; 32]);

impl Namespace {
    /// The bytes that enter the root key.
    pub fn bytes(&self) -> &[u8; 32] {
        &self.0
    }

    /// Its first 12 hexadecimal digits, for logs and `system_fingerprint`: what may change answers, the way keys and values are held and
    /// products are rounded included, changes it.
    pub fn fingerprint(&self) -> String {
        self.0.iter().take(6).map(|byte| format!("{byte:02x}")).collect()
    }
}

/// Bytes hashed between two calls of the progress callback.
const HASH_CHUNK_BYTES: usize = 8 << 20;

/// Hashes mapped files as one artefact, by the sidecar where the policy and the file's stamp allow it.
pub(crate) fn hash_files(
    files: &[(PathBuf, &[u8])],
    policy: HashPolicy,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<Digest, ModelError> {
    let total: u64 = files.iter().map(|(_, bytes)| bytes.len() as u64).sum();
    let mut done = 0;
    let mut digests = Vec::with_capacity(files.len());
    for (path, bytes) in files {
        let stamp = stamp(path)?;
        let known = if policy == HashPolicy::Cached { read_sidecar(path, &stamp) } else { None };
        let digest = match known {
            Some(digest) => digest,
            None => {
                let mut hash = Sha256::new();
                for (index, chunk) in bytes.chunks(HASH_CHUNK_BYTES).enumerate() {
                    hash.update(chunk);
                    progress(done + (index * HASH_CHUNK_BYTES + chunk.len()) as u64, total);
                }
                let digest = Digest(hash.finalize().into());
                write_sidecar(path, &stamp, digest);
                digest
            }
        };
        done += bytes.len() as u64;
        digests.push(digest);
    }
    match digests[..] {
        [one] => Ok(one),
        _ => {
            let mut hash = Sha256::new();
            digests.iter().for_each(|digest| hash.update(digest.0));
            Ok(Digest(hash.finalize().into()))
        }
    }
}

/// What must be unchanged for a recorded hash to hold: size, modification time, inode, and change time, which no program can set. The device is
/// not among them: the sidecar lies in the same folder, and a container or a network mount has another number at each start.
fn stamp(path: &Path) -> Result<String, ModelError> {
    let metadata = fs::metadata(path).map_err(|e| ModelError::io(path, "read the size of", e))?;
    let time = |seconds: i64, nanoseconds: i64| format!("{seconds}.{nanoseconds:09}");
    let modified = time(metadata.mtime(), metadata.mtime_nsec());
    let changed = time(metadata.ctime(), metadata.ctime_nsec());
    Ok(format!("{} {modified} {} {changed}", metadata.len(), metadata.ino()))
}

fn sidecar(path: &Path) -> Option<PathBuf> {
    let name = path.file_name()?.to_str()?;
    Some(path.with_file_name(format!(".{name}.sha256")))
}

fn read_sidecar(path: &Path, stamp: &str) -> Option<Digest> {
    let text = fs::read_to_string(sidecar(path)?).ok()?;
    let (recorded, hex) = text.trim_end().rsplit_once(' ')?;
    (recorded == stamp).then(|| Digest::from_hex(hex))?
}

/// Best effort: a read-only folder costs a second hash at the next start, nothing else. Renamed into place, so never half written.
fn write_sidecar(path: &Path, stamp: &str, digest: Digest) {
    let Some(target) = sidecar(path) else { return };
    let temporary = target.with_extension(format!("{}.tmp", std::process::id()));
    let written = fs::File::create(&temporary).and_then(|mut file| writeln!(file, "{stamp} {digest}"));
    if written.is_err() || fs::rename(&temporary, &target).is_err() {
        let _ = fs::remove_file(&temporary);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The empty string and "abc" of FIPS 180-2.
    #[test]
    fn digests_match_the_standard() {
        let abc = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";
        assert_eq!(Digest::of(b"abc").to_string(), abc);
        assert_eq!(Digest::from_hex(abc), Some(Digest::of(b"abc")));
        assert_eq!(Digest::from_hex(&abc[1..]), None);
        assert_eq!(Digest::from_hex(&abc.replace('b', "g")), None);
    }

    #[test]
    fn a_sidecar_spares_the_second_hash_until_the_file_changes() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("w.bin");
        fs::write(&path, b"abc").unwrap();
        let hash = |policy| {
            let bytes = fs::read(&path).unwrap();
            let mut calls = 0;
            let digest = hash_files(&[(path.clone(), &bytes)], policy, &mut |_, _| calls += 1).unwrap();
            (digest, calls)
        };
        assert_eq!(hash(HashPolicy::Cached), (Digest::of(b"abc"), 1));
        assert_eq!(hash(HashPolicy::Cached), (Digest::of(b"abc"), 0));
        assert_eq!(hash(HashPolicy::Always), (Digest::of(b"abc"), 1));
        fs::write(&path, b"abcd").unwrap();
        assert_eq!(hash(HashPolicy::Cached), (Digest::of(b"abcd"), 1));
        fs::write(folder.path().join(".w.bin.sha256"), "rubbish").unwrap();
        assert_eq!(hash(HashPolicy::Cached), (Digest::of(b"abcd"), 1));
    }
    /// As `cp --preserve=timestamps` and `rsync --times` leave a file: other bytes, the same length and modification time.
    #[test]
    fn a_file_replaced_with_the_same_size_and_time_is_hashed_again() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("w.bin");
        let hash = || {
            let bytes = fs::read(&path).unwrap();
            hash_files(&[(path.clone(), &bytes)], HashPolicy::Cached, &mut |_, _| {}).unwrap()
        };
        fs::write(&path, b"abc").unwrap();
        let first = fs::metadata(&path).unwrap();
        assert_eq!(hash(), Digest::of(b"abc"));
        let replace = |place: &Path, bytes: &[u8]| {
            fs::write(place, bytes).unwrap();
            fs::File::options().write(true).open(place).unwrap().set_modified(first.modified().unwrap()).unwrap();
        };
        // Another file under the name.
        let aside = folder.path().join("aside");
        replace(&aside, b"xyz");
        fs::rename(&aside, &path).unwrap();
        let second = fs::metadata(&path).unwrap();
        assert_eq!((second.len(), second.modified().unwrap()), (first.len(), first.modified().unwrap()));
        assert_eq!(hash(), Digest::of(b"xyz"));
        // Other bytes in the same file. Where the system's clock ticks slowly the change must fall into another tick to be seen.
        let changed = |metadata: &fs::Metadata| (metadata.ctime(), metadata.ctime_nsec());
        while changed(&fs::metadata(&path).unwrap()) == changed(&second) {
            replace(&path, b"uvw");
        }
        let third = fs::metadata(&path).unwrap();
        assert_eq!((third.ino(), third.modified().unwrap()), (second.ino(), first.modified().unwrap()));
        assert_eq!(hash(), Digest::of(b"uvw"));
    }
}
