//! Reading the index: a cursor that cannot leave the file, and the checks on what it finds.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::ops::Range;

use super::{GgufHeader, GgufType, TensorInfo, Value, ValueKind};
use crate::error::ModelError;
use crate::limits::{
    GGUF_ALIGNMENT_MAX, GGUF_ARRAY_DEPTH_MAX, GGUF_DIMENSIONS_MAX, GGUF_METADATA_MAX, GGUF_NAME_BYTES_MAX, TENSORS_MAX,
};

/// Fewest bytes of a metadata entry: key length, one key byte, kind, one value byte.
const METADATA_ENTRY_BYTES_MIN: u64 = 8 + 1 + 4 + 1;
/// Fewest bytes of a tensor entry: name length, one name byte, dimension count, one dimension, kind, offset.
const TENSOR_ENTRY_BYTES_MIN: u64 = 8 + 1 + 4 + 8 + 4 + 8;

struct Cursor<'a> {
    file: &'a [u8],
    at: usize,
}

impl<'a> Cursor<'a> {
    fn remaining(&self) -> usize {
        self.file.len() - self.at
    }

    fn take(&mut self, count: u64, what: &str) -> Result<Range<usize>, ModelError> {
        match usize::try_from(count) {
            Ok(count) if count <= self.remaining() => {
                let range = self.at..self.at + count;
                self.at = range.end;
                Ok(range)
            }
            _ => Err(ModelError::gguf(self.at, format!("{what} needs {count} bytes, {} are left", self.remaining()))),
        }
    }

    fn bytes<const N: usize>(&mut self, what: &str) -> Result<[u8; N], ModelError> {
        let range = self.take(N as u64, what)?;
        let mut out = [0; N];
        out.copy_from_slice(&self.file[range]);
        Ok(out)
    }

    fn u32(&mut self, what: &str) -> Result<u32, ModelError> {
        self.bytes(what).map(u32::from_le_bytes)
    }

    fn u64(&mut self, what: &str) -> Result<u64, ModelError> {
        self.bytes(what).map(u64::from_le_bytes)
    }

    fn name(&mut self, what: &str) -> Result<&'a str, ModelError> {
        let start = self.at;
        let length = self.u64(what)?;
        if length == 0 || length > GGUF_NAME_BYTES_MAX {
            return Err(ModelError::gguf(
                start,
                format!("{what} of {length} bytes is outside 1..={GGUF_NAME_BYTES_MAX}"),
            ));
        }
        let range = self.take(length, what)?;
        std::str::from_utf8(&self.file[range]).map_err(|_| ModelError::gguf(start, format!("{what} is not UTF-8")))
    }
}

impl ValueKind {
    fn from_id(id: u32) -> Option<Self> {
        Some(match id {
            0 => Self::U8,
            1 => Self::I8,
            2 => Self::U16,
            3 => Self::I16,
            4 => Self::U32,
            5 => Self::I32,
            6 => Self::F32,
            7 => Self::Bool,
            8 => Self::String,
            9 => Self::Array,
            10 => Self::U64,
            11 => Self::I64,
            12 => Self::F64,
            _ => return None,
        })
    }

    /// Bytes of one value, for kinds of fixed size.
    fn fixed_bytes(self) -> Option<u64> {
        match self {
            Self::U8 | Self::I8 | Self::Bool => Some(1),
            Self::U16 | Self::I16 => Some(2),
            Self::U32 | Self::I32 | Self::F32 => Some(4),
            Self::U64 | Self::I64 | Self::F64 => Some(8),
            Self::String | Self::Array => None,
        }
    }
}

pub(super) fn header(file: &[u8]) -> Result<GgufHeader, ModelError> {
    let mut cursor = Cursor { file, at: 0 };
    if cursor.bytes("the magic number").ok() != Some(*b"GGUF") {
        return Err(ModelError::gguf(0, "does not begin with GGUF"));
    }
    let version = cursor.u32("the version")?;
    if version.swap_bytes() < 16 && version > 0xffff {
        return Err(ModelError::Unsupported {
            what: "GGUF byte order",
            name: "big endian".to_owned(),
            remedy: "convert the file to little endian",
        });
    }
    if !(2..=3).contains(&version) {
        return Err(ModelError::Unsupported {
            what: "GGUF version",
            name: version.to_string(),
            remedy: "versions 2 and 3 are read; convert the model again with a current converter",
        });
    }
    let tensor_count = count(&mut cursor, "tensors", TENSORS_MAX, TENSOR_ENTRY_BYTES_MIN)?;
    let metadata_count = count(&mut cursor, "metadata entries", GGUF_METADATA_MAX, METADATA_ENTRY_BYTES_MIN)?;

    let mut metadata = HashMap::new();
    for _ in 0..metadata_count {
        let at = cursor.at;
        let key = cursor.name("a metadata key")?;
        let kind = kind(&mut cursor, key)?;
        let value = value(&mut cursor, kind, key)?;
        match metadata.entry(key.to_owned()) {
            Entry::Occupied(_) => return Err(ModelError::gguf(at, format!("metadata key {key} appears twice"))),
            Entry::Vacant(slot) => slot.insert(value),
        };
    }
    let alignment = alignment(&metadata)?;

    let mut infos: Vec<(TensorInfo, u64, usize)> = Vec::new();
    let mut by_name = HashMap::new();
    for index in 0..tensor_count {
        let at = cursor.at;
        let (info, offset) = tensor_info(&mut cursor)?;
        if by_name.insert(info.name.clone(), index as usize).is_some() {
            return Err(ModelError::gguf(at, format!("tensor {} appears twice", info.name)));
        }
        infos.push((info, offset, at));
    }

    // With no tensors the data section may be absent, and so may its padding.
    let data_offset = cursor.at.checked_next_multiple_of(alignment).filter(|&at| at <= file.len() || infos.is_empty());
    let Some(data_offset) = data_offset else {
        return Err(ModelError::gguf(cursor.at, "the tensor data is missing"));
    };
    let mut tensors = Vec::with_capacity(infos.len());
    for (mut info, offset, at) in infos {
        info.bytes = tensor_bytes(&info, offset, data_offset, alignment, file.len(), at)?;
        tensors.push(info);
    }
    refuse_overlaps(&tensors)?;
    Ok(GgufHeader { version, alignment, data_offset, metadata, tensors, by_name })
}

