//! Replicas whose cache is heard of by KV events: their news take the place of what the replicas say themselves.

use std::sync::Arc;

use penstock_base::ReplicaEpoch;
use penstock_sched::gateway::GatewayInput;
use penstock_sched::message::{CacheEvent, FromReplica};

use super::GatewayLoop;
use crate::cache_events::{CacheNews, Line};

/// One replica's news. The machine counts them like the replica's own words: densely, from where those stood.
pub(super) struct Followed {
    epoch: ReplicaEpoch,
    /// Number of the last event that the machine took.
    sequence: u64,
    /// What was told is what the replica caches.
    is_whole: bool,
    line: Arc<Line>,
}

impl Followed {
    /// Does the machine hear this? What the replica itself says of its cache it does not; and a report confirms what is followed, while
    /// that is whole, so that it grows stale otherwise.
    pub fn lets_pass(&self, message: &mut FromReplica) -> bool {
        match message {
            FromReplica::Cache { .. } => false,
            FromReplica::Report(report) => {
                let agrees = self.is_whole && !self.line.is_gone();
                report.cache_sequence = if agrees { self.sequence } else { u64::MAX };
                true
            }
            _ => true,
        }
    }
}

impl GatewayLoop {
    /// What was heard of a replica's cache.
    pub(super) fn take_cache_news(&mut self, news: CacheNews) {
        let CacheNews { replica, life, events, is_whole, line } = news;
        if !self.followed.contains_key(&replica) {
            let known = self.machine.replicas().find(|view| view.replica == replica);
            // One that begins in the middle, or is of nobody who is known, comes again from its beginning.
            let (Some(view), Some(CacheEvent::Cleared)) = (known, events.first()) else { return line.ask_anew() };
            let (epoch, sequence) = (view.epoch, view.cache_sequence);
            self.followed.insert(replica, Followed { epoch, sequence, is_whole: false, line: Arc::clone(&line) });
        }
        let Some(followed) = self.followed.get_mut(&replica) else { return };
        if life.is_some_and(|life| life != followed.epoch.0) {
            followed.is_whole = false;
            return line.ask_for_another_life();
        }
        if !Arc::ptr_eq(&followed.line, &line) {
            // Another follower of the same replica: its first news are behind a word that nothing is cached.
            if events.first() != Some(&CacheEvent::Cleared) {
                return line.ask_anew();
            }
            followed.line = line;
        }
        followed.is_whole = is_whole;
        let (epoch, first) = (followed.epoch, followed.sequence);
        followed.sequence += events.len() as u64;
        for (sequence, event) in (first + 1..).zip(events) {
            self.step(GatewayInput::Replica { replica, epoch, message: FromReplica::Cache { sequence, event } });
        }
    }

    /// Shows how many replicas get requests by load alone.
    pub(super) fn count_doubted(&self) {
        let doubted = self.machine.replicas().filter(|view| !view.cache_known).count();
        self.wiring.metrics.caches().doubted(doubted);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rig::report;

    #[test]
    fn a_report_confirms_what_is_followed_only_while_that_is_whole() {
        let line = Arc::<Line>::default();
        let mut followed = Followed { epoch: ReplicaEpoch(1), sequence: 40, is_whole: true, line: Arc::clone(&line) };
        let told = |followed: &Followed| {
            let mut message = FromReplica::Report(report(7));
            assert!(followed.lets_pass(&mut message));
            let FromReplica::Report(report) = message else { panic!("it is still a report") };
            report.cache_sequence
        };
        assert_eq!(told(&followed), 40, "not the replica's own count");
        followed.is_whole = false;
        assert_eq!(told(&followed), u64::MAX);
        followed.is_whole = true;
        assert!(!followed.lets_pass(&mut FromReplica::Cache { sequence: 8, event: CacheEvent::Cleared }));
    }
}
