//! MessagePack, as far as KV events need it: shortest forms out, anything in.

use crate::limits::HASHES_MAX;

/// Bytes that are not what they should be.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("byte {at}: {what}")]
pub struct Malformed {
    /// Where.
    pub at: usize,
    /// What is wrong.
    pub what: &'static str,
}

/// Writes each value in its shortest form, as msgspec does for vLLM.
#[derive(Default)]
pub(crate) struct Writer {
    pub bytes: Vec<u8>,
}

impl Writer {
    fn sized(&mut self, fix: Option<u8>, codes: [u8; 3], len: usize) {
        match (fix, len) {
            (Some(byte), _) => self.bytes.push(byte),
            (None, 0..=0xff) if codes[0] != 0 => self.bytes.extend([codes[0], len as u8]),
            (None, 0..=0xffff) => {
                self.bytes.push(codes[1]);
                self.bytes.extend((len as u16).to_be_bytes());
            }
            // Payloads have far fewer than 4 GiB.
            _ => {
                self.bytes.push(codes[2]);
                self.bytes.extend((len as u32).to_be_bytes());
            }
        }
    }

    pub fn nil(&mut self) {
        self.bytes.push(0xc0);
    }

    pub fn array(&mut self, len: usize) {
        self.sized((len < 16).then_some(0x90 | len as u8), [0, 0xdc, 0xdd], len);
    }

    pub fn map(&mut self, len: usize) {
        self.sized((len < 16).then_some(0x80 | len as u8), [0, 0xde, 0xdf], len);
    }

    pub fn text(&mut self, text: &str) {
        self.sized((text.len() < 32).then_some(0xa0 | text.len() as u8), [0xd9, 0xda, 0xdb], text.len());
        self.bytes.extend_from_slice(text.as_bytes());
    }

    pub fn binary(&mut self, bytes: &[u8]) {
        self.sized(None, [0xc4, 0xc5, 0xc6], bytes.len());
        self.bytes.extend_from_slice(bytes);
    }

    pub fn uint(&mut self, value: u64) {
        match value {
            0..=0x7f => self.bytes.push(value as u8),
            0x80..=0xff => self.bytes.extend([0xcc, value as u8]),
            0x100..=0xffff => {
                self.bytes.push(0xcd);
                self.bytes.extend((value as u16).to_be_bytes());
            }
            0x1_0000..=0xffff_ffff => {
                self.bytes.push(0xce);
                self.bytes.extend((value as u32).to_be_bytes());
            }
            _ => {
                self.bytes.push(0xcf);
                self.bytes.extend(value.to_be_bytes());
            }
        }
    }

    pub fn int(&mut self, value: i64) {
        match value {
            0.. => self.uint(value as u64),
            -32..=-1 => self.bytes.push(value as u8),
            -128..=-33 => self.bytes.extend([0xd0, value as u8]),
            -0x8000..=-129 => {
                self.bytes.push(0xd1);
                self.bytes.extend((value as i16).to_be_bytes());
            }
            -0x8000_0000..=-0x8001 => {
                self.bytes.push(0xd2);
                self.bytes.extend((value as i32).to_be_bytes());
            }
            _ => {
                self.bytes.push(0xd3);
                self.bytes.extend(value.to_be_bytes());
            }
        }
    }

    pub fn float(&mut self, value: f64) {
        self.bytes.push(0xcb);
        self.bytes.extend(value.to_be_bytes());
    }
}

/// One value, or the head of one that has parts.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Value<'a> {
    Nil,
    Bool,
    Uint(u64),
    /// Negative.
    Int(i64),
    Float(f64),
    Text(&'a str),
    Binary(&'a [u8]),
    /// So many values follow.
    Array(usize),
    /// So many pairs follow.
    Map(usize),
    Extension,
}

/// Reads values one by one. No count that it returns is larger than what the remaining bytes can hold.
pub(crate) struct Reader<'a> {
    bytes: &'a [u8],
    at: usize,
    /// How many more block hashes the payload may hold.
    pub hashes_left: usize,
}

impl<'a> Reader<'a> {
    pub fn new(bytes: &'a [u8]) -> Self {
        Self { bytes, at: 0, hashes_left: HASHES_MAX }
    }

    pub fn fault(&self, what: &'static str) -> Malformed {
        Malformed { at: self.at, what }
    }

    pub fn is_at_end(&self) -> bool {
        self.at == self.bytes.len()
    }

