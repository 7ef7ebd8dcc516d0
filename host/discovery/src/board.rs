//! What does one watcher know? The set, what changed since it last asked, and how old all that is.
//!
//! Every implementation writes what it hears onto a board; the board checks, compares, and hands out a snapshot followed by changes. It
//! holds at most the set and [`QUEUE_MAX`](crate::limits::QUEUE_MAX) changes: a watcher that falls behind gets a snapshot again.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::Notify;

use crate::limits::{FAULT_CHARS_MAX, FAULTS_MAX};
use crate::record::{WorkerId, WorkerRecord, decode_at};

/// What a watcher is told, in order.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum Event {
    /// The whole set: first of all, and again when changes were dropped because nobody fetched them. What is not in it has left.
    Snapshot(Vec<Arc<WorkerRecord>>),
    /// A worker that was not there.
    Joined(Arc<WorkerRecord>),
    /// The same life of the same worker says something else, its state for example.
    Changed(Arc<WorkerRecord>),
    /// Another life of a known worker: nothing of the old one is valid.
    Restarted {
        /// The life that is over.
        old_epoch: u64,
        /// The new one.
        record: Arc<WorkerRecord>,
    },
    /// It took itself out, or its lease ran out.
    Left {
        /// Which.
        id: WorkerId,
        /// Its last life.
        epoch: u64,
    },
    /// The service does not answer. The set stays as it was; [`View::stale`] has its age.
    Stale {
        /// Why.
        why: String,
    },
    /// It answers again, and everything missed has been told.
    Fresh,
}

/// The set at one moment.
#[derive(Clone, Debug)]
pub struct View {
    /// By id.
    pub workers: Vec<Arc<WorkerRecord>>,
    /// How long ago the service was heard last, when it does not answer now (or has never answered).
    pub stale: Option<Duration>,
    /// Entries that could not be used, with the reason; at most [`FAULTS_MAX`](crate::limits::FAULTS_MAX).
    pub faults: Vec<(String, String)>,
    /// Since the last whole reading: workers turned away because the set is full, and faults beyond those that are listed.
    pub turned_away: u64,
}

pub(crate) struct Board {
    state: Mutex<State>,
    changed: Notify,
    /// The watcher wants the whole set to be read again.
    pub resync: Notify,
    limits: BoardLimits,
}

#[derive(Clone, Copy)]
pub(crate) struct BoardLimits {
    pub workers_max: usize,
    pub queue_max: usize,
    /// How long workers that are missing after an outage are kept, so that they can register again.
    pub grace: Duration,
}

struct State {
    workers: BTreeMap<WorkerId, Arc<WorkerRecord>>,
    /// Workers that a listing after an outage did not have, and when they count as gone.
    doubtful: BTreeMap<WorkerId, Instant>,
    queue: VecDeque<Event>,
    /// The next event is the whole set.
    snapshot_due: bool,
    /// A listing has been heard.
    has_listed: bool,
    /// Why the service is not heard.
    stale: Option<String>,
    told_stale: bool,
    heard_at: Instant,
    faults: BTreeMap<String, String>,
    turned_away: u64,
}

impl Board {
    pub fn new(limits: BoardLimits) -> Self {
        let state = State {
            workers: BTreeMap::new(),
            doubtful: BTreeMap::new(),
            queue: VecDeque::new(),
            snapshot_due: true,
            has_listed: false,
            stale: None,
            told_stale: false,
            heard_at: Instant::now(),
            faults: BTreeMap::new(),
            turned_away: 0,
        };
        Self { state: Mutex::new(state), changed: Notify::new(), resync: Notify::new(), limits }
    }

    /// The whole set, as the service has it now: what is not in it has left.
    pub fn list(&self, now: Instant, entries: &[(String, Vec<u8>)]) {
        let mut state = self.lock();
        let mut present = Vec::with_capacity(entries.len().min(self.limits.workers_max));
        state.faults.clear();
        state.turned_away = 0;
        for (place, bytes) in entries {
            state.put(place, bytes, self.limits);
            present.push(place.as_str());
        }
        present.sort_unstable();
        let is_after_outage = state.stale.is_some() && self.limits.grace > Duration::ZERO;
        let missing: Vec<WorkerId> =
            state.workers.keys().filter(|id| present.binary_search(&id.as_str()).is_err()).cloned().collect();
        for id in missing {
            if is_after_outage {
                // Also one that an earlier outage left in doubt: it could not register meanwhile.
                state.doubtful.insert(id, now + self.limits.grace);
            } else if !state.doubtful.contains_key(&id) {
                state.remove(&id, self.limits);
            }
        }
        state.has_listed = true;
        state.heard(now);
        drop(state);
        self.changed.notify_one();
    }

