//! A folder on disk.

use std::fs;
use std::path::PathBuf;
use std::time::{Duration, SystemTime};

use penstock_discovery::{Discovery, Event, Folder, Settings};
use tempfile::TempDir;

use crate::{Arena, cases, ids, next, next_change, record, settings, until};

struct Disk {
    root: TempDir,
    settings: Settings,
}

impl Disk {
    fn folder(&self) -> PathBuf {
        self.root.path().join("workers")
    }
}

impl Arena for Disk {
    type Service = Folder;

    async fn open(settings: Settings) -> Option<Self> {
        let root = tempfile::tempdir().unwrap();
        let arena = Self { root, settings };
        fs::create_dir(arena.folder()).unwrap();
        Some(arena)
    }

    fn client(&self) -> Folder {
        Folder::new(self.folder(), self.settings).unwrap()
    }

    fn narrow(&self, workers_max: usize) -> Folder {
        Folder::new(self.folder(), Settings { workers_max, ..self.settings }).unwrap()
    }

    /// As when the disk is not mounted.
    async fn lose(&mut self) {
        fs::rename(self.folder(), self.root.path().join("away")).unwrap();
    }

    async fn restore(&mut self) {
        fs::rename(self.root.path().join("away"), self.folder()).unwrap();
    }
}

cases::suite!(Disk);

/// A worker's file, written by hand from the page's description.
fn file(id: &str, epoch: u64, beat: u64) -> String {
    format!(
        "penstock-worker 1 beat {beat}\n{{\"v\":1,\"id\":\"{id}\",\"epoch\":{epoch},\"role\":\"decode\",\"state\":\"ready\",\
         \"addresses\":{{\"control\":\"10.1.2.3:7000\",\"kv_transfer\":[\"tcp://10.1.2.3:7001\"],\"kv_events\":\"tcp://10.1.2.3:5557\"}},\
         \"model\":\"SmolLM2-135M-Instruct\",\"compatibility\":\"0f1e2d3c\",\
         \"capacity\":{{\"blocks\":4096,\"block_tokens\":16,\"slots\":64,\"context_tokens\":8192}},\"topology\":{{\"zone\":\"a\"}}}}\n"
    )
}

#[tokio::test]
async fn torn_and_foreign_files_are_named_and_skipped() {
    let arena = Disk::open(settings()).await.unwrap();
    let folder = arena.folder();
    let _a = arena.client().register(record("a", 1)).await.unwrap();
    let whole = file("torn", 1, 1);
    fs::write(folder.join("torn.json"), &whole[..whole.len() - 20]).unwrap();
    fs::write(folder.join("empty.json"), "").unwrap();
    fs::write(folder.join("notes.txt"), "buy milk").unwrap();
    fs::write(folder.join("foreign.json"), "{\"some\": \"json\"}\n").unwrap();
    fs::write(folder.join("other.json"), file("someone", 1, 1)).unwrap();
    fs::write(folder.join("huge.json"), file("huge", 1, 1) + &" ".repeat(1 << 20)).unwrap();
    fs::create_dir(folder.join("folder.json")).unwrap();
    let mut watch = arena.client().watch();
    assert_eq!(next(&mut watch).await, Event::Snapshot(vec![record("a", 1).into()]));
    until(|| watch.view().faults.len() == 7, "seven faults").await;
    let faults = watch.view().faults;
    let why = |name: &str| faults.iter().find(|(place, _)| place == name).unwrap().1.clone();
    assert!(why("torn.json").contains("breaks off"), "{}", why("torn.json"));
    assert!(why("empty.json").contains("empty"));
    assert!(why("notes.txt").contains("not a worker's file"));
    assert!(why("foreign.json").contains("does not begin as a worker's file does"));
    assert!(why("other.json").contains("it is of worker someone, and its place belongs to other"));
    assert!(why("huge.json").contains("breaks off or is too long"));
    assert!(why("folder.json").contains("not a worker's file"));
    // What is nobody's is left alone, however old it becomes.
    assert_eq!(fs::read_to_string(folder.join("notes.txt")).unwrap(), "buy milk");
}

/// A worker's file that is torn for a moment, by a copy for instance, does not end the worker.
#[tokio::test]
async fn a_torn_beat_is_overcome_by_the_next() {
    let arena = Disk::open(settings()).await.unwrap();
    let path = arena.folder().join("a.json");
    fs::write(&path, file("a", 1, 1)).unwrap();
    let mut watch = arena.client().watch();
    assert_eq!(next(&mut watch).await, Event::Snapshot(vec![record("a", 1).into()]));
    fs::write(&path, &file("a", 1, 2)[..40]).unwrap();
    until(|| !watch.view().faults.is_empty(), "the fault").await;
    assert_eq!(ids(&watch), ["a"]);
    fs::write(&path, file("a", 1, 3)).unwrap();
    until(|| watch.view().faults.is_empty(), "no fault any more").await;
    assert_eq!(ids(&watch), ["a"]);
    assert_eq!(watch.try_next(), None);
}

/// The record's own text is pinned: what a worker writes is what the page says, to the byte.
#[tokio::test]
async fn the_file_is_as_documented() {
    let arena = Disk::open(settings()).await.unwrap();
    let _a = arena.client().register(record("a", 1)).await.unwrap();
    let text = fs::read_to_string(arena.folder().join("a.json")).unwrap();
    assert_eq!(text, file("a", 1, 1));
}

/// What crashed workers left long ago is no worker, not even for a moment, and is swept. So is what was never finished.
#[tokio::test]
async fn old_files_never_count_and_are_swept() {
    let settings = Settings { lease: Duration::from_millis(300), ..settings() };
    let arena = Disk::open(settings).await.unwrap();
    let hour_ago = SystemTime::now() - Duration::from_secs(3_600);
    for (name, text) in [("old.json", file("old", 1, 9)), (".old.1.tmp", "penstock-wor".to_owned())] {
        let path = arena.folder().join(name);
        fs::write(&path, text).unwrap();
        fs::File::options().write(true).open(&path).unwrap().set_modified(hour_ago).unwrap();
    }
    let mut watch = arena.client().watch();
    assert_eq!(next(&mut watch).await, Event::Snapshot(vec![]));
    until(|| fs::read_dir(arena.folder()).unwrap().count() == 0, "an empty folder").await;
    assert_eq!(watch.try_next(), None);
}

/// A host whose clock is wrong by an hour is believed once its counter moves.
#[tokio::test]
async fn a_wrong_clock_delays_and_no_more() {
    let arena = Disk::open(settings()).await.unwrap();
    let path = arena.folder().join("a.json");
    let write = |beat: u64, clock: SystemTime| {
        let new = arena.folder().join(".a.1.tmp");
        fs::write(&new, file("a", 1, beat)).unwrap();
        fs::File::options().write(true).open(&new).unwrap().set_modified(clock).unwrap();
        fs::rename(new, &path).unwrap();
    };
    let hour_ago = SystemTime::now() - Duration::from_secs(3_600);
    write(1, hour_ago);
    let mut watch = arena.client().watch();
    assert_eq!(next(&mut watch).await, Event::Snapshot(vec![]));
    write(2, hour_ago + Duration::from_secs(1));
    assert_eq!(next_change(&mut watch).await, Event::Joined(record("a", 1).into()));
}

#[test]
fn a_folder_that_is_not_there_is_refused() {
    let why = Folder::new("/nonexistent/workers", settings()).err().unwrap().to_string();
    assert!(why.contains("/nonexistent/workers is not a folder; make it, or mount the disk"), "{why}");
}
