//! Whom does a mover talk to?

use std::sync::Arc;
use std::time::Duration;

use penstock_base::ReplicaId;

use super::landed::Landed;
use super::mover::{LANDED, MoverWake};
use crate::remote::Word;
use crate::replica_wake::{self, ReplicaWake};
use crate::wiring::Wiring;

/// What is around a mover.
pub(crate) trait Outside {
    /// To the own replica's loop, which must hear it.
    fn tell(&self, wake: ReplicaWake);
    /// To the mover that it names. It may be lost: then the chunk is written again.
    fn post(&self, landed: Landed);
    /// A chunk was copied.
    fn moved(&self, bytes: u64, took: Duration);
    /// One was not.
    fn failed(&self);
}

/// In an engine.
pub(crate) struct Wired {
    pub wiring: Arc<Wiring>,
    pub replica: ReplicaId,
}

impl Outside for Wired {
    fn tell(&self, wake: ReplicaWake) {
        let port = self.wiring.replica(self.replica);
        if let Some(mailbox) = port.as_ref().and_then(|port| port.local()) {
            let _ = mailbox.push_waiting(replica_wake::MOVED, wake);
        }
    }

    fn post(&self, landed: Landed) {
        if let Some(mailbox) = self.wiring.mover(landed.to.replica) {
            let _ = mailbox.try_push(LANDED, MoverWake::Landed(landed));
        } else if let Some(links) = &self.wiring.links {
            // By way of the gateway that leads the hand-off.
            let word = Word::Mover { to: landed.to, body: landed.encode().into() };
            links.word(landed.transfer.gateway_epoch(), &word);
        }
    }

    fn moved(&self, bytes: u64, took: Duration) {
        self.wiring.metrics.chunk_moved(bytes, took);
    }

    fn failed(&self) {
        self.wiring.metrics.chunk_failed();
    }
}
