//! What gives way, and when is that asked? Counts since the last question, the edges that ask early, and the question itself.

use penstock_base::codec::{DecodeError, Reader, Writer};
use penstock_base::limits::{OVERLOAD_INTERVAL_MAX, OVERLOAD_INTERVAL_MIN};
use penstock_base::{ClassRank, Duration, Instant, Outcome, Refusal};
use penstock_policy_api::{ActionKind, Asked, Decision, OverloadSources, Stance, StanceAction, validate::Standing};

use super::State;
use super::finish::End;
use super::recent::LastMinute;
use super::seats::Cx;
use super::signals::{ClassRows, OverloadFacts, ReplicaRows};

/// Why overload is asked.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
#[repr(u8)]
pub(super) enum Edge {
    /// The tick.
    Tick,
    /// KV use passed its high mark.
    KvHigh,
    /// KV use fell under its low mark.
    KvLow,
    /// The queue passed its high mark.
    QueueHigh,
    /// The queue fell under its low mark.
    QueueLow,
    /// Somebody waits longer than the target of the class.
    Wait,
    /// A replica was lost.
    ReplicaLost,
}

/// Parts per million at which an edge is high, and under which it is low again.
const HIGH_PPM: u64 = 900_000;
/// See [`HIGH_PPM`].
const LOW_PPM: u64 = 800_000;

/// What happened since the last question.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Since {
    /// Arrivals.
    pub arrived: u64,
    /// Of these, retries.
    pub retried: u64,
    /// Refusals.
    pub refused: u64,
    /// By class.
    pub classes: [ClassSince; ClassRank::COUNT],
}

/// The same for one class.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct ClassSince {
    /// Arrivals.
    pub arrived: u64,
    /// Ends of admitted requests.
    pub finished: u64,
    /// Of these, outside what was promised.
    pub missed: u64,
    /// Shortest queue time among those that left the queue.
    pub min_sojourn: Duration,
}

impl Default for Since {
    fn default() -> Self {
        let class = ClassSince { arrived: 0, finished: 0, missed: 0, min_sojourn: Duration::MAX };
        Self { arrived: 0, retried: 0, refused: 0, classes: [class; ClassRank::COUNT] }
    }
}

/// When overload is asked and what it will be told.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Overload {
    /// Counts since the last question.
    pub since: Since,
    /// When it was asked last.
    pub asked_at: Instant,
    /// Replicas lost in the last minute.
    pub lost: LastMinute,
    /// The edge that waits for its question.
    edge: Edge,
    /// Where the edges stand: KV high, queue high, somebody waits too long.
    high: [bool; 3],
}

impl Overload {
    /// Nothing was asked.
    pub fn new(now: Instant) -> Self {
        Self { since: Since::default(), asked_at: now, lost: LastMinute::default(), edge: Edge::Tick, high: [false; 3] }
    }

    /// A request arrived.
    pub fn arrived(&mut self, class: ClassRank, retry: bool) {
        self.since.arrived += 1;
        self.since.retried += u64::from(retry);
        self.since.classes[class.index()].arrived += 1;
    }

    /// A request was refused.
    pub fn refused(&mut self) {
        self.since.refused += 1;
    }

    /// An admitted request ended.
    pub fn ended(&mut self, class: ClassRank, missed: bool) {
        let class = &mut self.since.classes[class.index()];
        class.finished += 1;
        class.missed += u64::from(missed);
    }

    /// A request left the queue.
    pub fn left_queue(&mut self, class: ClassRank, sojourn: Duration) {
        let class = &mut self.since.classes[class.index()];
        class.min_sojourn = class.min_sojourn.min(sojourn);
    }

    /// A replica was lost.
    pub fn replica_lost(&mut self, now: Instant) {
        self.lost.add(now);
    }

    /// Asks early, because of this; the gravest stands.
    pub fn edge(&mut self, edge: Edge) {
        self.edge = self.edge.max(edge);
    }

    /// Why the next question is asked.
    pub fn why(&self) -> Edge {
        self.edge
    }

    /// When the next question is due.
    fn next_due(&self, tick: Duration) -> Instant {
        let wait = if self.edge == Edge::Tick { tick } else { OVERLOAD_INTERVAL_MIN };
        self.asked_at + wait
    }

