//! What a gateway and a worker say over a control conversation, as bytes.
//!
//! Times travel as what is left or has passed: each process has its own clock. Stamps of hand-offs are not times for whoever carries them,
//! and go as they are.

use std::sync::Arc;

use bytes::Bytes;
use penstock_base::codec::{DecodeError, Reader, Writer};
use penstock_base::{Duration, GatewayEpoch, Instant, Manifest, Outcome, ReplicaEpoch, ReplicaId, RequestId, SeqId};
use penstock_exec::SamplingParams;
use penstock_journal::wire::{Decode, Encode};
use penstock_sched::gateway::ReplicaFacts;
use penstock_sched::handoff::{Order, Peer};
use penstock_sched::message::{FromReplica, ToReplica, Usage};
use penstock_sched::replica::{HandoffInput, ReplicaInput};

use super::tokens::{put_ids, put_sampling, put_tokens, take_ids, take_sampling, take_tokens};
use crate::context::{Placement, RequestContext};
use crate::outputs::TurnItem;

// --- To a worker -------------------------------------------------------------------------------------------------------------------

const MESSAGE: u8 = 1;
const FEEDBACK: u8 = 2;
const ENDPOINT: u8 = 4;
const ENDPOINT_GONE: u8 = 5;

// --- To a gateway ------------------------------------------------------------------------------------------------------------------

const UP: u8 = 1;
const SAID: u8 = 2;
/// Both ways: a word for the replica that it names.
const WORD: u8 = 3;
const TURN: u8 = 4;
const DOWN: u8 = 5;
const DRAINING: u8 = 6;

/// What a gateway says.
#[derive(Debug)]
pub(crate) enum ToWorker {
    /// The machine's message, with what the driver knows of the request that it begins with.
    Message { epoch: ReplicaEpoch, message: ToReplica, placement: Option<Placement> },
    /// What the text led to.
    Feedback { epoch: ReplicaEpoch, inputs: Vec<ReplicaInput> },
    /// Another worker's word about a hand-off.
    Word(Word),
    /// How another worker's memory is reached.
    Endpoint(Endpoint),
    /// It is not to be reached any more.
    EndpointGone { replica: ReplicaId, life: u64 },
}

/// What a worker says.
#[derive(Debug)]
pub(crate) enum ToGateway {
    /// An epoch begins.
    Up(ReplicaFacts),
    /// What the machine says.
    Said { epoch: ReplicaEpoch, messages: Vec<FromReplica> },
    /// What one turn brought.
    Turn { epoch: ReplicaEpoch, items: Vec<RemoteItem> },
    /// This epoch is over.
    Down { epoch: ReplicaEpoch, lost: bool },
    /// No new work any more.
    Draining { epoch: ReplicaEpoch },
    /// For another worker, as it is.
    Word { to: Peer, body: Bytes },
}

/// An item of a turn, without what only the gateway's process knows.
#[derive(Debug)]
pub(crate) enum RemoteItem {
    /// It needs nothing else.
    Whole(TurnItem),
    /// The end of a request.
    Ended { request: RequestId, attempt: u16, outcome: Outcome, usage: Usage },
}

/// What workers say to each other by way of the gateway. May be lost.
#[derive(Debug)]
pub(crate) enum Word {
    /// Of the machines.
    Handoff { to: Peer, input: HandoffInput },
    /// Of the movers, in their own encoding.
    Mover { to: Peer, body: Bytes },
}

/// How a worker's memory is reached.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Endpoint {
    pub replica: ReplicaId,
    /// The life of its process.
    pub life: u64,
    /// One a transport, the preferred first.
    pub descriptors: Vec<Vec<u8>>,
}

fn bytes(write: impl FnOnce(&mut Writer)) -> Bytes {
    let mut out = Writer::new();
    write(&mut out);
    out.into_bytes().into()
}

/// [`ToWorker::Message`].
pub(crate) fn message(now: Instant, epoch: ReplicaEpoch, said: &ToReplica, placement: Option<&Placement>) -> Bytes {
    let mut said = said.clone();
    if let Some(manifest) = manifest_of(&mut said) {
        let manifest = Arc::make_mut(manifest);
        manifest.arrived = Instant(now.since(manifest.arrived).0);
        manifest.deadline = Instant(now.until(manifest.deadline).0);
    }
    bytes(|out| {
        out.u8(MESSAGE);
        out.u64(epoch.0);
        said.put(out);
        out.option(placement, |out, Placement { context, resumed }| {
            put_ids(out, &context.prompt);
            put_sampling(out, &context.sampling);
            put_ids(out, resumed);
        });
    })
}

/// [`ToWorker::Feedback`].
pub(crate) fn feedback(epoch: ReplicaEpoch, inputs: &[ReplicaInput]) -> Bytes {
    bytes(|out| {
        out.u8(FEEDBACK);
        out.u64(epoch.0);
        out.list(inputs.iter(), |out, input| input.put(out));
    })
}

