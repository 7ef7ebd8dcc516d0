//! Token bytes to text as it comes, without ever splitting a character.

/// Turns a stream of byte pieces into text. Bytes that may still become a character are held back (at most three); bytes that cannot
/// become U+FFFD, one for each maximal ill-formed part, so that the pieces joined equal the lossy decoding of all bytes joined.
#[derive(Clone, Debug, Default)]
pub struct Detokeniser {
    held: Vec<u8>,
}

impl Detokeniser {
    /// An empty stream.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds one token's bytes and returns the text that is now certain. May be empty.
    pub fn push(&mut self, bytes: &[u8]) -> String {
        self.held.extend_from_slice(bytes);
        let mut text = String::with_capacity(self.held.len());
        let mut rest: &[u8] = &self.held;
        let keep = loop {
            match std::str::from_utf8(rest) {
                Ok(valid) => {
                    text.push_str(valid);
                    break 0;
                }
                Err(error) => {
                    let (valid, after) = rest.split_at(error.valid_up_to());
                    text.push_str(std::str::from_utf8(valid).expect("checked up to here by from_utf8"));
                    match error.error_len() {
                        None => break after.len(),
                        Some(bad) => {
                            text.push(char::REPLACEMENT_CHARACTER);
                            rest = &after[bad..];
                        }
                    }
                }
            }
        };
        self.held.drain(..self.held.len() - keep);
        text
    }

    /// Ends the stream: a character left incomplete becomes U+FFFD.
    pub fn finish(&mut self) -> String {
        let text = String::from_utf8_lossy(&self.held).into_owned();
        self.held.clear();
        text
    }

    /// Bytes held back, the start of a character.
    pub fn held(&self) -> &[u8] {
        &self.held
    }
}
