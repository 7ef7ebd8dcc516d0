//! A segment being written: records go into a bounded buffer, the driver writes the buffer out when it has time.
//!
//! ```text
//! open ──append──► open ──complete──► complete
//!   └── no room, too long, `break_off` ──► broken (no record is taken any more; the marker always has room)
//! ```

use std::io::{self, Write};
use std::marker::PhantomData;

use penstock_base::Instant;
use penstock_base::codec::Writer;

use crate::frame::{self, BreakCause, Broken, End, FRAME_BYTES, Outcome, PAYLOAD_BYTES_MAX};
use crate::header::SegmentHeader;
use crate::machine::Machine;
use crate::wire::Encode;

/// Room kept for the marker that ends a segment.
const MARKER_BYTES: usize = FRAME_BYTES + 16;

/// The segment takes no more records: it was broken off for this cause. Open the next one.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("the segment was broken off: {0:?}")]
pub struct Closed(pub BreakCause);

/// See the module.
#[derive(Debug)]
pub struct SegmentWriter<M, W> {
    sink: W,
    /// Appended and not written out.
    buffer: Vec<u8>,
    /// Most bytes in it.
    buffer_bytes_max: usize,
    /// Checksum of the last record.
    chain: u32,
    /// Inputs so far.
    steps: u64,
    /// Records so far.
    records: u64,
    /// Time of the last one.
    now: Instant,
    broken: Option<BreakCause>,
    scratch: Writer,
    machine: PhantomData<fn(M)>,
}

impl<M: Machine, W: Write> SegmentWriter<M, W> {
    /// Writes the header to `sink`. At most `buffer_bytes_max` bytes wait to be written out afterwards.
    ///
    /// # Errors
    /// What the sink says.
    pub fn open(mut sink: W, header: &SegmentHeader, buffer_bytes_max: usize) -> io::Result<Self> {
        let opening = header.to_segment();
        sink.write_all(&opening)?;
        Ok(Self {
            sink,
            buffer: Vec::with_capacity(buffer_bytes_max.max(MARKER_BYTES)),
            buffer_bytes_max: buffer_bytes_max.max(MARKER_BYTES),
            chain: crate::frame::crc32(0, &opening),
            steps: 0,
            records: 0,
            now: header.now,
            broken: None,
            scratch: Writer::new(),
            machine: PhantomData,
        })
    }

    /// Records what is about to go into the machine. Before the step, so that an input that breaks it is on record.
    ///
    /// # Errors
    /// The segment is broken off; this input is not in it.
    pub fn input(&mut self, now: Instant, input: &M::Input) -> Result<(), Closed> {
        self.scratch.clear();
        now.put(&mut self.scratch);
        input.put(&mut self.scratch);
        self.append(frame::KIND_INPUT)?;
        self.steps += 1;
        self.now = now;
        Ok(())
    }

    /// Records what came of it.
    ///
    /// # Errors
    /// The segment is broken off; this outcome is not in it.
    pub fn outcome(&mut self, outcome: &Outcome) -> Result<(), Closed> {
        self.scratch.clear();
        outcome.put(&mut self.scratch);
        self.append(frame::KIND_OUTCOME)
    }

    fn append(&mut self, kind: u8) -> Result<(), Closed> {
        if let Some(cause) = self.broken {
            return Err(Closed(cause));
        }
        let payload = self.scratch.bytes();
        let room = self.buffer_bytes_max - MARKER_BYTES;
        let cause = if payload.len() > PAYLOAD_BYTES_MAX as usize || payload.len() + FRAME_BYTES > room {
            BreakCause::TooLong
        } else if self.buffer.len() + payload.len() + FRAME_BYTES > room {
            BreakCause::Overload
        } else {
            self.chain = frame::append(&mut self.buffer, self.chain, kind, payload);
            self.records += 1;
            return Ok(());
        };
        self.mark_broken(cause);
        Err(Closed(cause))
    }

    fn mark_broken(&mut self, cause: BreakCause) {
        if self.broken.is_none() {
            self.scratch.clear();
            Broken { cause, records: self.records }.put(&mut self.scratch);
            self.chain = frame::append(&mut self.buffer, self.chain, frame::KIND_BROKEN, self.scratch.bytes());
            self.broken = Some(cause);
        }
    }

    /// Bytes that wait to be written out.
    pub fn waiting_bytes(&self) -> usize {
        self.buffer.len()
    }

    /// Why it was broken off, if it was.
    pub fn broken(&self) -> Option<BreakCause> {
        self.broken
    }

    /// Writes out what waits.
    ///
    /// # Errors
    /// What the sink says. The segment cannot go on then: part of a record may be written.
    pub fn write_out(&mut self) -> io::Result<()> {
        self.sink.write_all(&self.buffer)?;
        self.buffer.clear();
        self.sink.flush()
    }

    /// Ends the segment as complete, or as the broken one that it is.
    ///
    /// # Errors
    /// What the sink says.
    pub fn complete(mut self) -> io::Result<W> {
        if self.broken.is_none() {
            self.scratch.clear();
            End { steps: self.steps, now: self.now }.put(&mut self.scratch);
            frame::append(&mut self.buffer, self.chain, frame::KIND_END, self.scratch.bytes());
        }
        self.write_out()?;
        Ok(self.sink)
    }

    /// Ends the segment as broken off.
    ///
    /// # Errors
    /// What the sink says.
    pub fn break_off(mut self, cause: BreakCause) -> io::Result<W> {
        self.mark_broken(cause);
        self.write_out()?;
        Ok(self.sink)
    }
}