/// [`ToWorker::Endpoint`].
pub(crate) fn endpoint(endpoint: &Endpoint) -> Bytes {
    bytes(|out| {
        out.u8(ENDPOINT);
        put_endpoint(out, endpoint);
    })
}

/// [`ToWorker::EndpointGone`].
pub(crate) fn endpoint_gone(replica: ReplicaId, life: u64) -> Bytes {
    bytes(|out| {
        out.u8(ENDPOINT_GONE);
        out.u32(replica.0);
        out.u64(life);
    })
}

pub(super) fn put_endpoint(out: &mut Writer, endpoint: &Endpoint) {
    out.u32(endpoint.replica.0);
    out.u64(endpoint.life);
    out.list(endpoint.descriptors.iter(), |out, descriptor| out.blob(descriptor));
}

pub(super) fn take_endpoint(from: &mut Reader<'_>) -> Result<Endpoint, DecodeError> {
    let (replica, life) = (ReplicaId(from.u32()?), from.u64()?);
    let descriptors = from.list(|from| Ok(from.blob()?.to_vec()))?;
    Ok(Endpoint { replica, life, descriptors })
}

/// A word on its way to the gateway, and on from there.
pub(crate) fn word(word: &Word) -> Bytes {
    bytes(|out| {
        out.u8(WORD);
        match word {
            Word::Handoff { to, input } => {
                to.put(out);
                out.u8(0);
                input.put(out);
            }
            Word::Mover { to, body } => {
                to.put(out);
                out.u8(1);
                out.blob(body);
            }
        }
    })
}

/// [`ToGateway::Up`].
pub(crate) fn up(facts: &ReplicaFacts) -> Bytes {
    bytes(|out| {
        out.u8(UP);
        facts.put(out);
    })
}

/// [`ToGateway::Said`].
pub(crate) fn said<'a>(now: Instant, epoch: ReplicaEpoch, messages: impl Iterator<Item = &'a FromReplica>) -> Bytes {
    let messages: Vec<_> = messages.collect();
    bytes(|out| {
        out.u8(SAID);
        out.u64(epoch.0);
        out.list(messages.into_iter(), |out, message| match message {
            FromReplica::Report(report) => {
                let mut report = *report;
                report.as_of = Instant(now.since(report.as_of).0);
                FromReplica::Report(report).put(out);
            }
            message => message.put(out),
        });
    })
}

/// [`ToGateway::Turn`].
pub(crate) fn turn<'a>(epoch: ReplicaEpoch, items: impl Iterator<Item = &'a TurnItem>) -> Bytes {
    let items: Vec<_> = items.collect();
    bytes(|out| {
        out.u8(TURN);
        out.u64(epoch.0);
        out.list(items.into_iter(), |out, item| match item {
            TurnItem::Tokens { seq, attempt, first, tokens } => {
                out.u8(0);
                seq.put(out);
                out.u16(*attempt);
                out.u32(*first);
                put_tokens(out, tokens);
            }
            TurnItem::SequenceEnded { seq, attempt, outcome, tokens } => {
                out.u8(1);
                seq.put(out);
                out.u16(*attempt);
                outcome.put(out);
                out.u32(*tokens);
            }
            TurnItem::Ended { request, attempt, outcome, usage, .. } => {
                out.u8(2);
                request.put(out);
                out.u16(*attempt);
                outcome.put(out);
                usage.put(out);
            }
            // It is a message of its own.
            TurnItem::Down { .. } => out.u8(3),
        });
    })
}

/// [`ToGateway::Down`].
pub(crate) fn down(epoch: ReplicaEpoch, lost: bool) -> Bytes {
    bytes(|out| {
        out.u8(DOWN);
        out.u64(epoch.0);
        out.bool(lost);
    })
}

/// [`ToGateway::Draining`].
pub(crate) fn draining(epoch: ReplicaEpoch) -> Bytes {
    bytes(|out| {
        out.u8(DRAINING);
        out.u64(epoch.0);
    })
}

impl ToWorker {
    /// Reads what a gateway says. `now` is the reader's.
    pub fn read(body: &Bytes, now: Instant) -> Result<Self, DecodeError> {
        let mut from = Reader::new(body);
        let said = match from.u8()? {
            MESSAGE => {
                let epoch = ReplicaEpoch(from.u64()?);
                let mut message = ToReplica::take(&mut from)?;
                let body = from.option(|from| Ok((take_ids(from)?, take_sampling(from)?, take_ids(from)?)))?;
                let mut placement = None;
                if let Some(manifest) = manifest_of(&mut message) {
                    let own = Arc::make_mut(manifest);
                    own.arrived = now - Duration(own.arrived.0);
                    own.deadline = now + Duration(own.deadline.0);
                    placement = body.map(|body| placed(manifest, body)).transpose()?;
                    if placement.is_none() {
                        return Err(DecodeError::Invalid("request without its tokens"));
                    }
                }
                Self::Message { epoch, message, placement }
            }
            FEEDBACK => {
                let epoch = ReplicaEpoch(from.u64()?);
                let inputs = from.list(|from| match ReplicaInput::take(from)? {
                    input @ (ReplicaInput::Finish(_) | ReplicaInput::BlockKeys { .. }) => Ok(input),
                    _ => Err(DecodeError::Invalid("feedback")),
                })?;
                Self::Feedback { epoch, inputs }
            }
            WORD => {
                let to = Peer::take(&mut from)?;
                Self::Word(match from.u8()? {
                    0 => match HandoffInput::take(&mut from)? {
                        input @ (HandoffInput::OfSender(_) | HandoffInput::OfReceiver(_)) => {
                            Word::Handoff { to, input }
                        }
                        _ => return Err(DecodeError::Invalid("word of another worker")),
                    },
                    1 => Word::Mover { to, body: Bytes::copy_from_slice(from.blob()?) },
                    _ => return Err(DecodeError::Invalid("word of another worker")),
                })
            }
            ENDPOINT => Self::Endpoint(take_endpoint(&mut from)?),
            ENDPOINT_GONE => Self::EndpointGone { replica: ReplicaId(from.u32()?), life: from.u64()? },
            _ => return Err(DecodeError::Invalid("message to a worker")),
        };
        from.finish()?;
        Ok(said)
    }
}

