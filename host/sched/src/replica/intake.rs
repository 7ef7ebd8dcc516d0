//! Is this dispatch taken? And the other messages of gateways.
//!
//! Taken means: blocks for the input and the reserved output of all sequences are promised, the shared prompt once, less what the cache
//! holds now (the gateway's index is only a hint). A sequence has a slot or its request stands in the ready window.

use alloc::sync::Arc;

use penstock_base::limits::SEQUENCES_MAX;
use penstock_base::{CancelCause, DispatchNumber, GatewayEpoch, Instant, Manifest, Outcome, RefuseReason, RequestId};
use penstock_kv::{Admit, Keys, OwnerId};

use super::digest::Mark;
use super::handoff::Told;
use super::sequence::{Done, NONE, Request, Sending};
use super::{Replica, ReplicaEffects, ReplicaInput};
use crate::handoff::Caps;
use crate::message::{Dispatch, FromReplica, ToReplica};

/// A request that is to be taken in.
pub(super) struct Intake {
    pub manifest: Arc<Manifest>,
    pub gateway: GatewayEpoch,
    pub number: DispatchNumber,
    pub attempt: u16,
    pub caps: Caps,
    /// It is computed for another replica.
    pub sending: Option<Sending>,
}

impl Replica {
    pub(super) fn take_message(
        &mut self,
        now: Instant,
        gateway: GatewayEpoch,
        message: ToReplica,
        effects: &mut ReplicaEffects,
    ) {
        match message {
            ToReplica::Dispatch(dispatch) => self.dispatch(now, gateway, dispatch, effects),
            ToReplica::Cancel { request, attempt, outcome } => self.cancel(now, request, attempt, outcome, effects),
            ToReplica::Stance(stance) => match self.peers.take_stance(gateway, stance, now) {
                Ok(None) => {}
                Ok(order) => self.preempt_order = order,
                Err(()) => self.stale(effects),
            },
            ToReplica::Policies(generation) => self.take_policies(generation),
            ToReplica::Prefill(ordered) => self.order_sender(now, gateway, ordered, effects),
            ToReplica::Decode(ordered) => self.order_receiver(now, gateway, ordered, effects),
            ToReplica::PeerUp(peer) => self.tell_parties(now, Told::PeerUp(peer), effects),
        }
    }

    pub(super) fn gateway_up(&mut self, now: Instant, gateway: GatewayEpoch, effects: &mut ReplicaEffects) {
        if !self.peers.add(gateway) {
            return self.stale(effects);
        }
        // It may have been cut off: what it says from now on counts again.
        self.tell_parties(now, Told::GatewayUp(gateway), effects);
        self.list_cache(gateway, effects);
    }

    pub(super) fn gateway_down(&mut self, now: Instant, gateway: GatewayEpoch, effects: &mut ReplicaEffects) {
        if !self.peers.remove(gateway) {
            return self.stale(effects);
        }
        self.tell_parties(now, Told::GatewayDown(gateway), effects);
        for entry in 0..self.requests.len() as u32 {
            let is_its = self.requests[entry as usize].as_ref().is_some_and(|request| request.gateway == gateway);
            if is_its {
                self.end_request(now, entry, Outcome::Cancelled(CancelCause::Drain), effects);
            }
        }
    }

    fn cancel(
        &mut self,
        now: Instant,
        request: RequestId,
        attempt: u16,
        outcome: Outcome,
        effects: &mut ReplicaEffects,
    ) {
        let entry = self.by_id.get(&request).copied();
        match entry.filter(|entry| self.request(*entry).attempt == attempt && self.request(*entry).live > 0) {
            Some(entry) => self.end_request(now, entry, outcome, effects),
            None => self.stale(effects),
        }
    }

    fn dispatch(&mut self, now: Instant, gateway: GatewayEpoch, dispatch: Dispatch, effects: &mut ReplicaEffects) {
        if let Some(peer) = self.peers.get_mut(gateway) {
            peer.covers = peer.covers.max(dispatch.number);
        }
        if let Some(&entry) = self.by_id.get(&dispatch.manifest.request) {
            // One whose gateway was cut off and is back may still wait for its last step.
            return match self.request(entry).live {
                0 => self.refuse(gateway, &dispatch, RefuseReason::NotReady, effects),
                _ => self.stale(effects),
            };
        }
        if let Err(reason) = self.admit(now, gateway, &dispatch) {
            self.refuse(gateway, &dispatch, reason, effects);
        }
    }

    fn refuse(
        &mut self,
        gateway: GatewayEpoch,
        dispatch: &Dispatch,
        reason: RefuseReason,
        effects: &mut ReplicaEffects,
    ) {
        let request = dispatch.manifest.request;
        self.digest.mix(Mark::Refuse, request.0, u64::from(reason.code()));
        let message = FromReplica::Refuse { request, attempt: dispatch.attempt, number: dispatch.number, reason };
        // An unknown gateway gets its answer too: it may have come up a moment ago.
        effects.push(super::ReplicaEffect::Send { gateway, message });
    }

