//! How do parameters come in? A small JSON document of whole numbers, flags, texts and nested objects, read field by field.

use std::collections::BTreeMap;
use std::ops::RangeInclusive;

/// Objects inside objects, at most.
const DEPTH_MAX: usize = 8;

/// Why parameters were refused.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ParameterError {
    /// Path of the parameter, e.g. `weights.input`; empty for the whole document.
    pub field: String,
    /// What is wrong with it.
    pub problem: String,
}

impl ParameterError {
    /// Refuses `field`.
    pub fn new(field: impl Into<String>, problem: impl Into<String>) -> Self {
        Self { field: field.into(), problem: problem.into() }
    }
}

impl std::fmt::Display for ParameterError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        if self.field.is_empty() {
            return f.write_str(&self.problem);
        }
        write!(f, "{}: {}", self.field, self.problem)
    }
}

impl std::error::Error for ParameterError {}

#[derive(Clone, PartialEq, Eq, Debug)]
enum Value {
    Number(u64),
    Flag(bool),
    Text(String),
}

/// A parsed document. Each read takes its field out; what is left at the end is refused, so that a misspelt name cannot pass unseen.
///
/// ```
/// use penstock_policy_sdk::Document;
/// let mut document = Document::parse(r#"{ "weights": { "input": 2 } }"#)?;
/// assert_eq!(document.u64("weights.input", 1, 1..=100)?, 2);
/// assert_eq!(document.u64("weights.output", 2, 1..=100)?, 2, "an absent field is its default");
/// document.finish()?;
/// # Ok::<(), penstock_policy_sdk::ParameterError>(())
/// ```
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Document {
    fields: BTreeMap<String, Value>,
}

impl Document {
    /// Reads a JSON object. The empty text is the empty object.
    pub fn parse(text: &str) -> Result<Self, ParameterError> {
        let mut document = Self::default();
        if text.trim().is_empty() {
            return Ok(document);
        }
        let mut parser = Parser { bytes: text.as_bytes(), at: 0, fields: &mut document.fields };
        let read = parser.object("", 0).and_then(|()| parser.end());
        let at = parser.at;
        read.map_err(|problem| ParameterError::new("", format!("{problem} at byte {at}")))?;
        Ok(document)
    }

    /// A whole number in `range`; `default` when it is absent.
    pub fn u64(&mut self, field: &str, default: u64, range: RangeInclusive<u64>) -> Result<u64, ParameterError> {
        match self.fields.remove(field) {
            None => Ok(default),
            Some(Value::Number(number)) if range.contains(&number) => Ok(number),
            Some(Value::Number(_)) => {
                Err(ParameterError::new(field, format!("must be {}..={}", range.start(), range.end())))
            }
            Some(_) => Err(ParameterError::new(field, "must be a whole number")),
        }
    }

    /// As [`Self::u64`], for numbers of 32 bits.
    pub fn u32(&mut self, field: &str, default: u32, range: RangeInclusive<u32>) -> Result<u32, ParameterError> {
        let wide = self.u64(field, default.into(), u64::from(*range.start())..=u64::from(*range.end()))?;
        Ok(u32::try_from(wide).unwrap_or(default))
    }

    /// A flag; `default` when it is absent.
    pub fn flag(&mut self, field: &str, default: bool) -> Result<bool, ParameterError> {
        match self.fields.remove(field) {
            None => Ok(default),
            Some(Value::Flag(flag)) => Ok(flag),
            Some(_) => Err(ParameterError::new(field, "must be true or false")),
        }
    }

    /// A text; none when it is absent.
    pub fn text(&mut self, field: &str) -> Result<Option<String>, ParameterError> {
        match self.fields.remove(field) {
            None => Ok(None),
            Some(Value::Text(text)) => Ok(Some(text)),
            Some(_) => Err(ParameterError::new(field, "must be a text")),
        }
    }

    /// Refuses fields that nobody read.
    pub fn finish(self) -> Result<(), ParameterError> {
        match self.fields.into_keys().next() {
            None => Ok(()),
            Some(field) => Err(ParameterError::new(field, "there is no such parameter")),
        }
    }
}

struct Parser<'a> {
    bytes: &'a [u8],
    at: usize,
    fields: &'a mut BTreeMap<String, Value>,
}

type Parsed<T> = Result<T, &'static str>;

