//! Writing small GGUF files: test models and fixtures, never a conversion tool.
//!
//! The writer checks nothing, so that a test may write a wrong file on purpose.

use super::GgufType;
use crate::dtype::DType;

/// A metadata value to write.
#[derive(Clone, Debug)]
pub enum MetaValue {
    /// u32
    U32(u32),
    /// u64
    U64(u64),
    /// f32
    F32(f32),
    /// bool
    Bool(bool),
    /// string
    String(String),
    /// array of strings
    Strings(Vec<String>),
    /// array of i32
    I32s(Vec<i32>),
    /// array of f32
    F32s(Vec<f32>),
}

impl From<u32> for MetaValue {
    fn from(value: u32) -> Self {
        Self::U32(value)
    }
}
impl From<f32> for MetaValue {
    fn from(value: f32) -> Self {
        Self::F32(value)
    }
}
impl From<bool> for MetaValue {
    fn from(value: bool) -> Self {
        Self::Bool(value)
    }
}
impl From<&str> for MetaValue {
    fn from(value: &str) -> Self {
        Self::String(value.to_owned())
    }
}

/// Collects metadata and tensors and lays them out as a version 3 file with alignment 32.
#[derive(Clone, Debug, Default)]
pub struct GgufWriter {
    metadata: Vec<(String, MetaValue)>,
    tensors: Vec<(String, Vec<u64>, u32, Vec<u8>)>,
}

impl GgufWriter {
    /// An empty file.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a metadata entry.
    pub fn meta(&mut self, key: &str, value: impl Into<MetaValue>) -> &mut Self {
        self.metadata.push((key.to_owned(), value.into()));
        self
    }

    /// Gives a key that was added another value, or adds it.
    pub fn replace(&mut self, key: &str, value: MetaValue) -> &mut Self {
        match self.metadata.iter_mut().find(|(known, _)| known == key) {
            Some((_, old)) => *old = value,
            None => self.metadata.push((key.to_owned(), value)),
        }
        self
    }

    /// Adds a matrix of `rows` x `cols` in stored form; `rows` = 0 writes a vector of `cols`.
    pub fn tensor(&mut self, name: &str, rows: usize, cols: usize, dtype: DType, bytes: Vec<u8>) -> &mut Self {
        let mut dimensions = vec![cols as u64];
        if rows > 0 {
            dimensions.push(rows as u64);
        }
        self.raw_tensor(name, dimensions, GgufType::id_of(dtype), bytes)
    }

    /// Adds a tensor with any dimensions and type number.
    pub fn raw_tensor(&mut self, name: &str, dimensions: Vec<u64>, kind: u32, bytes: Vec<u8>) -> &mut Self {
        self.tensors.push((name.to_owned(), dimensions, kind, bytes));
        self
    }

    /// The file.
    pub fn finish(&self) -> Vec<u8> {
        let mut out = b"GGUF".to_vec();
        out.extend(3u32.to_le_bytes());
        out.extend((self.tensors.len() as u64).to_le_bytes());
        out.extend((self.metadata.len() as u64).to_le_bytes());
        for (key, value) in &self.metadata {
            string(&mut out, key);
            write_value(&mut out, value);
        }
        let mut offset = 0u64;
        for (name, dimensions, kind, bytes) in &self.tensors {
            string(&mut out, name);
            out.extend((dimensions.len() as u32).to_le_bytes());
            dimensions.iter().for_each(|d| out.extend(d.to_le_bytes()));
            out.extend(kind.to_le_bytes());
            out.extend(offset.to_le_bytes());
            offset = (offset + bytes.len() as u64).next_multiple_of(32);
        }
        for (_, _, _, bytes) in &self.tensors {
            out.resize(out.len().next_multiple_of(32), 0);
            out.extend(bytes);
        }
        out
    }
}

fn string(out: &mut Vec<u8>, text: &str) {
    out.extend((text.len() as u64).to_le_bytes());
    out.extend(text.as_bytes());
}

fn write_value(out: &mut Vec<u8>, value: &MetaValue) {
    let kind = |out: &mut Vec<u8>, id: u32| out.extend(id.to_le_bytes());
    match value {
        MetaValue::U32(v) => {
            kind(out, 4);
            out.extend(v.to_le_bytes());
        }
        MetaValue::U64(v) => {
            kind(out, 10);
            out.extend(v.to_le_bytes());
        }
        MetaValue::F32(v) => {
            kind(out, 6);
            out.extend(v.to_le_bytes());
        }
        MetaValue::Bool(v) => {
            kind(out, 7);
            out.push(u8::from(*v));
        }
        MetaValue::String(v) => {
            kind(out, 8);
            string(out, v);
        }
        MetaValue::Strings(items) => {
            kind(out, 9);
            kind(out, 8);
            out.extend((items.len() as u64).to_le_bytes());
            items.iter().for_each(|item| string(out, item));
        }
        MetaValue::I32s(items) => {
            kind(out, 9);
            kind(out, 5);
            out.extend((items.len() as u64).to_le_bytes());
            items.iter().for_each(|item| out.extend(item.to_le_bytes()));
        }
        MetaValue::F32s(items) => {
            kind(out, 9);
            kind(out, 6);
            out.extend((items.len() as u64).to_le_bytes());
            items.iter().for_each(|item| out.extend(item.to_le_bytes()));
        }
    }
}
