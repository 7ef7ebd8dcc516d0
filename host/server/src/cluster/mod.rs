//! One process of several: gateways that have the clients, workers that compute, and how they find each other.
//!
//! [`gateway`] and [`worker`] are the two roles from start to end. [`identity`] says who this process is and what both ends must have in
//! common, [`places`] where workers make themselves known. At a gateway [`roster`] decides whom to call, [`caller`] does it, and [`sight`] is
//! what operators are shown, [`quotas`] its part of the tenants' quotas; at a worker [`registrar`] keeps it known, and [`duty`] has how far it is.

mod caller;
mod doors;
mod drain;
mod duty;
pub mod gateway;
mod identity;
mod places;
mod quotas;
mod registrar;
mod roster;
mod sight;
mod stop;
pub mod worker;
mod worker_edge;

use std::sync::Arc;

use serde_json::Value;

use duty::Duty;
use sight::Sight;

/// What this process is among others.
#[derive(Clone)]
pub enum Cluster {
    /// It is alone.
    Alone,
    /// It has workers.
    Gateway(Arc<Sight>),
    /// It has gateways.
    Worker(Arc<Duty>),
}

impl Cluster {
    /// For operators, by name.
    pub fn shown(&self) -> Option<(&'static str, Value)> {
        match self {
            Self::Alone => None,
            Self::Gateway(sight) => Some(("cluster", sight.shown())),
            Self::Worker(duty) => Some(("worker", duty.shown())),
        }
    }
}
