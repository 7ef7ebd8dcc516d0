//! How do frames go through a socket that never waits? Data goes from and to registered memory in place.

use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::net::TcpStream;
use std::os::fd::{AsRawFd as _, OwnedFd, RawFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::frame::{CHUNK_BYTES, HEADER, Header, Word, control};
use crate::memory::Memory;
use crate::scatter::Scatter;
use crate::sys::{self, Slice};
use crate::{Gone, OpId};

/// Pieces of memory one call of the system takes. Linux takes 1,024; more than 64 gain nothing at 64 KiB each.
const PIECES_MAX: usize = 64;
/// Control frames that wait to be sent. Past this nothing more is read from the peer, which therefore must read first.
const WAITING_MAX: usize = 1_024;
/// Frames taken in by one call, so that one busy peer does not keep the others from their turn.
const FRAMES_A_TURN: usize = 64;
/// Bytes written by one call, for the same reason.
const BYTES_A_TURN: usize = 4 * 1024 * 1024;

/// The socket below.
pub(crate) enum Stream {
    Tcp(TcpStream),
    Unix(UnixStream),
}

impl Stream {
    pub(crate) fn fd(&self) -> RawFd {
        match self {
            Self::Tcp(stream) => stream.as_raw_fd(),
            Self::Unix(stream) => stream.as_raw_fd(),
        }
    }
}

/// Bytes of one operation on their way out: an own write, or a peer's read.
struct Sending {
    op: OpId,
    from: Scatter,
    sent: u64,
}

/// Where bytes of one operation go as they come: a peer's write, or an own read.
struct Landing {
    into: Scatter,
    landed: u64,
}

/// What came.
pub(crate) enum Arrived {
    Control(Header, Vec<u8>),
    /// The last byte of an operation, all of it checked.
    Landed(OpId, u64),
    /// A chunk whose checksum is wrong. Its landing is dropped.
    Corrupt(OpId),
}

/// A frame being written. The scatter list keeps its memory alive for as long as that takes.
struct Outgoing {
    head: Vec<u8>,
    /// Scatter list, from where in its row, how many bytes.
    body: Option<(Scatter, u64, usize)>,
    /// Bytes of head and body that have gone.
    sent: usize,
    /// Memory whose memfds go with the first byte.
    shown: Vec<Arc<dyn Memory>>,
}

enum Incoming {
    Header {
        bytes: [u8; HEADER],
        got: usize,
    },
    Control {
        header: Header,
        payload: Vec<u8>,
        got: usize,
    },
    /// `sum` is the checksum of what has come; `is_waste` when nobody waits for the rest.
    Data {
        header: Header,
        got: usize,
        sum: u32,
        is_waste: bool,
    },
}

const NEXT: Incoming = Incoming::Header { bytes: [0; HEADER], got: 0 };

/// One connection.
pub(crate) struct Link {
    stream: Stream,
    current: Option<Outgoing>,
    waiting: VecDeque<Outgoing>,
    /// Take turns, a chunk each.
    sendings: VecDeque<Sending>,
    landings: BTreeMap<OpId, Landing>,
    incoming: Incoming,
    /// Memfds that have come.
    pub(crate) fds: Vec<OwnedFd>,
    /// When bytes last went or came.
    last_life: Instant,
}

impl Link {
    pub(crate) fn new(stream: Stream) -> Self {
        Self {
            stream,
            current: None,
            waiting: VecDeque::new(),
            sendings: VecDeque::new(),
            landings: BTreeMap::new(),
            incoming: NEXT,
            fds: Vec::new(),
            last_life: Instant::now(),
        }
    }

    pub(crate) fn stream(&self) -> &Stream {
        &self.stream
    }

    /// Puts a control frame in line, ahead of all data that is not yet being written.
    pub(crate) fn say(&mut self, word: Word, op: OpId, arg: u64, payload: &[u8]) {
        self.show(word, op, arg, payload, Vec::new());
    }

    /// As [`say`](Self::say), with the memfds of some memory.
    pub(crate) fn show(&mut self, word: Word, op: OpId, arg: u64, payload: &[u8], shown: Vec<Arc<dyn Memory>>) {
        let head = control(word, op.0, arg, payload);
        self.note_debt();
        self.waiting.push_back(Outgoing { head, body: None, sent: 0, shown });
    }

    /// Whether there is anything to write.
    pub(crate) fn wants_to_write(&self) -> bool {
        self.current.is_some() || !self.waiting.is_empty() || !self.sendings.is_empty()
    }

    /// Whether the peer has owed us something for so long without a sign of life.
    pub(crate) fn is_silent(&self, now: Instant, for_long: Duration) -> bool {
        self.is_owed() && now.saturating_duration_since(self.last_life) >= for_long
    }

    /// Whether the peer owes us something to take in: room for bytes, or bytes.
    fn is_owed(&self) -> bool {
        self.wants_to_write() || !matches!(self.incoming, Incoming::Header { got: 0, .. })
    }

    /// Whether control frames wait that the peer has not taken for so long that it must not be heard either.
    fn is_clogged(&self) -> bool {
        self.waiting.len() >= WAITING_MAX
    }

    /// Whether this end may take in more.
    pub(crate) fn wants_to_read(&self) -> bool {
        !self.is_clogged()
    }

    /// Silence counts from when there is something to wait for.
    fn note_debt(&mut self) {
        if !self.is_owed() {
            self.last_life = Instant::now();
        }
    }

    /// Sends the bytes of an operation in turn with the others.
    pub(crate) fn send(&mut self, op: OpId, from: Scatter) {
        self.note_debt();
        self.sendings.push_back(Sending { op, from, sent: 0 });
    }

    /// How many operations send.
    pub(crate) fn sending_count(&self) -> usize {
        self.sendings.len()
    }

    /// Waits for the bytes of an operation.
    pub(crate) fn land(&mut self, op: OpId, into: Scatter) {
        self.landings.insert(op, Landing { into, landed: 0 });
    }

    /// How many operations land.
    pub(crate) fn landing_count(&self) -> usize {
        self.landings.len()
    }

    /// Whether this operation lands.
    pub(crate) fn is_landing(&self, op: OpId) -> bool {
        self.landings.contains_key(&op)
    }

    /// Stops sending bytes of an operation. A chunk that has begun is finished: the stream would be unreadable otherwise.
    pub(crate) fn stop_sending(&mut self, op: OpId) {
        self.sendings.retain(|sending| sending.op != op);
    }

    /// Writes until the socket is full or the turn is over. Returns whether anything went.
    pub(crate) fn write(&mut self) -> Result<bool, Gone> {
        let mut total = 0;
        while total < BYTES_A_TURN {
            if self.current.is_none() {
                self.current = self.next_frame();
            }
            let Some(frame) = &mut self.current else { break };
            let slices = frame.left();
            let fds: Vec<RawFd> = if frame.sent == 0 {
                frame.shown.iter().filter_map(|memory| memory.memfd().map(|memfd| memfd.as_raw_fd())).collect()
            } else {
                Vec::new()
            };
            // SAFETY: the slices lie in the frame's head and in memory that its scatter list keeps mapped.
            match unsafe { sys::send(self.stream.fd(), &slices, &fds) } {
                Ok(went) => {
                    frame.sent += went;
                    total += went;
                    if frame.sent == frame.bytes() {
                        self.current = None;
                    }
                }
                Err(fault) if fault.kind() == io::ErrorKind::WouldBlock => break,
                Err(fault) if fault.kind() == io::ErrorKind::Interrupted => {}
                Err(fault) => return Err(lost(&fault)),
            }
        }
        if total > 0 {
            self.last_life = Instant::now();
        }
        Ok(total > 0)
    }

    fn next_frame(&mut self) -> Option<Outgoing> {
        if let Some(frame) = self.waiting.pop_front() {
            return Some(frame);
        }
        let mut sending = self.sendings.pop_front()?;
        let mut slices = Vec::with_capacity(PIECES_MAX);
        let bytes = sending.from.slices(sending.sent, CHUNK_BYTES, PIECES_MAX - 1, &mut slices);
        let header =
            Header { word: Word::Data, op: sending.op.0, arg: sending.sent, bytes: bytes as u32, sum: sum(0, &slices) };
        let body = Some((sending.from.clone(), sending.sent, bytes));
        sending.sent += bytes as u64;
        if sending.sent < sending.from.bytes() {
            self.sendings.push_back(sending);
        }
        Some(Outgoing { head: header.encode().to_vec(), body, sent: 0, shown: Vec::new() })
    }

    /// Takes in what has come, up to the next control frame, until the socket is empty or the turn is over. Returns whether anything came.
    pub(crate) fn read(&mut self, arrived: &mut Vec<Arrived>) -> Result<bool, Gone> {
        let mut frames = 0;
        let mut moved = false;
        let mut slices: Vec<Slice> = Vec::with_capacity(PIECES_MAX);
        let mut discarded = Vec::new();
        while frames < FRAMES_A_TURN && !self.is_clogged() {
            slices.clear();
            self.room(&mut slices, &mut discarded);
            let asked: usize = slices.iter().map(|slice| slice.iov_len).sum();
            let got = if asked == 0 {
                0
            } else {
                // SAFETY: the slices lie in our own buffers or in memory that a landing's scatter list keeps mapped.
                match unsafe { sys::receive(self.stream.fd(), &slices, &mut self.fds) } {
                    Ok(0) => return Err(Gone::Closed),
                    Ok(got) => got,
                    Err(fault) if fault.kind() == io::ErrorKind::WouldBlock => break,
                    Err(fault) if fault.kind() == io::ErrorKind::Interrupted => continue,
                    Err(fault) => return Err(lost(&fault)),
                }
            };
            if self.fds.len() > sys::FDS_MAX {
                return Err(Gone::Protocol("more descriptors than regions"));
            }
            moved |= got > 0;
            frames += usize::from(self.take(got, &slices, arrived)?);
            if matches!(arrived.last(), Some(Arrived::Control(..))) {
                // What it says decides where the bytes after it go.
                break;
            }
        }
        if moved {
            self.last_life = Instant::now();
        }
        Ok(moved)
    }

    /// Says that nothing more will come from here. What was said before still arrives.
    pub(crate) fn finish(&self) {
        let how = std::net::Shutdown::Write;
        // Should it fail, the connection is gone anyway.
        let _ = match &self.stream {
            Stream::Tcp(stream) => stream.shutdown(how),
            Stream::Unix(stream) => stream.shutdown(how),
        };
    }

    /// Throws away what comes: to close with bytes unread would take back what was said. Returns whether anything came.
    pub(crate) fn discard(&mut self) -> Result<bool, Gone> {
        let mut bytes = [0_u8; 16 * 1024];
        let slice = Slice { iov_base: bytes.as_mut_ptr().cast(), iov_len: bytes.len() };
        // SAFETY: a buffer of our own.
        match unsafe { sys::receive(self.stream.fd(), &[slice], &mut self.fds) } {
            Ok(0) => Err(Gone::Closed),
            Ok(_) => {
                self.fds.clear();
                Ok(true)
            }
            Err(fault) if matches!(fault.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) => Ok(false),
            Err(fault) => Err(lost(&fault)),
        }
    }

    /// Where the next bytes go.
    fn room(&mut self, slices: &mut Vec<Slice>, discarded: &mut Vec<u8>) {
        let piece = |bytes: &mut [u8]| Slice { iov_base: bytes.as_mut_ptr().cast(), iov_len: bytes.len() };
        match &mut self.incoming {
            Incoming::Header { bytes, got } => slices.push(piece(&mut bytes[*got..])),
            Incoming::Control { payload, got, .. } => slices.push(piece(&mut payload[*got..])),
            Incoming::Data { header, got, is_waste, .. } => {
                let left = header.bytes as usize - *got;
                match self.landings.get(&OpId(header.op)).filter(|_| !*is_waste) {
                    Some(landing) => {
                        landing.into.slices(header.arg + *got as u64, left, PIECES_MAX, slices);
                    }
                    // Nobody waits for it any more: read so that the next frame can be.
                    None => {
                        discarded.resize(CHUNK_BYTES, 0);
                        slices.push(piece(&mut discarded[..left]));
                    }
                }
            }
        }
    }

    /// Counts in what has come. Returns whether that completes a frame.
    fn take(&mut self, came: usize, slices: &[Slice], arrived: &mut Vec<Arrived>) -> Result<bool, Gone> {
        match &mut self.incoming {
            Incoming::Header { bytes, got } => {
                *got += came;
                if *got < HEADER {
                    return Ok(false);
                }
                let header = Header::decode(bytes)?;
                self.incoming = if header.word == Word::Data {
                    let is_waste = !self.expects(&header)?;
                    Incoming::Data { header, got: 0, sum: 0, is_waste }
                } else {
                    Incoming::Control { header, payload: vec![0; header.bytes as usize], got: 0 }
                };
                Ok(false)
            }
            Incoming::Control { header, payload, got } => {
                *got += came;
                if *got < payload.len() {
                    return Ok(false);
                }
                if crc32c::crc32c(payload) != header.sum {
                    return Err(Gone::Protocol("a control frame is damaged"));
                }
                arrived.push(Arrived::Control(*header, std::mem::take(payload)));
                self.incoming = NEXT;
                Ok(true)
            }
            Incoming::Data { header, got, sum: so_far, is_waste } => {
                *so_far = sum(*so_far, &cut(slices, came));
                *got += came;
                if *got < header.bytes as usize {
                    return Ok(false);
                }
                if *is_waste {
                    self.incoming = NEXT;
                    return Ok(true);
                }
                let (op, bytes, is_whole) = (OpId(header.op), u64::from(header.bytes), *so_far == header.sum);
                self.incoming = NEXT;
                let Some(landing) = self.landings.get_mut(&op) else { return Ok(true) };
                landing.landed += bytes;
                let (landed, wanted) = (landing.landed, landing.into.bytes());
                if !is_whole {
                    self.landings.remove(&op);
                    arrived.push(Arrived::Corrupt(op));
                } else if landed == wanted {
                    self.landings.remove(&op);
                    arrived.push(Arrived::Landed(op, landed));
                }
                Ok(true)
            }
        }
    }

    /// Whether somebody waits for this chunk. It must follow the one before it and not reach past the row.
    fn expects(&self, header: &Header) -> Result<bool, Gone> {
        let Some(landing) = self.landings.get(&OpId(header.op)) else { return Ok(false) };
        let left = landing.into.bytes() - landing.landed;
        if header.arg != landing.landed || u64::from(header.bytes) > left {
            return Err(Gone::Protocol("a chunk is out of place"));
        }
        Ok(true)
    }

    /// Drops a landing: bytes that still come for it are thrown away. Returns whether there was one.
    pub(crate) fn drop_landing(&mut self, op: OpId) -> bool {
        if let Incoming::Data { header, is_waste, .. } = &mut self.incoming {
            *is_waste |= header.op == op.0;
        }
        self.landings.remove(&op).is_some()
    }
}

impl Outgoing {
    fn bytes(&self) -> usize {
        self.head.len() + self.body.as_ref().map_or(0, |(_, _, bytes)| *bytes)
    }

    fn left(&self) -> Vec<Slice> {
        let mut slices = Vec::with_capacity(PIECES_MAX);
        if let Some(head) = self.head.get(self.sent..).filter(|head| !head.is_empty()) {
            slices.push(Slice { iov_base: head.as_ptr().cast_mut().cast(), iov_len: head.len() });
        }
        if let Some((from, at, bytes)) = &self.body {
            let gone = self.sent.saturating_sub(self.head.len());
            from.slices(at + gone as u64, bytes - gone, PIECES_MAX - 1, &mut slices);
        }
        slices
    }
}

/// A reset is the other end's word that it has closed; anything else says nothing about it.
fn lost(fault: &io::Error) -> Gone {
    match fault.kind() {
        io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe => Gone::Closed,
        _ => Gone::Unreachable(fault.to_string()),
    }
}

/// The first `bytes` of the slices.
fn cut(slices: &[Slice], bytes: usize) -> Vec<Slice> {
    let mut left = bytes;
    let mut kept = Vec::with_capacity(slices.len());
    for slice in slices {
        let length = slice.iov_len.min(left);
        kept.push(Slice { iov_base: slice.iov_base, iov_len: length });
        left -= length;
    }
    kept
}

/// Continues a CRC-32C over the slices.
fn sum(so_far: u32, slices: &[Slice]) -> u32 {
    slices.iter().filter(|slice| slice.iov_len > 0).fold(so_far, |sum, slice| {
        // SAFETY: the slices lie in memory that the caller's scatter list or buffer keeps mapped. Should somebody write it
        // meanwhile, against `Region`'s contract, the sum is that of some mixture, and the other end will refuse it.
        let bytes = unsafe { std::slice::from_raw_parts(slice.iov_base.cast::<u8>(), slice.iov_len) };
        crc32c::crc32c_append(sum, bytes)
    })
}
