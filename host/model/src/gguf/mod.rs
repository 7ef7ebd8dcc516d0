//! The GGUF container, versions 2 and 3: what is in the file, and where?
//!
//! Strings, arrays and tensor data stay in the mapped file; the index holds ranges, so memory is bounded by a small multiple of the file's
//! own size whatever its counts claim. Every offset, length and product is checked before use; the first fault refuses the file.

pub mod quantise;
mod read;
pub mod tiny;
pub mod write;

use std::collections::HashMap;
use std::fs::File;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use memmap2::Mmap;

use crate::dtype::DType;
use crate::error::ModelError;

/// A tensor type as the file gives it. Types without a kernel parse (their size is in the offsets) and are refused when the tensor is used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GgufType {
    /// A type that kernels read.
    Supported(DType),
    /// A type known by number and name only.
    Unsupported {
        /// Number in the file.
        id: u32,
        /// Its name, or `unknown type`.
        name: &'static str,
    },
}

impl GgufType {
    /// From the number in the file.
    pub fn from_id(id: u32) -> Self {
        let name = match id {
            0 => return Self::Supported(DType::F32),
            1 => return Self::Supported(DType::F16),
            2 => return Self::Supported(DType::Q4_0),
            3 => return Self::Supported(DType::Q4_1),
            6 => return Self::Supported(DType::Q5_0),
            7 => return Self::Supported(DType::Q5_1),
            8 => return Self::Supported(DType::Q8_0),
            12 => return Self::Supported(DType::Q4K),
            13 => return Self::Supported(DType::Q5K),
            14 => return Self::Supported(DType::Q6K),
            30 => return Self::Supported(DType::Bf16),
            9 => "Q8_1",
            10 => "Q2_K",
            11 => "Q3_K",
            15 => "Q8_K",
            16 => "IQ2_XXS",
            17 => "IQ2_XS",
            18 => "IQ3_XXS",
            19 => "IQ1_S",
            20 => "IQ4_NL",
            21 => "IQ3_S",
            22 => "IQ2_S",
            23 => "IQ4_XS",
            24 => "I8",
            25 => "I16",
            26 => "I32",
            27 => "I64",
            28 => "F64",
            29 => "IQ1_M",
            34 => "TQ1_0",
            35 => "TQ2_0",
            39 => "MXFP4",
            _ => "unknown type",
        };
        Self::Unsupported { id, name }
    }

    /// The number that stands for a supported type in a file.
    pub const fn id_of(dtype: DType) -> u32 {
        match dtype {
            DType::F32 => 0,
            DType::F16 => 1,
            DType::Q4_0 => 2,
            DType::Q4_1 => 3,
            DType::Q5_0 => 6,
            DType::Q5_1 => 7,
            DType::Q8_0 => 8,
            DType::Q4K => 12,
            DType::Q5K => 13,
            DType::Q6K => 14,
            DType::Bf16 => 30,
        }
    }
}

/// One tensor's entry.
#[derive(Clone, Debug, PartialEq)]
pub struct TensorInfo {
    /// Name in the file.
    pub name: String,
    /// Slowest dimensions multiplied: output features of a matrix, 1 for a vector.
    pub rows: usize,
    /// Fastest dimension: input features of a matrix, length of a vector.
    pub cols: usize,
    /// Number of dimensions in the file.
    pub dimensions: u32,
    /// Storage type.
    pub kind: GgufType,
    /// Bytes in the file. Empty for unsupported types, whose size is not known here.
    pub bytes: Range<usize>,
}

/// Type of a metadata value; the numbers are the file's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ValueKind {
    /// 0
    U8,
    /// 1
    I8,
    /// 2
    U16,
    /// 3
    I16,
    /// 4
    U32,
    /// 5
    I32,
    /// 6
    F32,
    /// 7, stored as one byte 0 or 1
    Bool,
    /// 8, a u64 length and UTF-8 bytes
    String,
    /// 9, element kind, u64 count, elements
    Array,
    /// 10
    U64,
    /// 11
    I64,
    /// 12
    F64,
}