impl ToGateway {
    /// Reads what a worker says. `now` is the reader's.
    pub fn read(body: &Bytes, now: Instant) -> Result<Self, DecodeError> {
        let mut from = Reader::new(body);
        let said = match from.u8()? {
            UP => Self::Up(ReplicaFacts::take(&mut from)?),
            SAID => {
                let epoch = ReplicaEpoch(from.u64()?);
                let messages = from.list(|from| {
                    let mut message = FromReplica::take(from)?;
                    if let FromReplica::Report(report) = &mut message {
                        report.as_of = now - Duration(report.as_of.0);
                    }
                    Ok(message)
                })?;
                Self::Said { epoch, messages }
            }
            WORD => return Ok(Self::Word { to: Peer::take(&mut from)?, body: body.clone() }),
            TURN => Self::Turn { epoch: ReplicaEpoch(from.u64()?), items: from.list(take_item)? },
            DOWN => Self::Down { epoch: ReplicaEpoch(from.u64()?), lost: from.bool()? },
            DRAINING => Self::Draining { epoch: ReplicaEpoch(from.u64()?) },
            _ => return Err(DecodeError::Invalid("message of a worker")),
        };
        from.finish()?;
        Ok(said)
    }
}

fn take_item(from: &mut Reader<'_>) -> Result<RemoteItem, DecodeError> {
    Ok(match from.u8()? {
        0 => {
            let (seq, attempt, first) = (SeqId::take(from)?, from.u16()?, from.u32()?);
            RemoteItem::Whole(TurnItem::Tokens { seq, attempt, first, tokens: take_tokens(from)? })
        }
        1 => {
            let (seq, attempt, outcome) = (SeqId::take(from)?, from.u16()?, Outcome::take(from)?);
            RemoteItem::Whole(TurnItem::SequenceEnded { seq, attempt, outcome, tokens: from.u32()? })
        }
        2 => {
            let (request, attempt) = (RequestId::take(from)?, from.u16()?);
            RemoteItem::Ended { request, attempt, outcome: Outcome::take(from)?, usage: Usage::take(from)? }
        }
        _ => return Err(DecodeError::Invalid("item of a turn")),
    })
}

/// The request that a message begins with.
fn manifest_of(message: &mut ToReplica) -> Option<&mut Arc<Manifest>> {
    match message {
        ToReplica::Dispatch(dispatch) => Some(&mut dispatch.manifest),
        ToReplica::Prefill(ordered) => match &mut ordered.order {
            Order::Begin(open) => Some(&mut open.manifest),
            _ => None,
        },
        ToReplica::Decode(ordered) => match &mut ordered.order {
            Order::Begin(reserve) => Some(&mut reserve.manifest),
            _ => None,
        },
        _ => None,
    }
}

fn placed(
    manifest: &Arc<Manifest>,
    (prompt, sampling, resumed): (Vec<u32>, Box<[Arc<SamplingParams>]>, Vec<u32>),
) -> Result<Placement, DecodeError> {
    let tokens = prompt.len() + resumed.len();
    let sequences = usize::from(manifest.sequences);
    let fits = tokens == manifest.input_tokens as usize && sampling.len() == sequences;
    if !fits || prompt.is_empty() || (!resumed.is_empty() && sequences != 1) {
        return Err(DecodeError::Invalid("tokens of a request"));
    }
    let context = Arc::new(RequestContext::placed(Arc::clone(manifest), prompt.into(), sampling));
    Ok(Placement { context, resumed: resumed.into() })
}

/// Whose request an item of a turn is about; an epoch's end is everybody's.
pub(crate) fn gateway_of(item: &TurnItem) -> Option<GatewayEpoch> {
    match item {
        TurnItem::Tokens { seq, .. } | TurnItem::SequenceEnded { seq, .. } => Some(seq.request.gateway_epoch()),
        TurnItem::Ended { request, .. } => Some(request.gateway_epoch()),
        TurnItem::Down { .. } => None,
    }
}