fn count(cursor: &mut Cursor<'_>, what: &str, max: u64, entry_bytes_min: u64) -> Result<u64, ModelError> {
    let at = cursor.at;
    let count = cursor.u64(what)?;
    if count > max {
        return Err(ModelError::gguf(at, format!("{count} {what} exceed the limit of {max}")));
    }
    if count * entry_bytes_min > cursor.remaining() as u64 {
        return Err(ModelError::gguf(at, format!("{count} {what} cannot fit in {} bytes", cursor.remaining())));
    }
    Ok(count)
}

fn kind(cursor: &mut Cursor<'_>, key: &str) -> Result<ValueKind, ModelError> {
    let at = cursor.at;
    let id = cursor.u32("a value kind")?;
    ValueKind::from_id(id).ok_or_else(|| ModelError::gguf(at, format!("metadata key {key} has unknown kind {id}")))
}

fn value(cursor: &mut Cursor<'_>, kind: ValueKind, key: &str) -> Result<Value, ModelError> {
    let at = cursor.at;
    Ok(match kind {
        ValueKind::U8 => Value::Unsigned(u64::from(cursor.bytes::<1>(key)?[0])),
        ValueKind::I8 => Value::Signed(i64::from(i8::from_le_bytes(cursor.bytes(key)?))),
        ValueKind::U16 => Value::Unsigned(u64::from(u16::from_le_bytes(cursor.bytes(key)?))),
        ValueKind::I16 => Value::Signed(i64::from(i16::from_le_bytes(cursor.bytes(key)?))),
        ValueKind::U32 => Value::Unsigned(u64::from(cursor.u32(key)?)),
        ValueKind::I32 => Value::Signed(i64::from(i32::from_le_bytes(cursor.bytes(key)?))),
        ValueKind::F32 => Value::Float(f64::from(f32::from_le_bytes(cursor.bytes(key)?))),
        ValueKind::U64 => Value::Unsigned(cursor.u64(key)?),
        ValueKind::I64 => Value::Signed(i64::from_le_bytes(cursor.bytes(key)?)),
        ValueKind::F64 => Value::Float(f64::from_le_bytes(cursor.bytes(key)?)),
        ValueKind::Bool => match cursor.bytes::<1>(key)?[0] {
            0 => Value::Bool(false),
            1 => Value::Bool(true),
            other => return Err(ModelError::gguf(at, format!("{key} is a boolean of value {other}"))),
        },
        ValueKind::String => {
            let length = cursor.u64(key)?;
            let range = cursor.take(length, key)?;
            if std::str::from_utf8(&cursor.file[range.clone()]).is_err() {
                return Err(ModelError::gguf(at, format!("the value of {key} is not UTF-8")));
            }
            Value::String(range)
        }
        ValueKind::Array => array(cursor, key, 1)?,
    })
}

fn array(cursor: &mut Cursor<'_>, key: &str, depth: u32) -> Result<Value, ModelError> {
    let at = cursor.at;
    let element = kind(cursor, key)?;
    let count = cursor.u64(key)?;
    let start = cursor.at;
    if let Some(size) = element.fixed_bytes() {
        let total = count
            .checked_mul(size)
            .ok_or_else(|| ModelError::gguf(at, format!("the array {key} of {count} elements overflows")))?;
        cursor.take(total, key)?;
    } else {
        // Each string takes at least its length field and each array its kind and count: the loop is bounded by the file.
        let least = if element == ValueKind::String { 8 } else { 12 };
        if count > cursor.remaining() as u64 / least {
            return Err(ModelError::gguf(at, format!("the array {key} of {count} elements cannot fit in the file")));
        }
        for _ in 0..count {
            if element == ValueKind::String {
                let length = cursor.u64(key)?;
                cursor.take(length, key)?;
            } else if depth >= GGUF_ARRAY_DEPTH_MAX {
                return Err(ModelError::gguf(at, format!("the array {key} nests deeper than {GGUF_ARRAY_DEPTH_MAX}")));
            } else {
                array(cursor, key, depth + 1)?;
            }
        }
    }
    Ok(Value::Array { kind: element, count: count as usize, bytes: start..cursor.at })
}

