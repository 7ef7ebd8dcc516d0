//! What does the mover that has written a chunk say to the mover where it lies? Between processes it goes as bytes, and may be lost.

use penstock_base::codec::{DecodeError, Reader, Writer};
use penstock_base::{Instant, ReplicaEpoch, ReplicaId, TransferId};
use penstock_exec::{SampledToken, TopLogprob};
use penstock_sched::handoff::Peer;

use crate::limits::LOGPROBS_MAX;

/// Format of the bytes.
const VERSION: u8 = 1;
/// Tokens of a tail: those that one step samples for a sequence.
const TAIL_MAX: usize = 64;

/// A chunk that was written.
#[derive(Clone, PartialEq, Debug)]
pub(crate) struct Landed {
    pub transfer: TransferId,
    pub from: Peer,
    pub to: Peer,
    /// The sender's, for its receiver's answer.
    pub stamp: Instant,
    /// Which chunk.
    pub index: u32,
    /// Sum over what was sent.
    pub sent: u64,
    /// With the last chunk.
    pub tail: Option<Vec<SampledToken>>,
}

fn put_peer(out: &mut Writer, peer: Peer) {
    out.u32(peer.replica.0);
    out.u64(peer.epoch.0);
}

fn take_peer(from: &mut Reader<'_>) -> Result<Peer, DecodeError> {
    Ok(Peer { replica: ReplicaId(from.u32()?), epoch: ReplicaEpoch(from.u64()?) })
}

fn take_f32(from: &mut Reader<'_>) -> Result<f32, DecodeError> {
    from.u32().map(f32::from_bits)
}

fn take_token(from: &mut Reader<'_>) -> Result<SampledToken, DecodeError> {
    let (id, logprob) = (from.u32()?, take_f32(from)?);
    let top = from.list(|from| Ok(TopLogprob { id: from.u32()?, logprob: take_f32(from)? }))?;
    if top.len() > usize::from(LOGPROBS_MAX) {
        return Err(DecodeError::Invalid("number of log-probabilities"));
    }
    Ok(SampledToken { id, logprob, top })
}

impl Landed {
    /// As bytes.
    pub fn encode(&self) -> Vec<u8> {
        let Self { transfer, from, to, stamp, index, sent, tail } = self;
        let mut out = Writer::new();
        out.u8(VERSION);
        out.u64(transfer.0);
        put_peer(&mut out, *from);
        put_peer(&mut out, *to);
        out.u64(stamp.0);
        out.u32(*index);
        out.u64(*sent);
        out.option(tail.as_ref(), |out, tail| {
            out.list(tail.iter(), |out, token| {
                out.u32(token.id);
                out.u32(token.logprob.to_bits());
                out.list(token.top.iter(), |out, top| {
                    out.u32(top.id);
                    out.u32(top.logprob.to_bits());
                });
            });
        });
        out.into_bytes()
    }

    /// Reads what [`Self::encode`] wrote.
    ///
    /// # Errors
    /// For bytes that are anything else.
    pub fn decode(bytes: &[u8]) -> Result<Self, DecodeError> {
        let mut from = Reader::new(bytes);
        let found = from.u8()?;
        if found != VERSION {
            return Err(DecodeError::Version { found: u32::from(found), expected: u32::from(VERSION) });
        }
        let landed = Self {
            transfer: TransferId(from.u64()?),
            from: take_peer(&mut from)?,
            to: take_peer(&mut from)?,
            stamp: Instant(from.u64()?),
            index: from.u32()?,
            sent: from.u64()?,
            tail: from.option(|from| from.list(take_token))?,
        };
        from.finish()?;
        match &landed.tail {
            Some(tail) if tail.len() > TAIL_MAX => Err(DecodeError::Invalid("number of tokens in a tail")),
            _ => Ok(landed),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn landed(tail: Option<Vec<SampledToken>>) -> Landed {
        let peer = |replica, epoch| Peer { replica: ReplicaId(replica), epoch: ReplicaEpoch(epoch) };
        Landed {
            transfer: TransferId(0x0102_0304_0506_0708),
            from: peer(7, 1_700_000_000_123),
            to: peer(0xfeed_f00d, 2),
            stamp: Instant(99),
            index: 3,
            sent: u64::MAX - 1,
            tail,
        }
    }

    fn token(top: usize) -> SampledToken {
        let top = (0..top).map(|id| TopLogprob { id: id as u32, logprob: -0.5 * id as f32 }).collect();
        SampledToken { id: 17, logprob: f32::NEG_INFINITY, top }
    }

    #[test]
    fn what_was_said_is_heard() {
        for tail in [None, Some(Vec::new()), Some(vec![token(0), token(3)])] {
            let said = landed(tail);
            assert_eq!(Landed::decode(&said.encode()), Ok(said));
        }
    }

    #[test]
    fn the_bytes_lie_as_stated() {
        let bytes = landed(None).encode();
        let wanted = [
            &[1][..],
            &[8, 7, 6, 5, 4, 3, 2, 1],
            &[7, 0, 0, 0],
            &1_700_000_000_123_u64.to_le_bytes(),
            &[0x0d, 0xf0, 0xed, 0xfe],
            &[2, 0, 0, 0, 0, 0, 0, 0],
            &[99, 0, 0, 0, 0, 0, 0, 0],
            &[3, 0, 0, 0],
            &[254, 255, 255, 255, 255, 255, 255, 255],
            &[0],
        ];
        assert_eq!(bytes, wanted.concat());
    }

    #[test]
    fn bytes_that_are_something_else_are_refused() {
        let bytes = landed(Some(vec![token(3)])).encode();
        for end in 0..bytes.len() {
            assert!(Landed::decode(&bytes[..end]).is_err(), "cut at {end}");
        }
        let longer = [bytes.as_slice(), &[0]].concat();
        assert_eq!(Landed::decode(&longer), Err(DecodeError::Trailing));
        let mut other = bytes.clone();
        other[0] = 2;
        assert_eq!(Landed::decode(&other), Err(DecodeError::Version { found: 2, expected: 1 }));
        // The flag of the tail lies behind one byte and five numbers with two of half their size.
        let flag = 1 + 8 + 12 + 12 + 8 + 4 + 8;
        assert_eq!(bytes[flag], 1);
        let mut neither = bytes.clone();
        neither[flag] = 2;
        assert!(Landed::decode(&neither).is_err());
        // A count that no memory could hold must not be believed.
        let mut many = bytes;
        many[flag + 1..flag + 5].fill(0xff);
        assert!(Landed::decode(&many).is_err());
        assert!(Landed::decode(&landed(Some(vec![token(0); TAIL_MAX + 1])).encode()).is_err());
        assert!(Landed::decode(&landed(Some(vec![token(usize::from(LOGPROBS_MAX) + 1)])).encode()).is_err());
    }
}
