//! One live request: its two axes, its place, and what it holds there.
//!
//! The compute axis and the delivery axis are apart: a request may stream while it decodes, and its connection may be gone while its
//! blocks are still being returned.

use alloc::sync::Arc;

use penstock_base::limits::RANKED_MAX;
use penstock_base::{ClassRank, DispatchNumber, Duration, Instant, Manifest, Outcome, ReplicaEpoch, TransferId};
use penstock_policy_api::RequestRecord;

use super::io::DeliveryEvent;
use super::lead::Lead;
use super::table::NONE;

/// Where a request is in its computation.
///
/// ```text
/// ACCEPTED ──► QUEUED ──► PREFILLING ──► DECODING ──► COMPLETED
///    │            ▲ ▲─────────┼─────────────┤ (it goes on at another replica, where that is allowed: back to QUEUED)
///    │            │ └─────────┼ (refused by its replica, or lost with it before any token: back to QUEUED)
///    └────────────┴───────────┴──────────────┴─────► CANCELLED, FAILED      (PREFILLING may also complete: no token was asked for)
/// ```
///
/// COMPLETED, CANCELLED and FAILED are terminal and absorbing.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[repr(u8)]
pub enum Compute {
    /// It arrived; admission has not let it in yet (it may be deferred).
    Accepted,
    /// It waits at the gateway. Holds a queue slot and quota.
    Queued,
    /// It was dispatched; no output token yet. Holds credit, then blocks at its replica.
    Prefilling,
    /// Tokens are being produced. Holds blocks and a slot.
    Decoding,
    /// It got what it asked for.
    Completed,
    /// Somebody ended it.
    Cancelled,
    /// Refused after it was accepted, timed out, or broken.
    Failed,
}

impl Compute {
    /// All states, in the order of their numbers.
    pub const ALL: [Self; 7] = [
        Self::Accepted,
        Self::Queued,
        Self::Prefilling,
        Self::Decoding,
        Self::Completed,
        Self::Cancelled,
        Self::Failed,
    ];

    /// May `self` become `next`? See the diagram above the type.
    pub fn may_become(self, next: Self) -> bool {
        match self {
            Self::Accepted => matches!(next, Self::Queued | Self::Cancelled | Self::Failed),
            Self::Queued => matches!(next, Self::Prefilling | Self::Cancelled | Self::Failed),
            Self::Prefilling => !matches!(next, Self::Accepted | Self::Prefilling),
            Self::Decoding => matches!(next, Self::Queued | Self::Completed | Self::Cancelled | Self::Failed),
            Self::Completed | Self::Cancelled | Self::Failed => false,
        }
    }

    /// Does nothing follow?
    pub fn is_terminal(self) -> bool {
        matches!(self, Self::Completed | Self::Cancelled | Self::Failed)
    }

    /// The terminal state that an outcome means.
    pub fn of(outcome: Outcome) -> Self {
        match outcome {
            Outcome::Stop | Outcome::Length => Self::Completed,
            Outcome::Cancelled(_) => Self::Cancelled,
            Outcome::Refused(_) | Outcome::TimedOut(_) | Outcome::Failed(_) => Self::Failed,
        }
    }
}

/// Where a request is in its delivery.
///
/// ```text
/// CONNECTING ──► STREAMING ──► ACKNOWLEDGED
///     │  └────────────┼────────────┘ (an answer of one piece is acknowledged at once)
///     └───────────────┴──────► DISCONNECTED
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[repr(u8)]
pub enum Delivery {
    /// Nothing was written to the client.
    Connecting,
    /// The first byte was written.
    Streaming,
    /// The connection is gone.
    Disconnected,
    /// The terminal event was written.
    Acknowledged,
}

impl Delivery {
    /// All states, in the order of their numbers.
    pub const ALL: [Self; 4] = [Self::Connecting, Self::Streaming, Self::Disconnected, Self::Acknowledged];

    /// The state after `event`, or none where the move is illegal.
    pub fn after(self, event: DeliveryEvent) -> Option<Self> {
        match (self, event) {
            (Self::Connecting, DeliveryEvent::Streaming) => Some(Self::Streaming),
            (Self::Connecting | Self::Streaming, DeliveryEvent::Acknowledged) => Some(Self::Acknowledged),
            (Self::Connecting | Self::Streaming, DeliveryEvent::Disconnected) => Some(Self::Disconnected),
            _ => None,
        }
    }

