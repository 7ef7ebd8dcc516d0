//! JSON as Python's `json.dumps(value, ensure_ascii=False)` writes it: what chat templates were tested with.

use serde_json::Value;

/// How to lay the text out.
pub(crate) struct Layout {
    /// Spaces per level, each element on a line; `None` for one line.
    pub indent: Option<usize>,
    /// Between elements.
    pub item: String,
    /// Between key and value.
    pub key: String,
    /// Whether keys are sorted.
    pub sort_keys: bool,
}

impl Layout {
    /// Python's defaults for an indent.
    pub fn python(indent: Option<usize>) -> Self {
        let item = if indent.is_some() { "," } else { ", " };
        Self { indent, item: item.to_owned(), key: ": ".to_owned(), sort_keys: false }
    }

    /// Writes a value.
    pub fn write(&self, value: &Value) -> String {
        let mut out = String::new();
        self.append(value, 0, &mut out);
        out
    }

    fn append(&self, value: &Value, level: usize, out: &mut String) {
        match value {
            Value::Array(items) if !items.is_empty() => {
                out.push('[');
                for (at, item) in items.iter().enumerate() {
                    self.separate(at, level + 1, out);
                    self.append(item, level + 1, out);
                }
                self.line(level, out);
                out.push(']');
            }
            Value::Object(map) if !map.is_empty() => {
                let mut entries: Vec<(&String, &Value)> = map.iter().collect();
                if self.sort_keys {
                    entries.sort_by_key(|(key, _)| *key);
                }
                out.push('{');
                for (at, (key, item)) in entries.into_iter().enumerate() {
                    self.separate(at, level + 1, out);
                    string(key, out);
                    out.push_str(&self.key);
                    self.append(item, level + 1, out);
                }
                self.line(level, out);
                out.push('}');
            }
            Value::String(text) => string(text, out),
            other => out.push_str(&other.to_string()),
        }
    }

    fn separate(&self, at: usize, level: usize, out: &mut String) {
        if at > 0 {
            out.push_str(&self.item);
        }
        self.line(level, out);
    }

    fn line(&self, level: usize, out: &mut String) {
        if let Some(indent) = self.indent {
            out.push('\n');
            out.extend(std::iter::repeat_n(' ', indent * level));
        }
    }
}

fn string(text: &str, out: &mut String) {
    out.push('"');
    for character in text.chars() {
        match character {
            '"' => out.push_str("\\\""),
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            '\u{8}' => out.push_str("\\b"),
            '\u{c}' => out.push_str("\\f"),
            c if c < ' ' => out.push_str(&format!("\\u{:04x}", c as u32)),
            c => out.push(c),
        }
    }
    out.push('"');
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Expected texts are from CPython's json.dumps(v, ensure_ascii=False[, indent=2]).
    #[test]
    fn texts_equal_pythons() {
        let value: Value =
            serde_json::from_str(r#"{"b": [1, 2.5, null, true, []], "a": {"é\u0001": "x\"\n<>&'/"}, "e": {}}"#)
                .unwrap();
        assert_eq!(
            Layout::python(None).write(&value),
            "{\"b\": [1, 2.5, null, true, []], \"a\": {\"é\\u0001\": \"x\\\"\\n<>&'/\"}, \"e\": {}}"
        );
        assert_eq!(
            Layout::python(Some(2)).write(&value),
            "{\n  \"b\": [\n    1,\n    2.5,\n    null,\n    true,\n    []\n  ],\n  \"a\": {\n    \"é\\u0001\": \"x\\\"\\n<>&'/\"\n  },\n  \"e\": {}\n}"
        );
    }
}
