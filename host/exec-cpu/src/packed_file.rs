//! Packed weights as a file: what it looks like, and when it may be used.
//!
//! ```text
//!   0   8  magic
//!   8   4  layout version of the packing
//!  12   4  matrices
//!  16  32  digest of the weights that were packed (SHA-256 of all their bytes)
//!  48   8  length of this file
//!  56      for each matrix 40 bytes: format (4), CRC-32 of its bytes (4), outputs, inputs, place in the file, bytes (8 each)
//!          CRC-32 of everything before (4); zeros up to a multiple of 4,096
//!          the matrices, one behind the other
//! ```
//!
//! All numbers are little-endian. Everything but the checksums follows from the model and from this build, so a header is read by comparing
//! it with the one that this build would write; nothing in a file is believed. The CRC is there against disks and torn copies: whoever may
//! write the file may as well write the model.

use std::fs::File;
use std::io::{self, Read as _, Write};
use std::os::unix::fs::FileExt as _;

use memmap2::Mmap;
use penstock_kernels_cpu::weights::LAYOUT_VERSION;
use penstock_kernels_cpu::{PackedFormat, ThreadPool};
use penstock_model::Digest;

use crate::matrices::MatrixPlan;

const MAGIC: [u8; 8] = *b"PENSPACK";
const TABLE_AT: usize = 56;
const ROW_BYTES: usize = 40;
/// The matrices begin at a border of pages.
const PAGE_BYTES: usize = 4096;

/// Why a file of packed weights is not used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Unusable {
    /// It cannot be read.
    #[error("it cannot be read: {0}")]
    Io(#[from] io::Error),
    /// It begins like something else.
    #[error("it is not a file of packed weights")]
    NotPacked,
    /// Another build packs otherwise.
    #[error("it has layout version {found}, this build packs version {LAYOUT_VERSION}")]
    Version {
        /// The file's version.
        found: u32,
    },
    /// It was packed from other weights.
    #[error("it was packed from other weights")]
    Source,
    /// Its matrices are not those of the model.
    #[error("its matrices are not those of the model")]
    Matrices,
    /// It was cut or has grown.
    #[error("it has {found} bytes where {wanted} are expected")]
    Length {
        /// Bytes there are.
        found: u64,
        /// Bytes there should be.
        wanted: u64,
    },
    /// The header is damaged.
    #[error("its header is damaged")]
    Header,
    /// A matrix is damaged.
    #[error("matrix {index} is damaged")]
    Matrix {
        /// Which, in the order of the file.
        index: usize,
    },
}

/// The header for a plan: everything but its checksum and the zeros.
fn table(plan: &MatrixPlan<'_>, source: &Digest, checksums: &[u32]) -> Vec<u8> {
    let start = data_start(plan);
    let mut bytes = Vec::with_capacity(start);
    bytes.extend(MAGIC);
    bytes.extend(LAYOUT_VERSION.to_le_bytes());
    bytes.extend((plan.matrices.len() as u32).to_le_bytes());
    bytes.extend(source.0);
    bytes.extend(((start + plan.bytes()) as u64).to_le_bytes());
    let mut at = start;
    for (planned, checksum) in plan.matrices.iter().zip(checksums) {
        let shape = planned.shape;
        bytes.extend(format_code(shape.format()).to_le_bytes());
        bytes.extend(checksum.to_le_bytes());
        for number in [shape.n(), shape.k(), at, shape.bytes()] {
            bytes.extend((number as u64).to_le_bytes());
        }
        at += shape.bytes();
    }
    bytes
}

fn data_start(plan: &MatrixPlan<'_>) -> usize {
    (TABLE_AT + plan.matrices.len() * ROW_BYTES + 4).next_multiple_of(PAGE_BYTES)
}

/// Numbers that stay, whatever the order of the enum.
fn format_code(format: PackedFormat) -> u32 {
    match format {
        PackedFormat::Q4_0 => 0,
        PackedFormat::Q4_1 => 1,
        PackedFormat::Q5_0 => 2,
        PackedFormat::Q5_1 => 3,
        PackedFormat::Q8_0 => 4,
        PackedFormat::Q4K => 5,
        PackedFormat::Q5K => 6,
        PackedFormat::Q6K => 7,
        PackedFormat::Bf16 => 8,
    }
}

/// The checksum of each matrix, computed on all threads.
fn checksums(plan: &MatrixPlan<'_>, memory: &[u8], threads: &ThreadPool) -> io::Result<Vec<u32>> {
    let mut work: Vec<(&[u8], u32)> = plan.cut(memory).into_iter().map(|bytes| (bytes, 0)).collect();
    let task = |_: usize, (bytes, sum): &mut (&[u8], u32)| *sum = crc32fast::hash(bytes);
    threads.enter().each(&mut work, task).map_err(io::Error::other)?;
    Ok(work.into_iter().map(|(_, sum)| sum).collect())
}

