//! What do two endpoints say to each other, byte for byte?
//!
//! A frame is a header of [`HEADER`] bytes and a payload. The header has a checksum of its own, so that a length is believed
//! only when it is right; the payload's checksum stands in the header. The header's layout is the same in all versions.
//!
//! ```text
//!  0 magic "PSTK"   4 version u16   6 word u8   7 zero   8 op u64   16 arg u64
//! 24 payload length u32   28 payload CRC-32C   32 CRC-32C of bytes 0..32
//! ```

use crate::wire::Reader;
use crate::{Failure, Gone, Refusal, TransportError};

/// Version of the frames and of descriptors.
pub const VERSION: u16 = 2;
/// Bytes of a frame's header.
pub(crate) const HEADER: usize = 36;
/// Longest payload of any frame but data: a list of 16,384 spans is 128 KiB, one for both ends twice that and some words.
pub(crate) const CONTROL_BYTES_MAX: usize = 256 * 1024 + 64;
/// Longest payload of a data frame. Large enough that a header costs nothing, small enough that operations take turns.
pub(crate) const CHUNK_BYTES: usize = 256 * 1024;

const MAGIC: [u8; 4] = *b"PSTK";

/// What a frame is about. "Dialler" is the end that connected; all operations on a connection are its own.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Word {
    /// Dialler: who I am, and whom I mean. To a guarded listener over a Unix socket also: my regions, whose memfds come along.
    Hello = 1,
    /// Listener: it is me. Payload: my regions; over a Unix socket their memfds come along.
    Welcome = 2,
    /// Listener: no. `arg`: [`Denial`], `op`: its version.
    Reject = 3,
    /// Dialler: operation `op` will write these runs of region `arg`.
    Open = 4,
    /// Dialler: send me these runs of region `arg`.
    Fetch = 5,
    /// Either: bytes of operation `op` from byte `arg` of its row.
    Data = 6,
    /// Listener: all of `op` has landed.
    Ack = 7,
    /// Listener: not `op`. `arg`: [`nack`].
    Nack = 8,
    /// Dialler: `op` is over.
    Cancel = 9,
    /// Listener: nothing of `op` will move any more.
    Still = 10,
    /// Listener (mapped memory): `op` may write.
    Ready = 11,
    /// Dialler (mapped memory): `arg` bytes of `op` lie in place.
    Doorbell = 12,
    /// Listener (mapped memory): stop `op`. `arg`: [`nack`].
    Revoke = 13,
    /// Dialler (mapped memory): `op` does not write and never will.
    Revoked = 14,
    /// Dialler: as `Open`, under a grant. Payload: the grant, how many runs there are here, the runs; where the listener copies, the
    /// dialler's region and its runs after that.
    OpenUnder = 15,
}

impl Word {
    fn of(byte: u8) -> Option<Self> {
        use Word::*;
        let all = [
            Hello, Welcome, Reject, Open, Fetch, Data, Ack, Nack, Cancel, Still, Ready, Doorbell, Revoke, Revoked,
            OpenUnder,
        ];
        all.into_iter().find(|word| *word as u8 == byte)
    }
}

/// Why a listener rejects.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Denial {
    Version = 1,
    Epoch = 2,
    Token = 3,
    Full = 4,
}

impl Denial {
    /// What the dialler makes of it.
    pub(crate) fn read(arg: u64, version: u64) -> Gone {
        match arg {
            1 => Gone::Version { ours: VERSION, theirs: version as u16 },
            2 => Gone::Epoch,
            3 => Gone::Denied,
            4 => Gone::Full,
            _ => Gone::Protocol("rejected for no known reason"),
        }
    }
}

/// Number that says why an operation is refused.
pub(crate) fn nack(why: &Failure) -> u64 {
    match why {
        Failure::Corrupt => 1,
        Failure::Refused(Refusal::Busy) => 2,
        Failure::Refused(Refusal::OutOfRange) => 3,
        Failure::Refused(Refusal::Duplicate) => 5,
        Failure::Refused(Refusal::NotGranted) => 6,
        _ => 4,
    }
}

/// What that number says.
pub(crate) fn read_nack(arg: u64) -> Failure {
    match arg {
        1 => Failure::Corrupt,
        2 => Failure::Refused(Refusal::Busy),
        3 => Failure::Refused(Refusal::OutOfRange),
        5 => Failure::Refused(Refusal::Duplicate),
        6 => Failure::Refused(Refusal::NotGranted),
        _ => Failure::Refused(Refusal::Revoked),
    }
}