    /// Does nothing follow?
    pub fn is_terminal(self) -> bool {
        matches!(self, Self::Disconnected | Self::Acknowledged)
    }
}

/// Which structure a live request is in. Exactly one.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Place {
    /// In the list of deferred requests; not in the queue.
    Deferred,
    /// In its flow's queue and in its class's list.
    Queued,
    /// In the queue's counts and its class's list, out of its flow's queue until a hold of routing ends.
    Held,
    /// As held, in a replica's list of requests that wait for its next credit.
    Reserved {
        /// Whose list.
        replica: u32,
    },
    /// At a replica.
    Running {
        /// Which.
        replica: u32,
    },
    /// Over for its client; its replica has not yet confirmed that its resources are back.
    Settling {
        /// Which.
        replica: u32,
    },
}

impl Place {
    /// Waiting in the queue's sense: counted there, and in its class's list.
    pub fn is_waiting(self) -> bool {
        matches!(self, Self::Queued | Self::Held | Self::Reserved { .. })
    }

    /// The replica that holds resources for it.
    pub fn at_replica(self) -> Option<u32> {
        match self {
            Self::Running { replica } | Self::Settling { replica } => Some(replica),
            _ => None,
        }
    }
}

/// One live request. Created by arrival, removed when its resources are settled.
#[derive(Clone, Debug)]
pub(super) struct Request {
    /// What is known of it; never changes.
    pub manifest: Arc<Manifest>,
    /// Class in force; admission may lower it.
    pub class: ClassRank,
    /// Output cap in force; admission or a stance may lower it.
    pub max_output_tokens: u32,
    /// Output of each sequence whose blocks a dispatch reserves; set by admission.
    pub reserve_output_tokens: u32,
    /// Median output expected of each sequence, when it entered the queue.
    pub expected_output_tokens: u32,
    /// 1 is the first; grows when its replica is lost.
    pub attempt: u16,
    /// How often it went on at another replica with output behind it.
    pub migrations: u16,
    /// Output tokens of the attempts before the present one, which are computed again like a prompt.
    pub carried_output: u32,
    /// When its first token was confirmed, over all attempts; [`Instant::NEVER`] until then.
    pub first_token_at: Instant,
    /// Compute axis.
    pub compute: Compute,
    /// Delivery axis; the driver moves it.
    pub delivery: Delivery,
    /// Where it is.
    pub place: Place,
    /// Its tenant's slot in the ledger.
    pub tenant: u32,
    /// Its flow's slot, [`NONE`] while deferred.
    pub flow: u32,
    /// Tokens reserved of its tenant's window; 0 while deferred. Given back once, at settlement.
    pub reserved_tokens: u64,
    /// Deferral: how often it was deferred, and when it was asked about last. Set by admission.
    pub deferrals: u32,
    /// See `deferrals`.
    pub asked_at: Instant,
    /// When its deferral, hold or reservation ends; [`Instant::NEVER`] else.
    pub until: Instant,
    /// How it ended, as its client was told; set once.
    pub outcome: Option<Outcome>,
    /// Its waiting.
    pub wait: Wait,
    /// Its present or last stay at a replica.
    pub run: Run,
}

/// How a request waits, from the first time it is queued.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Wait {
    /// Order of first entry into the queue: its place when it comes back.
    pub ticket: u64,
    /// When the first stay began.
    pub first: Instant,
    /// When the present stay began.
    pub since: Instant,
    /// All earlier stays together.
    pub before: Duration,
    /// Rounds that passed over it because no replica could take it.
    pub skips: u32,
    /// The dispatch round that counted the last skip: one a round.
    pub skipped_round: u64,
    /// Replica whose credit is withheld for it, [`NONE`] else.
    pub withheld: u32,
    /// What routing ranked, as replica slots; the next ones are tried when a wait ends or a replica refuses.
    pub ranked: Ranked,
    /// A hand-off came to nothing: one replica does all of it.
    pub whole: bool,
    /// Routing said that the replica which decodes computes the prompt as well.
    pub colocate: bool,
    /// Who holds its prompt's lead, as last looked up.
    pub lead: Lead,
    /// Time held or reserved, all together.
    pub held: Duration,
    /// When the present hold or reservation began.
    pub held_since: Instant,
    /// Time held or reserved while a replica that could take it idled, before `idle_since`.
    pub held_idle: Duration,
    /// Since when a replica that could take it has idled; [`Instant::NEVER`] when none does.
    pub idle_since: Instant,
}

