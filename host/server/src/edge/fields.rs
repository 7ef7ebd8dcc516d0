//! Reads a JSON object field by field: a bad value is a 400 that names the field, an unknown field is ignored, null is absent.

use std::ops::RangeInclusive;

use serde_json::{Map, Value};

use super::error::ApiError;

/// The fields of one object of the body.
#[derive(Debug)]
pub struct Fields {
    map: Map<String, Value>,
    /// Prefix of names in errors, such as `stream_options.`.
    prefix: String,
}

impl Fields {
    /// Parses a whole body.
    ///
    /// # Errors
    /// Not JSON, or not an object. The message says where, and repeats nothing of the body.
    pub fn parse(body: &[u8]) -> Result<Self, ApiError> {
        let value: Value = serde_json::from_slice(body).map_err(|fault| {
            ApiError::malformed(format!(
                "the body is not valid JSON (line {}, column {}): {}",
                fault.line(),
                fault.column(),
                match fault.classify() {
                    serde_json::error::Category::Eof => "it ends too early",
                    _ => "syntax error",
                }
            ))
        })?;
        match value {
            Value::Object(map) => Ok(Self { map, prefix: String::new() }),
            _ => Err(ApiError::malformed("the body must be a JSON object")),
        }
    }

    fn name(&self, field: &str) -> String {
        format!("{}{field}", self.prefix)
    }

    fn expected(&self, field: &str, what: &str) -> ApiError {
        let name = self.name(field);
        ApiError::bad_field(&name, format!("`{name}` must be {what}"))
    }

    /// The value itself; null counts as absent.
    pub fn take(&mut self, field: &str) -> Option<Value> {
        self.map.remove(field).filter(|value| !value.is_null())
    }

    /// A flag.
    ///
    /// # Errors
    /// Any other type.
    pub fn flag(&mut self, field: &str) -> Result<Option<bool>, ApiError> {
        match self.take(field) {
            None => Ok(None),
            Some(Value::Bool(value)) => Ok(Some(value)),
            Some(_) => Err(self.expected(field, "true or false")),
        }
    }

    /// A whole number.
    ///
    /// # Errors
    /// Another type, a fraction, or out of range.
    pub fn integer(&mut self, field: &str, range: RangeInclusive<i64>) -> Result<Option<i64>, ApiError> {
        let Some(value) = self.take(field) else { return Ok(None) };
        let number = value.as_i64().filter(|number| range.contains(number));
        let what = || format!("a whole number from {} to {}", range.start(), range.end());
        number.map(Some).ok_or_else(|| self.expected(field, &what()))
    }

    /// A number.
    ///
    /// # Errors
    /// Another type or out of range.
    pub fn number(&mut self, field: &str, range: RangeInclusive<f64>) -> Result<Option<f64>, ApiError> {
        let Some(value) = self.take(field) else { return Ok(None) };
        let number = value.as_f64().filter(|number| range.contains(number));
        let what = || format!("a number from {} to {}", range.start(), range.end());
        number.map(Some).ok_or_else(|| self.expected(field, &what()))
    }

    /// A string.
    ///
    /// # Errors
    /// Any other type.
    pub fn text(&mut self, field: &str) -> Result<Option<String>, ApiError> {
        match self.take(field) {
            None => Ok(None),
            Some(Value::String(text)) => Ok(Some(text)),
            Some(_) => Err(self.expected(field, "a string")),
        }
    }

    /// A string, or a list of at most `most` strings; none of them empty.
    ///
    /// # Errors
    /// Anything else.
    pub fn texts(&mut self, field: &str, most: usize) -> Result<Vec<String>, ApiError> {
        let what = format!("a non-empty string or a list of up to {most} non-empty strings");
        let list = match self.take(field) {
            None => return Ok(Vec::new()),
            Some(Value::String(text)) => vec![Value::String(text)],
            Some(Value::Array(list)) if list.len() <= most => list,
            Some(_) => return Err(self.expected(field, &what)),
        };
        let texts = list.into_iter().map(|value| match value {
            Value::String(text) if !text.is_empty() => Ok(text),
            _ => Err(self.expected(field, &what)),
        });
        texts.collect()
    }

    /// An object.
    ///
    /// # Errors
    /// Any other type.
    pub fn object(&mut self, field: &str) -> Result<Option<Self>, ApiError> {
        match self.take(field) {
            None => Ok(None),
            Some(Value::Object(map)) => Ok(Some(Self { map, prefix: format!("{}.", self.name(field)) })),
            Some(_) => Err(self.expected(field, "an object")),
        }
    }

    /// All that is left, for objects whose keys are data.
    pub fn rest(self) -> Map<String, Value> {
        self.map
    }

    /// Refuses a field that is known and not built, unless its value is `harmless`.
    ///
    /// # Errors
    /// 422 that names the field.
    pub fn not_built(&mut self, field: &str, harmless: impl FnOnce(&Value) -> bool) -> Result<(), ApiError> {
        match self.take(field) {
            Some(value) if !harmless(&value) => {
                let name = self.name(field);
                Err(ApiError::unsupported(&name, format!("`{name}` with this value is not supported yet")))
            }
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fields(text: &str) -> Fields {
        Fields::parse(text.as_bytes()).unwrap()
    }

    #[test]
    fn errors_name_the_field_and_null_is_absent() {
        let mut body = fields(
            r#"{"n": 9, "seed": null, "stream_options": {"include_usage": 3}, "top_p": "x", "max_tokens": 1.5}"#,
        );
        assert_eq!(body.integer("n", 1..=8).unwrap_err().param.as_deref(), Some("n"));
        assert_eq!(body.integer("seed", 0..=9).unwrap(), None);
        let mut options = body.object("stream_options").unwrap().unwrap();
        assert_eq!(options.flag("include_usage").unwrap_err().param.as_deref(), Some("stream_options.include_usage"));
        assert_eq!(body.number("top_p", 0.0..=1.0).unwrap_err().status.as_u16(), 400);
        assert!(body.integer("max_tokens", 1..=10).is_err());
    }

    #[test]
    fn a_message_about_syntax_repeats_nothing_of_the_body() {
        let error = Fields::parse(b"{\"prompt\": \"my secret\" oops}").unwrap_err();
        assert!(!error.message.contains("secret") && !error.message.contains("oops"), "{}", error.message);
        assert!(Fields::parse(b"[1]").is_err());
        assert!(Fields::parse(&[b'['; 100_000]).is_err());
    }

    #[test]
    fn known_but_not_built_is_a_422_unless_harmless() {
        let mut body = fields(r#"{"best_of": 2, "suffix": ""}"#);
        assert_eq!(body.not_built("best_of", |v| v == 1).unwrap_err().status.as_u16(), 422);
        assert!(body.not_built("suffix", |v| v == "").is_ok());
    }
}
