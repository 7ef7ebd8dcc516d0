//! Keeping packed weights from one start to the next: which file, when it is read, when it is written.
//!
//! The file is named by the model file's own place and by the digest of its weights, the SHA-256 over all their bytes that the loader has
//! anyway. It lies beside the model, or where that cannot be written in a cache folder. It is written aside, synced, and renamed into place:
//! whoever sees it sees all of it. Writers hold a lock on the file written aside, so one of several that start at once writes, and what a
//! killed one left is written over. A new file replaces those that the same model file had with other weights. Weights packed as bfloat16
//! lie in files of their own, beside the others: changing the precision back and forth packs each once.
//!
//! Nothing that goes wrong here keeps a model from being loaded: it is packed then, and [`PackedOutcome`] says why.

use std::collections::HashMap;
use std::fmt;
use std::fs::{self, File, OpenOptions, TryLockError};
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use penstock_kernels_cpu::weights::WeightMemory;
use penstock_kernels_cpu::{MemoryBudget, PackedMatrix, Precision, ThreadPool};
use penstock_model::Digest;
use penstock_model::weights::TensorRole;

use crate::error::CpuError;
use crate::matrices::MatrixPlan;
use crate::packed_file::{self, PackedFile, Unusable};

/// What is done with files of packed weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum PackedMode {
    /// Nothing: every start packs.
    Off,
    /// They are read into huge pages.
    #[default]
    Copy,
    /// They are mapped, and serve from the page cache, which processes share: slower, since the cache's pages are small ones.
    Map,
}

/// Where a model's packed weights are kept.
#[derive(Clone, Debug)]
pub struct PackedCache {
    /// What to do.
    pub mode: PackedMode,
    /// Digest of the weights that are packed. Equal digests must mean equal weights.
    pub source: Digest,
    /// Files to look for, and to write, in order of preference; see [`packed_places`].
    pub places: Vec<PathBuf>,
}

/// What became of it.
#[derive(Debug)]
pub struct PackedOutcome {
    /// The file that the weights came from; `None` when they were packed.
    pub read: Option<PathBuf>,
    /// The file written for the next start.
    pub written: Option<PathBuf>,
    /// Files that are there and cannot be used.
    pub unusable: Vec<(PathBuf, Unusable)>,
    /// Places where nothing could be written.
    pub unwritable: Vec<(PathBuf, io::Error)>,
    /// Bytes of the packed matrices.
    pub bytes: usize,
}

impl fmt::Display for PackedOutcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (&self.read, &self.written) {
            (Some(path), _) => write!(f, "read {}", path.display()),
            (None, Some(path)) => write!(f, "packed, and kept as {}", path.display()),
            (None, None) => f.write_str("packed"),
        }
    }
}

/// Digits of a digest in a file's name: enough to tell apart what one model file has been.
const NAME_DIGITS: usize = 16;
/// How names end, of weights packed for integers and as bfloat16.
const ENDINGS: [&str; 2] = [".packed", ".bf16.packed"];

/// Where the packed weights of the model at `model` may lie, for products of that precision: beside a file, inside a folder, or in
/// `cache_dir`.
pub fn packed_places(model: &Path, source: &Digest, precision: Precision, cache_dir: Option<&Path>) -> Vec<PathBuf> {
    let digits = &source.to_string()[..NAME_DIGITS];
    let ending = ENDINGS[usize::from(precision == Precision::Bf16)];
    let beside = if model.is_dir() {
        Some(model.join(format!(".weights.{digits}{ending}")))
    } else {
        model.file_name().map(|name| model.with_file_name(format!(".{}.{digits}{ending}", name.to_string_lossy())))
    };
    // Models of one name in several folders must not replace each other's files there.
    let place = fs::canonicalize(model).unwrap_or_else(|_| model.to_owned());
    let place = &Digest::of(place.as_os_str().as_encoded_bytes()).to_string()[..NAME_DIGITS];
    let in_cache = cache_dir.map(|dir| dir.join(format!("{place}.{digits}{ending}")));
    beside.into_iter().chain(in_cache).collect()
}

impl PackedCache {
    /// The matrices of `plan`: read, or packed and written.
    pub(crate) fn matrices(
        &self,
        plan: &MatrixPlan<'_>,
        threads: &ThreadPool,
        budget: &MemoryBudget,
    ) -> Result<(HashMap<TensorRole, PackedMatrix>, PackedOutcome), CpuError> {
        let mut outcome = PackedOutcome {
            read: None,
            written: None,
            unusable: Vec::new(),
            unwritable: Vec::new(),
            bytes: plan.bytes(),
        };
        if self.mode == PackedMode::Off {
            return Ok((plan.matrices_in(WeightMemory::Huge(plan.pack(threads, budget)?), 0), outcome));
        }
        for path in &self.places {
            match self.read(path, plan, threads, budget) {
                Ok((memory, start)) => {
                    outcome.read = Some(path.clone());
                    return Ok((plan.matrices_in(memory, start), outcome));
                }
                Err(ReadFault::Absent) => {}
                Err(ReadFault::Unusable(why)) => outcome.unusable.push((path.clone(), why)),
                Err(ReadFault::Memory(fault)) => return Err(fault),
            }
        }
        let packed = plan.pack(threads, budget)?;
        for path in &self.places {
            match self.write(path, plan, &packed, threads) {
                Ok(()) => {
                    outcome.written = Some(path.clone());
                    break;
                }
                Err(why) => outcome.unwritable.push((path.clone(), why)),
            }
        }
        Ok((plan.matrices_in(WeightMemory::Huge(packed), 0), outcome))
    }

