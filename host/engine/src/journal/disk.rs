//! The writer's side: segments as files, their bytes, and what happens when the disk does not take them.

use std::collections::VecDeque;
use std::fs::{File, OpenOptions};
use std::io::{self, Write as _};
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use penstock_journal::frame::{self, Broken, End, KIND_BROKEN, KIND_END, crc32};
use penstock_journal::wire::to_bytes;
use penstock_journal::{BreakCause, SegmentHeader};

use super::JournalConfig;
use super::queue::{Order, Queue, What};
use crate::metrics::Metrics;

/// What a segment's file is called behind its name.
pub(crate) const EXTENSION: &str = "journal";
/// Bytes of a raw record beside its payload.
const RAW_HEAD_BYTES: usize = 5;

/// How a file is made.
type Create = fn(&Path) -> io::Result<File>;

/// See the module.
pub(super) struct Disk {
    dir: PathBuf,
    total_bytes: u64,
    /// Names this run's files: they sort behind those of earlier runs.
    run: String,
    /// All segments in the folder that are not open, the oldest first.
    closed: VecDeque<(PathBuf, u64)>,
    /// Bytes of these and of the open ones.
    bytes: u64,
    logs: Vec<Option<Segment>>,
    metrics: Arc<Metrics>,
    create: Create,
    framed: Vec<u8>,
    /// A fault was said aloud and nothing was written since.
    is_failing: bool,
}

/// An open segment.
struct Segment {
    path: PathBuf,
    file: File,
    chain: u32,
    records: u64,
    /// Bytes that are whole records.
    bytes: u64,
}

impl Disk {
    pub fn new(config: &JournalConfig, logs: usize, metrics: Arc<Metrics>) -> Self {
        let now_s = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
        let closed: VecDeque<_> = segments(&config.dir).into();
        Self {
            dir: config.dir.clone(),
            total_bytes: config.total_bytes,
            run: format!("{now_s:010}-{}", std::process::id()),
            bytes: closed.iter().map(|(_, bytes)| bytes).sum(),
            closed,
            logs: (0..logs).map(|_| None).collect(),
            metrics,
            create: create_owned,
            framed: Vec::new(),
            is_failing: false,
        }
    }

    /// Does as told. Faults are said aloud, and end the log's segment.
    pub fn carry_out(&mut self, Order { log, what }: Order, queue: &Queue) {
        let done = match what {
            What::Open(header) => self.open(log, &header),
            What::Records(raw) => self.records(log, &raw),
            What::Complete { steps, now } => self.end(log, KIND_END, "complete", |_| to_bytes(&End { steps, now })),
            What::Broken(cause) => self.broken(log, cause),
        };
        match done {
            Ok(()) => {}
            Err(error) => {
                self.fail(log, &error);
                queue.fail(log);
            }
        }
    }

    fn open(&mut self, log: usize, header: &SegmentHeader) -> io::Result<()> {
        let machine = if log == 0 { "gateway".to_owned() } else { format!("replica{}", log - 1) };
        let path = self.dir.join(format!("{}-{machine}-{:06}.{EXTENSION}", self.run, header.segment));
        std::fs::DirBuilder::new().recursive(true).mode(0o700).create(&self.dir)?;
        let mut file = (self.create)(&path)?;
        let opening = header.to_segment();
        if let Err(error) = file.write_all(&opening) {
            // It could never be read.
            let _ = std::fs::remove_file(&path);
            return Err(error);
        }
        let bytes = opening.len() as u64;
        self.wrote(bytes);
        if let Some(slot) = self.logs.get_mut(log) {
            *slot = Some(Segment { path, file, chain: crc32(0, &opening), records: 0, bytes });
        }
        self.make_room();
        Ok(())
    }

    fn records(&mut self, log: usize, raw: &[u8]) -> io::Result<()> {
        let Some(segment) = self.logs.get_mut(log).and_then(Option::as_mut) else { return Ok(()) };
        self.framed.clear();
        let (mut chain, mut records, mut rest) = (segment.chain, segment.records, raw);
        while let Some((head, behind)) = rest.split_at_checked(RAW_HEAD_BYTES) {
            let bytes = u32::from_le_bytes([head[1], head[2], head[3], head[4]]) as usize;
            let Some((payload, behind)) = behind.split_at_checked(bytes) else { break };
            chain = frame::append(&mut self.framed, chain, head[0], payload);
            records += 1;
            rest = behind;
        }
        segment.file.write_all(&self.framed)?;
        let bytes = self.framed.len() as u64;
        (segment.chain, segment.records) = (chain, records);
        segment.bytes += bytes;
        self.wrote(bytes);
        self.make_room();
        Ok(())
    }

