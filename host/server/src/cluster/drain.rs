//! How does a worker end? In this order, with a line in the log for each step, so that nothing that it promised is broken:
//!
//! 1. Its record says `draining`: no gateway that comes by discovery calls it.
//! 2. The gateways before it are told to send nothing new.
//! 3. What runs ends within the grace; what is left then ends with an error that may be retried.
//! 4. Prompts that it computed for others stay until they are fetched, or their leases are over.
//! 5. The sessions close.
//! 6. The registration goes.

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, Result};
use penstock_discovery::WorkerState;
use penstock_engine::Worker;

use super::doors::Doors;
use super::duty::Duty;
use super::registrar::Registrar;

/// Longest wait for discovery to hear of it. It may be away; then the lease says the rest.
const TELL_WITHIN: Duration = Duration::from_secs(5);
/// Longest wait for sessions to end that are closed.
const CLOSE_WITHIN: Duration = Duration::from_secs(2);

/// How often it is looked whether a step is over.
const LOOK_EVERY: Duration = Duration::from_millis(10);

/// How long the steps may take.
#[derive(Clone, Copy, Debug)]
pub struct Patience {
    /// For what runs.
    pub grace: penstock_base::Duration,
    /// For prompts that were computed for others: past their leases nobody may fetch them.
    pub keep: Duration,
}

/// Ends the service. The engine still runs afterwards, without anybody.
///
/// # Errors
/// A part of the process has broken.
pub async fn drain(
    worker: &Arc<Worker>,
    duty: &Duty,
    registrar: &Registrar,
    doors: Doors,
    Patience { grace, keep }: Patience,
) -> Result<()> {
    let record = duty.change(|record| record.state = WorkerState::Draining);
    let told = tokio::time::timeout(TELL_WITHIN, registrar.say(record)).await;
    let heard = matches!(told, Ok(Ok(())));
    tracing::info!(step = 1, heard, "drain: the record says draining");
    doors.nobody_new();
    worker.engine().begin_drain();
    tracing::info!(step = 2, gateways = worker.gateways().len(), "drain: gateways are told to send nothing new");
    let draining = Arc::clone(worker.engine());
    let report = tokio::task::spawn_blocking(move || draining.drain(grace)).await.context("drain")?;
    tracing::info!(step = 3, cancelled = report.cancelled, left = report.left, "drain: what ran has ended");
    let until = tokio::time::Instant::now() + keep;
    while in_transfer(worker) > 0 && tokio::time::Instant::now() < until {
        tokio::time::sleep(LOOK_EVERY).await;
    }
    let blocks = in_transfer(worker);
    tracing::info!(step = 4, blocks, "drain: computed prompts have been fetched or given up");
    doors.close().await;
    let until = tokio::time::Instant::now() + CLOSE_WITHIN;
    while !worker.gateways().is_empty() && tokio::time::Instant::now() < until {
        tokio::time::sleep(LOOK_EVERY).await;
    }
    tracing::info!(step = 5, left = worker.gateways().len(), "drain: the sessions are closed");
    duty.change(|record| record.state = WorkerState::Terminated);
    let gone = tokio::time::timeout(TELL_WITHIN, registrar.leave()).await;
    match gone {
        Ok(Ok(())) => tracing::info!(step = 6, "drain: the registration is removed"),
        Ok(Err(why)) => tracing::warn!(step = 6, %why, "drain: the registration is left to its lease"),
        Err(_) => tracing::warn!(step = 6, why = "no answer in time", "drain: the registration is left to its lease"),
    }
    Ok(())
}

/// Blocks that others may still read or write.
fn in_transfer(worker: &Worker) -> u64 {
    worker.engine().status().sum(|load| u64::from(load.transfer_blocks))
}
