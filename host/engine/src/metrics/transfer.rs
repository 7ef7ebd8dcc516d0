//! What is counted of KV that goes from replica to replica.

use super::{Metrics, signed};
use crate::handoff::Way;

impl Metrics {
    /// A chunk of KV was copied to another replica.
    pub(crate) fn chunk_moved(&self, bytes: u64, took: std::time::Duration) {
        self.transfer_bytes.inc_by(bytes);
        self.transfer_chunks.with_label_values(&["written"]).inc();
        self.transfer_time.observe(took.as_secs_f64());
    }

    /// How the movers here reach others now.
    pub(crate) fn transport_peers(&self, ways: &[Way]) {
        for kind in Way::KINDS {
            let count = ways.iter().filter(|way| way.kind == Some(kind)).count();
            self.transport_peers.with_label_values(&[kind.to_string().as_str()]).set(signed(count as u64));
        }
    }

    /// A chunk was turned away or came to nothing.
    pub(crate) fn chunk_failed(&self) {
        self.transfer_chunks.with_label_values(&["failed"]).inc();
    }

    /// A hand-off that nobody kept was ended.
    pub(crate) fn handoff_swept(&self) {
        self.handoffs_swept.inc();
    }
}