    /// One entry is new or different.
    pub fn put(&self, now: Instant, place: &str, bytes: &[u8]) {
        let mut state = self.lock();
        state.put(place, bytes, self.limits);
        state.heard(now);
        drop(state);
        self.changed.notify_one();
    }

    /// An entry that the implementation itself could not read.
    pub fn fault(&self, place: &str, why: &str) {
        self.lock().fault(place, why);
    }

    /// One entry has gone.
    pub fn remove(&self, now: Instant, place: &str) {
        let mut state = self.lock();
        state.faults.remove(place);
        if let Ok(id) = place.parse() {
            state.remove(&id, self.limits);
        }
        state.heard(now);
        drop(state);
        self.changed.notify_one();
    }

    /// The service has answered, and nothing is new.
    pub fn heard(&self, now: Instant) {
        let mut state = self.lock();
        if state.has_listed {
            state.heard(now);
        }
        let due: Vec<WorkerId> =
            state.doubtful.iter().filter(|(_, until)| **until <= now).map(|(id, _)| id.clone()).collect();
        for id in due {
            state.remove(&id, self.limits);
        }
        drop(state);
        self.changed.notify_one();
    }

    /// The service does not answer.
    pub fn lost(&self, why: &str) {
        let mut state = self.lock();
        state.stale.get_or_insert_with(|| cut(why));
        drop(state);
        self.changed.notify_one();
    }

    pub fn take(&self) -> Option<Event> {
        let mut state = self.lock();
        if state.snapshot_due && state.has_listed {
            state.snapshot_due = false;
            return Some(Event::Snapshot(state.workers.values().cloned().collect()));
        }
        if let Some(event) = state.queue.pop_front() {
            return Some(event);
        }
        if state.told_stale == state.stale.is_some() {
            return None;
        }
        state.told_stale = state.stale.is_some();
        Some(state.stale.clone().map_or(Event::Fresh, |why| Event::Stale { why }))
    }

    pub async fn next(&self) -> Event {
        loop {
            if let Some(event) = self.take() {
                return event;
            }
            self.changed.notified().await;
        }
    }

