//! Where does compiled code wait between two starts, and why can nobody slip other code in?
//!
//! Loading compiled code runs it without any check of its own, so a file counts only with a tag that this deployment made: HMAC-SHA-256
//! under the deployment's secret over the engine's version and settings, the component's digest and the code. A file of another version,
//! another component, another deployment, or with one bit changed is as good as none: the component is compiled again.

use std::fmt;
use std::fs;
use std::io::{self, Write as _};
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};

use hmac::{Hmac, KeyInit as _, Mac as _};
use sha2::Sha256;

use crate::digest::Digest;

/// Opens every file; the number is the format's version.
const MAGIC: &[u8; 16] = b"penstock code 1\n";
const TAG_BYTES: usize = 32;
/// Compiled code is some three times its component; a file beyond this is not read.
const FILE_BYTES_MAX: u64 = 256 << 20;

/// The deployment's secret, as far as compiled code is concerned.
#[derive(Clone, PartialEq, Eq)]
pub struct CacheSecret(Vec<u8>);

impl CacheSecret {
    /// Derived from the deployment's secret, so that a tag here is worth nothing elsewhere. None when it is shorter than 16 bytes.
    pub fn from_deployment(secret: &[u8]) -> Option<Self> {
        if secret.len() < 16 {
            return None;
        }
        let mut mac = keyed(secret);
        mac.update(b"penstock compiled policies");
        Some(Self(mac.finalize().into_bytes().to_vec()))
    }
}

impl fmt::Debug for CacheSecret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("CacheSecret(..)")
    }
}

fn keyed(key: &[u8]) -> Hmac<Sha256> {
    Hmac::<Sha256>::new_from_slice(key).expect("HMAC takes a key of any length")
}

/// A directory of compiled components.
#[derive(Debug)]
pub(crate) struct Cache {
    dir: PathBuf,
    secret: CacheSecret,
    /// Makes the names of unfinished files differ.
    written: AtomicU64,
}

impl Cache {
    /// Uses `dir`, made for its owner alone where it is absent.
    pub fn open(dir: PathBuf, secret: CacheSecret) -> io::Result<Self> {
        fs::DirBuilder::new().recursive(true).mode(0o700).create(&dir)?;
        Ok(Self { dir, secret, written: AtomicU64::new(0) })
    }

    /// The code of a component, if a file vouches for it.
    pub fn get(&self, config: Digest, component: Digest) -> Option<Vec<u8>> {
        let path = self.path(config, component);
        if fs::metadata(&path).ok()?.len() > FILE_BYTES_MAX {
            return None;
        }
        let mut bytes = fs::read(&path).ok()?;
        let rest = bytes.strip_prefix(MAGIC)?;
        let (tag, code) = rest.split_at_checked(TAG_BYTES)?;
        self.mac(config, component, code).verify_slice(tag).ok()?;
        bytes.drain(..MAGIC.len() + TAG_BYTES);
        Some(bytes)
    }

    /// Keeps code. The file appears whole or not at all.
    pub fn put(&self, config: Digest, component: Digest, code: &[u8]) -> io::Result<()> {
        let tag = self.mac(config, component, code).finalize().into_bytes();
        let serial = self.written.fetch_add(1, Ordering::Relaxed);
        let unfinished = self.dir.join(format!("{component}.{}.{serial}.unfinished", std::process::id()));
        let written = self.write(&unfinished, &tag, code);
        let kept = written.and_then(|()| fs::rename(&unfinished, self.path(config, component)));
        if kept.is_err() {
            // What could not be finished is of no use; that it cannot be removed either changes nothing.
            let _removed = fs::remove_file(&unfinished);
        }
        kept
    }

    fn write(&self, path: &PathBuf, tag: &[u8], code: &[u8]) -> io::Result<()> {
        let mut file = fs::OpenOptions::new().write(true).create_new(true).mode(0o600).open(path)?;
        file.write_all(MAGIC)?;
        file.write_all(tag)?;
        file.write_all(code)?;
        file.sync_all()
    }

    fn path(&self, config: Digest, component: Digest) -> PathBuf {
        self.dir.join(format!("{component}-{:016x}.code", config.short()))
    }

    fn mac(&self, config: Digest, component: Digest, code: &[u8]) -> Hmac<Sha256> {
        let mut mac = keyed(&self.secret.0);
        mac.update(MAGIC);
        mac.update(config.as_bytes());
        mac.update(component.as_bytes());
        mac.update(&(code.len() as u64).to_le_bytes());
        mac.update(code);
        mac
    }
}
