//! What came of a run?

use penstock_base::{ClassRank, Instant, Outcome, TenantId};
use penstock_journal::MachineId;
use penstock_sched::message::Usage;

/// A run that broke no rule.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Report {
    /// Over all effects and decisions of all machines, in order: equal for equal scenarios.
    pub digest: u64,
    /// Steps of all machines.
    pub steps: u64,
    /// Virtual time at the end.
    pub ended_at: Instant,
    /// In order of arrival.
    pub requests: Vec<RequestReport>,
    /// Counts of what a scenario may want to see.
    pub figures: Figures,
    /// Segments of logs, when asked for.
    pub journals: Vec<(MachineId, Vec<u8>)>,
    /// What happened to whom, when asked for. Requests by their place in the traffic.
    pub trace: Vec<(Instant, Happened)>,
}

/// What a reader of service and waiting wants to know. Seen by the driver and its executor, not by the machines.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Happened {
    /// It waits in a gateway's queue.
    Waits(usize),
    /// It was placed, or ended.
    WaitsNoMore(usize),
    /// So many of its prompt tokens were computed for the first time.
    Prefilled(usize, u32),
    /// One output token was delivered.
    Decoded(usize),
    /// A gateway's stance changed to this level.
    Stance(u8),
}

/// One request.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct RequestReport {
    /// Who asked.
    pub tenant: TenantId,
    /// How important.
    pub class: ClassRank,
    /// When it arrived.
    pub arrived: Instant,
    /// When the client had its first token; [`Instant::NEVER`] is never.
    pub first_token_at: Instant,
    /// When the client was told; [`Instant::NEVER`] when its gateway was lost with it.
    pub ended_at: Instant,
    /// How it ended; none when its gateway was lost.
    pub outcome: Option<Outcome>,
    /// What was billed.
    pub usage: Usage,
    /// Output cap in force.
    pub cap: u32,
    /// Tokens of each sequence that count, as one hash each; complete for requests that ended well.
    pub answers: Vec<u64>,
}

/// What happened how often.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Figures {
    /// Requests that got what they asked for.
    pub completed: u64,
    /// Refused by the gateway.
    pub refused: u64,
    /// Cancelled, whoever did it.
    pub cancelled: u64,
    /// Ended by time.
    pub timed_out: u64,
    /// Failed.
    pub failed: u64,
    /// Dispatches.
    pub dispatched: u64,
    /// Placements after a lost replica.
    pub retried: u64,
    /// Dispatches that a replica refused.
    pub sent_back: u64,
    /// Steps of executors.
    pub batches: u64,
    /// Tokens delivered.
    pub tokens: u64,
    /// Preempted sequences.
    pub preempted: u64,
    /// Prompt tokens found in caches.
    pub hit_tokens: u64,
    /// Blocks that left caches.
    pub evicted_blocks: u64,
    /// Copies of shared blocks.
    pub copies: u64,
    /// Rows that took a token still in flight.
    pub chained_rows: u64,
    /// Tokens that a replica delivered for a placement that was over.
    pub late_tokens: u64,
    /// Replica epochs that ended.
    pub epochs_lost: u64,
    /// Gateways lost.
    pub gateways_lost: u64,
    /// Outputs that were cut at a stop string.
    pub cut_outputs: u64,
    /// Admissions with a lowered cap.
    pub degraded: u64,
    /// Inputs that machines counted as stale.
    pub stale: u64,
    /// Times a watchdog said that nothing moves.
    pub stuck: u64,
    /// Hand-offs begun.
    pub handoffs: u64,
    /// Of these, decoded where they were meant to be.
    pub handed_off: u64,
    /// Decoded where they were prefilled.
    pub kept_at_sender: u64,
    /// Gone the whole path, as a new attempt.
    pub handed_back: u64,
    /// Ended without any of that: failed, or their client left.
    pub handoffs_ended: u64,
    /// Hand-offs that a party swept because nobody kept them.
    pub swept: u64,
    /// Chunks that arrived.
    pub chunks: u64,
    /// Of these, while their prompt was still computed.
    pub early_chunks: u64,
    /// Bytes of KV that arrived.
    pub kv_bytes: u64,
    /// Writes that a mover turned away: nothing, or nothing any more, was granted.
    pub writes_turned_away: u64,
    /// Writes that landed in quarantine.
    pub late_writes: u64,
    /// Words and chunks that got lost.
    pub lost_words: u64,
    /// Sessions that were over for one end or both.
    pub sessions_lost: u64,
    /// Steps of machines that had to do with a hand-off.
    pub protocol_steps: u64,
}

impl Figures {
    /// Adds those of another run.
    pub fn add(&mut self, other: &Self) {
        let pairs = [
            (&mut self.completed, other.completed),
            (&mut self.refused, other.refused),
            (&mut self.cancelled, other.cancelled),
            (&mut self.timed_out, other.timed_out),
            (&mut self.failed, other.failed),
            (&mut self.dispatched, other.dispatched),
            (&mut self.retried, other.retried),
            (&mut self.sent_back, other.sent_back),
            (&mut self.batches, other.batches),
            (&mut self.tokens, other.tokens),
            (&mut self.preempted, other.preempted),
            (&mut self.hit_tokens, other.hit_tokens),
            (&mut self.evicted_blocks, other.evicted_blocks),
            (&mut self.copies, other.copies),
            (&mut self.chained_rows, other.chained_rows),
            (&mut self.late_tokens, other.late_tokens),
            (&mut self.epochs_lost, other.epochs_lost),
            (&mut self.gateways_lost, other.gateways_lost),
            (&mut self.cut_outputs, other.cut_outputs),
            (&mut self.degraded, other.degraded),
            (&mut self.stale, other.stale),
            (&mut self.stuck, other.stuck),
            (&mut self.handoffs, other.handoffs),
            (&mut self.handed_off, other.handed_off),
            (&mut self.kept_at_sender, other.kept_at_sender),
            (&mut self.handed_back, other.handed_back),
            (&mut self.handoffs_ended, other.handoffs_ended),
            (&mut self.swept, other.swept),
            (&mut self.chunks, other.chunks),
            (&mut self.early_chunks, other.early_chunks),
            (&mut self.kv_bytes, other.kv_bytes),
            (&mut self.writes_turned_away, other.writes_turned_away),
            (&mut self.late_writes, other.late_writes),
            (&mut self.lost_words, other.lost_words),
            (&mut self.sessions_lost, other.sessions_lost),
            (&mut self.protocol_steps, other.protocol_steps),
        ];
        for (sum, more) in pairs {
            *sum += more;
        }
    }
}

/// A rule that did not hold, and when.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Violation {
    /// Virtual time.
    pub at: Instant,
    /// Where and what.
    pub what: String,
}

impl std::fmt::Display for Violation {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "at {} ns: {}", self.at.0, self.what)
    }
}

impl std::error::Error for Violation {}
