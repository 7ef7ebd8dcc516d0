//! How does a worker stay known? One task a registration: announce, renew three times a lease, announce again when the service forgot.

use std::time::Duration;

use tokio::sync::{mpsc, oneshot, watch};
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep_until};

use crate::Answer;
use crate::error::DiscoveryError;
use crate::record::WorkerRecord;

/// What an implementation does for a registration. Each call ends within its own time limit.
pub(crate) trait Announcer: Send + 'static {
    /// Writes the record, unless a later life of the worker is there.
    fn announce<'a>(&'a mut self, record: &'a WorkerRecord) -> Answer<'a, ()>;
    /// Renews the lease. `false`: the service has forgotten the record, announce it again.
    fn renew<'a>(&'a mut self, record: &'a WorkerRecord) -> Answer<'a, bool>;
    /// Takes the record out, if it is still this life's.
    fn withdraw<'a>(&'a mut self, record: &'a WorkerRecord) -> Answer<'a, ()>;
}

/// How a registration stands.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Standing {
    /// The service has the record.
    Announced,
    /// The last renewal failed or was refused; more are tried, and the record is announced again when the service has lost it. A role that
    /// somebody takes away and gives back does not end a worker.
    Interrupted(DiscoveryError),
    /// A later life of the worker has taken its place. Nothing is renewed any more.
    Over(DiscoveryError),
}

enum Command {
    Update(Box<WorkerRecord>, oneshot::Sender<Result<(), DiscoveryError>>),
    Withdraw(oneshot::Sender<Result<(), DiscoveryError>>),
}

/// A registered worker. Dropping it is what a crash is: nothing is renewed, and the lease runs out.
pub struct Registration {
    commands: mpsc::Sender<Command>,
    standing: watch::Receiver<Standing>,
    task: JoinHandle<()>,
}

impl Drop for Registration {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Registration {
    /// Announces `record`, then keeps it announced. Renews every third of `lease`.
    pub(crate) async fn start(
        mut announcer: impl Announcer,
        record: WorkerRecord,
        lease: Duration,
    ) -> Result<Self, DiscoveryError> {
        record.encode()?;
        announcer.announce(&record).await?;
        let (commands, inbox) = mpsc::channel(4);
        let (standing_in, standing) = watch::channel(Standing::Announced);
        let task = tokio::spawn(keep(announcer, record, lease, inbox, standing_in));
        Ok(Self { commands, standing, task })
    }

    /// How it stands now.
    #[must_use]
    pub fn standing(&self) -> Standing {
        self.standing.borrow().clone()
    }

    /// Waits until it stands otherwise. Ends for good after [`Standing::Over`].
    ///
    /// # Errors
    /// [`DiscoveryError::Ended`] when it cannot change any more.
    pub async fn changed(&mut self) -> Result<Standing, DiscoveryError> {
        self.standing.changed().await.map_err(|_| DiscoveryError::Ended)?;
        Ok(self.standing())
    }

    /// Says something else of the same life of the same worker: its state, above all.
    ///
    /// # Errors
    /// As the service gives them. The new record is kept and announced with the next renewal when the service does not answer now.
    pub async fn update(&self, record: WorkerRecord) -> Result<(), DiscoveryError> {
        record.encode()?;
        let (answer, wait) = oneshot::channel();
        self.commands.send(Command::Update(Box::new(record), answer)).await.map_err(|_| DiscoveryError::Ended)?;
        wait.await.map_err(|_| DiscoveryError::Ended)?
    }

    /// Leaves in order: watchers are told without waiting for the lease.
    ///
    /// # Errors
    /// As the service gives them; then the lease runs out instead.
    pub async fn deregister(self) -> Result<(), DiscoveryError> {
        let (answer, wait) = oneshot::channel();
        self.commands.send(Command::Withdraw(answer)).await.map_err(|_| DiscoveryError::Ended)?;
        wait.await.map_err(|_| DiscoveryError::Ended)?
    }
}

async fn keep(
    mut announcer: impl Announcer,
    mut record: WorkerRecord,
    lease: Duration,
    mut inbox: mpsc::Receiver<Command>,
    standing: watch::Sender<Standing>,
) {
    let mut is_written = true;
    let mut due = Instant::now() + lease / 3;
    loop {
        let command = tokio::select! {
            command = inbox.recv() => command,
            () = sleep_until(due) => None,
        };
        let outcome = match command {
            Some(Command::Withdraw(answer)) => {
                // Whoever asked may have gone; then nobody wants to know.
                let _ = answer.send(announcer.withdraw(&record).await);
                return;
            }
            Some(Command::Update(new, answer)) => {
                let is_same = new.id == record.id && new.epoch == record.epoch;
                if !is_same {
                    let why = format!("the registration is of worker {} in epoch {}", record.id, record.epoch);
                    let _ = answer.send(Err(crate::RecordError::Field { field: "id", why }.into()));
                    continue;
                }
                record = *new;
                is_written = false;
                let outcome = announcer.announce(&record).await;
                let _ = answer.send(outcome.clone());
                outcome
            }
            None if inbox.is_closed() => return,
            None => match if is_written { announcer.renew(&record).await } else { Ok(false) } {
                Ok(true) => Ok(()),
                Ok(false) => announcer.announce(&record).await,
                Err(why) => Err(why),
            },
        };
        is_written |= outcome.is_ok();
        let (now, wait) = match outcome {
            Ok(()) => (Standing::Announced, lease / 3),
            Err(why @ DiscoveryError::Superseded { .. }) => {
                standing.send_replace(Standing::Over(why));
                return;
            }
            Err(why) => (Standing::Interrupted(why), lease / 6),
        };
        standing.send_if_modified(|old| {
            let is_new = *old != now;
            *old = now;
            is_new
        });
        due = Instant::now() + wait;
    }
}
