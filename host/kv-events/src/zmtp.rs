//! How do messages travel between ZeroMQ sockets? ZMTP 3.0 over TCP with the NULL mechanism, which libzmq speaks with everybody.
//!
//! Written here rather than taken from the crate `zeromq`: that one reserves whatever length a peer names, and holds up to 100,000 messages
//! of any size for each peer, neither of which can be set. All that is needed is a greeting, one command and frames.

use std::time::Duration;

use bytes::{Buf as _, Bytes, BytesMut};
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};
use tokio::time::timeout;

use crate::error::PeerFault;
use crate::limits::{COMMAND_BYTES_MAX, FRAMES_MAX, PATIENCE, PAYLOAD_BYTES_MAX};

const MORE: u8 = 1;
const LONG: u8 = 2;
const COMMAND: u8 = 4;
const GREETING_BYTES: usize = 64;
/// Longest message: a payload, a topic, and what stands around them.
const MESSAGE_BYTES_MAX: usize = PAYLOAD_BYTES_MAX + (1 << 16);

/// What a socket is to its peer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Kind {
    Pub,
    Sub,
    Router,
    Dealer,
}

impl Kind {
    fn name(self) -> &'static str {
        match self {
            Self::Pub => "PUB",
            Self::Sub => "SUB",
            Self::Router => "ROUTER",
            Self::Dealer => "DEALER",
        }
    }

    fn peers(self) -> &'static [&'static str] {
        match self {
            Self::Pub => &["SUB", "XSUB"],
            Self::Sub => &["PUB", "XPUB"],
            Self::Router => &["DEALER", "REQ", "ROUTER"],
            Self::Dealer => &["ROUTER", "REP", "DEALER"],
        }
    }
}

/// The frames of a message as bytes of the wire.
pub(crate) fn encode(frames: &[&[u8]]) -> Bytes {
    let mut wire = Vec::with_capacity(frames.iter().map(|frame| frame.len() + 9).sum());
    for (place, frame) in frames.iter().enumerate() {
        let more = if place + 1 < frames.len() { MORE } else { 0 };
        write_frame(&mut wire, more, frame);
    }
    wire.into()
}

fn write_frame(wire: &mut Vec<u8>, flags: u8, frame: &[u8]) {
    match u8::try_from(frame.len()) {
        Ok(len) => wire.extend([flags, len]),
        Err(_) => {
            wire.push(flags | LONG);
            wire.extend((frame.len() as u64).to_be_bytes());
        }
    }
    wire.extend_from_slice(frame);
}

/// The receiving half of a connection.
pub(crate) struct Inbound<R> {
    stream: R,
    held: BytesMut,
    /// Frames of a message that is not whole yet.
    frames: Vec<Bytes>,
    frames_bytes: usize,
}

/// What arrived.
pub(crate) enum Arrived {
    Message(Vec<Bytes>),
    Command(Bytes),
}

impl<R: AsyncRead + Unpin> Inbound<R> {
    pub fn new(stream: R) -> Self {
        Self { stream, held: BytesMut::new(), frames: Vec::new(), frames_bytes: 0 }
    }

    async fn fill(&mut self) -> Result<(), PeerFault> {
        self.held.reserve(4_096);
        match self.stream.read_buf(&mut self.held).await? {
            0 => Err(PeerFault::Closed),
            _ => Ok(()),
        }
    }

    /// The next message or command. May be dropped half way: nothing is lost. A length beyond the limit ends the connection before anything
    /// is reserved for it.
    pub async fn next(&mut self) -> Result<Arrived, PeerFault> {
        loop {
            if let Some(arrived) = self.parse()? {
                return Ok(arrived);
            }
            self.fill().await?;
        }
    }

    /// The next message; commands of later versions are passed over.
    pub async fn message(&mut self) -> Result<Vec<Bytes>, PeerFault> {
        loop {
            if let Arrived::Message(frames) = self.next().await? {
                return Ok(frames);
            }
        }
    }