/// One metadata value. Strings and arrays are ranges of the file.
#[derive(Clone, Debug, PartialEq)]
pub enum Value {
    /// Any unsigned integer.
    Unsigned(u64),
    /// Any signed integer.
    Signed(i64),
    /// Either float.
    Float(f64),
    /// A boolean.
    Bool(bool),
    /// A string: where its bytes are. Checked to be UTF-8.
    String(Range<usize>),
    /// An array: element kind, count, and where its elements are. All its strings are checked for length; UTF-8 is checked when read.
    Array {
        /// Kind of every element.
        kind: ValueKind,
        /// Number of elements.
        count: usize,
        /// Their bytes.
        bytes: Range<usize>,
    },
}

/// The parsed index of a GGUF file. Owns no file bytes beyond names and keys.
#[derive(Clone, Debug)]
pub struct GgufHeader {
    /// Format version, 2 or 3.
    pub version: u32,
    /// Alignment of tensor data.
    pub alignment: usize,
    /// Where tensor data begins.
    pub data_offset: usize,
    metadata: HashMap<String, Value>,
    tensors: Vec<TensorInfo>,
    by_name: HashMap<String, usize>,
}

impl GgufHeader {
    /// Reads the index of a whole file. `file` must be all of it: tensors that reach past its end are refused.
    pub fn parse(file: &[u8]) -> Result<Self, ModelError> {
        read::header(file)
    }

    /// Tensors in file order.
    pub fn tensors(&self) -> &[TensorInfo] {
        &self.tensors
    }

    /// A tensor by name.
    pub fn tensor(&self, name: &str) -> Option<&TensorInfo> {
        self.by_name.get(name).map(|&at| &self.tensors[at])
    }

    /// A metadata value by key.
    pub fn value(&self, key: &str) -> Option<&Value> {
        self.metadata.get(key)
    }

    /// Number of metadata entries.
    pub fn metadata_len(&self) -> usize {
        self.metadata.len()
    }
}

/// A mapped GGUF file with its index.
#[derive(Debug)]
pub struct Gguf {
    path: PathBuf,
    map: Arc<Mmap>,
    header: GgufHeader,
}

impl Gguf {
    /// Maps and reads a file.
    pub fn open(path: &Path) -> Result<Self, ModelError> {
        let map = map_file(path)?;
        let header = GgufHeader::parse(&map)?;
        Ok(Self { path: path.to_path_buf(), map, header })
    }

    /// The file's path, as given.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The mapping, shared with the weights that view it.
    pub fn map(&self) -> &Arc<Mmap> {
        &self.map
    }

    /// The index.
    pub fn header(&self) -> &GgufHeader {
        &self.header
    }

    /// A string value; `None` when the key is absent.
    pub fn string(&self, key: &str) -> Result<Option<&str>, ModelError> {
        match self.header.value(key) {
            None => Ok(None),
            Some(Value::String(at)) => std::str::from_utf8(&self.map[at.clone()])
                .map(Some)
                .map_err(|_| ModelError::gguf(at.start, format!("the value of {key} is not UTF-8"))),
            Some(other) => Err(wrong_type(key, "a string", other)),
        }
    }

    /// An integer value that is not negative; `None` when the key is absent.
    pub fn unsigned(&self, key: &str) -> Result<Option<u64>, ModelError> {
        match self.header.value(key) {
            None => Ok(None),
            Some(Value::Unsigned(value)) => Ok(Some(*value)),
            Some(Value::Signed(value)) if *value >= 0 => Ok(Some(value.unsigned_abs())),
            Some(other) => Err(wrong_type(key, "an unsigned integer", other)),
        }
    }

    /// A floating-point value; `None` when the key is absent.
    pub fn float(&self, key: &str) -> Result<Option<f64>, ModelError> {
        match self.header.value(key) {
            None => Ok(None),
            Some(Value::Float(value)) => Ok(Some(*value)),
            Some(other) => Err(wrong_type(key, "a float", other)),
        }
    }

