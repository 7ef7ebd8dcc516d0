//! What does a guest reach outside itself? Memory under a cap, and the two functions of `penstock:types/host`.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use wasmtime::ResourceLimiter;

use crate::backstop::CallTime;
use crate::bindings::life;
use crate::fault::{OverCap, TooManyHostCalls, plain};
use crate::limits::{
    CORE_INSTANCES_MAX, COUNTER_NAME_BYTES_MAX, COUNTERS_MAX, HOST_CALLS_MAX, LOG_CALLS_PER_LINE, LOG_LINES_MAX,
    LOG_TEXT_BYTES_MAX, MEMORIES_MAX, TABLE_ELEMENTS_MAX,
};

/// How urgent a line is.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum LogLevel {
    /// Level 0.
    Error,
    /// Level 1.
    Warning,
    /// Level 2.
    Information,
    /// Level 3 and above.
    Debug,
}

/// A line that a policy wrote.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct LogLine {
    /// How urgent.
    pub level: LogLevel,
    /// At most 1 KiB, without control characters.
    pub text: String,
}

/// What a seat's policy said and counted since it was last drained. Outlives the instance that said it.
#[derive(Debug)]
pub(crate) struct Notes {
    pub lines: VecDeque<LogLine>,
    pub lines_dropped: u64,
    /// Lines that may still be written.
    credit: usize,
    /// Names and sums, in the order they appeared. Names stay, sums are taken.
    pub counters: Vec<(String, u64)>,
    pub counts_dropped: u64,
}

impl Default for Notes {
    fn default() -> Self {
        Self {
            lines: VecDeque::new(),
            lines_dropped: 0,
            credit: LOG_LINES_MAX,
            counters: Vec::new(),
            counts_dropped: 0,
        }
    }
}

impl Notes {
    /// Lets the credit for lines grow back, at every call of the seat.
    pub fn earn(&mut self, calls: u64) {
        if calls.is_multiple_of(LOG_CALLS_PER_LINE) {
            self.credit = (self.credit + 1).min(LOG_LINES_MAX);
        }
    }

    fn log(&mut self, level: u8, text: String) {
        if self.credit == 0 || self.lines.len() >= LOG_LINES_MAX {
            self.lines_dropped = self.lines_dropped.saturating_add(1);
            return;
        }
        self.credit -= 1;
        let level = match level {
            0 => LogLevel::Error,
            1 => LogLevel::Warning,
            2 => LogLevel::Information,
            _ => LogLevel::Debug,
        };
        self.lines.push_back(LogLine { level, text: plain(text, LOG_TEXT_BYTES_MAX) });
    }

    fn count(&mut self, name: &str, by: u64) {
        if let Some((_, sum)) = self.counters.iter_mut().find(|(known, _)| known == name) {
            *sum = sum.saturating_add(by);
        } else if self.counters.len() < COUNTERS_MAX && is_counter_name(name) {
            self.counters.push((name.to_owned(), by));
        } else {
            self.counts_dropped = self.counts_dropped.saturating_add(1);
        }
    }
}

/// Lower-case letters, digits, hyphens and underscores: such a name fits a metric's label anywhere.
fn is_counter_name(name: &str) -> bool {
    let is_allowed = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-' || byte == b'_';
    !name.is_empty() && name.len() <= COUNTER_NAME_BYTES_MAX && name.bytes().all(is_allowed)
}

/// Counts an instance for as long as it lives.
#[derive(Debug)]
pub(crate) struct Alive(Arc<AtomicUsize>);

impl Alive {
    pub fn new(count: &Arc<AtomicUsize>) -> Self {
        count.fetch_add(1, Ordering::Relaxed);
        Self(Arc::clone(count))
    }
}

impl Drop for Alive {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Data of one store.
#[derive(Debug)]
pub(crate) struct Host {
    pub notes: Notes,
    /// Host calls that the present guest call may still make.
    pub calls_left: u32,
    pub call_time: CallTime,
    /// Linear memory that it holds, all memories together.
    pub memory_bytes: usize,
    memory_bytes_max: usize,
    _alive: Alive,
}

impl Host {
    pub fn new(memory_bytes_max: usize, notes: Notes, alive: Alive) -> Self {
        Self { notes, calls_left: 0, call_time: CallTime::default(), memory_bytes: 0, memory_bytes_max, _alive: alive }
    }

    fn called(&mut self) -> wasmtime::Result<()> {
        match self.calls_left.checked_sub(1) {
            Some(left) => {
                self.calls_left = left;
                Ok(())
            }
            None => Err(wasmtime::Error::new(TooManyHostCalls { limit: HOST_CALLS_MAX })),
        }
    }
}

impl life::types::Host for Host {}

impl life::host::Host for Host {
    fn log(&mut self, level: u8, text: String) -> wasmtime::Result<()> {
        self.called()?;
        self.notes.log(level, text);
        Ok(())
    }

    fn count(&mut self, name: String, by: u64) -> wasmtime::Result<()> {
        self.called()?;
        self.notes.count(&name, by);
        Ok(())
    }
}

impl ResourceLimiter for Host {
    fn memory_growing(&mut self, current: usize, desired: usize, maximum: Option<usize>) -> wasmtime::Result<bool> {
        if maximum.is_some_and(|maximum| desired > maximum) && desired <= self.memory_bytes_max {
            // Past what the module itself declared: the guest is told no, and nothing has grown.
            return Ok(false);
        }
        let asked = self.memory_bytes.saturating_add(desired.saturating_sub(current));
        if asked > self.memory_bytes_max {
            let limit = self.memory_bytes_max;
            return Err(wasmtime::Error::new(OverCap { what: "bytes of memory", asked, limit }));
        }
        self.memory_bytes = asked;
        Ok(true)
    }

    fn table_growing(&mut self, _current: usize, desired: usize, _maximum: Option<usize>) -> wasmtime::Result<bool> {
        if desired > TABLE_ELEMENTS_MAX {
            let over = OverCap { what: "elements of a table", asked: desired, limit: TABLE_ELEMENTS_MAX };
            return Err(wasmtime::Error::new(over));
        }
        Ok(true)
    }

    fn instances(&self) -> usize {
        CORE_INSTANCES_MAX as usize
    }

    fn tables(&self) -> usize {
        MEMORIES_MAX as usize
    }

    fn memories(&self) -> usize {
        MEMORIES_MAX as usize
    }
}
