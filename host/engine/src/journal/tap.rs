//! A machine's side of its journal: encodes what happens into a buffer, and hands it over now and then. Never waits.

use std::sync::Arc;

use penstock_base::codec::Writer;
use penstock_base::{Duration, Instant};
use penstock_journal::frame::{KIND_ANSWER, KIND_INPUT, KIND_OBSERVED, KIND_OUTCOME, KIND_SEATED, PAYLOAD_BYTES_MAX};
use penstock_journal::wire::{AnswerHead, Encode, Given, ObserveFault, Seated};
use penstock_journal::{BreakCause, Outcome, SegmentHeader};

use super::SegmentTerms;
use super::queue::{Order, Queue, What};
use crate::metrics::Metrics;

/// Handed over at this size: waking the writer costs more than it writes otherwise.
const HAND_OVER_BYTES: usize = 64 << 10;
/// Handed over at this age: what a process that is killed loses.
const HAND_OVER_AFTER: Duration = Duration::from_ms(200);
/// After a segment that was broken off: the next one opens no sooner. A snapshot takes the machine's time.
const REOPEN_AFTER: Duration = Duration::from_s(1);
/// After the disk failed.
const RETRY_AFTER: Duration = Duration::from_s(10);

/// See the module.
pub(crate) struct Tap {
    queue: Arc<Queue>,
    metrics: Arc<Metrics>,
    log: usize,
    terms: SegmentTerms,
    /// Number of the next segment.
    next_segment: u64,
    open: Option<Open>,
    /// Records that are not handed over.
    buffer: Vec<u8>,
    handed_at: Instant,
    not_before: Instant,
    scratch: Writer,
}

/// The segment that is being written.
#[derive(Clone, Copy)]
struct Open {
    steps: u64,
    /// Of the last step.
    now: Instant,
    /// Of its records.
    bytes: u64,
    /// From which it ends: never less than its opening takes, so that openings do not become most of what is written.
    bytes_max: u64,
}

impl Tap {
    pub(super) fn new(queue: Arc<Queue>, metrics: Arc<Metrics>, log: usize, terms: SegmentTerms) -> Self {
        Self {
            queue,
            metrics,
            log,
            terms,
            next_segment: 0,
            open: None,
            buffer: Vec::new(),
            handed_at: Instant::ZERO,
            not_before: Instant::ZERO,
            scratch: Writer::new(),
        }
    }

    /// Is a segment being written?
    pub fn is_open(&self) -> bool {
        self.open.is_some()
    }

    /// Number of the segment that is to open now, if one is.
    pub fn due(&mut self, now: Instant) -> Option<u64> {
        if self.open.is_some_and(|open| open.bytes >= open.bytes_max) {
            self.complete();
        }
        let is_due = self.open.is_none() && now >= self.not_before && self.queue.has_room();
        is_due.then_some(self.next_segment)
    }

    /// Opens a segment, unless there is no room for it now.
    pub fn open(&mut self, mut header: SegmentHeader, since: Instant, now: Instant) {
        header.build.clone_from(&self.terms.build);
        header.context_tokens_max = self.terms.context_tokens_max;
        let bytes_max = self.terms.bytes.max((header.config.len() + header.snapshot.len()) as u64);
        self.metrics.journal_snapshot(now.since(since));
        if self.put(What::Open(Box::new(header))) {
            self.open = Some(Open { steps: 0, now: since, bytes: 0, bytes_max });
            self.next_segment += 1;
            self.handed_at = since;
        } else {
            self.not_before = since + REOPEN_AFTER;
        }
    }

    /// What is about to go into the machine.
    pub fn input<I: Encode>(&mut self, now: Instant, input: &I) {
        if let Some(open) = &mut self.open {
            open.steps += 1;
            open.now = now;
            self.append(KIND_INPUT, |out| {
                now.put(out);
                input.put(out);
            });
        }
    }

    /// What a policy answered.
    pub fn answer(&mut self, head: AnswerHead, given: Given<'_>) {
        self.append(KIND_ANSWER, |out| {
            head.put(out);
            given.put(out);
        });
    }

    /// A policy failed on facts.
    pub fn observed(&mut self, fault: ObserveFault) {
        self.append(KIND_OBSERVED, |out| fault.put(out));
    }

    /// Others sit in the seats, or what they remember is another thing.
    pub fn seated(&mut self, seated: &Seated) {
        self.append(KIND_SEATED, |out| seated.put(out));
    }

    /// What came of the step.
    pub fn outcome(&mut self, outcome: Outcome) {
        self.append(KIND_OUTCOME, |out| outcome.put(out));
        if self.buffer.len() >= HAND_OVER_BYTES {
            self.hand_over();
        }
    }

    /// Room for encoding.
    pub fn scratch(&mut self) -> &mut Writer {
        &mut self.scratch
    }

    /// Called after every turn of the machine's loop.
    pub fn between_steps(&mut self, now: Instant) {
        if self.open.is_some() && self.queue.has_failed(self.log) {
            // The writer has ended the segment: what would follow is of no use.
            self.open = None;
            self.buffer.clear();
            self.not_before = now + RETRY_AFTER;
        } else if !self.buffer.is_empty()
            && (self.buffer.len() >= HAND_OVER_BYTES || now.since(self.handed_at) >= HAND_OVER_AFTER)
        {
            self.handed_at = now;
            self.hand_over();
        }
    }

    /// Ends the segment as broken off.
    pub fn break_off(&mut self, cause: BreakCause) {
        if self.open.is_some() {
            self.hand_over();
        }
        if let Some(open) = self.open.take() {
            self.not_before = open.now;
            self.put(What::Broken(cause));
        }
    }

    fn complete(&mut self) {
        self.hand_over();
        if let Some(Open { steps, now, .. }) = self.open.take() {
            self.put(What::Complete { steps, now });
        }
    }

    fn append(&mut self, kind: u8, encode: impl FnOnce(&mut Writer)) {
        let Some(open) = &mut self.open else { return };
        self.scratch.clear();
        encode(&mut self.scratch);
        let payload = self.scratch.bytes();
        if payload.len() > PAYLOAD_BYTES_MAX as usize {
            return self.break_off(BreakCause::TooLong);
        }
        open.bytes += (payload.len() + penstock_journal::frame::FRAME_BYTES) as u64;
        self.buffer.push(kind);
        self.buffer.extend_from_slice(&(payload.len() as u32).to_le_bytes());
        self.buffer.extend_from_slice(payload);
    }

    /// Hands the buffer over. Where it does not fit, the segment has ended before it.
    fn hand_over(&mut self) {
        if self.buffer.is_empty() {
            return;
        }
        let bytes = std::mem::take(&mut self.buffer);
        self.buffer.reserve(bytes.len().min(HAND_OVER_BYTES));
        if !self.put(What::Records(bytes))
            && let Some(open) = self.open.take()
        {
            self.not_before = open.now + REOPEN_AFTER;
            self.put(What::Broken(BreakCause::Overload));
        }
    }

    fn put(&self, what: What) -> bool {
        self.queue.put(Order { log: self.log, what })
    }
}

impl Drop for Tap {
    fn drop(&mut self) {
        self.complete();
    }
}
