//! What each end says of itself before anything else.

use bytes::Bytes;
use penstock_base::GatewayEpoch;
use penstock_base::codec::{DecodeError, Reader, Writer};
use penstock_exec::Geometry;
use penstock_journal::wire::{Decode as _, Encode as _};
use penstock_sched::gateway::ReplicaFacts;

use super::wire::{Endpoint, put_endpoint, take_endpoint};

/// Version of everything that gateways and workers say to each other. Another one is refused before anything is read of it.
pub const WIRE_VERSION: u16 = 1;

/// A worker's.
#[derive(Debug)]
pub(super) struct WorkerGreeting {
    pub facts: ReplicaFacts,
    pub block_size_tokens: u32,
    pub kv_token_bytes: u64,
    pub vocabulary: u32,
    pub endpoint: Endpoint,
}

impl WorkerGreeting {
    pub fn new(facts: ReplicaFacts, sizes: &Geometry, endpoint: Endpoint) -> Self {
        let Geometry { block_size_tokens, kv_token_bytes, vocabulary, .. } = *sizes;
        Self { facts, block_size_tokens, kv_token_bytes, vocabulary, endpoint }
    }

    pub fn write(&self) -> Bytes {
        let mut out = Writer::new();
        out.u16(WIRE_VERSION);
        self.facts.put(&mut out);
        out.u32(self.block_size_tokens);
        out.u64(self.kv_token_bytes);
        out.u32(self.vocabulary);
        put_endpoint(&mut out, &self.endpoint);
        out.into_bytes().into()
    }

    pub fn read(bytes: &[u8]) -> Result<Self, DecodeError> {
        let mut from = versioned(bytes)?;
        let facts = ReplicaFacts::take(&mut from)?;
        let greeting = Self {
            facts,
            block_size_tokens: from.u32()?,
            kv_token_bytes: from.u64()?,
            vocabulary: from.u32()?,
            endpoint: take_endpoint(&mut from)?,
        };
        from.finish()?;
        Ok(greeting)
    }
}

/// What a gateway with this number puts into its identity when it dials a worker.
pub fn gateway_greeting(epoch: GatewayEpoch) -> Bytes {
    let mut out = Writer::new();
    out.u16(WIRE_VERSION);
    out.u16(epoch.0);
    out.into_bytes().into()
}

pub(super) fn read_gateway_greeting(bytes: &[u8]) -> Result<GatewayEpoch, DecodeError> {
    let mut from = versioned(bytes)?;
    let epoch = GatewayEpoch(from.u16()?);
    from.finish()?;
    Ok(epoch)
}

fn versioned(bytes: &[u8]) -> Result<Reader<'_>, DecodeError> {
    let mut from = Reader::new(bytes);
    match from.u16()? {
        WIRE_VERSION => Ok(from),
        _ => Err(DecodeError::Invalid("version of the greeting")),
    }
}
