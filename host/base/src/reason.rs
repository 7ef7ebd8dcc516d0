//! Why a request ended, was refused or came back. Closed enums: the edge maps each to one status, metrics use them as labels.

/// How a request (or one of its sequences) ended. Terminal and absorbing.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Outcome {
    /// A stop token or stop string.
    Stop,
    /// The output cap.
    Length,
    /// Ended by the caller or by the host's own reasons.
    Cancelled(CancelCause),
    /// Not admitted, or dropped from the queue.
    Refused(Refusal),
    /// A deadline or a typed wait ran out.
    TimedOut(Phase),
    /// Something broke; `retryable` says whether the same request may be sent again.
    Failed(Failure),
}

/// Who ended a request early.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum CancelCause {
    /// The client closed its connection or asked to.
    Client,
    /// The client read too slowly for the declared send timeout.
    SlowClient,
    /// An operator or the drain's grace ended it.
    Drain,
}

/// Where a request was when its time ran out.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Phase {
    /// Waiting at the gateway.
    Queue,
    /// Its prompt was being computed.
    Prefill,
    /// Tokens were being produced.
    Decode,
}

/// Why the gateway said no. No work was done for the request.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Refusal {
    /// Input plus output can never fit a replica's KV pool or the model's context: malformed, not busy.
    NeverFits,
    /// The tenant's quota.
    Quota,
    /// The queue is full.
    QueueFull,
    /// Capacity, by the admission policy's judgement.
    Capacity,
    /// Its deadline cannot be met or has passed.
    Deadline,
    /// Too many retries of the same work.
    RetryStorm,
    /// Too long for the present stance.
    TooLong,
    /// Shed by the overload stance.
    Shed,
    /// Every replica is busy.
    AllBusy,
    /// No replica is ready.
    NoReplica,
    /// The server is draining.
    Draining,
    /// The policy's own reason, 16 and up, named in its manifest.
    Policy(u16),
}

/// What broke.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Failure {
    /// Its replica was lost or froze. Retryable.
    ReplicaLost,
    /// The executor failed the batch that it was in.
    Executor,
    /// Preempted more often than the limit allows.
    PreemptedTooOften,
    /// Nothing moved for longer than the watchdog allows.
    NoProgress,
    /// A broken invariant or an overflow; the replica was frozen. Retryable.
    Internal,
}

/// Why a replica sent a dispatch back.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum RefuseReason {
    /// Its ready window and slots are full.
    NoSlot,
    /// Its pool cannot reserve the blocks.
    NoBlocks,
    /// It is draining or frozen.
    NotReady,
    /// The dispatch named another epoch.
    OldEpoch,
}

impl Failure {
    /// May the client send the same request again?
    pub fn is_retryable(self) -> bool {
        !matches!(self, Self::Executor)
    }
}

macro_rules! coded {
    ($ty:ty { $($variant:pat => $make:expr, $code:literal;)* }) => {
        impl $ty {
            /// Stable number, for journals and facts.
            pub fn code(self) -> u16 {
                match self { $($variant => $code,)* }
            }
            /// The value of [`Self::code`].
            pub fn from_code(code: u16) -> Option<Self> {
                match code { $($code => Some($make),)* _ => None }
            }
        }
    };
}

coded!(CancelCause {
    Self::Client => Self::Client, 0;
    Self::SlowClient => Self::SlowClient, 1;
    Self::Drain => Self::Drain, 2;
});
coded!(Phase {
    Self::Queue => Self::Queue, 0;
    Self::Prefill => Self::Prefill, 1;
    Self::Decode => Self::Decode, 2;
});
coded!(Failure {
    Self::ReplicaLost => Self::ReplicaLost, 0;
    Self::Executor => Self::Executor, 1;
    Self::PreemptedTooOften => Self::PreemptedTooOften, 2;
    Self::NoProgress => Self::NoProgress, 3;
    Self::Internal => Self::Internal, 4;
});
coded!(RefuseReason {
    Self::NoSlot => Self::NoSlot, 0;
    Self::NoBlocks => Self::NoBlocks, 1;
    Self::NotReady => Self::NotReady, 2;
    Self::OldEpoch => Self::OldEpoch, 3;
});

impl Refusal {
    /// Stable number: the policy's own reasons (16 and up) as they are, the host's below 16.
    pub fn code(self) -> u16 {
        match self {
            Self::Quota => 0,
            Self::Capacity => 1,
            Self::Deadline => 2,
            Self::RetryStorm => 3,
            Self::TooLong => 4,
            Self::NeverFits => 5,
            Self::QueueFull => 6,
            Self::Shed => 7,
            Self::AllBusy => 8,
            Self::NoReplica => 9,
            Self::Draining => 10,
            Self::Policy(code) => code.max(16),
        }
    }

    /// The value of [`Self::code`].
    pub fn from_code(code: u16) -> Option<Self> {
        Some(match code {
            0 => Self::Quota,
            1 => Self::Capacity,
            2 => Self::Deadline,
            3 => Self::RetryStorm,
            4 => Self::TooLong,
            5 => Self::NeverFits,
            6 => Self::QueueFull,
            7 => Self::Shed,
            8 => Self::AllBusy,
            9 => Self::NoReplica,
            10 => Self::Draining,
            11..=15 => return None,
            own => Self::Policy(own),
        })
    }
}

impl Outcome {
    /// Kind and detail as two stable numbers.
    pub fn code(self) -> (u8, u16) {
        match self {
            Self::Stop => (0, 0),
            Self::Length => (1, 0),
            Self::Cancelled(cause) => (2, cause.code()),
            Self::Refused(refusal) => (3, refusal.code()),
            Self::TimedOut(phase) => (4, phase.code()),
            Self::Failed(failure) => (5, failure.code()),
        }
    }

    /// The value of [`Self::code`].
    pub fn from_code(kind: u8, detail: u16) -> Option<Self> {
        match kind {
            0 => Some(Self::Stop),
            1 => Some(Self::Length),
            2 => CancelCause::from_code(detail).map(Self::Cancelled),
            3 => Refusal::from_code(detail).map(Self::Refused),
            4 => Phase::from_code(detail).map(Self::TimedOut),
            5 => Failure::from_code(detail).map(Self::Failed),
            _ => None,
        }
    }

    /// Did the request get what it asked for?
    pub fn is_success(self) -> bool {
        matches!(self, Self::Stop | Self::Length)
    }
}
