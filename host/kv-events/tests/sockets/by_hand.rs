//! ZMTP 3.0 written by hand from its specification (RFC 23), apart from the code under test.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::time::Duration;

/// Frames of a message as bytes.
pub fn message(frames: &[&[u8]]) -> Vec<u8> {
    let mut wire = Vec::new();
    for (place, frame) in frames.iter().enumerate() {
        let more = u8::from(place + 1 < frames.len());
        if frame.len() < 256 {
            wire.extend([more, frame.len() as u8]);
        } else {
            wire.push(more | 2);
            wire.extend((frame.len() as u64).to_be_bytes());
        }
        wire.extend_from_slice(frame);
    }
    wire
}

/// Reads one message.
pub fn receive(stream: &mut TcpStream) -> std::io::Result<Vec<Vec<u8>>> {
    let mut frames = Vec::new();
    loop {
        let mut flags = [0];
        stream.read_exact(&mut flags)?;
        let mut len = [0; 8];
        match flags[0] & 2 {
            0 => stream.read_exact(&mut len[7..])?,
            _ => stream.read_exact(&mut len)?,
        }
        let mut frame = vec![0; usize::try_from(u64::from_be_bytes(len)).unwrap()];
        stream.read_exact(&mut frame)?;
        frames.push(frame);
        if flags[0] & 1 == 0 {
            return Ok(frames);
        }
    }
}

/// Greets as version 3.1 does, which is what today's libzmq says.
pub fn greet(stream: &mut TcpStream, kind: &str) {
    stream.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
    let mut greeting = [0; 64];
    greeting[0] = 0xff;
    greeting[9] = 0x7f;
    greeting[10..12].copy_from_slice(&[3, 1]);
    greeting[12..16].copy_from_slice(b"NULL");
    stream.write_all(&greeting).unwrap();
    let mut theirs = [0; 64];
    stream.read_exact(&mut theirs).unwrap();
    assert_eq!((theirs[0], theirs[9], theirs[10], &theirs[12..17]), (0xff, 0x7f, 3, &b"NULL\0"[..]));
    let mut ready = b"\x05READY\x0bSocket-Type\0\0\0".to_vec();
    ready.push(kind.len() as u8);
    ready.extend(kind.bytes());
    ready.extend(b"\x08Identity\0\0\0\0");
    stream.write_all(&[4, ready.len() as u8]).unwrap();
    stream.write_all(&ready).unwrap();
    let mut head = [0; 2];
    stream.read_exact(&mut head).unwrap();
    assert_eq!(head[0], 4, "a command");
    let mut theirs = vec![0; usize::from(head[1])];
    stream.read_exact(&mut theirs).unwrap();
    assert!(theirs.starts_with(b"\x05READY"));
}

/// A publisher of the test's own.
pub struct Peer {
    pub publish: TcpListener,
    pub replay: TcpListener,
}

impl Peer {
    pub fn open() -> Self {
        let open = || TcpListener::bind("127.0.0.1:0").unwrap();
        Self { publish: open(), replay: open() }
    }

    pub fn addresses(&self) -> (SocketAddr, SocketAddr) {
        (self.publish.local_addr().unwrap(), self.replay.local_addr().unwrap())
    }

    /// Waits for a subscriber and its subscription.
    pub fn subscriber(&self) -> TcpStream {
        let (mut stream, _) = self.publish.accept().unwrap();
        greet(&mut stream, "PUB");
        let subscription = receive(&mut stream).unwrap();
        assert_eq!(subscription, [b"\x01kv@"]);
        stream
    }

    /// Answers each question by `answer`, until it says that it is enough.
    pub fn serve(replay: &TcpListener, mut answer: impl FnMut(u64) -> Option<Vec<Vec<u8>>>) {
        loop {
            let (mut stream, _) = replay.accept().unwrap();
            greet(&mut stream, "ROUTER");
            // The peer may leave after one question.
            while let Ok(question) = receive(&mut stream) {
                assert_eq!(question.len(), 2);
                assert!(question[0].is_empty());
                let from = u64::from_be_bytes(question[1][..].try_into().unwrap());
                let Some(messages) = answer(from) else { return };
                for wire in messages {
                    // One that left early does not want the rest.
                    if stream.write_all(&wire).is_err() {
                        break;
                    }
                }
            }
        }
    }
}
