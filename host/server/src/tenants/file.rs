//! The key file.
//!
//! ```toml
//! [[tenant]]
//! name = "search"
//! keys_sha256 = ["2bb80d53..."]     # printf %s "$KEY" | sha256sum
//! weight = 2.0                      # share of service relative to others
//! class_ceiling = 5
//! requests_max = 64
//! tokens_per_window_max = 200000
//! ```

use penstock_base::{ClassRank, TenantTerms};
use serde::Deserialize;

use super::{Identity, Tenant};
use crate::config::Faults;

/// Most tenants in a file: the ledger's bound.
const TENANTS_MAX: usize = penstock_base::limits::TENANTS_MAX;

/// A parsed key file.
#[derive(Debug)]
pub struct KeyFile {
    /// In file order.
    pub tenants: Vec<TenantEntry>,
}

/// One tenant of the file.
#[derive(Debug)]
pub struct TenantEntry {
    written: Written,
    /// Digests of its keys.
    pub keys: Vec<[u8; 32]>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Written {
    name: String,
    keys_sha256: Vec<String>,
    weight: Option<f64>,
    class_ceiling: Option<u8>,
    class_default: Option<u8>,
    trust_group: Option<String>,
    requests_max: Option<u32>,
    tokens_per_window_max: Option<u64>,
    guaranteed_tokens_per_window: Option<u64>,
    borrow_tokens_max: Option<u64>,
    rate_tokens_per_s: Option<u64>,
    burst_tokens: Option<u64>,
    cache_blocks_max: Option<u64>,
    #[serde(default)]
    no_store: bool,
    #[serde(default)]
    disabled: bool,
}

impl KeyFile {
    /// Reads the text.
    ///
    /// # Errors
    /// Every fault at once. No key or digest is repeated in a message.
    pub fn parse(text: &str) -> Result<Self, Faults> {
        let mut table: toml::Table =
            text.parse().map_err(|fault: toml::de::Error| Faults::one(fault.message().to_owned()))?;
        let mut faults = Faults::default();
        let entries = match table.remove("tenant") {
            Some(toml::Value::Array(entries)) => entries,
            _ => {
                return Err(Faults::one(
                    "no tenant: write at least one [[tenant]] with name and keys_sha256".to_owned(),
                ));
            }
        };
        for key in table.keys() {
            faults.push(format!("{key} is not known here; a key file holds [[tenant]] tables only"));
        }
        if entries.len() > TENANTS_MAX {
            faults.push(format!("{} tenants, at most {TENANTS_MAX}", entries.len()));
        }
        let mut tenants: Vec<TenantEntry> = Vec::with_capacity(entries.len());
        let mut names = std::collections::HashSet::new();
        let mut seen = std::collections::HashSet::new();
        for (at, entry) in entries.into_iter().enumerate() {
            let place = format!("tenant {}", at + 1);
            match Written::deserialize(entry) {
                Ok(written) => {
                    if !names.insert(written.name.clone()) {
                        faults.push(format!("{place}: the name {} stands twice", written.name));
                    }
                    faults.extend(check(&place, &written));
                    let keys = digests(&place, &written, &mut seen, &mut faults);
                    tenants.push(TenantEntry { written, keys });
                }
                Err(fault) => faults.push(format!("{place}: {}", fault.message())),
            }
        }
        if faults.is_empty() { Ok(Self { tenants }) } else { Err(faults) }
    }
}

fn check(place: &str, written: &Written) -> Faults {
    let mut faults = Faults::default();
    if written.name.is_empty() || written.name.len() > 256 {
        faults.push(format!("{place}: name must have 1 to 256 bytes"));
    }
    if written.weight.is_some_and(|weight| !(0.001..=1_000.0).contains(&weight)) {
        faults.push(format!("{place}: weight must be 0.001..=1000"));
    }
    for (key, class) in [("class_ceiling", written.class_ceiling), ("class_default", written.class_default)] {
        if class.is_some_and(|class| class > 7) {
            faults.push(format!("{place}: {key} must be 0..=7"));
        }
    }
    if written.requests_max == Some(0) {
        faults.push(format!("{place}: requests_max = 0 lets nothing in; use disabled = true"));
    }
    faults
}

fn digests(
    place: &str,
    written: &Written,
    seen: &mut std::collections::HashSet<[u8; 32]>,
    faults: &mut Faults,
) -> Vec<[u8; 32]> {
    let mut keys = Vec::new();
    for (at, text) in written.keys_sha256.iter().enumerate() {
        match digest(text) {
            Some(key) if seen.insert(key) => keys.push(key),
            Some(_) => faults.push(format!("{place}: key {} stands twice in the file", at + 1)),
            None => faults.push(format!(
                "{place}: key {} is not a SHA-256 digest of 64 hex digits; make one with: printf %s \"$KEY\" | sha256sum",
                at + 1
            )),
        }
    }
    if written.keys_sha256.is_empty() {
        faults.push(format!("{place}: keys_sha256 is empty, nobody could call"));
    }
    keys
}

fn digest(text: &str) -> Option<[u8; 32]> {
    let mut out = [0; 32];
    if text.len() != 64 || !text.is_ascii() {
        return None;
    }
    for (byte, pair) in out.iter_mut().zip(text.as_bytes().chunks(2)) {
        *byte = u8::from_str_radix(std::str::from_utf8(pair).ok()?, 16).ok()?;
    }
    Some(out)
}

impl TenantEntry {
    /// With its ids.
    pub fn tenant(&self, identity: &Identity) -> Tenant {
        let written = &self.written;
        let defaults = TenantTerms::default();
        let ceiling = ClassRank::clamped(written.class_ceiling.unwrap_or(7));
        Tenant {
            id: identity.tenant(&written.name),
            trust: identity.trust(written.trust_group.as_ref().unwrap_or(&written.name)),
            class_ceiling: ceiling,
            class_default: written.class_default.map_or(ClassRank::default(), ClassRank::clamped).min(ceiling),
            terms: TenantTerms {
                weight_ppm: written.weight.map_or(defaults.weight_ppm, |weight| (weight * 1e6) as u64),
                requests_max: written.requests_max.unwrap_or(defaults.requests_max),
                window_tokens_max: written.tokens_per_window_max.unwrap_or(defaults.window_tokens_max),
                guaranteed_tokens: written.guaranteed_tokens_per_window.unwrap_or(defaults.guaranteed_tokens),
                borrow_tokens_max: written.borrow_tokens_max.unwrap_or(defaults.borrow_tokens_max),
                rate_tokens_per_sec: written.rate_tokens_per_s.unwrap_or(defaults.rate_tokens_per_sec),
                burst_tokens: written.burst_tokens.unwrap_or(defaults.burst_tokens),
                cache_blocks_max: written.cache_blocks_max.unwrap_or(defaults.cache_blocks_max),
            },
            no_store: written.no_store,
            disabled: written.disabled,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::{AuthFault, Tenants};
    use super::*;

    // printf %s secret-a | sha256sum
    const DIGEST_A: &str = "8766b9cb08e6040b704f1e3ee1e186efccf2635b1d2634d6525333007e6aeae1";

    #[test]
    fn a_key_finds_its_tenant_and_a_wrong_one_does_not() {
        let text =
            format!("[[tenant]]\nname = \"a\"\nkeys_sha256 = [\"{DIGEST_A}\"]\nweight = 2.0\nclass_ceiling = 2\n");
        let tenants = Tenants::parse(&text, &Identity::new([1; 32])).unwrap();
        let tenant = tenants.authenticate(Some("secret-a")).unwrap();
        assert_eq!(
            (tenant.terms.weight_ppm, tenant.class_ceiling.get(), tenant.class_default.get()),
            (2_000_000, 2, 2)
        );
        assert_eq!(tenants.authenticate(Some("secret-b")), Err(AuthFault::Unknown));
        assert_eq!(tenants.authenticate(None), Err(AuthFault::Missing));
    }

    #[test]
    fn all_faults_are_named_and_no_digest_is_repeated() {
        let text = format!(
            "[[tenant]]\nname = \"a\"\nkeys_sha256 = [\"{DIGEST_A}\", \"{DIGEST_A}\"]\n[[tenant]]\nname = \"a\"\nkeys_sha256 = [\"xyz\"]\nclass_ceiling = 9\n"
        );
        let faults = KeyFile::parse(&text).unwrap_err().to_string();
        for part in ["key 2 stands twice", "the name a stands twice", "not a SHA-256", "class_ceiling"] {
            assert!(faults.contains(part), "{part} is missing in:\n{faults}");
        }
        assert!(!faults.contains(DIGEST_A));
    }
}