/// Replicas in the order in which a request shall try them.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) struct Ranked {
    /// Slot and epoch; a replaced replica is passed over.
    pub rows: [(u32, ReplicaEpoch); RANKED_MAX],
    /// How many there are.
    pub len: u8,
    /// How many were tried or passed.
    pub tried: u8,
}

impl Ranked {
    /// The next one to try.
    pub fn next(&mut self) -> Option<(u32, ReplicaEpoch)> {
        let next = self.rows.get(usize::from(self.tried)).copied().filter(|_| self.tried < self.len)?;
        self.tried += 1;
        Some(next)
    }

    /// Adds one behind the others, while there is room.
    pub fn push(&mut self, row: (u32, ReplicaEpoch)) {
        if let Some(place) = self.rows.get_mut(usize::from(self.len)) {
            *place = row;
            self.len += 1;
        }
    }

    /// Where it stands, or the length.
    pub fn rank_of(&self, row: (u32, ReplicaEpoch)) -> u8 {
        let ranked = &self.rows[..usize::from(self.len)];
        ranked.iter().position(|other| *other == row).map_or(self.len, |rank| rank as u8)
    }

    /// Is it among those tried?
    pub fn has_tried(&self, row: (u32, ReplicaEpoch)) -> bool {
        self.rows[..usize::from(self.tried)].contains(&row)
    }
}

/// What a request holds at a replica, and what came of it there.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) struct Run {
    /// Number of the dispatch.
    pub number: DispatchNumber,
    /// What was debited.
    pub need: Need,
    /// Prefix tokens that the index promised.
    pub predicted_cached_tokens: u32,
    /// Prefix tokens that the replica found.
    pub cached_tokens: u32,
    /// When it was dispatched.
    pub dispatched_at: Instant,
    /// When its first token was confirmed; zero until then.
    pub first_token_at: Instant,
    /// The replica said that it started.
    pub started: bool,
    /// Prompt tokens computed.
    pub prefill_tokens: u64,
    /// Output tokens confirmed, over all sequences.
    pub output_tokens: u64,
    /// Output tokens still expected, over all sequences.
    pub expected_left: u64,
    /// Part of the estimate told with `taken` that is not settled yet.
    pub unsettled_tokens: u64,
    /// Its first token has come: its prompt no longer counts as prefill in flight.
    pub emitted: bool,
    /// Preemptions reported.
    pub preemptions: u32,
    /// Its prompt is computed elsewhere, by this hand-off, and nobody decodes it yet.
    pub transfer: Option<TransferId>,
    /// Which row of the ranking took it, from 0; the length of the ranking when none of them did.
    pub rank_taken: u8,
}

/// What a dispatch debits.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) struct Need {
    /// One a sequence.
    pub slots: u32,
    /// Uncached prompt tokens, as believed when it was placed.
    pub prefill_tokens: u64,
    /// Input and reserved output of all sequences, the shared prompt once.
    pub blocks: u64,
}

impl Wait {
    /// Before the first stay.
    pub fn new(now: Instant) -> Self {
        Self {
            ticket: 0,
            first: now,
            since: now,
            before: Duration::ZERO,
            skips: 0,
            skipped_round: 0,
            withheld: NONE,
            ranked: Ranked::default(),
            whole: false,
            colocate: false,
            lead: Lead::default(),
            held: Duration::ZERO,
            held_since: Instant::NEVER,
            held_idle: Duration::ZERO,
            idle_since: Instant::NEVER,
        }
    }
}

impl Request {
    /// A request that has just arrived.
    pub fn new(manifest: Arc<Manifest>, tenant: u32, now: Instant) -> Self {
        Self {
            class: manifest.class,
            max_output_tokens: manifest.max_output_tokens,
            reserve_output_tokens: manifest.max_output_tokens,
            expected_output_tokens: manifest.max_output_tokens,
            attempt: 1,
            compute: Compute::Accepted,
            delivery: Delivery::Connecting,
            place: Place::Deferred,
            tenant,
            migrations: 0,
            carried_output: 0,
            first_token_at: Instant::NEVER,
            flow: NONE,
            reserved_tokens: 0,
            deferrals: 0,
            asked_at: now,
            until: Instant::NEVER,
            outcome: None,
            wait: Wait::new(now),
            run: Run::default(),
            manifest,
        }
    }

