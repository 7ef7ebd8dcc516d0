//! Stable ids for names: keyed hashes under the deployment's secret, the same in every process and not invertible by a policy.

use std::io::Write as _;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, ensure};
use hmac::{Hmac, KeyInit as _, Mac as _};
use penstock_base::{ClassRank, FlowId, SessionId, TenantId, TrustGroup};
use sha2::Sha256;

const SECRET_BYTES: usize = 32;

/// Hashes names into ids.
#[derive(Clone)]
pub struct Identity {
    secret: [u8; SECRET_BYTES],
}

impl Identity {
    /// Under this secret.
    pub fn new(secret: [u8; SECRET_BYTES]) -> Self {
        Self { secret }
    }

    /// Of a tenant's name; never 0, which is the open tenant.
    pub fn tenant(&self, name: &str) -> TenantId {
        TenantId(self.hash("tenant", &[name.as_bytes()]).max(1))
    }

    /// Of a trust group's name.
    pub fn trust(&self, name: &str) -> TrustGroup {
        TrustGroup(self.hash("trust", &[name.as_bytes()]))
    }

    /// Of a conversation of a tenant.
    pub fn session(&self, tenant: TenantId, key: &str) -> SessionId {
        SessionId(self.hash("session", &[&tenant.0.to_le_bytes(), key.as_bytes()]).max(1))
    }

    /// Of tenant, class and the client's fairness id.
    pub fn flow(&self, tenant: TenantId, class: ClassRank, fairness: Option<&str>) -> FlowId {
        let fairness = fairness.unwrap_or_default();
        FlowId(self.hash("flow", &[&tenant.0.to_le_bytes(), &[class.get()], fairness.as_bytes()]))
    }

    fn hash(&self, domain: &str, parts: &[&[u8]]) -> u64 {
        let mut mac = Hmac::<Sha256>::new_from_slice(&self.secret).expect("HMAC takes keys of any length");
        mac.update(domain.as_bytes());
        for part in parts {
            mac.update(&(part.len() as u64).to_le_bytes());
            mac.update(part);
        }
        let digest = mac.finalize().into_bytes();
        let mut head = [0; 8];
        head.copy_from_slice(&digest[..8]);
        u64::from_le_bytes(head)
    }
}

/// Reads the deployment's secret, or makes one at the default place.
///
/// # Errors
/// A named file that is not there or is too short; a default place that cannot be written.
pub fn deployment_secret(named: Option<&Path>) -> Result<[u8; SECRET_BYTES]> {
    if let Some(path) = named {
        return read(path);
    }
    let path = default_path().context("no home directory: set server.secret_file")?;
    if path.exists() { read(&path) } else { make(&path) }
}

fn default_path() -> Option<PathBuf> {
    penstock_model::cache_dir::models_dir().and_then(|dir| Some(dir.parent()?.join("deployment-secret")))
}

fn read(path: &Path) -> Result<[u8; SECRET_BYTES]> {
    let bytes = std::fs::read(path).with_context(|| format!("read the deployment secret {}", path.display()))?;
    ensure!(
        bytes.len() >= SECRET_BYTES,
        "the deployment secret {} has {} bytes, at least {SECRET_BYTES} are needed: head -c 32 /dev/urandom > FILE",
        path.display(),
        bytes.len()
    );
    let mut secret = [0; SECRET_BYTES];
    secret.copy_from_slice(&bytes[..SECRET_BYTES]);
    Ok(secret)
}

fn make(path: &Path) -> Result<[u8; SECRET_BYTES]> {
    let mut secret = [0; SECRET_BYTES];
    for chunk in secret.chunks_mut(8) {
        chunk.copy_from_slice(&entropy().to_le_bytes());
    }
    if let Some(dir) = path.parent() {
        std::fs::create_dir_all(dir).with_context(|| format!("create {}", dir.display()))?;
    }
    let mut options = std::fs::OpenOptions::new();
    options.write(true).create_new(true);
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
    match options.open(path) {
        Ok(mut file) => file.write_all(&secret).with_context(|| format!("write {}", path.display()))?,
        // Another process was first: its secret counts.
        Err(fault) if fault.kind() == std::io::ErrorKind::AlreadyExists => return read(path),
        Err(fault) => return Err(fault).with_context(|| format!("create {}", path.display())),
    }
    Ok(secret)
}

/// 64 bits that nobody can guess: the standard library seeds this hasher from the system.
pub fn entropy() -> u64 {
    use std::hash::{BuildHasher as _, Hasher as _, RandomState};
    RandomState::new().build_hasher().finish()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_depend_on_secret_name_and_kind() {
        let (one, two) = (Identity::new([1; 32]), Identity::new([2; 32]));
        assert_eq!(one.tenant("a"), Identity::new([1; 32]).tenant("a"));
        assert_ne!(one.tenant("a"), two.tenant("a"));
        assert_ne!(one.tenant("a"), one.tenant("b"));
        assert_ne!(one.tenant("a").0, one.trust("a").0);
    }

    #[test]
    fn an_id_is_the_head_of_a_standard_hmac() {
        // printf 'tenant\x01\0\0\0\0\0\0\0a' | openssl dgst -sha256 -mac HMAC -macopt hexkey:0101..01 (32 bytes)
        assert_eq!(Identity::new([1; 32]).tenant("a").0, 0xb2b7da73a2a76f62);
    }
}