    /// A boolean value; `None` when the key is absent.
    pub fn boolean(&self, key: &str) -> Result<Option<bool>, ModelError> {
        match self.header.value(key) {
            None => Ok(None),
            Some(Value::Bool(value)) => Ok(Some(*value)),
            Some(other) => Err(wrong_type(key, "a boolean", other)),
        }
    }

    /// The values of a small F32 tensor that belongs to the configuration; `None` when there is none of that name.
    pub fn values(&self, tensor: &str) -> Result<Option<Vec<f32>>, ModelError> {
        let Some(info) = self.header.tensor(tensor) else { return Ok(None) };
        if info.kind != GgufType::Supported(DType::F32) {
            return Err(ModelError::gguf(info.bytes.start, format!("{tensor} is not stored as F32")));
        }
        Ok(Some(floats(&self.map[info.bytes.clone()])))
    }

    /// The strings of an array, borrowed from the file; `None` when the key is absent.
    pub fn strings(&self, key: &str) -> Result<Option<Vec<&str>>, ModelError> {
        match self.header.value(key) {
            None => Ok(None),
            Some(Value::Array { kind: ValueKind::String, count, bytes }) => {
                read::strings(&self.map, key, *count, bytes.clone()).map(Some)
            }
            Some(other) => Err(wrong_type(key, "an array of strings", other)),
        }
    }

    /// The numbers of an array of f32; `None` when the key is absent.
    pub fn floats(&self, key: &str) -> Result<Option<Vec<f32>>, ModelError> {
        match self.header.value(key) {
            None => Ok(None),
            Some(Value::Array { kind: ValueKind::F32, bytes, .. }) => Ok(Some(floats(&self.map[bytes.clone()]))),
            Some(other) => Err(wrong_type(key, "an array of f32", other)),
        }
    }

    /// The integers of an array of i32 or u32; `None` when the key is absent.
    pub fn integers(&self, key: &str) -> Result<Option<Vec<i64>>, ModelError> {
        match self.header.value(key) {
            None => Ok(None),
            Some(Value::Array { kind: kind @ (ValueKind::I32 | ValueKind::U32), bytes, .. }) => Ok(Some(
                self.map[bytes.clone()]
                    .chunks_exact(4)
                    .map(|b| {
                        let bits = u32::from_le_bytes([b[0], b[1], b[2], b[3]]);
                        if *kind == ValueKind::I32 { i64::from(bits.cast_signed()) } else { i64::from(bits) }
                    })
                    .collect(),
            )),
            Some(other) => Err(wrong_type(key, "an array of integers", other)),
        }
    }
}

/// Little-endian f32 values.
fn floats(bytes: &[u8]) -> Vec<f32> {
    bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect()
}

fn wrong_type(key: &str, wanted: &str, found: &Value) -> ModelError {
    let found = match found {
        Value::Unsigned(v) => format!("the integer {v}"),
        Value::Signed(v) => format!("the integer {v}"),
        Value::Float(v) => format!("the float {v}"),
        Value::Bool(v) => format!("the boolean {v}"),
        Value::String(_) => "a string".to_owned(),
        Value::Array { kind, count, .. } => format!("an array of {count} {kind:?}"),
    };
    ModelError::config(key, format!("is {found}, not {wanted}"))
}

/// Maps a file for reading.
pub(crate) fn map_file(path: &Path) -> Result<Arc<Mmap>, ModelError> {
    let file = File::open(path).map_err(|e| ModelError::io(path, "open", e))?;
    let metadata = file.metadata().map_err(|e| ModelError::io(path, "read the size of", e))?;
    if !metadata.is_file() {
        return Err(ModelError::NotAModel { path: path.to_path_buf(), what: "not a regular file".to_owned() });
    }
    // SAFETY: the mapping is private and read-only. Model files are installed whole (downloads are renamed into place) and must not be
    // truncated while served; that is the operator's contract, stated in the README, as for every system that maps its weights.
    let map = unsafe { Mmap::map(&file) }.map_err(|e| ModelError::io(path, "map", e))?;
    Ok(Arc::new(map))
}