/// A frame without its payload.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Header {
    pub(crate) word: Word,
    pub(crate) op: u64,
    pub(crate) arg: u64,
    pub(crate) bytes: u32,
    pub(crate) sum: u32,
}

impl Header {
    pub(crate) fn encode(&self) -> [u8; HEADER] {
        let mut bytes = [0_u8; HEADER];
        bytes[..4].copy_from_slice(&MAGIC);
        bytes[4..6].copy_from_slice(&VERSION.to_le_bytes());
        bytes[6] = self.word as u8;
        bytes[8..16].copy_from_slice(&self.op.to_le_bytes());
        bytes[16..24].copy_from_slice(&self.arg.to_le_bytes());
        bytes[24..28].copy_from_slice(&self.bytes.to_le_bytes());
        bytes[28..32].copy_from_slice(&self.sum.to_le_bytes());
        let sum = crc32c::crc32c(&bytes[..32]);
        bytes[32..].copy_from_slice(&sum.to_le_bytes());
        bytes
    }

    pub(crate) fn decode(bytes: &[u8; HEADER]) -> Result<Self, Gone> {
        let broken = |_: TransportError| Gone::Protocol("a frame's header is cut");
        if bytes[..4] != MAGIC {
            return Err(Gone::Protocol("what came is not a frame"));
        }
        let mut reader = Reader::new(&bytes[4..]);
        let theirs = reader.u16().map_err(broken)?;
        let word = reader.u8().map_err(broken)?;
        reader.u8().map_err(broken)?;
        let (op, arg) = (reader.u64().map_err(broken)?, reader.u64().map_err(broken)?);
        let (length, sum) = (reader.u32().map_err(broken)?, reader.u32().map_err(broken)?);
        if reader.u32().map_err(broken)? != crc32c::crc32c(&bytes[..32]) {
            return Err(Gone::Protocol("a frame's header is damaged"));
        }
        // A rejection is understood whatever its version: it says which.
        if theirs != VERSION && word != Word::Reject as u8 {
            return Err(Gone::Version { ours: VERSION, theirs });
        }
        let word = Word::of(word).ok_or(Gone::Protocol("a frame of unknown meaning"))?;
        let most = if word == Word::Data { CHUNK_BYTES } else { CONTROL_BYTES_MAX };
        if length as usize > most || (word == Word::Data && length == 0) {
            return Err(Gone::Protocol("a frame's length is out of bounds"));
        }
        Ok(Self { word, op, arg, bytes: length, sum })
    }
}

/// A whole control frame.
pub(crate) fn control(word: Word, op: u64, arg: u64, payload: &[u8]) -> Vec<u8> {
    let header = Header { word, op, arg, bytes: payload.len() as u32, sum: crc32c::crc32c(payload) };
    let mut bytes = header.encode().to_vec();
    bytes.extend_from_slice(payload);
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_header_is_laid_out_as_stated() {
        let bytes = control(Word::Ack, 0x0102, 0x0304, b"123456789");
        assert_eq!(&bytes[..8], b"PSTK\x02\x00\x07\x00");
        assert_eq!(&bytes[8..24], [2, 1, 0, 0, 0, 0, 0, 0, 4, 3, 0, 0, 0, 0, 0, 0]);
        assert_eq!(&bytes[24..28], [9, 0, 0, 0]);
        // The check value of CRC-32C (RFC 3720's polynomial) for these nine digits.
        assert_eq!(&bytes[28..32], 0xe306_9283_u32.to_le_bytes());
        assert_eq!(&bytes[36..], b"123456789");
    }

    #[test]
    fn no_flipped_bit_of_a_header_goes_unnoticed() {
        let good = Header { word: Word::Data, op: 3, arg: 4096, bytes: 65_536, sum: 7 };
        assert_eq!(Header::decode(&good.encode()), Ok(good));
        for bit in 0..HEADER * 8 {
            let mut bytes = good.encode();
            bytes[bit / 8] ^= 1 << (bit % 8);
            assert!(Header::decode(&bytes).is_err(), "bit {bit}");
        }
    }

    #[test]
    fn lengths_out_of_bounds_are_refused_though_the_checksum_is_right() {
        for (word, bytes) in [(Word::Data, 0), (Word::Data, CHUNK_BYTES + 1), (Word::Open, CONTROL_BYTES_MAX + 1)] {
            let header = Header { word, op: 1, arg: 0, bytes: bytes as u32, sum: 0 };
            assert!(matches!(Header::decode(&header.encode()), Err(Gone::Protocol(_))));
        }
    }
}
