//! Which events lie in the bytes of an event stream?

use crate::limits::LINE_BYTES_MAX;

/// Takes bytes as they come, in whatever pieces, and gives the `data` of each whole event.
#[derive(Debug, Default)]
pub struct Events {
    line: Vec<u8>,
    data: Vec<u8>,
    has_data: bool,
}

/// A line longer than the limit.
#[derive(Debug, Eq, PartialEq)]
pub struct TooLong;

impl Events {
    /// Takes some bytes; `found` is called with the data of each event that they complete.
    pub fn take(&mut self, bytes: &[u8], mut found: impl FnMut(&[u8])) -> Result<(), TooLong> {
        let mut rest = bytes;
        while let Some(end) = rest.iter().position(|byte| *byte == b'\n') {
            self.grow(&rest[..end])?;
            rest = &rest[end + 1..];
            self.end_line(&mut found);
        }
        self.grow(rest)
    }

    fn grow(&mut self, bytes: &[u8]) -> Result<(), TooLong> {
        if self.line.len() + self.data.len() + bytes.len() > LINE_BYTES_MAX {
            return Err(TooLong);
        }
        self.line.extend_from_slice(bytes);
        Ok(())
    }

    fn end_line(&mut self, found: &mut impl FnMut(&[u8])) {
        let line = self.line.strip_suffix(b"\r").unwrap_or(&self.line);
        if line.is_empty() {
            if self.has_data {
                found(&self.data);
            }
            self.data.clear();
            self.has_data = false;
        } else if let Some(data) = line.strip_prefix(b"data:") {
            if self.has_data {
                self.data.push(b'\n');
            }
            self.data.extend_from_slice(data.strip_prefix(b" ").unwrap_or(data));
            self.has_data = true;
        }
        self.line.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn split(text: &str, piece: usize) -> Vec<String> {
        let mut events = Events::default();
        let mut found = Vec::new();
        for bytes in text.as_bytes().chunks(piece) {
            events.take(bytes, |data| found.push(String::from_utf8_lossy(data).into_owned())).expect("short");
        }
        found
    }

    /// The examples of the HTML standard, section 9.2.6, and line ends of both kinds.
    #[test]
    fn events_are_found_however_the_bytes_are_cut() {
        let text = ": comment\n\ndata: YHOO\ndata: +2\ndata: 10\n\nid: 1\r\ndata:first\r\n\r\nevent: x\n\ndata\n\ndata: [DONE]\n\ndata: cut";
        for piece in [1, 2, 3, 7, 1_000] {
            assert_eq!(split(text, piece), ["YHOO\n+2\n10", "first", "[DONE]"], "pieces of {piece}");
        }
    }

    #[test]
    fn a_line_without_end_is_refused() {
        let mut events = Events::default();
        let piece = vec![b'x'; LINE_BYTES_MAX];
        assert_eq!(events.take(&piece, |_| ()), Ok(()));
        assert_eq!(events.take(b"x", |_| ()), Err(TooLong));
    }
}