/// The strings of an array whose lengths `header` has checked already.
pub(super) fn strings<'a>(
    file: &'a [u8],
    key: &str,
    count: usize,
    bytes: Range<usize>,
) -> Result<Vec<&'a str>, ModelError> {
    let mut cursor = Cursor { file: &file[..bytes.end], at: bytes.start };
    let mut out = Vec::with_capacity(count);
    for _ in 0..count {
        let at = cursor.at;
        let length = cursor.u64(key)?;
        let range = cursor.take(length, key)?;
        let text = std::str::from_utf8(&file[range])
            .map_err(|_| ModelError::gguf(at, format!("element {} of {key} is not UTF-8", out.len())))?;
        out.push(text);
    }
    Ok(out)
}

fn alignment(metadata: &HashMap<String, Value>) -> Result<usize, ModelError> {
    const KEY: &str = "general.alignment";
    match metadata.get(KEY) {
        None => Ok(32),
        Some(Value::Unsigned(value)) if value.is_power_of_two() && *value <= u64::from(GGUF_ALIGNMENT_MAX) => {
            Ok(*value as usize)
        }
        Some(other) => {
            Err(ModelError::config(KEY, format!("{other:?} is not a power of two of at most {GGUF_ALIGNMENT_MAX}")))
        }
    }
}

fn tensor_info(cursor: &mut Cursor<'_>) -> Result<(TensorInfo, u64), ModelError> {
    let at = cursor.at;
    let name = cursor.name("a tensor name")?;
    let dimensions = cursor.u32("a dimension count")?;
    if dimensions == 0 || dimensions > GGUF_DIMENSIONS_MAX {
        return Err(ModelError::gguf(at, format!("tensor {name} has {dimensions} dimensions")));
    }
    let cols = cursor.u64("a dimension")?;
    let mut rows = 1u64;
    for _ in 1..dimensions {
        let extent = cursor.u64("a dimension")?;
        rows = rows
            .checked_mul(extent)
            .ok_or_else(|| ModelError::gguf(at, format!("the dimensions of tensor {name} overflow")))?;
    }
    let kind = GgufType::from_id(cursor.u32("a tensor type")?);
    let offset = cursor.u64("a tensor offset")?;
    let whole = rows
        .checked_mul(cols)
        .filter(|&values| values > 0)
        .and_then(|_| Some((usize::try_from(rows).ok()?, usize::try_from(cols).ok()?)));
    let Some((rows, cols)) = whole else {
        return Err(ModelError::gguf(at, format!("tensor {name} of {rows} x {cols} values is empty or overflows")));
    };
    Ok((TensorInfo { name: name.to_owned(), rows, cols, dimensions, kind, bytes: 0..0 }, offset))
}

fn tensor_bytes(
    info: &TensorInfo,
    offset: u64,
    data_offset: usize,
    alignment: usize,
    file_len: usize,
    at: usize,
) -> Result<Range<usize>, ModelError> {
    let name = &info.name;
    if !offset.is_multiple_of(alignment as u64) {
        return Err(ModelError::gguf(at, format!("tensor {name} at offset {offset} is not aligned to {alignment}")));
    }
    let start = usize::try_from(offset).ok().and_then(|offset| data_offset.checked_add(offset));
    let dtype = match info.kind {
        GgufType::Supported(dtype) => dtype,
        GgufType::Unsupported { .. } => {
            return match start {
                Some(start) if start <= file_len => Ok(start..start),
                _ => Err(ModelError::gguf(at, format!("tensor {name} begins past the end of the file"))),
            };
        }
    };
    let Some(row) = dtype.row_bytes(info.cols) else {
        return Err(ModelError::gguf(
            at,
            format!("{} values of tensor {name} make no row of {dtype} blocks", info.cols),
        ));
    };
    let end = start.and_then(|start| start.checked_add(row.checked_mul(info.rows)?));
    match (start, end) {
        (Some(start), Some(end)) if end <= file_len => Ok(start..end),
        _ => Err(ModelError::gguf(
            at,
            format!(
                "tensor {name} of {} x {} {dtype} at offset {offset} reaches past the end of the file",
                info.rows, info.cols
            ),
        )),
    }
}

/// Tensors that share bytes are a sign of a forged or broken index; no writer makes them.
fn refuse_overlaps(tensors: &[TensorInfo]) -> Result<(), ModelError> {
    let mut order: Vec<&TensorInfo> = tensors.iter().filter(|t| !t.bytes.is_empty()).collect();
    order.sort_by_key(|t| t.bytes.start);
    for pair in order.windows(2) {
        if pair[0].bytes.end > pair[1].bytes.start {
            return Err(ModelError::gguf(
                pair[1].bytes.start,
                format!("tensors {} and {} share bytes", pair[0].name, pair[1].name),
            ));
        }
    }
    Ok(())
}
