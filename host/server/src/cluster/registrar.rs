//! Keeps a worker known: registers its record, says what changes in it, takes it out at the end. A discovery service that is away is waited
//! for; a later life of the same worker ends this one.

use std::sync::Arc;
use std::time::Duration;

use penstock_discovery::{Discovery, DiscoveryError, Registration, Standing, WorkerRecord};
use tokio::sync::{mpsc, oneshot, watch};

use super::duty::Duty;

/// Pause before a registration that failed is tried again: the first, doubled up to the last.
const PAUSE_FIRST: Duration = Duration::from_millis(500);
/// See [`PAUSE_FIRST`].
const PAUSE_LAST: Duration = Duration::from_secs(5);

/// Orders that wait while the service is asked: all states of a life, and more.
const ORDERS_MAX: usize = 16;

type Done = oneshot::Sender<Result<(), DiscoveryError>>;

enum Order {
    Say(Box<WorkerRecord>, Done),
    Leave(Done),
}

/// The handle of the task.
pub struct Registrar {
    orders: mpsc::Sender<Order>,
    over: watch::Receiver<Option<String>>,
}

impl Registrar {
    /// Begins to register `record`. To be called inside a tokio runtime.
    pub fn start(discovery: Arc<dyn Discovery>, record: WorkerRecord, duty: Arc<Duty>) -> Self {
        let (orders, inbox) = mpsc::channel(ORDERS_MAX);
        let (say_over, over) = watch::channel(None);
        tokio::spawn(keep(discovery, record, inbox, say_over, duty));
        Self { orders, over }
    }

    /// Says something else of this life. Comes back when the service has it, or why it has not: then it hears of it later.
    ///
    /// # Errors
    /// As the service gives them.
    pub async fn say(&self, record: WorkerRecord) -> Result<(), DiscoveryError> {
        self.order(|done| Order::Say(Box::new(record), done)).await
    }

    /// Says something else of this life, whenever the service hears it. Never waits.
    pub fn tell(&self, record: WorkerRecord) {
        let (done, _) = oneshot::channel();
        // There is room for every state of a life; should the service be so slow that there is none, the next one says it.
        if self.orders.try_send(Order::Say(Box::new(record), done)).is_err() {
            tracing::debug!("the registration is behind");
        }
    }

    /// Takes the record out.
    ///
    /// # Errors
    /// As the service gives them; then the lease runs out instead.
    pub async fn leave(&self) -> Result<(), DiscoveryError> {
        self.order(Order::Leave).await
    }

    async fn order(&self, order: impl FnOnce(Done) -> Order) -> Result<(), DiscoveryError> {
        let (done, wait) = oneshot::channel();
        self.orders.send(order(done)).await.map_err(|_| DiscoveryError::Ended)?;
        wait.await.map_err(|_| DiscoveryError::Ended)?
    }

    /// Waits until this life must end, and says why.
    pub async fn must_end(&self) -> String {
        let mut over = self.over.clone();
        loop {
            if let Some(why) = over.borrow_and_update().clone() {
                return why;
            }
            if over.changed().await.is_err() {
                // It has left in order.
                std::future::pending::<()>().await;
            }
        }
    }
}

async fn keep(
    discovery: Arc<dyn Discovery>,
    mut record: WorkerRecord,
    mut inbox: mpsc::Receiver<Order>,
    over: watch::Sender<Option<String>>,
    duty: Arc<Duty>,
) {
    let place = discovery.describe();
    loop {
        let Some(registration) = register(&*discovery, &mut record, &mut inbox, &over, &duty).await else { return };
        tracing::info!(worker = %record.id, life = record.epoch, place, "registered");
        duty.registration("announced".to_owned());
        match hold(registration, &mut record, &mut inbox, &duty).await {
            Held::Left => return,
            Held::Over(why) => return end(&over, &duty, &why),
            Held::Lost => duty.registration("lost: it is made again".to_owned()),
        }
    }
}

fn end(over: &watch::Sender<Option<String>>, duty: &Duty, why: &DiscoveryError) {
    duty.registration(format!("over: {why}"));
    over.send_replace(Some(why.to_string()));
}

/// Tries until it is registered. None when it has left before, or must end.
async fn register(
    discovery: &dyn Discovery,
    record: &mut WorkerRecord,
    inbox: &mut mpsc::Receiver<Order>,
    over: &watch::Sender<Option<String>>,
    duty: &Duty,
) -> Option<Registration> {
    let mut pause = PAUSE_FIRST;
    let mut said = String::new();
    loop {
        let why = match discovery.register(record.clone()).await {
            Ok(registration) => return Some(registration),
            // Waiting mends neither of these.
            Err(
                why @ (DiscoveryError::Superseded { .. }
                | DiscoveryError::Setting { .. }
                | DiscoveryError::Record(_)
                | DiscoveryError::Ended),
            ) => {
                end(over, duty, &why);
                return None;
            }
            Err(why) => why,
        };
        duty.registration(format!("not yet: {why}"));
        if said != why.to_string() {
            said = why.to_string();
            tracing::warn!(worker = %record.id, %why, "not registered: it is tried again");
        }
        tokio::select! {
            () = tokio::time::sleep(pause) => pause = (pause * 2).min(PAUSE_LAST),
            order = inbox.recv() => match order {
                Some(Order::Say(new, done)) => {
                    *record = *new;
                    // It is said with the registration; whoever asked need not wait for that.
                    drop(done.send(Err(why)));
                }
                Some(Order::Leave(done)) => {
                    drop(done.send(Ok(())));
                    return None;
                }
                None => return None,
            },
        }
    }
}

enum Held {
    Left,
    Over(DiscoveryError),
    Lost,
}

async fn hold(
    mut registration: Registration,
    record: &mut WorkerRecord,
    inbox: &mut mpsc::Receiver<Order>,
    duty: &Duty,
) -> Held {
    loop {
        tokio::select! {
            order = inbox.recv() => match order {
                Some(Order::Say(new, done)) => {
                    *record = *new;
                    let outcome = registration.update(record.clone()).await;
                    if let Err(why) = &outcome {
                        tracing::warn!(worker = %record.id, state = ?record.state, %why, "discovery has not heard of this yet");
                    }
                    drop(done.send(outcome));
                }
                Some(Order::Leave(done)) => {
                    drop(done.send(registration.deregister().await));
                    return Held::Left;
                }
                // Dropped without leaving: the lease runs out, as after a crash.
                None => return Held::Left,
            },
            standing = registration.changed() => match standing {
                Ok(Standing::Announced) => {
                    tracing::info!(worker = %record.id, "registered again");
                    duty.registration("announced".to_owned());
                }
                Ok(Standing::Interrupted(why)) => {
                    tracing::warn!(worker = %record.id, %why, "the registration is not renewed: what runs goes on");
                    duty.registration(format!("interrupted: {why}"));
                }
                Ok(Standing::Over(why)) => return Held::Over(why),
                Err(_) => return match registration.standing() {
                    Standing::Over(why) => Held::Over(why),
                    _ => Held::Lost,
                },
            },
        }
    }
}
