//! By which way does each mover of this process reach the others, and why that one? Written by the movers, read by status and metrics.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use penstock_base::ReplicaId;
use penstock_transport::Kind;

/// How the KV of one replica gets to another one.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Way {
    /// The replica that sends.
    pub from: ReplicaId,
    /// The one that receives.
    pub to: ReplicaId,
    /// Which transport is connected; none while there is no connection.
    pub kind: Option<Kind>,
    /// Why this one and no faster one, or why there is none.
    pub why: String,
}

impl Way {
    /// Every kind that there may be.
    pub const KINDS: [Kind; 4] = [Kind::Reference, Kind::Memfd, Kind::Nixl, Kind::Tcp];
}

/// All of them.
#[derive(Clone, Default, Debug)]
pub(crate) struct Ways(Arc<Mutex<BTreeMap<(ReplicaId, ReplicaId), Way>>>);

impl Ways {
    pub fn set(&self, way: Way) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).insert((way.from, way.to), way);
    }

    pub fn remove(&self, from: ReplicaId, to: ReplicaId) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).remove(&(from, to));
    }

    /// In the order of the replicas.
    pub fn all(&self) -> Vec<Way> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).values().cloned().collect()
    }
}
