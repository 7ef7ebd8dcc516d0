//! How often was this process asked to end? Once means in order, twice at once.

use anyhow::{Context as _, Result};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::watch;

/// Signals to end, counted from the moment it is made.
#[derive(Clone)]
pub struct Stop {
    asked: watch::Receiver<u32>,
}

impl Stop {
    /// Begins to listen for SIGTERM and SIGINT. To be called inside a tokio runtime.
    ///
    /// # Errors
    /// The system does not let it.
    pub fn listen() -> Result<Self> {
        let mut terminate = signal(SignalKind::terminate()).context("listen for signals")?;
        let mut interrupt = signal(SignalKind::interrupt()).context("listen for signals")?;
        let (count, asked) = watch::channel(0);
        tokio::spawn(async move {
            loop {
                tokio::select! {
                    _ = terminate.recv() => {}
                    _ = interrupt.recv() => {}
                }
                count.send_modify(|count| *count += 1);
            }
        });
        Ok(Self { asked })
    }

    /// Waits until it was asked `times` times.
    pub async fn asked(&mut self, times: u32) {
        // The task that counts lives as long as the runtime.
        let _ = self.asked.wait_for(|count| *count >= times).await;
    }
}