    fn broken(&mut self, log: usize, cause: BreakCause) -> io::Result<()> {
        let label = match cause {
            BreakCause::Overload => "overload",
            BreakCause::TooLong => "too_long",
            BreakCause::Frozen => "frozen",
            BreakCause::Stopped => "stopped",
            BreakCause::Disk => "disk",
        };
        if let Some(segment) = self.logs.get(log).and_then(Option::as_ref) {
            let (path, records) = (segment.path.display().to_string(), segment.records);
            tracing::warn!(path, records, cause = label, "a journal segment is broken off");
        }
        self.end(log, KIND_BROKEN, label, |records| to_bytes(&Broken { cause, records }))
    }

    /// Writes the last record and closes the file.
    fn end(
        &mut self,
        log: usize,
        kind: u8,
        label: &'static str,
        payload: impl FnOnce(u64) -> Vec<u8>,
    ) -> io::Result<()> {
        let Some(mut segment) = self.logs.get_mut(log).and_then(Option::take) else { return Ok(()) };
        let mut last = Vec::new();
        frame::append(&mut last, segment.chain, kind, &payload(segment.records));
        let written = segment.file.write_all(&last).and_then(|()| segment.file.sync_data());
        let bytes = if written.is_ok() { last.len() as u64 } else { 0 };
        self.metrics.journal_segment(if written.is_ok() { label } else { "disk" });
        self.wrote(bytes);
        self.closed.push_back((segment.path, segment.bytes + bytes));
        self.make_room();
        written
    }

    /// The disk did not take it: what is whole stays, with a mark behind it where there is room for one.
    fn fail(&mut self, log: usize, error: &io::Error) {
        self.metrics.journal_error();
        if !std::mem::replace(&mut self.is_failing, true) {
            let dir = self.dir.display().to_string();
            tracing::error!(dir, %error, "the journal cannot be written: serving goes on without it, and it is tried again");
        }
        let Some(mut segment) = self.logs.get_mut(log).and_then(Option::take) else { return };
        let mut last = Vec::new();
        let broken = Broken { cause: BreakCause::Disk, records: segment.records };
        frame::append(&mut last, segment.chain, KIND_BROKEN, &to_bytes(&broken));
        // A file that takes no mark ends like one whose writer was killed.
        let cut =
            segment.file.set_len(segment.bytes).and_then(|()| io::Seek::seek(&mut segment.file, io::SeekFrom::End(0)));
        let marked = cut.and_then(|_| segment.file.write_all(&last));
        self.metrics.journal_segment("disk");
        let bytes = if marked.is_ok() { last.len() as u64 } else { 0 };
        self.bytes += bytes;
        self.closed.push_back((segment.path, segment.bytes + bytes));
    }

    fn wrote(&mut self, bytes: u64) {
        self.bytes += bytes;
        self.metrics.journal_wrote(bytes);
        if bytes > 0 && std::mem::take(&mut self.is_failing) {
            tracing::info!("the journal is written again");
        }
    }

    /// The oldest segments leave while there are too many bytes.
    fn make_room(&mut self) {
        while self.bytes > self.total_bytes {
            let Some((path, bytes)) = self.closed.pop_front() else { return };
            if let Err(error) = std::fs::remove_file(&path) {
                tracing::warn!(path = %path.display(), %error, "an old journal segment cannot be removed");
            }
            self.bytes -= bytes.min(self.bytes);
        }
    }
}

/// Readable by its owner alone: counts and times say something about clients, too.
fn create_owned(path: &Path) -> io::Result<File> {
    OpenOptions::new().write(true).create_new(true).mode(0o600).open(path)
}

