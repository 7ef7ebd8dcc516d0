//! What wakes a replica's loop, who may send how much of it, and why a replica is frozen.

use penstock_base::limits::INFLIGHT_MAX;
use penstock_base::{GatewayEpoch, ReplicaEpoch, TransferId};
use penstock_exec::SampledToken;
use penstock_sched::handoff::Peer;
use penstock_sched::message::ToReplica;
use penstock_sched::replica::{HandoffInput, ReplicaConfig, ReplicaInput};

use crate::context::Placement;
use crate::executor_loop::StepOutcome;
use crate::limits::TURNS_PER_REPLICA;
use crate::mailbox::Lane;
use crate::policies::order::PolicyOrder;

/// Dispatches and cancels of the gateway, which does not wait.
pub(crate) const WORK: Lane = Lane(0);
/// The newest stance.
pub(crate) const STANCE: Lane = Lane(1);
/// What the output loop found in the text; it does not wait.
pub(crate) const FEEDBACK: Lane = Lane(2);
/// Computed steps.
pub(crate) const RESULTS: Lane = Lane(3);
/// An order to freeze.
pub(crate) const FREEZE: Lane = Lane(4);
/// Gateways that come and go, drain, shutdown.
pub(crate) const CONTROL: Lane = Lane(5);
/// Orders about policies: of one activation, and what is left of one that was given up.
pub(crate) const POLICIES: Lane = Lane(6);
/// The gateway's generation, for a replica that came up; only the newest counts.
pub(crate) const GENERATION: Lane = Lane(7);

/// What other replicas say about hand-offs, and may be lost.
pub(crate) const WORDS: Lane = Lane(8);
/// What the mover has done; it waits for room.
pub(crate) const MOVED: Lane = Lane(9);

/// Stances of gateways that are processes of their own; each waits for room.
pub(crate) const STANCES: Lane = Lane(10);

/// Bounds of the lanes for a replica with this configuration among `replicas`.
pub(crate) fn lanes(config: &ReplicaConfig, replicas: usize) -> [usize; 11] {
    // Credit bounds the dispatches under way; each may be cancelled, and so may what runs. This loop takes everything that waits before
    // it hands over a turn, so that feedback cannot outnumber the turns that wait at the output loop, but for the two at its ends and the one that closes
    // an epoch.
    let granted = config.slots as usize + config.ready_window;
    [4 * granted + 64, 1, TURNS_PER_REPLICA * replicas + 3, INFLIGHT_MAX + 1, 1, 8, 8, 1, 4_096, 256, 16]
}

/// Why a replica's loop wakes up.
pub(crate) enum ReplicaWake {
    /// The gateway says something to this incarnation.
    Gateway { gateway: GatewayEpoch, epoch: ReplicaEpoch, message: ToReplica, placement: Option<Placement> },
    /// A gateway in another process has come.
    GatewayUp(GatewayEpoch),
    /// It has left.
    GatewayDown(GatewayEpoch),
    /// No new work is taken any more.
    Drain,
    /// A step is computed.
    Computed(StepOutcome),
    /// Ends and keys that the output loop found.
    Feedback { epoch: ReplicaEpoch, inputs: Vec<ReplicaInput> },
    /// The gateway knows that this epoch is over: the next one may begin.
    Settled { epoch: ReplicaEpoch },
    /// Start anew.
    Freeze { epoch: ReplicaEpoch, cause: FreezeCause },
    /// Something of a hand-off, for one incarnation.
    Handoff { to: Peer, input: HandoffInput },
    /// The tail of a hand-off into this replica: what was sampled and not sent.
    Tail { to: Peer, transfer: TransferId, tail: Vec<SampledToken> },
    /// Nothing of this epoch is read or written any more.
    MoverQuiet { epoch: ReplicaEpoch },
    /// Something about policies.
    Policies(PolicyOrder),
    /// The loop ends.
    Shutdown,
}

/// Why a replica is taken out of service.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum FreezeCause {
    /// The machine panicked: an overflow or an index out of range.
    Panic,
    /// The machine says that an invariant does not hold.
    Broken(&'static str),
    /// A mailbox that cannot fill was full.
    MailboxFull,
    /// The executor answered something else than it was asked.
    Executor(&'static str),
    /// The executor's state is lost.
    ExecutorLost,
}

impl FreezeCause {
    /// As a metric label.
    pub fn name(self) -> &'static str {
        match self {
            Self::Panic => "panic",
            Self::Broken(_) => "invariant",
            Self::MailboxFull => "mailbox",
            Self::Executor(_) => "executor_answer",
            Self::ExecutorLost => "executor_lost",
        }
    }
}
