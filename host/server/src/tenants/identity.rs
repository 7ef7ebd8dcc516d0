//! Stable ids for names: keyed hashes under the deployment's secret, the same in every process and not invertible by a policy.

use hmac::{Hmac, KeyInit as _, Mac as _};
use penstock_base::{ClassRank, FlowId, SessionId, TenantId, TrustGroup};
use sha2::Sha256;

use crate::deployment::SECRET_BYTES;

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

/// 64 bits that differ from call to call, for seeds that a request does not name. Not for secrets.
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