    fn read(
        &self,
        path: &Path,
        plan: &MatrixPlan<'_>,
        threads: &ThreadPool,
        budget: &MemoryBudget,
    ) -> Result<(WeightMemory, usize), ReadFault> {
        let file = File::open(path).map_err(|fault| match fault.kind() {
            io::ErrorKind::NotFound | io::ErrorKind::NotADirectory => ReadFault::Absent,
            _ => ReadFault::Unusable(Unusable::Io(fault)),
        })?;
        let file = PackedFile::open(file, plan, &self.source).map_err(ReadFault::Unusable)?;
        if self.mode == PackedMode::Map {
            let map = file.map(plan, threads).map_err(ReadFault::Unusable)?;
            return Ok((WeightMemory::Mapped(map), file.start()));
        }
        let mut memory = budget.allocate(plan.bytes()).map_err(|fault| ReadFault::Memory(CpuError::Weights(fault)))?;
        file.read_into(plan, &mut memory, threads).map_err(ReadFault::Unusable)?;
        Ok((WeightMemory::Huge(memory), 0))
    }

    /// Writes `path` whole or not at all, and removes what the same model file had there before.
    fn write(&self, path: &Path, plan: &MatrixPlan<'_>, packed: &[u8], threads: &ThreadPool) -> io::Result<()> {
        if let Some(dir) = path.parent() {
            fs::create_dir_all(dir)?;
        }
        let aside = Aside::lock(path)?;
        packed_file::write(&mut &aside.file, plan, &self.source, packed, threads)?;
        aside.into_place(path)?;
        remove_predecessors(path);
        Ok(())
    }
}

enum ReadFault {
    Absent,
    Unusable(Unusable),
    Memory(CpuError),
}

/// The file beside the real one that is being written. Removed when dropped before its end.
struct Aside {
    file: File,
    path: PathBuf,
}

impl Aside {
    /// Makes the file, or takes over what a killed writer left.
    ///
    /// # Errors
    /// `WouldBlock` while another process writes it; whatever the system refuses.
    fn lock(path: &Path) -> io::Result<Self> {
        let aside = path.with_extension("packed-tmp");
        let file = OpenOptions::new().write(true).create(true).truncate(false).open(&aside)?;
        match file.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                return Err(io::Error::new(io::ErrorKind::WouldBlock, "another process is writing it"));
            }
            Err(TryLockError::Error(fault)) => return Err(fault),
        }
        // Between opening and locking, the one that had the lock may have renamed this very file into place: then it is not ours to write.
        let (mine, named) = (file.metadata()?, fs::metadata(&aside));
        if named.map_or(true, |named| (named.dev(), named.ino()) != (mine.dev(), mine.ino())) {
            return Err(io::Error::new(io::ErrorKind::WouldBlock, "another process has just written it"));
        }
        file.set_len(0)?;
        Ok(Self { file, path: aside })
    }

    fn into_place(self, path: &Path) -> io::Result<()> {
        self.file.sync_all()?;
        fs::rename(&self.path, path)?;
        // Without it a power failure may undo the renaming: then the next start packs again.
        let _ = path.parent().map(|dir| File::open(dir).and_then(|dir| dir.sync_all()));
        Ok(())
    }
}

impl Drop for Aside {
    fn drop(&mut self) {
        // After renaming there is nothing of that name, or another writer's file, which is locked by it: only one's own is removed.
        let is_mine = |named: fs::Metadata| self.file.metadata().is_ok_and(|mine| mine.ino() == named.ino());
        if fs::metadata(&self.path).is_ok_and(is_mine) {
            let _ = fs::remove_file(&self.path);
        }
    }
}

/// Removes the files of the same model file with other weights.
fn remove_predecessors(path: &Path) {
    let Some((dir, name)) = path.parent().zip(path.file_name().and_then(|name| name.to_str())) else { return };
    // The longer ending ends like the shorter one.
    let Some(&ending) = ENDINGS.iter().rev().find(|&&ending| name.ends_with(ending)) else { return };
    let Some(prefix) = name.len().checked_sub(ending.len() + NAME_DIGITS).and_then(|length| name.get(..length)) else {
        return;
    };
    let is_predecessor = |other: &str| {
        let digits = other.strip_prefix(prefix).and_then(|rest| rest.strip_suffix(ending));
        other != name
            && digits.is_some_and(|digits| {
                digits.len() == NAME_DIGITS && digits.bytes().all(|digit| digit.is_ascii_hexdigit())
            })
    };
    for entry in fs::read_dir(dir).into_iter().flatten().flatten() {
        if entry.file_name().to_str().is_some_and(is_predecessor) {
            let _ = fs::remove_file(entry.path());
        }
    }
}
