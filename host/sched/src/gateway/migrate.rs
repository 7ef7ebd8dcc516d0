//! What if a request that has output behind it must leave its replica?
//!
//! It goes on at another one, as a new attempt: prompt and output so far are computed again there, and what follows is what would have
//! followed, since a token depends on tokens, parameters, seed and index alone. The driver has the tokens; here only the request moves.
//! Off unless [`GatewayConfig::migrations_max`](super::GatewayConfig::migrations_max) says how often.

use penstock_base::{Duration, Failure, Outcome};

use super::State;
use super::feedback::SKIPPED_REFUSED;
use super::io::{GatewayEffect, GatewayEvent};
use super::request::Place;
use super::seats::Cx;
use super::table::NONE;
use crate::message::ToReplica;

/// Why a request leaves its replica.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum MigrationCause {
    /// The replica is gone.
    Lost,
    /// It takes no new work and is about to end.
    Drain,
}

/// Why a request that would have to move does not.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum MigrationRefusal {
    /// It has moved as often as is allowed; with a limit of 0 none moves.
    Limit,
    /// It has several answers, which share a prompt and are one placement.
    Sequences,
    /// No other replica could ever take it.
    Nowhere,
}

impl State {
    /// Moves a request with output behind it. False when it has none, or may not; the latter is told.
    pub(super) fn migrate(&mut self, slot: u32, cause: MigrationCause, cx: &mut Cx<'_>) -> bool {
        let request = &self.requests.table[slot];
        let Place::Running { replica } = request.place else { return false };
        if !request.has_emitted() || request.compute.is_terminal() {
            return false;
        }
        let id = request.manifest.request;
        let refusal = self.migration_refusal(slot, replica);
        if let Some(why) = refusal {
            cx.effects.push(GatewayEffect::Event(GatewayEvent::MigrationRefused { request: id, cause, why }));
            return false;
        }
        let facts = self.replicas.table[replica].facts;
        let request = &mut self.requests.table[slot];
        let attempt = request.attempt;
        request.attempt += 1;
        request.migrations += 1;
        let output = core::mem::take(&mut request.run.output_tokens);
        request.carried_output = request.carried_output.saturating_add(u32::try_from(output).unwrap_or(u32::MAX));
        // It waits anew, and not as one that has waited all along.
        request.wait.before = Duration::ZERO;
        // Its prompt is not a prompt any more that somebody else computes.
        request.wait.whole = true;
        if cause == MigrationCause::Drain {
            // A failed attempt is one that another may follow.
            let outcome = Outcome::Failed(Failure::ReplicaLost);
            let message = ToReplica::Cancel { request: id, attempt, outcome };
            cx.effects.push(GatewayEffect::Send { replica: facts.replica, epoch: facts.epoch, message });
        }
        let from = facts.replica;
        cx.effects.push(GatewayEffect::Event(GatewayEvent::Migrated { request: id, from, cause }));
        self.counters.migrated += 1;
        self.forget_ranking(slot);
        self.come_back(slot, SKIPPED_REFUSED, cx);
        true
    }

    fn migration_refusal(&self, slot: u32, from: u32) -> Option<MigrationRefusal> {
        let request = &self.requests.table[slot];
        if request.migrations >= self.config.migrations_max || request.attempt == u16::MAX {
            return Some(MigrationRefusal::Limit);
        }
        if request.manifest.sequences != 1 {
            return Some(MigrationRefusal::Sequences);
        }
        let (need, finish, tokens) = self.sizes_of(&request.manifest, request.max_output_tokens);
        let elsewhere = self
            .replicas
            .iter_ready()
            .any(|(other, replica)| other != from && replica.decodes() && replica.fits(&need, finish, tokens));
        (!elsewhere).then_some(MigrationRefusal::Nowhere)
    }

    /// Moves what others have room for away from a replica that takes no new work. The rest ends where it is.
    pub(super) fn migrate_all(&mut self, at: u32, cx: &mut Cx<'_>) {
        if self.config.migrations_max == 0 {
            return;
        }
        let others = self.replicas.iter_ready().filter(|(other, replica)| *other != at && replica.decodes());
        let mut room: u64 = others.map(|(_, replica)| u64::from(replica.credit().requests)).sum();
        let mut slot = self.replicas.table[at].requests.head;
        while slot != NONE && room > 0 {
            let next = self.requests.inner.next(slot);
            room -= u64::from(self.migrate(slot, MigrationCause::Drain, cx));
            slot = next;
        }
    }
}
