//! Is this a retry of what was refused a moment ago? A bounded memory of hashes.

use std::collections::HashMap;
use std::hash::{BuildHasher as _, RandomState};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use penstock_base::TenantId;

const REMEMBERED: Duration = Duration::from_secs(60);
/// Entries kept; past it the table starts anew, which forgets retries and costs nothing else.
const ENTRIES_MAX: usize = 65_536;

/// Prompts that were refused, by hash of tenant and tokens.
#[derive(Default)]
pub struct Refusals {
    hash: RandomState,
    seen: Mutex<HashMap<u64, Instant>>,
}

impl Refusals {
    /// Was this tenant refused this prompt within the last minute?
    pub fn is_recent(&self, tenant: TenantId, prompt: &[u32]) -> bool {
        // Hashed outside the lock: a prompt may be long.
        let hash = self.hash.hash_one((tenant, prompt));
        let seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        seen.get(&hash).is_some_and(|at| at.elapsed() < REMEMBERED)
    }

    /// Remembers a refusal.
    pub fn remember(&self, tenant: TenantId, prompt: &[u32]) {
        let hash = self.hash.hash_one((tenant, prompt));
        let mut seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        if seen.len() >= ENTRIES_MAX {
            seen.retain(|_, at| at.elapsed() < REMEMBERED);
        }
        if seen.len() >= ENTRIES_MAX {
            seen.clear();
        }
        seen.insert(hash, Instant::now());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_same_tenant_with_the_same_prompt_is_a_retry_and_the_table_is_bounded() {
        let refusals = Refusals::default();
        refusals.remember(TenantId(1), &[1, 2]);
        assert!(refusals.is_recent(TenantId(1), &[1, 2]));
        assert!(!refusals.is_recent(TenantId(2), &[1, 2]));
        assert!(!refusals.is_recent(TenantId(1), &[1]));
        for token in 0..=ENTRIES_MAX as u32 {
            refusals.remember(TenantId(3), &[token]);
        }
        assert!(refusals.seen.lock().unwrap().len() <= ENTRIES_MAX);
    }
}