    /// Moves the compute axis. `false`, and no move, where it is illegal.
    #[must_use]
    pub fn move_to(&mut self, next: Compute) -> bool {
        let legal = self.compute.may_become(next);
        if legal {
            self.compute = next;
        }
        legal
    }

    /// Has its client been sent something, as far as it is known here?
    pub fn has_emitted(&self) -> bool {
        self.first_token_at != Instant::NEVER
    }

    /// Time in the queue, all stays together.
    pub fn waited(&self, now: Instant) -> Duration {
        if self.place.is_waiting() { self.wait.before + now.since(self.wait.since) } else { self.wait.before }
    }

    /// Blocks that a dispatch reserves, no reuse.
    pub fn need_blocks(&self, block_size_tokens: u32) -> u64 {
        let manifest = &self.manifest;
        let input = manifest.input_tokens.saturating_add(self.carried_output);
        Manifest::need_blocks(input, self.left_of(self.reserve_output_tokens), manifest.sequences, block_size_tokens)
    }

    /// Blocks for input plus the full output cap.
    pub fn finish_blocks(&self, block_size_tokens: u32) -> u64 {
        let manifest = &self.manifest;
        let input = manifest.input_tokens.saturating_add(self.carried_output);
        Manifest::need_blocks(input, self.left_of(self.max_output_tokens), manifest.sequences, block_size_tokens)
    }

    /// What is left of an output of so many tokens.
    fn left_of(&self, tokens: u32) -> u32 {
        tokens.saturating_sub(self.carried_output).max(1)
    }

    /// As policies see it.
    pub fn record(&self) -> RequestRecord {
        RequestRecord {
            class_rank: self.class,
            attempt: u8::try_from(self.attempt).unwrap_or(u8::MAX),
            max_output_tokens: self.max_output_tokens,
            ..RequestRecord::of(&self.manifest)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every legal move, written out from the diagram.
    const LEGAL: [(Compute, Compute); 15] = {
        use Compute::{Accepted, Cancelled, Completed, Decoding, Failed, Prefilling, Queued};
        [
            (Accepted, Queued),
            (Accepted, Cancelled),
            (Accepted, Failed),
            (Queued, Prefilling),
            (Queued, Cancelled),
            (Queued, Failed),
            (Prefilling, Queued),
            (Prefilling, Decoding),
            (Prefilling, Completed),
            (Prefilling, Cancelled),
            (Prefilling, Failed),
            (Decoding, Queued),
            (Decoding, Completed),
            (Decoding, Cancelled),
            (Decoding, Failed),
        ]
    };

    #[test]
    fn exactly_the_moves_of_the_diagram_are_legal() {
        for from in Compute::ALL {
            for to in Compute::ALL {
                assert_eq!(from.may_become(to), LEGAL.contains(&(from, to)), "{from:?} to {to:?}");
            }
        }
    }

    #[test]
    fn terminal_states_absorb() {
        for state in Compute::ALL {
            assert_eq!(state.is_terminal(), Compute::ALL.iter().all(|next| !state.may_become(*next)));
        }
        for state in Delivery::ALL {
            let events = [DeliveryEvent::Streaming, DeliveryEvent::Disconnected, DeliveryEvent::Acknowledged];
            assert_eq!(state.is_terminal(), events.iter().all(|event| state.after(*event).is_none()));
        }
    }

    #[test]
    fn delivery_moves_are_those_of_its_diagram() {
        use DeliveryEvent as Event;
        let moves = [
            (Delivery::Connecting, Event::Streaming, Some(Delivery::Streaming)),
            (Delivery::Connecting, Event::Disconnected, Some(Delivery::Disconnected)),
            (Delivery::Connecting, Event::Acknowledged, Some(Delivery::Acknowledged)),
            (Delivery::Streaming, Event::Streaming, None),
            (Delivery::Streaming, Event::Disconnected, Some(Delivery::Disconnected)),
            (Delivery::Streaming, Event::Acknowledged, Some(Delivery::Acknowledged)),
        ];
        for (from, event, to) in moves {
            assert_eq!(from.after(event), to);
        }
    }
}