impl Parser<'_> {
    fn peek(&mut self) -> Option<u8> {
        while let Some(byte) = self.bytes.get(self.at) {
            if !byte.is_ascii_whitespace() {
                return Some(*byte);
            }
            self.at += 1;
        }
        None
    }

    fn take(&mut self, byte: u8, problem: &'static str) -> Parsed<()> {
        if self.peek() != Some(byte) {
            return Err(problem);
        }
        self.at += 1;
        Ok(())
    }

    fn end(&mut self) -> Parsed<()> {
        if self.peek().is_some() { Err("something follows the document") } else { Ok(()) }
    }

    fn object(&mut self, prefix: &str, depth: usize) -> Parsed<()> {
        self.take(b'{', "an object is expected")?;
        if depth == DEPTH_MAX {
            return Err("objects are nested too deep");
        }
        if self.peek() == Some(b'}') {
            self.at += 1;
            return Ok(());
        }
        loop {
            let name = self.string()?;
            let path = if prefix.is_empty() { name } else { format!("{prefix}.{name}") };
            self.take(b':', "a colon is expected")?;
            self.value(path, depth)?;
            match self.peek() {
                Some(b',') => self.at += 1,
                Some(b'}') => {
                    self.at += 1;
                    return Ok(());
                }
                _ => return Err("a comma or the end of the object is expected"),
            }
        }
    }

    fn value(&mut self, path: String, depth: usize) -> Parsed<()> {
        let value = match self.peek() {
            Some(b'{') => return self.object(&path, depth + 1),
            Some(b'"') => Value::Text(self.string()?),
            Some(b't') => self.word("true", Value::Flag(true))?,
            Some(b'f') => self.word("false", Value::Flag(false))?,
            Some(byte) if byte.is_ascii_digit() => Value::Number(self.number()?),
            _ => return Err("a whole number, a flag, a text or an object is expected"),
        };
        if self.fields.insert(path, value).is_some() { Err("a field stands twice") } else { Ok(()) }
    }

    fn word(&mut self, word: &str, value: Value) -> Parsed<Value> {
        if !self.bytes[self.at..].starts_with(word.as_bytes()) {
            return Err("no such word");
        }
        self.at += word.len();
        Ok(value)
    }

    fn number(&mut self) -> Parsed<u64> {
        let start = self.at;
        while self.bytes.get(self.at).is_some_and(u8::is_ascii_digit) {
            self.at += 1;
        }
        let digits = &self.bytes[start..self.at];
        if digits.len() > 1 && digits[0] == b'0' {
            return Err("a number has a leading zero");
        }
        if matches!(self.bytes.get(self.at), Some(b'.' | b'e' | b'E')) {
            return Err("only whole numbers are taken");
        }
        let value = digits.iter().try_fold(0u64, |sum, digit| sum.checked_mul(10)?.checked_add((digit - b'0').into()));
        value.ok_or("a number does not fit 64 bits")
    }

    fn string(&mut self) -> Parsed<String> {
        self.take(b'"', "a text in quotes is expected")?;
        let mut out = Vec::new();
        loop {
            let byte = *self.bytes.get(self.at).ok_or("a text has no end")?;
            self.at += 1;
            match byte {
                b'"' => return String::from_utf8(out).map_err(|_| "a text is not UTF-8"),
                b'\\' => out.push(self.escaped()?),
                0..0x20 => return Err("a text holds a control character"),
                other => out.push(other),
            }
        }
    }

    /// The short escapes. `\u` is refused: parameters are names and numbers.
    fn escaped(&mut self) -> Parsed<u8> {
        let byte = *self.bytes.get(self.at).ok_or("a text has no end")?;
        self.at += 1;
        match byte {
            b'"' | b'\\' | b'/' => Ok(byte),
            b'n' => Ok(b'\n'),
            b't' => Ok(b'\t'),
            b'r' => Ok(b'\r'),
            _ => Err("this escape is not taken"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn problem(text: &str) -> String {
        Document::parse(text).map_or_else(|error| error.problem, |_| "none".into())
    }

    #[test]
    fn nested_fields_are_read_by_path() {
        let text = " {\"a\": 1, \"b\": { \"c\": true, \"d\": {\"e\": \"x\\\"y\"} }, \"f\": 18446744073709551615}\n";
        let mut document = Document::parse(text).unwrap();
        assert_eq!(document.u64("a", 9, 0..=9), Ok(1));
        assert_eq!(document.flag("b.c", false), Ok(true));
        assert_eq!(document.text("b.d.e"), Ok(Some("x\"y".into())));
        assert_eq!(document.u64("f", 0, 0..=u64::MAX), Ok(u64::MAX));
        assert_eq!(document.u64("g", 5, 0..=9), Ok(5));
        assert_eq!(document.finish(), Ok(()));
    }

    #[test]
    fn the_empty_text_is_every_default() {
        assert_eq!(Document::parse(""), Ok(Document::default()));
        assert_eq!(Document::parse("{}"), Ok(Document::default()));
    }

    #[test]
    fn a_refusal_names_the_field() {
        let mut document = Document::parse(r#"{"low": 3, "odd": true, "unread": 1}"#).unwrap();
        assert_eq!(document.u64("low", 5, 5..=9), Err(ParameterError::new("low", "must be 5..=9")));
        assert_eq!(document.u64("odd", 5, 5..=9), Err(ParameterError::new("odd", "must be a whole number")));
        assert_eq!(document.finish(), Err(ParameterError::new("unread", "there is no such parameter")));
    }

    #[test]
    fn what_is_not_the_subset_is_refused_with_its_place() {
        assert_eq!(problem("[]"), "an object is expected at byte 0");
        assert_eq!(problem("{\"a\": 1.5}"), "only whole numbers are taken at byte 7");
        assert_eq!(problem("{\"a\": -1}"), "a whole number, a flag, a text or an object is expected at byte 6");
        assert_eq!(problem("{\"a\": 1} x"), "something follows the document at byte 9");
        assert_eq!(problem("{\"a\": 1, \"a\": 2}"), "a field stands twice at byte 15");
        assert_eq!(problem("{\"a\": 18446744073709551616}"), "a number does not fit 64 bits at byte 26");
        assert_eq!(problem("{\"a\": 01}"), "a number has a leading zero at byte 8");
        assert_eq!(problem("{\"a\": \"x"), "a text has no end at byte 8");
        assert_eq!(problem("{\"a\": tru}"), "no such word at byte 6");
        let deep = "{\"a\":".repeat(9) + "1" + &"}".repeat(9);
        assert_eq!(problem(&deep), "objects are nested too deep at byte 41");
    }
}
