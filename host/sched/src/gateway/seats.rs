//! Where the gateway's questions are asked, and the buffers that a question needs. Apart from the state, so that facts can be read
//! while a question is being asked.

use alloc::vec::Vec;

use penstock_base::BlockKey;
use penstock_base::codec::{DecodeError, Reader, Writer};
use penstock_base::limits::{ACTIONS_MAX, PROMISED_KEYS_MAX};
use penstock_base::map::Map;
use penstock_policy_api::{
    Action, AdmissionSeat, Answer, Call, Declared, OrderSeat, OverloadDeclaration, OverloadPolicy, OverloadQuestion,
    OverloadRows, OverloadSeat, Policies, Policy, RoutingSeat, Stance, StanceAction, Terms,
};

use super::directory::Overlaps;
use super::io::{GatewayConfig, GatewayEffects};

/// The four questions of a gateway.
#[derive(Debug)]
pub(super) struct Seats {
    /// Who enters.
    pub admission: AdmissionSeat,
    /// Who is next.
    pub order: OrderSeat,
    /// Where it runs.
    pub routing: RoutingSeat,
    /// What gives way.
    pub overload: OverloadSeat,
    /// Sits in that seat when a hold is over: the native default answers.
    pub silent: Silent,
    /// Buffers; nothing in them outlives a step.
    pub scratch: Scratch,
}

/// An overload policy without an opinion.
#[derive(Debug)]
pub(super) struct Silent(OverloadDeclaration);

impl Silent {
    fn new() -> Self {
        let rows = OverloadRows::default();
        Self(OverloadDeclaration { terms: Terms::native("silent"), context: Declared::default(), rows })
    }
}

impl Policy for Silent {
    fn terms(&self) -> &Terms {
        &self.0.terms
    }
}

impl OverloadPolicy for Silent {
    fn describe(&self) -> &OverloadDeclaration {
        &self.0
    }
    fn decide(&mut self, _: &Call, _: &OverloadQuestion<'_>, _: &mut Vec<Action>) -> Answer<Stance> {
        Answer::NoOpinion
    }
}

/// Buffers of one step.
#[derive(Debug)]
pub(super) struct Scratch {
    /// Rows of the order window.
    pub window: Vec<WindowRow>,
    /// Flows shown in it, and how far.
    pub shown: Vec<ShownFlow>,
    /// What `order` answered.
    pub ranked: Vec<u32>,
    /// Replica slots that passed the hard filter, by id.
    pub eligible: Vec<u32>,
    /// The window over them, by id.
    pub candidates: Vec<u32>,
    /// Replica slots that could compute a prompt for another one, best first.
    pub senders: Vec<u32>,
    /// What a native ranking answered.
    pub native: Vec<u32>,
    /// Actions of a stance.
    pub actions: Vec<StanceAction>,
    /// Overlap of the request that is being placed.
    pub overlaps: Overlaps,
    /// Request slots of a pass that changes the lists it goes over.
    pub slots: Vec<u32>,
    /// Keys that an earlier row or a dispatched prefill computes.
    pub promised: Map<BlockKey, ()>,
}

/// One row of the order window.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct WindowRow {
    /// Which request.
    pub slot: u32,
    /// Its ticket: the row order.
    pub ticket: u64,
    /// Requests of its flow ahead of it.
    pub ahead: u32,
    /// Prompt tokens that the best replica with credit is believed to hold; when the policy asks.
    pub cached_tokens: u32,
    /// No replica without credit is believed to hold more; when the policy asks.
    pub credited_overlap: bool,
    /// Uncached prompt tokens that somebody before it computes anyway; when the policy asks.
    pub shared_tokens: u32,
}

/// A flow shown in the order window.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct ShownFlow {
    /// The next of its requests to show.
    pub next: u32,
    /// How many were shown.
    pub shown: u32,
}

impl Seats {
    /// Seats that have asked nothing.
    pub fn new(config: &GatewayConfig) -> Self {
        Self {
            admission: AdmissionSeat::new(config.run_seed),
            order: OrderSeat::new(config.run_seed),
            routing: RoutingSeat::new(config.run_seed),
            overload: OverloadSeat::new(config.run_seed, config.context_tokens_max),
            silent: Silent::new(),
            scratch: Scratch::new(config),
        }
    }

    /// Writes what outlives a step.
    pub fn encode(&self, out: &mut Writer) {
        self.admission.encode(out);
        self.order.encode(out);
        self.routing.encode(out);
        self.overload.encode(out);
    }

    /// Reads what [`Self::encode`] wrote.
    pub fn decode(from: &mut Reader<'_>, config: &GatewayConfig) -> Result<Self, DecodeError> {
        Ok(Self {
            admission: AdmissionSeat::decode(from)?,
            order: OrderSeat::decode(from)?,
            routing: RoutingSeat::decode(from)?,
            overload: OverloadSeat::decode(from)?,
            silent: Silent::new(),
            scratch: Scratch::new(config),
        })
    }
}

impl Scratch {
    fn new(config: &GatewayConfig) -> Self {
        let (rows, replicas) = (config.order_rows, config.replicas_max);
        let running = config.queue_requests_max as usize + config.running_requests_max as usize;
        Self {
            window: Vec::with_capacity(rows),
            shown: Vec::with_capacity(rows),
            ranked: Vec::with_capacity(rows),
            eligible: Vec::with_capacity(replicas),
            candidates: Vec::with_capacity(replicas),
            senders: Vec::with_capacity(replicas),
            native: Vec::with_capacity(replicas),
            actions: Vec::with_capacity(ACTIONS_MAX),
            overlaps: Overlaps::with_capacity(replicas),
            slots: Vec::with_capacity(running),
            promised: Map::with_capacity(PROMISED_KEYS_MAX),
        }
    }
}

/// What a step works with beside the state.
pub(super) struct Cx<'a> {
    /// The policies in the seats.
    pub policies: &'a mut dyn Policies,
    /// Where effects go.
    pub effects: &'a mut GatewayEffects,
    /// Questions and buffers.
    pub seats: &'a mut Seats,
}