    /// Writes the state.
    pub fn encode(&self, out: &mut Writer) {
        out.u64(self.since.arrived);
        out.u64(self.since.retried);
        out.u64(self.since.refused);
        for class in &self.since.classes {
            out.u64(class.arrived);
            out.u64(class.finished);
            out.u64(class.missed);
            out.u64(class.min_sojourn.0);
        }
        out.u64(self.asked_at.0);
        self.lost.encode(out);
        out.u8(self.edge as u8);
        self.high.iter().for_each(|high| out.bool(*high));
    }

    /// Reads what [`Self::encode`] wrote.
    pub fn decode(from: &mut Reader<'_>) -> Result<Self, DecodeError> {
        let mut overload = Self::new(Instant::ZERO);
        overload.since.arrived = from.u64()?;
        overload.since.retried = from.u64()?;
        overload.since.refused = from.u64()?;
        for class in &mut overload.since.classes {
            *class = ClassSince {
                arrived: from.u64()?,
                finished: from.u64()?,
                missed: from.u64()?,
                min_sojourn: Duration(from.u64()?),
            };
        }
        overload.asked_at = Instant(from.u64()?);
        overload.lost = LastMinute::decode(from)?;
        overload.edge = match from.u8()? {
            0 => Edge::Tick,
            1 => Edge::KvHigh,
            2 => Edge::KvLow,
            3 => Edge::QueueHigh,
            4 => Edge::QueueLow,
            5 => Edge::Wait,
            6 => Edge::ReplicaLost,
            _ => return Err(DecodeError::Invalid("edge")),
        };
        for high in &mut overload.high {
            *high = from.bool()?;
        }
        Ok(overload)
    }
}

/// Where a value with two marks stands, given where it stood.
fn is_high(was: bool, value: u64, of: u64) -> bool {
    let ppm = u128::from(value) * 1_000_000 / u128::from(of.max(1));
    if was { ppm >= u128::from(LOW_PPM) } else { of > 0 && ppm >= u128::from(HIGH_PPM) }
}

impl State {
    /// Nothing lives here and service is normal: nobody needs to be asked, no replica needs to be told.
    pub(super) fn is_quiet(&self) -> bool {
        self.requests.table.len() == 0 && self.stance.is_normal() && self.overload.edge == Edge::Tick
    }

    /// When overload must be looked at again.
    pub(super) fn overload_due(&self) -> Instant {
        if self.is_quiet() {
            return Instant::NEVER;
        }
        self.overload.next_due(self.overload_tick()).min(self.stance.next_due())
    }

    fn overload_tick(&self) -> Duration {
        Duration(self.config.overload_tick.0.clamp(OVERLOAD_INTERVAL_MIN.0, OVERLOAD_INTERVAL_MAX.0))
    }

    /// At the end of a step: edges, the tick, the end of a hold, and the word to the replicas.
    pub(super) fn run_overload(&mut self, cx: &mut Cx<'_>) {
        if self.is_quiet() {
            return;
        }
        if self.now >= self.overload.asked_at + OVERLOAD_INTERVAL_MIN {
            self.find_edges();
        }
        if self.overload.next_due(self.overload_tick()) <= self.now {
            self.ask_overload(false, cx);
        } else if self.stance.hold_is_over(self.now) {
            self.ask_overload(true, cx);
        }
        self.tell_replicas(cx);
    }

    fn find_edges(&mut self) {
        let uncovered = self.replicas.uncovered_blocks;
        let pool = self.replicas.pool;
        let used = pool.active_blocks.saturating_add(uncovered);
        let queue = self.queue;
        let was = self.overload.high;
        let waits_too_long =
            ClassRank::all().any(|class| self.oldest_wait(class) > self.config.class_slo_ttft[class.index()]);
        let is = [
            is_high(was[0], used, pool.total_blocks),
            is_high(was[1], u64::from(queue.requests), u64::from(self.config.queue_requests_max))
                || is_high(was[1], queue.tokens, self.config.queue_tokens_max),
            waits_too_long,
        ];
        self.overload.high = is;
        for (index, rising, falling) in
            [(0, Edge::KvHigh, Edge::KvLow), (1, Edge::QueueHigh, Edge::QueueLow), (2, Edge::Wait, Edge::Tick)]
        {
            match (was[index], is[index]) {
                (false, true) => self.overload.edge(rising),
                (true, false) => self.overload.edge(falling),
                _ => {}
            }
        }
    }

