//! Marking message text, so that after rendering one can tell a user's spelling of a control token from the template's.
//!
//! A mark is one Unicode noncharacter that occurs nowhere in the inputs. It is put inside every control-token spelling in a string (after
//! its first character), and around free text that could complete a spelling together with the template's text beside it. Marks
//! survive what templates do to text (trim, split, join, slice at other text); the rendering without marks must equal the rendering of
//! the unmarked inputs, else the marks disturbed the template and the caller refuses.

use serde_json::{Map, Value};

use super::Inputs;
use crate::error::ModelError;
use crate::tokenizer::guard::Guard;

/// Keys whose strings are free text, placed by templates next to control tokens. Other strings (roles, types, ids) are compared by
/// templates, and marks at their borders would disturb that.
const FREE_TEXT_KEYS: [&str; 6] = ["content", "text", "reasoning_content", "arguments", "description", "refusal"];

/// Inputs with marks.
pub(super) struct Marked {
    pub inputs: Inputs,
    pub sentinel: char,
    /// A spelling found, for the message of a refusal.
    pub spelling: String,
}

/// Marks the inputs; `None` when no string needs a mark.
pub(super) fn mark(inputs: &Inputs, guard: &Guard) -> Result<Option<Marked>, ModelError> {
    let mut marker = Marker { guard, sentinel: sentinel(inputs)?, spelling: None, at_border: false, single: None };
    let marked = Inputs {
        messages: marker.value(&inputs.messages, false),
        tools: inputs.tools.as_ref().map(|tools| marker.value(tools, false)),
        variables: marker.map(&inputs.variables),
    };
    if let Some(token) = marker.single {
        return Err(ModelError::ControlTokenInText { token });
    }
    let spelling = match (marker.spelling, marker.at_border) {
        (None, false) => return Ok(None),
        (Some(spelling), _) => spelling,
        (None, true) => "that it is a part of".to_owned(),
    };
    Ok(Some(Marked { inputs: marked, sentinel: marker.sentinel, spelling }))
}

/// The text without marks, and the byte offsets in it where marks stood.
pub(super) fn take_out(text: &str, sentinel: char) -> (String, Vec<usize>) {
    let mut out = String::with_capacity(text.len());
    let mut offsets = Vec::new();
    for (index, part) in text.split(sentinel).enumerate() {
        if index > 0 && offsets.last() != Some(&out.len()) {
            offsets.push(out.len());
        }
        out.push_str(part);
    }
    (out, offsets)
}

/// A noncharacter (U+FDD0..U+FDEF) that the inputs do not hold.
fn sentinel(inputs: &Inputs) -> Result<char, ModelError> {
    let mut used = 0u32;
    let mut see = |text: &str| {
        for character in text.chars().filter(|c| ('\u{fdd0}'..='\u{fdef}').contains(c)) {
            used |= 1 << (character as u32 - 0xfdd0);
        }
    };
    see_strings(&inputs.messages, &mut see);
    inputs.tools.iter().for_each(|tools| see_strings(tools, &mut see));
    for (key, value) in &inputs.variables {
        see(key);
        see_strings(value, &mut see);
    }
    char::from_u32(0xfdd0 + (!used).trailing_zeros()).filter(|_| used != u32::MAX).ok_or_else(|| {
        ModelError::TemplateRefused { what: "the messages hold all 32 noncharacters U+FDD0 to U+FDEF".to_owned() }
    })
}

fn see_strings(value: &Value, see: &mut impl FnMut(&str)) {
    match value {
        Value::String(text) => see(text),
        Value::Array(items) => items.iter().for_each(|item| see_strings(item, see)),
        Value::Object(map) => {
            for (key, item) in map {
                see(key);
                see_strings(item, see);
            }
        }
        _ => {}
    }
}

struct Marker<'a> {
    guard: &'a Guard,
    sentinel: char,
    /// First spelling found inside a string.
    spelling: Option<String>,
    /// Whether some free text was marked at its borders.
    at_border: bool,
    /// A spelling of one character: there is no inside to mark.
    single: Option<String>,
}

impl Marker<'_> {
    fn value(&mut self, value: &Value, free_text: bool) -> Value {
        match value {
            Value::String(text) => Value::String(self.text(text, free_text)),
            Value::Array(items) => Value::Array(items.iter().map(|item| self.value(item, free_text)).collect()),
            Value::Object(map) => Value::Object(self.map(map)),
            other => other.clone(),
        }
    }

    fn map(&mut self, map: &Map<String, Value>) -> Map<String, Value> {
        let entries = map.iter().map(|(key, item)| {
            let free_text = FREE_TEXT_KEYS.contains(&key.as_str());
            (self.text(key, false), self.value(item, free_text))
        });
        entries.collect()
    }

    fn text(&mut self, text: &str, free_text: bool) -> String {
        let places = self.guard.places(text);
        let core = text.trim();
        let border = free_text && self.guard.touches_border(core);
        if places.is_empty() && !border {
            return text.to_owned();
        }
        let mut marks = Vec::with_capacity(places.len() + 2);
        for &(start, length) in &places {
            let first = text[start..].chars().next().map_or(1, char::len_utf8);
            if first >= length {
                self.single.get_or_insert_with(|| text[start..start + length].to_owned());
            }
            self.spelling.get_or_insert_with(|| text[start..start + length].to_owned());
            marks.push(start + first);
        }
        if border {
            // Inside surrounding white space, so that trimming works as before.
            let start = text.len() - text.trim_start().len();
            marks.extend([start, start + core.len()]);
            self.at_border = true;
            marks.sort_unstable();
        }
        let mut out = String::with_capacity(text.len() + marks.len() * self.sentinel.len_utf8());
        let mut from = 0;
        for mark in marks {
            out.push_str(&text[from..mark]);
            out.push(self.sentinel);
            from = mark;
        }
        out.push_str(&text[from..]);
        out
    }
}
