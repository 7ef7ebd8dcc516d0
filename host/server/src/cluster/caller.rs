//! Calls one worker, and calls it again, as long as its goal says so. One task a worker.

use std::sync::Arc;
use std::time::Duration;

use penstock_base::ReplicaId;
use penstock_control::{DialError, DialSettings, Ended, Identity, Limits, Link, dial};
use penstock_engine::{CacheFollower, ConsumerSettings, Engine, Joined};
use tokio::sync::{oneshot, watch};

use super::roster::Goal;
use super::sight::{LinkState, Sight};

/// Shortest pause before another call.
const PAUSE_FIRST: Duration = Duration::from_millis(100);
/// How often a worker that is ready again is looked at: it is called anew when nothing of before runs there.
const LOOK_EVERY: Duration = Duration::from_millis(500);

/// What all calls have in common.
pub struct Line {
    /// Where workers become replicas.
    pub engine: Arc<Engine>,
    /// What is shown of them.
    pub sight: Arc<Sight>,
    /// Who calls.
    pub identity: Identity,
    /// Bounds of a session.
    pub limits: Limits,
    /// Longest pause before another call.
    pub pause_max: Duration,
    /// Caches are heard of by KV events, where a worker publishes them.
    pub follows_events: bool,
}

/// Follows the goal of the worker `key` until there is none any more and its session is over.
pub async fn follow(line: Arc<Line>, key: String, mut goal: watch::Receiver<Option<Goal>>) {
    let mut pause = PAUSE_FIRST;
    let mut said = String::new();
    loop {
        let Ok(wanted) =
            goal.wait_for(|goal| goal.as_ref().is_none_or(|goal| goal.call)).await.map(|goal| goal.clone())
        else {
            break;
        };
        let Some(wanted) = wanted else { break };
        goal.mark_unchanged();
        line.sight.link(&key, LinkState::Calling);
        let called = tokio::select! {
            called = call(&line, &wanted) => called,
            // It is somewhere else, another one, or not to be called any more.
            _ = goal.changed() => continue,
        };
        match called {
            Ok((joined, link)) => {
                (pause, said) = (PAUSE_FIRST, String::new());
                let Joined { replica, epoch, ended } = joined;
                tracing::info!(worker = key, address = wanted.address, %replica, epoch = epoch.0, "a worker has joined");
                line.sight.link(&key, LinkState::Connected { replica, epoch });
                // Ends with the session.
                let _follower = listen(&line, &wanted, replica);
                let why = attend(&line, &wanted, replica, &link, ended, &mut goal).await;
                line.engine.metrics().worker_session_ended(reason(why));
                tracing::warn!(worker = key, address = wanted.address, %replica, %why, "a worker's session is over");
                line.sight.link(&key, LinkState::Idle);
            }
            Err((kind, why)) => {
                line.engine.metrics().worker_call_failed(kind);
                if said != why {
                    tracing::warn!(
                        worker = key,
                        address = wanted.address,
                        why,
                        "a worker cannot be had: it is called again"
                    );
                    said.clone_from(&why);
                }
                line.sight.link(&key, LinkState::Failed(why));
                tokio::select! {
                    () = tokio::time::sleep(pause) => {}
                    _ = goal.changed() => {}
                }
                pause = (pause * 2).min(line.pause_max);
            }
        }
    }
    line.sight.gone(&key);
}

/// Hears of the worker's cache by its KV events, if both ends want it so. Else its own word counts.
fn listen(line: &Line, wanted: &Goal, replica: ReplicaId) -> Option<CacheFollower> {
    let (publish, replay) = wanted.kv_events.clone().filter(|_| line.follows_events)?;
    match line.engine.follow_cache(replica, ConsumerSettings::new(publish, replay)) {
        Ok(follower) => Some(follower),
        Err(why) => {
            tracing::warn!(worker = wanted.address, %why, "its KV events cannot be followed: its own word counts");
            None
        }
    }
}

/// Holds a worker to its goal until the session is over. Why it is.
async fn attend(
    line: &Line,
    called: &Goal,
    replica: ReplicaId,
    link: &Link,
    mut ended: oneshot::Receiver<Ended>,
    goal: &mut watch::Receiver<Option<Goal>>,
) -> Ended {
    let mut look = tokio::time::interval(LOOK_EVERY);
    // A replica that gets nothing new gets nothing new to the end of its session.
    let mut is_retired = false;
    loop {
        let now = goal.borrow_and_update().clone();
        // One that discovery knows no more may serve on: it is the session that says whether it lives.
        let is_held = now.as_ref().is_some_and(|goal| goal.hold);
        if is_held && !is_retired {
            is_retired = line.engine.hold(replica);
            tracing::info!(worker = called.address, %replica, heard = is_retired, "a worker gets nothing new: it is not ready any more");
        }
        if now.as_ref().is_some_and(|goal| is_another(called, goal)) {
            // Nothing of the life that was called is valid.
            link.close();
        }
        if is_retired && now.as_ref().is_some_and(|goal| goal.call) && is_idle(&line.engine, replica) {
            // Ready again: another session begins anew.
            link.close();
        }
        tokio::select! {
            why = &mut ended => return why.unwrap_or(Ended::Closed),
            changed = goal.changed() => if changed.is_err() {
                link.close();
                return ended.await.unwrap_or(Ended::Closed);
            },
            _ = look.tick(), if is_held || is_retired => {}
        }
    }
}

/// Runs nothing there?
fn is_idle(engine: &Engine, replica: ReplicaId) -> bool {
    let status = engine.status();
    let replica = status.replicas.iter().find(|status| status.replica == replica);
    replica.is_none_or(|status| status.load.running_requests == 0 && status.load.ready_requests == 0)
}

/// Is it another process than the one that was called?
fn is_another(called: &Goal, now: &Goal) -> bool {
    let is_another_life = matches!((called.life, now.life), (Some(called), Some(now)) if called != now);
    is_another_life || called.address != now.address
}

type Failed = (&'static str, String);

async fn call(line: &Line, goal: &Goal) -> Result<(Joined, Link), Failed> {
    let settings = DialSettings {
        address: goal.address.clone(),
        epoch: goal.life,
        identity: line.identity.clone(),
        limits: line.limits,
    };
    let conversation = dial(settings).await.map_err(|fault| (kind(&fault), fault.to_string()))?;
    let link = conversation.link();
    let joined = line.engine.join(conversation).map_err(|fault| ("join", fault.to_string()))?;
    Ok((joined, link))
}

/// As a metric's label.
fn kind(fault: &DialError) -> &'static str {
    match fault {
        DialError::Settings { .. } => "settings",
        DialError::Unreachable { .. } => "unreachable",
        DialError::Denied { .. } => "denied",
        DialError::Refused { .. } => "refused",
        _ => "protocol",
    }
}

/// As a metric's label.
fn reason(ended: Ended) -> &'static str {
    match ended {
        Ended::Lease => "lease",
        Ended::Replaced => "replaced",
        Ended::Bye => "bye",
        Ended::Closed => "closed",
        Ended::Protocol(_) => "protocol",
        Ended::Refused(_) => "refused",
    }
}
