//! Every limit of the driver in one place, each with its reason. Those of the machines are in `penstock_base::limits`; what a deployment
//! may choose is in [`EngineLimits`](crate::EngineLimits).

use penstock_base::Duration;

/// Turns of one replica that may wait at the gateway loop or at the output loop: further behind, the replica computes no more until the
/// other side has caught up.
pub(crate) const TURNS_PER_REPLICA: usize = 256;
/// Freezes within [`FREEZE_WINDOW`] after which a replica is given up: what breaks it comes back.
pub(crate) const FREEZES_MAX: usize = 5;
/// See [`FREEZES_MAX`].
pub(crate) const FREEZE_WINDOW: Duration = Duration::from_s(60);
/// A gateway loop that has not turned for this long is stuck: it wakes for the overload tick at least.
pub(crate) const BEAT_MAX: Duration = Duration::from_s(10);
/// Cancels of one request that may wait at the gateway loop: its client's, a slow client's and an operator's, each while it is in flight
/// and again while its end is under way.
pub(crate) const CANCELS_PER_REQUEST: usize = 6;
/// News of one request's delivery that may wait at the gateway loop: there are three kinds, each told once.
pub(crate) const DELIVERIES_PER_REQUEST: usize = 3;
/// Wakes of one request that may wait at the output loop. It opens once, ends once, and is queued again only after a placement came to
/// nothing, which attempts and refusals bound far below this.
pub(crate) const OUTPUT_WAKES_PER_REQUEST: usize = 16;
/// Replicas that come and go, drain and shutdown: what may wait at the gateway loop beside [`CONTROL_PER_REPLICA`].
pub(crate) const CONTROL_WAKES: usize = 16;
/// Ups and downs of one replica that may wait at the gateway loop.
pub(crate) const CONTROL_PER_REPLICA: usize = 8;
/// Requests that a gateway knows a worker was told of, after which it looks which of them nobody holds any more. A few times what runs at one.
pub(crate) const TOLD_OF_SWEEP: usize = 16_384;
/// Turns with changes of the cache that may wait for the publisher of KV events: it takes a turn in some microseconds, and a second of
/// steps is far fewer.
pub(crate) const TAPPED_TURNS_MAX: usize = 1_024;
/// Changes in them, some 80 bytes each. One turn alone may have more: all that a pool can hold.
pub(crate) const TAPPED_CHANGES_MAX: usize = 1 << 16;
/// Changes in one batch of KV events: with the tokens of the largest usual blocks it is well below what a payload may have.
pub(crate) const TOLD_CHANGES_MAX: usize = 2_048;
/// Changes of a followed cache in one wake of the gateway's loop, so that a whole listing does not keep requests waiting.
pub(crate) const NEWS_CHANGES_MAX: usize = 1_024;
/// Such wakes that may wait there: a follower waits for room.
pub(crate) const NEWS_WAKES_MAX: usize = 16;
/// Most candidates with log-probabilities at a position, as the OpenAI API bounds them.
pub(crate) const LOGPROBS_MAX: u8 = 20;

const _: () = {
    assert!(FREEZES_MAX > 0, "a replica may come back once");
    assert!(BEAT_MAX.0 < FREEZE_WINDOW.0);
};