    pub fn view(&self, now: Instant) -> View {
        let state = self.lock();
        let is_stale = state.stale.is_some() || !state.has_listed;
        View {
            workers: state.workers.values().cloned().collect(),
            stale: is_stale.then(|| now.saturating_duration_since(state.heard_at)),
            faults: state.faults.iter().map(|(place, why)| (place.clone(), why.clone())).collect(),
            turned_away: state.turned_away,
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // Nothing between lock and unlock leaves the state half changed.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn put(&mut self, place: &str, bytes: &[u8], limits: BoardLimits) {
        let record = match decode_at(place, bytes) {
            Ok(record) => Arc::new(record),
            Err(why) => return self.fault(place, &why.to_string()),
        };
        let known = self.workers.get(&record.id).map(|known| (known.epoch, *known == record));
        let event = match known {
            Some((epoch, _)) if epoch > record.epoch => {
                return self.fault(place, &format!("epoch {} came after the later epoch {epoch}", record.epoch));
            }
            None if self.workers.len() >= limits.workers_max => {
                self.turned_away += 1;
                return self.fault(place, &format!("{} workers are known, and more are not taken", limits.workers_max));
            }
            Some((_, true)) => None,
            Some((old_epoch, _)) if old_epoch < record.epoch => {
                Some(Event::Restarted { old_epoch, record: Arc::clone(&record) })
            }
            Some(_) => Some(Event::Changed(Arc::clone(&record))),
            None => Some(Event::Joined(Arc::clone(&record))),
        };
        self.faults.remove(place);
        self.doubtful.remove(&record.id);
        self.workers.insert(record.id.clone(), record);
        if let Some(event) = event {
            self.emit(event, limits);
        }
    }

    fn remove(&mut self, id: &WorkerId, limits: BoardLimits) {
        self.doubtful.remove(id);
        if let Some(record) = self.workers.remove(id) {
            self.emit(Event::Left { id: id.clone(), epoch: record.epoch }, limits);
        }
    }

    fn emit(&mut self, event: Event, limits: BoardLimits) {
        if self.snapshot_due {
            return;
        }
        if self.queue.len() >= limits.queue_max {
            self.queue.clear();
            self.snapshot_due = true;
            return;
        }
        self.queue.push_back(event);
    }

    fn heard(&mut self, now: Instant) {
        self.heard_at = now;
        self.stale = None;
    }

    fn fault(&mut self, place: &str, why: &str) {
        let place = cut(place);
        if self.faults.len() < FAULTS_MAX || self.faults.contains_key(&place) {
            self.faults.insert(place, cut(why));
        } else {
            self.turned_away += 1;
        }
    }
}

/// Text of others, fit for a log: no control characters, not endless.
fn cut(text: &str) -> String {
    let mut kept: String = text.chars().take(FAULT_CHARS_MAX).collect();
    if kept.chars().any(char::is_control) {
        kept = kept.escape_debug().take(FAULT_CHARS_MAX).collect();
    }
    kept
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(id: &str, epoch: u64) -> (String, Vec<u8>) {
        let record = format!(
            r#"{{"v":1,"id":"{id}","epoch":{epoch},"role":"unified","state":"ready","addresses":{{"control":"h:1"}},"model":"m",
            "compatibility":"0","capacity":{{"blocks":1,"block_tokens":1,"slots":1,"context_tokens":1}}}}"#
        );
        (id.to_owned(), record.into_bytes())
    }

    fn board() -> Board {
        Board::new(BoardLimits { workers_max: 10, queue_max: 10, grace: Duration::from_secs(5) })
    }

    fn ids(board: &Board) -> Vec<String> {
        board.view(Instant::now()).workers.iter().map(|worker| worker.id.to_string()).collect()
    }

    /// Each outage gives those who are missing after it the whole grace again.
    #[test]
    fn a_second_outage_gives_a_second_grace() {
        let board = board();
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        board.list(at(0), &[entry("a", 1), entry("b", 1)]);
        board.lost("first");
        board.list(at(10), &[]);
        board.heard(at(14));
        assert_eq!(ids(&board), ["a", "b"]);
        board.lost("second");
        board.list(at(100), &[]);
        board.heard(at(104));
        assert_eq!(ids(&board), ["a", "b"]);
        board.put(at(104), "b", &entry("b", 1).1);
        board.heard(at(105));
        assert_eq!(ids(&board), ["b"]);
        assert!(matches!(board.take(), Some(Event::Snapshot(workers)) if workers.len() == 1));
        assert_eq!(board.take(), None);
    }

    /// What a life that is over still writes changes nothing, and is named.
    #[test]
    fn an_older_epoch_is_not_taken() {
        let board = board();
        let now = Instant::now();
        board.list(now, &[entry("a", 7)]);
        board.put(now, "a", &entry("a", 6).1);
        let view = board.view(now);
        assert_eq!(view.workers[0].epoch, 7);
        assert_eq!(view.faults, [("a".to_owned(), "epoch 6 came after the later epoch 7".to_owned())]);
        board.remove(now, "a");
        board.put(now, "a", &entry("a", 6).1);
        assert_eq!(board.view(now).workers[0].epoch, 6);
    }

    /// More faults than are kept by name are counted; hostile names do not reach a terminal as they are.
    #[test]
    fn faults_are_bounded() {
        let board = board();
        let bad: Vec<_> = (0..100).map(|i| (format!("{i:03}\u{1b}[2J{}", "x".repeat(1_000)), b"{".to_vec())).collect();
        board.list(Instant::now(), &bad);
        let view = board.view(Instant::now());
        assert_eq!((view.faults.len(), view.turned_away), (FAULTS_MAX, 100 - FAULTS_MAX as u64));
        assert!(view.faults.iter().all(|(place, why)| place.len() <= 200 && why.len() <= 200));
        assert!(view.faults.iter().all(|(place, _)| !place.contains('\u{1b}')));
    }
}