    /// Asks, or lets the native default stand again when a hold is over.
    fn ask_overload(&mut self, natively: bool, cx: &mut Cx<'_>) {
        if !natively {
            self.deliver_facts(Decision::Overload, cx);
        }
        let standing = Standing { level: self.stance.level(), held_us: self.stance.level_held(self.now).as_us() };
        let asked = {
            let seats = &mut *cx.seats;
            seats.scratch.candidates.clear();
            seats.scratch.candidates.extend(self.replicas.iter_ready().map(|(slot, _)| slot));
            let sources = OverloadSources {
                context: &OverloadFacts { state: self },
                classes: &ClassRows { state: self },
                replicas: &ReplicaRows::for_overload(self, &seats.scratch.candidates),
            };
            let actions = &mut seats.scratch.actions;
            if natively {
                seats.overload.ask(&mut seats.silent, self.now, &sources, standing, actions)
            } else {
                seats.overload.ask(cx.policies.overload(), self.now, &sources, standing, actions)
            }
        };
        if !natively {
            self.note_checked(Decision::Overload, &asked, cx);
            self.overload.since = Since::default();
            self.overload.edge = Edge::Tick;
            self.overload.asked_at = self.now;
        }
        self.take_stance(&asked, cx);
    }

    fn take_stance(&mut self, asked: &Asked<Stance>, cx: &mut Cx<'_>) {
        let actions = core::mem::take(&mut cx.seats.scratch.actions);
        self.digest.add(&[5, asked.call, u64::from(asked.decision.level), u64::from(asked.decision.hold_us)]);
        for action in &actions {
            self.digest.add(&[u64::from(action.kind.code()), u64::from(action.class.get()), action.amount]);
        }
        if self.stance.take(asked.decision, &actions, self.now) {
            self.counters.stances += 1;
            let level = asked.decision.level;
            cx.effects.push(super::io::GatewayEffect::Event(super::io::GatewayEvent::Stance { level }));
            self.wants_dispatch = true;
        }
        for action in actions.iter().filter(|action| action.kind == ActionKind::ShedQueued) {
            self.shed_queued(action, cx);
        }
        cx.seats.scratch.actions = actions;
    }

    /// The oldest of the least important classes are dropped.
    fn shed_queued(&mut self, action: &StanceAction, cx: &mut Cx<'_>) {
        let mut left = action.amount;
        for class in ClassRank::all().filter(|class| action.reaches(*class)) {
            let mut next = self.queue.classes[class.index()].list.head;
            while left > 0 {
                let Some(request) = self.requests.table.get(next) else { break };
                let slot = next;
                let sheddable = self.is_sheddable(class, request.manifest.traits);
                next = self.requests.outer.next(slot);
                if !sheddable {
                    continue;
                }
                left -= 1;
                let outcome = Outcome::Refused(Refusal::Shed);
                let end = End { retry_after_ms: self.retry_after_ms(), ..End::unused(outcome) };
                self.end_early(slot, end, cx);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_edge_has_two_marks() {
        assert!(!is_high(false, 89, 100) && is_high(false, 90, 100));
        assert!(is_high(true, 80, 100) && !is_high(true, 79, 100));
        assert!(!is_high(false, 5, 0) && !is_high(true, 0, 0), "without a pool nothing is full");
    }

    #[test]
    fn the_gravest_edge_asks_no_sooner_than_the_shortest_interval() {
        let mut overload = Overload::new(Instant::ZERO);
        assert_eq!(overload.next_due(Duration::from_ms(100)), Instant(100_000_000));
        overload.edge(Edge::ReplicaLost);
        overload.edge(Edge::QueueHigh);
        assert_eq!(
            (overload.why(), overload.next_due(Duration::from_ms(100))),
            (Edge::ReplicaLost, Instant(10_000_000))
        );
    }
}
