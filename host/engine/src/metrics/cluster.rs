//! What a process counts of the others: a gateway of its workers, a worker of its gateways. The server says when.

use std::time::Duration;

use prometheus::{Gauge, IntCounterVec, IntGauge, IntGaugeVec};

use super::{Maker, Metrics, table};

/// See the module.
#[derive(Debug)]
pub(super) struct ClusterMetrics {
    workers: IntGaugeVec,
    calls_failed: IntCounterVec,
    sessions_ended: IntCounterVec,
    discovery_age: Gauge,
    worker_state: IntGaugeVec,
    gateways: IntGauge,
}

impl ClusterMetrics {
    pub fn new(make: &Maker<'_>) -> Self {
        Self {
            workers: make.gauges(&table::WORKERS),
            calls_failed: make.counters(&table::WORKER_CALLS_FAILED),
            sessions_ended: make.counters(&table::WORKER_SESSIONS_ENDED),
            discovery_age: make.ratio(&table::DISCOVERY_AGE),
            worker_state: make.gauges(&table::WORKER_STATE),
            gateways: make.gauge(&table::GATEWAYS),
        }
    }
}

impl Metrics {
    /// Workers of a gateway that stand so.
    pub fn workers(&self, standing: &'static str, count: usize) {
        self.cluster.workers.with_label_values(&[standing]).set(i64::try_from(count).unwrap_or(i64::MAX));
    }

    /// A worker could not be reached, or was not taken in.
    pub fn worker_call_failed(&self, reason: &'static str) {
        self.cluster.calls_failed.with_label_values(&[reason]).inc();
    }

    /// A worker's session is over.
    pub fn worker_session_ended(&self, reason: &'static str) {
        self.cluster.sessions_ended.with_label_values(&[reason]).inc();
    }

    /// How long discovery has not been heard; zero while it answers.
    pub fn discovery_age(&self, age: Duration) {
        self.cluster.discovery_age.set(age.as_secs_f64());
    }

    /// Whether this worker is in that state.
    pub fn worker_state(&self, state: &'static str, is_in_it: bool) {
        self.cluster.worker_state.with_label_values(&[state]).set(i64::from(is_in_it));
    }

    /// Gateways before this worker.
    pub fn gateways(&self, count: usize) {
        self.cluster.gateways.set(i64::try_from(count).unwrap_or(i64::MAX));
    }
}

/// One series of each family that has labels.
#[cfg(test)]
pub(super) fn show(metrics: &Metrics) {
    metrics.workers("known", 1);
    metrics.worker_call_failed("denied");
    metrics.worker_session_ended("lease");
    metrics.worker_state("ready", true);
}
