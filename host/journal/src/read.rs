//! A segment being read, record by record. Damage is a typed error at the record that shows it; nothing behind it is returned.

use std::io::{self, Read};

use penstock_base::Instant;
use penstock_base::codec::DecodeError;

use crate::error::JournalError;
use crate::frame::{
    Broken, End, Ending, KIND_ANSWER, KIND_BROKEN, KIND_END, KIND_INPUT, KIND_OBSERVED, KIND_OUTCOME, KIND_SEATED,
    Outcome, PAYLOAD_BYTES_MAX, checksum, crc32,
};
use crate::header::{HEADER_BYTES_MAX, MAGIC, SegmentHeader, VERSION};
use crate::machine::Machine;
use crate::wire::{AnswerRecord, Decode, ObserveFault, Seated, from_bytes};

/// One record.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Record<I> {
    /// What went in.
    Input {
        /// When.
        now: Instant,
        /// What.
        input: I,
    },
    /// What a policy answered in that step.
    Answer(AnswerRecord),
    /// A policy failed on facts in that step.
    Observed(ObserveFault),
    /// What came of it.
    Outcome(Outcome),
    /// What sits in the seats from here on.
    Seated(Box<Seated>),
    /// A record of a later format: skipped by its length.
    Unknown {
        /// Its kind.
        kind: u8,
    },
}

/// See the module.
#[derive(Debug)]
pub struct SegmentReader<R> {
    source: R,
    header: SegmentHeader,
    chain: u32,
    /// Records read so far.
    records: u64,
    steps: u64,
    now: Instant,
    payload: Vec<u8>,
    ending: Option<Ending>,
}

impl<R: Read> SegmentReader<R> {
    /// Reads the header.
    ///
    /// # Errors
    /// Bytes that do not open a segment of this version.
    pub fn open(mut source: R) -> Result<Self, JournalError> {
        let mut opening = Vec::new();
        let mut read = |bytes: usize| -> Result<Vec<u8>, JournalError> {
            let mut part = Vec::new();
            if !fill(&mut source, &mut part, bytes)? {
                return Err(JournalError::Truncated { record: 0 });
            }
            opening.extend_from_slice(&part);
            Ok(part)
        };
        if read(MAGIC.len())? != MAGIC {
            return Err(JournalError::NotASegment);
        }
        let found = word(&read(4)?);
        if found != VERSION {
            return Err(JournalError::Version { found, expected: VERSION });
        }
        let bytes = word(&read(4)?);
        if bytes > HEADER_BYTES_MAX {
            return Err(JournalError::TooLong { record: 0, bytes: u64::from(bytes) });
        }
        let payload = read(bytes as usize)?;
        let expected = crc32(0, &opening);
        let mut sum = Vec::new();
        if !fill(&mut source, &mut sum, 4)? {
            return Err(JournalError::Truncated { record: 0 });
        }
        if word(&sum) != expected {
            return Err(JournalError::Checksum { record: 0 });
        }
        opening.extend_from_slice(&sum);
        let header = SegmentHeader::from_payload(&payload)?;
        let now = header.now;
        let chain = crc32(0, &opening);
        Ok(Self { source, header, chain, records: 0, steps: 0, now, payload, ending: None })
    }

    /// What the segment opens with.
    pub fn header(&self) -> &SegmentHeader {
        &self.header
    }

    /// Records read so far, the one that ends the segment included.
    pub fn records(&self) -> u64 {
        self.records
    }

    /// How the segment ends, once [`Self::next_record`] has returned `None`.
    pub fn ending(&self) -> Option<Ending> {
        self.ending
    }

