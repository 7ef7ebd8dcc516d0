//! Discovery inside one process: a table with leases.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::watch;
use tokio::time::sleep;

use crate::board::Board;
use crate::error::DiscoveryError;
use crate::record::WorkerRecord;
use crate::registration::{Announcer, Registration};
use crate::{Answer, Discovery, Settings, Watch};

const SERVICE: &str = "the table in memory";

/// The table. Clones share it.
#[derive(Clone)]
pub struct Memory {
    table: Arc<Table>,
    settings: Settings,
}

struct Table {
    rows: Mutex<Rows>,
    /// Counts changes, so that watchers need not poll.
    generation: watch::Sender<u64>,
}

struct Rows {
    by_id: BTreeMap<String, Row>,
    is_reachable: bool,
}

struct Row {
    epoch: u64,
    bytes: Vec<u8>,
    until: Instant,
}

impl Memory {
    /// An empty table.
    ///
    /// # Errors
    /// [`DiscoveryError::Setting`] when a setting breaks its limit.
    pub fn new(settings: Settings) -> Result<Self, DiscoveryError> {
        settings.check()?;
        let rows = Rows { by_id: BTreeMap::new(), is_reachable: true };
        let table = Table { rows: Mutex::new(rows), generation: watch::Sender::new(0) };
        Ok(Self { table: Arc::new(table), settings })
    }

    /// The same table, for watchers that take so many workers at most.
    #[must_use]
    pub fn narrowed(&self, workers_max: usize) -> Self {
        let settings = Settings { workers_max: workers_max.clamp(1, self.settings.workers_max), ..self.settings };
        Self { table: Arc::clone(&self.table), settings }
    }

    /// Cuts everybody off from the table, or lets them back: for rehearsals of an outage.
    pub fn set_reachable(&self, is_reachable: bool) {
        self.table.rows().is_reachable = is_reachable;
        self.table.changed();
    }
}

impl Table {
    fn rows(&self) -> MutexGuard<'_, Rows> {
        // Nothing between lock and unlock leaves the rows half changed.
        self.rows.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn reached(&self) -> Result<MutexGuard<'_, Rows>, DiscoveryError> {
        let rows = self.rows();
        if rows.is_reachable {
            return Ok(rows);
        }
        Err(DiscoveryError::Unreachable { service: SERVICE.to_owned(), why: "it has been cut off".to_owned() })
    }

    fn changed(&self) {
        self.generation.send_modify(|generation| *generation += 1);
    }
}

struct Seat {
    table: Arc<Table>,
    settings: Settings,
}

impl Seat {
    fn write(&mut self, record: &WorkerRecord) -> Result<(), DiscoveryError> {
        let bytes = record.encode()?;
        let mut rows = self.table.reached()?;
        let known = rows.by_id.get(record.id.as_str()).map(|row| row.epoch);
        if let Some(newer) = known.filter(|epoch| *epoch > record.epoch) {
            return Err(DiscoveryError::Superseded { id: record.id.clone(), epoch: record.epoch, newer });
        }
        if known.is_none() && rows.by_id.len() >= self.settings.workers_max {
            return Err(DiscoveryError::Refused {
                service: SERVICE.to_owned(),
                what: "a registration",
                why: format!("{} workers are registered", rows.by_id.len()),
                remedy: "raise workers_max or end some",
            });
        }
        let row = Row { epoch: record.epoch, bytes, until: Instant::now() + self.settings.lease };
        rows.by_id.insert(record.id.as_str().to_owned(), row);
        drop(rows);
        self.table.changed();
        Ok(())
    }

    fn extend(&mut self, record: &WorkerRecord) -> Result<bool, DiscoveryError> {
        let mut rows = self.table.reached()?;
        let Some(row) = rows.by_id.get_mut(record.id.as_str()) else { return Ok(false) };
        if row.epoch > record.epoch {
            let newer = row.epoch;
            return Err(DiscoveryError::Superseded { id: record.id.clone(), epoch: record.epoch, newer });
        }
        row.until = Instant::now() + self.settings.lease;
        Ok(true)
    }

    fn take_out(&mut self, record: &WorkerRecord) -> Result<(), DiscoveryError> {
        let mut rows = self.table.reached()?;
        if rows.by_id.get(record.id.as_str()).is_some_and(|row| row.epoch == record.epoch) {
            rows.by_id.remove(record.id.as_str());
        }
        drop(rows);
        self.table.changed();
        Ok(())
    }
}

impl Announcer for Seat {
    fn announce<'a>(&'a mut self, record: &'a WorkerRecord) -> Answer<'a, ()> {
        Box::pin(async move { self.write(record) })
    }

    fn renew<'a>(&'a mut self, record: &'a WorkerRecord) -> Answer<'a, bool> {
        Box::pin(async move { self.extend(record) })
    }

    fn withdraw<'a>(&'a mut self, record: &'a WorkerRecord) -> Answer<'a, ()> {
        Box::pin(async move { self.take_out(record) })
    }
}

impl Discovery for Memory {
    fn describe(&self) -> String {
        SERVICE.to_owned()
    }

    fn register(&self, record: WorkerRecord) -> Answer<'_, Registration> {
        let seat = Seat { table: Arc::clone(&self.table), settings: self.settings };
        Box::pin(Registration::start(seat, record, self.settings.lease))
    }

    fn watch(&self) -> Watch {
        let table = Arc::clone(&self.table);
        let lease = self.settings.lease;
        Watch::start(self.settings.board(lease), move |board| follow(table, board, lease / 6))
    }
}

async fn follow(table: Arc<Table>, board: Arc<Board>, tick: Duration) {
    let mut generation = table.generation.subscribe();
    loop {
        let now = Instant::now();
        let entries = {
            let mut rows = table.rows();
            // While the table is cut off nobody can renew, so nobody's lease runs out either.
            if rows.is_reachable {
                rows.by_id.retain(|_, row| row.until > now);
            }
            let copy = |(id, row): (&String, &Row)| (id.clone(), row.bytes.clone());
            rows.is_reachable.then(|| rows.by_id.iter().map(copy).collect::<Vec<_>>())
        };
        match entries {
            Some(entries) => {
                board.list(now, &entries);
                board.heard(now);
            }
            None => board.lost("it has been cut off"),
        }
        tokio::select! {
            // The table outlives the loop, so the channel does too.
            _ = generation.changed() => {}
            () = board.resync.notified() => {}
            () = sleep(tick) => {}
        }
    }
}
