//! Whom is a gateway to call? From what discovery says and what was configured, to one goal a worker. Pure: events come in, goals go out.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use penstock_discovery::{Event, WorkerRecord, WorkerState};

/// What is to be done about one worker.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Goal {
    /// `HOST:PORT` of its control connection.
    pub address: String,
    /// The life that is meant; none takes any.
    pub life: Option<u64>,
    /// Call it, and call it again when the session ends.
    pub call: bool,
    /// It gets nothing new, whatever it says itself.
    pub hold: bool,
    /// Why it is not called although it is known.
    pub refused: Option<String>,
    /// Where it publishes KV events, and is asked for what was missed.
    pub kv_events: Option<(String, Option<String>)>,
}

/// What is known of workers.
pub struct Roster {
    /// What a worker must have in common with this gateway.
    compatibility: String,
    /// Control addresses of workers that are there whatever discovery says.
    fixed: BTreeSet<String>,
    /// What discovery says, by name.
    known: BTreeMap<String, Arc<WorkerRecord>>,
    workers_max: usize,
}

impl Roster {
    /// Nobody is known but the workers at `fixed`.
    pub fn new(compatibility: String, fixed: &[String], workers_max: usize) -> Self {
        Self { compatibility, fixed: fixed.iter().cloned().collect(), known: BTreeMap::new(), workers_max }
    }

    /// Discovery has said something.
    pub fn heard(&mut self, event: &Event) {
        match event {
            Event::Snapshot(records) => {
                self.known = records.iter().map(|record| (record.id.to_string(), Arc::clone(record))).collect();
            }
            Event::Joined(record) | Event::Changed(record) | Event::Restarted { record, .. } => {
                self.known.insert(record.id.to_string(), Arc::clone(record));
            }
            Event::Left { id, .. } => {
                self.known.remove(id.as_str());
            }
            // The set stays as it was: what runs goes on.
            _ => {}
        }
    }

    /// What discovery says of a worker.
    pub fn record(&self, key: &str) -> Option<&Arc<WorkerRecord>> {
        self.known.get(key)
    }

    /// What is to be done, by worker: its name, or the address of one that is known by nothing else.
    pub fn goals(&self) -> BTreeMap<String, Goal> {
        let mut goals: BTreeMap<String, Goal> =
            self.known.iter().map(|(id, record)| (id.clone(), self.goal(record))).collect();
        let announced: BTreeSet<&str> = self.known.values().map(|record| record.addresses.control.as_str()).collect();
        for address in self.fixed.iter().filter(|address| !announced.contains(address.as_str())) {
            let goal =
                Goal { address: address.clone(), life: None, call: true, hold: false, refused: None, kv_events: None };
            goals.insert(address.clone(), goal);
        }
        // Discovery takes no more either; fixed ones come on top of its set.
        for goal in goals.values_mut().skip(self.workers_max) {
            goal.call = false;
            goal.refused = Some(format!("{} workers are known, and more are not taken", self.workers_max));
        }
        goals
    }

    fn goal(&self, record: &WorkerRecord) -> Goal {
        let is_ready = record.state == WorkerState::Ready;
        // Before it is ready nobody can say what it will serve.
        let refused = (is_ready && record.compatibility != self.compatibility)
            .then(|| format!("incompatible: {} there, {} here", record.compatibility, self.compatibility));
        Goal {
            address: record.addresses.control.clone(),
            life: Some(record.epoch),
            call: is_ready && refused.is_none(),
            hold: !is_ready,
            refused,
            kv_events: record.addresses.kv_events.clone().map(|at| (at, record.addresses.kv_replay.clone())),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const OURS: &str = "model a block 16";

    fn record(id: &str, epoch: u64, state: &str, address: &str) -> Arc<WorkerRecord> {
        let text = format!(
            r#"{{"v":1,"id":"{id}","epoch":{epoch},"role":"unified","state":"{state}","addresses":{{"control":"{address}"}},"model":"m",
            "compatibility":"{OURS}","capacity":{{"blocks":1,"block_tokens":16,"slots":1,"context_tokens":1}}}}"#
        );
        Arc::new(WorkerRecord::decode(text.as_bytes()).unwrap())
    }

