//! Which requests did a client mean by its `x-request-id`? For people who ask later; nothing inside the host depends on it.

use std::collections::VecDeque;
use std::sync::{Mutex, PoisonError};

use penstock_base::RequestId;

/// Names remembered: a few times as many as the decision log can tell of.
const NAMES_MAX: usize = 8_192;

/// Names that clients gave, the latest last. In memory alone: not in logs, metrics, journals or policies.
#[derive(Default)]
pub struct ClientIds(Mutex<VecDeque<(String, RequestId)>>);

impl ClientIds {
    /// A client called this request so.
    pub fn remember(&self, name: &str, request: RequestId) {
        let mut names = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if names.len() >= NAMES_MAX {
            names.pop_front();
        }
        names.push_back((name.to_owned(), request));
    }

    /// What was called so, the latest first.
    pub fn named(&self, name: &str) -> Vec<RequestId> {
        let names = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        names.iter().rev().filter(|(known, _)| known == name).map(|(_, request)| *request).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_may_come_twice_and_the_oldest_leave() {
        let ids = ClientIds::default();
        ids.remember("a", RequestId(1));
        ids.remember("b", RequestId(2));
        ids.remember("a", RequestId(3));
        assert_eq!(ids.named("a"), [RequestId(3), RequestId(1)]);
        (0..NAMES_MAX as u64 - 1).for_each(|number| ids.remember("c", RequestId(number)));
        assert_eq!(ids.named("a"), [RequestId(3)], "the two before it have left");
        assert!(ids.named("b").is_empty());
    }
}
