//! Context and class rows of overload.

use penstock_base::{ClassRank, Duration};
use penstock_policy_api::{ClassSignal, CommonSignal, ContextSource, OverloadSignal, RowSource};

use crate::gateway::State;

/// What overload is told about the whole.
#[derive(Clone, Copy)]
pub(in crate::gateway) struct OverloadFacts<'a> {
    /// The gateway.
    pub state: &'a State,
}

impl ContextSource<OverloadSignal> for OverloadFacts<'_> {
    fn common(&self, which: CommonSignal) -> Option<u64> {
        self.state.common_signal(which)
    }

    fn value(&self, which: OverloadSignal) -> Option<u64> {
        use OverloadSignal as Signal;
        let (state, config) = (self.state, &self.state.config);
        let since = &state.overload.since;
        match which {
            Signal::EdgeCode => Some(state.overload.why() as u64),
            Signal::SinceUs => Some(state.now.since(state.overload.asked_at).as_us()),
            Signal::LevelHeldUs => Some(state.stance.level_held(state.now).as_us()),
            Signal::ReadyReplicas => Some(u64::from(state.replicas.ready())),
            Signal::LostReplicas => Some(state.overload.lost.count(state.now)),
            Signal::QueuedRequests => Some(u64::from(state.queue.requests)),
            Signal::QueuedTokens => Some(state.queue.tokens),
            Signal::QueueLimitRequests => Some(u64::from(config.queue_requests_max)),
            Signal::QueueLimitTokens => Some(config.queue_tokens_max),
            Signal::ArrivedRequests => Some(since.arrived),
            Signal::RetriedRequests => Some(since.retried),
            Signal::FinishedRequests => Some(since.classes.iter().map(|class| class.finished).sum()),
            Signal::MissedRequests => Some(since.classes.iter().map(|class| class.missed).sum()),
            Signal::RefusedRequests => Some(since.refused),
            Signal::LoadAgeUs => state.load_age_us(),
            // The driver's buffers and memory do not enter the machine yet.
            Signal::SendBufferBytes | Signal::HostMemoryPpm => None,
        }
    }
}

/// The eight classes.
#[derive(Clone, Copy)]
pub(in crate::gateway) struct ClassRows<'a> {
    /// The gateway.
    pub state: &'a State,
}

impl RowSource<ClassSignal> for ClassRows<'_> {
    fn rows(&self) -> usize {
        ClassRank::COUNT
    }

    fn cell(&self, which: ClassSignal, row: usize) -> Option<u64> {
        use ClassSignal as Signal;
        let class = ClassRank::new(u8::try_from(row).ok()?)?;
        let state = self.state;
        let queue = &state.queue.classes[row];
        let since = &state.overload.since.classes[row];
        match which {
            Signal::KnownMask => None,
            Signal::ClassRank => Some(row as u64),
            Signal::SheddableFlag => Some(u64::from(state.config.class_sheddable[row])),
            Signal::QueuedRequests => Some(u64::from(queue.list.len)),
            Signal::QueuedTokens => Some(queue.tokens),
            Signal::InflightRequests => Some(u64::from(state.inflight[row].requests)),
            Signal::ReservedBlocks => Some(state.inflight[row].blocks),
            Signal::ActiveBlocks => {
                let loads = state.replicas.iter_ready().filter_map(|(_, replica)| replica.load());
                state.pooled(loads.map(|load| u64::from(load.class_active_blocks[row])).sum())
            }
            Signal::OldestWaitUs => Some(state.oldest_wait(class).as_us()),
            Signal::MinSojournUs => (since.min_sojourn != Duration::MAX).then(|| since.min_sojourn.as_us()),
            Signal::ArrivedRequests => Some(since.arrived),
            Signal::MissedRequests => Some(since.missed),
            Signal::FinishedRequests => Some(since.finished),
            Signal::SloTtftUs => {
                let target = state.config.class_slo_ttft[row];
                (target != Duration::MAX).then(|| target.as_us())
            }
        }
    }
}