    fn roster(fixed: &[&str]) -> Roster {
        let fixed: Vec<String> = fixed.iter().map(|address| (*address).to_owned()).collect();
        Roster::new(OURS.to_owned(), &fixed, 8)
    }

    fn told(roster: &Roster, key: &str) -> (bool, bool) {
        let goals = roster.goals();
        (goals[key].call, goals[key].hold)
    }

    #[test]
    fn only_a_ready_worker_is_called_and_one_that_drains_gets_nothing_new() {
        let mut roster = roster(&[]);
        for state in ["downloading", "loading", "warming"] {
            roster.heard(&Event::Joined(record("a", 1, state, "h:1")));
            assert_eq!(told(&roster, "a"), (false, true), "{state}");
        }
        roster.heard(&Event::Changed(record("a", 1, "ready", "h:1")));
        assert_eq!(told(&roster, "a"), (true, false));
        for state in ["draining", "unhealthy", "terminated"] {
            roster.heard(&Event::Changed(record("a", 1, state, "h:1")));
            assert_eq!(told(&roster, "a"), (false, true), "{state}");
        }
        roster.heard(&Event::Left { id: "a".parse().unwrap(), epoch: 1 });
        assert!(roster.goals().is_empty());
    }

    #[test]
    fn a_lost_service_takes_nobody_out() {
        let mut roster = roster(&[]);
        roster.heard(&Event::Snapshot(vec![record("a", 1, "ready", "h:1")]));
        roster.heard(&Event::Stale { why: "killed".to_owned() });
        assert_eq!(told(&roster, "a"), (true, false));
        roster.heard(&Event::Fresh);
        // A snapshot is the whole set.
        roster.heard(&Event::Snapshot(vec![record("b", 1, "ready", "h:2")]));
        assert_eq!(roster.goals().into_keys().collect::<Vec<_>>(), ["b"]);
    }

    #[test]
    fn another_life_is_another_goal() {
        let mut roster = roster(&[]);
        roster.heard(&Event::Joined(record("a", 1, "ready", "h:1")));
        let before = roster.goals();
        roster.heard(&Event::Restarted { old_epoch: 1, record: record("a", 2, "ready", "h:1") });
        assert_ne!(roster.goals(), before);
        assert_eq!(roster.goals()["a"].life, Some(2));
    }

    #[test]
    fn a_worker_that_was_named_is_called_once_however_it_is_known() {
        let mut roster = roster(&["h:1", "h:2"]);
        assert_eq!(told(&roster, "h:1"), (true, false));
        roster.heard(&Event::Joined(record("a", 1, "draining", "h:1")));
        assert_eq!(roster.goals().into_keys().collect::<Vec<_>>(), ["a", "h:2"]);
        assert_eq!(told(&roster, "a"), (false, true), "what it says of itself counts");
        roster.heard(&Event::Left { id: "a".parse().unwrap(), epoch: 1 });
        assert_eq!(told(&roster, "h:1"), (true, false));
    }

    #[test]
    fn another_model_is_not_called_and_both_texts_are_shown() {
        let mut roster = roster(&[]);
        let mut other = WorkerRecord::clone(&record("a", 1, "ready", "h:1"));
        other.compatibility = "model b block 16".to_owned();
        roster.heard(&Event::Joined(Arc::new(other)));
        let goals = roster.goals();
        assert!(!goals["a"].call);
        assert_eq!(goals["a"].refused.as_deref(), Some("incompatible: model b block 16 there, model a block 16 here"));
    }

    #[test]
    fn more_workers_than_are_taken_are_named_and_not_called() {
        let mut roster = Roster::new(OURS.to_owned(), &["z:1".to_owned()], 2);
        roster.heard(&Event::Snapshot(vec![record("a", 1, "ready", "h:1"), record("b", 1, "ready", "h:2")]));
        assert_eq!((told(&roster, "a").0, told(&roster, "b").0, told(&roster, "z:1").0), (true, true, false));
        assert!(roster.goals()["z:1"].refused.is_some());
    }
}
