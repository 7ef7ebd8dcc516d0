//! Ends and reasons as label values: closed sets, with the names that users of the contract know.

use penstock_base::{CancelCause, Failure, Outcome, Phase, Refusal};
use penstock_policy_api::validate::Malformed;
use penstock_policy_api::{FallbackReason, FaultKind};
use penstock_sched::gateway::{MigrationCause, MigrationRefusal};
use penstock_sched::handoff::{self, End};

/// The Gateway API Inference Extension's word for how a request left the gateway's queue.
pub(super) fn admission_outcome(outcome: Outcome, placed: bool) -> &'static str {
    if placed {
        return "Dispatched";
    }
    match outcome {
        Outcome::Refused(Refusal::NoReplica) => "RejectedNoEndpoints",
        Outcome::Refused(
            Refusal::QueueFull
            | Refusal::Capacity
            | Refusal::AllBusy
            | Refusal::Shed
            | Refusal::TooLong
            | Refusal::RetryStorm,
        ) => "RejectedCapacity",
        Outcome::Refused(_) => "RejectedOther",
        Outcome::TimedOut(_) => "EvictedTTL",
        Outcome::Cancelled(CancelCause::Client | CancelCause::SlowClient) => "EvictedContextCancelled",
        Outcome::Stop | Outcome::Length | Outcome::Cancelled(CancelCause::Drain) | Outcome::Failed(_) => "EvictedOther",
    }
}

/// Why a request had to leave its replica.
pub(super) fn migration_cause(cause: MigrationCause) -> &'static str {
    match cause {
        MigrationCause::Lost => "lost",
        MigrationCause::Drain => "drain",
    }
}

/// Why it did not move.
pub(super) fn migration_refusal(why: MigrationRefusal) -> &'static str {
    match why {
        MigrationRefusal::Limit => "refused_limit",
        MigrationRefusal::Sequences => "refused_sequences",
        MigrationRefusal::Nowhere => "refused_nowhere",
    }
}

/// How a hand-off ended, and why it did not come about.
pub(super) fn handoff_labels(end: End) -> (&'static str, &'static str) {
    match end {
        End::HandedOff(_) => ("handed_off", ""),
        End::AtSender(_, why) => ("at_sender", handoff_failure(why)),
        End::Anew(why) => ("anew", handoff_failure(why)),
        End::Failed(why) => ("failed", handoff_failure(why)),
        End::Cancelled => ("cancelled", ""),
    }
}

fn handoff_failure(why: handoff::Failure) -> &'static str {
    use handoff::Failure as Why;
    match why {
        Why::ReserveTimeout => "reserve_timeout",
        Why::OpenTimeout => "open_timeout",
        Why::BootstrapTimeout => "bootstrap_timeout",
        Why::WaitingTimeout => "waiting_timeout",
        Why::TransferTimeout => "transfer_timeout",
        Why::Silent => "silent",
        Why::LeaseExpired => "lease_expired",
        Why::Stalled => "stalled",
        Why::Checksum => "checksum",
        Why::SealMismatch => "seal_mismatch",
        Why::PeerRestarted => "peer_restarted",
        Why::PeerRefused(_) => "peer_refused",
        Why::PeerFailed => "peer_failed",
        Why::Prefill => "prefill",
        Why::GivenUp => "given_up",
        Why::GatewayGone => "gateway_gone",
        Why::Closed => "closed",
        Why::TableFull => "table_full",
    }
}

/// An end as two labels from closed sets.
pub fn outcome_labels(outcome: Outcome) -> (&'static str, &'static str) {
    match outcome {
        Outcome::Stop => ("stop", ""),
        Outcome::Length => ("length", ""),
        Outcome::Cancelled(cause) => (
            "cancelled",
            match cause {
                CancelCause::Client => "client",
                CancelCause::SlowClient => "slow_client",
                CancelCause::Drain => "drain",
            },
        ),
        Outcome::Refused(refusal) => ("refused", refusal_label(refusal)),
        Outcome::TimedOut(phase) => (
            "timed_out",
            match phase {
                Phase::Queue => "queue",
                Phase::Prefill => "prefill",
                Phase::Decode => "decode",
            },
        ),
        Outcome::Failed(failure) => (
            "failed",
            match failure {
                Failure::ReplicaLost => "replica_lost",
                Failure::Executor => "executor",
                Failure::PreemptedTooOften => "preempted_too_often",
                Failure::NoProgress => "no_progress",
                Failure::Internal => "internal",
            },
        ),
    }
}

/// Every way in which a proposal can be refused, in the order of their codes.
pub(crate) const MALFORMED: [Malformed; 18] = {
    use Malformed::*;
    [
        RowOutOfRange,
        RowTwice,
        TooManyRows,
        ClassOutOfRange,
        ClassRaised,
        ReserveAboveCap,
        CapOutOfRange,
        MayNotDegrade,
        DeferOutOfRange,
        UnknownReason,
        HoldOutOfRange,
        TargetOutOfRange,
        UnknownHow,
        WrongCount,
        UnknownTier,
        LevelOutOfRange,
        TooManyActions,
        UnknownAction,
    ]
};

/// The name of a fallback's reason code.
pub(super) fn fallback_label(code: u8) -> &'static str {
    use FaultKind::{Epoch, Fuel, Memory, Rebuilding, Trap};
    let faults = [Trap, Fuel, Epoch, Memory, Rebuilding].map(FallbackReason::Fault);
    let malformed = MALFORMED.map(FallbackReason::Malformed);
    let all = std::iter::once(FallbackReason::NoOpinion).chain(faults).chain(malformed);
    all.into_iter().find(|reason| reason.code() == code).map_or("other", FallbackReason::name)
}

fn refusal_label(refusal: Refusal) -> &'static str {
    match refusal {
        Refusal::NeverFits => "never_fits",
        Refusal::Quota => "quota",
        Refusal::QueueFull => "queue_full",
        Refusal::Capacity => "capacity",
        Refusal::Deadline => "deadline",
        Refusal::RetryStorm => "retry_storm",
        Refusal::TooLong => "too_long",
        Refusal::Shed => "shed",
        Refusal::AllBusy => "all_busy",
        Refusal::NoReplica => "no_replica",
        Refusal::Draining => "draining",
        // A policy names its own reasons; 65,520 possible numbers are no label.
        Refusal::Policy(_) => "policy",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fallback_reasons_have_the_contract_s_names() {
        assert_eq!(fallback_label(0), "no-opinion");
        assert_eq!(fallback_label(1), FaultKind::Trap.name());
        assert_eq!(fallback_label(16 + Malformed::UnknownAction as u8), Malformed::UnknownAction.name());
        assert_eq!(fallback_label(15), "other");
        assert!(MALFORMED.iter().enumerate().all(|(at, why)| at == *why as usize));
    }
}