/// Segments in a folder with their sizes, the oldest first.
fn segments(dir: &Path) -> Vec<(PathBuf, u64)> {
    let entries = std::fs::read_dir(dir).into_iter().flatten().flatten();
    let mut found: Vec<_> = entries
        .filter(|entry| entry.path().extension().is_some_and(|extension| extension == EXTENSION))
        .filter_map(|entry| Some((entry.path(), entry.metadata().ok()?.len())))
        .collect();
    found.sort();
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use penstock_base::codec::Writer;
    use penstock_base::{Generation, Instant};
    use penstock_journal::wire::Encode as _;
    use penstock_journal::{Ending, Machine as _, examine};
    use penstock_policy_api::native::NativePolicies;
    use penstock_sched::gateway::{Gateway, GatewayConfig, GatewayInput};

    fn disk(name: &str) -> (Disk, Queue, PathBuf) {
        let dir = std::env::temp_dir().join(format!("penstock-disk-{}-{name}", std::process::id()));
        let _ = std::fs::remove_dir_all(&dir);
        let config = JournalConfig {
            dir: dir.clone(),
            segment_bytes: 1 << 20,
            total_bytes: 1 << 30,
            queue_bytes: 1 << 20,
            build: String::new(),
        };
        (Disk::new(&config, 1, Arc::new(Metrics::new("demo"))), Queue::new(1 << 20, 1), dir)
    }

    fn opening() -> What {
        let config = GatewayConfig::default();
        let machine = Gateway::new(config.clone(), Instant::ZERO);
        let mut policies = NativePolicies::new(Generation(0), 1_024);
        let mut header = SegmentHeader::of(&machine, &config, &mut policies, (0, Instant::ZERO));
        header.has_answers = true;
        What::Open(Box::new(header))
    }

    /// One input, as a tap hands it over.
    fn input() -> What {
        let mut payload = Writer::new();
        Instant(1).put(&mut payload);
        GatewayInput::Tick.put(&mut payload);
        let mut raw = vec![frame::KIND_INPUT];
        raw.extend_from_slice(&(payload.bytes().len() as u32).to_le_bytes());
        raw.extend_from_slice(payload.bytes());
        What::Records(raw)
    }

    fn full(_: &Path) -> io::Result<File> {
        OpenOptions::new().write(true).open("/dev/full")
    }

    #[test]
    fn a_full_disk_ends_the_segment_and_the_next_one_is_tried() {
        let (mut disk, queue, dir) = disk("full");
        let order = |what| Order { log: 0, what };
        // Full from the beginning: nothing is left behind.
        disk.create = full;
        disk.carry_out(order(opening()), &queue);
        assert!(queue.has_failed(0) && disk.logs[0].is_none());
        disk.carry_out(order(input()), &queue);
        assert!(!queue.has_failed(0), "what follows is passed over");
        // Full in the middle: what was whole stays whole.
        disk.create = create_owned;
        disk.carry_out(order(opening()), &queue);
        disk.carry_out(order(input()), &queue);
        let path = disk.logs[0].as_ref().map(|segment| segment.path.clone()).expect("an open segment");
        disk.logs[0].as_mut().expect("as above").file = full(&path).expect("the device");
        disk.carry_out(order(input()), &queue);
        assert!(queue.has_failed(0) && disk.logs[0].is_none());
        let bytes = std::fs::read(&path).expect("the segment");
        let found = examine(&bytes[..], None).expect("its opening is whole");
        assert!(found.fault.is_none() && found.verified.unfinished, "{:?}", found.fault);
        assert_eq!((found.verified.records, found.verified.ending), (1, Ending::CutOff));
        assert_eq!(found.verified.machine, Gateway::id(&GatewayConfig::default()));
        std::fs::remove_dir_all(dir).expect("the test's own folder");
    }

    #[test]
    fn a_segment_that_is_broken_off_says_behind_which_record() {
        let (mut disk, queue, dir) = disk("broken");
        let order = |what| Order { log: 0, what };
        for what in [opening(), input(), What::Broken(BreakCause::Overload)] {
            disk.carry_out(order(what), &queue);
        }
        let (path, size) = disk.closed.back().cloned().expect("it is closed");
        let bytes = std::fs::read(path).expect("the segment");
        assert_eq!(bytes.len() as u64, size);
        let found = examine(&bytes[..], None).expect("a segment");
        assert_eq!(found.verified.ending, Ending::Broken(BreakCause::Overload));
        assert_eq!(found.verified.records, 2, "the input, and the mark behind it");
        std::fs::remove_dir_all(dir).expect("the test's own folder");
    }
}