    fn parse(&mut self) -> Result<Option<Arrived>, PeerFault> {
        loop {
            let Some(&flags) = self.held.first() else { return Ok(None) };
            if flags & !(MORE | LONG | COMMAND) != 0 {
                return Err(PeerFault::Protocol("a frame with unknown flags"));
            }
            let (head, len) = if flags & LONG == 0 {
                let Some(&len) = self.held.get(1) else { return Ok(None) };
                (2, u64::from(len))
            } else {
                let Some(len) = self.held.get(1..9) else { return Ok(None) };
                (9, len.iter().fold(0, |len, byte| len << 8 | u64::from(*byte)))
            };
            let is_command = flags & COMMAND != 0;
            let max = if is_command { COMMAND_BYTES_MAX } else { MESSAGE_BYTES_MAX - self.frames_bytes };
            let len = usize::try_from(len).ok().filter(|len| *len <= max);
            let len = len.ok_or(PeerFault::Protocol("a frame is longer than allowed"))?;
            if self.held.len() < head + len {
                return Ok(None);
            }
            self.held.advance(head);
            let frame = self.held.split_to(len).freeze();
            if is_command {
                return Ok(Some(Arrived::Command(frame)));
            }
            if self.frames.len() >= FRAMES_MAX {
                return Err(PeerFault::Protocol("a message has too many frames"));
            }
            self.frames_bytes += len;
            self.frames.push(frame);
            if flags & MORE == 0 {
                self.frames_bytes = 0;
                return Ok(Some(Arrived::Message(std::mem::take(&mut self.frames))));
            }
        }
    }
}

/// Greets the peer and learns what it is. Both sides do the same.
pub(crate) async fn shake_hands<R, W>(inbound: &mut Inbound<R>, outbound: &mut W, kind: Kind) -> Result<(), PeerFault>
where
    R: AsyncRead + Unpin,
    W: AsyncWrite + Unpin,
{
    let work = async {
        outbound.write_all(&greeting()).await?;
        while inbound.held.len() < GREETING_BYTES {
            inbound.fill().await?;
            // Whoever speaks HTTP or older ZeroMQ is told from the first bytes, and not waited for.
            if inbound.held[0] != 0xff || inbound.held.get(9).is_some_and(|byte| byte & 1 == 0) {
                return Err(PeerFault::Protocol("no greeting"));
            }
        }
        let theirs = inbound.held.split_to(GREETING_BYTES);
        if theirs[10] < 3 {
            return Err(PeerFault::Protocol("a version before 3"));
        }
        let mechanism: Vec<u8> = theirs[12..32].iter().copied().take_while(|byte| *byte != 0).collect();
        if mechanism != b"NULL" {
            return Err(PeerFault::Mechanism(String::from_utf8_lossy(&mechanism).into_owned()));
        }
        outbound.write_all(&ready(kind)).await?;
        let Arrived::Command(command) = inbound.next().await? else {
            return Err(PeerFault::Protocol("a message before READY"));
        };
        let theirs = socket_type(&command).ok_or(PeerFault::Protocol("no READY with a socket type"))?;
        if !kind.peers().iter().any(|peer| peer.as_bytes() == theirs) {
            return Err(PeerFault::Kind(String::from_utf8_lossy(theirs).into_owned()));
        }
        Ok(())
    };
    in_time(PATIENCE, work).await
}

pub(crate) async fn in_time<T>(
    time: Duration,
    work: impl Future<Output = Result<T, PeerFault>>,
) -> Result<T, PeerFault> {
    timeout(time, work).await.map_err(|_| PeerFault::Silent)?
}

/// Version 3.0: subscriptions are messages then, for every libzmq since 4.0.
fn greeting() -> [u8; GREETING_BYTES] {
    let mut greeting = [0; GREETING_BYTES];
    greeting[0] = 0xff;
    greeting[9] = 0x7f;
    greeting[10] = 3;
    greeting[12..16].copy_from_slice(b"NULL");
    greeting
}

