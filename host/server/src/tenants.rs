//! Who is calling? The key file maps API keys to tenants; without one there is a single open tenant.
//!
//! The file holds SHA-256 digests of keys, never keys. It is read again on SIGHUP; a broken file keeps the last good one.

mod file;
mod identity;

pub use file::KeyFile;
pub use identity::{Identity, entropy};

use std::collections::HashMap;
use std::path::Path;

use penstock_base::{ClassRank, TenantId, TenantTerms, TrustGroup};
use sha2::{Digest as _, Sha256};

use crate::config::Faults;

/// One authenticated tenant.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tenant {
    /// Keyed hash of its name.
    pub id: TenantId,
    /// Cache-sharing domain.
    pub trust: TrustGroup,
    /// Highest class it may use.
    pub class_ceiling: ClassRank,
    /// Class of a request that names none.
    pub class_default: ClassRank,
    /// What it may use.
    pub terms: TenantTerms,
    /// Its blocks are never kept for reuse.
    pub no_store: bool,
    /// Its requests are refused.
    pub disabled: bool,
}

/// Why a caller is not let in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AuthFault {
    /// No key was sent.
    Missing,
    /// The key is nobody's.
    Unknown,
    /// The tenant is switched off.
    Disabled,
}

/// All tenants by the digest of their keys.
#[derive(Debug)]
pub struct Tenants {
    by_key: Option<HashMap<[u8; 32], usize>>,
    tenants: Vec<Tenant>,
}

impl Tenants {
    /// One tenant for everybody.
    pub fn open(identity: &Identity) -> Self {
        let tenant = Tenant {
            id: TenantId(0),
            trust: identity.trust("open"),
            class_ceiling: ClassRank::MAX,
            class_default: ClassRank::default(),
            terms: TenantTerms::default(),
            no_store: false,
            disabled: false,
        };
        Self { by_key: None, tenants: vec![tenant] }
    }

    /// From a key file.
    ///
    /// # Errors
    /// Every fault of the file.
    pub fn read(path: &Path, identity: &Identity) -> Result<Self, Faults> {
        let text = std::fs::read_to_string(path)
            .map_err(|fault| Faults::one(format!("{}: {fault}: is the path right?", path.display())))?;
        Self::parse(&text, identity).map_err(|faults| faults.in_file(path))
    }

    /// From the text of a key file.
    ///
    /// # Errors
    /// As for [`Tenants::read`].
    pub fn parse(text: &str, identity: &Identity) -> Result<Self, Faults> {
        let file = KeyFile::parse(text)?;
        let mut by_key = HashMap::new();
        let mut tenants = Vec::with_capacity(file.tenants.len());
        for entry in &file.tenants {
            for key in &entry.keys {
                by_key.insert(*key, tenants.len());
            }
            tenants.push(entry.tenant(identity));
        }
        Ok(Self { by_key: Some(by_key), tenants })
    }

    /// The tenant of a bearer key.
    ///
    /// # Errors
    /// See [`AuthFault`].
    pub fn authenticate(&self, key: Option<&str>) -> Result<&Tenant, AuthFault> {
        let tenant = match (&self.by_key, key) {
            (None, _) => &self.tenants[0],
            (Some(_), None) => return Err(AuthFault::Missing),
            (Some(by_key), Some(key)) => {
                // The digest hides the key's bytes from the timing of the look-up.
                let digest: [u8; 32] = Sha256::digest(key.as_bytes()).into();
                &self.tenants[*by_key.get(&digest).ok_or(AuthFault::Unknown)?]
            }
        };
        if tenant.disabled { Err(AuthFault::Disabled) } else { Ok(tenant) }
    }

    /// How many.
    pub fn len(&self) -> usize {
        self.tenants.len()
    }
}