    /// Takes the request, or says why not.
    fn admit(&mut self, now: Instant, gateway: GatewayEpoch, dispatch: &Dispatch) -> Result<(), RefuseReason> {
        if self.draining || !self.peers.knows(gateway) {
            return Err(RefuseReason::NotReady);
        }
        let caps = Caps {
            class: dispatch.class,
            max_output_tokens: dispatch.max_output_tokens,
            reserve_output_tokens: dispatch.reserve_output_tokens,
            expected_output_tokens: dispatch.expected_output_tokens,
        };
        let (number, attempt) = (dispatch.number, dispatch.attempt);
        let intake = Intake { manifest: dispatch.manifest.clone(), gateway, number, attempt, caps, sending: None };
        self.take_in(now, intake).map(|_| ())
    }

    /// Takes the request in, or says why not. Where it lies.
    pub(super) fn take_in(&mut self, now: Instant, intake: Intake) -> Result<u32, RefuseReason> {
        let manifest = &intake.manifest;
        let max_output = intake.caps.max_output_tokens.min(manifest.max_output_tokens).max(1);
        if !self.could_hold(manifest, max_output) {
            return Err(RefuseReason::NoBlocks);
        }
        let joins =
            self.ready.is_empty() && self.vacant_slots() >= u32::from(manifest.sequences) && !self.resumes_first(now);
        if !joins && self.ready.len() >= self.config.ready_window {
            return Err(RefuseReason::NoSlot);
        }
        let size = self.config.block_size_tokens;
        let entry = self.request_entries.take().ok_or(RefuseReason::NoSlot)?;
        self.serial += 1;
        let mut request = self.new_request(&intake, self.serial);
        let total = Manifest::need_blocks(manifest.input_tokens, request.reserve_output, manifest.sequences, size);
        let total_blocks = u32::try_from(total);
        if total_blocks.is_err() || !self.hold(now, entry, &mut request, total_blocks.unwrap_or(u32::MAX)) {
            self.request_entries.give(entry);
            return Err(RefuseReason::NoBlocks);
        }
        self.next_deadline = self.next_deadline.min(manifest.deadline);
        self.by_id.insert(request.id(), entry);
        self.requests[entry as usize] = Some(request);
        self.ready.push(entry);
        if joins {
            self.join(now, entry);
        }
        Ok(entry)
    }

    /// The request as it stands in the ready window.
    pub(super) fn new_request(&self, intake: &Intake, serial: u64) -> Request {
        let (manifest, size) = (&intake.manifest, self.config.block_size_tokens);
        let max_output = intake.caps.max_output_tokens.min(manifest.max_output_tokens).max(1);
        let shared_blocks = (manifest.input_tokens - 1) / size;
        let positions = u64::from(manifest.input_tokens) + u64::from(max_output);
        Request {
            manifest: manifest.clone(),
            serial,
            gateway: intake.gateway,
            attempt: intake.attempt,
            number: intake.number,
            class: intake.caps.class.min(manifest.class),
            max_output,
            reserve_output: intake.caps.reserve_output_tokens.clamp(1, max_output),
            shared_blocks,
            own_blocks: Manifest::blocks_for(positions, size) as u32 - shared_blocks,
            expected_output: intake.caps.expected_output_tokens.min(max_output),
            ready: true,
            prefix: None,
            sequences: [NONE; SEQUENCES_MAX as usize],
            live: manifest.sequences,
            leader: 0,
            waiting: false,
            started: false,
            cached_tokens: 0,
            charged: 0,
            output_tokens: 0,
            first_token: false,
            first_token_at: Instant::NEVER,
            preemptions: 0,
            failure: None,
            first: None,
            sending: intake.sending,
            adopted: None,
            silent: false,
            done: Done::default(),
        }
    }

    /// Is the request well-formed for this replica, and could it ever finish here, alone?
    fn could_hold(&self, manifest: &Manifest, max_output: u32) -> bool {
        let size = self.config.block_size_tokens;
        let positions = u64::from(manifest.input_tokens) + u64::from(max_output);
        (1..=SEQUENCES_MAX).contains(&manifest.sequences)
            && u32::from(manifest.sequences) <= self.config.slots
            && manifest.input_tokens > 0
            && manifest.keys.len() as u64 <= u64::from(manifest.input_tokens / size)
            && positions <= u64::from(self.config.context_tokens_max)
            && Manifest::blocks_for(positions, size) <= u64::from(self.config.blocks)
    }

    /// References what the cache holds of the prompt and promises the rest of `total_blocks`. False when the blocks are not there.
    pub(super) fn hold(&mut self, now: Instant, entry: u32, request: &mut Request, total_blocks: u32) -> bool {
        let Some(mut table) = self.tables.pop() else { return false };
        let keys = if self.config.prefix_cache { Keys::prompt(&request.manifest.keys) } else { Keys::default() };
        let ask =
            Admit { owner: OwnerId(entry), keys, input_tokens: request.prompt(), total_blocks, class: request.class };
        let spare = self.kv.available_blocks().saturating_sub(self.growth_blocks);
        let fits = total_blocks.saturating_sub(self.kv.lookup(now, keys, request.prompt()).blocks) <= spare;
        if !fits || self.kv.admit(now, ask, &mut table).is_err() {
            self.tables.push(table);
            return false;
        }
        request.prefix = Some(table);
        true
    }

    /// What a frozen replica says.
    pub(super) fn turn_away(&mut self, input: ReplicaInput, effects: &mut ReplicaEffects) {
        match input {
            ReplicaInput::Gateway { gateway, message: ToReplica::Dispatch(dispatch) } => {
                self.refuse(gateway, &dispatch, RefuseReason::NotReady, effects);
            }
            ReplicaInput::Tick => {}
            _ => self.stale(effects),
        }
    }
}