/// Writes header and matrices.
///
/// # Errors
/// What `to` refuses.
pub(crate) fn write(
    to: &mut impl Write,
    plan: &MatrixPlan<'_>,
    source: &Digest,
    memory: &[u8],
    threads: &ThreadPool,
) -> io::Result<()> {
    let mut header = table(plan, source, &checksums(plan, memory, threads)?);
    header.extend(crc32fast::hash(&header).to_le_bytes());
    header.resize(data_start(plan), 0);
    to.write_all(&header)?;
    to.write_all(memory)
}

/// A file whose header is that of the plan.
#[derive(Debug)]
pub(crate) struct PackedFile {
    file: File,
    start: usize,
    checksums: Vec<u32>,
}

impl PackedFile {
    /// Reads the header and holds it against what this build would write.
    pub(crate) fn open(mut file: File, plan: &MatrixPlan<'_>, source: &Digest) -> Result<Self, Unusable> {
        let start = data_start(plan);
        let found = file.metadata()?.len();
        let mut fixed = [0; TABLE_AT];
        if found < TABLE_AT as u64 {
            return Err(Unusable::NotPacked);
        }
        file.read_exact(&mut fixed)?;
        let word = |at: usize| u32::from_le_bytes([fixed[at], fixed[at + 1], fixed[at + 2], fixed[at + 3]]);
        if fixed[..8] != MAGIC {
            return Err(Unusable::NotPacked);
        }
        if word(8) != LAYOUT_VERSION {
            return Err(Unusable::Version { found: word(8) });
        }
        if fixed[16..48] != source.0 {
            return Err(Unusable::Source);
        }
        if word(12) as usize != plan.matrices.len() {
            return Err(Unusable::Matrices);
        }
        let wanted = (start + plan.bytes()) as u64;
        if found != wanted {
            return Err(Unusable::Length { found, wanted });
        }
        let mut header = fixed.to_vec();
        header.resize(start, 0);
        file.read_exact(&mut header[TABLE_AT..])?;
        let table_end = TABLE_AT + plan.matrices.len() * ROW_BYTES;
        let (written, rest) = header.split_at(table_end);
        if rest[..4] != crc32fast::hash(written).to_le_bytes() || rest[4..].iter().any(|&byte| byte != 0) {
            return Err(Unusable::Header);
        }
        let sum = |row: &[u8]| u32::from_le_bytes([row[4], row[5], row[6], row[7]]);
        let checksums: Vec<u32> = written[TABLE_AT..].chunks_exact(ROW_BYTES).map(sum).collect();
        if written != table(plan, source, &checksums) {
            return Err(Unusable::Matrices);
        }
        Ok(Self { file, start, checksums })
    }

    /// Where the first matrix begins.
    pub(crate) fn start(&self) -> usize {
        self.start
    }

    /// Reads all matrices into `memory`, of [`MatrixPlan::bytes`], and checks each, on all threads.
    pub(crate) fn read_into(
        &self,
        plan: &MatrixPlan<'_>,
        memory: &mut [u8],
        threads: &ThreadPool,
    ) -> Result<(), Unusable> {
        struct Part<'m> {
            at: u64,
            to: &'m mut [u8],
            outcome: io::Result<u32>,
        }
        let mut at = self.start as u64;
        let mut parts = Vec::with_capacity(plan.matrices.len());
        for to in plan.cut_mut(memory) {
            let next = at + to.len() as u64;
            parts.push(Part { at, to, outcome: Ok(0) });
            at = next;
        }
        let read = |_: usize, part: &mut Part<'_>| {
            part.outcome = self.file.read_exact_at(part.to, part.at).map(|()| crc32fast::hash(part.to));
        };
        threads.enter().each(&mut parts, read).map_err(io::Error::other)?;
        for (index, (part, wanted)) in parts.into_iter().zip(&self.checksums).enumerate() {
            if part.outcome? != *wanted {
                return Err(Unusable::Matrix { index });
            }
        }
        Ok(())
    }

    /// Maps the file and checks all matrices, on all threads.
    pub(crate) fn map(&self, plan: &MatrixPlan<'_>, threads: &ThreadPool) -> Result<Mmap, Unusable> {
        // SAFETY: the file is only ever replaced by renaming another one over it (`packed_cache`), never cut or written to in place, so the
        // mapped pages stay there and stay as they were checked.
        let map = unsafe { Mmap::map(&self.file)? };
        let end = self.start + plan.bytes();
        if map.len() != end {
            return Err(Unusable::Length { found: map.len() as u64, wanted: end as u64 });
        }
        let found = checksums(plan, &map[self.start..], threads)?;
        match found.iter().zip(&self.checksums).position(|(found, wanted)| found != wanted) {
            Some(index) => Err(Unusable::Matrix { index }),
            None => Ok(map),
        }
    }
}