    fn take(&mut self, len: usize) -> Result<&'a [u8], Malformed> {
        let end = self.at.checked_add(len).filter(|end| *end <= self.bytes.len());
        let end = end.ok_or_else(|| self.fault("it breaks off"))?;
        let taken = &self.bytes[self.at..end];
        self.at = end;
        Ok(taken)
    }

    fn number<const N: usize>(&mut self) -> Result<[u8; N], Malformed> {
        let mut number = [0; N];
        number.copy_from_slice(self.take(N)?);
        Ok(number)
    }

    fn len(&mut self, width: u8) -> Result<usize, Malformed> {
        Ok(match width {
            0 => usize::from(self.number::<1>()?[0]),
            1 => usize::from(u16::from_be_bytes(self.number()?)),
            _ => u32::from_be_bytes(self.number()?) as usize,
        })
    }

    fn text(&mut self, len: usize) -> Result<Value<'a>, Malformed> {
        let bytes = self.take(len)?;
        std::str::from_utf8(bytes).map(Value::Text).map_err(|_| self.fault("text is not UTF-8"))
    }

    /// Each part has a byte at least.
    fn parts(&self, count: usize, each: usize) -> Result<usize, Malformed> {
        if count.saturating_mul(each) > self.bytes.len() - self.at {
            return Err(self.fault("it breaks off"));
        }
        Ok(count)
    }

    fn array(&self, count: usize) -> Result<Value<'a>, Malformed> {
        self.parts(count, 1).map(Value::Array)
    }

    fn map(&self, count: usize) -> Result<Value<'a>, Malformed> {
        self.parts(count, 2).map(Value::Map)
    }

    pub fn next(&mut self) -> Result<Value<'a>, Malformed> {
        let code = self.number::<1>()?[0];
        let signed = |value: i64| if value < 0 { Value::Int(value) } else { Value::Uint(value as u64) };
        Ok(match code {
            0x00..=0x7f => Value::Uint(u64::from(code)),
            0x80..=0x8f => self.map(usize::from(code & 0x0f))?,
            0x90..=0x9f => self.array(usize::from(code & 0x0f))?,
            0xa0..=0xbf => self.text(usize::from(code & 0x1f))?,
            0xc0 => Value::Nil,
            0xc1 => return Err(self.fault("a code that means nothing")),
            0xc2 | 0xc3 => Value::Bool,
            0xc4..=0xc6 => {
                let len = self.len(code - 0xc4)?;
                Value::Binary(self.take(len)?)
            }
            0xc7..=0xc9 => {
                let len = self.len(code - 0xc7)?;
                self.take(len.saturating_add(1))?;
                Value::Extension
            }
            0xca => Value::Float(f64::from(f32::from_be_bytes(self.number()?))),
            0xcb => Value::Float(f64::from_be_bytes(self.number()?)),
            0xcc => Value::Uint(u64::from(self.number::<1>()?[0])),
            0xcd => Value::Uint(u64::from(u16::from_be_bytes(self.number()?))),
            0xce => Value::Uint(u64::from(u32::from_be_bytes(self.number()?))),
            0xcf => Value::Uint(u64::from_be_bytes(self.number()?)),
            0xd0 => signed(i64::from(i8::from_be_bytes(self.number()?))),
            0xd1 => signed(i64::from(i16::from_be_bytes(self.number()?))),
            0xd2 => signed(i64::from(i32::from_be_bytes(self.number()?))),
            0xd3 => signed(i64::from_be_bytes(self.number()?)),
            0xd4..=0xd8 => {
                self.take((1 << (code - 0xd4)) + 1)?;
                Value::Extension
            }
            0xd9..=0xdb => {
                let len = self.len(code - 0xd9)?;
                self.text(len)?
            }
            0xdc | 0xdd => {
                let count = self.len(code - 0xdc + 1)?;
                self.array(count)?
            }
            0xde | 0xdf => {
                let count = self.len(code - 0xde + 1)?;
                self.map(count)?
            }
            0xe0..=0xff => Value::Int(i64::from(code as i8)),
        })
    }

    /// Passes over one value with all its parts, however deep, and gives its bytes.
    pub fn skip(&mut self) -> Result<&'a [u8], Malformed> {
        let from = self.at;
        let mut due = 1_usize;
        while due > 0 {
            due -= 1;
            match self.next()? {
                Value::Array(count) => due = due.saturating_add(count),
                Value::Map(count) => due = due.saturating_add(2 * count),
                _ => {}
            }
        }
        Ok(&self.bytes[from..self.at])
    }
}