fn ready(kind: Kind) -> Vec<u8> {
    let mut command = b"\x05READY".to_vec();
    let identity: &[(&str, &str)] = if kind == Kind::Dealer { &[("Identity", "")] } else { &[] };
    for (name, value) in [("Socket-Type", kind.name())].iter().chain(identity) {
        command.push(name.len() as u8);
        command.extend(name.bytes());
        command.extend((value.len() as u32).to_be_bytes());
        command.extend(value.bytes());
    }
    let mut wire = Vec::new();
    write_frame(&mut wire, COMMAND, &command);
    wire
}

fn socket_type(command: &[u8]) -> Option<&[u8]> {
    let mut rest = command.strip_prefix(b"\x05READY")?;
    while let [len, tail @ ..] = rest {
        let (name, tail) = tail.split_at_checked(usize::from(*len))?;
        let (len, tail) = tail.split_first_chunk::<4>()?;
        let (value, tail) = tail.split_at_checked(u32::from_be_bytes(*len) as usize)?;
        if name.eq_ignore_ascii_case(b"Socket-Type") {
            return Some(value);
        }
        rest = tail;
    }
    None
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn read(bytes: &[u8]) -> Vec<Vec<Bytes>> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().expect("a runtime");
        runtime.block_on(async {
            let mut inbound = Inbound::new(bytes);
            let mut messages = Vec::new();
            while let Ok(message) = inbound.message().await {
                messages.push(message);
                assert!(inbound.held.capacity() <= bytes.len() + 16_384, "what is held follows what came");
            }
            assert!(inbound.held.capacity() <= bytes.len() + 16_384, "what is held follows what came");
            messages
        })
    }

    proptest! {
        #[test]
        fn any_bytes_are_read_or_refused(bytes in proptest::collection::vec(any::<u8>(), 0..2_000)) {
            read(&bytes);
        }

        #[test]
        fn messages_come_back(frames in proptest::collection::vec(proptest::collection::vec(any::<u8>(), 0..400), 1..8)) {
            let slices: Vec<&[u8]> = frames.iter().map(Vec::as_slice).collect();
            let wire = [encode(&slices), encode(&slices)].concat();
            let messages = read(&wire);
            prop_assert_eq!(messages.len(), 2);
            prop_assert!(messages.iter().all(|message| message.iter().eq(frames.iter())));
        }

        #[test]
        fn any_greeting_is_taken_or_refused(mut bytes in proptest::collection::vec(any::<u8>(), 0..200), start in 0..3_usize) {
            // Some begin as they should, so that what comes after is reached.
            let good = [&greeting()[..], &ready(Kind::Pub)].concat();
            let keep = [0, GREETING_BYTES, good.len()][start];
            bytes.splice(0..0, good[..keep].iter().copied());
            let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().expect("a runtime");
            let taken = runtime.block_on(async {
                let mut inbound = Inbound::new(&bytes[..]);
                shake_hands(&mut inbound, &mut tokio::io::sink(), Kind::Sub).await.is_ok()
            });
            prop_assert!(taken || start < 2);
        }
    }

    /// A peer that announces a frame of 2^62 bytes.
    #[test]
    fn a_huge_length_reserves_nothing() {
        let wire = [&[LONG][..], &(1_u64 << 62).to_be_bytes(), b"x"].concat();
        assert!(read(&wire).is_empty());
    }

    /// From the specification (RFC 23): greeting and READY of a PUB socket.
    #[test]
    fn the_first_bytes_are_as_specified() {
        assert_eq!(greeting()[..16], *b"\xff\0\0\0\0\0\0\0\0\x7f\x03\0NULL");
        assert_eq!(ready(Kind::Pub), *b"\x04\x19\x05READY\x0bSocket-Type\0\0\0\x03PUB");
    }
}