    /// The next record; `None` at the end of the segment.
    ///
    /// # Errors
    /// The record is damaged, or of the other kind of machine.
    pub fn next_record<M: Machine>(&mut self) -> Result<Option<Record<M::Input>>, JournalError> {
        if self.ending.is_some() {
            return Ok(None);
        }
        if self.header.machine.kind != M::KIND {
            return Err(JournalError::OtherMachine);
        }
        let Some(kind) = self.read_frame()? else {
            self.ending = Some(Ending::CutOff);
            return Ok(None);
        };
        match kind {
            KIND_INPUT => {
                let (now, input) = self.decode::<Stamped<M::Input>>().map(|stamped| (stamped.now, stamped.input))?;
                self.steps += 1;
                self.now = now;
                Ok(Some(Record::Input { now, input }))
            }
            KIND_OUTCOME => Ok(Some(Record::Outcome(self.decode()?))),
            KIND_ANSWER => Ok(Some(Record::Answer(self.decode()?))),
            KIND_OBSERVED => Ok(Some(Record::Observed(self.decode()?))),
            KIND_SEATED => Ok(Some(Record::Seated(Box::new(self.decode()?)))),
            KIND_END => {
                let end: End = self.decode()?;
                if (end.steps, end.now) != (self.steps, self.now) {
                    return Err(self.malformed(DecodeError::Invalid("end")));
                }
                self.finish(Ending::Complete)
            }
            KIND_BROKEN => {
                let Broken { cause, records } = self.decode()?;
                if records + 1 != self.records {
                    return Err(self.malformed(DecodeError::Invalid("number of records")));
                }
                self.finish(Ending::Broken(cause))
            }
            kind => Ok(Some(Record::Unknown { kind })),
        }
    }

    fn finish<T>(&mut self, ending: Ending) -> Result<Option<T>, JournalError> {
        let mut more = Vec::new();
        if fill(&mut self.source, &mut more, 1)? || !more.is_empty() {
            return Err(JournalError::Trailing);
        }
        self.ending = Some(ending);
        Ok(None)
    }

    /// Reads one record into `payload`; its kind. `None` when the bytes end before it.
    fn read_frame(&mut self) -> Result<Option<u8>, JournalError> {
        let record = self.records + 1;
        let mut head = Vec::with_capacity(5);
        if !fill(&mut self.source, &mut head, 5)? {
            return if head.is_empty() { Ok(None) } else { Err(JournalError::Truncated { record }) };
        }
        let (kind, bytes) = (head[0], word(&head[1..]));
        if bytes > PAYLOAD_BYTES_MAX {
            return Err(JournalError::TooLong { record, bytes: u64::from(bytes) });
        }
        let mut sum = Vec::with_capacity(4);
        self.payload.clear();
        if !fill(&mut self.source, &mut self.payload, bytes as usize)? || !fill(&mut self.source, &mut sum, 4)? {
            return Err(JournalError::Truncated { record });
        }
        let expected = checksum(self.chain, kind, &self.payload);
        if word(&sum) != expected {
            return Err(JournalError::Checksum { record });
        }
        self.chain = expected;
        self.records = record;
        Ok(Some(kind))
    }

    fn decode<T: Decode>(&self) -> Result<T, JournalError> {
        from_bytes(&self.payload).map_err(|source| self.malformed(source))
    }

    fn malformed(&self, source: DecodeError) -> JournalError {
        JournalError::Malformed { record: self.records, source }
    }
}

struct Stamped<I> {
    now: Instant,
    input: I,
}

impl<I: Decode> Decode for Stamped<I> {
    fn take(from: &mut penstock_base::codec::Reader<'_>) -> Result<Self, DecodeError> {
        Ok(Self { now: Instant::take(from)?, input: I::take(from)? })
    }
}

/// Appends `bytes` bytes of the source, or as many as there are; were there all? Memory grows with what is there, not with what a
/// damaged length claims.
fn fill(source: &mut impl Read, into: &mut Vec<u8>, bytes: usize) -> io::Result<bool> {
    let before = into.len();
    source.by_ref().take(bytes as u64).read_to_end(into)?;
    Ok(into.len() - before == bytes)
}

fn word(bytes: &[u8]) -> u32 {
    let mut word = [0; 4];
    word.copy_from_slice(&bytes[..4]);
    u32::from_le_bytes(word)
}
